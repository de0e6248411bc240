"""The read-only part of Prometheus' HTTP API that Grafana uses, over answers: see `center.api.prometheus`.

Errors have Prometheus' form, so that clients show them. Errors of access have the API's form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from center.api.access import IN_TURN, OPEN, READS, caller
from center.api.bodies import read_body
from center.api.prometheus.evaluate import PromqlError, evaluate, instant_json, number, parse, range_json, selectors
from center.api.prometheus.series import MAX_POINTS, Axis, Labels, Matchers, SeriesReader
from center.api.services import Center, Services
from center.sinks.alert_rules import Details
from center.sinks.alert_states import AlertsState, saved_states
from edgewater.base.errors import Overspent
from edgewater.base.timestamps import EARLIEST_MS, LATEST_MS, parse_time
from edgewater.model.key_texts import with_label_names
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.table_texts import json_text, to_json

NEVER = "0001-01-01T00:00:00Z"
"""The time of the evaluation of a rule that was not evaluated yet, as Prometheus writes it."""
PROMETHEUS_VERSION = "2.42.0"
"""The Prometheus version that the responses follow. Clients choose their requests by it."""
FORM = "application/x-www-form-urlencoded"
MAX_PARAMETERS = 1_000  # limit: input of a request

router = APIRouter(prefix="/prometheus", include_in_schema=False)
API = "/api/v1"
Params = Mapping[str, list[str]]
Make = Callable[[Services, SeriesReader, Params], Any]
"""Makes the `data` of a reply: JSON, or an iterator of its parts."""


class InvalidParameter(PromqlError):
    """A parameter that cannot be used."""

    def __init__(self, name: str, value: str, accepted: str) -> None:
        super().__init__(f"invalid parameter {name!r}: {value[:200]!r} is not accepted; expected {accepted}")


@router.get("/", dependencies=[OPEN])
@router.get("", dependencies=[OPEN])
async def home() -> Response:
    """Some clients request this page to check the address."""
    return PlainTextResponse("Edgewater: answers as Prometheus series, at /prometheus/api/v1/\n")


def _instant(center: Services, reader: SeriesReader, params: Params) -> Any:
    """Evaluates an expression at a time."""
    at = _time(params, "time", center.now_ms())
    axis = Axis(at, at, 1)
    return instant_json(evaluate(parse(_one(params, "query")), reader, axis), axis)


def _range(center: Services, reader: SeriesReader, params: Params) -> Any:
    """Evaluates an expression over a range."""
    start, end = _time(params, "start"), _time(params, "end")
    if end < start:
        raise InvalidParameter("end", _one(params, "end"), "a time that is not before start")
    step = _seconds(_one(params, "step"))
    if (end - start) // step + 1 > MAX_POINTS:
        raise Overspent(f"exceeded maximum resolution of {MAX_POINTS} points per timeseries; choose a longer step")
    axis = Axis(start, end, step)
    return range_json(evaluate(parse(_one(params, "query")), reader, axis), axis)


def _series(center: Services, reader: SeriesReader, params: Params) -> Any:
    """Lists the series of the newest window in the range that match a selector."""
    if not params.get("match[]"):
        raise PromqlError("no match[] parameter provided")
    return [dict(labels) for labels in _found(reader, params)]


def _labels(center: Services, reader: SeriesReader, params: Params) -> Any:
    return sorted({name for labels in _found(reader, params) for name, _ in labels})


@router.get(f"{API}/label/{{name}}/values", dependencies=[READS, IN_TURN])
async def label_values(name: str, request: Request, center: Center) -> Response:
    def values(center: Services, reader: SeriesReader, params: Params) -> Any:
        return sorted({value for labels in _found(reader, params) for label, value in labels if label == name})

    return await _answer(request, center, values)


def _metadata(center: Services, reader: SeriesReader, params: Params) -> Any:
    """Lists the type and the meaning of each series."""
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


def _add_route(path: str, make: Make) -> None:
    async def answer(request: Request, center: Center) -> Response:
        return await _answer(request, center, make)

    answer.__name__ = path  # the audit log names it
    router.add_api_route(f"{API}/{path}", answer, methods=["GET", "POST"], dependencies=[READS, IN_TURN])


for _path, _make in {
    "query": _instant,
    "query_range": _range,
    "series": _series,
    "labels": _labels,
    "metadata": _metadata,
}.items():
    _add_route(_path, _make)


@router.get(f"{API}/rules", dependencies=[READS, IN_TURN])
def rules(request: Request, center: Center) -> Response:
    """Lists the rules of the sinks of the kind `alerts`, with a group per sink, and the alerts of each rule."""
    groups = []
    for sink, state in saved_states(center.sinks) if request.query_params.get("type") != "record" else ():
        alerts = _shown_alerts(request, state)
        each = [
            {
                "type": "alerting",
                "name": rule["rule"],
                "query": rule["condition"],
                "duration": rule["for_ms"] / 1000,
                "labels": dict(state.book.rules[rule["rule"]].labels),
                "annotations": {"summary": state.book.rules[rule["rule"]].summary},
                "alerts": [alert for alert in alerts if alert["labels"]["alertname"] == rule["rule"]],
                "state": rule["state"] if rule["state"] in ("firing", "pending") else "inactive",
                "health": "err" if rule["problem"] else "ok",
                "lastError": rule["problem"] or "",
                "lastEvaluation": rule["window"]["end"] if rule["window"] else NEVER,
                "evaluationTime": 0,
            }
            for rule in state.rules
            if caller(request).may("reader", rule["query"])
        ]
        groups.append({"name": sink, "file": sink, "interval": 0, "rules": each})
    return _success([to_json({"groups": groups})])


@router.get(f"{API}/alerts", dependencies=[READS, IN_TURN])
def alerts(request: Request, center: Center) -> Response:
    """Lists the alerts that fire or are pending."""
    shown = [alert for _, state in saved_states(center.sinks) for alert in _shown_alerts(request, state)]
    return _success([to_json({"alerts": shown})])


def _shown_alerts(request: Request, state: AlertsState) -> list[dict[str, Any]]:
    """Returns the alerts of a sink that the caller may read, in Prometheus' form."""
    return [
        {
            "labels": with_label_names(alert["labels"]),
            "annotations": with_label_names(alert["annotations"]),
            "state": alert["status"],
            "activeAt": alert["since"],
            "value": _value(alert["details"]),
        }
        for alert in state.alerts
        if caller(request).may("reader", alert["query"])
    ]


def _value(details: Details) -> str:
    """Returns the first number that a condition has read, as Prometheus writes it."""
    values = (d["value"] for d in details.values() if isinstance(d, Mapping) and "value" in d)
    return number(float(value)) if isinstance(value := next(values, None), int | float) else "NaN"


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


async def _answer(request: Request, center: Services, make: Make) -> Response:
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
    text, seconds = _one(params, name), math.nan
    try:
        seconds = float(text)
    except ValueError:
        with suppress(ValueError):
            return parse_time(text)
    if not math.isfinite(seconds) or not EARLIEST_MS <= seconds * 1000 <= LATEST_MS:
        raise InvalidParameter(name, text, "seconds since 1970, or RFC 3339")
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
