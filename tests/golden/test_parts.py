"""conf/algorithm: every file is a whole algorithm or a correction for one, and every name has its file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.algorithm.parts import CORRECTIONS, ESTIMATORS, LOSSES, PROXIMALS, REJECTIONS
from grmpipe.algorithm.settings import ROUTER_REPLAYS
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import ConfigError
from grmpipe.config.train import AlgorithmConfig

CONF = Path(__file__).parents[2] / "conf"
FILES = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (CONF / "algorithm").glob("*.yaml")}


def composed(*overrides: str) -> AlgorithmConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build(compose("config", list(overrides))).algorithm


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("estimator", ESTIMATORS),
        ("loss", LOSSES),
        ("proximal", PROXIMALS),
        ("correction", CORRECTIONS),
        ("rejections", REJECTIONS),
        ("router_replay", ROUTER_REPLAYS),
    ],
)
def test_every_name_has_a_file(key: str, names: Iterable[str]) -> None:
    """Or is the default."""
    chosen = set()
    for values in [*FILES.values(), {key: getattr(AlgorithmConfig(), key)}]:
        value = values.get(key, [])
        chosen |= {value} if isinstance(value, str) else set(value)
    assert chosen == set(names)


def test_a_replay_that_could_hold_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.replay_buffer\.groups"):
        composed("algorithm=[grpo,replay_buffer]", "train.max_staleness=0")
    assert composed("algorithm=[grpo,replay_buffer]").replay_buffer.groups == 4


def test_one_choice_is_a_whole_algorithm() -> None:
    assert composed("algorithm=dapo").clip_high == 0.28
    assert composed("algorithm=gspo").clip_low == 3e-4
    assert composed() == composed("algorithm=grpo") == AlgorithmConfig()


def test_choices_add_up() -> None:
    algorithm = composed("algorithm=[gspo,icepop,veto]", "algorithm.icepop.high=2")
    assert (algorithm.loss, algorithm.aggregation) == ("gspo", "sequence_mean")
    assert (algorithm.correction, algorithm.icepop.high, algorithm.rejections) == ("icepop", 2.0, ["veto"])


def test_choices_that_would_weigh_twice_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.correction: icepop .*twice.*algorithm\.correction=none"):
        composed("algorithm=[ppo_sampler,icepop]")
    with pytest.raises(ConfigError, match=r"algorithm\.pass_at_k\.k"):
        composed("algorithm=pass_at_k", "train.group_size=4")


@pytest.mark.parametrize("credit", ["gigpo", "mt_grpo", "process", "process_grpo"])
def test_credit_by_step_is_not_averaged_over_a_rollout(credit: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.loss: gspo .*{credit} credits steps or turns; .*=gspo_token"):
        composed(f"algorithm=[gspo,{credit}]", "algorithm.loss=gspo")
    assert composed(f"algorithm=[gspo_token,{credit}]", "algorithm.loss=gspo_token").estimator == credit


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_file_of_conf_algorithm_sets_its_keys(name: str) -> None:
    algorithm = AlgorithmConfig(**FILES[name])
    assert {key: getattr(algorithm, key) for key in FILES[name]} == FILES[name]


def test_tokens_add_up_as_in_the_papers() -> None:
    """By GSPO, SAPO: a mean over each rollout. By Dr.GRPO, RLOO, DPO: a sum over each. By all others over tokens."""
    expected = {"gspo": "sequence_mean", "gspo_token": "sequence_mean", "sapo": "sequence_mean"} | dict.fromkeys(
        ("dr_grpo", "rloo", "dpo"), "constant"
    )
    assert {name: AlgorithmConfig(**FILES[name]).aggregation for name in FILES} == {
        name: expected.get(name, "token_mean") for name in FILES
    }


def test_dapo_charges_half_the_range_of_rewards_for_length() -> None:
    """The paper's rewards are -1 and 1, its penalty -1; here rewards span 1."""
    assert composed("algorithm=dapo").overlong_buffer.penalty == 0.5
