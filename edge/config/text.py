"""Text formats of records, and their options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from edge.codecs import ACCESS_LOGS, CsvDialect, LinePattern, RecordSchema, TextFormat, TextFormatName, access_fields
from edge.config.section import Model
from edgewater.runtime.configuration import refusal


class CsvConfig(Model):
    """The CSV dialect."""

    delimiter: str = Field(default=",", pattern=r"^[\t !#-~]$")
    """One character between fields."""
    nulls: list[str] = []
    """Texts that mean null in every column. If the list is empty, an empty field means null. In columns that are not
    strings, NA, NULL and NaN then also mean null.
    """
    header: list[str] | None = None
    """Names of the columns, for input without a header line."""

    @property
    def dialect(self) -> CsvDialect:
        return CsvDialect(self.delimiter, tuple(self.nulls))


MAX_PATTERN = 4096
"""The largest length of a regular expression, in characters."""


class RegexConfig(Model):
    """The pattern of the format `regex`."""

    pattern: str = Field(min_length=1, max_length=MAX_PATTERN)
    """A regular expression of RE2 that matches a whole line, with a named group per column."""
    nulls: list[str] = []
    """Texts that mean null. An empty text always means null."""

    @field_validator("pattern")
    @classmethod
    def _pattern(cls, pattern: str) -> str:
        if (fault := LinePattern(pattern).fault) is not None:
            accepted = "a regular expression of RE2 with a named group per column, such as (?P<status>[0-9]+)"
            raise refusal(f"{accepted}; RE2 has no backreferences and no lookarounds", fault)
        return pattern


class TextConfig(Model):
    """The text format and its options, of a source whose records are lines."""

    format: TextFormatName
    """The format of the records."""
    csv: CsvConfig = CsvConfig()
    """Options of the format `csv`."""
    regex: RegexConfig | None = None
    """The pattern of the format `regex`."""

    @model_validator(mode="before")
    @classmethod
    def _format_by_options(cls, options: Any) -> Any:
        if isinstance(options, dict) and "format" not in options and "regex" in options:
            return {**options, "format": "regex"}
        return options

    @model_validator(mode="after")
    def _pattern_fits(self) -> Self:
        if (self.format == "regex") != (self.regex is not None):
            accepted = "regex: {pattern: …} with format: regex, and with no other format"
            raise refusal(accepted, f"format is {self.format}")
        return self

    def column_fault(self, columns: Sequence[str]) -> tuple[str, str] | None:
        """Returns what is accepted and what is wrong; None if the fields of the format fit the columns."""
        is_access_log = self.format in ACCESS_LOGS
        groups = self.pattern.groups if self.regex is not None else access_fields(self.format) if is_access_log else []
        if is_access_log or self.regex is not None:
            for name in columns:
                if name not in groups:
                    accepted = f"columns among the fields of the format {self.format}: {', '.join(groups)}"
                    return accepted, f"column {name} is none of these fields"
        for name in groups if self.regex is not None else ():
            if name not in columns:
                accepted = f"groups of regex.pattern that are columns or the time: {', '.join(columns)}"
                return accepted, f"the group {name} is none of them; (?:…) is a group without a column"
        return None

    @property
    def pattern(self) -> LinePattern:
        assert self.regex is not None
        return LinePattern(self.regex.pattern, tuple(self.regex.nulls))

    def text_format(self, schema: RecordSchema) -> TextFormat:
        """Returns the format for records of a stream. Not for Parquet."""
        header = tuple(self.csv.header) if self.csv.header is not None and self.format == "csv" else None
        pattern = self.pattern if self.regex is not None else None
        return TextFormat(self.format, schema, self.csv.dialect, header, pattern)
