"""A policy on prompts: its figures over all of them and by source; tables of them and policy_evaluation.json."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from grmpipe.evaluation.evaluation_files import causes, percent, show_figures, table
from grmpipe.evaluation.held_out import HeldOutEvaluation, JudgedRollout, by_prompt, compute_figures
from grmpipe.evaluation.intervals import Estimate
from grmpipe.evaluation.sampled_answers import AnswerSampling, mean_over_prompts, with_ends
from grmpipe.observe.plain_json import plain
from grmpipe.types import Failed, Metrics, Prompt, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    """The figures of some prompts.

    figures:  avg_at_<n>, pass_at_<k> and greedy by the judge; true_* by the rule, where a judge that isn't it scores.
    failed:   failed verdicts by cause; they are in no figure. num_unplayed: answers that never came.
    score:    mean of the verdicts on the first judge's scale; None without a verdict.
    """

    num_prompts: int
    num_answers: int
    num_unplayed: int
    failed: Mapping[str, int]
    figures: Mapping[str, Estimate]
    score: float | None
    response_tokens: float | None
    truncated_share: float | None

    @property
    def num_failed(self) -> int:
        return sum(self.failed.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEvaluation:
    """The results of a policy on prompts. by_source: empty if all have the same."""

    overall: PolicyFigures
    num_left_out: int = 0  # prompts without a reference, under a rule
    by_source: Mapping[str, PolicyFigures] = field(default_factory=dict)

    def metrics(self) -> Metrics:
        """The metrics by their names in summary.json."""
        own = self.overall
        optional = {
            "score": own.score, "response_tokens": own.response_tokens, "truncated_share": own.truncated_share,
        }  # fmt: skip
        return {
            **with_ends(own.figures),
            **{name: value for name, value in optional.items() if value is not None},
            "prompts": own.num_prompts,
            "prompts_left_out": self.num_left_out,
            "answers": own.num_answers,
            "answers_unplayed": own.num_unplayed,
            "failed_verdicts": own.num_failed,
            **{f"failed_{cause}": count for cause, count in sorted(own.failed.items())},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How answers become figures.

    pass_reward: the lowest reward of an answer that passes; None: rewards are on no scale, and there is no pass@k.
    by_rule: whether only a rule judges, so that the truth is the same again.
    """

    counting: AnswerSampling
    pass_reward: float | None
    greedy: bool
    by_rule: bool


def evaluate_answers(
    prompts: Sequence[Prompt], evaluated: HeldOutEvaluation, scoring: Scoring, num_left_out: int = 0
) -> PolicyEvaluation:
    """The evaluation of a policy's answers to these prompts."""
    sources = sorted({prompt.source for prompt in prompts})

    def of(source: str | None) -> PolicyFigures:
        chosen = [prompt for prompt in prompts if source in (None, prompt.source)]
        sampled, greedy = (
            [one for one in some if source in (None, one.prompt.source)]
            for some in (evaluated.rollouts, evaluated.greedy)
        )
        return figures_over(len(chosen), sampled, greedy, scoring)

    return PolicyEvaluation(
        overall=of(None),
        num_left_out=num_left_out,
        by_source={source or "(no source)": of(source) for source in sources} if len(sources) > 1 else {},
    )


def figures_over(
    num_prompts: int, sampled: Sequence[JudgedRollout], greedy: Sequence[JudgedRollout], scoring: Scoring
) -> PolicyFigures:
    answers = [*sampled, *greedy]
    verdicts = [one.report.verdict for one in answers]
    found = compute_figures(sampled, scoring.counting, scoring.pass_reward) | greedy_figures(greedy)
    wanted = num_prompts * (scoring.counting.num_samples + scoring.greedy)
    scores = [one.report.verdict.score for one in sampled if isinstance(one.report.verdict, Verdict)]
    return PolicyFigures(
        num_prompts=num_prompts,
        num_answers=len(answers),
        num_unplayed=wanted - len(answers),
        failed=Counter(verdict.cause for verdict in verdicts if isinstance(verdict, Failed)),
        figures={name: one for name, one in found.items() if not (scoring.by_rule and name.startswith("true_"))},
        score=statistics.fmean(scores) if scores else None,
        response_tokens=statistics.fmean(one.rollout.num_sampled_tokens for one in sampled) if sampled else None,
        truncated_share=statistics.fmean(one.rollout.status == "truncated" for one in sampled) if sampled else None,
    )


