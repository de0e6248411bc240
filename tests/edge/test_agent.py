"""The agent with real sources, a real journal and a real gateway, in one event loop."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from center.catalog import Catalog
from center.ingest.gateway import Gateway, GatewayConfig
from center.storage.frame_log import FrameLog
from edge.agent import RETIRED, Agent, open_agent
from edge.config import parse_config
from edge.process import now_ms
from edge.records import Chunk, Rejection
from edgewater.model.errors import InvalidConfig, StorageError
from edgewater.model.query import QuerySpec
from edgewater.model.streams import MAX_TIME_MS, EdgeId
from edgewater.wire import DropReason, FrameBody
from sim.demo.ports import free_address, free_port
from tests.center.kept_frames import stored_body
from tests.certificates import make_certificates
from tests.edge.core.test_core import merged

DAY_MS = 86_400_000
QUERY = QuerySpec.from_mapping(
    {
        "name": "miles",
        "from": "flights",
        "group_by": ["carrier"],
        "measures": {"flights": "count()", "miles": "sum(distance)", "longest": "max(distance)"},
        "window": {"tumbling": "1d"},
    }
)
START_MS = 1_600_000_000_000 // DAY_MS * DAY_MS


def lines(rows: range) -> str:
    return "".join(
        json.dumps({"carrier": f"C{i % 7}", "distance": i, "at": START_MS + i * 3_600_000}) + "\n" for i in rows
    )


def expected(rows: range) -> dict[tuple[str, int], dict[Any, dict[str, float]]]:
    result: dict[tuple[str, int], dict[Any, dict[str, float]]] = {}
    for i in rows:
        start = (START_MS + i * 3_600_000) // DAY_MS * DAY_MS
        groups = result.setdefault(("miles", start), {})
        held = groups.setdefault(f"C{i % 7}", {"flights": 0.0, "miles": 0.0, "longest": 0.0})
        held["flights"] += 1
        held["miles"] += i
        held["longest"] = max(held["longest"], i)
    return result


class Center:
    """A real gateway, catalog and frame log."""

    def __init__(self, directory: Path) -> None:
        self.catalog = Catalog(f"sqlite:///{directory / 'catalog.db'}")
        self.log = FrameLog(directory / "log")
        self.gateway: Gateway | None = None
        self.port = 0

    async def start(self) -> None:
        self.gateway = Gateway(self.catalog, self.log, GatewayConfig(), now_ms)
        self.port = await self.gateway.start(f"127.0.0.1:{self.port}")

    async def stop(self) -> None:
        if self.gateway is not None:
            await self.gateway.stop()
            self.gateway = None

    def bodies(self) -> list[tuple[str, FrameBody]]:
        result = []
        for key, last in self.catalog.frames.last_positions().items():
            for entry in self.catalog.frames.entries(key, 0, last):
                result.append((entry.query.name, stored_body(self.catalog, self.log, entry)))
        return result

    def ended(self) -> bool:
        return any(body.through_ms == MAX_TIME_MS for _, body in self.bodies())


NDJSON = {"Content-Type": "application/x-ndjson"}


def config(directory: Path, center: Center, sources: list[dict[str, Any]], **more: Any) -> Any:
    return parse_config(
        {
            "edge": "jfk",
            "center": {"address": f"127.0.0.1:{center.port}"},
            "state_dir": str(directory / "state"),
            "http": {"listen": free_address()},
            "streams": {
                "flights": {
                    "columns": {"carrier": "string", "distance": "int64"},
                    "time": {"column": "at", "unit": "ms"},
                    "idle": "1d",
                    "sources": sources,
                }
            },
            **more,
        }
    )


@asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[asyncio.Task[None]]:
    stop = asyncio.Event()
    task = asyncio.create_task(agent.run(stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait([task], timeout=20)
        task.result()


async def until(condition: Callable[[], bool], what: str, task: asyncio.Task[None] | None = None) -> None:
    """Waits for a state of the real processes; the timeout is generous, the wait is not."""
    async with asyncio.timeout(120):
        while not condition():
            if task is not None and task.done():
                task.result()
            await asyncio.sleep(0.02)


def run(test: Callable[[Center], Awaitable[None]], directory: Path, queries: Sequence[QuerySpec] = (QUERY,)) -> None:
    async def main() -> None:
        center = Center(directory)
        for query in queries:
            center.catalog.queries.register(query, now_ms())
        await center.start()
        try:
            await test(center)
        finally:
            await center.stop()
            center.catalog.close()

    asyncio.run(main())


def test_a_push_that_is_being_made_durable_when_the_agent_stops_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its records count, and count again when the client repeats the push."""

    async def test(center: Center) -> None:
        agent = open_agent(config(tmp_path, center, [{"http": {}}]))
        stop, durable = asyncio.Event(), agent.commit.durable

        async def stopping() -> None:
            stop.set()
            await asyncio.sleep(0)
            await durable()

        task = asyncio.create_task(agent.run(stop))
        await until(agent.outbox.configured.is_set, "the first queries", task)
        monkeypatch.setattr(agent.commit, "durable", stopping)
        async with httpx.AsyncClient() as client:
            url = f"http://{agent.config.http.listen}/v1/streams/flights"
            response = await client.post(url, content=lines(range(3)), headers=NDJSON)
        assert response.json()["accepted"] == 3
        await task

    run(test, tmp_path)


