"""The Spark session of the center. Spark is embedded by default. It runs on a cluster if the master is a cluster.

Spark only computes. It has no state store, no tables and no catalog. So the settings are for small jobs and little
memory. For `center.batch` over millions of rows, the settings are for throughput.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import re
import shlex
import shutil
import socketserver
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyspark
import pyspark.accumulators
from py4j.java_gateway import java_import
from pyspark.sql import SparkSession

from center.spark.java import require_java
from center.spark.workers import SINGLE_THREADED
from edgewater.runtime.allocator import without_pandas

WORKER_TIMEOUT_S = 60  # limit: the wait for a worker's connection
"""Usually a second. Spark's 15 s are not enough on an overloaded machine."""
SILENT_TIMEOUT_S = 600  # limit: the wait for a task that sleeps
"""A merge of low priority sends nothing until it ends, and waits for the CPU while others want it."""
CLUSTER_CORES = 8
"""Tasks of a large plan, on a cluster whose settings do not give the number of cores."""
SECRET_SETTING = re.compile(r"(?i)secret|password|token|access[.]?key")
"""Matches names of Spark properties whose values are secret. It is Spark's own rule (`spark.redaction.regex`)."""
_INTERPRETER = """#!/bin/sh
export PYTHONPATH="${{PYTHONPATH#*/pyspark.zip:}}"
exec {python} "$@"
"""
_INTERPRETERS = {"PYSPARK_PYTHON": "spark.pyspark.python", "PYSPARK_DRIVER_PYTHON": "spark.pyspark.driver.python"}
KEPT_JOBS = 20  # limit: memory of Spark's list of jobs
_HISTORIES = (
    "spark.ui.retainedJobs",
    "spark.ui.retainedStages",
    "spark.ui.retainedTasks",
    "spark.sql.ui.retainedExecutions",
)
MAX_SOCKET_DIRECTORY = 60
"""The most bytes of the path of the directory of Spark's sockets. The names of sockets have 43 bytes, and a socket's
path has at most 107 bytes."""
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"
"""Turns off the line that Java would print for each class that an archive lacks."""
_ESCAPED = "\\u%04x"
"""The form of a UTF-16 code unit in a file of Java properties."""


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """The configuration of a Spark session.

    Attributes:
        master: ``local[2]`` runs Spark inside the center's process tree. ``spark://…`` and ``k8s://…`` run it on a
            cluster; the driver runs here.
        driver_memory: heap of the driver's JVM, in Spark's notation of sizes.
        scratch_dir: directory for spilling. No file in it is needed after a run. None for the system's directory.
        work: "plans" for the job, or "bulk" for `center.batch` over millions of rows. "bulk" starts more
            slowly, and is several times faster once it is warm.
        conf: Spark properties that override the properties in this module.
        write_classes: file to which a local JVM writes its loaded classes when it ends. The JVM then does not read
            `class_archive`.
    """

    master: str = "local[2]"
    driver_memory: str = "1g"
    scratch_dir: Path | None = None
    work: Literal["plans", "bulk"] = "plans"
    conf: Mapping[str, str] = field(default_factory=dict)
    write_classes: Path | None = None

    @property
    def is_local(self) -> bool:
        return self.master.startswith("local")

    @property
    def cores(self) -> int:
        """The number of cores that tasks may use.

        With a local master, the number in the master. On a cluster, the number that the settings request;
        `CLUSTER_CORES` if the settings do not request a number.
        """
        match = re.fullmatch(r"local\[(\d+)(,\d+)?\]", self.master)
        if match:
            return int(match[1])
        if self.master.startswith("local[*"):
            return os.cpu_count() or 1
        if self.is_local:
            return 1
        if most := self._count("spark.cores.max"):
            return most
        return self._count("spark.executor.instances") * (self._count("spark.executor.cores") or 1) or CLUSTER_CORES

    def _count(self, name: str) -> int:
        """Returns a setting that is a number; 0 if it is not set or is not a number. Spark refuses settings that are
        wrong.
        """
        text = self.conf.get(name, "")
        return int(text) if text.isdecimal() else 0


def class_archive() -> Path:
    """Returns the file of Spark's loaded classes (Java's application class data sharing) beside this installation.

    Java ignores the file if it was written by another Java or for other jars. `edgewater center prepare` writes the
    file.
    """
    return Path(sys.prefix, "share", "edgewater", f"spark-{pyspark.__version__}.jsa")


