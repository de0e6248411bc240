"""The conformance tests of sources: promises that every source must keep. They need only a test runner.

Authors of sources run these tests in their own test suites. The agent never imports this module.

    import pytest
    from edge.testing import CASES, Subject

    class Table(Subject):
        entry = {"sqlite": {"path": "rows.db", "table": "events"}}

        def produce(self, records): ...

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    def test_a_table_keeps_the_promises_of_a_source(case, tmp_path):
        case(Table(tmp_path), tmp_path)

A case runs the real agent without a center, on a new asyncio loop, and fails with AssertionError. After a kill, as
after ``kill -9``, only the synced part of the journal exists.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from edge.agent import Agent, open_agent
from edge.config import parse_config
from edge.core.events import Configured
from edge.durability import PAYLOAD, journal
from edge.process import now_ms
from edge.records import Position
from edgewater.base.streams import Delivery
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef

STREAM = "events"
SECRET = "s3cret-of-the-test"
TIMEOUT_S = 60.0  # limit: the time of a case
CANCEL_S = 2.0  # limit: the end of a source
IDLE_MS = 1_000  # limit: the time of a case
_COUNT = QuerySpec.from_mapping(
    {"name": "n", "from": STREAM, "measures": {"n": "count()"}, "window": {"tumbling": "1h"}}
)


class Subject(ABC):
    """A source under test, and the system that it reads.

    Attributes:
        entry: the source as in ``edge.yaml``, such as ``{"sqlite": {"path": …}}``. A password in it is `SECRET`.
        columns: the columns of the stream. `record` returns their values, and the event time in the column ``at`` (ms).
        survives_kills: whether the source promises that each record counts once, also after a crash of the agent.
    """

    entry: dict[str, Any]
    columns: ClassVar[dict[str, str]] = {"x": "int64"}
    survives_kills: ClassVar[bool] = True

    @abstractmethod
    def produce(self, records: Sequence[dict[str, Any]]) -> None:
        """Passes records to the system that the source reads, and returns when the system has them."""

    def cut(self) -> None:
        """Makes the system unreachable. A subject without this method skips the cases of failures."""
        raise NotImplementedError

    def mend(self) -> None:
        """Ends `cut`. The system must still have its records."""
        raise NotImplementedError

    def record(self, number: int) -> dict[str, Any]:
        return {"x": number, "at": now_ms()}


class _Run:
    """Agents that run on one state, one after the other."""

    def __init__(self, subject: Subject, directory: Path) -> None:
        self.subject = subject
        self.produced = 0
        self._config = parse_config(
            {
                "edge": "conformance",
                "center": {"address": "127.0.0.1:1"},
                "state_dir": str(directory / "state"),
                "http": {"listen": "127.0.0.1:0"},
                "streams": {
                    STREAM: {
                        "columns": subject.columns,
                        "time": {"column": "at"},
                        "idle": f"{IDLE_MS}ms",
                        "sources": [subject.entry],
                    }
                },
                "limits": {"checkpoint": "1h"},
            }
        )
        self.agent: Agent = self._opened()
        self._task: asyncio.Task[None] | None = None

    def _opened(self) -> Agent:
        agent = open_agent(self._config)
        if not agent.durable.core.configured:
            agent.durable.handle(Configured(((QueryRef("n", 1), _COUNT),)))
            agent.durable.sync()
            agent.outbox.configured.set()
        return agent

    def start(self) -> None:
        self._task = asyncio.create_task(self.agent.run(asyncio.Event()))

    async def produce(self, count: int) -> None:
        records = [self.subject.record(self.produced + n) for n in range(count)]
        await asyncio.to_thread(self.subject.produce, records)
        self.produced += count

    @property
    def counted(self) -> int:
        return self.agent.durable.core.streams[STREAM].records

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not condition():
                    if self._task is not None and self._task.done():
                        self._task.result()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(
                f"no {what} within {TIMEOUT_S:g} s; counted {self.counted}; {self.agent.missing()}"
            ) from None

    async def kill(self) -> None:
        """Ends the agent without a last sync and without a checkpoint, and opens the next agent."""
        await self._end()
        self.agent = self._opened()

    async def _end(self) -> float:
        async def nothing() -> None:
            return

        began_s = time.monotonic()
        self.agent.commit.checkpoint = nothing  # type: ignore[method-assign]
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=TIMEOUT_S)
            assert self._task.done(), "the agent does not end"
        else:
            self.agent.durable.close()
        return time.monotonic() - began_s

    @property
    def may_repeat(self) -> bool:
        """Whether a source is at-least-once, so that a crash or a lost connection may count its records twice."""
        return any(source.delivery is Delivery.AT_LEAST_ONCE for source in self.agent.sources)

    def positions_on_disk(self) -> dict[str, Position]:
        """Returns the last position of each source in the journal, as far as the journal stores the source's
        records.
        """
        found: dict[str, Position] = {}
        for path in sorted(self.agent.durable.directory.glob("journal-*.log")):
            for record in journal.scan(path.read_bytes()).records:
                if record.kind == PAYLOAD:
                    head = json.loads(record.payload[4 : 4 + int.from_bytes(record.payload[:4], "little")])
                    if "end" in head:
                        found[head["source"]] = head["end"]
        return found


def _runs(case: Callable[[_Run], Awaitable[None]]) -> Callable[[Subject, Path], None]:
    def run(subject: Subject, directory: Path) -> None:
        async def main() -> None:
            each = _Run(subject, directory)
            try:
                await case(each)
            finally:
                await each._end()

        asyncio.run(main())

    run.__name__, run.__doc__ = case.__name__, case.__doc__
    return run


def _can_be_cut(subject: Subject) -> bool:
    return type(subject).cut is not Subject.cut


@_runs
async def each_record_counts_once_through_kills(run: _Run) -> None:
    """Kills the agent several times while it reads, if `Subject.survives_kills`. Each record must count once.

    Records of an at-least-once source may count again.
    """
    run.start()
    for kill in range(5 if run.subject.survives_kills else 0):
        before = run.produced
        await run.produce(500)
        await run.until(lambda: run.counted > before + 60 * kill, "record")  # noqa: B023
        await run.kill()
        assert run.counted <= run.produced or run.may_repeat, "records count twice after a kill"
        run.start()
    await run.produce(10)
    await run.until(lambda: run.counted >= run.produced, "last record")
    assert run.counted == run.produced or run.may_repeat, "records count twice"
    assert not run.agent.durable.state.losses, f"losses are stated: {run.agent.durable.state.losses}"


@_runs
async def committed_is_called_after_the_journal_is_on_disk(run: _Run) -> None:
    """Compares each committed position with the journal on disk. The journal must have it already."""
    seen: list[tuple[str, Position, Position | None]] = []
    for source in run.agent.sources:
        committed = source.committed

        def noted(position: Position, name: str = source.name, committed: Any = committed) -> None:
            seen.append((name, position, run.positions_on_disk().get(name)))
            committed(position)

        source.committed = noted  # type: ignore[method-assign]
    run.start()
    await run.produce(50)
    await run.until(lambda: run.counted >= run.produced, "last record")
    await asyncio.sleep(0.2)
    for name, position, on_disk in seen:
        assert on_disk is not None, f"{name}: {position} is committed, and the journal on disk has none"


@_runs
async def reading_ends_soon_when_it_is_cancelled(run: _Run) -> None:
    """Cancels the agent while the source waits for records. The agent must end within `CANCEL_S` + 2 s."""
    run.start()
    await run.produce(5)
    await run.until(lambda: run.counted >= run.produced, "last record")
    took_s = await run._end()
    run._task = None
    assert took_s < CANCEL_S + 2, f"it took {took_s:.1f} s"
    run.agent = run._opened()


@_runs
async def names_are_stable_and_nothing_shows_the_secret(run: _Run) -> None:
    """Opens the sources twice. Their names must be equal, and no name, message or log may contain `SECRET`."""
    shown = _Shown()
    logging.getLogger().addHandler(shown)
    try:
        names = [source.name for source in run.agent.sources]
        assert len(set(names)) == len(names), f"sources have equal names: {names}"
        run.start()
        await run.produce(5)
        await run.until(lambda: run.counted >= run.produced, "last record")
        await run.kill()
        assert [source.name for source in run.agent.sources] == names, "the names differ after a restart"
        assert not any(SECRET in text for text in (*names, *run.agent.missing(), *shown.texts))
    finally:
        logging.getLogger().removeHandler(shown)


@_runs
async def an_unreachable_system_costs_no_record_and_is_named(run: _Run) -> None:
    """Cuts the system off while the agent runs, and restores it. No record may be lost. Skipped without
    `Subject.cut`.
    """
    if not _can_be_cut(run.subject):
        return
    run.start()
    run.agent.reading.retry_s = 0.2
    await run.produce(5)
    await run.until(lambda: run.counted >= run.produced, "last record")
    await asyncio.to_thread(run.subject.cut)
    await run.until(lambda: any(reason.startswith("source ") for reason in run.agent.missing()), "failure in /readyz")
    assert not any(SECRET in reason for reason in run.agent.missing())
    await asyncio.to_thread(run.subject.mend)
    await run.produce(5)
    await run.until(lambda: run.counted >= run.produced, "record after the failure")
    assert run.counted == run.produced or run.may_repeat, "records count twice"


@_runs
async def windows_close_while_the_source_is_silent(run: _Run) -> None:
    """Waits after the last record. The idle rule must move the watermark beyond it, however long the source waits."""
    run.start()
    await run.produce(5)
    await run.until(lambda: run.counted >= run.produced, "last record")
    silent_ms = now_ms()
    stream = run.agent.durable.core.streams[STREAM]
    await run.until(lambda: (stream.watermark_ms or 0) > silent_ms, "watermark beyond the last record")


class _Shown(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


CASES: tuple[Callable[[Subject, Path], None], ...] = (
    each_record_counts_once_through_kills,
    committed_is_called_after_the_journal_is_on_disk,
    reading_ends_soon_when_it_is_cancelled,
    names_are_stable_and_nothing_shows_the_secret,
    an_unreachable_system_costs_no_record_and_is_named,
    windows_close_while_the_source_is_silent,
)
