"""Synopses of any kind as bytes: reading one (`from_bytes`), merging many (`merge_bytes`).

A center merges the partials of a window with `merge_bytes`. Dense sketches of one layout are merged as one matrix
(`encoding.flat`). Other kinds are read as one stack of many groups (`encoding.columns`). Kinds that neither supports
are parsed and merged one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from edgewater.model.errors import IncompatibleSynopses, SynopsisError, UnsupportedVersion
from edgewater.synopses import plugins
from edgewater.synopses.distinct.hyperloglog import HyperLogLog
from edgewater.synopses.encoding import codec, columns, flat
from edgewater.synopses.encoding.columns import MessageBatch, ParsedBatch
from edgewater.synopses.encoding.layout import layout_for
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
from edgewater.synopses.registry import kind_named
from edgewater.synopses.sampling.bernoulli import BernoulliSample
from edgewater.synopses.sampling.biased_reservoir import BiasedReservoir
from edgewater.synopses.sampling.fifo import FifoSample
from edgewater.synopses.sampling.reservoir import ReservoirSample
from edgewater.synopses.single import SingleSynopsis, compacted
from edgewater.synopses.wavelets.haar import HaarWavelet
from edgewater.synopses.wavelets.haar_max import MaxErrorWavelet
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

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

_MIN_SAME_LAYOUT = 4  # least number of partials of one layout for which a matrix is faster
_MIN_BATCH = 24  # least number of partials for which reading in columns is faster
_BATCH_BYTES = 1 << 22  # memory of the partials that are read in columns at a time
_MATRIX_BYTES = 1 << 19  # bytes of the partials that are read as a matrix at a time: they stay in the cache
_NO_GROUPS = np.zeros(0, np.int64)


class MessageMerging(Protocol):
    """A stack whose arrays for many groups are the concatenated arrays of single groups."""

    def merge_messages(self, batch: MessageBatch) -> None:
        """Merges messages of one group each, of equal parameters and seeds, into this stack of one group.

        The result is the result of `merge_singles`. Raises SynopsisError.
        """


class DenseMerging(Protocol):
    """A stack of one group whose dense form merges as plain arrays.

    Attributes:
        varying_arrays: indices, in the message, of the arrays that differ between dense stacks of equal parameters.
    """

    varying_arrays: tuple[int, ...]

    def merge_dense(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Merges many dense stacks of one group.

        Raises ValueError, with nothing changed, if they cannot be states of this stack.

        Args:
            arrays: the varying arrays of the stacks: shapes (partials, …), in their stored types.
        """


def from_bytes(data: bytes) -> AnySynopsis:
    """Reads a synopsis of any kind from the bytes that `to_bytes` returned.

    Raises:
        CorruptSynopsis: damaged or foreign bytes.
        UnsupportedVersion: a kind or a version that this release does not read.
    """
    synopsis: AnySynopsis = _from_message(codec.unseal(data))
    return synopsis


def _from_message(message: SynopsisMessage) -> Any:
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
    return found.from_message(message)


