"""Merges partials of which some may be unfit: damaged, incompatible, or beyond the range of a merge."""

from __future__ import annotations

from collections.abc import Sequence

from edgewater.synopses.grouped import GroupedAggregate


def merge_what_fits(partials: Sequence[bytes]) -> tuple[bytes | None, dict[int, Exception]]:
    """Merges the partials that can be read and merged. A partial that raises is left out; the others are merged.

    Partials of few records come first. So if a sum overflows, the partial with the most records is left out.

    Returns:
        The merge, or None if no partial can be read; and the exceptions of the omitted partials, by number. Takes
        O(omitted · log n) merges.
    """
    left_out: dict[int, Exception] = {}
    records: dict[int, int] = {}
    for number, partial in enumerate(partials):
        try:
            records[number] = GroupedAggregate.from_bytes(partial).records
        except Exception as exc:
            left_out[number] = exc
    remaining = sorted(records, key=lambda number: (records[number], number))
    merged: bytes | None = None
    while remaining:
        # The first `fit` of the remaining partials merge with the result; the first `unfit` do not.
        fit, unfit, failure = 0, len(remaining) + 1, None
        count = len(remaining)
        while unfit - fit > 1:
            parts = [partials[number] for number in remaining[fit:count]]
            try:
                merged = GroupedAggregate.merge_bytes(parts if merged is None else [merged, *parts])
                fit = count
            except Exception as exc:
                unfit, failure = count, exc
            count = (fit + unfit) // 2
        if failure is not None:
            left_out[remaining[fit]] = failure
        remaining = remaining[fit + 1 :]
    return merged, left_out
