"""Columns that the configuration names as lenient: values that are written as another type."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from edge.codecs.columnar import check_schema, convert
from edge.codecs.csv_codec import CsvDialect
from edge.codecs.formats import TextFormat
from edge.codecs.lenient import CONVERTED
from edge.codecs.line_decoder import LineDecoder
from edge.codecs.ndjson_codec import NdjsonCodec
from edge.codecs.schema import EventTime, RecordSchema
from edge.records import Decoded
from edgewater.base.errors import InvalidRecord
from tests.insides import reading


class Raw(float):
    """A number that JSON has as it is written here."""

    def __new__(cls, text: str) -> Raw:
        return super().__new__(cls, text)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


NOW = 1_700_000_000_000
COLUMNS = {"f": pa.float64(), "i": pa.int64(), "b": pa.bool_(), "s": pa.string()}
LENIENT = RecordSchema(COLUMNS, EventTime("t"), lenient=frozenset(COLUMNS))
STRICT = RecordSchema(COLUMNS, EventTime("t"))
ROWS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"f": "66.2", "i": "+5", "b": "yes", "s": 7}, [66.2, 5, True, "7"]),
    ({"f": 1, "i": 200.0, "b": 1, "s": True}, [1.0, 200, True, "true"]),
    ({"f": "1e3", "i": "200.0", "b": "OFF", "s": 1.5}, [1000.0, 200, False, "1.5"]),
    ({"f": "1e400", "i": "007", "b": "N", "s": Raw("1.50")}, [float("inf"), 7, False, "1.50"]),
    ({"f": 2, "i": Raw("9007199254740993.0"), "b": None, "s": Raw("-0")}, [2.0, 9007199254740993, None, "0"]),
    ({"f": "", "i": " ", "b": "", "s": ""}, [None, None, None, ""]),
    ({"f": None, "i": None, "b": None, "s": None}, [None] * 4),
    ({"f": 0.5, "i": -1, "b": False, "s": "x"}, [0.5, -1, False, "x"]),
]
WRONG = [{"f": "warm"}, {"i": 1.5}, {"i": "1e3"}, {"b": "2"}, {"b": 2}, {"s": [1]}, {"f": {"x": 1}}]


def ndjson(schema: RecordSchema, rows: list[dict[str, Any]]) -> Decoded:
    data = "".join("{" + ", ".join(f'"{n}": {_json(v)}' for n, v in {"t": NOW, **row}.items()) + "}\n" for row in rows)
    return LineDecoder(NdjsonCodec(schema)).decode(data.encode(), NOW)


def _json(value: Any) -> str:
    return value.text if isinstance(value, Raw) else json.dumps(value)


def values(decoded: Decoded) -> list[list[Any]]:
    return [[row[name] for name in COLUMNS] for row in decoded.batch.to_pylist()]


@pytest.mark.parametrize("times", [1, 300])
def test_ndjson_of_mixed_types_is_read(times: int) -> None:
    decoded = ndjson(LENIENT, [row for row, _ in ROWS] * times)
    assert values(decoded) == [read for _, read in ROWS] * times and decoded.rejected == ()
    assert len(ndjson(STRICT, [row for row, _ in ROWS]).batch) == 2


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_value_of_the_type_is_rejected_alone(wrong: dict[str, Any]) -> None:
    decoded = ndjson(LENIENT, [{"f": "1"}, wrong, {"f": 2}])
    assert [row[0] for row in values(decoded)] == [1.0, 2.0]
    assert [(each.reason, each.count, each.spans) for each in decoded.rejected] == [
        ("wrong-type", 1, ((NOW, NOW + 1, 1),))
    ]


def test_csv_is_read_by_the_same_rules() -> None:
    text = f"t,f,i,b,s\n{NOW},66.2,200.0,yes,7\n{NOW},1,1.5,no,x\n"
    decoded = (
        TextFormat("csv", LENIENT).decoder(["t", "f", "i", "b", "s"], "x").decode(text.split("\n", 1)[1].encode(), NOW)
    )
    assert values(decoded) == [[66.2, 200, True, "7"]]
    assert [each.reason for each in decoded.rejected] == ["wrong-type"]


def test_columns_of_parquet_and_arrow_are_converted() -> None:
    batch = pa.record_batch(
        {
            "t": [NOW] * 3,
            "f": pa.array(["66.2", " ", "warm"], pa.string_view()),
            "i": ["1.0", "2", "3"],
            "b": ["yes", "no", None],
            "s": [1, 2, None],
        }
    )
    with pytest.raises(InvalidRecord):
        check_schema(batch.schema, STRICT, "x")
    check_schema(batch.schema, LENIENT, "x")
    decoded = convert(batch, LENIENT, NOW)
    assert values(decoded) == [[66.2, 1, True, "1"], [None, 2, False, "2"]]
    assert [each.reason for each in decoded.rejected] == ["wrong-type"]


@pytest.mark.parametrize("integers", [pa.float64(), pa.float32(), pa.decimal128(4, 1)])
def test_integers_that_a_data_frame_has_as_floats_and_booleans_that_it_has_as_integers(integers: pa.DataType) -> None:
    """As pandas writes integers with nulls, and MySQL truth values."""
    batch = pa.record_batch(
        {
            "t": [NOW] * 5,
            "f": [0.5] * 5,
            "i": pa.array([7.0, None, 2.5, -3.0, 4.0]).cast(integers),
            "b": pa.array([1, 0, 1, 2, None], pa.int8()),
            "s": ["x"] * 5,
        }
    )
    with pytest.raises(InvalidRecord):
        check_schema(batch.schema, STRICT, "x")
    check_schema(batch.schema, LENIENT, "x")
    before = reading(CONVERTED.labels("i"))
    decoded = convert(batch, LENIENT, NOW)
    assert values(decoded) == [[0.5, 7, True, "x"], [0.5, None, False, "x"], [0.5, 4, None, "x"]]
    assert [(each.reason, each.count) for each in decoded.rejected] == [("wrong-type", 2)]
    assert reading(CONVERTED.labels("i")) == before + 3


MARKED = RecordSchema(
    {"f": pa.float64(), "i": pa.int64(), "s": pa.string()}, EventTime("t"), lenient=frozenset({"f"}), decimal=",",
    nulls={"f": ("NA", "-", "-999"), "i": ("?", "0"), "s": ("-", "")},
)  # fmt: skip
WORDS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"f": "66,2", "i": 1, "s": "a"}, [66.2, 1, "a"]),
    ({"f": "-1,5e3", "i": "?", "s": "-"}, [-1500.0, None, None]),
    ({"f": "NA", "i": 0, "s": ""}, [None, None, None]),
    ({"f": "-", "i": 5, "s": "NA"}, [None, 5, "NA"]),
    ({"f": -999, "i": 6, "s": "b"}, [None, 6, "b"]),
    ({"f": "-999,0", "i": 7, "s": "c"}, [None, 7, "c"]),
    ({"f": "662", "i": 8, "s": "1,5.0"}, [662.0, 8, "1,5.0"]),
]


def marked_csv(rows: list[dict[str, Any]]) -> Decoded:
    text = "".join(f"{NOW};{row['f']};{row['i']};{row['s']}\n" for row in rows)
    decoder = TextFormat("csv", MARKED, CsvDialect(";")).decoder(("t", "f", "i", "s"), "x")
    return decoder.decode(text.encode(), NOW)


@pytest.mark.parametrize("decode", [lambda rows: ndjson(MARKED, rows), marked_csv])
def test_decimal_commas_and_the_words_of_a_column_that_mean_null(
    decode: Callable[[list[dict[str, Any]]], Decoded],
) -> None:
    before = counted("f")
    decoded = decode([row for row, _ in WORDS])
    assert [list(row.values())[:3] for row in decoded.batch.to_pylist()] == [read for _, read in WORDS]
    assert decoded.rejected == () and counted("f") > before
    wrong = decode([{"f": text, "i": 1, "s": "a"} for text in ("1.234,5", "1,234.5", "1,2,3", ",", "n.v.")])
    assert len(wrong.batch) == 0 and sum(each.count for each in wrong.rejected) == 5
    thousands = decode([{"f": "1.234", "i": 1, "s": "a"}])
    assert (len(thousands.batch), [each.reason for each in thousands.rejected]) == (0, ["wrong-type"])


def test_numbers_of_json_have_a_point_also_beside_a_decimal_comma() -> None:
    schema = replace(LENIENT, decimal=",")
    decoded = ndjson(schema, [{"f": 1.25, "i": 200.0}, {"f": "1,25", "i": "1.000"}, {"f": "1,5", "i": "3,0"}])
    assert [row[:2] for row in values(decoded)] == [[1.25, 200], [1.5, 3]]
    assert [each.reason for each in decoded.rejected] == ["wrong-type"]


def counted(column: str) -> float:
    return reading(CONVERTED.labels(column))


@pytest.mark.parametrize(
    ("on_nan", "left"), [(None, [1.0, "nan", None]), ("null", [1.0, None, None]), ("reject", [1.0, None])]
)
def test_nan_is_kept_or_null_or_rejects_its_record(on_nan: str | None, left: list[Any]) -> None:
    rules = {} if on_nan is None else {"f": on_nan}
    schema = RecordSchema({"f": pa.float64()}, EventTime("t"), on_nan=rules)
    batch = pa.record_batch({"t": [NOW] * 3, "f": pa.array([1.0, float("nan"), None])})
    decoded = convert(batch, schema, NOW)
    found = decoded.batch.column("f").to_pylist()
    assert ["nan" if isinstance(each, float) and each != each else each for each in found] == left
    stated = [(each.reason, each.message, each.spans) for each in decoded.rejected]
    assert stated == (
        [("wrong-type", "f: got nan; on_nan is reject", ((NOW, NOW + 1, 1),))] if on_nan == "reject" else []
    )
