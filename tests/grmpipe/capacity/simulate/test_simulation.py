"""The simulated run: the real pipeline on a virtual clock, its bound, its lengths, its files."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, pstdev

import pytest
from configs import judge_config, with_sections
from hydra import compose, initialize_config_dir
from simulated_workload import COSTS, SPEED, always, seats, workload

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.cost import Costs, LearnerSpeed
from grmpipe.capacity.plan.work import ToolUse
from grmpipe.capacity.simulate.simulated_answers import (
    FILLER,
    PROMPT_ID,
    CountingRenderer,
    Lengths,
    ModelWriter,
    Writer,
    correlation_in,
    fit_lengths,
    lengths_in,
    lognormal,
    measure_tool_use,
)
from grmpipe.capacity.simulate.simulated_cluster import SimulatedRun, select_settled_steps, simulate
from grmpipe.capacity.simulate.simulated_learner import SimulatedRanks
from grmpipe.capacity.simulate.simulation import run_simulation
from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.capacity.simulate.workload import Workload
from grmpipe.config.grm import GrmConfig
from grmpipe.config.io.yaml_io import build
from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.config.reward import RewardConfig
from grmpipe.config.run_config import ConfigError
from grmpipe.models.settings import ModelConfig
from grmpipe.models.types import EngineSpeed, Message, RequestContext, SamplingParams
from grmpipe.pipeline.health import Unfit
from grmpipe.pipeline.stall_times import Setup, bottleneck
from grmpipe.scheduler.placement import Placement, PlacementConfig, PoolConfig, RoleConfig, place
from grmpipe.tasks import show_simulation
from grmpipe.train.batching.packer import MicroBatchRound, idle
from grmpipe.train.learner.learner_ranks import LearnerRanks

ROOT = Path(__file__).parents[4]


class Events:
    """Spans by name."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: str | int | float) -> None:
        self.spans.append((name, start_s, end_s))


def simulated(steps: int = 6, costs: Costs = COSTS, placement: Placement | None = None, **changes) -> SimulatedRun:
    return simulate(workload(**changes), placement or seats(), costs, steps)


def test_a_synchronous_step_takes_its_chain_where_engines_have_room_for_all() -> None:
    run = simulated()
    played_s, judged_s = 100 * 0.01, 50 * 0.01
    assert run.step_s == pytest.approx(played_s + judged_s + 16 * (26 + 100) * 1e-5 + 0.1 + 0.1, rel=0.02)
    assert run.max_staleness == 0
    assert len(run.steps) == 6


@pytest.mark.parametrize(("turns", "calls"), [(0.0, 0), (2.0, 2), (3.0, 3)])
def test_calls_of_a_judge_take_their_time_and_their_turns(turns: float, calls: int) -> None:
    called = replace(workload(), tools={"judge": ToolUse(turns=turns, seconds=5.0, tokens=40.0)})
    run, plain = simulate(called, seats(), COSTS, 6), simulated()
    assert run.step_s - plain.step_s == pytest.approx(calls * 5.0, rel=0.02, abs=0.01)
    assert run.failed_judgements == plain.failed_judgements == {}
    reading = replace(COSTS, engines={**COSTS.engines, "grm": replace(SPEED, prefill_token_s=0.01)})
    slower, without = (simulate(one, seats(), reading, 6) for one in (called, workload()))
    results_s = slower.step_s - without.step_s - calls * 5.0
    assert 0.05 * calls <= results_s + 1e-6 < 0.2 * calls + 0.01, "results are read, each once, in a batch with others"


