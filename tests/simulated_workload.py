"""A small workload, its placement and its costs, for tests of simulated runs. Simulates nothing."""

from __future__ import annotations

from configs import judge_config, run_config

from grmpipe.capacity.cost import Costs, LearnerSpeed
from grmpipe.capacity.simulate.simulated_answers import Lengths
from grmpipe.capacity.simulate.workload import Workload
from grmpipe.config.data import RolloutConfig
from grmpipe.config.train import TrainConfig
from grmpipe.data.stream import PromptStream
from grmpipe.models.types import EngineSpeed, Message
from grmpipe.scheduler.placement import Placement, PlacementConfig, PoolConfig, RoleConfig, place
from grmpipe.types import Prompt

SPEED = EngineSpeed(step_s=0.01, row_s=0.0, cached_token_s=0.0, prefill_token_s=0.0, max_rows=64)
COSTS = Costs(engines={"policy": SPEED, "grm": SPEED}, learner=LearnerSpeed(token_s=1e-5, step_s=0.1), sync_s=0.1)


def always(num_tokens: int) -> Lengths:
    return lambda quantile: num_tokens


ROLLOUTS, CRITIQUES = always(100), always(50)


def workload(
    *,
    staleness: int = 0,
    lengths: Lengths = ROLLOUTS,
    critiques: Lengths = CRITIQUES,
    unparseable_share: float = 0.0,
    ask_verdict: bool = False,
    score_from: str = "text",
) -> Workload:
    config = run_config(
        train=TrainConfig(groups_per_batch=4, group_size=4, max_staleness=staleness, micro_batch_tokens=512),
        rollout=RolloutConfig(max_new_tokens=400, min_tokens_per_s=1, group_deadline_s=3600),
        judge=judge_config(
            num_judgements=2,
            max_new_tokens=200,
            min_tokens_per_s=1,
            timeout_s=3600,
            max_retries=1,
            ask_verdict=ask_verdict,
            score_from=score_from,
        ),
    )
    question = Message(role="user", content="how many apples are left? " * 4)
    return Workload(
        config=config,
        prompts=PromptStream([Prompt(prompt_id=f"p{n}", messages=(question,)) for n in range(64)]),
        chars_per_token={"policy": 4.0, "grm": 4.0},
        lengths={"policy": lengths, "judge": critiques},
        unparseable_share=unparseable_share,
    )


def seats(policy: int = 2, grm: int = 2, learner: int = 1, elastic: bool = False) -> Placement:
    if elastic:
        pools = {"engines": PoolConfig(slots=policy, elastic=True), "train": PoolConfig(slots=learner)}
        roles = {"policy": RoleConfig(pool="engines"), "grm": RoleConfig(pool="engines")}
    else:
        pools = {"p": PoolConfig(slots=policy), "g": PoolConfig(slots=grm), "train": PoolConfig(slots=learner)}
        roles = {"policy": RoleConfig(pool="p", replicas=policy), "grm": RoleConfig(pool="g", replicas=grm)}
    roles["learner"] = RoleConfig(pool="train", replicas=learner)
    return place(PlacementConfig(pools=pools, roles=roles), ("policy", "learner", "grm"), ("policy", "grm"))
