"""The read-only part of Prometheus' HTTP API that Grafana uses, over answers: see `center.api.prometheus`.

Errors have Prometheus' form, so that clients show them. Errors of access have the API's form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from center.api.access import IN_TURN, OPEN, READS, caller
from center.api.bodies import read_body
from center.api.prometheus.evaluate import Matchers, PromqlError, evaluate, instant_json, parse, range_json, selectors
from center.api.prometheus.series import MAX_POINTS, Axis, Labels, SeriesReader
from center.api.services import Center, Services
from edgewater.model.errors import Overspent
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.table_texts import json_text, to_json
from edgewater.model.timestamps import EARLIEST_MS, LATEST_MS, parse_time

PROMETHEUS_VERSION = "2.42.0"
"""The Prometheus version that the responses follow. Clients choose their requests by it."""
FORM = "application/x-www-form-urlencoded"
MAX_PARAMETERS = 1_000

router = APIRouter(prefix="/prometheus", include_in_schema=False)
API = "/api/v1"
Params = Mapping[str, list[str]]


class InvalidParameter(PromqlError):
    """A parameter that cannot be used."""

    def __init__(self, name: str, value: str, accepted: str) -> None:
        super().__init__(f"invalid parameter {name!r}: {value[:200]!r} is not accepted; expected {accepted}")


@router.get("/", dependencies=[OPEN])
@router.get("", dependencies=[OPEN])
async def home() -> Response:
    """Some clients request this page to check the address."""
    return PlainTextResponse("Edgewater: answers as Prometheus series, at /prometheus/api/v1/\n")


@router.api_route(f"{API}/query", methods=["GET", "POST"], dependencies=[READS, IN_TURN])
async def query(request: Request, center: Center) -> Response:
    """Evaluates an expression at a time."""
    return await _answer(request, center, _instant)


def _instant(center: Services, reader: SeriesReader, params: Params) -> Any:
    at = _time(params, "time", center.now_ms())
    axis = Axis(at, at, 1)
    return instant_json(evaluate(parse(_one(params, "query")), reader, axis), axis)


@router.api_route(f"{API}/query_range", methods=["GET", "POST"], dependencies=[READS, IN_TURN])
async def query_range(request: Request, center: Center) -> Response:
    """Evaluates an expression over a range."""
    return await _answer(request, center, _range)


def _range(center: Services, reader: SeriesReader, params: Params) -> Any:
    start, end = _time(params, "start"), _time(params, "end")
    if end < start:
        raise InvalidParameter("end", _one(params, "end"), "a time that is not before start")
    step = _seconds(_one(params, "step"))
    if (end - start) // step + 1 > MAX_POINTS:
        raise Overspent(f"exceeded maximum resolution of {MAX_POINTS} points per timeseries; choose a longer step")
    axis = Axis(start, end, step)
    return range_json(evaluate(parse(_one(params, "query")), reader, axis), axis)


@router.api_route(f"{API}/series", methods=["GET", "POST"], dependencies=[READS, IN_TURN])
async def series(request: Request, center: Center) -> Response:
    """Lists the series of the newest window in the range that match a selector."""
    return await _answer(request, center, _series)


def _series(center: Services, reader: SeriesReader, params: Params) -> Any:
    if not params.get("match[]"):
        raise PromqlError("no match[] parameter provided")
    return [dict(labels) for labels in _found(reader, params)]


@router.api_route(f"{API}/labels", methods=["GET", "POST"], dependencies=[READS, IN_TURN])
async def labels(request: Request, center: Center) -> Response:
    return await _answer(request, center, _labels)


def _labels(center: Services, reader: SeriesReader, params: Params) -> Any:
    return sorted({name for labels in _found(reader, params) for name, _ in labels})


@router.get(f"{API}/label/{{name}}/values", dependencies=[READS, IN_TURN])
async def label_values(name: str, request: Request, center: Center) -> Response:
    def values(center: Services, reader: SeriesReader, params: Params) -> Any:
        return sorted({value for labels in _found(reader, params) for label, value in labels if label == name})

    return await _answer(request, center, values)


@router.get(f"{API}/metadata", dependencies=[READS, IN_TURN])
async def metadata(request: Request, center: Center) -> Response:
    """Lists the type and the meaning of each series."""
    return await _answer(request, center, _metadata)


def _metadata(center: Services, reader: SeriesReader, params: Params) -> Any:
    metric = params.get("metric", [""])[0]
    result: dict[str, list[dict[str, str]]] = {}
    for query in reader.queries:
        expressions = query.spec.to_mapping()["measures"]
        assert isinstance(expressions, Mapping)
        for labels in reader.newest(query, None, None):
            name = dict(labels)["__name__"]
            if not metric or name == metric:
                measure = name.partition(":")[2].partition(":")[0]
                base = next((m for m in (measure, measure[:-6]) if m in expressions), None)
                meaning = {"_lower": "lower bound of ", "_upper": "upper bound of "}.get(name[-6:], "")
                description = f"{meaning}{expressions[base]}" if base else f"{measure} of the newest answer"
                text = f"{description}, query {query.ref.name}"
                result.setdefault(name, [{"type": "gauge", "help": text, "unit": ""}])
    return result


@router.get(f"{API}/rules", dependencies=[READS])
async def rules() -> Response:
    return _success([b'{"groups":[]}'])


@router.get(f"{API}/alerts", dependencies=[READS])
async def alerts() -> Response:
    return _success([b'{"alerts":[]}'])


@router.api_route(f"{API}/query_exemplars", methods=["GET", "POST"], dependencies=[READS])
async def exemplars() -> Response:
    return _success([b"[]"])


@router.get(f"{API}/status/buildinfo", dependencies=[READS])
async def buildinfo() -> Response:
    empty = dict.fromkeys(("revision", "branch", "buildUser", "buildDate", "goVersion"), "")
    return _success([to_json({"version": PROMETHEUS_VERSION, **empty})])


def _found(reader: SeriesReader, params: Params) -> list[Labels]:
    """Returns the labels of each series of the newest window in the range that any `match[]` selects."""
    selected: Sequence[Matchers] = selectors(params.get("match[]", []))
    start = _time(params, "start", None) if "start" in params else None
    end = _time(params, "end", None) if "end" in params else None
    if start is not None and end is not None and end < start:
        raise InvalidParameter("end", _one(params, "end"), "a time that is not before start")
    result: set[Labels] = set()
    for query in reader.queries:
        if selected and not any(m.of(query) for m in selected):
            continue
        each = list(reader.newest(query, start, end))
        chosen = zip(*(m.selects(each) for m in selected), strict=True) if selected else [(True,)] * len(each)
        result.update(labels for labels, by in zip(each, chosen, strict=True) if any(by))
    return sorted(result)


async def _answer(request: Request, center: Services, make: Any) -> Response:
    """Runs a function of the parameters in a thread, and answers in Prometheus' form."""
    params: dict[str, list[str]] = {}
    pairs: Iterable[tuple[str, str]] = request.query_params.multi_items()
    if request.method == "POST":
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        body = await read_body(request, center.limits.body_ms / 1000)
        if media != FORM and body:
            return _error("bad_data", f"Content-Type {media[:100]!r} is not accepted; expected {FORM}", 400)
        try:
            pairs = [*pairs, *parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_PARAMETERS)]
        except ValueError as exc:
            return _error("bad_data", f"the body is no form: {exc}", 400)
    for name, value in pairs:
        params.setdefault(name, []).append(value)
    principal = caller(request)

    def run() -> Response:
        live: tuple[RegisteredQuery, ...] = tuple(
            q for q in center.catalog.queries.all() if principal.may("reader", q.ref.name)
        )
        reader = SeriesReader(center.results, live, center.samples)
        data = make(center, reader, params)
        parts = data if isinstance(data, Iterator) else [json_text(data).encode(errors="replace")]
        return _success(parts, reader.warnings)

    try:
        return await center.costly.run(request, run)
    except PromqlError as exc:
        return _error(exc.kind, exc.message, 400 if exc.kind == "bad_data" else 422)
    except Overspent as exc:
        return _error("execution", exc.message, 422)


