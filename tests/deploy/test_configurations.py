"""The configurations that are deployed are accepted by the programs that will read them."""

from __future__ import annotations

import base64
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from center.config import CenterConfig
from center.edge_access import EdgeAccess
from center.spark.spark_session import SessionConfig
from edge.config import EdgeConfig, load_config
from edgewater.__main__ import main
from edgewater.base.errors import InvalidConfig
from edgewater.runtime.configuration import is_loopback
from tests.deploy.conftest import render
from tests.refusals import refused


def center_environment(rendered: Any, part: str) -> dict[str, str]:
    """The variables of a part's container; those from Secrets have some value."""
    container = rendered.find("Deployment", f"edgewater-{part}")["spec"]["template"]["spec"]["containers"][0]
    return {e["name"]: e.get("value", "postgresql+psycopg://u:p@h/d") for e in container["env"]}


def loaded(rendered: Any, part: str, tmp_path: Path) -> CenterConfig:
    path = tmp_path / "center.yaml"
    path.write_text(rendered.config_maps["edgewater-center"]["center.yaml"])
    args = rendered.find("Deployment", f"edgewater-{part}")["spec"]["template"]["spec"]["containers"][0]["args"]
    sets = [arg.removeprefix("--set=").partition("=") for arg in args if arg.startswith("--set=")]
    return CenterConfig.load(path, {k: v for k, _, v in sets}, center_environment(rendered, part))


@pytest.mark.parametrize("part", ["gateway", "job", "api"])
def test_the_center_accepts_the_config_map_with_the_containers_variables(
    rendered: Any, part: str, tmp_path: Path
) -> None:
    if "edgewater-center" not in rendered.config_maps:
        return
    config = loaded(rendered, part, tmp_path)
    assert (config.tls is not None) is (rendered.target in ("overlays/prod", "targets/center") and part == "gateway")
    for url in (config.catalog_url, config.results_url):
        assert url.startswith("postgresql+psycopg://"), "SQLite is not safe between pods"


@pytest.mark.slow
def test_every_port_the_center_listens_on_is_declared_by_its_container(dev: Any, tmp_path: Path) -> None:
    for part, addresses in {
        "gateway": lambda c: [c.gateway.listen, c.gateway.metrics],
        "job": lambda c: [c.spark.metrics, "0.0.0.0:7078", "0.0.0.0:7079"],
        "api": lambda c: [c.api.listen, c.api.metrics],
    }.items():
        config = loaded(dev, part, tmp_path)
        container = dev.find("Deployment", f"edgewater-{part}")["spec"]["template"]["spec"]["containers"][0]
        listening = [a for a in addresses(config) if a is not None]
        assert not any(is_loopback(a) for a in listening), "a pod's loopback is reached by nobody"
        assert {int(a.rpartition(":")[2]) for a in listening} == {p["containerPort"] for p in container["ports"]}


@pytest.mark.slow
def test_pods_mount_the_frame_log_and_the_deltas_where_the_configuration_has_them(dev: Any, tmp_path: Path) -> None:
    frames, deltas = str(loaded(dev, "job", tmp_path).log_dir), str(loaded(dev, "job", tmp_path).deltas_dir)
    for pod in dev.pods:
        mounts = {m["mountPath"]: m for c in pod["spec"]["containers"] for m in c["volumeMounts"]}
        if pod["name"] in {"edgewater-gateway", "edgewater-job", "executor"}:
            assert mounts[frames].get("readOnly", False) is (pod["name"] == "executor")
        else:
            assert frames not in mounts
        writers = {"edgewater-job", "executor"}
        assert (deltas in mounts) is (pod["name"] in writers) and not mounts.get(deltas, {}).get("readOnly", False)


