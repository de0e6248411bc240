"""The sink `remote_write` writes final answers as series of Prometheus, by the remote write protocol 1.0.

A measure `m` of the query `q` has the series ``q_m``, ``q_m_lower`` and ``q_m_upper``. The labels are the groups,
``query`` and ``version``. The time of a sample is the end of the window. Samples of a series are written in the order
of time, because windows become final in this order.

A correction is left out if its values were written: Prometheus takes no second sample of a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import cramjam
import httpx
import numpy as np

from center.sinks.base import SinkAnswer, SinkContext, SinkQuery
from center.sinks.kinds import RemoteWriteSinkConfig
from edgewater.base.errors import StorageError
from edgewater.base.float_bounds import side_of
from edgewater.base.number_columns import float_column, is_number
from edgewater.base.timestamps import rfc3339
from edgewater.model.key_texts import key_text, label_names
from edgewater.model.own_columns import OWN_COLUMNS
from edgewater.model.registered_query import query_key
from edgewater.runtime.http_exchange import ExchangeFailed, post, way_of
from edgewater.wire import QueryRef
from edgewater.wire import remote_write_pb2 as pb

TIMEOUT_S = 30.0  # limit: the wait for a receiver
"""A limit of each step of a request. A sink that waits longer is closed and opened again."""
REFUSING = frozenset({400, 409, 413, 422})
"""HTTP status codes of a receiver that will not accept the same samples later."""
HEADERS = {
    "Content-Type": "application/x-protobuf", "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}  # fmt: skip


class RemoteWriteSink:
    """Sends final answers, one request per window. Implements `center.sinks.base.Sink`.

    The memory has the positions, and the ids of the answers of a page that are written. So after a kill, only the
    newest samples are sent again, and a receiver accepts a repetition of its newest samples.
    """

    def __init__(self, options: RemoteWriteSinkConfig, context: SinkContext) -> None:
        self._options, self._context = options, context
        self._client: httpx.Client | None = None
        self._written = set[int]()
        self.refused, self.refusal = 0, ""

    def open(self, queries: Sequence[SinkQuery]) -> Mapping[QueryRef, int]:
        """Implements `Sink.open`."""
        self._client = self._client or httpx.Client(**way_of(self._options.proxy))
        stored = self._context.memory.load([query.ref for query in queries])
        if stored is None:
            return {}
        self._written = set(json.loads(stored[1]).get("written", ()))
        return stored[0]

    def write(self, answers: Sequence[SinkAnswer], positions: Mapping[QueryRef, int]) -> None:
        """Implements `Sink.write`. Raises StorageError."""
        for answer in sorted(answers, key=lambda a: a.window_end_ms):
            series = [] if answer.repeats else list(self._series(answer))
            if answer.answer_id in self._written or not series:
                continue
            if reason := self._send(series):
                self.refused += len(series)
                self.refusal = f"query {query_key(answer.query)}, window {rfc3339(answer.window_start_ms)}: {reason}"
            self._written.add(answer.answer_id)
            self._save({})
        if positions:
            self._written -= {answer.answer_id for answer in answers}
        self._save(positions)

    def close(self) -> None:
        """Implements `Sink.close`."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _save(self, positions: Mapping[QueryRef, int]) -> None:
        self._context.memory.save(positions, json.dumps({"written": sorted(self._written)}))

    def _send(self, series: Sequence[bytes]) -> str:
        """Sends samples. Returns why the receiver will never accept them, or an empty text."""
        assert self._client is not None, "open comes first"
        body = bytes(cramjam.snappy.compress_raw(pb.WriteRequest(timeseries=series).SerializeToString()))
        token = self._options.token
        headers = HEADERS if token is None else {**HEADERS, "Authorization": f"Bearer {token.get_secret_value()}"}
        try:
            reply = post(self._client, self._options.url, body, headers, TIMEOUT_S)
        except ExchangeFailed as exc:
            raise StorageError(str(exc)) from None
        if not reply.is_success and reply.status not in REFUSING:
            raise StorageError(str(reply))
        return "" if reply.is_success else str(reply)

    def _series(self, answer: SinkAnswer) -> Iterator[bytes]:
        groups = [map(key_text, answer.rows.column(name).to_pylist()) for name in answer.group_columns]
        common = {"query": answer.query.name, "version": str(answer.query.version), **self._options.labels}
        names = label_names(answer.group_columns, {*common, "__name__"})
        labels = [dict(zip(names, row, strict=True)) for row in zip(*groups, strict=True)]
        own = [answer.own_columns[name] for name, column in OWN_COLUMNS.items() if column.is_series]
        columns = [*own, *answer.measure_columns]
        columns = [name for name in columns if is_number(answer.rows.column(name).type)]
        metrics = label_names([f"{answer.query.name}_{name}" for name in columns])
        for name, metric in zip(columns, metrics, strict=True):
            column = answer.rows.column(name)
            values = float_column(column, side_of(name))
            for row in np.flatnonzero(column.is_valid().to_numpy()).tolist():
                pairs = sorted({**common, **(labels[row] if labels else {}), "__name__": metric}.items())
                yield pb.TimeSeries(
                    labels=[pb.Label(name=n, value=v).SerializeToString() for n, v in pairs if v],
                    samples=[pb.Sample(value=float(values[row]), timestamp=answer.window_end_ms)],
                ).SerializeToString()
