"""Errors as RFC 9457 problem details: ``application/problem+json`` with stable `type` URIs.

This is the only mapping of the codes of `edgewater/base/errors.py` to HTTP. FastAPI's validation errors, unknown paths
and methods, and internal errors have the same form.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgewater.base.errors import EdgewaterError, InvalidInput, InvalidRequest, StorageError
from edgewater.model.json_types import Document, Json, as_document
from edgewater.runtime.configuration import as_phrase
from edgewater.runtime.problems import problem, problem_body

MAX_ERRORS = 20
"""Maximum number of errors that a problem lists for one request."""
INTERNAL_ERROR = "internal error; see the center's log"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProblemType:
    """The HTTP status and title of an error code."""

    status: int
    title: str


PROBLEMS: dict[str, ProblemType] = {
    "invalid-input": ProblemType(422, "Invalid input"),
    "invalid-config": ProblemType(500, "Invalid configuration"),
    "invalid-query": ProblemType(422, "Invalid query"),
    "invalid-record": ProblemType(422, "Invalid record"),
    "invalid-request": ProblemType(422, "Invalid request"),
    "synopsis": ProblemType(500, "Unusable stored synopsis"),
    "corrupt-synopsis": ProblemType(500, "Corrupt stored synopsis"),
    "unsupported-version": ProblemType(500, "Unsupported version of stored data"),
    "incompatible-synopses": ProblemType(500, "Incompatible stored synopses"),
    "protocol": ProblemType(400, "Protocol violation"),
    "corrupt-frame": ProblemType(400, "Corrupt frame"),
    "retired": ProblemType(410, "Edge retired"),
    "outdated-state": ProblemType(409, "Outdated state of an edge"),
    "limit-exceeded": ProblemType(429, "Limit exceeded"),
    "unauthenticated": ProblemType(401, "Authentication required"),
    "not-found": ProblemType(404, "Not found"),
    "conflict": ProblemType(409, "Conflict with existing content"),
    "precondition-failed": ProblemType(412, "Precondition failed"),
    "storage": ProblemType(503, "Storage unavailable"),
    "too-much-work": ProblemType(422, "Too much work for one request"),
    "client-gone": ProblemType(503, "Client gone"),
    "internal": ProblemType(500, "Internal error"),
}
"""By code of `edgewater/base/errors.py`."""

HTTP_PROBLEMS: dict[str, ProblemType] = {
    "forbidden": ProblemType(403, "Forbidden"),
    "method-not-allowed": ProblemType(405, "Method not allowed"),
    "not-acceptable": ProblemType(406, "Not acceptable"),
    "timeout": ProblemType(408, "Request timeout"),
    "too-large": ProblemType(413, "Body too large"),
    "incomplete": ProblemType(409, "Incomplete answers"),
    "misdirected": ProblemType(421, "Misdirected request"),
    "unsupported-media-type": ProblemType(415, "Unsupported media type"),
    "too-many-requests": ProblemType(429, "Too many requests"),
    "unavailable": ProblemType(503, "Unavailable for now"),
}
"""Errors of HTTP itself."""

_CODES_BY_STATUS = {p.status: code for code, p in HTTP_PROBLEMS.items()} | {
    409: "conflict",
    404: "not-found",
    401: "unauthenticated",
}


class HttpProblem(Exception):
    """An error of HTTP itself, by a code of `HTTP_PROBLEMS`."""

    def __init__(self, code: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.headers = dict(headers or {})


class Outage:
    """Logs the requests and streams that end because a store cannot be used: the first one, and the last one with their
    number when the stores can be used again. Otherwise each attempt of each client to connect again would be logged.

    Attributes:
        count: how many there were since the stores could be used.
    """

    def __init__(self) -> None:
        self.count, self._last = 0, ""

    def note(self, text: str) -> None:
        """Notes a request or a stream that has ended. Called on the event loop."""
        if not self.count:
            log.error("%s", text)
        self.count, self._last = self.count + 1, text

    def end(self) -> None:
        """Is called when the stores can be used again."""
        if self.count > 1:
            log.error("the stores can be used again; %d requests failed, the last one: %s", self.count, self._last)
        self.count = 0


def problem_response(
    code: str,
    detail: str,
    *,
    instance: str,
    status: int | None = None,
    extra: Document | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Returns the response for a code.

    Args:
        instance: the request's path.
        status: overrides the code's status.
        extra: extension members of the problem.
    """
    kind = _type(code)
    members = {"instance": instance, **(extra or {})}
    return problem(status or kind.status, code, detail, title=kind.title, members=members, headers=headers)


