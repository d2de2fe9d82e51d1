"""Monitors the judges during a run: canaries, adversarial replies, biases, limits on any metric.

Its results are metrics and alarms; a limit may pause judging or stop the run. It trains on nothing.
"""

import difflib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from grmpipe.config.judge_monitor import LIMITS_OF_COMPARING, JudgeMonitorConfig, LimitConfig
from grmpipe.data.labelled import load_labelled
from grmpipe.judge.composition.composed_judge import without_bounds
from grmpipe.judge.grm import set_purpose
from grmpipe.judge.monitor.adversarial import AdversarialProbe, probe_judge
from grmpipe.judge.monitor.canaries import Canary, CanaryDrift, CanaryScores, drifts, judge_canaries, with_first
from grmpipe.observe.journal import read_records, read_what_can_be, replace_journal
from grmpipe.pipeline.health import JudgeHealth, OutageBreaker, ServiceHealth, Unfit
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.run_dir.identity import read_run_id
from grmpipe.types import Judge, Metrics, Prompt, RankedResponses, Rollout, ScoredResponse

log = logging.getLogger(__name__)

T = TypeVar("T")

CANARIES = "canaries.jsonl"
DRIFT = "canary_drift"
# For one check: a drift of half a score shows in 16 responses, and a trick that works on two prompts is no accident.
NUM_CANARIES, ADVERSARIAL_PROMPTS = 16, 2
NO_CHECKS = (
    "there are no held-out rollouts to take canaries and adversarial replies from; set data.eval_path, or "
    "judge_monitor.canaries_path to labelled responses"
)
NO_CHECKS_COMPARING = (
    "a judge that compares needs labelled responses as canaries and beside adversarial replies; set "
    "judge_monitor.canaries_path to them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoredJudge:
    """The judge as the judge monitor knows it: the one that makes the reward, and each of several by its name.

    frozen:   judges whose models aren't trained, so that any drift is an alarm; a single judge has no name.
    compares: whether one of them needs several responses.
    make_health: gives their health for one check; None: any number of verdicts may fail.
    """

    judge: Judge
    members: Mapping[str, Judge] = field(default_factory=dict)
    frozen: Collection[str] = ("",)
    health: JudgeHealth
    compares: bool
    scale: tuple[int, int]
    show_thoughts: bool = False
    make_health: Callable[[], ServiceHealth] | None = None


class JudgeMonitor(RunFeature):
    """The monitor of a run's judges, after all features whose metrics it reads. Its state for a resume is in the run's
    files.

    `note` receives what a user should know at the start.
    """

    def __init__(
        self,
        monitored: MonitoredJudge,
        config: JudgeMonitorConfig,
        run_dir: Path,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        past = list(read_what_can_be(run_dir / "metrics.jsonl"))
        self._monitored = replace(monitored, judge=without_bounds(monitored.judge))
        self._config = config
        self._path = run_dir / CANARIES
        self._note = note
        self._why_unchecked = ""
        self._is_blind = False  # whether an alarm said that no canary can be judged
        self._canaries = read_canaries(self._path)
        known = {**(LIMITS_OF_COMPARING if monitored.compares else {}), **config.limits}
        typed = config.typed_limits
        self._limits = Limits(
            typed,
            exceeded=[name for name in known if was_ringing(past, name)],
            read_before=[name for name in known if any(f"alarm/{name}" in line for line in past)],
            defaults={name: limit for name, limit in known.items() if name not in typed},
        )
        names = ("", *monitored.members)
        self._drifting = {name for name in names if was_ringing(past, drift_alarm(name))}
        self._exceeded: list[Exceeded] = []
        self._outage = ""  # why the last check has no figures

    async def first(self, step: int, seen: Sequence[tuple[Prompt, Rollout]]) -> Metrics:
        """Measure before the first step. `seen`: rollouts of the first evaluation; they become canaries unless there
        are some. Raises Unfit if the judge's service fails: what it gives now is what later scores are compared with.
        """
        if not self._config.every:
            return {}
        if not self._canaries and (found := self._find_canaries(seen)):
            self._canaries = with_first(found, await self._judge_canaries(found))
            write_canaries(self._path, self._canaries, read_run_id(self._path.parent))
        metrics = await self._check(step)
        self._exceeded = self._limits.read(step, metrics)
        return metrics | self._limits.metrics()

    async def after_step(self, end: StepEnd) -> Metrics:
        return await self.measure(end.step, end.metrics)

    async def measure(self, step: int, metrics: Metrics) -> Metrics:
        """Returns further metrics of a step. `metrics`: all its other metrics."""
        monitor_metrics = self._monitored.health.bias_metrics()
        if self._config.every and step % self._config.every == 0:
            try:
                monitor_metrics |= await self._check(step)
            except Unfit as error:
                self._outage = f"the check of the judge at step {step} has no figures: {error}"
        self._exceeded = self._limits.read(step, metrics | monitor_metrics)
        return monitor_metrics | self._limits.metrics()

    def alarms(self, *, is_last: bool) -> Iterator[str]:
        """Drifts and exceeded limits. Raises Unfit to stop the run."""
        yield from super().alarms(is_last=is_last)
        outage, self._outage = self._outage, ""
        if outage:
            log.warning("%s", outage)
            self._monitored.health.trip(outage)
        exceeded, self._exceeded = self._exceeded, []
        for one in exceeded:
            if one.new:
                yield one.text
            if one.action == "stop":
                raise Unfit(one.text)
            if one.action == "pause":
                self._monitored.health.trip(one.text)
        if is_last:
            yield from self._limits.never_read(checks=self._config.every > 0, why_unchecked=self._why_unchecked)

    # -- checks ------------------------------------------------------------------------------------------------------

    async def _check(self, step: int) -> Metrics:
        metrics = await self._ask(lambda judge, _: probe_judge(judge, self._probes()))
        if self._canaries:
            metrics |= await self._check_canaries(step)
            if metrics.get("judge_monitor/canaries_failed") == len(self._canaries) and not self._is_blind:
                self._is_blind = True
                text = (
                    f"none of the {len(self._canaries)} canaries could be judged at step {step}, so that drift and "
                    "tricks go unseen; do the rows of judge_monitor.canaries_path, or of data.eval_path, have what the "
                    "judge needs, such as a rubric or a reference?"
                )
                self.new_alarms = [*self.new_alarms, text]
        if metrics:
            log.info("the judge at step %d: %s", step, metrics)
        return metrics

    async def _check_canaries(self, step: int) -> Metrics:
        metrics: Metrics = {}
        for name, drift in drifts(self._canaries, await self._judge_canaries(self._canaries)).items():
            metrics |= drift.metrics(name)
            if name in self._monitored.frozen and drift.differences:
                self._sound_drift(step, name, drift)
                metrics[f"alarm/{drift_alarm(name)}"] = float(name in self._drifting)
        if any(f"alarm/{drift_alarm(name)}" in metrics for name in self._monitored.frozen):
            metrics[f"alarm/{DRIFT}"] = float(bool(self._drifting))
        return metrics

    async def _judge_canaries(self, canaries: Sequence[Canary]) -> CanaryScores:
        return await self._ask(lambda judge, members: judge_canaries(judge, members, canaries))

    async def _ask(self, ask: Callable[[Judge, Mapping[str, Judge]], Awaitable[T]]) -> T:
        """What is asked of the judge and of each of several. Raises Unfit if their service fails."""
        judge, members, make_health = self._monitored.judge, self._monitored.members, self._monitored.make_health
        breaker = OutageBreaker(make_health()) if make_health is not None else None
        if breaker is not None:
            judge, members = breaker.guard(judge), {name: breaker.guard(one) for name, one in members.items()}
        with set_purpose("monitoring"):
            found = await ask(judge, members)
        if breaker is not None:
            breaker.check()
        return found

    def _sound_drift(self, step: int, name: str, drift: CanaryDrift) -> None:
        if drift.is_sure and name not in self._drifting:
            judge, count = f"judge {name}" if name else "judge", len(drift.differences)
            alarm = (
                f"The {judge} has changed: at step {step} its scores of {count} fixed responses differ by "
                f"{drift.mean:+.2f} on average, under the same seeds, although it isn't trained; is another model "
                "behind it?"
            )
            self.new_alarms = [*self.new_alarms, alarm]
        self._drifting = self._drifting | {name} if drift.is_sure else self._drifting - {name}

    def _probes(self) -> list[AdversarialProbe]:
        """The canaries that are labelled as wrong; without any, replies without content to the first prompts, and for
        a comparing judge a real response next to each.
        """
        if wrong := [AdversarialProbe(prompt=one.prompt, replies=one.texts) for one in self._canaries if one.wrong]:
            return wrong
        canaries = self._canaries[:ADVERSARIAL_PROMPTS]
        return [
            AdversarialProbe(prompt=one.prompt, rival=one.texts[0] if self._monitored.compares else None)
            for one in canaries
        ]

    def _find_canaries(self, seen: Sequence[tuple[Prompt, Rollout]]) -> tuple[Canary, ...]:
        if (path := self._config.canaries_path) is not None:
            items = load_labelled(path, scale=self._monitored.scale, num_tiny=2 * NUM_CANARIES)
            found = [
                Canary(prompt=item.prompt, texts=item.responses) for item in items if isinstance(item, RankedResponses)
            ]
            if not self._monitored.compares:  # as task=probe_judge writes them
                low = self._monitored.scale[0]
                found += [
                    Canary(prompt=item.prompt, texts=item.responses, wrong=True)
                    for item in items
                    if isinstance(item, ScoredResponse) and item.is_yes_no and item.score == low
                ]
        elif self._monitored.compares:
            found = []
        else:
            found = [canary_of_rollout(*one, thoughts=self._monitored.show_thoughts) for one in seen]
        if not found:
            self._why_unchecked = NO_CHECKS_COMPARING if self._monitored.compares else NO_CHECKS
            log.info("%s", self._why_unchecked)
            self._note(f"the judge is not checked for drift and attacks: {self._why_unchecked}")
        return tuple(found[:NUM_CANARIES])


def canary_of_rollout(prompt: Prompt, rollout: Rollout, *, thoughts: bool) -> Canary:
    """A held-out rollout as a canary: its text, or in an environment the whole episode."""
    if len(rollout.turns) == 1 and not rollout.opening and not rollout.turns[0].replies:
        return Canary(prompt=prompt, texts=(rollout.show_text(thoughts=thoughts),))
    episode = [(message.role, message.content) for message in rollout.opening]
    for turn in rollout.turns:
        episode.append(("assistant", turn.completion.text if thoughts else turn.completion.answer))
        episode += [(reply.role, reply.content) for reply in turn.replies if reply.role != "assistant"]
    return Canary(prompt=prompt, episode=tuple(episode))


def drift_alarm(judge: str) -> str:
    """The name of the alarm on the drift of a judge; a single one has no name."""
    return f"{judge}/{DRIFT}" if judge else DRIFT


def was_ringing(past: Sequence[Mapping[str, float]], name: str) -> bool:
    """Whether an alarm was on at its last reading: not every line of the metrics has one."""
    return next((line[f"alarm/{name}"] == 1.0 for line in reversed(past) if f"alarm/{name}" in line), False)


# -- the file ------------------------------------------------------------------------------------------------------


def write_canaries(path: Path, canaries: Sequence[Canary], run_id: str) -> None:
    """Write one line per canary, once: a resume compares with the beginning of the run."""
    replace_journal(path, map(canary_record, canaries), run_id=run_id)


def canary_record(canary: Canary) -> dict[str, Any]:
    """The line of a canary. With a single judge it has no scores by judge."""
    rare = {"by_judge": canary.by_judge, "episode": canary.episode, "wrong": canary.wrong}
    return {key: value for key, value in asdict(canary).items() if rare.get(key, True)}


def read_canaries(path: Path) -> tuple[Canary, ...]:
    return tuple(read_records(path, lambda record: msgspec.convert(record, Canary)))


# -- limits on metrics: which are exceeded, in words -------------------------------------------------------------------


OF_CHECKS = (
    "attack_success_share", "adversarial_score", "adversarial_failed_share", "canary_score", "canary_drift",
    "canary_drift_abs", "canaries_failed",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Exceeded:
    """A limit that a step's metrics exceed. `new`: whether they did not at the last reading."""

    name: str
    action: str
    text: str
    new: bool


class Limits:
    """Compares every step's metrics with their limits. A metric that a step lacks leaves its limit as it was."""

    def __init__(
        self,
        limits: Mapping[str, LimitConfig],
        exceeded: Iterable[str] = (),
        read_before: Iterable[str] = (),
        defaults: Mapping[str, LimitConfig] | None = None,
    ) -> None:
        """exceeded, read_before: names of the limits exceeded before a resume, and of those whose metric was there.

        defaults: limits of other names and metrics than `limits`, which nobody asked for: not missed if never read.
        """
        metrics = {limit.metric for limit in limits.values()}
        others = {name: limit for name, limit in (defaults or {}).items() if limit.metric not in metrics}
        self._asked_for = frozenset(limits)
        self._limits = {**others, **limits}
        self._exceeded = set(exceeded) & self._limits.keys()
        self._never_read = set(self._limits) - set(read_before)
        self._known: set[str] = set()

    def read(self, step: int, metrics: Metrics) -> list[Exceeded]:
        """The limits that this step's metrics exceed."""
        self._known |= metrics.keys()
        found = []
        for name, limit in self._limits.items():
            if (value := metrics.get(limit.metric)) is None:
                continue
            self._never_read.discard(name)
            if (breach := check_limit(limit, value)) is None:
                self._exceeded.discard(name)
                continue
            text = f"judge_monitor.limits.{name}: at step {step} {limit.metric} is {value:.4g}, {breach}"
            found.append(Exceeded(name=name, action=limit.action, text=text, new=name not in self._exceeded))
            self._exceeded.add(name)
        return found

    def metrics(self) -> Metrics:
        """Whether each limit is exceeded; a limit whose metric was never there has no alarm."""
        return {f"alarm/{name}": float(name in self._exceeded) for name in self._limits if name not in self._never_read}

    def never_read(self, *, checks: bool, why_unchecked: str = "") -> list[str]:
        """A sentence on each limit whose metric no step had.

        checks: whether canaries and adversarial replies are switched on; why_unchecked: why there were none.
        """
        return [
            self._why_unread(name, why_unchecked)
            for name in sorted(self._never_read & self._asked_for)
            if checks or not is_of_check(self._limits[name].metric)
        ]

    def _why_unread(self, name: str, why_unchecked: str) -> str:
        metric = self._limits[name].metric
        text = f"judge_monitor.limits.{name}: no step reported the metric {metric}"
        if why_unchecked and is_of_check(metric):
            return f"{text}: {why_unchecked}"
        near = difflib.get_close_matches(metric, sorted(self._known), n=1)
        return f"{text}; did you mean {near[0]}?" if near else text


def is_of_check(metric: str) -> bool:
    """Whether only the checks with canaries and adversarial replies report it, in total or by judge."""
    area, _, name = metric.rpartition("/")
    return area.split("/")[0] == "judge_monitor" and name in OF_CHECKS


def check_limit(limit: LimitConfig, value: float) -> str | None:
    if limit.above is not None and value > limit.above:
        return f"above {limit.above:g}"
    if limit.below is not None and value < limit.below:
        return f"below {limit.below:g}"
    return None
