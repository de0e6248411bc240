"""The pattern of a job: the empty synopsis that a user passes, from which every task creates its synopses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgewater.base.errors import InvalidRequest, UnsupportedVersion
from edgewater.synopses import GroupedAggregate, Properties, SampleStack, Stack, from_bytes, stack_from_message
from edgewater.synopses.encoding import codec

ACCEPTED = "an empty synopsis, such as CountMin(width=65536, depth=5) or HyperLogLog()"
ITEM_TYPES = ("string", "int64", "float64", "bool")
NUMBER_TYPES = ("int64", "float64")


@dataclass(frozen=True, slots=True)
class SynopsisPattern:
    """An empty synopsis as bytes, which can be sent to any worker, with the properties of its class.

    Attributes:
        data: bytes of the synopsis, including parameters and seeds.
        kind, properties: of the synopsis' class.
        types: names of the accepted value types.
        keys: for a `GroupedAggregate`, names and types of its keys; else empty.
        measures: for a `GroupedAggregate`, names of its measures; else empty.
        arguments: names of the measures that take an argument.
    """

    data: bytes
    kind: str
    properties: Properties
    types: tuple[str, ...]
    keys: tuple[tuple[str, str], ...] = ()
    measures: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, prototype: object) -> SynopsisPattern:
        """Returns the pattern of an empty synopsis.

        Raises:
            InvalidRequest: the object is not an empty synopsis, or `from_bytes` cannot read its bytes.
        """
        named = type(prototype).__name__
        if isinstance(prototype, type) or not all(hasattr(prototype, n) for n in ("to_bytes", "properties", "kind")):
            raise InvalidRequest("synopsis", prototype, ACCEPTED)
        records = getattr(prototype, "records", 0)
        if records:
            reason = "the job's synopses are copies of it, so it must be empty"
            raise InvalidRequest("synopsis", f"{named} of {records} values", ACCEPTED, reason)
        data = prototype.to_bytes()  # type: ignore[attr-defined]
        try:
            read = from_bytes(data)
        except UnsupportedVersion as exc:
            raise InvalidRequest("synopsis", named, ACCEPTED, f"its bytes are not read back: {exc}") from exc
        if isinstance(read, GroupedAggregate):
            return cls._of_grouped(data, read)
        types = getattr(read, "types", NUMBER_TYPES if read.properties.ordered else ITEM_TYPES)
        return cls(data, read.kind, read.properties, tuple(types))

    @classmethod
    def _of_grouped(cls, data: bytes, read: GroupedAggregate) -> SynopsisPattern:
        for name, stack in read.measures.items():
            if isinstance(stack, SampleStack):
                accepted = "the sample itself with stratify_by"
                reason = "records of a sample need an identity, which a grouped aggregate does not give them"
                raise InvalidRequest(f"synopsis.{name}", stack.kind, accepted, reason)
        keys = tuple((str(name), str(kind)) for name, kind in read.parameters["keys"])
        return cls(data, read.kind, read.properties, ITEM_TYPES, keys, tuple(read.measures))

    @property
    def is_grouped(self) -> bool:
        return bool(self.measures)

    def fresh(self) -> Any:
        """Creates an empty synopsis."""
        return from_bytes(self.data)

    def stack(self) -> Stack | None:
        """Creates a stack without groups, or returns None if this kind of synopsis has no stack."""
        try:
            stack = stack_from_message(codec.unseal(self.data))
        except UnsupportedVersion:
            return None
        return stack.take(np.zeros(0, np.int64))


def merged(first: Any, others: Sequence[Any]) -> Any:
    """Returns the merge of `first` and `others`."""
    return first.merge_many(list(others)) if others else first
