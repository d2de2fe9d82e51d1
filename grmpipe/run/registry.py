"""The tables of judges and clusters: a new kind is a file, a row here, a YAML and a test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from grmpipe.config.run_config import RunConfig
from grmpipe.judge.custom import load_custom_judge
from grmpipe.judge.grm import Grm
from grmpipe.judge.labels import LabelReward, rule_of
from grmpipe.judge.meta_rm import MetaRmScorer
from grmpipe.judge.mixed import MixedJudge
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.judge.rule import RuleJudge
from grmpipe.types import Judge
from grmpipe.validate.prepare import Prepared
from grmpipe.validate.sections import section
from scheduler.placement import Placement
from scheduler.processes.actors import Cluster, InProcessCluster


def generative_judge(prepared: Prepared, grm: Grm | None, meta_rm: MetaRmScorer | None = None) -> Judge:
    assert grm is not None
    return GenerativeJudge(grm, prepared.config.judge, prepared.config.seed, meta_rm, prepared.policy.renderer.decode)


def rule_judge(prepared: Prepared, grm: Grm | None, meta_rm: MetaRmScorer | None = None) -> Judge:
    return PointwiseAdapter(RuleJudge(prepared.config.judge.rule, prepared.config.judge.scale))


def label_judge(prepared: Prepared, grm: Grm | None, meta_rm: MetaRmScorer | None = None) -> Judge:
    return PointwiseAdapter(LabelReward(rule_of(prepared.config.judge)))


def mixed_judge(prepared: Prepared, grm: Grm | None, meta_rm: MetaRmScorer | None = None) -> Judge:
    mix = prepared.config.judge.mix
    return MixedJudge({name: (JUDGES[name](prepared, grm, meta_rm), weight) for name, weight in mix.items()})


def custom_judge(prepared: Prepared, *_: object) -> Judge:
    return load_custom_judge(prepared.config.judge)


async def ray_cluster(config: RunConfig, placement: Placement) -> Cluster:
    from scheduler.processes.ray_cluster import RayCluster

    with section(""):  # what only the machines of a joined cluster know is refused in the same form
        return await RayCluster.start(config.cluster, placement)


async def inprocess_cluster(config: RunConfig, placement: Placement) -> Cluster:
    return InProcessCluster(placement)


class MakeJudge(Protocol):
    """`grm`: of a generative judge; `meta`: the meta-RM for its vote. None if there is none."""

    def __call__(self, prepared: Prepared, grm: Grm | None, meta_rm: MetaRmScorer | None = None, /) -> Judge: ...


JUDGES: dict[str, MakeJudge] = {
    "generative": generative_judge,
    "rule": rule_judge,
    "mixed": mixed_judge,
    "label": label_judge,
    "custom": custom_judge,
}
CLUSTERS: dict[str, Callable[[RunConfig, Placement], Awaitable[Cluster]]] = {
    "ray": ray_cluster,
    "inprocess": inprocess_cluster,
}
