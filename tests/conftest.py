"""Lanes: what runs by default, which tests share a worker, and what came out of each lane."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import FULL

pytest_plugins = ["tests.compiled_statements", "tests.programs"]

# Limits of time fail on a machine that does something else meanwhile. By default the examples are the same in each run,
# and a quarter of them; `make test-all` draws others.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("edgewater", **UNTIMED, derandomize=True, max_examples=FULL // 4)
settings.register_profile("quick", **UNTIMED, derandomize=True, max_examples=FULL // 10)
settings.register_profile("full", **UNTIMED, max_examples=FULL)

MARKED_LANES = ("data", "e2e", "images", "spark")
"""Markers that make a lane; tests without any of them are the lane `units`."""

SLOW = ("e2e", "program", "slow", "spark")
"""Markers of tests that `make quick` leaves out."""

CHUNK = 8
"""The most tests of one file that a worker gets at once. For each test that ends, pytest-xdist walks through all chunks
that it has given out, which took its process ten seconds of CPU time for chunks of one test."""

PATIENCE_S = 120
"""The longest time that a coroutine of a test takes."""

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every law, data set and statistical cell (make test-all)")
    parser.addoption("--quick", action="store_true", help="one cell of each fast test, few examples (make quick)")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(next((name for name in ("full", "quick") if config.getoption(name)), "edgewater"))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What collection makes lives to the end. Looking for garbage in it took a third of collection, 6 % of tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Marks the cells of a product of parameters as nightly that have no value which the other cells lack.

    Cells that the run leaves out are not made: to make and to deselect them took a tenth of collection. One cell stays,
    so that the test is deselected and not made without its parameters.
    """
    of_test, calls = {mark.name for mark in metafunc.definition.iter_markers()}, list(metafunc._calls)
    if len(calls) < 2:
        return
    left_out = set() if metafunc.config.getoption("--full") else {"full"}
    if "not nightly" in (metafunc.config.option.markexpr or ""):
        left_out.add("nightly")
    if metafunc.config.getoption("--quick"):
        left_out |= {*SLOW}
    if not of_test & {"nightly", "product"}:
        _leave_products_to_the_night([call for call in calls if not {"full", "nightly"} & _marks(call)])
    kept = [call for call in calls if not left_out & _marks(call)] or calls[:1]
    metafunc._calls[:] = kept[:1] if metafunc.config.getoption("--quick") else kept


def _marks(call: Any) -> set[str]:
    return {mark.name for mark in call.marks}


def _leave_products_to_the_night(left: list[Any]) -> None:
    cells = [(call, set(enumerate(call._idlist))) for call in left]
    missing = set().union(*(values for _, values in cells))
    while missing:
        best = max(cells, key=lambda cell: len(missing & cell[1]))
        missing -= best[1]
        cells.remove(best)
    for call, _ in cells:
        call.marks.append(pytest.mark.nightly.mark)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests marked `full` to `make test-all`, and those with a marker of `SLOW` to `make test`.

    One worker runs the tests that start a JVM, which share one Spark session. One runs the tests that start processes:
    processes of one test do not compete with those of another for two cores. Tests that share a fixture of their module
    are together, so the fixture is made once. The other tests are given out in chunks.
    """
    left_out = set() if config.getoption("--full") else {item for item in items if item.get_closest_marker("full")}
    if config.getoption("--quick"):
        left_out |= {item for item in items if any(map(item.get_closest_marker, SLOW))}
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    in_file = Counter(item.path for item in items)
    seen = Counter[Path]()
    for item in items:
        lane = next((name for name in ("spark", "e2e") if item.get_closest_marker(name)), None)
        shared, file = _module_fixtures(item), item.nodeid.partition("::")[0]
        if lane is not None:
            group = lane
        elif shared:
            group = f"{file}-{'-'.join(shared)}"
        else:
            # Files of few tests have the long ones, which would keep one worker busy while the others have ended.
            chunk = min(CHUNK, 1 + in_file[item.path] // 16)
            group = f"{file}-{seen[item.path] // chunk}"
            seen[item.path] += 1
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine on an event loop of its own, and fails it rather than wait for ever."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})

    asyncio.run(bounded())
    return True


def _module_fixtures(item: pytest.Item) -> list[str]:
    """Returns the names of the fixtures of a test that are made once in a module."""
    assert isinstance(item, pytest.Function)
    found = item._fixtureinfo.name2fixturedefs.items()
    return sorted(name for name, definitions in found if definitions[-1].scope in ("module", "class"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.lane = next((name for name in MARKED_LANES if item.get_closest_marker(name)), "units")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: dict[str, Counter[str]] = {}
    seconds = Counter[str]()
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                lane = getattr(report, "lane", "units")  # a worker that died reports without one
                seconds[lane] += report.duration
                counts.setdefault(lane, Counter())[outcome] += 1
    for lane, found in counts.items():
        said = ", ".join(f"{found[outcome]} {outcome}" for outcome in OUTCOMES if found[outcome])
        terminalreporter.write_line(f"lane {lane}: {said}; {seconds[lane]:.0f} s in tests")
