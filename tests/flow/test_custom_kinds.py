"""A user's own loss, estimator, environment, judge protocol and backend: a run with all of them; what is refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from grmpipe.config.run_config import ConfigError

SOURCE = """
import functools
import inspect
import types

import numpy as np

from grmpipe.algorithm.advantages import outcomes, over_tokens
from grmpipe.algorithm.losses import PolicyLoss
from grmpipe.algorithm.parts import EstimatorKind
from grmpipe.config.judge_protocols import JudgeProtocol
from grmpipe.envs.env import Observation, Opening
from grmpipe.judge.protocols.pointwise import PointwiseSession
from grmpipe.train.learner.backend import LearnerRank, SendsWeights
from grmpipe.train.learner.learner import Learner

CALLED = set()  # in the driver


def weighted(scored, algorithm):
    loss_T = -algorithm.options["weight"] * scored.advantages_T * scored.logprobs_T
    return PolicyLoss(loss_T=loss_T, clipped_T=loss_T.new_ones(loss_T.shape))


def ranks(groups, algorithm):
    CALLED.add(f"estimator of {len(groups)} groups")
    return [over_tokens(group, np.linspace(-1, 1, len(group))[outcomes(group).argsort().argsort()]) for group in groups]


RANKS = EstimatorKind(function=ranks, need="batch")


def summed(scored, algorithm):
    return PolicyLoss(loss_T=scored.logprobs_T.sum(), clipped_T=scored.logprobs_T.new_zeros(()))


def detached(scored, algorithm):
    return PolicyLoss(loss_T=scored.logprobs_T.detach(), clipped_T=scored.loss_mask_T)


def logarithmic(scored, algorithm):
    return PolicyLoss(loss_T=scored.logprobs_T.log(), clipped_T=scored.loss_mask_T)


def crashing(scored, algorithm):
    return scored.rewards


def first_only(group, algorithm):
    return over_tokens(group[:1], outcomes(group))


def unweighted(drift, algorithm):
    return 1.0


def alone(scored):
    return scored


def last_word(text, reference):
    return text.split()[-1] == reference


def percent(text, reference):
    return 54


class Echo:
    def __init__(self, ending):
        CALLED.add(f"env {ending}")

    async def open(self, episode):
        return Opening(messages=episode.prompt.messages)

    async def step(self, action):
        return Observation(done=True)

    async def close(self):
        CALLED.add("closed")


class Session(PointwiseSession):
    def begin(self):
        CALLED.add("protocol")
        return super().begin()


class Backend:
    # Has the methods of LearnerRank and no others; each passes its call on.

    def __init__(self, spec, rank, world_size, init_method):
        learner = Learner(spec, rank, world_size, init_method)
        self.sender = types.SimpleNamespace(**self._calls_of(SendsWeights, learner.sender))
        vars(self).update(self._calls_of(LearnerRank, learner))

    def _calls_of(self, protocol, part):
        names = [name for name, what in vars(protocol).items() if name[0] != "_" and inspect.isfunction(what)]
        return {name: functools.partial(self._call, name, getattr(part, name)) for name in names}

    def _call(self, name, method, *args):
        CALLED.add(f"backend {name}")
        return method(*args)


