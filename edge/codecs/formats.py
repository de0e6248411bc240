"""The formats of sources, and the decoder of each text format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from edge.codecs.csv_codec import CsvCodec, CsvDialect
from edge.codecs.line_decoder import LineDecoder, unlimited
from edge.codecs.ndjson_codec import NdjsonCodec
from edge.codecs.schema import RecordSchema

Format = Literal["ndjson", "csv", "parquet"]

EXTENSIONS: dict[str, Format] = {
    ".ndjson": "ndjson",
    ".jsonl": "ndjson",
    ".json": "ndjson",
    ".csv": "csv",
    ".parquet": "parquet",
}


COMMA_SEPARATED = CsvDialect()


@dataclass(frozen=True, slots=True)
class TextFormat:
    """A text format with its options.

    Attributes:
        header: column names of CSV without a header line; None: the first line of a file names them.
    """

    format: Literal["ndjson", "csv"]
    schema: RecordSchema
    dialect: CsvDialect = COMMA_SEPARATED
    header: tuple[str, ...] | None = None

    @property
    def needs_header(self) -> bool:
        """Whether a header line has to be read before the records."""
        return self.format == "csv" and self.header is None

    def decoder(self, header: tuple[str, ...] | None, where: str, check: Callable[[], None] = unlimited) -> LineDecoder:
        """Builds the decoder for the lines below `header` (used for CSV only).

        Args:
            where: name of the input, for messages.
            check: as of `LineDecoder`.

        Raises:
            InvalidRecord: the header lacks a declared column.
        """
        if self.format == "ndjson":
            return LineDecoder(NdjsonCodec(self.schema), check)
        return LineDecoder(CsvCodec(self.schema, header or (), self.dialect, where), check)
