"""Rubrics that evolve in a run: asks a writer for criteria from pairs of the run's answers, tries them on others, and
judges on by a new version of the rubric.

    trained groups -> pairs -> writer -> candidates -> trial by the judge -> rubrics/<version>.json -> change_judge

Nothing here ends a run: where the writer or a trial fails, the rubric stays as it is, and an alarm says why.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from grmpipe.config.judge import EarlyStopConfig, JudgeConfig, RubricConfig
from grmpipe.config.keys.entry_names import JUDGE
from grmpipe.data.rubrics import SharedRubric, name_criteria
from grmpipe.judge.evolving_rubric import (
    EVOLVED,
    MOST_ASKED,
    SAME_SCORES,
    WRITER,
    EvolvingRubric,
    Trial,
    Version,
    as_merit,
    choose_candidates,
    correlate,
    find_folder,
    parse_candidates,
    retire,
    try_candidate,
)
from grmpipe.judge.grm import Grm, GrmClient, set_purpose
from grmpipe.judge.kinds.rule import Rule
from grmpipe.judge.pointwise_adapter import judge_group
from grmpipe.judge.prompt import JudgePrompt, with_texts
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.judge.trajectory import of_text
from grmpipe.judge.verdict import get_reward, make_failure
from grmpipe.models.seeds import is_drawn
from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import Journal
from grmpipe.pipeline.step_metrics import check_truth
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.run_dir.identity import read_run_id
from grmpipe.types import Criterion, Failed, JudgedGroup, Metrics, Prompt, Rollout

log = logging.getLogger(__name__)

CANDIDATES = "rubric_candidates.jsonl"
MOST_TRIED = 4  # candidates of a round
MOST_PAIRS, LEAST_PAIRS = 64, 8  # of a trial
PAIRS_OF_GROUP = 4
MOST_GROUPS, MOST_EARLIER = 256, 64  # of the latest steps, for trials; of the first round, for pairs


class Pair(NamedTuple):
    """Two texts for the writer: `second` has a higher reward than `first`, or is from later in the training."""

    prompt: Prompt
    first: str
    second: str


class RubricEvolution(RunFeature):
    """The rubric of one judge.

    writer, grm: the models that write criteria and that judge. is_right: the rule for labels.
    """

    def __init__(
        self,
        judge: JudgeConfig,
        rubric: EvolvingRubric,
        writer: Grm,
        grm: Grm,
        is_right: Rule,
        seed: int,
        run_dir: Path,
        guard: Guard | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._note = note
        self.name = "rubric_evolution" if judge.name == JUDGE else f"rubric_evolution/{judge.name}"
        self._judge, self._evolve, self._rubric, self._seed = judge, judge.rubric.evolve, rubric, seed
        self._writer, self._grm, self._is_right = writer, grm, is_right
        self._folder = find_folder(run_dir, judge.name)
        self._template = JudgePrompt.load(self._evolve.template, protocol=WRITER)
        self._shows_reference = JudgePrompt.of(judge).shows_reference  # else the writer must not see it either
        self._journal = Journal(run_dir / CANDIDATES, run_id=read_run_id(run_dir))
        self._guard = guard or Guard()
        self._groups: list[JudgedGroup] = []
        self._num_latest = 0  # of these, since the writer was asked
        self._earlier: list[tuple[str, str]] = []  # prompt_id, text: answers of the first steps
        self._was_asked, self._most_pairs = False, -1  # the writer in this process; pairs to try on when it wasn't
        self._spreads: dict[str, float] = {}  # name of a criterion -> of the latest step that judged it

    # -- a step --------------------------------------------------------------------------------------------------------

    async def after_step(self, end: StepEnd) -> Metrics:
        for name, counts in end.counts.judging.rubric.by_name.items():
            self._spreads[name] = counts.metrics().get("met_std", 0.0)
        self._groups = [*self._groups, *end.report.groups][-MOST_GROUPS:]
        self._num_latest += len(end.report.groups)
        metrics: Metrics = {}
        if end.step % self._evolve.every_steps == 0 and not end.is_last:
            with set_purpose("monitoring"):
                metrics = await self._evolve_rubric(end)
        if end.is_last and self._most_pairs >= 0 and not self._was_asked and not self._journal.path.exists():
            few = f"it takes {LEAST_PAIRS} pairs of siblings of which one is known to be better, and there were at most"
            few += f" {self._most_pairs}"
            more = f"take larger batches, or a larger {self._judge.key}.rubric.evolve.labelled_share"
            never = f"The writer of {self._judge.key}.rubric was never asked"
            self.new_alarms = [*self.new_alarms, f"{never}: {few}; {more}"]
        current = self._rubric.current
        return metrics | {
            "rubric/version": float(self._rubric.number),
            "rubric/evolved_criteria": float(len(current.evolved)),
        }

    async def _evolve_rubric(self, end: StepEnd) -> Metrics:
        """One round: at most one new version. Returns its counts."""
        latest, groups = self._groups[-self._num_latest :], self._groups
        self._num_latest = 0
        draw = random.Random(f"{self._seed} {self.name} {end.step}")
        pairs, is_labelled = self._draw_trial_pairs(groups, draw)
        asked = self._draw_pairs(latest, draw)
        self._earlier = self._earlier or [
            (group.prompt.prompt_id, self._show(group.rollouts[0])) for group in latest[:MOST_EARLIER]
        ]
        if len(pairs) < LEAST_PAIRS:
            self._most_pairs = max(self._most_pairs, len(pairs))
            return {"rubric/pairs": float(len(pairs))}
        self._was_asked = True
        proposed, failed = await self._ask_writer(asked, end.step)
        if failed and len(failed) == len(asked):
            causes = ", ".join(f"{count} {cause}" for cause, count in Counter(one.cause for one in failed).items())
            kept = f"The rubric of {self._judge.key} stays at version {self._rubric.number} after step {end.step}"
            why = f"the writer {self._evolve.writer} failed ({causes}): {failed[-1].detail}"
            self.new_alarms = [*self.new_alarms, f"{kept}: {why}"]
        known = [*self._rubric.current.criteria, *(one for group in groups for one in group.prompt.rubric)]
        candidates = choose_candidates(proposed, known, MOST_TRIED)
        entered, trials = await self._try_all(candidates, groups, pairs, end.step)
        for one, trial in trials:
            tried = {"text": one.text, "weight": one.weight, "labelled": is_labelled, **asdict(trial)}
            with self._guard.watch(CANDIDATES):
                where = {
                    "judge": self._judge.name,
                    "step": end.step,
                    "version": self._rubric.number,
                    "pairs": len(pairs),
                }
                self._journal.append(where | tried)
        if entered:
            await end.pipeline.change_judge(1, lambda: self._enter(entered))
        counts = Counter(trial.outcome for _, trial in trials)
        failures = Counter(one.cause for one in failed)
        return {
            "rubric/pairs": float(len(pairs)),
            "rubric/labelled": float(is_labelled),
            "rubric/proposed": float(len(proposed)),
            **{f"rubric/candidates_{outcome}": float(count) for outcome, count in counts.items()},
            **{f"rubric/writer_failed_{cause}": float(count) for cause, count in failures.items()},
        }

    async def _enter(self, entered: Sequence[Criterion]) -> None:
        current = self._rubric.current
        named = zip(current.criteria, name_criteria(current.criteria), strict=True)
        spreads = {one.text: self._spreads.get(name, 0.0) for one, name in named if EVOLVED in one.tags}
        kept = retire([*current.evolved, *entered], spreads, self._evolve.max_criteria)
        self._rubric.add(Version(current.base, tuple(kept)), self._folder)
        names = ", ".join(f"{one.text!r} (weight {one.weight:g})" for one in entered)
        text = f"the rubric of {self._judge.key} is version {self._rubric.number} now, with {names}"
        log.info("%s", text)
        self._note(text)

    # -- pairs ---------------------------------------------------------------------------------------------------------

    def _show(self, rollout: Rollout) -> str:
        return rollout.show_text(thoughts=self._judge.format.show_thoughts)

    def _draw_pairs(self, groups: Sequence[JudgedGroup], draw: random.Random) -> list[Pair]:
        """Pairs for the writer: in turn the worst and the best sibling, and an earlier answer, to the same prompt if
        there is one, with the best sibling of now.
        """
        found: list[Pair] = []
        for group in draw.sample(groups, len(groups)):
            rewards = zip(map(get_reward, group.verdicts), group.rollouts, strict=True)
            ranked = sorted(((reward, one) for reward, one in rewards if reward is not None), key=lambda one: one[0])
            if not ranked:
                continue
            best, same = self._show(ranked[-1][1]), [one for one in self._earlier if one[0] == group.prompt.prompt_id]
            if self._earlier and len(found) % 2:
                found.append(Pair(group.prompt, draw.choice(same or self._earlier)[1], best))
            elif ranked[0][0] < ranked[-1][0]:
                found.append(Pair(group.prompt, self._show(ranked[0][1]), best))
            if len(found) == MOST_ASKED:
                break
        return found

    def _draw_trial_pairs(
        self, groups: Sequence[JudgedGroup], draw: random.Random
    ) -> tuple[list[tuple[str, str]], bool]:
        """Siblings for trials, the better one first, by their names; and whether labels rank them."""
        share = self._evolve.labelled_share
        chosen = [one for one in groups if is_drawn(self._seed, f"labelled {one.prompt.prompt_id}", share)]
        right = check_truth(chosen, self._is_right) if share else {}
        pairs: list[tuple[str, str]] = []
        for group in groups:
            values = [
                right.get((group.group_id, rollout.sibling)) if right else get_reward(verdict)
                for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
            ]
            known = zip(values, group.rollouts, strict=True)
            ranked = sorted(((value, draw.random(), one) for value, one in known if value is not None), reverse=True)
            half = min(PAIRS_OF_GROUP, len(ranked) // 2)
            ends = zip(ranked[:half], reversed(ranked[-half:]), strict=True) if half else ()
            pairs += ((name(high), name(low)) for (better, _, high), (worse, _, low) in ends if better > worse)
        return draw.sample(pairs, min(MOST_PAIRS, len(pairs))), bool(right)

    # -- questions to models -------------------------------------------------------------------------------------------

    async def _ask_writer(self, pairs: Sequence[Pair], step: int) -> tuple[list[Criterion], list[Failed]]:
        """What the writer proposes, and where it failed."""
        client = GrmClient(self._writer, self._judge, self._seed)
        answers = await asyncio.gather(
            *(self._ask(client, pair, f"rubric/{step}/{index}") for index, pair in enumerate(pairs))
        )
        proposed, failed = list[Criterion](), list[Failed]()
        for answer in answers:
            if isinstance(answer, Failed):
                failed.append(answer)
                continue
            try:
                proposed += parse_candidates(answer, self._rubric.current.heaviest)
            except ValueError as error:
                failed.append(make_failure("unparseable", f"{error}, but ends with {answer[-80:]!r}"))
        return proposed, failed

    async def _ask(self, client: GrmClient, pair: Pair, request: str) -> str | Failed:
        prompt = pair.prompt if self._shows_reference else replace(pair.prompt, reference=None)
        rubric = [replace(as_merit(one), evidence=False) for one in self._rubric.current.shared.join(prompt)]
        escape = self._writer.escape_text
        texts = [of_text(text).change_texts(escape) for text in (pair.first, pair.second)]
        try:
            asked = self._writer.prompt(self._template.render(with_texts(prompt, escape), *texts, criteria=rubric))
        except ValueError as error:
            return make_failure("refused", str(error))
        room = client.room_for_principles
        if room is not None and asked.num_tokens > room:
            return make_failure("too_long", f"the writer's prompt has {asked.num_tokens} tokens; the limit is {room}")
        answer = await client.text(request, request, asked, 0)
        return answer if isinstance(answer, Failed) else answer.answer

    async def _try_all(
        self,
        candidates: Sequence[Criterion],
        groups: Sequence[JudgedGroup],
        pairs: Sequence[tuple[str, str]],
        step: int,
    ) -> tuple[list[Criterion], list[tuple[Criterion, Trial]]]:
        """The candidates that enter, and what became of each."""
        wanted = {one for pair in pairs for one in pair}
        answers = {
            group.group_id: (group.prompt, some)
            for group in groups
            if (some := [rollout for rollout in group.rollouts if name(rollout) in wanted])
        }
        lengths = {name(rollout): len(self._show(rollout)) for _, some in answers.values() for rollout in some}
        entered, scores, trials = list[Criterion](), list[Mapping[str, float]](), list[tuple[Criterion, Trial]]()
        for candidate in candidates:
            met = await self._judge_by(candidate, list(answers.values()), step)
            trial = try_candidate(candidate, pairs, met, lengths)
            own = {answer: sum(both) for answer, both in met.items()}
            if trial.outcome == "entered" and any(have_same_scores(own, other) for other in scores):
                trial = replace(trial, outcome="duplicate")
            if trial.outcome == "entered":
                entered.append(candidate)
                scores.append(own)
            trials.append((candidate, trial))
        return entered, trials

    async def _judge_by(
        self, criterion: Criterion, answers: Sequence[tuple[Prompt, Sequence[Rollout]]], step: int
    ) -> dict[str, tuple[float, float]]:
        """Answer -> how far it meets a criterion, by two judgements."""
        alone = EvolvingRubric([Version(SharedRubric(default=(as_merit(criterion),)))])
        judge = GenerativeJudge(self._grm, for_trial(self._judge), self._seed, evolving=alone)

        async def judge_twice(prompt: Prompt, rollouts: Sequence[Rollout]) -> Iterator[tuple[str, tuple[float, ...]]]:
            twice = [
                await judge_group(
                    judge,
                    replace(prompt, rubric=()),
                    [replace(one, group_id=f"{one.group_id}/rubric/{step}/{again}") for one in rollouts],
                )
                for again in range(2)
            ]
            rewards = [[get_reward(report.verdict) for report in reports] for reports in twice]
            both = zip(rollouts, zip(*rewards, strict=True), strict=True)
            return ((name(one), cast("tuple[float, ...]", own)) for one, own in both if None not in own)

        judged = await asyncio.gather(*(judge_twice(prompt, rollouts) for prompt, rollouts in answers))
        return {answer: (first, second) for some in judged for answer, (first, second) in some}

    # -- between runs --------------------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Any]:
        return {"version": self._rubric.number, "earlier": self._earlier}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rubric.begin(self._folder, state.get("version", 0))
        self._earlier = [(prompt_id, text) for prompt_id, text in state.get("earlier", ())]

    async def close(self) -> None:
        with self._guard.watch(CANDIDATES):
            self._journal.close()


def for_trial(judge: JudgeConfig) -> JudgeConfig:
    """The judge as it judges by one criterion alone, once."""
    rubric = RubricConfig(criteria_per_call=judge.rubric.criteria_per_call)
    return replace(judge, rubric=rubric, num_judgements=1, vote="mean", early_stop=EarlyStopConfig())


def name(rollout: Rollout) -> str:
    return f"{rollout.group_id}/{rollout.sibling}"


def have_same_scores(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    both = [answer for answer in one if answer in other]
    return correlate([one[answer] for answer in both], [other[answer] for answer in both]) >= SAME_SCORES
