"""Targets: bodies that clients push to an edge."""

from __future__ import annotations

import gzip
from functools import partial

import numpy as np
import pyarrow as pa

from bench.hostile.mutate import Rng, mutated_bytes, pick
from bench.hostile.targets import Target, register
from edge.codecs.fields_codec import LinePattern
from edge.codecs.formats import TextFormat
from edge.codecs.schema import EventTime, RecordSchema
from edge.receivers import MAX_EXPANSION, BodyTooCostly, BodyTooLarge
from edge.sources.http_body import ENCODINGS, BodyLimits, decode_body
from edgewater.base.errors import EdgewaterError

NOW_MS = 1_700_000_000_000
COLUMNS = {"k": pa.string(), "x": pa.int64(), "f": pa.float64(), "b": pa.bool_()}
SCHEMA = RecordSchema(COLUMNS, EventTime("t"))
LIMITS = BodyLimits(64 << 10, 1.0)
PIECES = (b"\n", b"\r", b'"', b",", b"{", b"[", b"}", b"null", b"\\u0000", b"\xff", b"1e999", b"9" * 400, b"[" * 5_000)


def _ndjson() -> list[bytes]:
    return [b"".join(b'{"t": %d, "k": "a%d", "x": %d, "f": 1.5, "b": true}\n' % (NOW_MS + i, i, i) for i in range(20))]


def _csv() -> list[bytes]:
    return [b"t,k,x,f,b\n" + b"".join(b'%d,"a, %d",%d,1.5,true\n' % (NOW_MS + i, i, i) for i in range(20))]


TEXTS = {
    "logfmt": TextFormat("logfmt", SCHEMA),
    "regex": TextFormat(
        "regex", SCHEMA, pattern=LinePattern(r"(?P<t>\d+) (?P<k>.*?) (?P<x>\S*) (?P<f>\S*) (?P<b>\w*)")
    ),
}


def _logfmt() -> list[bytes]:
    return [b"".join(b't=%d k="a \\"%d\\"" x=%d f=1.5 b\n' % (NOW_MS + i, i, i) for i in range(20))]


def _regex() -> list[bytes]:
    return [b"".join(b"%d a %d 1.5 true\n" % (NOW_MS + i, i) for i in range(20))]


def _arrow(compression: str | None) -> list[bytes]:
    rows = 20
    texts = pa.array([f"a{i % 3}" for i in range(rows)])
    bodies = []
    for text in (texts, texts.dictionary_encode(), texts.cast(pa.string_view()), texts.cast(pa.large_string())):
        columns = {
            "t": np.full(rows, NOW_MS), "k": text, "x": np.arange(rows, dtype=np.int16),
            "f": np.arange(rows) / 3, "b": np.arange(rows) % 2 == 0, "other": pa.array([[1]] * rows),
        }  # fmt: skip
        sink, batch = pa.BufferOutputStream(), pa.record_batch(columns)
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
            writer.write_batch(batch)
            writer.write_batch(batch)
        bodies.append(bytes(sink.getvalue()))
    return bodies


def _mutated_text(data: bytes, rng: Rng) -> bytes:
    """Changes bytes, or inserts characters with a meaning in the format."""
    if rng.random() < 0.5:
        return mutated_bytes(data, rng)
    at = int(rng.integers(len(data) + 1))
    return data[:at] + pick(rng, PIECES) * int(rng.integers(1, 4)) + data[at + int(rng.integers(3)) :]


def _decode(media: str, encoding: str, data: bytes) -> None:
    text = TEXTS.get(media)
    plain = ENCODINGS[encoding](data, LIMITS.size_bytes)
    decode_body(LIMITS.of(plain, NOW_MS), "text" if text else media, SCHEMA, "fuzz", text)


def _memory(_: bytes) -> int:
    return 2 * MAX_EXPANSION * LIMITS.size_bytes


_refusals = (EdgewaterError, BodyTooLarge, BodyTooCostly)
for _name, _corpus, _media, _encoding, _mutate in (
    ("ndjson", _ndjson, "ndjson", "identity", _mutated_text),
    ("csv", _csv, "csv", "identity", _mutated_text),
    ("logfmt", _logfmt, "logfmt", "identity", _mutated_text),
    ("regex", _regex, "regex", "identity", _mutated_text),
    ("gzip", lambda: [gzip.compress(_ndjson()[0], mtime=0) * 2], "ndjson", "gzip", mutated_bytes),
    ("arrow", partial(_arrow, None), "arrow", "identity", mutated_bytes),
    ("arrow-zstd", partial(_arrow, "zstd"), "arrow", "identity", mutated_bytes),
    ("arrow-lz4", partial(_arrow, "lz4"), "arrow", "identity", mutated_bytes),
):
    _run = partial(_decode, _media, _encoding)
    register(Target(f"push/{_name}", _corpus, _run, _mutate, _refusals, _memory))
