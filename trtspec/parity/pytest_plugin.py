"""The parity suite as pytest tests: `pytest --trtspec-config config.yaml`, or `pytest --trtspec-url host:port`.

Every check of every subject, and every part of one that has parts, is a test of its own, marked `parity` and
`parity_CHECK`, so that `-m` and `-k` choose among them. A fault fails; what is not applicable is skipped, and so is
what is inconclusive, unless `--trtspec-strict` is given. Loads nothing as long as none of the two is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.parity.result import Check
    from trtspec.parity.suite import Session
    from trtspec.parity.trace import Remembering
    from trtspec.parity.trial import Trial

_CHECKS = ("greedy", "sampled", "draws", "logits", "invariances", "rules", "degenerate")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plugin."""
    group = parser.getgroup("trtspec", "parity of speculative decoding")
    group.addoption("--trtspec-config", metavar="CONFIG", help="Spec whose engines, or server, are checked.")
    group.addoption(
        "--trtspec-url",
        metavar="HOST:PORT",
        help="gRPC of the server to check: of the spec, of what trtspec serve started here, or with --trtspec-target.",
    )
    group.addoption(
        "--trtspec-target",
        metavar="MODEL",
        help="Without a spec: the model that the server at the URL has to answer like, as target.model of a spec.",
    )
    group.addoption(
        "--trtspec-subject",
        metavar="NAME",
        action="append",
        default=[],
        help="engines, server, engine-model or runner (repeatable) [default: the engines; with a URL, the server].",
    )
    group.addoption(
        "--trtspec-set", metavar="KEY=VALUE", action="append", default=[], help="Override of the spec (repeatable)."
    )
    group.addoption("--trtspec-budget", help="What the sampled check may draw: 2000 (tokens), 90s or 5m.")
    group.addoption("--trtspec-strict", action="store_true", help="What is inconclusive fails.")


def pytest_configure(config: pytest.Config) -> None:
    """The markers; and what the options need."""
    config.addinivalue_line("markers", "parity: a check of the trtspec parity suite")
    for name in _CHECKS:
        config.addinivalue_line("markers", f"parity_{name}: the check {name} of the trtspec parity suite")
    if config.getoption("--trtspec-target"):
        if config.getoption("--trtspec-config"):
            raise pytest.UsageError("--trtspec-target is for a server without a spec, which names the target itself")
        if not config.getoption("--trtspec-url"):
            raise pytest.UsageError("--trtspec-target needs --trtspec-url: where the server is")


@pytest.hookimpl(tryfirst=True)  # before -m and -k choose
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the checks."""
    if given := config.getoption("--trtspec-config") or config.getoption("--trtspec-url"):
        try:
            items.extend(SpecFile.from_parent(session, path=Path(given).absolute()).collect())
        except TrtspecError as error:
            raise pytest.UsageError(str(error)) from error


class SpecFile(pytest.File):
    """A spec, or a server without one, whose checks are tests."""

    def collect(self) -> Iterator[CheckItem]:
        """A test for each check and part of each subject."""
        from trtspec.parity.checks import CHECKS
        from trtspec.parity.served import spec_of_model, spec_of_server
        from trtspec.parity.suite import Selection, asked, command
        from trtspec.parity.workbench import REMOTE
        from trtspec.spec.load import load_spec

        option = self.config.getoption
        overrides, url, target = tuple(option("--trtspec-set")), option("--trtspec-url"), option("--trtspec-target")
        subjects = tuple(option("--trtspec-subject")) or (("server",) if url else ("engines",))
        if path := option("--trtspec-config"):
            spec = load_spec(path, overrides)
        elif needing := set(subjects) - set(REMOTE):
            raise pytest.UsageError(f"--trtspec-subject {min(needing)} needs --trtspec-config")
        else:
            spec = spec_of_model(target, overrides) if target else spec_of_server(url, overrides)
        budget = option("--trtspec-budget")
        selection = Selection(subjects=subjects, url=url, target=target, budget=budget, checks=_CHECKS)
        run = _Run(spec, selection, command(path, selection, overrides))
        self.session.config.add_cleanup(run.close)
        for subject in subjects:
            for name in asked(spec, selection):
                for part in CHECKS[name].parts or (None,):
                    yield CheckItem.from_parent(
                        self,
                        name=f"{subject}::{name}" + (f":{part}" if part else ""),
                        run=run,
                        subject=subject,
                        check=name,
                        part=part,
                    )


class CheckItem(pytest.Item):
    """One check of one subject, or one part of it."""

    def __init__(self, *, run: _Run, subject: str, check: str, part: str | None, **more: Any) -> None:
        super().__init__(**more)
        self._run, self._subject, self._check, self._part = run, subject, check, part
        self.add_marker("parity")
        self.add_marker(f"parity_{check}")

    def runtest(self) -> None:
        """Fails for a fault."""
        from trtspec.parity.report.text import finding_lines
        from trtspec.parity.result import Verdict

        result = self._run.check(self._subject, self._check, self._part)
        evidence = result.parts[0].evidence if self._part and result.parts else result.evidence
        lines = [f"{result.hypothesis}: {evidence}", *finding_lines(result)]
        strict = self.config.getoption("--trtspec-strict")
        if result.verdict == Verdict.FAULT or (strict and result.verdict == Verdict.INCONCLUSIVE):
            raise ParityFault("\n".join(lines))
        if not result.verdict.passes or result.verdict == Verdict.NOT_APPLICABLE:
            pytest.skip(f"{result.verdict.value}: {evidence}")
        self.add_report_section("call", "parity", "\n".join(lines))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The report's own lines instead of a traceback."""
        if isinstance(excinfo.value, (ParityFault, TrtspecError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where it comes from."""
        return self.path, None, self.name


class ParityFault(AssertionError):
    """The subject does not answer as the reference does."""


class _Run:
    """Models and subjects of all tests of one spec, opened when the first test needs them."""

    def __init__(self, spec: Any, selection: Any, reproduce: Callable[[str, str, int | None], str]) -> None:
        self._spec, self._selection, self._reproduce = spec, selection, reproduce
        self._session: Session | None = None
        self._opened: dict[str, tuple[Trial, Remembering]] = {}
        self._stack = ExitStack()

    def check(self, subject: str, name: str, part: str | None) -> Check:
        """The outcome of one check, or of one part of it."""
        from trtspec.parity.suite import Session, prompts_of

        if self._session is None:
            prompts = prompts_of(self._spec, self._selection)
            self._session = Session(self._spec, self._selection, prompts, self._reproduce, _Silent())
        if subject not in self._opened:
            self._opened[subject] = self._stack.enter_context(self._session.opened(subject))
        trial, found = self._opened[subject]
        if part is not None:
            trial = replace(trial, wanted=lambda _, other: other == part)
        return self._session.check(name, trial, found)

    def close(self) -> None:
        """Ends what was opened."""
        self._stack.close()


class _Silent:
    """Watches, and says nothing: pytest reports."""

    def started(self, check: str, subject: str) -> None:
        """Nothing."""

    def advance(self, fraction: float) -> None:
        """Nothing."""

    def finished(self, check: Check) -> None:
        """Nothing."""
