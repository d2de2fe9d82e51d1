"""A policy that judges itself and learns to: judging tasks among the run's prompts, each a group of its own.

    place in the order of the prompts
        |-> a prompt of the run     -> its rollouts  -> judged by the policy -> rewards --|-> advantages, by group
        |-> a share: a judging task -> judgements    -> compared with labels -> rewards --|-> one batch, one step

One policy, one flow, one learner. SPARK (github.com/InternLM/Spark at bc47b937, openrlhf/trainer/ppo_trainer.py) makes
batches of prompts and batches of its judging tasks by turns; here they share every batch, as in URPO.
"""

import dataclasses
from collections.abc import Callable, Sequence

from grmpipe.config.keys.entry_names import POLICY
from grmpipe.data.stream import NothingToJudge, PromptStream
from grmpipe.envs.play import RolloutRequest
from grmpipe.judge.kinds.labels import LabelReward
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.pipeline.interfaces import PipelineComponents
from grmpipe.run.features.cotrain.cotraining import make_judging_tasks
from grmpipe.run.features.cotrain.judging_tasks import JudgingTaskStream, grm_play, grm_too_long
from grmpipe.run.prepare import Prepared
from grmpipe.run.run_model import RunModel
from grmpipe.types import Judge, JudgeSession, Prompt, Rollout

SOURCE = "self_judging"  # of these judging tasks, by which people find them


class MixedPrompts:
    """The run's prompts in their order, and among them judging tasks: which place is whose depends on the place alone,
    so that a resume finds the same. No prompt is left out for a judging task.
    """

    def __init__(self, prompts: PromptStream, judging_tasks: JudgingTaskStream, share: float) -> None:
        """share: of the places, those of judging tasks."""
        self._prompts, self._judging_tasks, self._share = prompts, judging_tasks, share

    def at(self, prompt_index: int) -> Prompt:
        """Raises EndOfData after the last prompt, and NothingToJudge at a place whose judging task can't be made."""
        before, with_this = (int(count * self._share) for count in (prompt_index, prompt_index + 1))
        if before == with_this:
            return self._prompts.at(prompt_index - before)
        if not self._judging_tasks.has_balance:
            raise NothingToJudge
        return dataclasses.replace(self._judging_tasks.at(before), source=SOURCE, self_judging=True)


class SelfJudging:
    """The parts of the policy's flow for prompts and judging tasks."""

    def __init__(self, prepared: Prepared, policy: RunModel) -> None:
        config = prepared.config
        judge = config.judging.find_training_judge(POLICY)
        self._may_ask = config.may_ask
        self._judging_tasks = make_judging_tasks(prepared, POLICY)
        self._play = grm_play(judge, policy.files, policy.router)
        self._labels = PointwiseAdapter(LabelReward(judge))
        self._too_long = grm_too_long(judge, policy.files)
        self.prompts = MixedPrompts(prepared.prompts, self._judging_tasks, config.self_judging_share)

    def keep(self, rollouts: Sequence[tuple[Prompt, Rollout]]) -> None:
        """Make judging tasks of these rollouts, where the policy judges their prompts and a rule knows the truth."""
        for prompt, rollout in rollouts:
            if not prompt.self_judging and self._may_ask(POLICY, prompt.source):
                self._judging_tasks.add(prompt, rollout)

    def join(self, components: PipelineComponents) -> PipelineComponents:
        """The components of the flow, each of which does for judging tasks what is theirs."""
        play, too_long = components.play, components.too_long

        async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
            if prompt.self_judging:
                return await self._play(request, prompt, on_first_token)
            rollout = await play(request, prompt, on_first_token)
            self.keep([(prompt, rollout)])
            return rollout

        return dataclasses.replace(
            components,
            prompts=self.prompts,
            too_long=lambda prompt: (self._too_long if prompt.self_judging else too_long)(prompt),
            play=played,
            judge=JudgeOrLabels(components.judge, self._labels),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class JudgeOrLabels:
    """The judge of the run; of judging tasks their labels."""

    judge: Judge
    labels: Judge

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        return (self.labels if prompt.self_judging else self.judge).open(prompt, group_id, size)
