"""Synopses of any kind as bytes: reading one (`from_bytes`), merging many (`merge_bytes`).

A center merges the partials of its queries with `GroupedAggregate.merge_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgewater.model.errors import IncompatibleSynopses, UnsupportedVersion
from edgewater.synopses import plugins
from edgewater.synopses.distinct.hyperloglog import HyperLogLog
from edgewater.synopses.encoding import codec
from edgewater.synopses.frequency.count_min import CountMin
from edgewater.synopses.frequency.fast_agms import FastAgms
from edgewater.synopses.frequency.top_k import TopK
from edgewater.synopses.grouped import GroupedAggregate, numbered, require_readable
from edgewater.synopses.histograms.equi_depth import EquiDepthHistogram
from edgewater.synopses.histograms.equi_width import EquiWidthHistogram
from edgewater.synopses.manager import GeneralManager, SliceManager
from edgewater.synopses.membership.bloom import BloomFilter
from edgewater.synopses.membership.cuckoo import CountingCuckooFilter, CuckooFilter
from edgewater.synopses.quantiles.ddsketch import DDSketch
from edgewater.synopses.quantiles.kll import Kll
from edgewater.synopses.sampling.bernoulli import BernoulliSample
from edgewater.synopses.sampling.biased_reservoir import BiasedReservoir
from edgewater.synopses.sampling.fifo import FifoSample
from edgewater.synopses.sampling.reservoir import ReservoirSample
from edgewater.synopses.single import SingleSynopsis
from edgewater.synopses.wavelets.haar import HaarWavelet
from edgewater.synopses.wavelets.haar_max import MaxErrorWavelet

AnySynopsis = GroupedAggregate | HaarWavelet | GeneralManager | SliceManager | SingleSynopsis[Any]

_BUILT_IN: dict[str, type[AnySynopsis]] = {
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
    """Reads a synopsis of any kind from the bytes that `to_bytes` returned.

    Raises:
        CorruptSynopsis: damaged or foreign bytes.
        UnsupportedVersion: a kind or a version that this release does not read.
    """
    message = codec.unseal(data)
    kind = message.kind
    found = _BUILT_IN.get(kind)
    if found is None:
        plugins.INSTALLED.load()
        found = plugins.INSTALLED.singles.get(kind)
    if found is None:
        known = ", ".join(sorted({**_BUILT_IN, **plugins.INSTALLED.singles}))
        raise UnsupportedVersion(
            f"synopsis kind {kind!r} is not one of those read here: {known}; {plugins.INSTALLED.hint()}"
        )
    synopsis: AnySynopsis = found.from_message(message)
    return synopsis


def merge_bytes(partials: Sequence[bytes]) -> bytes:
    """Returns the union of serialised synopses: the bytes of `from_bytes` of each, `merge_many` and `to_bytes`.

    Args:
        partials: at least one; all of one kind, with parameters that merge.

    Raises:
        CorruptSynopsis, UnsupportedVersion, IncompatibleSynopses: the error's message names the index of the partial.

    >>> from edgewater.synopses import HyperLogLog, Distinct
    >>> edges = [HyperLogLog(), HyperLogLog()]
    >>> edges[0].update(["ann", "bob"])
    >>> edges[1].update(["bob", "eve"])
    >>> round(from_bytes(merge_bytes([edge.to_bytes() for edge in edges])).query(Distinct()).value)
    3
    """
    if not partials:
        raise ValueError("nothing to merge: a merge needs at least one partial")
    of = len(partials)
    first: Any = numbered(0, of, from_bytes, partials[0])
    if of == 1:
        return partials[0]
    if isinstance(first, GroupedAggregate):
        return GroupedAggregate.merge_bytes(partials)
    union = _merge_objects(first, [numbered(number, of, from_bytes, partials[number]) for number in range(1, of)])
    data: bytes = union.to_bytes()
    require_readable(getattr(union, "_stack", union), codec.unseal(data))
    return data


def _merge_objects(first: Any, others: list[Any]) -> Any:
    try:
        return first.merge_many(others)
    except IncompatibleSynopses:
        for number, other in enumerate(others, 1):
            numbered(number, len(others) + 1, first.merge_many, [other])
        raise
