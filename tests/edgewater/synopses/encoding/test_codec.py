import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, UnsupportedVersion
from edgewater.synopses.encoding import codec
from edgewater.wire.synopsis_pb2 import Array

TYPES = ["|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f4", "<f8"]


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)
odd_floats = [-0.0, math.nan, math.inf, -math.inf, 5e-324, 1.7e308, 2.0**53, 2.0**62, -(2.0**63), 2.0**63]


@given(st.sampled_from(TYPES).flatmap(lambda t: hnp.arrays(np.dtype(t), shapes)))
def test_arrays_round_trip_bit_by_bit(values: np.ndarray) -> None:
    assert same(codec.decode(codec.encode(values)), values)


@given(st.sampled_from(["<i8", "<u8", "<f8"]), st.lists(st.integers(0, 300), max_size=40), st.integers(0, 1 << 62))
def test_small_and_large_integers_round_trip(kind: str, small: list[int], large: int) -> None:
    for values in (small, [*small, large]):
        array = np.array(values, np.dtype(kind))
        assert same(codec.decode(codec.encode(array)), array)


def stored_as(values: np.ndarray) -> str:
    return codec.encode(values).stored


def test_arrays_are_stored_in_the_narrowest_type_that_is_exact() -> None:
    assert stored_as(np.array([0, 255])) == "|u1"
    assert stored_as(np.array([-1, 127])) == "|i1"
    assert stored_as(np.array([0, 256])) == "<u2"
    assert stored_as(np.array([-32768])) == "<i2"
    assert stored_as(np.array([1 << 31])) == "<u4"
    assert stored_as(np.array([-1, 1 << 31])) == "<i8"
    assert stored_as(np.array([1 << 63], np.uint64)) == "<u8"
    assert stored_as(np.array([3.0, 250.0])) == "|u1"
    assert stored_as(np.array([2.5])) == "<f8"
    assert stored_as(np.array([-0.0, 1.0])) == "<f8", "-0.0 is no integer"
    assert stored_as(np.array([2.0**53])) == "<f8"
    assert stored_as(np.array([True])) == "|b1"


@pytest.mark.parametrize("value", odd_floats)
def test_special_floats_round_trip_alone_and_among_others(value: float) -> None:
    with np.errstate(over="ignore"):
        narrow = np.array([value] * 3).astype(np.float32)
    for values in (np.array([value]), np.array([value, 1.0]), narrow):
        assert same(codec.decode(codec.encode(values)), values)


def test_nan_keeps_its_payload_and_big_endian_arrays_are_converted() -> None:
    nan = np.array([0x7FF8_0000_DEAD_BEEF], np.uint64).view(np.float64)
    assert same(codec.decode(codec.encode(nan)), nan)
    turned = codec.decode(codec.encode(np.array([1, 2**40], ">i8")))
    assert turned.dtype == np.dtype("<i8") and turned.tolist() == [1, 2**40]
    strided = np.arange(20)[::3]
    assert codec.decode(codec.encode(strided)).tolist() == strided.tolist()


def test_decoded_arrays_may_be_written_to() -> None:
    for values in (np.array([1, 1 << 40]), np.array([1.5]), np.array([True])):
        decoded = codec.decode(codec.encode(values))
        decoded[0] = 0


def test_other_types_have_no_encoding() -> None:
    for values in (np.array(["a"]), np.array([1j]), np.array([None])):
        with pytest.raises(TypeError, match="no encoding"):
            codec.encode(values)


@pytest.mark.parametrize(
    "change",
    [
        {"encoding": Array.ENCODING_UNSPECIFIED},
        {"encoding": Array.UTF8},
        {"type": "|S1"},
        {"type": "O"},
        {"stored": "<M8[s]"},
        {"shape": [3]},
        {"shape": [1 << 40, 1 << 40]},
        {"data": b""},
        {"stored": "<f8", "data": bytes(16)},
        {"type": "<u8", "stored": "|i1"},
    ],
)
def test_invalid_arrays_are_corrupt(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"encoding": Array.FIXED, "type": "<i8", "stored": "|u1", "shape": [2], "data": b"\1\2"}
    assert codec.decode(Array(**fields)).tolist() == [1, 2]
    with pytest.raises(CorruptSynopsis):
        codec.decode(Array(**{**fields, **change}))