def _success(data: Iterable[bytes], warnings: Sequence[str] = ()) -> Response:
    """Returns a reply with the parts of `data`, JSON."""
    parts = [b'{"status":"success","data":', *data]
    parts.append(b',"warnings":%b}' % to_json(list(dict.fromkeys(warnings))) if warnings else b"}")
    return Response(b"".join(parts), 200, media_type="application/json")


def _error(kind: str, message: str, status: int) -> Response:
    body = {"status": "error", "errorType": kind, "error": message}
    return Response(json.dumps(body).encode(), status, media_type="application/json")


def _one(params: Params, name: str) -> str:
    values = params.get(name)
    if not values or not values[0]:
        raise PromqlError(f"invalid parameter {name!r}: it is missing")
    return values[0]


def _time(params: Params, name: str, default: int | None = None) -> int:
    """Returns a time in ms, from seconds since 1970, or RFC 3339."""
    if default is not None and not params.get(name):
        return default
    text = _one(params, name)
    accepted = "seconds since 1970, or RFC 3339"
    try:
        seconds = float(text)
    except ValueError:
        try:
            return parse_time(text)
        except ValueError:
            raise InvalidParameter(name, text, accepted) from None
    if not math.isfinite(seconds) or not EARLIEST_MS <= seconds * 1000 <= LATEST_MS:
        raise InvalidParameter(name, text, accepted)
    return round(seconds * 1000)


def _seconds(text: str) -> int:
    """Returns a step in ms, from seconds or a duration."""
    import promql_parser

    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = promql_parser.parse_duration(text).total_seconds()
        except ValueError:
            seconds = math.nan
    if not math.isfinite(seconds) or seconds * 1000 < 1 or seconds > LATEST_MS / 1000:
        raise InvalidParameter("step", text, "a positive number of seconds, or a duration such as 1m")
    return round(seconds * 1000)
