"""The section `streams`: columns, event time, lookups and sources of a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import AfterValidator, Field, field_validator, model_validator

from edge.codecs.access_log import ACCESS_LOGS, ACCESS_TIME, log_format
from edge.codecs.event_time import is_time_pattern
from edge.codecs.formats import EXTENSIONS
from edge.codecs.schema import MAX_SKEW_MS, MS_PER_UNIT, TIME_UNITS, YEAR_2000_MS, EventTime, RecordSchema
from edge.config.section import Model
from edge.config.sources import SourceConfig
from edgewater.base.errors import did_you_mean
from edgewater.base.streams import COLUMN_TYPES, MAX_CONSTANT, TIME_COLUMN, Constant, is_constant
from edgewater.model.calendars import is_zone
from edgewater.runtime.configuration import INSTANT_ACCEPTED, Duration, Instant, refusal

IDLE_MS = 10_000  # limit: how long a silent source holds its stream back


def _known_zone(name: str) -> str:
    if not is_zone(name):
        raise refusal("the IANA name of a time zone, such as Europe/Berlin", f"got {name!r}")
    return name


def _known_type(kind: str) -> str:
    if kind not in COLUMN_TYPES:
        raise refusal(f"a type among {', '.join(COLUMN_TYPES)}", f"unknown type{did_you_mean(kind, COLUMN_TYPES)}")
    return kind


Columns = dict[str, Annotated[str, AfterValidator(_known_type)]]
"""The types of columns by name."""
Zone = Annotated[str, AfterValidator(_known_zone)]
"""A time zone of the IANA database."""


class TimeConfig(Model):
    """The column and the unit of a record's event time."""

    column: str = Field(min_length=1)
    """The column of the event time."""
    time_of_day: str | None = Field(default=None, min_length=1)
    """A second column, with the time of day, if `column` has dates."""
    unit: str = "ms"
    """`ms`, `s`, `us`, `ns`, `iso8601`, or a pattern of `strptime`. If a source of the stream is an access log, the
    default is the time of its lines."""
    zone: Zone = "UTC"
    """The IANA name of the time zone of times that state none. A time that its clocks skip is rejected. A time that
    they show twice counts at the one nearer to the record's arrival, and states the guess `doubled-hour`."""
    min_time: Instant = YEAR_2000_MS
    """Records with an earlier event time are rejected."""
    max_skew_ms: Duration = MAX_SKEW_MS
    """Records whose event time is further ahead of the stream's clock are rejected, because they would make the records
    of all others late. A replay has no such limit."""

    @field_validator("unit")
    @classmethod
    def _unit(cls, unit: str) -> str:
        if unit not in TIME_UNITS and not ("%" in unit and is_time_pattern(unit)):
            raise refusal(
                f"one of {', '.join(TIME_UNITS)}, or a pattern of strptime such as {ACCESS_TIME!r}",
                f"{unit!r} does not read year, month, day, hour, minute and second",
            )
        return unit


class ReplayConfig(Model):
    """Replay of recorded data under a replay clock."""

    speed: float | Literal["max"]
    """How much event time passes per unit of wall time. `max`: as fast as records can be read, without a clock."""
    start: Instant | None = None
    """Event time at which the replay begins. Required unless `speed` is `max`."""
    at: Instant | None = None
    """Wall time at which the replay begins. None: at the agent's first start."""

    @field_validator("speed", mode="before")
    @classmethod
    def _speed(cls, value: object) -> object:
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
        if not number and value != "max":
            raise refusal("a positive number, such as 86400 for a day a second, or max")
        return float(value) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _has_start(self) -> ReplayConfig:
        if self.speed != "max" and self.start is None:
            raise refusal(f"start: {INSTANT_ACCEPTED}, the event time at which the replay begins", "start is missing")
        return self


class LookupConfig(Model):
    """Columns that are added to records from a file, by the value of a key column."""

    file: str = Field(min_length=1)
    """Path of the file, with one row per key."""
    format: Literal["csv", "ndjson", "parquet"]
    """Format of the file; by default the format that its extension names."""
    key: str | dict[str, str]
    """Key column of the stream and of the file; `{stream column: file column}` if their names differ."""
    columns: Columns = Field(min_length=1)
    """Columns of the file that are added, with their types. They become columns of the stream."""
    refresh_ms: Duration = Field(default=60_000, ge=1_000)
    """Interval at which the file is loaded again if it has changed."""

    @model_validator(mode="before")
    @classmethod
    def _format_by_name(cls, options: Any) -> Any:
        if not isinstance(options, dict) or "format" in options or not isinstance(options.get("file"), str):
            return options
        suffix = Path(options["file"]).suffix
        return {**options, "format": EXTENSIONS[suffix]} if suffix in EXTENSIONS else options

    @field_validator("key")
    @classmethod
    def _one_key(cls, key: str | dict[str, str]) -> str | dict[str, str]:
        if isinstance(key, dict) and len(key) != 1:
            raise refusal("one column, or {column of the stream: column of the file}")
        return key

    @model_validator(mode="after")
    def _types(self) -> LookupConfig:
        if self.file_key in self.columns:
            raise refusal("columns without the key", f"{self.file_key} is the key")
        return self

    @property
    def stream_key(self) -> str:
        return self.key if isinstance(self.key, str) else next(iter(self.key))

    @property
    def file_key(self) -> str:
        return self.key if isinstance(self.key, str) else next(iter(self.key.values()))


