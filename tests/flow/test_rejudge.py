"""A run's rollouts judged again: agreement, resume, and training on the new verdicts."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from viewed_run import thin_run

from grmpipe.cli import compose
from grmpipe.config.run_config import ConfigError
from grmpipe.judge.judge_in_time import judge_in_time
from grmpipe.judge.verdict import make_failure, report_failures
from grmpipe.observe.recorder import load_rollouts
from grmpipe.run.tasks import rejudge as rejudge_task
from grmpipe.tasks import run_task
from grmpipe.types import Judge, Prompt, Rollout


@pytest.fixture(scope="module")
def recorded(run_once: Callable[..., Any]) -> Any:
    return run_once("train.num_steps=2", "rollout.pause_s=0.01", run_dir="recorded")


@pytest.fixture
def rejudge(recorded: Any, restored_logging: None) -> Callable[..., Any]:
    """Judge the recorded run again; returns the files under the name."""

    def run(name: str, *typed: str) -> Any:
        where = (f"run_dir={recorded.run_dir}", f"rejudge.name={name}")
        run_task(compose(None, ["task=rejudge", *where, *typed]))
        return type(recorded)(recorded.run_dir / "rejudged" / name)

    return run


def checksums(run_dir: Path) -> dict[str, str]:
    """Of a run's own files."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and "rejudged" not in path.parts)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def scores(lines: list[dict]) -> dict[tuple[str, int], float]:
    return {(line["group_id"], line["sibling"]): line["verdict"]["score"] for line in lines if "verdict" in line}


def test_the_same_judge_gives_the_same_verdicts_and_no_old_file_changes(
    recorded: Any, rejudge: Callable[..., Any]
) -> None:
    before = checksums(recorded.run_dir)
    again = rejudge("same")
    assert scores(again.lines("judgements")) == scores(recorded.lines("judgements"))
    figures = again.summary["eval"]["final"]
    assert (figures["rank_correlation"], figures["flips"], figures["sign_changes"]) == (1.0, 0.0, 0.0)
    assert figures["old_accuracy"] == figures["new_accuracy"]
    assert again.summary["judging"]["tokens"] == recorded.summary["judging"]["tokens"]
    assert again.summary["judging"]["requests"].keys() == {"evaluation"}
    assert checksums(recorded.run_dir) == before


def test_a_judge_with_tools_judges_and_judges_again(run_once: Callable[..., Any], restored_logging: None) -> None:
    """It calls for questions, and then is asked for its verdict, which its calls or their results never are."""
    recorded = run_once(
        "train.num_steps=1", "train.groups_per_batch=2", "grm.path=tiny://policy_tools", "judge.max_new_tokens=96",
        "judge.tools.functions=grmpipe.tiny.tools", "judge.tools.max_calls=2", "judge.tools.max_result_chars=8",
        "judge.format.ask_verdict=true", "data.num_eval_prompts=4", run_dir="with_tools",
    )  # fmt: skip
    judging, lines = recorded.summary["judging"], recorded.lines("judgements")
    assert judging["called_tools"] > 0 and judging["tool_calls"] >= judging["called_tools"]
    said = [one for line in lines for one in (*line["judgements"], *line["failures"]) if "completion" in one]
    results = [results for one in said for results in one["completion"].get("tool_results", [])]
    assert results and all(len(one["completion"].get("tool_results", ())) <= 3 for one in said)
    assert any("= " in one["completion"]["text"] for one in said)
    assert all(line["verdict"]["score"] in range(1, 11) for line in lines if "verdict" in line)
    run_task(compose(None, ["task=rejudge", f"run_dir={recorded.run_dir}", "rejudge.name=again"]))
    again = type(recorded)(recorded.run_dir / "rejudged" / "again")
    assert scores(again.lines("judgements")) == scores(lines)
    assert again.summary["judging"]["tool_calls"] > 0


