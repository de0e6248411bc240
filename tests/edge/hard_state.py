"""The state that frames depend on: without what only the policies remember."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from edge.core.core import EdgeCore
from edgewater.synopses.encoding.state import State

LEARNED = slice(5, 7)
"""In the numbers of a slice: whether its history was learned, and until when its groups are sent late."""
SOFT = frozenset({"served_bytes", "first_pulls", "turns"})


def hard_state(core: EdgeCore) -> dict[str, Any]:
    """Returns the state of a core as paths and values. Equal hard states give equal dictionaries."""
    result: dict[str, Any] = {}
    _add(result, "", State.unpack(core.to_state(), "edge-core"))
    return result


def _add(result: dict[str, Any], path: str, state: State) -> None:
    numbers = state.numbers
    if isinstance(numbers, dict):
        numbers = {name: value for name, value in numbers.items() if name not in SOFT}
    if path.rpartition("/")[0].endswith("/store/slices"):
        del numbers[LEARNED]
    if path.endswith("/monitor") and "monitor" in state.components:
        del numbers[3][1:]  # the bytes of reports
    result[path] = numbers
    for name, value in state.arrays.items():
        if name not in ("timed", "positions"):  # for the timetable
            result[f"{path}/{name}"] = _plain(value)
    for name, part in state.components.items():
        if name not in ("shipper", "send_queue"):
            _add(result, f"{path}/{name}", part)


def _plain(value: Any) -> Any:
    if isinstance(value, pa.Array):
        return value.to_pylist()
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
