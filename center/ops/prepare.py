"""`edgewater center prepare` writes the archive of Spark's classes. With this archive, a center starts in less time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

from pyspark import SparkContext

from center.config import CenterConfig
from center.job.job import Job
from center.spark.java import require_java
from center.spark.spark_session import SessionConfig, class_archive
from edgewater.base.errors import StorageError

STATED_LINES = 3  # limit: length of a message
"""Number of last lines of the job's standard error that an error message has."""
POLL_S = 0.2  # limit: processor time while waiting


def prepare(timeout_s: float) -> Path:
    """Runs a job of its own until it is ready, makes its JVM write the loaded classes, and returns the written file.

    The job runs in a process of its own, because the JVM writes the file when it ends.

    Args:
        timeout_s: the limit for the whole run. It takes 20 s on an idle machine, and minutes on a busy machine.

    Raises:
        InvalidConfig: Java is missing or too old.
        StorageError: the file cannot be written, or the run exceeds the limit. The message has the last lines of the
            job.
    """
    require_java(os.environ)
    archive = class_archive()
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=archive.parent) as directory,
            tempfile.TemporaryFile("w+", errors="replace") as errors,
        ):
            written = Path(directory, archive.name)
            command = [sys.executable, "-P", "-m", __name__, str(written)]
            try:
                done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=errors, timeout=timeout_s, check=False)
            except subprocess.TimeoutExpired:
                reason = f"not ready within {timeout_s:g} s"
                raise StorageError(f"{archive}: {reason} (--timeout): {_last_lines(errors)}") from None
            if done.returncode or not written.exists():
                reason = f"Java wrote no archive of classes, code {done.returncode}"
                raise StorageError(f"{archive}: {reason}: {_last_lines(errors)}")
            written.chmod(0o644)
            written.replace(archive)
    except OSError as exc:
        raise StorageError(f"{archive}: {exc}") from exc
    return archive


def _last_lines(errors: IO[str]) -> str:
    errors.seek(0)
    return " | ".join(line.strip() for line in errors.read().strip().splitlines()[-STATED_LINES:])


def _run_until_ready(archive: Path) -> None:
    config = CenterConfig(data_dir=archive.parent)
    job, stop = Job(config, session=SessionConfig(write_classes=archive)), threading.Event()

    def wait_until_ready() -> None:
        while job.problem() and not stop.wait(POLL_S):
            pass
        stop.set()

    threading.Thread(target=wait_until_ready, daemon=True).start()
    job.run(stop)
    java: Any = SparkContext._gateway.proc
    java.stdin.close()
    java.wait()


if __name__ == "__main__":
    _run_until_ready(Path(sys.argv[1]))
