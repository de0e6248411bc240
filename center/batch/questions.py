"""Evaluates questions on serialised synopses. Runs on Spark's executors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from center.batch.compute_phase import millis_of
from center.batch.layout import TIMESTAMP
from center.spark.workers import settle
from edgewater.base.errors import EdgewaterError, InvalidRequest
from edgewater.base.streams import MIN_TIME_MS
from edgewater.synopses import Estimate, IntArray, KeyTable, Point, Question, RangeSum, TopItems, from_bytes
from edgewater.synopses.named_questions import QUESTION_KINDS, parse_question, read_confidence

ESTIMATE_DDL = "estimate double, lower double, upper double, confidence double, basis string"
ESTIMATE_FIELDS = [pa.field(n, pa.float64()) for n in ("estimate", "lower", "upper", "confidence")]
ESTIMATE_FIELDS.append(pa.field("basis", pa.string()))
ESTIMATE_TYPE = pa.struct(ESTIMATE_FIELDS)
ANSWER_DDL = f"window_start timestamp, window_end timestamp, {ESTIMATE_DDL}, error string"
ANSWER_FIELDS = [pa.field("window_start", TIMESTAMP), pa.field("window_end", TIMESTAMP), *ESTIMATE_FIELDS]
ANSWER_FIELDS.append(pa.field("error", pa.string()))

PARSED_MAX = 4096
"""The most parsed questions that a worker caches."""

_SIGNAL: dict[str, type[Question]] = {"point": Point, "range_sum": RangeSum}
"""Questions about a signal (values by index). Measures of a query do not have these questions."""


@dataclass(frozen=True, slots=True)
class NamedQuestion:
    """A question by name. The synopsis determines the question's class: `range` has different classes for a histogram
    and for a sample.

    Attributes:
        given: the question's fields by name.
    """

    name: str
    given: Mapping[str, Any]
    confidence: float | None = None

    def of(self, synopsis: Any) -> Question:
        """Returns the question for this synopsis.

        Raises:
            InvalidRequest: the synopsis does not answer the question, or a field is not accepted.
        """
        kind = _SIGNAL.get(self.name)
        if kind is None or kind not in synopsis.questions:
            return parse_question(self.name, self.given, synopsis, self.confidence)
        try:
            return kind(**self.given)
        except TypeError as exc:
            wanted = ", ".join(f.name for f in fields(kind))
            raise InvalidRequest("question", {"question": self.name, **self.given}, f"{self.name} of {wanted}") from exc


@lru_cache(PARSED_MAX)
def parse_question_json(text: str) -> NamedQuestion:
    """Parses a question in JSON.

    Raises:
        InvalidRequest: the text is not a JSON object with a question.
    """
    accepted = 'a JSON object such as {"question": "frequency", "item": "10.0.0.1"}'
    try:
        given = json.loads(text)
        json.dumps(given, ensure_ascii=False).encode()  # an item with an unpaired surrogate has no hash
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest("question", text, accepted, str(exc)) from exc
    if not isinstance(given, dict) or not isinstance(given.get("question"), str):
        raise InvalidRequest("question", given, accepted)
    name, confidence = given.pop("question"), read_confidence(given.pop("confidence", None))
    return NamedQuestion(name, given, confidence)


def sql_question(name: Any, arguments: Sequence[Any]) -> NamedQuestion:
    """Returns the question with a name and positional parameters, as in SQL.

    Raises:
        InvalidRequest: the name is not known, or there are too many parameters.
    """
    kinds = QUESTION_KINDS.get(name) or ((_SIGNAL[name],) if name in _SIGNAL else ())
    if not kinds:
        raise InvalidRequest("question", name, f"one of {', '.join([*QUESTION_KINDS, *_SIGNAL])}")
    names = [f.name for f in fields(kinds[0])]
    if len(arguments) > len(names):
        raise InvalidRequest("question", [name, *arguments], f"{name} with at most {', '.join(names) or 'nothing'}")
    # A literal 0.99 is a decimal in SQL.
    plain = [float(a) if isinstance(a, Decimal) else a for a in arguments]
    given = dict(zip(names, plain, strict=False))
    return NamedQuestion(name, given, read_confidence(given.pop("confidence", None)))


def estimate_of(synopsis: Any, asked: NamedQuestion | Question) -> dict[str, Any]:
    """Evaluates a question, and returns the estimate's fields by name.

    Raises:
        InvalidRequest: the synopsis does not answer the question.
    """
    if not hasattr(synopsis, "query") or not hasattr(synopsis, "questions"):
        kind = getattr(synopsis, "kind", type(synopsis).__name__)
        raise InvalidRequest("synopsis", kind, "a single synopsis", "a grouped aggregate has one answer per group")
    put = asked.of(synopsis) if isinstance(asked, NamedQuestion) else asked
    if isinstance(put, TopItems):
        raise InvalidRequest("question", "top", "a question with one number as its answer", "top returns a list")
    answer: Estimate = synopsis.query(put)
    if (
        isinstance(asked, NamedQuestion)
        and asked.confidence is not None
        and answer.confidence < asked.confidence - 1e-12
    ):
        raise InvalidRequest("confidence", asked.confidence, f"at most {answer.confidence:.6g}, or none")
    return {
        "estimate": answer.value,
        "lower": answer.lower,
        "upper": answer.upper,
        "confidence": answer.confidence,
        "basis": answer.basis,
    }


class EvaluateWindows:
    """Evaluates one question on the synopsis of every row, for `DataFrame.mapInArrow`."""

    def __init__(self, question: NamedQuestion | Question, strata: pa.Schema) -> None:
        self._question = question
        self._schema = pa.schema([*strata, *ANSWER_FIELDS])
        self._strata = len(strata)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle()
        for batch in batches:
            answers = [_answer(from_bytes(data.as_py()), self._question) for data in batch.column("synopsis")]
            columns = [batch.column(n).cast(self._schema.field(n).type) for n in self._schema.names[: self._strata + 2]]
            yield _with_answers(columns, answers, self._schema)


class EvaluateQuestions:
    """Evaluates questions on the broadcast windows, for `DataFrame.mapInArrow`.

    Args:
        windows: broadcast Arrow stream with strata, window_start, window_end, synopsis; newest window first.
        schema: schema of the questions.
        question: index of the column of JSON strings.
        time: index of the column of timestamps; None if every window is used.
        strata: for each stratum column of the windows, the index of the same column in the questions.
    """

    def __init__(self, windows: Any, schema: pa.Schema, question: int, time: int | None, strata: list[int]) -> None:
        self._windows = windows
        self._schema = pa.schema([*schema, *ANSWER_FIELDS])
        self._question, self._time, self._strata = question, time, strata

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle()
        windows = _BroadcastWindows(self._windows.value, len(self._strata))
        for batch in batches:
            time = None if self._time is None else batch.column(self._time)
            rows, hits = windows.hits([batch.column(i) for i in self._strata], time, len(batch))
            answers, which = windows.answers(hits, batch.column(self._question).take(pa.array(rows)))
            taken = batch.take(pa.array(rows))
            columns = [c.cast(self._schema.field(i).type) for i, c in enumerate(taken.columns)]
            columns += [windows.bounds(name, hits) for name in ("window_start", "window_end")]
            yield _with_answers(columns, answers, self._schema, which)


class _BroadcastWindows:
    """The broadcast windows. Each window is decoded on first use."""

    def __init__(self, stream: bytes, strata: int) -> None:
        with pa.ipc.open_stream(stream) as reader:
            table = reader.read_all().combine_chunks()
        # Starts and ends ascend together. So after sorting by time, the windows that contain a time are adjacent.
        self._table = table.sort_by([("window_start", "ascending"), ("window_end", "ascending")]).combine_chunks()
        self._strata = [_whole(self._table.column(i)) for i in range(strata)]
        self._starts, self._ends = (_millis(self._table.column(n)) for n in ("window_start", "window_end"))
        self._synopses: dict[int, Any] = {}

    def hits(self, strata: list[pa.Array], time: pa.Array | None, rows: int) -> tuple[IntArray, IntArray]:
        """Returns pairs: the row of a question, and the index of a window to evaluate it on. The index is -1 without a
        window.
        """
        windows = len(self._table)
        table = KeyTable(tuple(c.type for c in self._strata))
        keys = [pa.concat_arrays([mine, c.cast(mine.type)]) for mine, c in zip(self._strata, strata, strict=True)]
        codes = table.encode(keys, windows + rows)
        when = None if time is None else _millis(time)
        every_row: list[IntArray] = []
        every_hit: list[IntArray] = []
        for code in np.unique(codes[windows:]).tolist():
            asked, held = np.flatnonzero(codes[windows:] == code), np.flatnonzero(codes[:windows] == code)
            low, high = np.zeros(len(asked), np.int64), np.full(len(asked), len(held))
            if when is not None:
                # Sessions of several strata may be nested. So a window may end later than the windows after it.
                low = np.searchsorted(np.maximum.accumulate(self._ends[held]), when[asked], "right")
                high = np.maximum(np.searchsorted(self._starts[held], when[asked], "right"), low)
            counts = high - low
            behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            row, hit = np.repeat(asked, counts), held[np.repeat(low, counts) + behind]
            if when is not None:
                over = self._ends[hit] > when[row]
                row, hit = row[over], hit[over]
            every_row.append(row)
            every_hit.append(hit)
        answered = np.zeros(rows, bool)
        for row in every_row:
            answered[row] = True
        alone = np.flatnonzero(~answered)
        return np.concatenate([*every_row, alone]), np.concatenate([*every_hit, np.full(len(alone), -1)])

    def answers(self, hits: IntArray, texts: pa.Array) -> tuple[list[dict[str, Any]], IntArray]:
        """Returns the distinct answers, and for each pair the index of its answer. Repeated questions are evaluated
        once.
        """
        encoded = texts.dictionary_encode(null_encoding="encode")
        written = encoded.dictionary.to_pylist()
        asked = (hits + 1) * max(len(written), 1) + np.asarray(encoded.indices, np.int64)
        different, which = np.unique(asked, return_inverse=True)
        pairs = (divmod(one, len(written)) for one in different.tolist())
        return [self._answer(hit - 1, written[text]) for hit, text in pairs], which

    def _answer(self, hit: int, text: str | None) -> dict[str, Any]:
        if hit < 0:
            return {"error": "no window for this question"}
        if text is None:
            return {"error": "the question is null"}
        try:
            return _answer(self._synopsis(hit), parse_question_json(text))
        except EdgewaterError as exc:
            return {"error": f"{exc.code}: {exc}"}

    def _synopsis(self, hit: int) -> Any:
        held = self._synopses.get(hit)
        if held is None:
            held = self._synopses[hit] = from_bytes(self._table.column("synopsis")[hit].as_py())
        return held

    def bounds(self, name: str, hits: IntArray) -> pa.Array:
        return _whole(self._table.column(name).take(pa.array(hits, mask=hits < 0))).cast(TIMESTAMP)


def _whole(column: Any) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _millis(column: Any) -> Any:
    """Converts timestamps to ms. Null becomes a time that no window contains."""
    column = _whole(column)
    return np.where(np.asarray(column.is_valid()), millis_of(column.fill_null(0)), MIN_TIME_MS)


def _answer(synopsis: Any, asked: NamedQuestion | Question) -> dict[str, Any]:
    try:
        return estimate_of(synopsis, asked)
    except EdgewaterError as exc:
        return {"error": f"{exc.code}: {exc}"}


def _with_answers(
    columns: list[pa.Array], answers: list[dict[str, Any]], schema: pa.Schema, which: IntArray | None = None
) -> pa.RecordBatch:
    """Appends each row's answer to the columns.

    Args:
        which: index of each row's answer; None if it equals the row number.
    """
    for field in (*ESTIMATE_FIELDS, schema.field("error")):
        given = pa.array([a.get(field.name) for a in answers], field.type)
        columns.append(given if which is None else given.take(pa.array(which)))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