def test_siblings_are_as_alike_in_length_as_in_the_run_that_lengths_are_taken_from(tmp_path: Path) -> None:
    def correlation_of(correlation: float, name: str) -> float:
        writer = Writer(lengths=lognormal(200, 0.6), seed=3, sibling_correlation=correlation)
        params, run_dir = SamplingParams(max_new_tokens=10_000), tmp_path / name
        run_dir.mkdir()
        with (run_dir / "rollouts.jsonl").open("w") as journal:
            for group, sibling in itertools.product(range(400), range(8)):
                context = RequestContext(request_id=f"g{group}/{sibling}/t0", group_id=f"g{group}", role="policy")
                ids = list(writer((PROMPT_ID + group, 0, 0), params, context).token_ids)
                record = {"group_id": f"g{group}", "sibling": sibling, "turns": [{"token_ids": ids}]}
                journal.write(json.dumps(record) + "\n")
        assert median(lengths_in(run_dir)["policy"]) == pytest.approx(200, rel=0.1)
        return correlation_in(run_dir)

    assert correlation_of(0.0, "independent") < 0.03
    assert correlation_of(0.6, "alike") == pytest.approx(0.6, abs=0.05)
    assert correlation_of(1.0, "equal") == pytest.approx(1.0)


def test_time_shared_learner_and_engines_add_up() -> None:
    pools = {"all": PoolConfig(slots=1, time_shared=True)}
    roles = {role: RoleConfig(pool="all") for role in ("policy", "learner", "grm")}
    placed = PlacementConfig(pools=pools, roles=roles)
    by_turns = place(placed, ("policy", "learner", "grm"), ("policy", "grm"), {"policy": "learner"})
    events = Events()
    costs = replace(COSTS, switch_s=2.0)
    run = simulate(workload(staleness=1), by_turns, costs, 6, events)
    turns = [(start_s, end_s) for name, start_s, end_s in events.spans if name == "the learner's phase"]
    assert len(turns) == 6
    assert all(end_s - start_s >= 3 * 2.0 for start_s, end_s in turns), "to the device, and back in two parts"
    begun = [start_s for name, start_s, _ in events.spans if name in ("policy", "grm")]
    steps = [(start_s, end_s) for name, start_s, end_s in events.spans if name.startswith("step ")]
    assert not any(start_s < at < end_s for start_s, end_s in steps for at in begun), "asked in their sleep"
    assert run.dropped == {}


def test_no_run_beats_its_bound() -> None:
    for staleness in (0, 1, 3):
        for placement in (seats(), seats(policy=1, grm=1), seats(policy=1, grm=3, learner=2)):
            run = simulated(12, staleness=staleness, lengths=lognormal(80, 0.8), placement=placement)
            assert run.times_bound > 0.999
            assert run.max_staleness <= staleness


@pytest.mark.parametrize("steps", [5, 6, 8])
@pytest.mark.parametrize("staleness", [1, 2])
def test_no_few_steps_beat_their_bound_with_judgements_of_other_steps(staleness: int, steps: int) -> None:
    """The judge has most to do, and judges groups of later steps while a step is trained."""
    few_rows = replace(SPEED, max_rows=8, row_s=1e-3, cached_token_s=1e-6, prefill_token_s=1e-4)
    costs = replace(COSTS, engines={"policy": SPEED, "grm": few_rows})
    lengths = {"lengths": lognormal(80, 0.8), "critiques": lognormal(40, 0.8)}
    run = simulated(steps, staleness=staleness, costs=costs, placement=seats(grm=1), **lengths)
    assert run.busy["grm"] > 0.9
    assert 1 - 1e-9 < run.times_bound < 1.5


def test_engines_without_a_prefix_cache_compute_each_prompt() -> None:
    config = with_sections(workload().config, policy=ModelConfig(engine="vllm"), grm=GrmConfig(engine="vllm"))
    without = replace(config.engine.vllm, options={"enable_prefix_caching": False})
    off = replace(config, engine=replace(config.engine, vllm=without))
    slow = replace(COSTS, engines=dict.fromkeys(COSTS.engines, replace(SPEED, prefill_token_s=1e-3)))
    cached, uncached = (simulate(replace(workload(), config=one), seats(), slow, 3) for one in (config, off))
    assert uncached.steps[-1].busy_s["policy"] > cached.steps[-1].busy_s["policy"] + 3 * 4 * 2 * 26 * 1e-3


