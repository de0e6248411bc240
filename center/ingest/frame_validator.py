"""Checks frames. The event loop checks a small frame that comes alone; threads check all other frames.

A check of a small frame takes 0.1 ms. In a thread, the check waits for the interpreter's lock after each decompression.
On a busy gateway this wait takes longer than the check (`docs/decisions/0001-frame-log.md`). After a part of a
session's frame was refused, threads check all frames of the session.

Threads check the frames of each session in order. Frames that wait together are checked in one turn of at most
`TURN_BYTES`; then it is the next session's turn. One thread unpacks and checks all larger frames: they wait for each
other, and smaller frames do not wait for them. While smaller frames come, it rests half of the time
(`bench.scale --only heavy`: without that, ten small queries beside 280 MB had a 95th percentile of 3.1 times of alone;
with it 1.5 to 1.7). Checked frames are passed on as fast as the edge's share of the center's
work allows (`edgewater/guard/frame_work.py`), over all sessions of the edge.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import pyarrow as pa

from center.ingest.assignments import AssignmentPlan
from center.ingest.frame_check import CheckedFrame, FrameCheck
from center.ingest.open_windows import OpenWindows
from center.ingest.stream_rules import StreamRules
from center.ingest.validation import Hello
from edgewater.base.errors import StorageError
from edgewater.base.streams import EdgeId
from edgewater.guard.frame_work import BYTES_PER_UNIT
from edgewater.model.edge_records import StreamRecord
from edgewater.runtime.token_bucket import TokenBucket
from edgewater.wire import Frame, QueryRef

P = ParamSpec("P")
Result = TypeVar("Result")
THREADS = 2  # limit: processor time beside the event loop
TURN_BYTES = 256 << 10  # limit: time of a turn
"""Limit of the bytes of one turn before compression. A turn takes a few milliseconds. A larger frame has a turn of its
own, of up to a tenth of a second."""
LOOP_BYTES = 4 << 10  # limit: time of a turn of the event loop
"""The largest frame that the event loop checks, compressed or not. At worst, with 2,048 closes, the check takes 5 ms,
and the frame uses up 0.3 s of the edge's share."""

SMALL_S = 1.0  # limit: small frames come each second, or so rarely that they may wait.
REFUSED_BYTES_PER_UNIT = 32
"""Bytes of a refused body that count as one unit of work. Only the gateway spends time on them; the job does not."""

OnChecked = Callable[[Frame, int, CheckedFrame | Exception], None]
"""(frame, wall time of its arrival, the result or the error)"""