def spark_settings(config: SessionConfig) -> dict[str, str]:
    """Returns the Spark properties of a session."""
    settings = _common_settings(config)
    if config.is_local:
        settings |= _local_settings(config)
    if config.work == "plans":
        _set_for_plans(settings, config)
    if config.scratch_dir is not None:
        settings["spark.local.dir"] = str(config.scratch_dir)
    return settings | dict(config.conf)


def _common_settings(config: SessionConfig) -> dict[str, str]:
    return {
        "spark.driver.memory": config.driver_memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
        "spark.python.worker.reuse": "true",
        "spark.sql.shuffle.partitions": str(config.cores),
        # A plan has a few small stages, for which re-planning from statistics costs more time than it saves.
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
        "spark.sql.session.timeZone": "UTC",
        "spark.hadoop.fs.permissions.umask-mode": "077",  # Hadoop ignores the umask of the process
        # Capturing the call site of each DataFrame operation is a round trip to the JVM.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
    }


def _local_settings(config: SessionConfig) -> dict[str, str]:
    settings = {
        # Spark generates the secret. Without a secret, other users of the machine could use the driver's ports.
        "spark.authenticate": "true",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # Performance data would wake the JVM 20 times a second.
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:-UsePerfData",
    }
    if config.write_classes is not None:
        settings["spark.driver.extraJavaOptions"] += f" {_QUIET} -XX:ArchiveClassesAtExit={config.write_classes}"
    elif class_archive().exists():
        # With most classes loaded and verified, the JVM's start costs 4.3 s of CPU instead of 8.1.
        settings["spark.driver.extraJavaOptions"] += f" {_QUIET} -XX:SharedArchiveFile={class_archive()}"
    return settings


def _set_for_plans(settings: dict[str, str], config: SessionConfig) -> None:
    # For small batches, the optimising compiler costs more time than it saves. Without it, the first batch costs 10 s
    # of CPU instead of 17 s, and the first hundred batches cost 22 s instead of 41 s. Bulk work over millions of rows
    # is five times faster with this compiler.
    for name in ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"):
        settings[name] = f"{settings.get(name, '')} -XX:TieredStopAtLevel=1".lstrip()
    # An environment variable could switch sessions to Spark Connect, which has no RDDs.
    settings["spark.api.mode"] = "classic"
    # The driver finds the frame that a task has failed for (`center.job.loop_core`).
    settings["spark.task.maxFailures"] = "1"
    settings["spark.speculation"] = "false"
    settings["spark.scheduler.mode"] = "FAIR"  # a light plan does not wait for the tasks of a heavy one
    # If a worker hangs because of the bytes of a frame, its plan fails in the same way as if the worker had died.
    settings["spark.python.worker.idleTimeoutSeconds"] = str(SILENT_TIMEOUT_S)
    settings["spark.python.worker.killOnIdleTimeout"] = "true"
    settings["spark.python.authenticate.socketTimeout"] = f"{WORKER_TIMEOUT_S}s"
    if config.is_local and sys.platform == "linux":
        settings["spark.python.daemon.module"] = "center.spark.daemon"
    # By default, Spark stores data of past jobs even without its UI, which is a tenth of the live heap.
    settings |= dict.fromkeys(_HISTORIES, str(KEPT_JOBS))
    # Between two full collections the old generation grows, and its memory stays with the process.
    settings["spark.cleaner.periodicGC.interval"] = "10min"


@contextlib.contextmanager
def off_the_command_line(settings: Mapping[str, str]) -> Iterator[None]:
    """Passes settings to the JVM that starts during the `with` block, in a file that only this user can read.

    PySpark passes other settings as arguments of a process, which every user of the machine can see.
    """
    if not settings:
        yield
        return
    with tempfile.NamedTemporaryFile("w", suffix=".properties") as file:
        for name, value in settings.items():
            units = struct.iter_unpack(">H", value.encode("utf-16-be"))
            file.write(f"{name}={''.join(_ESCAPED % unit for (unit,) in units)}\n")
        file.flush()
        arguments = os.environ.get("PYSPARK_SUBMIT_ARGS")
        os.environ["PYSPARK_SUBMIT_ARGS"] = (
            f"--properties-file {shlex.quote(file.name)} --load-spark-defaults {arguments or 'pyspark-shell'}"
        )
        try:
            yield
        finally:
            if arguments is None:
                del os.environ["PYSPARK_SUBMIT_ARGS"]
            else:
                os.environ["PYSPARK_SUBMIT_ARGS"] = arguments


