"""The process of the front end; `trtspec serve --openai` starts it."""

from __future__ import annotations

from pathlib import Path

import click
import uvicorn

from trtspec.openai.app import FrontEnd, create_app

GRACE_S = 1  # for answers in flight when it is told to end


@click.command()
@click.argument("state_dir")  # what `trtspec stop` knows the process by
@click.option("--host", required=True)
@click.option("--port", type=int, required=True)
@click.option("--grpc", "url", required=True, help="host:port of the server's gRPC.")
@click.option("--tokenizer", type=click.Path(path_type=Path), required=True, help="The pipeline's tokenizer.json.")
@click.option("--model", "names", multiple=True, required=True, help="Name of the model for clients (repeatable).")
def main(state_dir: str, host: str, port: int, url: str, tokenizer: Path, names: tuple[str, ...]) -> None:
    """Serve OpenAI's API in front of a Triton server, until SIGTERM."""
    app = create_app(FrontEnd(url, names, tokenizer))
    uvicorn.run(app, host=host, port=port, access_log=False, log_level="warning", timeout_graceful_shutdown=GRACE_S)


if __name__ == "__main__":
    main()
