"""Requests to a center and its replies, without I/O. `Center` and `AsyncCenter` run the same flows.

A flow is a generator. It yields a `Request` and receives the reply, or yields a `Pause`. At its end it returns the
result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar
from urllib.parse import quote

import httpx
import yaml

from edgewater.client.answers import ARROW, Answer, Answers
from edgewater.model import errors
from edgewater.model.errors import Conflict, EdgewaterError, InvalidInput, InvalidQuery, InvalidRequest, ProtocolError
from edgewater.model.json_types import Document, Groups, Key
from edgewater.model.key_texts import key_text
from edgewater.model.replies import DryRun, Explanation, Members, Registered
from edgewater.model.timestamps import TIME_ACCEPTED, parse_time, rfc3339
from edgewater.runtime.plain_yaml import load_yaml

if TYPE_CHECKING:  # importing Arrow takes long, see `answers`
    import pyarrow as pa

T = TypeVar("T")
Phase = Literal["early", "complete", "final"]
IfExists = Literal["same", "error", "replace"]
Moment = datetime | str | int
"""A time as an aware datetime, as RFC 3339, or in unix ms."""

PHASES: tuple[Phase, ...] = ("early", "complete", "final")
PAGE, FIRST_PAGE = 1000, 50
"""The largest number of windows of a page, and the number of windows of the first page of a range."""
PAGE_S = 1.0
"""The time that a page should take, in seconds. The number of windows of the next page follows from the time of the
last page.
"""
POLL_S = 0.2
"""The time between two requests while waiting for a window, in seconds. A request without news gets a 304."""
PROBLEM = "application/problem+json"
SHOWN = 200
"""The number of characters of an unexpected reply that an error shows."""


class Unreachable(EdgewaterError):
    """The center does not answer.

    Attributes:
        timeout_s: the time-out that ended the request; None if it failed for another reason.
    """

    code = "unreachable"

    def __init__(self, message: str, timeout_s: float | None = None) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s


class WaitTimeout(EdgewaterError):
    """A window did not reach a phase in time. The message says what its query waits for."""

    code = "timeout"


class RequestRefused(EdgewaterError):
    """A refusal whose code is no code of `edgewater.model.errors`, such as `forbidden`.

    Attributes:
        status: the HTTP status.
        retry_after_s: the time after which to try again; None if unknown.

    >>> refusal = RequestRefused("forbidden", "the token may not register queries", 403)
    >>> refusal.code, refusal.status, str(refusal)
    ('forbidden', 403, 'the token may not register queries')
    """

    def __init__(self, code: str, message: str, status: int, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    params: tuple[tuple[str, str], ...] = ()
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    missing: bool = False
    """Whether statuses 404 and 304 are replies to the flow instead of errors."""


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


Flow = Generator[Request | Pause, httpx.Response, T]


def checked(response: httpx.Response, missing: bool = False) -> httpx.Response:
    """Returns a successful reply. Raises the error that a problem document states.

    Args:
        missing: see `Request.missing`.
    """
    if response.is_success or (missing and response.status_code in (304, 404)):
        return response
    raise problem(response)


_BY_CODE = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, EdgewaterError) and kind is not EdgewaterError
}


def problem(response: httpx.Response) -> EdgewaterError:
    """Returns the error that a reply states, in the class that the center raised if the class is known."""
    status = response.status_code
    if response.headers.get("content-type", "").partition(";")[0] != PROBLEM:
        if status in (502, 503, 504):
            return Unreachable(f"{response.request.url.host} answers {status}: it cannot reach the center behind it")
        return ProtocolError(
            f"{response.request.method} {response.request.url.copy_with(query=None)}: status {status} and"
            f" {response.text[:SHOWN]!r}, which is no reply of a center; is this the address of a center's API?"
        )
    body = response.json()
    code, detail = str(body.get("type", "")).rpartition("/")[2], str(body.get("detail") or body.get("title"))
    kind = _BY_CODE.get(code)
    if kind is not None and issubclass(kind, InvalidInput):
        if "field" in body:
            return kind(
                body["field"], body.get("value"), body.get("accepted") or "", body.get("reason") or detail_of(body)
            )
        return kind("", None, detail, "the request is not accepted")
    if kind is not None:
        return kind(detail)
    after = response.headers.get("retry-after", "")
    return RequestRefused(code, detail, status, float(after) if after.isdecimal() else None)


def detail_of(body: Document) -> str:
    """Returns a text about the number of errors after the first one; "" if there are none."""
    errors = body.get("errors")
    more = len(errors) - 1 if isinstance(errors, list) else 0
    return f"and {more} more errors" if more > 0 else ""


def json_of(response: httpx.Response) -> Any:
    """Returns the reply as JSON. Raises ProtocolError if it is no JSON, such as the page of a proxy."""
    try:
        return response.json()
    except ValueError:
        raise ProtocolError(
            f"{response.request.url.copy_with(query=None)}: the reply {response.text[:SHOWN]!r} is no JSON;"
            " is this the address of a center's API?"
        ) from None


def segment(name: str) -> str:
    """Returns a name as a segment of a path."""
    if not name or name in (".", ".."):
        raise InvalidRequest("name", name, "a name")
    return quote(name, safe="")


def moment(value: Moment | None, name: str) -> str | None:
    """Returns a time as RFC 3339. Raises InvalidRequest."""
    if value is None:
        return None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidRequest(name, value.isoformat(), "a datetime with a time zone, such as datetime.now(UTC)")
        return rfc3339(int(value.timestamp() * 1000))
    try:
        return rfc3339(parse_time(str(value)))
    except ValueError:
        raise InvalidRequest(name, value, TIME_ACCEPTED) from None


Several: TypeAlias = T | Sequence[T] | None
"""A value of a question, or several."""


class Questions(TypedDict, total=False):
    """The question parameters of the API, except `group`."""

    measure: Several[str]
    quantile: Several[float]
    item: Several[Key]
    contains: Several[Key]
    rank: Several[float]
    range: Several[str]
    top: int | None
    values: bool | None
    confidence: float | None
    compute: Several[str]
    having: str | None
    order: Several[str]
    limit_groups: int | None


class Asked(Questions, total=False):
    """All question parameters of the API."""

    group: Groups | None


QUESTIONS = tuple(Questions.__annotations__)


def question_params(group: Groups | None, questions: Questions) -> tuple[tuple[str, str], ...]:
    """Returns the parameters of a question. A value may be a list of values.

    Raises:
        InvalidRequest: a parameter is unknown.
    """
    params = [("group", f"{column}:{key_text(v)}") for column, value in (group or {}).items() for v in _each(value)]
    for name, value in questions.items():
        if name not in QUESTIONS:
            raise InvalidRequest(name, value, f"one of group, {', '.join(QUESTIONS)}", "no such question")
        params += [(name, _text(v)) for v in _each(value) if v is not None]
    return tuple(params)


def _each(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple | set) else [value]


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_spec(spec: Document | str | Path) -> tuple[bytes, str, str]:
    """Returns a query's body, its media type and its name, from a mapping, YAML text or a file of YAML.

    The center checks the rest, because only the center knows its functions. Raises InvalidQuery.
    """
    mapping: object = spec
    if isinstance(spec, Mapping):
        body, media = json.dumps(dict(spec)).encode(), "application/json"
    else:
        text = _read(spec) if isinstance(spec, Path) else spec
        body, media = text.encode(), "application/yaml"
        try:
            mapping = load_yaml(text)
        except yaml.YAMLError as exc:
            raise InvalidQuery("", text, "YAML", str(exc)) from None
    if not isinstance(mapping, Mapping) or not isinstance(mapping.get("name"), str):
        found = mapping.get("name") if isinstance(mapping, Mapping) else mapping
        raise InvalidQuery("name", found, "a mapping with a query's name, such as {name: flights, from: …}")
    return body, media, mapping["name"]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidQuery("", str(path), "a readable file of YAML", str(exc)) from None


def get(path: str, params: tuple[tuple[str, str], ...] = ()) -> Flow[Any]:
    response = yield Request("GET", path, params)
    return json_of(response)


def reply(path: str, kind: type[T], params: tuple[tuple[str, str], ...] = ()) -> Flow[T]:
    """Returns a resource as JSON of a type of `edgewater.model.replies`."""
    found: T = yield from get(path, params)
    return found


def send(method: str, path: str, body: bytes | None, media: str) -> Flow[Any]:
    response = yield Request(method, path, content=body, headers={"Content-Type": media} if body is not None else {})
    return json_of(response) if response.content else None


def sql(statement: str) -> Flow[Any]:
    return send("POST", "/v1/sql", statement.encode(), "application/sql")


def explain(name: str, start: str, revision: int | None, params: tuple[tuple[str, str], ...]) -> Flow[Explanation]:
    asked = params if revision is None else (*params, ("revision", str(revision)))
    return reply(f"/v1/queries/{segment(name)}/windows/{segment(start)}/explain", Explanation, asked)


def dry_run(
    spec: Document | str | Path, change: bool, at: Moment | None, version: int | None, lasts: str | None
) -> Flow[DryRun]:
    body, media, name = read_spec(spec)
    params = (("dry_run", "true"), *_borders(at, lasts))
    method, path = ("PUT", f"/v1/queries/{segment(name)}") if change else ("POST", "/v1/queries")
    response = yield Request(method, path, params, content=body, headers=_put_headers(media, version))
    found: DryRun = json_of(response)
    return found


def register(spec: Document | str | Path, if_exists: IfExists, lasts: str | None = None) -> Flow[Registered]:
    if if_exists not in ("same", "error", "replace"):
        raise InvalidRequest("if_exists", if_exists, "same, error or replace")
    if if_exists == "replace":
        return (yield from put(spec, None, None, lasts))
    body, media, name = read_spec(spec)
    params = (("for", lasts),) if lasts is not None else ()
    response = yield Request("POST", "/v1/queries", params, content=body, headers={"Content-Type": media})
    if if_exists == "error" and response.status_code == 200:
        raise Conflict(f"query {name} is registered already")
    registered: Registered = json_of(response)
    return registered


def put(spec: Document | str | Path, at: Moment | None, version: int | None, lasts: str | None) -> Flow[Registered]:
    body, media, name = read_spec(spec)
    params = _borders(at, lasts)
    path, headers = f"/v1/queries/{segment(name)}", _put_headers(media, version)
    response = yield Request("PUT", path, params, content=body, headers=headers)
    registered: Registered = json_of(response)
    return registered


def _put_headers(media: str, version: int | None) -> dict[str, str]:
    return {"Content-Type": media} | ({} if version is None else {"If-Match": f'"{version}"'})


def _borders(at: Moment | None, lasts: str | None) -> tuple[tuple[str, str], ...]:
    return tuple((k, v) for k, v in (("at", moment(at, "at")), ("for", lasts)) if v is not None)


def latest(name: str, params: tuple[tuple[str, str], ...], build: Build) -> Flow[Answer]:
    response = yield Request("GET", f"/v1/queries/{segment(name)}/latest", params, headers={"Accept": ARROW})
    return answers_of([page_of(response)], build)[0]


def window(
    name: str, start: str, revision: int | None, params: tuple[tuple[str, str], ...], build: Build
) -> Flow[Answer]:
    asked = params if revision is None else (*params, ("revision", str(revision)))
    path = f"/v1/queries/{segment(name)}/windows/{segment(start)}"
    response = yield Request("GET", path, asked, headers={"Accept": ARROW})
    return answers_of([page_of(response)], build)[0]


def windows(
    name: str, start: str | None, end: str | None, clock: Callable[[], float],
    params: tuple[tuple[str, str], ...], build: Build, *, every: str | None = None, zone: str | None = None,
) -> Flow[Answers]:  # fmt: skip
    """Reads a range in pages that take about `PAGE_S` each, so that no request reaches the time-out.

    Args:
        every: the length of the intervals into which windows are merged; None if they are not merged.
    """
    given = (("start", start), ("end", end), ("every", every), ("zone", zone))
    bounds = [(k, v) for k, v in given if v is not None]
    resource = "windows" if every is None else "rollup"
    cursor: tuple[tuple[str, str], ...] = ()
    limit, pages = min(FIRST_PAGE, PAGE), []
    while True:
        path, began = f"/v1/queries/{segment(name)}/{resource}", clock()
        asked = (*params, *bounds, ("limit", str(limit)), *cursor)
        response = yield Request("GET", path, asked, headers={"Accept": ARROW})
        pages.append(page_of(response))
        if "next" not in response.links:
            return answers_of(pages, build)
        took = max(clock() - began, 0.001)
        limit = max(1, min(PAGE, int(limit * min(4.0, PAGE_S / took))))
        # Only the cursor of the link is used, because the center may be behind a proxy with another address.
        cursor = (("cursor", httpx.URL(response.links["next"]["url"]).params["cursor"]),)


def wait(
    name: str, start: str, phase: Phase, timeout: float, clock: Callable[[], float],
    params: tuple[tuple[str, str], ...], build: Build,
) -> Flow[Answer]:  # fmt: skip
    if phase not in PHASES:
        raise InvalidRequest("phase", phase, "early, complete or final")
    deadline = clock() + timeout
    path = f"/v1/queries/{segment(name)}/windows/{segment(start)}"
    known, reached = {"Accept": ARROW}, "no answer"
    while True:
        try:
            response = yield Request("GET", path, params, headers=known, missing=True)
            if response.status_code == 200:
                answer = answers_of([page_of(response)], build)[0]
                if PHASES.index(answer.phase) >= PHASES.index(phase):
                    return answer
                known, reached = {"Accept": ARROW, "If-None-Match": response.headers["etag"]}, answer.phase
            elif response.status_code == 404:
                yield Request("GET", f"/v1/queries/{segment(name)}/status")  # raises NotFound if the query was deleted
        except Unreachable:  # for example while the center restarts
            if clock() >= deadline:
                raise
        if clock() >= deadline:
            status = json_of((yield Request("GET", f"/v1/queries/{segment(name)}/status")))
            why = f": {status['reason']}" if status["reason"] else ""
            raise WaitTimeout(f"query {name}, window {start}: {reached} after {timeout:g} s, not {phase}{why}")
        yield Pause(min(POLL_S, max(0.0, deadline - clock())))


Build = Callable[["pa.Table", list[Members]], Answers]
"""Builds answers from a table and the metadata of an Arrow stream."""
Page = tuple["pa.Table", list[Members]]


def page_of(response: httpx.Response) -> Page:
    """Returns the table and the metadata of the answers in a reply. Raises ProtocolError if it is no stream of
    answers.
    """
    import pyarrow as pa

    try:
        table = pa.ipc.open_stream(response.content).read_all()
        return table.replace_schema_metadata(), json.loads((table.schema.metadata or {})[b"edgewater.answers"])
    except (pa.ArrowInvalid, KeyError) as exc:
        raise ProtocolError(
            f"{response.request.url.copy_with(query=None)}: the reply is no Arrow stream of answers ({exc});"
            " is this the address of a center's API?"
        ) from None


def answers_of(pages: list[Page], build: Build) -> Answers:
    from edgewater.model.number_columns import concatenated

    tables, heads = zip(*pages, strict=True)
    return build(concatenated(tables), [head for each in heads for head in each])
