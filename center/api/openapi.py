"""OpenAPI responses that are not JSON models: problems, and answers in three forms."""

from __future__ import annotations

from typing import Any

from center.api.models import ProblemDetails
from center.api.problems import HTTP_PROBLEMS, PROBLEMS
from edgewater.model.table_texts import ARROW, CSV, JSON
from edgewater.runtime.problems import MEDIA_TYPE

_TITLES = {p.status: p.title for p in (*PROBLEMS.values(), *HTTP_PROBLEMS.values())} | {
    404: "Not found",
    422: "Invalid input; `field`, `value` and `accepted` say why",
}


OpenApi = dict[str, Any]
"""A part of the OpenAPI document, as FastAPI takes it."""
Responses = dict[int | str, OpenApi]
"""FastAPI's `responses` argument."""


def problems(*statuses: int) -> Responses:
    """Returns the `responses` of an endpoint that can fail with these statuses."""
    schema = {"$ref": f"#/components/schemas/{ProblemDetails.__name__}"}
    return {s: {"description": _TITLES[s], "content": {MEDIA_TYPE: {"schema": schema}}} for s in statuses}


def answers(model: type[Any], *statuses: int) -> Responses:
    """Returns the `responses` of an endpoint that returns answers, by ``Accept``."""
    ok = {
        "model": model,
        "description": "By `format` or `Accept`: JSON, CSV (a row per group), or an Arrow IPC stream whose schema"
        " metadata `edgewater.answers` has the quality of each answer.",
        "content": {
            JSON: {},
            CSV: {"schema": {"type": "string"}, "example": _EXAMPLE_CSV},
            ARROW: {"schema": {"type": "string", "format": "binary"}},
        },
        "headers": {"ETag": {"description": "Strong; send it as If-None-Match.", "schema": {"type": "string"}}},
    }
    return {200: ok, 304: {"description": "The client's copy is current."}, **problems(404, 406, *statuses)}


_EXAMPLE_CSV = (
    "window_start,window_end,phase,revision,completeness,given_at,contract,withheld,carrier,flights,flights_lower,"
    "flights_upper\n"
    "2013-01-01T00:00:00Z,2013-01-02T00:00:00Z,early,1,0.667,2013-01-02T00:00:01.800Z,missing-edges,{},UA,165,165,\n"
)
