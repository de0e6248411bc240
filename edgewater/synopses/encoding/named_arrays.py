"""A watermark's state as bytes: named arrays and a few numbers in the envelope of synopses.

Magic, checksum and narrow integers are `synopses.codec`'s. What is read back is exactly what was written, so that a
watermark restored at any moment goes on as the one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgewater.errors import CorruptSynopsis, UnsupportedVersion
from edgewater.synopses.encoding import codec

KIND = "watermark"
VERSION = 1

Arrays = dict[str, Any]
"""NumPy arrays by name."""


def pack(numbers: Mapping[str, Any], arrays: Arrays, kind: str = KIND) -> bytes:
    """Numbers (anything that JSON holds exactly, no NaN) and arrays of bool, integers or floats, of any shape."""
    message = codec.header(kind, VERSION, {"numbers": dict(numbers), "names": list(arrays)})
    message.arrays.extend(codec.encode(np.asarray(a)) for a in arrays.values())
    return codec.seal(message)


def unpack(state: bytes, kind: str = KIND) -> tuple[dict[str, Any], Arrays]:
    """Raises CorruptSynopsis for what `pack` did not make, UnsupportedVersion for a newer release's."""
    message = codec.unseal(state)
    if message.kind == kind and message.version > VERSION:
        raise UnsupportedVersion(f"{kind} state of version {message.version}; this release reads {VERSION}")
    given = codec.open_message(message, kind, VERSION, len(message.arrays))
    names, numbers = given.get("names"), given.get("numbers")
    if not isinstance(names, list) or not isinstance(numbers, dict) or len(names) != len(message.arrays):
        raise CorruptSynopsis(f"{kind} state names {names!r} for {len(message.arrays)} arrays")
    return numbers, {str(n): codec.decode(a) for n, a in zip(names, message.arrays, strict=True)}


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}.{name}": value for name, value in arrays.items()}


def part(prefix: str, arrays: Arrays) -> Arrays:
    """What `prefixed` put there."""
    return {name.removeprefix(f"{prefix}."): a for name, a in arrays.items() if name.startswith(f"{prefix}.")}


def restore(into: object, arrays: Arrays, names: Mapping[str, str]) -> None:
    """Sets attributes (name of the array: name of the attribute) to copies, where dtype and shape are as they were.

    Raises:
        CorruptSynopsis: an array is missing or of another shape or type.
    """
    for name, attribute in names.items():
        have, given = getattr(into, attribute), arrays.get(name)
        if given is None or given.shape != have.shape or given.dtype != have.dtype:
            raise CorruptSynopsis(
                f"{KIND} state: {name} is {None if given is None else (given.shape, given.dtype)}, "
                f"expected {(have.shape, have.dtype)}"
            )
        setattr(into, attribute, given.copy())
