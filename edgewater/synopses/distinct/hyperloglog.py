"""HyperLogLog: the number of distinct values, in 2^p registers.

Flajolet et al. (2007) with the improved estimator of Ertl, "New cardinality estimation algorithms for HyperLogLog
sketches" (2017), section 2.3: one formula over the whole range, no bias tables. Its standard error is 1.04/√m with m =
2^p.

The top p bits of a hash choose the register. A register contains the largest ρ seen. ρ is the position of the lowest
set bit among the other q = 64 - p bits (q + 1 if there is none).

A group with few registers in use stores them as sparse cells. It gets a dense row of m bytes when more than m/8
registers are in use. That number only grows under merging, so the form of a group, and with it the bytes, depend on the
values and not on their order.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.array_stack import ArrayStack, group_mask, register_stack
from edgewater.synopses.base import (
    CHUNK,
    ITEM_TYPES,
    BoolArray,
    Distinct,
    Estimates,
    FloatArray,
    IntArray,
    Properties,
    Question,
    Questions,
)
from edgewater.synopses.checks import check_whole
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import Layout, field
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray, hash_values
from edgewater.synopses.intervals import normal_quantile
from edgewater.synopses.registry import Parameter
from edgewater.synopses.row_stack import row_fields
from edgewater.synopses.single import SingleSynopsis
from edgewater.synopses.sparse_cells import SparseCells, cell_keys, cells_of, groups_of
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

Registers = npt.NDArray[np.uint8]

DEFAULT_PRECISION = 14
MIN_PRECISION, MAX_PRECISION = 4, 18  # limit: memory of a sketch
STANDARD_ERROR = math.sqrt(3 * math.log(2) - 1)
"""The relative standard error of the estimate times √m (Ertl 2017, eq. 25): 1.0389."""

_DENSE_DIVISOR = 8  # derived: a sparse register takes eight times the memory of a dense one
_NO_ROWS = np.zeros(0, np.int64)
_ROLES = codec.ArrayRoles(1, equal=(0,), group_numbers=(5,))
_MOST_GROUPS = 1 << 15  # limits how many groups' histograms are in memory at a time


class HyperLogLogStack(ArrayStack):
    """A HyperLogLog per group.

    Args:
        precision: p; only stacks of equal precision merge.
        level: the number of bits of p by which release 0.3.0 has folded it. Only stacks of equal levels merge.
        seed: seed of the hash.
    """

    kind: ClassVar[str] = "hyperloglog"
    properties: ClassVar[Properties] = Properties(idempotent=True)
    questions: ClassVar[Questions] = (Distinct,)
    required: ClassVar[tuple[str, ...]] = ("precision",)
    carried: ClassVar[tuple[str, ...]] = ("level", "seed")
    types: ClassVar[tuple[str, ...]] = ITEM_TYPES
    arrays: ClassVar[dict[str, tuple[str, float]]] = {"row": ("<i8", -1)}
    layouts: ClassVar[tuple[Layout, ...]] = (Layout.of(field("level", "<i8", 1), *row_fields("|u1")),)
    stacking: ClassVar[codec.ArrayRoles | None] = _ROLES

    def __init__(
        self, groups: int = 0, *, precision: int = DEFAULT_PRECISION, level: int = 0, seed: int = DEFAULT_SEED
    ) -> None:
        super().__init__(groups)
        self.precision = check_whole("precision", precision, MIN_PRECISION, MAX_PRECISION)
        self.level = check_whole("level", level, 0, precision - MIN_PRECISION)
        self.seed = seed
        self._sparse = SparseCells(np.maximum, np.uint8)
        self._dense: Registers = np.zeros((0, self.registers), np.uint8)

    @property
    def bits(self) -> int:
        """The current number of index bits: precision less level."""
        return self.precision - self.level

    @property
    def registers(self) -> int:
        return 1 << self.bits

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._sparse.nbytes + self._dense.nbytes

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        """Adds a batch: Arrow strings, or a NumPy array of bool, integers or floats."""
        for at in range(0, len(values), CHUNK):
            self._add(codes[at : at + CHUNK], hash_values(values[at : at + CHUNK], self.seed))

    def _add(self, codes: IntArray, hashes: WordArray) -> None:
        index = (hashes >> np.uint64(64 - self.bits)).view(np.int64)
        # Trailing zeros of the low q bits, plus 1: a set bit at q stops the count.
        hashes |= np.uint64(1 << (64 - self.bits))
        rho = np.bitwise_count(~hashes & (hashes - np.uint64(1))) + np.uint8(1)
        rows = self._view("row")[codes] if len(self) > 1 else self._view("row")
        dense = rows >= 0
        if dense.all():
            return self._raise_dense(rows, index, rho)
        if dense.any():
            self._raise_dense(rows[dense], index[dense], rho[dense])
            codes, index, rho = codes[~dense], index[~dense], rho[~dense]
        if len(self) == 1 and len(index) >= self.registers // 2 and not self._sparse.holds_any:
            return self._begin_dense(index, rho)
        if len(index) >= len(self) * (self.registers // _DENSE_DIVISOR):
            codes, index, rho = self._distinct(codes, index, rho)
            crowded = np.bincount(codes, minlength=len(self)) > self.registers // _DENSE_DIVISOR
            if crowded.any():
                self._make_dense(crowded)
                moved = crowded[codes]
                self._raise_dense(self._view("row")[codes[moved]], index[moved], rho[moved])
                codes, index, rho = codes[~moved], index[~moved], rho[~moved]
        self._sparse.add(cell_keys(codes, index), rho)
        if self._sparse.needs_consolidation:
            self.consolidate()
        return None

    def _begin_dense(self, index: IntArray, rho: Registers) -> None:
        """Adds a batch that probably needs a dense row. Called when the stack has one group, which is empty."""
        row = np.zeros((1, self.registers), np.uint8)
        np.maximum.at(row[0], index, rho)
        if np.count_nonzero(row) > self.registers // _DENSE_DIVISOR:
            self._dense, self._state["row"][0] = row, 0
        else:
            used = np.flatnonzero(row)
            self._sparse.add(used, row[0, used])

    def _distinct(self, codes: IntArray, index: IntArray, rho: Registers) -> tuple[IntArray, IntArray, Registers]:
        """Returns the registers that a batch uses, each once.

        An array of all registers is not much longer than the batch, and scattering into it takes a tenth of the time of
        a sort.
        """
        scratch = np.zeros(len(self) * self.registers, np.uint8)
        np.maximum.at(scratch, index if len(self) == 1 else codes * self.registers + index, rho)
        used = np.flatnonzero(scratch)
        return used >> self.bits, used & (self.registers - 1), scratch[used]

    def _raise_dense(self, rows: IntArray, index: IntArray, rho: Registers) -> None:
        flat = self._dense.reshape(-1)
        at = rows * self.registers + index
        # In a filled sketch most values change nothing, and a gather is much cheaper than maximum.at.
        higher = np.flatnonzero(rho > flat[at])
        if len(higher):
            np.maximum.at(flat, at[higher], rho[higher])

    def consolidate(self) -> tuple[IntArray, Registers]:
        """Consolidates the sparse cells, gives crowded groups a dense row, and returns the sparse cells."""
        if self._sparse.is_consolidated and not self._sparse.holds_any:
            return self._sparse.consolidated()
        self._sparse.consolidated()
        used = self._sparse.counts(len(self))
        crowded = used > self.registers // _DENSE_DIVISOR
        if crowded.any():
            self._make_dense(crowded)
        return self._sparse.consolidated()

    def _make_dense(self, chosen: BoolArray) -> None:
        """Gives these groups (bool per group) a dense row and moves their sparse cells there."""
        groups = np.flatnonzero(chosen)
        row = self._view("row")
        free = np.setdiff1d(np.arange(len(self._dense)), row[row >= 0]) if len(self._dense) else _NO_ROWS
        if len(free) < len(groups):
            rows = max(len(self._dense) + len(groups) - len(free), len(self._dense) * 3 // 2)
            wider = np.zeros((rows, self.registers), np.uint8)
            wider[: len(self._dense)] = self._dense
            free = np.concatenate([free, np.arange(len(self._dense), rows)])
            self._dense = wider
        row[groups] = free[: len(groups)]
        if not self._sparse.holds_any:
            return
        keys, rho = self._sparse.consolidated()
        moved = chosen[groups_of(keys)]
        keys, rho = keys[moved], rho[moved]
        self._sparse.drop(chosen)
        self._dense[row[groups_of(keys)], cells_of(keys)] = rho

    def merge(self, other: Self, codes: IntArray) -> None:
        self._require_equal_parameters(other)
        keys, rho = other.consolidate()
        targets = codes[groups_of(keys)]
        rows = self._view("row")[targets]
        dense = rows >= 0
        self._raise_dense(rows[dense], cells_of(keys[dense]), rho[dense])
        self._sparse.add(cell_keys(targets[~dense], cells_of(keys[~dense])), rho[~dense])
        theirs = np.flatnonzero(other._view("row") >= 0)
        if len(theirs):
            to_densify = np.zeros(len(self), bool)
            to_densify[codes[theirs]] = True
            self._make_dense(to_densify & (self._view("row") < 0))
            mine, rows = self._view("row")[codes[theirs]], other._view("row")[theirs]
            for at, row in zip(mine.tolist(), rows.tolist(), strict=True):  # codes may repeat
                np.maximum(self._dense[at], other._dense[row], out=self._dense[at])
        if self._sparse.needs_consolidation:
            self.consolidate()

    def take(self, groups: IntArray) -> Self:
        self.consolidate()
        if len(self) == len(groups) == 1:
            result = self._copy_single()
            result._sparse = self._sparse.copy()
            row = int(self._state["row"][0])
            result._dense = self._dense[row : row + 1].copy() if row >= 0 else self._dense[:0]
            result._state["row"][0] = min(row, 0)
            return result
        result = super().take(groups)
        if self._sparse.holds_any:
            result._sparse.replace(*self._sparse.select(groups, len(self)))
        dense = np.flatnonzero(result._view("row") >= 0)
        result._dense = self._dense[result._view("row")[dense]]
        result._view("row")[dense] = np.arange(len(dense))
        return result

    def beyond(self, known: Self) -> Self:
        """Returns the registers that are higher than those of `known`, which has the same groups."""
        keys, rho = self.consolidate()
        dense = np.flatnonzero(self._view("row") >= 0)
        if len(dense):
            rows = self._dense[self._view("row")[dense]]
            at, cells = np.nonzero(rows)
            keys = np.concatenate([keys, cell_keys(dense[at], cells.astype(np.int64))])
            rho = np.concatenate([rho, rows[at, cells]])
        known_keys, known_rho = known.consolidate()
        held = np.zeros(len(keys), np.uint8)
        if len(known_keys):
            place = np.minimum(np.searchsorted(known_keys, keys), len(known_keys) - 1)
            held = np.where(known_keys[place] == keys, known_rho[place], held)
        row = known._view("row")[groups_of(keys)]
        is_dense = row >= 0
        held[is_dense] = known._dense[row[is_dense], cells_of(keys[is_dense])]
        result = self._empty()
        result.grow(len(self))
        higher = rho > held
        result._sparse.add(keys[higher], rho[higher])
        result.consolidate()
        return result

    @property
    def holds_values(self) -> BoolArray:
        self.consolidate()
        return np.asarray((self._view("row") >= 0) | (self._sparse.counts(len(self)) > 0))

    def reset(self, groups: IntArray) -> None:
        rows = self._view("row")[groups]
        self._dense[rows[rows >= 0]] = 0
        super().reset(groups)
        self._sparse.drop(group_mask(groups, len(self)))

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the number of distinct values per group.

        The interval is normal in the logarithm of the estimate, and its ends are rounded outwards to whole numbers.
        With few values, single collisions make the difference between count and estimate. The lower end is wider by
        0.6/√m, because the estimate is skewed to the right (measured for p = 4 … 14). It is at least the number of
        registers in use, which is a deterministic bound.
        """
        self.check(question)
        confidence = question.confidence if isinstance(question, Distinct) else Distinct().confidence
        if len(self) > _MOST_GROUPS:
            return self._query_in_parts(question, confidence)
        histograms = self._histograms()
        value = ertl_estimate(histograms, self.registers)
        used = self.registers - histograms[:, 0]
        root = math.sqrt(self.registers)
        deviation = normal_quantile(confidence) * STANDARD_ERROR / root
        lower = np.maximum(np.floor(value * math.exp(-deviation * (1 + 0.6 / root))), used)
        value = np.maximum(value, used)
        return Estimates(value, lower, np.ceil(value * math.exp(deviation)), confidence, self.kind)

    def _query_in_parts(self, question: Question | None, confidence: float) -> Estimates:
        """Answers for some groups at a time: the histogram of a group takes far more memory than a sparse group."""
        parts = [
            self.take(np.arange(at, min(at + _MOST_GROUPS, len(self)))).query(question)
            for at in range(0, len(self), _MOST_GROUPS)
        ]
        value, lower, upper = (
            np.concatenate([getattr(part, n) for part in parts]) for n in ("value", "lower", "upper")
        )
        return Estimates(value, lower, upper, confidence, self.kind)

    def _histograms(self) -> IntArray:
        """Returns the number of registers with each ρ, shape (groups, q + 2)."""
        width = 66 - self.bits
        keys, rho = self.consolidate()
        histograms = np.bincount(groups_of(keys) * width + rho, minlength=len(self) * width).reshape(-1, width)
        for group in np.flatnonzero(self._view("row") >= 0):
            histograms[group] = np.bincount(self._dense[self._view("row")[group]], minlength=width)
        histograms[:, 0] = self.registers - histograms[:, 1:].sum(axis=1)
        return histograms

    def to_message(self) -> SynopsisMessage:
        self.consolidate()
        message = self._header()
        dense = np.flatnonzero(self._view("row") >= 0)
        rows = self._dense[self._view("row")[dense]]
        arrays = (np.array([self.level]), *self._sparse.pack(len(self)), dense, rows)
        message.arrays.extend(codec.encode(array) for array in arrays)
        return message

    @classmethod
    def _decoded(cls, given: dict[str, Any], arrays: list[Any]) -> Self:
        level, *cells, dense, rows = arrays
        result = cls(len(cells[0]), **given, level=int(level[0]))
        result._sparse.unpack(*cells)
        result._dense = rows
        result._check_state(dense)
        result._view("row")[dense] = np.arange(len(dense))
        return result

    def _check_state(self, dense: IntArray) -> None:
        """Raises ValueError unless decoded arrays are a valid state; `dense`: groups with a dense row."""
        highest = 65 - self.bits
        keys, rho = self._sparse.consolidated()
        rows = self._dense
        valid = (
            rows.shape == (len(dense), self.registers)
            and (cells_of(keys) < self.registers).all()
            and ((rho > 0) & (rho <= highest)).all()
            and (rows <= highest).all()
            and (dense[1:] > dense[:-1]).all()
            and (dense < len(self)).all()
            and not np.isin(dense, groups_of(keys)).any()
        )
        if not valid:
            raise ValueError("registers out of range or out of order")


