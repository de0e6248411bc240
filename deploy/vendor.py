"""Fetches the console's libraries with `npm pack`, and writes `LOCK`: name, version, sha256 and licence of each file.

Run by `make vendor`. Users and CI need neither npm nor a build: the files are in the repository and in the wheel.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "center" / "api" / "ui" / "vendor"
PACKAGES = {
    "htm@3.1.1": {"preact/standalone.module.js": "preact.js", "LICENSE": "LICENSE-htm"},
    "preact@10": {"LICENSE": "LICENSE-preact"},
    "uplot@1.6.32": {
        "dist/uPlot.iife.min.js": "uplot.js",
        "dist/uPlot.min.css": "uplot.css",
        "LICENSE": "LICENSE-uplot",
    },
}
"""Per package, the files that are taken, and their names here. preact is inside htm's standalone file."""


def main() -> None:
    entries = []
    for package, taken in PACKAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            packed = subprocess.run(
                ["npm", "pack", package, "--json"], cwd=folder, check=True, capture_output=True, text=True
            )
            described = json.loads(packed.stdout)[0]
            with tarfile.open(Path(folder) / described["filename"]) as archive:
                manifest = json.loads(archive.extractfile("package/package.json").read())  # type: ignore[union-attr]
                for path, name in taken.items():
                    body = archive.extractfile(f"package/{path}").read()  # type: ignore[union-attr]
                    (VENDOR / name).write_bytes(body)
                    if name.startswith("LICENSE"):
                        continue
                    entries.append(
                        {
                            "file": name,
                            "package": described["name"],
                            "version": described["version"],
                            "path": path,
                            "sha256": hashlib.sha256(body).hexdigest(),
                            "licence": manifest["license"],
                            "licence_file": f"LICENSE-{described['name']}",
                        }
                    )
    (VENDOR / "LOCK").write_text(json.dumps({"files": entries}, indent=2) + "\n")


if __name__ == "__main__":
    main()
