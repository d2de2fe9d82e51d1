"""An earlier run as costs: one made by hand with known costs; and the notes on one that lacks some."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grmpipe.capacity.plan.profile import read_profile
from grmpipe.config.grm import GrmConfig
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.reward import RewardConfig
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.train import TrainConfig
from grmpipe.config.yaml_io import to_yaml
from grmpipe.observe.timeline import Timeline
from scheduler.placement import ClusterConfig, PlacementConfig, PoolConfig, RoleConfig

APART = PlacementConfig(
    pools={name: PoolConfig() for name in ("policy", "grm", "learner")},
    roles={name: RoleConfig(pool=name) for name in ("policy", "grm", "learner")},
)
SECOND_JUDGE = {
    "models": {"safety": GrmConfig(path="tiny://grm", engine="embedded")},
    "judges": {"safety": JudgeConfig(model="safety")},
    "reward": RewardConfig(kind="mix", mix={"judge": 0.5, "safety": 0.5}),
    "placement": replace(
        APART,
        pools={**APART.pools, "safety": PoolConfig()},
        roles={**APART.roles, "safety": RoleConfig(pool="safety")},
    ),
}
ROLLOUT_S, JUDGEMENT_S = 0.01, 0.02  # per token, whichever others decode
PROMPT, GROUPS, SIBLINGS, STEPS = 30, 8, 4, 6
CORES, DRIVER_REQUEST_S = 4, 0.002  # enough cores for all


def made_by_hand(
    run_dir: Path,
    *,
    rows: int = 64,
    prefix_sharing: bool = True,
    cpu_share: float | None = None,
    second_judge: bool = False,
) -> Path:
    """cpu_share: CPU seconds of the learner's and the GRM's processes, as a share of the time of their spans.
    second_judge: on a model of its own, as fast as the policy, with half of the GRM's tokens; every fourth fails.

    Steps of 32 rollouts and as many judgements; a step of n tokens takes the learner n ms and half a second.
    """
    run_dir.mkdir()
    config = RunConfig(placement=APART, train=TrainConfig(prefix_sharing=prefix_sharing))
    if second_judge:
        config = replace(config, **SECOND_JUDGE)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    timeline = Timeline(run_dir / "timeline.json")
    journals: dict[str, list[dict]] = {"rollouts": [], "judgements": [], "groups": [], "metrics": []}
    now_s, shown = 100.0, 0
    for step in range(1, STEPS + 1):
        tokens, begun_s = 0, now_s
        rolled, judged = [], []
        for group in range(GROUPS):
            group_id = f"g{step:03d}{group:03d}"
            journals["groups"].append({"group_id": group_id, "outcome": "trained", "step": step})
            for sibling in range(SIBLINGS):
                new = 20 + 5 * sibling + 3 * group + 10 * step
                tokens += new if prefix_sharing and sibling > 0 else PROMPT + new
                ends_s = begun_s + new * ROLLOUT_S
                shown += 1
                if shown % 64 < rows:
                    request = f"{group_id}/{sibling}/t0"
                    timeline.span("policy-0", "policy", begun_s, ends_s, request=request, num_tokens=new)
                judged_s = ends_s + 2 * new * JUDGEMENT_S
                rolled.append(ends_s)
                judged.append(judged_s)
                request = f"{group_id}/{sibling}/j0.0"
                timeline.span("grm-0", "grm", ends_s, judged_s, request=request, num_tokens=2 * new)
                now_s = max(now_s, judged_s)
                seat = {"group_id": group_id, "sibling": sibling}
                turn = {"new_ids": [1] * PROMPT, "token_ids": [2] * new}
                judgement = {"prompt_ids": [1] * 60, "completion": {"token_ids": [3] * 2 * new}}
                journals["rollouts"].append({**seat, "turns": [turn]})
                report: dict = {"judgements": [judgement], "failures": []}
                if second_judge:
                    asked_s, request = ends_s + new * ROLLOUT_S, f"{request}@safety"
                    timeline.span("safety-0", "safety", ends_s, asked_s, request=request, num_tokens=new)
                    own = {"judge": "safety", "prompt_ids": [1] * 90, "completion": {"token_ids": [3] * new}}
                    judgement |= {"judge": "judge", "grm": "grm"}
                    report["failures" if sibling == 3 else "judgements"].append(
                        own if sibling == 3 else own | {"grm": "safety"}
                    )
                journals["judgements"].append({**seat, **report})
        timeline.span("learner", "accumulate", now_s, now_s + tokens / 2000)
        timeline.span("learner", f"step {step}", now_s + tokens / 2000, now_s + tokens / 1000 + 0.5)
        now_s += tokens / 1000 + 0.5
        timeline.span("weight sync", f"version {step}", now_s, now_s + 0.125)
        now_s += 0.25
        asked = GROUPS * SIBLINGS
        driven = {"driver/cpu_s": 2 * asked * DRIVER_REQUEST_S, "time/step_s": now_s - begun_s}
        if cpu_share is not None:
            driven["learner/cpu_s"] = cpu_share * (tokens / 1000 + 0.5 + 0.125)
            driven["grm/cpu_s"] = cpu_share * (max(judged) - min(rolled))
        journals["metrics"].append({"step": step, "rollout/finished": asked, "judge/asked": asked, **driven})
    timeline.close()
    for name, lines in journals.items():
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


@pytest.mark.parametrize("prefix_sharing", [True, False])
def test_engines_learner_pushes_and_lengths_are_found_again(tmp_path: Path, prefix_sharing: bool) -> None:
    profile = read_profile(str(made_by_hand(tmp_path / "run", prefix_sharing=prefix_sharing)), CORES)
    for role, token_s in (("policy", ROLLOUT_S), ("grm", JUDGEMENT_S)):
        assert profile.engines[role].error < 0.01
        assert profile.engines[role].speed.step_s == pytest.approx(token_s, rel=0.02)
    assert profile.learner is not None
    assert profile.learner.token_s == pytest.approx(0.001, rel=0.01)
    assert profile.learner.step_s == pytest.approx(0.5, rel=0.05)
    assert profile.sync_s == pytest.approx(0.125, rel=1e-3)
    assert profile.driver_request_s == pytest.approx(DRIVER_REQUEST_S)
    assert profile.lengths["policy"].prompt_tokens == PROMPT
    assert profile.lengths["grm"].new_tokens == 2 * profile.lengths["policy"].new_tokens
    assert profile.notes == ()


def test_each_judging_model_has_its_own_speed_and_lengths(tmp_path: Path) -> None:
    profile = read_profile(str(made_by_hand(tmp_path / "run", second_judge=True)), CORES)
    for role, token_s in (("policy", ROLLOUT_S), ("grm", JUDGEMENT_S), ("safety", ROLLOUT_S)):
        assert profile.engines[role].speed.step_s == pytest.approx(token_s, rel=0.02)
    assert profile.lengths["safety"].prompt_tokens == 90
    assert profile.lengths["safety"].new_tokens == profile.lengths["policy"].new_tokens
    assert profile.lengths["grm"].prompt_tokens == 60
    assert profile.notes == ()


def test_who_shared_a_core_is_as_fast_as_it_would_have_been_alone(tmp_path: Path) -> None:
    run_dir = made_by_hand(tmp_path / "run")
    apart, crowded = (read_profile(str(run_dir), cores) for cores in (CORES, 1))
    # Judgements run next to unfinished rollouts, and then alone; the learner runs next to the driver only.
    for role, at_most in (("policy", 0.8), ("grm", 0.98)):
        assert crowded.engines[role].speed.step_s < at_most * apart.engines[role].speed.step_s
    assert apart.learner is not None
    assert crowded.learner is not None
    assert 0.95 < crowded.learner.token_s / apart.learner.token_s < 1.0


def test_cpu_seconds_say_what_the_learner_and_an_engines_requests_took(tmp_path: Path) -> None:
    whole, half, more = (
        read_profile(str(made_by_hand(tmp_path / str(share), cpu_share=share)), CORES) for share in (1.0, 0.5, 1.5)
    )
    assert whole.learner is not None
    assert half.learner is not None
    assert half.learner.token_s == pytest.approx(whole.learner.token_s / 2, rel=0.01)
    assert half.sync_s == pytest.approx(0.0625, rel=0.01)
    assert half.engines["grm"].speed.step_s < 0.65 * whole.engines["grm"].speed.step_s
    assert half.engines["grm"].speed.request_s == 0.0
    assert more.engines["grm"].speed.request_s > 0.0
    assert half.engines["policy"] == whole.engines["policy"], "nobody counted its seconds"


def test_the_driver_of_a_single_process_is_not_distinct_overrides(tmp_path: Path) -> None:
    run_dir = made_by_hand(tmp_path / "run")
    (run_dir / "config.yaml").write_text(to_yaml(RunConfig(placement=APART, cluster=ClusterConfig(kind="inprocess"))))
    profile = read_profile(str(run_dir), CORES)
    assert profile.driver_request_s is None
    assert any(note.startswith("driver: ") for note in profile.notes)


def test_a_timeline_is_taken_as_well_as_its_directory_and_a_torn_end_does_not_matter(tmp_path: Path) -> None:
    run_dir = made_by_hand(tmp_path / "run")
    whole = read_profile(str(run_dir), CORES)
    for name in ("timeline.json", "rollouts.jsonl"):
        file = run_dir / name
        file.write_bytes(file.read_bytes()[:-20])
    torn = read_profile(str(run_dir / "timeline.json"), CORES)
    assert torn.engines["grm"].speed.step_s == pytest.approx(whole.engines["grm"].speed.step_s, rel=0.01)


def test_requests_without_a_row_are_counted_among_the_others_and_told(tmp_path: Path) -> None:
    profile = read_profile(str(made_by_hand(tmp_path / "run", rows=40)), CORES)
    assert profile.engines["policy"].speed.step_s == pytest.approx(ROLLOUT_S, rel=0.05)
    assert profile.engines["policy"].mean_rows == pytest.approx(
        read_profile(str(made_by_hand(tmp_path / "all")), CORES).engines["policy"].mean_rows, rel=0.1
    )
    assert any(note.startswith("policy: ") and "had no row in the timeline" in note for note in profile.notes)


def test_what_could_not_be_measured_is_said(tmp_path: Path) -> None:
    run_dir = made_by_hand(tmp_path / "run")
    lines = (run_dir / "timeline.json").read_text().splitlines()
    kept = [line for line in lines if "j0.0" not in line and '"step ' not in line and '"version ' not in line]
    (run_dir / "timeline.json").write_text("\n".join(kept))
    profile = read_profile(str(run_dir), CORES)
    assert set(profile.engines) == {"policy"}
    assert profile.learner is None
    assert profile.sync_s is None
    assert [note.split(":")[0] for note in profile.notes] == ["learner", "sync"]


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^plan\.profile: .* holds no timeline\.json; give the directory of a run"):
        read_profile(str(tmp_path), CORES)
