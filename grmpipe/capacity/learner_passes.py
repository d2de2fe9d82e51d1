"""The passes of a learner over a batch beside forward and backward, by the settings of its algorithm."""

from dataclasses import dataclass

from grmpipe.config.train import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What a batch takes beside one forward and backward pass over each micro-batch.

    reference_in_loss: the reference passes each micro-batch within `accumulate`. num_separate: passes without gradients
    that are calls of their own: of the reference for a KL in the reward, of the policy for pi_old. num_updates:
    optimizer steps.
    """

    reference_in_loss: bool = False
    num_separate: int = 0
    num_updates: int = 1

    @property
    def num_forward(self) -> int:
        """The passes without gradients over each packed token."""
        return self.num_separate + self.reference_in_loss


def count_passes(algorithm: AlgorithmConfig, groups_per_batch: int) -> Passes:
    """The passes of the learner that trains with these settings (BatchTrainer, Learner)."""
    has_reference = algorithm.kl_coefficient > 0
    num_updates = min(algorithm.updates_per_batch, groups_per_batch)
    has_old_pass = num_updates > 1 and algorithm.proximal == "recomputed"
    return Passes(
        reference_in_loss=has_reference and not algorithm.kl_in_reward,
        num_separate=(has_reference and algorithm.kl_in_reward) + has_old_pass,
        num_updates=num_updates,
    )