def _access_time(options: Any) -> str | None:
    """Returns the time unit of a source that is an access log; None for any other source."""
    if not isinstance(options, dict):
        return None
    try:
        declared = log_format(str(options["log_format"])).time_unit if "log_format" in options else None
    except ValueError:  # its own validator refuses it
        declared = ACCESS_TIME
    return ACCESS_TIME if options.get("format") in ACCESS_LOGS else declared


class RejectsConfig(Model):
    """What is stated about rejected records."""

    by: str
    """A column that tells devices apart. A rejected record in which it can be read widens only the groups with its
    value, in queries whose `group_by` has the column. The center's alarm then names the column, the first value and the
    device, so they leave this machine."""


class StreamConfig(Model):
    """A stream that this edge serves."""

    columns: Columns
    """Name and type of each column: string, int64, float64 or bool."""
    time: TimeConfig
    """The column and unit of the event time. The section may be missing if a source is an access log."""
    lookups: list[LookupConfig] = Field(default=[], max_length=8)
    """Files whose columns are added to the records. A key may be a column that an earlier lookup has added."""
    constants: dict[str, Constant] = {}
    """Columns that have one value in all records of the stream at this edge, such as its site."""
    lenient: list[str] = []
    """Columns whose values may be written as another type: `"66.2"` and `200.0` as numbers, `yes` and `off` as
    booleans, a number or `true` as a text. Other values are rejected as ever."""
    decimal: Literal[".", ","] = "."
    """The decimal mark of texts as numbers in `lenient` columns. With a comma, `1.234` and `1.234,5` are no numbers,
    because the point may separate thousands."""
    nulls: dict[str, Annotated[list[str], Field(min_length=1)]] = {}
    """By column, the words and values that mean null, such as `{temp: ["", NA, "-999"]}`."""
    on_nan: dict[str, Literal["keep", "null", "reject"]] = {}
    """By column of float64, what NaN is: a value (`keep`, the default), no value (`null`), or a reason to reject the
    record (`reject`)."""
    rejects: RejectsConfig | None = None
    """What is stated about rejected records. None: a rejected record may belong to any group."""
    disorder_ms: Duration = 0
    """How far the event time of a record may be behind the newest record without being late."""
    idle_ms: Duration | None = None
    """Time without records after which a source's watermark follows the clock. None: 10s for a live stream, and never
    in a replay.
    """
    replay: ReplayConfig | None = None
    """The clock of recorded data. None: event time is wall time."""
    sources: list[SourceConfig] = Field(min_length=1)
    """Where the records come from."""

    @field_validator("columns")
    @classmethod
    def _types(cls, columns: dict[str, str]) -> dict[str, str]:
        if not columns:
            raise refusal("at least one column, such as {carrier: string}")
        if TIME_COLUMN in columns:
            raise refusal(f"another name than {TIME_COLUMN}", "that is the name of the event time in every stream")
        return columns

    @model_validator(mode="before")
    @classmethod
    def _time_of_access_logs(cls, stream: Any) -> Any:
        sources = stream.get("sources") if isinstance(stream, dict) else None
        kinds = (
            [options for s in sources if isinstance(s, dict) for options in s.values()]
            if isinstance(sources, list)
            else []
        )
        unit = next((unit for options in kinds if (unit := _access_time(options)) is not None), None)
        time = stream.get("time", {}) if unit is not None else None
        return {**stream, "time": {"column": "time", "unit": unit, **time}} if isinstance(time, dict) else stream

    @model_validator(mode="after")
    def _formats_fit(self) -> StreamConfig:
        columns = list(self.record_schema.textual)
        for source in self.sources:
            text = source.file or source.stdin or source.http
            if text is not None and (fault := text.column_fault(columns)) is not None:
                raise refusal(*fault)
        return self

    @model_validator(mode="after")
    def _time_fits(self) -> StreamConfig:
        if self.time.time_of_day is not None and self.time.unit != "iso8601":
            raise refusal(
                "time.unit: iso8601, with dates such as 2013-01-01 and times of day such as 05:15:00",
                f"time.time_of_day is {self.time.time_of_day} and time.unit is {self.time.unit}",
            )
        if self.time.time_of_day == self.time.column:
            raise refusal("two different columns", f"time.column and time.time_of_day are both {self.time.column}")
        if self.time.zone != "UTC" and "%z" in self.time.unit:
            raise refusal("time.zone or the zone in time.unit", f"both are set, and time.unit is {self.time.unit}")
        fitting = ("int64", "float64") if self.time.unit in MS_PER_UNIT else ("string",)
        for name in (self.time.column, self.time.time_of_day):
            declared = self.columns.get(name) if name is not None else None
            if declared is not None and declared not in fitting:
                raise refusal(
                    f"the type {' or '.join(fitting)} for column {name}",
                    f"it is declared {declared} and time.unit is {self.time.unit}",
                )
        kinds = [kind for source in self.sources for kind in source.model_fields_set]
        paths = [source.file.path for source in self.sources if source.file]
        if kinds.count("http") > 1 or len(set(paths)) < len(paths):
            raise refusal(
                "each path once, and http once", "a source is named twice, so its records would be counted twice"
            )
        return self

    @model_validator(mode="after")
    def _lookups_fit(self) -> StreamConfig:
        known = dict(self.columns)
        for number, lookup in enumerate(self.lookups):
            kind = known.get(lookup.stream_key)
            if kind is None or kind == "float64":
                columns = ", ".join(name for name, kind in known.items() if kind != "float64")
                fault = f"lookups.{number}.key is {lookup.stream_key}, a " + (
                    "float64" if kind else "column of nothing"
                )
                raise refusal(f"one of the columns {columns}", fault)
            for name in lookup.columns:
                if name in known or name == TIME_COLUMN:
                    raise refusal(
                        "columns that the stream lacks", f"lookups.{number}.columns.{name} is a column already"
                    )
            known.update(lookup.columns)
        return self

    @field_validator("on_nan", mode="before")
    @classmethod
    def _null_is_a_word(cls, on_nan: object) -> object:
        """YAML reads the word null as None."""
        return (
            {n: "null" if each is None else each for n, each in on_nan.items()} if isinstance(on_nan, dict) else on_nan
        )

    @model_validator(mode="after")
    def _columns_are_there(self) -> StreamConfig:
        for key, names in (("lenient", self.lenient), ("nulls", self.nulls), ("on_nan", self.on_nan)):
            fitting = [name for name, kind in self.columns.items() if key != "on_nan" or kind == "float64"]
            if unknown := next((name for name in names if name not in fitting), None):
                near = did_you_mean(unknown, fitting)
                raise refusal(f"some of the columns {', '.join(fitting)}", f"{key} has {unknown}{near}")
        return self

    @model_validator(mode="after")
    def _rejects_fit(self) -> StreamConfig:
        if self.rejects is not None and self.columns.get(self.rejects.by) not in ("string", "int64", "bool"):
            known = ", ".join(name for name, kind in self.columns.items() if kind != "float64")
            raise refusal(f"rejects.by: one of the columns {known}", f"got {self.rejects.by!r}")
        return self

    @model_validator(mode="after")
    def _constants_fit(self) -> StreamConfig:
        for name, value in self.constants.items():
            declared = self.columns.get(name)
            if declared is None:
                near = did_you_mean(name, self.columns)
                raise refusal(f"one of the columns {', '.join(self.columns)}", f"constants.{name} is no column{near}")
            if not is_constant(value, declared):
                accepted = (
                    f"a {declared} of at most {MAX_CONSTANT} characters" if declared == "string" else f"a {declared}"
                )
                accepted = "a column of type string, int64 or bool" if declared == "float64" else accepted
                raise refusal(accepted, f"constants.{name} is {value!r:.300}, and the column is {declared}")
        return self

    @property
    def arrow_columns(self) -> dict[str, pa.DataType]:
        """The columns that sources read."""
        return {name: COLUMN_TYPES[kind] for name, kind in self.columns.items()}

    @property
    def stream_columns(self) -> dict[str, pa.DataType]:
        """The columns of the stream's records: the columns that sources read, and the columns that lookups add."""
        added = {name: COLUMN_TYPES[kind] for lookup in self.lookups for name, kind in lookup.columns.items()}
        return self.arrow_columns | added

    @property
    def record_schema(self) -> RecordSchema:
        """The schema that the decoders of this stream's sources produce."""
        skew = self.time.max_skew_ms if self.replay is None else None
        of = self.time
        time = EventTime(of.column, of.unit, of.min_time, skew, of.time_of_day, of.zone)
        by = None if self.rejects is None else self.rejects.by
        nulls = {name: tuple(words) for name, words in self.nulls.items()}
        return RecordSchema(
            self.arrow_columns, time, self.constants, frozenset(self.lenient), self.decimal, nulls, self.on_nan, by
        )

    @property
    def idle_rule_ms(self) -> int | None:
        """See `edge.core.streams.StreamSpec.idle_ms`. The default is 10 s for a live stream and None for a replay."""
        if self.idle_ms is not None:
            return self.idle_ms
        return IDLE_MS if self.replay is None else None
