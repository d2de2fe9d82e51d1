"""The first half hour on a GPU: does everything run, how fast, and how far is that from what `task=plan` says?

    python benchmarks/first_gpu.py                     all pieces, one after the other
    python benchmarks/first_gpu.py learner engine      some of them
    python benchmarks/first_gpu.py --rehearse          the same on a CPU with tiny models, to try the kit itself

The last pieces: `cards` is for machines with two or three of them; `calibrate` prints what to type so that plans assume
what this card did. Needs a card, the project, `pip install -e .[dev,vllm]` and no network: models get their shape from
the recipes and random weights, which nothing here can tell from trained ones but the answers, all of which reach their
limit. Each piece stands alone, in a process of its own that ends after 8 minutes. Each line that it prints becomes a
row of benchmarks/gpu.md, in place of the row of the same card and piece that was there.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from engines import Workload, answered
from quickstart import ROOT
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import grmpipe
from grmpipe.capacity.cost import Costs
from grmpipe.capacity.lower_bound import LEARNER, POLICY
from grmpipe.capacity.plan.costs import estimate_costs
from grmpipe.capacity.plan.memory import list_memory, total
from grmpipe.capacity.plan.plan_report import compute_loads
from grmpipe.capacity.plan.run_facts import RunFacts, collect_facts
from grmpipe.capacity.plan.work import step_work
from grmpipe.config.run_config import RunConfig
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.installed import vllm_missing
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.lm.packed_attention import _attend, _padded
from grmpipe.models.lm.packing import Packing
from grmpipe.models.settings import EmbeddedConfig, ModelShape, VllmConfig
from grmpipe.models.types import RequestContext, SamplingParams, VersionSpan
from grmpipe.observe.journal import read_journal
from grmpipe.pipeline.step_metrics import with_pace
from grmpipe.run.build.start_models import learner_spec
from grmpipe.scheduler.devices import GB, DeviceSpec, device_called
from grmpipe.tiny.tokenizer import build_tokenizer
from grmpipe.train.batching.packer import pack
from grmpipe.train.learner.learner import Learner
from grmpipe.types import BatchTotals, MicroBatch, TrainingSample

FOLDER = ROOT / "runs" / "first_gpu"
PAGE = Path(__file__).with_name("gpu.md")
REHEARSED_PAGE = FOLDER / "gpu.md"
PIECE_S = 480
RECIPES = {"0.6B": "qwen3_one_gpu", "1.7B": "qwen3_1_7b_one_gpu"}
PROMPT_TOKENS, ANSWER_TOKENS, STEPS = 256, 256, 5
HEAD = """# The first half hour on a GPU

`python benchmarks/first_gpu.py`

What was measured on a card, and what `task=plan` expects there by the card's data sheet; "of the plan" is the first by
the second. Models have the shape of the recipes and random weights.

| card | piece | what | measured | plan | of the plan | when, commit |
|---|---|---|---|---|---|---|
"""
TINY = ModelShape(
    num_layers=2, hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=512,
    context_tokens=4096, tied=True,
)  # fmt: skip
# A judge of random weights writes no verdict by itself: it is asked for one, of which a grammar leaves no other choice.
RUN = [
    "data=tiny", "data.eval_path=null", "judge_monitor.every=0", "judge.format.ask_verdict=true", "tracking=none",
]  # fmt: skip
REHEARSED = [
    "placement=laptop", "engine=embedded", "train.dtype=float32", "rollout.max_new_tokens=24",
    "train.micro_batch_tokens=2048", "train.groups_per_batch=2", "train.group_size=2", "cluster.kind=inprocess",
]  # fmt: skip
MOST_APART = (math.log(1 / 8), math.log(8.0))  # of a rate and its data sheet: what is further is no rate
IN_FLIGHT, REHEARSED_IN_FLIGHT = (16, 64, 256), (2, 4)
TWO_SHARED = ["placement.pools.all.slots=2", "placement.roles.learner.replicas=2"]
# What takes several cards -> how many, and what to type for it.
ON_CARDS = {
    "weights by NCCL": (
        2,
        [
            "placement=four_gpus", "placement.pools.rollout.slots=1", "placement.roles.policy.slots_per_replica=1",
            "placement.roles.grm.pool=rollout", "sync.transport=nccl",
        ],
    ),
    "weights by NCCL into an engine of two cards": (
        3, ["placement=four_gpus", "placement.roles.grm.pool=train", "sync.transport=nccl"]
    ),
    "an engine of two cards beside two ranks, weights by cuda_ipc": (
        2, [*TWO_SHARED, "placement.roles.policy.slots_per_replica=2", "sync.transport=cuda_ipc"]
    ),
    "a mixture by expert parallelism": (2, [*TWO_SHARED, "placement.roles.policy.replicas=2", "train.parallel.ep=2"]),
}  # fmt: skip
MIXTURE = "a mixture by expert parallelism"
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was measured. unit: of both numbers."""

    what: str
    measured: float
    unit: str = ""
    plan: float | None = None

    def describe(self) -> str:
        expected = f", planned {shown(self.plan)}" if self.plan is not None else ""
        return f"{self.what}: {shown(self.measured)} {self.unit}{expected}".strip()

    def cells(self) -> list[str]:
        planned = ["", ""] if not self.plan else [shown(self.plan), f"{self.measured / self.plan:.2f}"]
        return [self.what, f"{shown(self.measured)} {self.unit}".strip(), *planned]


