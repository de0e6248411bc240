"""Decompresses the body of a push within a size limit and decodes it by its media type."""

from __future__ import annotations

import io
import zlib

import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs import LineStream, RecordSchema, TextFormat, check_schema, concat, convert, is_text
from edge.records import Decoded
from edgewater.errors import InvalidRecord

_MEDIA = {
    "application/x-ndjson": "ndjson",
    "application/ndjson": "ndjson",
    "application/jsonl": "ndjson",
    "application/json": "ndjson",
    "text/csv": "csv",
    "application/vnd.apache.arrow.stream": "arrow",
}
MEDIA_TYPES = "application/x-ndjson, text/csv or application/vnd.apache.arrow.stream"
_ARROW_EXPANSION = 16


class BodyTooLarge(Exception):
    """The body exceeds the size limit, as sent or decompressed."""


def media_type(header: str) -> str | None:
    """Returns ndjson, csv or arrow for a Content-Type; None for others."""
    return _MEDIA.get(header.partition(";")[0].strip().lower())


def decode_body(
    body: bytes, media: str, encoding: str, schema: RecordSchema, arrival_ms: int, limit_bytes: int, where: str
) -> Decoded:
    """Decodes all valid records of a body as one batch.

    Raises:
        InvalidRecord: the body as a whole is invalid; the message says why and what is accepted.
        BodyTooLarge: the decompressed body is longer than `limit_bytes`.
    """
    if encoding.lower() == "gzip":
        body = _gunzip(body, limit_bytes)
    elif encoding.lower() != "identity":
        raise InvalidRecord("Content-Encoding", encoding, "gzip or identity")
    if media == "arrow":
        return _decode_arrow(body, schema, arrival_ms, limit_bytes, where)
    text = TextFormat("csv" if media == "csv" else "ndjson", schema)
    lines = LineStream(io.BytesIO(body), text, where)
    blocks = []
    while (block := lines.next(True, arrival_ms)) is not None:
        blocks.append(block[0])
    if not blocks:
        raise InvalidRecord("body", "", "at least one record", "the body is empty")
    return concat(blocks, schema)


def _gunzip(body: bytes, limit_bytes: int) -> bytes:
    """Raises BodyTooLarge before more than `limit_bytes` are in memory."""
    result = b""
    while body:
        inflate = zlib.decompressobj(wbits=31)
        try:
            result += inflate.decompress(body, limit_bytes + 1 - len(result))
        except zlib.error as exc:
            raise InvalidRecord("body", body[:20], "gzip data, as Content-Encoding says", str(exc)) from exc
        if len(result) > limit_bytes:
            raise BodyTooLarge
        if not inflate.eof:
            raise InvalidRecord("body", body[:20], "gzip data, as Content-Encoding says", "the data is cut off")
        body = inflate.unused_data
    return result


def _expanded_bytes(column: pa.Array) -> int:
    """Returns the bytes of a dictionary column of strings once it is decoded."""
    if not pa.types.is_dictionary(column.type) or not is_text(column.type.value_type):
        return 0
    lengths = pc.binary_length(column.dictionary.cast(pa.large_string()))
    return pc.sum(pc.take(lengths, column.indices)).as_py() or 0


def _decode_arrow(body: bytes, schema: RecordSchema, arrival_ms: int, limit_bytes: int, where: str) -> Decoded:
    batches, size = [], 0
    try:
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            check_schema(reader.schema, schema, where)
            for batch in reader:
                batch.validate(full=True)  # checks offsets and UTF-8: the body is untrusted
                size += batch.nbytes + sum(_expanded_bytes(column) for column in batch.columns)
                if size > _ARROW_EXPANSION * limit_bytes:
                    raise BodyTooLarge
                batches.append(convert(batch, schema, arrival_ms))
    except (pa.ArrowInvalid, OSError) as exc:
        raise InvalidRecord("body", body[:20], "an Arrow IPC stream", str(exc)) from exc
    return concat(batches, schema) if batches else Decoded(schema.empty())
