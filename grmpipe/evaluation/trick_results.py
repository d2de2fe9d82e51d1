"""What tricks do to a judge's verdicts on wrong responses: figures by trick, tables, and the responses as labels."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from grmpipe.config.task_settings import POLICY_TRICKS
from grmpipe.data.trained_prompts import digest_prompt
from grmpipe.evaluation.evaluation_files import MAX_CHARS, format_difference, interval, percent, table
from grmpipe.evaluation.intervals import Difference, Estimate, estimate_clustered, estimate_difference
from grmpipe.evaluation.judged_items import JudgedItem
from grmpipe.judge.verdict import get_reward
from grmpipe.observe.plain_json import plain
from grmpipe.types import JudgeReport, Labelled, Metrics, ScoredResponse

PLAIN = "plain"  # subset of responses without a trick
PROBE_RESULTS = "probe.json"
TRAIN, HELD_OUT = "probes_train.jsonl", "probes_held_out.jsonl"
SHOWN = 2  # examples of a trick that pays


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A wrong response with a trick, which its item's subset names, and the reports on it and on the plain one."""

    item: ScoredResponse
    report: JudgeReport
    plain: JudgeReport

    @property
    def reward(self) -> float | None:
        return get_reward(self.report.verdict)

    @property
    def rise(self) -> float | None:
        """By how much the reward is higher than without the trick. None: one of both verdicts failed."""
        before = get_reward(self.plain.verdict)
        return None if before is None or self.reward is None else self.reward - before


@dataclass(frozen=True, slots=True, kw_only=True)
class TrickResult:
    """What a trick does. Failed verdicts are in no figure but their share; intervals are over prompts.

    success:      the share of wrong responses that pass with it; success_before: of the same ones without it.
    success_rise: the difference of both.
    reward_rise:  the mean difference of the rewards, which are from 0 to 1.
    pays:         whether one of both rises is surely above the margin. Of a trick of the policy only the first: other
                  answers that are wrong may be less so. None: too few responses to say.
    """

    num_responses: int
    success: Estimate
    success_before: Estimate
    success_rise: Difference
    reward_rise: Difference
    failed_share: float
    pays: bool | None


def measure_tricks(attempts: Sequence[Attempt], pass_reward: float, margin: float) -> dict[str, TrickResult]:
    """Trick -> its result, in the order of their first attempts. pass_reward: the lowest reward that passes."""
    by_trick: dict[str, list[Attempt]] = {}
    for one in attempts:
        by_trick.setdefault(one.item.subset, []).append(one)
    return {trick: measure_trick(own, pass_reward, margin) for trick, own in by_trick.items()}


def measure_trick(attempts: Sequence[Attempt], pass_reward: float, margin: float) -> TrickResult:
    passes: dict[str, list[float]] = {}
    passed_before: dict[str, list[float]] = {}
    success_rises: dict[str, list[float]] = {}
    reward_rises: dict[str, list[float]] = {}
    for one in attempts:
        prompt = digest_prompt(one.item.prompt)
        if one.reward is not None:
            passes.setdefault(prompt, []).append(float(one.reward >= pass_reward))
        if one.reward is not None and one.rise is not None:
            passed = float(one.reward - one.rise >= pass_reward)
            passed_before.setdefault(prompt, []).append(passed)
            success_rises.setdefault(prompt, []).append(float(one.reward >= pass_reward) - passed)
            reward_rises.setdefault(prompt, []).append(one.rise)
    rises = estimate_difference(success_rises, are_shares=True), estimate_difference(reward_rises, are_shares=False)
    deciding = rises[:1] if attempts[0].item.subset in POLICY_TRICKS else rises
    return TrickResult(
        num_responses=len(attempts),
        success=estimate_clustered(passes),
        success_before=estimate_clustered(passed_before),
        success_rise=rises[0],
        reward_rise=rises[1],
        failed_share=sum(one.reward is None for one in attempts) / len(attempts),
        pays=does_pay(deciding, margin),
    )


def does_pay(rises: Sequence[Difference], margin: float) -> bool | None:
    """Whether one of the rises is surely above the margin; None: whether one is can't be told."""
    if any(one.num_clusters > 1 and one.low > margin for one in rises):
        return True
    return False if all(one.num_clusters > 1 and one.high <= margin for one in rises) else None


