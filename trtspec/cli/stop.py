"""`trtspec stop`: end the server of a configuration, however it was started."""

from __future__ import annotations

from pathlib import Path

import click

from trtspec.cli.common import config_argument, load, set_option


@click.command()
@config_argument
@set_option
def stop(config: Path, overrides: tuple[str, ...]) -> None:
    """End the server that trtspec serve started for CONFIG. Does nothing, successfully, if none is running."""
    from trtspec.openai.process import end as end_front_end
    from trtspec.triton.server import state_dir_of
    from trtspec.triton.server_state import stop as stop_server

    spec = load(config, overrides)
    state = stop_server(state_dir_of(spec))
    front_end = end_front_end(state_dir_of(spec))
    if state is None and front_end:
        click.echo(f"stopped the OpenAI front end of {spec.name}; its server was not running any more")
    elif state is None:
        click.echo(f"nothing was running for {spec.name}")
    else:
        click.echo(f"stopped the server of {spec.name} ({state.kept_by}, gRPC {state.grpc_url})")