def shown(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


class Kit:
    """The card, and models of the recipes' shapes on it. rehearse: on the CPU, with tiny shapes."""

    def __init__(self, *, rehearse: bool) -> None:
        self.rehearse = rehearse
        if not rehearse and not torch.cuda.is_available():
            raise SystemExit("torch finds no CUDA device; --rehearse tries the kit on a CPU")
        self.card = "CPU, rehearsed" if rehearse else torch.cuda.get_device_name()
        self.device, self.dtype = ("cpu", "float32") if rehearse else ("cuda", "bfloat16")
        self.is_known = rehearse or device_called(self.card) is not None

    @property
    def in_flight(self) -> tuple[int, ...]:
        return REHEARSED_IN_FLIGHT if self.rehearse else IN_FLIGHT

    @property
    def answer_tokens(self) -> int:
        return 16 if self.rehearse else ANSWER_TOKENS

    def overrides(self, size: str, *, rehearsed: bool = True) -> list[str]:
        """Those of a recipe, on models that are made here. rehearsed: with those of a rehearsal, if it is one."""
        fixed = [*RUN, *(REHEARSED if self.rehearse and rehearsed else ())]
        config = grmpipe.compose(RECIPES[size], fixed)
        paths = [f"{name}.path={self.make_model(config.models[name].shape)}" for name in (POLICY, "grm")]
        return [*fixed, *paths]

    def compose(self, size: str, *more: str) -> RunConfig:
        return grmpipe.compose(RECIPES[size], [*self.overrides(size), *more])

    def plan(self, config: RunConfig) -> tuple[RunFacts, Costs | None]:
        """None: the card has no data sheet here."""
        facts = collect_facts(config)
        return facts, estimate_costs(facts) if self.is_known else None

    def make_model(self, shape: ModelShape, experts: Mapping[str, int] | None = None) -> Path:
        """The folder of a Qwen3 of this shape, with random weights and the tiny models' tokenizer; with experts, of a
        Qwen3-MoE.
        """
        shape = TINY if self.rehearse else shape
        folder = FOLDER / f"qwen3_{shape.num_layers}x{shape.hidden_size}{'_experts' if experts else ''}"
        if (folder / "tokenizer_config.json").exists():
            return folder
        torch.manual_seed(0)
        config = (Qwen3MoeConfig if experts else Qwen3Config)(
            vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
            num_key_value_heads=shape.num_kv_heads, max_position_embeddings=shape.context_tokens,
            tie_word_embeddings=shape.tied, **(experts or {}),
        )  # fmt: skip
        torch.set_default_dtype(getattr(torch, self.dtype))
        with torch.device(self.device):
            model = (Qwen3MoeForCausalLM if experts else Qwen3ForCausalLM)(config)
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        return folder

    def open_engine(self, path: Path, max_rows: int) -> EmbeddedEngine | VllmEngine:
        """vLLM as a run starts it, with its graphs; in a rehearsal without it the embedded engine."""
        spec = EngineSpec(path=str(path), role=POLICY, dtype=self.dtype, device=self.device)
        if self.rehearse and vllm_missing():
            return EmbeddedEngine(spec, EmbeddedConfig(max_batch_rows=max_rows))
        config = VllmConfig(max_batch_rows=max_rows, max_context_tokens=PROMPT_TOKENS + ANSWER_TOKENS)
        return VllmEngine(spec, config)

    def open_learner(self, config: RunConfig, facts: RunFacts) -> Learner:
        model = facts.models[POLICY].model
        assert model is not None
        return Learner(learner_spec(config, facts.roles, model, "object_store", FOLDER))


# -- the pieces ------------------------------------------------------------------------------------------------------


def run_doctor(kit: Kit) -> Iterator[Row]:
    """What is installed, and whether a recipe can start here."""
    done = launch("task=doctor", f"+experiment={RECIPES['0.6B']}", *kit.overrides("0.6B"))
    print(done.stdout)
    yield Row(what="exit status of `task=doctor`", measured=done.returncode)


def run_tests(kit: Kit) -> Iterator[Row]:
    """The tests that need a GPU; a rehearsal collects them."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *(["--collect-only"] if kit.rehearse else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:])
    yield Row(what="exit status of `pytest -m gpu`", measured=done.returncode)


def measure_attention(kit: Kit) -> Iterator[Row]:
    """Packed attention as the learner computes it, beside float64: the largest error of outputs of about 1."""
    generator = torch.Generator(device=kit.device).manual_seed(0)
    lengths_S = torch.tensor([1, 700, 33, 256, 1024])
    packing = Packing(lengths_S, device=torch.device(kit.device))
    query, key, value = (
        torch.randn(int(lengths_S.sum()), heads, 128, generator=generator, device=kit.device, dtype=torch.float64)
        for heads in (16, 8, 8)
    )
    exact = _padded(query, key, value, packing, None, None)
    dtype = getattr(torch, kit.dtype)
    found = _attend(query.to(dtype), key.to(dtype), value.to(dtype), packing, None, None)
    error = float((found.double() - exact).abs().max())
    assert error < (1e-4 if kit.rehearse else 0.05), f"attention is off by {error:.3g}"
    yield Row(what=f"largest error of attention in {kit.dtype}", measured=error)


def measure_learner(kit: Kit) -> Iterator[Row]:
    """Packed tokens/s, MFU and memory of a learner, by its recipe."""
    for size in RECIPES:
        config = kit.compose(size)
        facts, costs = kit.plan(config)
        learner = kit.open_learner(config, facts)
        batch = draw_batch(config.train.micro_batch_tokens, facts)
        paces, packed = [], 2 * len(batch.token_ids_T)
        for _ in range(1 + STEPS):
            began_s = time.perf_counter()
            for _ in range(2):
                learner.accumulate(batch)
            trained = 2 * int((batch.loss_mask_E > 0).sum())
            metrics = learner.step(
                BatchTotals(num_loss_tokens=trained, num_sequences=16, num_groups=2, oldest_version=0)
            )
            sized = {**metrics, "train/packed_tokens": float(packed)}
            paces.append(with_pace(sized, time.perf_counter() - began_s))
        del learner
        planned = costs and predict_learner(costs, packed)
        speed = statistics.median(pace["learner/tokens_per_s"] for pace in paces[1:])
        yield Row(what=f"learner of {size}", measured=speed, unit="packed tokens/s", plan=planned)
        if "perf/mfu" in paces[-1]:
            yield Row(
                what=f"learner of {size}, MFU", measured=statistics.median(pace["perf/mfu"] for pace in paces[1:])
            )
        if kit.device == "cuda":
            peak, planned = torch.cuda.max_memory_allocated() / GB, total(list_memory(facts, LEARNER)) / GB
            yield Row(what=f"learner of {size}, memory at most", measured=peak, unit="GB", plan=planned)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def predict_learner(costs: Costs, packed: int) -> float:
    """Packed tokens/s of steps of so many."""
    return packed / (packed * costs.learner.token_s + costs.learner.step_s)


def draw_batch(num_tokens: int, facts: RunFacts) -> MicroBatch:
    """A micro-batch of random tokens, as full as it may be, in samples of a prompt and an answer."""
    footprint = facts.models[POLICY].footprint
    assert footprint is not None
    each = min(PROMPT_TOKENS + ANSWER_TOKENS, num_tokens)
    prompt = each // 4
    samples = [
        TrainingSample(
            group_id=f"g{index}", sibling=0, segment=0,
            token_ids=tuple(torch.randint(3, footprint.vocab_size, (each,)).tolist()),
            loss_mask=(0,) * prompt + (1,) * (each - prompt),
            sampler_logprobs=(0.0,) * prompt + (-5.0,) * (each - prompt),
            advantages=(0.0,) * prompt + (1.0 - index % 2 * 2,) * (each - prompt),
            versions=(VersionSpan(model=POLICY, version=0, start=prompt, end=each),),
        )
        for index in range(num_tokens // each)
    ]  # fmt: skip
    return pack(samples)


def measure_engine(kit: Kit) -> Iterator[Row]:
    """Tokens/s of an engine that samples with 16, 64 and 256 requests in flight."""
    config = kit.compose("0.6B")
    facts, costs = kit.plan(config)
    model, rows, answer = facts.models[POLICY], kit.in_flight, kit.answer_tokens
    assert model.footprint is not None and model.model is not None
    engine = kit.open_engine(Path(model.model.path), max(rows))

    async def sample_all() -> list[Row]:
        found = []
        for count in rows:
            speeds = []
            for _ in range(3):
                prompts = torch.randint(3, model.footprint.vocab_size, (count, PROMPT_TOKENS)).tolist()
                workload = Workload(prompts=tuple(map(tuple, prompts)), lengths=(answer,) * count)
                began_s = time.perf_counter()
                speeds.append(await answered(engine, workload) / (time.perf_counter() - began_s))
            planned = costs and predict_engine(costs, count, answer)
            found.append(Row(what=name_engine(count), measured=max(speeds), unit="tokens/s", plan=planned))
        return found

    try:
        yield from asyncio.run(sample_all())
    finally:
        engine.close()


def name_engine(count: int) -> str:
    return f"engine of 0.6B, {count} in flight"


def predict_engine(costs: Costs, count: int, answer: int) -> float:
    """Tokens/s of so many requests at once."""
    speed, middle = costs.engines[POLICY], PROMPT_TOKENS + answer / 2
    step_s = speed.step_s + count * (speed.row_s + middle * speed.cached_token_s)
    return count * answer / (answer * step_s + count * PROMPT_TOKENS * speed.prefill_token_s)


def measure_gap(kit: Kit) -> Iterator[Row]:
    """The log-probs of sampled tokens by the engine and by the learner: what importance ratios begin with."""
    config = kit.compose("0.6B")
    facts, _ = kit.plan(config)
    model = facts.models[POLICY]
    assert model.footprint is not None and model.model is not None
    engine = kit.open_engine(Path(model.model.path), 16)
    prompts = torch.randint(3, model.footprint.vocab_size, (16, 64)).tolist()

    async def sample_all() -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        completions = await asyncio.gather(
            *(
                engine.generate(
                    tuple(prompt), SamplingParams(max_new_tokens=64, seed=index),
                    RequestContext(request_id=str(index), group_id="", role=POLICY),
                )
                for index, prompt in enumerate(prompts)
            )
        )  # fmt: skip
        return [((*prompt, *one.token_ids), one.logprobs) for prompt, one in zip(prompts, completions, strict=True)]

    try:
        sampled = asyncio.run(sample_all())
    finally:
        engine.close()
    learner = kit.open_learner(config, facts)
    gaps = [
        abs(there - here)
        for ids, logprobs in sampled
        for there, here in zip(logprobs, learner.score(ids)[-len(logprobs) :], strict=True)
    ]
    yield Row(what="sampler and learner, mean difference of a log-prob", measured=statistics.fmean(gaps), unit="nats")
    yield Row(what="sampler and learner, largest", measured=max(gaps), unit="nats")


def run_recipe(kit: Kit) -> Iterator[Row]:
    """Five steps of a recipe, all roles on the card at the same time; then by turns."""
    for name, more in (("together", []), ("by turns", [] if kit.rehearse else ["placement=one_gpu_time_shared"])):
        yield from run_steps(kit, name, [*kit.overrides("0.6B"), *more])


def run_steps(kit: Kit, name: str, overrides: Sequence[str]) -> Iterator[Row]:
    typed = [*overrides, f"train.num_steps={STEPS}"]
    facts, costs = kit.plan(grmpipe.compose(RECIPES["0.6B"], typed))
    run_dir = FOLDER / f"{time.strftime('%Y%m%d_%H%M%S')}_{name.replace(' ', '_').replace(',', '')}"
    done = launch(f"+experiment={RECIPES['0.6B']}", *typed, f"run_dir={run_dir}")
    print(done.stdout[-4000:], done.stderr[-4000:])
    if done.returncode:
        raise SystemExit(f"the run ended with {done.returncode}")
    steps = list(read_journal(run_dir / "metrics.jsonl"))[2:]  # after the first, which is slower
    planned = costs and sum(compute_loads(step_work(facts), costs, facts).values())
    figures = (
        ("a step", "time/step_s", planned),
        ("a push of weights", "sync/push_s", costs and costs.sync_s),
        ("its pause of the engines", "sync/pause_s", None),
    )
    for what, metric, expected in figures:
        found = [step[metric] for step in steps if metric in step]
        yield Row(what=f"{what}, {name}", measured=statistics.median(found), unit="s", plan=expected)


def run_on_cards(kit: Kit) -> Iterator[Row]:
    """Five steps of each form that takes several cards; a form without enough of them is only composed and seated."""
    here = 0 if kit.rehearse else torch.cuda.device_count()
    for name, (cards, more) in ON_CARDS.items():
        typed = [*kit.overrides("0.6B", rehearsed=False), *more]
        if name == MIXTURE:
            shape = grmpipe.compose(RECIPES["0.6B"], RUN).policy.shape
            shape = replace(shape, num_layers=8)
            typed.append(f"policy.path={kit.make_model(shape, TINY_EXPERTS if kit.rehearse else EXPERTS)}")
        if here >= cards:
            yield from run_steps(kit, name, typed)
            continue
        collect_facts(grmpipe.compose(RECIPES["0.6B"], typed))
        print(f"cards: {name}: skipped, it needs {cards} cards and here are {here}", flush=True)


def calibrate_plan(kit: Kit) -> Iterator[Row]:
    """The device that plans must assume to predict this card's rows of learner and engine, and what to type for it: two
    of its rates are fitted, to all of these rows.
    """
    measured = read_measured(kit)
    facts, costs = kit.plan(config := kit.compose("0.6B"))
    engines = {count: measured[name_engine(count)] for count in kit.in_flight if name_engine(count) in measured}
    if costs is None or not engines or (learned := measured.get("learner of 0.6B")) is None:
        print("calibrate: skipped, it needs the rows of `learner` and `engine`, and a card with a data sheet here")
        return
    dtype, sheet = config.train.dtype, facts.devices[facts.placement.seats[POLICY][0].pool]
    assert sheet is not None
    packed = 2 * len(draw_batch(config.train.micro_batch_tokens, facts).token_ids_T)

    def compare(logs: np.ndarray) -> np.ndarray:
        """The logarithms of predicted by measured speeds; logs: those of both factors."""
        device = scale_device(sheet, *np.exp(logs))
        found = estimate_costs(replace(facts, devices=dict.fromkeys(facts.devices, device)))
        each = [predict_engine(found, count, kit.answer_tokens) / speed for count, speed in engines.items()]
        return np.log([*each, predict_learner(found, packed) / learned])

    bandwidth, arithmetic = np.exp(fit_least_squares(compare, np.zeros(2)))
    fitted = scale_device(sheet, bandwidth, arithmetic)
    yield Row(
        what="bandwidth that predicts these rows", measured=fitted.memory_gb_per_s, unit="GB/s",
        plan=sheet.memory_gb_per_s,
    )  # fmt: skip
    yield Row(
        what=f"arithmetic in {dtype} that predicts them", measured=fitted.tflops[dtype], unit="TFLOPS",
        plan=sheet.tflops[dtype],
    )  # fmt: skip
    print(
        f"calibrate: so that plans assume it, type\n  {describe_device(fitted)} placement.pools.<pool>.device=measured"
    )


def scale_device(device: DeviceSpec, bandwidth: float, arithmetic: float) -> DeviceSpec:
    rates = {dtype: rate * float(arithmetic) for dtype, rate in device.tflops.items()}
    return replace(device, memory_gb_per_s=device.memory_gb_per_s * float(bandwidth), tflops=rates)


def describe_device(device: DeviceSpec) -> str:
    """What to type for a device of one's own, called `measured`."""
    values = {name: value for name, value in vars(device).items() if name != "tflops"}
    rates = ", ".join(f"{dtype}: {rate:.4g}" for dtype, rate in device.tflops.items())
    sizes = ", ".join(f"{name}: {value:.4g}" for name, value in values.items())
    return f"'+plan.devices={{measured: {{{sizes}, tflops: {{{rates}}}}}}}'"


def fit_least_squares(compare: Callable[[np.ndarray], np.ndarray], at: np.ndarray) -> np.ndarray:
    """Where the squares of `compare` have their least sum, from `at` on (Levenberg and Marquardt, with a fixed damping:
    what no measurement tells stays as it is).
    """
    step = 1e-3
    for _ in range(40):
        apart = compare(at)
        slopes = np.stack([(compare(at + step * one) - apart) / step for one in np.eye(len(at))], axis=1)
        change = np.linalg.solve(slopes.T @ slopes + 1e-4 * np.eye(len(at)), -slopes.T @ apart)
        at = (at + change.clip(-0.5, 0.5)).clip(*MOST_APART)
    return at


def read_measured(kit: Kit) -> dict[str, float]:
    """What was measured -> the number, of this card's rows in the page."""
    page = REHEARSED_PAGE if kit.rehearse else PAGE
    lines = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith(f"| {kit.card} | ")]
    return {row[2]: float(row[3].split()[0].replace(",", "")) for row in rows if len(row) > 4 and row[3][:1].isdigit()}


