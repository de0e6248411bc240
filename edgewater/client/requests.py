"""The parameters of requests to a center, and its replies and errors, without I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar
from urllib.parse import quote

import httpx
import yaml

from edgewater.base import errors
from edgewater.base.errors import EdgewaterError, InvalidInput, InvalidQuery, InvalidRequest, ProtocolError
from edgewater.base.plain_yaml import load_yaml
from edgewater.base.timestamps import TIME_ACCEPTED, parse_time, rfc3339
from edgewater.client.answers import Answers, from_table
from edgewater.model.json_types import Document, Groups, Key
from edgewater.model.key_texts import key_text
from edgewater.model.replies import Members, Spec

if TYPE_CHECKING:  # importing Arrow takes long, see `answers`
    import pyarrow as pa

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")
Q_co = TypeVar("Q_co", covariant=True)
Params = tuple[tuple[str, str], ...]
Phase = Literal["early", "complete", "final"]

Draft: TypeAlias = Document | str | Path
"""A query as a mapping, as YAML text, or as a file of YAML."""
Moment = datetime | str | int
"""A time as an aware datetime, as RFC 3339, or in unix ms."""

PHASES: tuple[Phase, ...] = ("early", "complete", "final")
PAGE, FIRST_PAGE = 1000, 50  # limit: size of a reply
"""The largest number of windows of a page, and the number of windows of the first page of a range."""
PAGE_S = 1.0  # limit: time of a request
"""The time that a page should take, in seconds. The number of windows of the next page follows from the time of the
last page.
"""
POLL_S = 0.2  # limit: requests while waiting
"""The time between two requests while waiting for a window, in seconds. A request without news gets a 304."""
PROBLEM = "application/problem+json"
SHOWN = 200  # limit: length of a message
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
    """A refusal whose code is no code of `edgewater.base.errors`, such as `forbidden`.

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


def checked(response: httpx.Response, missing: bool = False) -> httpx.Response:
    """Returns a successful reply. Raises the error that a problem document states.

    Args:
        missing: whether statuses 404 and 304 are replies instead of errors.
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


def question_params(group: Groups | None, questions: Questions) -> Params:
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


def read_spec(spec: Draft) -> tuple[bytes, str, str]:
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


def put_headers(media: str, version: int | None) -> dict[str, str]:
    return {"Content-Type": media} | ({} if version is None else {"If-Match": f'"{version}"'})


def given(params: Mapping[str, str | None]) -> Params:
    """Returns the parameters that have a value."""
    return tuple((name, value) for name, value in params.items() if value is not None)


def borders(at: Moment | None, lasts: str | None) -> Params:
    return given({"at": moment(at, "at"), "for": lasts})


def revision_of(revision: int | None) -> Params:
    return given({"revision": None if revision is None else str(revision)})


TABLE_TYPES = {
    ".csv": "text/csv",
    ".ndjson": "application/x-ndjson",
    ".jsonl": "application/x-ndjson",
    ".parquet": "application/vnd.apache.parquet",
}
"""The media types of files of tables, by the ends of their names."""


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


def pages(ask: Callable[[Params], httpx.Response], clock: Callable[[], float]) -> list[Page]:
    """Reads a range in pages that take about `PAGE_S` each, so that no request reaches the time-out.

    Args:
        ask: requests a page with the limit and the cursor that it is given.
    """
    cursor: Params = ()
    limit, found = min(FIRST_PAGE, PAGE), []
    while True:
        began = clock()
        response = ask((("limit", str(limit)), *cursor))
        found.append(page_of(response))
        if "next" not in response.links:
            return found
        took = max(clock() - began, 0.001)
        limit = max(1, min(PAGE, int(limit * min(4.0, PAGE_S / took))))
        # Only the cursor of the link is used, because the center may be behind a proxy with another address.
        cursor = (("cursor", httpx.URL(response.links["next"]["url"]).params["cursor"]),)


def answers_of(pages: list[Page], spec: Spec, explain: Callable[..., Any]) -> Answers:
    from edgewater.base.number_columns import concatenated

    tables, heads = zip(*pages, strict=True)
    return from_table(concatenated(tables), [head for each in heads for head in each], spec, explain)
