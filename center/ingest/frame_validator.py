"""Checks frames in threads: the event loop parses nothing.

Each session's frames are checked in order, those that wait together in one turn of at most `TURN_BYTES`; then it is the
next session's turn. So an edge whose frames take long delays its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from center.catalog import StreamRecord
from center.ingest.assignments import AssignmentPlan
from center.ingest.frame_check import CheckedFrame, FrameCheck
from center.ingest.stream_rules import StreamRules
from center.ingest.validation import Hello
from edgewater.wire import Frame, QueryRef

THREADS = 2
TURN_BYTES = 256 << 10
"""Before compression: a few milliseconds, or one frame."""

OnChecked = Callable[[Frame, int, CheckedFrame | Exception], None]
"""(frame, wall time of its arrival, the result or the error)"""


class FrameValidator:
    """Checks frames against their queries.

    Args:
        read_plan: returns the newest plan, given the one in use; blocks.

    Attributes:
        plan: the queries; the gateway sets it when the catalog changes.
    """

    def __init__(self, rules: StreamRules, read_plan: Callable[[AssignmentPlan], AssignmentPlan]) -> None:
        self._rules = rules
        self._read_plan = read_plan
        self._checks: dict[QueryRef, tuple[Mapping[str, pa.DataType], FrameCheck]] = {}
        self.threads = ThreadPoolExecutor(THREADS, "frame-check")
        self.plan = AssignmentPlan(-1, ())

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)

    def check(self, hello: Hello, frame: Frame, now_ms: int) -> CheckedFrame:
        """Checks a frame of an edge; blocks. Raises CorruptFrame, StorageError."""
        plan = self.plan
        if frame.query not in plan.specs:
            plan = self._read_plan(plan)
        spec = plan.specs.get(frame.query)
        stream = None if spec is None else _stream(plan, hello, spec.stream)
        if spec is None or stream is None:
            frame.plain_body()
            return CheckedFrame(frame)  # it is discarded or refused
        # The types are those that the stream has at all edges: an edge that came first, or lies, must not set them.
        columns = plan.columns.get(spec.stream, {})
        if plan.is_retired(hello.edge) or hello.edge not in plan.edges:
            columns = {**stream.columns, **columns}
        held = self._checks.get(frame.query)
        if held is None or held[0] != columns:
            held = columns, FrameCheck(spec, columns)
            # Replaced, not changed: another thread may read it. Checks of deleted queries go.
            self._checks = {ref: c for ref, c in self._checks.items() if ref in plan.specs} | {frame.query: held}
        return held[1].check(frame, self._rules.latest_ms(stream, now_ms))


class SessionFrames:
    """The frames of one session that wait for their check.

    Args:
        on_checked: called on the event loop for each frame, in order.
    """

    def __init__(self, validator: FrameValidator, hello: Hello, on_checked: OnChecked) -> None:
        self._validator = validator
        self._hello = hello
        self._on_checked = on_checked
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Frame, int]] = deque()
        self._running = False

    def put(self, frame: Frame, now_ms: int) -> None:
        self._waiting.append((frame, now_ms))
        if not self._running:
            self._take_turn()

    def _take_turn(self) -> None:
        self._running = True
        turn, size = [], 0
        while self._waiting and size < TURN_BYTES:
            turn.append(self._waiting.popleft())
            size += turn[-1][0].raw_bytes
        self._loop.run_in_executor(self._validator.threads, self._check, turn).add_done_callback(self._deliver)

    def _check(self, turn: list[tuple[Frame, int]]) -> list[tuple[Frame, int, CheckedFrame | Exception]]:
        """Checks frames, in a thread."""
        done: list[tuple[Frame, int, CheckedFrame | Exception]] = []
        for frame, now_ms in turn:
            try:
                done.append((frame, now_ms, self._validator.check(self._hello, frame, now_ms)))
            except Exception as exc:
                done.append((frame, now_ms, exc))
        return done

    def _deliver(self, turn: asyncio.Future[list[tuple[Frame, int, CheckedFrame | Exception]]]) -> None:
        if turn.cancelled():
            return
        for frame, now_ms, result in turn.result():
            self._on_checked(frame, now_ms, result)
        self._running = False
        if self._waiting:
            self._take_turn()


def _stream(plan: AssignmentPlan, hello: Hello, name: str) -> StreamRecord | None:
    """The stream as the edge serves it, or has served it."""
    known = plan.edges.get(hello.edge)
    former = known.former_streams if known is not None else ()
    return next((s for s in (*hello.streams, *former) if s.name == name), None)