def test_a_stale_run_is_faster_than_a_synchronous_one() -> None:
    times = [simulated(12, staleness=staleness, lengths=lognormal(80, 0.8)).step_s for staleness in (0, 1, 2)]
    assert times[0] > times[1] > times[2]


def test_equal_runs_are_equal_and_other_lengths_are_not() -> None:
    def of_lengths(lengths: Lengths) -> list[float]:
        return [step.step_s for step in simulated(staleness=1, lengths=lengths).steps]

    assert of_lengths(lognormal(80, 0.8)) == of_lengths(lognormal(80, 0.8))
    assert of_lengths(lognormal(80, 0.8)) != of_lengths(lognormal(81, 0.8))


def test_busiest_part_is_busy_all_the_time() -> None:
    slow = replace(COSTS, learner=LearnerSpeed(token_s=2e-3, step_s=0.1))
    run = simulated(12, costs=slow, staleness=2)
    assert run.busy["learner"] > 0.95
    assert run.busy["policy"] < 0.5
    assert run.times_bound < 1.05


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"engines": {"policy": SPEED, "grm": replace(SPEED, step_s=0.1)}}, "the learner waited for judging"),
        ({"engines": {"policy": replace(SPEED, step_s=0.1), "grm": SPEED}}, "the learner waited for rollouts"),
        ({"learner": LearnerSpeed(token_s=5e-3, step_s=0.1)}, "the engines waited for the learner"),
        ({"sync_s": 10.0}, "the run waited for weight pushes"),
    ],
)
def test_at_its_end_a_run_names_who_was_slow(changed: dict, said: str, staleness: int) -> None:
    run = simulated(12, costs=replace(COSTS, **changed), staleness=staleness)
    told = bottleneck(run.stalls, Setup(judge="here", num_judgements=2, max_staleness=staleness))
    assert told is not None
    assert told.startswith(said)


def test_policy_and_learner_on_one_slot_take_turns_and_so_need_longer() -> None:
    apart = place(
        PlacementConfig(
            pools={"a": PoolConfig(slots=1), "b": PoolConfig(slots=1), "g": PoolConfig(slots=1)},
            roles={"policy": RoleConfig(pool="a"), "learner": RoleConfig(pool="b"), "grm": RoleConfig(pool="g")},
        ),
        ("policy", "learner", "grm"),
    )
    together = place(
        PlacementConfig(
            pools={"a": PoolConfig(slots=1), "g": PoolConfig(slots=1)},
            roles={"policy": RoleConfig(pool="a"), "learner": RoleConfig(pool="a"), "grm": RoleConfig(pool="g")},
        ),
        ("policy", "learner", "grm"),
    )
    slow = replace(COSTS, learner=LearnerSpeed(token_s=5e-4, step_s=0.1))
    one, two = (simulated(12, costs=slow, staleness=1, placement=placement) for placement in (together, apart))
    assert one.step_s > 1.2 * two.step_s
    assert one.busy["policy"] + one.busy["learner"] <= 1.0 + 1e-9


# Decoding that costs little more with more rows, as on a GPU: two batches that are in flight together stay together.
BATCHED = EngineSpeed(step_s=0.012, row_s=4e-5, cached_token_s=4e-8, prefill_token_s=1.6e-5, max_rows=256)


