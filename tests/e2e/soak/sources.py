"""The inputs of edges: files that are rotated, pushes, pipes. Each runs in a thread and logs what it handed over."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from typing import IO

import httpx
import paho.mqtt.client as mqtt
from confluent_kafka import Producer
from paho.mqtt.enums import CallbackAPIVersion

from tests.brokers import KafkaBroker, MqttBroker
from tests.e2e.soak.records import InputLog, Record, RecordSource, Rejected, to_arrow

PERIOD_S = 0.1
PUSH_TIMEOUT_S = 8.0
PUBLISH_TIMEOUT_S = 10.0
REPEAT_EVERY = 10
"""Every so many pushes, a batch is pushed again that was counted."""
GOES_ON_S = 1.0
COMPRESS_AFTER_S = 1.0
BAD_LINES = ('{"at": "yesterday"}', "not json", '{"k": "a", "n": 1}', '{"at": 1, "n": 1.5}')
"""Lines that are no records; a line with a wrong type and the time of a record is added to them."""
HEAD_LINE = '{"comment": "' + "the same in every file " * 20 + '"}'
"""Without a time, so it is no record; it makes the first bytes of all files of an episode equal."""


def wall_ms() -> int:
    return int(time.time() * 1000)  # noqa: TID251


class Input:
    """Writes drawn records until it is stopped.

    Attributes:
        capped: as in `InputLog.add`; set to False before a fault that makes the edge read later.
        bad: whether records that cannot be read are mixed in.
        drifts: whether the source writes the column `p` under another name.
    """

    def __init__(self, edge: str, source: RecordSource, log: InputLog, records_per_s: float, bad: bool) -> None:
        self.edge, self.log, self.bad = edge, log, bad
        self.capped = True
        self.drifts = False
        self._source, self._rate = source, records_per_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the writing and waits for it. Raises what made it fail."""
        self.abandon()
        self._thread.join(PUSH_TIMEOUT_S + 5)
        if self.failure is not None:
            raise self.failure

    def abandon(self) -> None:
        """Ends the writing without waiting."""
        self._stopping.set()

    def _run(self) -> None:
        try:
            self._write_until_stopped()
        except BaseException as exc:
            self.failure = exc

    def _write_until_stopped(self) -> None:
        due = 0.0
        ticks = 0
        while not self._stopping.is_set():
            due += self._rate * PERIOD_S
            count, due = int(due), due - int(due)
            ticks += 1
            if count:
                records = self._source.draw(count, wall_ms())
                if self.drifts:
                    records = [replace(r, p=None) for r in records]
                self.write(records, with_bad=self.bad and ticks % 7 == 0)
            self.between()
            self._stopping.wait(PERIOD_S)
        self.finish()

    def write(self, records: list[Record], with_bad: bool) -> None:
        raise NotImplementedError

    def note(self, records: list[Record], with_bad: bool, *, certain: bool = True, capped: bool = False) -> None:
        """Logs records that were written together, and the lines that are no records among them."""
        now_ms = wall_ms()
        self.log.add(self.edge, records, now_ms, certain=certain, capped=capped)
        times = [*[None] * len(BAD_LINES), _timed(records)] if with_bad else []
        self.log.rejected += [Rejected(records[0].src, self.edge, now_ms, certain, time) for time in times]

    def between(self) -> None:
        """Called between writes, in the writing thread."""

    def finish(self) -> None:
        """Called after the last write."""