def _type(code: str) -> ProblemType:
    return PROBLEMS.get(code) or HTTP_PROBLEMS.get(code) or PROBLEMS["internal"]


def problem_of(exc: EdgewaterError, instance: str) -> Document:
    """Returns an error as problem details, for a line of a stream whose status was already sent."""
    kind = _type(exc.code)
    members: Document = {"instance": instance, **_members(exc)}
    return as_document(problem_body(kind.status, exc.code, exc.message, title=kind.title, members=members))


def _members(exc: EdgewaterError) -> Document:
    """Returns the extension members of an error's problem."""
    if not isinstance(exc, InvalidInput):
        return {}
    members: dict[str, Json] = {"field": exc.field, "value": _shown(exc.value), "accepted": exc.accepted}
    return {**members, "reason": exc.reason} if exc.reason else members


def _shown(value: object) -> Json:
    """Returns a value for a problem's `value` member: the value itself if it is small JSON, else the beginning of its
    text.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value if len(value) <= 200 else value[:200] + "…"
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        text = ""
    if text and len(text) <= 200:
        shown: Json = json.loads(text)
        return shown
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _edgewater_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, EdgewaterError)
    response = problem_response(exc.code, exc.message, instance=request.url.path, extra=_members(exc))
    if isinstance(exc, StorageError):
        request.app.state.services.outage.note(f"{request.method} {request.url.path}: {exc.message}")
    elif response.status_code >= 500:
        log.error("%s %s: %s", request.method, request.url.path, exc.message)
    return response


def _validation_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    requests = [_invalid_request(e) for e in exc.errors()[:MAX_ERRORS]]
    errors = [_members(e) for e in requests]
    extra = {**errors[0], "errors": errors if errors[1:] else None}
    return problem_response("invalid-request", requests[0].message, instance=request.url.path, extra=extra)


def _invalid_request(error: ErrorDetails) -> InvalidRequest:
    # The first element of a location is query, path or body.
    field = ".".join(str(part) for part in error["loc"][1:])
    if error["type"] == "extra_forbidden":
        return InvalidRequest(field, error["input"], "a parameter of this endpoint, see /docs", "no such parameter")
    if error["type"] == "missing":
        return InvalidRequest(field, None, "a value", "it is missing")
    return InvalidRequest(field, error["input"], as_phrase(error["msg"]))


def _http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    path = request.url.path
    code = _CODES_BY_STATUS.get(exc.status_code, "internal" if exc.status_code >= 500 else "invalid-request")
    details = {404: f"no resource at {path}; see /docs", 405: f"{request.method} is not allowed at {path}"}
    detail = details.get(exc.status_code, str(exc.detail))
    return problem_response(code, detail, instance=path, status=exc.status_code, headers=exc.headers)


def _http_problem(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HttpProblem)
    return problem_response(exc.code, str(exc), instance=request.url.path, headers=exc.headers)


def _fault(request: Request, exc: Exception) -> Response:
    log.exception("%s %s", request.method, request.url.path, exc_info=exc)
    return problem_response("internal", INTERNAL_ERROR, instance=request.url.path)


class FaultMiddleware:
    """Middleware: answers internal errors.

    It is inside the other middleware, which adds headers, counters and audit lines.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def noted_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, noted_send)
        except Exception as exc:
            if has_started or scope["type"] != "http":
                raise
            await _fault(Request(scope), exc)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Installs handlers that turn every error of an app into problem details.

    Called before other middleware is added.
    """
    app.add_middleware(FaultMiddleware)
    app.add_exception_handler(EdgewaterError, _edgewater_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(HttpProblem, _http_problem)
