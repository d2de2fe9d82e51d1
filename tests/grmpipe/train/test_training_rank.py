"""The driver's calls of a rank in another process have plain data, and known errors."""

from __future__ import annotations

import pytest

from grmpipe.models.engines.scorer import ScalarScorer
from grmpipe.scheduler.processes.wire_types import Dialect, rebuild_error, remote_error
from grmpipe.train.critic.critic_learner import CriticLearner
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.offload import OffloadingLearner
from grmpipe.train.non_finite_gradients import NonFiniteGradients
from grmpipe.train.scalar.scalar_rank import ScalarLearner

RANKS = (Learner, OffloadingLearner, CriticLearner, ScalarLearner, ScalarScorer)


@pytest.mark.parametrize("kind", RANKS)
def test_all_calls_of_a_rank_can_travel_by_a_socket(kind: type) -> None:
    dialect = Dialect.of(kind)
    assert {"scores"} <= dialect.calls.keys() or {
        "accumulate",
        "step",
        "sender.bucket",
        "saved",
    } <= dialect.calls.keys()


@pytest.mark.parametrize("kind", RANKS[:4])
def test_driver_recognises_a_step_that_was_not_finite(kind: type) -> None:
    known = Dialect.of(kind).errors
    error = rebuild_error(remote_error(NonFiniteGradients(float("inf"), "critic.lr", ("g1", "g2")), known), known)
    assert isinstance(error, NonFiniteGradients)
    assert (error.norm, error.lr_key, error.group_ids) == (float("inf"), "critic.lr", ("g1", "g2"))