def _lines(records: list[Record], with_bad: bool) -> bytes:
    lines = [r.to_json() for r in records]
    if with_bad:
        lines[len(lines) // 2 : len(lines) // 2] = [*BAD_LINES, json.dumps({"at": _timed(records), "n": 1.5})]
    return ("\n".join(lines) + "\n").encode()


def _timed(records: list[Record]) -> int:
    """The time of the line of a wrong type among these records."""
    return records[len(records) // 2].at


class FileInput(Input):
    """Appends to ``app.log`` in a directory and rotates it when asked."""

    def __init__(
        self, edge: str, source: RecordSource, log: InputLog, records_per_s: float, bad: bool, path: Path
    ) -> None:
        super().__init__(edge, source, log, records_per_s, bad)
        self.path, self._src = path, source.src
        path.parent.mkdir(parents=True)
        self._file = self._create()
        self._rotations = 0
        self._commands: Queue[Callable[[], None]] = Queue()
        self._later: list[tuple[float, Callable[[], None]]] = []

    def _create(self) -> IO[bytes]:
        file = self.path.open("ab", buffering=0)
        file.write((HEAD_LINE + "\n").encode())
        self.log.rejected.append(Rejected(self._src, self.edge, wall_ms(), certain=True))
        return file

    def write(self, records: list[Record], with_bad: bool) -> None:
        self._file.write(_lines(records, with_bad))
        self.note(records, with_bad, capped=self.capped)

    def between(self) -> None:
        while True:
            try:
                self._commands.get_nowait()()
            except Empty:
                break
        due = [action for at, action in self._later if at <= time.monotonic()]
        self._later = [(at, action) for at, action in self._later if at > time.monotonic()]
        for action in due:
            action()

    def finish(self) -> None:
        for _, action in self._later:
            action()
        self._file.close()

    def rotate(self, style: str) -> None:
        """Rotates before the next write; `style` is one of the kinds of file faults."""
        self._commands.put(getattr(self, "_" + style.replace("-", "_")))

    def _aside(self) -> Path:
        self._rotations += 1
        aside = self.path.with_name(f"{self.path.name}.{self._rotations}")
        self.path.rename(aside)
        return aside

    def _rename(self) -> None:
        self._aside()
        self._reopen()

    def _reopen(self) -> None:
        self._file.close()
        self._file = self._create()

    def _goes_on(self) -> None:
        self._aside()
        self.path.touch()
        self._later.append((time.monotonic() + GOES_ON_S, self._reopen))

    def _copytruncate(self) -> None:
        self._rotations += 1
        shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.{self._rotations}"))
        os.truncate(self.path, 0)

    def _delete(self) -> None:
        self.path.unlink()
        self._reopen()

    def _compress(self) -> None:
        aside = self._aside()
        self._reopen()
        self._later.append((time.monotonic() + COMPRESS_AFTER_S, lambda: _gzip(aside)))

    def _same_inode(self) -> None:
        """Call only while no process has the file open: its inode is then free, and mostly taken for the next file."""
        self._file.close()
        self.path.unlink()
        self._file = self._create()


def _gzip(path: Path) -> None:
    with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    path.unlink()


class PushInput(Input):
    """Pushes batches; a batch that is refused, or gets no reply, is pushed again with the same body.

    Args:
        retries: whether a batch without a reply is pushed again: the edge keeps its state and its clock.
    """

    def __init__(
        self, edge: str, source: RecordSource, log: InputLog, records_per_s: float, bad: bool, url: str, arrow: bool,
        retries: bool,
    ) -> None:  # fmt: skip
        super().__init__(edge, source, log, records_per_s, bad)
        self._client = httpx.Client(timeout=PUSH_TIMEOUT_S)
        self._url, self._arrow, self._retries = url, arrow, retries
        self._waiting: list[Record] = []
        self._pushed = 0
        self._unheard: tuple[bytes, str, list[Record]] | None = None

    def write(self, records: list[Record], with_bad: bool) -> None:
        self._waiting += records
        self._push(with_bad)

    def finish(self) -> None:
        deadline = time.monotonic() + PUSH_TIMEOUT_S
        while (self._waiting or self._unheard) and time.monotonic() < deadline:
            self._push(False)
            time.sleep(PERIOD_S)
        if self._unheard is not None:
            self.note(self._unheard[2], _has_bad(self._unheard[0]), certain=False)
        self.log.refused += len(self._waiting)
        self._client.close()

    def _push(self, with_bad: bool) -> None:
        is_again = self._unheard is not None
        content, kind, batch = self._unheard or self._next(with_bad)
        if not batch:
            return
        try:
            reply = self._client.post(self._url, content=content, headers={"Content-Type": kind})
        except httpx.TransportError as exc:
            if is_again or not isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout):
                self._keep(content, kind, batch)
            else:
                self._wait(batch)
            return
        self._unheard = None
        if reply.status_code == 200:
            assert reply.json()["accepted"] == len(batch), reply.text
            assert is_again or not reply.json()["already_counted"], reply.text
            self.log.repeated += reply.json()["already_counted"]
            self.note(batch, _has_bad(content), capped=self.capped and not is_again)
            self._pushed += 1
            if self._retries and self._pushed % REPEAT_EVERY == 0:
                self._repeat(content, kind)
        elif reply.status_code in (500, 502) or is_again:  # the agent stopped in the middle of it
            self._keep(content, kind, batch)
        elif reply.status_code in (429, 503):
            self._wait(batch)
        else:
            self.log.refused += len(batch)

    def _repeat(self, content: bytes, kind: str) -> None:
        """Pushes a batch again that was counted, as a client whose reply came too late."""
        with contextlib.suppress(httpx.TransportError):
            reply = self._client.post(self._url, content=content, headers={"Content-Type": kind})
            assert reply.status_code != 200 or reply.json()["already_counted"], reply.text
            self.log.repeated += reply.status_code == 200

    def _next(self, with_bad: bool) -> tuple[bytes, str, list[Record]]:
        batch, self._waiting = self._waiting, []
        if self._arrow and not with_bad:
            return to_arrow(batch), "application/vnd.apache.arrow.stream", batch
        return _lines(batch, with_bad), "application/x-ndjson", batch

    def _wait(self, batch: list[Record]) -> None:
        """Nothing of the batch was taken."""
        self._waiting = batch + self._waiting

    def _keep(self, content: bytes, kind: str, batch: list[Record]) -> None:
        """The batch may have been taken."""
        if self._retries:
            self._unheard = content, kind, batch
        else:
            self.note(batch, _has_bad(content), certain=False)


class BrokerInput(Input):
    """Publishes one record per message to a topic, and waits until the broker has acknowledged it."""

    def write(self, records: list[Record], with_bad: bool) -> None:
        certain = self._published(_lines(records, with_bad).splitlines())
        self.note(records, with_bad, certain=certain, capped=self.capped)

    def _published(self, bodies: list[bytes]) -> bool:
        """Returns whether the broker has acknowledged all messages."""
        raise NotImplementedError


class KafkaInput(BrokerInput):
    def __init__(
        self, edge: str, source: RecordSource, log: InputLog, records_per_s: float, bad: bool, broker: KafkaBroker,
        topic: str,
    ) -> None:  # fmt: skip
        super().__init__(edge, source, log, records_per_s, bad)
        self._topic = topic
        self._producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 1, "log_level": 0})

    def _published(self, bodies: list[bytes]) -> bool:
        failures: list[object] = []
        for body in bodies:
            self._producer.produce(self._topic, body, on_delivery=lambda error, _: failures.append(error))
        return self._producer.flush(PUBLISH_TIMEOUT_S) == 0 and not any(failures)


