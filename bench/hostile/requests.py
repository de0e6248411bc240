"""Targets: input of people and programs to the center's API: queries, expressions, and whole requests.

A request is the bytes of HTTP/1.1, which h11 reads as the server does, given to the real application over real stores.
A response 5xx is a failure.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h11
import pyarrow as pa
import yaml
from fastapi import FastAPI

from bench.hostile.mutate import Rng, mutated_bytes, pick
from bench.hostile.targets import Target, register
from center.api import create_app
from center.api.models import EXAMPLE_SPEC, EXAMPLE_SPEC_YAML
from center.api.routers.queries import read_query
from center.catalog import COMPONENTS, Catalog, ComponentHeartbeat, ComponentRegistry, SessionStart
from center.config import ApiSection
from center.ledger import EdgesChanged, FrameSummary, Ledger, QueryRegistered
from center.results import ResultStore
from center.storage.delta_segments import Delta
from edgewater.base.streams import LIVE, EdgeId
from edgewater.model.edge_records import StreamRecord
from edgewater.model.expressions import bind
from edgewater.model.query import QuerySpec
from edgewater.model.syntax import parse_sql
from edgewater.synopses import GroupedAggregate
from edgewater.wire import SliceClose

HOUR, T0 = 3_600_000, 1_356_998_400_000
COLUMNS = {"carrier": pa.string(), "distance": pa.int64(), "dep_delay": pa.float64(), "late": pa.bool_()}
SPEC: dict[str, Any] = {
    "name": "n", "from": "flights", "group_by": ["carrier"], "window": {"tumbling": "1h"},
    "measures": {"c": "count()", "d": "distinct(distance)", "q": "quantiles(dep_delay)", "t": "top_k(carrier, 3)"},
}  # fmt: skip
EXPRESSIONS = (
    "distance > 10 and lower(carrier) in ('ua', 'aa') or not late",
    "case when distance is null then 1.5 else coalesce(dep_delay, 0) / nullif(distance, 0) end",
    "cast(carrier as bigint) between -3 and 7 and carrier like 'U%' and round(dep_delay, 2) <> 1e3",
)
PIECES = [
    "(", ")", "[", "]", "{", "}", ",", ":", "- ", "? ", "'", '"', "*a", "&a ", "!!binary ", "!!int ", "<<: ", "\n",
    "%", "null", "true", "1e999", "-1", "0x" + "f" * 99, "9" * 5000, "9" * 400, "struct(", "char(a,", "limit ",
    "cast(a as ", "case when ", "select ", "x'", "a.b", "::int", " in (", "/*", "--", ";", "\\", "\x00", "\ud800",
    "é", "\u2028", "2013-02-30", "1h", "5%", "1:59", "..", "%00", "%ff", "%2f", "&", "=", "?", "#", "+", "carrier:UA",
    "group=", "measure=", "quantile=2", "range=a:b", "item=", "top=0", "confidence=nan", "start=", "limit=",
    "cursor=", "revision=", "9999999999999999999", "NaN", "{" * 200,
]  # fmt: skip
QUESTIONS = (
    '{"id":1,"latest":1,"measure":"d","question":"distinct","global":true}',
    '{"id":2,"at":"2013-01-01T00:30:00Z","measure":"q","question":"quantile","q":0.5,"group":{"carrier":"UA"}}',
)
READS = (
    "", "/latest", "/status", "/windows?start=2013-01-01T00:00:00Z&limit=2", "/at?time=1356998400000",
    "/live?measure=c", "/windows/1356998400000?revision=1", "/windows/1356998400000/revisions",
    "/latest?group=carrier:UA&quantile=0.5&top=2", "/latest?measure=d&confidence=0.9", "/windows?measure=t&item=UA",
)  # fmt: skip


def mutated_text(data: bytes, rng: Rng) -> bytes:
    """Inserts pieces, once or often, repeats and removes parts. In one of four cases it changes bytes."""
    if rng.random() < 0.25:
        return mutated_bytes(data, rng)
    for _ in range(1 + int(rng.integers(3))):
        at, end = sorted(int(x) for x in rng.integers(len(data) + 1, size=2))
        piece = pick(rng, PIECES).encode(errors="surrogatepass") * int(pick(rng, (1, 1, 1, 2, 30, 3000)))
        kind = int(rng.integers(4))
        if kind == 0:
            data = data[:at] + piece + data[at:]
        elif kind == 1:
            data = data[:at] + piece + data[end:]
        elif kind == 2:
            data = data[:at] + data[at:end] * int(pick(rng, (2, 50))) + data[end:]
        else:
            data = data[:at] + data[end:]
        data = data[: 128 << 10]
    return data


@functools.cache
def application() -> tuple[FastAPI, Catalog, asyncio.AbstractEventLoop]:
    """Returns the API over stores with a query that has an answer. The stores are removed with the process."""
    path = Path(tempfile.mkdtemp(prefix="edgewater-hostile-"))
    catalog, results = Catalog(f"sqlite:///{path}/catalog.db"), ResultStore(f"sqlite:///{path}/results.db")
    streams = [StreamRecord("flights", COLUMNS, LIVE)]
    catalog.edges.begin_sessions(
        [SessionStart(EdgeId("e"), "e-1", labels={}, streams=streams, oldest_seq=0, next_seq=0, now_ms=T0)]
    )
    query, ledger = catalog.queries.register(QuerySpec.from_mapping(SPEC), T0)[0], Ledger()
    results.tick(ledger, [EdgesChanged(tuple(catalog.edges.all())), QueryRegistered(query)], T0)
    bound = query.spec.bind(COLUMNS).measures
    part = GroupedAggregate(
        {"carrier": pa.string()}, {b.measure.name: b.measure.stack(b.argument and b.argument.type) for b in bound}
    )
    keys = pa.array(["UA", "AA", "UA"])
    numbers: dict[str | None, Any] = {"distance": pa.array([1, 2, 3]), "dep_delay": pa.array([1.0, 2.0, 3.0])}
    numbers |= {"carrier": keys, None: None}
    part.update([keys], {b.measure.name: numbers[b.measure.argument] for b in bound}, 3)
    fact = FrameSummary(query.ref, 1, EdgeId("e"), T0 + HOUR, (SliceClose(T0, 3, 0, ()),), (T0,), 9, T0 + HOUR, "e-1")
    results.apply(ledger, [Delta(query.key, T0, part.to_bytes())], [fact], {query.key: 1}, T0 + HOUR)
    components = ComponentRegistry(f"sqlite:///{path}/catalog.db")
    for component in COMPONENTS:  # so that /readyz is 200
        components.record(ComponentHeartbeat(component, "host:1", "127.0.0.1:1", 0, T0 + HOUR, ""))
    app = create_app(catalog, results, components, ApiSection(), now_ms=lambda: T0 + HOUR, monotonic=time.monotonic)
    loop = asyncio.new_event_loop()
    atexit.register(_close, loop)
    return app, catalog, loop


def _close(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()


def send(data: bytes) -> int:
    """Returns the status of the response to a request.

    Raises h11.RemoteProtocolError, and AssertionError for a status 5xx.
    """
    app, catalog, loop = application()
    parser = h11.Connection(h11.SERVER, 16 << 10)
    parser.receive_data(data)
    event = parser.next_event()
    if not isinstance(event, h11.Request):
        raise h11.RemoteProtocolError("no whole request")
    body = b""
    while isinstance(part := parser.next_event(), h11.Data):
        body += part.data
    path, _, parameters = event.target.partition(b"?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": event.method.decode("ascii"),
        "path": unquote(path.decode("ascii")), "raw_path": path, "query_string": parameters, "root_path": "",
        "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 9), "state": {},
        "headers": [(name.lower(), value) for name, value in event.headers],
    }  # fmt: skip
    status = loop.run_until_complete(_response(app, scope, body))
    if scope["method"] in ("DELETE", "POST"):
        for query in catalog.queries.all():
            if query.ref.name != "n":
                catalog.queries.delete(query.ref.name, T0)
        if not catalog.queries.all():
            catalog.queries.register(QuerySpec.from_mapping(SPEC), T0)
    assert status < 500, f"{status} {scope['method']} {scope['path'][:80]}"
    return status


async def _response(app: FastAPI, scope: dict[str, Any], body: bytes) -> int:
    statuses: list[int] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.sleep(0.002 if scope["path"].endswith("/live") else 10)
        return {"type": "http.disconnect"}

    async def take(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, take)
    return statuses[0]


def requests() -> list[bytes]:
    """Returns honest requests: every route, and every kind of parameter."""
    heads = [f"GET /v1/queries/n{path}" for path in READS]
    heads += [f"GET {path}" for path in ("/v1/queries", "/v1/edges", "/v1/edges/e", "/v1/alarms?limit=3", "/v1/live")]
    heads += [f"GET {path}" for path in ("/v1/quarantine", "/v1/quarantine/n@1/7", "/readyz", "/docs", "/openapi.json")]
    heads += ["DELETE /v1/queries/n", "DELETE /v1/edges/e"]
    extra = 'Accept: text/csv;q=0.5, */*\r\nIf-None-Match: "x"\r\nLast-Event-ID: 1\r\nX-Request-ID: a\r\n'
    whole = [f"{head} HTTP/1.1\r\nHost: localhost\r\n{extra}\r\n".encode() for head in heads]
    bodies = [("/v1/queries", "application/json", json.dumps({**SPEC, "name": "m"}))]
    bodies += [("/v1/queries", "application/yaml", EXAMPLE_SPEC_YAML)]
    bodies += [("/v1/queries/n/evaluate", "application/x-ndjson", "\n".join(QUESTIONS))]
    for path, kind, body in bodies:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        whole.append(head.encode() + f"{len(body.encode()):x}\r\n{body}\r\n0\r\n\r\n".encode())
    application()
    return whole


def mutated_request(data: bytes, rng: Rng) -> bytes:
    """Changes the target, a header, or the body. The stated length of the body stays right."""
    head, _, rest = data.partition(b"\r\n\r\n")
    if b"chunked" in head and rng.random() < 0.7:
        size, _, body = rest.partition(b"\r\n")
        body = mutated_text(body[: int(size, 16)], rng)
        return head + b"\r\n\r\n" + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    lines = head.split(b"\r\n")
    at = 0 if rng.random() < 0.7 else int(rng.integers(len(lines)))
    if at:
        name, _, value = lines[at].partition(b":")
        lines[at] = name + b":" + mutated_text(value, rng).replace(b"\r", b"").replace(b"\n", b"")
    else:
        method, target, version = lines[0].split(b" ", 2) if lines[0].count(b" ") >= 2 else (b"GET", b"/", b"HTTP/1.1")
        changed = mutated_text(target[1:], rng)
        plain = "".join(f"%{b:02x}" if b <= 32 or b > 126 else chr(b) for b in changed)
        lines[0] = b" ".join((method, b"/" + plain.encode()[: 15 << 10], version))
    return b"\r\n".join(lines) + b"\r\n\r\n" + rest


def bound(data: bytes) -> None:
    bind(parse_sql(data.decode(errors="replace"), "where"), COLUMNS, "where")


def parse(kind: str, data: bytes) -> None:
    read_query(data, kind)


def unlimited(_: bytes) -> None:
    """Sets no limit: a parser's memory is not proportional to its text. The process' limit bounds it."""


_QUERIES = [EXAMPLE_SPEC, SPEC, *({**SPEC, "where": e} for e in EXPRESSIONS)]
_JSON, _YAML = functools.partial(parse, "application/json"), functools.partial(parse, "application/yaml")
_AS_YAML = [EXAMPLE_SPEC_YAML, *(yaml.safe_dump(q) for q in _QUERIES)]
register(Target("query/json", lambda: [json.dumps(q).encode() for q in _QUERIES], _JSON, mutated_text, limit=unlimited))
register(Target("query/yaml", lambda: [t.encode() for t in _AS_YAML], _YAML, mutated_text, limit=unlimited))
register(Target("query/expression", lambda: [e.encode() for e in EXPRESSIONS], bound, mutated_text, limit=unlimited))
register(
    Target("request", requests, send, mutated_request, errors=(h11.RemoteProtocolError,), limit=unlimited, seconds=2.0)
)
