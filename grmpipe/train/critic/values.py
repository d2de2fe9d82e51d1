"""Values of rollouts, computed while the judge works: once a group is rolled out."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from grmpipe.algorithm.rewards import Values
from grmpipe.train.batching.samples import rollout_key, select_judged
from grmpipe.train.critic.critic_ranks import CriticLearnerRanks
from grmpipe.train.critic.value_samples import make_sequences, values_of_samples
from grmpipe.train.scalar.scalar_batch import pack_sequences, plan_rounds
from grmpipe.types import JudgedGroup, Rollout


class ValueCache:
    """Consumes groups that are rolled out, produces their values. Waits for such groups, and for the critic.

    All values of a batch come from the critic as it is at the beginning of the batch. A step of the critic voids values
    of later groups, so only as many groups are valued in advance as the open batch has places left. Values missing when
    a group is taken are computed then.
    """

    def __init__(self, critic: CriticLearnerRanks, *, max_tokens: int, groups_per_batch: int) -> None:
        """max_tokens: packed tokens per batch."""
        self.num_asked = 0  # rollouts valued, repeats under a later version included
        self._critic = critic
        self._max_tokens = max_tokens
        self._groups_per_batch = groups_per_batch
        self._rolled_out: Callable[[], Sequence[Sequence[Rollout]]] = tuple  # from groups not taken
        self._known: dict[tuple[str, int], np.ndarray] = {}  # under the version at the beginning of the open batch
        self._num_taken = 0  # groups of the open batch
        self._resting = False  # the critic is making the steps that end a batch
        self._asking = asyncio.Lock()
        self._news = asyncio.Event()

    def watch(self, rolled_out: Callable[[], Sequence[Sequence[Rollout]]]) -> None:
        """Set where groups are found whose rollouts have all ended and that no batch has taken."""
        self._rolled_out = rolled_out

    def groups_changed(self) -> None:
        """Take note that there may be another such group."""
        self._news.set()

    async def run(self) -> None:
        """Compute values in advance, without end."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self._ask(self._due())

    async def take_values(self, group: JudgedGroup) -> Values:
        """The values of a group's siblings that have a verdict. Marks the group as taken into the open batch."""
        self._num_taken += 1
        rollouts = [rollout for rollout, _ in select_judged(group)]
        await self._ask(rollouts)
        return {rollout_key(rollout): self._known[rollout_key(rollout)] for rollout in rollouts}

    def knows(self, group: JudgedGroup) -> bool:
        """Whether all values of the group are known already."""
        return all(rollout_key(rollout) in self._known for rollout, _ in select_judged(group))

    def rest(self) -> None:
        """Mark that the critic begins to step: values of groups outside the open batch become void."""
        self._resting = True
        self._known = {}

    def resume(self) -> None:
        """Mark that the critic has stepped or the batch was dropped: the next batch begins."""
        self._resting = False
        self._num_taken = 0
        self._known = {}
        self._news.set()

    def _due(self) -> list[Rollout]:
        """Rollouts of the first groups, as many groups as the open batch still has places for."""
        if self._resting:
            return []
        places = max(0, self._groups_per_batch - self._num_taken)
        return [rollout for siblings in self._rolled_out()[:places] for rollout in siblings]

    async def _ask(self, rollouts: list[Rollout]) -> None:
        """Compute the values that are unknown. One call at a time, so that no value is computed twice."""
        async with self._asking:
            version = self._critic.version
            samples = [
                sample
                for rollout in rollouts
                if rollout_key(rollout) not in self._known
                for sample in make_sequences(rollout)
            ]
            lengths = [len(sample.token_ids) for sample in samples]
            scores: dict[int, np.ndarray] = {}
            for by_rank in plan_rounds(lengths, self._max_tokens, self._critic.dp_size):
                packed = tuple(pack_sequences([samples[index].token_ids for index in some]) for some in by_rank)
                for some, scores_T in zip(by_rank, await self._critic.scores(packed), strict=True):
                    ends = np.cumsum([lengths[index] for index in some])[:-1]
                    # Not strict: an idle rank has no samples but returns scores.
                    scores |= dict(zip(some, np.split(scores_T, ends), strict=False))
            if version == self._critic.version:
                self._known |= values_of_samples(samples, [scores[index] for index in range(len(samples))])
                self.num_asked += len({rollout_key(sample) for sample in samples})
