import csv
import io

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.codecs import CsvDialect, EventTime, LineDecoder, RecordSchema, read_header
from edge.codecs.csv_codec import CsvCodec
from edge.records import Decoded
from edgewater.model.errors import InvalidRecord
from tests.examples import examples

NOW = 1_700_000_000_000
SCHEMA = RecordSchema(
    {"carrier": pa.string(), "distance": pa.int64(), "delay": pa.float64(), "late": pa.bool_()}, EventTime("t", "ms")
)
HEADER = ("late", "t", "extra", "carrier", "delay", "distance")
GOOD = b'true,1700000000000,"x,y",AA,1.5,5'


def decode(data: bytes, dialect: CsvDialect = CsvDialect()) -> Decoded:  # noqa: B008
    return LineDecoder(CsvCodec(SCHEMA, HEADER, dialect)).decode(data, NOW)


def test_columns_are_found_by_the_header_in_any_order() -> None:
    assert decode(GOOD).batch.to_pylist() == [
        {"carrier": "AA", "distance": 5, "delay": 1.5, "late": True, "event_time_ms": 1_700_000_000_000}
    ]


def test_an_empty_field_is_null_and_na_too_where_it_is_not_text() -> None:
    first, second = decode(b'NA,1700000000000,,NA,,NaN\n,1700000000000,,"",,').batch.to_pylist()
    assert (first["late"], first["carrier"], first["delay"], first["distance"]) == (None, "NA", None, None)
    assert (second["late"], second["carrier"], second["delay"], second["distance"]) == (None, None, None, None)


def test_nulls_that_are_configured_count_in_text_too() -> None:
    (row,) = decode(b"-,1700000000000,-,-,-,5", CsvDialect(nulls=("-",))).batch.to_pylist()
    assert (row["late"], row["carrier"], row["delay"], row["distance"]) == (None, None, None, 5)


def test_another_delimiter_may_be_configured() -> None:
    line = b"true;1700000000000;x;AA;1.5;5"
    assert decode(line, CsvDialect(";")).batch.column("carrier").to_pylist() == ["AA"]


@pytest.mark.parametrize(
    ("line", "reason", "says"),
    [
        (b"true,1700000000000,x", "malformed", "3 fields; expected 6"),
        (b'true,1700000000000,x,"AA,1.5,5",,,', "malformed", "7 fields; expected 6"),
        (b"true,1700000000000,x,AA,1.5,5.5", "wrong-type", "distance: got '5.5'; expected int64 such as 42"),
        (b"true,1700000000000,x,AA,1.5,99999999999999999999", "wrong-type", "distance"),
        (b"true,1700000000000,x,AA,fast,5", "wrong-type", "delay: got 'fast'; expected float64"),
        (b"yes,1700000000000,x,AA,1.5,5", "wrong-type", "late: got 'yes'; expected bool such as true or false"),
        (b"true,1700000000000,x,\xff,1.5,5", "wrong-type", "carrier: got"),
        (b"true,noon,x,AA,1.5,5", "time-unparseable", "t: got 'noon'; expected a number of milliseconds"),
        (b"true,,x,AA,1.5,5", "time-missing", "t: no value"),
        (b"true,1700000000,x,AA,1.5,5", "time-out-of-range", "looks like seconds; set time.unit: s"),
    ],
)
def test_a_bad_record_is_refused_with_its_reason_and_the_others_survive(line: bytes, reason: str, says: str) -> None:
    decoded = decode(b"\n".join([GOOD, line, GOOD, b""]))
    assert decoded.batch.num_rows == 2
    (rejection,) = decoded.rejected
    assert rejection.reason == reason
    assert rejection.count == 1
    assert says in rejection.message


def test_a_row_of_another_length_that_is_not_utf8_is_rejected_and_nothing_is_written_to_stderr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    decoded = decode(GOOD + b"\n\xff,\xfe\n" * 3 + GOOD)
    assert decoded.batch.num_rows == 2
    assert [(str(r.reason), r.count) for r in decoded.rejected] == [("malformed", 3)]
    assert capfd.readouterr().err == ""


def test_bytes_that_are_not_utf8_do_not_matter_in_a_column_that_is_not_read() -> None:
    assert decode(b"true,1700000000000,\xff,AA,1.5,5\noops").batch.num_rows == 1


def test_a_missing_column_is_an_error_that_names_it_and_those_present() -> None:
    with pytest.raises(InvalidRecord, match=r"a\.csv: header: 'delay'.*missing column.*present: t, carrier, distance"):
        CsvCodec(SCHEMA, ("t", "carrier", "distance"), CsvDialect(), "a.csv")


def test_a_column_named_twice_is_an_error() -> None:
    with pytest.raises(InvalidRecord, match="column named twice"):
        CsvCodec(SCHEMA, (*HEADER, "delay"), CsvDialect())


def test_a_header_is_read_without_its_byte_order_mark_and_line_end() -> None:
    assert read_header(b'\xef\xbb\xbf"a b", c ,d\r\n', CsvDialect()) == ("a b", "c", "d")


fields = st.sampled_from(
    ["", "5", "-7", " 8 ", "1.5", "1e3", "NA", "true", "0", "x", 'q"q', '"', "a,b", "é", "0x1F", "+5"]
)
rows = st.lists(fields, min_size=5, max_size=7)


@examples(150)
@given(st.lists(rows, max_size=8))
def test_a_line_is_decoded_the_same_in_any_block(block: list[list[str]]) -> None:
    lines = []
    for row in block:
        out = io.StringIO()
        csv.writer(out, lineterminator="").writerow(["true", str(NOW), *row[2:]])
        lines.append(out.getvalue().encode())
    alone = [decode(line) for line in lines]
    records = [row for one in alone for row in one.batch.to_pylist()]
    refused = sum(r.count for one in alone for r in one.rejected)
    for extra, more in (([], 0), ([b"oops"], 1)):
        together = decode(b"\n".join([*lines, *extra]))
        assert repr(together.batch.to_pylist()) == repr(records)
        assert sum(r.count for r in together.rejected) == refused + more


def test_rejected_records_have_their_event_times() -> None:
    lines = [GOOD, b"true,1700000000005,,AA,1.5,far", b"true,soon,,AA,1.5,5", b"true,17,,AA,1.5,far", b"true,1", GOOD]
    found = {r.reason: (r.count, r.spans, r.around) for r in decode(b"\n".join(lines)).rejected}
    assert found == {
        "malformed": (1, (), (NOW, NOW + 1)),
        "wrong-type": (2, ((NOW + 5, NOW + 6, 1),), (NOW, NOW + 1)),
        "time-unparseable": (1, (), (NOW, NOW + 1)),
    }
