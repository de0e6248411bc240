"""`make demo-iot`: devices publish to brokers, edges read the brokers, a center answers by site and by device.

Kafka is `tansu`, from a Python package. The devices of the site `west` publish with MQTT if mosquitto is installed.
Each edge is killed once with `kill -9` meanwhile. Then all answers are compared with the published readings. They must
be equal. Answers of MQTT readings may be larger, if they state `at-least-once`. Exit status 0 only if all are so.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from sim.demo.brokers import MOSQUITTO, KafkaBroker, MqttBroker
from sim.demo.compare import millis
from sim.demo.ports import free_address
from sim.demo.run import Demo, DemoFailed

SITES = ("north", "south", "west")
DEVICES = 12
PER_SECOND = 400
"""Readings of a site."""
PERIOD_S = 0.05
PARTITIONS = 2
SETTLE_S = 60.0
COLUMNS = {"site": "string", "device": "string", "watts": "int64"}


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of the demo: durations, and when edges are killed.

    Attributes:
        seconds: how long devices publish.
        window_s, lateness_s: of the queries.
        idle_s: after this time without readings an edge's watermark follows the clock.
        kills: fractions of `seconds` after which all edges are killed, and started again.
        away_s: how long killed edges are away.
    """

    seconds: float = 15.0
    window_s: int = 5
    lateness_s: int = 10
    idle_s: int = 3
    kills: tuple[float, ...] = (0.4,)
    away_s: float = 2.0

    @property
    def specs(self) -> list[dict[str, Any]]:
        """The queries: exact sums by site, and by device."""
        common = {
            "from": "readings",
            "window": {"tumbling": f"{self.window_s}s"},
            "lateness": f"{self.lateness_s}s",
            "edges": list(SITES),
        }
        return [
            {
                **common,
                "name": "power_by_site",
                "group_by": ["site"],
                "measures": {"readings": "count()", "watts": "sum(watts)"},
            },
            {**common, "name": "power_by_device", "group_by": ["site", "device"], "measures": {"watts": "sum(watts)"}},
        ]


Totals = dict[tuple[int, tuple[str, ...]], dict[str, int]]
"""By window start (ms) and group: the value of each measure."""


