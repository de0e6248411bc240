"""The real Spark driver against an API server that only takes pods, and a real executor as the image starts it.

What Spark makes of our properties and the pod template cannot be read off the manifests, and a Role that lacks
a verb or an entry point that lacks an argument shows only when an executor is to start.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pyspark
import pytest
import yaml

pytestmark = [pytest.mark.spark, pytest.mark.full]

HERE = Path(__file__).parent
TIMEOUT_S = 180
POD_IP = "127.0.0.3"
"""The driver's address: on this machine, and no default of Spark."""
VERBS = {"POST": "create", "PATCH": "patch"}


class ApiServer:
    """Keeps the pods it is given and every request as (verb, resource)."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.pods: list[dict[str, Any]] = []
        self.requests: set[tuple[str, str]] = set()
        self.posted = threading.Event()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                code, said = api.handle(self.command, self.path, json.loads(body) if body else None)
                text = json.dumps(said).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = answer  # noqa: N815

        self.server = ThreadingHTTPServer((host, 0), Handler)

    def handle(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        match = re.fullmatch(r"/api/v1/namespaces/edgewater/(\w+)(/[\w-]+)?(\?.*)?", path)
        if match is None:
            return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
        resource, name, query = match.groups()
        self.requests.add((_verb(method, name, query or ""), resource))
        if method == "POST":
            self.pods.append(body)
            self.posted.set()
            return 201, {**body, "status": {"phase": "Running"}}
        if method == "GET" and name:
            return 200, _driver_pod(name.removeprefix("/"))
        if method == "GET":
            items = [{**p, "status": {"phase": "Running"}} for p in self.pods]
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}
        return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}


def _verb(method: str, name: str | None, query: str) -> str:
    if method == "GET":
        return "watch" if "watch=true" in query else "get" if name else "list"
    if method == "DELETE":
        return "delete" if name else "deletecollection"
    return VERBS[method]


def _driver_pod(name: str) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"name": name, "namespace": "edgewater", "uid": "6f2a"},
        "spec": {"containers": []},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


@contextmanager
def serving(api: ApiServer) -> Iterator[int]:
    thread = threading.Thread(target=api.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield api.server.server_port
    finally:
        api.server.shutdown()
        thread.join(timeout=10)
        api.server.server_close()


def job_environment(dev: Any) -> dict[str, str]:
    """The job container's own variables, references between them resolved as the kubelet does."""
    job = dev.find("Deployment", "edgewater-job")["spec"]["template"]["spec"]["containers"][0]
    env = {"POD_NAME": "edgewater-job-7d9f", "POD_NAMESPACE": "edgewater", "POD_IP": POD_IP}
    for entry in job["env"]:
        if "value" in entry:
            env[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], entry["value"])
    return env


def settings(dev: Any, template: Path) -> dict[str, str]:
    """Spark's properties as center.yaml has them, but at free ports, and with one small executor."""
    center = yaml.safe_load(dev.config_maps["edgewater-center"]["center.yaml"])
    template.write_text(dev.config_maps["edgewater-center"]["executor-pod.yaml"])
    return center["spark"]["conf"] | {
        "spark.kubernetes.executor.podTemplateFile": str(template),
        "spark.driver.port": "0",
        "spark.driver.blockManager.port": "0",
        "spark.blockManager.port": "0",
        "spark.executor.instances": "1",
        "spark.executor.memory": "512m",
    }


def executor_environment(pod: dict[str, Any], scratch: Path) -> dict[str, str]:
    env = {e["name"]: e["value"] for e in pod["spec"]["containers"][0]["env"] if "value" in e}
    of_the_cluster = {"SPARK_EXECUTOR_POD_IP": "127.0.0.1", "SPARK_EXECUTOR_POD_NAME": pod["metadata"]["name"]}
    of_the_image = {"SPARK_HOME": str(Path(pyspark.__file__).parent), "PATH": os.environ["PATH"]}
    if "JAVA_HOME" in os.environ:
        of_the_image["JAVA_HOME"] = os.environ["JAVA_HOME"]
    return env | of_the_cluster | of_the_image | {"SPARK_LOCAL_DIRS": str(scratch)}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, dev: Any) -> Iterator[dict[str, Any]]:
    """One run of driver and executor; the tests look at what it left."""
    tmp = tmp_path_factory.mktemp("spark")
    api = ApiServer()
    with serving(api) as port:
        given = {"master": f"k8s://http://127.0.0.1:{port}", "settings": settings(dev, tmp / "executor-pod.yaml")}
        yield {"api": api, "dev": dev, **run(given, api, job_environment(dev), tmp)}


