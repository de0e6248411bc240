"""Merges the rows of a micro-batch, on the executors. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from center.job.rows import MAX_REASON_BYTES, FrameRow, RowKind
from edgewater.errors import SynopsisError
from edgewater.synopses import GroupedAggregate


def merge_rows(rows: Iterable[FrameRow]) -> list[FrameRow]:
    """Merges partials to one per (query, slice, shard); rows of other kinds are returned unchanged, first."""
    result: list[FrameRow] = []
    partials: defaultdict[tuple[str, int, int], list[FrameRow]] = defaultdict(list)
    for row in rows:
        if row.kind is RowKind.PARTIAL:
            partials[row.query, row.slice_start_ms, row.shard].append(row)
        else:
            result.append(row)
    for same_key in partials.values():
        result += merge_key(same_key)
    return result


def merge_key(partials: list[FrameRow]) -> list[FrameRow]:
    """Merges the partials of one key; adds a REFUSED row for each that cannot be merged.

    Whatever a partial raises costs only that partial: bytes from outside may find any fault of the decoders.
    """
    try:
        return [replace(partials[0], payload=GroupedAggregate.merge_bytes([p.payload for p in partials]))]
    except Exception:
        return _merge_one_by_one(partials)


def _merge_one_by_one(partials: list[FrameRow]) -> list[FrameRow]:
    """Merges what can be merged: a damaged or incompatible partial is refused without the others."""
    merged: FrameRow | None = None
    refused = []
    for partial in partials:
        try:
            payloads = [partial.payload] if merged is None else [merged.payload, partial.payload]
            merged = replace(partial, payload=GroupedAggregate.merge_bytes(payloads))
        except Exception as exc:
            code = exc.code if isinstance(exc, SynopsisError) else type(exc).__name__
            reason = f"{code}: {exc}".encode(errors="backslashreplace")[:MAX_REASON_BYTES]
            refused.append(replace(partial, kind=RowKind.REFUSED, payload=reason))
    return refused if merged is None else [merged, *refused]
