from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal, cast

import pytest

from center.spark.daemon import Acknowledged
from center.spark.java import java_version, require_java
from center.spark.spark_session import (
    MAX_SOCKET_DIRECTORY,
    SessionConfig,
    class_archive,
    local_interpreter,
    off_the_command_line,
    socket_settings,
    spark_settings,
)
from center.spark.workers import SINGLE_THREADED
from edgewater.base.errors import InvalidConfig

WORK: tuple[Literal["plans", "bulk"], ...] = ("plans", "bulk")


def java_home(path: Path, answer: str, code: int = 0) -> dict[str, str]:
    java = path / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho '{answer}' >&2\nexit {code}\n")
    java.chmod(0o755)
    return {"JAVA_HOME": str(path), "PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ("Picked up JAVA_TOOL_OPTIONS: -Xmx1g", None),
    ],
)
def test_the_version_is_read_as_java_says_it(tmp_path: Path, answer: str, version: int | None) -> None:
    assert java_version(java_home(tmp_path / "jdk", answer)) == version


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ('IMPLEMENTOR="Debian"\nJAVA_RUNTIME_VERSION="17.0.15+6"\nJAVA_VERSION="17.0.15"\n', 17),
        ('JAVA_VERSION="1.8.0_402"\n', 8),
        ('JAVA_VERSION="25"\n', 25),
        ('IMPLEMENTOR="Debian"\n', 21),
    ],
)
def test_the_file_beside_java_tells_the_version_and_without_it_java_is_asked(
    tmp_path: Path, release: str, version: int
) -> None:
    java_home(tmp_path / "jdk", 'openjdk version "21.0.1"')
    (tmp_path / "jdk" / "release").write_text(release)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "java").symlink_to(tmp_path / "jdk" / "bin" / "java")

    assert java_version({"PATH": str(tmp_path / "link")}) == version


def test_a_file_beside_a_java_that_is_missing_tells_nothing(tmp_path: Path) -> None:
    environment = java_home(tmp_path / "jdk", "")
    (tmp_path / "jdk" / "bin" / "java").unlink()
    (tmp_path / "jdk" / "release").write_text('JAVA_VERSION="17.0.15"\n')

    assert java_version(environment) is None


@pytest.mark.parametrize("home", ["nowhere", "broken"])
def test_a_missing_or_broken_java_is_told_in_one_line_that_says_what_to_install(tmp_path: Path, home: str) -> None:
    java_home(tmp_path / "broken", "Error: could not find libjava.so", code=2)

    with pytest.raises(InvalidConfig, match="openjdk-17-jre-headless") as caught:
        require_java({"JAVA_HOME": str(tmp_path / home), "PATH": "/usr/bin:/bin"})

    assert "\n" not in str(caught.value)


def test_no_java_at_all_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="none can be run"):
        require_java({"PATH": str(tmp_path)})


def test_an_old_java_is_refused_with_its_version(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="this is Java 11"):
        require_java(java_home(tmp_path / "jdk", 'openjdk version "11.0.2"'))


@pytest.mark.parametrize(
    ("master", "cores", "local"),
    [("local[3]", 3, True), ("local[2,4]", 2, True), ("local", 1, True), ("spark://host:7077", 8, False)],
)
def test_the_shuffle_is_as_wide_as_the_master(master: str, cores: int, local: bool) -> None:
    settings = spark_settings(SessionConfig(master=master))

    assert settings["spark.sql.shuffle.partitions"] == str(cores)
    assert ("spark.driver.bindAddress" in settings) == local
    assert (settings.get("spark.python.daemon.module") == "center.spark.daemon") == local


@pytest.mark.parametrize(
    ("settings", "cores"),
    [
        ({}, 8),
        ({"spark.cores.max": "6"}, 6),
        ({"spark.executor.instances": "3"}, 3),
        ({"spark.executor.instances": "3", "spark.executor.cores": "4"}, 12),
        ({"spark.executor.cores": "4"}, 8),
        ({"spark.cores.max": "many"}, 8),
    ],
)
def test_a_cluster_has_the_cores_that_its_settings_request(settings: dict[str, str], cores: int) -> None:
    assert SessionConfig("spark://host:7077", conf=settings).cores == cores


def test_bulk_work_is_compiled_well() -> None:
    bulk, micro = (spark_settings(SessionConfig(work=work)) for work in ("bulk", "plans"))

    assert "TieredStopAtLevel" in micro["spark.driver.extraJavaOptions"]
    assert "TieredStopAtLevel" not in bulk["spark.driver.extraJavaOptions"]
    assert "spark.executor.extraJavaOptions" not in bulk


