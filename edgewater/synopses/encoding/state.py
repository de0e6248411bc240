"""The state of a component with components of its own, as bytes: a tree of numbers and named arrays.

Every component has two methods: `to_state` returns its `State`, and `from_state` builds a component from a `State`. The
outermost component packs the tree once, so that each array is copied once. Unpacking returns exactly the packed state,
so a restored component continues as the original component would.

Layout: ``EWT1`` | CRC32C of the following bytes (4 bytes, little endian) | pieces, each a length (4 bytes) and bytes.
The first piece is JSON: the kind, the version, and the tree with the names of its arrays. The other pieces are the
arrays: messages of `codec` in narrow types, or plain bytes.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from edgewater.base.errors import CorruptSynopsis, UnsupportedVersion
from edgewater.synopses.encoding import codec
from edgewater.wire.synopsis_pb2 import Array as ArrayMessage

MAGIC, VERSION = b"EWT1", 1
_HEADER, _LENGTH = struct.Struct("<4sI"), struct.Struct("<I")
_BYTES, _KEYS = "bytes", "keys"


@dataclass(frozen=True, slots=True)
class State:
    """The state of a component.

    It refers to the component's arrays without copying them: pack it before the component changes.

    Attributes:
        numbers: anything that JSON represents exactly (no NaN).
        arrays: by name: NumPy arrays of bool, integers or floats, of any shape; Arrow arrays of keys (string, int64,
            float64 or bool, with nulls); or bytes.
        components: the states of its components, by name, in order.
    """

    numbers: Any = None
    arrays: Mapping[str, Any] = field(default_factory=dict)
    components: Mapping[str, State] = field(default_factory=dict)

    def pack(self, kind: str) -> bytes:
        """Returns the state as bytes; equal states give equal bytes."""
        arrays: list[bytes] = []
        document = {"kind": kind, "version": VERSION, "state": self._flatten(arrays)}
        text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
        body = [part for piece in (text, *arrays) for part in (_LENGTH.pack(len(piece)), piece)]
        checksum = functools.reduce(google_crc32c.extend, body, 0)
        return b"".join((_HEADER.pack(MAGIC, checksum), *body))

    def _flatten(self, pieces: list[bytes]) -> list[Any]:
        """Returns the tree as JSON; appends its arrays, in the order of their names in the tree."""
        names = []
        for name, array in self.arrays.items():
            if isinstance(array, bytes):
                names.append([name, _BYTES])
                pieces.append(array)
                continue
            is_keys = isinstance(array, pa.Array)
            message = codec.encode_keys(array) if is_keys else codec.encode(np.asarray(array))
            names.append([name, _KEYS] if is_keys else [name])
            pieces.append(message.SerializeToString(deterministic=True))
        components = [[name, component._flatten(pieces)] for name, component in self.components.items()]
        return [self.numbers, names, components]

    @classmethod
    def unpack(cls, data: bytes, kind: str) -> State:
        """Reads the result of `pack`.

        Raises:
            CorruptSynopsis: the bytes are damaged, or of another kind.
            UnsupportedVersion: the bytes are of a newer release.
        """
        body = memoryview(data)[_HEADER.size :]
        if len(data) < _HEADER.size or _HEADER.unpack_from(data) != (MAGIC, google_crc32c.value(bytes(body))):
            raise CorruptSynopsis(f"{kind} state: {len(data)} bytes without the magic or with a wrong checksum")
        try:
            pieces = _pieces(body)
            document = json.loads(next(pieces))
            found = document["kind"], document["version"]
            if found == (kind, VERSION):
                state = cls._build(document["state"], pieces)
                if next(pieces, None) is None:
                    return state
        except (KeyError, TypeError, ValueError, StopIteration, RuntimeError, struct.error, DecodeError) as exc:
            raise CorruptSynopsis(f"{kind} state: {exc}") from exc
        if found[0] == kind and found[1] > VERSION:
            raise UnsupportedVersion(f"{kind} state of version {found[1]}; this release reads {VERSION}")
        raise CorruptSynopsis(f"{kind} state: found {found[0]!r} of version {found[1]}, or more arrays than names")

    @classmethod
    def _build(cls, tree: list[Any], pieces: Iterator[bytes]) -> State:
        numbers, names, components = tree
        arrays = {}
        for name, *kind in names:
            piece = next(pieces)
            decode = codec.decode_keys if kind == [_KEYS] else codec.decode
            arrays[name] = piece if kind == [_BYTES] else decode(ArrayMessage.FromString(piece))
        return cls(numbers, arrays, {name: cls._build(component, pieces) for name, component in components})


def _pieces(body: memoryview) -> Iterator[bytes]:
    at = 0
    while at < len(body):
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if at + length > len(body):
            raise ValueError(f"an array of {length} bytes at {at} of {len(body)}")
        yield bytes(body[at : at + length])
        at += length
