"""Pushed records: ``POST /v1/streams/{stream}`` with NDJSON, CSV or Arrow in the body.

A request is accepted as a whole or not at all. Invalid records are rejected individually and listed in the reply. If
all records are invalid, the reply is an error. If the request was counted before, the reply says `already_counted`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.responses import JSONResponse, Response

from edge.codecs.formats import TextFormat
from edge.config import EdgeConfig, HttpPushConfig
from edge.receivers import Body, Counted, Part, PushedSource, Refused, Request
from edge.source_kinds import SourceContext
from edge.sources.http_body import ENCODINGS, MEDIA_TYPES, decode_body, media_kind
from edgewater.base.errors import did_you_mean
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
        contexts = {name: SourceContext(name, config.streams[name].record_schema, lambda: 0) for name in options}
        sources = {name: http_source(http, contexts[name]) for name, http in options.items()}
        texts = {
            name: http.text_format(contexts[name].schema) for name, http in options.items() if http.format is not None
        }
        return cls(sources, texts)

    def sources(self, request: Request) -> Sequence[PushedSource]:
        name = request.parameters["stream"]
        source = self._sources.get(name)
        if source is None:
            known = ", ".join(sorted(self._sources)) or "(none)"
            near = did_you_mean(name[:100], self._sources)
            detail = f"stream {name[:100]!r} does not accept pushed records{near}; streams that accept them: {known}"
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


def http_source(config: HttpPushConfig, context: SourceContext) -> PushedSource:
    name = f"{context.stream}:http"
    return PushedSource(name, context.stream, context.schema, context.idle, knows_bodies=config.dedupe == "body")
