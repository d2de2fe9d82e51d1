"""What a run's evaluations measure of the judges."""

from __future__ import annotations

from typing import Any

import pytest
from configs import judge_config, run_config, with_sections

from grmpipe.config.data import DataConfig
from grmpipe.config.judge import JudgeConfig, JudgeEntry, LabelConfig
from grmpipe.config.reward import RewardConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.judge.composition.composed_judge import compose_judge
from grmpipe.judge.composition.composed_session import ComposedJudge
from grmpipe.judge.kinds.rule import RuleJudge
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.run.build.compose_pipeline import compute_pass_reward, first_of_all_answers, take_sources_in_turn
from grmpipe.types import Judge, Prompt

MATH, CHAT = (Prompt(prompt_id=source, messages=(), source=source) for source in ("math", "chat"))
SUM = JudgeConfig(num_judgements=4, vote="sum")


def judged_by(reward: RewardConfig, **judges: JudgeConfig) -> tuple[RunConfig, Judge]:
    """A run's settings and its judge, without any model behind it."""
    first = judges.pop("judge", JudgeConfig())
    config = run_config(judge=first, judges=judges, reward=reward)
    made = {name: PointwiseAdapter(RuleJudge("exact_answer")) for name in config.judges}
    return config, compose_judge(config.rewards, made, config.judges, seed=0)


@pytest.mark.parametrize(
    ("reward", "prompts", "first"),
    [
        ({"kind": "mix", "mix": {"judge": 1, "rm": 1}}, [MATH], "judge"),
        ({"kind": "jury", "members": ["rm", "judge"]}, [MATH], "judge"),
        ({"kind": "gate", "gate": "judge", "inner": "rm"}, [MATH], "judge"),
        ({"kind": "gate", "gate": "rm", "inner": "judge"}, [MATH], None),
        ({"kind": "cascade", "first": "judge", "then": "rm", "unsure_band": [0.1, 0.9]}, [MATH], "judge"),
        ({"kind": "cascade", "first": "rm", "then": "judge", "unsure_band": [0.1, 0.9]}, [MATH], None),
        ({"kind": "route", "route": {"math": "judge", "chat": "rm"}}, [MATH], "judge"),
        ({"kind": "route", "route": {"math": "judge", "chat": "rm"}}, [MATH, CHAT], None),
        ({"judge": "rm"}, [MATH], None),
    ],
)
def test_the_first_judges_scores_are_shown_where_it_sees_every_answer(
    reward: dict[str, Any], prompts: list[Prompt], first: str | None
) -> None:
    config, judge = judged_by(RewardConfig(**reward), judge=SUM, rm=JudgeConfig(kind="rule"))
    assert first_of_all_answers(config, judge, prompts) == first


def test_a_first_judge_that_compares_has_no_scores_of_single_answers_to_show() -> None:
    jury = RewardConfig(kind="jury", members=["judge", "rm"], quorum=1)
    listwise = JudgeConfig(protocol="listwise", template="listwise", parser="boxed")
    config, judge = judged_by(jury, judge=listwise, rm=JudgeConfig(kind="rule"))
    assert first_of_all_answers(config, judge, [MATH]) is None


def test_a_lone_judge_with_a_name_passes_answers_on_its_own_scale() -> None:
    """Not on that of the section `judge`, which asks nothing in such a run."""
    five = judge_config(score_max=5)
    config, _ = judged_by(RewardConfig(judge="five"), five=five)
    assert (config.main_judge, config.judging.by_model) == (JudgeEntry.of(five, "five"), True)
    assert compute_pass_reward(config) is None, "8 isn't on a scale from 1 to 5"
    labels = LabelConfig(pass_score=4)
    assert compute_pass_reward(with_sections(config, data=DataConfig(labels=labels))) == 0.75
    mixed = RewardConfig(kind="mix", mix={"five": 1.0})
    (config, judge) = judged_by(mixed, five=five)
    assert isinstance(judge, ComposedJudge) and judge.scale == five.scale


def test_the_first_prompts_are_of_all_sources_in_turn() -> None:
    prompts = [Prompt(prompt_id=f"{source}{n}", messages=(), source=source) for source in "abc" for n in range(3)][:7]
    assert [one.prompt_id for one in take_sources_in_turn(prompts)] == ["a0", "b0", "c0", "a1", "b1", "a2", "b2"]
