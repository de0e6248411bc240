"""HyperLogLog: how many different values, in 2^p registers.

Flajolet et al. (2007) with the improved estimator of Ertl, "New cardinality estimation algorithms for
HyperLogLog sketches" (2017), section 2.3: one formula over the whole range, no bias tables. Its
standard error is 1.04/√m with m = 2^p.

A hash's top p bits choose the register; a register holds the largest ρ seen, the position of the
lowest set bit among the other q = 64 - p bits (q + 1 if there is none). Counting from the low end
makes folding exact and cheap: with one index bit less ρ changes only where all q bits were zero.

A group with few registers in use keeps them as sparse cells and moves to a dense row of m bytes
when more than m/8 are in use. The number in use only grows under merging, so which form a group is
in, and with it the bytes, depend on what was added and not on the order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRequest
from edgewater.synopses.base import Distinct, Estimates, IntArray, Properties, Question, Questions
from edgewater.synopses.cells import Cells, cell_keys, cells_of, groups_of
from edgewater.synopses.distinct.ertl import ertl_estimate
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.columns import Many
from edgewater.synopses.exact.aggregates import ArrayStack
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray, hash_values
from edgewater.synopses.registry import Function, Parameter, Parameters, register_function, register_kind
from edgewater.synopses.single import SingleSynopsis
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

Registers = npt.NDArray[np.uint8]

DEFAULT_PRECISION = 14
MIN_PRECISION, MAX_PRECISION = 4, 18
PRECISION_ACCEPTED = f"a whole number from {MIN_PRECISION} to {MAX_PRECISION}"
STANDARD_ERROR = math.sqrt(3 * math.log(2) - 1)
"""Of the estimate, relative, times √m (Ertl 2017, eq. 25): 1.0389."""

_DENSE_SHARE = 8
_NO_ROWS = np.zeros(0, np.int64)
_CHUNK = 1 << 15  # so that a chunk's temporaries stay in the L2 cache


class HyperLogLogStack(ArrayStack):
    """A HyperLogLog per group.

    Args:
        precision: p; two stacks merge only if they were made with the same.
        level: by how many bits it has been folded since. Stacks of different levels merge.
        seed: of the hash.
    """

    kind: ClassVar[str] = "hyperloglog"
    properties: ClassVar[Properties] = Properties(idempotent=True, foldable=True)
    questions: ClassVar[Questions] = (Distinct,)
    arrays: ClassVar[dict[str, tuple[str, float]]] = {"row": ("<i8", -1)}

    def __init__(
        self, groups: int = 0, *, precision: int = DEFAULT_PRECISION, level: int = 0, seed: int = DEFAULT_SEED
    ) -> None:
        if not _is_precision(precision):
            raise InvalidRequest("precision", precision, PRECISION_ACCEPTED)
        if not 0 <= level <= precision - MIN_PRECISION:
            raise InvalidRequest("level", level, f"0 to {precision - MIN_PRECISION}")
        super().__init__(groups)
        self.precision = precision
        self.level = level
        self.seed = seed
        self._sparse = Cells(np.maximum, np.uint8)
        self._dense: Registers = np.zeros((0, self.registers), np.uint8)

    @property
    def bits(self) -> int:
        """Index bits now: precision less level."""
        return self.precision - self.level

    @property
    def registers(self) -> int:
        return 1 << self.bits

    @property
    def parameters(self) -> dict[str, Any]:
        return {"precision": self.precision}

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._sparse.nbytes + self._dense.nbytes

    def _empty(self) -> Self:
        return type(self)(precision=self.precision, level=self.level, seed=self.seed)

    # Updating

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        """Adds a batch: Arrow strings, or a NumPy array of bool, integers or floats."""
        for at in range(0, len(values), _CHUNK):
            self._add(codes[at : at + _CHUNK], hash_values(values[at : at + _CHUNK], self.seed))

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
        if len(index) >= len(self) * (self.registers // _DENSE_SHARE):
            codes, index, rho = self._distinct(codes, index, rho)
            crowded = np.bincount(codes, minlength=len(self)) > self.registers // _DENSE_SHARE
            if crowded.any():
                self._make_dense(crowded)
                moved = crowded[codes]
                self._raise_dense(self._view("row")[codes[moved]], index[moved], rho[moved])
                codes, index, rho = codes[~moved], index[~moved], rho[~moved]
        self._sparse.add(cell_keys(codes, index), rho)
        if self._sparse.is_due:
            self._settle()
        return None

    def _begin_dense(self, index: IntArray, rho: Registers) -> None:
        """Adds a batch that will most likely need a dense row to the one group that there is, which is empty."""
        row = np.zeros((1, self.registers), np.uint8)
        np.maximum.at(row[0], index, rho)
        if np.count_nonzero(row) > self.registers // _DENSE_SHARE:
            self._dense, self._state["row"][0] = row, 0
        else:
            used = np.flatnonzero(row)
            self._sparse.add(used, row[0, used])

    def _distinct(self, codes: IntArray, index: IntArray, rho: Registers) -> tuple[IntArray, IntArray, Registers]:
        """The registers that a batch uses, each once, by way of an array of all there are: the batch is as long as
        a good part of that, and a sort of it would cost ten times as much."""
        scratch = np.zeros(len(self) * self.registers, np.uint8)
        np.maximum.at(scratch, index if len(self) == 1 else codes * self.registers + index, rho)
        used = np.flatnonzero(scratch)
        return used >> self.bits, used & (self.registers - 1), scratch[used]

    def _raise_dense(self, rows: IntArray, index: IntArray, rho: Registers) -> None:
        flat = self._dense.reshape(-1)
        at = rows * self.registers + index
        # Soon most values change nothing: a gather is much cheaper than maximum.at.
        higher = np.flatnonzero(rho > flat[at])
        if len(higher):
            np.maximum.at(flat, at[higher], rho[higher])

    def _settle(self) -> tuple[IntArray, Registers]:
        """Settles the sparse cells and gives crowded groups a dense row; returns the sparse cells."""
        if self._sparse.is_settled and not self._sparse.holds_any:
            return self._sparse.settled()
        self._sparse.settled()
        used = self._sparse.counts(len(self))
        crowded = used > self.registers // _DENSE_SHARE
        if crowded.any():
            self._make_dense(crowded)
        return self._sparse.settled()

    def _make_dense(self, chosen: npt.NDArray[np.bool_]) -> None:
        """Gives these groups (bool per group) a dense row, with what they have in sparse cells."""
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
        keys, rho = self._sparse.settled()
        moved = chosen[groups_of(keys)]
        keys, rho = keys[moved], rho[moved]
        self._sparse.drop(chosen)
        self._dense[row[groups_of(keys)], cells_of(keys)] = rho

    # Merging

    def merge(self, other: Self, codes: IntArray) -> None:
        codec.require_equal(self.kind, {**self.parameters, "seed": self.seed}, {**other.parameters, "seed": other.seed})
        if other.level < self.level:
            other = other.fold(self.level - other.level)
        elif other.level > self.level:
            self._become(self.fold(other.level - self.level))
        keys, rho = other._settle()
        targets = codes[groups_of(keys)]
        rows = self._view("row")[targets]
        dense = rows >= 0
        self._raise_dense(rows[dense], cells_of(keys[dense]), rho[dense])
        self._sparse.add(cell_keys(targets[~dense], cells_of(keys[~dense])), rho[~dense])
        theirs = np.flatnonzero(other._view("row") >= 0)
        if len(theirs):
            wanted = np.zeros(len(self), bool)
            wanted[codes[theirs]] = True
            self._make_dense(wanted & (self._view("row") < 0))
            mine = self._view("row")[codes[theirs]]
            self._dense[mine] = np.maximum(self._dense[mine], other._dense[other._view("row")[theirs]])
        if self._sparse.is_due:
            self._settle()

    def merge_ones(self, others: Sequence[Self]) -> None:
        """Merges stacks of one group into this one, which has one too: one maximum over all their registers."""
        mine = (self.precision, self.seed, self.level)
        if any((o.precision, o.seed, o.level) != mine for o in others):
            for other in others:
                self.merge(other, np.zeros(1, np.int64))  # folds, or says what is wrong
            return
        dense = []
        for other in others:
            if other._sparse.holds_any:
                self._sparse.add(*other._settle())
            row = other._state["row"][0]
            if row >= 0:
                dense.append(other._dense[row])
        if dense or self._state["row"][0] >= 0:
            self._merge_dense(dense)
        self._settle()

    def unite(self, many: Many) -> None:
        """Merges messages of one group each (`merging.Uniting`)."""
        stack = self.from_message(many.stacked(1, alike=(0,), rows=(5,)))
        if stack.level != self.level:
            raise IncompatibleSynopses(f"{self.kind}: levels {self.level} and {stack.level}")
        keys, rho = stack._sparse.settled()
        self._sparse.add(cells_of(keys), rho)
        if len(stack._dense) or self._state["row"][0] >= 0:
            self._merge_dense([stack._dense.max(axis=0, initial=0)])
        self._settle()

    free_arrays: ClassVar[tuple[int, ...]] = (6,)

    def absorb(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Merges the dense rows of many stacks of one group (`merging.Flat`)."""
        greatest = arrays[0].reshape(-1, self.registers).max(axis=0)
        if (greatest > 65 - self.bits).any():
            raise ValueError("registers out of range")
        self._merge_dense([greatest])

    def _merge_dense(self, rows: Sequence[Registers]) -> None:
        """Merges registers into the one group that there is."""
        if self._state["row"][0] < 0:
            self._make_dense(np.ones(1, bool))
        held = self._dense[self._state["row"][0]]
        if self._sparse.holds_any:  # what has come since goes where its registers are now
            keys, rho = self._sparse.settled()
            np.maximum.at(held, cells_of(keys), rho)
            self._sparse.drop(np.ones(1, bool))
        for row in rows:
            np.maximum(held, row, out=held)

    def fold(self, levels: int = 1) -> Self:
        """A copy with 2^levels times fewer registers: what would stand there had it been built so."""
        if levels < 0 or self.bits - levels < MIN_PRECISION:
            most = self.bits - MIN_PRECISION
            raise InvalidRequest("level", levels, f"0 to {most}", f"{self.kind} with {self.bits} bits left")
        result = self.take(np.arange(len(self)))
        for _ in range(levels):
            result._fold_once()
        return result

    def _fold_once(self) -> None:
        keys, rho = self._settle()
        empty_word = np.uint8(65 - self.bits)  # ρ = q + 1: all q bits are zero
        # The index bit that goes becomes the q-th bit of the rest.
        raised = rho + ((rho == empty_word) & (keys & 1 == 0))
        even, odd = self._dense[:, 0::2], self._dense[:, 1::2]
        self.level += 1
        self._dense = np.maximum(even + (even == empty_word), odd)
        self._sparse.replace(cell_keys(groups_of(keys), cells_of(keys) >> 1), raised.astype(np.uint8))

    def _become(self, other: Self) -> None:
        self._state, self._sparse, self._dense, self.level = other._state, other._sparse, other._dense, other.level

    def take(self, groups: IntArray) -> Self:
        self._settle()
        if len(self) == len(groups) == 1:
            result = self._copied()
            result._sparse = self._sparse.copied()
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

    def reset(self, groups: IntArray) -> None:
        rows = self._view("row")[groups]
        self._dense[rows[rows >= 0]] = 0
        super().reset(groups)
        gone = np.zeros(len(self), bool)
        gone[groups] = True
        self._sparse.drop(gone)

    # Asking

    def query(self, question: Question | None = None) -> Estimates:
        """Distinct values per group.

        The interval is the normal one around the logarithm of the estimate, whole numbers outwards: with few
        values the truth is a whole number and an estimate one collision away from it. Its lower end is wider
        by 0.6/√m, because the estimate is skewed to the right (measured, p = 4 … 14), and never below the
        number of registers in use, which is a certain bound.
        """
        self.check(question)
        confidence = question.confidence if isinstance(question, Distinct) else Distinct().confidence
        if not 0 < confidence < 1:
            raise InvalidRequest("confidence", confidence, "a number between 0 and 1, such as 0.95")
        histograms = self._histograms()
        value = ertl_estimate(histograms, self.registers)
        used = self.registers - histograms[:, 0]
        root = math.sqrt(self.registers)
        deviation = NormalDist().inv_cdf((1 + confidence) / 2) * STANDARD_ERROR / root
        lower = np.maximum(np.floor(value * math.exp(-deviation * (1 + 0.6 / root))), used)
        value = np.maximum(value, used)
        return Estimates(value, lower, np.ceil(value * math.exp(deviation)), confidence, self.kind)

    def _histograms(self) -> IntArray:
        """How many registers hold each ρ, shape (groups, q + 2)."""
        width = 66 - self.bits
        keys, rho = self._settle()
        found = np.bincount(groups_of(keys) * width + rho, minlength=len(self) * width).reshape(-1, width)
        for group in np.flatnonzero(self._view("row") >= 0):
            found[group] = np.bincount(self._dense[self._view("row")[group]], minlength=width)
        found[:, 0] = self.registers - found[:, 1:].sum(axis=1)
        return found

    # Bytes

    def to_message(self) -> SynopsisMessage:
        self._settle()
        message = codec.header(self.kind, self.version, self.parameters, seed=self.seed)
        dense = np.flatnonzero(self._view("row") >= 0)
        rows = self._dense[self._view("row")[dense]]
        arrays = (np.array([self.level]), *self._sparse.pack(len(self)), dense, rows)
        message.arrays.extend(codec.encode(array) for array in arrays)
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        parameters = codec.open_message(message, cls.kind, cls.version, 7)
        level, *cells, dense, rows = (codec.decode(a) for a in message.arrays)
        try:
            result = cls(len(cells[0]), precision=parameters["precision"], level=int(level[0]), seed=message.seed)
            result._sparse.unpack(*cells)
            result._dense = rows
            result._check_state(dense)
        except (KeyError, IndexError, TypeError, ValueError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and arrays do not fit: {exc}") from exc
        result._view("row")[dense] = np.arange(len(dense))
        return result

    def _check_state(self, dense: IntArray) -> None:
        """Raises ValueError unless decoded arrays are the state of this stack; `dense`: groups with a row."""
        highest = 65 - self.bits
        keys, rho = self._sparse.settled()
        rows = self._dense
        sound = (
            rows.dtype == np.uint8
            and dense.dtype == np.int64
            and rows.shape == (len(dense), self.registers)
            and (cells_of(keys) < self.registers).all()
            and ((rho > 0) & (rho <= highest)).all()
            and (rows <= highest).all()
            and (dense[1:] > dense[:-1]).all()
            and ((dense >= 0) & (dense < len(self))).all()
            and not np.isin(dense, groups_of(keys)).any()
        )
        if not sound:
            raise ValueError("registers out of range or out of order")


class HyperLogLog(SingleSynopsis[HyperLogLogStack]):
    """How many different values: one HyperLogLog of 2^precision registers.

    Args:
        precision: 4 to 18; the standard error is 1.04/√(2^precision), 0.8 % at the default of 14.
        seed: of the hash. Only synopses of equal precision and seed merge.
    """

    stack_type = HyperLogLogStack
    types: ClassVar[tuple[str, ...]] = ("string", "int64", "float64", "bool")

    def __init__(self, precision: int = DEFAULT_PRECISION, *, seed: int = DEFAULT_SEED) -> None:
        super().__init__(HyperLogLogStack(1, precision=precision, seed=seed))

    @classmethod
    def for_error(cls, epsilon: float, *, seed: int = DEFAULT_SEED) -> Self:
        """The smallest one with a relative standard error of at most `epsilon`."""
        for precision in range(MIN_PRECISION, MAX_PRECISION + 1):
            if STANDARD_ERROR / math.sqrt(1 << precision) <= epsilon:
                return cls(precision, seed=seed)
        least = STANDARD_ERROR / math.sqrt(1 << MAX_PRECISION)
        raise InvalidRequest("epsilon", epsilon, f"a relative standard error of at least {least:.5f}")


def _is_precision(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and MIN_PRECISION <= value <= MAX_PRECISION


def _read_precision(value: Any) -> int:
    if not _is_precision(value):
        raise ValueError(PRECISION_ACCEPTED)
    return int(value)


def _make(parameters: Parameters, _: pa.DataType | None) -> HyperLogLogStack:
    return HyperLogLogStack(**dict(parameters))


register_kind(HyperLogLogStack)
register_function(
    Function(
        "distinct",
        _make,
        types=HyperLogLog.types,
        parameters={"precision": Parameter(DEFAULT_PRECISION, _read_precision, PRECISION_ACCEPTED)},
    )
)