def greedy_figures(greedy: Sequence[JudgedRollout]) -> dict[str, Estimate]:
    rewards, truths = by_prompt(greedy, lambda one: one.reward), by_prompt(greedy, lambda one: one.right)
    found = {"greedy": mean_over_prompts(rewards), "true_greedy": mean_over_prompts(truths)}
    return {name: one for name, one in found.items() if one.num_clusters}


# -- the output --------------------------------------------------------------------------------------------------------


RESULTS = "policy_evaluation.json"
BY_RULE = "true_"  # begins the figures by the rule, beside a judge


def write_policies(run_dir: Path, policies: Mapping[str, PolicyEvaluation]) -> None:
    (run_dir / RESULTS).write_text(json.dumps(plain(policies), indent=2, ensure_ascii=False) + "\n", "utf-8")


def show_policies(policies: Mapping[str, PolicyEvaluation], scoring: Scoring, pass_score: int, run_dir: Path) -> None:
    """Show the figures. pass_score: the lowest score of an answer that passes."""
    names = [name for one in policies.values() for name in one.overall.figures]
    by_judge = list(dict.fromkeys(name for name in names if not name.startswith(BY_RULE)))
    by_rule = list(dict.fromkeys(name for name in names if name.startswith(BY_RULE)))
    title = "the policy's answers, in percent, with 95 % intervals over prompts"
    tables = [policy_table(title, by_judge, policies)]
    if by_rule:
        tables.append(policy_table("the same answers, by the rule that knows the reference", by_rule, policies))
    show_figures(run_dir, tables, policy_notes(policies, scoring, pass_score))


def policy_table(title: str, figures: list[str], policies: Mapping[str, PolicyEvaluation]) -> Table:
    def cells(one: PolicyFigures) -> list[str]:
        shown = (figure_text(one.figures.get(figure)) for figure in figures)
        return [str(one.num_prompts), *shown, str(one.num_failed)]

    heads = ("n", *map(format_head, figures), "failed")
    return table("prompts", title, heads, [(name, cells(one)) for name, one in policies_and_sources(policies)])


def policies_and_sources(policies: Mapping[str, PolicyEvaluation]) -> Iterator[tuple[str, PolicyFigures]]:
    for name, policy in policies.items():
        yield name, policy.overall
        yield from ((f"  {source}", one) for source, one in policy.by_source.items())


def format_head(figure: str) -> str:
    """avg_at_4 as people write it."""
    return figure.removeprefix(BY_RULE).replace("_at_", "@")


def figure_text(one: Estimate | None) -> str:
    """In percent; rewards that aren't on [0, 1] as they are."""
    if one is None or math.isnan(one.mean):
        return "-"
    if one.low < 0 or one.high > 1:
        return f"{one.mean:.3g} ({one.low:.3g} to {one.high:.3g})"
    return f"{percent(one.mean)} ({100 * one.low:.0f}-{100 * one.high:.0f})"


def policy_notes(policies: Mapping[str, PolicyEvaluation], scoring: Scoring, pass_score: int) -> Iterator[str]:
    """Notes on what the tables leave out, one per line."""
    counting = scoring.counting
    passing = "" if scoring.by_rule else f" (score {pass_score} or more)"
    pass_at_k = f"pass@k: one of k passes{passing}, estimated without bias from all of them"
    if scoring.pass_reward is None:
        pass_at_k = "pass@k needs the range of the rewards, as in judge.function_call.score_range=[0, 1]"
    yield f"avg@{counting.num_samples}: the mean reward of {counting.num_samples} answers to a prompt; {pass_at_k}"
    for name, policy in policies.items():
        own = policy.overall
        if own.num_failed:
            yield f"{name}: {own.num_failed} of {own.num_answers} verdicts failed{causes(own.failed)}: in no figure"
        if own.num_unplayed:
            yield f"{name}: {own.num_unplayed} answers never came (run.log says why): in no figure"
        if policy.num_left_out:
            yield f"{name}: left out without a reference: {policy.num_left_out} prompts"
