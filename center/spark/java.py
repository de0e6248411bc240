"""Finds the Java that Spark needs. This module does not load PySpark, because checks must be fast."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from edgewater.base.errors import InvalidConfig

JAVA_MIN = 17  # format: of Spark's classes
JAVA_ACCEPTED = (
    f"Java {JAVA_MIN} or newer: install it (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME"
)
JAVA_TIMEOUT_S = 30  # limit: the wait for a Java that hangs


def java_version(env: Mapping[str, str]) -> int | None:
    """Returns the major version of the Java that Spark would use, or None if no Java can be run."""
    home = env.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java", path=env.get("PATH", os.defpath))
    if java is None:
        return None
    if (version := _release(Path(java))) is not None:
        return version
    try:
        answer = subprocess.run(
            [java, "-version"], env=dict(env), capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # `openjdk version "17.0.15" 2025-04-15`; before Java 9 it read `java version "1.8.0_402"`.
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(match[1]) if match else None


def _release(java: Path) -> int | None:
    """Returns the version in the file `release` of the installation of `java`, or None.

    Running Java takes 0.1 s, and a start of a center needs the version three times.
    """
    if not os.access(java, os.X_OK):
        return None
    try:
        release = java.resolve().parent.with_name("release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', release, re.MULTILINE)
    return int(match[1]) if match else None


def require_java(env: Mapping[str, str]) -> int:
    """Returns the version of Spark's Java.

    Raises:
        InvalidConfig: Java is missing or too old. The error says what to install.
    """
    version = java_version(env)
    if version is None:
        raise InvalidConfig("JAVA_HOME", env.get("JAVA_HOME"), JAVA_ACCEPTED, "Spark needs Java, and none can be run")
    if version < JAVA_MIN:
        raise InvalidConfig("JAVA_HOME", env.get("JAVA_HOME"), JAVA_ACCEPTED, f"this is Java {version}")
    return version
