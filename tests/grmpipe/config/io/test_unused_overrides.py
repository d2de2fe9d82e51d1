"""A key that is typed and would be ignored by task=evaluate is refused, with the way out."""

from __future__ import annotations

import pytest

from grmpipe.config.io.unused_overrides import EvaluationReads, check_typed_keys
from grmpipe.config.run_config import ConfigError


def reads(what: str, *, prompts: bool = False, by_policy: bool = False) -> EvaluationReads:
    return EvaluationReads(
        what=what, has_prompts=prompts, by_policy=by_policy, read_by_others=frozenset({"policy.dtype"})
    )


@pytest.mark.parametrize(
    "key", ["policy.path", "data.eval_path", "rollout.max_new_tokens", "evaluate.prompts", "evaluate.prompts.mine"]
)
def test_an_evaluation_of_a_judge_refuses_what_only_a_policy_needs(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: .*evaluate\.what=policy"):
        check_typed_keys(reads("judge"), ["task", "judge", key])
    check_typed_keys(reads("policy"), [key])
    check_typed_keys(reads("both"), [key])


def test_overrides_that_the_task_reads_or_a_config_group_sets_are_accepted() -> None:
    check_typed_keys(reads("judge"), ["policy", "data", "evaluate.path", "evaluate.num_items", "grm.path"])
    check_typed_keys(reads("judge"), ["policy.dtype", "data.columns", "data.labels.score_range"])
    check_typed_keys(reads("judge", by_policy=True), ["policy.path"])
    with pytest.raises(ConfigError, match=r"^data\.path"):
        check_typed_keys(reads("judge", by_policy=True), ["data.path"])


def test_an_evaluation_of_a_policy_refuses_what_only_a_judge_needs() -> None:
    with pytest.raises(ConfigError, match=r"^evaluate\.ks: .*evaluate\.what=both"):
        check_typed_keys(reads("policy"), ["evaluate.ks"])
    check_typed_keys(reads("both"), ["evaluate.ks"])


def test_prompts_from_two_places_are_refused() -> None:
    check_typed_keys(reads("policy"), ["data.eval_path"])
    with pytest.raises(ConfigError, match=r"^data\.eval_path: the policy answers evaluate\.prompts"):
        check_typed_keys(reads("policy", prompts=True), ["data.eval_path"])


def test_an_evaluation_by_itself_has_no_interval() -> None:
    with pytest.raises(ConfigError, match=r"^evaluate\.every: task=evaluate would ignore this key"):
        check_typed_keys(reads("both"), ["evaluate.every"])
