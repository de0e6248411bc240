"""Answers as bytes, rendered once for all who ask the same of them.

(query, window, revision) never changes, so what was rendered can be given again for ever: an LRU, bounded
by bytes, holds it. Lists and live streams are joined from the same pieces.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.csv
from cachetools import LRUCache

from center.api.negotiation import ARROW, CSV, JSON
from center.catalog import RegisteredQuery
from center.results import AnswerRecord
from center.serving import MeasureQuestions, render, rfc3339, to_table, without_lists

RELEASE = version("edgewater")
ARROW_METADATA = b"edgewater.answers"
"""Key in an Arrow schema's metadata: the answers without their data, as a JSON list; quality included."""


@dataclass(frozen=True, slots=True)
class Page:
    """A part of the answers in a range of window starts, as it was really taken.

    Attributes:
        start, end: RFC 3339, inclusive and exclusive; None: open.
        next_cursor: what to ask with for the rest; None: there is no more.
    """

    start: str | None
    end: str | None
    limit: int
    next_cursor: str | None


class AnswerRenderer:
    """Renders answers; safe to use from many threads.

    Args:
        cache_bytes: bound of what is kept.
        on_lookup: told of every look into the cache, whether it hit.
    """

    def __init__(self, cache_bytes: int, on_lookup: Callable[[bool], None] = lambda hit: None) -> None:
        self._cache: LRUCache[Any, bytes] = LRUCache(max(cache_bytes, 1), getsizeof=len)
        self._lock = threading.Lock()
        self._on_lookup = on_lookup

    def answer(self, record: AnswerRecord, query: RegisteredQuery, questions: MeasureQuestions) -> bytes:
        """One answer as JSON without line breaks, as `promises.md` has it."""
        key = (record.query, record.window_start_ms, record.revision, questions)
        with self._lock:
            held = self._cache.get(key)
        self._on_lookup(held is not None)
        if held is not None:
            return held
        # Two threads may render the same at once: cheaper than making all wait for the slowest.
        rendered = _json(render(record, query.spec, questions))
        with self._lock:
            if len(rendered) <= self._cache.maxsize:
                self._cache[key] = rendered
        return rendered

    def answers(
        self,
        records: Sequence[AnswerRecord],
        query: RegisteredQuery,
        questions: MeasureQuestions,
        page: Page | None,
        form: str,
    ) -> bytes:
        """Several answers of one query in one of `negotiation.ANSWER_FORMS`."""
        if form == JSON:
            head: dict[str, Any] = {"query": query.ref.name, "version": query.ref.version}
            if page is not None:
                head["range"] = {"start": page.start, "end": page.end, "limit": page.limit}
                head["next_cursor"] = page.next_cursor
            answers = b",".join(self.answer(r, query, questions) for r in records)
            return _json(head)[:-1] + b',"answers":[' + answers + b"]}"
        return self.table(records, query, questions, form)

    def table(
        self, records: Sequence[AnswerRecord], query: RegisteredQuery, questions: MeasureQuestions, form: str
    ) -> bytes:
        """Answers as CSV or as an Arrow IPC stream; window, phase, revision and completeness in every row."""
        tables = [_with_quality(to_table(r, query.spec, questions), r, form) for r in records]
        table = pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
        sink = BytesIO()
        if form == CSV:
            pyarrow.csv.write_csv(without_lists(table), sink)
        else:
            assert form == ARROW
            answers = [json.loads(self.answer(r, query, questions)) for r in records]
            stated = [{k: v for k, v in a.items() if k != "data"} for a in answers]
            table = table.replace_schema_metadata({**(table.schema.metadata or {}), ARROW_METADATA: _json(stated)})
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        return sink.getvalue()


def _with_quality(table: pa.Table, record: AnswerRecord, form: str) -> pa.Table:
    """Which answer a row belongs to, in front of its columns: a row must not look complete when it is not."""
    stated = {
        "window_start": _time(record.window_start_ms, form),
        "window_end": _time(record.window_end_ms, form),
        "phase": pa.scalar(record.phase.value, pa.string()),
        "revision": pa.scalar(record.revision, pa.int64()),
        "completeness": pa.scalar(record.quality["completeness"]["ratio"], pa.float64()),
    }
    taken = set(table.column_names)
    for at, (name, value) in enumerate(stated.items()):
        while name in taken:  # a group column or a measure of that name
            name = f"answer_{name}"
        table = table.add_column(at, name, pa.repeat(value, table.num_rows))
    return table


def _time(millis: int, form: str) -> pa.Scalar:
    return pa.scalar(rfc3339(millis), pa.string()) if form == CSV else pa.scalar(millis, pa.timestamp("ms", "UTC"))


def entity_tag(
    query: RegisteredQuery, records: Sequence[AnswerRecord], questions: MeasureQuestions, page: Page | None, form: str
) -> str:
    """A strong entity tag: other bytes, other tag. Rendering belongs to the release, so that is in it."""
    identity = (
        RELEASE, query.ref, [(r.answer_id, r.window_start_ms, r.revision) for r in records], questions, page, form
    )  # fmt: skip
    return f'"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}"'


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
