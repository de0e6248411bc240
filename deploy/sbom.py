"""Completes an SBOM that cyclonedx-py made of a lock: licences, and Spark's jars. Run by ``make sbom``.

Licences of Python packages come from the metadata of the installed packages, which are the locked ones. Licences of
jars come from Spark's LICENSE, which names each bundled artifact under its licence; otherwise from the jar itself.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SPDX = {
    "BSD 0-Clause": "0BSD", "BSD 2-Clause": "BSD-2-Clause", "BSD 3-Clause": "BSD-3-Clause", "MIT License": "MIT",
    "ISC License": "ISC", "Unicode/ICU License": "ICU",
    "Common Development and Distribution License (CDDL) 1.0": "CDDL-1.0",
    "Common Development and Distribution License (CDDL) 1.1": "CDDL-1.1",
    "Eclipse Distribution License (EDL) 1.0": "BSD-3-Clause", "Eclipse Public License (EPL) 2.0": "EPL-2.0",
}  # fmt: skip
"""Headings of Spark's LICENSE as identifiers of SPDX. What stands before the first of them is under Apache-2.0."""
_ARTIFACT = re.compile(r"([a-z][\w.-]*):([\w.-]+)")
Component = dict[str, Any]


def complete(document: dict[str, Any], *, spark: bool) -> None:
    """Adds licences and, with `spark`, the jars to a CycloneDX document. Removes packages of other platforms."""
    components = [c for c in document["components"] if _installed(c["name"]) is not None]
    for component in components:
        found = _installed(component["name"])
        assert found is not None
        component["licenses"] = [_licence_of_package(found)]
    absent = {c.get("bom-ref") for c in document["components"]} - {c.get("bom-ref") for c in components}
    document["dependencies"] = [d for d in document.get("dependencies", []) if d["ref"] not in absent]
    document["components"] = components + (list(jars()) if spark else [])


def jars() -> Iterator[Component]:
    """The jars of the installed pyspark that the center's image has."""
    package = distribution("pyspark")
    folder = Path(str(package.locate_file("pyspark/jars")))
    bundled = spark_licences(package)
    for jar in sorted(folder.glob("*.jar")):
        if not any(fnmatch(jar.name, pattern) for pattern in left_out()):
            yield _component(jar, bundled, package.version)


def left_out() -> list[str]:
    """What Containerfile.center removes of Spark's jars, as patterns of names."""
    lines = (ROOT / "deploy" / "Containerfile.center").read_text().replace("\\\n", " ")
    return next(line.split(" rm -r ")[1].split() for line in lines.splitlines() if "pyspark/jars && " in line)


def spark_licences(package: Distribution) -> dict[str, tuple[str, str]]:
    """Group and licence by artifact, from Spark's LICENSE."""
    (file,) = [f for f in package.files or () if f.parts[-2:] == ("licenses", "LICENSE")]
    licence, found = "Apache-2.0", dict[str, tuple[str, str]]()
    for line in Path(str(package.locate_file(file))).read_text().splitlines():
        licence = SPDX.get(line.strip(), licence)
        if match := _ARTIFACT.match(line):
            found[match[2]] = match[1], licence
    return found


def _component(jar: Path, bundled: dict[str, tuple[str, str]], spark: str) -> Component:
    stem = jar.stem
    artifact = max((a for a in bundled if re.match(re.escape(a) + r"-\d", stem)), key=len, default="")
    if artifact:
        group, licence = bundled[artifact]
    elif stem.startswith("spark-"):
        artifact, group, licence = stem.removesuffix(f"-{spark}"), "org.apache.spark", "Apache-2.0"
    else:
        artifact, group, licence = _own_words(jar)
    version = stem.removeprefix(f"{artifact}-")
    purl = f"pkg:maven/{group}/{artifact}@{version}"
    return {
        "type": "library", "bom-ref": purl, "group": group, "name": artifact, "version": version, "purl": purl,
        "licenses": [{"license": {"id" if licence in {*SPDX.values(), "Apache-2.0"} else "name": licence}}],
    }  # fmt: skip


def _own_words(jar: Path) -> tuple[str, str, str]:
    """Artifact, group and licence by the jar's own files."""
    artifact, group, licence = re.sub(r"-\d.*", "", jar.stem), "", ""
    with zipfile.ZipFile(jar) as archive:
        names = archive.namelist()
        own = [n for n in names if re.fullmatch(rf"META-INF/maven/[^/]+/{re.escape(artifact)}/pom\.xml", n)]
        if own:
            group = own[0].split("/")[2]
            pom = archive.read(own[0]).decode(errors="replace")
            licence = "".join(re.findall(r"<license>\s*<name>\s*(.*?)\s*</name>", pom)[:1])
        if not licence and any("Apache License" in archive.read(n)[:2000].decode(errors="replace")
                               for n in names if re.fullmatch(r"META-INF/LICENSE(\.txt)?", n)):  # fmt: skip
            licence = "Apache-2.0"
        manifest = archive.read("META-INF/MANIFEST.MF").decode(errors="replace") if not licence else ""
    stated = re.search(r"^Bundle-License: *(\S+)", manifest, re.M)
    licence = licence or (stated[1] if stated else "NOASSERTION")
    return artifact, group, "Apache-2.0" if re.search(r"Apache.*2", licence) else licence


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _licence_of_package(package: Distribution) -> dict[str, Any]:
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return {"expression": expression}
    classifiers = [c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier", []) if c.startswith("License :: ")]
    stated = "; ".join(classifiers) or str(metadata.get("License") or "NOASSERTION").strip().partition("\n")[0]
    return {"license": {"name": stated}}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        file = Path(argument)
        document = json.loads(file.read_text())
        complete(document, spark=file.name.startswith("center"))
        file.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
