"""How far the open batch is. It reads the buffer and changes nothing."""

from dataclasses import dataclass

from grmpipe.pipeline.group_buffer import GroupBuffer
from grmpipe.pipeline.untaken_groups import UNTAKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """The rollouts and verdicts that the open batch has, with those of the groups that are nearest to fill it.

    siblings: rollouts of the whole batch. learner: as `StallTracker.learner_state`.
    """

    rollouts: int
    verdicts: int
    siblings: int
    learner: str | None


def measure_batch(buffer: GroupBuffer, learner: str | None) -> BatchProgress:
    others = sorted((group.num_done for group in buffer.groups.values() if group.state in UNTAKEN), reverse=True)
    done = [*(group.num_done for group in buffer.taken), *others[: buffer.places_left]]
    return BatchProgress(
        rollouts=sum(rollouts for _, rollouts in done),
        verdicts=sum(verdicts for verdicts, _ in done),
        siblings=buffer.batch_siblings,
        learner=learner,
    )
