"""Admission: how far each query advances in the next batch. Pure.

A batch is one Spark job for all queries, so a query with a long backlog would delay all others. So admission is
bounded. If all pending frames fit, all of them are admitted. Otherwise the center is short of CPU, and queries are
admitted by their slack (`LeastSlack`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from center.storage.frame_log import FrameEntry
from edgewater.guard.frame_work import BYTES_PER_UNIT, MAX_FRAME_WORK
from edgewater.scheduling import PATIENCE, IngestionHistory

BATCH_S = 2.0
"""Maximum duration of a batch: twice the planned time. In smaller batches the fixed costs weigh more."""
LEAST_SHARE = 1 / 16
"""The smallest batch, as a share of the configured bytes. In smaller batches the fixed costs would dominate."""
WEIGHT = 0.3
"""Weight of the last full batch in the measured rate."""
FLOOR_MS = 10_000
"""A query comes first, whatever its slack, if its oldest frame has waited for this long. The time is compared with the
newest frame of all queries."""
FLOOR_SHARE = 1 / 4
"""The share of a batch that such queries may use."""
KEPT_STEPS = 3
"""An edge is no longer expected if its last frame is older than this many window ends."""


RUNNING = 2  # limit: memory of plans in flight
"""Batches that have been admitted and not applied."""


PendingFrames = Callable[[str, int, int], Sequence[FrameEntry]]
"""(query key, after, through) -> the frames with positions in (after, through], ascending."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one batch: per query, and in total. By default a batch takes 0.9 s, and a query's part 0.3 s.

    The first frame of a batch is admitted whatever its size. Otherwise a frame beyond the limit would block its query
    forever.
    """

    frames_per_query: int = 512
    bytes_per_query: int = 8 << 20
    frames: int = 4096
    bytes: int = MAX_FRAME_WORK * BYTES_PER_UNIT


class _Windows:
    """A query's window ends, derived from its admitted frames."""

    def __init__(self, step_ms: int, offset_ms: int) -> None:
        self._step_ms, self._offset_ms = step_ms, offset_ms
        self._swept: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._history = IngestionHistory()

    def closed_by(self, frame: FrameEntry) -> bool:
        """Returns whether a frame closes a window: it is the first frame of its edge that answers up to a window's
        end.
        """
        return frame.edge not in self._swept or self._steps(frame.through_ms) > self._swept[frame.edge]

    def _steps(self, time_ms: int) -> int:
        return (time_ms - self._offset_ms) // self._step_ms

    def expected_ms(self, now_ms: int) -> float:
        """Returns the wall time at which the first edge is expected to close its window."""
        return min(
            (end_ms + self._history.expected_delay_ms(now_ms - end_ms) for end_ms in set(self._ends.values())),
            default=now_ms,
        )

    def advance(self, admitted: Sequence[FrameEntry]) -> None:
        for frame in admitted:
            if not self.closed_by(frame):
                continue
            if frame.edge in self._ends:
                self._history.observe(frame.received_at_ms - self._ends[frame.edge])
            self._swept[frame.edge] = self._steps(frame.through_ms)
            self._ends[frame.edge] = self._offset_ms + (self._steps(frame.received_at_ms) + 1) * self._step_ms
        newest_ms = max(self._ends.values(), default=0)
        # An edge that no longer sends is not awaited forever.
        self._ends = {edge: end for edge, end in self._ends.items() if end > newest_ms - KEPT_STEPS * self._step_ms}
        self._swept = {edge: steps for edge, steps in self._swept.items() if edge in self._ends}


