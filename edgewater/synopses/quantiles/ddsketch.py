"""DDSketch: quantiles with a bounded relative error, for values of either sign.

Masson, Rim and Lee, "DDSketch" (VLDB 2019), with the uniform collapse of Epicoco et al., "UDDSketch"
(IEEE Access 2020): when a sketch has too many bins, γ becomes γ² and neighbouring bins become one, so
the bound holds for every quantile and not for the high ones only. A sketch's bins are named by the
integers (α, level), never by a float γ; sketches of different levels merge at the higher one. The
level is the least at which the bins fit, which depends on what was added and not on the order.

Bins are cells (`cells.py`) numbered by `SignedBins`, in the order of the values. NaN is counted apart and
has no rank; infinities do have one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.errors import CorruptSynopsis, InvalidRequest
from edgewater.synopses.base import (
    Count,
    Estimates,
    FloatArray,
    IntArray,
    Maximum,
    Mean,
    Minimum,
    Properties,
    Quantile,
    Question,
    Questions,
    Rank,
    Sum,
)
from edgewater.synopses.cells import Cells, cell_keys, cells_of, groups_of
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.columns import Many
from edgewater.synopses.exact.aggregates import ArrayStack
from edgewater.synopses.quantiles.log_bins import (
    MAX_ACCURACY,
    MIN_ACCURACY,
    OFFSET,
    ZERO,
    SignedBins,
    coarser,
    collapsed_accuracy,
    log_bins,
)
from edgewater.synopses.registry import Function, Parameter, Parameters, register_function, register_kind
from edgewater.synopses.single import SingleSynopsis
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

DEFAULT_ACCURACY = 0.01
ACCURACY_ACCEPTED = f"a relative accuracy from {MIN_ACCURACY} to {MAX_ACCURACY}, such as 0.01"
MAX_BINS = 2048
"""Bins in use per group; at 1 % they cover values over 17 orders of magnitude before the first collapse."""

_MAX_LEVEL = 20  # everything of one sign is in two bins by then
_UNITED = (("nan", add), ("below", add), ("above", add), ("sum", add), ("min", min), ("max", max))
_CHUNK = 1 << 15  # so that a chunk's temporaries stay in the L2 cache


class DDSketchStack(ArrayStack):
    """A DDSketch per group. `accuracy` is α at level 0, and the same in all that merge.

    Not invertible: bins could be subtracted while uncollapsed, extremes and levels could not.
    """

    kind: ClassVar[str] = "ddsketch"
    properties: ClassVar[Properties] = Properties(foldable=True)
    questions: ClassVar[Questions] = (Quantile, Rank, Count, Sum, Mean, Minimum, Maximum)
    arrays: ClassVar[dict[str, tuple[str, float]]] = {
        "level": ("<i8", 0),
        "nan": ("<i8", 0),
        "below": ("<i8", 0),  # -inf
        "above": ("<i8", 0),  # +inf
        "sum": ("<f8", 0.0),  # of finite values
        "min": ("<f8", np.inf),
        "max": ("<f8", -np.inf),
    }

    def __init__(self, groups: int = 0, *, accuracy: float = DEFAULT_ACCURACY) -> None:
        if not _is_accuracy(accuracy):
            raise InvalidRequest("accuracy", accuracy, ACCURACY_ACCEPTED)
        super().__init__(groups)
        self.accuracy = float(accuracy)
        self._bins = log_bins(self.accuracy)
        self._cells = Cells(np.add, np.int64)

    @property
    def parameters(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy}

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._cells.nbytes

    def _empty(self) -> Self:
        return type(self)(accuracy=self.accuracy)

    # Updating

    def update(self, codes: IntArray, values: npt.NDArray[Any], *, times: IntArray | None = None) -> None:
        """Adds a batch of integers or floats; integers count as the nearest float64."""
        for at in range(0, len(values), _CHUNK):
            self._add(codes[at : at + _CHUNK], values[at : at + _CHUNK].astype(np.float64, copy=False))

    def _add(self, codes: IntArray, values: FloatArray) -> None:
        least, greatest = values.min(), values.max()
        if not math.isfinite(least) or not math.isfinite(greatest):  # NaN comes through both
            codes, values = self._set_apart(codes, values)
            if not len(values):
                return None
            least, greatest = values.min(), values.max()
        with np.errstate(over="ignore", invalid="ignore"):  # a sum beyond float64 is infinite
            self._note(codes, values, least, greatest)
        if least > 0:
            return self._count(codes, self._bins.find(values) + np.int32(OFFSET))
        nonzero = values != 0
        signed = values[nonzero]
        bins = self._bins.find(np.abs(signed)) + np.int32(OFFSET)
        cells = np.zeros(len(values), np.int32)
        cells[nonzero] = np.where(signed < 0, -bins, bins)
        return self._count(codes, cells)

    def _set_apart(self, codes: IntArray, values: FloatArray) -> tuple[IntArray, FloatArray]:
        """Counts NaN and infinities, and returns the rest."""
        above, below = values == np.inf, values == -np.inf
        for name, chosen in (("nan", values != values), ("above", above), ("below", below)):
            self._view(name)[:] += np.bincount(codes[chosen], minlength=len(self))
        self._view("max")[codes[above]] = np.inf
        self._view("min")[codes[below]] = -np.inf
        finite = np.isfinite(values)
        return codes[finite], values[finite]

    def _note(self, codes: IntArray, values: FloatArray, least: float, greatest: float) -> None:
        """Sum and extremes of finite values."""
        if len(self) == 1:
            self._view("sum")[0] += values.sum()
            self._view("min")[0] = min(self._view("min")[0], least)
            self._view("max")[0] = max(self._view("max")[0], greatest)
            return
        self._view("sum")[:] += np.bincount(codes, values, len(self))
        np.minimum.at(self._view("min"), codes, values)
        np.maximum.at(self._view("max"), codes, values)

    def _count(self, codes: IntArray, cells: npt.NDArray[np.int32]) -> None:
        """Adds one to each (group, cell); cells count from that of zero, and are overwritten."""
        least = int(cells.min())
        span = int(cells.max()) - least + 1
        cells -= np.int32(least)
        keys = cells if len(self) == 1 else codes * span + cells
        if len(self) * span <= max(4 * len(cells), 1 << 16):
            found = np.bincount(keys)
            used = np.flatnonzero(found)
            counts = found[used]
        else:
            used, counts = np.unique(keys, return_counts=True)
        groups, within = np.divmod(used.astype(np.int64), span)
        self._add_cells(groups, ZERO + least + within, counts)

    def _add_cells(self, groups: IntArray, cells: IntArray, counts: IntArray) -> None:
        """Adds cells of level 0 to groups of any level."""
        level = self._view("level")
        if level.any():
            cells = SignedBins.of(cells).coarsened(level[groups])
        self._cells.add(cell_keys(groups, cells), counts)
        if self._cells.is_due:
            self._settle()

    def _settle(self) -> tuple[IntArray, IntArray]:
        """Settles the cells, and collapses groups until each has at most `MAX_BINS`."""
        keys, counts = self._cells.settled()
        while len(keys) > MAX_BINS:
            crowded = self._cells.counts(len(self)) > MAX_BINS
            if not crowded.any():
                break
            self._raise_level(self._view("level") + crowded)
            keys, counts = self._cells.settled()
        return keys, counts

    def _raise_level(self, wanted: IntArray) -> None:
        """Collapses each group to at least the wanted level."""
        steps = np.maximum(wanted - self._view("level"), 0)
        if steps.any():
            keys, counts = self._cells.settled()
            groups = groups_of(keys)
            self._cells.replace(cell_keys(groups, SignedBins.of(cells_of(keys)).coarsened(steps[groups])), counts)
            self._view("level")[:] += steps

    # Merging

    def merge(self, other: Self, codes: IntArray) -> None:
        codec.require_equal(self.kind, self.parameters, other.parameters)
        keys, counts = other._settle()
        theirs = other._view("level").copy()  # `other` may be this stack itself
        wanted = self._view("level").copy()
        wanted[codes] = np.maximum(wanted[codes], theirs)
        self._raise_level(wanted)
        groups = groups_of(keys)
        steps = (wanted[codes] - theirs)[groups]
        self._cells.add(cell_keys(codes[groups], SignedBins.of(cells_of(keys)).coarsened(steps)), counts)
        with np.errstate(over="ignore", invalid="ignore"):
            for name in ("nan", "below", "above", "sum"):
                self._view(name)[codes] += other._view(name)
        for name, better in (("min", np.minimum), ("max", np.maximum)):
            self._view(name)[codes] = better(self._view(name)[codes], other._view(name))
        if self._cells.is_due:
            self._settle()

    def merge_ones(self, others: Sequence[Self]) -> None:
        """Merges stacks of one group into this one, which has one too: all their bins in one sum."""
        for other in others:
            codec.require_equal(self.kind, self.parameters, other.parameters)
        if not others:
            return
        stacks = (self, *others)
        settled = [stack._settle() for stack in stacks]
        levels = [stack._state["level"].item(0) for stack in stacks]
        level = max(levels)
        # A group of one: keys are cells.
        if min(levels) == level:
            self._cells.hold(*_summed_runs(settled))
        else:
            cells = [SignedBins.of(keys).coarsened(level - of) for (keys, _), of in zip(settled, levels, strict=True)]
            self._cells.hold(*_summed(np.concatenate(cells), np.concatenate([counts for _, counts in settled])))
        self._state["level"][0] = level
        for name, united in _UNITED:
            # Sums one after the other: float64 comes out as if they were merged so.
            self._state[name][0] = reduce(united, [stack._state[name].item(0) for stack in stacks])
        self._settle()

    def unite(self, many: Many) -> None:
        """Merges messages of one group each (`merging.Uniting`)."""
        stack = self.from_message(many.stacked(0))
        level = np.maximum(self._view("level"), stack._view("level").max())
        self._raise_level(level)
        stack._raise_level(np.repeat(level, len(stack)))
        keys, counts = (np.concatenate(both) for both in zip(self._settle(), stack._settle(), strict=True))
        self._cells.hold(*_summed(cells_of(keys), counts))
        with np.errstate(over="ignore", invalid="ignore"):
            for name in ("nan", "below", "above", "sum"):
                self._state[name][0] = np.cumsum(np.append(self._view(name), stack._view(name)))[-1]
        for name, best in (("min", np.min), ("max", np.max)):
            self._state[name][0] = best(np.append(self._view(name), stack._view(name)))
        self._settle()

    def fold(self, levels: int = 1) -> Self:
        """A copy, collapsed further: half as many bins, twice the error (nearly) per level."""
        self._settle()
        most = _MAX_LEVEL - int(self._view("level").max(initial=0))
        if not 0 <= levels <= most:
            raise InvalidRequest("level", levels, f"0 to {most}", f"{self.kind} at level {_MAX_LEVEL - most}")
        result = self.take(np.arange(len(self)))
        result._raise_level(result._view("level") + levels)
        return result

    def take(self, groups: IntArray) -> Self:
        self._settle()
        if len(self) == len(groups) == 1:
            result = self._copied()
            result._cells = self._cells.copied()
            return result
        result = super().take(groups)
        result._cells.replace(*self._cells.select(groups, len(self)))
        return result

    def reset(self, groups: IntArray) -> None:
        super().reset(groups)
        gone = np.zeros(len(self), bool)
        gone[groups] = True
        self._cells.drop(gone)

    # Asking

    def query(self, question: Question | None = None) -> Estimates:
        """The answer per group; without a question, the median. NaN where there are no values."""
        self.check(question)
        match question:
            case Rank(x):
                return self._ranks(x)
            case None:
                return self._quantiles(0.5)
            case Quantile(q):
                return self._quantiles(q)
            case Minimum() | Maximum():
                name = "min" if isinstance(question, Minimum) else "max"
                return Estimates.exact(np.where(self._counts() > 0, self._view(name), np.nan))
        n = self._counts()
        if isinstance(question, Count):
            return Estimates.exact(n)
        total = self._total()
        if isinstance(question, Mean):
            total = total / np.maximum(n, 1)
        return Estimates.exact(np.where(n > 0, total, np.nan))

    def accuracies(self) -> FloatArray:
        """The relative accuracy that each group has now, after its collapses."""
        self._settle()
        each = np.array([collapsed_accuracy(self.accuracy, level) for level in range(_MAX_LEVEL + 1)])
        return np.asarray(each[self._view("level")])

    def _counts(self) -> IntArray:
        """Values per group, infinities included and NaN not."""
        _, counts = self._settle()
        ends = np.concatenate([[0], np.cumsum(counts)])[self._cells.starts(len(self))]
        return np.asarray(np.diff(ends) + self._view("below") + self._view("above"))

    def _total(self) -> FloatArray:
        above, below = self._view("above") > 0, self._view("below") > 0
        infinite = np.select([above & below, above, below], [np.nan, np.inf, -np.inf], 0.0)
        return np.asarray(self._view("sum") + infinite)

    def _quantiles(self, q: float) -> Estimates:
        """The value with rank ⌊q·(n - 1)⌋, from 0. Its bin's edges are certain bounds; extremes are exact."""
        if not 0 <= q <= 1:
            raise InvalidRequest("q", q, "a number from 0 to 1, such as 0.99")
        keys, counts = self._settle()
        n = self._counts()
        running = np.cumsum(counts)
        before = np.concatenate([[0], running])[self._cells.starts(len(self))[:-1]]
        target = np.floor(q * np.maximum(n - 1, 0)).astype(np.int64)
        rank = target - self._view("below")
        inside = (n > 0) & (rank >= 0) & (rank < n - self._view("below") - self._view("above"))
        results = [np.full(len(self), np.nan) for _ in range(3)]
        at = np.searchsorted(running, (before + rank)[inside], side="right")
        found = SignedBins.of(cells_of(keys[at])).edges(self.accuracy, self._view("level")[inside])
        infinite = np.where(rank < 0, -np.inf, np.inf)
        least, greatest = self._view("min"), self._view("max")
        for result, edge in zip(results, found, strict=True):
            result[inside] = np.clip(edge, least[inside], greatest[inside])
            result[(n > 0) & ~inside] = infinite[(n > 0) & ~inside]
            for rank_of_extreme, extreme in ((0, least), (n - 1, greatest)):
                np.copyto(result, extreme, where=(n > 0) & (target == rank_of_extreme))
        lower, value, upper = results
        return Estimates(value, lower, upper, 1.0, self.kind)

    def _ranks(self, x: float) -> Estimates:
        """The share of values at most `x`: between that of the bins below x's, and with x's bin."""
        if math.isnan(x):
            raise InvalidRequest("x", x, "a number")
        keys, counts = self._settle()
        n, level = self._counts(), self._view("level")
        running = np.concatenate([[0], np.cumsum(counts)])
        sign = (x > 0) - (x < 0)
        magnitude = np.array([min(abs(x), float(np.finfo(np.float64).max))])
        number = int(self._bins.find(magnitude)[0]) if sign else 0
        bins = SignedBins(np.full(len(self), number), np.full(len(self), sign))
        cells = bins.coarsened(level)
        wanted = cell_keys(np.arange(len(self)), cells)
        starts = running[self._cells.starts(len(self))[:-1]]
        least, most = (running[np.searchsorted(keys, wanted, side)] - starts for side in ("left", "right"))
        low, _, high = SignedBins.of(cells).edges(self.accuracy, level)
        least, most = np.where(x >= high, most, least), np.where(x < low, least, most)
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.where(high > low, np.clip((x - low) / (high - low), 0, 1), 1.0)
            value, lower, upper = (
                np.select([x >= self._view("max"), x < self._view("min")], [n, 0], self._view("below") + counted) / n
                for counted in (least + (most - least) * part, least, most)
            )
        return Estimates(value, lower, upper, 1.0, self.kind)

    # Bytes

    def to_message(self) -> SynopsisMessage:
        self._settle()
        message = super().to_message()
        message.arrays.extend(codec.encode(part) for part in self._cells.pack(len(self)))
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        parameters = codec.open_message(message, cls.kind, cls.version, len(cls.arrays) + 4)
        try:
            result = cls(accuracy=parameters["accuracy"])
            cells = [codec.decode(a) for a in message.arrays[-4:]]
            result._load(SynopsisMessage(arrays=message.arrays[:-4]))
            result._cells.unpack(*cells)
            result._check_state(len(cells[0]))
        except (KeyError, IndexError, TypeError, ValueError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and arrays do not fit: {exc}") from exc
        return result

    def _check_state(self, groups: int) -> None:
        """Raises ValueError unless decoded arrays are the state of this stack."""
        level = self._view("level")
        if groups != len(self) or ((level < 0) | (level > _MAX_LEVEL)).any():
            raise ValueError("levels out of range, or cells of other groups")
        keys, counts = self._cells.settled()
        bins = SignedBins.of(cells_of(keys))
        levels = level[groups_of(keys)]
        ends = [coarser(np.full(len(keys), k), levels) for k in (self._bins.lowest, self._bins.highest)]
        inside = (bins.number >= ends[0]) & (bins.number <= ends[1]) | (bins.sign == 0)
        counted = all((self._view(name) >= 0).all() for name in ("nan", "below", "above"))
        if not inside.all() or not (counts > 0).all() or not counted:
            raise ValueError("bins or counts out of range")


class DDSketch(SingleSynopsis[DDSketchStack]):
    """Quantiles, each within a relative error of `accuracy` (0.001 to 0.5) of the true one.

    Only synopses of equal accuracy merge. A sketch that would need more than `MAX_BINS` bins collapses,
    which about doubles its error: see `current_accuracy`.
    """

    stack_type = DDSketchStack
    types: ClassVar[tuple[str, ...]] = ("int64", "float64")

    def __init__(self, accuracy: float = DEFAULT_ACCURACY) -> None:
        super().__init__(DDSketchStack(1, accuracy=accuracy))

    @property
    def current_accuracy(self) -> float:
        return float(self._stack.accuracies()[0])


def _summed_runs(runs: Sequence[tuple[IntArray, IntArray]]) -> tuple[IntArray, IntArray]:
    """Distinct cells, ascending, and their counts, of runs of distinct and ascending cells each.

    Sketches of one stream soon use the same cells, or fewer: those are added where they stand.
    """
    cells, total = max(runs, key=lambda run: len(run[0]))
    total, others, first = total.copy(), [], True
    for run, counts in runs:
        if run is cells and first:
            first = False
        elif len(run) == len(cells) and (run == cells).all():
            total += counts
        elif len(run) and run[-1] <= cells[-1] and (cells[at := np.searchsorted(cells, run)] == run).all():
            total[at] += counts
        else:
            others.append((run, counts))
    if not others:
        return cells, total
    others.append((cells, total))
    return _summed(np.concatenate([cells for cells, _ in others]), np.concatenate([counts for _, counts in others]))


def _summed(cells: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct cells, ascending, and their counts."""
    if not len(cells):
        return cells, counts
    least = int(cells.min())
    span = int(cells.max()) - least + 1
    if span > 4 * len(cells) + (1 << 16):  # far apart
        order = np.argsort(cells, kind="stable")  # stable: merges the sorted runs that they are
        cells = cells[order]
        first = np.flatnonzero(np.concatenate([[True], cells[1:] != cells[:-1]]))
        return cells[first], np.add.reduceat(counts[order], first)
    total = np.zeros(span, np.int64)
    np.add.at(total, cells - least, counts)
    used = np.flatnonzero(total)
    return used + least, total[used]


def _is_accuracy(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and MIN_ACCURACY <= value <= MAX_ACCURACY


def _read_accuracy(value: Any) -> float:
    if not _is_accuracy(value):
        raise ValueError(ACCURACY_ACCEPTED)
    return float(value)


def _make(parameters: Parameters, _: pa.DataType | None) -> DDSketchStack:
    return DDSketchStack(**dict(parameters))


register_kind(DDSketchStack)
register_function(
    Function(
        "quantiles", _make, parameters={"accuracy": Parameter(DEFAULT_ACCURACY, _read_accuracy, ACCURACY_ACCEPTED)}
    )
)
