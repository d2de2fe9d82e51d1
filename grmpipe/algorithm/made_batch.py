"""The user's own parts of an algorithm, each tried on a small made batch, before anything starts. Pure."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from grmpipe.algorithm.parts import KEY, estimate, estimator_named
from grmpipe.algorithm.rewards import Rewards
from grmpipe.algorithm.settings import AlgorithmSettings
from grmpipe.config.keys.dotted_path import is_dotted
from grmpipe.config.keys.user_code import describe_error
from grmpipe.types import BatchTotals

NUM_GROUPS = 2
LENGTHS = (3, 2)  # tokens of the rollouts
TOTALS = BatchTotals(num_loss_tokens=sum(LENGTHS), num_sequences=len(LENGTHS), num_groups=NUM_GROUPS, oldest_version=0)


def try_own_parts(algorithm: AlgorithmSettings, group_size: int, max_new_tokens: int) -> None:
    """Raises ValueError, which names the key, for a part of the user's own that raises, or returns what can't be
    trained on: a learner would find it out only after the engines have started and sampled a batch.

    group_size: siblings of a group, as an estimator gets them. max_new_tokens: as an aggregation gets it.
    """
    if is_dotted(algorithm.estimator):
        with refuse(KEY):
            estimate([make_group(group_size, algorithm) for _ in range(NUM_GROUPS)], algorithm)
    parts = {
        "loss": algorithm.loss,
        "proximal": algorithm.proximal,
        "correction": algorithm.correction,
        "kl_estimator": algorithm.kl_estimator,
        "aggregation": algorithm.aggregation,
        "rejections": " ".join(algorithm.rejections),
    }
    for key in (key for key, names in parts.items() if is_dotted(names)):
        try_loss(algorithm, key, max_new_tokens)


def make_group(size: int, algorithm: AlgorithmSettings) -> list[Rewards]:
    """Siblings with different rewards, each for its whole rollout; with values if the estimator needs them."""
    return [
        Rewards(
            num_tokens=(length := LENGTHS[sibling % len(LENGTHS)]),
            ends_K=(length,),
            values_K=(sibling / size,),
            expected_N=np.zeros(length) if estimator_named(algorithm.estimator).needs_critic else None,
            turn_ends_U=(length,),
            state_keys_U=("",),
        )
        for sibling in range(size)
    ]


def try_loss(algorithm: AlgorithmSettings, key: str, max_new_tokens: int) -> None:
    """The loss of two rollouts and its gradient, with one part of the user's and all others as they are by default."""
    import torch  # late: few runs have a part of their own, and each would wait seconds for it

    from grmpipe.algorithm.corrections import TokenLogprobs
    from grmpipe.algorithm.objective import Objective

    own, default = Objective.of(algorithm), Objective.of(AlgorithmSettings())
    objective = {
        "loss": replace(default, loss=own.loss),
        "proximal": replace(default, proximal=own.proximal),
        "correction": replace(default, correction=own.correction),
        "kl_estimator": replace(default, kl=own.kl),
        "aggregation": replace(default, aggregation=own.aggregation),
        "rejections": replace(default, rejections=own.rejections),
    }[key]
    current_T = torch.linspace(-2.0, -0.5, sum(LENGTHS), requires_grad=True)
    old_T = current_T.detach()
    logprobs = TokenLogprobs(
        current_T=current_T,
        entropy_T=-old_T,
        old_T=old_T,
        sampler_T=old_T - 0.01,
        reference_T=old_T + 0.01,
        ages_T=torch.arange(sum(LENGTHS)),
    )
    advantages_T = torch.tensor([1.0] * LENGTHS[0] + [-1.0] * LENGTHS[1])
    name = f"algorithm.{key}"
    with refuse(name):
        loss = replace(objective, algorithm=algorithm).sum_loss(
            logprobs, advantages_T, torch.ones_like(advantages_T), torch.tensor(LENGTHS)
        )
        denominator = objective.aggregation.denominator(TOTALS, max_new_tokens)
    if not denominator > 0:
        raise ValueError(f"{name}: the denominator must be above 0, got {denominator} for {TOTALS}")
    if not loss.total.requires_grad:
        raise ValueError(f"{name}: the loss has no gradient; compute it from scored.logprobs_T, without detach()")
    (gradients_T,) = torch.autograd.grad(loss.total, current_T)
    if not (loss.total.isfinite() and gradients_T.isfinite().all()):
        raise ValueError(
            f"{name}: on a made batch the loss is {loss.total.item():g}, and its gradients are {gradients_T.tolist()}"
        )


@contextmanager
def refuse(key: str) -> Iterator[None]:
    """Context: whatever the user's code raises becomes a ValueError that names the key, and the line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(f"{key}: "):
            raise  # by our checks of what it returned
        raise ValueError(f"{key}: on a made batch it raised {describe_error(error)}") from error
