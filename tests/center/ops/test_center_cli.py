"""`edgewater center …` as an operator types it, and the components as the processes that they are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner, Result

from center.catalog import Catalog, ComponentRegistry, IndexOutcome, UnindexedFrame
from center.results import ResultStore
from center.spark.spark_session import class_archive
from edgewater.__main__ import main
from edgewater.wire import FrameBody, Partial, SliceClose
from sim.demo.ports import free_address
from tests.center.job.conftest import World
from tests.center.job.plans import deadly, install_deadly

WAIT_S = 600.0  # a JVM starts slowly beside twenty other processes
ANY = "127.0.0.1:0"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """One client: a new one reads the certificates of all authorities, which takes more CPU time than the requests."""
    with httpx.Client(timeout=60) as client:
        yield client


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["center", *args], prog_name="edgewater")


def test_every_command_says_what_it_does_and_the_group_shows_the_file() -> None:
    text = invoke("--help").output
    for key in ("data_dir", "gateway", "api", "tokens", "tls", "catalog_url", "log_dir", "spark", "retention"):
        assert f"{key}: " in text
    for command in ("run", "gateway", "job", "api", "check"):
        assert "--config" in invoke(command, "--help").output


def test_the_keys_in_the_help_are_keys_that_are_accepted() -> None:
    import yaml

    from center.config import CenterConfig

    file = invoke("--help").output.partition("every key has a default:\n")[2].partition("\n\n")[0]
    shown = yaml.safe_load("\n".join(line.strip() for line in file.splitlines()))
    CenterConfig.from_mapping(shown)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("api", "--set", "api.listen=0.0.0.0:0"), "api.listen 0.0.0.0:0 can be reached from other machines"),
        (("check", "--set", "api.listen=7480"), "api.listen: '7480' is not accepted"),
        (("api", "--set", "api.prot=1"), "api.prot: '1' is not accepted; unknown key"),
        (("gateway", "--set", "nothing"), "--set: 'nothing' is not accepted; expected key=value"),
        (("api", "--set", "api.token=x"), "the variable EDGEWATER_CENTER__API__TOKEN or a file"),
        (("gateway", "--set", "tokens.jfk=x"), "expected the variable EDGEWATER_CENTER__TOKENS__JFK or a file"),
        (
            ("api", "--set", "api.principals.ann.token=x"),
            "expected the variable EDGEWATER_CENTER__API__PRINCIPALS__ANN__TOKEN",
        ),
        (("job", "--config", "/nowhere.yaml"), "--config: '/nowhere.yaml' is not accepted"),
        (("gateway", "--set", "gateway.listen=0.0.0.0:0"), "tokens: {} is not accepted"),
    ],
)
def test_a_configuration_that_is_wrong_ends_with_code_2_and_names_the_key(args: tuple[str, ...], said: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert said in result.output


def test_check_finds_what_is_there_and_what_is_in_the_way(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        result = invoke(
            "check",
            "--json",
            "--data-dir",
            str(tmp_path),
            "--set",
            f"gateway.listen={busy}",
            "--set",
            f"api.listen={ANY}",
        )
    assert result.exit_code == 1
    found = {c["name"]: c for c in json.loads(result.output)["checks"]}
    assert not found["gateway.listen"]["ok"]
    assert busy in found["gateway.listen"]["message"]
    assert found["api.listen"]["ok"]
    assert found["catalog_url"] == {"name": "catalog_url", "ok": True, "message": "0 queries, 0 edges"}


@pytest.mark.parametrize("store", ["catalog", "results"])
def test_check_names_the_release_that_wrote_a_store_in_another_format(tmp_path: Path, store: str) -> None:
    Catalog(f"sqlite:///{tmp_path}/catalog.db").close()
    ResultStore(f"sqlite:///{tmp_path}/results.db").close()
    with sqlite3.connect(tmp_path / f"{store}.db") as connection:
        connection.execute("UPDATE releases SET format = 99, release = '9.8.7'")
    result = invoke("check", "--json", "--data-dir", str(tmp_path))
    found = {c["name"]: c for c in json.loads(result.output)["checks"]}[f"{store}_url"]
    assert result.exit_code == 1 and not found["ok"]
    assert "9.8.7" in found["message"]


def test_prepare_says_what_to_install_when_java_is_missing_and_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    class_archive().parent.mkdir(parents=True)
    class_archive().touch()
    result = invoke("prepare")
    assert result.exit_code == 2 and "install it" in result.output
    assert class_archive().exists()


@pytest.mark.nightly
def test_prepare_that_fails_says_why_and_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text('#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "17.0.15"\' >&2 && exit 0\nexit 7\n')
    java.chmod(0o700)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    class_archive().parent.mkdir(parents=True)
    class_archive().write_text("written before")
    result = invoke("prepare")
    assert result.exit_code == 1 and "Java wrote no archive of classes, code 1: " in result.output
    assert class_archive().read_text() == "written before"
    assert list(class_archive().parent.iterdir()) == [class_archive()]


@pytest.mark.nightly
def test_prepare_is_ended_at_its_limit_and_states_the_last_lines_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    # It ends with the pipe that the job holds, as Spark's JVM does.
    java.write_text(
        '#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "17.0.15"\' >&2 && exit 0\n'
        "echo 'this JVM hangs' >&2; exec cat\n"
    )
    java.chmod(0o700)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    result = invoke("prepare", "--timeout", "20")
    assert result.exit_code == 1
    assert "this JVM hangs" in result.output and "--timeout" in result.output
    assert list(class_archive().parent.iterdir()) == []


def test_check_says_what_to_install_when_java_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    result = invoke(
        "check", "--data-dir", str(tmp_path), "--set", f"api.listen={ANY}", "--set", f"gateway.listen={ANY}"
    )
    assert re.search(r"NOT +java .*install", result.output)
    assert result.exit_code == 1


@contextmanager
def process(*args: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A command as a process of its own; killed at the end if it still runs."""
    command = [sys.executable, "-m", "edgewater", "center", *args]
    with subprocess.Popen(command, text=True, stdin=subprocess.DEVNULL, **options) as started:
        try:
            yield started
        finally:
            started.kill()


