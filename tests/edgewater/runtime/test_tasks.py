"""Long-lived tasks: each is started by `Tasks`, and a failure is logged, counted, stated and ends the process."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgewater.base.errors import StorageError
from edgewater.runtime.tasks import Tasks
from tests.insides import reading

ROOT = Path(__file__).resolve().parents[3]
STARTERS = {"create_task", "ensure_future", "Thread", "Timer", "TaskGroup", "run_coroutine_threadsafe"}
BEGINNING = re.compile(rf"{'|'.join(STARTERS)}|tasks\.(start|thread)", re.IGNORECASE)
OWN = {
    "edge/agent/agent.py": {"_run"},  # waits for the stop
    "edge/agent/source_reading.py": {"read_all", "_read_sources", "_open"},  # awaited by the task `sources`
    "edge/sources/lookups.py": {"run"},  # awaited by the tasks `lookups-…`
    "edge/sources/kafka.py": {"assign"},  # each source raises the exception of the thread
    "edge/sources/syslog.py": {"connection_made"},  # of one connection
    "edge/sources/grpc_receiving.py": {"_serve"},  # of one request
    "edge/uplink/uplink_session.py": {"frames", "run"},  # awaited by the session, which begins again
    "edge/testing.py": {"start"},  # a kit for tests
    "edgewater/runtime/connections.py": {"connection_made"},  # of one connection
    "center/ingest/edge_session.py": {"run"},  # awaited by one session
    "center/api/lanes.py": {"run"},  # of one request
    "center/api/live_feed.py": {"read", "_run"},  # all that wait for a read get its exception
    "center/sinks/alert_delivery.py": {"_in_thread"},  # the attempt has the exception
    "center/ops/supervisor.py": {"run", "stop_with_supervisor"},  # awaited; its end stops the process
    "center/ops/prepare.py": {"_run_until_ready"},  # a tool that ends
}
"""Functions and classes that start tasks themselves: their caller gets the exception, or the task is about one request,
connection or source.
"""
SUPERVISED = {
    "center/ingest/gateway.py": {"group-commit", "status-writer", "hellos", "poll", "credentials", "links"},
    "center/api/app.py": {"newest-answers", "credentials"},
    "center/api/server.py": {"certificate"},
    "center/sinks/process.py": {"sinks", "sink-*"},
    "center/catalog/liveness.py": {"heartbeat"},
    "center/results/retention.py": {"answer-retention"},
    "center/job/job.py": {"deadlines", "function-rates", "warm-up", "stop"},
    "center/job/leadership.py": {"leadership"},
    "center/storage/wake.py": {"notify", "wakes-*"},
    "center/ops/supervisor.py": {"watch-*"},
    "center/ops/startup.py": {"report-when-ready"},
    "edgewater/runtime/health.py": {"health-http"},
    "edge/agent/agent.py": {"http", "*"},  # `*`: each of `Agent.loops`
    "edge/agent/reload.py": {"configuration"},
}
"""The tasks by module. Each has a test that makes it fail: here, or beside the tests of its process."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("edge", "center", "edgewater"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if "batch" not in path.parts and BEGINNING.search(text):
                yield str(path.relative_to(ROOT)), ast.parse(text)


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def starters(node: ast.AST, within: str = "") -> Iterator[str]:
    """The innermost functions and classes that start a task or a thread."""
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, ast.ClassDef):
            inner = child.name
            if any(name_of(base) == "Thread" for base in child.bases):
                yield inner
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = child.name
        elif isinstance(child, ast.Call) and name_of(child.func) in STARTERS:
            yield within
        yield from starters(child, inner)


def test_no_module_starts_a_long_lived_task_by_itself() -> None:
    found = {path: set(starters(tree)) for path, tree in modules() if path != "edgewater/runtime/tasks.py"}
    assert {path: names for path, names in found.items() if names} == OWN


def test_each_task_is_listed_and_so_has_a_test_that_makes_it_fail() -> None:
    found: dict[str, set[str]] = {}
    for path, tree in modules():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr in ("start", "thread") and "tasks" in ast.unparse(node.func.value).lower():
                given = node.args[0]
                if isinstance(given, ast.JoinedStr):
                    name = "".join(str(v.value) if isinstance(v, ast.Constant) else "*" for v in given.values)
                else:
                    name = str(given.value) if isinstance(given, ast.Constant) else "*"
                found.setdefault(path, set()).add(name)
    assert found == SUPERVISED


@pytest.mark.parametrize("failure", [RuntimeError("a secret"), StorageError("no disk")])
def test_a_task_that_fails_is_logged_counted_stated_and_ends_the_process(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[int] = []
    tasks = Tasks(lambda: ended.append(1))

    async def fail() -> None:
        raise failure

    async def other() -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        tasks.start("other", other())
        with pytest.raises(type(failure)):
            await tasks.start("poll", fail())
        await asyncio.gather(tasks.start("poll", fail()), return_exceptions=True)
        await tasks.cancel()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert ended == [1], "once"
    assert reading(tasks.failures.labels("poll")) == 2
    assert reading(tasks.failures.labels("other")) == 0, "it was cancelled"
    (stated,) = tasks.missing()
    assert "poll" in stated and "secret" not in stated
    assert caplog.records[0].exc_info is not None
    with pytest.raises(SystemExit) as exited:
        tasks.exit_if_failed()
    assert exited.value.code == 1


@pytest.mark.parametrize("failure", [RuntimeError, SystemExit])
def test_a_thread_that_fails_ends_the_process(failure: type[BaseException]) -> None:
    ended = threading.Event()
    tasks = Tasks(ended.set)

    def fail() -> None:
        raise failure

    tasks.thread("sinks", fail).join()
    assert ended.is_set() and reading(tasks.failures.labels("sinks")) == 1


def test_an_exception_that_the_owner_handles_and_an_end_in_order_are_no_failures() -> None:
    tasks = Tasks(expected=(StorageError,))

    async def run() -> None:
        async def refuse() -> None:
            raise StorageError("another agent has this state")

        async def end() -> None:
            pass

        await tasks.start("end", end())
        with pytest.raises(StorageError):
            await tasks.start("uplink", refuse())

    asyncio.run(run())
    assert tasks.missing() == []
    tasks.exit_if_failed()
