"""The manifests as documents that `podman kube play` runs, one pod for each workload.

Podman has no API server. So the translation does what a cluster does for a pod, and changes nothing else:

- Names of Services become entries of /etc/hosts, and each pod has a fixed address.
- ConfigMaps, Secrets, claims and scratch volumes become folders of the machine. They belong to the pod's user.
- References of variables are resolved, and arguments get them.
- Ports are left out: podman would open them on the machine, too, and two pods may have the same.
- Probes are left out: the test asks the probes' paths itself. Podman would run curl in the container.
- The driver asks `ExecutorPods` for executors, in place of the API server. They run as pods, too.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.conftest import Manifest, Rendered, unhashed
from tests.deploy.test_spark_on_kubernetes import ApiServer
from tests.images.engine import Engine

NET = "edgewatertest"
NETWORK = "10.89.77"
KEPT = ("restartPolicy", "securityContext", "terminationGracePeriodSeconds", "hostAliases")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


class ExecutorPods(ApiServer):
    """Takes the pods that the driver asks for, as an API server does, and starts them as a kubelet does.

    The driver has its reply before the pod starts. A driver that waited too long would ask again.
    """

    start: Callable[[str, Manifest], None]

    def __init__(self) -> None:
        super().__init__("0.0.0.0")
        self.started: list[str] = []
        self._kubelet = ThreadPoolExecutor(1)

    def handle(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        answer = super().handle(method, path, body)
        if method == "POST":
            name = body["metadata"]["name"]
            self.started.append(name)
            self._kubelet.submit(self.start, name, {"namespace": "edgewater", "spec": body["spec"]})
        return answer

    def close(self) -> None:
        self._kubelet.shutdown()


@dataclass(frozen=True)
class Pods:
    """All workloads of a rendered overlay; `folder` has the files of their volumes."""

    engine: Engine
    rendered: Rendered
    folder: Path
    executors: ExecutorPods
    api_server: str
    """The URL of `executors`, for pods."""

    @property
    def names(self) -> list[str]:
        return [pod["name"] for pod in self.rendered.pods]

    def address(self, name: str) -> str:
        if name in self.names:
            return f"{NETWORK}.{10 + self.names.index(name)}"
        return f"{NETWORK}.{100 + int(name.rpartition('-')[2])}"  # Spark numbers its executors

    def play_workload(self, name: str) -> None:
        """Starts the pod of a workload."""
        (pod,) = [p for p in self.rendered.pods if p["name"] == name]
        self.play(name, pod)

    def play(self, name: str, pod: Manifest) -> None:
        """Starts a pod with a namespace and a spec."""
        file = self.folder / f"{name}.yaml"
        file.write_text(self._document(name, pod["namespace"], pod["spec"]))
        address = self.address(name)
        self.engine.podman("kube", "play", f"--network={NET}", f"--ip={address}", str(file), timeout_s=180)

    def _document(self, name: str, namespace: str, pod: Manifest) -> str:
        spec = {key: pod[key] for key in KEPT if key in pod}
        user = pod["securityContext"]["runAsUser"]
        spec.setdefault("restartPolicy", "OnFailure")
        spec["hostAliases"] = self._services()
        volumes = {v["name"]: v for v in pod["volumes"]}
        mounts = {m["name"] for c in self._containers(pod) for m in c["volumeMounts"]}
        spec["volumes"] = [self._volume(name, namespace, v, volumes.get(v, {}), user) for v in sorted(mounts)]
        for kind in ("initContainers", "containers"):
            spec[kind] = [self._container(name, namespace, c) for c in pod.get(kind, [])]
        # The name of a pod is its host name, and a container's name is not the pod's.
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        return yaml.safe_dump(document, sort_keys=False)

    def _containers(self, pod: Manifest) -> list[Manifest]:
        return [*pod["containers"], *pod.get("initContainers", [])]

    def _services(self) -> list[dict[str, Any]]:
        found = []
        for service in self.rendered.of("Service"):
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            names = [name, f"{name}.{namespace}", f"{name}.{namespace}.svc"]
            found.append({"ip": self.address(name), "hostnames": names})
        return found

    def _container(self, pod: str, namespace: str, given: Manifest) -> Manifest:
        container = {key: value for key, value in given.items() if key not in (*PROBES, "ports")}
        container["image"] = given["image"] if "/" in given["image"] else f"localhost/{given['image']}"
        environment: dict[str, str] = {}
        for entry in given.get("env", []):
            value = self._value(pod, namespace, entry)
            environment[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], value)
        if pod == "edgewater-job":
            container["args"] = [*given["args"], f"--set=spark.master=k8s://{self.api_server}"]
        container["env"] = [{"name": n, "value": v} for n, v in environment.items()]
        container.pop("envFrom", None)
        for bounds in given["resources"].values():
            bounds.pop("ephemeral-storage", None)
        return container

    def _value(self, pod: str, namespace: str, entry: Manifest) -> str:
        source = entry.get("valueFrom")
        if source is None:
            return str(entry.get("value", ""))
        if "secretKeyRef" in source:
            return self._data("Secret", namespace, source["secretKeyRef"]["name"])[source["secretKeyRef"]["key"]]
        path = source["fieldRef"]["fieldPath"]
        known = {"metadata.name": pod, "metadata.namespace": namespace, "status.podIP": self.address(pod)}
        return known[path]

    def _data(self, kind: str, namespace: str, name: str) -> dict[str, str]:
        (found,) = [
            d for d in self.rendered.of(kind)
            if d["metadata"]["namespace"] == namespace
            and name in (d["metadata"]["name"], unhashed(d["metadata"]["name"]))
        ]  # fmt: skip
        data: dict[str, str] = found["data"]
        return {k: base64.b64decode(v).decode() for k, v in data.items()} if kind == "Secret" else data

    def _volume(self, pod: str, namespace: str, name: str, volume: Manifest, user: int) -> Manifest:
        claim = "persistentVolumeClaim" in volume
        folder = self.folder / (volume["persistentVolumeClaim"]["claimName"] if claim else f"{pod}-{name}")
        folder.mkdir(exist_ok=True)
        files: dict[str, str] = {}
        if "configMap" in volume:
            files = self._data("ConfigMap", namespace, volume["configMap"]["name"])
        elif "secret" in volume:
            data = self._data("Secret", namespace, volume["secret"]["secretName"])
            items = volume["secret"].get("items") or [{"key": key, "path": key} for key in data]
            files = {item["path"]: data[item["key"]] for item in items}
        for path, text in files.items():
            (folder / path).write_text(text)
        os.chown(folder, user, user)
        folder.chmod(0o755 if files else 0o750)
        return {"name": name, "hostPath": {"path": str(folder), "type": "Directory"}}