def eventually(look: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    """What `look` finds once it finds something; another process is at work, so it is asked again."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if found := look():
                return found
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("not in time")


@pytest.mark.nightly
@pytest.mark.e2e
def test_the_api_is_a_process_that_beats_answers_and_signs_off(tmp_path: Path, http: httpx.Client) -> None:
    registry = ComponentRegistry(f"sqlite:///{tmp_path}/catalog.db")
    with process("api", "--data-dir", str(tmp_path), "--set", f"api.listen={ANY}") as api:
        (beat,) = eventually(registry.heartbeats)
        assert beat.component == "api"
        url = f"http://{beat.address}"
        assert eventually(lambda: http.get(f"{url}/livez").json() == {"live": True})
        unready = http.get(f"{url}/readyz")
        assert unready.status_code == 503
        assert unready.json()["missing"] == ["gateway: has not started", "job: has not started"]
        api.send_signal(signal.SIGTERM)
        assert api.wait(WAIT_S) == 0
    assert registry.heartbeats() == []


@pytest.mark.nightly
@pytest.mark.e2e
def test_the_gateway_is_a_process_that_beats_and_shows_its_metrics(tmp_path: Path, http: httpx.Client) -> None:
    registry = ComponentRegistry(f"sqlite:///{tmp_path}/catalog.db")
    metrics = free_address()
    flags = ("--data-dir", str(tmp_path), "--set", f"gateway.listen={ANY}", "--set", f"gateway.metrics={metrics}")
    with process("gateway", *flags) as gateway:
        (beat,) = eventually(registry.heartbeats)
        assert (beat.component, beat.problem) == ("gateway", "")
        host, _, port = beat.address.rpartition(":")
        socket.create_connection((host, int(port))).close()
        assert eventually(lambda: http.get(f"http://{metrics}/readyz").status_code == 200)
        assert "edgewater_gateway" in http.get(f"http://{metrics}/metrics").text
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(WAIT_S) == 0
    assert registry.heartbeats() == []


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def readable_by_others(directory: Path) -> list[str]:
    """What a center has written below `directory` and other users of the machine could read."""
    paths = [p for p in directory.rglob("*") if p.name != "center.yaml" and not p.is_symlink()]
    return [str(p) for p in paths if p.exists() and p.stat().st_mode & 0o077]


@pytest.mark.e2e
@pytest.mark.spark
@pytest.mark.nightly
def test_a_whole_center_runs_outlives_the_death_of_each_component_and_stops_as_one(
    tmp_path: Path, http: httpx.Client
) -> None:
    flags = ("--data-dir", str(tmp_path), "--set", f"gateway.listen={ANY}", "--set", f"api.listen={ANY}")
    configured = tmp_path / "center.yaml"
    configured.write_text("spark: {conf: {spark.hadoop.store.secret.key: not-for-others}}\n")
    with process("run", "--json", "--config", str(configured), *flags, stdout=subprocess.PIPE) as center:
        assert center.stdout is not None
        ready = json.loads(center.stdout.readline())
        assert set(ready["pids"]) == {"gateway", "job", "api", "sink"}
        assert http.get(f"{ready['api']}/readyz").json()["ready"]
        assert readable_by_others(tmp_path) == []
        if sys.platform == "linux":  # a forked process has the addresses of its parent
            addresses = {Path(f"/proc/{pid}/auxv").read_bytes() for pid in (center.pid, *ready["pids"].values())}
            assert len(addresses) == 1
        job = psutil.Process(ready["pids"]["job"])
        lines = [" ".join(command) for p in (job, *job.children(recursive=True)) if (command := command_line(p))]
        assert any("java" in line for line in lines) and not any("not-for-others" in line for line in lines)
        refused = invoke("run", *flags)
        assert "another `edgewater center run` uses this directory" in refused.output

        for component in ("gateway", "job", "api"):
            pid_file = tmp_path / "pids" / f"{component}.pid"
            killed = int(pid_file.read_text())
            assert killed == ready["pids"][component]
            os.kill(killed, signal.SIGKILL)
            eventually(lambda f=pid_file, pid=killed: f.exists() and int(f.read_text()) != pid)  # type: ignore[misc]
        eventually(lambda: http.get(f"{ready['api']}/readyz").json()["components"]["gateway"]["instances"] == 1)
        again = eventually(lambda: (r := http.get(f"{ready['api']}/readyz").json())["ready"] and r)
        # Ports that were left to chance stay what they were, or nobody would find the center again.
        assert again["components"]["gateway"]["address"] == ready["gateway"]

        pids = [int(f.read_text()) for f in (tmp_path / "pids").iterdir()]
        center.send_signal(signal.SIGTERM)
        assert center.wait(WAIT_S) == 0
    assert list((tmp_path / "pids").iterdir()) == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.e2e
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.full
def test_a_frame_that_kills_the_driver_is_set_aside_and_the_job_goes_on(
    tmp_path: Path, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--data-dir", str(tmp_path), "--set", f"gateway.listen={ANY}", "--set", f"api.listen={ANY}")
    with contextlib.closing(World(tmp_path)) as world:
        ref, other = world.register("a", "b")
        evil, honest, _ = world.edges
        install_deadly(tmp_path / "plugins")
        path = os.pathsep.join([str(tmp_path / "plugins"), *filter(None, sys.path)])
        log = tmp_path / "center.log"
        with (
            log.open("w") as said,
            process(
                "run", "--json", *flags, stdout=subprocess.PIPE, stderr=said, env=os.environ | {"PYTHONPATH": path}
            ) as center,
        ):
            assert center.stdout is not None
            ready = json.loads(center.stdout.readline())
            world.ship_records(honest, other, 1, ["/a"])
            eventually(world.all_consumed)
            # The driver decodes it where it answers the window, in the batch that has the ends, too; if it were not the
            # first of its query, its kind would be refused.
            held: list[UnindexedFrame] = []
            with monkeypatch.context() as patch:
                patch.setattr(world.catalog.frames, "index", lambda rows: held.extend(rows) or [IndexOutcome.NEW])
                world.ship(evil, ref, FrameBody(0, (Partial(0, deadly("spares workers")),), (SliceClose(0, 1, 0),)))
                world.end(ref)
            world.catalog.frames.index(held)
            seen = set[int]()

            def is_set_aside() -> bool:
                seen.add(http.get(f"{ready['api']}/readyz").status_code)
                return bool(world.catalog.quarantine.frames())

            eventually(is_set_aside, 4 * WAIT_S)
            (frame,) = world.catalog.quarantine.frames()
            assert (frame.entry.edge, "SIGSEGV" in frame.reason) == (evil, True)
            assert 503 in seen, "red while the job was dead"
            # After the first death, of a job that had read the log, two starts without progress are suspicious.
            assert log.read_text().count("job was killed by SIGSEGV; starting it again") == 3
            world.ship_window(other, 0)
            world.end(other)
            eventually(lambda: world.all_consumed() and http.get(f"{ready['api']}/readyz").status_code == 200)
            eventually(lambda: world.answers() == world.truth)
            center.send_signal(signal.SIGTERM)
            assert center.wait(WAIT_S) == 0
