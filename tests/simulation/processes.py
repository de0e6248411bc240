"""The programs of a world: production code, started as its own shell starts it, on virtual machines."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random  # noqa: TID251  (a type)
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import edge.agent
from center.budgets.processing_delay import AnswerMargin
from center.catalog import Catalog
from center.config import CenterConfig
from center.ingest.gateway import Gateway, GatewayBounds
from center.job.admission import BatchLimits, LeastSlack, PendingFrames
from center.job.batch_applier import BatchApplier, Times
from center.job.delta_sweep import DeltaSweep
from center.job.frame_retention import FrameRetention
from center.job.job_parts import JobParts
from center.job.leadership import Leadership
from center.job.ledger_writer import LedgerWriter
from center.job.loop_core import Fault, Lane, QueryFault, Run
from center.job.merge import MergeTask, Part, PartMerged, PartOutcome
from center.job.merge_loop import MergeLoop
from center.job.merger import TasksFailed
from center.job.metrics import JobMetrics
from center.job.planner import FramePlanner
from center.ledger import Ledger
from center.results import COSTLY_MS, LeaseLost, ResultStore
from center.storage.delta_segments import INLINE_BYTES, DeltaSegments, SpanPart
from center.storage.frame_log import FrameLog
from edge.config import parse_config
from edge.core.core import EdgeCore
from edge.core.events import Effect, Event, Ingested
from edge.core.memory import SliceMemoryLimits
from edge.records import Chunk, Position, PushId, Rejection, Rejections
from edgewater.base.errors import OutdatedState, StorageError
from edgewater.base.streams import TIME_COLUMN, Delivery, EdgeId
from edgewater.wire import QueryRef
from tests.simulation.scenario import COLUMN_NAMES, COLUMNS, STREAM, WRONG_TYPE, EdgePlan
from tests.simulation.virtual import Process

FILE = f"{STREAM}:file:log.ndjson"
PUSH_RETRY_S = 0.3
PUSH_ATTEMPTS = 40
JOB_POLL_S = 0.5
LEASE_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Rule:
    """What the core's rules are about one record of one query.

    Attributes:
        watermark_ms: of the stream, when the record was ingested.
    """

    before_query: bool
    too_late: bool
    late: bool
    watermark_ms: int


class Disk:
    """The records of one edge: a file that grows as its records are written, or what its clients push.

    Attributes:
        accepted: per id of a pushed record, whether a positive reply was received; absent: it was never ingested.
        seen: per record id and query that ran, by which rule the core counted the record when it last ingested it.
        came_ms: per record id, the watermark of the stream when the core last ingested it.
        watermark_ms: of the stream, at the last event of the core; None: there was none.
    """

    def __init__(self, plan: EdgePlan) -> None:
        self.plan = plan
        rows = plan.records
        columns = {name: pa.array([r.values.get(name) for r in rows], t) for name, t in COLUMNS.items()}
        self.batch = pa.record_batch({**columns, TIME_COLUMN: pa.array([r.event_ms for r in rows], pa.int64())})
        self.accepted: dict[int, bool] = {}
        self.seen: dict[int, dict[QueryRef, Rule]] = {}
        self.came_ms: dict[int, int] = {}
        self.watermark_ms: int | None = None

    def read(self, row: int, end: int) -> tuple[pa.RecordBatch, tuple[Rejection, ...]]:
        """The valid records of these rows, and the others as a decoder rejects them."""
        rows, rejections = self.plan.records[row:end], Rejections()
        batch = self.batch.slice(row, end - row).filter(pa.array([r.rejected is None for r in rows], pa.bool_()))
        for record in rows:
            if record.rejected is not None:
                rejections.add(record.rejected, "", "")
                if record.rejected is WRONG_TYPE:
                    rejections.add_times(record.rejected, np.array([record.event_ms]))
        rejections.place(0, 1 << 62, batch.column(TIME_COLUMN).to_numpy())
        return batch, rejections.as_tuple()

    def written(self, at_s: float) -> int:
        return sum(r.at_s <= at_s for r in self.plan.records)


class FollowedFile:
    """A `Source` over a file that grows; it ends when its writer has ended."""

    replayable = True
    delivery = Delivery.EXACTLY_ONCE

    def __init__(self, disk: Disk, process: Process, idle: Callable[[str], AbstractContextManager[None]]) -> None:
        self.name, self.stream = FILE, STREAM
        self._disk, self._process, self._idle = disk, process, idle

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        loop, row = self._process.loop, position["row"] if position else 0
        total = self._disk.batch.num_rows
        while row < total:
            written = self._disk.written(loop.time())
            if row >= written:
                with self._idle(self.name):
                    await asyncio.sleep(max(0.01, self._disk.plan.records[row].at_s - loop.time()))
                continue
            end = min(written, row + self._process.rng.choice((1, 5, 1000)))
            yield self._chunk(row, end)
            row = end

    async def backfill(self, position: Position | None, until: Position, since_ms: int) -> AsyncGenerator[Chunk]:
        row = position["row"] if position else 0
        while row < until["row"]:
            end = min(until["row"], row + self._process.rng.choice((1, 5, 1000)))
            yield self._chunk(row, end)
            row = end
            await asyncio.sleep(0)

    def _chunk(self, row: int, end: int) -> Chunk:
        batch, rejected = self._disk.read(row, end)
        return Chunk(self.name, batch, {"row": row}, {"row": end}, rejected, 100 * (end - row))

    def reread(self, start: Position | None, end: Position) -> Chunk:
        return self._chunk(start["row"] if start else 0, end["row"])

    def fingerprints(self, position: Position, most: int) -> tuple[int, ...]:
        return ()


def observed_core(disk: Disk) -> type[EdgeCore]:
    """The production core; it also notes by which rule it counts each record."""

    class ObservedCore(EdgeCore):
        def handle(self, event: Event) -> list[Effect]:
            if isinstance(event, Ingested):
                watermark_ms = self.streams[event.stream].watermark_ms
                times = event.batch.column(TIME_COLUMN).to_pylist()
                ids = event.batch.column("id").to_pylist()
                for time, number in zip(times, ids, strict=True):
                    disk.came_ms[number] = watermark_ms
                    disk.seen[number] = {
                        ref: self._rule(pipeline.spec.window, pipeline, time, watermark_ms)
                        for ref, pipeline in self.queries.items()
                    }
            effects = super().handle(event)
            if STREAM in self.streams:
                disk.watermark_ms = self.streams[STREAM].watermark_ms
            return effects

        @staticmethod
        def _rule(window: Any, pipeline: Any, time: int, watermark_ms: int) -> Rule:
            start = window.slice_start(time)
            too_late = window.last_window_end(start) + pipeline.spec.lateness_ms <= watermark_ms
            return Rule(
                start < pipeline.store.since_ms, too_late, start + window.slice_ms <= watermark_ms, watermark_ms
            )

    return ObservedCore


class EdgeProgram:
    """`edge.agent`, without its HTTP server: pushes call what the server calls."""

    def __init__(self, process: Process, disk: Disk, state_dir: Path) -> None:
        self.process, self.disk = process, disk
        plan = disk.plan
        source: dict[str, Any] = {"http": {}} if plan.pushed else {"file": {"path": "log.ndjson"}}
        stream: dict[str, Any] = {"columns": COLUMN_NAMES, "time": {"column": "t"}, "sources": [source]}
        stream |= {"disorder": f"{plan.disorder_ms}ms", "idle": None if plan.idle_ms is None else f"{plan.idle_ms}ms"}
        stream |= {"constants": {} if plan.constant is None else {"k": plan.constant}}
        config = {"edge": plan.name, "state_dir": str(state_dir), "streams": {STREAM: stream}}
        self.agent = edge.agent.open_agent(parse_config({**config, "limits": {"checkpoint": "3s"}}))
        if plan.memory is not None:  # far below what a configuration may say
            self.agent.durable._memory = SliceMemoryLimits(*plan.memory)
        for loop in self.agent.loops().values():
            process.spawn(self._until_outdated(loop), plan.name)

    async def _until_outdated(self, loop: Coroutine[Any, Any, None]) -> None:
        """As `edgewater edge run`: an outdated state ends the agent, and the next one is a new incarnation."""
        try:
            await loop
        except OutdatedState:
            await self.agent.commit.checkpoint()
            edge.agent.begin_anew(self.agent)
            self.process.kill("begins anew")

    async def push(self, row: int) -> None:
        """Pushes a record; no reply if the process is killed meanwhile."""
        agent, name = self.agent, f"{STREAM}:http"
        batch, rejected = self.disk.read(row, row + 1)
        push = PushId(*2 * (row.to_bytes(16, "little"),))
        await agent.accept(Chunk(name, batch, None, None, rejected, 100, push=push), STREAM)
        self.disk.accepted[self.disk.batch.column("id")[row].as_py()] = True

    def close(self) -> None:
        self.agent.durable.close()


class GatewayProgram:
    """`center.ingest`, with a virtual server in the place of gRPC's."""

    def __init__(self, process: Process, directory: Path) -> None:
        self.process = process
        self.catalog = Catalog(f"sqlite:///{directory}/catalog.db")
        bounds = GatewayBounds(poll_ms=500)
        self._log = FrameLog(directory / "log")
        self.gateway = Gateway(self.catalog, self._log, CenterConfig(), process.now_ms, bounds=bounds)
        process.spawn(self._start(), "gateway")

    async def _start(self) -> None:
        while True:
            try:
                await self.gateway.start("127.0.0.1:0")
                return
            except StorageError:
                await asyncio.sleep(0.5)

    def serves(self, edge: str) -> bool:
        """Returns whether the gateway has a session with the edge."""
        return self.process.alive and EdgeId(edge) in self.gateway.sessions

    def close(self) -> None:
        self.catalog.close()


