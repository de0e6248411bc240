"""The keys of query files, for `docs/reference/configuration.md`. A test compares them with `edgewater.model.query`."""

from __future__ import annotations

from edgewater.model.caching import ESTIMATES, EVICTIONS, SIZINGS, CacheSpec, format_fraction


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_CACHE = CacheSpec()

QUERY_KEYS: tuple[tuple[str, str, tuple[tuple[str, str, str, str], ...]], ...] = (
    ("", "A query, as `POST /v1/queries` and `edgewater query add` read it.", (
        ("name", "lower-case letters, digits and `_`, at most 63", "required", "The query's name."),
        ("from", "name of a stream", "required", "The stream that the query reads."),
        ("where", "SQL condition", "all records", "Selects the records for which the condition is true."),
        ("lookup", "mapping of a table's name to `key` (a column, or `{column of the stream: column of the table}`), "
         "`columns` (a list, or names and types) and `version`, at most 8", "none", "Tables of the center whose "
         "columns are added to the records. `version` and `key_type` say what the center has found."),
        ("group_by", "list of columns, expressions and `{name: expression}`, at most 16", "none", "Divides the "
         "records into groups. Without it a window has one row."),
        ("measures", "mapping of name to function or arithmetic over measures, 1 to 32", "required", "What is computed "
         "of each group, such as `sum(bytes)` or `errors / requests`."),
        ("window", "section", "required", "How event time is divided."),
        ("budget", "section", "exact", "The error and staleness that answers may have, and their bytes."),
        ("accuracy", "section", "–", "Asks for early answers with a relative error."),
        ("cache", "section", "the defaults below", "Which values an edge sends first."),
        ("lateness", "duration", "`0ms`", "Event time after the end of a window in which late records revise it."),
        ("priority", "int, 1 to 100", "`10`", "The weight of the query where queries of an edge compete for the link."),
        ("since", "time, or `beginning`", "the registration", "The event time from which records count that edges "
         "read before the registration."),
        ("until", "time", "never", "The query ends by itself: it has the windows that start before. Its answers "
         "stay."),
        ("edges", "list of edges", "every edge that has the stream", "The edges that a window waits for."),
        ("seed", "0 to 2^64 − 1, or `\"0x…\"`", "drawn at the registration", "Seed of the hashes and samples."),
    )),
    ("window", "Exactly one of `tumbling`, `sliding` and `session`.", (
        ("tumbling", "duration, or `1 day`, `1 week`, `1 month`, `1 quarter`, `1 year`", "–", "Length of windows "
         "that do not overlap."),
        ("zone", "time zone of the IANA database", "`UTC`", "Zone of calendar units."),
        ("sliding", "duration", "–", "Length of windows that overlap. Needs `every`."),
        ("every", "duration, at least a 500th of `sliding`", "–", "Distance between the starts of sliding windows."),
        ("offset", "duration, also negative", "`0ms`", "Moves the starts of tumbling and sliding windows "
         "from the epoch, or from the start of the calendar unit."),
        ("session", "duration", "–", "Gap that ends a session."),
        ("max", "duration, one to 10,000 gaps", "`1d`, or 10,000 gaps if that is less", "Longest session. A longer one "
         "is cut."),
    )),
    ("budget", "One limit or several.", (
        ("error", "mapping of measure to amount or percentage", "–", "Largest error of a group's value, over all edges "
         "together."),
        ("staleness", "duration, at least 1ms", "–", "Time from the end of a window to its answer."),
        ("bytes", "amount `per hour` or `per day`, or `{amount: 50MB, per: day, over: all}`", "–", "Most bytes of the "
         "query's frames on the link of an edge, or of all `edges` together."),
    )),
    ("accuracy", "Early answers whose relative error is within `error` with probability `confidence`.", (
        ("error", "percentage between 0% and 100%", "required", "Relative error."),
        ("confidence", "percentage between 0% and 100%", "`95%`",
         "Probability that the error holds."),
        ("measure", "name of a measure", "the only measure", "The measure that the error is about."),
        ("substream", "duration", "from the window", "Length of the parts of a window in which arrivals are counted."),
        ("scope", "`each`, `all`", "`each`", "Whether the error holds for each group, or for all groups at "
         "once."),
        ("range", "two numbers", "unknown", "Least and greatest value of an expensive function."),
        ("delays", "duration", "unknown", "The longest delay of records. A later record withdraws it."),
    )),
    ("cache", "Policies of an edge's cache.", (
        ("eviction", _names(EVICTIONS), f"`{_CACHE.eviction}`", "The order in which entries of an open slice are "
         "sent."),
        ("sizing", _names(SIZINGS), f"`{_CACHE.sizing}`", "Under a staleness budget: how many entries are kept ready."),
        ("estimate", _names(ESTIMATES), f"`{_CACHE.estimate}`", "Under a staleness budget: the first error by which "
         "entries are kept ready."),
        ("eager", "percentage or number from 0 to 1", f"`{format_fraction(_CACHE.eager)}`", "Least gain of an early "
         "send under a staleness budget. Otherwise ten times this gain applies."),
    )),
)  # fmt: skip
"""Path of a section, what it is, and its keys: name, what it accepts, default, description."""
