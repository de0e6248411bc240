"""`AnswerRenderer`: answers as bytes, rendered once per selection of questions.

An answer never changes, so rendered bytes stay valid. An LRU cache bounded by bytes stores them. Lists and live streams
are joined from the same pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from io import BytesIO

import pyarrow as pa
import pyarrow.csv

from center.results import AnswerRecord, as_far_as_readable
from center.serving.answer_tables import page_without_answers, with_quality, with_types, with_version
from center.serving.byte_cache import ByteCache
from center.serving.measures import MeasureQuestions
from center.serving.render import evaluated, render
from edgewater.base.number_columns import concatenated
from edgewater.model.json_types import Json
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.table_texts import ARROW, CSV, JSON, csv_table, to_json

RELEASE = version("edgewater")
ARROW_METADATA = b"edgewater.answers"
"""Key in an Arrow schema's metadata: a JSON list of the answers without their data, quality included."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the answers to windows that start in a range.

    Attributes:
        start, end: RFC 3339, inclusive and exclusive; None: open.
        next_cursor: cursor of the next page; None: this is the last page.
    """

    start: str | None
    end: str | None
    limit: int
    next_cursor: str | None


class AnswerRenderer:
    """Renders answers. Thread-safe.

    Args:
        cache_bytes: capacity of the cache.
        on_lookup: called with each lookup's result: True if the answer was cached.
        schema: returns the types of the columns of a query's answers to questions, in tables.
    """

    def __init__(
        self,
        cache_bytes: int,
        on_lookup: Callable[[bool], None] = lambda hit: None,
        schema: Callable[[QuerySpec, MeasureQuestions], pa.Schema] = lambda spec, questions: pa.schema([]),
    ) -> None:
        self._schema = schema
        self._cache = ByteCache(cache_bytes, len, on_lookup)

    def answer(
        self,
        record: AnswerRecord,
        query: RegisteredQuery,
        questions: MeasureQuestions,
        *,
        summary: bool = False,
        base: AnswerRecord | None = None,
    ) -> bytes:
        """Returns one answer as JSON without line breaks; `summary` and `base` as in `center.serving.render`."""
        key = record.answer_id, questions, summary, None if base is None else base.answer_id
        make = partial(render, spec=query.spec, questions=questions, summary=summary, base=base)
        return self._cache.get(key, partial(as_far_as_readable, make, record))

    def answers(
        self,
        records: Sequence[AnswerRecord],
        query: RegisteredQuery,
        questions: MeasureQuestions,
        page: Page | None,
        form: str,
        *,
        are_stored: bool = True,
    ) -> bytes:
        """Returns several answers of one query in one of `negotiation.ANSWER_FORMS`.

        Args:
            are_stored: whether a store has the answers. Others, such as roll-ups, are not cached.
        """
        if form != JSON:
            return self.table(records, query, questions, form)
        if are_stored:
            return _page_json(query, page, (self.answer(r, query, questions) for r in records))
        make = partial(render, spec=query.spec, questions=questions)
        return _page_json(query, page, (as_far_as_readable(make, r) for r in records))

    def table(
        self, records: Sequence[AnswerRecord], query: RegisteredQuery, questions: MeasureQuestions, form: str
    ) -> bytes:
        """Returns answers as CSV or as an Arrow IPC stream.

        Every row states its answer's window, phase, revision, time, completeness, contract, and withheld values.
        """
        make = partial(evaluated, spec=query.spec, questions=questions)
        answers = [as_far_as_readable(make, record) for record in records]
        schema = self._schema(query.spec, questions)
        tables = [
            with_version(
                with_quality(with_types(each.table(), schema), each, text_times=form == CSV), query.ref.version
            )
            for each in answers
        ]
        if not tables:
            tables = [with_version(page_without_answers(query.spec, schema), query.ref.version)]
        table = concatenated(tables)
        sink = BytesIO()
        if form == CSV:
            pyarrow.csv.write_csv(csv_table(table), sink)
        else:
            assert form == ARROW
            heads = to_json([{**each.members(), "group_by": query.spec.group_by} for each in answers])
            table = table.replace_schema_metadata({**(table.schema.metadata or {}), ARROW_METADATA: heads})
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        return sink.getvalue()


def _page_json(query: RegisteredQuery, page: Page | None, answers: Iterable[bytes]) -> bytes:
    head: dict[str, Json] = {"query": query.ref.name, "version": query.ref.version}
    if page is not None:
        head["range"] = {"start": page.start, "end": page.end, "limit": page.limit}
        head["next_cursor"] = page.next_cursor
    return to_json(head)[:-1] + b',"answers":[' + b",".join(answers) + b"]}"


def entity_tag(
    query: RegisteredQuery, records: Sequence[AnswerRecord], questions: MeasureQuestions, page: Page | None, form: str
) -> str:
    """Returns a strong entity tag: different bytes have different tags. It includes the version of the renderer."""
    identity = (RELEASE, query.ref, [r.answer_id for r in records], questions, page, form)
    return f'"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}"'
