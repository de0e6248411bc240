"""Merging the rows of a micro-batch, on the executors. Pure: Arrow in, Arrow out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import pyarrow as pa

from center.merge import merge_partials
from center.spark.rows import Row, RowKind, from_table, to_batch
from center.spark.workers import settle
from edgewater.errors import SynopsisError


def merge_rows(rows: Iterable[Row], consumed: Mapping[str, int]) -> list[Row]:
    """One partial per (query, slice, shard), and all rows of other kinds as they came.

    Args:
        consumed: per query key the position through which frames have been applied: their rows are
            dropped, so that reading them again counts nothing twice.
    """
    passed: list[Row] = []
    partials: defaultdict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.position <= consumed.get(row.query, 0):
            continue
        if row.kind is RowKind.PARTIAL:
            partials[row.query, row.slice_start_ms, row.shard].append(row)
        else:
            passed.append(row)
    for parts in partials.values():
        passed += merge_key(parts)
    return passed


def merge_key(parts: list[Row]) -> list[Row]:
    """The merged partial of one key, and a REFUSED row for each part that cannot be merged."""
    try:
        return [replace(parts[0], payload=merge_partials([part.payload for part in parts]))]
    except SynopsisError:
        return _merge_one_by_one(parts)


def _merge_one_by_one(parts: list[Row]) -> list[Row]:
    """A damaged part, or one that does not fit the others, costs its own data only: it is told and left out."""
    merged: Row | None = None
    refused = []
    for part in parts:
        try:
            payloads = [part.payload] if merged is None else [merged.payload, part.payload]
            merged = replace(part, payload=merge_partials(payloads))
        except SynopsisError as exc:
            refused.append(replace(part, kind=RowKind.REFUSED, payload=f"{exc.code}: {exc}".encode()))
    return refused if merged is None else [merged, *refused]


class MergeBatches:
    """`merge_rows` as `DataFrame.mapInArrow` wants it: all batches of a task in, one out."""

    def __init__(self, consumed: Mapping[str, int]) -> None:
        self._consumed = dict(consumed)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle()
        merged = merge_rows((row for batch in batches for row in from_table(batch)), self._consumed)
        if merged:
            yield to_batch(merged)
