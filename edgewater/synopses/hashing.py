"""64-bit hashes of whole columns, the same on every platform and in every release.

Each value becomes one 64-bit word: integers in two's complement, floats by their bits with one zero and one NaN,
strings and bytes by a hash of their 8-byte words. A seeded finaliser mixes the word. Its key depends on the type, so
that 1, 1.0, True and "1" hash differently.

Strings are hashed as the sum over positions j of mix(word_j + key_j), not as a chain; the keys depend on the seed. A
sum can be computed over all rows at one position, or over all positions of one long row, with the same result, so
neither many short strings nor one long string needs a Python loop over the longer axis.

The hash is not cryptographic. For a known seed, collisions can be constructed, so the seed of a query is drawn and kept
from those who write its data. The keys of words depend on the seed because the finaliser alone would keep every
collision of the sums.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.base.errors import InvalidRecord
from edgewater.synopses.base import IntArray

WordArray = npt.NDArray[np.uint64]

DEFAULT_SEED = 0x45444745_57415452  # "EDGEWATR"

_MASK = (1 << 64) - 1  # format: of uint64
_GOLDEN = 0x9E3779B97F4A7C15  # format: of SplitMix64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # format: of SplitMix64
_NAN_BITS = 0x7FF8000000000000  # format: of float64
_TAGS = {"bool": 1, "integer": 2, "float": 3, "string": 4, "binary": 5}
_ACCEPTED = "strings, bytes, integers, floats or bools, without nulls"

_WORDS_BY_POSITION = 16  # measured: bench.synopses
"""Words of a string that are hashed position by position. Further words of a longer string are hashed row by row."""

_ENCODE_FROM_BYTES = 48  # measured: bench.synopses
"""Mean length in bytes of repeated values above which it is faster to hash only distinct strings."""


def hash_values(values: Any, seed: int = DEFAULT_SEED) -> WordArray:
    """Hashes each value to 64 bits.

    Args:
        values: NumPy array of bool, integers or floats, or an Arrow array of those or of string or
            binary (plain, large, or dictionary-encoded), without nulls.
        seed: any 64-bit integer; hashes of different seeds are unrelated.

    Returns:
        uint64, shape (len(values),).

    Raises:
        InvalidRecord: values of another type, or nulls among them.
    """
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        return _hash_arrow(values, seed)
    words, tag = _canonical(np.asarray(values))
    return _finalise(words, _key(seed, tag))


def finalised(words: WordArray, number: int) -> WordArray:
    """Mixes words again: each `number` gives an independent hash of the same values. Does not change the input."""
    return _finalise(words, _number_key(number))


def finalised_word(word: int, number: int) -> int:
    """`finalised` for one word from 0 to 2^64 - 1, at a tenth of the cost of an array of one."""
    return _mix((word + _number_key(number)) & _MASK)


def _hash_arrow(values: pa.Array, seed: int) -> WordArray:
    if values.null_count:
        raise InvalidRecord("values", f"{values.null_count} nulls", _ACCEPTED)
    kind = values.type
    if pa.types.is_dictionary(kind):
        codes = values.indices.to_numpy(zero_copy_only=False)
        return _hash_arrow(values.dictionary.drop_null(), seed)[codes] if len(codes) else np.zeros(0, np.uint64)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        if _repeats(values):
            return _hash_arrow(values.dictionary_encode(), seed)
        key = _key(seed, "string" if text else "binary")
        return _finalise(_byte_words(values, key), key)
    if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise InvalidRecord("values", str(kind), _ACCEPTED)
    return hash_values(values.to_numpy(zero_copy_only=False), seed)


def _canonical(values: npt.NDArray[Any]) -> tuple[WordArray, str]:
    """Returns one word per value, and the name of the type."""
    kind = values.dtype.kind
    if kind == "b":
        return values.astype(np.uint64), "bool"
    if kind == "u":
        return values.astype(np.uint64), "integer"
    if kind == "i":
        return values.astype(np.int64, copy=False).view(np.uint64), "integer"
    if kind == "f":
        numbers = values.astype(np.float64, copy=False) + 0.0  # -0.0 + 0.0 is 0.0
        words = numbers.view(np.uint64)
        odd = numbers != numbers
        if odd.any():
            words[odd] = _NAN_BITS
        return words, "float"
    raise InvalidRecord("values", str(values.dtype), _ACCEPTED)


def _mix(word: int) -> int:
    """Applies the finaliser to one Python integer."""
    word = ((word ^ word >> 30) * _FIRST) & _MASK
    word = ((word ^ word >> 27) * _SECOND) & _MASK
    return word ^ word >> 31


@lru_cache(maxsize=1 << 10)
def _number_key(number: int) -> int:
    return _mix(number * _GOLDEN & _MASK)


def _key(seed: int, tag: str) -> int:
    return _mix(((seed & _MASK) + _TAGS[tag] * _GOLDEN) & _MASK)


def _finalise(words: WordArray, key: int) -> WordArray:
    """Returns mix(word + key) per word, a bijection for each key. Does not change the input."""
    mixed = words + np.uint64(key)
    shifted = mixed >> np.uint64(30)
    mixed ^= shifted
    mixed *= np.uint64(_FIRST)
    np.right_shift(mixed, np.uint64(27), out=shifted)
    mixed ^= shifted
    mixed *= np.uint64(_SECOND)
    np.right_shift(mixed, np.uint64(31), out=shifted)
    mixed ^= shifted
    return mixed


def _repeats(values: pa.Array) -> bool:
    """Returns whether to hash only distinct strings: they are long, and a sample has few distinct strings."""
    rows = len(values)
    if rows < 4096 or values.nbytes < rows * _ENCODE_FROM_BYTES:
        return False
    sample = values.slice(rows // 2, 1024)
    return len(sample.unique()) <= 256


def _byte_words(values: pa.Array, key: int) -> WordArray:
    """Returns the hash before the finaliser of each string or bytes value, from Arrow's buffers."""
    rows = len(values)
    if rows == 0:
        return np.zeros(0, np.uint64)
    wide = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    width = np.dtype("<i8" if wide else "<i4")
    _, offset_buffer, data = values.buffers()
    offsets = np.frombuffer(offset_buffer, width, rows + 1, values.offset * width.itemsize).astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    padded = np.zeros(last - first + 8, np.uint8)
    if last > first:
        padded[:-8] = np.frombuffer(data, np.uint8, last - first, first)
    # An overlapping view with one word per byte, since words may begin at any byte.
    at_byte: WordArray = np.ndarray((last - first + 1,), "<u8", padded, strides=(1,))
    starts = offsets[:-1] - first
    lengths = np.diff(offsets)
    result = _finalise(lengths.view(np.uint64), _GOLDEN)
    _add_by_position(result, at_byte, starts, lengths, key)
    for row in np.flatnonzero(lengths > 8 * _WORDS_BY_POSITION):
        _add_rest(result, at_byte, int(row), int(starts[row]), int(lengths[row]), key)
    return result


