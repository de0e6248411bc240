"""Mergeable synopses: what an edge ships, and the center merges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgewater.errors import UnsupportedVersion
from edgewater.synopses import plugins
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
from edgewater.synopses.distinct.hyperloglog import HyperLogLog
from edgewater.synopses.encoding import codec, merging
from edgewater.synopses.frequency.count_min import CountMin
from edgewater.synopses.frequency.fast_agms import FastAgms
from edgewater.synopses.frequency.top_k import TopK
from edgewater.synopses.grouped import GroupedAggregate
from edgewater.synopses.histograms.equi_depth import EquiDepthHistogram
from edgewater.synopses.histograms.equi_width import EquiWidthHistogram
from edgewater.synopses.manager import GeneralManager, SliceManager
from edgewater.synopses.membership.bloom import BloomFilter
from edgewater.synopses.membership.cuckoo import CountingCuckooFilter, CuckooFilter
from edgewater.synopses.quantiles.ddsketch import DDSketch
from edgewater.synopses.quantiles.kll import Kll
from edgewater.synopses.questions import (
    Contains,
    FalsePositiveRate,
    Frequency,
    IntersectionSize,
    JoinSize,
    Point,
    Proportion,
    Range,
    RangeSum,
    RankedItems,
    Ranking,
    SelfJoinSize,
    Since,
    SubsetCount,
    TopItems,
    UnionSize,
)
from edgewater.synopses.sampling import sample_functions  # noqa: F401  (registers its functions)
from edgewater.synopses.sampling.bernoulli import BernoulliSample
from edgewater.synopses.sampling.biased_reservoir import BiasedReservoir
from edgewater.synopses.sampling.fifo import FifoSample
from edgewater.synopses.sampling.reservoir import ReservoirSample
from edgewater.synopses.single import SingleSynopsis
from edgewater.synopses.wavelets.haar import HaarWavelet
from edgewater.synopses.wavelets.haar_max import MaxErrorWavelet

__all__ = [
    "AnySynopsis",
    "BernoulliSample",
    "BiasedReservoir",
    "BloomFilter",
    "Contains",
    "Count",
    "CountMin",
    "CountingCuckooFilter",
    "CuckooFilter",
    "DDSketch",
    "Distinct",
    "EquiDepthHistogram",
    "EquiWidthHistogram",
    "Estimate",
    "Estimates",
    "FalsePositiveRate",
    "FastAgms",
    "FifoSample",
    "Frequency",
    "GeneralManager",
    "GroupedAggregate",
    "HaarWavelet",
    "HyperLogLog",
    "IntersectionSize",
    "JoinSize",
    "Kll",
    "MaxErrorWavelet",
    "Maximum",
    "Mean",
    "Minimum",
    "Point",
    "Properties",
    "Proportion",
    "Quantile",
    "Question",
    "Range",
    "RangeSum",
    "Rank",
    "RankedItems",
    "Ranking",
    "ReservoirSample",
    "SelfJoinSize",
    "Since",
    "SliceManager",
    "SubsetCount",
    "Sum",
    "Synopsis",
    "TopItems",
    "TopK",
    "UnionSize",
    "Variance",
    "from_bytes",
    "merge_bytes",
]

AnySynopsis = GroupedAggregate | HaarWavelet | GeneralManager | SliceManager | SingleSynopsis[Any]

_TYPES: dict[str, type[AnySynopsis]] = {
    t.kind: t
    for t in (
        GroupedAggregate,
        HyperLogLog,
        DDSketch,
        CountMin,
        FastAgms,
        BloomFilter,
        CuckooFilter,
        CountingCuckooFilter,
        TopK,
        ReservoirSample,
        BernoulliSample,
        FifoSample,
        BiasedReservoir,
        EquiWidthHistogram,
        EquiDepthHistogram,
        Kll,
        HaarWavelet,
        MaxErrorWavelet,
        GeneralManager,
        SliceManager,
    )
}


def from_bytes(data: bytes) -> AnySynopsis:
    """The synopsis that `to_bytes` was called on, whatever its kind.

    Raises:
        CorruptSynopsis: damaged or foreign bytes.
        UnsupportedVersion: a kind or a version that this release does not read.
    """
    message = codec.unseal(data)
    return _type_of(message.kind).from_message(message)


def merge_bytes(parts: Sequence[bytes]) -> bytes:
    """The union of serialised synopses: what `from_bytes` of each, `merge_many` of all and `to_bytes` give, faster.

    Dense sketches of one layout (HyperLogLog, count-min, Fast-AGMS) are merged as one array, without an object each.

    Args:
        parts: at least one; all of one kind, and of parameters that merge.

    Raises:
        CorruptSynopsis, UnsupportedVersion, IncompatibleSynopses: as those do, and names the part.
    """
    return merging.merged(parts, _type_of)


def _type_of(name: str) -> type[AnySynopsis]:
    """Raises UnsupportedVersion for a kind that is not read here."""
    kind = _TYPES.get(name)
    if kind is None:
        plugins.INSTALLED.load()
        kind = plugins.INSTALLED.singles.get(name)
    if kind is None:
        known = ", ".join(sorted({**_TYPES, **plugins.INSTALLED.singles}))
        raise UnsupportedVersion(
            f"synopsis kind {name!r} is not one of those read here: {known}; {plugins.INSTALLED.hint()}"
        )
    return kind
