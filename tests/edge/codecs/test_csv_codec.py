import csv
import io

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.codecs.csv_codec import CsvCodec, CsvDialect, read_header
from edge.codecs.csv_records import OPEN_BYTES
from edge.codecs.formats import TextFormat
from edge.codecs.framing import OPEN_RECORD_MS
from edge.codecs.line_decoder import LineDecoder
from edge.codecs.messages import MessageDecoder
from edge.codecs.schema import EventTime, RecordSchema
from edge.records import Decoded
from edgewater.base.errors import InvalidRecord
from tests.examples import examples
from tests.refusals import refused

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
    with refused(InvalidRecord, "a.csv: header"):
        CsvCodec(SCHEMA, ("t", "carrier", "distance"), CsvDialect(), "a.csv")


def test_a_column_named_twice_is_an_error() -> None:
    with refused(InvalidRecord, "header"):
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


BREAKS = (
    b'true,1700000000000,,plain,,1\n'
    b'true,1700000000001,,"two\nlines",,2\n'
    b'true,1700000000002,,"a ""quoted"" one",,4\r\n'
    b'true,1700000000003,,"x,\r\ntrue,1700000000099,,y",,8\n'
    b'true,1700000000004,"\n\n\n",5" disk,,16\n'
)  # fmt: skip


def texts(decoded: Decoded) -> list[tuple[str, int]]:
    return [(row["carrier"], row["distance"]) for row in decoded.batch.to_pylist()]


@pytest.mark.parametrize("bad", [b"", b"oops\n", b"true,1700000000000,,x,fast,0\n", b"true,1700000000000,,\xff,,0\n"])
def test_a_line_break_in_quotes_is_a_part_of_the_value(bad: bytes) -> None:
    decoded = decode(BREAKS + bad)
    lines = [
        ("plain", 1),
        ("two\nlines", 2),
        ('a "quoted" one', 4),
        ("x,\r\ntrue,1700000000099,,y", 8),
        ('5" disk', 16),
    ]
    assert texts(decoded) == lines
    assert sum(r.count for r in decoded.rejected) == bool(bad)


@pytest.mark.parametrize(
    ("bad", "count"),
    [
        (b'true,1700000000000,,"open,,0\ntrue,1700000000000,,like a record,,100\n', 2),
        (b'true,1700000000000,,"open\n\n \ntrue,1700000000000,,x,,100', 4),
        (b'true,1700000000000,,"two\nlines"x,,0\n', 2),
        (b'true,1700000000000,,"two\ntrue,1700000000000,,"x",,100\n', 2),
        (b"true,1700000000000,,x\ry,,0\n", 1),
        (b'true,1700000000000,,x,,0,"a\nb"\n', 1),
    ],
)
def test_a_part_of_a_record_never_passes_as_a_record(bad: bytes, count: int) -> None:
    """A quote that stays open reaches to the end, so it comes last."""
    decoded = decode(BREAKS + bad)
    assert decoded.batch.num_rows == 5
    assert [(r.reason, r.count) for r in decoded.rejected] == [("malformed", count)]


def test_a_quote_that_stays_open_costs_64_kib_and_no_more() -> None:
    good = b"true,1700000000000,,AA,,7\n"
    lines = OPEN_BYTES // len(good)
    data = good * 3 + b'true,1700000000000,,"open,,0\n' + good * (lines + 10_000)
    decoded = decode(data)
    (rejection,) = decoded.rejected
    assert rejection.count == pytest.approx(lines, abs=3)
    assert decoded.batch.num_rows + rejection.count == data.count(b"\n")
    by_mistake = b'true,1700000000000,,"open,,0\n' + good * lines * 2 + b'true,1700000000000,,"AA",,7\n'
    decoded = decode(by_mistake + good)
    assert lines - 3 <= decoded.batch.num_rows <= lines + 3
    assert decoded.batch.num_rows + sum(r.count for r in decoded.rejected) == (by_mistake + good).count(b"\n")


def test_a_long_record_with_line_breaks_is_a_record() -> None:
    long = "x\n" * OPEN_BYTES
    decoded = decode(GOOD + b'\ntrue,1700000000000,,"' + long.encode() + b'",,7\n' + GOOD)
    assert decoded.batch.column("carrier").to_pylist() == ["AA", long, "AA"]


def test_blank_lines_are_no_records_and_lines_of_tabs_are_where_tabs_delimit() -> None:
    decoded = decode(b"\n \n\t\n" + GOOD + b"\r\n\r\n  \r\n" + GOOD + b"\n\n")
    assert (decoded.batch.num_rows, decoded.rejected) == (2, ())
    decoded = decode(GOOD.replace(b",", b"\t") + b"\n\t\t\t\t\t\n \n", CsvDialect("\t"))
    assert (decoded.batch.num_rows, [(r.reason, r.count) for r in decoded.rejected]) == (1, [("time-missing", 1)])


