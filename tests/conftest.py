"""Shared by all tests: poisoned outputs, where data lives, and each instruction set this machine has."""

import gc
import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._device import _device_constructors

from tests import shapes
from tests.turns import SPREAD, of_group, take_left_out
from twofour import native
from twofour.calls import fast_paths_are_off
from twofour.kernels import rows
from twofour.kernels.base import Row
from twofour.measure import chooser, timing
from twofour.measure.record import Record
from twofour.measure.timing import Candidate

ROOT = Path(__file__).parent.parent

# What modules beside the tests assert is told with its values, as what tests themselves assert.
pytest.register_assert_rewrite("tests.compiler", "tests.export", "tests.kernels", "tests.training")

# Read when a Triton kernel is first imported: without a GPU its interpreter runs them on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# `with torch.device(...)` looks functions up in a list made at its first use: it must hold torch.empty itself.
_device_constructors()


def pytest_report_header() -> str:
    return shapes.described()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each of several processes begin to read the tests at a place of its own: what one compiles, others find.

    All of them collect every file. Side by side each would compile them all, in a fresh clone for twenty seconds.
    """
    given = getattr(session.config, "workerinput", None)
    if given is None or session.config.args != session.config.getini("testpaths"):
        return
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    begin = len(files) * int(given["workerid"].removeprefix("gw")) // given["workercount"]
    for path in files[begin:] if begin else ():
        with suppress(Exception, pytest.skip.Exception):  # collecting tells of it
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Leave what importing and collecting made to itself: a collection of garbage in a test looks at the test's.

    Capturing a model makes and keeps millions of containers, which would be looked at after each 700.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_unconfigure() -> None:
    """What is left is freed in its order."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the report carry the cases that an item left out, from one process to another too."""
    report = yield
    report.user_properties.extend(("left out", case) for case in take_left_out())
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the cases that were skipped beside others that ran, as -ra prints items: each case and reason once."""
    reports = [one for found in terminalreporter.stats.values() for one in found if isinstance(one, pytest.TestReport)]
    cases = [
        (report.nodeid.partition("[")[0], text)
        for report in reports
        if report.when == "call"
        for name, text in report.user_properties
        if name == "left out"
    ]
    if cases:
        terminalreporter.section("cases that were skipped beside others", "=", cyan=True)
    for (test, text), count in Counter(cases).items():
        terminalreporter.line(f"SKIPPED [{count}] {test}: {text}")


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty returns with NaN (all ones for integers), so that an unwritten output is seen."""

    def poison(make):
        def empty(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.device.type == "cpu" and tensor.layout == torch.strided:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
            return tensor

        return empty

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))


@pytest.fixture(autouse=True)
def no_tracing_stays() -> Iterator[None]:
    """Fail the test that leaves torch tracing: every later capture of the process would fail in its place."""
    yield
    assert not _len_torch_dispatch_stack_pre_dispatch(), "a mode of torch.export was left"


@pytest.fixture(autouse=True)
def fast_paths_stay() -> Iterator[None]:
    """Fail the test that leaves the fast paths off, torch's or ours: encoders would run slower in all that follow."""
    yield
    assert torch.backends.mha.get_fastpath_enabled(), "torch's fast paths were left off"
    assert not fast_paths_are_off(), "somebody is still inside `without_fast_paths`"


@pytest.fixture(autouse=True)
def no_whole_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a whole model of a few microseconds beats the dense one is for a quiet machine to say: here they tie."""
    monkeypatch.setattr("twofour.compiler.against_dense.milliseconds", lambda calls: dict.fromkeys(calls, 1.0))


@pytest.fixture(autouse=True)
def short_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernel is faster is for a quiet machine to say too: two rounds of samples of a tenth of a millisecond."""

    def short(candidates: Mapping[str, Candidate], **how: Any) -> Record:
        with pytest.MonkeyPatch.context() as shorter:
            shorter.setattr(timing, "SAMPLE_SECONDS", 1e-4)
            return timing.compare(candidates, **how | {"repeats": 2, "sure": None})

    monkeypatch.setattr(chooser, "compare", short)


def loggers() -> dict[str, tuple[int, bool, bool, list[logging.Handler]]]:
    """Return what each logger of twofour, by its name, lets pass and where it sends it."""
    found = {"twofour": logging.getLogger("twofour"), **logging.Logger.manager.loggerDict}
    return {
        name: (one.level, one.disabled, one.propagate, list(one.handlers))
        for name, one in found.items()
        if isinstance(one, logging.Logger) and name.partition(".")[0] == "twofour"
    }