def test_spark_properties_agree_with_the_pods_and_policies(dev: Any, tmp_path: Path) -> None:
    conf = loaded(dev, "job", tmp_path).spark.conf
    job = dev.find("Deployment", "edgewater-job")["spec"]["template"]["spec"]["containers"][0]
    ports = {p["name"]: p["containerPort"] for p in job["ports"]}
    assert (ports["driver"], ports["blockmanager"]) == (
        int(conf["spark.driver.port"]),
        int(conf["spark.driver.blockManager.port"]),
    )
    # With two drivers an executor must reach its own: by the pod's address.
    (address,) = [e for e in job["env"] if e["name"] == "POD_IP"]
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    (arguments,) = [e["value"] for e in job["env"] if e["name"] == "PYSPARK_SUBMIT_ARGS"]
    assert "spark.driver.host=$(POD_IP)" in arguments and "spark.driver.host" not in conf
    # Otherwise executors are given the bind address, at which no driver is.
    assert conf["spark.kubernetes.executor.useDriverPodIP"] == "false"
    policy = dev.find("NetworkPolicy", "edgewater-executor")["spec"]["ingress"]
    assert policy[0]["ports"] == [{"protocol": "TCP", "port": int(conf["spark.blockManager.port"])}]
    assert Path(conf["spark.kubernetes.executor.podTemplateFile"]).name in dev.config_maps["edgewater-center"]