FIELD = st.lists(st.sampled_from(["a", ",", '"', "\n", "\r\n", " ", "ü"]), max_size=6).map("".join)


def written(rows: list[list[str]], line_end: str) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator=line_end).writerows([["true", str(NOW), a, b, "", "1"] for a, b in rows])
    return out.getvalue().encode()


@examples(300)
@given(
    st.lists(st.tuples(FIELD, FIELD), max_size=6), st.sampled_from(["\n", "\r\n"]), st.integers(1, 40), st.booleans()
)
def test_what_is_written_as_csv_is_read_again_in_blocks_of_any_size(
    rows: list[list[str]], line_end: str, size: int, has_bad_value: bool
) -> None:
    data = written(rows, line_end) + b"true,x,,,,x\n" * has_bad_value
    text = TextFormat("csv", SCHEMA, header=HEADER)

    class Slow:
        at = 0

        def read(self, most: int) -> bytes:
            part = data[self.at : self.at + min(size, most)]
            self.at += len(part)
            return part

    reader, carriers, rejected = text.blocks(Slow(), 100), list[str | None](), 0
    while (block := reader.next(final=True)) is not None:
        decoded = decode(block.data)
        carriers += decoded.batch.column("carrier").to_pylist()
        rejected += sum(r.count for r in decoded.rejected)
    assert carriers == [b or None for _, b in rows]
    assert rejected == has_bad_value


@examples(300)
@given(st.lists(st.text(st.sampled_from('a,"\n\r '), max_size=12), max_size=8))
def test_whatever_the_bytes_are_each_line_is_a_record_a_part_of_one_or_rejected(parts: list[str]) -> None:
    data = ("true,1700000000000," + ",".join(parts)).encode()
    decoded = decode(data)
    lines = sum(1 for line in data.split(b"\n") if line.strip())
    assert decoded.batch.num_rows + sum(r.count for r in decoded.rejected) <= lines + data.count(b"\n")
    assert decoded.batch.num_rows <= lines


def test_open_quotes_wait_for_their_end_for_a_moment_only() -> None:
    data = bytearray(b'a,b\n1,"two')
    at = 0

    class Growing:
        def read(self, most: int) -> bytes:
            nonlocal at
            part = bytes(data[at : at + most])
            at += len(part)
            return part

    reader = TextFormat("csv", SCHEMA, header=HEADER).blocks(Growing())
    first = reader.next(False, 0)
    assert first is not None and first.data == b"a,b\n"
    assert reader.next(False, 0) is None
    assert not reader.is_open, "a line that is not complete is no line"
    data += b"\nli"
    assert reader.next(False, 1) is None and reader.is_open
    data += b'nes\n"\n2,"open\n'
    second = reader.next(False, 2)
    assert second is not None and second.data == b'1,"two\nlines\n"\n'
    for now_ms in (3, OPEN_RECORD_MS + 2):
        assert reader.next(False, now_ms) is None and reader.is_open
        data += b"3\n4"
    third = reader.next(False, OPEN_RECORD_MS + 3)
    assert third is not None and third.data == b'2,"open\n3\n43\n', "the last line is not complete"
    assert not reader.is_open


@pytest.mark.parametrize("more", [[], ["t"]])
def test_a_message_in_csv_may_have_line_breaks_in_quotes_and_an_open_quote_costs_only_itself(more: list[str]) -> None:
    schema = RecordSchema({"a": pa.string(), "b": pa.string()}, EventTime("t"))
    header = ("a", "b") if more else ("a", "b", "t")
    made = MessageDecoder(TextFormat("csv", schema, header=header), more, "x")
    end = b"" if more else b",%d" % NOW
    bodies: list[bytes | None] = [
        b'1,"two\nlines"', b'2,"open', b'3,"x"', b"4,a\n5,b", None, b"", b'6,"y\n"\n\0', b'7",z'
    ]  # fmt: skip
    given = [body.rstrip(b"\0\n") + end if body and body.strip(b" \0\n") else body for body in bodies]
    decoded = made.decode(given, {"t": [NOW + n for n in range(len(bodies))]} if more else {}, NOW)
    got = [(row["a"], row["b"], row["event_time_ms"] - NOW if more else 0) for row in decoded.batch.to_pylist()]
    at = (lambda n: n) if more else (lambda n: 0)
    assert got == [("1", "two\nlines", at(0)), ("3", "x", at(2)), ("6", "y\n", at(6)), ('7"', "z", at(7))]
    assert sum(r.count for r in decoded.rejected) == 2
