"""Which engines can return the experts that the sampler chose."""

from __future__ import annotations

import pytest

from grmpipe.config.io.yaml_io import config_of
from grmpipe.config.roles import resolve_roles
from grmpipe.config.run_config import ConfigError
from grmpipe.validate.router_replay import check_engine
from scheduler.placement import place

ROLES = ("policy", "learner", "grm")


def check(engine: str, resource: str, **options: bool) -> None:
    pools = {role: {"slots": 1, "resource": resource} for role in ROLES}
    placement = {"pools": pools, "roles": {role: {"pool": role} for role in ROLES}}
    policy = {"engine": engine, "engine_options": options}
    values = {"cluster": {"kind": "inprocess"}, "placement": placement, "policy": policy}
    config = config_of(values | {"algorithm": {"router_replay": "rollout"}})
    check_engine(resolve_roles(config, place(config.placement, config.roles)).served["policy"])


@pytest.mark.parametrize(
    ("engine", "resource", "why"),
    [("sglang", "gpu", "engine=sglang doesn't report them"), ("vllm", "cpu", "vLLM reports them only on a GPU")],
)
def test_who_does_not_tell_them_is_refused(engine: str, resource: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^algorithm\.router_replay: .*{why}; type policy\.engine=embedded"):
        check(engine, resource)
    check("embedded", resource)
    check("vllm", "gpu")


def test_vllm_keeps_them_with_its_prefix_cache() -> None:
    with pytest.raises(ConfigError, match=r"^policy\.engine_options\.prefix_caching: .* type .*prefix_caching=true"):
        check("vllm", "gpu", prefix_caching=False)
