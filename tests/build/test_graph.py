"""The step graph on small steps of its own: order, caching, damage, failures, locks, foreign outputs."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtspec.build import output
from trtspec.build.fingerprint import digest_file
from trtspec.build.graph import CACHED, FAILED, OK, SKIPPED, WOULD_RUN, Graph, Outcome, Report, Step, Task
from trtspec.build.output import staging_dir
from trtspec.errors import TrtspecError


class Recorder:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.notes: list[str] = []
        self.fractions: list[float] = []

    def started(self, name: str, reason: str) -> None:
        self.names.append(name)

    def advance(self, fraction: float) -> None:
        self.fractions.append(fraction)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finished(self, outcome: Outcome) -> None:
        pass


class Kitchen:
    """`flour` and `water` are values, `bread` is a directory made of both, `menu` a file that names the bread."""

    def __init__(self, root: Path) -> None:
        self.root = root / "out"
        self.menu = root / "elsewhere" / "menu.txt"
        self.flour, self.water, self.oven = "rye", 3, "hot"
        self.bake: Callable[[Task], None] = lambda task: None
        self.runs: list[str] = []

    def graph(self) -> Graph:
        def value(name: str) -> Callable[[Task], dict[str, Any]]:
            def run(task: Task) -> dict[str, Any]:
                self.runs.append(name)
                return {name: getattr(self, name)}

            return run

        def bake(task: Task) -> dict[str, Any]:
            self.runs.append("bread")
            task.destination.mkdir()
            (task.destination / "crust").write_text(task.results["flour"].facts["flour"] * 5)
            self.bake(task)
            (task.destination / "crumb").write_text(str(task.results["water"].facts["water"]))
            task.advance(1.0)
            return {}

        def write_menu(task: Task) -> dict[str, Any]:
            self.runs.append("menu")
            task.destination.write_text(task.results["bread"].output_hash)
            return {}

        steps = [
            Step(
                "menu",
                write_menu,
                needs=("bread",),
                inputs=lambda results: {"bread": results["bread"].output_hash},
                actions=lambda results: ["write the menu"],
                output=self.menu,
            ),
            Step(
                "bread",
                bake,
                needs=("flour", "water"),
                inputs=lambda results: {
                    "flour": results["flour"].facts,
                    "water": results["water"].facts,
                    "oven": self.oven,
                },
                actions=lambda results: ["bake"],
                output=self.root / "bread",
            ),
            Step(
                "flour",
                value("flour"),
                inputs=lambda results: {"flour": self.flour},
                actions=lambda results: [],
                peek=True,
            ),
            Step(
                "water",
                value("water"),
                inputs=lambda results: {"water": self.water},
                actions=lambda results: [],
                peek=True,
            ),
        ]
        return Graph(steps, self.root)

    def build(self, **options: Any) -> Report:
        self.runs.clear()
        return self.graph().run(Recorder(), **options)


@pytest.fixture
def kitchen(tmp_path: Path) -> Kitchen:
    return Kitchen(tmp_path)


def statuses(report: Report) -> dict[str, str]:
    return {outcome.name: outcome.status for outcome in report.outcomes}


def files_below(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_steps_run_in_the_order_of_their_needs_and_only_once(kitchen: Kitchen) -> None:
    report = kitchen.build()
    assert kitchen.runs.index("bread") > max(kitchen.runs.index("flour"), kitchen.runs.index("water"))
    assert kitchen.runs[-1] == "menu"
    assert set(statuses(report).values()) == {OK} and report.changed
    assert (kitchen.root / "bread" / "crust").read_text() == "ryeryeryeryerye"
    before = files_below(kitchen.root.parent)
    again = kitchen.build()
    assert kitchen.runs == [] and not again.changed
    assert set(statuses(again).values()) == {CACHED}
    assert files_below(kitchen.root.parent) == before


def test_unknown_needs_and_circles_are_refused(tmp_path: Path) -> None:
    def step(name: str, *needs: str) -> Step:
        return Step(name, lambda task: {}, lambda results: {}, lambda results: [], needs)

    with pytest.raises(ValueError, match="no such step: b"):
        Graph([step("a", "b")], tmp_path)
    with pytest.raises(ValueError, match="cycle"):
        Graph([step("a", "b"), step("b", "a")], tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"flour": "wheat"}, ["flour", "bread", "menu"]),
        ({"water": 4}, ["water", "bread", "menu"]),
        ({"oven": "warm"}, ["bread"]),  # the bread comes out the same, so the menu stands
    ],
)
def test_a_change_runs_what_depends_on_it_and_no_more(
    kitchen: Kitchen, change: dict[str, Any], expected: list[str]
) -> None:
    kitchen.build()
    vars(kitchen).update(change)
    report = kitchen.build()
    assert kitchen.runs == expected
    assert {name for name, status in statuses(report).items() if status == CACHED} == {
        "flour",
        "water",
        "bread",
        "menu",
    } - set(expected)
    ran = next(outcome for outcome in report.outcomes if outcome.name == expected[0])
    assert ran.reason == f"changed: {next(iter(change))}"


@pytest.mark.parametrize("harm", ["delete file", "delete all", "shorten", "flip a byte", "flip a byte, old times"])
def test_a_damaged_output_is_built_again(kitchen: Kitchen, harm: str) -> None:
    kitchen.build()
    right = files_below(kitchen.root / "bread")
    crust = kitchen.root / "bread" / "crust"
    if harm == "delete file":
        crust.unlink()
    elif harm == "delete all":
        for path in (crust, kitchen.root / "bread" / "crumb"):
            path.unlink()
        (kitchen.root / "bread").rmdir()
    elif harm == "shorten":
        crust.write_text("rye")
    else:
        stat = crust.stat()
        crust.write_text("ryeryeryXryerye")
        if harm.endswith("old times"):
            os.utime(crust, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    report = kitchen.build()
    assert kitchen.runs == ["bread"]
    reason = next(outcome.reason for outcome in report.outcomes if outcome.name == "bread")
    assert str(crust.parent) in reason
    assert files_below(kitchen.root / "bread") == right


def test_a_touched_output_is_read_once_and_still_cached(kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch) -> None:
    kitchen.build()
    crust = kitchen.root / "bread" / "crust"
    os.utime(crust, (1, 1))
    read: list[Path] = []
    monkeypatch.setattr(output, "digest_file", lambda path: read.append(path) or digest_file(path))
    kitchen.build()
    assert kitchen.runs == [] and read == [crust]
    kitchen.build()
    assert kitchen.runs == [] and read == [crust]


def test_files_added_to_an_output_do_not_matter(kitchen: Kitchen) -> None:
    kitchen.build()
    (kitchen.root / "bread" / "__pycache__").mkdir()
    kitchen.build()
    assert kitchen.runs == []


def test_force_runs_everything_and_force_only_one(kitchen: Kitchen) -> None:
    kitchen.build()
    kitchen.build(force=True)
    assert sorted(kitchen.runs) == ["bread", "flour", "menu", "water"]
    report = kitchen.build(force=True, only="bread")
    assert kitchen.runs == ["bread"]
    assert statuses(report) == {"flour": CACHED, "water": CACHED, "bread": OK, "menu": SKIPPED}


def test_only_runs_one_step_when_those_before_it_are_up_to_date(kitchen: Kitchen) -> None:
    with pytest.raises(TrtspecError, match=r"flour is not up to date \(not built yet\); run it first: --only flour"):
        kitchen.build(only="bread")
    assert kitchen.runs == []
    for name in ("flour", "water", "bread"):
        report = kitchen.build(only=name)
        assert kitchen.runs == [name]
    assert statuses(report)["menu"] == SKIPPED and not kitchen.menu.exists()
    kitchen.water = 9
    with pytest.raises(TrtspecError, match=r"water is not up to date \(changed: water\)"):
        kitchen.build(only="bread")
    with pytest.raises(TrtspecError, match="no step 'cake'"):
        kitchen.build(only="cake")


def test_a_failure_keeps_finished_steps_and_the_old_output(kitchen: Kitchen) -> None:
    kitchen.build()
    old = files_below(kitchen.root / "bread")

    def burn(task: Task) -> None:
        raise TrtspecError("burnt", where="oven")

    kitchen.flour, kitchen.bake = "wheat", burn
    report = kitchen.build()
    assert statuses(report) == {"flour": OK, "water": CACHED, "bread": FAILED, "menu": SKIPPED}
    assert str(report.error) == "oven: burnt"
    assert files_below(kitchen.root / "bread") == old
    assert not staging_dir(kitchen.root / "bread").exists()
    kitchen.bake = lambda task: None
    kitchen.build()
    assert kitchen.runs == ["bread", "menu"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "no space left on the disk; free some space and run this again; finished steps are kept"),
        (errno.EFBIG, "no space left on the disk"),
        (errno.EACCES, "no permission"),
        (errno.EROFS, "no permission"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_what_the_operating_system_refuses_is_one_line_with_the_path(kitchen: Kitchen, code: int, message: str) -> None:
    def refuse(task: Task) -> None:
        raise OSError(code, os.strerror(code), str(task.destination / "crumb"))

    kitchen.bake = refuse
    report = kitchen.build()
    assert message in str(report.error) and f"{kitchen.root}/bread/crumb: " in str(report.error)
    assert "\n" not in str(report.error)
    assert not (kitchen.root / "bread").exists() and not staging_dir(kitchen.root / "bread").exists()
    kitchen.bake = lambda task: None
    kitchen.build()
    assert kitchen.runs == ["bread", "menu"]


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
def test_what_no_step_expects_passes_through_and_leaves_nothing(kitchen: Kitchen, fault: type[BaseException]) -> None:
    def trip(task: Task) -> None:
        raise fault

    kitchen.bake = trip
    with pytest.raises(fault):
        kitchen.build()
    assert not staging_dir(kitchen.root / "bread").exists()


def test_state_that_cannot_be_saved_fails_the_step(kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch) -> None:
    kitchen.build()
    kitchen.oven = "warm"

    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        kitchen.bake = lambda task: None
        report = kitchen.build()
    assert statuses(report)["bread"] == FAILED and "no space left" in str(report.error)
    kitchen.build()
    assert "bread" in kitchen.runs  # done, but not recorded: done again
    assert kitchen.build().changed is False


def test_leftovers_of_a_killed_build_are_removed(kitchen: Kitchen) -> None:
    kitchen.build()
    for place in (kitchen.root / "bread", kitchen.menu):
        staging_dir(place).mkdir()
        (staging_dir(place) / "half").write_text("x")
    kitchen.build()
    assert kitchen.runs == []
    assert not any(path.name.endswith(".staging") for path in kitchen.root.parent.rglob("*"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 99}', '{"version": 1, "steps": {"bread": {}}}'])
def test_an_unreadable_state_means_building_again(kitchen: Kitchen, content: str) -> None:
    kitchen.build()
    (kitchen.root / ".build" / "state.json").write_text(content)
    report = kitchen.build()
    assert sorted(kitchen.runs) == ["bread", "flour", "menu", "water"] and report.error is None


def test_a_second_build_is_refused_at_once_with_the_pid(kitchen: Kitchen) -> None:
    refusals: list[TrtspecError] = []

    def build_meanwhile(task: Task) -> None:
        with pytest.raises(TrtspecError) as refused:
            Kitchen(kitchen.root.parent).build()
        refusals.append(refused.value)

    kitchen.bake = build_meanwhile
    assert kitchen.build().error is None
    assert f"process {os.getpid()} is building here" in str(refusals[0])
    assert str(kitchen.root) in str(refusals[0]) and "run this again" in str(refusals[0])


def test_an_output_shared_with_another_engines_directory_is_guarded_too(kitchen: Kitchen) -> None:
    kitchen.build()
    other = Kitchen(kitchen.root.parent)
    other.root = other.root.with_name("out2")
    with open(kitchen.menu.with_name(".menu.txt.lock"), "r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TrtspecError, match=r"menu\.txt: another process is building here"):
            other.build()
    assert other.build().error is None


def test_what_no_build_has_written_is_never_replaced(kitchen: Kitchen) -> None:
    kitchen.menu.parent.mkdir(parents=True)
    kitchen.menu.write_text("my own menu")
    with pytest.raises(TrtspecError, match=r"menu\.txt: exists and was not written by trtspec build"):
        kitchen.build()
    assert kitchen.menu.read_text() == "my own menu" and kitchen.runs == []
    assert not kitchen.root.exists()


def test_a_file_where_the_engines_directory_must_go(kitchen: Kitchen) -> None:
    kitchen.root.write_text("a file")
    with pytest.raises(TrtspecError, match="something else stands where a file or directory must go"):
        kitchen.build()
    assert kitchen.root.read_text() == "a file"


def test_preview_writes_nothing_and_says_why(kitchen: Kitchen) -> None:
    report = kitchen.graph().preview()
    assert not kitchen.root.exists() and not kitchen.menu.parent.exists()
    assert statuses(report) == dict.fromkeys(["flour", "water", "bread", "menu"], WOULD_RUN)
    reasons = {outcome.name: outcome.reason for outcome in report.outcomes}
    assert reasons["bread"] == "not built yet" and reasons["menu"] == "after bread"
    kitchen.build()
    before = files_below(kitchen.root.parent)
    kitchen.water = 5
    report = kitchen.graph().preview()
    assert statuses(report) == {"flour": CACHED, "water": WOULD_RUN, "bread": WOULD_RUN, "menu": WOULD_RUN}
    assert next(o.reason for o in report.outcomes if o.name == "bread") == "changed: water"
    assert files_below(kitchen.root.parent) == before
    assert kitchen.build().error is None and kitchen.runs == ["water", "bread", "menu"]


def test_preview_shows_a_refusal_of_a_step_that_only_looks(tmp_path: Path) -> None:
    def refuse(task: Task) -> dict[str, Any]:
        raise TrtspecError("the models do not pair")

    steps = [
        Step("pair", refuse, lambda results: {}, lambda results: ["compare"], peek=True),
        Step("engine", lambda task: {}, lambda results: {}, lambda results: ["convert"], ("pair",), tmp_path / "e"),
    ]
    report = Graph(steps, tmp_path / "root").preview()
    assert statuses(report) == {"pair": FAILED, "engine": WOULD_RUN}
    assert str(report.error) == "the models do not pair"
    assert report.outcomes[1].actions == ("convert",)
