"""A text is a value of a type or is none, in every format and whatever stands beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge.codecs.fields_codec import LinePattern
from edge.codecs.formats import TextFormat
from edge.codecs.line_decoder import LineDecoder
from edge.codecs.messages import MessageDecoder
from edge.codecs.schema import EventTime, RecordSchema
from edge.codecs.syslog import SyslogFormat
from edge.config import LookupConfig
from edge.records import Decoded
from edge.sources.lookups import load_table
from edge.sources.otlp.columns import Values
from edgewater.base.streams import COLUMN_TYPES
from edgewater.model.expressions import bind
from edgewater.model.syntax import parse_sql
from tests.examples import examples

NOW = 1_700_000_000_000
UNITS = ("iso8601", "ms", "s", "us", "%d/%b/%Y:%H:%M:%S %z", "%Y-%m-%d %H:%M:%S")
NUMBERS = [
    "0", "7", "-7", "+7", "-0", "+0", "007", "0x10", "0X1f", "-0x10", "1_000", "1,000", "1e3", "1E+3", "1.0", "1.",
    ".5", "-.5", ".", "-", "+", "--1", "+-1", "1-", "inf", "Infinity", "-INF", "+inf", "nan", "NaN", "-nan", "nan(1)",
    "NAN(x)", "infinit", "1e400", "-1e400", "1e-400", "9223372036854775807", "9223372036854775808",
    "-9223372036854775808", "-9223372036854775809", "0" * 40 + "5", "9" * 40, "٣",
    "１", "1f", "1d", "0b1", "1e", "e1", "1.5", "1..2",
    "true", "FALSE", "True", "tRue", "yes", "1", "on", "null",
]  # fmt: skip
TIMES = [
    "2023-11-14", "2023-11-14 05", "2023-11-14T05", "2023-11-14T05Z", "2023-11-14T05+01", "2023-11-14 05-0130",
    "2023-11-14T05:06", "2023-11-14T05:06Z", "2023-11-14T05:06:07", "2023-11-14T05:06:07.5Z",
    "2023-11-14T05:06:07.123456", "2023-11-14T05:06:07.1234567", "2023-11-14T05:06:07.123456789Z",
    "2023-11-14T05:06:07.123456789012+01:00", "2023-11-14T05:06:07.", "2023-11-14T05:06:07,5", "2023-11-14T24:00",
    "2023-02-30", "2023-11-14Z", "2023-11-14T", "20231114", "20231114T050607Z", "2023-11-14T050607",
    "2023-11-14t05:06:07z", "2023-11-14T05:06:07 Z", "2023-11-14T05:06:60", "2023-1-1", "soon", "10000-01-01",
    "14/Nov/2023:05:06:07 +0000", "31/Feb/2023:05:06:07 +0000", "2023-11-14 05:06:07", "2023-11-14 05:06:07 x",
    "1700000000", "1700000000000", "1.7e12", "1700000000.5", "0x18bcfe56800", "+1700000000000",
]  # fmt: skip
TEXTS = st.sampled_from([*NUMBERS, *TIMES]) | st.text(
    st.sampled_from("0123456789+-.eExX_infaINFANtT:Z "), min_size=1, max_size=12
)


Decode = Callable[[bytes], Decoded]


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def lines_of(kind: str, **options: Any) -> Callable[[RecordSchema], Decode]:
    def codec(schema: RecordSchema) -> Decode:
        return lambda data: TextFormat(kind, schema, **options).decoder(("v", "t"), "x").decode(data, NOW)  # type: ignore[arg-type]

    return codec


def syslog(schema: RecordSchema) -> Decode:
    """The values are parameters of the structured data."""
    codec = SyslogFormat(schema, {"v": "sd.x.v", "t": "sd.x.t"}).codec(NOW)
    return lambda data: LineDecoder(codec).decode(data, NOW)


def messages(schema: RecordSchema) -> Decode:
    """The value is in the body of a message, and the event time is its key."""
    made = MessageDecoder(TextFormat("csv", schema, header=("v",)), ["t"] if "t" in schema.textual else [], "x")

    def decode(data: bytes) -> Decoded:
        bodies = data.split(b"\n")
        return made.decode(bodies, {"t": [NOW] * len(bodies)} if "t" in schema.textual else {}, NOW)

    return decode


FORMATS: dict[str, tuple[Callable[[str], str], Callable[[RecordSchema], Decode]]] = {
    "csv": (lambda text: f'"{text}",{NOW}', lines_of("csv")),
    "logfmt": (lambda text: f"v={quoted(text)} t={NOW}", lines_of("logfmt")),
    "regex": (lambda text: f"{text};{NOW}", lines_of("regex", pattern=LinePattern("(?P<v>[^;]*);(?P<t>.*)"))),
    "syslog": (lambda text: f'<13>1 - h a - - [x v={quoted(text)} t="{NOW}"]', syslog),
    "messages": (lambda text: f'"{text}"', messages),
    "ndjson": (lambda text: f'{{"v": {json.dumps(text)}, "t": {NOW}}}', lines_of("ndjson")),
}
SQL_TYPES = {"int64": "BIGINT", "float64": "DOUBLE", "bool": "BOOLEAN"}
KINDS = ["int64", "float64", "bool", "string"]


def typed(kind: str) -> RecordSchema:
    return RecordSchema({"v": COLUMN_TYPES[kind]}, EventTime("t", "ms"))


def timed(unit: str) -> RecordSchema:
    return RecordSchema({}, EventTime("v", unit, min_ms=-(1 << 61), max_skew_ms=None))


def result(decode: Decode, lines: list[str]) -> tuple[list[str], Counter[str]]:
    decoded = decode("\n".join(lines).encode())
    reasons = Counter[str]()
    for rejection in decoded.rejected:
        reasons["time" if rejection.reason.startswith("time") else rejection.reason] += rejection.count
    return list(map(repr, decoded.batch.to_pylist())), reasons


def check_each_by_itself(decode: Decode, lines: list[str]) -> None:
    """Decodes lines together. The result must be the results of all lines alone."""
    alone = [result(decode, [line]) for line in lines]
    rows, reasons = [row for rows, _ in alone for row in rows], sum((more for _, more in alone), Counter[str]())
    assert result(decode, lines) == (rows, reasons)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), has_bad_line=st.booleans())
@examples(100)
def test_a_value_counts_or_is_rejected_by_itself(name: str, kind: str, texts: list[str], has_bad_line: bool) -> None:
    line, codec = FORMATS[name]
    good = {"int64": "5", "float64": "5.5", "bool": "true", "string": "x"}[kind]
    check_each_by_itself(
        codec(typed(kind)), [line(good), *map(line, texts), *["\N{REPLACEMENT CHARACTER}"] * has_bad_line]
    )


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", FORMATS)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), has_bad_line=st.booleans())
@examples(60)
def test_a_time_counts_or_is_rejected_by_itself(name: str, unit: str, texts: list[str], has_bad_line: bool) -> None:
    line, codec = FORMATS[name]
    check_each_by_itself(codec(timed(unit)), [*map(line, texts), *["\N{REPLACEMENT CHARACTER}"] * has_bad_line])


NUMBERS_IN_JSON = [
    *NUMBERS,
    '"5"',
    "[]",
    "{}",
    "null",
    "-Infinity",
    "1e999",
    "5.0",
    "5e0",
    "0.1e1",
    "-0.0",
    '"\\ud800"',
]


@pytest.mark.parametrize("kind", [*KINDS, "time"])
@given(tokens=st.lists(st.sampled_from(NUMBERS_IN_JSON), min_size=1, max_size=6))
@examples(200)
def test_a_value_in_json_counts_or_is_rejected_by_itself(kind: str, tokens: list[str]) -> None:
    decode = lines_of("ndjson")(timed("ms") if kind == "time" else typed(kind))
    check_each_by_itself(decode, [f'{{"v": {token}, "t": {NOW}}}' for token in tokens])


@pytest.mark.parametrize("kind", ["int64", "float64", "bool"])
@given(text=TEXTS)
@example(text="NA")
@example(text="#N/A")
@examples(300)
def test_all_formats_casts_attributes_and_lookups_read_the_same_values(kind: str, text: str) -> None:
    bound = bind(parse_sql(f"CAST(s AS {SQL_TYPES[kind]})", ""),
                 {"s": pa.string()}, "")  # fmt: skip
    expected = bound.array(pa.record_batch({"s": [text]}))[0].as_py()
    nulls = pa.csv.ConvertOptions().null_values  # CSV without `nulls`
    for name in ("csv", "logfmt", "regex", "syslog", "messages"):
        line, codec = FORMATS[name]
        rows, _ = result(codec(typed(kind)), [line(text)])
        if not text.strip() or (name in ("csv", "messages") and text in nulls):
            continue
        wanted = [] if expected is None else [repr({"v": expected, "event_time_ms": NOW})]
        assert rows == wanted, name
    array, bad = Values([text, 5 if kind != "bool" else True]).typed(COLUMN_TYPES[kind])
    assert (repr(array[0].as_py()), bool(bad[0])) == (repr(expected), expected is None)


@pytest.mark.parametrize("kind", ["int64", "float64", "bool"])
def test_a_lookup_reads_the_values_that_a_cast_reads(kind: str, tmp_path: Path) -> None:
    texts = [text for text in NUMBERS if text]
    bound = bind(parse_sql(f"CAST(s AS {SQL_TYPES[kind]})", ""),
                 {"s": pa.string()}, "")  # fmt: skip
    expected = bound.array(pa.record_batch({"s": texts})).to_pylist()
    path = tmp_path / "a.csv"
    path.write_text("k,v\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(texts)))
    config = LookupConfig.model_validate({"file": str(path), "key": "k", "columns": {"v": kind}})
    table = load_table(config, pa.int64())
    got = table.take(table.rows_of(pa.array(range(len(texts)))))["v"].to_pylist()
    assert list(map(repr, got)) == list(map(repr, expected))
    assert sum(each.count for each in table.rejected) == expected.count(None)