def test_the_development_overlay_fits_on_a_node_of_two_cpus_also_while_it_is_updated(dev: Any, tmp_path: Path) -> None:
    section = loaded(dev, "job", tmp_path).spark
    spark = SessionConfig(section.master, conf=section.conf)
    executors = int(spark.conf["spark.executor.instances"])
    milli = executors * int(spark.conf["spark.kubernetes.executor.request.cores"].removesuffix("m"))
    for workload in dev.workloads:
        for container in workload["spec"]["template"]["spec"]["containers"]:
            milli += int(container["resources"]["requests"]["cpu"].removesuffix("m"))
    # The system pods of kind request 950m.
    assert milli <= 1000
    assert (executors, spark.cores) == (1, 1)
    for deployment in dev.of("Deployment"):
        assert deployment["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
        assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 1


def test_the_gateway_of_the_development_overlay_knows_its_edge(dev: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_bytes(base64.b64decode(secret(dev, "edgewater-edges")["tokens.yaml"]))
    config = loaded(dev, "gateway", tmp_path).model_copy(update={"tokens_file": tokens})
    token = base64.b64decode(secret(dev, "edgewater-edge-tokens")["dev"]).decode()
    assert config.edge_access() == {"dev": EdgeAccess.model_validate({"tokens": [token]})}


def secret(rendered: Any, name: str) -> dict[str, str]:
    (found,) = [
        d["data"] for d in rendered.of("Secret") if re.fullmatch(name + r"-[0-9a-z]{10}", d["metadata"]["name"])
    ]
    return dict(found)


def edge_config(text: str, tmp_path: Path, **environ: str) -> EdgeConfig:
    token = tmp_path / "token"  # stands for each file with a secret
    token.write_text("secret\n")
    path = tmp_path / "edge.yaml"
    path.write_text(re.sub(r"\{file: [^ ]*/[^ ]*?\}(?=[\n\]])", f"{{file: {token}}}", text))
    return load_config(path, environ)


def test_an_edge_takes_the_name_of_its_node_or_pod_for_its_id_and_reads_the_token_that_is_mounted(
    rendered: Any, tmp_path: Path
) -> None:
    if "edgewater-edge" not in rendered.config_maps:
        return
    text = rendered.config_maps["edgewater-edge"]["edge.yaml"]
    config = edge_config(text, tmp_path, EDGE="node-7.example")
    assert config.edge == "node-7.example"
    assert config.center.token is not None and config.center.token.get_secret_value() == "secret"
    (pod,) = [p for p in rendered.pods if p["name"] == "edgewater-edge"]
    (container,) = pod["spec"]["containers"]
    mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
    assert config.state_dir in mounts
    # A single file that is mounted by subPath is never renewed.
    assert not [m for m in mounts.values() if {"subPath", "subPathExpr"} & set(m)]
    folder, _, name = yaml.safe_load(text)["center"]["token"]["file"].rpartition("/")
    assert (mounts[folder]["name"], name) == ("tokens", "${EDGE}")
    assert [t.get_secret_value() for t in config.http.tokens] == ["secret"]
    assert yaml.safe_load(text)["http"]["tokens"][0]["file"].rpartition("/")[0] in mounts
    if config.center.tls is not None:
        assert str(Path(str(config.center.tls.ca)).parent) in mounts
    listening = [address.rpartition(":")[2] for address in (config.http.listen, str(config.http.metrics))]
    assert listening == [str(port["containerPort"]) for port in container["ports"]]


def test_an_edge_on_a_node_says_which_variable_its_id_should_be_in(dev: Any, tmp_path: Path) -> None:
    with refused(InvalidConfig, "edge"):
        edge_config(dev.config_maps["edgewater-edge"]["edge.yaml"], tmp_path)


def test_the_edges_memory_limit_holds_what_it_may_keep_pending(rendered: Any, tmp_path: Path) -> None:
    for workload in rendered.of("DaemonSet"):
        pending = edge_config(rendered.config_maps["edgewater-edge"]["edge.yaml"], tmp_path, EDGE="n").limits
        limit = workload["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
        assert int(limit.removesuffix("Mi")) << 20 >= 4 * pending.max_pending_bytes


def test_the_example_configurations_are_accepted(root: Path, tmp_path: Path) -> None:
    assert edge_config((root / "deploy" / "edge.yaml").read_text(), tmp_path).edge == "branch-1"
    tokens = {"EDGEWATER_CENTER__TOKENS__BRANCH_1": "secret"}
    assert CenterConfig.load(root / "deploy" / "center.yaml", environment=tokens).edge_access() == {
        "branch_1": EdgeAccess.model_validate({"tokens": ["secret"]})
    }


def commands(root: Path, every_rendered: list[Any]) -> set[tuple[str, ...]]:
    """Every `edgewater …` that is deployed: arguments of containers, images, compose, and the service."""
    entry = {"gateway": "center", "job": "center", "api": "center", "edge": "edge"}
    found = {
        ("edgewater", entry[c["name"]], *c["args"])
        for rendered in every_rendered
        for pod in rendered.pods
        for c in pod["spec"]["containers"]
        if c["name"] in entry
    }
    for name in ("edge", "center"):
        lines = (root / "deploy" / f"Containerfile.{name}").read_text().splitlines()
        entrypoint, cmd = (yaml.safe_load(_last(lines, word)) for word in ("ENTRYPOINT", "CMD"))
        argv = [*entrypoint, *cmd]
        found.add(tuple(argv[argv.index("edgewater") :]))
    service = (root / "deploy" / "edgewater-edge.service").read_text()
    found.add(("edgewater", *re.findall(r"^ExecStart=\S+/edgewater (.*)$", service, re.M)[0].split()))
    return found


def _last(lines: list[str], word: str) -> str:
    return [line for line in lines if line.startswith(f"{word} ")][-1].removeprefix(f"{word} ")


@pytest.mark.slow
def test_every_command_that_is_deployed_exists_and_takes_its_arguments(every_rendered: list[Any], root: Path) -> None:
    deployed = commands(root, every_rendered)
    assert {c[1:3] for c in deployed} >= {
        ("edge", "run"), ("center", "run"), ("center", "gateway"), ("center", "job"), ("center", "api"),
    }  # fmt: skip
    for _, *arguments in deployed:
        command: click.Command = main
        context = click.Context(main, info_name="edgewater")
        while isinstance(command, click.Group):
            name, command_found, arguments = command.resolve_command(context, arguments)
            assert command_found is not None
            context = click.Context(command_found, info_name=name, parent=context)
            command = command_found
        command.parse_args(context, arguments)  # raises UsageError for what it does not take


def test_the_entry_point_that_images_start_is_installed() -> None:
    assert shutil.which("edgewater", path=str(Path(sys.executable).parent))


@pytest.mark.usefixtures("kubectl")
def test_an_agent_beside_an_application_takes_its_configuration_and_no_push_from_elsewhere(tmp_path: Path) -> None:
    shop = render("targets/sidecar")
    (pod,) = shop.pods
    (agent,) = pod["spec"]["initContainers"]
    assert agent["restartPolicy"] == "Always"  # Kubernetes' sign of a sidecar
    text = shop.config_maps["edgewater-edge"]["edge.yaml"]
    config = edge_config(text, tmp_path, EDGE="shop-0")
    assert (config.edge, config.http.listen) == ("shop-0", "127.0.0.1:7410")
    mounts = {m["mountPath"]: m["name"] for m in agent["volumeMounts"]}
    (claim,) = shop.find("StatefulSet", "shop")["spec"]["volumeClaimTemplates"]
    assert mounts[config.state_dir] == claim["metadata"]["name"]
    assert yaml.safe_load(text)["center"]["token"]["file"].rpartition("/")[0] in mounts
    assert [str(p["containerPort"]) for p in agent["ports"]] == [str(config.http.metrics).rpartition(":")[2]]
