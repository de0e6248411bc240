"""The contracts of this package: synopses, stacks, questions, estimates, functions of sampled rows.

A synopsis is a window aggregate function: it is updated with batches of values, two synopses of equal
parameters merge, and it answers questions with an interval. `Properties` states what its algebra allows.
The runtime reads only `Properties` when it divides work, handles late records and judges re-delivery.

A grouped query holds thousands of synopses of one kind. The runtime therefore handles a `Stack`: the
states of many groups as arrays whose first axis is the group. A `Synopsis` is the state of one group, as a
user holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

CHUNK = 1 << 15  # measured: bench.synopses
"""Values that a stack adds at a time, so that temporary arrays stay in the L2 cache."""
MIN_PENDING = 1 << 14  # measured: bench.synopses
"""Rows that a stack buffers at least before it merges them into its sorted rows."""
ITEM_TYPES = ("string", "int64", "float64", "bool")
"""Column types whose values can be compared for equality. Functions of items and samples accept them."""
NUMBER_TYPES = ("int64", "float64")


@dataclass(frozen=True, slots=True)
class Properties:
    """The algebra of a synopsis. The tests of `edgewater.synopses.testing` check every claim.

    Attributes:
        mergeable: two synopses of equal parameters merge into the synopsis of their union.
        commutative: the order of updates and merges does not change any answer.
        idempotent: merging the same synopsis twice changes nothing, so re-delivery is harmless.
        linear: the state is a linear function of the frequency vector.
        ordered: the state depends on the order, or on the event time, of values.
        reproducible: the same batches in the same order give the same bytes. Recovery by journal replay
            requires it.
    """

    mergeable: bool = True
    commutative: bool = True
    idempotent: bool = False
    linear: bool = False
    ordered: bool = False
    reproducible: bool = True


@dataclass(frozen=True, slots=True)
class Estimate:
    """An answer: the true value lies in [`lower`, `upper`] with probability at least `confidence`.

    A confidence of 1.0 is a deterministic bound. `basis` names the method of the interval. A value of NaN means that
    there is no answer, such as the mean of no values.

    >>> from edgewater.synopses import CountMin, Frequency
    >>> sketch = CountMin()
    >>> sketch.update(["de", "de", "fr"])
    >>> found = sketch.query(Frequency("de"))
    >>> found.value, found.lower, found.upper, round(found.confidence, 3)
    (2.0, 2.0, 2.0, 0.993)
    """

    value: float
    lower: float
    upper: float
    confidence: float = 1.0
    basis: str = "exact"


@dataclass(frozen=True, slots=True)
class Estimates:
    """One estimate per group: three float64 arrays of shape (groups,).

    Attributes:
        integers: the values as int64, or as decimal128(38, 0) if one exceeds int64; null for a group without a value.
            `value` has the nearest float64. None: the values are no integers.
        present: which groups have a value. If `present` is true, a NaN is the value, such as the sum of a NaN. None:
            the groups whose `value` is not NaN.
        rounding: how far values may be from values without rounding; None: no rounding, or the bounds include it.
    """

    value: FloatArray
    lower: FloatArray
    upper: FloatArray
    confidence: float = 1.0
    basis: str = "exact"
    integers: pa.Array | None = None
    present: BoolArray | None = None
    rounding: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.value)

    @property
    def odd(self) -> BoolArray:
        """Which groups have a value that is NaN or infinite."""
        present = ~np.isnan(self.value) if self.present is None else self.present
        return np.asarray(present & ~np.isfinite(self.value))

    def __getitem__(self, group: int) -> Estimate:
        return Estimate(
            float(self.value[group]), float(self.lower[group]), float(self.upper[group]), self.confidence, self.basis
        )

    @classmethod
    def exact(cls, value: npt.NDArray[Any]) -> Estimates:
        values = value.astype(np.float64)
        return cls(values, values, values)

    @classmethod
    def exact_integers(cls, value: pa.Array, present: BoolArray | None = None) -> Estimates:
        """Exact int64 or decimal128 values, one per group; null for a group without a value."""
        mask = None if present is None or present.all() else pa.array(present)
        integers = value if mask is None else pc.if_else(mask, value, None)
        values = integers.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return cls(values, values, values, integers=integers, present=present)

    @classmethod
    def exact_floats(cls, value: FloatArray, present: BoolArray, rounding: FloatArray | None = None) -> Estimates:
        """Values that are exact up to rounding. The `value` of a group that is not `present` is ignored."""
        values = np.where(present, value, np.nan)
        return cls(values, values, values, present=present, rounding=rounding)

    def without_bounds(self) -> Estimates:
        """Returns the estimates with unknown bounds."""
        unknown = np.full(len(self), np.nan)
        return replace(self, lower=unknown, upper=unknown)

    def depending_on(self, confidence: float) -> Estimates:
        """Returns the estimates when their bounds also need what is true with this confidence.

        Bounds of which nothing can be promised then are unknown.
        """
        both = self.confidence + confidence - 1.0  # Bonferroni: whatever the dependence
        return replace(self, confidence=both) if both > 0.0 else self.without_bounds()


@dataclass(frozen=True, slots=True)
class Question:
    """Base of all questions. A synopsis lists in `questions` the classes that it answers.

    `confidence` is the requested confidence of the interval. Synopses with deterministic bounds ignore it.
    """


Questions = tuple[type[Question], ...]
"""The classes of questions that a kind of synopsis answers."""


@dataclass(frozen=True, slots=True)
class Count(Question):
    """The number of values: records, or non-null values of the argument."""

    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Sum(Question):
    """The sum of the values."""

    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Mean(Question):
    """The arithmetic mean of the values."""

    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Variance(Question):
    """The sample variance (n - 1) of the values."""


@dataclass(frozen=True, slots=True)
class Minimum(Question):
    """The smallest value."""


@dataclass(frozen=True, slots=True)
class Maximum(Question):
    """The largest value."""


@dataclass(frozen=True, slots=True)
class Distinct(Question):
    """The number of distinct values."""

    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Quantile(Question):
    """The value at rank `q` in [0, 1]."""

    q: float
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Rank(Question):
    """The fraction of the values that are at most `x`. Its denominator is the answer to `Count`."""

    x: float
    confidence: float = 0.95


@runtime_checkable
class Synopsis(Protocol):
    """The state of one group, as a user holds it.

    Each edge updates a synopsis of its own, and ships bytes. The center merges the bytes and asks:

    >>> from edgewater.synopses import DDSketch, Quantile, Synopsis, from_bytes, merge_bytes
    >>> here, there = DDSketch(), DDSketch()
    >>> here.update([12.0, 15.0, 18.0])
    >>> there.update([120.0, 150.0])
    >>> both = from_bytes(merge_bytes([here.to_bytes(), there.to_bytes()]))
    >>> isinstance(both, Synopsis)
    True
    >>> median = both.query(Quantile(0.5))
    >>> median.lower <= 18 <= median.upper
    True
    """

    kind: ClassVar[str]
    properties: ClassVar[Properties]
    questions: ClassVar[Questions]

    def update(self, values: Any, *, times: Any = None) -> None:
        """Adds a batch.

        Args:
            values: NumPy or Arrow array of n values, or a sequence; nulls are skipped.
            times: int64 event times in ms, for ordered synopses.
        """

    def merge_many(self, others: list[Self]) -> Self:
        """Returns the synopsis of the union as a new object; `self` and `others` stay unchanged.

        Raises:
            IncompatibleSynopses: parameters or seeds differ; the message names both.
        """

    def query(self, question: Question) -> Estimate:
        """Returns the answer. Raises InvalidRequest, with the accepted questions, if this kind cannot answer."""

    def to_bytes(self) -> bytes:
        """Bytes in the format of `proto/edgewater/v1/synopsis.proto`, which `from_bytes` reads."""


class Stack(Protocol):
    """The states of n groups of one kind of synopsis; the first axis of each array is the group.

    `codes` are int64 group numbers, one per value, each below the stack's length. Values contain no
    nulls: `GroupedAggregate.update` drops them.
    """

    kind: ClassVar[str]
    properties: ClassVar[Properties]
    questions: ClassVar[Questions]

    def __len__(self) -> int: ...

    def grow(self, groups: int) -> None:
        """Extends the stack to at least `groups` groups; new groups are empty."""

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        """Adds ``values[i]`` to group ``codes[i]``; NumPy array, or Arrow array for strings."""

    def merge(self, other: Self, codes: IntArray) -> None:
        """Merges `other`'s i-th group into group ``codes[i]``; codes are distinct.

        Raises IncompatibleSynopses if parameters differ.
        """

    def take(self, groups: IntArray) -> Self:
        """Returns a copy of these groups, in this order."""

    def reset(self, groups: IntArray) -> None:
        """Empties these groups."""

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the answer per group; None asks the default question of the kind."""

    def to_message(self) -> SynopsisMessage:
        """Returns the whole state and leaves it unchanged.

        A stack that is read from the message behaves like this stack.
        """

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""

    @property
    def nbytes(self) -> int:
        """Memory of the arrays, in bytes."""


