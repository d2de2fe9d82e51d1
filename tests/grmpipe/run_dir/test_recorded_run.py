"""A run's journals as batches: what the learner took, in its order, also of crashed runs. And what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import ConfigError
from grmpipe.models.types import Completion, Message, VersionSpan
from grmpipe.observe.recorder import Recorder
from grmpipe.run.tasks.retrain import prepare_retraining
from grmpipe.run_dir.recorded_run import RecordedRun, open_recorded
from grmpipe.scheduler.placement import place
from grmpipe.types import Failed, GroupEnd, JudgeReport, Prompt, RewardSpan, Rollout, Turn, Verdict

ROOT = Path(__file__).parents[3]


def rollout(group_id: str, sibling: int, version: int = 0) -> Rollout:
    spans = (VersionSpan(model="policy", version=version, start=0, end=2),)
    completion = Completion(token_ids=(7, 8), logprobs=(-0.5, -0.25), text="x", finish_reason="stop", versions=spans)
    turn = Turn(new_ids=(1, 2), completion=completion)
    return Rollout(group_id=group_id, sibling=sibling, turns=(turn,), status="finished")


def report(value: float, grm_version: int = 0) -> JudgeReport:
    rewards = (RewardSpan(turn=0, start=0, end=2, value=value),)
    return JudgeReport(
        verdict=Verdict(
            rewards=rewards, score=value, breakdown={}, score_std=0.0, num_judgements=1, grm_version=grm_version
        )
    )


def record(run_dir: Path, steps: Sequence[Sequence[str]], group_size: int = 2) -> Recorder:
    """Each sibling's reward is its number."""
    recorder = Recorder(run_dir)
    prompt_indices = {
        name: prompt_index for prompt_index, name in enumerate(sorted(name for names in steps for name in names))
    }
    for name, prompt_index in prompt_indices.items():
        prompt = Prompt(prompt_id=f"p{prompt_index}", messages=(Message(role="user", content="?"),))
        for sibling in reversed(range(group_size)):
            recorder.rollout(prompt_index, prompt, rollout(name, sibling))
            recorder.record_verdict(rollout(name, sibling), report(float(sibling)))
    for number, names in enumerate(steps, start=1):
        for name in names:
            recorder.group_ended(
                GroupEnd(
                    group_id=name,
                    prompt_index=prompt_indices[name],
                    prompt_id=f"p{prompt_indices[name]}",
                    outcome="trained",
                    step=number,
                    version=0,
                )
            )
    return recorder


def opened(run_dir: Path) -> RecordedRun:
    return open_recorded(run_dir / "rollouts.jsonl")


def test_batches_come_in_the_order_in_which_they_were_taken(tmp_path: Path) -> None:
    record(tmp_path, [["c", "a"], ["b", "d"]]).group_ended(
        GroupEnd(group_id="e", prompt_index=9, prompt_id="p9", outcome="dropped", cause="stale")
    )
    run = opened(tmp_path)
    assert (run.group_size, run.groups_per_batch, run.max_staleness) == (2, 2, 1)
    assert [[group.group_id for group in run.batch(step)] for step in (1, 2)] == [["c", "a"], ["b", "d"]]
    group = run.batch(1)[0]
    assert group.rollouts == (rollout("c", 0), rollout("c", 1))
    assert group.verdicts == (report(0.0).verdict, report(1.0).verdict)
    assert open_recorded(tmp_path).steps == run.steps


