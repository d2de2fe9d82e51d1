"""Settings of distillation: the models that teach the policy, and how it follows them. Frozen, checked."""

import functools
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grmpipe.models.bounds import Bounded, at_least, between_0_and_1, one_of

DEFAULT = "default"  # in place of a source: for prompts of all others
FORMS = ("loss", "advantage")
CRITIQUE, REFERENCE, BETTER_ANSWER = CONTEXT_FIELDS = ("critique", "reference", "better_answer")


@dataclass(frozen=True)
class DistillConfig(Bounded):
    """On-policy distillation (GKD, arXiv 2306.13649): the policy follows what other models give to its own tokens."""

    # Sources of prompts and the models that teach them, as in {math: qwen3_32b, default: general}, where models.<name>
    # are models of their own, policy is the policy itself, and default is for all other sources; null: nothing is
    # distilled.
    teachers: Any = None
    # Text that the teacher reads after the prompt and the policy doesn't, with {critique} of the judge, {reference} of
    # the row, {better_answer} of the sibling with the highest reward; a rollout without one of them isn't taught. null:
    # the teacher reads what the policy reads.
    context: str | None = None
    # Divergence to the teacher: 1 is the reverse KL(policy || teacher), 0 the forward KL(teacher || policy), between
    # them the generalized Jensen-Shannon divergence, as GKDConfig's beta in TRL.
    beta: float = between_0_and_1(1.0)
    # Most likely tokens of the teacher that are compared, all others as one; 0: only the sampled token, for beta=1.
    top_k: int = at_least(0, 0)
    # What the divergence is: a term of the loss, or an advantage of each token, -log(pi / teacher), added to that of
    # the rewards.
    form: str = one_of(FORMS, "loss")
    coefficient: float = at_least(0, 1.0)  # Weight of the divergence beside the rewards.
    # A rollout that its teacher couldn't score leaves its group like one without a verdict; false: it is trained on its
    # rewards alone.
    required: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teachers is not None and not is_map_of_names(self.teachers):
            raise ValueError(
                f"teachers: must be sources of prompts with names of models, got {self.teachers!r}; type "
                "'algorithm.distill.teachers={default: teacher}'"
            )
        unknown = self.context_fields - set(CONTEXT_FIELDS)
        if unknown:
            raise ValueError(
                f"context: unknown field {{{min(unknown)}}}; known are "
                f"{', '.join(f'{{{field}}}' for field in CONTEXT_FIELDS)}; braces of the text itself are written double"
            )
        if self.top_k == 0 and self.beta < 1:
            raise ValueError(
                f"top_k: beta={self.beta:g} needs the teacher's most likely tokens, and top_k=0 asks for none; type "
                "algorithm.distill.top_k=16, or algorithm.distill.beta=1"
            )
        if self.form == "advantage" and (self.top_k or self.beta < 1):
            raise ValueError(
                "form: an advantage is that of the sampled token, by the reverse KL; type algorithm.distill.top_k=0 "
                "and algorithm.distill.beta=1, or algorithm.distill.form=loss"
            )

    @functools.cached_property
    def context_fields(self) -> frozenset[str]:
        """What the teacher's context shows. Raises ValueError for braces that don't match."""
        try:
            return frozenset(name for _, name, _, _ in string.Formatter().parse(self.context or "") if name is not None)
        except ValueError as error:
            raise ValueError(f"context: {error}; braces of the text itself are written double") from None

    @property
    def by_source(self) -> Mapping[str, str]:
        """Source of prompts, or `default` -> the model that teaches it."""
        return self.teachers or {}

    def find_teacher(self, source: str) -> str | None:
        """The model that teaches the prompts of a source; None: none does."""
        return self.by_source.get(source, self.by_source.get(DEFAULT))


def is_map_of_names(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(name, str) for name in value.values())