@runtime_checkable
class BoundedError(Protocol):
    """A stack with an error function, which lets an edge withhold updates under an error budget."""

    def change(self, sent: FloatArray) -> FloatArray:
        """Returns error(F, F ⊕ V) per group, signed, where V is the pending state (this stack).

        It is the change of the center's value if V were sent. It is infinite or NaN if the change has no bound: such
        groups are always sent.

        Args:
            sent: F, the value sent so far, float64 per group; 0 if none was sent. Minima and maxima have their own type
                and empty value.
        """

    def advance(self, sent: FloatArray) -> FloatArray:
        """Returns F ⊕ V per group, in the type of F: the center's value after the pending state is sent."""


@runtime_checkable
class DivisibleSum(Protocol):
    """A stack of sums or counts that may be sent in parts: rounded values first, their remainders later or never."""

    def cut(self, quantum: float) -> Self:
        """Rounds each value down to a multiple of `quantum`, a power of two.

        Returns the remainders, as sums of no values. A value that is too large for such a multiple stays unchanged, and
        its remainder is 0.
        """


@runtime_checkable
class Incremental(Protocol):
    """A stack that may be sent without values that the receiver has.

    Merging it gives the same state as the whole stack.
    """

    def beyond(self, known: Self) -> Self:
        """Returns the values of this stack that `known`, of the same groups, does not have, in the form that is
        shipped.
        """

    @property
    def holds_values(self) -> BoolArray:
        """Which groups are not empty."""


