"""task=rejudge: judges the stored rollouts of a run again, and compares the new verdicts with the run's own. Those of
another trainer (rejudge.path) become the journals of a run first.

rollouts.jsonl of the run -> judge -> judgements.jsonl here -> compare: groups of both -> comparison.json, a table
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grmpipe.config.data import RolloutConfig
from grmpipe.config.io.key_errors import section
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.reward_checks import check_sources
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.task_settings import RejudgeConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.data.prompts import Data
from grmpipe.evaluation.verdict_comparison import (
    ComparedGroup,
    ComparedRollout,
    VerdictComparison,
    compare,
    list_metrics,
    show_comparison,
    write_comparison,
)
from grmpipe.judge.composition.composed_judge import without_bounds
from grmpipe.judge.context_limits import check_template
from grmpipe.judge.evolving_rubric import find_folder, load_version
from grmpipe.judge.grm import set_purpose
from grmpipe.judge.judge_in_time import judge_in_time
from grmpipe.judge.kinds.labels import find_rule
from grmpipe.judge.verdict import get_reward
from grmpipe.models.seeds import is_drawn
from grmpipe.observe.recorder import GROUPS, JUDGEMENTS, ROLLOUTS, decode_recorded, load_group_ends
from grmpipe.observe.records import TEXT, decode_report
from grmpipe.observe.summary import EvalSummary, Status, Summary
from grmpipe.pipeline.counters import Counters
from grmpipe.pipeline.health import OutageBreaker
from grmpipe.pipeline.interfaces import RolloutKey
from grmpipe.pipeline.step_metrics import check_truth
from grmpipe.run.build.compose_pipeline import compose_health
from grmpipe.run.build.make_judge import find_evolving
from grmpipe.run.build.start import Running, start
from grmpipe.run.prepare import Prepared, check_all_judges, check_own_judges
from grmpipe.run.run_context import Run, RunContext
from grmpipe.run.run_prompts import select_reaching
from grmpipe.run.tasks.import_rollouts import check_all_references, import_rollouts
from grmpipe.run.tasks.prepare_evaluation import check_measurable, find_judges
from grmpipe.run.tasks.stats import summarize_judging
from grmpipe.run_dir.recorded_run import JournalLines, RecordedGroups
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.run_together import raise_first_failure, run_until
from grmpipe.train.batching.samples import mean_advantages, select_judged, to_samples
from grmpipe.types import Failed, Judge, JudgedGroup, JudgeReport, Metrics, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroups:
    """Groups of a run that are to be judged again, those of the first steps first.

    steps:   group_id -> the step that trained it; None: none did.
    prompts: those of these groups, each once.
    num_without_text: further groups, whose text was dropped: they can't be judged again.
    run:     the groups with the run's own verdicts.
    """

    steps: Mapping[str, int | None]
    prompts: tuple[Prompt, ...]
    run: RecordedGroups
    num_without_text: int = 0

    @property
    def num_rollouts(self) -> int:
        return sum(len(self.run.rollouts.places[group_id]) for group_id in self.steps)

    def read_new_verdicts(self, run_dir: Path) -> RecordedGroups:
        """The same groups with the new verdicts in a directory."""
        return replace(self.run, judgements=JournalLines(run_dir / JUDGEMENTS, self.steps.keys()))


def open_stored(run_dir: Path, chosen: RejudgeConfig, seed: int) -> StoredGroups:
    """Open a run's journals, also of a run that goes on: a torn last line is ignored. ValueError says what is
    missing.
    """
    rollouts, judgements, groups = (run_dir / name for name in (ROLLOUTS, JUDGEMENTS, GROUPS))
    if not rollouts.exists():
        raise ValueError(f"there is no {rollouts}; give the directory of a run that has stored rollouts")
    trained = {} if not groups.exists() else {end.group_id: end.step for end in load_group_ends(groups)}
    lines = JournalLines(rollouts)
    steps = {
        group_id: trained.get(group_id)
        for group_id in lines.places
        if chosen.wants(trained.get(group_id)) and is_drawn(seed, f"rejudge/{group_id}", chosen.sample)
    }
    if not steps:
        raise ValueError(f"{rollouts} has no group for rejudge.steps={chosen.steps} and rejudge.sample={chosen.sample}")
    first = {group_id: min((at, sibling) for sibling, at in lines.places[group_id].items()) for group_id in steps}
    in_order = sorted(steps, key=lambda group_id: (steps[group_id] is None, steps[group_id] or 0, first[group_id]))
    firsts = ((group_id, lines.read(group_id, first[group_id][1], decode_recorded)) for group_id in in_order)
    texts = {group_id: line.prompt for group_id, line in firsts if line.thinned != TEXT}
    found = {group_id: prompt for group_id, prompt in texts.items() if not prompt.self_judging}  # which labels judge
    if not found:
        raise ValueError(f"{rollouts} holds no text of these groups: journals.keep dropped it; choose other steps")
    return StoredGroups(
        steps={group_id: steps[group_id] for group_id in found},
        prompts=tuple({prompt.prompt_id: prompt for prompt in found.values()}.values()),
        num_without_text=len(in_order) - len(texts),
        run=RecordedGroups(rollouts=lines, judgements=JournalLines(judgements)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRejudging:
    """A checked judging again, ready to start. source: the directory of the run. imported: what is to be said of
    rollouts of another trainer.
    """

    prepared: Prepared
    stored: StoredGroups
    source: Path
    imported: tuple[str, ...] = ()

    @property
    def config(self) -> RunConfig:
        return self.prepared.config

    def notes(self) -> list[str]:
        """What the new judge is not."""
        said = [f"rejudge.path: {line}" for line in self.imported]
        if self.config.judging.by_policy:
            said.append("the policy judges as it was at the start of the run")
        for role in self.config.judging.local_roles:
            if (trained := self.source / role).is_dir():
                model = self.config.models[role]
                said.append(
                    f"{model.key}.path: {role} was trained in this run, and judges again as it was at the start, "
                    f"{model.path}; for the trained one type {model.key}.path={trained}"
                )
        return said


def prepare_rejudging(config: RunConfig) -> PreparedRejudging:
    """Open the run's rollouts, find the models that judge, and check that they can read them. Raises ConfigError."""
    assert config.run_dir is not None
    source, config, imported = Path(config.run_dir).parent.parent, config.without_adapters(), None
    for judge in config.judging.judges.values():
        if judge.kind == "label":
            raise ConfigError(
                f"{judge.key}.kind: label is for a judge in training; type judge=generative, or another judge of texts"
            )
        if config.rejudge.path is not None:
            check_measurable(judge)
    if config.rejudge.path is not None:
        with section("rejudge.path: "):
            imported = import_rollouts(config, source)
    with section("run_dir: "):
        stored = open_stored(source, config.rejudge, config.seed)
    with section(""):
        check_sources(config.rewards, {prompt.source for prompt in stored.prompts})
    for judge in config.judging.generative.values():
        check_template(judge, stored.prompts)
    for name, judge in config.judging.judges.items():
        reaching = select_reaching(config.rewards, name, stored.prompts)
        if judge.kind == "rule":
            where, way_out = (
                ("run_dir", f"{judge.key}=pointwise, or another judge without references")
                if imported is None
                else ("rejudge.path", "data.path=<prompts with references>")
            )
            with section(f"{where}: "):
                check_all_references(judge, reaching, way_out)
    prepared = find_judges(config, stored.prompts, reads_policy=imported is None)
    for judge in config.judging.generative.values():
        read_rubric_versions(prepared, judge, stored, source)
    if imported is not None:  # nothing has tokens
        check_own_judges(config)
        return PreparedRejudging(prepared=prepared, stored=stored, source=source, imported=imported)
    check_all_judges(prepared, Data(train=stored.prompts, held_out=()))
    return PreparedRejudging(prepared=prepared, stored=stored, source=source)


