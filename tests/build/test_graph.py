"""The step graph on small steps of its own: order, caching, damage, failures, locks, foreign outputs."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
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

    def advance(self, name: str, fraction: float) -> None:
        self.fractions.append(fraction)

    def note(self, name: str, text: str) -> None:
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


class Machines:
    """Steps that need GPUs and note when they run; a test opens the gates that hold them."""

    def __init__(self, root: Path, gpus: int) -> None:
        self.root, self.gpus = root, gpus
        self.lock = threading.Lock()
        self.running: set[str] = set()
        self.together: list[frozenset[str]] = []
        self.given: dict[str, tuple[int, ...]] = {}
        self.threads: dict[str, int] = {}
        self.during: dict[str, Callable[[Task], None]] = {}

    def step(self, name: str, *needs: str, gpus: int = 0, output: bool = True) -> Step:
        def run(task: Task) -> dict[str, Any]:
            with self.lock:
                self.running.add(name)
                self.together.append(frozenset(self.running))
                self.given[name] = task.gpu_ids
                self.threads[name] = threading.get_ident()
            try:
                self.during.get(name, lambda task: None)(task)
                if output:
                    task.destination.write_text(name)
            finally:
                with self.lock:
                    self.running.discard(name)
            return {"name": name}

        place = self.root / "out" / name if output else None
        return Step(name, run, lambda results: {}, lambda results: [], needs, place, gpus=gpus)

    def build(self, *steps: Step, observer: Recorder | None = None) -> Report:
        self.together.clear()
        return Graph(steps, self.root / "out", gpus=self.gpus).run(observer or Recorder())

    def meet(self, *names: str) -> None:
        """Hold each of these steps until all of them run at the same time."""
        barrier = threading.Barrier(len(names))
        self.during |= {name: lambda task: barrier.wait(20) and None for name in names}


def test_steps_with_gpus_run_side_by_side_on_gpus_of_their_own(tmp_path: Path) -> None:
    machines = Machines(tmp_path, gpus=4)
    machines.meet("a", "b")
    report = machines.build(machines.step("a", gpus=2), machines.step("b", gpus=2))
    assert report.error is None and frozenset("ab") in machines.together
    assert sorted(machines.given.values()) == [(0, 1), (2, 3)]
    assert machines.build(machines.step("a", gpus=2), machines.step("b", gpus=2)).changed is False


def test_a_step_waits_for_gpus_and_a_smaller_one_goes_first(tmp_path: Path) -> None:
    machines = Machines(tmp_path, gpus=3)
    machines.meet("first", "small")  # both must run before either can end
    steps = (machines.step("first", gpus=2), machines.step("big", gpus=2), machines.step("small", gpus=1))
    assert machines.build(*steps).error is None
    assert frozenset({"first", "big"}) not in machines.together
    assert machines.given["small"] == (2,)


def test_a_step_that_wants_more_than_there_is_gets_all_and_runs_alone(tmp_path: Path) -> None:
    machines = Machines(tmp_path, gpus=2)
    steps = (machines.step("huge", gpus=8), machines.step("small", gpus=1))
    assert machines.build(*steps).error is None
    assert machines.given == {"huge": (0, 1), "small": (0,)}
    assert frozenset({"huge", "small"}) not in machines.together


def test_steps_without_gpus_run_alone_in_the_main_thread(tmp_path: Path) -> None:
    machines = Machines(tmp_path, gpus=4)
    machines.meet("a", "b")
    steps = [
        machines.step("before"),
        machines.step("a", "before", gpus=1),
        machines.step("b", "before", gpus=1),
        machines.step("beside", "before"),
        machines.step("after", "a", "b"),
    ]
    assert machines.build(*steps).error is None
    for name in ("before", "beside", "after"):
        assert [ran for ran in machines.together if name in ran] == [frozenset({name})]
        assert machines.threads[name] == threading.main_thread().ident and machines.given[name] == ()


def test_without_gpus_such_steps_run_one_at_a_time(tmp_path: Path) -> None:
    machines = Machines(tmp_path, gpus=0)
    assert machines.build(machines.step("a", gpus=1), machines.step("b", gpus=1)).error is None
    assert set(machines.together) == {frozenset("a"), frozenset("b")} and machines.given == {"a": (), "b": ()}


def test_after_a_failure_nothing_starts_and_what_runs_is_kept(tmp_path: Path) -> None:
    machines = Machines(tmp_path, gpus=2)
    failed = threading.Event()

    def fail(task: Task) -> None:
        failed.set()
        raise TrtspecError("no memory left")

    machines.during = {"bad": fail, "good": lambda task: failed.wait(20) and None}
    steps = [machines.step("bad", gpus=1), machines.step("good", gpus=1), machines.step("next", gpus=1)]
    report = machines.build(*steps, machines.step("end", "bad", "good"))
    assert statuses(report) == {"bad": FAILED, "good": OK, "next": SKIPPED, "end": SKIPPED}
    assert [outcome.name for outcome in report.outcomes] == ["bad", "good", "next", "end"]
    assert str(report.error) == "no memory left"
    assert (tmp_path / "out" / "good").read_text() == "good"
    machines.during = {}
    report = machines.build(*steps, machines.step("end", "bad", "good"))
    assert statuses(report) == {"bad": OK, "good": CACHED, "next": OK, "end": OK}


def test_what_one_of_several_steps_does_not_expect_ends_the_others_too(tmp_path: Path) -> None:
    machines = Machines(tmp_path, gpus=2)
    ended: list[str] = []

    def trip(task: Task) -> None:
        raise ZeroDivisionError

    def work(task: Task) -> None:
        deadline = time.monotonic() + 20
        try:
            while time.monotonic() < deadline:
                task.advance(0.5)
                time.sleep(0.01)
        except KeyboardInterrupt:
            ended.append("long")
            raise

    machines.during = {"trips": trip, "long": work}
    with pytest.raises(ZeroDivisionError):
        machines.build(machines.step("trips", gpus=1), machines.step("long", gpus=1))
    assert ended == ["long"]
    assert not (tmp_path / "out" / "long").exists()


def test_observers_hear_which_step_it_is_and_are_never_called_by_two_at_once(tmp_path: Path) -> None:
    machines = Machines(tmp_path, gpus=2)
    barrier = threading.Barrier(2)
    inside = threading.Lock()

    class Careful(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[tuple[str, float]] = []

        def advance(self, name: str, fraction: float) -> None:
            assert inside.acquire(blocking=False), "two threads at once"
            time.sleep(0.001)
            self.heard.append((name, fraction))
            inside.release()

    def work(task: Task) -> None:
        barrier.wait(20)
        for tenths in range(1, 11):
            task.advance(tenths / 10)

    machines.during = {"a": work, "b": work}
    observer = Careful()
    assert machines.build(machines.step("a", gpus=1), machines.step("b", gpus=1), observer=observer).error is None
    for name in "ab":
        assert [fraction for heard, fraction in observer.heard if heard == name] == [n / 10 for n in range(1, 11)]
