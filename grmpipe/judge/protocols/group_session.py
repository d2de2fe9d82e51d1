"""What the judge sessions of all protocols have in common: a group's prompt, its rollouts, its principles."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from grmpipe.judge.grm import GrmPrompt
from grmpipe.judge.protocols.judge_context import JudgeContext
from grmpipe.judge.protocols.principles import Principles
from grmpipe.types import Failed, JudgeReport, JudgeTask, Prompt, Rollout


class GroupSession(ABC):
    """The judge session of a protocol."""

    def __init__(self, context: JudgeContext, prompt: Prompt, group_id: str, size: int) -> None:
        self._context = context
        self._prompt = prompt
        self._group_id = group_id
        self._size = size
        self._principles = Principles(context.client, context.principles_template, prompt, group_id)
        self._rollouts: dict[int, Rollout] = {}

    def begin(self) -> Sequence[JudgeTask]:
        return self._principles.judge_tasks()

    @abstractmethod
    def add(self, rollout: Rollout) -> Sequence[JudgeTask]: ...

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        principles = await self._principles.text(priority)
        return await self._judge(judge_task, principles, priority) if judge_task.members else {}

    async def _prompt_for(self, order: Sequence[int], principles: str | Failed | None) -> GrmPrompt | Failed:
        """The GRM's prompt for whole rollouts next to each other, or why there is none."""
        if isinstance(principles, Failed):
            return principles
        responses = [self._context.show_rollout(self._prompt, self._rollouts[sibling]) for sibling in order]
        return await self._context.prompt(self._prompt, responses, principles)

    @abstractmethod
    async def _judge(
        self, judge_task: JudgeTask, principles: str | Failed | None, priority: int
    ) -> Mapping[int, JudgeReport]:
        """Do a judge task that has members. principles: the group's, or why there are none."""
