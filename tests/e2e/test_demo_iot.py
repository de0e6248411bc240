"""The demo of devices and brokers, short, on the center of all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from sim.demo.iot import SITES, Plan, brokers, compare
from sim.demo.run import Demo


@pytest.mark.e2e
@pytest.mark.nightly  # tests/edge/sources has each broker, and test_disturbances.py a center with its edges
@pytest.mark.parametrize(
    "plan",
    [
        Plan(seconds=2, window_s=1, lateness_s=1, idle_s=1, kills=()),
        pytest.param(Plan(seconds=25, kills=(0.2, 0.6)), marks=pytest.mark.full),
    ],
)
def test_answers_are_what_devices_published_to_kafka_and_mqtt(system: Demo, tmp_path: Path, plan: Plan) -> None:
    try:
        with brokers(plan, tmp_path) as fleet:
            assert compare(system, fleet, Console()) == []
            assert sum(readings for readings, _ in fleet.published.values()) > 100
    finally:
        for site in SITES:
            if site in system.processes:
                system.kill(site)
            system.client.delete(f"/v1/edges/{site}")
        for spec in plan.specs:
            system.client.delete(f"/v1/queries/{spec['name']}")
