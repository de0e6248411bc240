"""The contract of a synopsis, and what questions and estimates look like.

A synopsis is a window aggregate function: it is updated with batches of values, any two of equal
parameters merge, and it answers questions with an interval. What its algebra allows is stated in
`Properties`; the runtime divides work, treats late records and judges re-delivery by that alone.

Grouped queries hold thousands of synopses of one kind, so the unit that the runtime handles is a
`Stack`: the states of many groups as arrays whose first axis is the group. A `Synopsis` is what a
user holds: the state of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Properties:
    """The algebra of a synopsis. Every claim is checked by the battery, `edgewater.synopses.testing`.

    Attributes:
        mergeable: two synopses of equal parameters merge into the one of their union.
        commutative: the order of updates and merges does not change any answer.
        idempotent: merging the same synopsis twice changes nothing, so re-delivery is harmless.
        invertible: what was merged can be taken out again.
        linear: the state is a linear function of the frequency vector.
        foldable: an edge may shrink it before shipping.
        ordered: the state depends on the order (or the event time) of values.
        reproducible: the same batches in the same order give the same bytes. An edge that recovers by
            replaying its journal needs it.
    """

    mergeable: bool = True
    commutative: bool = True
    idempotent: bool = False
    invertible: bool = False
    linear: bool = False
    foldable: bool = False
    ordered: bool = False
    reproducible: bool = True


@dataclass(frozen=True, slots=True)
class Estimate:
    """An answer: `value`, inside [`lower`, `upper`] with probability at least `confidence`.

    A confidence of 1.0 is a deterministic bound. `basis` names where the interval comes from. NaN
    as a value means that there is none (the mean of nothing).
    """

    value: float
    lower: float
    upper: float
    confidence: float = 1.0
    basis: str = "exact"


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimates for many groups at once: three float64 arrays of one length."""

    value: FloatArray
    lower: FloatArray
    upper: FloatArray
    confidence: float = 1.0
    basis: str = "exact"

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, group: int) -> Estimate:
        return Estimate(
            float(self.value[group]), float(self.lower[group]), float(self.upper[group]), self.confidence, self.basis
        )

    @classmethod
    def exact(cls, value: npt.NDArray[Any]) -> Estimates:
        values = value.astype(np.float64)
        return cls(values, values, values)


@dataclass(frozen=True, slots=True)
class Question:
    """Base of all questions. Each synopsis says in `questions` which it answers.

    A `confidence` is that of the interval asked for; synopses with certain bounds pass it over.
    """


Questions = tuple[type[Question], ...]
"""The questions that a kind of synopsis answers."""


@dataclass(frozen=True, slots=True)
class Count(Question):
    """How many values (records, or non-null values of the argument)?"""

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
    """The least value."""


@dataclass(frozen=True, slots=True)
class Maximum(Question):
    """The greatest value."""


@dataclass(frozen=True, slots=True)
class Distinct(Question):
    """How many different values?"""

    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Quantile(Question):
    """The value at rank `q` in [0, 1]."""

    q: float
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Rank(Question):
    """The fraction of values at most `x`."""

    x: float
    confidence: float = 0.95


@runtime_checkable
class Synopsis(Protocol):
    """The state of one synopsis, as a user holds it."""

    kind: ClassVar[str]
    properties: ClassVar[Properties]
    questions: ClassVar[Questions]

    def update(self, values: Any, *, times: Any = None, weights: Any = None) -> None:
        """Adds a batch.

        Args:
            values: NumPy or Arrow array of n values, or a sequence; nulls are passed over.
            times: int64 event times in ms, for ordered synopses.
            weights: n numbers, for synopses that take weights.
        """

    def merge_many(self, others: list[Self]) -> Self:
        """The synopsis of the union of all, as a new one; `self` and `others` stay unchanged.

        Raises:
            IncompatibleSynopses: unequal parameters or seeds; names both.
        """

    def query(self, question: Question) -> Estimate:
        """Raises InvalidRequest for a question that this kind cannot answer; names those it can."""

    def to_bytes(self) -> bytes:
        """The format of `proto/edgewater/v1/synopsis.proto`, read back by `codec.from_bytes`."""


class Stack(Protocol):
    """The states of n groups of one kind of synopsis; the first axis of each array is the group.

    `codes` are int64 group numbers, one per value, each below the stack's length. Values never hold
    nulls: the caller drops them (`GroupedAggregate.update`).
    """

    kind: ClassVar[str]
    properties: ClassVar[Properties]
    questions: ClassVar[Questions]

    def __len__(self) -> int: ...

    def grow(self, groups: int) -> None:
        """Makes the stack at least `groups` long; new groups are empty."""

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        """Adds ``values[i]`` to group ``codes[i]``: NumPy or Arrow array, as the function says."""

    def merge(self, other: Self, codes: IntArray) -> None:
        """Merges `other`'s i-th group into group ``codes[i]``; codes are distinct.

        Raises IncompatibleSynopses for unequal parameters.
        """

    def take(self, groups: IntArray) -> Self:
        """A copy of these groups, in this order."""

    def reset(self, groups: IntArray) -> None:
        """Makes these groups empty."""

    def query(self, question: Question | None = None) -> Estimates:
        """The answer per group; None: the function's own question (`default`)."""

    def to_message(self) -> SynopsisMessage:
        """The state, which stays as it is: a stack read from the message goes on as this one does."""

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""

    @property
    def nbytes(self) -> int:
        """Memory held by the arrays, in bytes."""


class Condensing(Stack, Protocol):
    """A stack in which values wait to be compacted, many together. When that happens decides later coins and
    cuts, so only updates, merges and resets may bring it about: `to_message` has what waits as it is, and a
    stack read from that goes on as this one does. What `take` gives has nothing that waits: it is for shipping.
    """

    def condense(self) -> None:
        """Compacts all that waits."""


@runtime_checkable
class BoundedError(Protocol):
    """A stack that defines the paper's error function, so that an edge may withhold under a budget."""

    def change(self, sent: FloatArray) -> FloatArray:
        """error(F, F ⊕ V) per group, signed: how the center's value would change if the pending
        state V (this stack) were sent. `sent` is F, the value sent so far (0 where none was)."""

    def advance(self, sent: FloatArray) -> FloatArray:
        """F ⊕ V per group: the value at the center once the pending state is sent."""


def arrow_values(values: Any) -> pa.Array:
    """Values of any accepted form as one Arrow array without nulls."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return array.drop_null() if array.null_count else array
