"""Rates of a plan's data sheets beside rates that others published. Needs no GPU; writes benchmarks/plan_rates.md.

    python benchmarks/plan_rates.py

Each model's rates are estimated twice: with the rates of grmpipe/capacity/cost.py, and with rates that are fitted to
the other models alone. plan_rates.yaml holds the published rates, and where each was read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import TypeVar

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from grmpipe.capacity.cost import (  # noqa: E402
    ENGINE_RATES,
    LEARNER_RATES,
    EngineRates,
    LearnerModel,
    LearnerRates,
    ModelSizes,
    engine_speed,
    learner_speed,
)
from grmpipe.models.lm.flops import PackedSizes  # noqa: E402
from grmpipe.models.lm.footprint import Footprint, footprint_of_shape  # noqa: E402
from grmpipe.models.settings import ModelShape  # noqa: E402
from grmpipe.scheduler.devices import DEVICES, DeviceSpec  # noqa: E402

TABLE = Path(__file__).with_suffix(".yaml")
PAGE = Path(__file__).with_suffix(".md")
Rates = TypeVar("Rates", EngineRates, LearnerRates)
# What is fitted, between these limits; a fit tries this many values of each in turn.
ENGINE_LIMITS = {"bandwidth": (0.6, 0.9), "flops": (0.3, 0.7), "row_s": (0.0, 8e-5)}
LEARNER_LIMITS = {"flops": (0.3, 0.8), "expert_flops": (0.1, 0.8), "attention": (0.3, 0.8), "traffic": (1.0, 25.0)}
VALUES, SWEEPS = 11, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A published rate of a learner, per GPU. modules: "transformers", like those of this learner; or "tuned"."""

    model: str
    device: str
    gpus: int
    sequence_tokens: int
    adapter_rank: int
    checkpointing: bool
    modules: str
    tokens_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A published rate of an engine over its GPUs. rows: requests that decode at once, on average."""

    model: str
    device: str
    gpus: int
    rows: int
    new_tokens: int
    tokens_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The published rates, with what is known of their models and devices."""

    learners: tuple[Learner, ...]
    engines: tuple[Engine, ...]
    footprints: Mapping[str, Footprint]
    devices: Mapping[str, DeviceSpec]
    sources: Mapping[str, str]


Row = TypeVar("Row", Learner, Engine)


def read_table() -> Table:
    held = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    learners = tuple(Learner(**dict(zip(Learner.__slots__, row, strict=True))) for row in held["learners"])
    engines = tuple(Engine(**dict(zip(Engine.__slots__, row, strict=True))) for row in held["engines"])
    names = {row.model for row in (*learners, *engines)}
    return Table(
        learners=learners,
        engines=engines,
        footprints={name: footprint_of_shape(shape_of(name, held["shapes"])) for name in names},
        devices={
            **DEVICES,
            **{
                name: DeviceSpec(memory_gb, memory_gb_per_s, {"bfloat16": tflops})
                for name, (memory_gb, memory_gb_per_s, tflops) in held["devices"].items()
            },
        },
        sources=held["sources"],
    )


def shape_of(name: str, shapes: Mapping[str, list[int]]) -> ModelShape:
    if name not in shapes:
        return ModelShape(**yaml.safe_load((ROOT / f"conf/policy/{name}.yaml").read_text(encoding="utf-8"))["shape"])
    layers, hidden, inner, heads, key_heads, head, vocabulary, tied, experts, chosen, expert = shapes[name]
    return ModelShape(
        num_layers=layers, hidden_size=hidden, intermediate_size=inner, num_heads=heads, num_kv_heads=key_heads,
        head_dim=head, vocab_size=vocabulary, context_tokens=131072, tied=bool(tied), num_experts=experts,
        experts_per_token=chosen, moe_intermediate_size=expert,
    )  # fmt: skip


# -- a plan's rates --------------------------------------------------------------------------------------------------


def planned_learner(row: Learner, table: Table, rates: LearnerRates = LEARNER_RATES) -> float:
    """Tokens per second of a GPU, without the optimizer's step."""
    footprint = table.footprints[row.model]
    packed = PackedSizes(lengths_S=[row.sequence_tokens], prefixes_S=[0], head_rows=row.sequence_tokens)
    attended = sum(each * packed.pairs(window) for window, each in footprint.attention_flops.items())
    beside = footprint.adapter_parameters(1, ()) if row.adapter_rank else 0
    speed = learner_speed(
        LearnerModel(
            num_parameters=footprint.num_parameters,
            num_active=footprint.matrix_weights,
            num_adapters=footprint.adapter_parameters(row.adapter_rank, ()),
            values_per_token=footprint.values_per_token + beside,
            attention_flops=attended / packed.num_tokens,
            is_mixture=footprint.num_expert_parameters > 0,
        ),
        table.devices[row.device],
        ranks=1,
        dtype="bfloat16",
        checkpointing=row.checkpointing,
        rates=rates,
    )
    return 1 / speed.token_s


def planned_engine(row: Engine, table: Table, rates: EngineRates = ENGINE_RATES) -> float:
    """New tokens per second of an engine that decodes this many requests at once."""
    footprint = table.footprints[row.model]
    speed = engine_speed(
        ModelSizes(
            num_parameters=footprint.matrix_weights,
            weight_bytes=footprint.weight_bytes("bfloat16"),
            kv_bytes_per_token=footprint.kv_bytes_per_token("bfloat16", row.gpus),
            dtype="bfloat16",
        ),
        table.devices[row.device],
        num_slots=row.gpus,
        max_rows=row.rows,
        rates=rates,
    )
    cached = row.rows * row.new_tokens / 2
    return row.rows / (speed.step_s + row.rows * speed.row_s + cached * speed.cached_token_s)


