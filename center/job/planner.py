"""`FramePlanner`: plans the next frames of the index: admitted by slack, gathered from edges that send together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from center.catalog import Catalog, LastPositions
from center.job.admission import BatchLimits, LeastSlack
from center.job.coalescing import MANY_FRAMES, BatchCoalescer
from center.job.loop_core import Look, Looked, Run
from center.job.merge import Frame
from center.storage.frame_log import FrameEntry
from center.storage.query_partition import ALL_QUERIES, QueryPartition
from edgewater.model.registered_query import query_key
from edgewater.model.windows import window_ends

HEAVY_BYTES = 4 << 20
"""A query is heavy if its pending frames have more bytes than this per window (`FrameEntry.size`): a merge of 0.15 s. A
query that is behind has pending frames of many windows, and is as light as before."""
HEAVY_PLAN_BYTES = 64 << 20  # limit: memory of a plan
"""Of a plan of a heavy query, which no other query waits for. Its partials are merged by tasks. With smaller plans, the
driver would merge more of their results, and all queries wait for the driver."""
MIN_PART_BYTES = 2 << 20
"""A smaller part costs more as a task than it saves."""


class FramePlanner:
    """Plans frames of the partition of this driver. One thread calls its methods.

    Args:
        consumed: returns the applied positions, by query key.
        partition: returns the partition that this driver leads.
        monotonic: clock in seconds.
        heavy_bytes: bytes per window above which a query is heavy.
    """

    def __init__(
        self,
        catalog: Catalog,
        consumed: Callable[[], Mapping[str, int]],
        limits: BatchLimits,
        monotonic: Callable[[], float],
        *,
        partition: Callable[[], QueryPartition] = lambda: ALL_QUERIES,
        admission: LeastSlack | None = None,
        heavy_bytes: int = HEAVY_BYTES,
    ) -> None:
        self._catalog, self._consumed, self._limits, self._monotonic = catalog, consumed, limits, monotonic
        self._partition = partition
        self._admission = admission or LeastSlack(self._step_ms)
        self._coalescer, self._heavy_bytes = BatchCoalescer(), heavy_bytes
        self._steps: dict[str, tuple[int, int] | None] = {}
        self._read: dict[str, list[FrameEntry]] = {}
        self._known: LastPositions | None = None
        self._nothing: tuple[LastPositions, Mapping[str, int], frozenset[str], QueryPartition] | None = None

    def look(self, effect: Look) -> Looked:
        """Returns the next frames. Raises StorageError."""
        applied = dict(self._consumed()) if effect.after is None else None
        after = effect.after if applied is None else applied
        assert after is not None
        partition = self._partition()
        self._known = known = self._catalog.frames.last_positions_since(self._known)
        if self._nothing == (known, after, effect.without, partition):
            return Looked(applied, None)
        last = {
            key: end
            for key, end in known.by_key.items()
            if end > after.get(key, 0) and key in partition and key not in effect.without
        }
        self._read = {}
        if (until_s := self._wait_until_s(after, last, known)) is not None:
            return Looked(applied, None, until_s)
        self._read_ahead(after, last)
        heavy = self._heavy(last) if len(known.by_key) > 1 else []
        light = {key: end for key, end in last.items() if key not in heavy}
        ends = self._admission.admit(after, light, self._frames, self._limits)
        alone = [self._run(after, {key: self._share(key)}) for key in heavy[: effect.heavy]]
        if not ends and not alone:
            self._nothing = None if heavy else (known, after, effect.without, partition)
            return Looked(applied, None)
        self._nothing = None
        return Looked(applied, self._run(after, ends) if ends else None, None, tuple(alone))

    def _run(self, after: Mapping[str, int], ends: Mapping[str, int]) -> Run:
        begins = {key: after.get(key, 0) for key in ends}
        frames = ((key, entry) for key in sorted(ends) for entry in self._frames(key, begins[key], ends[key]))
        return Run(tuple(frames), begins, ends)

    def _heavy(self, last: Mapping[str, int]) -> list[str]:
        """Returns the keys of the heavy queries. The query whose first frame came earliest is first."""
        heavy: list[tuple[int, str]] = []
        for key in last:
            read = self._read[key]
            size = sum(entry.size for entry in read)
            if size > self._heavy_bytes:
                step_ms, offset_ms = self._step_ms(key) or (0, 0)
                windows = {(e.through_ms - offset_ms) // step_ms for e in read} if step_ms else ()
                if size > self._heavy_bytes * max(1, len(windows)):
                    heavy.append((read[0].received_at_ms, key))
        return [key for _, key in sorted(heavy)]

    def _share(self, key: str) -> int:
        """Returns the position up to which a heavy query's frames are one plan."""
        read, size = self._read[key], 0
        for number, entry in enumerate(read[: self._limits.frames_per_query]):
            size += entry.size
            if number and size > HEAVY_PLAN_BYTES:
                return read[number - 1].position
        return read[: self._limits.frames_per_query][-1].position

    def done(self, run: Run, took_s: float) -> None:
        """Tells the admission how long a plan took until it could be applied."""
        self._admission.done(run.through, took_s)

    def _wait_until_s(self, after: Mapping[str, int], last: Mapping[str, int], known: LastPositions) -> float | None:
        """Returns how long edges that send at the same moment are waited for (`BatchCoalescer`); None: not at all."""
        self._coalescer.keep(known.by_key)
        frames = sum(end - after.get(key, 0) for key, end in last.items())
        if self._coalescer.expects_many(last) and frames < self._limits.frames:
            return self._coalescer.wait_for_queries_until_s(last, self._monotonic())
        if frames > MANY_FRAMES:
            return None
        self._read_ahead(after, last)
        edges = {key: {str(e.edge) for e in self._frames(key, after.get(key, 0), end)} for key, end in last.items()}
        return self._coalescer.wait_until_s(edges, self._monotonic())

    def _read_ahead(self, start: Mapping[str, int], last: Mapping[str, int]) -> None:
        """Reads the entries of pending frames, as many as a plan may contain, by one statement for all keys."""
        share = max(1, self._limits.frames // max(1, len(last)))
        missing = {}
        for key, end in last.items():
            read = self._read.setdefault(key, [])
            after = read[-1].position if read else start.get(key, 0)
            if after < min(end, start.get(key, 0) + share):
                missing[key] = (after, min(end, start.get(key, 0) + share))
        if missing:
            for key, entries in self._catalog.frames.entries_in(missing).items():
                self._read[key] += entries

    def _frames(self, key: str, after: int, through: int) -> Sequence[FrameEntry]:
        """Returns a query's frames, from the entries that `_read_ahead` has read if they are complete."""
        read = self._read.get(key, [])
        if read and read[0].position <= after + 1 and through <= read[-1].position:
            return [entry for entry in read if after < entry.position <= through]
        return self._catalog.frames.entries(key, after, through)

    def _step_ms(self, key: str) -> tuple[int, int] | None:
        """Returns distance and offset of a query's window ends; for session windows, of their slices."""
        if key not in self._steps:
            self._steps = {
                query_key(q.ref): window_ends(q.spec.window) for q in self._catalog.queries.all(deleted=True)
            }
            self._steps.setdefault(key, None)  # the package of its function is not installed here
        return self._steps[key]


def divide(frames: Sequence[Frame], parallelism: int) -> list[tuple[Frame, ...]]:
    """Divides frames, ordered by query, into at most `parallelism` parts of about equal size (`FrameEntry.size`).

    A part is contiguous. So few queries are in two parts, and most keys are merged where they are read.
    """
    total_bytes = sum(entry.size for _, entry in frames)
    count = max(1, min(parallelism, total_bytes // MIN_PART_BYTES))
    parts: list[list[Frame]] = [[] for _ in range(count)]
    before_bytes = 0
    for key, entry in frames:
        parts[min(before_bytes * count // max(total_bytes, 1), count - 1)].append((key, entry))
        before_bytes += entry.size
    return [tuple(part) for part in parts if part]
