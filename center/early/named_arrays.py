"""Snapshots as bytes: named arrays and a few numbers in the byte format of synopses.

Magic number, checksum and narrow integers come from `edgewater.synopses.encoding.codec`. Arrays are restored exactly,
so a restored object returns the same results as the object before the snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from edgewater.model.errors import CorruptSynopsis
from edgewater.synopses.encoding import codec

VERSION = 1

Arrays = dict[str, Any]
"""NumPy arrays by name."""


class ArrayState:
    """Base class of estimators whose state is a fixed set of arrays. The constructor sets the shapes of the arrays.

    Subclasses list the names of these attributes in `STATE`.
    """

    STATE: ClassVar[tuple[str, ...]]

    def to_state(self) -> Arrays:
        return {name: getattr(self, name).copy() for name in self.STATE}

    def restore(self, arrays: Arrays) -> None:
        """Sets the attributes to copies of the arrays.

        Raises:
            CorruptSynopsis: an array is missing, or its shape or dtype differs from the attribute's.
        """
        for name in self.STATE:
            own, array = getattr(self, name), arrays.get(name)
            if array is None or array.shape != own.shape or array.dtype != own.dtype:
                raise CorruptSynopsis(
                    f"{type(self).__name__} state: {name} is {None if array is None else (array.shape, array.dtype)}, "
                    f"expected {(own.shape, own.dtype)}"
                )
            setattr(self, name, array.copy())


def pack(kind: str, numbers: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Serialises numbers and arrays.

    Args:
        numbers: values that JSON represents exactly; NaN is not allowed.
        arrays: arrays of bool, integers or floats.
    """
    message = codec.header(kind, VERSION, {"numbers": dict(numbers), "names": list(arrays)})
    message.arrays.extend(codec.encode(np.asarray(a)) for a in arrays.values())
    return codec.seal(message)


def unpack(kind: str, state: bytes) -> tuple[dict[str, Any], Arrays]:
    """Returns the numbers and arrays from the bytes that `pack` returned.

    Raises:
        CorruptSynopsis: the bytes cannot be read.
        UnsupportedVersion: the bytes have a format version that is not supported.
    """
    message = codec.unseal(state)
    parameters = codec.open_message(message, kind, VERSION, len(message.arrays))
    names, numbers = parameters.get("names"), parameters.get("numbers")
    if not isinstance(names, list) or not isinstance(numbers, dict) or len(names) != len(message.arrays):
        raise CorruptSynopsis(f"{kind} state names {names!r} for {len(message.arrays)} arrays")
    # Returns a copy, because equal messages share the parsed parameters.
    return dict(numbers), {str(n): codec.decode(a) for n, a in zip(names, message.arrays, strict=True)}


def with_prefix(prefix: str, arrays: Arrays) -> Arrays:
    """Returns the arrays with `prefix` and a dot before each name."""
    return {f"{prefix}.{name}": value for name, value in arrays.items()}


def without_prefix(prefix: str, arrays: Arrays) -> Arrays:
    """Returns the arrays whose names begin with `prefix` and a dot. The prefix is removed from the names."""
    return {name.removeprefix(f"{prefix}."): a for name, a in arrays.items() if name.startswith(f"{prefix}.")}
