"""No secret of a configuration is in its file or in a refused resume, and a resume still knows what changed."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from hydra import compose, initialize_config_dir

from grmpipe import cli as entry
from grmpipe.config.io.resume_rules import find_changed_keys
from grmpipe.config.io.yaml_io import build, build_config, read_yaml, to_yaml
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.observe.logs import setup_logging

ROOT = Path(__file__).parents[4]
SECRET, OTHER = "sk-planted-0123456789", "sk-rotated-0123456789"
BODY = "engine.openai.extra_body"


@pytest.fixture(scope="module")
def conf() -> Iterator[None]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def composed(*overrides: str) -> RunConfig:
    return build(compose("config", list(overrides)))


def resumed(tmp_path: Path, old: RunConfig, new: RunConfig) -> list[str]:
    (tmp_path / "config.yaml").write_text(to_yaml(old), encoding="utf-8")
    return find_changed_keys(read_yaml(tmp_path / "config.yaml"), new)


@pytest.mark.parametrize(
    "override",
    [
        "{gateway: {api_key: " + SECRET + "}}",
        "{gateway: {api_key: '${oc.env:PLANTED}'}}",
        "{note: '${oc.env:PLANTED}'}",
        "{note: '${oc.env:PLANTED,none}'}",
        "{authorization: 'Bearer ${oc.env:PLANTED}'}",
        "{auth: Bearer-" + SECRET + "}",
        "{headers: {X-Cookie: [" + SECRET + "]}}",
        "{db: {pwd: " + SECRET + "}}",
        "{url: 'https://joe:" + SECRET + "@host/v1'}",
        "{body: '${oc.decode:${oc.env:PLANTED_BODY}}'}",
    ],
)
def test_a_secret_reaches_its_engine_and_no_file(
    conf: None, override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", SECRET)
    monkeypatch.setenv("PLANTED_BODY", "{note: " + SECRET + "}")
    config = composed(f"+{BODY}={override}")
    assert SECRET in str(config.engine.openai.extra_body)
    written = to_yaml(config)
    assert SECRET not in written
    assert resumed(tmp_path, config, config) == []
    told = find_changed_keys(read_yaml(tmp_path / "config.yaml"), composed(f"+{BODY}={{note: something}}"))
    assert told == [] or SECRET not in str(told)


def test_rotated_key_resumes_and_another_secret_does_not_and_neither_is_shown(
    conf: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(key: str, note: str) -> RunConfig:
        monkeypatch.setenv("PLANTED", note)
        return composed("+" + BODY + "={gateway: {api_key: " + key + "}, note: '${oc.env:PLANTED}'}")

    first = config(SECRET, SECRET)
    assert resumed(tmp_path, first, config(OTHER, SECRET)) == []
    (told,) = resumed(tmp_path, first, config(OTHER, OTHER))
    assert told.startswith(f"{BODY}.note: <sha256 ")
    assert SECRET not in told and OTHER not in told


def with_server(given: str) -> RunConfig:
    return build_config({"env": {"kind": "tools", "mcp": {"notes": yaml.safe_load("{" + given + "}")}}})


@pytest.mark.parametrize(
    "given",
    [
        "command: [server], env: {DATABASE: " + SECRET + "}",
        "command: [server, --token, " + SECRET + "]",
        "command: [server, '--api-key=" + SECRET + "']",
        "url: 'https://host/mcp', headers: {X-Team: " + SECRET + "}",
        "url: 'https://host/mcp?apiKey=" + SECRET + "'",
    ],
)
def test_secrets_for_a_server_of_tools_reach_it_and_no_file(given: str, tmp_path: Path) -> None:
    config = with_server(given)
    assert SECRET in str(config.env.mcp_servers)
    assert SECRET not in to_yaml(config)
    assert resumed(tmp_path, config, config) == []
    told = resumed(tmp_path, config, with_server(given.replace(SECRET, OTHER)))
    assert SECRET not in str(told) and OTHER not in str(told)
    assert bool(told) == ("env:" in given), "a variable may say what the server does; other secrets may be rotated"


def test_keys_that_may_change_on_resume_stay_as_typed_and_others_are_compared(
    conf: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_URL", "https://host/token/abc")
    monkeypatch.setenv("MODEL", "models/a")
    overrides = ("engine.openai.base_url=${oc.env:PLANTED_URL}", "policy=path", "policy.path=${oc.env:MODEL}")
    config = composed(*overrides)
    assert "base_url: ${oc.env:PLANTED_URL}" in to_yaml(config)
    assert "path: models/a" in to_yaml(config)
    assert resumed(tmp_path, config, config) == []
    monkeypatch.setenv("MODEL", "models/b")
    assert resumed(tmp_path, config, composed(*overrides)) == ["policy.path: models/a -> models/b"]
    monkeypatch.delenv("PLANTED_URL")  # opening the files of a run needs none of its variables
    with pytest.raises(ConfigError, match="base_url"):  # but a missing variable that is needed is reported
        read_yaml(tmp_path / "config.yaml")


def test_no_text_of_our_own_keys_is_taken_for_a_secret(tmp_path: Path) -> None:
    config = build_config({"policy": {"lora": {"rank": 4}}, "rollout": {"max_new_tokens": 7}})
    assert "sha256" not in to_yaml(config)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_yaml(tmp_path / "config.yaml") == config


def planted(section: Any, secrets: Iterator[str]) -> Any:
    """A copy with a secret in every field that holds text, lists of texts or anything at all: found from the schema."""
    hints, changed = get_type_hints(type(section)), {}
    for spec in dataclasses.fields(section):
        value, hint = getattr(section, spec.name), str(hints[spec.name])
        if dataclasses.is_dataclass(value):
            changed[spec.name] = planted(value, secrets)
        elif hints[spec.name] in (str, str | None):
            changed[spec.name] = f"before {next(secrets)} after"
        elif hint.startswith(("dict[str, typing.Any", "collections.abc.Mapping[str, typing.Any")):
            changed[spec.name] = {"note": f"before {next(secrets)}", "deep": [{"er": next(secrets)}]}
        elif hint.startswith(("list[str", "collections.abc.Sequence[str")):
            changed[spec.name] = [next(secrets)]
    copied = copy.copy(section)
    for name, value in changed.items():
        object.__setattr__(copied, name, value)
    return copied


def test_what_looks_like_a_key_is_in_no_file_whatever_field_it_was_typed_into() -> None:
    used: list[str] = []

    def secrets() -> Iterator[str]:
        for number in itertools.count():
            used.append(f"sk-planted-{number:04}-a1b2c3d4")
            yield used[-1]

    plain = build_config({})
    config = planted(plain, secrets())
    for name in ("task", "resume", "experiment_name"):  # where a text of that form is refused
        object.__setattr__(config, name, getattr(plain, name))
        used.pop(0)
    written = to_yaml(config)
    assert len(used) > 60, "fields were found"
    assert [secret for secret in used if secret in written] == []


@pytest.mark.parametrize("key", ["engine.openai.base_url=", "engine.sglang.urls="])
def test_a_url_with_a_password_is_refused_by_its_key_and_not_repeated(conf: None, key: str) -> None:
    url = f"http://joe:{SECRET}@host/v1"
    with pytest.raises(ConfigError, match="api_key_env") as refused:
        composed(key + (f"['{url}']" if "urls" in key else f"'{url}'"))
    assert str(refused.value).startswith(key[:-1].rsplit(".", 1)[0])
    assert SECRET not in str(refused.value) and "joe" not in str(refused.value)


def test_a_request_is_no_line_of_the_log(tmp_path: Path, restored_logging: None) -> None:
    setup_logging(tmp_path)
    for name in ("httpx", "httpcore", "httpcore.http11"):
        logging.getLogger(name).info("HTTP Request: POST https://joe:pw@host/v1")
        logging.getLogger(name).warning("%s warns of https://joe:pw@host/v1", name)
    log = (tmp_path / "run.log").read_text()
    assert "HTTP Request" not in log and "pw" not in log
    assert log.count("warns of https://<redacted>@host/v1") == 3


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
@pytest.mark.parametrize(
    "override",
    [
        BODY + "={gateway:{api_key:" + SECRET + "}}",
        "+" + BODY + ".auth=" + SECRET,
        "+env.mcp={notes:{command:[server],env:{DATABASE:" + SECRET + "}}}",
        "engine.openai.base_url='http://joe:" + SECRET + "@host/v1','http://b/v1'",
        "experiment_name=" + SECRET,
    ],
)
def test_a_sweep_with_a_secret_on_its_command_line_is_refused(
    flag: str, override: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["launch.py", flag, "+experiment=quickstart", override])
    assert entry.main() == 2
    said = capsys.readouterr().err
    assert "multirun.yaml" in said and "${oc.env:" in said
    assert SECRET not in said
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_may_take_its_secrets_from_the_environment() -> None:
    given = [
        "-m",
        BODY + "={gateway:{api_key:'${oc.env:PLANTED}'}}",
        "train.max_tokens=1,2",
        "engine.openai.api_key_env=A",
    ]
    assert entry.secrets_typed_in_a_sweep(given) == []
    assert entry.secrets_typed_in_a_sweep(given[1:]) == []
