"""OpenAI's API in front of the real server with a tiny random target and a draft that is often right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

SPEC = """\
version: 1
target: {{model: {target}, dtype: float32}}
speculation: {{method: draft_target, num_draft_tokens: 3, draft: {{model: {draft}, dtype: float32}}}}
engine: {{max_batch_size: 8, max_input_len: 128, max_seq_len: 256, max_draft_len: 3}}
output: {{engines: engines, model_repo: repo}}
serving: {{{ports}, num_threads: 1, max_concurrency: 16}}
"""


@pytest.fixture(scope="session")
def api(
    tiny_model_dir: Path,
    tiny_draft_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[], dict[str, int]],
) -> Iterator[SimpleNamespace]:
    """`url` and `port` of the API, its `process`, and `grpc` and `metrics` addresses of the server behind it."""
    from trtspec.cli import main
    from trtspec.openai.process import FrontEndProcess
    from trtspec.spec.load import load_spec
    from trtspec.triton.server import LocalServer

    root = tmp_path_factory.mktemp("openai")
    ports = ", ".join(f"{name}: {port}" for name, port in free_ports().items())
    (root / "tiny.yaml").write_text(SPEC.format(target=tiny_model_dir, draft=tiny_draft_dir, ports=ports))
    built = CliRunner().invoke(main, ["build", str(root / "tiny.yaml")])
    assert built.exit_code == 0, built.output
    spec = load_spec(root / "tiny.yaml")
    server = LocalServer.from_spec(spec)
    port = free_ports()["http_port"]
    process = None
    try:
        server.start()
        process = FrontEndProcess(
            server.state_dir,
            host="127.0.0.1",
            port=port,
            grpc_url=server.state.grpc_url,
            tokenizer=spec.model_repo_dir / "tensorrt_llm_bls" / "1" / "tokenizer.json",
            names=("tiny", "tensorrt_llm_bls"),
        )
        process.start()
        server.wait_ready()
        process.wait_ready()
        yield SimpleNamespace(url=process.url, port=port, process=process, grpc=server.state.grpc_url)
    finally:
        if process is not None:
            process.stop()
        server.stop()