@pytest.fixture(autouse=True)
def loggers_stay() -> Iterator[None]:
    """Fail the test that leaves a logger of twofour, or logging as a whole, changed: later ones would hear nothing."""
    before, root = loggers(), logging.getLogger()
    general = (root.level, root.disabled, logging.root.manager.disable)
    yield
    left = {name: state for name, state in loggers().items() if state != before.get(name, (0, False, True, []))}
    assert not left, f"loggers were left changed (level, disabled, propagate, handlers): {left}"
    assert (root.level, root.disabled, logging.root.manager.disable) == general, "logging was left changed for all"


def isa_levels() -> list[str]:
    """Instruction-set levels that this CPU has and TWOFOUR_ISA allows, slowest first."""
    return [level for level in native.isa_levels() if runs(level)]


OF_FLOATS = {"avx_vnni": "avx2", "amx": "avx512"}
"""Levels without rows of float32 -> the level whose rows run there."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch and the kernels use `count` threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_undisturbed(
    call: Callable[[torch.Tensor], torch.Tensor], inputs: Sequence[torch.Tensor], want: Sequence[torch.Tensor]
) -> None:
    """Call with every input from a Python thread of its own, again and again: the answers are the same bits."""

    def same(index: int) -> bool:
        return all(torch.equal(call(inputs[index]), want[index]) for _ in range(20))

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(same, range(len(inputs))))


def runs(instruction_set: str) -> bool:
    """Tell whether this CPU has the instruction set and TWOFOUR_ISA allows it."""
    return native.supports(instruction_set)


def case(value: Any, name: str, reason: str | None) -> Any:
    """Return a case of a test for one kernel, which is skipped where there is a reason that it cannot run."""
    return pytest.param(value, id=name, marks=() if reason is None else pytest.mark.skip(reason=reason))


def each_row(rows: Iterable[Row], argument: str = "row") -> Callable[[Any], Any]:
    """Run the test for every row, those of an instruction set in turn: see tests/turns.py.

    Those beyond this CPU or TWOFOUR_ISA are skipped, each set with its reason.
    """
    groups: dict[tuple[str, str | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.name if SPREAD else row.isa, row.unavailable()), []).append(row)

    def decorate(test: Callable[..., None]) -> Any:
        cases = [case(group, name, reason) for (name, reason), group in groups.items()]
        return pytest.mark.parametrize(argument, cases)(of_group(argument)(test))

    return decorate


_OF_FLOATS = {row.level for row in rows() if row.dtype in ("float32", "bfloat16")}


@pytest.fixture(params=[level for level in native.isa_levels() if native.level(level) in _OF_FLOATS])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test once for each level that adds rows of floats; others run what the level below them runs.

    Those beyond this CPU or TWOFOUR_ISA are skipped with the reason.
    """
    return _capped(request.param, monkeypatch)


def _caps() -> list[str]:
    """The levels, and sets below their level's others: what a CPU runs that has these but not those."""
    sets = native.instruction_sets()
    extended = {parent for one in sets.values() for parent in one.parents if sets[parent].level == one.level}
    return [name for name, one in sets.items() if one.level == name or name in extended]


@pytest.fixture(params=_caps())
def every_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test once for each level, also those that add rows of bytes alone, and for CPUs with a part of one."""
    return _capped(request.param, monkeypatch)


def _capped(level: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if reason := native.unavailable(level):
        pytest.skip(reason)
    monkeypatch.setenv("TWOFOUR_ISA", level)
    return level


def find_data() -> Path | None:
    """Return the folder of real data sets: $TWOFOUR_DATA, else ../shared/data beside the repository."""
    given = os.environ.get("TWOFOUR_DATA")
    folder = Path(given) if given else ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets; the test is skipped where there is none."""
    folder = find_data()
    if folder is None:
        pytest.skip("no data folder: set TWOFOUR_DATA to one that holds the data sets")
    return folder


@pytest.fixture(scope="session")
def times_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for measured times, shared by the session: each shape is measured once."""
    return tmp_path_factory.mktemp("times")


_of_benchmarks: dict[str, ModuleType] = {}
"""Modules of the benchmarks by name: imported once, and found by the tests that ask for the folder alone."""


@contextmanager
def of_benchmarks(folder: Path) -> Iterator[None]:
    """Let their modules alone have their names inside: those of the experiments, of the same names, stand aside."""
    made = {path.stem for path in folder.glob("*.py")} | {"cases", "models"}

    def apart(inside: bool) -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.split(".")[0] in made]
        found = [
            name
            for name in names
            if (folder in Path(getattr(sys.modules[name], "__file__", None) or "").parents) is inside
        ]
        return {name: sys.modules.pop(name) for name in found}

    others = apart(inside=False)
    sys.modules.update(_of_benchmarks)
    try:
        yield
    finally:
        _of_benchmarks.update(apart(inside=True))
        sys.modules.update(others)


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the benchmarks, imported from as `python benchmarks/run.py` does; torch's threads stay as many."""
    folder = Path(__file__).resolve().parent.parent / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    with of_benchmarks(folder), threads(torch.get_num_threads()):
        yield folder
