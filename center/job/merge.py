"""Merging the rows of a micro-batch, on the executors. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from center.job.rows import FrameRow, RowKind
from edgewater.errors import SynopsisError
from edgewater.synopses import GroupedAggregate


def merge_rows(rows: Iterable[FrameRow]) -> list[FrameRow]:
    """One partial per (query, slice, shard), and all rows of other kinds as they came."""
    passed: list[FrameRow] = []
    partials: defaultdict[tuple[str, int, int], list[FrameRow]] = defaultdict(list)
    for row in rows:
        if row.kind is RowKind.PARTIAL:
            partials[row.query, row.slice_start_ms, row.shard].append(row)
        else:
            passed.append(row)
    for parts in partials.values():
        passed += merge_key(parts)
    return passed


def merge_key(parts: list[FrameRow]) -> list[FrameRow]:
    """The merged partial of one key, and a REFUSED row for each part that cannot be merged."""
    try:
        return [replace(parts[0], payload=GroupedAggregate.merge_bytes([part.payload for part in parts]))]
    except SynopsisError:
        return _merge_one_by_one(parts)


def _merge_one_by_one(parts: list[FrameRow]) -> list[FrameRow]:
    """A damaged part, or one that does not fit the others, costs its own data only: it is told and left out."""
    merged: FrameRow | None = None
    refused = []
    for part in parts:
        try:
            payloads = [part.payload] if merged is None else [merged.payload, part.payload]
            merged = replace(part, payload=GroupedAggregate.merge_bytes(payloads))
        except SynopsisError as exc:
            refused.append(replace(part, kind=RowKind.REFUSED, payload=f"{exc.code}: {exc}".encode()))
    return refused if merged is None else [merged, *refused]