def test_a_sibling_without_a_verdict_is_the_deadlines_failure(tmp_path: Path) -> None:
    recorder = record(tmp_path, [["a"]], group_size=3)
    recorder.rollout(1, Prompt(prompt_id="p1", messages=()), rollout("b", 0))
    lines = (tmp_path / "judgements.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "judgements.jsonl").write_text("".join(line for line in lines if '"sibling":1' not in line))
    (group,) = opened(tmp_path).batch(1)
    assert group.verdicts[1] == Failed(stage="judge", cause="timeout", attempts=1, detail="group deadline")
    assert all(isinstance(group.verdicts[sibling], Verdict) for sibling in (0, 2))


def test_verdicts_of_an_older_grm_are_void_once_the_group_is_judged_again(tmp_path: Path) -> None:
    recorder = record(tmp_path, [["a"]], group_size=3)
    for sibling in (0, 2):
        recorder.record_verdict(rollout("a", sibling), report(5.0, grm_version=1))
    (group,) = opened(tmp_path).batch(1)
    assert [verdict.outcome if isinstance(verdict, Verdict) else None for verdict in group.verdicts] == [5.0, None, 5.0]


def test_a_run_that_was_killed_opens_with_its_whole_batches(tmp_path: Path) -> None:
    record(tmp_path, [["a", "b"], ["c", "d"], ["e", "f"]])
    for name in ("rollouts", "judgements", "groups"):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write('{"group_id": "g", "sib')
    ends = (tmp_path / "groups.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "groups.jsonl").write_text("".join(ends[:5] + ends[-1:]))
    run = opened(tmp_path)
    assert len(run.steps) == 2
    assert [group.group_id for group in run.batch(2)] == ["c", "d"]


@pytest.mark.parametrize("name", ["rollouts", "judgements", "groups"])
def test_a_journal_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    record(tmp_path, [["a"]])
    (tmp_path / f"{name}.jsonl").unlink()
    with pytest.raises(ValueError, match=rf"there is no .*{name}\.jsonl"):
        opened(tmp_path)


def test_missing_lines_are_reported(tmp_path: Path) -> None:
    record(tmp_path, [["a", "b"], ["c", "d"]])
    rollouts, groups = tmp_path / "rollouts.jsonl", tmp_path / "groups.jsonl"
    whole = rollouts.read_text()
    rollouts.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(
        ValueError, match=r"lacks rollouts of group d, which was trained in step 2: it holds siblings \[1\]"
    ):
        opened(tmp_path)
    rollouts.write_text('{"text": "another file"}\n')
    with pytest.raises(ValueError, match="rollouts.jsonl:1: has no group_id and sibling"):
        opened(tmp_path)
    rollouts.write_text(whole)
    groups.write_text("".join(groups.read_text().splitlines(keepends=True)[2:]))
    with pytest.raises(ValueError, match="has no steps from the first one on"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.group_size=4", r"^train\.group_size: 4, .* has 2; type train\.group_size=2"),
        ("train.groups_per_batch=8", r"^train\.groups_per_batch: 8, .* has 1; type train\.groups_per_batch=1"),
        ("train.max_staleness=1", r"^train\.max_staleness: 1, .* type train\.max_staleness=2"),
        ("task=plan", r"^data\.retrain_from: task=plan can't replay"),
        ("data.retrain_from=nowhere.jsonl", r"^data\.retrain_from: there is no nowhere\.jsonl"),
        ("train.num_steps=3", r"^policy\.path: the tokenizer or the chat template of tiny://policy differs"),
    ],
)
def test_what_does_not_fit_the_recorded_run_is_refused_by_its_key(tmp_path: Path, override: str, told: str) -> None:
    record(tmp_path, [["a"], ["b"], ["c"]])
    fitting = [
        "train.group_size=2",
        "train.groups_per_batch=1",
        "train.max_staleness=2",
        f"data.retrain_from={tmp_path}",
    ]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"), pytest.raises(ConfigError, match=told):
        config = build(compose("config", ["cluster=inprocess", *fitting, override]))
        prepare_retraining(config)


@pytest.mark.parametrize("placement", ["laptop", "time_shared", "elastic", "two_ranks"])
def test_only_the_learner_needs_a_place(tmp_path: Path, placement: str) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = build(compose("config", [f"data.retrain_from={tmp_path}", f"placement={placement}"]))
    assert list(place(config.placement.without_time_sharing(), config.roles).seats) == ["learner"]