def ertl_estimate(histograms: IntArray, registers: int) -> FloatArray:
    """Returns the estimates of Ertl 2017, algorithm 6, for register histograms of shape (groups, q + 2)."""
    m = float(registers)
    z = m * _tau(1 - histograms[:, -1] / m)
    for held in range(histograms.shape[1] - 2, 0, -1):
        z = 0.5 * (z + histograms[:, held])
    z = z + m * _sigma(histograms[:, 0] / m)
    with np.errstate(divide="ignore"):
        result: FloatArray = m * m / (2 * math.log(2)) / z
    return result


def _sigma(x: FloatArray) -> FloatArray:
    """Returns x + Σ x^(2^k) 2^(k-1), k ≥ 1; infinite at 1, where no register is in use."""
    power, factor, total = x, 1.0, x
    full = x == 1
    while True:
        power = np.where(full, 0, power * power)
        following = total + power * factor
        factor *= 2
        if (following == total).all():
            return np.where(full, np.inf, total)
        total = following


def _tau(x: FloatArray) -> FloatArray:
    """Returns (1 - x - Σ (1 - x^(2^-k))² 2^-k) / 3, k ≥ 1; zero at 0 and 1."""
    inside = (x > 0) & (x < 1)
    root, factor = np.where(inside, x, 1.0), 1.0
    total = 1 - root
    while True:
        root = np.sqrt(root)
        factor *= 0.5
        following = total - (1 - root) ** 2 * factor
        if (following == total).all():
            return np.where(inside, total / 3, 0.0)
        total = following


