"""The configuration of judging a run again: that of the run, with what is typed; no key is typed in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from grmpipe.cli import compose
from grmpipe.config.io.yaml_io import to_yaml
from grmpipe.config.run_config import ConfigError, RunConfig


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The directory of a run with settings of its own."""
    own = ("judge.num_judgements=3", "judge.temperature=0.7", "grm=tiny_weak", "train.group_size=4", "seed=5")
    (tmp_path / "config.yaml").write_text(to_yaml(compose("quickstart", [*own, "tracking=none"])))
    return tmp_path


def again(run_dir: Path, *typed: str) -> RunConfig:
    return compose(None, ["task=rejudge", f"run_dir={run_dir}", *typed])


def test_the_run_is_the_base_and_what_is_typed_replaces_it(recorded: Path) -> None:
    same = again(recorded)
    assert (same.main_judge.num_judgements, same.policy.path, same.seed, same.tracking.trackers) == (
        3, compose("quickstart").policy.path, 5, [],
    )  # fmt: skip
    assert same.models["grm"].path == "tiny://weak_grm" and same.run_dir == str(recorded / "rejudged" / "again")
    one_key = again(recorded, "judge.num_judgements=5", "rejudge.name=five")
    assert (one_key.main_judge.num_judgements, one_key.main_judge.temperature) == (5, 0.7)
    assert one_key.run_dir == str(recorded / "rejudged" / "five")
    chosen = again(recorded, "judge=rule", "grm=tiny")
    assert (chosen.main_judge.kind, chosen.main_judge.temperature) == ("rule", 1.0), "a group replaces its section"
    assert chosen.models["grm"].path == "tiny://grm" and chosen.train.group_size == 4
    several = again(recorded, "+judge@judges.gold=rule", "reward=mix", "reward.mix={judge: 1, gold: 1}")
    assert several.judges["gold"].kind == "rule" and several.judges["judge"].num_judgements == 3
    mixed = ["+judge@judges.gold=rule", "reward=mix", "reward.mix={judge: 1, gold: 1}"]
    (recorded / "config.yaml").write_text(to_yaml(compose("quickstart", mixed)))
    assert list(again(recorded, "reward=single").judging.judges) == ["judge"], "the run's others may be left unused"
    assert again(recorded, "grm=policy").models["grm"].path == same.policy.path, "of the run"


def test_no_judge_of_a_cotrained_run_is_trained_again_whatever_judges(recorded: Path) -> None:
    (recorded / "config.yaml").write_text(to_yaml(compose("cotrain")))
    assert compose("cotrain").trained_grms
    for typed in ([], ["judge=rule"]):
        assert again(recorded, *typed).trained_grms == {}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("train.group_size=8", "train.group_size: task=rejudge takes everything but the judge from"),
        ("data=tiny_tools", "data: task=rejudge takes everything but the judge"),
        ("+experiment=quickstart", "experiment: .*leave it out"),
        ("rejudge.sample=0", "rejudge.sample: is a share"),
        ("rejudge.steps=[5,2]", "rejudge.steps: give the first and the last step"),
        ("rejudge.name=a/b", "rejudge.name: may hold letters"),
    ],
)
def test_a_key_that_would_be_ignored_is_refused_by_name(recorded: Path, typed: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        again(recorded, typed)


def test_a_typed_key_that_the_run_has_too_is_ignored(recorded: Path) -> None:
    assert again(recorded, "train.group_size=4", "algorithm=grpo") == again(recorded)


def test_a_run_that_is_not_there_or_of_another_version_is_refused_in_words(recorded: Path) -> None:
    with pytest.raises(ConfigError, match="run_dir: task=rejudge judges .*; type run_dir="):
        compose(None, ["task=rejudge"])
    with pytest.raises(ConfigError, match="there is no .*nowhere/config.yaml"):
        again(recorded / "nowhere")
    written = recorded / "config.yaml"
    written.write_text(written.read_text() + "cotrain:\n  enabled: true\n")
    with pytest.raises(ConfigError, match=r"run_dir: .* another version of grmpipe: .*type grm.train.enabled"):
        again(recorded)
