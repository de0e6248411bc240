"""Merging what edges ship. Pure: bytes of partials in, bytes of their union out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edgewater.synopses.encoding import codec
from edgewater.synopses.grouped import GroupedAggregate
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage


def merge_partials(parts: Sequence[bytes]) -> bytes:
    """The union of partials of one query: of shards, edges, slices or batches, in any mixture.

    Counts and integer sums are exact, so the order and the grouping of merges do not change them.
    Every part is checked, also a lone one: damage must show here, where the frame that brought it is
    known, and not when a reader asks.

    Args:
        parts: at least one `GroupedAggregate` as bytes; all of equal keys and measures.

    Raises:
        CorruptSynopsis, UnsupportedVersion: a part cannot be read.
        IncompatibleSynopses: parts of different queries.
    """
    if not parts:
        raise ValueError("nothing to merge: a merge needs at least one part")
    return GroupedAggregate.merge_bytes(parts)


def shape_of(part: bytes) -> str:
    """What must be equal for two partials to merge: kinds, parameters and seeds, as JSON.

    Raises CorruptSynopsis for bytes that are no synopsis.
    """
    return json.dumps(_shape(codec.unseal(part)), separators=(",", ":"))


def _shape(message: SynopsisMessage) -> list[Any]:
    return [message.kind, message.parameters, message.seed, [_shape(part) for part in message.parts]]
