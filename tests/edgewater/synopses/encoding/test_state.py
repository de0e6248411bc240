"""`State`: what is unpacked is what was packed, and damage is detected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgewater.base.errors import CorruptSynopsis, UnsupportedVersion
from edgewater.synopses.encoding import state
from edgewater.synopses.encoding.state import State

NAMES = st.text(max_size=4)
NUMBERS = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
DTYPES = st.sampled_from(["?", "u1", "i4", "u8", "i8", "f4", "f8"])
KEYS = st.lists(st.none() | st.text(max_size=3), max_size=4).map(lambda keys: pa.array(keys, pa.string()))
ARRAYS = (
    st.binary(max_size=20)
    | KEYS
    | DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=4)))
)
STATES = st.recursive(
    st.builds(State, NUMBERS, st.dictionaries(NAMES, ARRAYS, max_size=3)),
    lambda inner: st.builds(
        State, NUMBERS, st.dictionaries(NAMES, ARRAYS, max_size=2), st.dictionaries(NAMES, inner, max_size=3)
    ),
    max_leaves=4,
)


def assert_equal(one: Any, other: Any) -> None:
    assert one.numbers == other.numbers
    assert list(one.arrays) == list(other.arrays) and list(one.components) == list(other.components)
    for name, array in one.arrays.items():
        found = other.arrays[name]
        assert type(found) is type(array)
        if isinstance(array, bytes | pa.Array):
            assert found == array
        else:
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    for name, component in one.components.items():
        assert_equal(component, other.components[name])


@given(STATES)
def test_a_state_is_unpacked_as_it_was_packed(tree: State) -> None:
    data = tree.pack("kind")
    assert_equal(tree, State.unpack(data, "kind"))
    assert State.unpack(data, "kind").pack("kind") == data


def test_every_flipped_byte_and_every_cut_is_detected() -> None:
    data = State([1, {"a": 2.5}], {"x": np.arange(5), "y": b"abc"}, {"z": State(None, {"w": np.zeros(3)})}).pack("kind")
    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            with pytest.raises(CorruptSynopsis):
                State.unpack(damaged, "kind")


def test_another_kind_is_refused() -> None:
    data = State().pack("one")
    with pytest.raises(CorruptSynopsis):
        State.unpack(data, "other")


def test_a_newer_version_is_refused_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "VERSION", 2)
    data = State().pack("kind")
    monkeypatch.undo()
    with pytest.raises(UnsupportedVersion):
        State.unpack(data, "kind")
