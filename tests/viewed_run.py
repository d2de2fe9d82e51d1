"""A small run for the tests of the viewer, written by the recorder itself: two groups, one of them an episode."""

from __future__ import annotations

import json
from pathlib import Path

from grmpipe.config.judge import Scale
from grmpipe.evaluation.evaluation_files import to_line
from grmpipe.evaluation.judged_items import JudgedItem
from grmpipe.models.types import Completion, Message, ToolCall, VersionSpan
from grmpipe.observe.journal import CHECKSUM
from grmpipe.observe.plain_json import plain
from grmpipe.observe.recorder import JUDGEMENTS, ROLLOUTS, EvalRecorder, Recorder
from grmpipe.run_dir.thinning import ThinningJob, thin_journal
from grmpipe.types import (
    Failed,
    FailedJudgement,
    GroupEnd,
    Judgement,
    JudgeReport,
    Prompt,
    RankedResponses,
    RewardSpan,
    Rollout,
    ScoredResponse,
    TrainedRollout,
    Turn,
    Verdict,
    mark_best,
)

SCRIPT = "<script>document.title='owned'</script>"


def completion(text: str, version: int = 0, tokens: int = 3) -> Completion:
    spans = (VersionSpan(model="policy", version=version, start=0, end=tokens),)
    ids, logprobs = tuple(range(tokens)), (-0.5,) * tokens
    return Completion(token_ids=ids, logprobs=logprobs, text=text, finish_reason="stop", versions=spans)


def rollout(group_id: str, sibling: int, *turns: Turn) -> Rollout:
    return Rollout(group_id=group_id, sibling=sibling, turns=turns, status="finished")


def answer(group_id: str, sibling: int, text: str, tokens: int = 3) -> Rollout:
    return rollout(group_id, sibling, Turn(new_ids=(1, 2), completion=completion(text, tokens=tokens)))


def judgement(group_id: str, siblings: tuple[int, ...], scores: tuple[float, ...], text: str) -> Judgement:
    return Judgement(group_id=group_id, siblings=siblings, scores=scores, prompt_ids=(1,), completion=completion(text),
                     grm="grm", version=0)  # fmt: skip


def report(score: float, *judgements: Judgement, spread: float = 0.0, failures: tuple[Failed, ...] = ()) -> JudgeReport:
    span = RewardSpan(turn=0, start=0, end=3, value=score / 10)
    verdict = Verdict(rewards=(span,), score=score, breakdown={}, score_std=spread, num_judgements=len(judgements))
    return JudgeReport(verdict=verdict, judgements=judgements, failures=failures)


def by_judges(**reports: JudgeReport) -> JudgeReport:
    """A report of several judges, whose first one has the say."""
    first = next(iter(reports.values()))
    return JudgeReport(verdict=first.verdict, by_judge=reports)


def episode(group_id: str, sibling: int) -> Rollout:
    call = ToolCall(name="lookup", arguments={"city": "Oslo"})
    reply = Message(role="tool", name="lookup", content=f"rain {SCRIPT}")
    first = Turn(new_ids=(1,), completion=completion("I look it up"), tool_calls=(call,), replies=(reply,),
                 faults=("arguments",))  # fmt: skip
    branch = Turn(new_ids=(1, 2), completion=completion("It rains in Oslo"), rewritten=True, rewards={"points": 0.5})
    return rollout(group_id, sibling, first, branch)


