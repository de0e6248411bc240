"""Haar wavelets: the largest coefficients of a signal, for sums over ranges of its index.

Gilbert et al., "Surfing Wavelets on Streams" (VLDB 2001): on a sequence in order, a finished coefficient never changes
again. So the B coefficients of largest orthonormal magnitude are the best approximation in the L2 norm with B
coefficients, in one pass. (Condor's wavelet, after Karras and Mamoulis, minimises the maximum error of a point:
`haar_max`.)

The effect of discarded coefficients is tracked: the L2 norm of the error, and per level the maximum error of a retained
coefficient and the maximum magnitude of a discarded one. Every answer has deterministic bounds.

`merge_many` adds signals on one index axis, such as the same seconds at several sites. Partials of one signal do not
merge: `manager.SliceManager` stores consecutive partials, `manager.GeneralManager` partials that are dealt round robin.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from edgewater.base.errors import CorruptSynopsis, InvalidRecord, InvalidRequest
from edgewater.synopses.base import CHUNK, Estimate, FloatArray, IntArray, Properties, Stack
from edgewater.synopses.checks import check_whole
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import Layout, field, layout_for
from edgewater.synopses.ordered import OrderedSynopsis
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
MAX_COEFFICIENTS = 1 << 20  # limit: memory of a wavelet
MAX_LENGTH = 1 << 48  # limit: indices that float64 represents
LEVELS = 49  # derived: MAX_LENGTH
_EPSILON = float(np.finfo(np.float64).eps)


_GREATEST = 1e143  # derived: squares of sums do not overflow
"""Beyond all sums of values and coefficients."""
FIELDS = (
    field("level and length", "<i8", 2, least=0, most=MAX_LENGTH),
    field("norms", "<f8", 2, least=0, most=_GREATEST**2.1),
    field("means", "<f8", "blocks", least=-_GREATEST, most=_GREATEST),
    field("bounds of dropped coefficients", "<f8", LEVELS, least=0, most=_GREATEST),
    field("bounds of kept coefficients", "<f8", LEVELS, least=0, most=_GREATEST),
    field("levels", "<i8", "coefficients", least=1, most=LEVELS - 1),
    field("positions", "<i8", "coefficients", least=0, most=MAX_LENGTH),
    field("details", "<f8", "coefficients", least=-_GREATEST, most=_GREATEST),
)


class HaarWavelet(OrderedSynopsis):
    """A signal (values by index, from 0) in its `coefficients` largest Haar coefficients.

    It has no groups, and uses the order of values, not their times. Merging adds signals, so it is not idempotent.
    Merges in another order may discard other coefficients, so answers differ within their bounds.

    >>> from edgewater.synopses import RangeSum
    >>> load = HaarWavelet(4)
    >>> load.update([3, 3, 3, 3, 9, 9, 9, 9])
    >>> load.query(RangeSum(2, 5)).value
    24.0
    """

    kind: ClassVar[str] = "haar"
    layouts: ClassVar[tuple[Layout, ...]] = (Layout.of(*FIELDS),)
    properties: ClassVar[Properties] = Properties(commutative=False, ordered=True)

    def __init__(self, coefficients: int = DEFAULT_COEFFICIENTS) -> None:
        self.coefficients = check_whole("coefficients", coefficients, 1, MAX_COEFFICIENTS)
        self.level = 0
        self._front = Frontline()
        self._held = no_coefficients()
        self._pending: list[Coefficients] = []
        self._unconsolidated = 0  # number of values whose coefficients are pending
        self._residual_norm = 0.0  # L2 norm of an error of unknown direction
        self._discarded_energy = 0.0  # energy of the coefficients discarded since; they are orthogonal
        self._dropped_bound = np.zeros(LEVELS)  # per level: maximum magnitude of a discarded coefficient
        self._kept_bound = np.zeros(LEVELS)  # per level: maximum error of a retained coefficient

    def __repr__(self) -> str:
        return f"<HaarWavelet of {self.records} values, {self.nbytes} bytes>"

    @property
    def records(self) -> int:
        """The length of the signal."""
        return self._front.length

    @property
    def capacity(self) -> int:
        """The current number of coefficients: halved per level."""
        return max(self.coefficients >> self.level, 1)

    @property
    def nbytes(self) -> int:
        return 24 * sum(len(c) for c in (self._held, *self._pending)) + 16 * LEVELS + 8 * len(self._front.means)

    @property
    def error(self) -> float:
        """An upper bound of the L2 norm of the difference between the signal and its approximation."""
        self.consolidate()
        return (self._residual_norm + math.sqrt(self._discarded_energy)) * (
            1 + 1e-12
        )  # the factor covers rounding of the sum of energies

    def update(self, values: Any, *, times: Any = None) -> None:
        """Appends values to the signal.

        Args:
            values: NumPy or Arrow array or a sequence of finite numbers below 1e140 in magnitude, without nulls:
                skipping one would shift all later values.

        Raises:
            InvalidRecord: other values; nothing is added then.
        """
        signal = signal_of(values)
        if self.records + len(signal) > MAX_LENGTH:
            raise InvalidRecord("values", f"{len(signal)} values", f"at most {MAX_LENGTH} altogether")
        for at in range(0, len(signal), CHUNK):
            self._pending += self._front.append(signal[at : at + CHUNK])
            self._unconsolidated = self._unconsolidated + len(signal[at : at + CHUNK])
            if self._unconsolidated > max(4 * self.capacity, 1 << 12):
                self.consolidate()

    def consolidate(self) -> None:
        """Merges pending coefficients and retains the largest. No answer depends on when this happens."""
        if self._pending:
            self._held = concatenated([self._held, *self._pending])
            self._pending, self._unconsolidated = [], 0
            self._threshold()

    def _threshold(self) -> None:
        """Retains at most `capacity` coefficients, and adds the others to the error bounds."""
        weights = self._held.weights()
        candidates = self._chosen(weights)
        lost = weights > 0
        lost[candidates] = False
        if lost.any():
            levels, details = self._held.levels[lost], self._held.details[lost]
            with np.errstate(over="ignore"):
                # A square that underflows would be an uncounted error.
                squares = np.where(details != 0, np.maximum(details * details, np.finfo(np.float64).tiny), 0.0)
                self._discarded_energy += float(np.sum(squares * np.exp2(levels)))
            np.maximum.at(self._dropped_bound, levels, np.abs(details) + self._kept_bound[levels])
        kept = self._held.at(candidates)
        self._held = kept.at(np.argsort(kept.keys()))

    def _chosen(self, weights: FloatArray) -> IntArray:
        """Returns the indices of the coefficients of largest weight; ties by the lowest key."""
        least = 0.0
        if len(weights) > self.capacity:
            least = -np.partition(-weights, self.capacity - 1)[self.capacity - 1]
        candidates = np.flatnonzero((weights >= least) & (weights > 0))
        if len(candidates) > self.capacity:
            order = np.lexsort((self._held.keys()[candidates], -weights[candidates]))
            candidates = candidates[order[: self.capacity]]
        return candidates

    def merge_many(self, others: list[Self]) -> Self:
        """Returns the sum of the signals, index by index, as a new signal. Shorter signals are extended by zeros.

        Raises:
            IncompatibleSynopses: another kind or number of coefficients; the message names both.
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
        self._residual_norm += math.sqrt(self._discarded_energy) + other.error
        self._discarded_energy = 0.0
        # Coefficients retained by both signals; by one of them; by neither.
        off = np.maximum(self._kept_bound + other._kept_bound, 0.0)
        for chosen, levels, error in (
            (~np.isin(mine, theirs), self._held.levels, self._kept_bound + other._dropped_bound),
            (~np.isin(theirs, mine), other._held.levels, other._kept_bound + self._dropped_bound),
        ):
            alone = levels[chosen]
            off[alone] = np.maximum(off[alone], error[alone])
        self._kept_bound, self._dropped_bound = off, self._dropped_bound + other._dropped_bound
        self._held = concatenated([self._held, other._held]).summed()
        self._threshold()

    def _extended(self, length: int) -> Self:
        """Returns a copy that is extended by zeros to this length."""
        self.consolidate()
        result = type(self)(self.coefficients)
        result.level, result._front, result._held = self.level, self._front.copy(), self._held
        result._residual_norm, result._discarded_energy = self._residual_norm, self._discarded_energy
        result._dropped_bound, result._kept_bound = self._dropped_bound.copy(), self._kept_bound.copy()
        while result.records < length:
            at = result.records
            room = (at & -at).bit_length() - 1 if at else 63
            level = min(room, (length - at).bit_length() - 1)
            result._pending.append(result._front.push(level, 0.0))
        result.consolidate()
        return result

    def _require_same(self, other: Self) -> None:
        codec.require_equal("synopses", self.kind, getattr(other, "kind", type(other).__name__))
        mine, theirs = ({"coefficients": each.coefficients, "level": each.level} for each in (self, other))
        codec.require_equal(self.kind, mine, theirs)

    def signal(self) -> FloatArray:
        """Returns the approximation of the signal, shape (records,)."""
        self.consolidate()
        result = np.zeros(self.records)
        for level, start, mean in self._front.blocks():
            result[start : start + (1 << level)] = mean
        for level in np.unique(self._held.levels)[::-1]:
            chosen = self._held.at(np.flatnonzero(self._held.levels == level))
            index = (chosen.positions[:, None] << level) + np.arange(1 << level)
            half = np.where(np.arange(1 << level) < 1 << (level - 1), 1.0, -1.0)
            result[index] += chosen.details[:, None] * half
        return result

    def _range_sum(self, first: int, last: int) -> Estimate:
        self.consolidate()
        end = last + 1
        terms = [
            mean * max(min(end, start + (1 << level)) - max(first, start), 0)
            for level, start, mean in self._front.blocks()
        ]
        parts = self._held.details * self._held.overlaps(first, end)
        value = math.fsum([*terms, *parts.tolist()])
        # The rounding of the transform and of this sum is added, so that bounds hold to the last digit.
        rounding = 4 * _EPSILON * LEVELS * (math.fsum(map(abs, terms)) + float(np.abs(parts).sum()))
        error = min(self._norm_error(end - first), self._path_error(first, end)) + rounding
        return Estimate(value, value - error, value + error, 1.0, self.kind)

    def _norm_error(self, length: int) -> float:
        """Returns the error of a sum of `length` values that the norm implies."""
        return math.sqrt(length) * self.error

    def _path_error(self, first: int, end: int) -> float:
        """Returns the error of a range sum that coefficients imply whose support an end of the range cuts."""
        held, total = self._held.keys(), 0.0
        for level, start, _ in self._front.blocks():
            levels = np.arange(1, level + 1)
            cut = [index for index in {first, end} if start < index < start + (1 << level)]
            # One coefficient per level contains the index. A coefficient that contains both ends counts once.
            each = np.unique(np.concatenate([np.zeros(0, np.int64), *((i >> levels) << 6 | levels for i in cut)]))
            at, positions = each & 63, each >> 6
            size = np.abs(imbalance(at, positions, first, end))
            total += float(np.sum(size * np.where(np.isin(each, held), self._kept_bound[at], self._dropped_bound[at])))
        return total

    def to_message(self) -> SynopsisMessage:
        self.consolidate()
        message = codec.header(self.kind, self.version, {"coefficients": self.coefficients}, records=self.records)
        held = self._held
        arrays = (
            np.array([self.level, self.records]),
            np.array([self._residual_norm, self._discarded_energy]),
            np.array(self._front.means, np.float64),
            self._dropped_bound,
            self._kept_bound,
            held.levels,
            held.positions,
            held.details,
        )
        message.arrays.extend(codec.encode(array) for array in arrays)
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""
        parameters = codec.open_message(message, cls.kind, cls.version, len(message.arrays))
        layout = layout_for(cls.kind, cls.layouts, message.arrays)
        meta, norms, means, missing, off, *columns = layout.decode(cls.kind, message.arrays)[: len(FIELDS)]
        try:
            result = cls(parameters["coefficients"])
            level, length = (int(x) for x in meta)
            loose, energy = (float(x) for x in norms)
            result.level = check_whole("level", level, 0, result.coefficients.bit_length() - 1)
            result._front = Frontline(check_whole("length", length, 0, MAX_LENGTH), means.tolist())
            result._held = Coefficients(*columns)
            result._residual_norm, result._discarded_energy, result._dropped_bound, result._kept_bound = (
                loose,
                energy,
                missing,
                off,
            )
            result._check_state(means)
        except (KeyError, TypeError, ValueError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and arrays do not fit: {exc}") from exc
        return result

    def _check_state(self, means: FloatArray) -> None:
        """Raises ValueError unless decoded arrays are a valid state."""
        held, blocks = self._held, block_levels(self.records)
        if len(means) != len(blocks) or len(held) > self.capacity:
            raise ValueError(f"{len(means)} blocks and {len(held)} coefficients for {self.records} values")
        top = blocks[0] if blocks else 0
        if ((held.levels > top) | (held.positions > self.records >> held.levels)).any():
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
        unavailable="a wavelet needs all records in the order of one signal, which edges and groups do not provide:"
        " build it with center.batch or edgewater.synopses.HaarWavelet",
    )
)
