"""Changes the sources of a trigger when edges join, are retired, or have been silent for too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from center.early import named_arrays
from center.early.trigger import STATE_KIND, EarlyTrigger


class SourceRemap:
    """New source i inherits the state of `rows[i]`; None starts empty.

    Args:
        sources: number of sources before.
        new_trigger: makes a trigger of the query with the given number of sources.
    """

    def __init__(self, sources: int, rows: Sequence[int | None], new_trigger: Callable[[int], EarlyTrigger]) -> None:
        # The axis that counts sources is the one in which a trigger with one more source differs.
        _, self._wider = named_arrays.unpack(STATE_KIND, new_trigger(sources + 1).to_state())
        _, self._empty = named_arrays.unpack(STATE_KIND, new_trigger(len(rows)).to_state())
        self._to = [i for i, row in enumerate(rows) if row is not None]
        self._from = [row for row in rows if row is not None]

    def apply(self, trigger: EarlyTrigger) -> EarlyTrigger:
        """Returns the trigger over the new sources. State that belongs to no source, such as backtests, is kept."""
        numbers, old = named_arrays.unpack(STATE_KIND, trigger.to_state())
        new = dict(self._empty)
        for name, array in old.items():
            differ = [axis for axis in range(array.ndim) if array.shape[axis] != self._wider[name].shape[axis]]
            if name.startswith("calibration.") or not differ:
                new[name] = array
                continue
            at: list[Any] = [slice(None)] * array.ndim
            new[name] = new[name].copy()
            new[name][(*at[: differ[0]], self._to)] = np.take(array, self._from, axis=differ[0])
        return EarlyTrigger.from_state(named_arrays.pack(STATE_KIND, numbers, new))
