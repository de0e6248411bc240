"""Snapshots as bytes: named arrays and a few numbers in the byte format of synopses.

The early trigger of the center and the arrival monitors of the edge write their states with it. Magic, checksum and
narrow integers are `codec`'s. Arrays are restored exactly, so a restored object behaves as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgewater.errors import CorruptSynopsis
from edgewater.synopses.encoding import codec

KIND = "early_trigger"
VERSION = 1

Arrays = dict[str, Any]
"""NumPy arrays by name."""


def pack(numbers: Mapping[str, Any], arrays: Arrays, kind: str = KIND) -> bytes:
    """Serialises numbers (values that JSON represents exactly, no NaN) and arrays of bool, integers or floats."""
    message = codec.header(kind, VERSION, {"numbers": dict(numbers), "names": list(arrays)})
    message.arrays.extend(codec.encode(np.asarray(a)) for a in arrays.values())
    return codec.seal(message)


def unpack(state: bytes, kind: str = KIND) -> tuple[dict[str, Any], Arrays]:
    """Returns the numbers and arrays that `pack` wrote. Raises CorruptSynopsis or UnsupportedVersion."""
    message = codec.unseal(state)
    parameters = codec.open_message(message, kind, VERSION, len(message.arrays))
    names, numbers = parameters.get("names"), parameters.get("numbers")
    if not isinstance(names, list) or not isinstance(numbers, dict) or len(names) != len(message.arrays):
        raise CorruptSynopsis(f"{kind} state names {names!r} for {len(message.arrays)} arrays")
    return numbers, {str(n): codec.decode(a) for n, a in zip(names, message.arrays, strict=True)}


def with_prefix(prefix: str, arrays: Arrays) -> Arrays:
    """Returns the arrays under names that begin with the prefix."""
    return {f"{prefix}.{name}": value for name, value in arrays.items()}


def without_prefix(prefix: str, arrays: Arrays) -> Arrays:
    """Returns the arrays whose names begin with the prefix, under their names without it."""
    return {name.removeprefix(f"{prefix}."): a for name, a in arrays.items() if name.startswith(f"{prefix}.")}


def restore(into: object, arrays: Arrays, names: Mapping[str, str]) -> None:
    """Sets attributes to copies of arrays that have the shape and dtype of the current values.

    Args:
        names: array name -> attribute name.

    Raises:
        CorruptSynopsis: an array is missing or of another shape or type.
    """
    for name, attribute in names.items():
        held, array = getattr(into, attribute), arrays.get(name)
        if array is None or array.shape != held.shape or array.dtype != held.dtype:
            raise CorruptSynopsis(
                f"{type(into).__name__} state: {name} is {None if array is None else (array.shape, array.dtype)}, "
                f"expected {(held.shape, held.dtype)}"
            )
        setattr(into, attribute, array.copy())
