"""Haar wavelets: a signal in its largest coefficients, for sums over ranges of its index.

Gilbert et al., "Surfing Wavelets on Streams" (VLDB 2001): on a sequence that comes in order a finished
coefficient never changes again, so keeping the B of largest orthonormal magnitude gives the best
approximation in the L2 norm that B coefficients can give, in one pass. (Condor's, after Karras and
Mamoulis, minimises the greatest error of a point: `haar_max`.)

What is discarded is gone, so its effect is tracked: the L2 norm of the error, and per level how large
an error a coefficient that is held or is not held can have. Every answer is within certain bounds.

- `append`: another signal behind this one, if its blocks fit the dyadic grid of this one.
- `merge_many`: signals on one index axis, such as the same seconds at several sites, are added up.
- Parts of one signal that were dealt out round robin do not merge; that is a manager's work.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from edgewater.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRecord, InvalidRequest
from edgewater.synopses.base import (
    Count,
    Estimate,
    FloatArray,
    IntArray,
    Mean,
    Properties,
    Question,
    Questions,
    Stack,
    Sum,
)
from edgewater.synopses.encoding import codec
from edgewater.synopses.items import check_whole
from edgewater.synopses.questions import Point, RangeSum
from edgewater.synopses.registry import Function, Parameters, register_function
from edgewater.synopses.wavelets.haar_blocks import (
    Coefficients,
    Frontline,
    block_levels,
    concatenated,
    imbalance,
    no_coefficients,
    signal_of,
)
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

DEFAULT_COEFFICIENTS = 128
MAX_COEFFICIENTS = 1 << 20
MAX_LENGTH = 1 << 48
_LEVELS = 49
_CHUNK = 1 << 15
_EPSILON = float(np.finfo(np.float64).eps)


class HaarWavelet:
    """A signal (values by index, from 0) in its `coefficients` largest Haar coefficients.

    Not for groups: an index axis has no groups. The order of values is all that counts; times do not.
    Merging adds signals up, so it is not idempotent; in another order other coefficients may be
    discarded on the way, and answers differ within their bounds.
    """

    kind: ClassVar[str] = "haar"
    version: ClassVar[int] = 1
    properties: ClassVar[Properties] = Properties(commutative=False, foldable=True, ordered=True)
    questions: ClassVar[Questions] = (RangeSum, Point, Sum, Mean, Count)

    def __init__(self, coefficients: int = DEFAULT_COEFFICIENTS) -> None:
        self.coefficients = check_whole("coefficients", coefficients, 1, MAX_COEFFICIENTS)
        self.level = 0
        self._front = Frontline()
        self._held = no_coefficients()
        self._pending: list[Coefficients] = []
        self._waiting = 0  # values since pending coefficients were last taken in
        self._loose = 0.0  # L2 norm of an error of which nothing but the norm is known
        self._energy = 0.0  # of coefficients discarded since, orthogonal to each other
        self._missing = np.zeros(_LEVELS)  # per level: how large a coefficient may be that is not held
        self._off = np.zeros(_LEVELS)  # per level: how far one may be off that is held

    def __repr__(self) -> str:
        return f"<HaarWavelet of {self.records} values, {self.nbytes} bytes>"

    @property
    def records(self) -> int:
        """The length of the signal."""
        return self._front.length

    @property
    def capacity(self) -> int:
        """Coefficients held now: halved per level of folding."""
        return max(self.coefficients >> self.level, 1)

    @property
    def nbytes(self) -> int:
        return 24 * sum(len(c) for c in (self._held, *self._pending)) + 16 * _LEVELS + 8 * len(self._front.means)

    @property
    def error(self) -> float:
        """A bound of the L2 norm of the difference between the signal and what is held of it."""
        self._settle()
        return (self._loose + math.sqrt(self._energy)) * (1 + 1e-12)  # energies are summed with rounding

    # Updating

    def update(self, values: Any, *, times: Any = None, weights: Any = None) -> None:
        """Adds values behind the signal.

        Args:
            values: NumPy or Arrow array or a sequence of finite numbers below 1e140 in magnitude. A null has no
                place in a signal, and leaving it out would move all behind it.
            weights: not taken.

        Raises:
            InvalidRecord: anything else; nothing is added then.
        """
        if weights is not None:
            raise InvalidRecord("weights", type(weights).__name__, "no weights", "a signal has one value per index")
        signal = signal_of(values)
        if self.records + len(signal) > MAX_LENGTH:
            raise InvalidRecord("values", f"{len(signal)} values", f"at most {MAX_LENGTH} altogether")
        for at in range(0, len(signal), _CHUNK):
            self._pending += self._front.append(signal[at : at + _CHUNK])
            self._waiting = self._waiting + len(signal[at : at + _CHUNK])
            if self._waiting > max(4 * self.capacity, 1 << 12):
                self._settle()

    def add_at(self, index: int, amount: float) -> None:
        """Adds to a value that is there already, such as by a late record. Bounds stay certain.

        Raises:
            InvalidRequest: no value at this index.
            InvalidRecord: not a finite number.
        """
        check_whole("index", index, 0, self.records - 1)
        change = float(signal_of([amount])[0])
        self._settle()
        # From here on the discarded part is known by its norm alone: what is added now overlaps it.
        self._loose, self._energy = self.error, 0.0
        for number, (level, start, mean) in enumerate(self._front.blocks()):
            if start <= index < start + (1 << level):
                self._front.means[number] = mean + math.ldexp(change, -level)
                levels = np.arange(1, level + 1)
                signs = np.where(index >> (levels - 1) & 1, -1.0, 1.0)
                path = Coefficients(levels, index >> levels, signs * np.ldexp(change, -levels))
                # A coefficient that was discarded comes back without what it was.
                self._off[levels] = np.maximum(self._off[levels], self._missing[levels])
                self._held = concatenated([self._held, path]).summed()
        self._threshold()

    def _settle(self) -> None:
        """Takes pending coefficients in and keeps the largest. No answer depends on when this is done."""
        if self._pending:
            self._held = concatenated([self._held, *self._pending])
            self._pending, self._waiting = [], 0
            self._threshold()

    def _threshold(self) -> None:
        """Keeps at most `capacity` coefficients, and notes what is lost with the others."""
        weights = self._held.weights()
        candidates = self._chosen(weights)
        lost = weights > 0
        lost[candidates] = False
        if lost.any():
            levels, details = self._held.levels[lost], self._held.details[lost]
            self._energy += float(np.sum(details * details * np.exp2(levels)))
            np.maximum.at(self._missing, levels, np.abs(details) + self._off[levels])
        kept = self._held.at(candidates)
        self._held = kept.at(np.argsort(kept.keys()))

    def _chosen(self, weights: FloatArray) -> IntArray:
        """The places of the coefficients of largest weight; of equal ones those with the lowest key."""
        least = 0.0
        if len(weights) > self.capacity:
            least = -np.partition(-weights, self.capacity - 1)[self.capacity - 1]
        candidates = np.flatnonzero((weights >= least) & (weights > 0))
        if len(candidates) > self.capacity:
            order = np.lexsort((self._held.keys()[candidates], -weights[candidates]))
            candidates = candidates[order[: self.capacity]]
        return candidates

    # Merging

    def merge_many(self, others: list[Self]) -> Self:
        """The sum of the signals, index by index, as a new one. A shorter signal goes on as zeros.

        Raises:
            IncompatibleSynopses: another kind, or another number of coefficients; names both.
        """
        length = max(s.records for s in (self, *others))
        result = self._extended(length)
        for other in others:
            self._require_same(other)
            result._add(other._extended(length))
        return result

    def _add(self, other: Self) -> None:
        """Adds a signal of equal length."""
        mine, theirs = (s._held.keys() for s in (self, other))
        self._front.means = [a + b for a, b in zip(self._front.means, other._front.means, strict=True)]
        self._loose += math.sqrt(self._energy) + other.error
        self._energy = 0.0
        # Held by both; by one of them only; by none.
        off = np.maximum(self._off + other._off, 0.0)
        for chosen, levels, error in (
            (~np.isin(mine, theirs), self._held.levels, self._off + other._missing),
            (~np.isin(theirs, mine), other._held.levels, other._off + self._missing),
        ):
            alone = levels[chosen]
            off[alone] = np.maximum(off[alone], error[alone])
        self._off, self._missing = off, self._missing + other._missing
        self.level = max(self.level, other.level)
        self._held = concatenated([self._held, other._held]).summed()
        self._threshold()

    def append(self, other: Self) -> Self:
        """This signal with `other` behind it, as a new one.

        Raises:
            IncompatibleSynopses: other parameters, or a length of this one that is no multiple of the largest
                power of two in the other's length: its coefficients then have no place in this one's grid.
        """
        self._require_same(other)
        other._settle()
        largest = 1 << max(other.records.bit_length() - 1, 0)
        if self.records % largest:
            raise IncompatibleSynopses(
                f"{self.kind}: a signal of {other.records} values cannot be appended to one of {self.records}, "
                f"which is no multiple of {largest}"
            )
        result = self._extended(self.records)
        start = self.records
        moved = other._held.positions + (start >> other._held.levels)
        result._pending.append(Coefficients(other._held.levels, moved, other._held.details))
        result._pending += [result._front.push(level, mean) for level, _, mean in other._front.blocks()]
        # The errors have no index in common.
        result._loose = math.hypot(self._loose, other._loose)
        result._energy += other._energy
        result._missing = np.maximum(self._missing, other._missing)
        result._off = np.maximum(self._off, other._off)
        result.level = max(self.level, other.level)
        result._settle()
        return result

    def fold(self, level: int = 1) -> Self:
        """A copy with half as many coefficients per level and a wider bound. Raises InvalidRequest."""
        most = self.capacity.bit_length() - 1
        if not 0 <= level <= most:
            raise InvalidRequest("level", level, f"0 to {most}", f"{self.kind} with {self.capacity} coefficients")
        result = self._extended(self.records)
        result.level += level
        result._threshold()
        return result

    def _extended(self, length: int) -> Self:
        """A copy, with zeros behind up to this length."""
        self._settle()
        result = type(self)(self.coefficients)
        result.level, result._front, result._held = self.level, self._front.copy(), self._held
        result._loose, result._energy = self._loose, self._energy
        result._missing, result._off = self._missing.copy(), self._off.copy()
        while result.records < length:
            at = result.records
            room = (at & -at).bit_length() - 1 if at else 63
            level = min(room, (length - at).bit_length() - 1)
            result._pending.append(result._front.push(level, 0.0))
        result._settle()
        return result

    def _require_same(self, other: Self) -> None:
        codec.require_equal("synopses", self.kind, getattr(other, "kind", type(other).__name__))
        codec.require_equal(self.kind, {"coefficients": self.coefficients}, {"coefficients": other.coefficients})

    # Asking

    def query(self, question: Question | None = None) -> Estimate:
        """The answer, with certain bounds; without a question, the sum of the signal.

        Raises:
            InvalidRequest: a question that is not one of `questions`, or an index that is not there.
        """
        n = self.records
        match question:
            case Count():
                return Estimate(n, n, n)
            case Point(index):
                return self._sum(check_whole("index", index, 0, n - 1), index)
            case RangeSum(first, last):
                check_whole("last", last, 0, n - 1)
                return self._sum(check_whole("first", first, 0, last), last)
            case None | Sum() | Mean():
                if not n:
                    return Estimate(math.nan, math.nan, math.nan)
                total = self._sum(0, n - 1)
                size = n if isinstance(question, Mean) else 1
                return Estimate(total.value / size, total.lower / size, total.upper / size, 1.0, self.kind)
        able = ", ".join(q.__name__ for q in self.questions)
        raise InvalidRequest("question", question, f"one of {able}", f"{self.kind} cannot answer it")

    def signal(self) -> FloatArray:
        """What is held of the signal, as values, shape (records,)."""
        self._settle()
        result = np.zeros(self.records)
        for level, start, mean in self._front.blocks():
            result[start : start + (1 << level)] = mean
        for level in np.unique(self._held.levels)[::-1]:
            chosen = self._held.at(np.flatnonzero(self._held.levels == level))
            index = (chosen.positions[:, None] << level) + np.arange(1 << level)
            half = np.where(np.arange(1 << level) < 1 << (level - 1), 1.0, -1.0)
            result[index] += chosen.details[:, None] * half
        return result

    def _sum(self, first: int, last: int) -> Estimate:
        self._settle()
        end = last + 1
        terms = [
            mean * max(min(end, start + (1 << level)) - max(first, start), 0)
            for level, start, mean in self._front.blocks()
        ]
        parts = self._held.details * self._held.overlaps(first, end)
        value = math.fsum([*terms, *parts.tolist()])
        # Rounding, of the transform and of this sum, so that bounds hold to the last digit.
        rounding = 4 * _EPSILON * _LEVELS * (math.fsum(map(abs, terms)) + float(np.abs(parts).sum()))
        error = min(self._norm_error(end - first), self._path_error(first, end)) + rounding
        return Estimate(value, value - error, value + error, 1.0, self.kind)

    def _norm_error(self, length: int) -> float:
        """The error of a sum of this many values, by the norm."""
        return math.sqrt(length) * self.error

    def _path_error(self, first: int, end: int) -> float:
        """The error of a range sum by coefficients: only those whose support an end of the range cuts count."""
        held, total = self._held.keys(), 0.0
        for level, start, _ in self._front.blocks():
            levels = np.arange(1, level + 1)
            cut = [index for index in {first, end} if start < index < start + (1 << level)]
            # The one coefficient per level that has the index inside, for either end, once.
            each = np.unique(np.concatenate([np.zeros(0, np.int64), *((i >> levels) << 6 | levels for i in cut)]))
            at, positions = each & 63, each >> 6
            size = np.abs(imbalance(at, positions, first, end))
            total += float(np.sum(size * np.where(np.isin(each, held), self._off[at], self._missing[at])))
        return total

    # Bytes

    def to_message(self) -> SynopsisMessage:
        self._settle()
        message = codec.header(self.kind, self.version, {"coefficients": self.coefficients}, records=self.records)
        held = self._held
        arrays = (
            np.array([self.level, self.records]),
            np.array([self._loose, self._energy]),
            np.array(self._front.means, np.float64),
            self._missing,
            self._off,
            held.levels,
            held.positions,
            held.details,
        )
        message.arrays.extend(codec.encode(array) for array in arrays)
        return message

    def to_bytes(self) -> bytes:
        return codec.seal(self.to_message())

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""
        return cls.from_message(codec.unseal(data))

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""
        parameters = codec.open_message(message, cls.kind, cls.version, 8)
        meta, norms, means, missing, off, *columns = (codec.decode(a) for a in message.arrays)
        try:
            result = cls(parameters["coefficients"])
            level, length = (int(x) for x in meta)
            loose, energy = (float(x) for x in norms)
            result.level = check_whole("level", level, 0, result.coefficients.bit_length() - 1)
            result._front = Frontline(check_whole("length", length, 0, MAX_LENGTH), means.tolist())
            result._held = Coefficients(*columns)
            result._loose, result._energy, result._missing, result._off = loose, energy, missing, off
            result._check_state(means)
        except (KeyError, TypeError, ValueError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and arrays do not fit: {exc}") from exc
        return result

    def _check_state(self, means: FloatArray) -> None:
        """Raises ValueError unless decoded arrays are the state of a wavelet."""
        held, blocks = self._held, block_levels(self.records)
        columns = (held.levels, held.positions, held.details)
        typed = [c.dtype.str for c in columns] == ["<i8", "<i8", "<f8"] and len({c.shape for c in columns}) == 1
        bounds = np.concatenate([self._missing, self._off, [self._loose, self._energy]])
        shaped = self._missing.shape == self._off.shape == (_LEVELS,) and means.shape == (len(blocks),)
        if not typed or not shaped or held.levels.ndim != 1 or len(held) > self.capacity:
            raise ValueError("arrays of other shapes or types")
        if not (bounds >= 0).all() or not np.isfinite([*held.details, *means]).all():
            raise ValueError("bounds below zero, or numbers that are not finite")
        top = blocks[0] if blocks else 0
        if ((held.levels < 1) | (held.levels > top) | (held.positions < 0)).any():
            raise ValueError("coefficients out of range")
        ends = (held.positions + 1) << held.levels
        within = np.array([0, *np.cumsum([1 << level for level in blocks])])
        starts = ends - (1 << held.levels)
        block = np.searchsorted(within, starts, side="right")
        if (ends > within[np.minimum(block, len(within) - 1)]).any() or (np.diff(held.keys()) <= 0).any():
            raise ValueError("coefficients across blocks, or out of order")


def _no_stack(_: Parameters, __: pa.DataType | None) -> Stack:
    raise NotImplementedError("haar has no stack of groups")


register_function(
    Function(
        "haar",
        _no_stack,
        unavailable="a wavelet needs all records in the order of one signal, which edges and groups do not have: build"
        " it with center.batch or edgewater.synopses.HaarWavelet",
    )
)
