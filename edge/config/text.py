"""Text formats of records, and their options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from edge.codecs.access_log import ACCESS_LOGS, ACCESS_NULLS, log_format
from edge.codecs.csv_codec import CsvDialect
from edge.codecs.fields_codec import LinePattern
from edge.codecs.formats import TextFormat, TextFormatName
from edge.codecs.schema import RecordSchema
from edge.config.section import Model
from edgewater.base.errors import did_you_mean
from edgewater.runtime.configuration import refusal


class CsvConfig(Model):
    """The CSV dialect."""

    delimiter: str = Field(default=",", pattern=r"^[\t !#-~]$")
    """One character between fields."""
    nulls: list[str] = []
    """Texts that mean null in every column. If the list is empty, an empty field means null. In columns that are not
    strings, `NA`, `N/A`, `#NA`, `#N/A`, `NULL`, `NaN`, their lower case and the like then also mean null.
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
    log_format: str | None = Field(default=None, max_length=MAX_PATTERN)
    """The lines of the format `access`: a directive `log_format` of nginx or `LogFormat` of Apache, or only its
    template."""

    @model_validator(mode="before")
    @classmethod
    def _format_by_options(cls, options: Any) -> Any:
        if isinstance(options, dict) and "format" not in options:
            named = "regex" if "regex" in options else "access" if "log_format" in options else None
            return options if named is None else {**options, "format": named}
        return options

    @field_validator("log_format")
    @classmethod
    def _declared(cls, declared: str | None) -> str | None:
        accepted = "a log_format of nginx, or a LogFormat of Apache, such as '$remote_addr [$time_local] $request_time'"
        try:
            fault = None if declared is None else LinePattern(log_format(declared).pattern).fault
        except ValueError as exc:
            fault = str(exc)
        if fault is not None:
            raise refusal(accepted, fault)
        return declared

    @model_validator(mode="after")
    def _pattern_fits(self) -> Self:
        if (self.format == "regex") != (self.regex is not None):
            accepted = "regex: {pattern: …} with format: regex, and with no other format"
            raise refusal(accepted, f"format is {self.format}")
        if (self.format == "access") != (self.log_format is not None):
            raise refusal("log_format with format: access, and with no other format", f"format is {self.format}")
        return self

    def column_fault(self, columns: Sequence[str]) -> tuple[str, str] | None:
        """Returns what is accepted and what is wrong; None if the fields of the format fit the columns."""
        pattern = self.pattern
        groups = pattern.groups if pattern is not None else []
        for name in columns if pattern is not None else ():
            if name not in groups:
                accepted = f"columns among the fields of the format {self.format}: {', '.join(groups)}"
                return accepted, f"column {name} is none of these fields{did_you_mean(name, groups)}"
        for name in groups if self.regex is not None else ():
            if name not in columns:
                accepted = f"groups of regex.pattern that are columns or the time: {', '.join(columns)}"
                return accepted, f"the group {name} is none of them; (?:…) is a group without a column"
        return None

    @property
    def pattern(self) -> LinePattern | None:
        if self.regex is not None:
            return LinePattern(self.regex.pattern, tuple(self.regex.nulls))
        if self.log_format is not None:
            return LinePattern(log_format(self.log_format).pattern, ACCESS_NULLS)
        return ACCESS_LOGS.get(self.format)

    def text_format(self, schema: RecordSchema) -> TextFormat:
        """Returns the format for records of a stream. Not for Parquet."""
        header = tuple(self.csv.header) if self.csv.header is not None and self.format == "csv" else None
        return TextFormat(self.format, schema, self.csv.dialect, header, self.pattern)


class MessageConfig(TextConfig):
    """The text format of a source whose records are messages. Other columns come from beside their bodies."""

    @property
    def more(self) -> list[str]:
        """The columns whose values do not come from the bodies of messages."""
        return []

    @model_validator(mode="after")
    def _has_header(self) -> Self:
        if self.format == "csv" and self.csv.header is None:
            raise refusal("csv: {header: […]}, as messages have no header line", "format is csv")
        return self

    def column_fault(self, columns: Sequence[str]) -> tuple[str, str] | None:
        for name in self.more:
            if name not in columns:
                return f"columns of the stream or its time: {', '.join(columns)}", f"{name} is none of them"
            if self.more.count(name) > 1:
                return "each column from one place", f"{name} is there twice"
        return super().column_fault([name for name in columns if name not in self.more])