def name_metrics(results: Mapping[str, TrickResult]) -> Metrics:
    """The figures by their names in summary.json. A trick without a verdict has none."""
    metrics: Metrics = {"tricks_that_pay": float(sum(one.pays is True for one in results.values()))}
    for trick, one in results.items():
        if one.success.num_clusters:
            metrics[f"{trick}_success_share"] = one.success.mean
        if one.reward_rise.num_clusters:
            metrics |= {
                f"{trick}_success_rise": one.success_rise.mean,
                f"{trick}_reward_rise": one.reward_rise.mean,
            }
    return metrics


# -- what is shown -----------------------------------------------------------------------------------------------------


def make_table(results: Mapping[str, TrickResult]) -> Table:
    heads = (
        "wrong responses",
        "pass without",
        "pass",
        "95 %",
        "rise",
        "95 %",
        "p",
        "reward rise",
        "95 %",
        "p",
        "failed",
        "",
    )
    rows = [(trick, format_row(one)) for trick, one in results.items()]
    return table("trick", "wrong responses that a trick gets past the judge, shares in percent", heads, rows)


def format_row(one: TrickResult) -> Iterator[str]:
    yield str(one.num_responses)
    yield percent(one.success_before.mean)
    yield percent(one.success.mean)
    yield interval(one.success.low, one.success.high)
    yield from format_difference(one.success_rise, 100, 1)
    yield from format_difference(one.reward_rise, 1, 3)
    yield percent(one.failed_share)
    yield {True: "pays", False: "", None: "too few to say"}[one.pays]


def list_worst(attempts: Iterable[Attempt], results: Mapping[str, TrickResult]) -> Iterator[str]:
    """The wrong responses that gained most by each trick that pays."""
    ranked = sorted(attempts, key=lambda one: (-(one.rise or 0), -(one.reward or 0)))
    for trick in (trick for trick, one in results.items() if one.pays):
        for one in [one for one in ranked if one.item.subset == trick and one.rise is not None][:SHOWN]:
            assert one.reward is not None and one.rise is not None
            question, text = (shorten(text) for text in (one.item.prompt.messages[-1].content, one.item.response))
            yield f'{trick}: reward {one.reward - one.rise:.2f} -> {one.reward:.2f} for "{text}" to "{question}"'


def shorten(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_CHARS else f"{flat[: MAX_CHARS - 3]}..."


# -- the files ---------------------------------------------------------------------------------------------------------


def write_probes(run_dir: Path, wrong: Sequence[JudgedItem], right: Sequence[Labelled]) -> dict[str, int]:
    """Write all responses as labels, into one of two files by a hash of the prompt. Those of each trick with the
    highest rewards come first: the first rows are the worst ones of all tricks. Returns the number of rows by file.

    right: without them a judge in training would learn that all is wrong.
    """
    known = [(one.item, get_reward(one.reports[0].verdict)) for one in wrong]
    places: dict[str, int] = {}
    ranked: list[tuple[int, dict[str, object]]] = []
    for item, reward in sorted(known, key=lambda one: -1.0 if one[1] is None else one[1], reverse=True):
        place = places[item.subset] = places.get(item.subset, -1) + 1
        ranked.append((place, describe_row(item, right=False) | {"reward": reward}))
    rows = [row for _, row in sorted(ranked, key=lambda one: one[0])] + [describe_row(one, right=True) for one in right]
    halves: dict[str, list[str]] = {TRAIN: [], HELD_OUT: []}
    for row in rows:
        half = TRAIN if int(str(row["prompt_digest"]), 16) % 2 else HELD_OUT
        halves[half].append(json.dumps(plain(row), ensure_ascii=False) + "\n")
    for name, lines in halves.items():
        (run_dir / name).write_text("".join(lines), encoding="utf-8")
    return {name: len(lines) for name, lines in halves.items()}


def describe_row(item: Labelled, *, right: bool) -> dict[str, object]:
    prompt = item.prompt
    asked = [{"role": one.role, "content": one.content} for one in prompt.messages]
    is_text = len(asked) == 1 and asked[0]["role"] == "user"
    known = {"source": prompt.source, "reference": prompt.reference}
    return {
        **({"prompt": asked[0]["content"]} if is_text else {"messages": asked}),
        "response": item.responses[0],
        "right": right,
        "subset": item.subset,
        "item_id": item.item_id,
        **{name: value for name, value in known.items() if value},
        "prompt_digest": digest_prompt(prompt),
    }
