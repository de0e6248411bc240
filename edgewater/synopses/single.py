"""`SingleSynopsis`: a stack of one group behind the `Synopsis` contract, which is what a user holds."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import pyarrow as pa

from edgewater.base.errors import CorruptSynopsis, InvalidRecord
from edgewater.base.streams import COLUMN_TYPES, type_name
from edgewater.synopses.base import Estimate, Properties, Question, Questions, Stack, arrow_values
from edgewater.synopses.encoding import codec
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

S = TypeVar("S", bound=Stack)


def compacted(stack: S) -> S:
    """Returns a stack of one group in the form that is shipped: without buffered values.

    A stack with the method `compact` buffers values and compacts many at a time. The moment of a compaction decides
    later random bits and cuts, so only updates, merges and resets may start one. `to_message` therefore includes the
    buffered values unchanged. `take` returns a compacted copy, as an edge ships it.
    """
    return stack.take(np.zeros(1, np.int64)) if hasattr(stack, "compact") else stack


class SingleSynopsis(Generic[S]):
    """A `Synopsis` over a stack of length 1.

    Subclasses define `stack_type`, and `types` if the stack does not. The other constants are the stack's.

    Attributes:
        stack: the stack of length 1.
        records: number of values that were added or merged, without nulls.
    """

    stack_type: type[S]
    kind: ClassVar[str]
    properties: ClassVar[Properties]
    questions: ClassVar[Questions]
    types: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        stack = cls.__dict__.get("stack_type")  # None: a base class
        for name in ("kind", "properties", "questions", "types"):
            if hasattr(stack, name) and name not in cls.__dict__:
                setattr(cls, name, getattr(stack, name))

    def __init__(self, stack: S) -> None:
        self.stack = stack
        self.records = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.records} values, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        return self.stack.nbytes

    def update(self, values: Any, *, times: Any = None) -> None:
        """Adds a batch. Skips nulls and ignores `times`.

        Args:
            values: NumPy or Arrow array or a sequence, of one of `types` or a narrower type.

        Raises:
            InvalidRecord: values of another type.
        """
        columnar = self._columnar(arrow_values(values))
        if len(columnar):
            self.stack.update(np.zeros(len(columnar), np.int64), columnar)
            self.records += len(columnar)

    def _columnar(self, values: pa.Array) -> Any:
        """Returns values without nulls in the form that the stack accepts. Raises InvalidRecord for another type."""
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
        """Returns the synopsis of the union as a new object.

        Raises:
            IncompatibleSynopses: kinds, parameters or seeds differ; the message names both.
        """
        result = self._with(self.stack.take(np.zeros(1, np.int64)), self.records)
        for other in others:
            if type(other) is not type(self):
                codec.require_equal("synopses", self.kind, getattr(other, "kind", type(other).__name__))
            result.stack.merge(other.stack, np.zeros(1, np.int64))
            result.records += other.records
        result.stack = compacted(result.stack)  # without the values of `others` that it has buffered
        return result

    def query(self, question: Question | None = None) -> Estimate:
        """Answers a question; None: the default question of the kind. Raises InvalidRequest for an unsupported one."""
        return self.stack.query(question)[0]

    def to_bytes(self) -> bytes:
        """Returns the synopsis in the form that is shipped, and leaves it unchanged."""
        message = compacted(self.stack).to_message()
        message.records = min(self.records, codec.MAX_RECORDS)
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
        result.stack, result.records = stack, records
        return result
