"""Ranks that can't form the meshes of the configuration are refused before a run."""

from __future__ import annotations

import pytest

from grmpipe.capacity.plan.survey import survey_run
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.yaml_io import from_values
from grmpipe.validate.parallel import check_shares_no_samples
from grmpipe.validate.places import seat_roles
from grmpipe.validate.prepare import prepare
from models.tiny.resolve import SHIPPED


def config(ranks: int, **parallel: int) -> RunConfig:
    placement = {
        "pools": {"all": {"slots": ranks}},
        "roles": {"policy": {"pool": "all"}, "learner": {"pool": "all", "replicas": ranks}},
    }
    return from_values(
        RunConfig,
        {
            "cluster": {"kind": "ray"},
            "placement": placement,
            "judge": {"kind": "rule"},
            "data": {"num_prompts": 20},
            "train": {"parallel": parallel},
        },
    )


def no_progress(what: str, share: float) -> None:
    raise AssertionError(f"{what} is shipped and needn't be built")


def test_copies_and_shared_samples_must_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"^train\.parallel\.dp_replicate: 2 copies .* there are 3"):
        seat_roles(config(3, dp_replicate=2))
    with pytest.raises(ConfigError, match=r"^train\.parallel\.cp: 4 doesn't divide the 2 ranks of one copy"):
        seat_roles(config(4, dp_replicate=2, cp=4))
    seat_roles(config(4, dp_replicate=2, cp=2))


@pytest.mark.parametrize("check", [prepare, survey_run])
def test_ranks_that_cannot_divide_the_query_heads_are_refused(check) -> None:
    """The shipped policy has three."""
    assert config(1).policy.path == "tiny://policy" and SHIPPED.is_dir()
    with pytest.raises(ConfigError, match=r"^train\.parallel\.cp: 2 ranks can't divide the 3 query heads .*cp=1$"):
        check(config(2, cp=2), no_progress)


def test_ranks_that_divide_the_query_heads_may_be_planned() -> None:
    assert survey_run(config(3, cp=3), no_progress).config.train.max_packed_tokens == 3 * 4096


def test_ranks_of_a_scalar_head_cannot_share_samples() -> None:
    with pytest.raises(ConfigError, match=r"^train\.parallel\.cp: ranks of a model with a scalar head"):
        check_shares_no_samples(config(2, cp=2))
    check_shares_no_samples(config(2, dp_replicate=2))
