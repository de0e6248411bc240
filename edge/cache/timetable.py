"""When the records of each group came in the newest slices, for streams that follow a schedule.

`arrival_profile` says in which part of a slice a group has its records. A schedule is finer: a flight leaves at the
same minute each day, and after the last flight nothing more comes. So for streams with few records the times of the
newest `SLICES` slices are stored. The expected number of records to come is a weighted mean. Its terms are the numbers
of records in these slices after the same time, and the profile's forecast, which counts as `PRIOR` slices.

Records on a schedule vary less in number than a Poisson process. The variance of their number as a multiple φ of its
mean is learnt for classes of the mean. P(no record) is the probability under the binomial (φ < 1) or negative binomial
distribution with these two moments, φ^(−m/(φ−1)).

When a slice closes, the forecasts with and without the times are scored at `CHECKPOINTS`, by the Poisson log-likelihood
of the records that then came (Gneiting and Raftery, JASA 102, 2007, section 3.3). The times are used as long as the
forecasts with them have the larger discounted score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edge.cache.error_target import NEWEST_WEIGHT
from edgewater.synopses import FloatArray, IntArray
from edgewater.synopses.encoding.state import State

MAX_TIMES = 1 << 14
"""Maximum number of records whose times are stored: of a slice, and of all slices. Of a larger slice no times are
stored."""
FEW_TIMES = 1 << 10  # limit: memory of a slice's times
TIMES_PER_GROUP = 16  # limit: memory of a slice's times
"""A slice with more than `FEW_TIMES` records, and more than this many per group, follows no schedule. Its times are not
stored."""
SLICES = 4  # limit: memory of the times
RETAINED = 1.0 - NEWEST_WEIGHT
"""Weight of a slice, and of its scores, relative to the next newer slice."""
PRIOR = 1.0  # measured: bench.budgets --trace flights; with 0.3, answers are up to a quarter later
MIN_EXPECTED = 1e-3
"""Smaller expectations are scored as this value, since a group without records so far may always get one."""
CHECKPOINTS = (0.5, 0.75, 0.875, 0.94, 0.97, 0.985, 0.995)
"""Elapsed fractions of a slice."""
CLASSES: FloatArray = np.array([0.03, 0.1, 0.3, 0.7, 1.5, 5.0])
"""Borders of the classes of means."""
SPREAD_PRIOR = 5.0
"""A Poisson process counts as this many expected records in each class."""
SPREAD_RANGE = (0.02, 20.0)  # limit: φ of a class with few records
_POSITION_BITS = 32  # format: of times in a checkpoint

Positions = npt.NDArray[np.uint32]
"""Times as fractions of their slice, in units of 2^-32."""


def positions_of(times: IntArray, start_ms: int, slice_ms: int) -> Positions:
    """Returns the positions of event times in their slice."""
    return position_at((times - start_ms) / slice_ms)


def position_at(elapsed: FloatArray | float) -> Positions:
    """Returns the positions of elapsed fractions of a slice."""
    scaled = np.floor(np.asarray(elapsed) * 2.0**_POSITION_BITS)
    return np.minimum(np.maximum(scaled, 0.0), 2.0**_POSITION_BITS - 1.0).astype(np.uint32)


def most_times(groups: int) -> int:
    """Returns how many times of a slice with this many groups are stored at most."""
    return min(FEW_TIMES + TIMES_PER_GROUP * groups, MAX_TIMES)


@dataclass(slots=True)
class KeptTimes:
    """The groups and positions of all records of an open slice, unless there are too many records.

    Attributes:
        parts: (numbers of groups, positions) per batch; None: incomplete, or already taken.
    """

    parts: list[tuple[npt.NDArray[np.int32], Positions]] | None = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.parts is not None

    @property
    def nbytes(self) -> int:
        return sum(8 * len(codes) for codes, _ in self.parts or ())

    def keep(self, codes: IntArray, positions: Positions | None, groups: int) -> None:
        """Adds the records of a batch.

        Args:
            codes: the group of each record.
            positions: of each record in the slice; None: unknown.
            groups: number of groups of the slice.
        """
        if self.parts is None:
            return
        if positions is None or sum(len(codes_of_batch) for codes_of_batch, _ in self.parts) + len(codes) > most_times(
            groups
        ):
            self.parts = None
        else:
            self.parts.append((codes.astype(np.int32), positions))

    def take(self) -> tuple[npt.NDArray[np.int32], Positions] | None:
        """Returns the groups and positions of all records, once; None: they are not complete."""
        parts, self.parts = self.parts, None
        if parts is None:
            return None
        codes = np.concatenate([c for c, _ in parts] or [np.zeros(0, np.int32)])
        return codes, np.concatenate([p for _, p in parts] or [np.zeros(0, np.uint32)])

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        if not self.parts:
            return {}
        codes, positions = zip(*self.parts, strict=True)
        return {"timed": np.concatenate(codes), "positions": np.concatenate(positions)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> KeptTimes:
        """Reads what `to_arrays` of a slice with records returned."""
        return cls([(arrays["timed"], arrays["positions"])] if "timed" in arrays else None)


@dataclass(frozen=True, slots=True)
class RecordTimes:
    """The records of a slice: hashes of their groups, and positions."""

    hashes: npt.NDArray[np.uint64]
    positions: Positions

    def __len__(self) -> int:
        return len(self.hashes)


@dataclass(slots=True)
class _Index:
    """The records of all slices whose times are stored, by group and time.

    Attributes:
        groups: hashes, ascending.
        ends: per group, the end of its records.
        keys: per record, the number of its group and its position.
        weights: [record + 1]: element i is the sum of the weights of the first i records.
        total: the sum of the weights of slices.
    """

    groups: npt.NDArray[np.uint64]
    ends: IntArray
    keys: npt.NDArray[np.int64]
    weights: FloatArray
    total: float

    @classmethod
    def of(cls, slices: tuple[RecordTimes | None, ...]) -> _Index:
        weighted = [(RETAINED**age, times) for age, times in enumerate(slices) if times is not None]
        hashes = np.concatenate([t.hashes for _, t in weighted] or [np.zeros(0, np.uint64)])
        positions = np.concatenate([t.positions for _, t in weighted] or [np.zeros(0, np.uint32)])
        weights = np.repeat([w for w, _ in weighted], [len(t) for _, t in weighted])
        groups, number = np.unique(hashes, return_inverse=True)
        keys = (number.astype(np.int64) << _POSITION_BITS) | positions.astype(np.int64)
        order = np.argsort(keys, kind="stable")
        ends = np.cumsum(np.bincount(number, minlength=len(groups)))
        return cls(groups, ends, keys[order], np.r_[0.0, np.cumsum(weights[order])], sum(w for w, _ in weighted))


@dataclass(slots=True)
class Timetable:
    """The times of one query's records in its newest slices.

    Attributes:
        slices: the newest slice first; None: the slice had too many records.
        advantage: the discounted score of forecasts with the times, less the score of forecasts without them.
        spread: float64 [2, class], discounted sums of squared errors of forecasts, and of forecasts.
    """

    slices: tuple[RecordTimes | None, ...] = ()
    advantage: float = 0.0
    spread: FloatArray = field(default_factory=lambda: np.zeros((2, len(CLASSES) + 1)))
    _index: _Index = field(init=False)

    def __post_init__(self) -> None:
        self._index = _Index.of(self.slices)

    @property
    def nbytes(self) -> int:
        index = self._index
        return sum(12 * len(s) for s in self.slices if s) + sum(
            a.nbytes for a in (index.groups, index.ends, index.keys, index.weights)
        )

    @property
    def is_used(self) -> bool:
        return self.advantage > 0.0 and self._index.total > 0.0

    def numbers_of(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        """Returns the number of each group in the timetable; -1: it has no record there."""
        groups = self._index.groups
        at = np.searchsorted(groups, hashes)
        inside = at < len(groups)
        inside[inside] = groups[at[inside]] == hashes[inside]
        return np.where(inside, at, -1).astype(np.int32)

    def expected(self, numbers: npt.NDArray[np.int32], elapsed: float, otherwise: FloatArray) -> FloatArray:
        """Returns the expected number of records to come after the fraction `elapsed` of a slice, float64 per group.

        Args:
            numbers: `numbers_of` the groups.
            otherwise: the forecasts without the times.
        """
        index, known = self._index, np.flatnonzero(numbers >= 0)
        of = numbers[known].astype(np.int64)
        at = np.searchsorted(index.keys, (of << _POSITION_BITS) | int(position_at(elapsed)), "right")
        result = PRIOR * otherwise
        result[known] += index.weights[index.ends[of]] - index.weights[at]
        return np.asarray(result / (index.total + PRIOR), np.float64)

    def dispersion(self, expected: FloatArray) -> FloatArray:
        """Returns φ for expected numbers of records."""
        squares, means = self.spread + SPREAD_PRIOR
        return np.asarray(np.clip(squares / means, *SPREAD_RANGE)[np.digitize(expected, CLASSES)])

    def score(self, numbers: npt.NDArray[np.int32], later: FloatArray, otherwise: FloatArray) -> None:
        """Scores the forecasts for a slice that has just closed.

        Args:
            numbers: `numbers_of` its groups.
            later: float64 [checkpoint, group], the records after each of `CHECKPOINTS`.
            otherwise: the same shape, the forecasts without the times.
        """
        if not self._index.total:
            return
        mean = np.array([self.expected(numbers, *pair) for pair in zip(CHECKPOINTS, otherwise, strict=True)])
        used, other = (np.maximum(m, MIN_EXPECTED) for m in (mean, otherwise))
        self.advantage = RETAINED * self.advantage + float((later * np.log(used / other) - used + other).sum())
        at = np.digitize(mean, CLASSES).ravel()
        sums = [np.bincount(at, a.ravel(), len(CLASSES) + 1) for a in ((later - mean) ** 2, mean)]
        self.spread = RETAINED * self.spread + np.array(sums)

    def learn(self, times: RecordTimes | None) -> None:
        """Adds the slice that has just closed; None: it had too many records."""
        slices, records = [times], len(times or ())
        for older in self.slices[: SLICES - 1]:
            records += len(older or ())
            slices.append(older if records <= MAX_TIMES else None)
        self.slices = tuple(slices)
        self._index = _Index.of(self.slices)

    def to_state(self) -> State:
        numbers = [self.advantage, [None if s is None else len(s) for s in self.slices]]
        stored = [s for s in self.slices if s is not None]
        hashes = np.concatenate([s.hashes for s in stored] or [np.zeros(0, np.uint64)])
        positions = np.concatenate([s.positions for s in stored] or [np.zeros(0, np.uint32)])
        return State(numbers, {"spread": self.spread, "hashes": hashes, "positions": positions})

    @classmethod
    def from_state(cls, state: State) -> Timetable:
        advantage, lengths = state.numbers
        slices: list[RecordTimes | None] = []
        first = 0
        for length in lengths:
            part = slice(first, first + (length or 0))
            first = part.stop
            times = RecordTimes(state.arrays["hashes"][part], state.arrays["positions"][part])
            slices.append(None if length is None else times)
        return cls(tuple(slices), advantage, state.arrays["spread"])
