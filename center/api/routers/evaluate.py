"""Questions about one query's windows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from center.api.access import IN_TURN, READS_QUERY, Caller
from center.api.bodies import read_body, require_media_type
from center.api.measure_models import EvaluatedLine
from center.api.openapi import OpenApi, Responses, problems
from center.api.problems import problem_of
from center.api.services import Center, Services
from center.api_access import Principal
from center.serving.evaluator import Evaluator
from center.serving.question_lines import MAX_QUESTIONS, QuestionLine, parse_questions, read_question
from center.serving.stored_windows import StoredWindows
from edgewater.answers.work import WorkEnded, WorkLimits
from edgewater.base.errors import ClientGone, EdgewaterError, NotFound, StorageError
from edgewater.model.json_types import Document
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.table_texts import JSON, to_json

NDJSON = "application/x-ndjson"
READ_TYPES = (JSON, NDJSON, "application/ndjson", "application/jsonl", "application/json-lines")
MAX_BODY_BYTES = 1 << 20  # limit: of a request
LIMITS = WorkLimits(less="fewer questions, windows or groups")
EXAMPLE_QUESTIONS = [
    {"id": 1, "latest": 1, "measure": "ips", "question": "frequency", "item": "10.0.0.1"},
    {"id": 2, "at": "2013-01-01T06:30:00Z", "measure": "delay", "question": "quantile", "q": 0.99},
    {"id": 3, "latest": 24, "measure": "clients", "question": "distinct", "global": True, "merge": True},
]
_QUESTION: OpenApi = QuestionLine.model_json_schema(by_alias=True)
_LIST: OpenApi = {"type": "array", "items": _QUESTION}
_BODY: OpenApi = {
    "requestBody": {
        "required": True,
        "description": f"A `QuestionLine`, a list of them, or one per line: at most {MAX_QUESTIONS:,}, and 1 MiB.",
        "content": {
            JSON: {"schema": {"oneOf": [_QUESTION, _LIST]}, "example": EXAMPLE_QUESTIONS},
            NDJSON: {"schema": _QUESTION},
        },
    }
}
_RESPONSES: Responses = {
    200: {
        "description": "An `EvaluatedLine` per question and window, in the order of the questions.",
        "content": {
            JSON: {"schema": {"type": "array", "items": EvaluatedLine.model_json_schema()}},
            NDJSON: {"schema": EvaluatedLine.model_json_schema()},
        },
    },
    **problems(429, 503),
}

router = APIRouter(prefix="/v1/queries/{name}", tags=["answers"])


@router.post(
    "/evaluate",
    dependencies=[READS_QUERY, IN_TURN],
    response_model=None,
    responses=_RESPONSES,
    openapi_extra=_BODY,
    summary="Questions about windows",
)
async def evaluate(name: str, request: Request, center: Center, caller: Caller) -> Response:
    """Answers a question, a list of questions, or a question per line; lines are answered by lines.

    Windows: `latest` n, the windows that contain a time (`at`), or the window that starts at `window`. There is one
    answer per window, or one for all with `merge`. `group` selects groups, `global` merges all groups; with neither,
    `data` has a row per group. A question that cannot be answered has an `error` in place of its answer.
    """
    media_type = require_media_type(request.headers.get("content-type", NDJSON), READ_TYPES)
    body = await read_body(request, center.limits.body_ms / 1000, MAX_BODY_BYTES)
    path, by_line = request.url.path, media_type != JSON

    def answered() -> bytes:
        windows = StoredWindows(
            center.results, center.catalog.queries.get(name), center.synopses, partial(_readable, center, caller)
        )
        evaluator = Evaluator(windows, center.synopses)
        questions = parse_questions(body, by_line=by_line)
        lines = [to_json(line) for fields in questions for line in _answers(evaluator, fields, path)]
        return b"".join(line + b"\n" for line in lines) if by_line else b"[" + b",".join(lines) + b"]"

    given = await center.costly.run(request, answered, LIMITS)
    return Response(given, media_type=NDJSON if by_line else JSON)


def _readable(center: Services, caller: Principal, name: str) -> RegisteredQuery:
    """Returns the query that a question names. Raises NotFound, also if the caller may not read it."""
    if not caller.may("reader", name):
        raise NotFound(f"query {name} is not registered")
    return center.catalog.queries.get(name)


def _answers(evaluator: Evaluator, fields: Any, path: str) -> Iterator[Document]:
    """Yields the answers to a question, or a problem. If the budget of the request is spent, that is the problem."""
    try:
        yield from evaluator.answer(read_question(fields))
        return
    except StorageError:
        raise
    except EdgewaterError as exc:
        error = exc
    except WorkEnded as end:
        if isinstance(end.error, ClientGone):
            raise
        error = end.error
    yield {"id": fields.get("id") if isinstance(fields, dict) else None, "error": problem_of(error, path)}
