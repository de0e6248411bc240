"""The empty synopsis that a user passes, as the pattern from which every task creates its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgewater.model.errors import InvalidRequest, UnsupportedVersion
from edgewater.synopses import (
    GroupedAggregate,
    Properties,
    Question,
    Questions,
    SampleStack,
    Stack,
    from_bytes,
    stack_from_message,
)
from edgewater.synopses.encoding import codec

ACCEPTED = "an empty synopsis, such as CountMin(width=65536, depth=5) or HyperLogLog()"
ITEM_TYPES = ("string", "int64", "float64", "bool")
NUMBER_TYPES = ("int64", "float64")


@dataclass(frozen=True, slots=True)
class SynopsisPattern:
    """An empty synopsis as bytes, which can be sent to any worker, with the properties of its class.

    Attributes:
        data: bytes, including parameters and seeds.
        types: names of the accepted value types.
        keys, measures: of a `GroupedAggregate`, which takes several columns; keys with their types. Else empty.
        arguments: the measures that take an argument.
    """

    data: bytes
    kind: str
    properties: Properties
    questions: Questions
    types: tuple[str, ...]
    keys: tuple[tuple[str, str], ...] = ()
    measures: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, prototype: object) -> SynopsisPattern:
        """Raises InvalidRequest unless given an empty synopsis that `from_bytes` can read back."""
        named = type(prototype).__name__
        if isinstance(prototype, type) or not all(hasattr(prototype, n) for n in ("to_bytes", "properties", "kind")):
            raise InvalidRequest("synopsis", prototype, ACCEPTED)
        records = getattr(prototype, "records", 0)
        if records:
            raise InvalidRequest("synopsis", f"{named} of {records} values", ACCEPTED, "it is the pattern of others")
        data = prototype.to_bytes()  # type: ignore[attr-defined]
        try:
            read = from_bytes(data)
        except UnsupportedVersion as exc:
            raise InvalidRequest("synopsis", named, ACCEPTED, f"its bytes are not read back: {exc}") from exc
        if isinstance(read, GroupedAggregate):
            return cls._of_grouped(data, read)
        types = getattr(read, "types", NUMBER_TYPES if read.properties.ordered else ITEM_TYPES)
        return cls(data, read.kind, read.properties, tuple(read.questions), tuple(types))

    @classmethod
    def _of_grouped(cls, data: bytes, read: GroupedAggregate) -> SynopsisPattern:
        for name, stack in read.measures.items():
            if isinstance(stack, SampleStack):
                raise InvalidRequest(
                    f"synopsis.{name}",
                    stack.kind,
                    "the sample itself with stratify_by",
                    "records of a sample need an identity, which a grouped aggregate does not give them",
                )
        keys = tuple((str(name), str(kind)) for name, kind in read.parameters["keys"])
        return cls(data, read.kind, read.properties, (), ITEM_TYPES, keys, tuple(read.measures))

    @property
    def is_grouped(self) -> bool:
        return bool(self.measures)

    def fresh(self) -> Any:
        """Creates an empty synopsis."""
        return from_bytes(self.data)

    def stack(self) -> Stack | None:
        """Creates a stack without groups; None: the synopsis has no stack."""
        try:
            stack = stack_from_message(codec.unseal(self.data))
        except UnsupportedVersion:
            return None
        return stack.take(np.zeros(0, np.int64))

    @property
    def samples(self) -> bool:
        """Whether records need an identity for parts to merge."""
        return isinstance(self.stack(), SampleStack)

    def union(self, parts: Sequence[bytes]) -> bytes:
        """The bytes of the union; a single part is validated and returned.

        Raises:
            CorruptSynopsis, UnsupportedVersion, IncompatibleSynopses.
        """
        first, *others = (from_bytes(part) for part in parts)
        return parts[0] if not others else merged(first, others).to_bytes()

    def answers(self, question: Question) -> bool:
        return not self.questions or isinstance(question, self.questions)


def merged(first: Any, others: Sequence[Any]) -> Any:
    """Merges `first` and all others."""
    return first.merge_many(list(others)) if others else first
