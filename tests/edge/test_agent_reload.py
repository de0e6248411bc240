"""Reloads of an agent's configuration: real processes, which clients push to and which follow files."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from edge.agent.reload import PREVIOUS, ConfigFile
from edgewater.base.errors import InvalidConfig
from edgewater.runtime.health import bound_address
from edgewater.runtime.listeners import VARIABLE, Listeners
from tests.edge.agent_process import AgentProcess, lines
from tests.refusals import refused

pytestmark = pytest.mark.slow

RELOADS = int(os.environ.get("EDGEWATER_RELOADS", "3"))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    source = {"file": {"path": str(tmp_path / "app.log"), "format": "ndjson", "follow": True}}
    agent = AgentProcess(tmp_path, [source, {"http": {}}])
    yield agent
    agent.close()


def edit(agent: AgentProcess, **changes: Any) -> None:
    path = agent.directory / "edge.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))


@pytest.mark.nightly
def test_reloads_during_pushes_and_file_reading_lose_double_and_refuse_no_record(
    agent: AgentProcess, tmp_path: Path
) -> None:
    agent.start()
    pid, log = agent.pid, tmp_path / "app.log"
    ended, pushed, written, faults = threading.Event(), [0], [0], list[str]()

    def push() -> None:
        with httpx.Client(base_url=f"http://{agent.address}", timeout=60) as client:
            while not ended.is_set():
                data = lines(1_000_000 + pushed[0], 7)
                try:
                    reply = client.post(
                        "/v1/streams/events", content=data, headers={"Content-Type": "application/x-ndjson"}
                    )
                except httpx.TransportError as exc:
                    faults.append(repr(exc))
                    return
                if reply.status_code != 200 or reply.json()["already_counted"]:
                    faults.append(reply.text)
                    return
                pushed[0] += 7

    def write() -> None:
        with log.open("a") as file:
            while not ended.is_set():
                file.write(lines(written[0], 5))
                file.flush()
                written[0] += 5
                time.sleep(0.01)

    threads = [threading.Thread(target=push), threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    try:
        for number in range(RELOADS):
            edit(agent, labels={"reload": str(number)})
            before = pushed[0]
            os.kill(pid, signal.SIGHUP)
            agent.until(lambda n=number: reloads(agent) == n + 1 and runs_anew(agent))  # type: ignore[misc]
            agent.until(lambda n=before: pushed[0] > n or bool(faults))  # type: ignore[misc]
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert faults == [] and agent.pid == pid
    agent.settle(pushed[0] + written[0])
    assert agent.recovered() == (pushed[0] + written[0], [])


BEGINS_ANEW = "begins anew with the new configuration"


def reloads(agent: AgentProcess) -> int:
    return agent.log.count(BEGINS_ANEW)


def runs_anew(agent: AgentProcess) -> bool:
    """Whether the program of the last reload has its handlers: it has tried to reach the center, which is not there."""
    return "no session with the center" in agent.log.rpartition(BEGINS_ANEW)[2]


def test_a_file_that_cannot_be_used_changes_nothing_and_is_stated(agent: AgentProcess, tmp_path: Path) -> None:
    agent.start()
    path = tmp_path / "edge.yaml"
    good = path.read_text()
    for bad in ("streams: [", good.replace("edge: a", "edge: b"), good + "\nunknown: 1\n", ""):
        path.write_text(bad)
        os.kill(agent.pid, signal.SIGHUP)
        agent.until(lambda: (agent.metrics() or {})["edgewater_edge_configuration_failed"] == 1)
        assert agent.push(lines(0, 1))["accepted"] == 1
        path.write_text(good)
        os.kill(agent.pid, signal.SIGHUP)
        agent.until(lambda: (agent.metrics() or {}).get("edgewater_edge_configuration_failed") == 0)


@pytest.mark.nightly
def test_a_fault_that_shows_only_in_the_new_program_brings_the_previous_configuration_back(tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path, [{"http": {}}])
    try:
        agent.start()
        agent.push(lines(0, 5))
        document = yaml.safe_load((tmp_path / "edge.yaml").read_text())
        document["http"]["listen"] = "192.0.2.1:80"  # of no interface of this machine
        (tmp_path / "edge.yaml").write_text(yaml.safe_dump(document))
        os.kill(agent.pid, signal.SIGHUP)
        agent.until(lambda: (agent.metrics() or {}).get("edgewater_edge_configuration_failed") == 1)
        assert agent.records() == 5 and agent.push(lines(5, 1))["accepted"] == 1
    finally:
        agent.close()


def test_a_watched_file_is_reloaded_when_it_changes_and_once_only(agent: AgentProcess, tmp_path: Path) -> None:
    agent.start("--watch")
    edit(agent, labels={"site": "north"})
    agent.until(lambda: reloads(agent) == 1)
    agent.until(lambda: agent.metrics() is not None)
    (tmp_path / "edge.yaml").write_text("edge: [")
    agent.until(lambda: (agent.metrics() or {}).get("edgewater_edge_configuration_failed") == 1)
    assert agent.push(lines(0, 1))["accepted"] == 1 and reloads(agent) == 1


def test_an_agent_that_reads_standard_input_is_not_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "edge.yaml"
    stream = {
        "columns": {"x": "int64"},
        "time": {"column": "at", "unit": "ms"},
        "sources": [{"stdin": {"format": "ndjson"}}],
    }
    document = {"edge": "a", "center": {"address": "127.0.0.1:1"}, "state_dir": str(tmp_path), "streams": {"s": stream}}
    path.write_text(yaml.safe_dump(document))
    file = ConfigFile(path, {})
    file.load()
    assert not file.may_reload() and "stdin" in file.failure
    with pytest.raises(InvalidConfig):
        file.load_previous(InvalidConfig("edge", "a", "b"))


def test_a_file_that_changes_between_the_check_and_the_start_is_checked_again(tmp_path: Path) -> None:
    path = tmp_path / "edge.yaml"
    stream = {"columns": {"x": "int64"}, "time": {"column": "at", "unit": "ms"}, "sources": [{"http": {}}]}
    document = {"edge": "a", "center": {"address": "127.0.0.1:1"}, "state_dir": str(tmp_path), "streams": {"s": stream}}
    path.write_text(yaml.safe_dump({**document, "edge": "b"}))
    descriptor = os.memfd_create("previous")
    os.write(descriptor, yaml.safe_dump(document).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    file = ConfigFile(path, {PREVIOUS: str(descriptor)})
    with pytest.raises(InvalidConfig) as refused:
        file.load()
    assert (refused.value.field, file.load_previous(refused.value).edge) == ("edge", "a") and file.failure


def test_listeners_keep_their_sockets_for_the_next_program() -> None:
    environ: dict[str, str] = {}
    first = Listeners(environ)
    one, other = first.listen([("127.0.0.1:0", "a"), ("localhost:0", "b")])
    address = bound_address(one)
    one.close()
    other.close()
    first.hand_over()
    descriptors = json.loads(environ[VARIABLE])
    assert all(os.get_inheritable(fd) for fd in descriptors.values())
    copies = {name: os.dup(fd) for name, fd in descriptors.items()}  # the other program's
    first.close()
    second = Listeners({VARIABLE: json.dumps(copies)})
    (again,) = second.listen([("127.0.0.1:0", "a")])
    assert bound_address(again) == address
    with pytest.raises(OSError):
        os.fstat(next(fd for name, fd in copies.items() if "localhost" in name))
    again.close()
    second.close()


def test_an_address_that_is_not_available_closes_no_socket_and_two_keys_do_not_share_one() -> None:
    listeners = Listeners({})
    (one,) = listeners.listen([("127.0.0.1:0", "a")])
    taken = bound_address(one)
    for addresses in ([(taken, "b")], [("127.0.0.1:0", "a"), (taken, "b")]):
        with refused(InvalidConfig, "b", taken):
            listeners.listen(addresses)
    (again,) = listeners.listen([("127.0.0.1:0", "a")])
    assert bound_address(again) == taken
    again.close()
    listeners.close()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = bound_address(probe)
    one.close()
    with refused(InvalidConfig, "http.metrics", free):
        listeners.listen([(free, "http.listen"), (free, "http.metrics")])
    listeners.close()
