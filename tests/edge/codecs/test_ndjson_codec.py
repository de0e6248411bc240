import json
import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.codecs.line_decoder import LineDecoder
from edge.codecs.ndjson_codec import NdjsonCodec
from edge.codecs.schema import EventTime, RecordSchema
from edge.records import MAX_SPANS, Decoded, RejectedRecords
from tests.examples import examples

NOW = 1_700_000_000_000
SCHEMA = RecordSchema(
    {"carrier": pa.string(), "distance": pa.int64(), "delay": pa.float64(), "late": pa.bool_()}, EventTime("t", "ms")
)
GOOD = b'{"t": 1700000000000, "carrier": "AA", "distance": 5, "delay": 1.5, "late": true}'


def decode(data: bytes) -> Decoded:
    return LineDecoder(NdjsonCodec(SCHEMA)).decode(data, NOW)


def test_records_come_out_in_the_declared_columns_and_types() -> None:
    batch = decode(GOOD + b"\n").batch
    assert batch.schema == SCHEMA.output
    assert batch.to_pylist() == [
        {"carrier": "AA", "distance": 5, "delay": 1.5, "late": True, "event_time_ms": 1_700_000_000_000}
    ]


def test_an_absent_key_is_null_and_an_undeclared_one_is_ignored() -> None:
    batch = decode(b'{"t": 1700000000000, "other": [1, {"x": 2}], "distance": 5}').batch
    assert batch.to_pylist()[0] == {
        "carrier": None, "distance": 5, "delay": None, "late": None, "event_time_ms": 1_700_000_000_000,
    }  # fmt: skip


@pytest.mark.parametrize("data", [b"", b"\n", b"  \n\r\n\n"])
def test_blank_lines_are_skipped(data: bytes) -> None:
    decoded = decode(data)
    assert decoded.batch.num_rows == 0
    assert decoded.rejected == ()


@pytest.mark.parametrize(
    ("line", "reason", "says"),
    [
        (b'{"t": 17', "malformed", "not JSON"),
        (b"[1]", "malformed", "an array instead of a JSON object"),
        (b"17", "malformed", "the number 17 instead of a JSON object"),
        (b'{"t": 1700000000000} {"t": 1700000000000}', "malformed", "one JSON object per line"),
        (b'{"t": 1700000000000, "carrier": "\xff"}', "malformed", "not UTF-8 at byte 33"),
        (b'{"t": 1700000000000, "distance": 1, "distance": 2}', "malformed", "distance: duplicate key"),
        (b'{"t": 1700000000000, "carrier": "a\tb"}', "malformed", "control character"),
        (b'{"t": 1700000000000, "carrier": "\\ud800"}', "malformed", "surrogate"),
        (b'{"t": 1700000000000, "carrier": 5}', "wrong-type", 'got the number 5; expected string such as "JFK"'),
        (b'{"t": 1700000000000, "distance": 1.5}', "wrong-type", "distance: got the number 1.5; expected int64"),
        (b'{"t": 1700000000000, "distance": "5"}', "wrong-type", "distance: got the text '5'; expected int64"),
        (b'{"t": 1700000000000, "distance": 9223372036854775808}', "wrong-type", "distance"),
        (b'{"t": 1700000000000, "delay": true}', "wrong-type", "delay: got true; expected float64"),
        (b'{"t": 1700000000000, "late": {}}', "wrong-type", "late: got an object; expected bool"),
        (b'{"t": "soon"}', "time-unparseable", "t: got the text 'soon'; expected a number of milliseconds since 1970"),
        (b'{"distance": 5}', "time-missing", "t: no value"),
        (b'{"t": null}', "time-missing", "t: no value"),
        (b"null", "time-missing", "t: no value"),
        (b'{"t": 1700000000}', "time-out-of-range", "looks like seconds; set time.unit: s"),
    ],
)  # fmt: skip
def test_a_bad_record_is_refused_with_its_reason_and_the_others_survive(line: bytes, reason: str, says: str) -> None:
    decoded = decode(b"\n".join([GOOD, line, GOOD, b""]))
    assert decoded.batch.num_rows == 2
    (rejection,) = decoded.rejected
    assert (rejection.reason, rejection.count) == (reason, 1)
    assert says in rejection.message


def test_rejections_are_counted_by_reason_with_the_first_as_the_example() -> None:
    lines = [GOOD, b'{"t": 1700000000000, "distance": "first"}', b"oops", b'{"t": 1700000000000, "distance": "second"}']
    rejected = {r.reason: r for r in decode(b"\n".join(lines)).rejected}
    assert rejected["wrong-type"].count == 2
    assert "first" in rejected["wrong-type"].example
    assert rejected["malformed"].count == 1


def test_an_example_is_cut_to_a_line_of_readable_length() -> None:
    (rejection,) = decode(b'{"t": 1700000000000, "carrier": "' + b"x" * 10_000).rejected
    assert len(rejection.example) == 200