@pytest.mark.parametrize(
    ("rollout", "critique", "token_s"),
    [(40, 40, 1.6e-5), (120, 20, 1.6e-5), (20, 120, 1.6e-5), (40, 40, 5e-4)],
    ids=["balanced", "slow policy", "slow judge", "slow learner"],
)
def test_batches_that_bunch_are_kept_apart_and_no_throughput_is_lost(
    rollout: int, critique: int, token_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = LearnerSpeed(token_s=token_s, step_s=0.02)
    costs = replace(COSTS, engines=dict.fromkeys(COSTS.engines, BATCHED), learner=learner, sync_s=0.05)

    def late_steps(**changes) -> list[float]:
        run = simulated(
            28, costs, seats(policy=1, grm=1), lengths=always(rollout), critiques=always(critique), **changes
        )
        assert run.max_staleness == 1
        assert run.dropped == {}
        return [step.step_s for step in run.steps[16:26]]

    even = late_steps(staleness=1)
    monkeypatch.setattr("grmpipe.scheduler.admission.AdmissionPace.step_ended", lambda *_: None)
    bunched = late_steps(staleness=1)
    assert pstdev(even) < 0.15 * fmean(even)
    assert fmean(even) < 1.01 * fmean(bunched)
    assert pstdev(bunched) > 0.3 * fmean(bunched), "the sawtooth isn't there"


def test_elastic_slots_move_and_nothing_is_lost() -> None:
    one_row = replace(SPEED, max_rows=4)
    costs = replace(COSTS, engines={"policy": one_row, "grm": one_row}, switch_s=0.05)
    run = simulated(8, costs=costs, placement=seats(policy=4, elastic=True), lengths=lognormal(80, 0.8))
    assert run.moves.get("policy->grm", 0) > 0
    assert run.moves.get("grm->policy", 0) > 0
    assert run.dropped == {}
    assert len(run.steps) == 8


def test_critiques_go_through_the_real_parser() -> None:
    run = simulated(unparseable_share=0.1)
    assert run.failed_judgements.keys() == {"unparseable"}
    assert 0 < run.failed_judgements["unparseable"] < 60
    assert run.dropped == {}
    by_tokens = {"ask_verdict": True, "score_from": "expectation"}  # a script has neither
    assert simulated(unparseable_share=0.1, **by_tokens).failed_judgements == run.failed_judgements


def test_endless_critique_is_cut_and_counted() -> None:
    with pytest.raises(Exception, match="truncated"):
        simulated(critiques=always(201))


def test_the_first_and_last_steps_of_a_stale_run_are_not_counted() -> None:
    assert select_settled_steps(10, 0) == range(10)
    assert select_settled_steps(10, 1) == range(2, 8)
    assert select_settled_steps(4, 1) == range(4)


# -- several judges ----------------------------------------------------------------------------------------------------

SECOND = judge_config(
    model="safety", template="boxed", parser="boxed", score_min=0, score_max=1, num_judgements=1, max_new_tokens=200,
    min_tokens_per_s=1, timeout_s=3600,
)  # fmt: skip
THREE = replace(COSTS, engines={"policy": SPEED, "grm": SPEED, "safety": SPEED})
BOTH = RewardConfig(kind="mix", mix={"judge": 0.5, "safety": 0.5})


def of_several(second: JudgeConfig = SECOND, reward: RewardConfig = BOTH, **changes) -> Workload:
    """A workload with a second judge, on a model of its own unless it says otherwise."""
    load = workload(**changes)
    models = (
        {} if second.model in ("grm", "policy") else {second.model: GrmConfig(path="tiny://grm", engine="embedded")}
    )
    config = with_sections(load.config, models=models, judges={"safety": second}, reward=reward)
    return replace(
        load,
        config=config,
        chars_per_token=dict.fromkeys(config.served, 4.0),
        lengths={**load.lengths, "safety": always(20)},
    )


def seats_of_three(elastic: bool = False) -> Placement:
    pools = {"engines": PoolConfig(slots=3, elastic=elastic), "train": PoolConfig(slots=1)}
    roles = {role: RoleConfig(pool="engines", replicas=1) for role in ("policy", "grm", "safety")}
    roles["learner"] = RoleConfig(pool="train")
    return place(PlacementConfig(pools=pools, roles=roles), ("learner", *THREE.engines), tuple(THREE.engines))


def judgements_in(run: SimulatedRun, role: str) -> float:
    """Seconds of work of a role in a step; with equal lengths and one row at a time a count of judgements."""
    return run.steps[-1].busy_s[role] / len(run.steps)


ONE_ROW = replace(THREE, engines=dict.fromkeys(THREE.engines, replace(SPEED, max_rows=1)))


def test_two_models_judge_and_each_has_its_engines_its_work_and_its_share_of_the_bound() -> None:
    run = simulate(of_several(), seats_of_three(), ONE_ROW, 4)
    assert run.failed_judgements == {}
    assert judgements_in(run, "grm") == pytest.approx(16 * 2 * 50 * 0.01)
    assert judgements_in(run, "safety") == pytest.approx(16 * 1 * 20 * 0.01)
    assert run.busy.keys() == {"policy", "grm", "safety", "learner"}
    assert run.bound.loads_s["safety"] == pytest.approx(16 * 20 * 0.01)
    assert run.times_bound > 0.999


@pytest.mark.parametrize("model", ["grm", "policy"])
def test_judges_of_different_formats_that_ask_one_model_are_answered_each_in_its_own(model: str) -> None:
    """The second one's scale and form would be unreadable to the first one, and the other way round."""
    run = simulate(of_several(replace(SECOND, model=model)), seats(), COSTS, 4)
    assert run.failed_judgements == {}
    assert run.dropped == {}


def test_answers_that_move_between_slots_keep_the_format_of_their_judge() -> None:
    rows = replace(THREE, engines=dict.fromkeys(THREE.engines, replace(SPEED, max_rows=3)), switch_s=0.05)
    run = simulate(of_several(lengths=lognormal(80, 0.8)), seats_of_three(elastic=True), rows, 6)
    assert {move.split("->")[1] for move in run.moves} == {"policy", "grm", "safety"}
    assert run.failed_judgements == {}
    assert run.dropped == {}


def test_the_format_of_a_public_grm_is_judged_with_its_own_prompt() -> None:
    pairs = replace(
        SECOND, protocol="pairwise", template="mt_bench_pairwise", parser="letter_or_tie", vote="majority",
        num_judgements=2,
    )  # fmt: skip
    run = simulate(of_several(pairs), seats_of_three(), ONE_ROW, 3)
    assert run.failed_judgements == {}
    assert judgements_in(run, "safety") == pytest.approx(4 * 6 * 2 * 20 * 0.01)


def test_a_cascade_asks_its_second_model_about_no_more_than_it_may() -> None:
    cascade = RewardConfig(kind="cascade", first="judge", then="safety", unsure_band=[0.3, 0.7], share=0.25)
    run = simulate(of_several(reward=cascade), seats_of_three(), ONE_ROW, 12)
    everything = 16 * 20 * 0.01
    assert 0 < judgements_in(run, "safety") <= (0.25 + cascade.audit_share + 0.1) * everything
    assert run.failed_judgements == {}


def test_a_model_that_no_prompt_is_routed_to_is_never_busy() -> None:
    route = RewardConfig(kind="route", route={"chat": "safety"}, default="judge")
    assert simulate(of_several(reward=route), seats_of_three(), THREE, 3).busy["safety"] == 0.0


# -- lengths -----------------------------------------------------------------------------------------------------------


def drawn(lengths: Lengths, count: int = 4000) -> list[int]:
    writer = Writer(lengths=lengths, seed=3)
    contexts = [RequestContext(request_id=f"g{n}/0/t0", group_id="g", role="policy") for n in range(count)]
    return [len(writer((1,), SamplingParams(max_new_tokens=1 << 20), context).token_ids) for context in contexts]


def test_lognormal_lengths_have_their_median_and_their_mean() -> None:
    lengths = drawn(lognormal(300, 0.6))
    assert median(lengths) == pytest.approx(300, rel=0.05)
    assert fmean(lengths) == pytest.approx(300 * math.exp(0.18), rel=0.05)


def test_measured_lengths_come_as_often_as_they_did() -> None:
    lengths = drawn(fit_lengths([5, 5, 5, 90]))
    assert lengths.count(90) / len(lengths) == pytest.approx(0.25, abs=0.03)
    assert set(lengths) == {5, 90}


def ask(writer: Writer | ModelWriter, prompt_ids: Sequence[int], max_new_tokens: int):
    context = RequestContext(request_id="g/0/j0.0", group_id="g", role="grm")
    return writer(prompt_ids, SamplingParams(max_new_tokens=max_new_tokens), context)


def test_migrated_answer_ends_as_it_would_have() -> None:
    judge = Writer(lengths=always(50), seed=0, scale=Scale(low=1, high=10))
    writer = ModelWriter(turns=None, judges={"judge": judge})
    whole = ask(writer, (1, 2), 64)
    rest = ask(writer, (1, 2, *(FILLER,) * 20), 44)
    assert len(whole.token_ids) == 50
    assert (FILLER,) * 20 + rest.token_ids == whole.token_ids
    assert writer.decode(whole.token_ids) == whole.text == rest.text


def test_a_simulated_answer_is_cut_at_the_limit_of_tokens() -> None:
    script = ask(Writer(lengths=always(50), seed=0), (1,), 49)
    assert (len(script.token_ids), script.finish_reason) == (49, "length")


def test_sampled_text_counts_as_the_tokens_it_is() -> None:
    renderer = CountingRenderer(4.0)
    answer = ask(Writer(lengths=always(123), seed=0), (1,), 200)
    plain, with_answer = (renderer.render((Message(role="user", content="q" * 40 + t),)) for t in ("", answer.text))
    assert len(plain) == 10
    assert len(with_answer) == 133
    assert plain[0] != with_answer[0]


# -- the task ----------------------------------------------------------------------------------------------------------


SMALL = (
    "+experiment=quickstart", "task=simulate", "simulate.steps=4", "train.groups_per_batch=2", "data.num_prompts=16",
    "data.num_eval_prompts=4",
)  # fmt: skip


def run_task(tmp_path: Path, *overrides: str) -> tuple[str, float]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = build(compose("config", [*SMALL, f"run_dir={tmp_path / 'simulated'}", *overrides]))
    return run_simulation(config)


def test_the_task_tells_step_time_busy_shares_and_bound_and_leaves_its_files(tmp_path: Path) -> None:
    text, step_s = run_task(tmp_path)
    for word in ("a step", "bound", "busy", "staleness at most", "bottleneck"):
        assert word in text
    record = json.loads((tmp_path / "simulated" / "simulation.json").read_text())
    assert len(record["steps_s"]) == 4
    assert step_s == record["step_s"] >= record["bound_s"] > 0
    assert record["busy"].keys() == {"policy", "grm", "learner", "driver"}
    lanes = {
        event["args"]["name"]
        for event in json.loads((tmp_path / "simulated" / "timeline.json").read_text())
        if event["name"] == "thread_name"
    }
    assert {"policy-0", "grm-0", "learner", "weight sync"} <= lanes


def test_a_second_judges_model_is_simulated_under_its_name(tmp_path: Path) -> None:
    second = ("+grm@models.safety=tiny", "+judge@judges.safety=generative", "judges.safety.model=safety", "reward=mix",
              "reward.mix={judge: 0.5, safety: 0.5}")  # fmt: skip
    text, _ = run_task(tmp_path, *second)
    assert "judgements by judge 1, safety 1, simulated" in text
    assert "busy      safety" in text


def test_a_sweep_of_simulations_gets_the_seconds_of_a_step(tmp_path: Path) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = build(compose("config", [*SMALL, f"run_dir={tmp_path / 'simulated'}"]))
    step_s = show_simulation(config)
    assert step_s == json.loads((tmp_path / "simulated" / "simulation.json").read_text())["step_s"] > 0


@pytest.mark.parametrize(
    ("cause", "way_out"),
    [
        ("timeout", r"type a longer rollout\.group_deadline_s"),
        ("unparseable", "type judges that decide more of its rollouts, or another composition of them$"),
    ],
)
def test_a_simulation_whose_judge_fails_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, way_out: str
) -> None:
    def stops(*parts: object) -> SimulatedRun:
        raise Unfit(f"60 of the last 64 verdicts failed (94%; judge.max_failure_rate=0.2): 60 {cause}")

    monkeypatch.setattr("grmpipe.capacity.simulate.simulation.simulate", stops)
    with pytest.raises(ConfigError, match=rf"^reward: the simulated run stops.*60 {cause}; {way_out}"):
        run_task(tmp_path)


