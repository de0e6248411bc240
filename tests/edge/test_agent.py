"""The agent with real sources, a real journal and a real gateway."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import ssl
from pathlib import Path

import httpx
import pytest

from edge.agent import RETIRED, Agent, AgentHealth, open_agent
from edge.process import now_ms
from edge.records import Chunk, Rejection
from edgewater.base.errors import InvalidConfig, StorageError
from edgewater.base.streams import EdgeId
from edgewater.model.query import QuerySpec
from edgewater.wire import DropReason
from sim.demo.ports import free_address, free_port
from tests.certificates import make_certificates
from tests.edge.center_world import (
    DAY_MS,
    NDJSON,
    QUERY,
    START_MS,
    Center,
    closed,
    config,
    expected,
    lines,
    push_to,
    running,
    serving,
    until,
    with_center,
)
from tests.edge.core.test_core import merged
from tests.refusals import refused


@with_center()
async def test_a_push_that_is_being_made_durable_when_the_agent_stops_is_answered(
    center: Center, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its records count, and count again when the client repeats the push."""
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


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
@with_center()
async def test_rejected_records_are_not_in_the_log_unless_it_is_asked_for(
    center: Center, tmp_path: Path, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    agent = open_agent(config(tmp_path, center, [{"http": {}}]))
    schema = agent.config.streams["flights"].record_schema
    rejection = Rejection("wrong-type", 2, '{"name": "Jane Doe"}', "distance: got 'Jane Doe'; expected int64")
    committing = asyncio.create_task(agent.commit.run())
    with caplog.at_level(level, "edge"):
        await agent.accept(Chunk("flights:http", schema.empty(), None, None, (rejection,), 1), "flights")
    committing.cancel()
    agent.durable.close()
    assert "records are rejected: wrong-type" in caplog.text
    assert ("Jane Doe" in caplog.text) == (level == logging.DEBUG)


@pytest.mark.slow
@with_center()
async def test_a_file_is_shipped_whole_and_bad_lines_are_counted(center: Center, tmp_path: Path) -> None:
    (tmp_path / "a.ndjson").write_text(lines(range(300)) + '{"carrier": "UA", "dist\n' + lines(range(300, 400)))
    (tmp_path / "b.ndjson.gz").write_bytes(gzip.compress(lines(range(400, 500)).encode()))
    agent = open_agent(config(tmp_path, center, [{"file": {"path": str(tmp_path / "*.ndjson*"), "format": "ndjson"}}]))
    async with running(agent) as task:
        await until(center.ended, "the end of the stream", task)
        assert merged(center.bodies()) == expected(range(500))
        (status,) = AgentHealth(agent).source_statuses()
        assert (status.state, status.records, status.rejected) == ("ended", 500, {"malformed": 1})
        async with httpx.AsyncClient(base_url=f"http://{agent.config.http.listen}") as client:
            assert (await client.get("/readyz")).json() == {"ready": True, "missing": []}
            metrics = (await client.get("/metrics")).text
        named = f'source="flights:file:{tmp_path}/*.ndjson*",stream="flights"'
        assert 'edgewater_edge_records_total{stream="flights"} 500.0' in metrics
        assert f'edgewater_edge_rejected_records_total{{reason="malformed",{named}}} 1.0' in metrics
        assert "edgewater_edge_connected 1.0" in metrics
        (busy,) = (line for line in metrics.splitlines() if line.startswith("edgewater_edge_busy_share "))
        assert 0.0 <= float(busy.split()[1]) <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("pushed", [False, True])
@with_center()
async def test_rejected_records_travel_to_the_center_with_their_windows_and_are_counted_once(
    center: Center, tmp_path: Path, pushed: bool
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

    path.write_text("" if pushed else body)
    source = {"http": {}} if pushed else {"file": {"path": str(path), "format": "ndjson", "follow": True}}
    settings = config(tmp_path, center, [source])
    for restart in (False, True):
        agent = open_agent(settings)
        async with running(agent) as task:
            await until(agent.outbox.configured.is_set, "queries", task)
            if pushed and not restart:
                async with httpx.AsyncClient(base_url=f"http://{settings.http.listen}") as client:
                    reply = await push_to(client, body)
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


@with_center()
async def test_a_repeated_push_is_a_guess_unless_its_client_gives_it_a_key(center: Center, tmp_path: Path) -> None:
    """Two devices behind one address may send equal bodies, so such a body is counted once, and the doubt is stated."""
    settings = config(tmp_path, center, [{"http": {}}])
    center.catalog.queries.register(QUERY, now_ms())
    agent = open_agent(settings)
    async with serving(agent) as (task, client):
        at_ms = now_ms()
        rows = "".join(json.dumps({"carrier": "UA", "distance": 1, "at": at_ms + n}) + "\n" for n in range(3))
        for key in ({}, {}, {"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}):
            reply = await push_to(client, rows, **key)
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


@with_center()
async def test_an_agent_that_was_stopped_for_a_while_does_not_take_its_sources_for_idle(
    center: Center, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, or a suspended machine: senders go on, and what they sent is read after the pause."""
    paused_ms = 0
    monkeypatch.setattr("edge.agent.assembly.now_ms", lambda: now_ms() + paused_ms)
    settings = config(tmp_path, center, [{"http": {}}], idle="2s")
    spec = {**QUERY.to_mapping(), "name": "pauses", "window": {"tumbling": "1s"}}
    center.catalog.queries.register(QuerySpec.from_mapping(spec), now_ms())
    agent = open_agent(settings)
    async with serving(agent) as (task, client):

        async def push_at(at_ms: int) -> None:
            reply = await push_to(client, json.dumps({"carrier": "UA", "distance": 1, "at": at_ms}))
            assert (reply.status_code, reply.json()["accepted"]) == (200, 1)

        before_ms = now_ms()
        await push_at(before_ms)
        paused_ms = 60_000
        resumed_ms = now_ms() + paused_ms
        await until(lambda: agent.durable.core._now_ms >= resumed_ms, "a tick after the pause", task)
        await push_at(before_ms + 1)
        assert agent.durable.state.drops == {}


@pytest.mark.slow
@with_center()
async def test_pushed_records_are_counted_once_through_a_restart_without_a_clean_stop(
    center: Center, tmp_path: Path
) -> None:
    settings = config(tmp_path, center, [{"http": {}}])
    first = open_agent(settings)
    stop = asyncio.Event()
    task = asyncio.create_task(first.run(stop))
    await until(first.outbox.configured.is_set, "queries", task)
    async with httpx.AsyncClient(base_url=f"http://{settings.http.listen}") as client:
        reply = await push_to(client, lines(range(100)))
        assert (reply.status_code, reply.json()["accepted"]) == (200, 100)
    # What a kill -9 leaves: no checkpoint, no last sync.
    task.cancel()
    first.commit.checkpoint = _nothing  # type: ignore[method-assign]
    await asyncio.wait([task])
    second = open_agent(settings)
    async with serving(second) as (task, client):
        await until(lambda: second.uplink.connected, "a session", task)
        assert (await push_to(client, lines(range(100, 300)))).json()["accepted"] == 200
        await until(lambda: merged(center.bodies()) == closed(range(300)), "all closed days", task)


async def _nothing() -> None:
    return


@with_center()
async def test_while_the_center_is_away_the_edge_goes_on_and_then_ships(center: Center, tmp_path: Path) -> None:
    agent = open_agent(config(tmp_path, center, [{"http": {}}]))
    async with serving(agent) as (task, client):
        await center.stop()
        assert (await client.get("/readyz")).status_code == 200
        assert (await push_to(client, lines(range(200)))).status_code == 200
        await until(lambda: not agent.uplink.connected, "the loss of the session", task)
        await center.start()
        await until(lambda: merged(center.bodies()) == closed(range(200)), "all closed days", task)


@with_center()
async def test_a_file_that_lacks_a_column_stops_its_own_source_only_and_is_named(
    center: Center, tmp_path: Path
) -> None:
    (tmp_path / "wrong.csv").write_text(f"carrier,at\nUA,{START_MS}\n")
    (tmp_path / "good.ndjson").write_text(lines(range(100)))
    sources = [{"file": {"path": str(tmp_path / name)}} for name in ("wrong.csv", "good.ndjson")]
    agent = open_agent(config(tmp_path, center, sources))
    async with running(agent) as task:
        await until(lambda: bool(agent.reading.failing), "the refusal", task)
        await until(lambda: agent.durable.core.streams["flights"].records == 100, "the other source", task)
        async with httpx.AsyncClient(base_url=f"http://{agent.config.http.listen}") as client:
            (missing,) = (await client.get("/readyz")).json()["missing"]
        assert "wrong.csv" in missing and "distance" in missing
        assert not center.ended(), "a stream is not finished while one of its files cannot be read"


@pytest.mark.slow
@with_center()
async def test_pushes_over_tls_need_a_clients_certificate_and_health_has_an_address_of_its_own(
    center: Center, tmp_path: Path
) -> None:
    made = make_certificates(tmp_path, {"localhost": "DNS:localhost", "app": "DNS:app"})
    tls = {"cert": "localhost.pem", "key": "localhost.key", "client_ca": "ca.pem"}
    http = {
        "listen": f"localhost:{free_port()}",
        "metrics": free_address(),
        "tls": {field: str(made / name) for field, name in tls.items()},
    }
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


@with_center()
async def test_a_certificate_that_cannot_be_read_is_named_when_the_agent_starts(center: Center, tmp_path: Path) -> None:
    http = {"listen": free_address(), "tls": {"cert": "/nowhere.pem", "key": "/nowhere.key"}}
    agent = open_agent(config(tmp_path, center, [{"http": {}}], http=http))
    with refused(InvalidConfig, "http.tls"):
        await agent.run(asyncio.Event())
    agent.durable.close()


@with_center()
async def test_before_any_query_is_known_a_push_is_turned_away_and_says_why(center: Center, tmp_path: Path) -> None:
    await center.stop()
    settings = config(tmp_path, center, [{"http": {}}])
    agent = open_agent(settings)
    async with running(agent), httpx.AsyncClient(base_url=f"http://{settings.http.listen}") as client:

        async def ready() -> httpx.Response:
            while True:
                try:
                    return await push_to(client, lines(range(3)))
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)

        reply = await asyncio.wait_for(ready(), 20)
        assert reply.status_code == 503
        assert "Retry-After" in reply.headers
        assert "queries" in reply.json()["detail"]


@with_center()
async def test_a_full_disk_holds_the_reply_until_the_records_are_safe(
    center: Center, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = open_agent(config(tmp_path, center, [{"http": {}}]))
    async with serving(agent) as (task, client):
        sound = agent.durable.sync

        def full() -> None:
            raise StorageError("the journal cannot be written: No space left on device")

        monkeypatch.setattr(agent.durable, "sync", full)
        push = asyncio.create_task(push_to(client, lines(range(100))))
        await until(lambda: agent.commit.failure is not None, "the failure", task)
        assert not push.done()
        assert (await push_to(client, lines(range(100)))).status_code == 503
        assert (await client.get("/readyz")).status_code == 503
        monkeypatch.setattr(agent.durable, "sync", sound)
        assert (await push).json()["accepted"] == 100
        assert agent.durable.core.streams["flights"].records == 100


@with_center()
async def test_a_page_in_a_browser_of_this_machine_cannot_push_to_an_edge_without_credentials(
    center: Center, tmp_path: Path
) -> None:
    async with serving(open_agent(config(tmp_path, center, [{"http": {}}]))) as (_, client):
        for headers in ({"Host": "rebound.example.com"}, {"Origin": "https://page.example.com"}):
            reply = await push_to(client, lines(range(3)), **headers)
            assert (reply.status_code, "http.hosts" in reply.json()["detail"]) == (421, True)
        assert 'edgewater_edge_refused_total{reason="host"} 2.0' in (await client.get("/metrics")).text
        assert (await push_to(client, lines(range(3)))).status_code == 200


@with_center()
async def test_a_page_of_a_named_origin_pushes_with_its_token_and_others_do_not(center: Center, tmp_path: Path) -> None:
    page, other = "https://shop.example", "https://page.example.com"
    settings = config(
        tmp_path, center, [{"http": {}}], http={"listen": free_address(), "tokens": ["t"], "origins": [page]}
    )
    async with serving(open_agent(settings)) as (_, client):
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        allowed = await client.options("/v1/streams/flights", headers={"Origin": page} | asked)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, page)
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        refused = await client.options("/v1/streams/flights", headers={"Origin": other} | asked)
        assert "access-control-allow-origin" not in refused.headers
        for token, status in (("t", 200), ("x", 401)):
            reply = await push_to(client, lines(range(3)), Origin=page, Authorization=f"Bearer {token}")
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, page)
        health = await client.get("/metrics", headers={"Origin": page})
        assert health.status_code == 200 and "access-control-allow-origin" not in health.headers
        assert (await client.get("/nowhere")).status_code == 404


@pytest.mark.slow
@with_center()
async def test_an_edge_that_is_retired_while_it_is_connected_accepts_no_more_records(
    center: Center, tmp_path: Path
) -> None:
    (tmp_path / "live.ndjson").write_text(lines(range(20_000, 20_050)))
    sources = [{"http": {}}, {"file": {"path": str(tmp_path / "live.ndjson"), "follow": True}}]
    settings = config(tmp_path, center, sources)
    agent, accepted = open_agent(settings), 0
    async with serving(agent) as (task, client):

        async def push() -> httpx.Response:
            nonlocal accepted
            rows = range(accepted, accepted + 30)
            reply = await push_to(client, lines(rows))
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
        await until(lambda: merged(center.bodies()) == closed(range(accepted)), "all closed days", task)


@pytest.mark.slow
@with_center()
async def test_two_edges_that_read_one_file_raise_an_alarm_that_names_both(
    center: Center, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.agent.source_reading.INPUTS_EVERY_S", 0.05)
    for name, rows in (("shared", range(200)), ("other", range(200, 400))):
        (tmp_path / f"{name}.ndjson").write_text(lines(rows))

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
