"""The syslog source: framing, limits and options; and real senders: logger, rsyslogd and openssl."""

from __future__ import annotations

import asyncio
import contextlib
import logging.handlers
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pydantic import ValidationError

from edge.codecs.schema import EventTime, RecordSchema
from edge.config import parse_config
from edge.preflight import check
from edge.records import Chunk
from edge.source_kinds import SourceContext
from edge.sources.syslog import KIND, SyslogConfig, SyslogSource, _Connection, _Intake
from edge.sources.syslog_framing import BadFrame, Framing
from edgewater.base.errors import InvalidConfig
from edgewater.base.streams import Delivery
from sim.demo.ports import free_port
from tests.brokers import TIMEOUT_S, until_open
from tests.certificates import make_certificates
from tests.edge.agent_process import AgentProcess
from tests.programs import running

SCHEMA = RecordSchema({"severity": pa.int64(), "message": pa.string()}, EventTime("at", max_skew_ms=None))
NOW_MS = 1_700_000_000_000


def source(schema: RecordSchema = SCHEMA, **options: Any) -> SyslogSource:
    config = SyslogConfig.model_validate({"listen": "127.0.0.1:0", **options})
    (made,) = KIND.sources(config, SourceContext("s", schema, lambda: NOW_MS))
    assert isinstance(made, SyslogSource)
    return made


def message(text: str | int, severity: int = 5) -> bytes:
    return f"<{8 + severity}>1 2023-11-14T22:13:20Z host app - - - {text}".encode()


def counted(*messages: bytes) -> bytes:
    return b"".join(b"%d %s" % (len(each), each) for each in messages)


def read(
    made: SyslogSource, send: Callable[[tuple[str, int]], object], enough: Callable[[list[Chunk]], bool]
) -> list[Chunk]:
    """Reads until there is enough. `send` gets the source's address, in a thread."""

    async def collect() -> list[Chunk]:
        stream, chunks = made.chunks(None), list[Chunk]()
        async with asyncio.timeout(TIMEOUT_S):
            first = asyncio.ensure_future(anext(stream))
            while made.address is None and not first.done():
                await asyncio.sleep(0.005)
            if made.address is not None:
                await asyncio.to_thread(send, made.address)
            chunks.append(await first)
            while not enough(chunks):
                chunks.append(await anext(stream))
        await stream.aclose()  # type: ignore[attr-defined]
        return chunks

    return asyncio.run(collect())


def texts(chunks: Sequence[Chunk]) -> list[str]:
    return [text for chunk in chunks for text in chunk.batch.column("message").to_pylist()]


def rejected(chunks: Sequence[Chunk]) -> dict[str, int]:
    found: dict[str, int] = {}
    for rejection in (r for chunk in chunks for r in chunk.rejected):
        found[rejection.reason] = found.get(rejection.reason, 0) + rejection.count
    return found


def over_tcp(*parts: bytes) -> Callable[[tuple[str, int]], object]:
    def send(address: tuple[str, int]) -> None:
        with socket.create_connection(address, TIMEOUT_S) as sender:
            for part in parts:
                sender.sendall(part)

    return send


def enough(rows: int, bad: int = 0) -> Callable[[list[Chunk]], bool]:
    return lambda chunks: len(texts(chunks)) >= rows and sum(rejected(chunks).values()) >= bad


