"""Mergeable synopses: what an edge ships, and the center merges."""

from __future__ import annotations

# First: it imports the modules that register functions, whichever of them a caller asks for.
from edgewater.synopses import registry  # noqa: F401  # isort: skip
from edgewater.errors import UnsupportedVersion
from edgewater.synopses import codec
from edgewater.synopses.base import (
    Count,
    Distinct,
    Estimate,
    Estimates,
    Maximum,
    Mean,
    Minimum,
    Properties,
    Quantile,
    Question,
    Rank,
    Sum,
    Synopsis,
    Variance,
)
from edgewater.synopses.ddsketch import DDSketch
from edgewater.synopses.grouped import GroupedAggregate
from edgewater.synopses.hyperloglog import HyperLogLog

__all__ = [
    "Count",
    "DDSketch",
    "Distinct",
    "Estimate",
    "Estimates",
    "GroupedAggregate",
    "HyperLogLog",
    "Maximum",
    "Mean",
    "Minimum",
    "Properties",
    "Quantile",
    "Question",
    "Rank",
    "Sum",
    "Synopsis",
    "Variance",
    "from_bytes",
]

AnySynopsis = GroupedAggregate | HyperLogLog | DDSketch

_TYPES: dict[str, type[AnySynopsis]] = {t.kind: t for t in (GroupedAggregate, HyperLogLog, DDSketch)}


def from_bytes(data: bytes) -> AnySynopsis:
    """The synopsis that `to_bytes` was called on, whatever its kind.

    Raises:
        CorruptSynopsis: damaged or foreign bytes.
        UnsupportedVersion: a kind or a version that this release does not read.
    """
    message = codec.unseal(data)
    kind = _TYPES.get(message.kind)
    if kind is None:
        known = ", ".join(sorted(_TYPES))
        raise UnsupportedVersion(f"synopsis kind {message.kind!r} is not one of those read here: {known}")
    return kind.from_message(message)
