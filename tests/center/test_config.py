"""A center's configuration: one file, flags over it, errors that name the key."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from center.config import CenterConfig
from center.edge_access import EdgeAccess
from edgewater.base.errors import InvalidConfig
from edgewater.runtime.configuration import OLD_KEYS, is_loopback, split_address
from tests.refusals import refused


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "center.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_every_default_works_on_one_machine() -> None:
    config = CenterConfig.load(None)
    assert config.gateway.listen == "127.0.0.1:7400"
    assert config.api.listen == "127.0.0.1:7480"
    assert config.catalog_url == f"sqlite:///{Path('.edgewater/center').resolve()}/catalog.db"
    assert config.results_url != config.catalog_url


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert CenterConfig.load(write(tmp_path, "")) == CenterConfig()


def test_a_file_sets_what_it_names_and_reads_sizes_and_durations(tmp_path: Path) -> None:
    text = f"data_dir: {tmp_path}\ngateway: {{credit_bytes: 1MiB}}\napi: {{progress: 5s}}\ntokens: {{jfk: secret}}\n"
    config = CenterConfig.load(write(tmp_path, text))
    assert config.gateway.credit_bytes == 1 << 20
    assert config.api.progress_ms == 5000
    assert config.tokens["jfk"].tokens[0].token.get_secret_value() == "secret"
    assert config.log_dir == tmp_path / "log"


def test_flags_override_the_file_and_leave_the_rest_of_their_section_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, "api: {listen: '127.0.0.1:1', token: t}\n")
    config = CenterConfig.load(path, {"api.listen": "127.0.0.1:2", "spark.master": "local[1]"})
    assert config.api.listen == "127.0.0.1:2"
    assert config.api.token is not None
    assert config.spark.master == "local[1]"


def test_a_flag_sets_one_property_of_spark_whose_name_has_dots(tmp_path: Path) -> None:
    path = tmp_path / "center.yaml"
    path.write_text('spark: {conf: {spark.executor.instances: "2", spark.executor.cores: "1"}}')
    config = CenterConfig.load(path, {"spark.conf.spark.executor.instances": "3"})
    assert config.spark.conf == {"spark.executor.instances": "3", "spark.executor.cores": "1"}


def test_the_environment_overrides_the_file_and_flags_override_both(tmp_path: Path) -> None:
    path = write(tmp_path, "api: {listen: '127.0.0.1:1'}\nspark: {master: local}\n")
    environment = {
        "EDGEWATER_CENTER__API__LISTEN": "127.0.0.1:2",
        "EDGEWATER_CENTER__API__TOKEN": "12345",
        "EDGEWATER_CENTER__CATALOG_URL": "postgresql+psycopg://db/catalog",
        "EDGEWATER_CENTER__SPARK__MASTER": "local[4]",
        "PATH": "/bin",
    }
    config = CenterConfig.load(path, {"spark.master": "local[1]"}, environment)
    assert config.api.listen == "127.0.0.1:2"
    assert config.api.token is not None
    assert config.api.token.get_secret_value() == "12345"
    assert config.catalog_url == "postgresql+psycopg://db/catalog"
    assert config.spark.master == "local[1]"
    with refused(InvalidConfig, "api.prot"):
        CenterConfig.load(None, environment={"EDGEWATER_CENTER__API__PROT": "1"})


def token(secret: str) -> EdgeAccess:
    return EdgeAccess.model_validate({"tokens": [secret]})


def test_tokens_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("lga: two\n")
    given = {"gateway": {"listen": "0.0.0.0:7400"}, "tokens": {"jfk": "one"}, "tokens_file": str(tokens)}
    assert CenterConfig.from_mapping(given).edge_access() == {"jfk": token("one"), "lga": token("two")}
    tokens.write_text("[secret]")
    with pytest.raises(InvalidConfig) as caught:
        CenterConfig.from_mapping(given).edge_access()
    assert caught.value.field == "tokens_file" and "secret" not in caught.value.message
    tokens.write_text("jfk: 12345\nlga: {token: [s3cret], streams: 7}\n")
    with pytest.raises(InvalidConfig) as caught:
        CenterConfig.from_mapping(given).edge_access()
    assert all(f"at {field}" in caught.value.message for field in ("jfk", "lga.token", "lga.streams"))
    assert "s3cret" not in caught.value.message and "12345" not in caught.value.message


def test_the_long_form_of_an_entry_has_several_tokens_names_and_patterns(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        "jfk: {tokens: [old, {token: new, expires: 2027-01-01T00:00:00Z}], identity: 'spiffe://example.org/jfk',"
        " streams: [flights], queries: ['air-*']}\n"
    )
    access = CenterConfig.from_mapping({"tokens_file": str(tokens)}).edge_access()["jfk"]
    assert [t.expires for t in access.tokens] == [None, 1_798_761_600_000]
    assert access.identity == ("spiffe://example.org/jfk",)
    assert access.may_serve("flights") and not access.may_serve("trains")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{tokens: [{token: s3cret, expires: s3cret}]}", "at jfk.tokens.0.expires"),
        ("{tokens: [s3cret], stream: [flights]}", "at jfk.stream, unknown key, did you mean streams?"),
        ("{tokens: {s3cret: 1}}", "at jfk.tokens"),
        ("12345", "at jfk"),
    ],
)
def test_an_entry_that_is_not_accepted_is_named_without_its_secret(tmp_path: Path, entry: str, said: str) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(f"jfk: {entry}\n")
    with pytest.raises(InvalidConfig) as caught:
        CenterConfig.from_mapping({"tokens_file": str(tokens)}).edge_access()
    assert said in caught.value.message
    assert "s3cret" not in caught.value.message and "12345" not in caught.value.message
    with pytest.raises(InvalidConfig) as caught:
        CenterConfig.from_mapping({"tokens": yaml.safe_load(tokens.read_text())})
    assert caught.value.field.startswith("tokens.jfk")
    assert "s3cret" not in caught.value.message and "12345" not in caught.value.message


def test_secrets_do_not_show_when_a_configuration_is_printed() -> None:
    assert "hidden" not in repr(CenterConfig.from_mapping({"tokens": {"jfk": "hidden"}, "api": {"token": "hidden"}}))


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"gatway": {}}, "gatway", "one of the keys data_dir"),
        ({"gatway": {}}, "gatway", "did you mean gateway?"),
        ({"spark": {"driver_memory": "much"}}, "spark.driver_memory", "text that matches"),
        ({"spark": {"max_answer_bytes": "1KiB"}}, "spark.max_answer_bytes", "greater than or equal to 1048576"),
        ({"api": {"limits": {"response_bytes": 0}}}, "api.limits.response_bytes", "greater than or equal to 1048576"),
        ({"gateway": {"port": 1}}, "gateway.port", "one of the keys listen"),
        ({"tls": {"cert": "c", "pem": 1, "key": "k"}}, "tls.pem", "one of the keys cert"),
        ({"tls": {"cert": "c"}}, "tls.key", "missing key"),
        ({"api": {"listen": "nowhere"}}, "api.listen", "host:port"),
        ({"api": {"listen": 7480}}, "api.listen", "host:port"),
        ({"api": {"progress": "often"}}, "api.progress", "a duration such as"),
        ({"api": {"progress": "1ms"}}, "api.progress", "greater than or equal to 100"),
        ({"gateway": {"credit_bytes": "lots"}}, "gateway.credit_bytes", "a size such as"),
        ({"api": 3}, "api", "valid dictionary"),
        ([1], "", "a mapping with the keys"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_accepted(given: object, field: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        CenterConfig.from_mapping(given)
    assert caught.value.field == field
    assert said in caught.value.message


def test_a_gateway_that_others_can_reach_needs_tokens() -> None:
    with refused(InvalidConfig, "tokens"):
        CenterConfig.from_mapping({"gateway": {"listen": "0.0.0.0:7400"}})
    CenterConfig.from_mapping({"gateway": {"listen": "0.0.0.0:7400"}, "tokens": {"jfk": "secret"}})


def test_a_file_that_is_not_there_or_not_yaml_is_named(tmp_path: Path) -> None:
    with refused(InvalidConfig, "--config"):
        CenterConfig.load(tmp_path / "nowhere.yaml")
    with refused(InvalidConfig, "--config"):
        CenterConfig.load(write(tmp_path, "a: ["))


def test_an_override_cannot_reach_into_a_value(tmp_path: Path) -> None:
    with refused(InvalidConfig, "data_dir.sub"):
        CenterConfig.load(write(tmp_path, "data_dir: x"), {"data_dir.sub": 1})


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("0.0.0.0:1", False), ("center:1", False)],
)
def test_loopback_is_what_only_this_machine_can_reach(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback
    assert split_address(address)[1] == 1


def test_answers_are_kept_for_a_month_for_ever_or_for_as_long_as_said_but_not_shorter_than_a_reader_needs() -> None:
    def kept(given: object) -> int | None:
        return CenterConfig.from_mapping({"retention": {"answers": given}}).retention.answers_ms

    assert CenterConfig().retention.answers_ms == 30 * 24 * 3_600_000
    assert (kept("90d"), kept(None)) == (90 * 24 * 3_600_000, None)
    for wrong in ("59s", "long"):
        with refused(InvalidConfig, "retention.answers"):
            kept(wrong)


def test_secrets_may_lie_in_the_environment_or_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "jfk").write_text("from-file\n")
    document = {
        "catalog_url": {"env": "CATALOG"},
        "api": {"token": {"env": "ADMIN"}, "principals": {"me": {"token": {"file": str(tmp_path / "jfk")}}}},
        "tokens": {"jfk": {"file": str(tmp_path / "jfk")}, "lga": {"tokens": [{"env": "LGA"}]}},
    }
    path = write(tmp_path, json.dumps(document))
    environment = {"CATALOG": "postgresql+psycopg://u:p@db/catalog", "ADMIN": "root", "LGA": "from-env"}
    config = CenterConfig.load(path, environment=environment)
    assert config.catalog_url == environment["CATALOG"] and "u:p" not in repr(config)
    assert config.api.token is not None and config.api.token.get_secret_value() == "root"
    (mine,) = (p.token for p in config.api.principals.values())
    assert mine is not None and mine.get_secret_value() == "from-file"
    tokens = {edge: [t.token.get_secret_value() for t in access.tokens] for edge, access in config.tokens.items()}
    assert tokens == {"jfk": ["from-file"], "lga": ["from-env"]}
    with pytest.raises(InvalidConfig) as caught:
        CenterConfig.load(path, environment={**environment, "LGA": ""})
    assert caught.value.field == "tokens.lga.tokens.0.token"


def test_faults_are_named_together_with_their_places_and_without_secrets(tmp_path: Path) -> None:
    path = write(tmp_path, "api:\n  progres: 5s\ntokens:\n  jfk: [s3cret-1]\nretention: {frames: soon}\n")
    with pytest.raises(InvalidConfig) as caught:
        CenterConfig.load(path)
    faults = caught.value.faults()
    assert faults[0].startswith(f"{path}:2:3: api.progres: '5s' is not accepted; unknown key, did you mean progress?")
    assert any(fault.startswith(f"{path}:4:3: tokens.jfk") for fault in faults[1:])
    assert any(fault.startswith(f"{path}:5:13: retention.frames: 'soon'") for fault in faults[1:])
    assert "s3cret" not in str(caught.value)


OLD_CENTER = {
    "gateway": {"credit": "1MiB", "max_frame": "2MiB", "compression_memory": 0, "work": 1_000, "heartbeat": "2s"},
    "api": {"cache": "1MiB", "limits": {"responses": "4MiB", "evaluate": 4, "evaluate_per_principal": 2, "idle": "1m"}},
    "spark": {"max_answer": "2MiB", "trigger": "1s", "lease": "2s"},
}
"""All keys of 0.3.0 that have another name now."""


def test_keys_of_0_3_0_are_read_and_named_once_with_the_present_ones(caplog: pytest.LogCaptureFixture) -> None:
    config = CenterConfig.from_mapping(OLD_CENTER)
    gateway, spark = config.gateway, config.spark
    assert (gateway.credit_bytes, gateway.max_frame_bytes, gateway.work_per_s) == (1 << 20, 2 << 20, 1_000)
    assert (gateway.compression_bytes, gateway.heartbeat_ms, spark.lease_ms) == (0, 2_000, 2_000)
    assert (config.api.cache_bytes, config.api.limits.response_bytes) == (1 << 20, 4 << 20)
    assert spark.max_answer_bytes == 2 << 20
    of_the_center = {old: new for old, new in OLD_KEYS.items() if not old.startswith("limits.")}
    named = [record.args for record in caplog.records]
    assert named == [((old, new) if new else (old,)) for old, new in of_the_center.items()]


@pytest.mark.parametrize("old", [old for old, new in OLD_KEYS.items() if new])
def test_both_names_of_a_key_are_refused(old: str) -> None:
    *sections, key = old.split(".")
    document: Any = {key: 0, OLD_KEYS[old].rpartition(".")[2]: 1 << 20}
    for name in reversed(sections):
        document = {name: document}
    with pytest.raises(InvalidConfig) as refused:
        CenterConfig.from_mapping(document)
    assert refused.value.field == old and OLD_KEYS[old] in refused.value.reason
