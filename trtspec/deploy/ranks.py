"""Start the processes of one server on several pods of a LeaderWorkerSet, without ssh, which the stock image lacks.

`work` waits in every worker pod for a command of mpirun's; `lead -- COMMAND` waits in the leader pod for all workers,
writes mpirun's host file and becomes COMMAND; `agent HOST COMMAND` is what mpirun calls in place of ssh. Both sides
prove with a challenge that they hold the key in TRTSPEC_RANKS_KEY; it never crosses the network. Knows Open MPI 4 and
the standard library; not what is served.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

PORT = 8010
KEY = "TRTSPEC_RANKS_KEY"
HOST_FILE = Path(tempfile.gettempdir(), "trtspec-hosts")
# Ranks fill the hosts in order, and mpirun itself reaches every host.
MPI = {
    "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
    "OMPI_MCA_rmaps_base_mapping_policy": "slot",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
_RETRY_S = 1.0


def work(port: int = PORT) -> None:
    """Run what the leader asks for, one thread a command, until this pod ends."""
    with Listener(("0.0.0.0", port), authkey=_key()) as listener:
        while True:
            try:
                connection = listener.accept()
            except (AuthenticationError, EOFError, OSError) as error:
                print(f"ranks: refused a connection: {error or type(error).__name__}", file=sys.stderr, flush=True)
                continue
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: Connection) -> None:
    with connection:
        command = connection.recv_bytes().decode()
        code = subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL).returncode
        connection.send_bytes(str(code).encode())


def ask(host: str, command: str, port: int = PORT) -> int:
    """Run a command on another pod; its exit code.

    Raises:
        OSError, EOFError, AuthenticationError: that pod does not answer, or holds another key.
    """
    with Client((host, port), authkey=_key()) as connection:
        connection.send_bytes(command.encode())
        return int(connection.recv_bytes())


def workers(environment: Mapping[str, str]) -> list[str]:
    """Host names of the group's workers: the leader's with their number behind the first label."""
    first, _, domain = environment["LWS_LEADER_ADDRESS"].partition(".")
    return [f"{first}-{number}.{domain}" for number in range(1, int(environment["LWS_GROUP_SIZE"]))]


def host_file(addresses: Sequence[str], slots: Sequence[int]) -> str:
    """mpirun's host file. Addresses, because it would cut the domain off a name."""
    return "".join(f"{address} slots={count}\n" for address, count in zip(addresses, slots, strict=True))


def lead(slots: Sequence[int], timeout_s: float, command: Sequence[str]) -> None:
    """Wait for all workers, then become `command`.

    Args:
        slots: ranks of each pod, the leader's first.
        timeout_s: longest wait.
        command: what starts the server.
    """
    deadline = time.monotonic() + timeout_s
    addresses = [socket.gethostbyname(socket.gethostname())]
    for name in workers(os.environ):
        addresses.append(_wait_for(name, deadline))
        print(f"ranks: {name} is there", flush=True)
    HOST_FILE.write_text(host_file(addresses, slots), encoding="utf-8")
    agent = f"{sys.executable} {Path(__file__).resolve()} agent"
    environment = MPI | {"OMPI_MCA_orte_default_hostfile": str(HOST_FILE), "OMPI_MCA_plm_rsh_agent": agent}
    os.execvpe(command[0], list(command), os.environ | environment)


def _wait_for(name: str, deadline: float) -> str:
    while True:
        try:
            address = socket.gethostbyname(name)
            ask(address, ":")
            return address
        except (OSError, EOFError, AuthenticationError) as error:
            if time.monotonic() > deadline:
                sys.exit(f"ranks: {name} does not answer: {error or type(error).__name__}")
        time.sleep(_RETRY_S)


def _key() -> bytes:
    key = os.environ.get(KEY, "")
    if not key:
        sys.exit(f"ranks: {KEY} is not set")
    return key.encode()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: that of the command, 1 for a pod that cannot be reached."""
    parser = argparse.ArgumentParser(prog="ranks.py", description="Start the processes of one server on several pods.")
    roles = parser.add_subparsers(dest="role", required=True)
    roles.add_parser("work")
    leader = roles.add_parser("lead")
    leader.add_argument("--slots", required=True, metavar="N,N", help="ranks of each pod, the leader's first")
    leader.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="longest wait for the workers")
    leader.add_argument("command", nargs="+")
    agent = roles.add_parser("agent")
    agent.add_argument("host")
    agent.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.role == "work":
        work()
    elif options.role == "lead":
        lead([int(count) for count in options.slots.split(",")], options.timeout, options.command)
    else:
        try:
            return ask(options.host, " ".join(options.command))
        except (OSError, EOFError, AuthenticationError) as error:
            print(f"ranks: {options.host} does not answer: {error or type(error).__name__}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
