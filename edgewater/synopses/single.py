"""What a user holds: one synopsis, as a stack of one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa

from edgewater.errors import CorruptSynopsis, InvalidRecord, InvalidRequest
from edgewater.streams import COLUMN_TYPES, type_name
from edgewater.synopses.base import Estimate, Properties, Question, Questions, Stack, arrow_values
from edgewater.synopses.encoding import codec
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage


class ManyMerging(Stack, Protocol):
    """A stack for which merging many at once is cheaper than one after the other."""

    def merge_ones(self, others: Sequence[Self]) -> None:
        """Merges stacks of one group into this one, which has one group too. Raises IncompatibleSynopses."""


S = TypeVar("S", bound=Stack)


def merge_ones(stack: S, others: Sequence[S]) -> None:
    """Merges stacks of one group into one of one group, all at once if it is `ManyMerging`.

    Told by the attribute: `isinstance` of a protocol looks up all of its members, which takes longer than a merge.
    """
    many = getattr(stack, "merge_ones", None)
    if many is not None:
        many(others)
        return
    for other in others:
        stack.merge(other, np.zeros(1, np.int64))


def shipped(stack: S) -> S:
    """A stack of one group as it travels: without what waits to be compacted (`Condensing`)."""
    return stack.take(np.zeros(1, np.int64)) if hasattr(stack, "condense") else stack


class SingleSynopsis(Generic[S]):
    """A `Synopsis` over a stack of length 1. Subclasses state `stack_type` and `types`; the contract's other
    constants are the stack's.

    Attributes:
        records: values added so far, merged ones included, nulls not.
    """

    stack_type: type[S]
    kind: ClassVar[str]
    properties: ClassVar[Properties]
    questions: ClassVar[Questions]
    types: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        stack = cls.__dict__.get("stack_type")  # None: a base of others
        for name in ("kind", "properties", "questions"):
            if stack is not None and name not in cls.__dict__:
                setattr(cls, name, getattr(stack, name))

    def __init__(self, stack: S) -> None:
        self._stack = stack
        self.records = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.records} values, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        return self._stack.nbytes

    def update(self, values: Any, *, times: Any = None, weights: Any = None) -> None:
        """Adds a batch. Nulls are passed over; `times` makes no difference.

        Args:
            values: NumPy or Arrow array or a sequence, of one of `types` or a narrower type.
            weights: not taken.

        Raises:
            InvalidRecord: values of another type, or weights.
        """
        if weights is not None:
            raise InvalidRecord("weights", type(weights).__name__, "no weights", f"{self.kind} takes each value once")
        columnar = self._columnar(arrow_values(values))
        if len(columnar):
            self._stack.update(np.zeros(len(columnar), np.int64), columnar)
            self.records += len(columnar)

    def _columnar(self, values: pa.Array) -> Any:
        """Values without nulls as the stack takes them. Raises InvalidRecord for another type."""
        array = self._widened(values)
        return array if pa.types.is_string(array.type) else array.to_numpy(zero_copy_only=False)

    def _widened(self, values: pa.Array) -> pa.Array:
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        wider = type_name(values.type)
        if pa.types.is_integer(values.type):
            wider = "int64"
        elif pa.types.is_floating(values.type):
            wider = "float64"
        elif pa.types.is_large_string(values.type):
            wider = "string"
        if len(values) and wider not in self.types:
            raise InvalidRecord("values", str(values.type), f"values of type {' or '.join(self.types)}")
        if wider not in COLUMN_TYPES or values.type == COLUMN_TYPES[wider]:
            return values
        try:
            return values.cast(COLUMN_TYPES[wider])
        except pa.ArrowInvalid as exc:
            raise InvalidRecord("values", str(values.type), f"values that fit {wider}", str(exc)) from exc

    def merge_many(self, others: list[Self]) -> Self:
        """The synopsis of the union, as a new one.

        Raises:
            IncompatibleSynopses: unequal kinds, parameters or seeds; names both.
        """
        result = self._with(self._stack.take(np.zeros(1, np.int64)), self.records)
        for other in others:
            if type(other) is not type(self):
                codec.require_equal("synopses", self.kind, getattr(other, "kind", type(other).__name__))
        result.records += sum([other.records for other in others])
        merge_ones(result._stack, [other._stack for other in others])
        return result

    def query(self, question: Question | None = None) -> Estimate:
        """Raises InvalidRequest for a question that is not one of `questions`."""
        return self._stack.query(question)[0]

    def fold(self, level: int = 1) -> Self:
        """A smaller copy with a coarser bound, which still merges with unfolded ones. Raises InvalidRequest."""
        fold = getattr(self._stack, "fold", None)
        if fold is None:
            raise InvalidRequest("level", level, "a synopsis that folds", f"{self.kind} does not")
        return self._with(fold(level), self.records)

    def to_bytes(self) -> bytes:
        """The synopsis as it is shipped; it stays as it is, and answers the same."""
        message = shipped(self._stack).to_message()
        message.records = self.records
        return codec.seal(message)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""
        return cls.from_message(codec.unseal(data))

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""
        stack = cls.stack_type.from_message(message)
        if len(stack) != 1:
            raise CorruptSynopsis(f"{cls.kind}: {len(stack)} groups where one synopsis was expected")
        return cls._with(stack, message.records)

    @classmethod
    def _with(cls, stack: S, records: int) -> Self:
        result = cls.__new__(cls)
        result._stack, result.records = stack, records
        return result
