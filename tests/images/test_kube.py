"""The overlay `dev` runs as pods, as kustomize renders them: database, gateway, job, executor, API, sink and edge."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from center.ops.backup import read_backup
from tests.deploy.conftest import render
from tests.deploy.test_spark_on_kubernetes import serving
from tests.images import bases
from tests.images.engine import Engine
from tests.images.pods import NET, NETWORK, ExecutorPods, Pods
from tests.images.service import WINDOW_S, Truth, answered, ready, until

pytestmark = pytest.mark.images
SECRET = {"Authorization": "Bearer for-development-only"}
PROBES = {
    "edgewater-gateway": "7401/readyz",
    "edgewater-job": "7402/readyz",
    "edgewater-api": "7480/livez",
    "edgewater-sink": "7404/livez",
    "edgewater-edge": "7411/readyz",
}
"""Port and path of the readiness probes, in the order in which the pods start after PostgreSQL."""
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
    dev = render("targets/dev")
    (postgres,) = dev.find("StatefulSet", "edgewater-postgres")["spec"]["template"]["spec"]["containers"]
    bases.postgres(engine, postgres["image"], base)
    folder = tmp_path_factory.mktemp("pods")
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    executors = ExecutorPods()
    engine.podman("network", "create", f"--subnet={NETWORK}.0/24", NET)
    try:
        with serving(executors) as port:
            pods = Pods(engine, dev, folder, executors, f"http://{NETWORK}.1:{port}")
            executors.start = pods.play
            yield pods
    finally:
        executors.close()
        engine.podman("pod", "rm", "--all", "--force", "--time=5", timeout_s=180)
        engine.podman("network", "rm", "--force", NET)


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(headers=SECRET, timeout=30) as client:
        yield client


def logs(engine: Engine) -> str:
    names = engine.podman("ps", "--all", "--format={{.Names}}").split()
    return "\n".join(f"== {n}\n" + engine.run("podman", "logs", "--tail=30", n, check=False).stderr for n in names)


def start(pods: Pods, name: str, client: httpx.Client) -> None:
    began = time.monotonic()
    pods.play_workload(name)
    if name in PROBES:
        port, _, path = PROBES[name].partition("/")
        until(name, lambda: ready(f"http://{pods.address(name)}:{port}/{path}", client), 180)
    else:
        probe = ["podman", "exec", f"{name}-postgres", "pg_isready", "--host=127.0.0.1", "--username=edgewater"]
        until(name, lambda: pods.engine.run(*probe, check=False).returncode == 0, 60)
    print(f"{name} ready: {time.monotonic() - began:.1f} s")


def test_the_development_overlay_answers_with_the_truth(engine: Engine, pods: Pods, client: httpx.Client) -> None:
    api = f"http://{pods.address('edgewater-api')}:7480"
    try:
        for name in ("edgewater-postgres", *PROBES):
            if name == "edgewater-edge":
                client.post(f"{api}/v1/queries", json=QUERY).raise_for_status()
            start(pods, name, client)
        truth = Truth()
        now = int(time.time())  # noqa: TID251
        push = f"http://{pods.address('edgewater-edge')}:7410"
        truth.push(client, push, now - now % WINDOW_S - 3 * WINDOW_S, 600)
        began = time.monotonic()
        with httpx.Client(base_url=api, headers=SECRET, timeout=30) as asking:
            until("answers", lambda: answered(asking, "by_route", edges=1) == truth, 120)
        print(f"all answers: {time.monotonic() - began:.1f} s")
    except AssertionError:
        print(logs(engine))
        raise


def test_the_answers_were_merged_by_an_executor_in_a_pod_of_its_own(engine: Engine, pods: Pods) -> None:
    (executor,) = pods.executors.started
    container = engine.inspect("container", f"{executor}-executor")
    assert container["State"]["Running"]
    assert container["HostConfig"]["ReadonlyRootfs"] and container["Config"]["User"] == "10001:10001"
    assert "Successfully registered with driver" in engine.run("podman", "logs", f"{executor}-executor").stderr


def test_the_backup_of_the_cron_job_is_whole(engine: Engine, pods: Pods) -> None:
    pods.play_workload("edgewater-backup")
    name = "edgewater-backup-backup"
    code = engine.podman("wait", name)
    assert code == "0", engine.run("podman", "logs", name).stderr
    (backup,) = (pods.folder / "edgewater-backup").iterdir()
    info = read_backup(backup)
    assert {"catalog.db", "results.db"} <= info.sizes.keys()


def test_a_renewed_push_token_is_taken_without_a_restart(pods: Pods) -> None:
    url = f"http://{pods.address('edgewater-edge')}:7410"
    file: Path = pods.folder / "edgewater-edge-push-token" / "token"
    with httpx.Client(headers={"Authorization": "Bearer renewed"}, timeout=30) as client:
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            Truth().push(client, url, int(time.time()), 1)  # noqa: TID251
        file.write_text("renewed\n")
        Truth().push(client, url, int(time.time()), 1)  # noqa: TID251