class RestingThread(ThreadPoolExecutor):
    """One thread. While small frames come, it rests for as long as it has worked, so that half of a core's time is
    theirs.

    Args:
        now_s: monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep):
        super().__init__(1, "large-frame-check")
        self._now_s, self._sleep = now_s, sleep
        self._small_at_s, self._rests_until_s = -math.inf, 0.0

    def note_small(self) -> None:
        """Notes that a small frame has come."""
        self._small_at_s = self._now_s()

    def submit(self, fn: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        return super().submit(lambda: self._after_rest(fn, *args, **kwargs))

    def _after_rest(self, fn: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        now_s = self._now_s()
        if now_s < self._rests_until_s and now_s - self._small_at_s < SMALL_S:
            self._sleep(self._rests_until_s - now_s)
        began_s = self._now_s()
        try:
            return fn(*args, **kwargs)
        finally:
            ended_s = self._now_s()
            self._rests_until_s = ended_s + ended_s - began_s


class FrameValidator:
    """Checks frames against their queries.

    Args:
        read_plan: returns the newest plan, given the one in use; blocks.
        open_windows: as in `OpenWindows`.

    Attributes:
        plan: the queries; the gateway sets it when the catalog changes.
    """

    def __init__(
        self, rules: StreamRules, read_plan: Callable[[AssignmentPlan], AssignmentPlan], open_windows: int
    ) -> None:
        self._rules = rules
        self._max_open = open_windows
        self._open: dict[QueryRef, dict[EdgeId, OpenWindows]] = {}
        self._lock = threading.Lock()
        self._read_plan = read_plan
        self._checks: dict[QueryRef, tuple[Mapping[str, pa.DataType], FrameCheck]] = {}
        self._threads = ThreadPoolExecutor(THREADS, "frame-check")
        self._thread_of_large = RestingThread()
        self.plan = AssignmentPlan(-1, ())

    def close(self) -> None:
        for threads in (self._threads, self._thread_of_large):
            threads.shutdown(wait=False, cancel_futures=True)

    def threads(self, plain_bytes: int) -> ThreadPoolExecutor:
        """Returns the threads for frames of so many bytes before compression."""
        if plain_bytes > TURN_BYTES:
            return self._thread_of_large
        self.note_small()
        return self._threads

    def note_small(self) -> None:
        """Notes that a small frame has come: the thread of large frames rests."""
        self._thread_of_large.note_small()

    def is_ready(self, frame: Frame) -> bool:
        """Whether the check of a frame needs no new plan and no import, because its query has had a frame before."""
        return frame.query in self.plan.specs and frame.query in self._checks

    def check(self, hello: Hello, frame: Frame, now_ms: int) -> CheckedFrame:
        """Checks a frame of an edge; blocks. Raises CorruptFrame, StorageError."""
        plan = self.plan
        if frame.query not in plan.specs:
            plan = self._read_plan(plan)
        spec = plan.specs.get(frame.query)
        stream = None if spec is None else _stream(plan, hello, spec.stream)
        if spec is None or stream is None:
            frame.plain_body()
            return CheckedFrame.lost()  # the group commit discards or refuses the frame
        # The types are the types of the stream at all edges. Neither the first edge nor a lying edge may decide them.
        columns = plan.columns.get(spec.stream, {})
        if plan.is_retired(hello.edge) or hello.edge not in plan.edges:
            columns = {**stream.columns, **columns}
        held = self._checks.get(frame.query)
        if held is None or held[0] != columns:
            held = columns, FrameCheck(spec, columns)
            # The mapping is replaced, not changed, because another thread may read it. Checks of deleted queries are
            # removed.
            self._checks = {ref: c for ref, c in self._checks.items() if ref in plan.specs} | {frame.query: held}

        def too_open(through_ms: int, starts: list[int]) -> set[int]:
            with self._lock:
                edges = self._open.get(frame.query)
                if edges is None:
                    self._open = {ref: kept for ref, kept in self._open.items() if ref in plan.specs}
                    edges = self._open[frame.query] = {}
                if hello.edge not in edges:
                    edges[hello.edge] = OpenWindows(spec, self._max_open)
                return edges[hello.edge].refuse(hello.incarnation, frame.seq, through_ms, starts)

        return held[1].check(frame, self._rules.latest_ms(stream, now_ms), too_open)


class SessionFrames:
    """The frames of one session that wait for their check, or wait to be passed on.

    Args:
        share: the edge's share of the center's work, in units of work. Its clock is the event loop's time.
        on_checked: called on the event loop for each frame, in order.
        on_delayed: called with the seconds for which the next frame waits for `share`.

    Attributes:
        is_delayed: a frame waits for `share`.
    """

    def __init__(
        self,
        validator: FrameValidator,
        hello: Hello,
        share: TokenBucket,
        on_checked: OnChecked,
        on_delayed: Callable[[float], None],
    ) -> None:
        self._validator = validator
        self._hello = hello
        self._share = share
        self._on_checked = on_checked
        self._on_delayed = on_delayed
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Frame, int]] = deque()
        self._checked: deque[tuple[Frame, int, CheckedFrame | Exception]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._running = self._closed = self._was_refused = False

    @property
    def is_delayed(self) -> bool:
        return self._timer is not None

    def put(self, frame: Frame, now_ms: int) -> None:
        self._waiting.append((frame, now_ms))
        if not self._running:
            # The check starts later, so that the other frames of the message are in the same turn.
            self._running = True
            self._loop.call_soon(self._take_turn)

    def close(self) -> None:
        """Called when the session ends. Its frames that would wait for `share` fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._pass_on()

    def _take_turn(self) -> None:
        if self._is_small():
            self._validator.note_small()
            self._checked.extend(self._check([self._waiting.popleft()]))
            self._pass_on()
            return
        turn, size = list[tuple[Frame, int]](), 0
        while self._waiting and (not turn or size + self._waiting[0][0].raw_bytes <= TURN_BYTES):
            turn.append(self._waiting.popleft())
            size += turn[-1][0].raw_bytes
        self._loop.run_in_executor(self._validator.threads(size), self._check, turn).add_done_callback(self._deliver)

    def _is_small(self) -> bool:
        """Whether only one frame waits, and the event loop may check it."""
        if self._was_refused or len(self._waiting) != 1:
            return False
        frame = self._waiting[0][0]
        return max(frame.raw_bytes, frame.wire_bytes) <= LOOP_BYTES and self._validator.is_ready(frame)

    def _check(self, turn: list[tuple[Frame, int]]) -> list[tuple[Frame, int, CheckedFrame | Exception]]:
        """Checks frames. An error is returned as a result."""
        done: list[tuple[Frame, int, CheckedFrame | Exception]] = []
        for frame, now_ms in turn:
            try:
                done.append((frame, now_ms, self._validator.check(self._hello, frame, now_ms)))
            except Exception as exc:
                done.append((frame, now_ms, exc))
        return done

    def _deliver(self, turn: asyncio.Future[list[tuple[Frame, int, CheckedFrame | Exception]]]) -> None:
        if not turn.cancelled():
            self._checked.extend(turn.result())
            self._pass_on()

    def _pass_on(self) -> None:
        self._timer = None
        while self._checked:
            delay_s = self._share.delay_s(self._loop.time())
            if delay_s > 0:
                self._delay(delay_s)
                return
            frame, now_ms, result = self._checked.popleft()
            self._was_refused |= _is_refused(result)
            self._share.consume(_work(frame, result), self._loop.time())
            self._on_checked(frame, now_ms, result)
        self._running = bool(self._waiting)
        if self._running:
            self._take_turn()

    def _delay(self, delay_s: float) -> None:
        if not self._closed:
            self._on_delayed(delay_s)
            self._timer = self._loop.call_later(delay_s, self._pass_on)
            return
        dropped = [*((frame, now_ms) for frame, now_ms, _ in self._checked), *self._waiting]
        self._checked.clear()
        self._waiting.clear()
        self._running = False
        for frame, now_ms in dropped:
            self._on_checked(frame, now_ms, StorageError("the session has ended"))


def _work(frame: Frame, result: CheckedFrame | Exception) -> int:
    """Returns the units of work by which a frame reduces its edge's share."""
    by_size = frame.raw_bytes // (REFUSED_BYTES_PER_UNIT if _is_refused(result) else BYTES_PER_UNIT)
    return max(1, by_size) if isinstance(result, Exception) else max(1, by_size, result.work, result.checking)


def _is_refused(result: CheckedFrame | Exception) -> bool:
    return isinstance(result, Exception) or result.reason is not None


def _stream(plan: AssignmentPlan, hello: Hello, name: str) -> StreamRecord | None:
    """Returns the stream as the edge serves it now, or served it before."""
    known = plan.edges.get(hello.edge)
    former = known.former_streams if known is not None else ()
    return next((s for s in (*hello.streams, *former) if s.name == name), None)
