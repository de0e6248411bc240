"""Rows of counters per group: what count-min and Fast-AGMS have in common, which is nearly all.

Both are linear functions of the frequencies: an item adds its weight, times a sign or not, to one
counter of each row. So states add, subtract, and fold by adding neighbouring columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRecord, InvalidRequest
from edgewater.synopses.base import Estimates, IntArray, Properties, Question, arrow_values
from edgewater.synopses.encoding import codec, packed_rows
from edgewater.synopses.encoding.columns import Many
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray
from edgewater.synopses.items import CHUNK, ItemStack, check_whole, check_width, read_item_type
from edgewater.synopses.registry import Function, Parameter, Parameters, item_type, register_function, register_kind
from edgewater.synopses.single import SingleSynopsis
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

MIN_WIDTH, MAX_WIDTH = 16, 1 << 24
MAX_DEPTH = 32

_SAMPLE = 512
_REPEATING = 1 << 16  # values that are sorted at a time where many are the same: the more, the fewer are different


class CounterStack(ItemStack):
    """A sketch of `depth` rows of `width` counters per group, as one array of shape (groups, depth, columns).

    Args:
        width: a power of two; two stacks merge only if they were made with the same.
        level: how often it has been folded since. Stacks of different levels merge.
    """

    properties: ClassVar[Properties] = Properties(invertible=True, linear=True, foldable=True)
    arrays: ClassVar[dict[str, tuple[str, float]]] = {"n": ("<i8", 0)}
    chunk: ClassVar[int] = CHUNK

    def __init__(
        self,
        groups: int = 0,
        *,
        width: int,
        depth: int,
        level: int = 0,
        seed: int = DEFAULT_SEED,
        item_type: str | None = None,
    ) -> None:
        self.width = check_width(width, MIN_WIDTH, MAX_WIDTH)
        self.depth = check_whole("depth", depth, 1, MAX_DEPTH)
        self.level = check_whole("level", level, 0, (self.width // MIN_WIDTH).bit_length() - 1)
        super().__init__(groups, seed=seed, item_type=item_type)
        self._counters: IntArray = np.zeros((groups, self.depth, self.columns), np.int64)

    @property
    def columns(self) -> int:
        """Counters per row now: the width, halved per level."""
        return self.width >> self.level

    @property
    def parameters(self) -> dict[str, Any]:
        return {"width": self.width, "depth": self.depth}

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._counters.nbytes

    def _empty(self) -> Self:
        return type(self)(
            width=self.width, depth=self.depth, level=self.level, seed=self.seed, item_type=self.item_type
        )

    def _table(self) -> IntArray:
        """The counters, shape (groups, depth, columns); a view."""
        return self._counters[: len(self)]

    def grow(self, groups: int) -> None:
        super().grow(groups)
        held = len(self._counters)
        if groups > held:
            wider = np.zeros((max(groups, held * 3 // 2), self.depth, self.columns), np.int64)
            wider[:held] = self._counters
            self._counters = wider

    # Updating

    def update(
        self, codes: IntArray, values: Any, *, times: IntArray | None = None, weights: IntArray | None = None
    ) -> None:
        """Adds a batch: Arrow strings, or a NumPy array of bool, integers or floats.

        Args:
            weights: int64, how often each value came (default 1); negative: how often it is taken out.
        """
        self._learn(values)
        at = 0
        while at < len(values):
            repeats = weights is None and len(self) == 1 and self._repeats(values, at)
            part = slice(at, at + (_REPEATING if repeats else self.chunk))
            words, amounts = self._hash(values[part]), None if weights is None else weights[part]
            if repeats:
                words, amounts = _counted(words)
            self._add(codes[at : at + len(words)], words, amounts)
            at = part.stop

    def _repeats(self, values: Any, at: int) -> bool:
        """Whether distinct values should be found first: a sample shows that many come several times."""
        if len(values) - at < 2 * _SAMPLE:
            return False
        return len(_counted(self._hash(values[at : at + _SAMPLE]))[0]) <= _SAMPLE * 0.6

    def decrement(self, codes: IntArray, values: Any) -> None:
        """Takes out values that were added before."""
        self.update(codes, values, weights=np.full(len(values), -1))

    def _add(self, codes: IntArray, words: WordArray, weights: IntArray | None) -> None:
        single = len(self) == 1
        if single:
            self._view("n")[0] += len(words) if weights is None else weights.sum()
        else:
            np.add.at(self._view("n"), codes, 1 if weights is None else weights)
        flat, starts = self._counters.reshape(-1), 0 if single else codes * (self.depth * self.columns)
        for row in range(self.depth):
            columns, signs = self._row(words, row)
            amount: Any = 1 if weights is None else weights
            if signs is not None:
                amount = signs if weights is None else signs * weights
            # Whole numbers all the way: bincount with weights would sum float64, exact below 2^53 only.
            if single:
                np.add.at(self._counters[0, row], columns, amount)
            else:
                np.add.at(flat, columns + (starts + row * self.columns), amount)

    def _row(self, words: WordArray, row: int) -> tuple[IntArray, IntArray | None]:
        """Per word its column in this row, and its sign there (None: all plus)."""
        raise NotImplementedError

    def query(self, question: Question | None = None) -> Estimates:
        raise NotImplementedError

    # Merging

    def merge(self, other: Self, codes: IntArray) -> None:
        self._combine(other, codes, 1)

    def merge_ones(self, others: Sequence[Self]) -> None:
        """Merges stacks of one group into this one, which has one too."""
        into = self._counters[0]
        for other in others:
            alike = (other.width, other.depth, other.level, other.seed, other.item_type)
            if alike == (self.width, self.depth, self.level, self.seed, self.item_type):
                np.add(into, other._counters[0], out=into)
                self._state["n"][0] += other._state["n"][0]
            else:
                self.merge(other, np.zeros(1, np.int64))  # folds, or says what is wrong
                into = self._counters[0]

    def unite(self, many: Many) -> None:
        """Merges messages of one group each (`merging.Uniting`)."""
        stack = self.from_message(many.stacked(1, alike=(0,), rows=(6,)))
        if stack.level != self.level:
            raise IncompatibleSynopses(f"{self.kind}: levels {self.level} and {stack.level}")
        self._state["n"][0] += stack._view("n").sum()
        self._counters[0] += stack._table().sum(axis=0)

    free_arrays: ClassVar[tuple[int, ...]] = (1, 7)

    def absorb(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Adds the dense counters of many stacks of one group (`merging.Flat`)."""
        n, counters = arrays[0].reshape(-1), arrays[1].reshape(len(arrays[0]), self.depth, self.columns)
        self._check_counters(counters, n)
        self._counters[0] += exact_sum(counters, 0)
        self._state["n"][0] += n.sum(dtype=np.int64)

    def invert(self, other: Self, codes: IntArray) -> None:
        """Takes out what `merge` with the same arguments put in."""
        self._combine(other, codes, -1)

    def _combine(self, other: Self, codes: IntArray, sign: int) -> None:
        self._require_mergeable(other)
        if other.level < self.level:
            other = other.fold(self.level - other.level)
        elif other.level > self.level:
            folded = self.fold(other.level - self.level)
            self.level, self._counters = folded.level, folded._counters
        self._view("n")[codes] += sign * other._view("n")
        self._table()[codes] += sign * other._table()

    def fold(self, levels: int = 1) -> Self:
        """A copy with 2^levels times fewer columns: what would stand there had it been built so."""
        most = (self.columns // MIN_WIDTH).bit_length() - 1
        if not 0 <= levels <= most:
            raise InvalidRequest("level", levels, f"0 to {most}", f"{self.kind} with {self.columns} columns left")
        result = self.take(np.arange(len(self)))
        result.level += levels
        # A column is the top bits of a hash: what folds together lies side by side.
        result._counters = result._counters.reshape(len(self), self.depth, result.columns, 1 << levels).sum(axis=3)
        return result

    def take(self, groups: IntArray) -> Self:
        if len(self) == len(groups) == 1:
            result = self._copied()
            result._counters = self._counters[:1].copy()
            return result
        result = super().take(groups)
        result._counters = self._table()[groups]
        return result

    def reset(self, groups: IntArray) -> None:
        super().reset(groups)
        self._counters[groups] = 0

    # Bytes

    def to_message(self) -> SynopsisMessage:
        message = codec.header(self.kind, self.version, self._header_parameters, seed=self.seed)
        message.arrays.extend(codec.encode(array) for array in (np.array([self.level]), self._view("n")))
        message.arrays.extend(packed_rows.pack_rows(self._table().reshape(len(self), self.depth * self.columns)))
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        parameters = codec.open_message(message, cls.kind, cls.version, 2 + packed_rows.ARRAYS)
        item_type = read_item_type(parameters, cls.kind)
        level, n = (codec.decode(a) for a in message.arrays[:2])
        try:
            result = cls(
                width=parameters["width"],
                depth=parameters["depth"],
                level=int(level[0]),
                seed=message.seed,
                item_type=item_type,
            )
            rows = packed_rows.unpack_rows(message.arrays[2:], result.depth * result.columns, np.dtype("<i8"))
            if n.shape != (len(rows),) or n.dtype != np.int64:
                raise ValueError(f"{n.dtype}{n.shape} for {len(rows)} groups")
        except (KeyError, IndexError, TypeError, ValueError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and arrays do not fit: {exc}") from exc
        result._state["n"], result._length = n, len(n)
        result._counters = rows.reshape(len(n), result.depth, result.columns)
        try:
            result._check_counters(result._counters, n)
        except ValueError as exc:
            raise CorruptSynopsis(f"{cls.kind}: {exc}") from exc
        return result

    def _check_counters(self, counters: npt.NDArray[Any], n: npt.NDArray[Any]) -> None:
        """Raises ValueError unless counters, shape (groups, depth, columns), can be those of n values."""


def exact_sum(counters: npt.NDArray[Any], axis: int) -> IntArray:
    """The int64 sum along an axis, added up in the narrowest type that holds it whatever the counters are: the
    narrower, the more of them NumPy adds at once."""
    limits = np.iinfo(counters.dtype)
    most = counters.shape[axis] * max(int(limits.max), -int(limits.min))
    fitting = next((t for t in (np.int16, np.int32) if most <= np.iinfo(t).max), np.int64)
    return np.asarray(counters.sum(axis=axis, dtype=fitting), np.int64)


def _counted(words: WordArray) -> tuple[WordArray, IntArray]:
    """Each different word and how often it comes. The words are sorted in place."""
    words.sort()
    borders = np.flatnonzero(np.concatenate([[True], words[1:] != words[:-1], [True]]))
    return words[borders[:-1]], np.diff(borders)


class SingleCounters(SingleSynopsis[Any]):
    """A `Synopsis` over a `CounterStack` of length 1: takes weights, and what was added can be taken out."""

    types: ClassVar[tuple[str, ...]] = ("string", "int64", "float64", "bool")
    _stack: CounterStack

    def update(self, values: Any, *, times: Any = None, weights: Any = None) -> None:
        """Adds a batch. Nulls are passed over; `times` makes no difference.

        Args:
            values: NumPy or Arrow array or a sequence, of one of `types` or a narrower type; all batches alike.
            weights: whole numbers, how often each value came; negative ones take values out.

        Raises:
            InvalidRecord: values of another type, or weights that are no whole numbers or not as many.
        """
        if weights is None:
            super().update(values)
            return
        amounts = np.asarray(weights)
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
        present = np.asarray(array.is_valid())
        columnar = self._columnar(arrow_values(array))
        if amounts.dtype.kind not in "iu" or amounts.shape != present.shape:
            accepted = f"{len(present)} whole numbers, one per value"
            raise InvalidRecord("weights", f"{amounts.dtype}{amounts.shape}", accepted)
        amounts = amounts.astype(np.int64)[present]
        self._stack.update(np.zeros(len(columnar), np.int64), columnar, weights=amounts)
        self.records = max(self.records + int(amounts.sum()), 0)

    def decrement(self, values: Any) -> None:
        """Takes out values that were added before. Raises InvalidRecord as `update` does."""
        self.update(values, weights=np.full(len(values), -1))

    def invert(self, other: Self) -> Self:
        """This one without `other`, which was merged into it, as a new one. Raises IncompatibleSynopses."""
        codec.require_equal("synopses", self.kind, getattr(other, "kind", type(other).__name__))
        result = self.merge_many([])
        result._stack.invert(other._stack, np.zeros(1, np.int64))
        result.records = max(result.records - other.records, 0)
        return result


def register_counters(single: type[Any], width: int, depth: int, delta: float) -> None:
    """Makes a kind of counters known to queries and readable.

    Args:
        single: what a user holds of it, which is sized by `for_error(epsilon, delta)`.
        width, depth, delta: what holds where a query does not say it.
    """
    stack: type[CounterStack] = single.stack_type

    def make(parameters: Parameters, data_type: pa.DataType | None) -> CounterStack:
        return stack(**dict(parameters), item_type=item_type(data_type))

    def size_for(goals: Mapping[str, Any]) -> Mapping[str, Any]:
        parameters: Mapping[str, Any] = single.for_error(goals["epsilon"], goals["delta"])._stack.parameters
        return parameters

    register_kind(stack)
    register_function(
        Function(
            stack.kind,
            make,
            types=single.types,
            parameters={
                "width": Parameter.power_of_two(width, MIN_WIDTH, MAX_WIDTH),
                "depth": Parameter.whole(depth, 1, MAX_DEPTH),
            },
            goals={"epsilon": Parameter.share(None), "delta": Parameter.share(delta)},
            size_for=size_for,
        )
    )
