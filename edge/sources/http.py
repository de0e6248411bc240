"""Pushed records: ``POST /v1/streams/{stream}`` with NDJSON, CSV or Arrow in the body.

A request is accepted as a whole or not at all. Invalid records are rejected individually and listed in the reply. If
all records are invalid, the reply is an error. If the request was counted before, the reply says `already_counted`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from starlette.responses import JSONResponse, Response

from edge.codecs import TextFormat
from edge.config import EdgeConfig
from edge.receivers import Body, Counted, Part, PushedSource, Receiver, Refused, Request
from edge.series import SeriesMemory
from edge.sources.http_body import ENCODINGS, MEDIA_TYPES, BodyLimits, decode_body, media_kind
from edge.sources.receiving import Accept, BearerTokens, PushEndpoint, PushLimits, Unavailable
from edge.utilization import ActivityMarker, no_marker
from edgewater.model.errors import Retired
from edgewater.runtime.problems import problem


class StreamReceiver:
    """A `Receiver` of the records of streams with an ``http`` source.

    Args:
        sources: the source of each stream.
        texts: by stream, the format of bodies of the type text/plain. Streams without an entry refuse such bodies.
    """

    path = "/v1/streams/{stream}"
    encodings = ENCODINGS
    grpc_method: str | None = None

    def __init__(self, sources: Mapping[str, PushedSource], texts: Mapping[str, TextFormat]) -> None:
        self._sources, self._texts = sources, texts

    @classmethod
    def of(cls, config: EdgeConfig) -> StreamReceiver:
        options = {
            name: source.http
            for name, stream in config.streams.items()
            for source in stream.sources
            if source.http is not None
        }
        schemas = {name: config.streams[name].record_schema for name in options}
        sources = {
            name: PushedSource(http_source_name(name), name, schemas[name], knows_bodies=http.dedupe == "body")
            for name, http in options.items()
        }
        texts = {name: http.text_format(schemas[name]) for name, http in options.items() if http.format is not None}
        return cls(sources, texts)

    def sources(self, request: Request) -> Sequence[PushedSource]:
        name = request.parameters["stream"]
        source = self._sources.get(name)
        if source is None:
            known = ", ".join(sorted(self._sources)) or "(none)"
            detail = f"stream {name[:100]!r} does not accept pushed records; streams that accept them: {known}"
            raise Refused(404, "not-found", detail)
        kind = media_kind(request.media)
        if kind is None:
            header = request.headers.get("content-type", "(none)")[:100]
            detail = f"Content-Type {header} is not accepted; expected {MEDIA_TYPES}"
            raise Refused(415, "unsupported-media-type", detail)
        if kind == "text" and name not in self._texts:
            detail = f"text/plain needs http: {{format: …}} in the sources of stream {name}, such as logfmt"
            raise Refused(415, "unsupported-media-type", detail)
        return [source]

    def decode(self, request: Request, body: Body) -> Sequence[Part]:
        (source,), kind = self.sources(request), media_kind(request.media)
        assert kind is not None
        return [Part(source, decode_body(body, kind, source.schema, source.stream, self._texts.get(source.stream)))]

    def reply(self, request: Request, counted: Sequence[Counted]) -> Response:
        (whole,) = counted
        rejected = [r.to_json() for r in whole.rejected]
        if rejected and not whole.records:
            first = whole.rejected[0]
            detail = f"none of {sum(r.count for r in whole.rejected)} records can be read: {first.message}"
            raise Refused(422, "invalid-record", detail, members={"accepted": 0, "rejected": rejected})
        return JSONResponse({"accepted": whole.records, "rejected": rejected, "already_counted": whole.already_counted})

    def refusal(self, request: Request, refused: Refused) -> Response:
        return problem(refused.status, refused.code, refused.detail, members=refused.members)


def push_endpoint(
    config: EdgeConfig,
    accept: Accept,
    unavailable: Callable[[], Unavailable | Retired | None],
    now_ms: Callable[[], int],
    busy: ActivityMarker = no_marker,
    on_refused: Callable[[str], None] = lambda _: None,
    count_refused: Callable[[str], None] = lambda _: None,
    series_of: Callable[[str], SeriesMemory] = lambda _: SeriesMemory(0),
    count_skipped: Callable[[str, Mapping[str, int]], None] = lambda _stream, _skipped: None,
    more: Sequence[Receiver] = (),
) -> PushEndpoint:
    """Returns the endpoint of the records that are pushed to an edge. `PushEndpoint` describes the other arguments.

    Args:
        config: streams with an ``http`` source accept records. `config.limits` bounds the cost of requests.
        more: the receivers of other kinds of sources.
    """
    body = BodyLimits(config.limits.max_push_bytes, config.limits.push_cpu_ms / 1000)
    limits = PushLimits(body, config.limits.push_timeout_ms / 1000)
    tokens = BearerTokens(config.http.tokens)
    receivers: list[Receiver] = [StreamReceiver.of(config), *more]
    return PushEndpoint(
        receivers, limits, tokens, accept, unavailable, now_ms, busy, on_refused, count_refused, series_of,
        count_skipped,
    )  # fmt: skip


def http_source_name(stream: str) -> str:
    return f"{stream}:http"
