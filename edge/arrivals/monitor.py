"""What an edge notes of every event for the center's decision: delay D, gap G, value V, per sub-stream.

D, to the slot, and the counts are of all events; G is of the head of the first batch since statistics were taken. V is
of the events that were sampled: for others the value may not have been worked out at all. Everything adds up: over the
batches of an edge, and over edges that are one stratum.

Times are as the edge's clock has them, corrected by the session's offset estimate before they come here. What the
clocks do all the same: an event from the future (born after it arrived) by at most `max_skew_ms` has delay 0; one
further ahead is not counted as punctual or late but in `from_future`, so that one device with a wrong clock can
neither close windows nor teach that delays are negative. A clock that steps back only makes a gap of 0.

What arrives in one slot is counted together, so that small batches cost little more than large ones: per event a
maximum, a minimum, a subtraction and one `bincount` by milliseconds, and one more each for Σv and Σv². Slots, lags and
sub-streams are worked out of the few thousand sums. Nothing is sub-sampled: an edge that processes every record ships
the very sums that answers are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from edge.arrivals.keyed_sums import DENSE, counted, runs, starts, summed
from edgewater.arrivals import DEFAULT_MAX_SKEW_MS, Moments, SlotGrid, SubstreamStatistics, lag_groups
from edgewater.errors import CorruptSynopsis, InvalidConfig, InvalidRecord
from edgewater.synopses import FloatArray, IntArray
from edgewater.synopses.encoding import named_arrays as saved

_GAPS = 512
_PENDING, _PENDING_VALUES, _CHUNKS = 1 << 16, 1 << 13, 1 << 10
"""Events, values, and batches' counts that are held before they are put together: what is held is bounded."""
_SLOTS_HELD = 1 << 6
_SLOTFUL = 1 << 11
"""Values of one slot that are worth being summed by the millisecond, which costs as much as some hundred of them."""


_Worth = tuple[IntArray, IntArray | int, FloatArray]
"""Time of birth, slot of arrival (one, if it is the same for all), value."""


