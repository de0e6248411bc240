"""What a process of Edgewater takes from its environment, and what its children get."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from edgewater.runtime.environment import settle


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "all_proxy", "grpc_proxy", "mqtt_proxy", "NO_PROXY"])
def test_a_proxy_of_the_environment_is_not_used_and_named_in_the_log(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {name: "http://user:secret@127.0.0.1:9", "PATH": "/bin"}
    settle(environ)
    assert name not in environ and environ["PATH"] == "/bin"
    assert name in caplog.text and "secret" not in caplog.text


CHILD = """
import os, subprocess, sys
from edgewater.runtime.environment import settle
settle(os.environ)
sys.stdout.write(subprocess.run(["locale", "charmap"], capture_output=True, text=True).stdout)
"""


@pytest.mark.parametrize("given", [{"LC_ALL": "POSIX"}, {"LC_ALL": "C"}, {"LANG": "POSIX"}, {}, {"LC_ALL": "C.UTF-8"}])
def test_children_read_names_of_files_as_utf_8_whatever_the_locale_of_the_caller(given: dict[str, str]) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "LANG" and not name.startswith("LC_")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environ | given, capture_output=True, text=True, check=True
    )
    assert done.stdout == "UTF-8\n"
