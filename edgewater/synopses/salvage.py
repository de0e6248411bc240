"""Merging of partials of which some may be unfit: damaged, incompatible, or beyond what a merge can represent."""

from __future__ import annotations

from collections.abc import Sequence

from edgewater.synopses.grouped import GroupedAggregate


def merge_what_fits(partials: Sequence[bytes]) -> tuple[bytes | None, dict[int, Exception]]:
    """Merges the partials that can be read and merged; whatever one of them raises costs only that one.

    Partials of few records come first. So where a sum overflows, the one is left out that claims the most.

    Returns:
        The merge, or None if no partial can be read, and by number why others were left out. Takes
        O(left out · log n) merges.
    """
    left_out: dict[int, Exception] = {}
    records: dict[int, int] = {}
    for number, partial in enumerate(partials):
        try:
            records[number] = GroupedAggregate.from_bytes(partial).records
        except Exception as exc:
            left_out[number] = exc
    rest = sorted(records, key=lambda number: (records[number], number))
    merged: bytes | None = None
    while rest:
        # The first `fit` of the rest merge with what is merged; the first `unfit` do not.
        fit, unfit, failure = 0, len(rest) + 1, None
        count = len(rest)
        while unfit - fit > 1:
            parts = [partials[number] for number in rest[fit:count]]
            try:
                merged = GroupedAggregate.merge_bytes(parts if merged is None else [merged, *parts])
                fit = count
            except Exception as exc:
                unfit, failure = count, exc
            count = (fit + unfit) // 2
        if failure is not None:
            left_out[rest[fit]] = failure
        rest = rest[fit + 1 :]
    return merged, left_out
