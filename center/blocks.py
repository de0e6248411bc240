"""Strata side by side: time passes for them, and windows are looked at, by arrays over all. Pure.

A query's groups are told apart by watermarks of their own (`strata.py`), each a few sources times some hundred lags.
One by one, hundreds of them would take longer than the windows last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from center.prediction import Outlook
from center.strata import TOO_FEW, Stratum
from center.tallies import sampled_by, windows
from edgewater.accuracy import Accuracy
from edgewater.synopses.base import BoolArray, FloatArray, IntArray
from edgewater.watermarks.estimate import Sampled, WindowModel
from edgewater.watermarks.stragglers import LEAST_EVENTS, StragglersByMark
from edgewater.watermarks.together import Together
from edgewater.watermarks.watermark import Answer, Wait

BLOCK = 64
"""Strata of a block: so many that calling NumPy does not count, and few enough that a window which waits for one of
them is not modelled for all."""
MOSTLY = 0.5
"""Part of a window's records that must have come before it is said that their mean may be zero: of the first few of a
skewed distribution a single large one decides, and waiting brings more."""


class Block:
    """Some strata over the same edges. It is good until one of them is reseated or gets into another block."""

    def __init__(self, strata: Sequence[Stratum], accuracy: Accuracy) -> None:
        self.strata, self.accuracy = list(strata), accuracy
        self.together = Together([s.mark for s in strata])

    def advance(self, slot: int, target: int, rows: IntArray, reporting: BoolArray) -> None:
        """Time goes on from `slot` to `target`.

        Args:
            rows: arrivals, ascending by slot, as (slot, source, lag, count, number of the stratum in the block).
            reporting: the sources that have told of `target`.
        """
        cuts = np.searchsorted(rows[:, 0], np.arange(slot, target + 1)).tolist()
        shape, telling = self.together.triangle.seen.shape, np.tile(reporting, len(self.strata))
        place, count = (rows[:, 4] * len(reporting) + rows[:, 1]) * shape[1] + rows[:, 2], rows[:, 3]
        for begin, end in pairwise(cuts):
            self.together.advance(_table(place[begin:end], count[begin:end], shape), telling)

    def come_back(self, source: int, rows: IntArray) -> None:
        """A source that stood still tells what it had: rows of (slot, lag, count, stratum in the block)."""
        triangle, sources = self.together.triangle, self.together.marks[0].triangle.sources
        behind = triangle.behind[source::sources]
        for slots in np.unique(behind[behind > 0]).tolist():  # a stratum may be younger than the silence
            here = np.flatnonzero(behind == slots)
            row = np.full(len(behind), -1)
            row[here] = np.arange(len(here))
            mine = rows[row[rows[:, 3]] >= 0]
            at = np.maximum(mine[:, 0] - (self.strata[0].slot - slots), 0)
            mine, at = mine[np.argsort(at, kind="stable")], np.sort(at)
            cuts = np.searchsorted(at, np.arange(slots + 1)).tolist()
            place = row[mine[:, 3]] * triangle.grid.lags + mine[:, 1]
            shape = (len(here), triangle.grid.lags)
            told = (_table(place[begin:end], mine[begin:end, 2], shape) for begin, end in pairwise(cuts))
            triangle.catch_up_all(here * sources + source, told)

    def learn(self, start_ms: int, edges: Sequence[str], outlooks: Mapping[str, Outlook]) -> None:
        """The window has been answered so."""
        known = [i for i, s in enumerate(self.strata) if s.key in outlooks and s.has_seen(start_ms)]
        sampled = sampled_by([self.strata[i].tallies for i in known], start_ms, edges) if known else None
        if sampled is None:
            return
        some = (sampled.arrived.sum(axis=0) > 0).tolist()
        known = [i for i, has_records in zip(known, some, strict=True) if has_records]
        if not known:
            return
        tallies = [self.strata[i].tallies for i in known]
        _, sums = windows(tallies, start_ms, edges)
        count, total, squares = sums.transpose(2, 0, 1, 3).reshape(3, -1, sums.shape[3])
        # Of a group without a promise it is learnt what its values are, and that its stragglers may be anything.
        told = [outlooks[self.strata[i].key] for i in known]
        with np.errstate(divide="ignore", invalid="ignore"):
            straggler = np.array([o.straggler if o.promised else 1.0 for o in told])
            shares = straggler / np.abs(np.array([o.estimate if o.promised else 1.0 for o in told]))
        self.together.on_answered(known, sampled_by(tallies, start_ms, edges), (count, total, squares), shares)

    def look(self, start_ms: int, edges: Sequence[str], *, complete: bool = False, widening: float = 1.0) -> Look:
        """The block's part of the window that starts there, now.

        Args:
            complete: no more of it will come.
            widening: how many times as wide as the model says an interval is to be, if all that came was processed.
        """
        sampled = sampled_by([s.tallies for s in self.strata], start_ms, edges)
        offset = self.strata[0].offset(start_ms)
        stragglers, model = self.together.window_models(offset, sampled)
        if complete:
            arrived = sampled.arrived
            model = replace(model, population=arrived, events=arrived, straggler_width=np.zeros(len(self.strata)))
        sampling = model.sampling_width(sampled.count, np.array([s.mark.quantile for s in self.strata]))
        if widening > 1 and not complete:
            factor = np.where((sampled.count >= sampled.arrived).all(axis=0), widening, 1.0)
            sampling, model = sampling * factor, replace(model, straggler_width=model.straggler_width * factor)
        promised = np.ones(len(self.strata), bool)
        if complete:
            stragglers = replace(stragglers, known=promised)
            promised = sampled.count.sum(axis=0) > 1
        elif self.accuracy.scope is not None:
            seen = np.array([s.has_seen(start_ms) for s in self.strata])
            promised = seen & self._is_known(stragglers, model)
        behind = self.together.triangle.behind.reshape(len(self.strata), -1).T > 0
        return Look(self, start_ms, sampled, stragglers, model, sampling, promised, np.asarray(behind))

    def _is_known(self, stragglers: StragglersByMark, model: WindowModel) -> BoolArray:
        """Of which of them enough is known to state an interval."""
        error, size, events = self.accuracy.error, model.size, model.events
        seen = self.together.triangle.remembered().reshape(len(self.strata), -1).T
        part = np.where(seen > 0, events / np.maximum(seen, 1e-9), 0.0).sum(axis=0)
        unseen = -math.log(1 - self.accuracy.confidence) * part
        large = size >= max(LEAST_EVENTS, 1 / error)
        told = ~((seen <= 0) & (events > 0.5)).any(axis=0)
        return np.asarray(stragglers.known & large & told & (unseen <= error * size))


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of a block's part of a window. Arrays are by stratum, or [source, stratum].

    Attributes:
        sampling: half-width that comes from having processed only some of the records.
        promised: enough is known to state an interval.
        behind: sources that cannot be heard.
    """

    block: Block
    start_ms: int
    sampled: Sampled
    stragglers: StragglersByMark
    model: WindowModel
    sampling: FloatArray
    promised: BoolArray
    behind: BoolArray

    @property
    def met(self) -> BoolArray:
        """Whether the interval is within the error."""
        width = np.hypot(self.sampling, self.model.straggler_width)
        return np.asarray(self.stragglers.known & (width <= self.block.accuracy.error * np.abs(self.model.estimate)))

    def verdicts(self) -> tuple[dict[str, str], int | None]:
        """Of the strata with a promise, by key, why an answer is given that is not met, or nothing if it is.

        Returns:
            And the slot until which one of them waits, None if none does. One is enough for the answer to wait, and all
            that wait do so until the same slot, so the rest are not asked then.
        """
        reasons: dict[str, str] = {}
        for i, met in zip(np.flatnonzero(self.promised).tolist(), self.met[self.promised].tolist(), strict=True):
            stratum = self.block.strata[i]
            if met:
                reasons[stratum.key] = ""
                continue
            sampled = self.sampled.of(i)
            verdict = stratum.judge(self.start_ms, sampled, (self.stragglers.of(i), self.model.of(i)))
            if isinstance(verdict, Answer) and verdict.met:
                # By the model alone, whose intervals have been too narrow: with what comes next it may be.
                return reasons, stratum.slot + 1
            if not isinstance(verdict, Wait):
                reasons[stratum.key] = verdict.reason
            # No waiting makes an interval a part of nothing.
            elif self._has_mostly_come(i) and (zero := stratum.tallies.may_be_zero(sampled, self.block.accuracy.of)):
                reasons[stratum.key] = zero
            else:
                return reasons, stratum.base + verdict.until
        return reasons, None

    def _has_mostly_come(self, stratum: int) -> bool:
        arrived = float(self.sampled.arrived[:, stratum].sum())
        return arrived >= MOSTLY * float(self.model.size[stratum])

    def outlooks(self, reasons: Mapping[str, str]) -> list[Outlook]:
        """What each of the strata comes to; with groups, of those that have records in the window, or are expected to.

        Args:
            reasons: by key, why the answer is given though it may not be good enough.
        """
        numbers, met, nan, result = self._numbers(), self.met.tolist(), math.nan, []
        for i, (arrived, size) in enumerate(zip(self.sampled.arrived.sum(axis=0), self.model.size, strict=True)):
            if self.block.accuracy.scope is not None and arrived <= 0 and size <= 0.5:
                continue
            estimate, lower, upper, sampling, straggler, missing, come, expected, processed = numbers[i]
            key = self.block.strata[i].key
            if not self.promised[i]:
                few = (nan, nan, nan, nan, nan, come, expected, processed, TOO_FEW)
                result.append(Outlook(key, False, False, self._scaled(i), *few))
                continue
            reason = "" if met[i] else reasons.get(key) or "the interval is wider than the error"
            result.append(
                Outlook(key, True, met[i], estimate, lower, upper, sampling, straggler, missing, come, expected,
                        processed, reason)
            )  # fmt: skip
        return result

    def _numbers(self) -> list[list[float]]:
        """The numbers of an `Outlook`, from `estimate` to `sampled`, of each."""
        model, size = self.model, self.model.size
        variance = self.stragglers.deviation.reshape(len(size), -1).T ** 2
        total = variance.sum(axis=0)
        of_silent = np.where(self.behind, variance, 0.0).sum(axis=0)
        silent = np.where(total > 0, of_silent / np.where(total > 0, total, 1.0), 0.0)
        width = np.hypot(self.sampling, model.straggler_width)
        arrived = self.sampled.arrived.sum(axis=0)
        lower = model.estimate - width
        if self.block.accuracy.kind == "count":
            lower = np.maximum(lower, arrived)
        columns = (
            model.estimate, lower, model.estimate + width, self.sampling, model.straggler_width * np.sqrt(1 - silent),
            model.straggler_width * np.sqrt(silent), arrived, size, self.sampled.count.sum(axis=0),
        )  # fmt: skip
        table: list[list[float]] = np.stack(columns, axis=1).tolist()
        return table

    def _scaled(self, stratum: int) -> float:
        """The measure of what has arrived, from the part of it that was processed; NaN if all was: the data say it."""
        arrived, count, total = (x[:, stratum] for x in (self.sampled.arrived, self.sampled.count, self.sampled.total))
        rows = count > 0
        if not (count < arrived).any() or not rows.any():
            return math.nan
        worth = float((total[rows] / count[rows] * arrived[rows]).sum())
        return worth / float(arrived[rows].sum()) if self.block.accuracy.kind == "mean" else worth


def _table(place: IntArray, count: IntArray, shape: tuple[int, ...]) -> FloatArray:
    """Sums of counts by place."""
    result = np.zeros(shape)
    np.add.at(result.reshape(-1), place, count.astype(np.float64))
    return result
