"""Writes the golden set of the release in development: ``python -m tests.golden.write``.

A set is what a release leaves on disk and on the wire, and what it answers from that. Each later release must read it.
The set of a release is written again until the release is made, and never after it: `docs/how-to/release.md`.
"""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
import sqlite3
import struct
import tempfile
import tomllib
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from edgewater.synopses import GroupedAggregate
from edgewater.wire import MIN_PROTOCOL, PROTOCOL, Frame, SamplingReason, synopsis_pb2
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.session_stream import SessionPacker
from tests.golden.synopses import SAMPLES
from tests.golden.system import COLUMNS, INCARNATION, JFK, LABELS, NOW_MS, ROWS, SPECS, T0, Edge, Stores

HERE = Path(__file__).parent
SETS = sorted((path for path in HERE.iterdir() if path.name[0].isdigit()), key=lambda p: [*map(int, p.name.split("."))])
WINDOW_LOG = 16
_LENGTH = struct.Struct("<I")


def merged(frames: Iterable[Frame]) -> dict[str, Any]:
    """What frames say: by query and slice, the records, the groups, and the values of sums, counts and extrema."""
    parts: defaultdict[str, list[bytes]] = defaultdict(list)
    for frame in sorted(frames, key=lambda f: f.seq):
        for partial in frame.unpack().partials:
            parts[f"{frame.query.name} {partial.slice_start_ms}"].append(partial.synopsis)
    return {key: _values(GroupedAggregate.from_bytes(GroupedAggregate.merge_bytes(p))) for key, p in parts.items()}


def _values(aggregate: GroupedAggregate) -> list[Any]:
    exact = sorted(set(aggregate.measures) & {"n", "miles", "longest", "delay", "total"})
    values = {name: aggregate.query(name).value.tolist() for name in exact}
    return [aggregate.records, [column.to_pylist() for column in aggregate.rows()], values]


def session(frames: Sequence[Frame]) -> list[pb.FromEdge]:
    """The messages of an edge's session: its Hello, its frames in the session's stream, a heartbeat, its Goodbye."""
    types = {pa.string(): "string", pa.int64(): "int64", pa.float64(): "float64"}
    columns = [pb.Stream.Column(name=name, type=types[of]) for name, of in COLUMNS.items()]
    hello = pb.Hello(
        protocol_min=MIN_PROTOCOL, protocol_max=PROTOCOL, edge=JFK, incarnation=INCARNATION, labels=LABELS,
        streams=[pb.Stream(name="flights", columns=columns)], oldest_seq=frames[0].seq, next_seq=frames[-1].seq + 1,
        sent_at_ms=NOW_MS, runs=[11], durable_records={"flights": ROWS},
        frames=[pb.FrameDigest(seq=f.seq, crc32c=f.crc32c) for f in frames],
    )  # fmt: skip
    progress = pb.StreamProgress(stream="flights", watermark_ms=T0 + 60_000, ended=True, records=ROWS)
    beat = pb.Heartbeat(streams=[progress], sent_at_ms=NOW_MS, drops={"too-late": 1}, busy_share=0.5)
    packer = SessionPacker(WINDOW_LOG, 3)
    wire = [frame.plain().to_wire() for frame in frames]
    sent = [pb.FromEdge(frame=wire[0]), pb.FromEdge(frames=pb.Frames(frames=wire[1:])), pb.FromEdge(heartbeat=beat)]
    goodbye = pb.FromEdge(goodbye=pb.Goodbye(reason="restart"))
    return [pb.FromEdge(hello=hello), *(packer.pack(message.SerializeToString())[0] for message in sent), goodbye]


def replies() -> list[pb.ToEdge]:
    """Messages of a center, one of each kind that an edge acts upon."""
    of = {"query": "budgeted", "query_version": 1}
    specs = [pb.Query(name=spec.name, version=1, spec=json.dumps(spec.to_mapping())) for spec in SPECS]
    return [
        pb.ToEdge(queries=pb.Queries(version=3, queries=specs)),
        pb.ToEdge(sampling=pb.Sampling(**of, rate=0.5, clock_offset_ms=-2.5, reason=SamplingReason.LINK)),
        pb.ToEdge(refused=pb.Refused(**of, reason="not-expected", seq=3, message="of another edge", frames=2)),
        pb.ToEdge(budget=pb.Budget(**of, shares={"miles": 1500.0}, version=2, from_ms=T0, center_ms=40)),
    ]


