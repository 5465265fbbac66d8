"""A self-contained HTML page from a template that extends `base.html.j2`, which has the looks of all pages.

The base has the blocks `title`, `style`, `heading` and `content`, and the classes banner (with good, bad, open, none),
tag, cards, stack (a table that becomes a list on narrow screens; give its cells `data-label`), num, word, soft and
plots.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trtspec import __version__

_UNPRINTABLE = re.compile("[^\t\n\r\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(template: Path, **values: Any) -> str:
    """The page.

    Args:
        template: a Jinja template; what it prints is escaped unless it says `|safe`.
        values: the names that it uses; an unknown one is an error. `version` is trtspec's own.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text: str = environment.get_template(template.name).render(version=__version__, **values)
    return printable(text)


def printable(text: str) -> str:
    """Text without characters that steer a terminal, or that XML and HTML cannot hold."""
    return _UNPRINTABLE.sub("\ufffd", text)
