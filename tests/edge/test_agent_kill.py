"""The real agent, killed with -9: what it has counted, and what it states about the rest."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.durability import journal
from edge.durability.event_records import PAYLOAD, SOURCE_ENDED
from tests.cells import at_night
from tests.edge.agent_process import AgentProcess, lines

pytestmark = pytest.mark.slow  # each starts processes

Start = Callable[..., AgentProcess]


@pytest.fixture
def agent_of(tmp_path: Path) -> Iterator[Start]:
    made: list[AgentProcess] = []

    def start(*sources: dict[str, Any], **limits: Any) -> AgentProcess:
        agent = AgentProcess(tmp_path, list(sources), **limits)
        made.append(agent)
        agent.start()
        return agent

    yield start
    for agent in made:
        agent.close()


def synced(agent: AgentProcess, kind: int) -> int:
    """Number of journal records of a kind that are on disk."""
    paths = (agent.directory / "state").glob("journal-*.log")
    return sum(r.kind == kind for p in paths for r in journal.scan(p.read_bytes()).records)


@pytest.mark.nightly
def test_records_of_stdin_are_synced_soon_and_each_restart_states_what_may_be_lost(agent_of: Start) -> None:
    agent = agent_of({"stdin": {}})
    for n in range(2):
        agent.write(lines(300 * n, 300))
        agent.until(lambda n=n: synced(agent, PAYLOAD) > n and agent.records() == 300 * (n + 1))  # type: ignore[misc]
        agent.kill()
        agent.start()
        agent.until(lambda n=n: agent.losses() == {"restart": n + 1})  # type: ignore[misc]
    agent.kill()
    count, losses = agent.recovered()
    assert count == 600
    assert {(loss.source, loss.reason, loss.records) for loss in losses} == {("events:stdin", "restart", None)}
    assert all(loss.to_ms is not None for loss in losses), "windows after the restart are complete"


@pytest.mark.nightly
def test_a_restart_after_the_end_of_stdin_has_lost_nothing(agent_of: Start) -> None:
    agent = agent_of({"stdin": {}})
    agent.write(lines(0, 10))
    agent.process.stdin.close()  # type: ignore[union-attr]
    agent.until(lambda: synced(agent, SOURCE_ENDED) == 1)
    agent.kill()
    assert agent.recovered() == (10, [])


@pytest.mark.nightly
def test_a_journal_that_needs_a_file_that_is_gone_is_recovered_without_it(agent_of: Start, tmp_path: Path) -> None:
    gone, kept = tmp_path / "gone.ndjson", tmp_path / "kept.ndjson"
    gone.write_text(lines(0, 500))
    kept.write_text(lines(500, 100))
    agent = agent_of({"file": {"path": str(gone)}}, {"file": {"path": str(kept)}}, {"http": {}})
    agent.until(lambda: agent.records() == 600)
    agent.push(lines(600, 1))
    agent.kill()
    gone.unlink()
    agent.start()
    assert (agent.losses(), agent.records()) == ({"file-gone": 1}, 601), "records keep their numbers"
    agent.push(lines(601, 1))
    agent.kill()
    count, losses = agent.recovered()
    assert count == 102
    (loss,) = losses
    assert (loss.source, loss.reason, loss.records) == (f"events:file:{gone}", "file-gone", 500)
    assert "500 records that the journal refers to cannot be read again" in agent.log


def logged(agent: AgentProcess, name: str, data: str) -> Path:
    path = agent.directory / name
    with path.open("a") as file:
        file.write(data)
    return path


def follow(tmp_path: Path) -> dict[str, Any]:
    return {"file": {"path": str(tmp_path / "app.log"), "format": "ndjson", "follow": True}}


def compressed(path: Path) -> None:
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


@pytest.mark.nightly
@pytest.mark.parametrize("style", [*at_night("renamed"), "compressed", "copied"])
def test_a_file_that_was_rotated_after_it_was_read_is_read_again_by_a_recovery(
    agent_of: Start, tmp_path: Path, style: str
) -> None:
    agent = agent_of(follow(tmp_path), {"http": {}})
    log = logged(agent, "app.log", lines(0, 500))
    agent.until(lambda: agent.records() == 500)
    agent.push(lines(500, 1))  # syncs the positions
    agent.kill()
    held = log.open("rb")  # keeps the inode from being given to the next file
    if style == "copied":
        shutil.copy(log, tmp_path / "app.log.1")
        log.write_text("")
    else:
        log.rename(tmp_path / "app.log.1")
    if style == "compressed":
        compressed(tmp_path / "app.log.1")
    logged(agent, "app.log", lines(600, 100))
    agent.start()
    agent.until(lambda: agent.records() == 601)
    assert agent.losses() == ({"file-truncated": 1} if style == "copied" else {})
    agent.kill()
    held.close()
    assert agent.recovered()[0] in (501, 601), "each once, whether the rest was synced or not"


@pytest.mark.nightly
def test_a_file_that_is_deleted_after_it_was_read_is_not_needed_for_long(agent_of: Start, tmp_path: Path) -> None:
    agent = agent_of(follow(tmp_path))
    log = logged(agent, "app.log", lines(0, 500))
    agent.until(lambda: agent.records() == 500)
    log.unlink()
    agent.until(lambda: any((agent.directory / "state").glob("checkpoint-*.ckpt")))  # the next one is due in an hour
    agent.kill()
    assert agent.recovered()[0] == 500
    agent.start()
    agent.until(lambda: agent.records() == 500)
    # Nobody knows what was appended to it between the last read and its deletion, unless its end was recorded.
    assert agent.losses() in ({}, {"file-gone": 1})


def test_a_file_that_is_deleted_before_its_positions_are_journaled_is_a_stated_loss(
    agent_of: Start, tmp_path: Path
) -> None:
    agent = agent_of(follow(tmp_path), {"http": {}})
    log = logged(agent, "app.log", lines(0, 500))
    agent.until(lambda: agent.records() == 500)
    agent.push(lines(500, 1))
    logged(agent, "app.log", lines(1000, 500))
    agent.until(lambda: agent.records() == 1001)
    agent.kill()
    log.unlink()
    agent.start()
    # The 500 that the journal knows are gone, and so is what came after them.
    agent.until(lambda: agent.losses() == {"file-gone": 2})
    assert agent.records() == 501
    agent.kill()
    count, losses = agent.recovered()
    assert count == 1
    assert {loss.reason for loss in losses} == {"file-gone"}


@pytest.mark.parametrize("key", [*at_night(None), "batch 1"])
def test_a_push_whose_reply_was_lost_counts_once_when_it_is_pushed_again(agent_of: Start, key: str | None) -> None:
    agent = agent_of({"http": {}})
    data = lines(0, 5)
    with agent.push_unheard(data, key):
        agent.until(lambda: synced(agent, PAYLOAD) == 1)
        agent.kill()
    agent.start()
    again = agent.push(data, key)
    assert (again["accepted"], again["already_counted"], agent.records()) == (5, True, 5)
    other = agent.push(data, "on purpose")
    assert (other["already_counted"], agent.records()) == (False, 10)
    agent.kill()
    assert agent.recovered()[0] == 10


def test_a_push_that_comes_again_before_it_is_durable_is_counted_once_and_waits_for_the_disk(agent_of: Start) -> None:
    agent = agent_of({"http": {}})
    data = lines(0, 5)
    with agent.push_unheard(data), agent.push_unheard(data):
        assert agent.push(data)["accepted"] == 5
        agent.until(lambda: (agent.metrics() or {})["edgewater_edge_repeated_pushes_total"] == 2)
    # Without a key, a repetition is a guess. So the journal states both repetitions, beside the records.
    assert (synced(agent, PAYLOAD), agent.records()) == (3, 5)
