"""What another user of the machine can do at the ports of a Spark session: nothing but take time."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")]

NOBODY = 65534
TIMEOUT_S = 60
ATTACK = """
import encodings.idna, itertools, os, socket, sys
from concurrent.futures import ThreadPoolExecutor
os.setgroups([]), os.setgid({nobody}), os.setuid({nobody})

def call(port, object_id):
    try:
        with socket.create_connection(("127.0.0.1", int(port)), timeout=1) as connection:
            connection.sendall(b"c\\n%s\\n__setattr__\\nscall\\nsx\\ne\\n" % object_id.encode())
            return port, connection.recv(2000)
    except OSError as exc:
        return port, exc

with ThreadPoolExecutor(16) as threads:  # the servers that do not answer take a second each
    for answer in threads.map(call, *zip(*itertools.product(sys.argv[1:], ("t", "p0", "p1", "p2", "p3")))):
        print(*answer)
"""
WAIT = """
import encodings.idna, os, socket, sys
os.setgroups([]), os.setgid({nobody}), os.setuid({nobody})
connection = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
print("connected", flush=True)
sys.stdin.read()
"""


def ports_of_this_process_tree() -> list[str]:
    ports: set[str] = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # Spark's Python workers come and go
            connections = process.net_connections("tcp")
            ports.update(str(c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN)
    return sorted(ports)


def as_nobody(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-ISc", program.format(nobody=NOBODY), *arguments]


def test_another_user_cannot_stop_a_job(spark: Any) -> None:
    ports = ports_of_this_process_tree()
    assert len(ports) >= 3  # JVM, accumulators, RPC

    attack = subprocess.run(as_nobody(ATTACK, *ports), capture_output=True, text=True, timeout=TIMEOUT_S, check=True)

    assert set(ports) <= set(attack.stdout.split())
    assert "Traceback" not in attack.stdout
    assert spark.sparkContext.parallelize(range(3), 3).map(lambda n: n + 1).collect() == [1, 2, 3]


def test_a_silent_connection_of_another_user_does_not_keep_the_jvm_from_its_accumulators(spark: Any) -> None:
    host, port = spark.sparkContext._accumulatorServer.server_address
    token = spark.sparkContext._gateway.gateway_parameters.auth_token
    nobody = subprocess.Popen(as_nobody(WAIT, str(port)), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with nobody, socket.create_connection((host, port), timeout=TIMEOUT_S) as jvm:
        assert nobody.stdout is not None
        assert nobody.stdout.readline()

        jvm.sendall(token.encode() + struct.pack("!i", 0))  # no accumulator

        assert jvm.recv(1) == b"\1"
        nobody.communicate()