class VirtualMerger:
    """A `Merger` on virtual machines: tasks take any time, end in any order, run twice, and die. Results may come after
    the driver has lost its lease, or for a plan that it has dropped. A task on an executor goes on when its driver is
    dead or deposed, and writes its segment then.

    Args:
        deaths: how often a worker dies when it has merged a plan, so that the plan's frames are merged again.
    """

    def __init__(self, process: Process, task: MergeTask, deaths: float) -> None:
        self._process, self._task, self._deaths = process, task, deaths
        self._rng = random.Random(f"tasks of {process.name} from {process.now_ms()}")

    def submit(
        self, number: int, parts: Sequence[Part], lane: Lane, description: str, prefix: str
    ) -> Future[list[PartOutcome]]:
        done: Future[list[PartOutcome]] = Future()
        copies = pickle.loads(pickle.dumps(list(parts)))
        frames = sum(0 if isinstance(part, SpanPart) else len(part) for part in copies)
        # Deaths of a frame that is alone, or of answers, would be their fault.
        is_safe = lane is Lane.ANSWER or (lane is Lane.SUSPECT and frames < 2)
        dies = not is_safe and self._process.rng.random() < self._deaths
        (self._executor() or self._process).spawn(self._run(done, prefix, copies, dies), f"plan {number}")
        return done

    def _executor(self) -> Process | None:
        """A machine that lives longer than the driver; None: the task ends with the driver, at any step."""
        driver = self._process
        if driver.steps_left is None or self._rng.random() < 0.5:
            return None
        return Process(
            f"executor of {driver.name}", driver.loop, driver.rng, driver.now_ms, lambda *_: None, driver._on_failure
        )

    async def _run(self, done: Future[list[PartOutcome]], prefix: str, parts: list[Part], dies: bool) -> None:
        rng = self._process.rng
        # At the end, while the world comes to rest, tasks take the usual time.
        is_slow = self._process.steps_left is not None and rng.random() < 0.3
        await asyncio.sleep(rng.uniform(0.1, 4.0) if is_slow else rng.uniform(0.01, 0.1))
        for _ in range(1 + (self._rng.random() < 0.1)):
            outcomes = await asyncio.to_thread(lambda: [self._task.merge(prefix, part) for part in parts])
        rng.shuffle(outcomes)
        if dies:
            done.set_exception(TasksFailed(Fault.FRAMES, "a worker was killed"))
        else:
            done.set_result(outcomes)

    def probe(self) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def cancel(self, number: int) -> None:
        """A cancelled task may end by itself."""

    def close(self) -> None:
        pass


