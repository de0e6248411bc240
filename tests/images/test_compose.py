"""deploy/compose.yaml runs: a center and two edges, hardened, with answers that are equal to the truth."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from sim.demo.ports import free_port
from tests.images.engine import COMPOSE, Engine
from tests.images.service import WINDOW_S, Truth, answered, ready, until

pytestmark = pytest.mark.images
PROJECT = "edgewatertest"
TOKENS = {name: secrets.token_hex(32) for name in ("EDGE_TOKEN", "EDGE2_TOKEN", "PUSH_TOKEN", "API_TOKEN")}


@dataclass(frozen=True)
class Compose:
    """The services of deploy/compose.yaml, as podman-compose runs them."""

    engine: Engine
    file: Path
    ports: dict[tuple[str, int], int]

    def __call__(self, *arguments: str, timeout_s: float = 180) -> None:
        self.engine.run(
            str(COMPOSE), "-f", str(self.file), "-p", PROJECT, *arguments, timeout_s=timeout_s, check=True, **TOKENS
        )

    def url(self, service: str, port: int) -> str:
        return f"http://127.0.0.1:{self.ports[service, port]}"

    def container(self, service: str) -> str:
        return f"{PROJECT}_{service}_1"

    def logs(self) -> str:
        parts = [
            self.engine.podman("logs", "--tail=40", self.container(s), check=False) for s in ("center", "edge", "edge2")
        ]
        return "\n".join(parts)


@pytest.fixture(scope="module")
def compose(
    engine: Engine, edge_image: str, center_image: str, tmp_path_factory: pytest.TempPathFactory, root: Path
) -> Iterator[Compose]:
    """The file as it is, with free ports of this machine, absolute paths, and a second edge like the first."""
    folder = tmp_path_factory.mktemp("compose")
    given: dict[str, Any] = yaml.safe_load((root / "deploy/compose.yaml").read_text())
    edge = yaml.safe_load((root / "deploy/compose-edge.yaml").read_text())
    (folder / "edge2.yaml").write_text(yaml.safe_dump({**edge, "edge": "edge2"}))
    folder.chmod(0o755)
    services = given["services"]
    services["edge2"] = {**services["edge"]}
    services["edge2"]["volumes"] = [
        f"{folder}/edge2.yaml:/etc/edgewater/edge.yaml:ro,z",
        "edge2-state:/var/lib/edgewater",
    ]
    given["volumes"]["edge2-state"] = None
    services["edge2"]["environment"] = {**services["edge"]["environment"], "EDGE_TOKEN": "${EDGE2_TOKEN}"}
    services["center"]["environment"]["EDGEWATER_CENTER__TOKENS__EDGE2"] = "${EDGE2_TOKEN}"
    ports = {}
    for name, service in services.items():
        service.pop("build")
        inside = [int(p.rpartition(":")[2]) for p in service["ports"]]
        ports |= {(name, port): free_port() for port in inside}
        service["ports"] = [f"127.0.0.1:{ports[name, port]}:{port}" for port in inside]
        service["volumes"] = [
            v.replace("./", f"{root}/deploy/", 1) if v.startswith("./") else v for v in service["volumes"]
        ]
    (folder / "compose.yaml").write_text(yaml.safe_dump(given, sort_keys=False))
    compose = Compose(engine, folder / "compose.yaml", ports)
    try:
        yield compose
    finally:
        compose("down", "--volumes")


@pytest.fixture(scope="module")
def api(compose: Compose) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {TOKENS['API_TOKEN']}"}
    with httpx.Client(base_url=compose.url("center", 7480), headers=headers, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def push() -> Iterator[httpx.Client]:
    with httpx.Client(headers={"Authorization": f"Bearer {TOKENS['PUSH_TOKEN']}"}, timeout=30) as client:
        yield client


def query_of_the_readme(root: Path) -> str:
    found = re.search(r"<<'YAML'\n(.*?)^YAML$", (root / "deploy/README.md").read_text(), re.S | re.M)
    assert found is not None
    return found[1] + "edges: [edge1, edge2]\n"


def timed(what: str, wait: Callable[[], Any]) -> None:
    began = time.monotonic()
    wait()
    print(f"{what}: {time.monotonic() - began:.1f} s")


def test_answers_of_two_edges_equal_the_truth_through_a_kill_of_each_container(
    compose: Compose, api: httpx.Client, push: httpx.Client, root: Path
) -> None:
    compose("up", "-d", "center")
    try:
        timed("center ready", lambda: until("center", lambda: ready("/readyz", api), 180))
    except AssertionError:
        print(compose.logs())
        raise
    query = {"content": query_of_the_readme(root), "headers": {"Content-Type": "application/yaml"}}
    api.post("/v1/queries", **query).raise_for_status()  # type: ignore[arg-type]
    compose("up", "-d", "edge", "edge2")
    edges = [compose.url(edge, 7410) for edge in ("edge", "edge2")]
    timed("edges ready", lambda: [until(url, lambda url=url: ready(f"{url}/readyz", push), 60) for url in edges])

    truth = Truth()
    now = int(time.time())  # noqa: TID251
    start = now - now % WINDOW_S - 6 * WINDOW_S
    for url in edges:
        truth.push(push, url, start, 600)
    for service in ("edge", "center"):
        compose.engine.podman("kill", "--signal=KILL", compose.container(service))
        compose.engine.podman("start", compose.container(service))
    timed("center ready after a kill", lambda: until("center", lambda: ready("/readyz", api), 180))
    [until(url, lambda url=url: ready(f"{url}/livez", push), 60) for url in edges]
    for url in edges:  # of this moment: an idle source's watermark follows the clock
        truth.push(push, url, int(time.time()), 400, seconds=1)  # noqa: TID251

    def equal() -> bool:
        return answered(api, "requests_by_route", edges=2) == truth

    try:
        timed("all answers", lambda: until("answers", equal, 120))
    except AssertionError:
        print(api.get("/v1/queries/requests_by_route/windows").text[:3000], compose.logs())
        raise
    assert sum(truth.requests.values()) == 2 * (600 + 400)


@pytest.mark.parametrize("service", ["center", "edge", "edge2"])
def test_every_container_is_confined_as_the_file_says(compose: Compose, service: str) -> None:
    container = compose.container(service)
    host = compose.engine.inspect("container", container)["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["Memory"] == {"center": 3 << 30}.get(service, 512 << 20)
    assert host["PidsLimit"] == {"center": 1024}.get(service, 128)
    program = (
        "import os\n"
        "said = dict(line.split(':', 1) for line in open('/proc/1/status') if ':' in line)\n"
        "print(said['CapEff'].split(), said['CapBnd'].split(), said['NoNewPrivs'].split(), os.getuid())\n"
        "try: open('/opt/venv/x', 'w')\n"
        "except OSError as exc: print(exc.strerror)\n"
    )
    said = compose.engine.podman("exec", container, "python", "-c", program)
    zero = "['0000000000000000']"
    assert said.splitlines() == [f"{zero} {zero} ['1'] 10001", "Read-only file system"]


@pytest.mark.parametrize("service", ["center", "edge"])
def test_the_health_check_of_the_file_succeeds(compose: Compose, service: str) -> None:
    compose.engine.podman("healthcheck", "run", compose.container(service))


@pytest.mark.parametrize("service", ["edge", "center"])
def test_a_container_ends_within_its_grace_period_when_it_is_stopped(compose: Compose, service: str) -> None:
    container = compose.container(service)
    timed(f"{service} stops", lambda: compose.engine.podman("stop", "--time=40", container, timeout_s=60))
    assert compose.engine.inspect("container", container)["State"]["ExitCode"] in (0, 143)