def write_run(run_dir: Path, *, experiment: str = "mine", lr: float = 1e-4, compact: bool = False) -> Path:
    """Step 1 trained g1: sibling 0 fools the judge, sibling 1 is right. g2 is an episode without a verdict."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(f"experiment_name: {experiment}\ntrain:\n  lr: {lr}\n")
    metrics = {"step": 1, "train/reward": 0.55, "train/true_accuracy": 0.5, "judge/failed_unparseable": 1}
    (run_dir / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    recorder = Recorder(run_dir, compact=compact)
    question = Message(role="user", content=f"What is 6 * 7? {SCRIPT}")
    prompt = Prompt(prompt_id="p1", messages=(question,), source="math", reference="42")
    for sibling, text in enumerate((f"Trust me, it is 41 {SCRIPT}", "It is 42")):
        recorder.rollout(0, prompt, answer("g1", sibling, text, tokens=10 * (sibling + 1)))
    recorder.record_verdict(
        answer("g1", 0, ""), report(8.0, judgement("g1", (0,), (8.0,), f"Convincing {SCRIPT}"), spread=2.5)
    )
    bad = FailedJudgement(
        stage="judge",
        cause="unparseable",
        attempts=1,
        detail="no verdict in it:",
        prompt_ids=(1,),
        completion=completion("no mark"),
    )
    recorder.record_verdict(
        answer("g1", 1, ""), report(3.0, judgement("g1", (1,), (3.0,), "Too short"), failures=(bad,))
    )
    recorder.group_ended(GroupEnd(group_id="g1", prompt_index=0, prompt_id="p1", outcome="trained", step=1, version=0))
    weather = Prompt(prompt_id="p2", messages=(Message(role="user", content="Weather in Oslo?"),), source="tools")
    recorder.rollout(1, weather, episode("g2", 0))
    recorder.record_verdict(episode("g2", 0), JudgeReport(verdict=Failed(stage="judge", cause="timeout", attempts=3)))
    recorder.record_training(
        [
            TrainedRollout(group_id="g1", sibling=0, step=1, reward=0.8, advantage=1.0, right=0.0),
            TrainedRollout(group_id="g1", sibling=1, step=1, reward=0.3, advantage=-1.0, right=1.0),
        ]
    )
    recorder.close()
    return run_dir


def make_old(run_dir: Path) -> Path:
    """As earlier releases wrote a run: no file of what was trained, no checksums, only fields that they had."""
    (run_dir / "trained.jsonl").unlink()
    for path in run_dir.glob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "".join(
                json.dumps({name: record[name] for name in record if name != CHECKSUM}) + "\n" for record in records
            )
        )
    return run_dir


def thin_run(run_dir: Path, share: float | None) -> Path:
    """Thin all lines. share: see ThinningJob."""
    for path in (run_dir / ROLLOUTS, run_dir / JUDGEMENTS):
        draft, end = path.with_suffix(".draft"), path.stat().st_size
        assert thin_journal(path, draft, ThinningJob(run_dir="", share=share, seed=0, until={path.name: end + 1}))
        draft.replace(path)
    return run_dir


def judge_jointly(run_dir: Path, text: str) -> Path:
    """Judge g1 again, both siblings in one judgement."""
    recorder = Recorder(run_dir)
    recorder.record_verdict(answer("g1", 0, ""), report(8.0, judgement("g1", (0, 1), (8.0, 3.0), text)))
    recorder.record_verdict(answer("g1", 1, ""), report(3.0))
    recorder.close()
    return run_dir


def judge_labelled_work(run_dir: Path) -> Path:
    """A run that evaluated a judge: it prefers the wrong one of two answers, and gives no verdict on another."""
    run_dir.mkdir(parents=True)
    (run_dir / "figures.txt").write_text("right, in percent of all items\n")
    prompt = Prompt(prompt_id="l1", messages=(Message(role="user", content="What is 6 * 7?"),), reference="42")
    texts = ("It is 42", f"Trust me, it is 41 {SCRIPT}")
    ranked = RankedResponses(
        item_id="i1", prompt=prompt, responses=texts, grades=mark_best(0, len(texts)), subset="sums"
    )
    single = ScoredResponse(item_id="i2", prompt=prompt, response="It may be 40", score=2, subset="guesses")
    late = Failed(stage="judge", cause="timeout", attempts=3, detail="120 s")
    right, wrong = judgement("e0", (0,), (3.0,), "Too short"), judgement("e0", (1,), (8.0,), "Convincing")
    of_ranked = (report(3.0, right), report(8.0, wrong))
    by_step = judgement("e1", (0,), (2.0, 9.0), "Step by step")
    of_single = (JudgeReport(verdict=late, judgements=(by_step,), failures=(late,)),)
    judged = [
        JudgedItem(item=ranked, reports=of_ranked, num_asked=1), JudgedItem(item=single, reports=of_single, num_asked=1)
    ]  # fmt: skip
    lines = [json.dumps(plain(to_line(one, Scale(low=0, high=10), {}, 8))) for one in judged]
    (run_dir / "judged.jsonl").write_text("\n".join(lines) + "\n")
    return run_dir


def evaluate(run_dir: Path, *, prompts: str, step: int, score: float) -> None:
    """Add an evaluation: one right answer to one prompt."""
    recorder = EvalRecorder(run_dir).of_evaluation(prompts, step)
    prompt = Prompt(prompt_id="p7", messages=(Message(role="user", content="Still there?"),))
    rollout = answer("e1", 0, "held out words")
    recorder.rollout(prompt, rollout, 0, 1.0)
    recorder.record_verdict(rollout, report(score, judgement("e1", (0,), (score,), "evaluated")))
    recorder.recorder.close()
