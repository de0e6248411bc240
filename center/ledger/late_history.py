"""`LateHistory`: the late records of a query's recent windows, and how many a new window may have for that reason.

A late record comes after the close of its slice. The first answer to a window lacks the window's late records, and
nobody knows them yet. So the answer allows for the largest number that any of the last `MAX_WINDOWS` answered windows
had, as a part of the window's records. If windows are exchangeable, the largest of k windows is exceeded by the next
one with a probability of at most 1/(k + 1), whatever the distribution is (conformal prediction). The same rule holds
for the sums of late values and for their maxima.

The late records of the newest windows may still be on their way, so their numbers may be too small. The older windows
of the history have theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from edgewater.answers import Amount, Cause, Deviation, WithheldBound
from edgewater.model.query import QuerySpec
from edgewater.model.streams import MIN_TIME_MS
from edgewater.model.windows import SlidingWindow, TimeWindow
from edgewater.wire import DroppedRecords

MAX_WINDOWS = 100
"""The number of answered windows whose late records count. The least probability of an error is 1 in 101."""

_Amounts = Mapping[str, WithheldBound]


@dataclass(frozen=True, slots=True)
class LateRecords:
    """Late records of a block.

    Attributes:
        amounts: by measure, by how much they move a value together. An absent measure is unknown.
    """

    records: int = 0
    amounts: _Amounts = field(default_factory=dict)

    def plus(self, other: LateRecords) -> LateRecords:
        if not self.records or not other.records:
            return self if self.records else other
        names = self.amounts.keys() & other.amounts.keys()
        united = {n: WithheldBound.union([self.amounts[n], other.amounts[n]]) for n in sorted(names)}
        return LateRecords(self.records + other.records, united)

    def to_value(self) -> list[Any]:
        """Returns JSON, in which infinity is a text."""
        stated = [(n, a.above, a.below, a.unsent) for n, a in sorted(self.amounts.items())]
        return [
            self.records,
            [
                [n, str(above), str(below), None if unsent is None else str(unsent)]
                for n, above, below, unsent in stated
            ],
        ]

    @classmethod
    def from_value(cls, value: Sequence[Any]) -> Self:
        records, amounts = value
        bounds = (
            (n, float(above), float(below), None if unsent is None else float(unsent))
            for n, above, below, unsent in amounts
        )
        return cls(records, {n: WithheldBound(above, below, unsent) for n, above, below, unsent in bounds})


@dataclass(frozen=True, slots=True)
class LateBlock:
    """The late records of one stretch of event time that is as long as a window.

    Attributes:
        at: how many windows had been answered when the last of the late records came.
        in_time: number of records that were not late.
        by_closes: number of late records that the closes of slices count.
        counted: the late records that are counted, as edges state them. Edges of 0.3.0 state them in closes only.
        dropped: the late records that are not counted.
    """

    at: int
    in_time: int = 0
    by_closes: int = 0
    counted: LateRecords = LateRecords()
    dropped: LateRecords = LateRecords()

    def late(self, *, is_final: bool) -> LateRecords:
        """Returns the records that came after the first answer, or after the final one."""
        if is_final:
            return self.dropped
        counted = LateRecords(self.by_closes) if self.by_closes > self.counted.records else self.counted
        return counted.plus(self.dropped)

    def to_value(self) -> list[Any]:
        return [self.at, self.in_time, self.by_closes, self.counted.to_value(), self.dropped.to_value()]

    @classmethod
    def from_value(cls, value: Sequence[Any]) -> Self:
        at, in_time, by_closes, *late = value
        return cls(at, in_time, by_closes, *map(LateRecords.from_value, late))


@dataclass(frozen=True, slots=True)
class LateHistory:
    """The history of one query.

    Attributes:
        answered: number of windows with a first answer so far.
        newest_ms: start of the newest of these windows.
        blocks: the blocks with late records, by start; at most `MAX_WINDOWS`.
    """

    answered: int = 0
    newest_ms: int = MIN_TIME_MS
    blocks: Mapping[int, LateBlock] = field(default_factory=dict)

    def with_answer(self, start_ms: int, window: TimeWindow) -> LateHistory:
        """Returns the history after the first answer to a window."""
        answered = self.answered + 1
        since = answered - MAX_WINDOWS * _overlap(window)
        blocks = self.blocks
        if any(block.at <= since for block in blocks.values()):
            blocks = {start: block for start, block in blocks.items() if block.at > since}
        return LateHistory(answered, max(self.newest_ms, start_ms), blocks)

    def with_late(
        self,
        window: TimeWindow,
        by_closes: Mapping[int, int],
        counted: Iterable[DroppedRecords],
        dropped: Iterable[DroppedRecords],
        observed: Mapping[int, int],
    ) -> LateHistory:
        """Returns the history after late records.

        Args:
            by_closes: by slice, how many late records more its closes count.
            counted, dropped: the statements of edges about late records.
            observed: by slice with late records, the number of all its records.
        """
        blocks = dict(self.blocks)

        def block_of(slice_ms: int) -> int:
            """Returns the block of a slice. The newest block has the records whose slice is not known any more."""
            known = slice_ms > MIN_TIME_MS and (observed.get(slice_ms) or _block(window, slice_ms) in blocks)
            return _block(window, slice_ms if known else self.newest_ms)

        def block(start: int) -> LateBlock:
            return replace(blocks.get(start) or LateBlock(self.answered), at=self.answered)

        for slice_ms, records in by_closes.items():
            start = block_of(slice_ms)
            blocks[start] = replace(block(start), by_closes=block(start).by_closes + records)
        for each in counted:
            start = block_of(each.slice_start_ms)
            blocks[start] = replace(block(start), counted=block(start).counted.plus(_late(each)))
        for each in dropped:
            start = block_of(each.slice_start_ms)
            blocks[start] = replace(block(start), dropped=block(start).dropped.plus(_late(each)))
        totals: dict[int, int] = {}
        for slice_ms, records in observed.items():
            totals[_block(window, slice_ms)] = totals.get(_block(window, slice_ms), 0) + records
        for start in totals.keys() & blocks.keys():
            known, late = blocks[start], max(blocks[start].by_closes, blocks[start].counted.records)
            blocks[start] = replace(known, in_time=max(known.in_time, totals[start] - late))
        newest = sorted(blocks, key=lambda start: (blocks[start].at, start))[-MAX_WINDOWS:]
        return replace(self, blocks={start: blocks[start] for start in sorted(newest)})

    def allowance(
        self, slices: Sequence[int], observed: int, late: int, spec: QuerySpec, *, is_final: bool
    ) -> Deviation | None:
        """Returns the late records that an answer to a window allows for; None: recent windows had none.

        Args:
            slices: the window's slices.
            observed, late: number of its records, and of those of them that came late.
            is_final: the answer is final, and not the first one.
        """
        window = spec.window
        if not self.blocks:
            return None
        assert isinstance(window, TimeWindow)
        own = {_block(window, start) for start in slices}
        others = [(block, block.late(is_final=is_final)) for start, block in self.blocks.items() if start not in own]
        others = [(block, each) for block, each in others if each.records]
        if not others:
            return None
        in_time = observed - late
        scales = [max(in_time, 1) / max(block.in_time, 1) for block, _ in others]
        most = max(math.ceil(each.records * scale) for (_, each), scale in zip(others, scales, strict=True))
        amounts: dict[str, WithheldBound] = {}
        sides = 1
        for measure in spec.measures:
            known = [each.amounts.get(measure.name) for _, each in others]
            if measure.function.name not in ("sum", "max") or None in known:
                continue
            bounds = [(bound, scale) for bound, scale in zip(known, scales, strict=True) if bound is not None]
            above, below = (max(getattr(b, side) * scale for b, scale in bounds) for side in ("above", "below"))
            unsent = max((b.unsent for b, _ in bounds if b.unsent is not None), default=None)
            amounts[measure.name] = WithheldBound(above, below, unsent)
            sides = max(sides, (above > 0) + (below > 0))
        windows = min(self.answered // _overlap(window), MAX_WINDOWS)
        return Deviation(
            Cause.MAY_CHANGE,
            lacks=Amount(0, max(most - (0 if is_final else late), 1)),
            amounts=amounts,
            confidence=max(1.0 - sides / (windows + 1), 0.0),
        )

    def to_value(self) -> list[Any]:
        return [self.answered, self.newest_ms, [[start, block.to_value()] for start, block in self.blocks.items()]]

    @classmethod
    def from_value(cls, value: Sequence[Any]) -> Self:
        answered, newest_ms, blocks = value
        return cls(answered, newest_ms, {start: LateBlock.from_value(block) for start, block in blocks})


def _late(stated: DroppedRecords) -> LateRecords:
    return LateRecords(stated.records, {w.measure: WithheldBound.of(w) for w in stated.amounts})


def _overlap(window: TimeWindow) -> int:
    """Returns how many windows a record belongs to at most."""
    return -(-window.size_ms // window.every_ms) if isinstance(window, SlidingWindow) else 1


def _block(window: TimeWindow, slice_ms: int) -> int:
    if not isinstance(window, SlidingWindow):
        return slice_ms
    return (slice_ms - window.offset_ms) // window.size_ms * window.size_ms + window.offset_ms


def slices_of_blocks(window: TimeWindow, slices: Iterable[int]) -> list[int]:
    """Returns all slices of the blocks that contain some slices."""
    blocks = {_block(window, start) for start in slices if start > MIN_TIME_MS}
    return [start for block in sorted(blocks) for start in window.slices_of_window(block)]