def descriptors() -> FileDescriptorSet:
    """The messages of this release."""
    described = FileDescriptorSet()
    for module in (pb, synopsis_pb2):
        module.DESCRIPTOR.CopyToProto(file := FileDescriptorProto())
        described.file.append(file)
    return described


def to_file(messages: Iterable[Any]) -> bytes:
    """Messages, each after its length."""
    sent = [message.SerializeToString(deterministic=True) for message in messages]
    return b"".join(part for data in sent for part in (_LENGTH.pack(len(data)), data))


def from_file(data: bytes) -> Iterator[bytes]:
    """Yields the messages that `to_file` wrote."""
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length


def _write_system(target: Path, work: Path) -> dict[str, Any]:
    edge, stores = Edge(work / "edge"), Stores(work)
    edge.begin()
    stores.register()
    edge.read_on(200)
    stores.receive(frames := edge.frames())
    edge.acknowledge(len(frames) - 2)
    edge.core.checkpoint()
    edge.read_on(300)
    later = [frame for frame in edge.frames() if frame.seq > frames[-1].seq]
    stores.receive(later)
    stores.merge()
    unacknowledged = [[f.seq, f.query.name, f.crc32c] for f in edge.frames()]
    edge.core.close()
    shutil.copytree(work / "edge", target / "edge", ignore=shutil.ignore_patterns("*.lock"))
    expected = {"answers": stores.answers(), "unacknowledged": unacknowledged}
    rest = _rest(work, {f.seq for f in (*frames, *later)})
    stores.receive(rest)
    stores.close()
    _pack_stores(work, target)
    again = Stores(work)
    again.merge()
    again.finish()
    every = sorted((*frames, *later, *rest), key=lambda f: f.seq)
    expected |= {"final": again.answers(), "merged": merged(every)}
    again.close()
    (target / "session.bin").write_bytes(to_file(session(every)))
    (target / "frames.bin").write_bytes(to_file(frame.plain().to_wire() for frame in every))
    return expected


def _rest(work: Path, known: set[int]) -> list[Frame]:
    """The frames of the rest of the records, of a copy of the edge."""
    shutil.copytree(work / "edge", work / "copy")
    edge = Edge(work / "copy")
    edge.read_on(ROWS)
    edge.end()
    frames = [frame for frame in edge.frames() if frame.seq not in known]
    edge.core.close()
    return frames


def _pack_stores(work: Path, target: Path) -> None:
    shutil.copytree(work / "log", target / "log")
    for name in ("catalog.db", "results.db"):
        with sqlite3.connect(work / name) as connection:
            connection.execute("PRAGMA journal_mode=DELETE")
            connection.execute("VACUUM")
        connection.close()
        (target / f"{name}.gz").write_bytes(gzip.compress((work / name).read_bytes(), mtime=0))


def unpack(golden: Path, target: Path) -> None:
    """Copies the files of a set to a directory that may change: the edge's state, the stores and the frame log."""
    for name in ("edge", "log"):
        shutil.copytree(golden / name, target / name)
    for name in ("catalog.db", "results.db"):
        (target / name).write_bytes(gzip.decompress((golden / f"{name}.gz").read_bytes()))


def write(release: str, target: Path) -> None:
    """Writes the set of a release to a directory, which is made."""
    (target / "synopses").mkdir(parents=True)
    for name, make in SAMPLES.items():
        (target / "synopses" / f"{name}.bin").write_bytes(make())
    numbers = itertools.count(1)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for module in (
            "edge.durability.durable_core",
            "edge.durability.event_records",
            "edge.durability.state_dir",
            "center.storage.database",
        ):
            stack.enter_context(mock.patch(f"{module}.RELEASE", release))
        stack.enter_context(mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(int=next(numbers) << 64)))
        expected = _write_system(target, work)
    (target / "expected.json").write_text(json.dumps(expected, indent=0, ensure_ascii=False, sort_keys=True) + "\n")
    (target / "replies.bin").write_bytes(to_file(replies()))
    (target / "messages.binpb").write_bytes(descriptors().SerializeToString(deterministic=True))


def main() -> None:
    version = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]["version"]
    release = version.partition(".dev")[0]
    if release == version:
        raise SystemExit(f"release {version} is made, and its golden set stays as it is")
    shutil.rmtree(HERE / release, ignore_errors=True)
    write(release, HERE / release)
    files = [path for path in (HERE / release).rglob("*") if path.is_file()]
    print(f"{HERE / release}: {len(files)} files, {sum(path.stat().st_size for path in files) >> 10} KiB")


if __name__ == "__main__":
    main()
