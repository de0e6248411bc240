"""A stream of questions about one query's windows."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from center.api.access import READS_QUERY, Caller, require_still
from center.api.evaluate_stream import MAX_LINE_BYTES, NDJSON, READ_TYPES, DuplexResponse, LineEvaluator
from center.api.limits import InSlot
from center.api.measure_models import EvaluatedLine, QuestionLine
from center.api.openapi import OpenApi, Responses, problems
from center.api.problems import HttpProblem
from center.api.services import Center, Services
from center.api_access import Principal
from center.serving.evaluator import Evaluator
from center.serving.stored_windows import StoredWindows
from edgewater.model.errors import NotFound
from edgewater.model.registered_query import RegisteredQuery

EXAMPLE_QUESTIONS = """\
{"id":1,"latest":1,"measure":"ips","question":"frequency","item":"10.0.0.1"}
{"id":2,"at":"2013-01-01T06:30:00Z","measure":"delay","question":"quantile","q":0.99,"group":{"carrier":"UA"}}
{"id":3,"latest":24,"measure":"clients","question":"distinct","global":true,"merge":true}
"""
EXAMPLE_ANSWERS = """\
{"id":1,"query":"q","measure":"ips","question":"frequency","window":{…},"phase":"final","revision":2,"completeness":{…},\
"estimate":41,"lower":38,"upper":41,"confidence":0.993,"basis":"count_min"}
{"id":2,…}
{"id":3,"error":{"type":"https://edgewater.dev/problems/invalid-request","status":422,"field":"measure",…}}
"""
_BODY: OpenApi = {
    "requestBody": {
        "required": True,
        "description": f"One question per line, each a `QuestionLine` of at most {MAX_LINE_BYTES} bytes.",
        "content": {NDJSON: {"schema": QuestionLine.model_json_schema(by_alias=True), "example": EXAMPLE_QUESTIONS}},
    }
}
_RESPONSES: Responses = {
    200: {
        "description": "Lines in the order of the questions, each an `EvaluatedLine`.",
        "content": {NDJSON: {"schema": EvaluatedLine.model_json_schema(), "example": EXAMPLE_ANSWERS}},
    },
    **problems(404, 415, 429, 503),
}

router = APIRouter(prefix="/v1/queries/{name}", tags=["answers"])


def _readable(center: Services, caller: Principal, name: str) -> RegisteredQuery:
    """Returns the query that a question names. Raises NotFound, also if the caller may not read it."""
    if not caller.may("reader", name):
        raise NotFound(f"query {name} is not registered")
    return center.catalog.queries.get(name)


@router.post(
    "/evaluate",
    dependencies=[READS_QUERY],
    response_model=None,
    responses=_RESPONSES,
    openapi_extra=_BODY,
    summary="A stream of questions",
)
async def evaluate(name: str, request: Request, center: Center, caller: Caller) -> Response:
    """Answers lines in their order while they are received. An invalid line is answered by a problem.

    Windows: `latest` n, the windows that contain a time (`at`), or the window that starts at `window`. There is one
    line per window, or one for all with `merge`. `group` selects groups, `global` merges all groups; with neither,
    `data` has a row per group.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type and media_type not in READ_TYPES:
        accepted = ", ".join(READ_TYPES)
        raise HttpProblem("unsupported-media-type", f"Content-Type: {media_type} is not one of {accepted}")
    query = await run_in_threadpool(center.catalog.queries.get, name)
    windows = StoredWindows(center.results, query, center.synopses, partial(_readable, center, caller))
    evaluator = LineEvaluator(windows, Evaluator(windows, center.synopses), request.url.path)
    answers = DuplexResponse(
        evaluator.answers, partial(require_still, request), center.limits.idle_ms / 1000, center.costly
    )
    return InSlot(answers, center.evaluate_slots, caller)
