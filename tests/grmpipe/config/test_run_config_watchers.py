"""judge_monitor.watch: which judges may watch, and what a run starts for them."""

from __future__ import annotations

import pytest

from grmpipe.cli import compose
from grmpipe.config.run_config import ConfigError, RunConfig

GOLD = ("+grm@models.gold=tiny", "+judge@judges.gold=pointwise", "judges.gold.model=gold")


def quickstart(*typed: str) -> RunConfig:
    return compose("quickstart", typed)


def test_a_judge_that_the_reward_does_not_use_may_watch_and_its_model_is_started() -> None:
    with pytest.raises(
        ConfigError, match=r"judges.gold: the reward doesn't use it.*'judge_monitor.watch=\{gold: 0.2\}'"
    ):
        quickstart(*GOLD)
    config = quickstart(*GOLD, "judge_monitor.watch={gold: 0.2}")
    assert config.watchers == {"gold": 0.2}
    assert (list(config.judging.judges), list(config.asked.judges)) == (["judge"], ["judge", "gold"])
    assert "gold" in config.served and "gold" in config.roles
    assert config.judging.max_concurrency == quickstart().judging.max_concurrency


def test_a_composition_may_watch_with_its_judges() -> None:
    rule = ("+judge@judges.rule=rule", "+reward@rewards.both=mix", "rewards.both.mix={gold: 0.5, rule: 0.5}")
    config = quickstart(*GOLD, *rule, "judge_monitor.watch={both: 1}")
    assert list(config.asked.judges) == ["judge", "gold", "rule"]


def test_nothing_watches_where_nothing_is_trained_on_verdicts() -> None:
    typed = ("+judge@judges.gold=rule", "judge_monitor.watch={gold: 1}")
    assert quickstart(*typed).watchers
    assert not quickstart(*typed, "task=evaluate", "evaluate.what=policy").watchers
    assert not quickstart(*typed, "data.retrain_from=runs/x").watchers


def test_an_evaluation_asks_every_judge_that_no_reward_uses() -> None:
    typed = ("task=evaluate", "+judge@judges.gold=rule", "+judge@judges.used=rule", "reward.judge=used")
    assert quickstart(*typed).watchers == {"gold": 0}
    assert set(quickstart(*typed).asked.judges) == {"used", "gold"}


@pytest.mark.parametrize(
    ("watch", "said"),
    [
        ("{nobody: 0.2}", "judge_monitor.watch.nobody: there is no judge or composition"),
        ("{judge: 0.2}", "judge_monitor.watch.judge: the reward uses it already"),
        ("{reward: 0.2}", "judge_monitor.watch.reward: the reward uses it already"),
        ("{judge: 0}", "judge_monitor.watch.judge: is a share of the groups"),
        ("[judge]", "judge_monitor.watch: give names and shares"),
    ],
)
def test_a_watcher_that_can_not_be_is_refused_by_name(watch: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        quickstart(f"judge_monitor.watch={watch}")


def test_a_component_of_weight_zero_is_told_how_to_watch() -> None:
    mixed = quickstart("+judge@judges.gold=rule", "reward=mix", "reward.mix={judge: 1, gold: 0}")
    assert mixed.rewards.weightless() == ["gold"]
    mixed = quickstart("+judge@judges.gold=rule", "reward=mix", "reward.mix={judge: 1, gold: 1}")
    assert mixed.rewards.weightless() == []