def run(given: Any, api: ApiServer, env: dict[str, str], tmp: Path) -> dict[str, Any]:
    with (tmp / "driver.log").open("wb") as driver_log, (tmp / "executor.log").open("wb") as executor_log:
        driver = subprocess.Popen(
            [sys.executable, str(HERE / "driver_program.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=driver_log, env=os.environ | env, cwd=tmp,
        )  # fmt: skip
        executor = None
        try:
            assert driver.stdin is not None
            driver.stdin.write(json.dumps(given).encode())
            driver.stdin.close()
            driver.stdin = None
            assert api.posted.wait(TIMEOUT_S), (tmp / "driver.log").read_text()[-4000:]
            container = api.pods[0]["spec"]["containers"][0]
            executor = subprocess.Popen(
                [str(HERE.parents[1] / "deploy" / container["command"][-1]), *container["args"]],
                stdin=subprocess.DEVNULL, stdout=executor_log, stderr=executor_log,
                env=executor_environment(api.pods[0], tmp / "scratch"), cwd=tmp,
            )  # fmt: skip
            out, _ = driver.communicate(timeout=TIMEOUT_S)
            executor_code = executor.wait(TIMEOUT_S)
        finally:
            for process in (driver, executor):
                if process is not None and process.poll() is None:
                    process.kill()
                    process.wait()
    logs = (tmp / "driver.log").read_text()[-4000:] + (tmp / "executor.log").read_text()[-4000:]
    assert driver.returncode == 0, logs
    return {"out": json.loads(out), "executor_code": executor_code}


def test_an_executor_of_our_image_registers_and_runs_a_python_stage(outcome: dict[str, Any]) -> None:
    assert outcome["out"] == {"counted": 1000}
    assert outcome["executor_code"] == 0


def test_executors_call_the_driver_at_the_address_of_its_pod(outcome: dict[str, Any]) -> None:
    (container,) = outcome["api"].pods[0]["spec"]["containers"]
    (url,) = (e["value"] for e in container["env"] if e["name"] == "SPARK_DRIVER_URL")
    assert re.fullmatch(rf"spark://CoarseGrainedScheduler@{re.escape(POD_IP)}:\d+", url)


def test_the_driver_asks_for_nothing_that_its_role_does_not_allow(outcome: dict[str, Any]) -> None:
    (rule,) = outcome["dev"].find("Role", "edgewater-job")["rules"]
    permitted = {(verb, resource) for verb in rule["verbs"] for resource in rule["resources"]}
    assert {"create", "deletecollection"} <= {verb for verb, _ in outcome["api"].requests}
    assert outcome["api"].requests <= permitted


def test_the_executor_pod_is_valid_bounded_and_restricted(outcome: dict[str, Any]) -> None:
    pod = outcome["api"].pods[0]
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    (container,) = pod["spec"]["containers"]
    for bound in ("requests", "limits"):
        assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"][bound])
    assert container["image"] in (HERE.parents[1] / "k8s/base/center/job.yaml").read_text()
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["serviceAccountName"] == "edgewater-executor"


def test_the_executor_pod_keeps_the_labels_that_its_network_policy_selects(outcome: dict[str, Any]) -> None:
    policy = outcome["dev"].find("NetworkPolicy", "edgewater-executor")["spec"]["podSelector"]["matchLabels"]
    assert policy.items() <= outcome["api"].pods[0]["metadata"]["labels"].items()


def test_the_executor_pod_is_owned_by_the_drivers_so_that_it_goes_with_it(outcome: dict[str, Any]) -> None:
    (owner,) = outcome["api"].pods[0]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("Pod", "edgewater-job-7d9f", True)


def test_executors_of_two_drivers_in_a_row_have_different_names(outcome: dict[str, Any]) -> None:
    # A prefix of our own would be the same for the next driver, whose executors may come before these have gone.
    assert re.fullmatch(r"edgewater-[0-9a-f]{8,}-exec-1", outcome["api"].pods[0]["metadata"]["name"])


def test_the_executor_refuses_any_other_argument(root: Path) -> None:
    done = subprocess.run([root / "deploy" / "spark-executor", "driver"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "driver is not accepted" in done.stderr