@dataclass
class Fleet:
    """The devices of all sites.

    Attributes:
        published: the readings that the brokers have acknowledged: window start, site, device -> readings, watts.
    """

    plan: Plan
    kafka: KafkaBroker
    mqtt: MqttBroker | None
    published: dict[tuple[int, str, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    _rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def publish(self, between: Callable[[float], None]) -> None:
        """Publishes for the time of the plan, and until the brokers have acknowledged everything.

        Args:
            between: called in each period with the fraction of the time that has passed.
        """
        send = dict.fromkeys(SITES, self._to_kafka())
        if self.mqtt is not None:
            send["west"] = self._to_mqtt()
        began, sent, seconds = time.monotonic(), 0, self.plan.seconds
        while (passed := time.monotonic() - began) < seconds:
            due = int(passed * PER_SECOND) - sent
            for site in SITES:
                self._readings(site, due, send[site])
            sent += due
            between(passed / seconds)
            time.sleep(PERIOD_S)
        for finish in {id(each): each for each in send.values()}.values():
            finish("", "", None)

    def _readings(self, site: str, count: int, send: Callable[[str, str, bytes | None], None]) -> None:
        window_ms = 1000 * self.plan.window_s
        at_ms = round(time.time() * 1000)  # noqa: TID251
        for device, watts in zip(
            self._rng.integers(DEVICES, size=count), self._rng.integers(2_000, size=count), strict=True
        ):
            name = f"{site}-{device:02}"
            send(site, name, json.dumps({"device": name, "watts": int(watts), "at": at_ms}).encode())
            total = self.published[at_ms // window_ms * window_ms, site, name]
            total[0] += 1
            total[1] += int(watts)

    def _to_kafka(self) -> Callable[[str, str, bytes | None], None]:
        from confluent_kafka import Producer

        failures: list[Any] = []
        producer = Producer({"bootstrap.servers": self.kafka.address, "linger.ms": 20})

        def send(site: str, device: str, body: bytes | None) -> None:
            if body is not None:
                producer.produce(
                    site, body, device, on_delivery=lambda error, _: failures.extend(filter(None, [error]))
                )
                producer.poll(0)
            elif producer.flush(SETTLE_S) or any(failures):
                raise DemoFailed("the Kafka broker has not taken all readings")

        return send

    def _to_mqtt(self) -> Callable[[str, str, bytes | None], None]:
        import paho.mqtt.client as mqtt
        from paho.mqtt.enums import CallbackAPIVersion

        assert self.mqtt is not None
        client = mqtt.Client(CallbackAPIVersion.VERSION2, "devices", protocol=mqtt.MQTTv5)
        client.connect("127.0.0.1", self.mqtt.port)
        client.loop_start()
        open_messages: list[Any] = []

        def send(site: str, device: str, body: bytes | None) -> None:
            if body is not None:
                open_messages.append(client.publish(f"{site}/{device}/power", body, qos=1))
                return
            for message in open_messages:
                message.wait_for_publish(SETTLE_S)
            client.loop_stop()

        return send

    def totals(self, groups: Callable[[str, str], tuple[str, ...]]) -> Totals:
        """Returns the published readings, by window and group."""
        result: Totals = defaultdict(lambda: {"readings": 0, "watts": 0})
        for (start, site, device), (readings, watts) in self.published.items():
            total = result[start, groups(site, device)]
            total["readings"] += readings
            total["watts"] += watts
        return result


def edge_config(run: Demo, site: str, fleet: Fleet) -> dict[str, Any]:
    """Returns the configuration of a site's edge."""
    source: dict[str, Any] = {"kafka": {"brokers": [fleet.kafka.address], "topic": site}}
    if site == "west" and fleet.mqtt is not None:
        source = {"mqtt": {"broker": fleet.mqtt.address, "topics": [f"{site}/+/power"], "client_id": f"edge-{site}"}}
    return {
        "edge": site,
        "center": {"address": f"127.0.0.1:{run.gateway_port}"},
        "state_dir": str(run.directory / "state" / site),
        "http": {"listen": free_address()},
        "streams": {
            "readings": {
                "columns": COLUMNS,
                "constants": {"site": site},
                "time": {"column": "at"},
                "disorder": "1s",
                "idle": f"{fleet.plan.idle_s}s",
                "sources": [source],
            }
        },
    }


def problems(
    spec: dict[str, Any], answers: list[dict[str, Any]], truth: Totals, at_least_once: str | None
) -> Iterator[str]:
    """Yields each difference between the answers to a query and the published readings.

    Args:
        at_least_once: the site whose readings may count twice; None: there is none.
    """
    name, found = spec["name"], {millis(answer["window"]["start"]): answer for answer in answers}
    for start in sorted({start for start, _ in truth}):
        answer = found.get(start)
        if answer is None or answer["phase"] != "final" or not answer["contract"]["met"]:
            yield f"{name}, window {start}: {'no answer' if answer is None else answer['quality']}"
            continue
        stated = answer["quality"]["completeness"].get("delivery", {})
        if stated != ({at_least_once: ["at-least-once"]} if at_least_once else {}):
            yield f"{name}, window {start}: the delivery is stated as {stated}"
        rows = {tuple(row["group"].values()): row for row in answer["data"]}
        for group in {group for each, group in truth if each == start} | set(rows):
            for measure in spec["measures"]:
                published = truth[start, group][measure]
                estimate = rows[group][measure]["estimate"] if group in rows else 0
                if estimate != published and not (group[0] == at_least_once and estimate > published):
                    yield f"{name}, window {start}, {group}: {measure} is {estimate}, and {published} were published"


def _kill_and_restart(
    run: Demo, plan: Plan, configs: dict[str, dict[str, Any]], console: Console
) -> Callable[[float], None]:
    """Returns a function for `Fleet.publish` that kills all edges, and starts them again."""
    kills, killed_s = list(plan.kills), math.inf

    def between(passed: float) -> None:
        nonlocal killed_s
        run.check_alive()
        if kills and passed >= kills[0]:
            kills.pop(0)
            console.print(f"kill -9 of the edges {', '.join(configs)}")
            for site in configs:
                run.kill(site)
            killed_s = time.monotonic()
        elif time.monotonic() >= killed_s + plan.away_s:
            killed_s = math.inf
            for config in configs.values():
                run.run_edge(config)

    return between


def _final_answers(run: Demo, spec: dict[str, Any], last_ms: int) -> list[dict[str, Any]]:
    """Returns the answers once the window at `last_ms` is final, or after `SETTLE_S`."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        run.check_alive()
        answers = list(run.answers(spec["name"]))
        finals = [millis(a["window"]["start"]) for a in answers if a["phase"] == "final"]
        if last_ms in finals or time.monotonic() > deadline:
            return answers
        time.sleep(0.5)


def _shown(answers: list[dict[str, Any]], truth: Totals, seconds: float) -> Table:
    result = Table(title=f"Answers compared with what the devices published, after {seconds:.0f} s", title_style="bold")
    for column in ("window", "site", "published", "counted", "watts", "complete", "delivery"):
        result.add_column(
            column, justify="right" if column in ("published", "counted", "watts", "complete") else "left"
        )
    for answer in answers:
        start, completeness = millis(answer["window"]["start"]), answer["quality"]["completeness"]
        for row in answer["data"]:
            site = row["group"]["site"]
            delivery = completeness.get("delivery", {}).get(site, ["exactly-once"])
            result.add_row(
                answer["window"]["start"][11:19],
                site,
                str(truth[start, (site,)]["readings"]),
                f"{row['readings']['estimate']:.0f}",
                f"{row['watts']['estimate']:.0f}",
                f"{completeness['reported']} of {completeness['expected']}",
                ", ".join(delivery),
            )
    return result


def compare(run: Demo, fleet: Fleet, console: Console) -> list[str]:
    """Runs the edges on a center and brokers that run, publishes, and compares. Returns the differences."""
    plan, began = fleet.plan, time.monotonic()
    for spec in plan.specs:
        run.client.post("/v1/queries", json=spec).raise_for_status()
    configs = {site: edge_config(run, site, fleet) for site in SITES}
    for config in configs.values():
        run.run_edge(config)
    for site, config in configs.items():
        run.wait_for_edge(site, config)
    if fleet.mqtt is not None:
        fleet.mqtt.wait_for_session("edge-west")
    where = f"look at it: [bold]{run.url}/ui/[/]"
    console.print(f"{len(SITES) * DEVICES} devices publish for {plan.seconds:g} s; {where}")
    fleet.publish(_kill_and_restart(run, plan, configs, console))
    by_site, by_device = fleet.totals(lambda site, _: (site,)), fleet.totals(lambda site, device: (site, device))
    last_ms = max(start for start, _ in by_site)
    at_least_once = "west" if fleet.mqtt is not None else None
    answers = {spec["name"]: _final_answers(run, spec, last_ms) for spec in plan.specs}
    found = [
        problem
        for spec, truth in zip(plan.specs, (by_site, by_device), strict=True)
        for problem in problems(spec, answers[spec["name"]], truth, at_least_once)
    ]
    console.print(_shown(answers["power_by_site"], by_site, time.monotonic() - began))
    readings = sum(total["readings"] for total in by_site.values())
    console.print(f"{readings} readings, {len(found)} differences")
    for problem in found[:20]:
        console.print(f"[red]{problem}[/]")
    return found


@contextmanager
def brokers(plan: Plan, directory: Path) -> Iterator[Fleet]:
    """Runs the brokers, and yields their devices."""
    fleet = Fleet(plan, KafkaBroker(directory / "kafka"), MqttBroker(directory / "mqtt") if MOSQUITTO else None)
    try:
        fleet.kafka.start()
        fleet.kafka.create(*SITES, partitions=PARTITIONS)
        if fleet.mqtt is not None:
            fleet.mqtt.start()
        yield fleet
    finally:
        for broker in (fleet.kafka, fleet.mqtt):
            if broker is not None:
                broker.kill()


@click.command()
@click.option("--seconds", type=click.FloatRange(5), default=15.0, show_default=True, help="How long devices publish.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=Path(".edgewater/demo-iot"),
    show_default=True,
    help="Directory for state, configurations and logs; removes the state of an earlier run.",
)
@click.option("--port", default=7480, show_default=True, help="Port of the REST API on loopback; 0: a free port.")
def main(seconds: float, directory: Path, port: int) -> None:
    """Run brokers, a center and three edges on readings of devices, and compare each answer with the truth."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = Demo(directory.absolute(), seconds, port)
    console.print(f"starting the brokers and the center (Spark needs a few seconds); logs: {directory}")
    if MOSQUITTO is None:
        console.print("mosquitto is not installed: the devices of west publish to Kafka, too")
    try:
        run.start_center()
        with brokers(Plan(seconds), run.directory / "state") as fleet:
            found = compare(run, fleet, console)
    except DemoFailed as exc:
        raise click.ClickException(str(exc)) from exc
    finally:
        run.stop()
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