@functools.cache
def _private_directory() -> Path:
    """Returns a directory that only this user can read. It is removed when this process ends."""
    directory = tempfile.mkdtemp(prefix="edgewater-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def socket_settings(directory: Path) -> dict[str, str]:
    """Returns the Spark properties with which a local JVM and its Python workers communicate over sockets in this
    directory.

    Over TCP, each task waits for 40 ms: Spark writes its input in small pieces without TCP_NODELAY, so each piece waits
    for the delayed acknowledgement of the previous piece. Sockets in a directory have no secret, so the directory must
    be private.
    """
    if len(os.fsencode(directory)) > MAX_SOCKET_DIRECTORY:
        return {}
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": str(directory)}


@functools.cache
def local_interpreter() -> str:
    """Returns a command that runs this interpreter with the installed PySpark.

    By default, Spark puts a zipped copy of PySpark first on the path of its Python processes. Each process then
    compiles this copy again, which takes 0.4 s of CPU.
    """
    installed = Path(pyspark.__file__).parent
    if Path(os.environ.get("SPARK_HOME", installed)) != installed:
        return sys.executable  # SPARK_HOME may have another PySpark
    command = _private_directory() / "python"
    command.write_text(_INTERPRETER.format(python=shlex.quote(sys.executable)))
    command.chmod(0o700)
    return str(command) if os.access(command, os.X_OK) else sys.executable  # directories may be mounted noexec


class AccumulatorServer(socketserver.ThreadingMixIn, pyspark.accumulators.AccumulatorTCPServer):  # type: ignore[misc]
    """Receives the accumulators of Python tasks from the JVM, with one thread per connection.

    PySpark's own server has only one thread. Any user of the machine could block this thread with a silent connection.
    Then no Python task would end.
    """

    daemon_threads = True


def start_session(config: SessionConfig) -> SparkSession:
    """Starts the JVM and returns its session. This takes seconds. Call `session.stop()` at the end.

    The JVM ends with this process, however this process ends, because the JVM reads a pipe that only this process holds
    open.

    Raises:
        InvalidConfig: Java is missing or too old.
    """
    # Otherwise Spark's Python processes would import a directory `center` of the working directory in place of the
    # installed package.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    os.environ.setdefault("LOG4J_CONFIGURATION_FILE", str(Path(__file__).with_name("log4j2.properties")))
    require_java(os.environ)
    # If nothing else is configured, executors must run this interpreter, because another one has other packages. These
    # settings are read here because only `spark-submit` reads them, and not a session that Python starts.
    interpreter = local_interpreter() if config.is_local else sys.executable
    for name, setting in _INTERPRETERS.items():
        os.environ.setdefault(name, config.conf.get(setting, interpreter))
    if config.work == "plans":
        os.environ |= SINGLE_THREADED | dict(os.environ)  # for the JVM's Python processes
        with without_pandas():  # PySpark asks this module whether there is NumPy, and it imports pandas
            importlib.import_module("pyspark.testing.utils")
    if config.is_local:
        # This is set before the JVM starts. Otherwise the JVM resolves the host's name, which may fail.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(config.master).appName("edgewater")
    secrets: dict[str, str] = {}
    sockets = socket_settings(_private_directory()) if config.is_local and config.work == "bulk" else {}
    for name, value in (sockets | spark_settings(config)).items():
        if SECRET_SETTING.search(name):
            secrets[name] = value
        else:
            builder = builder.config(name, value)
    pyspark.accumulators.AccumulatorTCPServer = AccumulatorServer
    with off_the_command_line(secrets):
        spark = builder.getOrCreate()
    # PySpark imports whole packages. So at each use of a name, the JVM looks through all jars for a class of this name
    # in all imported packages. Importing the two classes by name avoids this.
    for name in ("PythonUtils", "SimplePythonFunction"):
        java_import(spark._jvm, f"org.apache.spark.api.python.{name}")
    return spark
