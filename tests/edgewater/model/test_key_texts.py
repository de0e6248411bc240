"""Keys of groups as texts: different keys of one column have different texts, and labels have different names."""

from __future__ import annotations

import math
import re
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from center.serving.render import denoted_values
from edgewater.base.float_bounds import to_float
from edgewater.base.number_columns import concatenated
from edgewater.model.key_texts import key_text, label_names
from tests.examples import examples

LABELS = st.text("ab._9é", min_size=1)
TEXTS = st.one_of(st.sampled_from(["", "null", '"', '""', '"null"', '"\\"null\\""', "NaN", "true", "1"]), st.text())
COLUMNS = {
    pa.string(): TEXTS,
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.float64(): st.floats().map(lambda x: x + 0.0),
    pa.bool_(): st.booleans(),
}


@pytest.mark.parametrize("kind", COLUMNS, ids=str)
@examples(200)
@given(data=st.data())
def test_a_text_denotes_its_key_and_no_other_key_of_the_column(kind: pa.DataType, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.one_of(st.none(), COLUMNS[kind]), min_size=1, max_size=5))
    for key in keys:
        (denoted,) = denoted_values([key_text(key)], kind).to_pylist()
        assert denoted == key or (isinstance(key, float) and math.isnan(key) and math.isnan(denoted))


def test_a_text_that_no_key_has_stands_for_itself() -> None:
    assert denoted_values(['"UA"', '"', '"a" b'], pa.string()).to_pylist() == ['"UA"', '"', '"a" b']


@examples(200)
@given(st.lists(LABELS, unique=True), st.sets(st.sampled_from(["a", "b", "exported_a"])))
def test_labels_have_valid_names_each_once_whatever_the_order_of_the_columns(
    columns: list[str], reserved: set[str]
) -> None:
    names = label_names(columns, reserved)
    assert len(set(names)) == len(names) and not reserved & set(names)
    assert all(re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name) for name in names)
    for column, name in zip(columns, names, strict=True):
        if re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", column) and column not in reserved:
            assert name == column


@examples(200)
@given(st.one_of(st.integers(), st.integers(10**16, 10**20), st.decimals(allow_nan=False, allow_infinity=False)))
def test_a_bound_as_a_float_is_on_its_side(number: int | Decimal) -> None:
    assert to_float(number, -1) <= number <= to_float(number, 1)


@pytest.mark.parametrize("other", [pa.array([None], pa.float64()), pa.array([0.5]), pa.array([Decimal(1 << 64)])])
def test_answers_with_other_types_are_one_table_with_true_bounds(other: pa.Array) -> None:
    big = (1 << 53) + 1
    names = ("n", "n_lower", "n_upper")
    (n, lower, upper) = concatenated(
        [pa.table({m: pa.array([big]) for m in names}), pa.table(dict.fromkeys(names, other))]
    )
    assert lower[0].as_py() <= big <= upper[0].as_py()
    assert n[1].as_py() == other[0].as_py()