PROTOCOL = JudgeProtocol(session="users_kinds.Session", early_stops=("relaxed",))
"""


@pytest.fixture
def users_module(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is importable in this process."""
    folder = tmp_path_factory.mktemp("users")
    (folder / "users_kinds.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(folder))


def test_a_run_with_the_users_own_kinds(users_module: None, small_run: Callable) -> None:
    files = small_run(
        "train.num_steps=1",
        "algorithm.loss=users_kinds.weighted",
        "+algorithm.options.weight=0.5",
        "algorithm.estimator=users_kinds.RANKS",
        "env=custom",
        "env.target=users_kinds.Echo",
        "+env.options.ending=soon",
        "judge.protocol=users_kinds.PROTOCOL",
        "train.backend=users_kinds.Backend",
    )
    assert files.summary["status"] == "completed"
    called = importlib.import_module("users_kinds").CALLED
    assert {"estimator of 4 groups", "env soon", "closed", "protocol", "backend step", "backend bucket"} <= called
    (step,) = files.steps()
    assert step["train/clip_share"] == 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.loss=nowhere.loss", r"^algorithm\.loss: nowhere can't be imported .*PYTHONPATH"),
        ("algorithm.loss=users_kinds.los", r"^algorithm\.loss: the module users_kinds has no los$"),
        ("algorithm.loss=users_kinds.CALLED", r"^algorithm\.loss: .* takes \(scored, algorithm\), and is a set"),
        ("algorithm.loss=users_kinds.alone", r"^algorithm\.loss: .* takes \(scored, algorithm\): too many"),
        ("algorithm.loss=users_kinds.summed", r"^algorithm\.loss: .*summed \(.*:\d+\) gave a loss_T of shape \(\)"),
        ("algorithm.loss=users_kinds.detached", r"^algorithm\.loss: the loss has no gradient; compute it from"),
        ("algorithm.loss=users_kinds.logarithmic", r"^algorithm\.loss: on a made batch the loss is nan"),
        (
            "algorithm.loss=users_kinds.crashing",
            r"^algorithm\.loss: on a made batch it raised AttributeError: .* 'rewards' \(.*users_kinds\.py:\d+\)",
        ),
        ("algorithm.estimator=users_kinds.first_only", r"^algorithm\.estimator: on a made batch it raised ValueError"),
        ("algorithm.correction=users_kinds.unweighted", r"^algorithm\.correction: .* returned 1\.0; return a tensor"),
        ("algorithm.loss=hinge", r"^algorithm\.loss: unknown value 'hinge'; known: ppo_clip, .* dotted path"),
        ("algorithm.estimator=users_kinds.alone", r"^algorithm\.estimator: .* takes \(group, algorithm\): too many"),
        (
            "judge.protocol=users_kinds.alone",
            r"^judge\.protocol: .* takes \(context, prompt, group_id, size\): too many",
        ),
        (
            "judge=rule judge.rule=users_kinds.last_word",
            r"^judge\.rule: users_kinds\.last_word \(.*:\d+\) raised IndexError: .* \(.*:\d+\); .* the empty text",
        ),
        (
            "judge=rule judge.rule=users_kinds.percent",
            r"^judge\.rule: users_kinds\.percent \(.*:\d+\) returned 54; return True or False, or a number from 0 to 1",
        ),
        ("judge.protocol=users_kinds.Judge", r"^judge\.protocol: the module users_kinds has no Judge"),
        ("train.backend=users_kinds.alone", r"^train\.backend: .* takes \(spec, rank, world_size, init_method\)"),
        ("train.backend=megatron", r"^train\.backend: unknown value 'megatron'; known: fsdp2; .* dotted path"),
        (
            "train.backend=users_kinds.Backend placement=one_gpu_time_shared",
            r"^train\.backend: .* can't give its memory .*train\.backend=fsdp2",
        ),
        ("env=custom", r"^env\.target: is empty; for kind=custom type env\.target="),
        ("env.target=users_kinds.Echo", r"^env\.target: is for env\.kind=custom or workflow; type that"),
        (
            "env=custom env.target=users_kinds.alone",
            r"^env\.target: users_kinds\.alone is no env: it needs `async",
        ),
        ("env=custom env.target=users_kinds.Echo", r"^env\.options: .* can't be made with {}: .*ending"),
        ("env=custom env.target=users_kinds.Echo task=simulate", r"^env\.kind: task=simulate knows only single turns"),
    ],
)
def test_a_custom_kind_that_cant_be_used_is_refused_by_its_key(
    users_module: None, small_run: Callable, override: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        small_run(*override.split())