Interval = tuple[FloatArray, FloatArray, FloatArray, float]
"""Value, lower and upper bounds (float64, one per name), and the relative error that holds with the confidence."""

MAX_ROW_COLUMNS = 16
"""Columns of a row that a `SampleFunction` may take."""


class SampleFunction:
    """A function of rows, evaluated at the center. Subclasses define how to compute it and name its numbers.

    It must depend on the set of rows such that a sample of the rows gives about the same value as all rows. A sum or a
    count over all rows is not such a function; use `sum` and `count`.
    """

    columns: tuple[int, int] = (1, MAX_ROW_COLUMNS)
    """The minimum and maximum number of columns of a row."""

    def names(self, parameters: Mapping[str, Any], columns: int) -> Sequence[str]:
        """Returns the names of the function's numbers, in order. A single empty name stands for a single number."""
        return ("",)

    def fit(self, rows: FloatArray, parameters: Mapping[str, Any], start: FloatArray | None) -> FloatArray:
        """Computes the function.

        Args:
            rows: float64 (n, columns), at least `min_rows` of them.
            start: given if `rows` are resampled: the value on the original rows. Functions that search from an initial
                value use it, so that the numbers of both values correspond. None: no such value. Equal rows give equal
                values.

        Returns:
            float64, one per name.
        """
        raise NotImplementedError

    def distance(self, value: FloatArray, reference: FloatArray, parameters: Mapping[str, Any]) -> float:
        """Returns the distance of a value from a reference, relative to the reference. By default it is the largest
        relative error of any number.
        """
        gap, size = np.abs(value - reference), np.abs(reference)
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.where(gap == 0, 0.0, gap / size).max(initial=0.0))

    def min_rows(self, parameters: Mapping[str, Any]) -> int:
        """Returns the number of rows below which the function has no value."""
        return 1

    def interval(
        self, rows: FloatArray, parameters: Mapping[str, Any], confidence: float, fraction: float
    ) -> Interval | None:
        """Returns the value and its interval from a formula; None: the caller resamples.

        Args:
            fraction: the fraction of all rows that `rows` are.
        """
        return None


def arrow_values(values: Any) -> pa.Array:
    """Returns values of any accepted form as one Arrow array without nulls."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return array.drop_null() if array.null_count else array


def run_indices(starts: IntArray, counts: IntArray) -> IntArray:
    """Returns the concatenation of ``arange(starts[i], starts[i] + counts[i])`` for all i."""
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) + np.repeat(starts - ends + counts, counts)