def test_rejected_records_are_not_in_the_log_unless_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(center: Center) -> None:
        agent = open_agent(config(tmp_path, center, [{"http": {}}]))
        schema = agent.config.streams["flights"].record_schema
        rejection = Rejection("wrong-type", 2, '{"name": "Jane Doe"}', "distance: got 'Jane Doe'; expected int64")
        committing = asyncio.create_task(agent.commit.run())
        await agent.accept(Chunk("flights:http", schema.empty(), None, None, (rejection,), 1), "flights")
        committing.cancel()
        agent.durable.close()

    for level in (logging.INFO, logging.DEBUG):
        caplog.clear()
        with caplog.at_level(level, "edge"):
            run(test, tmp_path / str(level))
        assert "records are rejected: wrong-type" in caplog.text
        assert ("Jane Doe" in caplog.text) == (level == logging.DEBUG)


@pytest.mark.slow
def test_a_file_is_shipped_whole_and_bad_lines_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.ndjson").write_text(lines(range(300)) + '{"carrier": "UA", "dist\n' + lines(range(300, 400)))
    (tmp_path / "b.ndjson.gz").write_bytes(gzip.compress(lines(range(400, 500)).encode()))

    async def test(center: Center) -> None:
        agent = open_agent(
            config(tmp_path, center, [{"file": {"path": str(tmp_path / "*.ndjson*"), "format": "ndjson"}}])
        )
        async with running(agent) as task:
            await until(center.ended, "the end of the stream", task)
            assert merged(center.bodies()) == expected(range(500))
            (status,) = agent.health().source_statuses()
            assert (status.state, status.records, status.rejected) == ("ended", 500, {"malformed": 1})
            async with httpx.AsyncClient(base_url=f"http://{agent.config.http.listen}") as client:
                assert (await client.get("/readyz")).json() == {"ready": True, "missing": []}
                metrics = (await client.get("/metrics")).text
            named = f'source="flights:file:{tmp_path}/*.ndjson*",stream="flights"'
            assert 'edgewater_edge_records_total{stream="flights"} 500.0' in metrics
            assert f'edgewater_edge_rejected_records_total{{reason="malformed",{named}}} 1.0' in metrics
            assert "edgewater_edge_connected 1.0" in metrics
            (busy,) = (line for line in metrics.splitlines() if line.startswith("edgewater_edge_busy_share "))
            assert 0.0 < float(busy.split()[1]) <= 1.0

    run(test, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("pushed", [False, True])
def test_rejected_records_travel_to_the_center_with_their_windows_and_are_counted_once(
    tmp_path: Path, pushed: bool
) -> None:
    good, day = lines(range(48)), "".join(
        json.dumps({"carrier": "UA", "distance": text, "at": START_MS + DAY_MS + i}) + "\n"
        for i, text in enumerate(["far", "near", "1"])
    )  # fmt: skip
    body = good + day + '{"carrier": "UA", "dist\n' + lines(range(48, 60))
    path = tmp_path / "a.ndjson"

    def stated(center: Center) -> dict[tuple[str, int, int | None], int]:
        found: dict[tuple[str, int, int | None], int] = {}
        for dropped in (d for _, each in center.bodies() for d in each.dropped):
            key = dropped.reason.label, (dropped.slice_start_ms - START_MS) // DAY_MS, dropped.until_ms
            found[key] = found.get(key, 0) + dropped.records
        return found

    async def test(center: Center) -> None:
        path.write_text("" if pushed else body)
        source = {"http": {}} if pushed else {"file": {"path": str(path), "format": "ndjson", "follow": True}}
        settings = config(tmp_path, center, [source])
        for restart in (False, True):
            agent = open_agent(settings)
            async with running(agent) as task:
                await until(agent.outbox.configured.is_set, "queries", task)
                if pushed and not restart:
                    async with httpx.AsyncClient(base_url=f"http://{settings.http.listen}") as client:
                        reply = await client.post("/v1/streams/flights", content=body, headers=NDJSON)
                        assert reply.json()["accepted"] == 60
                await until(lambda: len(stated(center)) == 2, "the statements", task)
                name = agent.sources[0].name
                rejected = agent.durable.core.streams["flights"].rejected
                assert rejected == {name: {"wrong-type": 3, "malformed": 1}}
                await until(lambda: any(e.rejected for e in center.catalog.edges.all()), "a heartbeat", task)
                (edge,) = center.catalog.edges.all()
                counts = {(r[0], r[1]): r[2] for r in edge.rejected["flights"]}
                assert counts == {(name, "wrong-type"): 3, (name, "malformed"): 1}
            found = stated(center)
            assert found.pop(("wrong-type", 1, START_MS + 2 * DAY_MS)) == 3
            (((reason, first, until_ms), records),) = found.items()
            assert (reason, records) == ("malformed", 1)
            assert first <= 0 and until_ms is not None and until_ms > START_MS + 2 * DAY_MS

    run(test, tmp_path)


def test_a_repeated_push_is_a_guess_unless_its_client_gives_it_a_key(tmp_path: Path) -> None:
    """Two devices behind one address may send equal bodies, so such a body is counted once, and the doubt is stated."""

    async def test(center: Center) -> None:
        settings = config(tmp_path, center, [{"http": {}}])
        center.catalog.queries.register(QUERY, now_ms())
        agent = open_agent(settings)
        async with running(agent) as task, httpx.AsyncClient(base_url=f"http://{settings.http.listen}") as client:
            await until(agent.outbox.configured.is_set, "queries", task)
            at_ms = now_ms()
            rows = "".join(json.dumps({"carrier": "UA", "distance": 1, "at": at_ms + n}) + "\n" for n in range(3))
            for key in ({}, {}, {"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}):
                reply = await client.post("/v1/streams/flights", content=rows, headers={**NDJSON, **key})
                assert (reply.status_code, reply.json()["accepted"]) == (200, 3)
            (status,) = (await client.get("/v1/sources")).json()["sources"]
            assert (status["records"], status["guessed"]) == (6, {"assumed-repetition": 3})
            assert agent.durable.core.streams["flights"].records == 6

            def stated() -> int:
                reason = DropReason.ASSUMED_REPETITION
                return sum(d.records for _, body in center.bodies() for d in body.dropped if d.reason is reason)

            await until(lambda: stated() == 3, "the frame that states the guess", task)
        reopened = open_agent(settings)
        assert reopened.durable.core.streams["flights"].records == 6, "the journal replays the guess"

    run(test, tmp_path)


def test_an_agent_that_was_stopped_for_a_while_does_not_take_its_sources_for_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, or a suspended machine: senders go on, and what they sent is read after the pause."""
    paused_ms = 0
    monkeypatch.setattr("edge.agent.assembly.now_ms", lambda: now_ms() + paused_ms)

    async def test(center: Center) -> None:
        nonlocal paused_ms
        stream = {
            "columns": {"carrier": "string", "distance": "int64"},
            "time": {"column": "at", "unit": "ms"},
            "idle": "2s",
            "sources": [{"http": {}}],
        }
        settings = config(tmp_path, center, [], streams={"flights": stream})
        spec = {**QUERY.to_mapping(), "name": "pauses", "window": {"tumbling": "1s"}}
        center.catalog.queries.register(QuerySpec.from_mapping(spec), now_ms())
        agent = open_agent(settings)
        async with running(agent) as task, httpx.AsyncClient(base_url=f"http://{settings.http.listen}") as client:

            async def push(at_ms: int) -> None:
                row = json.dumps({"carrier": "UA", "distance": 1, "at": at_ms})
                reply = await client.post("/v1/streams/flights", content=row, headers=NDJSON)
                assert (reply.status_code, reply.json()["accepted"]) == (200, 1)

            await until(agent.outbox.configured.is_set, "queries", task)
            before_ms = now_ms()
            await push(before_ms)
            paused_ms = 60_000
            resumed_ms = now_ms() + paused_ms
            await until(lambda: agent.durable.core._now_ms >= resumed_ms, "a tick after the pause", task)
            await push(before_ms + 1)
            assert agent.durable.state.drops == {}

    run(test, tmp_path)


@pytest.mark.slow
def test_pushed_records_are_counted_once_through_a_restart_without_a_clean_stop(tmp_path: Path) -> None:
    async def test(center: Center) -> None:
        settings = config(tmp_path, center, [{"http": {}}])
        first = open_agent(settings)
        stop = asyncio.Event()
        task = asyncio.create_task(first.run(stop))
        await until(first.outbox.configured.is_set, "queries", task)
        async with httpx.AsyncClient(base_url=f"http://{settings.http.listen}") as client:
            reply = await client.post("/v1/streams/flights", content=lines(range(100)), headers=NDJSON)
            assert (reply.status_code, reply.json()["accepted"]) == (200, 100)
        # What a kill -9 leaves: no checkpoint, no last sync.
        task.cancel()
        first.commit.checkpoint = _nothing  # type: ignore[method-assign]
        await asyncio.wait([task])
        second = open_agent(settings)
        async with running(second) as task:
            async with httpx.AsyncClient(base_url=f"http://{settings.http.listen}") as client:
                await until(lambda: second.uplink.connected, "a session", task)
                reply = await client.post("/v1/streams/flights", content=lines(range(100, 300)), headers=NDJSON)
                assert reply.json()["accepted"] == 200
            want = expected(range(300))
            closed = {key: groups for key, groups in want.items() if key[1] < max(want)[1]}
            await until(lambda: merged(center.bodies()) == closed, "all closed days", task)

    run(test, tmp_path)


async def _nothing() -> None:
    return


def test_while_the_center_is_away_the_edge_goes_on_and_then_ships(tmp_path: Path) -> None:
    async def test(center: Center) -> None:
        settings = config(tmp_path, center, [{"http": {}}])
        agent = open_agent(settings)
        async with running(agent) as task:
            await until(agent.outbox.configured.is_set, "queries", task)
            await center.stop()
            async with httpx.AsyncClient(base_url=f"http://{settings.http.listen}") as client:
                assert (await client.get("/readyz")).status_code == 200
                reply = await client.post("/v1/streams/flights", content=lines(range(200)), headers=NDJSON)
                assert reply.status_code == 200
            await until(lambda: not agent.uplink.connected, "the loss of the session", task)
            await center.start()
            want = expected(range(200))
            closed = {key: groups for key, groups in want.items() if key[1] < max(want)[1]}
            await until(lambda: merged(center.bodies()) == closed, "all closed days", task)

    run(test, tmp_path)


def test_a_file_that_lacks_a_column_stops_its_own_source_only_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "wrong.csv").write_text(f"carrier,at\nUA,{START_MS}\n")
    (tmp_path / "good.ndjson").write_text(lines(range(100)))

    async def test(center: Center) -> None:
        sources = [{"file": {"path": str(tmp_path / name)}} for name in ("wrong.csv", "good.ndjson")]
        agent = open_agent(config(tmp_path, center, sources))
        async with running(agent) as task:
            await until(lambda: bool(agent.reading.failing), "the refusal", task)
            await until(lambda: agent.durable.core.streams["flights"].records == 100, "the other source", task)
            async with httpx.AsyncClient(base_url=f"http://{agent.config.http.listen}") as client:
                (missing,) = (await client.get("/readyz")).json()["missing"]
            assert "wrong.csv" in missing and "distance" in missing
            assert not center.ended(), "a stream is not finished while one of its files cannot be read"

    run(test, tmp_path)


@pytest.mark.slow
def test_pushes_over_tls_need_a_clients_certificate_and_health_has_an_address_of_its_own(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, {"localhost": "DNS:localhost", "app": "DNS:app"})
    tls = {"cert": "localhost.pem", "key": "localhost.key", "client_ca": "ca.pem"}
    http = {
        "listen": f"localhost:{free_port()}",
        "metrics": free_address(),
        "tls": {field: str(made / name) for field, name in tls.items()},
    }

    async def test(center: Center) -> None:
        agent = open_agent(config(tmp_path, center, [{"http": {}}], http=http))
        async with running(agent) as task:
            await until(agent.outbox.configured.is_set, "the first queries", task)
            url, trusted = f"https://{http['listen']}", ssl.create_default_context(cafile=str(made / "ca.pem"))
            async with httpx.AsyncClient(verify=trusted) as stranger:
                with pytest.raises(httpx.TransportError):
                    await stranger.post(f"{url}/v1/streams/flights", content=lines(range(3)), headers=NDJSON)
                assert (await stranger.get(f"http://{http['metrics']}/readyz")).status_code == 200
            trusted.load_cert_chain(made / "app.pem", made / "app.key")
            async with httpx.AsyncClient(verify=trusted) as client:
                reply = await client.post(f"{url}/v1/streams/flights", content=lines(range(3)), headers=NDJSON)
                assert reply.json()["accepted"] == 3
                assert (await client.get(f"{url}/metrics")).status_code == 404
                assert (await client.get(url, headers={"x": "y" * 100_000})).status_code == 400
            async with httpx.AsyncClient() as operator:
                shown = (await operator.get(f"http://{http['metrics']}/metrics")).text
                assert 'edgewater_edge_refused_total{reason="malformed"} 1.0' in shown

    run(test, tmp_path)


def test_a_certificate_that_cannot_be_read_is_named_when_the_agent_starts(tmp_path: Path) -> None:
    async def test(center: Center) -> None:
        http = {"listen": free_address(), "tls": {"cert": "/nowhere.pem", "key": "/nowhere.key"}}
        agent = open_agent(config(tmp_path, center, [{"http": {}}], http=http))
        with pytest.raises(InvalidConfig, match=r"http\.tls: '/nowhere\.pem'"):
            await agent.run(asyncio.Event())
        agent.durable.close()

    run(test, tmp_path)


def test_before_any_query_is_known_a_push_is_turned_away_and_says_why(tmp_path: Path) -> None:
    async def test(center: Center) -> None:
        await center.stop()
        settings = config(tmp_path, center, [{"http": {}}])
        agent = open_agent(settings)
        async with running(agent), httpx.AsyncClient(base_url=f"http://{settings.http.listen}") as client:

            async def ready() -> httpx.Response:
                while True:
                    try:
                        return await client.post("/v1/streams/flights", content=lines(range(3)), headers=NDJSON)
                    except httpx.ConnectError:
                        await asyncio.sleep(0.02)

            reply = await asyncio.wait_for(ready(), 20)
            assert reply.status_code == 503
            assert "Retry-After" in reply.headers
            assert "queries" in reply.json()["detail"]

    run(test, tmp_path)


def test_a_full_disk_holds_the_reply_until_the_records_are_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(center: Center) -> None:
        settings = config(tmp_path, center, [{"http": {}}])
        agent = open_agent(settings)
        async with running(agent) as task:
            await until(agent.outbox.configured.is_set, "queries", task)
            sound = agent.durable.sync

            def full() -> None:
                raise StorageError("the journal cannot be written: No space left on device")

            monkeypatch.setattr(agent.durable, "sync", full)
            async with httpx.AsyncClient(base_url=f"http://{settings.http.listen}", timeout=20) as client:
                push = asyncio.create_task(
                    client.post("/v1/streams/flights", content=lines(range(100)), headers=NDJSON)
                )
                await until(lambda: agent.commit.failure is not None, "the failure", task)
                assert not push.done()
                turned_away = await client.post("/v1/streams/flights", content=lines(range(100)), headers=NDJSON)
                assert turned_away.status_code == 503
                assert (await client.get("/readyz")).status_code == 503
                monkeypatch.setattr(agent.durable, "sync", sound)
                assert (await push).json()["accepted"] == 100
            assert agent.durable.core.streams["flights"].records == 100

    run(test, tmp_path)


def test_a_page_in_a_browser_of_this_machine_cannot_push_to_an_edge_without_credentials(tmp_path: Path) -> None:
    async def test(center: Center) -> None:
        settings = config(tmp_path, center, [{"http": {}}])
        agent = open_agent(settings)
        async with running(agent) as task, httpx.AsyncClient(base_url=f"http://{settings.http.listen}") as client:
            await until(agent.outbox.configured.is_set, "queries", task)
            for headers in ({"Host": "rebound.example.com"}, {"Origin": "https://page.example.com"}):
                reply = await client.post("/v1/streams/flights", content=lines(range(3)), headers=NDJSON | headers)
                assert (reply.status_code, "http.hosts" in reply.json()["detail"]) == (421, True)
            assert 'edgewater_edge_refused_total{reason="host"} 2.0' in (await client.get("/metrics")).text
            reply = await client.post("/v1/streams/flights", content=lines(range(3)), headers=NDJSON)
            assert reply.status_code == 200

    run(test, tmp_path)


@pytest.mark.slow
def test_an_edge_that_is_retired_while_it_is_connected_accepts_no_more_records(tmp_path: Path) -> None:
    (tmp_path / "live.ndjson").write_text(lines(range(20_000, 20_050)))

    async def test(center: Center) -> None:
        sources = [{"http": {}}, {"file": {"path": str(tmp_path / "live.ndjson"), "follow": True}}]
        settings = config(tmp_path, center, sources)
        agent, accepted = open_agent(settings), 0
        async with running(agent) as task, httpx.AsyncClient(base_url=f"http://{settings.http.listen}") as client:

            async def push() -> httpx.Response:
                nonlocal accepted
                rows = range(accepted, accepted + 30)
                reply = await client.post("/v1/streams/flights", content=lines(rows), headers=NDJSON)
                accepted += 30 if reply.status_code == 200 else 0
                return reply

            await until(lambda: agent.uplink.connected, "a session", task)
            await until(lambda: agent.durable.core.streams["flights"].records == 50, "the file", task)
            assert (await push()).status_code == 200
            await asyncio.to_thread(center.catalog.edges.retire, EdgeId("jfk"))
            while (reply := await push()).status_code == 200:
                await asyncio.sleep(0)
            assert (reply.status_code, reply.json()["type"]) == (410, "https://edgewater.dev/problems/retired")
            assert "reinstate it, then restart the agent" in reply.json()["detail"]
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()["missing"]) == (503, [RETIRED])
            assert "edgewater_edge_retired 1.0" in (await client.get("/metrics")).text
            with (tmp_path / "live.ndjson").open("a") as file:
                file.write(lines(range(20_050, 20_100)))
            assert center.catalog.edges.get("jfk").retired, "it has not registered itself again"
            assert agent.durable.core.streams["flights"].records == 50 + accepted
            assert agent.durable.core.queries, "what has not been shipped is kept"
        again = open_agent(settings)
        async with running(again) as task:
            await until(lambda: again.uplink.retired.is_set(), "the refusal", task)
            assert center.catalog.edges.get("jfk").retired, "a restart is no reinstatement"
        await asyncio.to_thread(center.catalog.edges.reinstate, EdgeId("jfk"))
        again = open_agent(settings)
        async with running(again) as task:
            await until(lambda: again.durable.core.streams["flights"].records == 100 + accepted, "the rest", task)
            want = expected(range(accepted))
            closed = {key: groups for key, groups in want.items() if key[1] < max(want)[1]}
            await until(lambda: merged(center.bodies()) == closed, "all closed days", task)

    run(test, tmp_path)


@pytest.mark.slow
def test_two_edges_that_read_one_file_raise_an_alarm_that_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.agent.source_reading.INPUTS_EVERY_S", 0.05)
    for name, rows in (("shared", range(200)), ("other", range(200, 400))):
        (tmp_path / f"{name}.ndjson").write_text(lines(rows))

    async def test(center: Center) -> None:
        def agent(edge: str, *names: str) -> Agent:
            sources = [{"file": {"path": str(tmp_path / f"{name}.ndjson"), "follow": True}} for name in names]
            return open_agent(config(tmp_path / edge, center, sources, edge=edge))

        def equal() -> list[str]:
            return [a.message for a in center.catalog.alarms.latest() if a.kind == "equal-inputs"]

        async with running(agent("jfk", "shared")) as jfk, running(agent("lga", "other", "shared")) as lga:
            await until(lambda: bool(equal()), "the alarm", jfk)
            assert not lga.done()
        (message,) = equal()
        assert all(part in message for part in ("jfk", "lga", "flights:file:", "shared.ndjson"))
        assert "other.ndjson" not in message

    run(test, tmp_path)
