"""The real processes on real flights: whatever dies or is cut on the way, the answers are the truth."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sim.demo import data
from sim.demo.compare import millis
from sim.demo.data import AIRPORTS, TIME
from sim.demo.run import Demo
from tests.e2e.conftest import REPLAY_S
from tests.e2e.link import Link

pytestmark = pytest.mark.e2e

DAY_MS = 86_400_000
DAYS = 45
SPEED = DAYS * 86_400 / REPLAY_S
FIRST_MS = 1_356_998_400_000
TIMEOUT_S = 180.0


@pytest.fixture(scope="module")
def flights() -> pa.Table:
    table = data.load()
    return table.filter(pc.less(table[TIME], FIRST_MS + DAYS * DAY_MS))


class Scenario:
    """Three edges that replay the same days under a stream and query names of their own."""

    def __init__(self, system: Demo, flights: pa.Table, name: str, port: int | None = None) -> None:
        self.system, self.flights, self.name, self.port = system, flights, name, port
        self.edges = {airport: f"{name}-{airport.lower()}" for airport in AIRPORTS}
        self.files = data.write_airports(flights, system.directory / "data" / name)
        self.begin = datetime.fromtimestamp(time.time() + 4, UTC)  # noqa: TID251
        for spec in self.specs():
            system.client.post("/v1/queries", json=spec).raise_for_status()

    def specs(self) -> list[dict[str, Any]]:
        common = {"from": f"flights_{self.name}", "edges": list(self.edges.values())}
        return [
            {
                "name": f"exact_{self.name}",
                "group_by": ["carrier", "dest"],
                "measures": {
                    "flights": "count()",
                    "miles": "sum(distance)",
                    "longest": "max(distance)",
                    "length": "miles / flights",
                    "far": "count() filter (where distance > 1000) / count()",
                },
                "window": {"tumbling": "1d"},
                **common,
            },
            {
                "name": f"sliding_{self.name}",
                "where": "dep_delay > 0",
                "measures": {"late": "count()"},
                "window": {"sliding": "3d", "every": "1d"},
                **common,
            },
        ]

    def start(self, *airports: str) -> None:
        for airport in airports or AIRPORTS:
            edge = self.edges[airport]
            self.system.start_edge(edge, self.files[airport], f"flights_{self.name}", SPEED, self.begin, self.port)

    def kill(self, name: str) -> None:
        """kill -9, at once and without a word."""
        process = self.system.processes.pop(name)
        process.kill()
        process.wait()

    def wait_for_day(self, day: int) -> None:
        """Until the center has answered this day, so that a disturbance falls into the middle."""
        self._wait(lambda: self._last(f"exact_{self.name}") >= FIRST_MS + day * DAY_MS, f"day {day}")

    def _last(self, query: str, phase: str = "") -> int:
        """The start of the last window; 0 while it has no answer, or none of the phase."""
        reply = self.system.client.get(f"/v1/queries/{query}/latest")
        if reply.status_code != 200 or phase not in ("", reply.json()["phase"]):
            return 0
        return millis(reply.json()["window"]["start"])

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come within {TIMEOUT_S:.0f} s"
            time.sleep(0.25)  # each look costs the center as much as a few windows

    def check_goes_on(self, day: int, disturbance: str) -> None:
        """Answers go on past this day, and those that are final are exactly the truth."""
        self.wait_for_day(day)
        truth = self._exact()
        final = [a for a in self.system.answers(f"exact_{self.name}") if a["phase"] == "final"]
        assert final, disturbance
        for answer in final:
            assert _values(answer) == truth[millis(answer["window"]["start"])], disturbance

    def check(self) -> None:
        """All windows are final, and every one is exactly the truth."""
        try:
            for query, truth in (("exact", self._exact()), ("sliding", self._sliding())):
                name = f"{query}_{self.name}"
                self._wait(lambda name=name, truth=truth: self._finished(name, truth), f"the end of {name}")  # type: ignore[misc]
                answers = list(self.system.answers(name))
                assert {millis(a["window"]["start"]): _values(a) for a in answers} == truth
                assert all(a["contract"]["met"] and a["quality"]["completeness"]["ratio"] == 1.0 for a in answers)
            self._check_weeks()
        finally:
            for edge in self.edges.values():
                process = self.system.processes.pop(edge, None)
                if process is not None:
                    process.terminate()
                    process.wait()

    def _check_weeks(self) -> None:
        """The mean length of a week's flights is that of all its flights, and not the mean of the days' means."""
        path = f"/v1/queries/exact_{self.name}/rollup?every=7d&limit=100"
        flights, miles = Counter[Any](), Counter[Any]()
        for day, groups in self._exact().items():
            for group, values in groups.items():
                flights[day // (7 * DAY_MS), group] += int(values["flights"])
                miles[day // (7 * DAY_MS), group] += int(values["miles"])
        weeks = {}
        for answer in self.system.client.get(path).raise_for_status().json()["answers"]:
            for row in answer["data"]:
                group = tuple(row["group"].values())
                weeks[millis(answer["window"]["start"]) // (7 * DAY_MS), group] = row["length"]["estimate"]
        assert weeks == {key: miles[key] / number for key, number in flights.items()}

    def _finished(self, name: str, truth: dict[int, Any]) -> bool:
        return self._last(name, "final") >= max(truth) and all(a["phase"] == "final" for a in self.system.answers(name))

    def _exact(self) -> dict[int, dict[tuple[Any, ...], dict[str, float]]]:
        days = pa.array(self.flights[TIME].to_numpy() // DAY_MS * DAY_MS)
        table, keys = self.flights.append_column("day", days), ["day", "carrier", "dest"]
        result: dict[int, dict[tuple[Any, ...], dict[str, float]]] = {}
        table = table.append_column("far", pc.greater(self.flights["distance"], 1000).cast(pa.int64())).group_by(keys)
        asked = [([], "count_all"), ("distance", "sum"), ("distance", "max"), ("far", "sum")]
        for row in table.aggregate(asked).to_pylist():
            number, miles = row["count_all"], row["distance_sum"]
            values = {"flights": number, "miles": miles, "longest": row["distance_max"]}
            values |= {"length": miles / number, "far": row["far_sum"] / number}
            result.setdefault(row["day"], {})[(row["carrier"], row["dest"])] = values
        return result

    def _sliding(self) -> dict[int, dict[tuple[Any, ...], dict[str, float]]]:
        late = self.flights.filter(pc.greater(self.flights["dep_delay"], 0))[TIME].to_numpy()
        starts = range(FIRST_MS - 2 * DAY_MS, FIRST_MS + (DAYS + 1) * DAY_MS, DAY_MS)
        counts = {s: int(((late >= s) & (late < s + 3 * DAY_MS)).sum()) for s in starts}
        return {s: {(): {"late": n}} for s, n in counts.items() if n}


def _values(answer: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, float]]:
    rows = {}
    for row in answer["data"]:
        values = {name: value for name, value in row.items() if name != "group"}
        assert all(v["lower"] == v["estimate"] == v["upper"] for v in values.values())
        rows[tuple(row.get("group", {}).values())] = {name: v["estimate"] for name, v in values.items()}
    return rows


def kill_part(system: Demo, part: str) -> None:
    """kill -9 of a part of the center, of which the supervisor knows nothing beforehand."""
    pid = int((system.directory / "state" / "center" / "pids" / f"{part}.pid").read_text())
    os.kill(pid, signal.SIGKILL)


def test_an_edge_that_is_killed_twice_and_a_link_that_is_cut_for_ten_seconds_lose_nothing(
    system: Demo, flights: pa.Table
) -> None:
    link = Link(system.gateway_port)
    scenario = Scenario(system, flights, "edges", link.port)
    try:
        scenario.start()
        for day in (6, 14):
            scenario.wait_for_day(day)
            scenario.kill("edges-jfk")
            scenario.start("JFK")
            scenario.check_goes_on(day + 4, f"JFK was killed on day {day}")
        scenario.wait_for_day(22)
        link.cut()
        time.sleep(10)  # the scenario itself: the link is dead for ten seconds
        link.heal()
        scenario.check()
    finally:
        link.close()


@pytest.mark.nightly
def test_parts_of_the_center_that_are_killed_in_turn_lose_and_repeat_nothing(system: Demo, flights: pa.Table) -> None:
    scenario = Scenario(system, flights, "parts")
    scenario.start()
    for part, day in (("gateway", 6), ("api", 16), ("job", 26)):
        scenario.wait_for_day(day)
        kill_part(system, part)
        if part == "api":
            system.wait_until_ready()
        scenario.check_goes_on(day + 4, f"the {part} was killed on day {day}")
    scenario.check()