def test_secret_settings_reach_java_in_a_file_of_this_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--verbose pyspark-shell")
    with off_the_command_line({"spark.hadoop.fs.secret": "a=b\\ \n€𝄞"}):
        option, name, *others = os.environ["PYSPARK_SUBMIT_ARGS"].split()
        written = Path(name).read_text(encoding="ascii")
        assert (option, others) == ("--properties-file", ["--load-spark-defaults", "--verbose", "pyspark-shell"])
        assert Path(name).stat().st_mode & 0o077 == 0
    key, _, value = written.strip().partition("=")
    assert key == "spark.hadoop.fs.secret"
    assert json.loads(f'"{value}"') == "a=b\\ \n€𝄞"
    assert os.environ["PYSPARK_SUBMIT_ARGS"] == "--verbose pyspark-shell"
    assert not Path(name).exists()


def test_workers_are_reached_over_sockets_if_a_path_of_theirs_fits() -> None:
    directory = Path("/" + "d" * (MAX_SOCKET_DIRECTORY - 1))

    assert socket_settings(directory)["spark.python.unix.domain.socket.dir"] == str(directory)
    assert socket_settings(Path(f"{directory}d")) == {}


def test_what_a_worker_reads_is_acknowledged_before_it_waits_for_more() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as jvm,
        listener.accept()[0] as connection,
        cast(io.BufferedReader, connection.makefile("rb")) as received,
    ):
        file = io.BufferedReader(Acknowledged(received, connection))
        for piece in (b"a task", b"and its records"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            jvm.sendall(piece)
            assert file.read(len(piece)) == piece
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1
        jvm.shutdown(socket.SHUT_WR)
        assert file.read() == b""


def test_a_users_settings_win() -> None:
    config = SessionConfig(conf={"spark.ui.enabled": "true"})

    assert spark_settings(config)["spark.ui.enabled"] == "true"


def test_local_sessions_use_the_archive_of_classes_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for work in WORK:
        assert "SharedArchiveFile" not in spark_settings(SessionConfig(work=work))["spark.driver.extraJavaOptions"]
    class_archive().parent.mkdir(parents=True)
    class_archive().touch()
    for work in WORK:
        assert f"={class_archive()}" in spark_settings(SessionConfig(work=work))["spark.driver.extraJavaOptions"]
    on_a_cluster = spark_settings(SessionConfig("spark://host:7077"))
    for process in ("driver", "executor"):
        assert on_a_cluster[f"spark.{process}.extraJavaOptions"] == "-XX:TieredStopAtLevel=1"


@pytest.mark.parametrize("path", ["/spark/python/lib/pyspark.zip:/spark/python/lib/py4j-src.zip:/mine", "/mine", ""])
def test_python_processes_of_spark_are_this_interpreter_without_the_zipped_pyspark(path: str) -> None:
    code = "import os, sys; print(sys.prefix, os.environ['PYTHONPATH'])"
    said = subprocess.run(
        [local_interpreter(), "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip("\n") == f"{sys.prefix} {path.partition('pyspark.zip:')[2] or path}"


UNREAD = """
import sys
from pathlib import Path
from center.spark.spark_session import SessionConfig, start_session
spark = start_session(SessionConfig(master="local[1]", scratch_dir=Path("."), driver_memory="512m"))
log = spark._jvm.org.slf4j.LoggerFactory.getLogger("spark")
for i in range(3_000): log.warn("x" * 100)
print("went on, pandas:", "pandas" in sys.modules, flush=True)
spark.stop()
"""


def started_daemon(*arguments: str, **environment: str) -> list[str]:
    """The modules that the daemon of workers has loaded before it forks, and that an array in Arrow loads."""
    code = (
        "import sys, pyspark.daemon\n"
        "def manager():\n"
        "    import pyarrow\n"
        "    pyarrow.array([1])\n"
        "    print(*sys.modules)\n"
        "pyspark.daemon.manager = manager\n"
        f"{'; '.join(arguments)}\n"
        "import runpy; runpy.run_module('center.spark.daemon', run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return said.stdout.split()


def test_the_daemon_of_workers_has_the_modules_of_a_task_before_it_forks() -> None:
    loaded = set(started_daemon(**SINGLE_THREADED))
    assert {"pyspark.worker", "center.job.merge", "pyarrow"} <= loaded and "pandas" not in loaded


@pytest.mark.nightly
def test_a_daemon_with_a_thread_begins_again_and_loads_nothing() -> None:
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    loaded = started_daemon(
        f"import os\nif os.environ.get('EDGEWATER_DAEMON_LOADS') != '0': {thread}", **SINGLE_THREADED
    )
    assert "center.spark.daemon" in loaded or "pyspark.daemon" in loaded
    assert "center.job.merge" not in loaded


@pytest.mark.spark
def test_the_jvm_goes_on_and_ends_while_nobody_reads_its_log(tmp_path: Path) -> None:
    """The pipe is full long before the last line."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", UNREAD], cwd=tmp_path, stdout=pipe, stderr=pipe) as process:
        timer = threading.Timer(120, process.kill)
        timer.start()
        assert process.stdout is not None and process.stdout.readline() == b"went on, pandas: False\n"
        assert process.wait() == 0
        timer.cancel()