class LeastSlack:
    """Admits all frames if they fit. Otherwise admits queries in the order of their slack.

    The first frame of an edge that answers up to a window's end closes the window at this edge. The answer needs it: it
    is the query's sweeping watermark. Queries with such a pending frame are due, and come first. Their order is the
    arrival of this frame plus `PATIENCE` times the work of the backlog. Queries that expect such a frame follow, by
    expected slack. A query whose frames have waited for `FLOOR_MS` comes before all others.

    The time is the time of the frames: the arrival of the newest pending frame counts as now. Admission is told how
    long full batches take (`done`). On a slow machine, batches become smaller by this measurement.

    Args:
        step_ms: by query key, the distance of a query's window ends and their offset; None if it is not known.
    """

    def __init__(self, step_ms: Callable[[str], tuple[int, int] | None]) -> None:
        self._step_ms = step_ms
        self._windows: dict[str, _Windows] = {}
        self._bytes_per_s = BatchLimits().bytes / BATCH_S
        self._is_measured = False
        self._full: deque[tuple[dict[str, int], int]] = deque(maxlen=RUNNING)

    def admit(
        self, start: Mapping[str, int], last: Mapping[str, int], frames: PendingFrames, limits: BatchLimits
    ) -> dict[str, int]:
        """Returns the new end position of each query that advances.

        It is above `start` (0 if absent), and at most `last`. The result is empty only if no query has pending frames.
        """
        limits = self._within_capacity(limits)
        pending = [key for key, position in last.items() if position > start.get(key, 0)]
        # Frames beyond a query's even share are not fetched, because they can hardly be admitted.
        share = max(1, min(limits.frames_per_query, limits.frames // max(1, len(pending))))
        ends: dict[str, int] = {}
        queues: dict[str, Sequence[FrameEntry]] = {}
        for key in pending:
            after = start.get(key, 0)
            through = min(last[key], after + share)
            if queue := frames(key, after, through):
                queues[key] = queue
            else:
                ends[key] = through  # retention has dropped these frames, so they were applied
        if _fit(queues, last, limits):
            return ends | {key: last[key] for key in queues}
        return ends | self._by_slack(start, last, queues, frames, limits)

    def _by_slack(
        self,
        start: Mapping[str, int],
        last: Mapping[str, int],
        fetched: Mapping[str, Sequence[FrameEntry]],
        frames: PendingFrames,
        limits: BatchLimits,
    ) -> dict[str, int]:
        now_ms = max((queue[-1].received_at_ms for queue in fetched.values()), default=0)
        self._windows = {key: self._windows[key] for key in self._windows if key in last}
        batch = _Batch(limits)
        queues = {key: deque(queue) for key, queue in fetched.items()}

        def take(key: str, count: int) -> bool:
            """Admits frames of a query; False if the limits do not allow all of them."""
            queue = queues[key]
            taken: list[FrameEntry] = []
            while count > len(taken) and batch.take(key, queue[0]):
                taken.append(queue.popleft())
            self._advance(key, taken)
            after = taken[-1].position if taken else start.get(key, 0)
            through = min(last[key], start.get(key, 0) + limits.frames_per_query)
            if not queue and after < through:
                queue.extend(frames(key, after, through))
            return len(taken) == count

        for key in sorted(queues, key=lambda key: (queues[key][0].received_at_ms, key)):
            if now_ms - queues[key][0].received_at_ms < FLOOR_MS or batch.taken_bytes >= FLOOR_SHARE * limits.bytes:
                break
            take(key, 1)
        order = [(*self._priority(key, queue, now_ms), key) for key, queue in queues.items() if queue]
        heapify(order)
        while order and not batch.is_full:
            *_, count, key = heappop(order)
            if take(key, count) and queues[key]:
                heappush(order, (*self._priority(key, queues[key], now_ms), key))
        if batch.taken_bytes >= limits.bytes / 2:
            self._full.append((batch.ends, batch.taken_bytes))
        return batch.ends

    def _priority(self, key: str, queue: Iterable[FrameEntry], now_ms: int) -> tuple[int, float, int]:
        """Returns (0, due) if a pending frame closes a window, else (1, slack); and the number of frames up to it, or
        of all.
        """
        windows = self._windows.get(key)
        size = count = 0
        for frame in queue:
            size, count = size + frame.size, count + 1
            if windows is None or windows.closed_by(frame):
                return 0, frame.received_at_ms + PATIENCE * 1e3 * size / self._bytes_per_s, count
        assert windows is not None
        return 1, windows.expected_ms(now_ms) - 1e3 * size / self._bytes_per_s, count

    def _advance(self, key: str, admitted: Sequence[FrameEntry]) -> None:
        """Advances the window ends by the admitted frames."""
        if key not in self._windows:
            step = self._step_ms(key)
            if step is None:
                return
            self._windows[key] = _Windows(*step)
        self._windows[key].advance(admitted)

    def done(self, ends: Mapping[str, int], took_s: float) -> None:
        """Measures how fast a full batch was merged. Called when the frames up to the end positions of a result of
        `admit` could be applied.

        Args:
            took_s: seconds since their admission.
        """
        size = next((size for full, size in self._full if full.items() <= ends.items()), 0)
        if size and took_s > 0:
            rate = size / took_s
            self._bytes_per_s += (WEIGHT if self._is_measured else 1.0) * (rate - self._bytes_per_s)
            self._is_measured = True

    def _within_capacity(self, limits: BatchLimits) -> BatchLimits:
        if not self._is_measured:
            return limits
        capacity = int(max(self._bytes_per_s * BATCH_S, limits.bytes * LEAST_SHARE))
        return replace(limits, bytes=min(limits.bytes, capacity))


def _fit(queues: Mapping[str, Sequence[FrameEntry]], last: Mapping[str, int], limits: BatchLimits) -> bool:
    """Returns whether a batch may have all pending frames, and these are all of them."""
    sizes = [sum(frame.size for frame in queue) for queue in queues.values()]
    return (
        all(queue[-1].position == last[key] for key, queue in queues.items())
        and sum(map(len, queues.values())) <= limits.frames
        and max(sizes, default=0) <= limits.bytes_per_query
        and sum(sizes) <= limits.bytes
    )


class _Batch:
    """A batch while it is filled."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._by_query: dict[str, tuple[int, int]] = {}
        self.ends: dict[str, int] = {}
        self.taken_frames = self.taken_bytes = 0

    @property
    def is_full(self) -> bool:
        return self.taken_frames >= self._limits.frames or (bool(self.ends) and self.taken_bytes >= self._limits.bytes)

    def take(self, key: str, frame: FrameEntry) -> bool:
        """Admits a query's next frame, if the limits allow it."""
        limits = self._limits
        frames, size = self._by_query.get(key, (0, 0))
        if self.taken_frames >= limits.frames or frames >= limits.frames_per_query:
            return False
        above_share = frames > 0 and size + frame.size > limits.bytes_per_query
        if self.ends and (above_share or self.taken_bytes + frame.size > limits.bytes):
            return False
        self.ends[key] = frame.position
        self._by_query[key] = frames + 1, size + frame.size
        self.taken_frames += 1
        self.taken_bytes += frame.size
        return True
