"""What the commands share: the CONFIG argument and `--set`. Knows click; imports the spec only when one is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trtspec.spec.schema import Spec

config_argument = click.argument("config", type=click.Path(path_type=Path))
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override one value of the spec (repeatable), such as --set speculation.num_draft_tokens=6.",
)


def load(config: Path, overrides: tuple[str, ...] = ()) -> Spec:
    """The validated spec in `config` with `overrides` applied.

    Raises:
        TrtspecError: the file or an override is wrong.
    """
    from trtspec.spec.load import load_spec

    return load_spec(config, overrides)
