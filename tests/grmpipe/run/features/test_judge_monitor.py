"""The judge monitor measures before the run and every N steps, acts on limits, and continues after a resume."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from grmpipe.cli import compose
from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.config.judge_monitor import OUR_LIMITS, JudgeMonitorConfig, LimitConfig
from grmpipe.config.reward import RewardConfig, RewardTree
from grmpipe.judge.composition.composed_judge import compose_judge, get_members
from grmpipe.judge.pointwise_adapter import PointwiseAdapter, rollout_of_messages, rollout_of_text
from grmpipe.judge.votes import mean, voted
from grmpipe.models.types import Message
from grmpipe.pipeline.health import JudgeHealth, ServiceHealth, Unfit
from grmpipe.run.features.judge_monitor import (
    NUM_CANARIES,
    JudgeMonitor,
    MonitoredJudge,
    canary_of_rollout,
    read_canaries,
    write_canaries,
)
from grmpipe.types import Failed, Judge, JudgeReport, Metrics, Prompt, Rollout

ASKED = Prompt(prompt_id="p", messages=(Message(role="user", content="6 x 7?"),), reference="42")
SEEN = [(ASKED, rollout_of_text("look", 0, text)) for text in ("42", "four", "1234567")]


@dataclass
class ByLength:
    shift: float = 0.0
    fails: bool = False

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        if self.fails:
            return JudgeReport(verdict=Failed(stage="judge", cause="refused", attempts=1))
        return JudgeReport(verdict=voted("g", rollout, (min(len(rollout.text), 10) + self.shift,), mean, Scale()))


def service_health(window: int = 8) -> ServiceHealth:
    return ServiceHealth(
        "judging", max_failure_rate=0.5, window=window, pause_s=30.0, counted="verdicts", key="judge.max_failure_rate"
    )


@dataclass
class Scene:
    """A judge monitor over a judge that can change."""

    folder: Path
    config: JudgeMonitorConfig = field(default_factory=lambda: JudgeMonitorConfig(every=2))
    judge: ByLength = field(default_factory=ByLength)
    frozen: Collection[str] = ("",)
    second: ByLength | None = None  # composed with the judge
    reward: RewardConfig = field(default_factory=lambda: RewardConfig(kind="mix", mix={"judge": 0.9, "second": 0.1}))
    compares: bool = False
    service: ServiceHealth = field(default_factory=service_health)
    make_health: Callable[[], ServiceHealth] | None = None
    alarms: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def judge_monitor(self) -> JudgeMonitor:
        judge: Judge = PointwiseAdapter(self.judge)
        if self.second is not None:
            judges = {"judge": judge, "second": PointwiseAdapter(self.second)}
            judge = compose_judge(RewardTree.of(self.reward), judges, dict.fromkeys(judges, JudgeConfig()), seed=0)
        watched = MonitoredJudge(
            judge=judge,
            members=get_members(judge),
            health=JudgeHealth(self.service),
            compares=self.compares,
            frozen=self.frozen,
            scale=(1, 10),
            make_health=self.make_health,
        )
        return JudgeMonitor(watched, self.config, self.folder, self.notes.append)

    def hear(self, judge_monitor: JudgeMonitor, *, is_last: bool = False) -> None:
        for alarm in judge_monitor.alarms(is_last=is_last):
            self.alarms.append(alarm)

    def run(self, act: Callable[[JudgeMonitor], object]) -> object:
        async def acted() -> object:
            judge_monitor = self.judge_monitor()
            try:
                return await act(judge_monitor)  # type: ignore[misc]
            finally:
                self.hear(judge_monitor)

        return asyncio.run(acted())


def test_a_check_of_a_dead_judge_has_no_figures_and_pauses_judging(tmp_path: Path) -> None:
    scene = Scene(tmp_path, make_health=lambda: service_health(256))
    scene.judge.fails = True
    with pytest.raises(Unfit, match=r"3 of 3 verdicts failed .* refused"):
        scene.run(lambda monitor: monitor.first(0, SEEN))
    assert not (tmp_path / "canaries.jsonl").exists(), "later scores would be compared with nothing"
    scene.judge.fails = False
    scene.run(lambda monitor: monitor.first(0, SEEN))
    scene.judge.fails = True
    metrics = scene.run(lambda monitor: monitor.measure(2, {}))
    assert not [name for name in metrics if "canar" in name or "attack" in name]  # type: ignore[attr-defined]
    assert scene.service.cause.startswith("the check of the judge at step 2 has no figures: 20 of 20 verdicts failed")


def test_monitor_measures_before_the_run_and_every_n_steps(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def watch(judge_monitor: JudgeMonitor) -> list[Metrics]:
        return [
            await judge_monitor.first(0, SEEN),
            *[await judge_monitor.measure(step, {}) for step in (1, 2, 3, 4)],
        ]

    measured = scene.run(watch)
    assert isinstance(measured, list)
    assert ["judge_monitor/canary_drift" in metrics for metrics in measured] == [True, False, True, False, True]
    assert all(metrics["judge_monitor/attack_success_share"] > 0 for metrics in measured if metrics)
    lines = [json.loads(line) for line in (tmp_path / "canaries.jsonl").read_text().splitlines()]
    assert [line["scores"] for line in lines] == [[2.0], [4.0], [7.0]]
    assert all(line.keys() == {"prompt", "texts", "scores", "xxh3"} for line in lines), "one judge: no scores by judge"


def test_an_episode_is_a_canary_with_what_the_environment_said(tmp_path: Path) -> None:
    said = [("system", "Go."), ("assistant", "add(6, 2)"), ("tool", "8"), ("tool", "9"), ("assistant", "Answer: 8")]
    messages = [Message(role=role, content=content) for role, content in said]
    rollout = rollout_of_messages("look", 0, messages)
    assert [len(turn.replies) for turn in rollout.turns] == [2, 0]
    first, last = rollout.turns
    edited = (*first.replies, Message(role="assistant", content="the agent's, not the policy's"))
    rollout_of_branches = replace(rollout, turns=(replace(first, replies=edited), replace(last, rewritten=True)))
    canary = canary_of_rollout(ASKED, rollout_of_branches, thoughts=False)
    write_canaries(tmp_path / "canaries.jsonl", [canary], "r")
    (back,) = read_canaries(tmp_path / "canaries.jsonl")
    assert back == canary and back.rollouts("look") == [rollout]
    assert canary_of_rollout(ASKED, SEEN[0][1], thoughts=False).texts == ("42",)


def test_a_frozen_judge_that_moved_is_an_alarm_once_and_after_a_resume(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def begin(judge_monitor: JudgeMonitor) -> None:
        await judge_monitor.first(0, SEEN)

    async def go_on(judge_monitor: JudgeMonitor) -> Metrics:
        await judge_monitor.first(0, [])  # a resumed run has measured already
        return (await judge_monitor.measure(2, {})) | (await judge_monitor.measure(4, {}))

    scene.run(begin)
    assert scene.alarms == []
    scene.judge.shift = -1.5
    metrics = scene.run(go_on)
    assert isinstance(metrics, dict)
    assert (metrics["judge_monitor/canary_drift"], metrics["alarm/canary_drift"]) == (-1.5, 1.0)
    (alarm,) = scene.alarms
    assert "scores of 3 fixed responses differ by -1.50" in alarm


def test_a_judge_that_learns_may_drift(tmp_path: Path) -> None:
    scene = Scene(tmp_path, frozen=())

    async def watch(judge_monitor: JudgeMonitor) -> Metrics:
        await judge_monitor.first(0, SEEN)
        scene.judge.shift = 2.0
        return await judge_monitor.measure(2, {})

    metrics = scene.run(watch)
    assert isinstance(metrics, dict)
    assert metrics["judge_monitor/canary_drift"] == 2.0
    assert "alarm/canary_drift" not in metrics
    assert scene.alarms == []


def test_the_drift_of_one_judge_is_found_and_named_also_after_a_resume(tmp_path: Path) -> None:
    limits = {"second": LimitConfig(metric="judge_monitor/second/canary_drift", below=-1.0)}
    config = JudgeMonitorConfig(every=2, limits=limits)
    scene = Scene(tmp_path, config, frozen=("judge", "second"), second=ByLength())

    async def begin(judge_monitor: JudgeMonitor) -> None:
        await judge_monitor.first(0, SEEN)

    async def go_on(judge_monitor: JudgeMonitor) -> Metrics:
        metrics = await judge_monitor.measure(2, {})
        scene.hear(judge_monitor, is_last=False)
        return metrics

    scene.run(begin)
    assert json.loads((tmp_path / "canaries.jsonl").read_text().splitlines()[0])["by_judge"]["second"] == [2.0]
    assert scene.second is not None
    scene.second.shift = -1.5
    metrics = scene.run(go_on)
    assert isinstance(metrics, dict)
    assert (metrics["judge_monitor/second/canary_drift"], metrics["judge_monitor/judge/canary_drift"]) == (-1.5, 0.0)
    assert (metrics["alarm/second/canary_drift"], metrics["alarm/judge/canary_drift"]) == (1.0, 0.0)
    assert metrics["alarm/canary_drift"] == 1.0
    assert scene.alarms[0].startswith("The judge second has changed: at step 2 its scores of 3 fixed responses differ")
    assert "limits.second: at step 2 judge_monitor/second/canary_drift is -1.5" in scene.alarms[1]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2, **metrics}) + "\n")
    scene.run(go_on)
    assert len(scene.alarms) == 2, "both were told before"


def test_cascade_of_unchanged_judges_has_no_drift(tmp_path: Path) -> None:
    """It escalates the same responses at every check, however small its share is, and whatever came before."""
    cascade = RewardConfig(kind="cascade", first="judge", then="second", unsure_band=(0.2, 0.4), share=0.25)
    scene = Scene(tmp_path, second=ByLength(shift=2.0), reward=cascade)

    async def watch(judge_monitor: JudgeMonitor) -> list[Metrics]:
        first = await judge_monitor.first(0, SEEN)
        return [first, *[await judge_monitor.measure(step, {}) for step in (2, 4)]]

    measured = scene.run(watch)
    assert isinstance(measured, list)
    assert [metrics["judge_monitor/canary_drift_abs"] for metrics in measured] == [0.0] * 3
    assert measured[0]["judge_monitor/canary_score"] == (2 + (4 + 2) + 7) / 3, "the second response is escalated"
    shares = {metrics["judge_monitor/attack_success_share"] for metrics in measured}
    assert len(shares) == 1


def test_only_a_frozen_judge_raises_an_alarm_when_it_drifts(tmp_path: Path) -> None:
    scene = Scene(tmp_path, frozen=("judge",), second=ByLength())

    async def watch(judge_monitor: JudgeMonitor) -> Metrics:
        await judge_monitor.first(0, SEEN)
        assert scene.second is not None
        scene.second.shift = 2.0
        return await judge_monitor.measure(2, {})

    metrics = scene.run(watch)
    assert isinstance(metrics, dict)
    assert metrics["judge_monitor/second/canary_drift"] == 2.0
    assert (metrics["alarm/canary_drift"], "alarm/second/canary_drift" in metrics) == (0.0, False)
    assert scene.alarms == []


def test_a_limit_warns_and_another_stops_with_its_words(tmp_path: Path) -> None:
    limits = {
        "ties": LimitConfig(metric="judge/ties", above=0.5),
        "gone": LimitConfig(metric="train/reward", below=0.1, action="stop"),
    }
    scene = Scene(tmp_path, JudgeMonitorConfig(every=0, limits=limits))

    async def watch(judge_monitor: JudgeMonitor) -> None:
        assert await judge_monitor.measure(1, {"judge/ties": 0.9, "train/reward": 0.5}) == {
            "alarm/ties": 1.0, "alarm/gone": 0.0,
        }  # fmt: skip
        scene.hear(judge_monitor, is_last=False)
        await judge_monitor.measure(2, {"train/reward": 0.0})
        with pytest.raises(Unfit, match=r"judge_monitor.limits.gone: at step 2 train/reward is 0, below 0.1"):
            scene.hear(judge_monitor, is_last=False)

    scene.run(watch)
    assert [alarm.split(":")[0] for alarm in scene.alarms] == ["judge_monitor.limits.ties", "judge_monitor.limits.gone"]


def test_a_resumed_watchman_does_not_tell_again_what_rang_before_the_last_line(tmp_path: Path) -> None:
    lines = [{"step": 3, "alarm/ties": 1.0}, {"step": 4, "eval/true_accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scene = Scene(tmp_path, JudgeMonitorConfig(every=0, limits={"ties": LimitConfig(metric="judge/ties", above=0.5)}))

    async def watch(judge_monitor: JudgeMonitor) -> None:
        assert (await judge_monitor.measure(5, {"judge/ties": 0.9}))["alarm/ties"] == 1.0
        scene.hear(judge_monitor, is_last=False)

    scene.run(watch)
    assert scene.alarms == []


def test_a_limit_that_pauses_does_so_once_for_as_long_as_it_lasts(tmp_path: Path) -> None:
    limits = {"ties": LimitConfig(metric="judge/ties", above=0.5, action="pause")}
    scene = Scene(tmp_path, JudgeMonitorConfig(every=0, limits=limits))

    async def watch(judge_monitor: JudgeMonitor) -> None:
        await judge_monitor.measure(1, {"judge/ties": 0.9})
        scene.hear(judge_monitor, is_last=False)
        assert scene.service.state == "open"
        await judge_monitor.measure(2, {"judge/ties": 0.9})
        scene.hear(judge_monitor, is_last=False)  # nothing is new during the pause

    scene.run(watch)
    assert len(scene.alarms) == 1


def test_a_judge_that_compares_takes_its_canaries_from_labelled_work(tmp_path: Path) -> None:
    config = JudgeMonitorConfig(every=1, canaries_path="tiny://judgements_held_out")
    scene = Scene(tmp_path, config, compares=True)

    async def watch(judge_monitor: JudgeMonitor) -> Metrics:
        return await judge_monitor.first(0, SEEN)

    metrics = scene.run(watch)
    assert isinstance(metrics, dict) and metrics["judge_monitor/canary_drift"] == 0.0
    lines = [json.loads(line) for line in (tmp_path / "canaries.jsonl").read_text().splitlines()]
    assert len(lines) == NUM_CANARIES and all(len(line["texts"]) >= 2 for line in lines)


def test_responses_that_are_labelled_as_wrong_are_what_may_fool_the_judge(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} x 7?", "response": "0" * (10 if i < 4 else 1), "right": False} for i in range(8)]
    rows += [{"prompt": "6 x 7?", "response": "4200000000", "right": True}] * 2
    path = tmp_path / "probes_held_out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = JudgeMonitorConfig(every=1, canaries_path=str(path))
    scene = Scene(tmp_path, config)

    async def watch(judge_monitor: JudgeMonitor) -> Metrics:
        return await judge_monitor.first(0, SEEN)

    metrics = scene.run(watch)
    assert isinstance(metrics, dict) and metrics["judge_monitor/attack_success_share"] == 0.5
    path.unlink()  # a resume has them in canaries.jsonl
    again = Scene(tmp_path, config).run(watch)
    assert isinstance(again, dict) and again["judge_monitor/attack_success_share"] == 0.5
    assert again["judge_monitor/canary_drift"] == 0.0


def test_fooled_judge_is_reported_before_the_first_step(tmp_path: Path) -> None:
    limits = {"fooled": LimitConfig(metric="judge_monitor/attack_success_share", above=0.1)}
    scene = Scene(tmp_path, JudgeMonitorConfig(every=2, limits=limits))

    async def watch(judge_monitor: JudgeMonitor) -> Metrics:
        metrics = await judge_monitor.first(0, SEEN)
        scene.hear(judge_monitor, is_last=False)
        return metrics

    metrics = scene.run(watch)
    assert isinstance(metrics, dict) and metrics["alarm/fooled"] == 1.0
    assert [alarm.split(" at step")[0] for alarm in scene.alarms] == ["judge_monitor.limits.fooled:"]


def test_disabled_check_raises_no_alarm(tmp_path: Path) -> None:
    limits = {
        "fooled": LimitConfig(metric="judge_monitor/attack_success_share", above=0.1),
        "typo": LimitConfig(metric="a", above=1.0),
    }
    scene = Scene(tmp_path, JudgeMonitorConfig(every=0, limits=limits))

    async def watch(judge_monitor: JudgeMonitor) -> None:
        await judge_monitor.measure(1, {"b": 1.0})
        scene.hear(judge_monitor, is_last=True)

    scene.run(watch)
    assert [alarm.split(":")[0] for alarm in scene.alarms] == ["judge_monitor.limits.typo"]


@pytest.mark.parametrize(
    ("compares", "way_out"),
    [(False, "set data.eval_path, or judge_monitor.canaries_path"), (True, "set judge_monitor.canaries_path")],
)
def test_a_monitor_without_anything_to_check_says_so_at_the_start_and_at_the_end(
    tmp_path: Path, compares: bool, way_out: str
) -> None:
    limits = {"fooled": LimitConfig(metric="judge_monitor/attack_success_share", above=0.1)}
    scene = Scene(tmp_path, JudgeMonitorConfig(every=1, limits=limits), compares=compares)

    async def watch(judge_monitor: JudgeMonitor) -> list[Metrics]:
        measured = [await judge_monitor.first(0, []), await judge_monitor.measure(1, {})]
        scene.hear(judge_monitor, is_last=True)
        return measured

    assert scene.run(watch) == [{}, {}], "no alarm of what was not measured"
    (note,), (alarm,) = scene.notes, scene.alarms
    assert note.startswith("the judge is not checked for drift and attacks: ") and way_out in note
    assert alarm.startswith(
        "judge_monitor.limits.fooled: no step reported the metric judge_monitor/attack_success_share"
    )
    assert way_out in alarm
    assert not (tmp_path / "canaries.jsonl").exists()


def test_a_drift_that_no_verdict_shows_is_no_alarm_that_is_off(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def watch(judge_monitor: JudgeMonitor) -> Metrics:
        await judge_monitor.first(0, SEEN)
        scene.judge.fails = True
        return await judge_monitor.measure(2, {})

    metrics = scene.run(watch)
    assert isinstance(metrics, dict) and metrics["judge_monitor/canaries_failed"] == 3
    assert "alarm/canary_drift" not in metrics


def test_canaries_that_the_judge_cannot_judge_are_an_alarm_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def watch(judge_monitor: JudgeMonitor) -> None:
        scene.judge.fails = True
        await judge_monitor.first(0, SEEN)
        await judge_monitor.measure(2, {})
        scene.hear(judge_monitor)

    scene.run(watch)
    (alarm,) = [one for one in scene.alarms if "canaries could be judged" in one]
    assert alarm.startswith("none of the 3 canaries could be judged at step 0")


@pytest.mark.parametrize(
    ("compares", "own", "rung"),
    [
        (True, {}, ["order_flips", "first_place"]),
        (False, {}, []),
        (True, {"mine": LimitConfig(metric="judge/first_place_share", above=0.95)}, ["order_flips"]),
        (True, {"order_flips": LimitConfig(metric="judge/order_flips_share", above=0.9)}, ["first_place"]),
    ],
)
def test_a_judge_that_compares_has_limits_on_its_position_bias_unless_the_user_has_others(
    tmp_path: Path, compares: bool, own: dict[str, LimitConfig], rung: list[str]
) -> None:
    scene = Scene(tmp_path, JudgeMonitorConfig(every=0, limits=own), compares=compares)

    async def watch(judge_monitor: JudgeMonitor) -> None:
        await judge_monitor.measure(1, {"judge/order_flips_share": 0.7, "judge/first_place_share": 0.9})
        scene.hear(judge_monitor, is_last=True)

    scene.run(watch)
    assert [alarm.split(":")[0] for alarm in scene.alarms] == [f"judge_monitor.limits.{name}" for name in rung]


@pytest.mark.parametrize("every", [0, 2])
def test_limits_that_nobody_typed_are_silent_without_their_metric(tmp_path: Path, every: int) -> None:
    config = compose().judge_monitor
    assert dict(config.limits) == OUR_LIMITS
    scene = Scene(tmp_path, replace(config, every=every), compares=True)

    async def watch(judge_monitor: JudgeMonitor) -> None:
        await judge_monitor.first(0, [])
        assert await judge_monitor.measure(1, {}) == {}
        scene.hear(judge_monitor, is_last=True)

    scene.run(watch)
    assert scene.alarms == []
