"""Tokens a second of the quickstart through Triton: beside the same requests in process, and by number of clients.

All requests are greedy, end by their length alone and come with the chat template applied, so that everyone makes
the same tokens. Whoever is compared takes turns, so that whatever else the machine does hits all alike. Whole requests
are timed, prompts too; but prompts come again and again, and engines keep what they read, so little is left of these.

The server's draft length is adaptive; a request that says how many tokens to draft overrules that. Thus one server
answers with drafts, without, and with as many as pay.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click
from serving import free_ports

from trtspec.bench.load import closed_loop, in_turn
from trtspec.build.progress import Lines
from trtspec.build.steps import build_graph
from trtspec.decoding.sampling import GREEDY
from trtspec.parity.subjects import Query, Subject
from trtspec.parity.trial import Case
from trtspec.parity.workbench import ENGINES, SERVER, Workbench, engine_configs
from trtspec.prompts import read_prompts, spread
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec
from trtspec.triton.client import Client
from trtspec.triton.server import LocalServer

FIXED, OFF, ADAPTIVE = "drafting", "not drafting", "adaptive"
IN_PROCESS, STREAMED, WHOLE = "in process", "streamed", "in one answer"
GOAL_IN_PROCESS = 0.9
GOAL_ADAPTIVE = 0.95
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Rates:
    """Tokens a second, one number a round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over the rounds."""
        return statistics.median(self.rounds)

    def over(self, other: Rates) -> Rates:
        """Its ratio to another, round by round: what hits a round hits both."""
        return Rates(tuple(mine / its for mine, its in zip(self.rounds, other.rounds, strict=True)))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({min(self.rounds):.2f} to {max(self.rounds):.2f})"


@dataclass(frozen=True)
class Beside:
    """One client beside the engines in process: rates by how it asks, and answers with other tokens."""

    rates: Mapping[str, Rates]
    other_answers: int

    @property
    def ratios(self) -> dict[str, Rates]:
        """What is left of the rate in process."""
        return {name: rates.over(self.rates[IN_PROCESS]) for name, rates in self.rates.items() if name != IN_PROCESS}


@dataclass(frozen=True)
class Crowded:
    """So many clients at the same time: rates with drafts, without, and with the adaptive draft length."""

    clients: int
    rates: Mapping[str, Rates]

    @property
    def better(self) -> str:
        """Which of drafting and not drafting is faster."""
        return max((FIXED, OFF), key=lambda arm: self.rates[arm].median)

    @property
    def ratio(self) -> Rates:
        """What the adaptive draft length keeps of the better one's rate."""
        return self.rates[ADAPTIVE].over(self.rates[self.better])


def built(config: Path, settings: Sequence[str], work_dir: Path) -> Spec:
    """The spec with an adaptive draft length, its engines and its repository up to date under `work_dir`.

    Raises:
        TrtspecError: it cannot be built.
    """
    name = load_spec(config, settings).name
    spec = load_spec(
        config,
        [
            f"serving.num_threads={len(os.sched_getaffinity(0))}",
            "serving.draft_length.policy=adaptive",
            *settings,
            *(f"output.{what}={work_dir.resolve() / what / name}" for what in ("engines", "model_repo")),
        ],
    )
    report = build_graph(spec).run(Lines(lambda line: click.echo(f"  {line}", err=True)))
    if report.error:
        raise report.error
    return spec


class Bench:
    """The server and, if it is asked for, the engines in process, for the length of a `with` block.

    Args:
        spec: built.
        state_dir: of the server.
        num_prompts: how many of the spec's prompts are asked.
        max_tokens: of every answer.
    """

    def __init__(self, spec: Spec, state_dir: Path, num_prompts: int, max_tokens: int) -> None:
        self._spec, self._state_dir, self._max_tokens = spec, state_dir, max_tokens
        self._workbench = Workbench(spec, engine_configs(spec))
        self._cases = [self._workbench.case(prompt) for prompt in spread(read_prompts(spec.prompts_path), num_prompts)]
        self._num_draft_tokens = spec.default_num_draft_tokens

    def __enter__(self) -> Bench:
        with ExitStack() as stack:
            server = LocalServer(
                self._spec.model_repo_dir,
                engines_root=self._spec.engines_dir,
                mount_point=self._spec.serving.mount_point,
                num_threads=self._spec.serving.num_threads,
                state_dir=self._state_dir,
                **free_ports(),
            )
            stack.enter_context(server)
            self._url = server.state.grpc_url
            self._client = stack.enter_context(Client(self._url))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def beside_in_process(self, rounds: int) -> Beside:
        """One client, after one round that does not count."""
        with self._workbench.subject(ENGINES) as engines, self._workbench.subject(SERVER, self._url) as server:
            arms: dict[str, tuple[Subject, bool]] = {
                IN_PROCESS: (engines, True),
                STREAMED: (server, True),
                WHOLE: (server, False),
            }
            seconds: dict[str, list[float]] = {arm: [] for arm in arms}
            other_answers = 0
            for number in range(rounds + 1):
                spent = dict.fromkeys(arms, 0.0)
                for case in self._cases:
                    answers = set()
                    for arm in in_turn(list(arms), number):
                        subject, stream = arms[arm]
                        begin = time.perf_counter()
                        answer = subject.generate(self._query(case, stream))
                        spent[arm] += time.perf_counter() - begin
                        answers.add(tuple(itertools.chain.from_iterable(answer.blocks)))
                    other_answers += len(answers) - 1
                for arm in arms if number else ():
                    seconds[arm].append(spent[arm])
        tokens = self._max_tokens * len(self._cases)
        rates = {arm: Rates(tuple(tokens / one for one in spent)) for arm, spent in seconds.items()}
        return Beside(rates, other_answers)

    def crowded(self, counts: Sequence[int], rounds: int, warmups: int) -> Iterator[Crowded]:
        """The rates with so many clients, after rounds that do not count, in which the adaptive length learns."""
        drafts = {FIXED: self._num_draft_tokens, OFF: 0, ADAPTIVE: None}
        for count in counts:
            rates: dict[str, list[float]] = {arm: [] for arm in drafts}
            for number in range(warmups + rounds):
                for arm in in_turn(list(drafts), number):
                    rate = self._rate(count, drafts[arm])
                    if number >= warmups:
                        rates[arm].append(rate)
            yield Crowded(count, {arm: Rates(tuple(found)) for arm, found in rates.items()})

    def _rate(self, clients: int, num_draft_tokens: int | None) -> float:
        """Tokens a second of so many clients, who share a list of requests until it is empty.

        Raises:
            TrtspecError: a request fails.
        """
        tokens = []

        def work(number: int, _: float) -> None:
            stats = self._client.complete(
                self._cases[number % len(self._cases)].text,
                max_tokens=self._max_tokens,
                end_id=-1,
                num_draft_tokens=num_draft_tokens,
                timeout_s=_TIMEOUT_S,
            ).stats
            tokens.append(stats.tokens)

        begin = time.perf_counter()
        closed_loop(clients, work, threading.Event(), requests=max(len(self._cases), 2 * clients))
        return sum(tokens) / (time.perf_counter() - begin)

    def _query(self, case: Case, stream: bool) -> Query:
        return Query(
            text=case.text,
            ids=case.ids,
            max_tokens=self._max_tokens,
            sampling=GREEDY,
            num_draft_tokens=self._num_draft_tokens,
            end_ids=(),
            stream=stream,
        )
