"""Whole runs with teachers: what is trained, what is on file, and a resume that asks no teacher again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from teacher_endpoint import serve_teacher

from grmpipe.config.run_config import ConfigError
from grmpipe.data.catalogs import resolve_model
from grmpipe.models.chat.renderer import Renderer
from grmpipe.observe.recorder import load_verdicts
from grmpipe.run_reader import read_run
from grmpipe.types import Verdict

TEACHER = ("+policy@models.teacher=tiny", "algorithm.distill.teachers={default: teacher}")
ALONE = (*TEACHER, "reward=none")
ROLLOUTS = 3 * 4 * 4  # steps, groups, siblings


def test_a_teacher_with_the_policys_weights_leaves_it_as_it_is_and_scores_every_token(small_run: Callable) -> None:
    """Its log-probs are the sampler's: the engines and the learner agree on what a log-prob is."""
    files = small_run(*ALONE, "train.max_staleness=0", "train.num_steps=1")
    (step,) = files.steps()
    assert abs(step["train/distill_kl_nats"]) < 1e-4 and step["train/taught_share"] == 1.0
    verdicts = [report.verdict for _, report in load_verdicts(files.run_dir / "judgements.jsonl")]
    rollouts = {(line["group_id"], line["sibling"]): line for line in files.lines("rollouts")}
    assert len(verdicts) == len(rollouts) == 16
    for (key, report), _ in zip(load_verdicts(files.run_dir / "judgements.jsonl"), verdicts, strict=True):
        assert isinstance(report.verdict, Verdict) and report.verdict.teacher is not None
        (scores,) = report.verdict.teacher.by_turn
        np.testing.assert_allclose(scores.logprobs_N, rollouts[key]["turns"][0]["logprobs"], atol=1e-4)


def test_a_teacher_behind_an_endpoint_scores_as_one_here_and_what_it_refuses_has_a_cause(small_run: Callable) -> None:
    with serve_teacher("tiny://policy") as server:
        outside = (
            *ALONE, "models.teacher.engine=openai", "models.teacher.path=a-teacher",
            f"engine.openai.base_url={server.url}", "engine.openai.api_key_env=''",
            "+models.teacher.engine_options.tokenizer=tiny://policy",
            "train.max_staleness=0", "train.num_steps=1", "data.eval_path=null",
        )  # fmt: skip
        server.script = [503]
        files = small_run(*outside)
        (step,) = files.steps()
        assert abs(step["train/distill_kl_nats"]) < 1e-4 and step["train/taught_share"] == 1.0
        assert files.summary["teaching"]["scored"] == 16 and files.summary["teaching"]["failed"] == {}
        assert len(server.asked) == 18, "one was asked again, and one before the first step"
        server.asked, server.without = [], True
        with pytest.raises(ConfigError, match=r"^models\.teacher\.path: .* gave no prompt_logprobs, which a teacher's"):
            small_run(*outside, run_dir="without")
        assert len(server.asked) == 1


def test_without_a_reward_nothing_on_file_is_a_reward_of_0(small_run: Callable) -> None:
    files = small_run(*ALONE, "algorithm.distill.top_k=4", "algorithm.distill.beta=0.5")
    summary = files.summary
    assert summary["status"] == "completed" and summary["versions"] == {"policy": 3, "teacher": 0}
    assert summary["teaching"]["scored"] == ROLLOUTS and summary["teaching"]["failed"] == {}
    assert summary["judging"]["asked"] == 0 and "grm_score" not in summary["eval"]["final"]
    assert summary["busy_s"]["teacher"] > 0
    assert not any("train/reward" in step or "train/grm_score" in step for step in files.steps())
    assert all("reward" not in line for line in files.lines("trained"))
    report = (files.run_dir / "report.html").read_text()
    assert "no score" in report and "reward 0" not in report
    judged = read_run(files.run_dir).judgements.to_arrow().to_pylist()
    assert len(judged) == ROLLOUTS and all(row["reward"] is None and row["score"] is None for row in judged)


