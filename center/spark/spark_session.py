"""The Spark session of the center: embedded by default, on a cluster if the master says so.

Spark only computes; it holds no state: no state store, no tables, no catalog. So the settings aim at short
micro-batches and a small footprint or, for `center.batch` over millions of rows, at throughput.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import secrets
import shlex
import shutil
import socketserver
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyspark
import pyspark.accumulators
from py4j.java_gateway import JavaObject, java_import
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

from center.spark.fork_server import SINGLE_THREADED
from center.spark.java import require_java

WORKER_TIMEOUT_S = 60
"""How long a Python worker may take for its part of a micro-batch, and to connect: a second is usual, and Spark's 15 s
for connecting are not enough on a starved machine."""
CLUSTER_CORES = 8
"""Tasks of a large micro-batch, on a cluster whose settings do not say how many cores it has."""
SECRET_SETTING = re.compile(r"(?i)secret|password|token|access[.]?key")
"""Names of Spark properties whose values are secret: Spark's own rule (`spark.redaction.regex`)."""
_INTERPRETER = """#!/bin/sh
export PYTHONPATH="${{PYTHONPATH#*/pyspark.zip:}}"
exec {python} -IS {client} {socket} {python} "$@"
"""
_FORK_CLIENT = Path(__file__).with_name("fork_client.py")
_INTERPRETERS = {"PYSPARK_PYTHON": "spark.pyspark.python", "PYSPARK_DRIVER_PYTHON": "spark.pyspark.driver.python"}
KEPT_JOBS = 20
_HISTORIES = (
    "spark.ui.retainedJobs",
    "spark.ui.retainedStages",
    "spark.ui.retainedTasks",
    "spark.sql.ui.retainedExecutions",
)
MAX_SOCKET_DIRECTORY = 60
"""Bytes of the path of the directory of Spark's sockets: the names in it have 43, and a socket's path at most 107."""
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"
"""Java would otherwise print a line for each class that an archive lacks."""
_ESCAPED = "\\u%04x"
"""A UTF-16 code unit in a file of Java properties."""


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How Spark runs.

    Attributes:
        master: ``local[2]`` runs inside the center's process tree; ``spark://…`` and ``k8s://…`` on a
            cluster, with the driver here.
        driver_memory: heap of the driver's JVM, as Spark writes sizes.
        scratch_dir: directory for spilling; nothing in it outlives a run. None: the system's.
        work: "micro_batches", for the job; or "bulk", for `center.batch` over millions of rows, which is several
            times faster once it is warm and starts more slowly.
        conf: Spark properties that override the ones below.
        write_classes: file to which a local JVM writes the classes that it has loaded when it ends; it then does not
            read `class_archive`.
    """

    master: str = "local[2]"
    app_name: str = "edgewater"
    driver_memory: str = "1g"
    scratch_dir: Path | None = None
    work: Literal["micro_batches", "bulk"] = "micro_batches"
    conf: Mapping[str, str] = field(default_factory=dict)
    write_classes: Path | None = None

    @property
    def is_local(self) -> bool:
        return self.master.startswith("local")

    @property
    def cores(self) -> int:
        """The cores that tasks may use: those of a local master, or those that the settings request of a cluster;
        `CLUSTER_CORES` where they do not say."""
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
        """A setting that is a number; 0 where it is none, or not set. Spark refuses those that are wrong."""
        text = self.conf.get(name, "")
        return int(text) if text.isdecimal() else 0


def class_archive() -> Path:
    """The file of Spark's loaded classes (Java's application class data sharing) beside this installation.

    Java ignores a file of another Java or of other jars. `edgewater center prepare` writes it.
    """
    return Path(sys.prefix, "share", "edgewater", f"spark-{pyspark.__version__}.jsa")


def spark_settings(config: SessionConfig) -> dict[str, str]:
    """Returns the Spark properties of a session."""
    settings = _common_settings(config)
    if config.is_local:
        settings |= _local_settings(config)
    if config.work == "micro_batches":
        _set_for_small_batches(settings, config)
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
        # A micro-batch has a few small stages: re-planning from statistics costs more than a better plan saves.
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "50000" if config.work == "bulk" else "10000",
        "spark.sql.session.timeZone": "UTC",
        # The polling interval while idle; half of it is added to every answer's age. Spark's default of 10 ms would
        # query the catalog a hundred times a second.
        "spark.sql.streaming.pollingDelay": "20ms",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.minBatchesToRetain": "2",
        "spark.sql.streaming.numRecentProgressUpdates": "10",
        # The checkpoint decides nothing (`center.job.job`), so it needs no checksums. Without Hadoop's native library
        # each local file, and each checksum file, costs a fork of `chmod`: with this setting, and checksums off below,
        # a batch writes its two files in 25 ms instead of 110.
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        ),
        "spark.hadoop.fs.permissions.umask-mode": "077",  # Hadoop does not heed the process's own
        # Capturing the call site of each DataFrame operation is a round trip to the JVM.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
    }


def _local_settings(config: SessionConfig) -> dict[str, str]:
    settings = {
        # Spark makes up the secret. Other users of the machine could otherwise use the driver's ports.
        "spark.authenticate": "true",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
    }
    if config.write_classes is not None:
        settings["spark.driver.extraJavaOptions"] += f" {_QUIET} -XX:ArchiveClassesAtExit={config.write_classes}"
    elif class_archive().exists():
        # With most classes loaded and verified, the JVM's start costs 4.3 s of CPU instead of 8.1.
        settings["spark.driver.extraJavaOptions"] += f" {_QUIET} -XX:SharedArchiveFile={class_archive()}"
    return settings


def _set_for_small_batches(settings: dict[str, str], config: SessionConfig) -> None:
    # Small batches never repay the optimising compiler: without it the first batch costs 10 s of CPU instead of
    # 17, and the first hundred 22 instead of 41. Bulk work over millions of rows is five times faster with it.
    for name in ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"):
        settings[name] = f"{settings.get(name, '')} -XX:TieredStopAtLevel=1".lstrip()
    # A worker that hangs on the bytes of a frame ends its batch as one that dies does.
    settings["spark.python.worker.idleTimeoutSeconds"] = str(WORKER_TIMEOUT_S)
    settings["spark.python.worker.killOnIdleTimeout"] = "true"
    settings["spark.python.authenticate.socketTimeout"] = f"{WORKER_TIMEOUT_S}s"
    if config.is_local and sys.platform == "linux":
        settings["spark.python.daemon.module"] = "center.spark.daemon"
    # What Spark keeps of past jobs, also without its UI, is a tenth of the live heap by default.
    settings |= dict.fromkeys(_HISTORIES, str(KEPT_JOBS))
    # Between two full collections the old generation grows, and its memory stays with the process.
    settings["spark.cleaner.periodicGC.interval"] = "10min"


@contextlib.contextmanager
def off_the_command_line(settings: Mapping[str, str]) -> Iterator[None]:
    """Passes settings to the JVM that starts meanwhile in a file that only this user can read.

    PySpark passes all others as arguments of a process, which every user of the machine can see.
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
    """Returns a directory that only this user can read, until this process ends."""
    directory = tempfile.mkdtemp(prefix="edgewater-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def socket_settings(directory: Path) -> dict[str, str]:
    """Returns the Spark properties by which a local JVM reaches its Python workers over sockets in this directory.

    Over TCP each task waits 40 ms: Spark writes its input in small pieces without TCP_NODELAY, so a piece waits for the
    delayed acknowledgement of the one before. Sockets in a directory have no secret: the directory must be private.
    """
    if len(os.fsencode(directory)) > MAX_SOCKET_DIRECTORY:
        return {}
    return {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.unix.domain.socket.dir": str(directory),
    }


@functools.cache
def local_interpreter() -> str:
    """Returns a command that runs this interpreter with the installed PySpark, by fork if there is a server.

    Spark puts a zipped copy first on the path of its Python processes, and each of them compiles it anew: 0.4 s of CPU
    in each of the six that a start of the job waits for.
    """
    installed = Path(pyspark.__file__).parent
    if Path(os.environ.get("SPARK_HOME", installed)) != installed:
        return sys.executable  # it may have another PySpark
    command = _private_directory() / "python"
    words = {"python": sys.executable, "client": str(_FORK_CLIENT), "socket": str(_fork_socket())}
    command.write_text(_INTERPRETER.format(**{name: shlex.quote(word) for name, word in words.items()}))
    command.chmod(0o700)
    return str(command) if os.access(command, os.X_OK) else sys.executable  # directories may be mounted noexec


def _fork_socket() -> Path:
    return _private_directory() / "fork"


@functools.cache
def _start_fork_server(modules: tuple[str, ...]) -> None:
    """Starts `center.spark.fork_server`, which ends with this process; without it each process loads the modules."""
    if sys.platform != "linux" or len(os.fsencode(_fork_socket().parent)) > MAX_SOCKET_DIRECTORY:
        return
    # Spark gives its workers this seed, so that the same text has the same hash in all of them.
    environment = {"PYTHONHASHSEED": "0"} | os.environ | SINGLE_THREADED
    command = [sys.executable, "-u", "-m", "center.spark.fork_server", str(_fork_socket()), *modules]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    atexit.register(server.communicate)


class AccumulatorServer(socketserver.ThreadingMixIn, pyspark.accumulators.AccumulatorTCPServer):  # type: ignore[misc]
    """Receives the accumulators of Python tasks from the JVM, with one thread per connection.

    PySpark's own server has one thread. A silent connection, from any user of the machine, blocks this thread, and then
    no Python task ends.
    """

    daemon_threads = True


def secure_callbacks(gateway: Any) -> None:
    """Starts the server by which the JVM calls Python functions, such as the function of `foreachBatch`.

    PySpark starts this server without a token, so every user of the machine could send commands to it. Here the server
    requires a token. Called once per gateway, before the first stream starts.
    """
    parameters = gateway.callback_server_parameters
    if parameters.auth_token is not None:
        return
    parameters.auth_token = secrets.token_hex()
    ensure_callback_server_started(gateway)
    jvm, java_server = gateway.jvm, JavaObject("GATEWAY_SERVER", gateway._gateway_client)
    java_gateway = java_server.getGateway()
    client = jvm.py4j.PythonClient(
        java_gateway,
        java_server.getCustomCommands(),
        gateway.get_callback_server().get_listening_port(),
        java_server.getCallbackClient().getAddress(),
        jvm.py4j.CallbackClient.DEFAULT_MIN_CONNECTION_TIME,
        jvm.py4j.CallbackClient.DEFAULT_MIN_CONNECTION_TIME_UNIT,
        jvm.javax.net.SocketFactory.getDefault(),
        java_server,
        True,
        java_server.getReadTimeout(),
        parameters.auth_token,
    )
    # Py4J's own method that sets the port, `resetCallbackClient`, makes a client without a token.
    field = java_gateway.getClass().getDeclaredField("cbClient")
    field.setAccessible(True)
    field.set(java_gateway, client)


def start_session(config: SessionConfig, modules: tuple[str, ...] = ()) -> SparkSession:
    """Starts the JVM and returns its session. Takes seconds; call `session.stop()` when done.

    The JVM ends with this process, however it ends: it reads a pipe that only this process holds open.

    Args:
        modules: what the Python processes of a local session load. It is loaded once, while the JVM starts.

    Raises:
        InvalidConfig: Java is missing or too old.
    """
    # Otherwise Spark's Python processes would import a directory `center` of the working directory in place of the
    # installed package.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if config.is_local and modules:
        _start_fork_server(modules)
    require_java(os.environ)
    # Executors must run this interpreter, where nobody says otherwise: another has other packages. These settings have
    # an effect only here: `spark-submit` reads them, and not a session that Python starts.
    interpreter = local_interpreter() if config.is_local else sys.executable
    for name, setting in _INTERPRETERS.items():
        os.environ.setdefault(name, config.conf.get(setting, interpreter))
    if config.is_local:
        # Set before the JVM starts: otherwise it resolves the host's name, which may fail.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(config.master).appName(config.app_name)
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
    secure_callbacks(spark.sparkContext._gateway)
    # PySpark imports whole packages: at each use of a name, the JVM looks for such a class in all of those before its
    # own, through all jars.
    for name in ("PythonUtils", "SimplePythonFunction"):
        java_import(spark._jvm, f"org.apache.spark.api.python.{name}")
    hadoop = spark._jsc.hadoopConfiguration()
    spark._jvm.org.apache.hadoop.fs.FileSystem.getLocal(hadoop).setWriteChecksum(False)
    return spark