def test_a_run_keeps_its_files(tmp_path: Path) -> None:
    (tmp_path / "simulated").mkdir()
    (tmp_path / "simulated" / "config.yaml").write_text("task: train\n")
    with pytest.raises(ConfigError, match="run_dir"):
        run_task(tmp_path)[0]


def test_lengths_of_a_run_without_journals_are_refused_by_their_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"simulate\.lengths"):
        run_task(tmp_path, f"simulate.lengths={tmp_path}")


def test_lengths_come_from_the_journals_of_a_run(tmp_path: Path) -> None:
    completion = {"token_ids": [1] * 30}
    rollout = {"turns": [{"token_ids": [1] * 20}]}
    judged = {"judgements": [{"completion": completion}], "failures": [{"cause": "timeout"}]}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(rollout) + "\n" + '{"torn')
    (tmp_path / "judgements.jsonl").write_text(json.dumps(judged) + "\n")
    assert lengths_in(tmp_path) == {"policy": [20], "judge": [30]}


def test_the_use_of_tools_comes_from_the_journals_of_a_run(tmp_path: Path) -> None:
    results = [
        {"start": 10, "end": 16, "took_s": 0.5},
        {"start": 20, "end": 22, "took_s": 1.5},
        {"start": 30, "end": 30},
    ]
    called, plain = {"token_ids": [1] * 30, "tool_results": results}, {"token_ids": [1] * 30}
    judged = {"judgements": [{"completion": one} for one in (called, plain)], "failures": []}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({"turns": [{"token_ids": [1] * 20}]}) + "\n")
    (tmp_path / "judgements.jsonl").write_text(json.dumps(judged) + "\n")
    assert measure_tool_use(tmp_path, "judge") == ToolUse(turns=1.0, seconds=1.0, tokens=4.0)
    assert measure_tool_use(tmp_path, "other") == ToolUse(turns=0, seconds=0, tokens=0)
    assert lengths_in(tmp_path)["judge"] == [22, 30]


