"""Deflate with a preset dictionary, for the bodies of small frames.

The body of a window with few groups consists mostly of bytes that every frame repeats: kinds, parameters, types,
message structure. A dictionary that both sides hold removes them: such a frame is a quarter to two fifths smaller
than with zstd (`docs/decisions/0007-frame-compression.md`). Frames stay independent of each other.

The dictionary is part of the format and never changes; another dictionary would be another encoding.
`tests/golden/make_preset.py` generated it.
"""

from __future__ import annotations

import zlib
from functools import cache
from importlib.resources import files

MAX_BODY_BYTES = 16 << 10
"""Larger bodies do not benefit from a dictionary of this size; zstd is faster and compresses better."""

_LEVEL = 9
_RAW = -15


@cache
def _dictionary() -> bytes:
    return files("edgewater.wire").joinpath("preset_v1.bin").read_bytes()


def deflate(plain: bytes) -> bytes:
    """Compresses by raw deflate, level 9, 32 KiB window, with the preset dictionary."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, 9, zdict=_dictionary())
    return stream.compress(plain) + stream.flush()


def inflate(data: bytes, length: int) -> bytes:
    """Decompresses `length` bytes. Raises ValueError for another length or trailing bytes."""
    stream = zlib.decompressobj(_RAW, zdict=_dictionary())
    try:
        plain = stream.decompress(data, length + 1)
    except zlib.error as exc:
        raise ValueError(f"not a deflate stream with the preset dictionary: {exc}") from exc
    if len(plain) != length or not stream.eof or stream.unused_data:
        raise ValueError(f"expected a deflate stream of {length} bytes; this one has {len(plain)} or is truncated")
    return plain
