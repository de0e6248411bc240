"""Reading many partials at once gives the same arrays as the protobuf parser."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.model.errors import CorruptSynopsis, IncompatibleSynopses
from edgewater.synopses import Kll, TopK
from edgewater.synopses.encoding import codec, columns
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage
from tests.examples import examples

SHAPES: dict[str, Any] = {"scalar": (1,), "empty": (0,), "few": (5,), "many": (300,), "longer": (20_000,)}


def serialized(number: int, arrays: list[np.ndarray], kind: str = "kll") -> bytes:
    message = codec.header(kind, 1, {"k": 200}, seed=7, records=number * 40_000)
    message.arrays.extend(codec.encode(array) for array in arrays)
    return codec.seal(message)


def like(partials: list[bytes]) -> SynopsisMessage:
    return codec.unseal(partials[0])


@examples(60)
@given(st.lists(st.tuples(*[st.sampled_from([*SHAPES.values()])] * 2, st.sampled_from([1, 300, 1 << 40, -5, 0.5])),
                min_size=2, max_size=9))  # fmt: skip
def test_arrays_of_any_length_and_stored_type_equal_those_of_the_parser(batch_shapes: list[Any]) -> None:
    rng = np.random.default_rng(3)
    partials = []
    for number, (one, two, scale) in enumerate(batch_shapes):
        integers = (rng.integers(0, 100, one) * int(scale)).astype(np.int64)
        partials.append(serialized(number, [np.array([number]), integers, rng.integers(0, 100, two) * float(scale)]))
    read, messages = columns.read(like(partials), partials), [codec.unseal(partial) for partial in partials]
    parsed = columns.ParsedBatch(messages)
    assert read is not None and read.records == sum(message.records for message in messages)
    for number in range(3):
        for of in (slice(None), slice(1, 4)):
            mine, theirs = read.array(number, of), parsed.array(number, of)
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and (mine == theirs).all()
    roles = codec.ArrayRoles(0, first_only=(1,), group_numbers=(2,))
    assert read.stacked(roles) == parsed.stacked(roles)


def test_arrays_with_similar_heads_are_read_as_any_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widths of numbers, the types and the presence of data are those of the first partial, or differ."""
    rng = np.random.default_rng(5)
    for sizes in ([150, 140, 131], [150, 20, 3], [4, 4, 4], [0, 0, 0], [3, 0, 3], [0, 3, 0], [40_000, 33_000, 20_000]):
        arrays = [[rng.integers(0, 200, (size, 2)), np.arange(size) * 0.5] for size in sizes]
        partials = [serialized(1, held) for held in arrays]
        read = columns.read(like(partials), partials)
        with monkeypatch.context() as patch:
            patch.setattr(columns, "_similar_column", lambda reader: None)
            other = columns.read(like(partials), partials)
        assert read is not None and other is not None
        for number in range(2):
            expected = np.concatenate([held[number] for held in arrays])
            assert (read.array(number) == expected).all() and (other.array(number) == expected).all()


def test_rows_of_several_columns_are_read() -> None:
    partials = [serialized(n, [np.full((n % 2, 4), n), np.array([n])]) for n in range(6)]
    read = columns.read(like(partials), partials)
    assert read is not None and read.array(0).tolist() == [[1] * 4, [3] * 4, [5] * 4]


def test_partials_with_other_headers_are_not_read() -> None:
    partials = [serialized(n, [np.array([n]), np.arange(n)]) for n in range(4)]
    head = like(partials)
    assert columns.read(head, partials) is not None
    strangers = [
        serialized(1, [np.array([1]), np.arange(2)], "hll"),
        serialized(1, [np.array([1])]),
        partials[1] + b"\0",
    ]
    top = TopK(4)
    top.update(pa.array(["a", "b"]))
    for stranger in (*strangers, top.to_bytes(), partials[1][:-1], b"", b"EWS1"):
        assert columns.read(head, [*partials, stranger]) is None
    strings = top.to_bytes()
    assert columns.read(codec.unseal(strings), [strings] * 3) is None, "strings have lengths of their own"


def test_every_flipped_bit_is_detected() -> None:
    sketch = Kll(16)
    sketch.update(np.arange(40.0))
    partial = sketch.to_bytes()
    for at in range(0, len(partial) * 8, 5):
        flipped = bytearray(partial)
        flipped[at // 8] ^= 1 << at % 8
        assert columns.read(codec.unseal(partial), [partial, bytes(flipped), partial]) is None


@pytest.mark.parametrize("stored", ["<f4", "<u8", "|x9"])
def test_types_that_lose_values_and_lengths_that_do_not_fit_are_corrupt(stored: str) -> None:
    partials = [serialized(n, [np.array([n]), np.arange(300)]) for n in range(4)]
    message = codec.unseal(partials[2])
    message.arrays[1].stored = stored
    partials[2] = codec.seal(message)
    read = columns.read(like(partials), partials)
    assert read is not None
    with pytest.raises(CorruptSynopsis):
        read.array(1)
    message.arrays[1].stored, message.arrays[1].shape[:] = "<i2", [299]
    partials[2] = codec.seal(message)
    read = columns.read(like(partials), partials)
    assert read is not None
    with pytest.raises(CorruptSynopsis, match="lengths"):
        read.array(1)


def test_unequal_arrays_and_stacks_of_several_groups_are_incompatible() -> None:
    partials = [serialized(n, [np.array([3]), np.array([n])]) for n in range(4)]
    read = columns.read(like(partials), partials)
    assert read is not None and len(read.stacked(codec.ArrayRoles(1, equal=(0,))).arrays) == 2
    with pytest.raises(IncompatibleSynopses):
        read.stacked(codec.ArrayRoles(0, equal=(1,)))
    twos = [serialized(n, [np.array([3, 4])]) for n in range(4)]
    read = columns.read(like(twos), twos)
    assert read is not None
    for batch in (read, columns.ParsedBatch([codec.unseal(partial) for partial in twos])):
        with pytest.raises(IncompatibleSynopses):
            batch.stacked(codec.ArrayRoles(0))
        with pytest.raises(IncompatibleSynopses):
            batch.scalars(0)
