"""The texts of keys of groups, and the names of columns, for formats that have only texts.

Labels of series and alerts, parameters of URLs, terminals and pages use these functions. Two values of one column have
different texts, and two columns of one query have different names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence

NULL = "null"
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_NOT_A_LABEL = re.compile(r"[^a-zA-Z0-9_]|^(?=[0-9])")


def not_finite(value: float) -> str:
    """Returns the name of NaN or of an infinity, as JSON and texts of keys have it."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def key_text(value: object) -> str:
    """Returns the text of a group's value. Values of one column have different texts.

    Null is ``null``. A text is itself. But a text is quoted as in JSON if it is empty, is ``null``, or begins with a
    quotation mark. The console's `keyText` is the same function.
    """
    if value is None:
        return NULL
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else not_finite(value)
    text = str(value)
    if isinstance(value, str) and (text in ("", NULL) or text.startswith('"')):
        return json.dumps(text, ensure_ascii=False)
    return text


def text_of_key(text: str) -> str:
    """Returns the value whose `key_text` is `text`, in a column of texts. `text` is not `NULL`.

    If no value has this `key_text`, returns `text` as it is, because people write parameters of URLs.
    """
    if text.startswith('"'):
        try:
            value = json.loads(text)
        except ValueError:
            return text
        if isinstance(value, str) and key_text(value).startswith('"'):
            return value
    return text


def label_names(columns: Sequence[str], reserved: Collection[str] = ()) -> list[str]:
    """Returns a name of a label for each column of groups: valid in Prometheus, not reserved, each name once.

    Columns that are valid names keep their names, whatever the order of the columns.
    """
    names: dict[str, str] = {}
    for column in sorted(columns, key=lambda c: _NOT_A_LABEL.search(c) is not None):
        name = _NOT_A_LABEL.sub("_", column) or "_"
        while name in reserved or name in names.values() or name.startswith("__"):
            name = f"exported_{name}"
        names[column] = name
    return [names[column] for column in columns]


def with_label_names(values: Mapping[str, str]) -> dict[str, str]:
    """Returns labels or annotations under names that Prometheus and an Alertmanager accept: `rate_binomial`."""
    return dict(zip(label_names(list(values)), values.values(), strict=True))
