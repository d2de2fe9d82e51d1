"""Rollouts with their judgements, as rows of a table for people. Never used for training."""

from grmpipe.judge.prompt_injection import plain
from grmpipe.judge.trajectory import make_trajectory
from grmpipe.judge.verdict import describe_criteria, get_shown_score
from grmpipe.trackers.tracker import SampleRow
from grmpipe.types import Failed, JudgeReport, Prompt, Rollout


def sample_row(prompt: Prompt, rollout: Rollout, report: JudgeReport, truth: float | None = None) -> SampleRow:
    return SampleRow(
        group_id=rollout.group_id,
        sibling=rollout.sibling,
        question=next((m.content for m in reversed(prompt.messages) if m.role == "user"), ""),
        answer=plain(make_trajectory(prompt, rollout, thoughts=True)),
        critique=join_critiques(report),
        score=get_shown_score(report.verdict),
        truth=truth,
    )


def join_critiques(report: JudgeReport) -> str:
    """The judgements' texts, with the judge's name if there are several, and with the turn, from 1, if each is of one;
    for a failed verdict, the cause first. Before them how far each criterion of a rubric is met.
    """
    texts = [
        mark_text(judgement.completion.text, name, "" if judgement.turn is None else f"turn {judgement.turn + 1}")
        for name, own in report.own_reports.items()
        for judgement in own.judgements
    ]
    texts[:0] = [
        mark_text(describe_criteria(own.criteria), name) for name, own in report.own_reports.items() if own.criteria
    ]
    if isinstance(report.verdict, Failed):
        failed = report.verdict
        texts.insert(0, f"[{failed.stage} failed: {failed.cause}] {failed.detail}".rstrip())
    return "\n\n".join(texts)


def mark_text(text: str, *marks: str) -> str:
    """The text after its marks, without empty ones."""
    said = ", ".join(filter(None, marks))
    return f"[{said}] {text}" if said else text
