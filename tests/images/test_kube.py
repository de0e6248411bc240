"""The overlay `dev` runs as pods: PostgreSQL, gateway, job, API, sink and an edge, as kustomize renders them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.conftest import render
from tests.images import bases
from tests.images.engine import Engine
from tests.images.pods import NETWORK, Pods
from tests.images.service import WINDOW_S, Truth, answered, ready, until

pytestmark = pytest.mark.images
NET = "edgewatertest"
SECRET = {"Authorization": "Bearer for-development-only"}
PORTS = {"edgewater-gateway": 7401, "edgewater-job": 7402, "edgewater-api": 7480, "edgewater-edge": 7411}
ORDER = ["edgewater-postgres", "edgewater-gateway", "edgewater-job", "edgewater-api", "edgewater-edge"]
QUERY = {
    "name": "by_route",
    "from": "requests",
    "group_by": ["service", "route"],
    "measures": {"requests": "count()", "bytes": "sum(bytes)"},
    "window": {"tumbling": f"{WINDOW_S}s"},
    "edges": ["dev"],
}


@pytest.fixture(scope="module")
def pods(
    engine: Engine, edge_image: str, center_image: str, base: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pods]:
    dev = render("overlays/dev")
    (postgres,) = dev.find("StatefulSet", "edgewater-postgres")["spec"]["template"]["spec"]["containers"]
    bases.postgres(engine, postgres["image"], base)
    folder = tmp_path_factory.mktemp("pods")
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    pods = Pods(dev, folder)
    engine.podman("network", "create", f"--subnet={NETWORK}.0/24", NET)
    try:
        yield pods
    finally:
        engine.podman("pod", "rm", "--all", "--force", "--time=5", timeout_s=180)
        engine.podman("network", "rm", "--force", NET)


def play(engine: Engine, pods: Pods, name: str) -> None:
    file = pods.folder / f"{name}.yaml"
    file.write_text(pods.document(name))
    engine.podman("kube", "play", f"--network={NET}", f"--ip={pods.address(name)}", str(file), timeout_s=180)


def logs(engine: Engine) -> str:
    names = engine.podman("ps", "--all", "--format={{.Names}}").split()
    return "\n".join(f"== {n}\n" + engine.run("podman", "logs", "--tail=30", n, check=False).stderr for n in names)


def test_the_development_overlay_answers_with_the_truth(engine: Engine, pods: Pods) -> None:
    client = httpx.Client(headers=SECRET, timeout=30)
    url = {name: f"http://{pods.address(name)}:{port}" for name, port in PORTS.items()}
    try:
        for name in ORDER:
            began = time.monotonic()
            if name == "edgewater-edge":
                client.post(f"{url['edgewater-api']}/v1/queries", json=QUERY).raise_for_status()
            play(engine, pods, name)
            if name in PORTS:
                path = "livez" if name == "edgewater-api" else "readyz"
                until(name, lambda: ready(f"{url[name]}/{path}", client), 180)  # noqa: B023
            else:
                probe = ["podman", "exec", f"{name}-postgres", "pg_isready", "--host=127.0.0.1", "--username=edgewater"]
                until(name, lambda: engine.run(*probe, check=False).returncode == 0, 60)  # noqa: B023
            print(f"{name} ready: {time.monotonic() - began:.1f} s")
        truth = Truth()
        now = int(time.time())  # noqa: TID251
        push = f"http://{pods.address('edgewater-edge')}:7410"
        truth.push(client, push, now - now % WINDOW_S - 3 * WINDOW_S, 600)
        api = httpx.Client(base_url=url["edgewater-api"], headers=SECRET, timeout=30)
        until("answers", lambda: answered(api, "by_route", edges=1) == truth, 120)
    except AssertionError:
        print(logs(engine))
        raise


def test_a_renewed_push_token_is_taken_without_a_restart(pods: Pods) -> None:
    url = f"http://{pods.address('edgewater-edge')}:7410"
    file: Path = pods.folder / "edgewater-edge-push-token" / "token"
    with httpx.Client(headers={"Authorization": "Bearer renewed"}, timeout=30) as client:
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            Truth().push(client, url, int(time.time()), 1)  # noqa: TID251
        file.write_text("renewed\n")
        Truth().push(client, url, int(time.time()), 1)  # noqa: TID251