class MqttInput(BrokerInput):
    def __init__(
        self, edge: str, source: RecordSource, log: InputLog, records_per_s: float, bad: bool, broker: MqttBroker,
        topic: str,
    ) -> None:  # fmt: skip
        super().__init__(edge, source, log, records_per_s, bad)
        self._topic = topic
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        self._changed, self._acknowledged = threading.Condition(), set[int]()
        self._client.on_publish = self._acknowledge
        self._client.connect("127.0.0.1", broker.port)
        self._client.loop_start()

    def _published(self, bodies: list[bytes]) -> bool:
        # Without a connection the client sends the messages once it has one again.
        sent = {self._client.publish(self._topic, body, qos=1).mid for body in bodies}
        with self._changed:
            is_published = self._changed.wait_for(lambda: sent <= self._acknowledged, PUBLISH_TIMEOUT_S)
            self._acknowledged -= sent
        return is_published

    def _acknowledge(self, _client: object, _userdata: object, mid: int, _reason: object, _properties: object) -> None:
        with self._changed:
            self._acknowledged.add(mid)
            self._changed.notify()

    def finish(self) -> None:
        self._client.loop_stop()


def _has_bad(content: bytes) -> bool:
    return BAD_LINES[1].encode() in content


class StdinInput(Input):
    """Writes to the standard input of an edge, which a restart replaces."""

    def __init__(self, edge: str, source: RecordSource, log: InputLog, records_per_s: float, bad: bool) -> None:
        super().__init__(edge, source, log, records_per_s, bad)
        self.process: subprocess.Popen[bytes] | None = None

    def write(self, records: list[Record], with_bad: bool) -> None:
        process = self.process
        if process is None or process.stdin is None:
            return
        try:
            process.stdin.write(_lines(records, with_bad))
            process.stdin.flush()
        except (OSError, ValueError):
            # The pipe broke within the write: the dead process may have read a part of it.
            self.note(records, with_bad, certain=False)
            return
        self.note(records, with_bad, capped=self.capped)
