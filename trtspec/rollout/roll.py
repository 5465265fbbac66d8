"""Rolling a new version out and back: what the commands do, in order.

Knows who does each part of it. Knows no terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import TrtspecError
from trtspec.rollout.candidate import BESIDE, build, end_gate, gate, require_memory, spec_of
from trtspec.rollout.live import LiveServer
from trtspec.rollout.move import Mover, Watch
from trtspec.rollout.stage import ServedRepository, read_config
from trtspec.rollout.store import Record, Store, Version, identity, remove
from trtspec.triton.life_signs import PROBE_PROMPT
from trtspec.triton.repository import BLS, ENGINE_MODELS
from trtspec.triton.server import state_dir_of
from trtspec.triton.server_state import ServerState, running

if TYPE_CHECKING:
    from trtspec.build.graph import Observer as BuildObserver
    from trtspec.parity.suite import Observer
    from trtspec.spec.schema import Spec

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How versions are changed.

    Attributes:
        watch: requests that a version must answer after the switch.
        drain_timeout_s: longest wait for requests of the version before, in seconds.
        checks: of parity, that a new version must pass.
    """

    watch: int
    drain_timeout_s: float
    checks: Sequence[str] = ()


def roll_out(
    spec: Spec,
    options: Options,
    say: Say,
    builds: Callable[[], AbstractContextManager[BuildObserver]],
    judges: Callable[[], AbstractContextManager[Observer]],
) -> None:
    """Build the spec as the next version, judge it, and let the running server serve it; or finish what was cut off.

    Args:
        spec: what is to be served; its server is running.
        options: see there.
        say: is told in lines how it goes on.
        builds, judges: show the build and the checks.

    Raises:
        GateClosed: parity found a fault.
        TrtspecError: no server that can be changed, no room for two versions, a build that fails, a version that does
            not load or answer: the version before goes on serving. What is cut off later is gone on with by the same
            command.
    """
    store = _store(spec)
    state = _server(spec)
    if state is None and store.record.move is None:
        raise TrtspecError(
            "no server of this configuration is running, so there is nobody to keep from a gap",
            where=str(spec.source),
            fix=f"run: trtspec build {spec.source}, then trtspec serve {spec.source} --detach",
        )
    with store.locked(), _mover(spec, store, state, options, say) as mover:
        if (move := store.record.move) is not None:
            say(f"going on with the change from version {move.origin} to {move.target}, which was cut off")
            mover.move(move.target, _served_with(store.record, move.target))
            say(_ended(move.target, state))
            return
        if state is None or state.outdated:
            raise TrtspecError(
                "the running server serves another build than lies here, which could not be gone back to",
                where=str(spec.model_repo_dir),
                fix=f"run: trtspec stop {spec.source}; then serve again",
            )
        require_memory(spec)
        served = store.keep_served()
        number = store.candidate()
        candidate = spec_of(spec, store, number)
        with builds() as building:
            build(candidate, building)
        version = store.version_of(number)
        if version.identity == served.identity:
            remove(store.place(number))
            say(f"nothing to roll out: version {served.number} is what {spec.source} describes")
            return
        _require_in_place(spec, store, number)
        with judges() as judging:
            report = gate(candidate, store.place(number), options.checks, judging, say)
        store.add(replace(version, parity=report.verdict.value))
        began = time.monotonic()
        mover.move(number, _served_with(store.record, number))
        say(f"version {number} serves; the change took {time.monotonic() - began:.1f} s")
        say(f"trtspec rollback {spec.source} goes back to version {served.number}")


def roll_back(spec: Spec, options: Options, say: Say) -> None:
    """Let the version before serve again, or take back a roll-out that was cut off.

    Raises:
        TrtspecError: there is no version before, or it does not load or answer.
    """
    store = _store(spec)
    state = _server(spec)
    with store.locked(), _mover(spec, store, state, options, say) as mover:
        target, move = _target_of_rollback(store.record, spec), store.record.move
        if move is not None and not move.replacing and target == move.origin and _lies_here(store, target):
            mover.undo()
        else:
            mover.move(target, _served_with(store.record, target))
        say(_ended(target, state))


def _lies_here(store: Store, number: int) -> bool:
    """Whether the files in the places of those served are a version's: a build may have come over a cut-off change."""
    return identity(store.engines) == store.record.versions[number].identity


def _ended(number: int, state: ServerState | None) -> str:
    return f"version {number} serves" if state else f"version {number} is in place; no server is running"