@pytest.mark.slow
def test_a_first_line_null_does_not_crash_the_process() -> None:
    """Arrow 26 does, when it sees one first (apache/arrow#47409)."""
    program = (
        "from edge.codecs.ndjson_codec import NdjsonCodec; from edge.codecs.line_decoder import LineDecoder;"
        "from edge.codecs.schema import *; import pyarrow as pa;"
        "d = LineDecoder(NdjsonCodec(RecordSchema({'a': pa.int64()}, EventTime('t'))));"
        "print([d.decode(x, 1700000000000).rejected[0].reason for x in (b'null', b'null null', b'null\\n{}')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "['time-missing', 'malformed', 'time-missing']\n"), done.stderr


def test_deep_nesting_in_an_undeclared_key_is_no_problem() -> None:
    deep = b'{"t": 1700000000000, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert decode(deep + b"\n" + GOOD).batch.num_rows == 2
    assert decode(deep + b"\noops\n" + GOOD).batch.num_rows == 2


class CountingCodec(NdjsonCodec):
    parsed_bytes = 0

    def parse(self, data: bytes, rejections: object) -> pa.Table:
        self.parsed_bytes += len(data)
        return super().parse(data, rejections)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [1, 16, 512, 4096])
def test_the_number_of_parses_is_logarithmic_however_many_records_are_bad(bad: int) -> None:
    lines = [b'{"t": 1700000000000, "distance": "x"}' if n % (4096 // bad) == 0 else GOOD for n in range(4096)]
    data = b"\n".join(lines)
    codec = CountingCodec(SCHEMA)
    decoded = LineDecoder(codec).decode(data, NOW)
    assert decoded.batch.num_rows == 4096 - bad
    assert decoded.rejected[0].count == bad
    assert codec.parsed_bytes < 6 * len(data)  # log2(4096 / 256) + 2


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
objects = st.fixed_dictionaries(
    {"t": st.just(NOW) | json_values},
    optional={"carrier": json_values, "distance": json_values, "delay": json_values, "late": json_values},
)
lines = st.one_of(
    objects.map(lambda o: json.dumps(o).encode()),
    objects.map(lambda o: json.dumps(o, ensure_ascii=False).encode("utf-8", "replace")),
    json_values.map(lambda v: json.dumps(v).encode()),
    st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")),
    st.sampled_from([b"Inf", b"-Inf", b"-NaN", b"NaN", b"Infinity", b"1e400", b"Infx", b'"-NaN"']).map(
        lambda number: b'{"t": %d, "delay": %b}' % (NOW, number)
    ),
)


@examples(150)
@given(st.lists(lines, max_size=8))
def test_a_line_is_decoded_the_same_in_any_block(block: list[bytes]) -> None:
    """Together, alone, or beside a line that makes the whole block fail: always the same records."""
    alone = [decode(line) for line in block]
    records = [row for one in alone for row in one.batch.to_pylist()]
    refused = sum(r.count for one in alone for r in one.rejected)
    for extra, more in (([], 0), ([b"oops"], 1)):
        together = decode(b"\n".join([*block, *extra]))
        assert repr(together.batch.to_pylist()) == repr(records)
        assert sum(r.count for r in together.rejected) == refused + more


def test_rejected_records_have_their_event_times_as_far_as_these_can_be_read() -> None:
    lines = [b'{"t": %d, "distance": 5}' % (NOW + i) for i in (0, 90_000)]
    bad = [
        *(b'{"t": %d, "distance": "five"}' % at for at in (NOW + 7, NOW + 7, NOW + 70_000)),
        b'{"t": 17, "distance": "five"}',
        b'{"t": 1%s, "distance": "five"}' % (b"0" * 400),
        b'{"distance": "five"}',
        b'{"t": null, "distance": "five"}',
        b'{"t": 17',
        b'{"t": "soon", "distance": 5}',
    ]
    found = {r.reason: r for r in decode(b"\n".join([lines[0], *bad, lines[1]])).rejected}
    wrong = found["wrong-type"]
    assert (wrong.count, wrong.spans) == (7, ((NOW + 7, NOW + 8, 2), (NOW + 70_000, NOW + 70_001, 1)))
    assert {r.around for r in found.values()} == {(NOW, NOW + 90_001)}
    assert {reason: r.spans for reason, r in found.items() if r.spans} == {"wrong-type": wrong.spans}
    *timed, untimed = wrong.parts()
    assert [(p.records, p.is_timed) for p in timed] == [(2, True), (1, True)]
    assert untimed == RejectedRecords("wrong-type", 4, NOW, NOW + 90_001)
    (alone,) = decode(b'{"t": 17').rejected
    assert list(alone.parts()) == [RejectedRecords("malformed", 1)]


@pytest.mark.parametrize("step_ms", [1, 400, 20_000, 10_000_000])
def test_many_rejected_records_are_counted_in_few_spans_that_contain_them(step_ms: int) -> None:
    start = NOW - 20_000_000_000
    times = [start + i * step_ms for i in range(2_000)]
    lines = b"\n".join(b'{"t": %d, "distance": "five"}' % at for at in times)
    schema = RecordSchema(dict(SCHEMA.columns), EventTime("t", "ms", max_skew_ms=None))
    (rejection,) = LineDecoder(NdjsonCodec(schema)).decode(lines, NOW).rejected
    assert len(rejection.spans) <= MAX_SPANS and sum(n for _, _, n in rejection.spans) == 2_000
    for first, end, records in rejection.spans:
        assert sum(first <= at < end for at in times) == records
