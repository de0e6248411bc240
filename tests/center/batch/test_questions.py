"""MeasureQuestions as executors read them, without Spark: a bad one is an error of its own, and the job goes on."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from center.batch.layout import TIMESTAMP
from center.batch.questions import EvaluateQuestions, parse_question_json, sql_question
from edgewater.base.errors import InvalidRequest
from edgewater.synopses import CountMin

BAD = {
    "text": '{"question": "frequency", "item": "a", "confidence": "high"}',
    "truth": '{"question": "frequency", "item": "a", "confidence": true}',
    "two": '{"question": "frequency", "item": "a", "confidence": 2}',
    "certain": '{"question": "frequency", "item": "a", "confidence": 0.9999999999999999}',
    "nan": '{"question": "frequency", "item": "a", "confidence": NaN}',
    "deep": '{"question": "frequency", "item": ' + "[" * 100_000,
    "surrogate": r'{"question": "frequency", "item": "\ud800"}',
    "object": '{"question": "frequency", "item": {}}',
    "digits": '{"question": "frequency", "item": ' + "9" * 5_000 + "}",
}


class Broadcast:
    """What Spark hands to executors."""

    def __init__(self, value: bytes) -> None:
        self.value = value


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_an_invalid_question_is_an_error_beside_the_other_answers(bad: str) -> None:
    counted = CountMin(1 << 10, 3)
    counted.update(["a", "a", "b"])
    window = {"window_start": [0], "window_end": [1_000_000], "synopsis": [counted.to_bytes()]}
    types = {"window_start": TIMESTAMP, "window_end": TIMESTAMP, "synopsis": pa.binary()}
    table = pa.table({name: pa.array(values, types[name]) for name, values in window.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    asked = pa.record_batch({"question": [bad, json.dumps({"question": "frequency", "item": "a"})]})
    ask = EvaluateQuestions(Broadcast(sink.getvalue().to_pybytes()), asked.schema, 0, None, [])
    (answers,) = ask(iter([asked]))
    refused, answered = answers.to_pylist()
    assert refused["error"].startswith("invalid-request: ") and refused["estimate"] is None
    assert (answered["estimate"], answered["error"]) == (2, None)


def test_a_confidence_in_sql_is_checked_too() -> None:
    assert sql_question("distinct", [0.5]).confidence == 0.5
    with pytest.raises(InvalidRequest, match=r"^confidence: 'high' .*between 0 and 1"):
        sql_question("distinct", ["high"])
    assert parse_question_json('{"question": "distinct", "confidence": 0.5}').confidence == 0.5
