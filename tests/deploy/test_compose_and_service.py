"""The compose file and the systemd unit."""

from __future__ import annotations

import re
import subprocess
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from center.config import CenterConfig
from edge.config import parse_config


@pytest.fixture(scope="module")
def compose(root: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((root / "deploy" / "compose.yaml").read_text()))


def mounted_file(service: dict[str, Any]) -> str:
    """The configuration of a service, mounted read-only where its image looks for it."""
    (mount,) = [v for v in service["volumes"] if v.startswith("./")]
    path, target, options = mount.split(":")
    assert target in ("/etc/edgewater/center.yaml", "/etc/edgewater/edge.yaml") and options.startswith("ro")
    return str(path)


def test_compose_names_services_images_and_volumes_that_exist(compose: dict[str, Any], root: Path) -> None:
    assert set(compose["services"]) == {"center", "edge"}
    for name, service in compose["services"].items():
        assert (root / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert re.fullmatch(rf"edgewater-{name}:\d+\.\d+\.\d+(\.dev\d+)?", service["image"])
        mounted = {v.partition(":")[0] for v in service["volumes"]} - set(compose["volumes"])
        assert mounted == {mounted_file(service)}
        assert (root / "deploy" / mounted_file(service)).is_file()
        assert "configs" not in service, "podman-compose ignores them"


def test_every_service_of_compose_is_hardened_bounded_and_watched(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert {"cpus", "memory", "pids"} == set(service["deploy"]["resources"]["limits"])
        assert service["healthcheck"]["test"][0] == "CMD"
        assert "privileged" not in service and "user" not in service


def test_compose_publishes_on_loopback_only(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_center_and_edge_of_compose_share_a_token_that_is_not_written_down(compose: dict[str, Any], root: Path) -> None:
    variables = {**compose["services"]["center"]["environment"], **compose["services"]["edge"]["environment"]}
    assert all(value.startswith(("${EDGE_TOKEN:?", "${PUSH_TOKEN:?", "${API_TOKEN:?")) for value in variables.values())
    given = dict.fromkeys(variables, "secret")
    files = {name: root / "deploy" / mounted_file(service) for name, service in compose["services"].items()}
    center = CenterConfig.load(files["center"], environment=given)
    edge = parse_config(yaml.safe_load(files["edge"].read_text()), given)
    assert edge.center.token is not None
    center.api.require_credentials()
    (token,) = center.edge_access()[edge.edge].tokens
    assert token.token == edge.center.token


def test_compose_health_checks_ask_where_the_services_listen(compose: dict[str, Any], root: Path) -> None:
    center = CenterConfig.load(root / "deploy" / "center.yaml", environment={"EDGEWATER_CENTER__TOKENS__A": "x"})
    edge = yaml.safe_load((root / "deploy" / mounted_file(compose["services"]["edge"])).read_text())
    for name, listen in {"center": center.api.listen, "edge": edge["http"]["listen"]}.items():
        port = listen.rpartition(":")[2]
        assert f"127.0.0.1:{port}/" in compose["services"][name]["healthcheck"]["test"][-1]
        assert any(published.endswith(f":{port}") for published in compose["services"][name]["ports"])


@pytest.fixture(scope="module")
def unit(root: Path) -> RawConfigParser:
    parser = RawConfigParser(strict=False, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys of units are case-sensitive
    parser.read(root / "deploy" / "edgewater-edge.service")
    return parser


def test_the_service_runs_as_a_user_of_its_own_and_is_always_restarted(unit: RawConfigParser) -> None:
    service = unit["Service"]
    assert (service["DynamicUser"], service["NoNewPrivileges"], service["ProtectSystem"]) == ("yes", "yes", "strict")
    assert service["Restart"] == "always"
    assert service["RestartPreventExitStatus"] == "2", "the exit code of a configuration that is not accepted"


def test_the_example_of_an_edge_lies_where_the_service_looks_for_its_state_and_token(
    unit: RawConfigParser, root: Path
) -> None:
    given = yaml.safe_load((root / "deploy" / "edge.yaml").read_text())
    service = unit["Service"]
    assert given["state_dir"] == f"/var/lib/{service['StateDirectory']}"
    credential = service["LoadCredential"].partition(":")[0]
    assert given["center"]["token"] == {"file": f"/run/credentials/edgewater-edge.service/{credential}"}
    assert service["ExecStart"].split()[1:] == ["edge", "run", "/etc/edgewater/edge.yaml"]


def test_systemd_accepts_the_service_and_finds_it_well_confined(
    root: Path, tmp_path: Path, systemd_analyze: str
) -> None:
    text = (root / "deploy" / "edgewater-edge.service").read_text()
    path = tmp_path / "edgewater-edge.service"
    # The program has to exist where systemd looks.
    path.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.M))
    verified = subprocess.run([systemd_analyze, "verify", str(path)], capture_output=True, text=True, timeout=60)
    assert (verified.returncode, verified.stderr) == (0, "")
    judged = subprocess.run(
        [systemd_analyze, "security", "--offline=true", "--threshold=20", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert judged.returncode == 0, judged.stdout[-500:]