COLUMNS = {
    "string": st.text(max_size=5) | st.none(),
    "int64": st.integers(-(1 << 63), (1 << 63) - 1) | st.none(),
    "float64": st.floats() | st.none(),
    "bool": st.booleans() | st.none(),
}
ARROW = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}


@given(
    st.sampled_from(sorted(COLUMNS)).flatmap(lambda t: st.tuples(st.just(t), st.lists(COLUMNS[t]))), st.integers(0, 3)
)
def test_key_columns_round_trip_with_their_nulls(given: tuple[str, list[Any]], skip: int) -> None:
    kind, values = given
    column = pa.array(values, ARROW[kind]).slice(min(skip, len(values)))
    again = codec.decode_keys(codec.encode_keys(column))
    assert again.type == column.type
    assert repr(again.to_pylist()) == repr(column.to_pylist())


@given(st.lists(st.sampled_from(["", "a", "ä", "ab", None])), st.integers(0, 3))
def test_strings_of_any_lengths_and_repeats_round_trip(values: list[str | None], skip: int) -> None:
    for column in (pa.array(values, pa.string()), pa.array(sorted(v or "" for v in values), pa.string())):
        column = column.slice(min(skip, len(column)))
        message = codec.encode_keys(column)
        assert codec.decode_keys(message).equals(column)
        joined = codec.decode_strings([message, message])
        assert joined.to_pylist() == [value or "" for value in column.to_pylist()] * 2


def test_equal_neighbours_take_bytes_once() -> None:
    column = pa.array(["package-with-a-long-name"] * 5 + ["other"] * 20 + ["third"])
    message = codec.encode_keys(column)
    assert message.data == b"package-with-a-long-name\xffother\xffthird\xff"
    assert codec.decode_keys(message).equals(column)


def test_few_different_strings_have_numbers() -> None:
    column = pa.array(["FR", "DE", "US", "a country with a long name"] * 10)
    message = codec.encode_keys(column)
    assert message.data == b"DE\xffFR\xffUS\xffa country with a long name\xff"
    assert message.codes == bytes([1, 0, 2, 3] * 10)
    assert codec.decode_keys(message).equals(column)
    assert codec.string_facts(message).nbytes == len("".join(column.to_pylist())) + 4 * 40
    many = pa.array([f"{number:05d}" for number in range(300)] * 4)
    assert codec.decode_keys(codec.encode_keys(many)).equals(many)


def test_strings_that_take_too_much_memory_are_not_read() -> None:
    text, values = b"x" * 100_000 + codec.END, 10_000
    for change in ({"repeats": codec.encode(np.array([values]))}, {"codes": bytes(values)}):
        message = Array(encoding=Array.UTF8, shape=[values], data=text, **change)
        with pytest.raises(CorruptSynopsis):
            codec.decode_keys(message)


def test_invalid_key_columns_are_corrupt() -> None:
    good = codec.encode_keys(pa.array(["ab", None, "ä"]))
    assert codec.decode_keys(good).to_pylist() == ["ab", None, "ä"]
    cases: list[dict[str, Any]] = [
        {"data": b"ab\xff\xff"},  # two strings
        {"data": b"ab\xff\xff\xc3\xa4"},  # the last one does not end
        {"data": b"ab\xff\xc3\xff\xa4\xff"},  # ends within a character
        {"data": b"abcd"},
        {"data": b""},
        {"data": b"", "shape": [1 << 40], "valid": b""},
        {"valid": b"\1"},
        {"shape": [3, 1]},
        {"repeats": codec.encode(np.array([1, 1, 2]))},
        {"repeats": codec.encode(np.array([5, -1, -1]))},
        {"repeats": codec.encode(np.array([1.0, 1.0, 1.0]))},
        {"repeats": codec.encode(np.array([[1, 1, 1]]))},
        {"repeats": codec.encode(np.array([1 << 40, 1, 1])), "shape": [(1 << 40) + 2], "valid": b""},
        {"repeats": codec.encode(np.array([200, 1, 1])), "shape": [202], "valid": b""},
        {"data": b"ab\xffc\xffd", "codes": b"\0\1\1"},  # the last string does not end
        {"data": b"ab\xffc\xff", "codes": b"\0\1\2"},
        {"data": b"ab\xffc\xff", "codes": b"\0\1"},
        {"data": b"ab\xffc\xff", "codes": b"\0\1\1", "repeats": codec.encode(np.array([2, 1]))},
        {"repeats": codec.encode(np.array([40_000])), "shape": [40_000], "data": b"", "valid": b""},
        {"repeats": codec.encode(np.array([1 << 30, 1 << 30])), "shape": [1 << 31], "data": b"ab", "valid": b""},
    ]
    for change in cases:
        message = Array(encoding=good.encoding, shape=good.shape, data=good.data, valid=good.valid)
        for name, value in change.items():
            message.ClearField(name)
            message.MergeFrom(Array(**{name: value}))
        with pytest.raises(CorruptSynopsis):
            codec.decode_keys(message)


