"""Each long-lived task of each process fails once. The process states it, counts it, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import edgewater.runtime.health
from center.api.live_feed import AnswerPoller
from center.api.routers.health import missing_components
from center.api.server import ApiServer
from center.catalog import ComponentRegistry
from center.catalog.liveness import HeartbeatThread
from center.config import ApiTlsSection, CenterConfig
from center.ops.startup import Startup
from center.ops.supervisor import ComponentCommand, Supervisor
from center.results import ResultStore, trimming
from center.sinks import SinkStore
from center.sinks.process import SinkProcess
from center.sinks.runner import SinkRunner
from edge.agent import Agent, open_agent
from edge.agent.reload import ConfigFile, until_stopped
from edgewater.runtime.configuration import FileWatch
from edgewater.runtime.health import health_server
from edgewater.runtime.tasks import Tasks
from edgewater.wire import uplink_pb2 as pb
from tests.center.api.conftest import Desk
from tests.center.gateway_world import RawEdge, frame, spec
from tests.center.gateway_world import center as running_center
from tests.edge.center_world import Center as EdgeCenter
from tests.edge.center_world import config as edge_config
from tests.insides import reading


class Bug(Exception):
    """An exception that nobody expects."""


def broken(*_: Any, **__: Any) -> Any:
    raise Bug("token 42")


def states(tasks: Tasks, name: str, missing: list[str]) -> None:
    assert reading(tasks.failures.labels(name)) == 1
    assert any(name in reason and "Bug" in reason and "token" not in reason for reason in missing)


@pytest.mark.parametrize("task", ["group-commit", "status-writer", "hellos", "poll", "credentials", "links"])
async def test_a_gateway_ends_if_a_task_of_it_fails(tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("center.ingest.link_shares.EVERY_S", 0.02)
    ended = asyncio.Event()
    async with running_center(tmp_path, reload_ms=20) as c, RawEdge(c.port) as edge:
        c.gateway.tasks.end = ended.set
        c.catalog.queries.register(spec(), 1)
        await edge.hello()
        place: tuple[Any, str] = {
            "group-commit": (c.gateway._group_commit, "_take"),
            "status-writer": (c.gateway._status, "flush"),
            "hellos": (c.gateway._hello_queue, "_next_batch"),
            "poll": (c.gateway, "_refresh"),
            "credentials": (c.gateway._credentials, "refresh"),
            "links": (c.gateway._links, "sync"),
        }[task]
        with monkeypatch.context() as patch:
            patch.setattr(*place, broken)
            await edge.send(frame(0))
            await edge.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=c.clock[0])))
            async with RawEdge(c.port) as other:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await other.hello("lga")
                await ended.wait()
        states(c.gateway.tasks, task, c.gateway.readiness())


@pytest.mark.parametrize("task", ["newest-answers", "credentials"])
async def test_the_api_ends_if_a_task_of_it_fails(tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("center.api.app.REFRESH_S", 0.01)
    desk, ended = Desk(tmp_path), asyncio.Event()
    app = desk.app()
    services = app.state.services
    services.tasks.end = ended.set
    if task == "newest-answers":
        monkeypatch.setattr(services.feed.changes, "_read", broken)
    else:
        monkeypatch.setattr(services.authenticator, "refresh", broken)
    async with app.router.lifespan_context(app):
        poller: AnswerPoller = services.feed.changes
        waiting = asyncio.ensure_future(poller.wait(1, 30))
        await ended.wait()
        states(services.tasks, task, await asyncio.to_thread(missing_components, services))
        waiting.cancel()


async def test_the_api_ends_if_it_cannot_look_for_new_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, tasks = asyncio.Event(), Tasks()
    tasks.end = ended.set
    server = ApiServer.__new__(ApiServer)
    server._tasks, server._reload_s, server.config = tasks, 0.01, type("Config", (), {"ssl": object()})()
    monkeypatch.setattr(FileWatch, "read", broken)
    tls = ApiTlsSection.model_construct(cert=None, key=None)
    tasks.start("certificate", server._watch_certificate(tls))
    await ended.wait()
    states(tasks, "certificate", tasks.missing())


@pytest.mark.parametrize("task", ["sinks", "sink-files"])
def test_the_process_of_sinks_ends_if_a_thread_of_it_fails(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, stop = Desk(tmp_path), threading.Event()
    store = SinkStore(desk.results.engine)
    process = SinkProcess([], desk.catalog, desk.results, store, owner="host:1", now_ms=lambda: desk.now)
    process.tasks.end = stop.set
    if task == "sinks":
        monkeypatch.setattr(process, "_follow", broken)
    else:
        store.define("files", {"kind": "parquet", "path": str(tmp_path / "lake")})
        monkeypatch.setattr(SinkRunner, "step", broken)
    process.run(stop)
    states(process.tasks, task, process.problems())


def ends(start: Callable[[Tasks], Any], name: str) -> None:
    ended = threading.Event()
    tasks = Tasks(ended.set)
    with start(tasks):
        assert ended.wait(30)
    states(tasks, name, tasks.missing())


def test_a_process_ends_if_it_cannot_state_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = ComponentRegistry(f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setattr(registry, "record", broken)
    ends(lambda tasks: HeartbeatThread(registry, "api", "host:1", now_ms=lambda: 5, tasks=tasks), "heartbeat")


def test_a_process_ends_if_old_answers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResultStore(f"sqlite:///{tmp_path}/results.db")
    monkeypatch.setattr(store, "trim", broken)
    ends(lambda tasks: trimming(store, 1, lambda: 2, tasks=tasks), "answer-retention")


def test_a_process_ends_if_its_health_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edgewater.runtime.health.EmbeddedServer, "run", broken)
    serve = lambda tasks: health_server(CollectorRegistry(), list, "127.0.0.1:0", "metrics", tasks=tasks)  # noqa: E731
    ends(serve, "health-http")


def test_a_center_ends_if_a_component_is_not_watched(tmp_path: Path) -> None:
    component = ComponentCommand("gateway", lambda: ["sleep", "60"], broken)
    supervisor = Supervisor([component], tmp_path / "pids", monotonic=time.monotonic)
    with pytest.raises(SystemExit) as ended:
        asyncio.run(supervisor.run(asyncio.Event()))
    assert ended.value.code == 1
    states(supervisor._tasks, "watch-gateway", supervisor._tasks.missing())


def test_a_center_ends_if_its_start_cannot_be_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Startup, "_missing", broken)
    startup = Startup(CenterConfig.model_validate({"data_dir": str(tmp_path)}), [], as_json=True)
    component = ComponentCommand("gateway", lambda: ["sleep", "60"])
    with pytest.raises(SystemExit):
        asyncio.run(startup.run(Supervisor([component], tmp_path / "pids", monotonic=time.monotonic)))


async def fails(*_: Any) -> None:
    raise Bug("token 42")


LOOPS = (*("group-commit", "uplink", "tick", "sync", "checkpoint", "sources", "backfills", "inputs"), "lookups-flights")


@pytest.mark.parametrize("task", [*LOOPS, "http", "configuration"])
async def test_an_edge_ends_if_a_loop_of_it_fails(tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = EdgeCenter(tmp_path)
    await served.start()
    settings = edge_config(tmp_path, served, [{"http": {}}])
    agent = open_agent(settings)
    if task in LOOPS:
        loops = agent.loops()
        assert {*loops, "lookups-flights"} == set(LOOPS)
        for loop in loops.values():
            loop.close()
        monkeypatch.setattr(Agent, "loops", lambda self: {task: fails()})
    elif task == "http":
        monkeypatch.setattr("edgewater.runtime.health.EmbeddedServer.serve", fails)
    run: Callable[[asyncio.Event], Awaitable[None]] = agent.run
    file = ConfigFile(tmp_path / "edge.yaml")
    monkeypatch.setattr(file, "changed", fails)
    with pytest.raises(SystemExit if task == "configuration" else Bug):
        await until_stopped(run, file, task == "configuration", agent.tasks)
    states(agent.tasks, task, agent.missing())
    await served.stop()


async def test_an_error_that_is_no_exception_ends_the_process_too() -> None:
    class Panic(BaseException):
        """What libraries in Rust raise."""

    def panics() -> None:
        raise Panic

    async def panics_later() -> None:
        raise Panic

    ended = threading.Event()
    starts: list[Callable[[Tasks], object]] = [
        lambda tasks: tasks.thread("it", panics),
        lambda tasks: tasks.start("it", panics_later()),
    ]
    for start in starts:
        tasks = Tasks(ended.set)
        start(tasks)
        await asyncio.to_thread(ended.wait, 5)
        assert any("Panic" in reason for reason in tasks.missing())
        ended.clear()
    stays = Tasks(ended.set)
    stays.start("waits", asyncio.Event().wait())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await stays.cancel()
    assert stays.missing() == []
