"""Merges the partials that a task has read, on the executors. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from center.job.rows import MAX_REASON_BYTES, FrameRow, RowKind
from edgewater.model.errors import SynopsisError
from edgewater.synopses import GroupedAggregate, merge_what_fits


def merge_rows(rows: Iterable[FrameRow]) -> list[FrameRow]:
    """Merges partials to one per (query, slice). Rows of other kinds are returned unchanged, first."""
    result: list[FrameRow] = []
    partials: defaultdict[tuple[str, int], list[FrameRow]] = defaultdict(list)
    for row in rows:
        if row.kind is RowKind.PARTIAL:
            partials[row.query, row.slice_start_ms].append(row)
        else:
            result.append(row)
    for same_key in partials.values():
        result += _merge_key(same_key)
    return result


def _merge_key(partials: list[FrameRow]) -> list[FrameRow]:
    """Merges the partials of one key.

    An exception of a partial affects only that partial: foreign bytes may trigger any fault of the decoders. If some
    partials merge with each other but not with the rest, both remain: the store decides which of them fit the query. A
    partial that cannot be read becomes a REFUSED row.
    """
    try:
        return [_merged(partials, GroupedAggregate.merge_bytes([p.payload for p in partials]))]
    except Exception:
        return _merge_what_fits(partials)


def _merge_what_fits(partials: list[FrameRow]) -> list[FrameRow]:
    apart: list[FrameRow] = []
    while partials:
        payload, left_out = merge_what_fits([p.payload for p in partials])
        if payload is None:
            return [*apart, *(_refused(partials[number], exc) for number, exc in left_out.items())]
        apart.append(_merged([p for number, p in enumerate(partials) if number not in left_out], payload))
        partials = [partials[number] for number in left_out]
    return apart


def _merged(partials: list[FrameRow], payload: bytes) -> FrameRow:
    return replace(partials[0], payload=payload, partials=len(partials))


def _refused(partial: FrameRow, exc: Exception) -> FrameRow:
    code = exc.code if isinstance(exc, SynopsisError) else type(exc).__name__
    reason = f"{code}: {exc}".encode(errors="backslashreplace")[:MAX_REASON_BYTES]
    return replace(partial, kind=RowKind.REFUSED, payload=reason)
