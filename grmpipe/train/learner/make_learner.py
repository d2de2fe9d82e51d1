"""How the driver has a learner made in another process. Imports no torch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from grmpipe.config.train import TRAIN_BACKENDS
from grmpipe.train.learner.learner_spec import LearnerSpec

if TYPE_CHECKING:
    from grmpipe.train.learner.backend import LearnerRank
    from grmpipe.train.learner.offload import OffloadingLearner


def make_learner(spec: LearnerSpec, rank: int, world_size: int, init_method: str | None) -> LearnerRank:
    """A rank by the backend of `train.backend`."""
    make = cast("Callable[..., LearnerRank]", TRAIN_BACKENDS.find_object(spec.train.backend))
    return make(spec, rank, world_size, init_method)


def make_offloading_learner(
    spec: LearnerSpec, rank: int, world_size: int, init_method: str | None
) -> OffloadingLearner:
    from grmpipe.train.learner.offload import OffloadingLearner

    return OffloadingLearner(spec, rank, world_size, init_method)
