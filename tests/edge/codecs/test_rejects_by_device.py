"""`rejects.by`: rejected records are told apart by the device that sent them, in every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from edge.codecs import event_time
from edge.codecs.columnar import convert
from edge.codecs.formats import TextFormat
from edge.codecs.line_decoder import PIECE_LINES
from edge.codecs.messages import MessageDecoder
from edge.codecs.schema import EventTime, RecordSchema
from edge.records import MAX_VALUES, Chunk, Decoded, Rejection

NOW = 1_700_000_000_000
SCHEMA = RecordSchema({"device": pa.string(), "temp": pa.float64()}, EventTime("t"), rejects_by="device")
ROWS: list[dict[str, Any]] = [
    {"t": str(NOW), "device": "a7", "temp": "1.5"},
    {"t": str(NOW + 5), "device": "a7", "temp": "warm"},
    {"t": str(NOW + 6), "device": "b8", "temp": "cold"},
    {"t": str(NOW + 7), "device": None, "temp": "off"},
    {"t": "", "device": "b8", "temp": "3"},
]


def ndjson(schema: RecordSchema) -> Decoded:
    rows = [{**row, "t": int(row["t"]) if row["t"] else None} for row in ROWS]
    lines = "".join(json.dumps({**row, "temp": row["temp"] if row["temp"].isalpha() else 1}) + "\n" for row in rows)
    return TextFormat("ndjson", schema).decoder(None, "x").decode(lines.encode(), NOW)


def csv(schema: RecordSchema) -> Decoded:
    lines = "".join(f"{row['t']},{row['device'] or ''},{row['temp']}\n" for row in ROWS)
    return TextFormat("csv", schema).decoder(("t", "device", "temp"), "x").decode(lines.encode(), NOW)


def logfmt(schema: RecordSchema) -> Decoded:
    lines = "".join(" ".join(f"{name}={value}" for name, value in row.items() if value) + "\n" for row in ROWS)
    return TextFormat("logfmt", schema).decoder(None, "x").decode(lines.encode(), NOW)


def parquet(schema: RecordSchema) -> Decoded:
    times = [int(row["t"]) if row["t"] else None for row in ROWS]
    columns = {name: [row[name] for row in ROWS] for name in ("device", "temp")}
    lenient = replace(schema, lenient=frozenset({"temp"}))
    return convert(pa.record_batch({"t": pa.array(times, pa.int64()), **columns}), lenient, NOW)


def messages(schema: RecordSchema) -> Decoded:
    """The device is the message's key."""
    bodies = [f'{{"t": {row["t"] or "null"}, "temp": "{row["temp"]}"}}'.encode() for row in ROWS]
    bodies = [body.replace(b'"1.5"', b"1.5").replace(b'"3"', b"3") for body in bodies]
    decoder = MessageDecoder(TextFormat("ndjson", schema), ["device"], "topic")
    return decoder.decode(bodies, {"device": pa.array([row["device"] for row in ROWS])}, NOW)


def told(rejected: tuple[Rejection, ...]) -> dict[tuple[str, str], tuple[int, tuple[tuple[int, int, int], ...]]]:
    return {(each.reason, each.only): (each.count, each.spans) for each in rejected}


@pytest.mark.parametrize("decode", [ndjson, csv, logfmt, parquet, messages])
def test_rejected_records_are_told_apart_by_device(decode: Callable[[RecordSchema], Decoded]) -> None:
    decoded = decode(SCHEMA)
    assert decoded.batch.column("device").to_pylist() == ["a7"]
    assert told(decoded.rejected) == {
        ("wrong-type", '{"device":"a7"}'): (1, ((NOW + 5, NOW + 6, 1),)),
        ("wrong-type", '{"device":"b8"}'): (1, ((NOW + 6, NOW + 7, 1),)),
        ("wrong-type", ""): (1, ((NOW + 7, NOW + 8, 1),)),
        ("time-missing", '{"device":"b8"}'): (1, ()),
    }
    first = Chunk("x", decoded.batch, None, None, decoded.rejected, 0).rejected_records[0].first
    assert first.startswith('{"device":"a7"}: temp: ') and "warm" in first
    plain = decode(RecordSchema(SCHEMA.columns, SCHEMA.time))
    assert {each.only for each in plain.rejected} == {""} and sum(each.count for each in plain.rejected) == 4


