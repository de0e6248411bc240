"""The sink `remote_write` writes final answers as series of Prometheus, by the remote write protocol 1.0.

A measure `m` of the query `q` has the series ``q_m``, ``q_m_lower`` and ``q_m_upper``, with the groups as labels. The
time of a sample is the end of the window. Samples of a series are written in the order of time, because windows become
final in this order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import cramjam
import httpx
import numpy as np
import pyarrow as pa

from center.sinks.base import Position, SinkAnswer, SinkContext, SinkMemory, SinkQuery
from center.sinks.kinds import RemoteWriteConfig
from edgewater.model.errors import StorageError
from edgewater.runtime.http_exchange import failure, host_of, post
from edgewater.wire import remote_write_pb2 as pb

TIMEOUT_S = 30.0
KNOWN = ("out of order", "duplicate sample", "too old", "out of bounds")
"""Messages of a receiver that already has the samples or has newer samples."""
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_OWN = ("window_start", "window_end", "phase", "revision", "given_at", "contract", "withheld")
HEADERS = {
    "Content-Type": "application/x-protobuf", "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}  # fmt: skip


class RemoteWriteSink:
    """Sends final answers, one request per window. Implements `center.sinks.base.Sink`."""

    def __init__(self, options: RemoteWriteConfig, context: SinkContext) -> None:
        self._options, self._context = options, context
        self._client: httpx.Client | None = None
        self.refused = 0

    def open(self, queries: Sequence[SinkQuery]) -> Position | None:
        """Implements `Sink.open`."""
        if self._client is None:
            self._client = httpx.Client()
        stored = self._memory.load()
        return None if stored is None else stored[0]

    def write(self, answers: Sequence[SinkAnswer], position: Position) -> None:
        """Implements `Sink.write`. Raises StorageError."""
        for answer in sorted(answers, key=lambda a: a.window_end_ms):
            request = pb.WriteRequest(timeseries=list(self._series(answer)))
            if request.timeseries:
                self._send(request)
        self._memory.save(position, "{}")

    def close(self) -> None:
        """Implements `Sink.close`."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def _memory(self) -> SinkMemory:
        assert self._context.memory is not None, "a process gives one"
        return self._context.memory

    def _send(self, request: pb.WriteRequest) -> None:
        assert self._client is not None, "open comes first"
        body, token = bytes(cramjam.snappy.compress_raw(request.SerializeToString())), self._options.token
        headers = HEADERS if token is None else {**HEADERS, "Authorization": f"Bearer {token.get_secret_value()}"}
        try:
            reply = post(self._client, self._options.url, body, headers, TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
            raise StorageError(f"{host_of(self._options.url)}: {failure(exc)}") from None
        if reply.is_success:
            return
        if reply.status == 400 and any(phrase in reply.text for phrase in KNOWN):
            self.refused += 1  # a repetition after a kill: newer samples were written, so these were written, too
            return
        raise StorageError(f"{host_of(self._options.url)}: HTTP {reply.status} {reply.text[:200]}")

    def _series(self, answer: SinkAnswer) -> Iterator[bytes]:
        groups = [answer.rows.column(name).to_pylist() for name in answer.group_columns]
        common = {"version": str(answer.query.version), **self._options.labels}
        for name in answer.rows.column_names:
            column = answer.rows.column(name)
            is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
            if name in _OWN or name in answer.group_columns or not (is_number or pa.types.is_decimal(column.type)):
                continue
            values = column.cast(pa.float64(), safe=False).to_numpy()
            metric = _name(f"{answer.query.name}_{name}")
            for row in np.flatnonzero(column.is_valid().to_numpy()).tolist():
                keys = {_name(n): _text(g[row]) for n, g in zip(answer.group_columns, groups, strict=True)}
                pairs = sorted({**common, **keys, "__name__": metric}.items())
                yield pb.TimeSeries(
                    labels=[pb.Label(name=n, value=v).SerializeToString() for n, v in pairs if v],
                    samples=[pb.Sample(value=float(values[row]), timestamp=answer.window_end_ms)],
                ).SerializeToString()


def _name(text: str) -> str:
    name = _NOT_IN_NAMES.sub("_", text)
    return f"_{name}" if name[:1].isdigit() else name


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