@pytest.mark.parametrize("pieces", [1, 2, 7, 1000])
@pytest.mark.parametrize("counts", [False, True], ids=["lines", "octets"])
def test_framing_gives_the_same_messages_however_the_bytes_arrive(counts: bool, pieces: int) -> None:
    sent = [b"<13>a", b"<13>" + b"x" * 50, b"<13>b c", b"<13>" + b"y" * 30, b"<13>d"]
    data = counted(*sent) if counts else b"".join(each + b"\n" for each in sent)
    framing, size = Framing(30), -(-len(data) // pieces)
    got = b"".join(framing.feed(data[at : at + size]) for at in range(0, len(data), size)) + framing.end()
    assert got.splitlines() == [sent[0], sent[2], sent[4]]
    assert [each[:5] for each in framing.take_too_long()] == [b"<13>x", b"<13>y"]
    assert framing.take_too_long() == []


@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("trailer", [b"\n", b"\0", b"\r\n", b"\n\0", b"\0\n", b"\r"])
def test_each_trailer_that_senders_use_ends_a_message(trailer: bytes, pieces: int) -> None:
    sent = [b"<13>a", b"<13>" + b"x" * 50, b"<13>b\rc", b"<13>d"]
    data = b"".join(each + trailer for each in sent)
    framing, size = Framing(30), -(-len(data) // pieces)
    got = b"".join(framing.feed(data[at : at + size]) for at in range(0, len(data), size)) + framing.end()
    assert [line.rstrip(b"\r") for line in got.split(b"\n") if line.strip()] == [sent[0], sent[2], sent[3]]
    assert [each[:5] for each in framing.take_too_long()] == [b"<13>x"]


def test_with_octet_counting_a_nul_inside_stays_and_trailers_are_skipped() -> None:
    sent = [b"<13>a\0b", b"<13>c\0", b"<13>d\n", b"<13>e"]
    assert Framing(100).feed(counted(*sent)) == b"<13>a\0b\n<13>c\n<13>d\n<13>e\n"
    framing = Framing(100)
    got = [framing.feed(bytes([byte])) for byte in b"".join(counted(each) + b"\n\0" for each in sent[:2])]
    assert b"".join(got) == b"<13>a\0b\n<13>c\n"


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_handler_of_pythons_logging_sends_messages(protocol: str) -> None:
    def send(address: tuple[str, int]) -> None:
        kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
        handler = logging.handlers.SysLogHandler(address, socktype=kind)  # it ends each message with a NUL
        try:
            for number in range(5):
                text = f"Nov 14 22:13:20 host app: {number}"
                handler.emit(logging.LogRecord("x", logging.INFO, "", 1, text, None, None))
        finally:
            handler.close()

    chunks = read(source(protocol=protocol), send, enough(5))
    assert (texts(chunks), rejected(chunks)) == (["0", "1", "2", "3", "4"], {})


def test_the_last_line_of_a_connection_needs_no_line_feed() -> None:
    framing = Framing(100)
    assert (framing.feed(b"<13>a\n<13>b"), framing.end()) == (b"<13>a\n", b"<13>b\n")


@pytest.mark.parametrize("data", [b"10 <13>a", b"10 ", b"1"])
def test_a_part_of_a_message_is_no_message_and_is_not_lost_silently(data: bytes) -> None:
    counted_octets, cut = Framing(100), Framing(100)
    assert counted_octets.feed(data) == cut.feed(b"<13>took=12") == b""
    for framing, is_cut in ((counted_octets, False), (cut, True)):
        with pytest.raises(BadFrame) as failed:
            framing.end(is_cut=is_cut)
        assert "part of a message" in str(failed.value)


@pytest.mark.parametrize("data", [message(1) + b"\n" + message(23), counted(message(1), message(23))])
def test_a_message_whose_connection_is_cut_is_rejected(data: bytes) -> None:
    def send(address: tuple[str, int]) -> None:
        with socket.create_connection(address, TIMEOUT_S) as cut:
            cut.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
            cut.sendall(data[:-1])
            time.sleep(0.2)

    chunks = read(source(), send, enough(1, 1))
    assert (texts(chunks), rejected(chunks)) == (["1"], {"malformed": 1})


def test_a_line_feed_inside_a_counted_message_is_a_space() -> None:
    assert Framing(100).feed(counted(b"<13>a\nb", b"<13>c\n")) == b"<13>a b\n<13>c\n"


@pytest.mark.parametrize("bad", [b"5 <13>a<13>b", b"5 <13>a99999999999 x", b"5 <13>a x"])
def test_bytes_without_a_length_end_the_framing_after_the_messages_before(bad: bytes) -> None:
    with pytest.raises(BadFrame) as failed:
        Framing(100).feed(bad)
    assert failed.value.before == b"<13>a\n"


def test_bad_messages_cost_only_themselves() -> None:
    long = b"<13>" + b"x" * 1000
    data = b"\n".join([message(1), b"oops", long, message(2), message(3)]) + b"\n"
    chunks = read(source(max_message="480B"), over_tcp(data), enough(3, 2))
    assert texts(chunks) == ["1", "2", "3"]
    assert rejected(chunks) == {"malformed": 1, "too-long": 1}


def test_a_connection_with_a_bad_length_ends_and_others_go_on() -> None:
    def send(address: tuple[str, int]) -> None:
        with socket.create_connection(address, TIMEOUT_S) as good, socket.create_connection(address, TIMEOUT_S) as bad:
            bad.sendall(counted(message("before")) + b"x" * 20)
            assert bad.recv(1) == b""
            good.sendall(counted(message("good")))

    chunks = read(source(), send, enough(2, 1))
    assert sorted(texts(chunks)) == ["before", "good"]
    assert rejected(chunks) == {"malformed": 1}


def test_a_new_sender_takes_the_place_of_the_one_that_is_idle_the_longest() -> None:
    def send(address: tuple[str, int]) -> None:
        connect = lambda: socket.create_connection(address, TIMEOUT_S)  # noqa: E731
        with connect() as first, connect() as second:
            second.sendall(message("second") + b"\n")
            first.sendall(message("first") + b"\n")
            with connect() as third:
                third.sendall(message("third") + b"\n")
                ended, _, _ = select_readable([first, second])
                assert len(ended) == 1 and has_ended(ended[0])

    # What the sender had sent and the source had not read is lost with its connection.
    got = texts(read(source(max_connections=2), send, lambda chunks: "third" in texts(chunks)))
    assert {"third"} < set(got) <= {"first", "second", "third"}


def from_machine(host: str, address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, TIMEOUT_S, (host, 0))


def ended(connections: Sequence[socket.socket]) -> None:
    """Waits until at least one of the connections has ended."""
    readable, _, _ = select_readable(list(connections))
    assert all(map(has_ended, readable))


@pytest.mark.parametrize("attack", [b"", b"<", b"12"])
def test_silent_connections_cut_no_sender_and_no_silent_connection_of_another_machine(attack: bytes) -> None:
    def send(address: tuple[str, int]) -> None:
        with contextlib.ExitStack() as opened:
            sender = opened.enter_context(from_machine("127.0.0.1", address))
            sender.sendall(message("before") + b"\n")
            waiting = opened.enter_context(from_machine("127.0.0.3", address))
            hostile = [opened.enter_context(from_machine("127.0.0.2", address)) for _ in range(8)]
            for each in hostile:
                with contextlib.suppress(ConnectionError):
                    each.sendall(attack)
            ended(hostile)
            sender.sendall(message("after") + b"\n")
            waiting.sendall(message("first") + b"\n")

    got = texts(read(source(max_connections=4), send, enough(3)))
    assert set(got) == {"before", "after", "first"}


def test_beyond_the_limit_a_connection_of_the_machine_with_the_most_connections_ends() -> None:
    def send(address: tuple[str, int]) -> None:
        with contextlib.ExitStack() as opened:
            sender = opened.enter_context(from_machine("127.0.0.1", address))
            sender.sendall(message("before") + b"\n")
            hostile = [opened.enter_context(from_machine("127.0.0.2", address)) for _ in range(4)]
            for each in hostile:
                with contextlib.suppress(ConnectionError):
                    each.sendall(message("hostile") + b"\n")
            ended(hostile)
            sender.sendall(message("after") + b"\n")

    assert "after" in texts(read(source(max_connections=3), send, lambda chunks: "after" in texts(chunks)))


def test_a_sender_with_a_certificate_is_cut_by_none_without_a_message(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, {"localhost": "DNS:localhost", "app": "DNS:app"})
    tls = {"cert": str(made / "localhost.pem"), "key": str(made / "localhost.key"), "client_ca": str(made / "ca.pem")}

    def send(address: tuple[str, int]) -> None:
        context = ssl.create_default_context(cafile=tls["client_ca"])
        context.check_hostname = False
        context.load_cert_chain(made / "app.pem", made / "app.key")
        with contextlib.ExitStack() as opened:
            plain = from_machine("127.0.0.1", address)
            sender = opened.enter_context(context.wrap_socket(plain))
            sender.settimeout(0.2)  # the certificate arrives at the edge before the next connection
            with contextlib.suppress(TimeoutError):
                sender.recv(1)
            hostile = [opened.enter_context(from_machine("127.0.0.2", address)) for _ in range(4)]
            ended(hostile)
            sender.sendall(counted(message("late")))

    assert texts(read(source(max_connections=1, tls=tls), send, enough(1))) == ["late"]


def has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def select_readable(sockets: list[socket.socket]) -> tuple[list[socket.socket], list[Any], list[Any]]:
    import select

    return select.select(sockets, [], [], TIMEOUT_S)


def test_an_idle_connection_is_closed() -> None:
    def send(address: tuple[str, int]) -> None:
        with socket.create_connection(address, TIMEOUT_S) as sender:
            sender.sendall(message(1) + b"\n" + message(23)[:-1])
            assert sender.recv(1) == b""

    chunks = read(source(idle="1s"), send, enough(1, 1))
    assert (texts(chunks), rejected(chunks)) == (["1"], {"malformed": 1}), "a part of a message is no message"


def test_machines_outside_of_peers_are_refused() -> None:
    def send(address: tuple[str, int]) -> None:
        with socket.create_connection(("127.0.0.1", address[1]), TIMEOUT_S, ("127.0.0.2", 0)) as stranger:
            stranger.settimeout(TIMEOUT_S)
            try:
                stranger.sendall(message("no") + b"\n")
                assert stranger.recv(1) == b""
            except ConnectionError:
                pass
        with socket.create_connection(("127.0.0.1", address[1]), TIMEOUT_S, ("127.0.0.3", 0)) as known:
            known.sendall(message("yes") + b"\n")

    made = source(listen="127.0.0.1:0", peers=["127.0.0.3/32"])
    assert texts(read(made, send, enough(1))) == ["yes"]


def test_datagrams_are_messages() -> None:
    def send(address: tuple[str, int]) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for each in (message(1), b"", message("2\n"), message("3\0"), message("a\nb"), message("c\n\0")):
                sender.sendto(each, address)

    chunks = read(source(protocol="udp", receive_buffer="1MiB"), send, enough(5, 1))
    assert texts(chunks) == ["1", "2", "3", "a b", "c"]
    assert rejected(chunks) == {"malformed": 1}


def test_the_text_of_a_message_may_have_a_format() -> None:
    schema = RecordSchema({"host": pa.string(), "x": pa.int64(), "route": pa.string()}, EventTime("at"))
    made = source(schema, format="logfmt", columns={"host": "host", "at": "time"})
    sent = [message("x=1 route=/a"), message("nothing"), message("x=no route=/b"), message("x=2")]
    chunks = read(made, over_tcp(counted(*sent)), lambda c: sum(chunk.batch.num_rows for chunk in c) >= 2)
    rows = [row for chunk in chunks for row in chunk.batch.to_pylist()]
    assert [(row["host"], row["x"], row["route"]) for row in rows] == [("host", 1, "/a"), ("host", 2, None)]
    assert rejected(chunks) == {"malformed": 1, "wrong-type": 1}
    in_body = source(schema, format="logfmt", columns={"host": "host"})
    chunks = read(in_body, over_tcp(counted(message(f"x=1 at={NOW_MS}"))), lambda c: bool(c[0].batch.num_rows))
    assert chunks[0].batch.column("event_time_ms").to_pylist() == [NOW_MS]


def test_an_address_that_is_taken_is_a_failure_of_the_source() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        made = source(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(OSError, match="address"):
            read(made, lambda _: None, lambda _: True)
    assert made.delivery is Delivery.AT_MOST_ONCE


@pytest.mark.parametrize(
    "options",
    [
        {"listen": "0.0.0.0:514"},
        {"listen": "nowhere"},
        {"protocol": "udp", "tls": {"cert": "a", "key": "b"}},
        {"receive_buffer": "1MiB"},
        {"peers": ["all"]},
        {"columns": {"severity": "level"}},
        {"columns": {"x": "sd.only"}},
        {"zone": "Mars"},
        {"format": "csv"},
        {"max_message": "1B"},
        {"max_connections": 0},
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SyslogConfig.model_validate({"listen": "127.0.0.1:0", **options})


@pytest.mark.parametrize(
    ("columns", "options", "field"),
    [
        ({"level": "int64"}, {}, "columns"),
        ({"severity": "float64"}, {}, "columns"),
        ({"at": "int64"}, {}, "columns"),
        ({"host": "string"}, {"columns": {"ghost": "host"}}, "columns"),
        ({"host": "string"}, {"columns": {"at": "host"}}, "columns"),
        ({"host": "string"}, {"tls": {"cert": "/nowhere", "key": "/nowhere"}}, "tls"),
    ],
)
def test_the_check_of_an_edge_names_what_does_not_fit(
    tmp_path: Path, columns: dict[str, str], options: dict[str, Any], field: str
) -> None:
    config = parse_config(
        {
            "edge": "e",
            "state_dir": str(tmp_path),
            "streams": {
                "s": {
                    "columns": columns,
                    "time": {"column": "at"},
                    "sources": [{"syslog": {"listen": "127.0.0.1:0", **options}}],
                }
            },
        }
    )
    (stream,) = check(config, lambda: NOW_MS).streams
    assert any(f"streams.s.sources.syslog.{field}" in problem for problem in stream.sources[0].problems)


def test_a_failed_handshake_costs_only_its_connection(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, {"localhost": "DNS:localhost", "app": "DNS:app"})
    tls = {"cert": str(made / "localhost.pem"), "key": str(made / "localhost.key"), "client_ca": str(made / "ca.pem")}

    def send(address: tuple[str, int]) -> None:
        with socket.create_connection(address, TIMEOUT_S) as plain:
            plain.sendall(message("plain") + b"\n")
            plain.settimeout(TIMEOUT_S)
            while plain.recv(100):
                pass
        trusted = ssl.create_default_context(cafile=str(made / "ca.pem"))
        trusted.load_cert_chain(made / "app.pem", made / "app.key")
        with (
            socket.create_connection(address, TIMEOUT_S) as raw,
            trusted.wrap_socket(raw, server_hostname="localhost") as sender,
        ):
            sender.sendall(counted(message("secret")))

    with pytest.raises(InvalidConfig):
        source(tls={**tls, "key": "/nowhere"})
    assert texts(read(source(tls=tls), send, enough(1))) == ["secret"]


# --- real senders and a real agent -----------------------------------------------------------------------------------

SENT = 20_000


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[..., AgentProcess]]:
    made = list[AgentProcess]()

    def start(**options: Any) -> AgentProcess:
        process = AgentProcess(tmp_path, [{"syslog": {"columns": {"x": "severity"}, **options}}])
        made.append(process)
        process.start()
        if options.get("protocol") != "udp":
            until_open(int(options["listen"].rpartition(":")[2]))
        return process

    try:
        yield start
    finally:
        for process in made:
            process.close()


@pytest.fixture
def helpers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def wait_for(process: AgentProcess, records: int) -> None:
    try:
        process.until(lambda: process.records() >= records)
    finally:
        assert process.records() == records, process.metrics()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [["--octet-count", "--rfc5424"], ["--rfc3164"]], ids=["octet counting", "lines of RFC 3164"]
)
def test_every_message_of_logger_arrives_over_tcp(
    agent: Callable[..., AgentProcess], tmp_path: Path, logger: str, options: list[str]
) -> None:
    port = free_port()
    process = agent(listen=f"127.0.0.1:{port}")
    lines = tmp_path / "lines"
    lines.write_text("".join(f"message {n}\n" for n in range(SENT)))
    command = [logger, "--server", "127.0.0.1", "--port", str(port), "--tcp", *options, "--file", str(lines)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    wait_for(process, SENT)


@pytest.mark.nightly
def test_messages_of_logger_arrive_over_udp(agent: Callable[..., AgentProcess], tmp_path: Path, logger: str) -> None:
    port = free_port(socket.SOCK_DGRAM)
    process = agent(listen=f"127.0.0.1:{port}", protocol="udp", receive_buffer="4MiB")
    # Nobody keeps a datagram for a socket that is not open yet.
    process.until(lambda: f":{port:04X} " in Path("/proc/net/udp").read_text())
    lines = tmp_path / "lines"
    lines.write_text("".join(f"message {n}\n" for n in range(100)))
    command = [logger, "--server", "127.0.0.1", "--port", str(port), "--udp", "--file", str(lines)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    wait_for(process, 100)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "framing", ["tls", *(pytest.param(name, marks=pytest.mark.full) for name in ("octet-counted", "traditional"))]
)
def test_every_message_of_rsyslog_arrives(
    agent: Callable[..., AgentProcess], tmp_path: Path, rsyslogd: str, stunnel: str, helpers: ExitStack, framing: str
) -> None:
    """Its TLS begins in stunnel, because Debian's rsyslog has none without a further package."""
    port = target = free_port()
    options: dict[str, Any] = {"listen": f"127.0.0.1:{port}"}
    if framing == "tls":
        made = make_certificates(tmp_path, {"localhost": "DNS:localhost", "app": "DNS:app"})
        options["tls"] = {
            "cert": str(made / "localhost.pem"), "key": str(made / "localhost.key"), "client_ca": str(made / "ca.pem")
        }  # fmt: skip
        target = free_port()
        tunnel = tmp_path / "stunnel.conf"
        tunnel.write_text(
            f"foreground = yes\npid =\n[syslog]\nclient = yes\naccept = 127.0.0.1:{target}\n"
            f"connect = 127.0.0.1:{port}\nCAfile = {made}/ca.pem\nverifyChain = yes\n"
            f"cert = {made}/app.pem\nkey = {made}/app.key\n"
        )
        helpers.enter_context(running([stunnel, str(tunnel)], stderr=subprocess.DEVNULL))
        until_open(target)
    process = agent(**options)
    lines, work = tmp_path / "lines.log", tmp_path / "rsyslog"
    work.mkdir()
    lines.write_text("".join(f"message {n}\n" for n in range(SENT)))
    config = tmp_path / "rsyslog.conf"
    wanted = "octet-counted" if framing == "tls" else framing
    template = "RSYSLOG_SyslogProtocol23Format" if framing == "octet-counted" else "RSYSLOG_TraditionalForwardFormat"
    config.write_text(
        f'global(workDirectory="{work}")\nmodule(load="imfile")\n'
        f'input(type="imfile" File="{lines}" Tag="test:" Severity="info")\n'
        f'action(type="omfwd" Target="127.0.0.1" Port="{target}" Protocol="tcp" TCP_Framing="{wanted}"\n'
        f'  Template="{template}" queue.type="linkedList" action.resumeRetryCount="-1")\n'
    )
    command = [rsyslogd, "-n", "-f", str(config), "-i", str(tmp_path / "rsyslog.pid")]
    helpers.enter_context(running(command, stderr=subprocess.DEVNULL))
    process.until(lambda: process.records() >= SENT)
    assert SENT <= process.records() <= SENT + 10, "rsyslog sends some messages about itself"
    assert not [name for name in process.metrics() or {} if "rejected_records_total{" in name]


@pytest.mark.nightly
def test_a_killed_agent_counts_no_message_twice_and_states_a_loss(agent: Callable[..., AgentProcess]) -> None:
    port = free_port()
    process = agent(listen=f"127.0.0.1:{port}")
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    data = b"".join(b"<13>1 %s h a - - - %d\n" % (at.encode(), n) for n in range(1000))
    over_tcp(data)(("127.0.0.1", port))
    wait_for(process, 1000)
    process.kill()
    process.start()
    until_open(port)
    recovered = process.records()
    assert recovered <= 1000
    over_tcp(data)(("127.0.0.1", port))
    wait_for(process, recovered + 1000)
    assert process.losses() == {"restart": 1}


def test_a_sender_that_leaves_in_its_tls_handshake_raises_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def left(*_: object, **__: object) -> None:
        return None

    async def run() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "start_tls", left, raising=False)
        connection = _Connection(_Intake(SyslogConfig(listen="127.0.0.1:0"), loop.time))
        await connection._start_tls(Mock(spec=asyncio.Transport), ssl.create_default_context())

    asyncio.run(run())
