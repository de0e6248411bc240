"""Sources of a kind that a package provides: positions in the journal, failures, and sources that come later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from pydantic import BaseModel, ConfigDict, SecretStr, model_validator

from edge.agent import Agent, AgentHealth, open_agent
from edge.config import edge_config, parse_config
from edge.config import sources as source_config
from edge.preflight import check
from edge.records import Chunk, Decoded, Lag, Position, Source
from edge.source_kinds import GROUP, KeptSource, SourceCheck, SourceContext, SourceKinds, SourcePluginWarning
from edge.sources import factory
from edgewater.base.errors import InvalidConfig
from edgewater.base.streams import Delivery
from edgewater.runtime.configuration import refusal
from tests.edge.center_world import START_MS, Center, closed, config, push_to, running, until, with_center
from tests.edge.core.test_core import merged
from tests.refusals import refused


class Broker:
    """Numbers in partitions, in memory. A number may be given again until it is committed."""

    def __init__(self) -> None:
        self.partitions: dict[int, list[int]] = {0: []}
        self.committed: dict[int, int] = {}
        self.failure: Exception | None = None
        self.lag_failure: Exception | None = None
        self.delivery = Delivery.EXACTLY_ONCE
        self.changed = asyncio.Event()
        self.changed, self.answers, self.attempts = asyncio.Event(), asyncio.Event(), 0
        self.answers.set()

    def add(self, partition: int, *numbers: int) -> None:
        self.partitions.setdefault(partition, []).extend(numbers)
        self.changed.set()


BROKER = Broker()


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    topic: str
    password: SecretStr = SecretStr("")

    @model_validator(mode="after")
    def _careless(self) -> Options:
        if self.password.get_secret_value().endswith("!"):
            raise refusal("a password without an exclamation mark", f"it is {self.password.get_secret_value()}")
        return self


class Partition(KeptSource):
    """Partition 0 also looks for others."""

    def __init__(self, topic: str, context: SourceContext, number: int) -> None:
        self.name, self.stream = f"{context.stream}:numbers:{topic}:{number}", context.stream
        self._topic, self._context, self._number = topic, context, number
        self.entry, self.delivery = f"{context.stream}:numbers:{topic}", BROKER.delivery

    def opened_before(self, names: Iterable[str]) -> tuple[Source, ...]:
        numbers = [int(name.rsplit(":", 1)[1]) for name in names if name != self.name]
        return tuple(Partition(self._topic, self._context, n) for n in numbers) if self._number == 0 else ()

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        at = 0 if position is None else position["offset"]
        while True:
            BROKER.attempts += 1
            if BROKER.failure is not None:
                raise BROKER.failure
            await BROKER.answers.wait()
            numbers = BROKER.partitions[self._number][at : at + 5]
            at += len(numbers)
            opens: tuple[Source, ...] = ()
            if self._number == 0:
                opens = tuple(Partition(self._topic, self._context, n) for n in BROKER.partitions if n)
            yield Chunk(self.name, self._batch(numbers), None, {"offset": at}, (), 8, keep=True, opens=opens)
            if not numbers:
                with self._context.idle(self.name):
                    await BROKER.changed.wait()
                    await asyncio.sleep(0.01)

    def _batch(self, numbers: Sequence[int]) -> pa.RecordBatch:
        columns = {"carrier": [f"C{n % 7}" for n in numbers], "distance": list(numbers)}
        columns["event_time_ms"] = [START_MS + n * 3_600_000 for n in numbers]
        return pa.RecordBatch.from_pydict(columns, self._context.schema.output)

    def lag(self) -> Lag:
        if BROKER.lag_failure is not None:
            raise BROKER.lag_failure
        return Lag(10 + self._number, float(self._number))

    def committed(self, position: Position) -> None:
        BROKER.committed[self._number] = position["offset"]


class Numbers:
    name = "numbers"
    config = Options

    def sources(self, options: Options, context: SourceContext) -> Sequence[Source]:
        return [Partition(options.topic, context, 0)]

    def check(self, options: Options, context: SourceContext, records: int) -> SourceCheck:
        if BROKER.failure is not None:
            raise BROKER.failure
        first = Partition(options.topic, context, 0)
        samples = [Decoded(first._batch(numbers[:records])) for numbers in BROKER.partitions.values()]
        return SourceCheck((f"{len(samples)} partitions",), tuple(samples), nbytes=8)


KIND = Numbers()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Broker:
    kinds = SourceKinds(lambda: [EntryPoint("numbers", f"{__name__}:KIND", GROUP)])
    monkeypatch.setattr(edge_config, "KINDS", kinds)
    monkeypatch.setattr(source_config, "KINDS", kinds)
    monkeypatch.setattr(factory, "KINDS", kinds)
    global BROKER
    BROKER = Broker()
    return BROKER


def records(agent: Agent) -> int:
    return agent.durable.core.streams["flights"].records


NAME = "flights:numbers:t:0"
PATH = "streams.flights.sources.0.numbers"
SOURCES: list[dict[str, Any]] = [{"numbers": {"topic": "t", "password": "s3cret"}}]


async def killed(agent: Agent, task: asyncio.Task[None]) -> None:
    """Leaves what a kill -9 leaves: no checkpoint, no last sync."""
    task.cancel()
    agent.commit.checkpoint = _nothing  # type: ignore[method-assign]
    await asyncio.wait([task])


async def _nothing() -> None:
    return


async def started(agent: Agent) -> asyncio.Task[None]:
    task = asyncio.create_task(agent.run(asyncio.Event()))
    await until(agent.outbox.configured.is_set, "queries", task)
    return task


@pytest.mark.nightly
@with_center()
async def test_records_are_committed_once_they_are_on_disk_and_count_once_through_crashes(
    center: Center, tmp_path: Path
) -> None:
    settings = config(tmp_path, center, SOURCES)
    given = 0
    for crash in range(4):
        BROKER.add(0, *range(given, given + 60))
        given += 60
        agent = open_agent(settings)
        assert agent.durable.state.positions.get(NAME, {"offset": 0})["offset"] >= BROKER.committed.get(0, 0)
        task = await started(agent)
        least = given - 60 + 17 * crash
        await until(partial(lambda least: BROKER.committed.get(0, 0) >= least, least), "a commit", task)
        await killed(agent, task)
    agent = open_agent(settings)
    async with running(agent) as task:
        await until(lambda: records(agent) == given == BROKER.committed.get(0), "all records", task)
        await until(lambda: merged(center.bodies()) == closed(range(given)), "all closed days", task)


@pytest.mark.parametrize("failure", [ZeroDivisionError("s3cret"), OSError("unreachable"), KeyError("x")])
@with_center()
async def test_a_failure_of_a_source_costs_only_itself(
    center: Center,
    tmp_path: Path,
    failure: Exception,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edge.agent.source_reading.SOURCE_RETRY_S", 0.05)
    (tmp_path / "a.ndjson").write_text("")
    file = {"file": {"path": str(tmp_path / "a.ndjson"), "follow": True}}
    agent = open_agent(config(tmp_path, center, [*SOURCES, file, {"http": {}}]))
    async with running(agent) as task:
        BROKER.failure = failure
        await until(lambda: NAME in agent.reading.failing, "the failure", task)
        (reason,) = (reason for reason in agent.missing() if NAME in reason)
        assert "s3cret" not in reason
        with (tmp_path / "a.ndjson").open("a") as lines:
            lines.write(f'{{"carrier": "C1", "distance": 1, "at": {START_MS}}}\n')
        await until(lambda: records(agent) == 1, "the record of the other source", task)
        async with httpx.AsyncClient(base_url=f"http://{agent.config.http.listen}") as client:
            body = f'{{"carrier": "C1", "distance": 1, "at": {START_MS}}}\n'
            reply = await push_to(client, body)
            assert (reply.status_code, reply.json()["accepted"]) == (200, 1)
        BROKER.add(0, 1, 2)
        BROKER.failure = None
        await until(lambda: records(agent) == 4 and not agent.missing(), "the source after its failure", task)


@with_center()
async def test_sources_that_come_while_the_agent_runs_are_read_and_hold_the_watermark(
    center: Center, tmp_path: Path
) -> None:
    settings = config(tmp_path, center, SOURCES)
    agent = open_agent(settings)
    async with running(agent) as task:
        BROKER.add(0, 0, 48)
        await until(lambda: records(agent) == 2, "the first partition", task)
        BROKER.add(1, 24, 25)
        await until(lambda: records(agent) == 4, "the new partition", task)
    agent = open_agent(settings)
    async with running(agent) as task:  # its place is known after a restart
        BROKER.add(0, 72)
        BROKER.add(1, 26)
        await until(lambda: BROKER.committed == {0: 3, 1: 3}, "the rest", task)
        # The first partition is at 72 h. The second one is at 26 h, and holds what was reached before it came.
        assert agent.durable.core.streams["flights"].watermark_ms == START_MS + 48 * 3_600_000


@with_center()
async def test_a_source_that_an_earlier_run_has_opened_holds_the_watermark_from_the_start(
    center: Center, tmp_path: Path
) -> None:
    settings = config(tmp_path, center, SOURCES)
    BROKER.add(0, 0)
    BROKER.add(1, 26)
    agent = open_agent(settings)
    async with running(agent) as task:
        await until(lambda: BROKER.committed == {0: 1, 1: 1}, "both partitions", task)
        BROKER.add(0, 72)
        await until(lambda: BROKER.committed == {0: 2, 1: 1}, "the first partition", task)
    agent = open_agent(settings)
    try:
        assert [source.name for source in agent.sources] == [NAME, NAME[:-1] + "1"]
        assert agent.durable.core.streams["flights"].watermark_ms == START_MS + 26 * 3_600_000
    finally:
        agent.durable.close()


@with_center()
async def test_a_source_is_failing_until_it_reads_or_finds_that_there_is_nothing_to_read(
    center: Center, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("edge.agent.source_reading.SOURCE_RETRY_S", 0.02)
    caplog.set_level("INFO", "edge.agent")
    agent = open_agent(config(tmp_path, center, SOURCES))
    async with running(agent) as task:
        BROKER.failure, BROKER.attempts = OSError("unreachable"), 0
        await until(lambda: NAME in agent.reading.failing, "the failure", task)
        BROKER.failure = None
        BROKER.answers.clear()  # the next attempt neither fails nor reads: it waits for the broker
        before = BROKER.attempts
        await until(lambda: BROKER.attempts > before, "an attempt that waits", task)
        assert any(NAME in reason for reason in agent.missing())
        assert AgentHealth(agent).gauges()["failing_sources"][1] == 1
        BROKER.answers.set()
        await until(lambda: not agent.missing(), "the end of the failure", task)
        assert AgentHealth(agent).gauges()["failing_sources"][1] == 0
    lines = [message for message in caplog.messages if NAME in message]
    assert len(lines) == 2, "one line for each change"


def test_the_check_of_a_kind_is_reported_with_its_samples(tmp_path: Path) -> None:
    stream = {"columns": {"carrier": "string", "distance": "int64"}, "time": {"column": "at"}, "sources": SOURCES}
    settings = parse_config({"edge": "jfk", "state_dir": str(tmp_path), "streams": {"flights": stream}}, {})
    BROKER.add(0, 1, 2)
    BROKER.add(1, 0)
    (source,) = check(settings, lambda: START_MS).streams[0].sources
    assert (source.source, source.records, source.facts, source.problems) == (NAME, 3, ("2 partitions",), ())
    assert source.disorder_ms == 0, "disorder is measured within a sample"
    for failure, problem in (
        (InvalidConfig("topic", "t", "a topic"), str(InvalidConfig(f"{PATH}.topic", "t", "a topic"))),
        (OSError("unreachable"), f"{PATH}: unreachable"),
        (ZeroDivisionError("s3cret"), f"{PATH}: the check failed: ZeroDivisionError"),
    ):
        BROKER.failure = failure
        report = check(settings, lambda: START_MS)
        assert (report.ok, report.streams[0].sources[0].problems) == (False, (problem,))
    assert check(settings, lambda: START_MS, connects=False).ok


def test_options_are_checked_and_secrets_are_not_shown(tmp_path: Path, installed: Broker) -> None:
    stream = {"columns": {"distance": "int64"}, "time": {"column": "at"}}

    def parsed(sources: list[dict[str, Any]], **more: Any) -> Any:
        given = {"flights": {**stream, "sources": sources, **more}}
        return parse_config({"edge": "jfk", "state_dir": "s", "streams": given}, {})

    settings = parsed(SOURCES)
    assert settings.streams["flights"].sources[0].package.options.topic == "t"
    assert "s3cret" not in repr(settings)
    for sources, more, field in (
        ([{"numbers": {}}], {}, "streams.flights.sources.0.numbers.topic"),
        ([{"numbers": {"topic": "t", "pasword": "x"}}], {}, "streams.flights.sources.0.numbers.pasword"),
        ([{"number": {"topic": "t"}}], {}, "streams.flights.sources.0.number"),
        (SOURCES, {"replay": {"speed": "max"}}, "streams.flights.sources.0.numbers"),
    ):
        with refused(InvalidConfig, field):
            parsed(sources, **more)


@pytest.mark.parametrize(
    ("source", "field", "reason"),
    [
        ({"numbers": {"topic": "t", "pasword": "s3cret"}}, "0.numbers.pasword", "unknown key, did you mean password?"),
        ({"numbers": {"topic": "t", "password": "s3cret!"}}, "0.numbers", ""),
        ({"numbers": None, "topic": "t", "password": "s3cret"}, "0", "the entry has several keys"),
        ({"numbers": {"topic": "t"}, "other": {"password": "s3cret"}}, "0", "the entry has several keys"),
    ],
)
def test_an_error_of_options_has_its_reason_unless_that_quotes_what_may_be_a_secret(
    installed: Broker, source: dict[str, Any], field: str, reason: str
) -> None:
    stream = {"columns": {"distance": "int64"}, "time": {"column": "at"}, "sources": [source]}
    with pytest.raises(InvalidConfig) as caught:
        parse_config({"edge": "jfk", "state_dir": "s", "streams": {"flights": stream}}, {})
    assert (caught.value.field, caught.value.reason) == (f"streams.flights.sources.{field}", reason)
    assert "s3cret" not in str(caught.value)


def test_a_source_that_is_there_twice_is_refused(tmp_path: Path, installed: Broker) -> None:
    center = Center(tmp_path)
    center.port = 1
    with pytest.raises(InvalidConfig) as caught:
        open_agent(config(tmp_path, center, SOURCES * 2))
    assert caught.value.value == NAME


def test_misspelt_keys_do_not_show_what_may_be_a_secret(installed: Broker) -> None:
    stream = {"columns": {"distance": "int64"}, "time": {"column": "at"}}
    for options in ({"pasword": "s3cret"}, {"password": ["s3cret"]}, {"password": {"evn": "s3cret"}}):
        given = {"flights": {**stream, "sources": [{"numbers": {"topic": "t", **options}}]}}
        with pytest.raises(InvalidConfig) as caught:
            parse_config({"edge": "jfk", "state_dir": "s", "streams": given}, {})
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("fault", [{"name": "file"}, {"name": "No"}, {"config": dict}, {"sources": None}])
def test_a_kind_that_lacks_something_is_not_registered(fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KIND, "name", "numbers", raising=False)
    for name, value in fault.items():
        monkeypatch.setattr(KIND, name, value, raising=False)
    kinds = SourceKinds(lambda: [EntryPoint("numbers", f"{__name__}:KIND", GROUP)])
    with pytest.warns(SourcePluginWarning):
        assert kinds.names == []
    assert len(kinds.problems) == 1


@with_center()
async def test_a_source_shows_its_delivery_state_lag_and_position_with_its_partitions_together(
    center: Center, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.agent.source_reading.SOURCE_RETRY_S", 0.05)
    BROKER.delivery = Delivery.AT_LEAST_ONCE
    BROKER.add(0, 1, 2)
    BROKER.add(1, 3)
    agent = open_agent(config(tmp_path, center, [*SOURCES, {"http": {"dedupe": "key"}}]))
    async with running(agent) as task, httpx.AsyncClient(base_url=f"http://{agent.config.http.listen}") as client:
        await until(lambda: records(agent) == 3, "the records of both partitions", task)
        body = f'{{"carrier": "C1", "distance": 1, "at": {START_MS}}}\noops\n'
        await push_to(client, body)
        topic, push = (await client.get("/v1/sources")).json()["sources"]
        assert (topic["source"], topic["parts"], topic["records"], topic["state"]) == (
            "flights:numbers:t", 2, 3, "ready",
        )  # fmt: skip
        assert (topic["delivery"], push["delivery"]) == (["at-least-once"], ["at-least-once"])
        assert (topic["lag"], push["lag"]) == (
            {"messages": 21, "seconds": 1.0}, {"messages": None, "seconds": None},
        )  # fmt: skip
        assert topic["positions"] == {NAME: {"offset": 2}, "flights:numbers:t:1": {"offset": 1}}
        assert (push["records"], push["rejected"]) == (1, {"malformed": 1})
        metrics = (await client.get("/metrics")).text
        named = 'source="flights:numbers:t",stream="flights"'
        for sample in (
            f"source_records_total{{{named}}} 3.0", f"source_lag_messages{{{named}}} 21.0",
            f"source_parts{{{named}}} 2.0", f"source_failing{{{named}}} 0.0",
            f'source_delivery{{delivery="at-least-once",{named}}} 1.0',
            'rejected_records_total{reason="malformed",source="flights:http",stream="flights"} 1.0',
        ):  # fmt: skip
            assert f"edgewater_edge_{sample}" in metrics
        assert "numbers:t:1" not in metrics, "a label for each partition has no bound"
        BROKER.failure, BROKER.lag_failure = OSError("unreachable"), ValueError("s3cret")
        BROKER.add(1, 4)
        await until(lambda: "flights:numbers:t:1" in agent.reading.failing, "the failure", task)
        topic, _ = (await client.get("/v1/sources")).json()["sources"]
        assert (topic["state"], topic["reason"], topic["lag"]["messages"]) == ("failing", "unreachable", None)
        (edge,) = center.catalog.edges.all()
        assert edge.streams[0].deliveries == (Delivery.AT_LEAST_ONCE,)


@with_center()
async def test_a_new_source_that_promises_less_than_the_edge_has_told_the_center_is_not_read(
    center: Center, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.agent.source_reading.SOURCE_RETRY_S", 0.05)
    agent = open_agent(config(tmp_path, center, SOURCES))
    async with running(agent) as task:
        await until(agent.outbox.configured.is_set, "queries", task)
        BROKER.delivery = Delivery.AT_MOST_ONCE
        BROKER.add(1, 3)
        await until(lambda: NAME in agent.reading.failing, "the failure", task)
        assert records(agent) == 0


def test_a_source_without_a_delivery_is_refused(tmp_path: Path) -> None:
    BROKER.delivery = "sometimes"  # type: ignore[assignment]
    center = Center(tmp_path)
    center.port = 1
    with refused(InvalidConfig, "streams.flights.sources.numbers", "sometimes"):
        open_agent(config(tmp_path, center, SOURCES))