def read_rubric_versions(prepared: Prepared, judge: JudgeConfig, stored: StoredGroups, source: Path) -> None:
    """Let a judge whose rubric changed in the run judge each group by the version that judged it."""
    rubric, folder = find_evolving(prepared, judge), find_folder(source, judge.name)
    if rubric is None:
        return
    for group_id in stored.steps:
        for sibling in stored.run.judgements.places.get(group_id, {}):
            report = stored.run.judgements.read(group_id, sibling, decode_report)
            number = report.own_reports.get(judge.name, report).rubric_version or 0
            rubric.by_group[group_id] = max(number, rubric.by_group.get(group_id, 0))  # earlier ones were void
    try:
        rubric.versions[:] = [
            load_version(folder / f"{number}.json") for number in range(1 + max(rubric.by_group.values(), default=0))
        ]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{judge.key}.rubric.evolve.writer: the versions of the run's rubric can't be read ({error}); restore "
            f"{folder}, or type {judge.key}.rubric.evolve.writer=null to judge by {judge.key}.rubric.path"
        ) from error


class GroupJudging:
    """Judges groups one after the other, with the breaker and the deadline of a run."""

    def __init__(
        self,
        prepared: PreparedRejudging,
        judge: Judge,
        done: Callable[[JudgedGroup, Sequence[JudgeReport]], None],
        clock: ActiveClock,
    ) -> None:
        """done: gets each group with its reports. clock: of the deadlines of groups."""
        self._stored = prepared.stored
        self._deadline_s = prepared.config.rollout.group_deadline_s
        self._clock = clock
        self._breaker = OutageBreaker(compose_health(prepared.config), self._clock)
        self._judge = judge
        self._done = done

    async def judge_each(self, in_order: Iterator[tuple[int, str]]) -> None:
        """in_order: the priority and the id of each group; several callers may share it. Raises Unfit."""
        for priority, group_id in in_order:
            await self._breaker.until_fit()
            group = self._stored.run.group(group_id)
            limit = self._clock.timeout(self._deadline_s)
            reports = await judge_in_time(self._judge, group.prompt, group.rollouts, limit, priority)
            self._done(group, reports)
            for report in reports:
                self._breaker.record(report.verdict)


