"""The agent answers a query with `since` from its files, beside the live data, through kill -9."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.agent import open_agent
from edge.core.events import Configured, SourceEnded
from edge.durability import DurableCore
from edge.process import now_ms
from edgewater.base.streams import MAX_TIME_MS
from edgewater.model.query import QuerySpec
from edgewater.wire import FrameBody, QueryRef
from tests.cores import drained
from tests.edge.agent_process import COUNT, QUERY, AgentProcess, counted, lines, no_ranges
from tests.edge.center_world import QUERY as MILES
from tests.edge.center_world import Center, config, expected, running, until, with_center
from tests.edge.center_world import lines as flights
from tests.edge.core.test_core import merged

SINCE = QuerySpec.from_mapping({**COUNT.to_mapping(), "name": "again", "since": "beginning"})
SINCE_REF = QueryRef("again", 1)


def bodies(center: Center, query: str) -> list[tuple[str, FrameBody]]:
    return [(name, body) for name, body in center.bodies() if name == query]


@pytest.mark.slow
@with_center()
async def test_a_query_registered_after_the_files_were_read_has_their_records(center: Center, tmp_path: Path) -> None:
    (tmp_path / "a.ndjson").write_text(flights(range(300)))
    (tmp_path / "b.ndjson.gz").write_bytes(gzip.compress(flights(range(300, 500)).encode()))
    file = {"file": {"path": str(tmp_path / "*.ndjson*"), "format": "ndjson"}}
    agent = open_agent(config(tmp_path, center, [file]))
    async with running(agent) as task:
        await until(center.ended, "the end of the stream", task)
        (tmp_path / "a.ndjson").rename(tmp_path / "moved")
        (tmp_path / "a.ndjson").write_text(flights(range(300)))  # a copy is put back
        every, some = (
            QuerySpec.from_mapping({**MILES.to_mapping(), "name": name, "since": since})
            for name, since in (("every", "beginning"), ("some", "2020-09-20T00:00:00Z"))
        )
        for spec in (every, some):
            center.catalog.queries.register(spec, now_ms())

        def answered(query: str) -> bool:
            return any(body.through_ms == MAX_TIME_MS for _, body in bodies(center, query))

        await until(lambda: answered("every") and answered("some"), "the answers", task)
        truth = {start: groups for (_, start), groups in expected(range(500)).items()}
        assert {start: g for (_, start), g in merged(bodies(center, "every")).items()} == truth
        since_ms = some.since_ms
        assert since_ms is not None and min(truth) < since_ms < max(truth)
        found = {start: g for (_, start), g in merged(bodies(center, "some")).items()}
        assert found == {start: groups for start, groups in truth.items() if start >= since_ms}
        assert not any(body.losses for query in ("every", "some") for _, body in bodies(center, query))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    sources = [{"file": {"path": str(tmp_path / "*.ndjson"), "format": "ndjson", "follow": True}}]
    process = AgentProcess(tmp_path, sources, checkpoint="100ms")
    yield process
    process.close()


def register(agent: AgentProcess) -> None:
    """The agent receives the query shortly before it is killed."""
    with agent.state() as opened:
        directory, make_core = opened.durable.directory, opened.durable._make_core
    durable = DurableCore(directory, make_core, no_ranges, "")
    durable.handle(Configured(((QUERY, COUNT), (SINCE_REF, SINCE))))
    durable.sync()
    durable.close()


def unread(agent: AgentProcess) -> int:
    return int((agent.metrics() or {})["edgewater_edge_backfill_records"])


def stop(agent: AgentProcess) -> None:
    process = agent.process
    assert process is not None and process.stdin is not None
    process.terminate()
    process.wait()
    process.stdin.close()
    agent.process = None


def answers(agent: AgentProcess) -> dict[str, list[FrameBody]]:
    """What the stopped agent has to send, by query."""
    found: dict[str, list[FrameBody]] = {}
    with agent.state() as opened:
        for source in opened.sources:
            opened.durable.handle(SourceEnded(source.stream, source.name))
        for frame in drained(opened.durable):
            found.setdefault(frame.query.name, []).append(frame.unpack())
    return found


@pytest.mark.slow
def test_a_backfill_goes_on_after_each_kill(agent: AgentProcess) -> None:
    total = 240_000
    for name, first in (("a", 0), ("b", total // 2)):
        (agent.directory / f"{name}.ndjson").write_text(lines(first, total // 2))
    agent.start()
    agent.until(lambda: agent.records() == total)
    stop(agent)  # with a checkpoint, so that `register` reads no file
    register(agent)
    left = total
    for _ in range(2):
        agent.start()
        with (agent.directory / "a.ndjson").open("a") as file:
            file.write(lines(total, 10))  # live records
        total += 10
        agent.until(lambda total=total: agent.records() == total)  # type: ignore[misc]
        agent.until(lambda left=left: unread(agent) < left)  # type: ignore[misc]
        left = unread(agent)
        agent.kill()
    assert left > 0, "killed during the backfill"
    agent.start()
    agent.until(lambda: unread(agent) == 0)
    stop(agent)
    found = answers(agent)
    assert counted(found["n"]) == counted(found["again"]) == total
    assert not any(body.losses for body in found["again"])


@pytest.mark.slow
def test_a_file_that_is_deleted_during_a_backfill_is_stated(agent: AgentProcess) -> None:
    for name, first in (("a", 0), ("b", 1_000)):
        (agent.directory / f"{name}.ndjson").write_text(lines(first, 1_000))
    agent.start()
    agent.until(lambda: agent.records() == 2_000)
    stop(agent)  # with a checkpoint, which does not need the file
    register(agent)
    (agent.directory / "a.ndjson").unlink()
    agent.start()
    agent.until(lambda: unread(agent) == 0)
    stop(agent)
    found = answers(agent)
    assert counted(found["n"]) == 2_000
    assert counted(found["again"]) == 1_000
    # That it was deleted while the agent was down is a loss of its own: more may have been written to it.
    losses = {(loss.reason, loss.records) for body in found["again"] for loss in body.losses}
    assert losses == {("before-query", 1_000), ("file-gone", None)}