def launch(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch.py", *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


PIECES: dict[str, Callable[[Kit], Iterator[Row]]] = {
    "doctor": run_doctor,
    "tests": run_tests,
    "attention": measure_attention,
    "learner": measure_learner,
    "engine": measure_engine,
    "gap": measure_gap,
    "run": run_recipe,
    "cards": run_on_cards,
    "calibrate": calibrate_plan,
}


# -- the page --------------------------------------------------------------------------------------------------------


def write_rows(kit: Kit, piece: str, rows: Sequence[list[str]]) -> None:
    """Put the rows of a piece into the page, in place of those that it has of this card."""
    card, page = kit.card, REHEARSED_PAGE if kit.rehearse else PAGE
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    before = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    kept = [
        line for line in before if line.startswith("| ") and not line.startswith(("| card |", f"| {card} | {piece} |"))
    ]
    made = [
        "| " + " | ".join([card, piece, *row, f"{time.strftime('%Y-%m-%d')} {commit.strip()}"]) + " |" for row in rows
    ]
    order = list(PIECES)
    lines = sorted([*kept, *made], key=lambda line: (line.split(" | ")[0], order.index(line.split(" | ")[1])))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


def measure_piece(piece: str, *, rehearse: bool) -> None:
    """In the process of a piece: each row is printed and kept as soon as it is there."""
    kit, cells = Kit(rehearse=rehearse), []
    for row in PIECES[piece](kit):
        print(f"{piece}: {row.describe()}", flush=True)
        cells.append(row.cells())
        write_rows(kit, piece, cells)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("pieces", nargs="*", help=f"of {', '.join(PIECES)}; none: all")
    options.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny models")
    options.add_argument("--here", action="store_true", help="in this process, without a limit of time")
    args = options.parse_args()
    if unknown := [one for one in args.pieces if one not in PIECES]:
        options.error(f"{unknown[0]}: expected some of {', '.join(PIECES)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.here:
        for piece in args.pieces:
            measure_piece(piece, rehearse=args.rehearse)
        return
    failed, kit = [], Kit(rehearse=args.rehearse)
    for piece in args.pieces or PIECES:
        command = [sys.executable, __file__, piece, "--here", *(["--rehearse"] if args.rehearse else [])]
        began_s = time.monotonic()
        try:
            status = subprocess.run(command, timeout=PIECE_S, check=False).returncode
        except subprocess.TimeoutExpired:
            status = 124
        print(
            f"{piece}: {'done' if not status else f'FAILED ({status})'}, {time.monotonic() - began_s:.0f} s", flush=True
        )
        if status:
            failed.append(piece)
            write_rows(kit, piece, [["it failed", "" if status != 124 else f"no end after {PIECE_S} s", "", ""]])
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