class RejudgeRun(Run[PreparedRejudging]):
    """Judges what has no new verdict, or failed, then compares all."""

    is_policy_run = False

    def __init__(self, prepared: PreparedRejudging, context: RunContext) -> None:
        super().__init__(prepared, context)
        self._running: Running | None = None
        self._counters = Counters()
        self._metrics: Metrics = {}

    async def run(self) -> Status:
        stored = self._prepared.stored
        again = stored.read_new_verdicts(self._run_dir)
        missing = [group_id for group_id in stored.steps if not again.have_verdicts(group_id)]
        self._observers.note(
            f"{len(missing)} of {len(stored.steps)} groups ({stored.num_rollouts} rollouts) of "
            f"{self._prepared.source} are judged again; files in {self._run_dir}"
        )
        if stored.num_without_text:
            self._observers.note(f"{stored.num_without_text} further groups have no text any more (journals.keep)")
        if missing:
            self._running = running = await start(self._prepared.prepared, self._observers, self._run_dir, plays=False)
            await run_until(self._judge(running, missing), **running.background())
        self._compare()
        return "completed"

    async def _judge(self, running: Running, missing: list[str]) -> None:
        """Judge groups, the first steps first, as many at once as the judges have requests in flight."""
        running.maintenance.stops(clock := ActiveClock())
        rejudging = GroupJudging(self._prepared, without_bounds(running.judge), self._done, clock)
        in_order = iter(list(enumerate(missing)))
        at_once = max(1, self._config.judging.max_concurrency // self._config.train.group_size)
        with set_purpose("evaluation"):
            async with raise_first_failure() as tasks:
                for _ in range(min(at_once, len(missing))):
                    tasks.create_task(rejudging.judge_each(in_order))

    def _done(self, group: JudgedGroup, reports: Sequence[JudgeReport]) -> None:
        for rollout, report in zip(group.rollouts, reports, strict=True):
            self._observers.recorder.record_verdict(rollout, report)
            self._counters.report(report)

    def _compare(self) -> None:
        stored, failures = self._prepared.stored, Counter[str]()
        again, self._counters = stored.read_new_verdicts(self._run_dir), Counters()  # of the stored ones too
        all_verdicts = OutageBreaker(compose_health(self._config))
        for report in again.reports():
            self._counters.report(report)
            all_verdicts.count(report.verdict)
            if isinstance(report.verdict, Failed):
                failures[report.verdict.cause] += 1
        all_verdicts.check()
        result: VerdictComparison = compare(list(read_compared(stored, again, self._config)))
        self._metrics = list_metrics(result)
        write_comparison(self._run_dir, result)
        show_comparison(self._run_dir, result, failures, [*self._prepared.imported, self._cost])
        self._observers.metrics.truncate_after(-1)  # of a comparison here before
        self._observers.trackers.log(0, {f"eval/{name}": value for name, value in self._metrics.items()})

    @property
    def _cost(self) -> str:
        counts = self._counters.judging
        return f"judgements: {counts.asked}, with {counts.judge_tokens} sampled tokens; {self._context.wall_s:.0f} s"

    async def close(self) -> None:
        if self._running is not None:
            await self._running.close()

    def results(self) -> Summary:
        return Summary(
            steps=0,
            versions=dict.fromkeys(self._config.judging.roles, 0),
            eval=EvalSummary(final=self._metrics),
            judging=summarize_judging(self._counters),
            engines_replaced=self._running.maintenance.count_replaced() if self._running is not None else {},
        )


Advantages = Mapping[RolloutKey, float]  # mean over the trained tokens


def read_compared(stored: StoredGroups, again: RecordedGroups, config: RunConfig) -> Iterator[ComparedGroup]:
    """The groups that were judged again, step by step: a batch is in memory at a time."""
    judged = [group_id for group_id in stored.steps if group_id in again.judgements.places]
    for step, group_ids in itertools.groupby(judged, key=stored.steps.__getitem__):
        if step is not None:
            yield from compare_batch(step, stored.run, again, list(group_ids), config)
            continue
        for group_id in group_ids:
            yield from compare_batch(None, stored.run, again, [group_id], config)


def compare_batch(
    step: int | None, run: RecordedGroups, again: RecordedGroups, group_ids: Sequence[str], config: RunConfig
) -> Iterator[ComparedGroup]:
    """The groups of a step. Those that no step trained have no advantages."""
    old, new = [run.group(group_id) for group_id in group_ids], [again.group(group_id) for group_id in group_ids]
    before: Advantages = {}
    after: Advantages = {}
    if step is not None:
        before, after = (
            estimate_advantages(groups, config.algorithm, config.train, config.rollout) for groups in (old, new)
        )
    right = check_truth(old, find_rule(config.truth))
    for one, other in zip(old, new, strict=True):
        rollouts = tuple(
            ComparedRollout(
                old=get_reward(old_verdict),
                new=get_reward(new_verdict),
                right=right.get(key := (one.group_id, rollout.sibling)),
                old_advantage=before.get(key),
                new_advantage=after.get(key),
            )
            for rollout, old_verdict, new_verdict in zip(one.rollouts, one.verdicts, other.verdicts, strict=True)
        )
        yield ComparedGroup(group_id=one.group_id, step=step, rollouts=rollouts)


def estimate_advantages(
    groups: Sequence[JudgedGroup], algorithm: AlgorithmConfig, train: TrainConfig, rollout: RolloutConfig
) -> Advantages:
    """The advantages of a batch, without a KL in the reward, which needs the learner. None with too few verdicts, and
    with an estimator that needs a critic.
    """
    kind, least = algorithm.estimator_kind, max(2, train.min_valid_siblings)
    whole = [group for group in groups if len(select_judged(group)) >= least]
    if kind.needs_critic or not whole:
        return {}
    batches = [whole] if kind.need == "batch" else [[group] for group in whole]
    mask = rollout.truncated == "mask"
    by_batch = [to_samples(batch, algorithm, rollout.max_new_tokens, mask_truncated=mask) for batch in batches]
    return mean_advantages([sample for samples in by_batch for sample in samples])