# -- fits ------------------------------------------------------------------------------------------------------------


def fitted(
    rates: Rates, limits: Mapping[str, tuple[float, float]], rows: Sequence[Row], ratio: Callable[[Row, Rates], float]
) -> Rates:
    """The rates with the least mean |log(planned / published)|, one after the other between their limits."""

    def wrong(tried: Rates) -> float:
        return fmean(abs(math.log(ratio(row, tried))) for row in rows)

    for _ in range(SWEEPS):
        for name, (least, most) in limits.items():
            tried = [least + (most - least) * n / (VALUES - 1) for n in range(VALUES)]
            rates = min((rates, *(replace(rates, **{name: value}) for value in tried)), key=wrong)
    return rates


def learner_ratio(table: Table) -> Callable[[Learner, LearnerRates], float]:
    return lambda row, rates: planned_learner(row, table, rates) / row.tokens_per_s


def engine_ratio(table: Table) -> Callable[[Engine, EngineRates], float]:
    return lambda row, rates: planned_engine(row, table, rates) / row.tokens_per_s


def unseen_ratios(
    rows: Sequence[Row], rates: Rates, limits: Mapping[str, tuple[float, float]], ratio: Callable[[Row, Rates], float]
) -> list[float]:
    """planned / published of each row, with rates that are fitted to the other models."""
    models = {row.model for row in rows}
    without = {m: fitted(rates, limits, [row for row in rows if row.model != m], ratio) for m in models}
    return [ratio(row, without[row.model]) for row in rows]


def factor(ratio: float) -> float:
    """How far a ratio is from 1, in either direction."""
    return max(ratio, 1 / ratio)


# -- the page --------------------------------------------------------------------------------------------------------


def main() -> None:
    table = read_table()
    own = [row for row in table.learners if row.modules == "transformers"]
    unseen = dict(zip(own, unseen_ratios(own, LEARNER_RATES, LEARNER_LIMITS, learner_ratio(table)), strict=True))
    tuned = [row for row in table.learners if row.modules == "tuned"]
    faster = [learner_ratio(table)(row, LEARNER_RATES) for row in tuned]
    engines = unseen_ratios(table.engines, ENGINE_RATES, ENGINE_LIMITS, engine_ratio(table))
    blocks = [
        "# A plan's rates beside published ones",
        "Written by `python benchmarks/plan_rates.py`. No figure was measured here: a plan's are computed, the others\n"
        "were read in the sources below. `ratio` is planned / published; `others` is the same with rates that were\n"
        "fitted to the other models alone. A factor is the ratio or its inverse, whichever is above 1.",
        "\n".join([
            "| | rows | models | median factor | 9 of 10 within | worst |", "|---|---|---|---|---|---|",
            summary("learners of transformers' modules, fitted to the others", own, list(unseen.values())),
            summary("tuned learners, to which nothing was fitted", tuned, faster),
            summary("engines, fitted to the others", table.engines, engines),
        ]),
        "## Learners",
        "\n".join([
            "| model | device | GPUs | sequence | adapters | computed again | modules | published, tokens/s a GPU "
            "| planned | ratio | others | source |", "|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(learner_line(row, table, unseen.get(row)) for row in table.learners),
        ]),
        "## Engines",
        "\n".join([
            "| model | device | GPUs | requests at once | new tokens | published, tokens/s | planned | ratio | others "
            "| source |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(engine_line(row, table, other) for row, other in zip(table.engines, engines, strict=True)),
        ]),
        "## Sources",
        "\n".join(f"- `{name}`: {' '.join(said.split())}" for name, said in table.sources.items()),
    ]  # fmt: skip
    PAGE.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    for name, rates, limits in (
        ("learner", fitted(LEARNER_RATES, LEARNER_LIMITS, own, learner_ratio(table)), LEARNER_LIMITS),
        ("engine", fitted(ENGINE_RATES, ENGINE_LIMITS, table.engines, engine_ratio(table)), ENGINE_LIMITS),
    ):
        print(f"{name}, fitted to all rows: " + ", ".join(f"{key} {getattr(rates, key):.3g}" for key in limits))


def summary(what: str, rows: Sequence[Row], ratios: Sequence[float]) -> str:
    factors = [factor(ratio) for ratio in ratios]
    spread = quantiles(factors, n=10, method="inclusive")[8]
    num_models = len({row.model for row in rows})
    return f"| {what} | {len(rows)} | {num_models} | {median(factors):.2f} | {spread:.2f} | {max(factors):.2f} |"


def learner_line(row: Learner, table: Table, other: float | None) -> str:
    planned = planned_learner(row, table)
    again, adapters = "yes" if row.checkpointing else "no", row.adapter_rank or "none"
    unseen = "" if other is None else f"{other:.2f}"
    return (
        f"| {row.model} | {row.device} | {row.gpus} | {row.sequence_tokens} | {adapters} | {again} | {row.modules} "
        f"| {row.tokens_per_s:,} | {planned:,.0f} | {planned / row.tokens_per_s:.2f} | {unseen} | {row.source} |"
    )


def engine_line(row: Engine, table: Table, other: float) -> str:
    planned = planned_engine(row, table)
    return (
        f"| {row.model} | {row.device} | {row.gpus} | {row.rows} | {row.new_tokens} | {row.tokens_per_s:,} "
        f"| {planned:,.0f} | {planned / row.tokens_per_s:.2f} | {other:.2f} | {row.source} |"
    )


if __name__ == "__main__":
    main()