def _add_by_position(result: WordArray, at_byte: WordArray, starts: IntArray, lengths: IntArray, key: int) -> None:
    """Adds the first words of every row: one step per word position, over all rows with a word there."""
    rows: IntArray | None = None
    for position in range(min(_WORDS_BY_POSITION, -(-int(lengths.max()) // 8))):
        if position:
            longer = lengths > 8 * position
            if not longer.all():
                rows = np.flatnonzero(longer) if rows is None else rows[longer]
                starts, lengths = starts[longer], lengths[longer]
        mixed = _mix_words(_masked(at_byte[starts + 8 * position], lengths - 8 * position), position, key)
        if rows is None:
            # An empty string has no first word.
            result += np.where(lengths > 0, mixed, np.uint64(0)) if position == 0 else mixed
        else:
            result[rows] += mixed


def _add_rest(result: WordArray, at_byte: WordArray, row: int, start: int, length: int, key: int) -> None:
    """Adds the words of one long row that `_add_by_position` does not add."""
    positions = np.arange(_WORDS_BY_POSITION, -(-length // 8))
    words = _masked(at_byte[start + 8 * positions], length - 8 * positions)
    # A slice: arrays wrap around silently, scalars warn.
    result[row : row + 1] += _mix_words(words, positions, key).sum(dtype=np.uint64)


def _masked(words: WordArray, remaining: IntArray) -> WordArray:
    """Clears the bytes of each word after its first `remaining` bytes. They belong to other values."""
    surplus = np.clip(8 - remaining, 0, 7).astype(np.uint64) * np.uint64(8)
    return words & (np.uint64(_MASK) >> surplus)


def _mix_words(words: WordArray, position: int | IntArray, key: int) -> WordArray:
    """Returns mix(word + key), where the key is derived from the word's position and the seed's key."""
    if isinstance(position, int):
        return _finalise(words, _mix((key + position * _GOLDEN) & _MASK))
    keys = _finalise(position.view(np.uint64) * np.uint64(_GOLDEN), key)
    return _finalise(words + keys, 0)
