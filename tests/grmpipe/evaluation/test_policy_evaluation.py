"""A policy's figures: failed verdicts are counted by cause and are in none, sources stand by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grmpipe.config.judge import Scale
from grmpipe.evaluation.held_out import HeldOutEvaluation, JudgedRollout
from grmpipe.evaluation.policy_evaluation import RESULTS, Scoring, evaluate_answers, show_policies, write_policies
from grmpipe.evaluation.sampled_answers import AnswerSampling
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.votes import mean, voted
from grmpipe.models.types import Message
from grmpipe.observe.run_files import read_run
from grmpipe.types import Failed, JudgeReport, Prompt

SCORING = Scoring(counting=AnswerSampling(num_samples=2, pass_k=(1, 2)), pass_reward=7 / 9, greedy=True, by_rule=False)
PROMPTS = [
    Prompt(prompt_id=name, messages=(Message(role="user", content="?"),), source=source, reference="7")
    for name, source in (("a", "math"), ("b", "math"), ("c", "chat"))
]


def answer(prompt: Prompt, sample: int | None, score: float | None, right: bool = False) -> JudgedRollout:
    rollout = rollout_of_text("g", 0, "x")
    failed = Failed(stage="judge", cause="unparseable", attempts=1)
    verdict = failed if score is None else voted("generative", rollout, (score,), mean, Scale())
    return JudgedRollout(
        prompt=prompt, rollout=rollout, report=JudgeReport(verdict=verdict), right=right, sample=sample
    )


A, B, C = PROMPTS
EVALUATED = HeldOutEvaluation(
    metrics={},
    rollouts=(
        answer(A, 0, 10, right=True), answer(A, 1, 1), answer(B, 0, None, right=True), answer(B, 1, None),
        answer(C, 0, 8),
    ),
    greedy=(answer(A, None, 10, right=True), answer(C, None, None)),
)  # fmt: skip


def test_a_failed_verdict_is_counted_and_in_no_figure() -> None:
    found = evaluate_answers(PROMPTS, EVALUATED, SCORING, num_left_out=3)
    own = found.overall
    assert (own.num_answers, own.num_unplayed, own.failed) == (7, 2, {"unparseable": 3})
    assert own.figures["avg_at_2"].mean == pytest.approx((0.5 + 7 / 9) / 2), "b has no verdict"
    assert (own.figures["pass_at_1"].mean, own.figures["pass_at_2"].mean) == (0.75, 1.0)
    assert (own.figures["greedy"].mean, own.figures["greedy"].num_clusters) == (1.0, 1)
    assert own.figures["true_avg_at_2"].mean == pytest.approx((0.5 + 0.5 + 0) / 3), "the rule knows b's answers"
    assert {name: one.num_prompts for name, one in found.by_source.items()} == {"chat": 1, "math": 2}
    metrics = found.metrics()
    assert (metrics["failed_verdicts"], metrics["failed_unparseable"], metrics["prompts_left_out"]) == (3, 3, 3)
    assert metrics["avg_at_2_low"] < metrics["avg_at_2"] < metrics["avg_at_2_high"]


def test_the_console_and_the_report_have_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"mine": evaluate_answers(PROMPTS, EVALUATED, SCORING, num_left_out=3)}
    write_policies(tmp_path, found)
    assert json.loads((tmp_path / RESULTS).read_text())["mine"]["overall"]["failed"] == {"unparseable": 3}
    show_policies(found, SCORING, 8, tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    for text in ("avg@2", "63.9", "the rule that knows the reference", "3 of 7 verdicts failed (3 unparseable)",
                 "2 answers never came", "left out without a reference: 3", "score 8 or more"):  # fmt: skip
        assert text in out
    rows = [line.replace("│", " ").split() for line in read_run(tmp_path).figures.splitlines()]
    assert ["prompts", "n", "avg@2", "pass@1", "pass@2", "greedy", "failed"] in rows
    assert [row[:3] for row in rows if row[:1] == ["mine"]] == [["mine", "3", "63.9"], ["mine", "3", "33.3"]]
    assert {"chat", "math"} <= {row[0] for row in rows if row}