def _target_of_rollback(record: Record, spec: Spec) -> int:
    move = record.move
    if move is not None:
        return move.target if move.target in record.served else move.origin
    if record.previous is None:
        raise TrtspecError(
            "there is no version before the one that is served",
            where=str(spec.engines_dir),
            fix=f"look at: trtspec rollout {spec.source} --status",
        )
    return record.previous.number


def status(spec: Spec) -> list[str]:
    """Which versions there are, which is served, and what is under way, in lines."""
    record = _store(spec).record
    if not record.versions:
        return [f"{spec.name}: no version but the one in {spec.engines_dir}; trtspec rollout brings the next"]
    lines = [_line(version, record) for version in record.versions.values()]
    if (move := record.move) is not None:
        lines.append(
            f"the change from version {move.origin} to {move.target} was cut off: trtspec rollout {spec.source} goes "
            f"on, trtspec rollback {spec.source} goes back"
        )
    return lines


def prune(spec: Spec) -> list[int]:
    """Remove the versions that are neither served nor the one before; returns their numbers.

    Raises:
        TrtspecError: another process builds or changes versions here, or a change was cut off.
    """
    store = _store(spec)
    with store.locked():
        if store.record.move is not None:
            raise TrtspecError(
                "a change of versions was cut off, which may need them",
                where=str(spec.engines_dir),
                fix=f"finish it first: trtspec rollout {spec.source}, or trtspec rollback {spec.source}",
            )
        for place in store.places():
            end_gate(place)
        return store.prune()


def _line(version: Version, record: Record) -> str:
    judged = f"parity {version.parity}" if version.parity else "served without a gate"
    since = f", in service since {version.served_since}" if version.served_since else ""
    is_current = record.current is not None and version.number == record.current.number
    return f"version {version.number}{' (serves)' if is_current else ''}: {judged}{since}; built as {version.manifest}"


def _store(spec: Spec) -> Store:
    return Store(spec.engines_dir, spec.model_repo_dir)


def _server(spec: Spec) -> ServerState | None:
    """The running server of a spec, if there is one.

    Raises:
        TrtspecError: one that cannot hold two versions.
    """
    state = running(state_dir_of(spec))
    if state is not None and state.project:
        raise TrtspecError(
            "the server runs in a container on GPUs, whose free memory its KV caches hold: there is no room for a "
            "second version in it",
            where=state.model_repo,
            fix=BESIDE,
        )
    return state


@contextmanager
def _mover(spec: Spec, store: Store, state: ServerState | None, options: Options, say: Say) -> Iterator[Mover]:
    for place in store.places():
        end_gate(place)
    repository = ServedRepository(spec.model_repo_dir, spec.serving.mount_point)
    watch = Watch([PROBE_PROMPT], options.watch, spec.serving.call_timeout_s)
    if state is None:
        yield Mover(store, repository, None, watch, say)
        return
    server = LiveServer(state, load_timeout_s=spec.serving.startup_timeout_s, drain_timeout_s=options.drain_timeout_s)
    with closing(server):
        yield Mover(store, repository, server, watch, say)


def _served_with(record: Record, number: int) -> tuple[int, ...]:
    """The versions served, with `number` as the last one."""
    served = record.served
    return served[: served.index(number) + 1] if number in served else (*served, number)


def _require_in_place(spec: Spec, store: Store, number: int) -> None:
    """Refuse what a running server cannot take over.

    Raises:
        TrtspecError: another mount point, or another tokenizer behind a front end that has read the old one.
    """
    from trtspec.openai.process import running_port

    now, new = store.repository / BLS, store.repository_of(number) / BLS
    path = read_config(store.repository / ENGINE_MODELS["target"]).parameters["gpt_model_path"].string_value
    if Path(path).parent != Path(spec.serving.mount_point):
        raise TrtspecError(
            f"the running server sees its engines under {Path(path).parent}",
            where=spec.where(("serving", "mount_point")),
            fix="leave it as it was, or stop and serve again",
        )
    tokenizers = [(place / "1" / "tokenizer.json").read_bytes() for place in (now, new)]
    templates = [read_config(place).parameters["chat_template"].string_value for place in (now, new)]
    if running_port(state_dir_of(spec)) and (tokenizers[0] != tokenizers[1] or templates[0] != templates[1]):
        raise TrtspecError(
            "the new version has another tokenizer or chat template than OpenAI's API in front of the server has read",
            where=str(new),
            fix="stop and serve again, or " + BESIDE,
        )