class SubstreamMonitor:
    """Collects one source's statistics; `take` hands out what has come since the last time.

    Args:
        max_skew_ms: how far in the future an event may be and still count.
    """

    def __init__(self, grid: SlotGrid, *, max_skew_ms: int = DEFAULT_MAX_SKEW_MS) -> None:
        if max_skew_ms < 0:
            raise InvalidConfig("max_skew", max_skew_ms, "0 ms or more")
        self.grid, self.max_skew_ms = grid, max_skew_ms
        self._groups = lag_groups(grid.lags)
        self._lag_groups = int(self._groups[-1]) + 1
        self._last_born_ms: int | None = None
        self._centre: float | None = None
        self._forget()

    def _forget(self) -> None:
        self._cells: list[tuple[IntArray, IntArray]] = []  # slot·lags + lag since epoch; events
        self._slots: list[
            tuple[int, int, IntArray]
        ] = []  # slot of arrival, first slot of birth; events by slot of birth
        self._values: list[tuple[IntArray, FloatArray]] = []  # part·groups + group; count, Σ(v - c), Σ(v - c)²
        self._odd: dict[int, list[int]] = {}  # part: skewed, from the future
        self._gaps: dict[int, Moments] = {}
        self._arrival_slot = 0
        self._born: list[IntArray] = []  # of this slot's arrivals
        self._held = 0
        self._worth: list[_Worth] = []
        self._worth_held, self._worth_slot = 0, 0

    def observe(
        self,
        born_ms: IntArray,
        arrival_ms: IntArray | int,
        values: FloatArray | None = None,
        kept: IntArray | None = None,
    ) -> None:
        """A batch in order of arrival. Its arrays are held for a while: they must not be changed.

        Args:
            arrival_ms: of each event, or of all: a batch that was read at once arrived at once.
            values: of the sampled events; `kept` their positions, ascending; None: all are sampled. NaN and infinity
                are left out.

        Raises:
            InvalidRecord: as many arrivals as events, or values as sampled events, are not there.
        """
        if np.ndim(arrival_ms) == 0:
            arrival_ms = int(arrival_ms)
        elif born_ms.shape != np.shape(arrival_ms):
            raise InvalidRecord("arrival_ms", np.shape(arrival_ms), f"as many as events, {born_ms.shape}")
        if not len(born_ms):
            return
        if int(born_ms.max()) > (arrival_ms if isinstance(arrival_ms, int) else int(arrival_ms.min())):
            born_ms, arrival_ms, values, kept = self._set_apart(born_ms, arrival_ms, values, kept)
            if not len(born_ms):
                return
        if not self._gaps:
            self._add_gaps(born_ms)
        self._last_born_ms = int(born_ms[-1])
        slot = arrival_ms // self.grid.slot_ms
        if isinstance(slot, int):
            if slot != self._arrival_slot or self._held > _PENDING:
                self._count_held()
                self._arrival_slot = slot
            self._born.append(born_ms)
            self._held += len(born_ms)
        else:
            self._add_by_lag(born_ms, slot)
        if values is not None:
            self._hold_values(born_ms, slot, values, kept)

    def take(self) -> list[SubstreamStatistics]:
        """What was observed since the last call, by sub-stream."""
        self._sum_values()
        self._fold()
        found: dict[int, SubstreamStatistics] = {}

        def of(index: int) -> SubstreamStatistics:
            return found.setdefault(index, SubstreamStatistics(self.grid, index))

        for keys, counts in self._cells:
            self._state_cells(of, keys, counts)
        for keys, sums in self._values:
            for index, mine in runs(keys // self._lag_groups):
                self._state_values(of(index), keys[mine] - index * self._lag_groups, sums[:, mine])
        for index, gap in self._gaps.items():
            of(index).gap = gap
        for index, (skewed, future) in self._odd.items():
            of(index).skewed, of(index).from_future = skewed, future
        self._forget()
        return [found[i] for i in sorted(found)]

    def to_state(self) -> bytes:
        """What was not taken yet, and the last event's time. What is taken later does not depend on its being asked."""
        self._fold()
        held = self._worth or [(np.zeros(0, np.int64), 0, np.zeros(0))]
        born, values = _joined([h[0] for h in held]), _joined([h[2] for h in held])
        arrived = np.full(len(born), _joined_slots(held))
        nothing = np.zeros(0, np.int64)
        keys, counts = self._cells[0] if self._cells else (nothing, nothing)
        codes, sums = self._values[0] if self._values else (nothing, np.zeros((3, 0)))
        gaps = [[index, m.count, m.mean, m.deviations] for index, m in sorted(self._gaps.items())]
        numbers = {"last_born_ms": self._last_born_ms, "centre": self._centre}
        return saved.pack("substream-monitor", numbers, {
            "keys": keys, "counts": counts, "codes": codes, "sums": sums,
            "born": born, "arrived": arrived, "values": values,
            "gaps": np.array(gaps, np.float64).reshape(-1, 4),
            "odd": np.array([[i, *o] for i, o in sorted(self._odd.items())], np.int64).reshape(-1, 3),
        })  # fmt: skip

    @classmethod
    def from_state(cls, state: bytes, grid: SlotGrid, *, max_skew_ms: int = DEFAULT_MAX_SKEW_MS) -> Self:
        """Raises CorruptSynopsis, UnsupportedVersion."""
        result = cls(grid, max_skew_ms=max_skew_ms)
        numbers, given = saved.unpack("substream-monitor", state)
        try:
            keys, counts, codes, sums = (given[name] for name in ("keys", "counts", "codes", "sums"))
            worth = given["born"], given["arrived"], given["values"]
            if keys.shape != counts.shape or sums.shape != (3, len(codes)) or len({w.shape for w in worth}) != 1:
                raise ValueError("shapes")
            if len(worth[0]):
                result._hold_values(worth[0], _one_if_all(worth[1]), worth[2], None)
            result._last_born_ms, result._centre = numbers["last_born_ms"], numbers["centre"]
            result._cells = [(keys, counts)] if len(keys) else []
            result._values = [(codes, sums)] if len(codes) else []
            result._gaps = {int(i): Moments(*m) for i, *m in given["gaps"].tolist()}
            result._odd = {i: [skewed, future] for i, skewed, future in given["odd"].tolist()}
        except (KeyError, ValueError, TypeError) as exc:
            raise CorruptSynopsis(f"the monitor's state cannot be read: {exc}") from exc
        return result

    def _set_apart(
        self, born_ms: IntArray, arrival_ms: IntArray | int, values: FloatArray | None, kept: IntArray | None
    ) -> tuple[IntArray, IntArray | int, FloatArray | None, IntArray | None]:
        """Counts events that were born after they arrived, and takes out those from further than the skew."""
        ahead = born_ms - arrival_ms
        future = ahead > self.max_skew_ms
        for index, count in counted(born_ms[(ahead > 0) & ~future] // self.grid.substream_ms):
            self._odd.setdefault(index, [0, 0])[0] += count
        if not future.any():
            return born_ms, arrival_ms, values, kept
        # Counted at the earliest: there is no sub-stream for a time to come.
        index = int((born_ms[future] // self.grid.substream_ms).min())
        self._odd.setdefault(index, [0, 0])[1] += int(future.sum())
        stay = ~future
        if kept is not None and values is not None:
            good = stay[kept]
            kept, values = (np.cumsum(stay) - 1)[kept[good]], values[good]
        return born_ms[stay], arrival_ms if isinstance(arrival_ms, int) else arrival_ms[stay], values, kept

    def _count_held(self) -> None:
        """Counts what has arrived in the slot that is over."""
        if not self._held:
            return
        born = self._born[0] if len(self._born) == 1 else np.concatenate(self._born)
        self._born, self._held = [], 0
        width = self.grid.slot_ms
        low = int(born.min()) // width
        if int(born.max()) - low * width >= DENSE:
            slot, number = np.unique(born // width, return_counts=True)
            self._keep(self._key(slot, self._arrival_slot), number)
            return
        by_ms = np.bincount(born - low * width)
        number = np.add.reduceat(by_ms, np.arange(0, len(by_ms), width))
        self._slots.append((self._arrival_slot, low, number))
        if len(self._slots) > _SLOTS_HELD:
            self._fold()

    def _add_by_lag(self, born_ms: IntArray, arrived: IntArray) -> None:
        """As `_count_held`, of events whose arrivals are told one by one."""
        key = self._key(born_ms // self.grid.slot_ms, arrived)
        first = int(key.min())
        if int(key.max()) - first >= DENSE:
            self._keep(*np.unique(key, return_counts=True))
            return
        number = np.bincount(key - first)
        used = np.flatnonzero(number)
        self._keep(first + used, number[used])

    def _key(self, slot: IntArray, arrived: IntArray | int) -> IntArray:
        """Slot of birth and lag in one number."""
        return np.asarray(slot * self.grid.lags + self._lag(slot, arrived))

    def _lag(self, slot: IntArray, arrived: IntArray | int) -> IntArray:
        return np.minimum(np.maximum(arrived - slot, 0), self.grid.lags - 1)

    def _keep(self, keys: IntArray, counts: IntArray) -> None:
        self._cells.append((keys, counts))
        if len(self._cells) > _CHUNKS:
            self._fold()

    def _fold(self) -> None:
        """Counts what is held, and makes one chunk of all, sorted by key.

        Whenever it is done, the sums are the same to the last bit, as an edge that replays its journal needs: counts
        are integers, and chunks of values are added up from the first on.
        """
        self._count_held()
        if self._slots or len(self._cells) > 1:
            self._spread_slots()
            keys = np.concatenate([k for k, _ in self._cells])
            order = np.argsort(keys, kind="stable")
            keys, counts = keys[order], np.concatenate([c for _, c in self._cells])[order]
            first = starts(keys)
            self._cells = [(keys[first], np.add.reduceat(counts, first))]
        if len(self._values) > 1:
            codes = np.concatenate([k for k, _ in self._values])
            self._values = [summed(codes, np.concatenate([s for _, s in self._values], axis=1))]

    def _spread_slots(self) -> None:
        """The counts of whole slots as cells."""
        if not self._slots:
            return
        arrived, low, number = zip(*self._slots, strict=True)
        self._slots = []
        lengths = [len(n) for n in number]
        starts = np.cumsum([0, *lengths[:-1]])
        counts = np.concatenate(number)
        slot = np.arange(len(counts)) + np.repeat(np.array(low) - starts, lengths)
        used = np.flatnonzero(counts)
        self._cells.append((self._key(slot[used], np.repeat(np.array(arrived), lengths)[used]), counts[used]))

    def _add_gaps(self, born_ms: IntArray) -> None:
        """Gaps between consecutive events, of the head of a batch: enough of them for a mean and a variance."""
        head = born_ms[:_GAPS]
        previous = head[0] if self._last_born_ms is None else self._last_born_ms
        gap = np.maximum(np.diff(head, prepend=previous), 0)
        self._gaps[int(head[0]) // self.grid.substream_ms] = Moments.of(gap.astype(np.float64))

    def _hold_values(self, born_ms: IntArray, slot: IntArray | int, values: FloatArray, kept: IntArray | None) -> None:
        if kept is not None and len(kept) != len(born_ms):
            born_ms, slot = born_ms[kept], slot if isinstance(slot, int) else slot[kept]
        if len(values) != len(born_ms):
            raise InvalidRecord("values", len(values), f"as many as sampled events, {len(born_ms)}")
        if not len(values):
            return
        slot = _one_if_all(slot)
        last = slot if isinstance(slot, int) else int(slot[-1])
        if last != self._worth_slot and self._worth_held >= _SLOTFUL:
            self._sum_values()
        self._worth.append((born_ms, slot, np.asarray(values, np.float64)))
        self._worth_held, self._worth_slot = self._worth_held + len(values), last
        if self._worth_held > _PENDING_VALUES:
            self._sum_values()

    def _sum_values(self) -> None:
        if not self._worth_held:
            return
        held, self._worth, self._worth_held = self._worth, [], 0
        born, arrived, values = _joined([h[0] for h in held]), _joined_slots(held), _joined([h[2] for h in held])
        if not np.isfinite(values.sum()):
            sound = np.isfinite(values)
            born, values = born[sound], values[sound]
            arrived = arrived if isinstance(arrived, int) else arrived[sound]
        if not len(values):
            return
        if self._centre is None:
            self._centre = float(values.mean())
        # Around a centre: far from zero, the difference of Σv² and n·mean² would have no digits left.
        gap = values - self._centre
        if isinstance(arrived, int) and len(gap) >= _SLOTFUL and int(born.max()) - int(born.min()) < DENSE:
            self._values.append(self._summed_by_ms(born, arrived, gap))
        else:
            code = self._code(born // self.grid.slot_ms, arrived)
            self._values.append(summed(code, np.stack([np.ones(len(gap)), gap, gap * gap])))
        if len(self._values) > _CHUNKS:
            self._fold()

    def _code(self, slot: IntArray, arrived: IntArray | int) -> IntArray:
        """Sub-stream of birth and group of the lag in one number."""
        return slot // self.grid.substream_slots * self._lag_groups + self._groups[self._lag(slot, arrived)]

    def _summed_by_ms(self, born: IntArray, arrived: int, gap: FloatArray) -> tuple[IntArray, FloatArray]:
        """As `summed`, of what arrived in one slot: then the births of one code are next to each other."""
        width = self.grid.slot_ms
        low = int(born.min()) // width
        at = born - low * width
        count = np.bincount(at)
        code = self._code(np.arange(low, low + -(-len(count) // width)), arrived)
        first = starts(code)
        by_ms = count, np.bincount(at, gap), np.bincount(at, gap * gap)
        sums = np.array([np.add.reduceat(each, first * width) for each in by_ms], np.float64)
        used = np.flatnonzero(sums[0])
        return code[first[used]], sums[:, used]

    def _state_cells(self, of: Callable[[int], SubstreamStatistics], keys: IntArray, counts: IntArray) -> None:
        width, lag = self.grid.substream_slots * self.grid.lags, keys % self.grid.lags
        parts = runs(keys // width)
        weighted = np.stack([counts, counts * lag, counts * lag * lag])
        sums = np.add.reduceat(weighted, [mine.start for _, mine in parts], axis=1).T.tolist()
        for (index, mine), (events, lags, squares) in zip(parts, sums, strict=True):
            one, slot = of(index), self.grid.slot_ms
            one.cells, one.counts = keys[mine] - index * width, counts[mine]
            # Whole numbers up to the quotient.
            one.delay = Moments(events, lags * slot / events, (squares * events - lags * lags) * slot * slot / events)

    def _state_values(self, into: SubstreamStatistics, group: IntArray, sums: FloatArray) -> None:
        centre = self._centre or 0.0
        count, total, squares = (float(x) for x in sums.sum(axis=1))
        into.value = Moments(count, centre + total / count, max(0.0, squares - total * total / count))
        into.value_sums = np.zeros((3, self._lag_groups))
        into.value_sums[0, group] = sums[0]
        into.value_sums[1, group] = sums[1] + centre * sums[0]
        into.value_sums[2, group] = sums[2] + 2 * centre * sums[1] + centre * centre * sums[0]


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _one_if_all(slots: IntArray | int) -> IntArray | int:
    """The number itself where all are the same."""
    if isinstance(slots, int) or not len(slots) or (slots != slots[0]).any():
        return slots
    return int(slots[0])


def _joined_slots(held: list[_Worth]) -> IntArray | int:
    """The slot in which all that is held arrived; of each, if there are several."""
    slots = [slot for _, slot, _ in held]
    first = slots[0]
    if isinstance(first, int) and all(isinstance(s, int) and s == first for s in slots):
        return first
    return np.concatenate([np.full(len(born), slot) if isinstance(slot, int) else slot for born, slot, _ in held])