def merge_bytes(partials: Sequence[bytes]) -> bytes:
    """Returns the union of serialised synopses: faster than `from_bytes` of each, `merge_many` and `to_bytes`.

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
    first = numbered(0, of, from_bytes, partials[0])
    if of == 1:
        return partials[0]
    if isinstance(first, GroupedAggregate):
        return GroupedAggregate.merge_bytes(partials)
    merged = np.zeros(of, bool)
    if isinstance(first, SingleSynopsis) and hasattr(first._stack, "merge_dense"):
        merged = _merge_matrices(first, partials)
    rest = np.flatnonzero(~merged)[1:].tolist()
    if len(rest) >= _MIN_SAME_LAYOUT and isinstance(first, SingleSynopsis):
        union = _merge_batches(first, [partials[number] for number in rest])
        if union is not None:
            return _sealed(union)
    others = [numbered(number, of, from_bytes, partials[number]) for number in rest]
    return _sealed(_merge_objects(first, others, rest, of) if others else first)


def _sealed(union: Any) -> bytes:
    """Returns the bytes of a union. Raises IncompatibleSynopses if they could not be read again."""
    data: bytes = union.to_bytes()
    if not isinstance(union, GroupedAggregate):
        require_readable(getattr(union, "_stack", union), codec.unseal(data))
    return data


def _merge_batches(first: SingleSynopsis[Any], partials: list[bytes]) -> Any:
    """Merges `first` and partials, which are read as stacks of many groups.

    Returns None if a partial has another header, or is invalid.
    """
    if getattr(first._stack, "merge_messages", None) is None:
        return None
    # The bytes of a batch stay in the cache. Stacks of a fixed size may have few bytes; their memory stays in it, too.
    fixed = first._stack.nbytes if hasattr(first._stack, "merge_dense") else len(partials[0])
    multiple = getattr(first._stack, "merge_batch_size", 2 * _MIN_SAME_LAYOUT)
    step = -(-_BATCH_BYTES // (fixed * multiple)) * multiple
    head = compacted(first._stack).to_message()
    whole = first.merge_many([])
    try:
        for at in range(0, len(partials), step):
            batch, records = _read_batch(head, partials[at : at + step])
            whole._stack.merge_messages(batch)
            whole.records += records
    except SynopsisError:
        return None  # reading them one by one reports the error and the partial
    return whole


def _read_batch(head: SynopsisMessage, partials: list[bytes]) -> tuple[MessageBatch, int]:
    """Reads partials with the header of `head`; returns them and the sum of their records. Raises SynopsisError."""
    if len(partials) >= _MIN_BATCH:
        read = columns.read(head, partials)
        if read is not None:
            return read, read.records
    messages = [codec.unseal(partial) for partial in partials]
    if any(_header_of(message) != _header_of(head) for message in messages):
        raise IncompatibleSynopses(f"{head.kind}: headers differ")
    layouts = getattr(kind_named(head.kind), "layouts", ())
    for message in messages:
        layout_for(head.kind, layouts, message.arrays).check(head.kind, message.arrays)
    return ParsedBatch(messages), sum(message.records for message in messages)


def _header_of(message: SynopsisMessage) -> tuple[Any, ...]:
    return message.kind, message.version, message.parameters, message.seed, len(message.arrays)


def _merge_objects(first: Any, others: list[Any], numbers: list[int], of: int) -> Any:
    try:
        return first.merge_many(others)
    except IncompatibleSynopses as exc:
        _raise_for_partial(exc, first, others, numbers, of)


def _raise_for_partial(
    exc: IncompatibleSynopses, first: Any, others: list[Any], numbers: list[int], of: int
) -> NoReturn:
    """Raises for the first partial that does not merge with the first of all; otherwise raises `exc`."""
    for number, other in zip(numbers, others, strict=True):
        numbered(number, of, first.merge_many, [other])
    raise exc


def _merge_matrices(first: SingleSynopsis[Any], partials: Sequence[bytes]) -> npt.NDArray[np.bool_]:
    """Merges the dense partials of its kind into `first`, which is the first partial; returns which it merged.

    Partials of one length usually have one layout, which means counters of one type.
    """
    merged = np.zeros(len(partials), bool)
    lengths = np.fromiter(map(len, partials), np.int64, len(partials))
    for length in np.unique(lengths[1:]).tolist():
        numbers = (np.flatnonzero(lengths[1:] == length) + 1).tolist()
        model = partials[0] if lengths[0] == length else partials[numbers[0]]
        layout = _layout_of(first, model, model is partials[0]) if len(numbers) >= _MIN_SAME_LAYOUT else None
        if layout is None:
            continue
        step = max(_MATRIX_BYTES // length, _MIN_SAME_LAYOUT)
        for at in range(0, len(numbers), step):
            block = numbers[at : at + step]
            merged[block] = _merge_matrix(first, [partials[i] for i in block], layout, model)
    return merged


def _layout_of(first: SingleSynopsis[Any], partial: bytes, is_first: bool) -> flat.Layout | None:
    """Returns the layout of a partial that is dense and merges with `first`; None: it is not dense, or does not merge.

    The partial may be `first` itself.
    """
    try:
        message = codec.unseal(partial)
        if not is_first:
            model = _from_message(message)
            if model.kind != first.kind or model._stack.level != first._stack.level:
                return None
            first._stack.take(_NO_GROUPS).merge(model._stack.take(_NO_GROUPS), _NO_GROUPS)
    except SynopsisError:
        return None  # reading them one by one reports the error and the partial
    if codec.seal(message) != partial:
        return None  # the layout describes bytes that `seal` wrote
    varying = first._stack.varying_arrays
    dense = message.arrays[varying[-1]].shape[0] == 1
    return flat.Layout.of(partial, message, varying) if dense else None


def _merge_matrix(
    first: SingleSynopsis[Any], partials: list[bytes], layout: flat.Layout, model: bytes
) -> npt.NDArray[np.bool_]:
    """Merges partials of the length of `model`. Returns which partials were merged: the valid ones of its layout."""
    rows = np.frombuffer(b"".join(partials), np.uint8).reshape(len(partials), layout.length)
    valid = flat.valid_checksums(rows) & layout.matches(rows, np.frombuffer(model, np.uint8))
    chosen = rows if valid.all() else rows[valid]
    try:
        first._stack.merge_dense([layout.array(chosen, number) for number in first._stack.varying_arrays])
    except ValueError:
        return np.zeros(len(partials), bool)
    first.records += layout.total_records(chosen)
    return valid
