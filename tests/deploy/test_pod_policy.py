"""Every container runs with the least it needs, bounded, and watched."""

from __future__ import annotations

import re
from typing import Any

import yaml

PROBED_BY_SPARK = {"executor"}
"""Spark's driver watches its executors by heartbeats and replaces them; a probe would be a second opinion."""
ENDS_BY_ITSELF = {"backup"}
ROOT_FOR_A_MOMENT = {"own-state"}
"""The one command that runs as root: it gives the node's state directory to the agent."""


def containers(rendered: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(p, c) for p in rendered.pods for c in [*p["spec"]["containers"], *p["spec"].get("initContainers", [])]]


def test_every_container_states_requests_and_limits_of_all_three_resources(rendered: Any) -> None:
    for pod, container in containers(rendered):
        for bound in ("requests", "limits"):
            given = set(container["resources"][bound])
            wanted = {"cpu", "memory", "ephemeral-storage"}
            # CPU and memory of executors are Spark properties: test_spark_on_kubernetes sees the result.
            assert given == (wanted - {"cpu", "memory"} if pod["name"] == "executor" else wanted), container["name"]


def test_every_long_running_container_has_all_three_probes(rendered: Any) -> None:
    for pod in rendered.pods:
        for container in pod["spec"]["containers"]:
            if container["name"] not in PROBED_BY_SPARK | ENDS_BY_ITSELF:
                assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container), container["name"]


def test_probes_name_ports_that_the_container_has(rendered: Any) -> None:
    for _, container in containers(rendered):
        ports = {p["name"] for p in container.get("ports", [])}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            for how in ("httpGet", "tcpSocket"):
                if how in container.get(probe, {}):
                    assert container[probe][how]["port"] in ports


def test_no_pod_runs_as_root(rendered: Any) -> None:
    for pod, container in containers(rendered):
        security = {**pod["spec"]["securityContext"], **container["securityContext"]}
        if container["name"] in ROOT_FOR_A_MOMENT:
            assert security["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
            continue
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] >= 100
        assert security["runAsGroup"] >= 100
        assert security["capabilities"] == {"drop": ["ALL"]}


def test_every_container_has_a_read_only_root_and_no_way_to_more_privileges(rendered: Any) -> None:
    for pod, container in containers(rendered):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert "privileged" not in container["securityContext"]
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod["spec"])


def test_only_the_edge_mounts_a_path_of_its_node(rendered: Any) -> None:
    for pod in rendered.pods:
        paths = [v["hostPath"]["path"] for v in pod["spec"]["volumes"] if "hostPath" in v]
        per_node = rendered.of("DaemonSet") and pod["name"] == "edgewater-edge"
        assert paths == (["/var/lib/edgewater-edge"] if per_node else [])


def test_every_scratch_volume_has_a_bound(rendered: Any) -> None:
    for pod in rendered.pods:
        for volume in pod["spec"]["volumes"]:
            if "emptyDir" in volume:
                assert "sizeLimit" in volume["emptyDir"], (pod["name"], volume["name"])


def test_every_image_has_a_version(rendered: Any) -> None:
    for _, container in containers(rendered):
        if container["name"] != "executor":
            name, _, tag = container["image"].rpartition(":")
            assert name, container["image"]
            assert re.fullmatch(r"\d+\.\d+[\w.-]*", tag), container["image"]


def test_executors_run_the_image_of_the_job(rendered: Any) -> None:
    for pod, container in containers(rendered):
        if pod["name"] == "edgewater-job":
            env = {e["name"]: e.get("value") for e in container["env"]}
            assert env["EXECUTOR_IMAGE"] == container["image"]


def test_only_the_job_holds_a_token_of_the_api_server(rendered: Any) -> None:
    for pod in rendered.pods:
        assert pod["spec"]["automountServiceAccountToken"] is (pod["name"] == "edgewater-job")
    for account in rendered.of("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_the_only_role_is_the_jobs_and_reaches_pods_only(rendered: Any) -> None:
    assert rendered.of("ClusterRole", "ClusterRoleBinding") == []
    for role in rendered.of("Role"):
        assert role["metadata"]["name"] == "edgewater-job"
        assert [(r["apiGroups"], r["resources"]) for r in role["rules"]] == [([""], ["pods"])]
        assert "*" not in role["rules"][0]["verbs"]
    for binding in rendered.of("RoleBinding"):
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "edgewater-job", "namespace": binding["metadata"]["namespace"]}
        ]


def test_an_update_replaces_one_driver_at_a_time(rendered: Any) -> None:
    for workload in rendered.of("Deployment"):
        if workload["metadata"]["name"] == "edgewater-job":
            assert workload["spec"]["strategy"] == {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}


def test_only_a_namespace_whose_pods_mount_a_path_of_their_node_is_privileged(rendered: Any) -> None:
    for namespace in rendered.of("Namespace"):
        name, labels = namespace["metadata"]["name"], namespace["metadata"]["labels"]
        paths = [v for p in rendered.pods if p["namespace"] == name for v in p["spec"]["volumes"] if "hostPath" in v]
        assert labels["pod-security.kubernetes.io/enforce"] == ("privileged" if paths else "restricted")


def test_no_manifest_holds_a_secret_but_the_development_overlay(every_rendered: list[Any]) -> None:
    for rendered in every_rendered:
        if rendered.target != "overlays/dev":
            assert rendered.of("Secret") == []
            assert not re.search(r"(?i)password: *[^ {]", yaml.safe_dump_all(rendered.of("ConfigMap")))