def test_a_value_that_contradicts_a_constant_is_told_apart() -> None:
    schema = RecordSchema(
        {"device": pa.string(), "site": pa.string()}, EventTime("t"), {"site": "x"}, rejects_by="device"
    )
    text = f'{{"t": {NOW}, "device": "a7", "site": "y"}}\n'
    decoded = TextFormat("ndjson", schema).decoder(None, "x").decode(text.encode(), NOW)
    assert told(decoded.rejected) == {("other-constant", '{"device":"a7"}'): (1, ((NOW, NOW + 1, 1),))}


@pytest.mark.parametrize("text", ["csv", "ndjson"])
def test_so_many_devices_are_told_apart(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n, reads, read_times = 3 * MAX_VALUES, list[int](), event_time.read_times

    def counted(raw: pa.Array, *time: Any) -> event_time.ParsedTimes:
        reads.append(len(raw))
        return read_times(raw, *time)

    monkeypatch.setattr(event_time, "read_times", counted)
    rows = [{"t": NOW, "device": f"d{k}", "temp": "warm"} for k in range(n)]
    lines = [json.dumps(row) if text == "ndjson" else ",".join(map(str, row.values())) for row in rows]
    decoder = TextFormat(text, SCHEMA).decoder(("t", "device", "temp"), "x")
    rejected = decoder.decode("\n".join(lines).encode(), NOW).rejected
    assert len(rejected) == MAX_VALUES + 1 and sum(each.count for each in rejected) == n
    assert all(each.count == sum(span[2] for span in each.spans) for each in rejected)
    assert next(each.count for each in rejected if not each.only) == n - MAX_VALUES
    assert len(reads) <= n // PIECE_LINES + 2, "the times of all devices are read together"


def test_a_word_that_means_null_is_no_device() -> None:
    schema = RecordSchema(SCHEMA.columns, SCHEMA.time, nulls={"device": ("a7",)}, rejects_by="device")
    for decode in (ndjson, csv, logfmt, parquet, messages):
        decoded = decode(schema)
        assert decoded.batch.column("device").to_pylist() == [None]
        assert {each.only for each in decoded.rejected} == {"", '{"device":"b8"}'}, decode


def test_a_number_that_means_null_is_no_device() -> None:
    columns = {"device": pa.int64(), "temp": pa.float64()}
    schema = RecordSchema(columns, SCHEMA.time, nulls={"device": ("-1",)}, rejects_by="device")
    lines = "".join(f'{{"t": {NOW}, "device": {device}, "temp": "warm"}}\n' for device in (-1, 1))
    decoded = TextFormat("ndjson", schema).decoder(None, "x").decode(lines.encode(), NOW)
    assert {each.only for each in decoded.rejected} == {"", '{"device":1}'}


def test_a_quote_that_hides_records_of_other_devices_states_no_device_and_no_time() -> None:
    hidden = f'{NOW},a7,"1\n{NOW + 60_000},b8,2\n{NOW + 90_000},c9,3"\n'
    text = f"{hidden}{NOW},d0,4\n{NOW},e1,warm\n"
    decoded = TextFormat("csv", SCHEMA).decoder(("t", "device", "temp"), "x").decode(text.encode(), NOW)
    assert decoded.batch.column("device").to_pylist() == ["d0"]
    assert told(decoded.rejected) == {
        ("wrong-type", ""): (1, ()),
        ("wrong-type", '{"device":"e1"}'): (1, ((NOW, NOW + 1, 1),)),
    }
