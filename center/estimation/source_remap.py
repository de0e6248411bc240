"""A watermark whose sources change: edges join, are retired, or have been silent for too long. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from center.early_trigger.trigger import Watermark
from edgewater.synopses.encoding import named_arrays as state


class Seats:
    """Other sources: source i is what was source `rows[i]`, or (None) one that nothing is known of.

    Args:
        sources: how many there were.
        fresh: makes the query's watermark of so many sources.
    """

    def __init__(self, sources: int, rows: Sequence[int | None], fresh: Callable[[int], Watermark]) -> None:
        # Which axis counts the sources is read off a watermark that has one more of them.
        _, self._wider = state.unpack(fresh(sources + 1).to_state())
        _, self._new = state.unpack(fresh(len(rows)).to_state())
        self._into = [i for i, row in enumerate(rows) if row is not None]
        self._out = [row for row in rows if row is not None]

    def reseated(self, mark: Watermark) -> Watermark:
        """The watermark over the other sources. What belongs to no source, the record of predictions above all, is
        kept."""
        numbers, old = state.unpack(mark.to_state())
        new = dict(self._new)
        for name, array in old.items():
            differ = [axis for axis in range(array.ndim) if array.shape[axis] != self._wider[name].shape[axis]]
            if name.startswith("calibration.") or not differ:
                new[name] = array
                continue
            at: list[Any] = [slice(None)] * array.ndim
            new[name] = new[name].copy()
            new[name][(*at[: differ[0]], self._into)] = np.take(array, self._out, axis=differ[0])
        return Watermark.from_state(state.pack(numbers, new))
