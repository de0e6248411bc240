"""The zstd stream of a session: the compressor uses the previous messages of the session to compress the next one.

Frames of the same query have the same keys again and again. If each frame is compressed alone, each frame takes bytes
for its keys. In one stream, only the first frame takes these bytes. Identity and checksums of frames are computed from
the plain bodies. So a session that ends loses nothing: the next session begins a new stream and sends unacknowledged
frames again.

Only the uplink and the gateway import it, like the gRPC stubs.
"""

from __future__ import annotations

import zstandard
from google.protobuf.message import DecodeError

from edgewater.base.errors import CorruptFrame
from edgewater.wire import uplink_pb2 as pb

LEAST_WINDOW_LOG, MOST_WINDOW_LOG = 14, 20
"""The windows of a stream: 16 KiB to 1 MiB, the uncompressed bytes of some seconds to minutes of an edge."""
MOST_TABLE_LOG = 17
"""A compressor's tables have at most 2^17 entries: larger ones take 10 to 80 MB, and gain less than a percent."""
_BLOCK_BYTES = 128 << 10  # format: of zstd
_OVERHEAD_BYTES = 1 << 10  # limit: bytes of an envelope
"""A packed message is larger than the message by at most 1/64 and this many bytes. zstd adds 1/256 and some headers. An
edge that sends more adds bytes that decompress to nothing.
"""


def field_bytes(size: int) -> int:
    """Returns the bytes of a field of a message: its tag, its length, and `size` bytes.

    `ByteSize` of a message encodes the message, which takes milliseconds for a large one.
    """
    return 1 + max(1, (size.bit_length() + 6) // 7) + size


def _packed_bytes(data_bytes: int, plain_bytes: int) -> int:
    """Returns the bytes of `FromEdge` with a packed message."""
    number_bytes = field_bytes(plain_bytes) - plain_bytes if plain_bytes else 0
    return field_bytes((field_bytes(data_bytes) if data_bytes else 0) + number_bytes)


def unpacker_bytes(window_log: int) -> int:
    """Returns the maximum memory of a `SessionUnpacker` between two messages, in bytes; 0 if `window_log` is 0 (no
    stream).
    """
    if not window_log:
        return 0
    window, block = 1 << window_log, min(1 << window_log, _BLOCK_BYTES)
    # Two blocks follow the window, so that it does not move. A further block has bytes that are not decoded yet.
    return zstandard.estimate_decompression_context_size() + window + 3 * block


class SessionPacker:
    """Compresses the messages of one session, in the order in which they are sent.

    Args:
        window_log: the window has 2^window_log bytes.
        level: zstd's compression level.
    """

    def __init__(self, window_log: int, level: int) -> None:
        self._window_log = window_log
        self._ended = b""
        self._begin(level)

    def set_level(self, level: int) -> None:
        """Changes the level. With another level a new zstd frame begins, which does not remember earlier messages."""
        if level != self._level:
            self._ended += self._stream.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH)
            self._begin(level)

    def _begin(self, level: int) -> None:
        usual = zstandard.ZstdCompressionParameters.from_level(level)
        parameters = zstandard.ZstdCompressionParameters.from_level(
            level,
            window_log=self._window_log,
            hash_log=min(usual.hash_log, MOST_TABLE_LOG),
            chain_log=min(usual.chain_log, MOST_TABLE_LOG),
        )
        self._level = level
        self._stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()

    def pack(self, plain: bytes) -> tuple[pb.FromEdge, int]:
        """Compresses an encoded message. The interpreter's lock is released meanwhile; calls must not overlap.

        Returns:
            The packed message, and its bytes.
        """
        ended, self._ended = self._ended, b""
        data = ended + self._stream.compress(plain) + self._stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        message = pb.FromEdge(packed=pb.Packed(data=data, plain_bytes=len(plain)))
        return message, _packed_bytes(len(data), len(plain))


class _BoundedSink:
    """Collects decompressed bytes, up to a limit."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._room = 0

    def expect(self, size: int) -> None:
        self._chunks, self._room = [], size

    def write(self, chunk: bytes) -> int:
        self._room -= len(chunk)
        if self._room < 0:
            raise CorruptFrame("a packed message is longer than it says")
        self._chunks.append(chunk)
        return len(chunk)

    def take(self) -> bytes:
        if self._room:
            raise CorruptFrame(f"a packed message is {self._room} bytes shorter than it says")
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class SessionUnpacker:
    """Decompresses the messages of one session, in their order. After an error the stream cannot be continued.

    Args:
        window_log: a stream with a larger window is refused.
        max_message_bytes: the largest message, before compression.
    """

    def __init__(self, window_log: int, max_message_bytes: int) -> None:
        self._most = max_message_bytes
        self._sink = _BoundedSink()
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << window_log)
        # Written in one piece: with several pieces, the rest in the decompressor would wait for the next message.
        self._stream = decompressor.stream_writer(self._sink, write_size=max_message_bytes + 1, closefd=False)  # type: ignore[arg-type]

    def unpack(self, packed: pb.Packed) -> tuple[pb.FromEdge, float]:
        """Decompresses a message, at most the bytes that it states. Releases the interpreter's lock meanwhile.

        Returns:
            The message, and the bytes of the packed message per byte of it.

        Raises:
            CorruptFrame: the data is larger than permitted, has another length than stated, or is not a message.
        """
        if packed.plain_bytes > self._most:
            raise CorruptFrame(f"a packed message of {packed.plain_bytes} bytes; expected at most {self._most}")
        most = packed.plain_bytes + packed.plain_bytes // 64 + _OVERHEAD_BYTES
        data = packed.data  # each access copies it
        if len(data) > most:
            raise CorruptFrame(f"a packed message of {len(data)} bytes; expected at most {most}")
        self._sink.expect(packed.plain_bytes)
        try:
            self._stream.write(data)
        except zstandard.ZstdError as exc:
            raise CorruptFrame(f"a packed message cannot be decompressed: {exc}") from exc
        plain = self._sink.take()
        try:
            message = pb.FromEdge.FromString(plain)
        except DecodeError as exc:
            raise CorruptFrame(f"a packed message cannot be read: {exc}") from exc
        kind = message.WhichOneof("message")
        if kind in ("hello", "packed"):
            raise CorruptFrame(f"a packed message contains a {kind}")
        return message, _packed_bytes(len(data), packed.plain_bytes) / max(packed.plain_bytes, 1)
