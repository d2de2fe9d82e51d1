"""The work of a planned step: every judge is counted on the model that it asks, and every learner has its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from configs import with_sections
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.lower_bound import mean_alone_s
from grmpipe.capacity.plan.memory import list_memory
from grmpipe.capacity.plan.plan_report import arithmetic, times
from grmpipe.capacity.plan.run_facts import RunFacts, collect_facts
from grmpipe.capacity.plan.work import (
    count_judgements,
    judge_lengths,
    learner_flops,
    policy_lengths,
    prompts_judged,
    shares_asked,
    step_work,
)
from grmpipe.config.io.resolve_config import fill_sections
from grmpipe.config.io.yaml_io import build
from grmpipe.config.reward import RewardConfig
from grmpipe.models.types import EngineSpeed

ROOT = Path(__file__).parents[4]
SPEED = EngineSpeed(step_s=0.01, row_s=0.0, cached_token_s=0.0, prefill_token_s=0.0, max_rows=64)
# Beside the first judge: one more on its model, and one on a model of its own.
JUDGES = (
    "+experiment=quickstart", "task=plan", "+judge@judges.brief=generative", "judges.brief.num_judgements=3",
    "judges.brief.max_new_tokens=32", "+grm@models.safety=tiny_weak", "+judge@judges.safety=generative",
    "judges.safety.model=safety", "judges.safety.num_judgements=2", "reward=jury",
    "reward.members=[judge,brief,safety]",
)  # fmt: skip
LEARNS = "models.safety.train={enabled: true, prompts_per_batch: 4, group_size: 8, grm_steps_per_policy_step: 2.0}"


def surveyed(*overrides: str) -> RunFacts:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return collect_facts(build(compose("config", [*JUDGES, *overrides])))


@pytest.fixture(scope="module")
def facts() -> RunFacts:
    return surveyed()


def test_two_judges_of_one_model_add_up_on_its_engines(facts: RunFacts) -> None:
    work = step_work(facts).engines
    assert list(work) == ["policy", "grm", "safety"]
    assert (work["grm"].requests, work["safety"].requests) == (128 * (1 + 3), 128 * 2)
    assert work["grm"].new_tokens == pytest.approx((1 * 64 + 3 * 16) / 4)
    assert work["safety"].new_tokens == 64


def test_calls_of_a_judge_are_read_by_its_engine_and_lengthen_its_chain(facts: RunFacts) -> None:
    tools = ("judges.safety.tools.functions=grmpipe.tiny.tools", "judges.safety.tools.max_calls=6", "plan.tool_s=4",
             "judges.safety.tools.max_result_chars=80", "models.safety.path=tiny://policy_tools")  # fmt: skip
    calling = surveyed(*tools)
    before, after = (step_work(one).engines["safety"] for one in (facts, calling))
    assert (after.requests, after.new_tokens, after.outside_s) == (before.requests, before.new_tokens, 3 * 4.0)
    assert after.prefilled_tokens - before.prefilled_tokens == pytest.approx(3 * 10, abs=3), "no cache has results"
    assert mean_alone_s(after, SPEED) == pytest.approx(mean_alone_s(replace(after, outside_s=0), SPEED) + 12)
    assert "each with 3 calls of tools of 4 s (plan.tool_s)" in arithmetic(calling)


def test_prompts_are_shared_by_siblings_and_by_the_judgements_of_a_rollout(facts: RunFacts) -> None:
    work = step_work(facts).engines
    assert work["policy"].prompt_shared_by == facts.config.train.group_size == 8
    assert work["safety"].prompt_shared_by == pytest.approx(2)
    assert 1 < work["grm"].prompt_shared_by < 3, "of one judgement by judge, three by brief"


def test_a_plan_has_a_line_for_every_judge_and_every_role(facts: RunFacts) -> None:
    said = arithmetic(facts)
    assert "judged by 3 judges, at most:" in said
    assert "brief    128 rollouts x 3 judgements = 384 judgements by grm, at most 12288 tokens" in said
    told = times(facts)
    assert "64 tokens per judgement of judge, 16 tokens per judgement of brief" in told
    for role in ("policy", "learner", "grm", "safety"):
        assert f"  {role:<8} " in told


def test_a_route_gives_each_judge_the_prompts_of_its_sources(facts: RunFacts) -> None:
    prompts = facts.data.train[:40]
    mixed = tuple(replace(prompt, source="math" if n < 10 else "chat") for n, prompt in enumerate(prompts))
    route = RewardConfig(kind="route", route={"math": "safety"}, default="judge")
    config = with_sections(facts.config, judges={"safety": fill_sections(facts.config).judges["safety"]}, reward=route)
    routed = replace(facts, config=config, data=replace(facts.data, train=mixed))
    assert shares_asked(routed) == {"safety": 0.25, "judge": 0.75}
    work = step_work(routed).engines
    assert (work["safety"].requests, work["grm"].requests) == (128 * 2 // 4, 128 * 3 // 4)
    assert {prompt.source for prompt in prompts_judged("safety", routed)} == {"math"}
    assert "32 rollouts x 2 judgements = 64 judgements by safety, at most 8192 tokens, of 25% of" in arithmetic(routed)


def test_a_policy_that_judges_has_the_work_of_both(facts: RunFacts) -> None:
    own = replace(fill_sections(facts.config).judges["safety"], model="policy")
    roles = {role: seat for role, seat in facts.config.placement.roles.items() if not role.startswith("safety")}
    placed = replace(facts.config.placement, roles=roles)
    reward = RewardConfig(judge="safety")
    alone = with_sections(facts.config, placement=placed, models={}, judges={"safety": own}, reward=reward)
    work = step_work(facts.under(alone)).engines
    assert list(work) == ["policy"]
    assert work["policy"].requests == 128 + 128 * 2


def test_a_judging_model_that_learns_has_the_work_and_the_memory_of_its_learner() -> None:
    facts = surveyed(LEARNS)
    work, asked = step_work(facts), judge_lengths("safety", facts)
    assert "safety_learner" in work.roles
    assert work.engines["safety"].requests == 128 * 2 + 2 * 4 * 8
    trained = work.grm_learners["safety_learner"]
    assert (trained.model, trained.steps) == ("safety", 2.0)
    prompts = 2 * 4 if facts.config.train.prefix_sharing else 2 * 4 * 8
    assert trained.tokens == pytest.approx(prompts * asked.prompt_tokens + 2 * 4 * 8 * asked.new_tokens)
    held = {use.what for use in list_memory(facts, "safety_learner")}
    assert {"weights", "gradients", "optimizer, two moments"} <= held and "weights of the reference" not in held
    assert "safety_learner " in times(facts)


def test_a_reference_and_several_updates_are_work_of_the_learners_that_have_them() -> None:
    plain = step_work(surveyed())
    assert (plain.learner_forward_tokens, plain.learner_updates, plain.critic_updates) == (0.0, 1, 1)
    algorithm = ("algorithm.kl_coefficient=0.1", "algorithm.updates_per_batch=4")
    facts = surveyed(*algorithm, LEARNS.replace("enabled: true", "enabled: true, kl_coefficient: 0.1"))
    work = step_work(facts)
    assert work.learner_forward_tokens == 2 * work.learner_tokens, "a reference, and pi_old"
    assert work.learner_updates == 4
    assert plain.starts_early and not work.starts_early, "the whole batch is there before its first update"
    assert work.grm_learners["safety_learner"].forward_tokens == work.grm_learners["safety_learner"].tokens
    # Both passes without gradients take a third of forward and backward.
    assert (learner_flops(facts) or 0.0) == pytest.approx((learner_flops(surveyed()) or 0.0) * 5 / 3)


def test_a_rubric_that_is_divided_is_several_calls(tmp_path: Path) -> None:
    (tmp_path / "rubric.json").write_text(str([f"trait {n}" for n in range(5)]).replace("'", '"'))
    rubric = ("grm=qwen3_4b", "judge=rubric", f"judge.rubric.path={tmp_path / 'rubric.json'}")
    whole, divided = surveyed(*rubric), surveyed(*rubric, "judge.rubric.criteria_per_call=2")
    assert (count_judgements("judge", whole), count_judgements("judge", divided)) == (2 * 128, 3 * 2 * 128)
    assert "128 rollouts x 2 judgements x 3 calls = 768 calls" in arithmetic(divided)


def test_a_meta_rm_reads_what_its_judges_read_and_wrote() -> None:
    facts = surveyed(
        "judges.safety.vote=weighted", "meta_rm.path=tiny://meta_rm", "placement.roles.meta_rm.pool=judging"
    )
    work, asked = step_work(facts), judge_lengths("safety", facts)
    assert work.scorer_tokens["meta_rm"] == pytest.approx(128 * 2 * (asked.prompt_tokens + asked.new_tokens))
    weights, _ = list_memory(facts, "meta_rm")
    assert weights.num_bytes == list_memory(facts, "safety")[0].num_bytes
    assert "meta_rm  " in times(facts)


def test_a_scalar_reward_model_reads_prompts_and_rollouts() -> None:
    facts = surveyed(
        "+grm@models.scalar=tiny_reward_model", "+judge@judges.taste=scalar", "judges.taste.model=scalar",
        "reward.members=[judge,brief,safety,taste]",
    )  # fmt: skip
    played = policy_lengths(facts)
    work = step_work(facts)
    assert work.scorer_tokens == {"scalar": pytest.approx(128 * (played.prompt_tokens + played.new_tokens))}
    assert [use.what for use in list_memory(facts, "scalar")] == ["weights", "Python and libraries"]
    assert "scalar   " in times(facts)
    assert "taste    a scalar" in arithmetic(facts)


def test_judging_tasks_of_the_policy_take_the_place_of_answers() -> None:
    recipe = ("+experiment=self_judging", "task=plan", "train.groups_per_batch=16")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        learns, alone = (
            collect_facts(build(compose("config", [*recipe, f"algorithm.self_judging={tasks}"])))
            for tasks in ("{share: 0.25}", "{share: null, data_path: null}")
        )
    with_tasks, without = step_work(learns), step_work(alone)
    assert (with_tasks.engines["policy"].requests, without.engines["policy"].requests) == (96 + 32 + 96, 128 + 128)
    assert count_judgements("judge", learns) == 96
    assert with_tasks.learner_tokens > without.learner_tokens, "a judgement is longer than an answer"
    assert "25% of the groups are judging tasks" in arithmetic(learns)
