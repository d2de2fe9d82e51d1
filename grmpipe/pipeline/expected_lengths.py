"""How many tokens a prompt's rollouts will probably sample, by those that ended before in this run. Pure."""

from grmpipe.types import Prompt, Rollout

WEIGHT_OF_LATEST = 1 / 8  # in a running mean, once it is of as many rollouts: a policy in training changes


class ExpectedLengths:
    """Running means of rollouts: of each prompt, of each source, and of all."""

    def __init__(self) -> None:
        self._prompts: dict[str, RunningMean] = {}  # by prompt_id
        self._sources: dict[str, RunningMean] = {}
        self._all = RunningMean()

    def __getitem__(self, prompt: Prompt) -> float:
        """Tokens: the mean of the prompt's own rollouts, before these come of its source's, then of all."""
        known = self._prompts.get(prompt.prompt_id) or self._sources.get(prompt.source) or self._all
        return known.mean

    def record(self, prompt: Prompt, rollout: Rollout) -> None:
        """A rollout ended."""
        for means, key in ((self._prompts, prompt.prompt_id), (self._sources, prompt.source)):
            means.setdefault(key, RunningMean()).add(rollout.num_sampled_tokens)
        self._all.add(rollout.num_sampled_tokens)


class RunningMean:
    """A mean that forgets; 0 without any value."""

    __slots__ = ("count", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.mean += max(1 / self.count, WEIGHT_OF_LATEST) * (value - self.mean)
