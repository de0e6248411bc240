"""`MergeLoop`: the shell of `LoopCore`. One thread plans, applies and sweeps; a `Merger` runs the tasks."""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial

from center.catalog import SetAside
from center.job import loop_core
from center.job.batch_applier import BatchApplier, Times
from center.job.delta_sweep import DeltaSweep
from center.job.loop_core import Effect, Event, Fault, Lane, LoopCore, QueryFault, Run
from center.job.merge import Part, PartMerged, PartOutcome, SkipKind, Skipped, StorageFailed, TooLargeHere
from center.job.merger import Merger, SparkLost, TasksFailed
from center.job.planner import FramePlanner, divide
from center.results import LeaseLost
from center.storage.delta_segments import SpanMerge
from edgewater.base.errors import StorageError, named

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Merge:
    """A plan whose tasks run or have returned."""

    run: Run
    began_s: float
    began_ms: int
    merged_ms: int = 0
    skipped: tuple[Skipped, ...] = ()
    outcomes: tuple[PartMerged, ...] = ()


class MergeLoop:
    """Applies the frames of the log, as long as this driver leads. Any thread may call `wake`.

    Args:
        parallelism: number of tasks of a large plan.
        retention: drops the frames that were applied; its failures are logged.
        segments: sweeps the results that are not applied.
        now_ms, monotonic: wall clock, and clock in seconds.
    """

    def __init__(
        self,
        planner: FramePlanner,
        applier: BatchApplier,
        merger: Merger,
        parallelism: int,
        retention: Callable[[], object],
        segments: DeltaSweep,
        *,
        now_ms: Callable[[], int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = LoopCore()
        self._planner, self._applier, self._merger = planner, applier, merger
        self._parallelism, self._retention, self._segments = parallelism, retention, segments
        self._now_ms, self._monotonic = now_ms, monotonic
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._merges: dict[int, _Merge] = {}
        self._answers: dict[int, list[SpanMerge]] = {}
        self._sweep_failures = 0
        self.applied = 0
        """Number of plans that were applied."""
        self.planned = 0
        """Number of plans that looks at the index have made."""

    def wake(self) -> None:
        """The index may have new frames."""
        self._events.put(loop_core.Woken())

    def want_answers(self, key: str) -> None:
        """Answers of a query are due that tasks must merge first."""
        self._events.put(loop_core.AnswersWanted(key))

    def begin_term(self) -> None:
        """This driver leads from now on, except the queries that the applier leaves out."""
        self._merges.clear()
        self.handle(loop_core.TermBegan(frozenset(self._applier.set_aside)))
        for key in self._applier.writer.awaited():
            self.handle(loop_core.AnswersWanted(key))

    def end_term(self) -> None:
        self._merges.clear()
        self.handle(loop_core.TermEnded())

    def turn(self, wait_s: float = 0.0) -> bool:
        """Waits for an event, and handles all events that have come. Called by the loop's thread.

        Returns:
            Whether there was an event.

        Raises:
            LeaseLost: this driver does not lead any more: call `end_term`.
            SparkLost: no task runs any more.
        """
        deadline_s = self.core.next_deadline()
        if deadline_s is not None:
            wait_s = min(wait_s, max(0.0, deadline_s - self._monotonic()))
        events = self._drain(wait_s)
        for event in events:
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, loop_core.MergeFailed):
                log.error("plan %d is not merged: %s", event.number, event.reason)
                self._applier.count_failure("merge")
            if not isinstance(event, loop_core.Woken):
                self.handle(event)
        if events or (deadline_s is not None and deadline_s <= self._monotonic()):
            self.handle(loop_core.Woken())  # one look for all of them
        self._merges = {number: merge for number, merge in self._merges.items() if self.core.has_plan(number)}
        for number in [number for number in list(self._answers) if not self.core.has_plan(number)]:
            del self._answers[number]
        return bool(events)

    def _drain(self, wait_s: float) -> list[Event | BaseException]:
        events: list[Event | BaseException] = []
        try:
            events.append(self._events.get(timeout=wait_s) if wait_s > 0 else self._events.get_nowait())
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def handle(self, event: Event) -> None:
        """Handles an event, and the answers of its effects before its later effects. Raises LeaseLost."""
        effects = deque(self.core.handle(event, self._monotonic()))
        while effects:
            answer = self._do(effects.popleft())
            if answer is not None:
                effects.extendleft(reversed(self.core.handle(answer, self._monotonic())))

    def _do(self, effect: Effect) -> Event | None:
        match effect:
            case loop_core.Look():
                return self._look(effect)
            case loop_core.Submit(number, run, lane):
                return self._submit(number, run, lane)
            case loop_core.Apply(number, run):
                return self._apply(number, run)
            case loop_core.SetFrameAside(number, run, reason):
                now_ms = self._now_ms()
                apply_loss = partial(self._applier.apply_loss, run, reason, Times(now_ms, now_ms))
                return self._applied(number, apply_loss)
            case loop_core.Probe(number):
                began_s = self._monotonic()
                self._merger.probe().add_done_callback(partial(self._probed, number, began_s))
            case loop_core.Cancel(number):
                self._merger.cancel(number)
            case loop_core.Pause(key, reason):
                self._pause(key, reason)
            case loop_core.MergeAnswers(number, key):
                return self._merge_answers(number, key)
            case loop_core.GiveAnswers(number, key):
                return self._give(number, key)
            case loop_core.Sweep():
                self._try_sweep()
        return None

    def _look(self, effect: loop_core.Look) -> Event:
        if self._segments.is_full:
            self._try_sweep()
        try:
            self._segments.require_room()
            looked = self._planner.look(effect)
        except Exception as exc:
            return loop_core.LookFailed(named(exc))
        self.planned += looked.run is not None or bool(looked.heavy)
        return looked

    def _submit(self, number: int, run: Run, lane: Lane) -> Event | None:
        try:
            quarantined = self._applier.quarantined()
        except StorageError as exc:
            return loop_core.MergeFailed(number, Fault.SYSTEM, named(exc))
        merge = self._merges[number] = _Merge(run, self._monotonic(), self._now_ms())
        read = [frame for frame in run.frames if (frame[0], frame[1].position) not in quarantined]
        merge.skipped = tuple(
            Skipped(key, e.position, SkipKind.QUARANTINED, quarantined[key, e.position])
            for key, e in run.frames
            if (key, e.position) in quarantined
        )
        # A heavy query leaves a core to the others.
        tasks = {Lane.LIGHT: self._parallelism, Lane.HEAVY: max(1, self._parallelism - 1), Lane.SUSPECT: 1}
        parts = divide(read, tasks[lane]) if read else []
        return self._start(number, parts, lane, f"{len(read)} frames of {len(run.through)} queries")

    def _merge_answers(self, number: int, key: str) -> Event | None:
        writer = self._applier.writer
        try:
            parts = writer.parts(key, writer.segment_prefix(number))
        except StorageError as exc:
            return loop_core.MergeFailed(number, Fault.SYSTEM, named(exc))
        return self._start(number, parts, Lane.ANSWER, f"{len(parts)} merges of query {key}")

    def _start(self, number: int, parts: Sequence[Part], lane: Lane, what: str) -> Event | None:
        """Starts the tasks of a plan. Without parts, they have returned."""
        if not parts:
            return self._returned(number, [])
        prefix = self._applier.writer.segment_prefix(number)
        tasks = self._merger.submit(number, parts, lane, f"plan {number}, {lane}: {what}", prefix)
        tasks.add_done_callback(partial(self._tasks_done, number))
        return None

    def _give(self, number: int, key: str) -> Event:
        def give() -> Event:
            self._applier.writer.give(key, self._answers.get(number, ()))
            return loop_core.Applied(number)

        return self._written(number, f"the answers of query {key}", give)

    def _tasks_done(self, number: int, tasks: Future[list[PartOutcome]]) -> None:
        """Called by a thread of the merger."""
        try:
            self._events.put(self._returned(number, tasks.result()))
        except TasksFailed as exc:
            self._events.put(loop_core.MergeFailed(number, exc.fault, str(exc)))
        except SparkLost as exc:
            self._events.put(exc)
        except (Exception, CancelledError) as exc:
            self._events.put(loop_core.MergeFailed(number, Fault.SYSTEM, named(exc)))

    def _returned(self, number: int, outcomes: Iterable[PartOutcome]) -> Event:
        merged, answers = list[PartMerged](), list[SpanMerge]()
        for outcome in outcomes:
            match outcome:
                case StorageFailed(reason):
                    return loop_core.MergeFailed(number, Fault.SYSTEM, reason)
                case TooLargeHere(reason):
                    return loop_core.MergeFailed(number, Fault.FRAMES, reason)
                case PartMerged():
                    merged.append(outcome)
                case SpanMerge():
                    answers.append(outcome)
        if answers:
            self._answers[number] = answers
        merge = self._merges.get(number)
        if merge is not None:  # of this term
            merge.outcomes, merge.merged_ms = (*merged, PartMerged(skipped=merge.skipped)), self._now_ms()
        return loop_core.Merged(number)

    def _probed(self, number: int, began_s: float, task: Future[None]) -> None:
        """Called by a thread of the merger."""
        exc = None if task.cancelled() else task.exception()
        works = not task.cancelled() and exc is None and self._monotonic() - began_s < loop_core.PROBE_S
        self._events.put(exc if isinstance(exc, SparkLost) else loop_core.Probed(number, works))

    def _apply(self, number: int, run: Run) -> Event:
        merge = self._merges.pop(number)
        self._planner.done(merge.run, self._monotonic() - merge.began_s)
        times = Times(merge.began_ms, merge.merged_ms)
        answer = self._applied(number, partial(self._applier.apply, run, merge.outcomes, times))
        took_s = self._monotonic() - merge.began_s
        log.debug("plan %d: %d frames, applied after %.3f s", number, len(run.frames), took_s)
        return answer

    def _applied(self, number: int, apply: Callable[[], dict[str, QueryFault]]) -> Event:
        def counted() -> Event:
            failed = apply()
            self.applied += 1
            return loop_core.Applied(number, failed)

        return self._written(number, f"plan {number}", counted)

    def _written(self, number: int, what: str, write: Callable[[], Event]) -> Event:
        """Returns the event of a transaction; `NotApplied` if it fails while this driver leads."""
        try:
            return write()
        except LeaseLost:
            raise
        except Exception as exc:
            log.warning("%s: not written: %s", what, named(exc))
            self._applier.count_failure("apply")
            return loop_core.NotApplied(number, named(exc))

    def _pause(self, key: str, reason: str) -> None:
        try:
            self._applier.pause(key, reason)
        except StorageError as exc:  # its alarm is missing; a next driver finds the cause again
            log.warning("query %s is paused, which is not stored: %s", key, exc)
            self._applier.leave_out(key, SetAside.PAUSED)

    def _try_sweep(self) -> None:
        try:
            self._retention()
            self._segments.run(self._now_ms(), self.core.has_plan)
            self._sweep_failures = 0
        except LeaseLost:
            raise
        except Exception as exc:
            self._sweep_failures += 1
            if self._sweep_failures & (self._sweep_failures - 1) == 0:
                log.warning("retention failed, %d times in a row: %s", self._sweep_failures, named(exc))
