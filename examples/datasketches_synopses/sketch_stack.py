"""The base of stacks of library sketches: one object per group.

A library with scalar bindings allows no other form. Each batch runs a Python loop over the groups that it touches,
which is slow for thousands of groups; the built-in stacks are arrays for this reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import google_crc32c
import numpy as np

from edgewater.base.errors import CorruptSynopsis, InvalidRequest
from edgewater.synopses import Estimates, IntArray, Properties, Question, Questions
from edgewater.synopses.encoding import codec
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

VERSION = 1


class SketchStack(ABC):
    """A stack of library sketches. Subclasses define how a sketch is made, merged, serialised and queried.

    Args:
        size: the only parameter of these sketches; only stacks of equal size merge.
    """

    kind: ClassVar[str]
    properties: ClassVar[Properties]
    questions: ClassVar[Questions]
    parameter: ClassVar[str]

    def __init__(self, groups: int = 0, *, size: int) -> None:
        self.size = size
        self._sketches: list[Any] = []
        self.grow(groups)

    @abstractmethod
    def _new(self) -> Any:
        """Returns an empty sketch."""

    @abstractmethod
    def _merged(self, mine: Any, other: Any) -> Any:
        """Returns the union; may change `mine`, but not `other`."""

    @staticmethod
    @abstractmethod
    def _dump(sketch: Any) -> bytes: ...

    @staticmethod
    @abstractmethod
    def _load(data: bytes) -> Any: ...

    @abstractmethod
    def _is_valid(self, sketch: Any) -> bool:
        """Returns whether a sketch that was read has this stack's size."""

    @abstractmethod
    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None: ...

    @abstractmethod
    def query(self, question: Question | None = None) -> Estimates: ...

    def __len__(self) -> int:
        return len(self._sketches)

    @property
    def nbytes(self) -> int:
        # The library does not report the memory of a sketch; 64 bytes approximate the overhead of an object.
        return sum(len(self._dump(sketch)) + 64 for sketch in self._sketches)

    def grow(self, groups: int) -> None:
        self._sketches += [self._new() for _ in range(groups - len(self))]

    def merge(self, other: Self, codes: IntArray) -> None:
        codec.require_equal(self.kind, {self.parameter: self.size}, {other.parameter: other.size})
        for code, theirs in zip(codes.tolist(), other._sketches, strict=True):
            self._sketches[code] = self._merged(self._sketches[code], theirs)

    def take(self, groups: IntArray) -> Self:
        result = type(self)(size=self.size)
        result._sketches = [self._load(self._dump(self._sketches[g])) for g in groups.tolist()]
        return result

    def reset(self, groups: IntArray) -> None:
        for group in groups.tolist():
            self._sketches[group] = self._new()

    def check(self, question: Question | None) -> None:
        """Raises InvalidRequest for a question that is not one of `questions`."""
        if question is not None and not isinstance(question, self.questions):
            able = ", ".join(q.__name__ for q in self.questions)
            raise InvalidRequest("question", question, f"one of {able}", f"{self.kind} cannot answer it")

    # The library validates little of what it reads, so each sketch has a checksum of its own: only bytes that
    # `to_message` wrote reach the library.

    def to_message(self) -> SynopsisMessage:
        dumps = [self._dump(sketch) for sketch in self._sketches]
        message = codec.header(self.kind, VERSION, {self.parameter: self.size})
        lengths = np.array([len(d) for d in dumps], np.int64)
        checksums = np.array([google_crc32c.value(d) for d in dumps], np.int64)
        data = np.frombuffer(b"".join(dumps), np.uint8)
        message.arrays.extend(codec.encode(array) for array in (lengths, checksums, data))
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        parameters = codec.open_message(message, cls.kind, VERSION, arrays=3)
        lengths, checksums, data = (codec.decode(array) for array in message.arrays)
        try:
            result = cls(size=parameters[cls.parameter])
            result._read(lengths, checksums, data.tobytes())
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and arrays do not fit: {exc}") from exc
        return result

    def _read(self, lengths: IntArray, checksums: IntArray, data: bytes) -> None:
        if lengths.ndim != 1 or lengths.dtype != np.int64 or (lengths < 0).any() or int(lengths.sum()) != len(data):
            raise ValueError(f"lengths {lengths.dtype}{lengths.shape} of {len(data)} bytes")
        if checksums.shape != lengths.shape:
            raise ValueError(f"{checksums.shape} checksums of {lengths.shape} sketches")
        ends = np.cumsum(lengths)
        for start, end, expected in zip((ends - lengths).tolist(), ends.tolist(), checksums.tolist(), strict=True):
            dump = data[start:end]
            if google_crc32c.value(dump) != expected:
                raise ValueError("a sketch has a wrong checksum")
            sketch = self._load(dump)
            if not self._is_valid(sketch):
                raise ValueError(f"a sketch of another size than {self.size}")
            self._sketches.append(sketch)


def by_group(codes: IntArray) -> list[tuple[int, IntArray]]:
    """Returns each group that a batch touches, and the indices of its values."""
    order = np.argsort(codes, kind="stable")
    groups, starts = np.unique(codes[order], return_index=True)
    return list(zip(groups.tolist(), np.split(order, starts[1:]), strict=True)) if len(groups) else []