@pytest.mark.long
def test_a_teacher_and_a_judge_teach_one_policy(small_run: Callable) -> None:
    files = small_run(*TEACHER, "algorithm.distill.form=advantage")
    files.check_complete(12)
    assert files.summary["teaching"]["scored"] == ROLLOUTS
    assert all("train/reward" in step for step in files.steps())
    assert sum(step.get("teacher/scored", 0) for step in files.steps()) == ROLLOUTS


def test_a_policy_that_teaches_itself_is_scored_after_the_critique_and_trained_without_it(small_run: Callable) -> None:
    files = small_run(
        "policy=tiny_told", "algorithm.distill.teachers={default: policy}", 'algorithm.distill.context="\\n{critique}"'
    )
    files.check_complete(12)
    assert files.summary["teaching"]["scored"] == ROLLOUTS and "policy" in files.summary["busy_s"]
    assert all(step["train/taught_share"] == 1.0 for step in files.steps())
    renderer = Renderer.load(resolve_model("tiny://policy_told"))
    prompts = [renderer.decode(line["turns"][0]["new_ids"]) for line in files.lines("rollouts")]
    assert len(prompts) == ROLLOUTS and all("How many" in prompt and ">" not in prompt for prompt in prompts)


@pytest.mark.long
def test_a_better_sibling_teaches_those_with_a_lower_reward(small_run: Callable) -> None:
    files = small_run(
        "policy=tiny_told", "algorithm.distill.teachers={default: policy}",
        'algorithm.distill.context="\\n{better_answer}"',
    )  # fmt: skip
    files.check_complete(12)
    assert 0 < files.summary["teaching"]["scored"] < ROLLOUTS
    assert all(0 <= step["train/taught_share"] < 1 for step in files.steps())


def test_a_resume_asks_neither_judge_nor_teacher_about_what_is_on_file(small_run: Callable) -> None:
    files = small_run(*TEACHER, "train.checkpoint_every=1")
    (files.run_dir / "checkpoints" / "latest").write_text("step_2")  # as after a kill at the end of the second step
    (files.run_dir / "summary.json").unlink()
    again = small_run(*TEACHER, "train.checkpoint_every=1", "resume=auto")
    assert again.summary["status"] == "completed" and again.summary["steps"] == 3
    assert again.summary["teaching"]["scored"] == ROLLOUTS
    assert len(again.lines("judgements")) == ROLLOUTS, "no rollout was judged or scored twice"
    assert again.steps()[-1]["train/taught_share"] == 1.0


@pytest.mark.long
@pytest.mark.parametrize("limit", [14, 4])  # some, or all rollouts are truncated
@pytest.mark.parametrize("experiment", ["quickstart", "ppo"])
def test_a_run_goes_on_where_all_rollouts_of_an_update_are_masked(
    small_run: Callable, experiment: str, limit: int
) -> None:
    files = small_run(
        "rollout.truncated=mask", f"rollout.max_new_tokens={limit}", "train.group_size=2", "train.num_steps=2",
        "algorithm.updates_per_batch=4", experiment=experiment,
    )  # fmt: skip
    files.check_complete(8)
    skipped = [step.get("train/skipped_updates", 0.0) for step in files.steps()]
    assert set(files.summary["versions"].values()) == {0, 2}, "all but the GRM's"
    assert skipped == [4.0, 4.0] if limit == 4 else 0 < sum(skipped) < 8
    assert all(("train/loss" in step) is (number < 4) for step, number in zip(files.steps(), skipped, strict=True))


@pytest.mark.parametrize("mode", ["mask", "fail"])
def test_truncated_rollouts_are_masked_or_fail_their_group(small_run: Callable, mode: str) -> None:
    files = small_run(f"rollout.truncated={mode}", "rollout.max_new_tokens=16", "train.num_steps=2")
    truncated = {
        (line["group_id"], line["sibling"]) for line in files.lines("rollouts") if line["status"] == "truncated"
    }
    trained = {(line["group_id"], line["sibling"]): line for line in files.lines("trained")}
    if mode == "fail":
        assert files.summary["groups"]["dropped"]["rollout_truncated"] > 0
        assert not truncated & trained.keys()
    else:
        assert truncated & trained.keys() and files.summary["groups"]["dropped"] == {}
        assert all("advantage" not in trained[key] for key in truncated & trained.keys())