def packed(values: np.ndarray[Any, Any]) -> Array:
    """Returns the array as a part of a sealed message has it."""
    message = codec.header("outer", 1, {})
    message.parts.add().arrays.append(codec.encode(values))
    return codec.unseal(codec.seal(codec.pack(message))).parts[0].arrays[0]


@given(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-300, 300), min_size=1),
    st.lists(st.floats() | st.integers(-300, 300).map(float), min_size=1),
    st.integers(0, 40),
    st.integers(-1070, 900),
)
def test_packed_numbers_keep_their_bits(integers: list[int], floats: list[float], shift: int, exponent: int) -> None:
    whole = np.array(integers, np.int64)
    small = np.array(integers, np.int64) % 1000
    with np.errstate(over="ignore"):
        for values in (whole, small << shift, whole.view("<u8"), np.array(floats), np.ldexp(small * 1.0, exponent)):
            array = packed(values)
            assert same(codec.decode(array), values)
            if array.encoding != Array.UTF8:
                stored, data = codec.plain(array)
                assert same(np.frombuffer(data, stored).astype(values.dtype), values)


def test_multiples_of_a_power_of_two_take_the_bytes_of_their_quotients() -> None:
    values = np.arange(100, dtype=np.int64)
    assert len(packed(values << 40).data) == 100
    assert len(packed(values * 2.0**-30).data) == 100
    assert len(packed(values * -(2.0**30)).data) == 800  # -0.0 stays


@pytest.mark.parametrize(
    "change",
    [
        {"exponent": 63},
        {"exponent": -1},
        {"exponent": 64},
        {"exponent": 1 << 30},
        {"type": "<f8", "exponent": 1 << 30},
        {"type": "<f8", "exponent": -(1 << 31)},
        {"type": "<f8", "stored": "<f8", "data": bytes(16), "exponent": 1},
        {"type": "|b1", "stored": "|b1", "exponent": 1},
        {"shape": [3]},
        {"shape": [1]},
        {"stored": "<u4"},
    ],
)
def test_invalid_packed_arrays_are_corrupt(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"encoding": Array.PLANES, "type": "<i8", "stored": "|u1", "shape": [2], "data": b"\1\2"}
    assert codec.decode(Array(**fields, exponent=3)).tolist() == [8, 16]
    with pytest.raises(CorruptSynopsis):
        codec.decode(Array(**{**fields, **change}))


def test_sealed_messages_round_trip_and_other_bytes_are_corrupt() -> None:
    message = codec.header("count", 1, {"b": 1, "a": [2]}, seed=(1 << 64) - 1, records=5)
    assert message.parameters == '{"a":[2],"b":1}', "canonical: equal parameters are equal bytes"
    data = codec.seal(message)
    assert codec.unseal(data) == message
    assert codec.open_message(message, "count", 1, 0) == {"a": [2], "b": 1}
    for bad in (b"", b"EWS1", b"EWS2" + data[4:], data + b"x"):
        with pytest.raises(CorruptSynopsis):
            codec.unseal(bad)
    nonsense = b"\xff\xff\xff"
    with pytest.raises(CorruptSynopsis):
        codec.unseal(codec._HEADER.pack(codec.MAGIC, codec.google_crc32c.value(nonsense)) + nonsense)


def test_open_message_names_the_mismatch() -> None:
    message = codec.header("count", 3, {})
    with pytest.raises(CorruptSynopsis):
        codec.open_message(message, "sum", 3, 0)
    with pytest.raises(UnsupportedVersion):
        codec.open_message(message, "count", 2, 0)
    with pytest.raises(CorruptSynopsis):
        codec.open_message(message, "count", 3, 1, 2)
    with pytest.raises(ValueError):
        codec.header("count", 1, {"x": math.nan})
    with pytest.raises(IncompatibleSynopses):
        codec.require_equal("count", 1, 2)
