"""The output of a policy's evaluation: tables and policy_evaluation.json."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.table import Table

from grmpipe.evaluation.evaluation_files import causes, percent, show_figures, table
from grmpipe.evaluation.intervals import Estimate
from grmpipe.evaluation.policy_evaluation import PolicyEvaluation, PolicyFigures, Scoring
from grmpipe.observe.plain_json import plain

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
