"""The how-to of the client, as it stands, against a real server."""

import re
from pathlib import Path

from tests.center.api.conftest import HOUR, T0

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "python-client.md"


def test_the_code_of_the_how_to_runs(desk, monkeypatch, capsys):
    code = "\n".join(re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL)).replace("token=…", "token=None")
    desk.connect("jfk")
    measures = {"flights": "count()", "delay": "mean(dep_delay)"}
    query = desk.register(name="flights_by_carrier", measures=measures)
    for hour in range(3):
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 5, "AA": 1})
    monkeypatch.delenv("EDGEWATER_TOKEN_FILE", raising=False)
    with desk.served() as url:
        monkeypatch.setenv("EDGEWATER_URL", url)
        scope: dict[str, object] = {}
        exec(compile(code, str(HOW_TO), "exec"), scope)
        scope["center"].close()  # type: ignore[attr-defined]
    printed = capsys.readouterr().out
    assert "complete 1.0 [] True" in printed
    assert "{'jfk': 'up'}" in printed
