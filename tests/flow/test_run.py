"""Whole runs with the real engine, learner and tiny models, in this process: the files, the variants, the ends."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from grmpipe.config.run_config import ConfigError
from grmpipe.observe.recorder import load_rollouts
from grmpipe.run.errors import RunFailed
from grmpipe.tiny.resolve import resolve_model
from grmpipe.train.learner.learner import Learner
from grmpipe.train.non_finite_gradients import NonFiniteGradients
from grmpipe.types import Metrics, MicroBatch

TEMPLATES = Path(__file__).parents[1] / "models" / "chat" / "templates"
FILES = {
    "config.yaml", "summary.json", "metrics.jsonl", "rollouts.jsonl", "judgements.jsonl", "groups.jsonl",
    "timeline.json", "run.log", "checkpoints", "policy", "report.html",
}  # fmt: skip


@pytest.fixture(scope="module")
def plain_run(run_once: Callable[..., Any]) -> Any:
    """Three steps of the unchanged quickstart."""
    return run_once()


def test_a_run_leaves_whole_files_that_agree_with_each_other(plain_run: Any) -> None:
    files = plain_run
    assert {path.name for path in files.run_dir.iterdir()} >= FILES
    summary = files.summary
    assert (summary["status"], summary["steps"], summary["versions"]) == ("completed", 3, {"policy": 3, "grm": 0})
    assert summary["groups"] == {"submitted": 12, "trained": 12, "dropped": {}, "in_flight": 0}
    assert summary["objective"] == summary["eval"]["final"]["true_accuracy"]
    assert set(summary["eval"]["initial"]) >= {"true_accuracy", "true_accuracy_greedy", "grm_score"}
    assert [line["step"] for line in files.lines("metrics")] == [0, 1, 2, 3]
    trained = [line for line in files.lines("groups") if line["outcome"] == "trained"]
    assert sorted({line["step"] for line in trained}) == [1, 2, 3]
    rollouts = {(line["group_id"], line["sibling"]) for line in files.lines("rollouts")}
    assert rollouts == {(line["group_id"], line["sibling"]) for line in files.lines("judgements")}
    assert len(rollouts) == 48
    assert summary["judging"]["counted"] == sum(len(line["judgements"]) for line in files.lines("judgements"))
    json.loads((files.run_dir / "timeline.json").read_text())


def test_the_exported_policy_scores_a_text_as_the_run_left_it(plain_run: Any, small_run: Callable) -> None:
    """The run ends with a push of the final weights; a second run from the export starts with the same scores."""
    exported = plain_run.run_dir / "policy"
    again = small_run(f"policy.path={exported}", "train.num_steps=1", run_dir="again")
    assert again.summary["eval"]["initial"]["true_accuracy_greedy"] == pytest.approx(
        plain_run.summary["eval"]["final"]["true_accuracy_greedy"]
    )
    policy = AutoModelForCausalLM.from_pretrained(exported)
    shipped = AutoModelForCausalLM.from_pretrained(resolve_model("tiny://policy"))
    assert not policy.model.embed_tokens.weight.equal(shipped.model.embed_tokens.weight)


def test_sampled_log_probs_equal_the_learners_on_policy_and_three_judgements_are_asked_for_each_rollout(
    small_run: Callable,
) -> None:
    files = small_run("train.num_steps=2", "train.max_staleness=0", "judge.num_judgements=3")
    assert all(step["mismatch/max_nats"] < 1e-3 for step in files.steps())
    assert all(step["staleness/max"] == 0 for step in files.steps())
    judging = files.summary["judging"]
    assert "judge/score_std" in files.steps()[0]
    assert judging["counted"] + sum(judging["failed"].values()) == judging["asked"] >= 3 * 2 * 16


def test_a_thinking_budget_ends_the_policys_thoughts_and_its_tokens_are_not_trained(
    small_run: Callable, taken: list[MicroBatch]
) -> None:
    """A template that opens a thought in the prompt: the tiny policy writes on in it, and never closes it itself."""
    files = small_run(
        f"policy.chat_template={TEMPLATES}/deepseek_r1.jinja", "rollout.thinking_budget_tokens=3",
        "rollout.max_new_tokens=48", "train.num_steps=1", "train.max_staleness=0", "data.eval_path=null",
    )  # fmt: skip
    (step,) = files.steps()
    completions = [line.rollout.turns[0].completion for line in load_rollouts(files.run_dir / "rollouts.jsonl")]
    forced = [one.inserted for one in completions if one.inserted is not None]
    assert forced and {start for start, _ in forced} == {3}
    assert step["rollout/forced_share"] == len(forced) / len(completions)
    sampled = sum(len(one.token_ids) for one in completions) - sum(end - start for start, end in forced)
    trained = sum(int(one.loss_mask_E.sum()) for one in taken)
    assert trained == sampled
    assert step["mismatch/max_nats"] < 1e-3  # of sampled tokens only: an inserted one has no sampler's log-prob


def test_demonstrations_are_imitated_beside_the_rollouts(small_run: Callable, tmp_path: Path) -> None:
    rows = [{"prompt": "What is 6 x 7?", "completion": "6 x 7 = 42"}, {"prompt": "2 + 2", "completion": "4"}]
    (tmp_path / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = small_run(
        "algorithm.sft.path=shown.jsonl", "algorithm.sft.rows_per_step=2", "algorithm.updates_per_batch=2",
        "train.num_steps=3", "train.lr=1e-3", "data.eval_path=null",
    )  # fmt: skip
    nll = [step["train/sft_nll_nats"] for step in files.steps()]
    assert len(nll) == 3 and nll[-1] < nll[0] - 0.1
    with pytest.raises(ConfigError, match=r"^algorithm\.sft\.path: absent\.jsonl: no such file"):
        small_run("algorithm.sft.path=absent.jsonl", run_dir="other")


def test_trained_ids_are_the_sampled_ids_and_the_versions_cover_them(plain_run: Any) -> None:
    for line in load_rollouts(plain_run.run_dir / "rollouts.jsonl"):
        completion = line.rollout.turns[0].completion
        assert len(completion.token_ids) == len(completion.logprobs)
        assert completion.versions[0].start == 0
        assert completion.versions[-1].end == len(completion.token_ids)


@pytest.mark.parametrize(
    ("overrides", "metric"),
    [
        (["algorithm=[reinforce_pp,icepop]", "algorithm.kl_coefficient=0.1", "algorithm.kl_in_reward=true"],
         "train/loss"),
        (
            ["algorithm=decoupled_ppo_interpolated", "algorithm.updates_per_batch=2", "train.max_staleness=2"],
            "train/clip_share",
        ),
        (["algorithm=[gspo,veto,replay_buffer]", "train.schedule=cosine"], "train/replayed_groups"),
        (["algorithm=dapo", "algorithm.kl_coefficient=0.1", "train.max_staleness=2",
          "engine.embedded.recompute_kv_on_sync=true"], "train/kl_nats"),
    ],
)  # fmt: skip
def test_variants_run_to_their_end(small_run: Callable, overrides: list[str], metric: str) -> None:
    files = small_run("train.num_steps=2", *overrides)
    assert files.summary["status"] == "completed"
    assert all(metric in step for step in files.steps())


def test_with_a_rule_as_judge_no_grm_is_started(small_run: Callable) -> None:
    files = small_run("train.num_steps=1", "judge=rule")
    assert "grm" not in files.summary["versions"]
    assert "grm" not in files.summary["busy_s"]
    assert "reward/rule_mean" in files.steps()[0]


def test_a_diverged_step_fails_with_its_cause_and_keeps_the_batch(small_run: Callable, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"train\.lr"):
        small_run("train.lr=1e30", "train.warmup_steps=0", "train.max_grad_norm=1e30")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "train.lr" in summary["failure"]
    batch = (tmp_path / "run" / "failed_batch.jsonl").read_text().splitlines()
    assert len(batch) == 4
    assert all(json.loads(line)["rollouts"] for line in batch)


def test_a_batch_that_may_be_skipped_is_dropped_and_kept_in_the_file_and_the_run_goes_on(
    small_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = Learner._step, itertools.count()

    def diverge_once(learner: Learner, denominator: float) -> Metrics:
        if next(calls) == 1:
            raise NonFiniteGradients(math.nan)
        return step(learner, denominator)

    monkeypatch.setattr(Learner, "_step", diverge_once)
    files = small_run("train.max_skipped_steps=1")
    summary = files.summary
    assert (summary["status"], summary["versions"]["policy"]) == ("completed", 3)
    assert summary["groups"] == {"submitted": 16, "trained": 12, "dropped": {"not_finite": 4}, "in_flight": 0}
    dropped = {line["group_id"] for line in files.lines("groups") if line.get("cause") == "not_finite"}
    assert {line["group_id"] for line in files.lines("failed_batch")} == dropped


def test_a_resume_that_fails_to_start_keeps_what_the_run_had_come_to(
    small_run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = small_run("train.checkpoint_every=2")
    whole = files.summary
    checkpoints = files.run_dir / "checkpoints"
    (checkpoints / "latest").write_text("step_2")  # as after a kill at the end of the second step
    (files.run_dir / "summary.json").unlink()

    async def no_start(*_: object) -> None:
        raise OSError("no process could be started")

    monkeypatch.setattr("grmpipe.run.tasks.train.start", no_start)
    with pytest.raises(RunFailed, match="no process could be started"):
        small_run("train.checkpoint_every=2", "resume=auto")
    summary = files.summary
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert summary["eval"]["initial"] == whole["eval"]["initial"]
    assert summary["judging"]["counted"] >= 32
    ledger = summary["groups"]
    assert ledger["trained"] == 8
    assert ledger["submitted"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