def test_a_judge_with_tools_is_simulated(tmp_path: Path) -> None:
    tools = ("judge.tools.functions=grmpipe.tiny.tools", "judge.tools.max_calls=4", "grm.path=tiny://policy_tools")
    (_, quick_s), (_, slow_s) = (run_task(tmp_path, *tools, f"plan.tool_s={seconds}") for seconds in (0.0, 10.0))
    assert slow_s > quick_s + 5  # two calls; judgements of a further step go on meanwhile


def test_lengths_of_several_judges_are_kept_apart_by_name(tmp_path: Path) -> None:
    judged = [{"judge": name, "completion": {"token_ids": [1] * count}} for name, count in (("judge", 30), ("b", 7))]
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({"turns": [{"token_ids": [1] * 20}]}) + "\n")
    (tmp_path / "judgements.jsonl").write_text(json.dumps({"judgements": judged, "failures": []}) + "\n")
    assert lengths_in(tmp_path) == {"policy": [20], "judge": [30], "b": [7]}


def test_a_simulation_is_fast() -> None:
    began = time.process_time()
    simulated(10, staleness=1, lengths=lognormal(80, 0.8))
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize(("cp", "micro_batches"), [(1, 4), (2, 2), (4, 1)])
def test_ranks_that_share_a_micro_batch_divide_its_time(cp: int, micro_batches: int) -> None:
    """Four ranks at 1 ms for a packed token: 2 tokens in each micro-batch."""

    async def took_s() -> float:
        group = LearnerRanks(SimulatedRanks(4, LearnerSpeed(token_s=1e-3, step_s=0.0), 0.0, cp=cp), cp)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await group.accumulate(MicroBatchRound(micro_batches=(idle(),) * micro_batches))
        return clock() - began_s

    assert run_virtually(took_s) == pytest.approx(2e-3 * micro_batches)