class AnyAdmission(LeastSlack):
    """Admits few frames, some, or all."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(lambda _: None)
        self._rng = rng

    def admit(
        self, start: Mapping[str, int], last: Mapping[str, int], frames: PendingFrames, limits: BatchLimits
    ) -> dict[str, int]:
        return super().admit(start, last, frames, replace(limits, frames=self._rng.choice((1, 3, 1000))))


class ObservedApplier(BatchApplier):
    """The production's; all frames here are good, so only a database may fail."""

    process: Process

    def apply(self, run: Run, outcomes: Iterable[PartMerged], times: Times) -> dict[str, QueryFault]:
        try:
            failed = super().apply(run, outcomes, times)
        except (StorageError, LeaseLost):
            raise
        except Exception as exc:
            self.process.report_failure(exc)
            raise
        for key, fault in failed.items():
            self.process.report_failure(RuntimeError(f"{key}: {fault.reason}"))
        self.process.step("applied")
        return failed


class JobProgram:
    """`center.job` without Spark: its loop and its deadlines.

    One of several drivers leads by a lease; a single one needs none.
    """

    def __init__(self, process: Process, directory: Path, repeats: float, drivers: int) -> None:
        self.process = process
        url = f"sqlite:///{directory}/catalog.db"
        self.catalog = Catalog(url)
        rng = random.Random(f"segments of {process.name} from {process.now_ms()}")
        segments = DeltaSegments(directory / "log" / "deltas", inline_bytes=rng.choice((0, 500, INLINE_BYTES)))
        self.store = ResultStore(
            f"sqlite:///{directory}/results.db", costly_ms=process.rng.choice((0.0, COSTLY_MS)), segments=segments
        )
        metrics, self.ledger = JobMetrics(), Ledger(AnswerMargin(50))
        self.store.load_ledger(self.ledger)
        self._shared = shared = JobParts(self.catalog, self.store, metrics, process.now_ms)
        self._writer = LedgerWriter(self.ledger, shared)
        applier = ObservedApplier(self._writer, shared, directory / "log")
        applier.process = process
        planner = FramePlanner(
            self.catalog, self._writer.consumed, BatchLimits(), process.monotonic,
            partition=lambda: self.store.partition, admission=AnyAdmission(process.rng),
            heavy_bytes=process.rng.choice((1, 1000, 4 << 20)),
        )  # fmt: skip
        retention = FrameRetention(shared, FrameLog(directory / "log"), every_ms=4000)
        self._applier = applier
        self._loop = MergeLoop(
            planner, applier, VirtualMerger(process, MergeTask(directory / "log", segments), repeats), 2,
            lambda: retention.run(process.now_ms(), self.store.partition),
            DeltaSweep(shared, every_ms=4000), now_ms=process.now_ms, monotonic=process.monotonic,
        )  # fmt: skip
        self._writer.on_awaited = self._loop.want_answers
        self._terms = 0
        self._leadership: Leadership | None = None
        if drivers > 1:
            self._leadership = Leadership(
                shared, monotonic=process.monotonic, began=self._begin_term,
                lease_ms=3_000, drivers=drivers, owner=f"{process.name}:{process.now_ms()}|||",
            )  # fmt: skip
            process.spawn(self._lead(), "leadership")
        process.spawn(self._deadlines(), "deadlines")
        process.spawn(self._merge(), "loop")

    def _begin_term(self) -> None:
        self._applier.begin_term()
        self._writer.begin_term()
        self._terms += 1

    async def _lead(self) -> None:
        while True:
            await asyncio.to_thread(self._look_at_lease)
            await asyncio.sleep(LEASE_POLL_S)

    def _look_at_lease(self) -> None:
        assert self._leadership is not None
        self._leadership.step()
        self.process.step("lease")

    @property
    def leads(self) -> bool:
        return self._leadership is None or self._leadership.leads.is_set()

    async def _deadlines(self) -> None:
        while True:
            if not self.leads:
                await asyncio.sleep(JOB_POLL_S)
                continue
            await asyncio.to_thread(self._advance)
            due_ms = self.ledger.next_deadline()
            pause_s = JOB_POLL_S if due_ms is None else (due_ms - self.process.now_ms()) / 1000
            await asyncio.sleep(min(max(pause_s, 0.005), JOB_POLL_S))

    def _advance(self) -> None:
        with contextlib.suppress(LeaseLost):  # as in `DeadlineLoop`
            self._writer.advance()
        self.process.step("advanced")

    async def _merge(self) -> None:
        """As `Job._keep_merging`."""
        term = -1
        while True:
            await asyncio.sleep(self.process.rng.uniform(0.01, JOB_POLL_S))
            led, leads = self._terms, self.leads
            if leads and term != led:
                term = led
                await asyncio.to_thread(self._turn, self._loop.begin_term)
            elif not leads and term >= 0:
                term = -1
                await asyncio.to_thread(self._turn, self._loop.end_term)
            else:
                self._loop.wake()
                await asyncio.to_thread(self._turn, self._loop.turn)
            for frame in self.catalog.quarantine.frames():  # the frames here are all good
                self.process.report_failure(RuntimeError(f"{frame.key}, frame {frame.entry.position}: {frame.reason}"))

    def _turn(self, do: Callable[[], object]) -> None:
        try:
            do()
        except LeaseLost:
            self._loop.end_term()

    def segments(self) -> tuple[set[str], set[str]]:
        """Sweeps. Returns the segments that are left and belong to no plan, and the segments that rows name."""
        has_plan, own = self._loop.core.has_plan, self.store.partition.directory
        DeltaSweep(self._shared).run(self.process.now_ms(), has_plan)
        named, _ = self.store.named_segments()
        files = self.store.segments.files()
        return {f.name for f in files if f.name in named or f.partition != own or not has_plan(f.plan)}, named

    def close(self) -> None:
        self.store.close()
        self.catalog.close()
