"""`LateHistory`: the late records of a query's recent windows, and how many a new window may have for that reason.

A late record comes after the close of its slice. The first answer to a window lacks the window's late records, and
nobody knows them yet. So the answer allows for the largest number that any of the last `MAX_WINDOWS` answered windows
had, as a part of the window's records. If windows are exchangeable, the largest of k windows is exceeded by the next
one with a probability of at most 1/(k + 1), whatever the distribution is (conformal prediction). The same rule holds
for the sums of late values and for their maxima.

A late record may also lengthen a session, or join two. No number bounds this, so a session allows for an unknown
number of records if a recent session had late ones.

The late records of the newest windows may still be on their way, so their numbers may be too small. The older windows
of the history have theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from edgewater.answers import NO_LATE, UNKNOWN, Amount, Cause, Deviation, LateRecords, WithheldBound
from edgewater.answers.uniting import MAX_COUNTED
from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.query import QuerySpec
from edgewater.model.windows import SlicedWindow, TimeWindow
from edgewater.synopses.late_values import LATE_VALUES
from edgewater.wire import DroppedRecords

MAX_WINDOWS = 100
"""The number of answered windows whose late records count. The least probability of an error is 1 in 101."""


@dataclass(frozen=True, slots=True)
class LateBlock:
    """The late records of one stretch of event time that is as long as a window.

    Attributes:
        at: how many windows had been answered when the last of the late records came.
        in_time: number of records that were not late.
        by_closes: number of late records that the closes of slices count.
        after_final: number of them that came when some window over their slice was final.
        counted: the late records that are counted, as edges state them. Edges of 0.3.0 state them in closes only.
        dropped: the late records that are not counted.
    """

    at: int
    in_time: int = 0
    by_closes: int = 0
    after_final: int = 0
    counted: LateRecords = NO_LATE
    dropped: LateRecords = NO_LATE

    def late(self, *, is_final: bool) -> LateRecords:
        """Returns the records that came after the first answer, or that a final answer to some window lacks."""
        counted = LateRecords(self.by_closes) if self.by_closes > self.counted.records else self.counted
        if is_final:  # their values are among the values of all counted records
            counted = replace(counted, records=self.after_final)
        return counted.plus(self.dropped)

    def to_state(self) -> list[Any]:
        numbers = [self.at, self.in_time, self.by_closes, self.after_final]
        return [*numbers, self.counted.to_state(), self.dropped.to_state()]

    @classmethod
    def from_state(cls, value: Sequence[Any]) -> Self:
        *numbers, counted, dropped = value
        return cls(*numbers, *map(LateRecords.from_state, (counted, dropped)))


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

    def with_answer(self, start_ms: int, window: SlicedWindow) -> LateHistory:
        """Returns the history after the first answer to a window."""
        answered = self.answered + 1
        since = answered - MAX_WINDOWS * window.most_windows
        blocks = self.blocks
        if any(block.at <= since for block in blocks.values()):
            blocks = {start: block for start, block in blocks.items() if block.at > since}
        return LateHistory(answered, max(self.newest_ms, start_ms), blocks)

    def with_late(
        self,
        window: SlicedWindow,
        by_closes: Mapping[int, int],
        after_final: Mapping[int, int],
        counted: Iterable[DroppedRecords],
        dropped: Iterable[DroppedRecords],
        observed: Mapping[int, int],
    ) -> LateHistory:
        """Returns the history after late records.

        Args:
            by_closes: by slice, how many late records more its closes count.
            after_final: by slice, how many of them came when some window over the slice was final.
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
            known = block(start)
            final = known.after_final + after_final.get(slice_ms, 0)
            blocks[start] = replace(known, by_closes=known.by_closes + records, after_final=final)
        for each in counted:
            start = block_of(each.slice_start_ms)
            late = block(start).counted.plus(LateRecords.by(each.records, each.amounts))
            blocks[start] = replace(block(start), counted=late)
        for each in dropped:
            start = block_of(each.slice_start_ms)
            late = block(start).dropped.plus(LateRecords.by(each.records, each.amounts))
            blocks[start] = replace(block(start), dropped=late)
        totals: dict[int, int] = {}
        for slice_ms, records in observed.items():
            totals[_block(window, slice_ms)] = totals.get(_block(window, slice_ms), 0) + records
        for start in totals.keys() & blocks.keys():
            known = blocks[start]
            in_time = totals[start] - max(known.by_closes, known.counted.records)
            blocks[start] = replace(known, in_time=max(known.in_time, in_time))
        newest = sorted(blocks, key=lambda start: (blocks[start].at, start))[-MAX_WINDOWS:]
        return replace(self, blocks={start: blocks[start] for start in sorted(newest)})

    def allowance(
        self, slices: Sequence[int], observed: int, late: int, spec: QuerySpec, *, is_final: bool
    ) -> Deviation | None:
        """Returns the late records that an answer to a window allows for; None: recent windows had none.

        Args:
            slices: the window's slices.
            observed: number of the window's records.
            late: number of these records that came late.
            is_final: the answer is final. It lacks only late records that are not counted.
        """
        window = spec.window
        if not self.blocks:
            return None
        own = {_block(window, start) for start in slices}
        others = [(block, block.late(is_final=is_final)) for start, block in self.blocks.items() if start not in own]
        others = [(block, each) for block, each in others if each.records]
        if not others:
            return None
        if not isinstance(window, TimeWindow):
            return Deviation(Cause.MAY_CHANGE, lacks=UNKNOWN)
        in_time = observed - late
        scales = [max(in_time, 1) / max(block.in_time, 1) for block, _ in others]
        most = max(math.ceil(each.records * scale) for (_, each), scale in zip(others, scales, strict=True))
        most = min(most, MAX_COUNTED)
        amounts: dict[str, WithheldBound] = {}
        sides = 1
        for measure in spec.measures:
            known = [each.amounts.get(measure.name) for _, each in others]
            if measure.function.name not in LATE_VALUES or None in known:
                continue
            bounds = [(bound, scale) for bound, scale in zip(known, scales, strict=True) if bound is not None]
            above, below = (max(getattr(b, side) * scale for b, scale in bounds) for side in ("above", "below"))
            unsent = max((b.unsent for b, _ in bounds if b.unsent is not None), default=None)
            amounts[measure.name] = WithheldBound(above, below, unsent)
            by_number = measure.function.error is None  # their bounds also follow from the number of the records
            sides = max(sides, (above > 0) + (below > 0) + by_number)
        windows = min(self.answered // window.most_windows, MAX_WINDOWS)
        return Deviation(
            Cause.MAY_CHANGE,
            lacks=Amount(0, max(most - (0 if is_final else late), 1)),
            amounts=amounts,
            confidence=max(1.0 - sides / (windows + 1), 0.0),
        )

    def of_next_version(self, before: QuerySpec, spec: QuerySpec) -> LateHistory:
        """Returns the history with which the next version of a query begins. It has the amounts of equal measures only.

        It is empty if the version has other records or windows, or if other records come too late for it.
        """
        if any(getattr(before, name) != getattr(spec, name) for name in ("stream", "where", "window", "lateness_ms")):
            return LateHistory()
        known = {(m.name, m.function.name, m.argument, m.parameters) for m in before.measures}
        names = {m.name for m in spec.measures if (m.name, m.function.name, m.argument, m.parameters) in known}
        blocks = {
            start: replace(block, counted=block.counted.of(names), dropped=block.dropped.of(names))
            for start, block in self.blocks.items()
        }
        return replace(self, blocks=blocks)

    def to_state(self) -> list[Any]:
        return [self.answered, self.newest_ms, [[start, block.to_state()] for start, block in self.blocks.items()]]

    @classmethod
    def from_state(cls, value: Sequence[Any]) -> Self:
        answered, newest_ms, blocks = value
        return cls(answered, newest_ms, {start: LateBlock.from_state(block) for start, block in blocks})


def _block(window: SlicedWindow, slice_ms: int) -> int:
    length_ms = window.grid_ms[0]
    if length_ms == window.slice_ms:
        return slice_ms
    return (slice_ms - window.origin_ms) // length_ms * length_ms + window.origin_ms


def slices_of_blocks(window: SlicedWindow, slices: Iterable[int]) -> list[int]:
    """Returns all slices of the blocks that contain some slices. Of sessions, a block is a slice."""
    blocks = sorted({_block(window, start) for start in slices if start > MIN_TIME_MS})
    if not isinstance(window, TimeWindow):
        return blocks
    return [start for block in blocks for start in window.slices_of_window(block)]
