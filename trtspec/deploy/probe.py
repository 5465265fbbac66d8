"""Kubernetes asks this file in a serving pod whether its server answers: exit code 0 if so, 1 and one line if not.

It sends a request for one token through the whole pipeline, since Triton goes on calling a model ready whose process
has died. It lies beside `launch.py` and imports nothing else but the standard library. Does not start or end anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import launch  # type: ignore[import-not-found]  # beside this file in the pod


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 if the server answers, or is busy where that is allowed."""
    parser = argparse.ArgumentParser(prog="probe.py", description="Ask a running server for one token.")
    parser.add_argument("--llmapi", action="store_true", help="the repository of an LLM API model")
    parser.add_argument("--http-port", type=int, default=8000, metavar="PORT", help="port of HTTP")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="longest wait for the answer")
    parser.add_argument("--or-busy", action="store_true", help="accept that the server answers others meanwhile")
    options = parser.parse_args(arguments)
    address = f"127.0.0.1:{options.http_port}"
    before = launch.answered(address)
    try:
        launch.probe(address, options.llmapi, options.timeout)
    except launch.LaunchFailed as error:
        if options.or_busy and launch.is_busy(error, address, before + int(options.llmapi)):
            return 0
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