class HyperLogLog(SingleSynopsis[HyperLogLogStack]):
    """The number of distinct values: one HyperLogLog of 2^precision registers.

    Args:
        precision: 4 to 18; the standard error is 1.04/√(2^precision), 0.8 % at the default of 14.
        seed: seed of the hash. Only synopses of equal precision and seed merge.

    >>> import numpy as np
    >>> from edgewater.synopses import Distinct
    >>> visitors = HyperLogLog()
    >>> visitors.update(np.arange(100_000) % 5_000)
    >>> found = visitors.query(Distinct())
    >>> round(found.value), round(found.lower), round(found.upper)  # 5,000 are true
    (5021, 4941, 5103)
    """

    stack_type = HyperLogLogStack

    def __init__(self, precision: int = DEFAULT_PRECISION, *, seed: int = DEFAULT_SEED) -> None:
        super().__init__(HyperLogLogStack(1, precision=precision, seed=seed))

    @classmethod
    def for_error(cls, epsilon: float, *, seed: int = DEFAULT_SEED) -> Self:
        """Returns the smallest sketch with a relative standard error of at most `epsilon`."""
        for precision in range(MIN_PRECISION, MAX_PRECISION + 1):
            if STANDARD_ERROR / math.sqrt(1 << precision) <= epsilon:
                return cls(precision, seed=seed)
        least = STANDARD_ERROR / math.sqrt(1 << MAX_PRECISION)
        raise InvalidRequest("epsilon", epsilon, f"a relative standard error of at least {least:.5f}")


register_stack(
    HyperLogLogStack,
    "distinct",
    parameters={"precision": Parameter.whole(DEFAULT_PRECISION, MIN_PRECISION, MAX_PRECISION)},
)
