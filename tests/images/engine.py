"""A container engine for these tests: podman with a storage of its own, set up for what the machine allows.

Three limits of a virtual machine or a container are worked around here, and nowhere else:

- A process without CAP_SYS_RESOURCE cannot raise limits of resources. Podman's defaults are higher than what such a
  process has, so that containers get the limits of the test itself.
- crun refuses cgroups of both versions at once. runc runs with them, and still bounds memory, CPU and processes.
- A build has the network of the machine and trusts what the machine trusts, because packages may come from a mirror.
  The certificates are mounted for the build only, and are not in the image.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = ("podman", "runc", "mmdebstrap", "iptables", "netavark")
COMPOSE = Path(sys.executable).with_name("podman-compose")
"""Of requirements/images.txt: the podman-compose of bookworm does not know `pids` and `CMD` of health checks."""
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
NETAVARK = "/usr/lib/podman/netavark"


def missing() -> str | None:
    """Why images cannot be built and run here, or None if they can."""
    if os.geteuid() != 0:
        return "containers with cgroups and networks need root"
    absent = [p for p in PROGRAMS if shutil.which(p) is None and not (p == "netavark" and Path(NETAVARK).exists())]
    absent += ["podman-compose (make test-images installs it)"] * (not COMPOSE.exists())
    return f"not installed: {', '.join(absent)}" if absent else None


@dataclass(frozen=True)
class Engine:
    """Podman over the folder `home`, which has its images, its containers and its networks."""

    home: Path

    def prepare(self) -> None:
        """Writes the configuration. Called once, before anything else."""
        (self.home / "networks").mkdir(parents=True, exist_ok=True)
        limits = {
            "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            "nproc": min(resource.getrlimit(resource.RLIMIT_NPROC)[1], 8192),
        }
        ulimits = ", ".join(f'"{name}={value}:{value}"' for name, value in limits.items())
        (self.home / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{self.home}/storage"\nrunroot = "{self.home}/run"\n'
        )
        (self.home / "pip.conf").write_text("[global]\ncert = /etc/certificates-of-the-machine.crt\n")
        (self.home / "containers.conf").write_text(
            f"[containers]\ndefault_ulimits = [{ulimits}]\n"
            '[engine]\nruntime = "runc"\nevents_logger = "file"\ncgroup_manager = "cgroupfs"\n'
            f'[network]\nnetwork_backend = "netavark"\nnetwork_config_dir = "{self.home}/networks"\n'
        )

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which podman and podman-compose use this storage."""
        return {
            **os.environ,
            "CONTAINERS_STORAGE_CONF": str(self.home / "storage.conf"),
            "CONTAINERS_CONF": str(self.home / "containers.conf"),
        }

    def run(
        self, *command: str, timeout_s: float = 120, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program with this storage, and fails the test with its output."""
        done = subprocess.run(
            command, env={**self.environment, **variables}, capture_output=True, text=True, timeout=timeout_s
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done

    def podman(self, *arguments: str, timeout_s: float = 120, check: bool = True) -> str:
        """The standard output of podman."""
        return self.run("podman", *arguments, timeout_s=timeout_s, check=check).stdout.strip()

    def has(self, image: str) -> bool:
        return self.run("podman", "image", "exists", image, check=False).returncode == 0

    def build(self, context: Path, containerfile: Path, tag: str, *arguments: str, timeout_s: float = 1500) -> None:
        """Builds an image. RUN steps work in a chroot, so that no limit of a container applies to them."""
        mounts = {CERTIFICATES: "/etc/certificates-of-the-machine.crt", f"{self.home}/pip.conf": "/etc/pip.conf"}
        command = ["build", "--network=host", "--isolation=chroot", f"--file={containerfile}", f"--tag={tag}"]
        command += [f"--volume={source}:{target}:ro" for source, target in mounts.items()]
        self.podman(*command, *arguments, str(context), timeout_s=timeout_s)

    def inspect(self, kind: str, name: str) -> dict[str, Any]:
        """What `podman KIND inspect` says."""
        (found,) = json.loads(self.podman(kind, "inspect", name))
        return dict(found)

    def size(self, image: str) -> int:
        """Bytes of all layers of an image."""
        return int(self.inspect("image", image)["Size"])
