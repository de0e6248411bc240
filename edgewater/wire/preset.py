"""Deflate with a preset dictionary, for the bodies of small frames.

A window of few groups is mostly what every frame repeats: kinds, parameters, types, the skeletons of messages. A
dictionary that both sides hold takes that out (a quarter to two fifths of such a frame against plain zstd,
`docs/decisions/0007-frame-compression.md`) without any state in the session: each frame can be read alone.

The dictionary is part of the format. It never changes; another one is another encoding. `tests/golden/make_preset.py`
made it.
"""

from __future__ import annotations

import zlib
from functools import cache
from importlib.resources import files

MAX_BODY_BYTES = 16 << 10
"""Bodies above it gain nothing from a dictionary of this size; zstd is faster and finds more."""

_LEVEL = 9
_RAW = -15


@cache
def _dictionary() -> bytes:
    return files("edgewater.wire").joinpath("preset_v1.bin").read_bytes()


def deflate(plain: bytes) -> bytes:
    """Raw deflate, level 9, 32 KiB window, over the preset dictionary."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, 9, zdict=_dictionary())
    return stream.compress(plain) + stream.flush()


def inflate(data: bytes, length: int) -> bytes:
    """What `deflate` was given. Raises ValueError unless that is `length` bytes, and nothing follows."""
    stream = zlib.decompressobj(_RAW, zdict=_dictionary())
    try:
        plain = stream.decompress(data, length + 1)
    except zlib.error as exc:
        raise ValueError(f"no deflate stream over the preset dictionary: {exc}") from exc
    if len(plain) != length or not stream.eof or stream.unused_data:
        raise ValueError(f"a deflate stream of {length} bytes was expected, this one has {len(plain)} or does not end")
    return plain