LEFT = """
from grmpipe.envs.env import Observation, Opening, State
__all__ = ["add", "sub"]
class Leaves:
    async def open(self, episode):
        return Opening(messages=episode.prompt.messages, saved=b"nothing")
    async def step(self, action):
        return Observation(done=True, saved=("Score: 10\\n" + action.text).encode())
    async def close(self):
        pass
class Forgets(Leaves):
    async def step(self, action):
        return Observation(done=True)
def add(a: int, b: int, left: State) -> str:
    return left.decode()
def sub(a: int, b: int, left: State) -> str:
    return left.decode()
"""


@pytest.mark.long
def test_a_judge_of_final_states_judges_and_judges_again(
    run_once: Callable[..., Any], restored_logging: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_over.py").write_text(LEFT)
    monkeypatch.syspath_prepend(tmp_path)
    typed = (
        "train.num_steps=1", "train.groups_per_batch=2", "grm.path=tiny://policy_tools", "judge.max_new_tokens=96",
        "judge.tools.functions=left_over", "judge.tools.state=true", "judge.tools.max_calls=1", "env=custom",
        "judge.tools.max_result_chars=20", "judge.format.ask_verdict=true", "data.num_eval_prompts=4",
    )  # fmt: skip
    recorded = run_once(*typed, "env.target=left_over.Leaves", run_dir="with_states")
    rollouts = [line.rollout for line in load_rollouts(recorded.run_dir / "rollouts.jsonl")]
    assert all(one.state == b"Score: 10\n" + one.turns[0].completion.text.encode() for one in rollouts)
    lines = recorded.lines("judgements")
    said = [one for line in lines for one in (*line["judgements"], *line["failures"]) if "completion" in one]
    called = [one["completion"]["text"] for one in said if one["completion"].get("tool_results")]
    assert any("\n| Score: 10\n| " in text for text in called) and "\nScore: 10\n" not in "".join(called)
    run_task(compose(None, ["task=rejudge", f"run_dir={recorded.run_dir}", "rejudge.name=again"]))
    again = type(recorded)(recorded.run_dir / "rejudged" / "again")
    assert scores(again.lines("judgements")) == scores(lines)
    assert again.summary["judging"]["tool_calls"] > 0
    with pytest.raises(ConfigError, match=r"step returned no state.*judge\.tools\.state=false"):
        run_once(*typed, "env.target=left_over.Forgets", run_dir="without_states")


def test_a_rule_judges_again_and_the_advantages_turn(recorded: Any, rejudge: Callable[..., Any]) -> None:
    again = rejudge("rule", "judge=rule")
    figures = again.summary["eval"]["final"]
    assert figures["new_accuracy"] == 1.0 and figures["rank_correlation"] < 1
    comparison = json.loads((again.run_dir / "comparison.json").read_text())
    right = [step["train/true_accuracy"] for step in recorded.steps()]
    assert [one["right"] for one in comparison["steps"]] == pytest.approx(right)
    assert [one["new_reward"] for one in comparison["steps"]] == pytest.approx(right)
    assert [one["old_reward"] for one in comparison["steps"]] == pytest.approx(
        [step["train/reward"] for step in recorded.steps()]
    )
    assert "rank correlation within groups" in (again.run_dir / "report.html").read_text()


@pytest.mark.long
def test_a_killed_rejudging_continues_and_another_question_needs_another_name(
    recorded: Any, rejudge: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rejudge("unbroken", "judge=rule")
    killed = rejudge("killed", "judge=rule")
    lines = (killed.run_dir / "judgements.jsonl").read_text().splitlines(keepends=True)
    (killed.run_dir / "judgements.jsonl").write_text("".join(lines[:6]) + lines[6][:40])  # one group, half of another
    (killed.run_dir / "summary.json").unlink()
    with pytest.raises(ConfigError, match="rejudge.name: .* already holds verdicts; type resume=auto"):
        rejudge("killed", "judge=rule")
    with pytest.raises(ConfigError, match="rejudge.name: .*another judge.*rejudge.sample: 1.0 -> 0.5"):
        rejudge("killed", "judge=rule", "resume=auto", "rejudge.sample=0.5")
    judged: list[str] = []

    async def watched(judge: Judge, prompt: Prompt, rollouts: Sequence[Rollout], *more: Any) -> object:
        judged.append(rollouts[0].group_id)
        return await judge_in_time(judge, prompt, rollouts, *more)

    monkeypatch.setattr(rejudge_task, "judge_in_time", watched)
    resumed = rejudge("killed", "judge=rule", "resume=auto")
    groups = {line["group_id"] for line in recorded.lines("rollouts")}
    assert len(judged) == len(groups) - 1 and lines[0].split('"')[3] not in judged
    assert scores(resumed.lines("judgements")) == scores(whole.lines("judgements"))
    assert resumed.summary["eval"] == whole.summary["eval"]


def test_a_sample_is_the_same_by_seed_and_steps_choose_trained_groups(
    recorded: Any, rejudge: Callable[..., Any]
) -> None:
    def groups(files: Any) -> set[str]:
        return {line["group_id"] for line in files.lines("judgements")}

    second = {end["group_id"] for end in recorded.lines("groups") if end.get("step") == 2}
    assert groups(rejudge("second", "judge=rule", "rejudge.steps=[2,2]")) == second
    half = groups(rejudge("half", "judge=rule", "rejudge.sample=0.5"))
    every = {line["group_id"] for line in recorded.lines("rollouts")}
    assert half < every and half == groups(rejudge("half_again", "judge=rule", "rejudge.sample=0.5"))


@pytest.mark.long  # tests/grmpipe/run_dir/test_thinning.py has what it reads
def test_a_thinned_run_is_judged_again_with_the_same_figures(
    recorded: Any, rejudge: Callable[..., Any], tmp_path: Path
) -> None:
    whole = rejudge("unthinned", "judge=rule")
    run_dir = shutil.copytree(recorded.run_dir, tmp_path / "thinned")
    thin_run(run_dir, None)
    run_task(compose(None, ["task=rejudge", f"run_dir={run_dir}", "judge=rule"]))
    summary = json.loads((run_dir / "rejudged" / "again" / "summary.json").read_text())
    assert summary["eval"]["final"] == whole.summary["eval"]["final"] and "sign_changes" in summary["eval"]["final"]


class GoingOn:
    """A run that goes on: its journals are a copy of the first part of another's, and grow by the rest."""

    def __init__(self, recorded: Any, run_dir: Path, groups: int) -> None:
        self.run_dir = run_dir
        run_dir.mkdir()
        shutil.copy(recorded.run_dir / "config.yaml", run_dir)
        self._rest = {}
        for name in ("rollouts", "judgements", "groups"):
            lines = (recorded.run_dir / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
            known = list(dict.fromkeys(json.loads(line)["group_id"] for line in lines))[:groups]
            num_whole = sum(json.loads(line)["group_id"] in known for line in lines)
            lines.sort(key=lambda line: json.loads(line)["group_id"] not in known)
            whole, torn = b"".join(lines[:num_whole]), lines[num_whole][:50]
            (run_dir / f"{name}.jsonl").write_bytes(whole + torn)
            self._rest[name] = b"".join(lines)[len(whole + torn) :]

    def grow(self) -> None:
        for name, rest in self._rest.items():
            with (self.run_dir / f"{name}.jsonl").open("ab") as file:
                file.write(rest)


def judged_by(monkeypatch: pytest.MonkeyPatch, judge_one: Callable[..., Any]) -> list[str]:
    """Judge by this in judge_in_time's place; the groups as they come."""
    judged: list[str] = []

    async def watched(judge: Judge, prompt: Prompt, rollouts: Sequence[Rollout], *more: Any) -> object:
        judged.append(rollouts[0].group_id)
        return await judge_one(judge, prompt, rollouts, *more)

    monkeypatch.setattr(rejudge_task, "judge_in_time", watched)
    return judged


@pytest.mark.long
def test_a_run_that_goes_on_is_judged_as_far_as_it_was_written_and_later_the_rest(
    recorded: Any, rejudge: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running = GoingOn(recorded, tmp_path / "going_on", groups=3)

    async def grows_meanwhile(*asked: Any) -> object:
        if len(judged) == 1:
            running.grow()
        return await judge_in_time(*asked)

    judged = judged_by(monkeypatch, grows_meanwhile)
    typed = (f"run_dir={running.run_dir}", "rejudge.name=rule", "judge=rule")
    run_task(compose(None, ["task=rejudge", *typed]))
    first = set(judged)
    again = type(recorded)(running.run_dir / "rejudged" / "rule")
    assert len(first) == len(judged) == 3 and again.summary["status"] == "completed"
    assert {line["group_id"] for line in again.lines("judgements")} == first
    run_task(compose(None, ["task=rejudge", *typed, "resume=auto"]))
    assert len(judged) == len(set(judged)) == len({line["group_id"] for line in recorded.lines("rollouts")})
    assert scores(again.lines("judgements")) == scores(rejudge("not_running", "judge=rule").lines("judgements"))


def test_a_judge_that_fails_half_way_stops_it_and_a_resume_judges_what_failed(
    recorded: Any, rejudge: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies_after_two(judge: Judge, prompt: Prompt, rollouts: Sequence[Rollout], *more: Any) -> object:
        if len(judged) > 2:
            return [report_failures(make_failure("died", "no such host", attempts=1))] * len(rollouts)
        return await judge_in_time(judge, prompt, rollouts, *more)

    judged = judged_by(monkeypatch, dies_after_two)
    typed = ("judge=rule", "judge.limits.max_concurrency=4")
    monkeypatch.setattr("grmpipe.run.build.compose_pipeline.VERDICTS_WINDOW", 16)
    with pytest.raises(Exception, match="died"):
        rejudge("broken", *typed)
    broken = type(recorded)(recorded.run_dir / "rejudged" / "broken")
    assert broken.summary["status"] == "failed" and "judge.max_failure_rate" in broken.summary["failure"]
    lines = broken.lines("judgements")
    good = {line["group_id"] for line in lines if "verdict" in line}
    assert len(good) == 2 and len(judged) < 8, "what was judged is kept; the rest isn't asked for"
    assert not (broken.run_dir / "comparison.json").exists()
    judged_again = judged_by(monkeypatch, judge_in_time)
    resumed = rejudge("broken", *typed, "resume=auto")
    assert len(judged_again) == 6 and not good & set(judged_again)
    assert resumed.summary["judging"]["failed"] == {}
    assert resumed.summary["eval"] == rejudge("sound", *typed).summary["eval"]


@pytest.mark.long
def test_a_retraining_trains_on_the_new_verdicts(recorded: Any, rejudge: Callable[..., Any]) -> None:
    again, part = rejudge("gold", "judge=rule"), rejudge("part", "judge=rule", "rejudge.steps=[1,1]")
    keys = ["train.groups_per_batch=4", "train.group_size=4", "cluster=inprocess", "tracking=none"]

    def retrain(source: Path, name: str) -> Any:
        run_dir = recorded.run_dir.parent / name
        run_task(compose("quickstart", [f"data.retrain_from={source}", f"run_dir={run_dir}", *keys]))
        return type(recorded)(run_dir)

    trained = retrain(again.run_dir, "on_rule")
    assert [step["train/reward"] for step in trained.steps()] == pytest.approx(
        [step["train/true_accuracy"] for step in recorded.steps()]
    )
    old = retrain(recorded.run_dir, "on_grm")
    weights = [(files.run_dir / "policy" / "model.safetensors").read_bytes() for files in (trained, old, recorded)]
    assert weights[1] == weights[2] != weights[0]
    with pytest.raises(ConfigError, match=r"data.retrain_from: .*verdicts of 4 of 8 trained groups"):
        retrain(part.run_dir, "on_part")
