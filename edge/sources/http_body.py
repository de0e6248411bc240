"""Decompresses the body of a push and decodes it by its media type, within limits of memory and CPU time.

Limits are checked before memory is allocated: the sizes that compressed data declare are summed first. The CPU clock is
read between small pieces of work.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import re
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import flatbuffers
import flatbuffers.encode
import flatbuffers.packer
import flatbuffers.table
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import zstandard

from edge.codecs.columnar import check_schema, concat, convert, is_text
from edge.codecs.formats import TextFormat
from edge.codecs.line_stream import LineStream
from edge.codecs.schema import RecordSchema
from edge.receivers import MAX_EXPANSION, Body, BodyTooCostly, BodyTooLarge, Decompress
from edge.records import Decoded
from edgewater.base.errors import InvalidRecord

_MEDIA = {
    "application/x-ndjson": "ndjson",
    "application/ndjson": "ndjson",
    "application/jsonl": "ndjson",
    "application/json": "ndjson",
    "text/csv": "csv",
    "text/plain": "text",
    "application/vnd.apache.arrow.stream": "arrow",
}
MEDIA_TYPES = f"one of {', '.join(_MEDIA)}"
MAX_GZIP_MEMBERS = 1024  # limit: CPU of a body
MAX_ZSTD_WINDOW = 8 << 20
"""The largest window of zstd, in bytes. RFC 9659 says that senders use no larger one."""
_SPACE = re.compile(r"[ \t\r\n]*")
_GZIP_PIECE_BYTES = 64 << 10  # limit: memory between two checks of the CPU time
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2  # format: of Arrow messages
"""Types of Arrow IPC messages (`MessageHeader` in Message.fbs)."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one body.

    Attributes:
        size_bytes: the largest size as sent, and also the largest decompressed size.
        cpu_s: the CPU time that decoding may take, in seconds.
        cpu_clock: returns the CPU time of the current thread, in seconds.
    """

    size_bytes: int
    cpu_s: float
    cpu_clock: Callable[[], float] = time.thread_time

    def timer(self) -> Callable[[], None]:
        """Returns a function that raises BodyTooCostly once the CPU time is used up.

        Call `timer` and the function in the same thread.
        """
        end_s = self.cpu_clock() + self.cpu_s

        def check() -> None:
            if self.cpu_clock() > end_s:
                raise BodyTooCostly

        return check

    def of(self, plain: bytes, arrival_ms: int, check: Callable[[], None] | None = None) -> Body:
        """Returns a decompressed body with these limits.

        Args:
            check: a result of `timer` whose time is already running; None to start the time now.
        """
        return Body(plain, arrival_ms, self.size_bytes, check or self.timer())


def media_kind(media: str) -> str | None:
    """Returns ndjson, csv, text or arrow for a media type; None for other media types."""
    return _MEDIA.get(media)


def decode_body(body: Body, kind: str, schema: RecordSchema, where: str, text: TextFormat | None = None) -> Decoded:
    """Decodes all valid records of a body as one batch.

    Args:
        kind: a result of `media_kind`.
        where: the name of the stream, for error messages.
        text: the format of a body of the kind `text`.

    Raises:
        InvalidRecord: the body as a whole is invalid. The message says why and what is accepted.
        BodyTooLarge: the records need more memory than a body may use.
        BodyTooCostly: decoding has used the CPU time of `BodyLimits`.
    """
    if not body.plain:
        return Decoded(schema.empty())
    if kind == "arrow":
        return _decode_arrow(body, schema, where)
    plain = body.plain
    if kind == "ndjson":
        plain = _lines(plain, body.check)
    if kind != "text" or text is None:
        text = TextFormat("csv" if kind == "csv" else "ndjson", schema)
    lines = LineStream(io.BytesIO(plain), text, where, body.check)
    blocks: list[Decoded] = []
    size = 0
    while (block := lines.next(True, body.arrival_ms)) is not None:
        blocks.append(block[0])
        size += block[0].batch.nbytes
        if size > MAX_EXPANSION * body.limit_bytes:
            raise BodyTooLarge
    return concat(blocks, schema) if blocks else Decoded(schema.empty())


def _lines(body: bytes, check: Callable[[], None]) -> bytes:
    """Returns the records of a JSON array, or one object that is indented over several lines, as lines.

    Another body is returned as it is. Raises InvalidRecord if the body begins as an array and is none.
    """
    text = body.removeprefix(codecs.BOM_UTF8).strip()
    if text[:1] == b"[":
        return _elements(text, check)
    if text[:1] == b"{" and text[1:].lstrip(b" \t\r")[:1] == b"\n":
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(text)
            return text.replace(b"\n", b" ")  # JSON has no line feeds in texts
    return body


def _elements(body: bytes, check: Callable[[], None]) -> bytes:
    """Returns the elements of a JSON array as lines. Raises InvalidRecord if the body is no JSON array."""
    elements, decoder = list[str](), json.JSONDecoder()
    try:
        text = body.decode().strip()
        at = _SPACE.match(text, 1).end()  # type: ignore[union-attr]
        while text[at : at + 1] != "]" or elements:
            check()
            _, end = decoder.raw_decode(text, at)
            elements.append(text[at:end].replace("\n", " ").replace("\r", " "))
            at = _SPACE.match(text, end).end()  # type: ignore[union-attr]
            if text[at : at + 1] != ",":
                break
            at = _SPACE.match(text, at + 1).end()  # type: ignore[union-attr]
        if text[at:] != "]":
            raise ValueError(f"no ] at character {at}")
    except (ValueError, RecursionError) as exc:
        raise InvalidRecord("body", body[:20], "JSON objects, one per line or in an array", str(exc)[:200]) from exc
    return "\n".join(elements).encode()


def gunzip(body: bytes, limit_bytes: int) -> bytes:
    """Decompresses gzip data. Raises BodyTooLarge before more than `limit_bytes` are in memory."""
    accepted = "gzip data, as Content-Encoding says"
    source, pieces, left, rest = io.BytesIO(body), list[bytes](), limit_bytes + 1, b""
    for _ in range(MAX_GZIP_MEMBERS):
        inflate = zlib.decompressobj(wbits=31)
        while not inflate.eof:
            piece = rest or source.read(_GZIP_PIECE_BYTES)
            if not piece:
                raise InvalidRecord("body", body[:20], accepted, "the data is cut off")
            try:
                pieces.append(inflate.decompress(piece, left))
            except zlib.error as exc:
                raise InvalidRecord("body", body[:20], accepted, str(exc)) from exc
            left -= len(pieces[-1])
            if left == 0:
                raise BodyTooLarge
            rest = inflate.unconsumed_tail
        rest = inflate.unused_data.lstrip(b"\0")
        while not rest and (more := source.read(_GZIP_PIECE_BYTES)):
            rest = more.lstrip(b"\0")  # as gzip itself, zeros after a member are ignored
        if not rest:
            return b"".join(pieces)
    raise InvalidRecord("body", body[:20], f"at most {MAX_GZIP_MEMBERS} gzip members", "there are more")


def unzstd(body: bytes, limit_bytes: int) -> bytes:
    """Decompresses one frame of zstd. Raises BodyTooLarge before more than `limit_bytes` are in memory."""
    accepted = f"one frame of zstd, with a window of at most {MAX_ZSTD_WINDOW >> 20} MiB, as Content-Encoding says"
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
        plain = decompressor.stream_reader(body).read(limit_bytes + 1)
        if len(plain) > limit_bytes:
            raise BodyTooLarge
        whole = decompressor.decompressobj()  # the stream does not tell whether the frame has ended
        whole.decompress(body)
    except zstandard.ZstdError as exc:
        raise InvalidRecord("body", body[:20], accepted, str(exc)) from exc
    if not whole.eof or whole.unused_data:
        raise InvalidRecord("body", body[:20], accepted, "it goes on after the frame" if whole.eof else "it is cut off")
    return bytes(plain)


def _identity(body: bytes, limit_bytes: int) -> bytes:
    if len(body) > limit_bytes:
        raise BodyTooLarge
    return body


ENCODINGS: Mapping[str, Decompress] = {"gzip": gunzip, "zstd": unzstd, "identity": _identity}
"""The functions that decompress a body, by the values of ``Content-Encoding`` that most receivers accept."""


def _plain_bytes(message: pa.Message) -> int:
    """Returns the decompressed size of an Arrow IPC message's buffers in bytes, as the message declares it.

    PyArrow allocates this size before it decompresses, and does not report it. A compressed buffer begins with its
    decompressed length as int64; -1 if the buffer is not compressed (Message.fbs, `BodyCompression`).
    """
    metadata = message.metadata.to_pybytes()
    root = flatbuffers.table.Table(metadata, flatbuffers.encode.Get(flatbuffers.packer.uoffset, metadata, 0))
    kind = metadata[root.Pos + at] if (at := root.Offset(6)) else 0
    if kind not in (_RECORD_BATCH, _DICTIONARY_BATCH):
        return 0
    batch = flatbuffers.table.Table(metadata, root.Indirect(root.Pos + root.Offset(8)))
    if kind == _DICTIONARY_BATCH:
        batch = flatbuffers.table.Table(metadata, batch.Indirect(batch.Pos + batch.Offset(6)))
    body = message.body
    if not batch.Offset(10) or not batch.Offset(8) or body is None:
        return 0 if body is None else int(body.size)
    count, start = batch.VectorLen(batch.Offset(8)), batch.Vector(batch.Offset(8))
    buffers = np.frombuffer(metadata, "<i8", 2 * count, start).reshape(count, 2)
    begins, lengths = buffers[buffers[:, 1] > 0].T
    if begins.size and (begins.min() < 0 or begins.max() > body.size - 8):
        raise ValueError("a buffer lies outside of its message")
    declared = np.frombuffer(body, np.uint8)[begins[:, None] + np.arange(8)].view("<i8").ravel()
    if declared.size and declared.min() < -1:
        raise ValueError("a buffer of negative length")
    return sum(map(int, np.where(declared < 0, lengths, declared)))


def _check_sizes(body: bytes, limit_bytes: int, check: Callable[[], None]) -> None:
    """Raises BodyTooLarge if the buffers of an Arrow IPC stream would need more than `limit_bytes`."""
    size = 0
    for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(body)):
        check()
        size += _plain_bytes(message)
        if size > limit_bytes:
            raise BodyTooLarge


def _expanded_bytes(column: pa.Array) -> int:
    """Returns the bytes by which a text column grows beyond `nbytes` when it is converted to plain strings.

    Values of dictionaries and of views may refer to the same bytes many times.
    """
    if pa.types.is_dictionary(column.type):
        if not is_text(column.type.value_type):
            return 8 * len(column)
        lengths = _text_lengths(column.dictionary)
        return int(pc.sum(pc.take(lengths, column.indices)).as_py() or 0)
    if column.type in (pa.string_view(), pa.binary_view()):
        return int(pc.sum(_text_lengths(column)).as_py() or 0)
    return 0


def _text_lengths(texts: pa.Array) -> pa.Array:
    """Returns the length of each text in bytes, int64."""
    if texts.type not in (pa.string_view(), pa.binary_view()):
        return pc.binary_length(texts).cast(pa.int64())
    if not len(texts):
        return pa.array([], pa.int64())
    views = np.frombuffer(texts.buffers()[1], "<i4")[4 * texts.offset : 4 * (texts.offset + len(texts)) : 4]
    return pa.array(views.astype(np.int64))


def _decode_arrow(body: Body, schema: RecordSchema, where: str) -> Decoded:
    batches, size = [], 0
    try:
        _check_sizes(body.plain, body.limit_bytes, body.check)
        with pa.ipc.open_stream(pa.py_buffer(body.plain)) as reader:
            check_schema(reader.schema, schema, where)
            for batch in reader:
                body.check()
                batch.validate(full=True)  # checks offsets and UTF-8, because the body is untrusted
                size += batch.nbytes + sum(_expanded_bytes(column) for column in batch.columns)
                if size > MAX_EXPANSION * body.limit_bytes:
                    raise BodyTooLarge
                batches.append(convert(batch, schema, body.arrival_ms))
    except (pa.ArrowException, ValueError, TypeError, IndexError, OSError, struct.error, MemoryError) as exc:
        raise InvalidRecord("body", body.plain[:20], "an Arrow IPC stream", str(exc)) from exc
    return concat(batches, schema) if batches else Decoded(schema.empty())
