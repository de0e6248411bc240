"""The entries of `sources`: where the records of a stream come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from edge.codecs.decompression import CODECS
from edge.codecs.formats import EXTENSIONS, Format, TextFormatName
from edge.config.section import Model
from edge.config.text import TextConfig
from edge.source_kinds import BUILT_IN, KINDS
from edgewater.runtime.configuration import Duration, refusal


class FileConfig(TextConfig):
    """Files that match a pattern."""

    path: str = Field(min_length=1)
    """A path, or a pattern such as `/var/log/*.csv`."""
    format: Format  # type: ignore[assignment]
    """The format of the records. It may be missing if the extension of `path` or a `regex` determines it."""
    follow: bool = False
    """Whether appended lines, new files and rotated files are read, too."""
    rotate_wait_ms: Duration = 60_000
    """How long a followed file stays open after its last record, if it no longer matches the pattern. It is closed
    earlier if no process has it open for writing.
    """
    compression: Literal["auto", "none", "gzip", "zstd", "bz2"] = "auto"
    """The compression of the files. `auto`: the extension of each file decides."""

    @model_validator(mode="before")
    @classmethod
    def _format_by_name(cls, options: Any) -> Any:
        if not isinstance(options, dict) or "format" in options or not isinstance(options.get("path"), str):
            return options
        path = Path(options["path"])
        suffix = Path(path.stem).suffix if path.suffix in CODECS else path.suffix
        return {**options, "format": EXTENSIONS[suffix]} if suffix in EXTENSIONS else options


class StdinConfig(TextConfig):
    """Standard input of the agent. Its records count at most once."""

    format: TextFormatName = "ndjson"


class HttpPushConfig(TextConfig):
    """Records are pushed to ``POST /v1/streams/{stream}``."""

    dedupe: Literal["body", "key"] = "body"
    """How a repeated batch is recognised. `body`: by its Idempotency-Key, or without one by its body and client. `key`:
    only by its Idempotency-Key.
    """
    format: TextFormatName | None = None  # type: ignore[assignment]
    """The format of bodies of the type text/plain. None: such bodies are refused."""


class PackageSourceConfig(Model):
    """A source of a kind that a package provides.

    Attributes:
        options: the user's values; after the whole configuration is validated, an instance of the kind's `config`.
    """

    kind: str
    options: Any


class SourceConfig(Model):
    """One source: exactly one of the three built-in kinds, or a kind that a package provides."""

    file: FileConfig | None = None
    """Files that match a pattern."""
    stdin: StdinConfig | None = None
    """Standard input of the agent, in one stream only."""
    http: HttpPushConfig | None = None
    """Records that clients push."""
    package: PackageSourceConfig | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _one_kind(cls, source: Any) -> Any:
        if isinstance(source, dict) and len(source) == 1:
            ((kind, options),) = source.items()
            options = {} if options is None else options
            return {kind: options} if kind in BUILT_IN else {"package": {"kind": str(kind), "options": options}}
        accepted = (
            "one of file: {path: …}, stdin: {format: …}, http: {}, or a kind of a package, with its options below it"
        )
        raise refusal(accepted, "the entry has several keys" if isinstance(source, dict) and len(source) > 1 else "")

    @property
    def is_pushed(self) -> bool:
        """Whether the records of the source arrive in requests to this edge."""
        return self.http is not None or self.has_receivers

    @property
    def has_receivers(self) -> bool:
        """Whether the source's kind comes from a package, and its records arrive in requests."""
        return self.package is not None and KINDS.receivers(self.package.kind) is not None
