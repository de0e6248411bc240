"""The formats of sources, and the decoder of each text format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from edge.codecs.access_log import ACCESS_LOGS
from edge.codecs.csv_codec import CsvCodec, CsvDialect
from edge.codecs.csv_records import records_end
from edge.codecs.decompression import Digest
from edge.codecs.fields_codec import LinePattern, logfmt_codec, pattern_codec
from edge.codecs.framing import BlockReader, ByteStream
from edge.codecs.line_decoder import LineCodec, LineDecoder, unlimited
from edge.codecs.ndjson_codec import NdjsonCodec
from edge.codecs.schema import RecordSchema
from edge.records import BLOCK_BYTES

TextFormatName = Literal[
    "ndjson", "csv", "regex", "access", "common", "combined", "vhost_combined", "forwarded_combined", "logfmt"
]
Format = TextFormatName | Literal["parquet"]

EXTENSIONS: dict[str, Format] = {
    ".ndjson": "ndjson",
    ".jsonl": "ndjson",
    ".json": "ndjson",
    ".csv": "csv",
    ".parquet": "parquet",
}


COMMA_SEPARATED = CsvDialect()
_FORMS = {"regex": "a line that the whole of regex.pattern matches", "access": "a line that log_format describes"}


@dataclass(frozen=True, slots=True)
class TextFormat:
    """A text format with its options.

    Attributes:
        header: column names of CSV without a header line; None if the first line of a file has the names.
        pattern: the pattern of the formats `regex` and `access`; None for other formats.
    """

    format: TextFormatName
    schema: RecordSchema
    dialect: CsvDialect = COMMA_SEPARATED
    header: tuple[str, ...] | None = None
    pattern: LinePattern | None = None

    @property
    def needs_header(self) -> bool:
        """Whether a header line has to be read before the records."""
        return self.format == "csv" and self.header is None

    def blocks(
        self, source: ByteStream, block_bytes: int = BLOCK_BYTES, *, digest: Digest | None = None
    ) -> BlockReader:
        """Returns the reader of the blocks of a byte stream, with the digest of the bytes before them."""
        if self.format == "csv":
            end = partial(records_end, delimiter=self.dialect.delimiter)
            return BlockReader(source, end, block_bytes, digest=digest)
        return BlockReader(source, block_bytes=block_bytes, digest=digest)

    def decoder(self, header: tuple[str, ...] | None, where: str, check: Callable[[], None] = unlimited) -> LineDecoder:
        """Builds the decoder for lines.

        Args:
            header: the column names, for CSV only.
            where: name of the input, for messages.
            check: as in `LineDecoder`.

        Raises:
            InvalidRecord: the header lacks a declared column.
        """
        return LineDecoder(self._codec(header or (), where), check)

    def _codec(self, header: tuple[str, ...], where: str) -> LineCodec:
        match self.format:
            case "ndjson":
                return NdjsonCodec(self.schema)
            case "csv":
                return CsvCodec(self.schema, header, self.dialect, where)
            case "logfmt":
                return logfmt_codec(self.schema)
            case other:
                pattern = self.pattern or ACCESS_LOGS[other]
                return pattern_codec(self.schema, pattern, _FORMS.get(other, f"a line of the access log {other}"))
