"""Refused before a run: ranks that form no meshes, experts that nobody divides or records, names no engine knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import MixtralConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grmpipe.capacity.plan.run_facts import collect_facts
from grmpipe.config.io.yaml_io import build_config
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.models.lm import checkpoint_names
from grmpipe.models.settings import ParallelConfig
from grmpipe.roles.learners import (
    check_divides,
    check_experts,
    check_records_experts,
    check_weight_names,
)
from grmpipe.roles.role_placement import seat_roles
from grmpipe.roles.roles import LearnerRole, Model, resolve_roles
from grmpipe.run.prepare import prepare
from grmpipe.run.tasks.train_meta_rm import check_shares_no_samples
from grmpipe.scheduler.placement import Placement, place
from grmpipe.tiny.resolve import SHIPPED

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
         "vocab_size": 32, "intermediate_size": 32}  # fmt: skip


def config(ranks: int, **parallel: int) -> RunConfig:
    placement = {
        "pools": {"all": {"slots": ranks}},
        "roles": {"policy": {"pool": "all"}, "learner": {"pool": "all", "replicas": ranks}},
    }
    return build_config(
        {
            "cluster": {"kind": "ray"},
            "placement": placement,
            "judge": {"kind": "rule"},
            "data": {"num_prompts": 20},
            "train": {"parallel": parallel},
        },
    )


def test_copies_and_shared_samples_must_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"^train\.parallel\.dp_replicate: 2 copies .* there are 3"):
        seat_roles(config(3, dp_replicate=2))
    with pytest.raises(ConfigError, match=r"^train\.parallel\.cp: 4 doesn't divide the 2 ranks of one copy"):
        seat_roles(config(4, dp_replicate=2, cp=4))
    seat_roles(config(4, dp_replicate=2, cp=2))


@pytest.mark.parametrize("check", [prepare, collect_facts])
def test_ranks_that_cannot_divide_the_query_heads_are_refused(check) -> None:
    """The shipped policy has three."""
    assert config(1).policy.path == "tiny://policy" and SHIPPED.is_dir()
    with pytest.raises(ConfigError, match=r"^train\.parallel\.cp: 2 ranks can't divide the 3 query heads .*cp=1$"):
        check(config(2, cp=2))


def with_grm_learner(ranks: int, fp32_router: bool = False, **parallel: int) -> RunConfig:
    """A run that trains its GRM on ranks of their own."""
    base = config(1)
    roles = {"policy": {"pool": "all"}, "learner": {"pool": "all"}, "grm": {"pool": "all"}}
    placement = {
        "pools": {"all": {"slots": ranks}},
        "roles": roles | {"grm_learner": {"pool": "all", "replicas": ranks}},
    }
    return build_config(
        {
            "cluster": {"kind": base.cluster.kind},
            "placement": placement,
            "data": {"num_prompts": 20},
            "grm": {"train": {"enabled": True, "parallel": parallel}},
            "train": {"fp32_modules": ["router"] if fp32_router else []},
        },
    )


def test_the_ranks_of_a_grm_in_training_are_grouped_as_its_own_section_says() -> None:
    with pytest.raises(ConfigError, match=r"^grm\.train\.parallel\.dp_replicate: 2 copies .* there are 3"):
        seat_roles(with_grm_learner(3, dp_replicate=2))
    seat_roles(with_grm_learner(4, dp_replicate=2, cp=2))
    with pytest.raises(
        ConfigError, match=r"^grm\.train\.parallel\.cp: 2 ranks can't divide the 3 query heads of grm\.path"
    ):
        prepare(with_grm_learner(2, cp=2))
    with pytest.raises(ConfigError, match=r"^grm\.train\.parallel\.ep: .* type 1$"):
        prepare(with_grm_learner(2, ep=2))


def learner(name: str, run: RunConfig) -> LearnerRole:
    return resolve_roles(run, place(run.placement, run.roles, run.served, run.learners)).learners[name]


def test_a_dense_grm_may_learn_next_to_a_mixture_with_routers_in_float32() -> None:
    run = with_grm_learner(2, fp32_router=True)
    check_experts(learner("grm_learner", run), str(SHIPPED / "grm"))
    with pytest.raises(ConfigError, match=r"^train\.fp32_modules: .* leave router out$"):
        check_experts(learner("learner", run), str(SHIPPED / "policy"))


def test_the_ranks_of_a_critic_are_grouped_as_its_own_section_says(tmp_path: Path) -> None:
    Qwen3Config(**SMALL).save_pretrained(tmp_path)
    critic = LearnerRole(name="critic", key="critic", parallel=ParallelConfig(cp=4), has_scalar_head=True)
    with pytest.raises(ConfigError, match=r"^critic\.parallel\.cp: 4 .* 2 query heads of critic\.path .*cp=2$"):
        check_divides(critic, "critic", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^critic\.parallel\.ep: a 'qwen3' model .* type 1$"):
        check_experts(replace(critic, parallel=ParallelConfig(ep=2)), str(tmp_path))


def test_the_learner_and_a_critic_are_grouped_each_by_its_own_section() -> None:
    roles = {role: {"pool": "all"} for role in ("policy", "learner", "critic")}
    sections = {"judge": {"kind": "rule"}, "critic": {"enabled": True, "parallel": {"ep": 2}}}
    placement = {"pools": {"all": {"slots": 2}}, "roles": roles}
    run = build_config({"placement": placement, "algorithm": {"estimator": "gae"}, **sections})
    found = [(one.parallel.ep, one.has_scalar_head) for one in (learner("learner", run), learner("critic", run))]
    assert found == [(1, False), (2, True)]


def test_ranks_that_divide_the_query_heads_may_be_planned() -> None:
    assert collect_facts(config(3, cp=3)).config.train.max_packed_tokens == 3 * 4096


def test_ranks_of_a_scalar_head_cannot_share_samples() -> None:
    with pytest.raises(ConfigError, match=r"^train\.parallel\.cp: ranks of a model with a scalar head"):
        check_shares_no_samples(ParallelConfig(cp=2))
    check_shares_no_samples(ParallelConfig(dp_replicate=2))


def divided(ep: int) -> LearnerRole:
    return LearnerRole(name="learner", key="train", parallel=ParallelConfig(ep=ep))


def test_a_dense_model_has_no_experts_to_divide(tmp_path: Path) -> None:
    Qwen3Config(**SMALL).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^train\.parallel\.ep: a 'qwen3' model .* type 1$"):
        check_experts(divided(2), str(tmp_path))
    check_experts(divided(1), str(tmp_path))


def test_ranks_divide_experts_evenly(tmp_path: Path) -> None:
    Qwen3MoeConfig(**SMALL, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8).save_pretrained(tmp_path)
    check_experts(divided(3), str(tmp_path))
    with pytest.raises(ConfigError, match=r"^train\.parallel\.ep: 4 ranks can't divide 6 experts"):
        check_experts(divided(4), str(tmp_path))
    MixtralConfig(**SMALL, num_local_experts=4).save_pretrained(tmp_path)
    check_experts(divided(4), str(tmp_path))


def test_families_with_other_experts_are_refused_by_name(tmp_path: Path) -> None:
    shape = {**SMALL, "n_routed_experts": 4, "moe_intermediate_size": 8, "first_k_dense_replace": 0}
    CONFIG_MAPPING["glm4_moe"](**shape).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^train\.parallel\.ep: .*'glm4_moe' .*\(Glm4MoeExperts\).*MixtralExperts"):
        check_experts(divided(2), str(tmp_path))


ROLES = ("policy", "learner", "grm")


def check_replay(engine: str, resource: str, **options: object) -> None:
    pools = {role: {"slots": 1, "resource": resource} for role in ROLES}
    placement = {"pools": pools, "roles": {role: {"pool": role} for role in ROLES}}
    policy = {"engine": engine, "engine_options": options}
    values = {"cluster": {"kind": "inprocess"}, "placement": placement, "policy": policy}
    config = build_config(values | {"algorithm": {"router_replay": "rollout"}})
    check_records_experts(resolve_roles(config, place(config.placement, config.roles)).served["policy"])


@pytest.mark.parametrize(
    ("engine", "resource", "why"),
    [("sglang", "gpu", "engine=sglang doesn't report them"), ("vllm", "cpu", "vLLM reports them only on a GPU")],
)
def test_engine_that_reports_no_experts_is_refused(engine: str, resource: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^algorithm\.router_replay: .*{why}; type policy\.engine=embedded"):
        check_replay(engine, resource)
    check_replay("embedded", resource)
    check_replay("vllm", "gpu")


def test_vllm_keeps_them_with_its_prefix_cache() -> None:
    key = r"policy\.engine_options\.options\.enable_prefix_caching"
    with pytest.raises(ConfigError, match=rf"^{key}: .* type {key}=true"):
        check_replay("vllm", "gpu", options={"enable_prefix_caching": False})


def check_names(path: Path, engine: str) -> None:
    config = build_config({"cluster": {"kind": "inprocess"}, "policy": {"engine": engine}})
    role = resolve_roles(config, Placement(pools={}, seats={})).served["policy"]
    check_weight_names(Model(name="policy", path=str(path), renderer=None, context_tokens=64), role)


def test_a_family_that_only_the_embedded_engine_can_be_sent_is_refused_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Qwen3MoeConfig(
        hidden_size=16, num_hidden_layers=1, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        vocab_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8, architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    check_names(tmp_path, "vllm")
    monkeypatch.setattr(
        checkpoint_names, "revert_weight_conversion", lambda model, state: {"x": next(iter(state.values()))}
    )
    with pytest.raises(
        ConfigError, match=r"^policy\.engine: the weights of a 'qwen3_moe' model .* type engine=embedded"
    ):
        check_names(tmp_path, "sglang")
    check_names(tmp_path, "embedded")
