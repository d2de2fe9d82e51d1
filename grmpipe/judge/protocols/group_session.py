"""What the judge sessions of all protocols have in common: their judge, a group's prompt, rollouts and principles."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.judge.calibration import Calibration
from grmpipe.judge.evolving_rubric import EvolvingRubric
from grmpipe.judge.grm import GrmClient, GrmPrompt
from grmpipe.judge.prompt import JudgePrompt, PrinciplesPrompt, with_texts
from grmpipe.judge.protocols.sampled_judgements import Noise
from grmpipe.judge.trajectory import Trajectory, make_trajectory, note_truncation, truncate_to_fit
from grmpipe.judge.verdict import make_failure
from grmpipe.judge.votes import JudgeVote
from grmpipe.models.chat.chat_template import off_loop_if_long
from grmpipe.models.types import Completion
from grmpipe.types import Criterion, Failed, FailedJudgement, JudgeReport, JudgeTask, Prompt, Rollout

Decode = Callable[[Sequence[int]], str]  # tokens -> their text


class Principles:
    """The principles of one group: one text for all siblings. The first caller requests it, the others wait for it; so
    no limit of concurrency can deadlock.

    A failure isn't kept: the next caller tries again, with other seeds. A greedy judge's is: it would fail again.

    template: asks for them; None: they are part of each judgement, and no text is written before.
    """

    def __init__(self, client: GrmClient, template: PrinciplesPrompt | None, prompt: Prompt, group_id: str) -> None:
        self._client = client
        self._template = template
        self._prompt = prompt
        self._group_id = group_id
        self._writing = asyncio.Lock()
        self._written: Completion | None = None
        self._unwritable: FailedJudgement | None = None
        self._num_tries = 0
        self._unreported: Completion | None = None

    def judge_tasks(self) -> Sequence[JudgeTask]:
        """Judge tasks to do before any rollout has ended."""
        return () if self._template is None else (JudgeTask(members=()),)

    async def text(self, priority: int) -> str | Failed | None:
        """The text for the judge's prompts. None if there is none to show."""
        if self._template is None:
            return None
        async with self._writing:
            if self._unwritable is not None:
                return self._unwritable
            if self._written is None:
                answer = await self._write(self._template, priority)
                if isinstance(answer, FailedJudgement) and self._client.is_greedy:
                    self._unwritable = answer
                if isinstance(answer, Failed):
                    return answer
                self._written = self._unreported = answer
        return self._written.answer.strip()

    def add_to(self, report: JudgeReport) -> JudgeReport:
        """The report with the completion that wrote the principles, if no earlier report had it."""
        unreported, self._unreported = self._unreported, None
        return report if unreported is None else replace(report, principles=unreported)

    async def _write(self, template: PrinciplesPrompt, priority: int) -> Completion | Failed:
        try:
            asked = with_texts(self._prompt, self._client.grm.escape_text)
            asked_for = self._client.grm.prompt(template.render(asked))
        except ValueError as error:
            return make_failure("refused", str(error))
        room = self._client.room_for_principles
        if room is not None and asked_for.num_tokens > room:
            return make_failure("too_long", f"principles: {asked_for.num_tokens} tokens; the limit is {room}")
        name = f"{self._group_id}/principles/{self._num_tries}"
        self._num_tries += 1
        return await self._client.text(name, self._group_id, asked_for, priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeContext:
    """Shared parts of one judge. `decode`: the policy's tokens -> text, for steps. `calibration`: of a judge of pairs,
    whose votes on a pair it turns into the probability that a response wins it. `evolving`: the rubric, if it changes
    in the run.
    """

    client: GrmClient
    config: JudgeConfig
    template: JudgePrompt
    principles_template: PrinciplesPrompt | None  # None: principles are part of each judgement
    vote: JudgeVote
    decode: Decode | None
    seed: int
    noise: Noise = field(default_factory=Noise)
    calibration: Calibration | None = None
    evolving: EvolvingRubric | None = None

    @property
    def scale(self) -> Scale:
        return self.config.scale

    def show_rollout(self, prompt: Prompt, rollout: Rollout) -> Trajectory:
        """What the judge sees of a rollout: `judge.format.show_thoughts`, `judge.format.show_truncation`."""
        shown = make_trajectory(prompt, rollout, thoughts=self.config.format.show_thoughts)
        return note_truncation(shown, rollout) if self.config.format.show_truncation else shown

    async def prompt(
        self,
        prompt: Prompt,
        responses: Sequence[Trajectory],
        principles: str | None,
        criteria: Sequence[Criterion] | None = None,
        *,
        shorten: bool = True,
        state: bytes = b"",
    ) -> GrmPrompt | Failed:
        """The GRM's prompt for some responses, or a failure: refused or too_long.

        criteria: those that it is asked about; None: all of the rubric. shorten: whether `judge.format.truncation`
        holds; else a long response is too long. state: the rollout's final one, for the judge's tools.
        """
        if self.config.tools.state and not state:
            return make_failure(
                "refused",
                f"the rollout has no final state, which {self.config.key}.tools.state=true reads: it was recorded "
                "without, or played in no environment",
            )
        truncation = self.config.format.truncation if shorten else "error"
        asked = with_texts(prompt, self.client.grm.escape_text)

        def render(shown: Sequence[Trajectory]) -> GrmPrompt:
            spelt = [trajectory.change_texts(self.client.grm.escape_text) for trajectory in shown]
            return self.client.grm.prompt(self.template.render(asked, *spelt, principles=principles, criteria=criteria))

        try:
            made = await off_loop_if_long(
                sum(len(passage.text) for response in responses for passage in response.passages),
                partial(truncate_to_fit, render, responses, self.client.room, truncation),
            )
        except ValueError as error:
            return make_failure("refused", str(error))
        if isinstance(made, str):
            return make_failure("too_long", f"{self.client.grm.name}: {made}")
        return replace(made, state=state) if self.config.tools.state else made


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
