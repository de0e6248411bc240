"""A watermark whose sources change: edges join, are retired, or have been silent for too long. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgewater.watermarks import state
from edgewater.watermarks.watermark import Watermark


def reseated(mark: Watermark, rows: Sequence[int | None], fresh: Callable[[int], Watermark]) -> Watermark:
    """The watermark over other sources: source i is what was source `rows[i]`, or (None) one that nothing is known of.

    What belongs to no source, the record of predictions above all, is kept.

    Args:
        fresh: makes the query's watermark of so many sources.
    """
    numbers, old = state.unpack(mark.to_state())
    # Which axis counts the sources is read off a watermark that has one more of them.
    _, wider = state.unpack(fresh(mark.triangle.sources + 1).to_state())
    _, new = state.unpack(fresh(len(rows)).to_state())
    into = [i for i, row in enumerate(rows) if row is not None]
    out = [row for row in rows if row is not None]
    for name, array in old.items():
        differ = [axis for axis in range(array.ndim) if array.shape[axis] != wider[name].shape[axis]]
        if name.startswith("calibration.") or not differ:
            new[name] = array
            continue
        at: list[Any] = [slice(None)] * array.ndim
        new[name] = new[name].copy()
        new[name][(*at[: differ[0]], into)] = np.take(array, out, axis=differ[0])
    return Watermark.from_state(state.pack(numbers, new))
