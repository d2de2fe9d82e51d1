"""The next judging task of a GRM trained next to the policy: a stored one, or one of the run's rollouts. Judges
none.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from grmpipe.config.grm import GrmTrainConfig
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.model_training import ModelTraining
from grmpipe.config.run_config import RunConfig
from grmpipe.data.stream import PromptStream
from grmpipe.envs.play import Play, Player, RolloutRequest, play_single_turn
from grmpipe.envs.retry_episode import ActingEngine, free_after, with_attempts
from grmpipe.envs.thinking_budget import ReasoningEngine
from grmpipe.judge.composition.combine_verdicts import reaches
from grmpipe.judge.kinds.label_format import PartLabel
from grmpipe.judge.kinds.labels import JudgingTasks
from grmpipe.judge.kinds.rule import Rule
from grmpipe.judge.tool_grm import JudgeTools, make_limits
from grmpipe.judge.trajectory import make_trajectory
from grmpipe.models.chat.thinking import thinks
from grmpipe.models.seeds import derive_seed
from grmpipe.models.types import SamplingParams
from grmpipe.pipeline.interfaces import FlowConfig
from grmpipe.roles.roles import Model
from grmpipe.types import Prompt, Rollout

Own = Callable[[], Prompt]  # makes a judging task of a rollout
NAME_IN_SEEDS = "lesson"  # names a judging task in seeds and group ids: another name would change every sample
CHECK_S = 1.0  # between two checks whether further rollouts may come


@dataclass(slots=True)
class Recent:
    """The latest rollouts that their label calls right, and those that it calls wrong."""

    window: int
    right: deque[Own] = field(init=False)
    wrong: deque[Own] = field(init=False)

    def __post_init__(self) -> None:
        self.right, self.wrong = deque(maxlen=self.window), deque(maxlen=self.window)

    def of(self, right: bool) -> deque[Own]:
        return self.right if right else self.wrong

    @property
    def has_both(self) -> bool:
        return bool(self.right and self.wrong)


class JudgingTaskStream:
    """A stream of judging tasks. A share of `rollout_share` are the run's rollouts, right and wrong ones alternately,
    or what people have labelled so far; the others are stored judging tasks.

    They alternate because a judge that sees more wrong than right ones learns to reject; a judge that compares gets
    siblings of different labels instead. A judge that is asked about one criterion at a time gets those that are met
    and those that aren't of the same criterion: of all together it would learn which criteria are often met. Until
    there are rollouts of both kinds, stored judging tasks take their place; without stored ones, one kind is used only
    after the warm-up, if no rollouts of the other kind can come.
    """

    def __init__(
        self,
        judging_tasks: JudgingTasks,
        rule: Rule | None,
        stored: PromptStream | None,
        *,
        rollout_share: float,
        window: int,
        seed: int,
        pass_reward: float = 1.0,
        key: str = "grm.train",
    ) -> None:
        """rule: labels rollouts; None: others do.
        pass_reward: lowest grade of the rule, or reward by the judge that labels, that counts as right.
        key: the configuration's section of the GRM's learner, for errors.
        """
        self._pass_reward = pass_reward
        self._key = key
        self.tasks = judging_tasks
        self._rule = rule
        self._stored = stored
        self._share = rollout_share if stored is not None else 1.0
        self._recent: dict[str, Recent] = {}  # by what a task asks: a criterion; empty: a whole response
        self._window = window
        self._compared: deque[Prompt] = deque(maxlen=window)
        self._annotated: PromptStream | None = None
        self._seed = seed
        self._usable = asyncio.Event()
        if stored is not None:
            self._usable.set()

    @property
    def has_balance(self) -> bool:
        """Whether there are stored judging tasks, or right rollouts and wrong ones."""
        return self._stored is not None or bool(self._list_balanced())

    @property
    def is_usable(self) -> bool:
        """Whether there is a judging task."""
        return self._usable.is_set()

    def passes(self, reward: float) -> bool:
        """Whether a response of this reward, or this grade by the rule, counts as right."""
        return reaches(reward, self._pass_reward)

    def add(self, prompt: Prompt, rollout: Rollout) -> None:
        """Add an ended rollout. It is ignored if no rule knows its truth."""
        if self._rule is None or prompt.reference is None or self._share == 0:
            return
        try:
            grade = self._rule(rollout.answer, prompt.reference)
        except ValueError:  # for example a rubric, which the rule can't read
            return
        right = self.passes(grade)
        self._take(right, self._ask_later(prompt, rollout, self.tasks.label_side(right)))

    def add_judged(self, prompt: Prompt, rollout: Rollout, reward: float, score: float) -> None:
        """Add a rollout that another judge has judged. score: the reward on the scale of the judge that learns."""
        self._take(self.passes(reward), self._ask_later(prompt, rollout, self.tasks.label_score(score)))

    def add_task(self, right: bool, task: Prompt) -> None:
        """Add a task whose label another judge has given to parts of a rollout. right: whether all of them pass."""
        self._take(right, lambda: task, task.rubric[0].text if len(task.rubric) == 1 else "")

    def add_ranked(self, group_id: str, prompt: Prompt, rewards: Sequence[tuple[Rollout, float]]) -> None:
        """Add siblings that another judge has judged, for a judge that compares them."""
        thoughts = self.tasks.show_thoughts
        shown = [make_trajectory(prompt, rollout, thoughts=thoughts) for rollout, _ in rewards]
        self._compared += self.tasks.rank(group_id, prompt, shown, [reward for _, reward in rewards])
        if self._compared:
            self._usable.set()

    def replace_annotated(self, judging_tasks: Sequence[Prompt]) -> None:
        """Take these in place of the run's rollouts: all that people have labelled so far."""
        self._annotated = PromptStream(judging_tasks, seed=self._seed)
        self._usable.set()

    def _ask_later(self, prompt: Prompt, rollout: Rollout, label: PartLabel) -> Own:
        """Most rollouts are never asked about: their texts are made when they are."""

        def ask() -> Prompt:
            shown = make_trajectory(prompt, rollout, thoughts=self.tasks.show_thoughts)
            return self.tasks.ask(f"{rollout.group_id}/{rollout.sibling}", prompt, shown, label)

        return ask

    def _take(self, right: bool, own: Own, about: str = "") -> None:
        recent = self._recent.setdefault(about, Recent(self._window))
        recent.of(right).append(own)
        if recent.has_both:
            self._usable.set()

    def _list_balanced(self) -> list[Recent]:
        return [one for one in self._recent.values() if one.has_both]

    async def until_usable(self, *, may_come: Callable[[], bool], warm: Callable[[], bool]) -> None:
        """Return once there is a judging task. Raises ValueError if all rollouts before the end of the warm-up are of
        one kind.

        may_come: whether further rollouts may come before the GRM's next step. warm: whether its warm-up is over.
        """
        while not self._usable.is_set():
            if not may_come():
                if not (warm() and self._recent):
                    raise ValueError(self._why_unusable())
                self._usable.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._usable.wait(), CHECK_S)

    def _why_unusable(self) -> str:
        right, wrong = (sum(len(one.of(side)) for one in self._recent.values()) for side in (True, False))
        return (
            f"{self._key}.data_path: is null, and by judge.rule {right} of the first responses are right and {wrong} "
            "wrong, so that the judge would learn one answer; give labelled judgements, or a larger train.group_size"
        )

    def at(self, prompt_index: int) -> Prompt:
        before, own = (
            int(prompt_index * self._share),
            int((prompt_index + 1) * self._share) > int(prompt_index * self._share),
        )
        if own and self._annotated is not None:
            return self._annotated.at(before)
        balanced = self._list_balanced()
        if self._stored is not None and not (own and (balanced or self._compared)):
            return self._stored.at(prompt_index - before)
        seed = derive_seed(self._seed, f"{NAME_IN_SEEDS} {prompt_index}")
        if self._compared:
            return self._compared[seed % len(self._compared)]
        recent = (balanced or list(self._recent.values()))[before // 2 % max(1, len(balanced))]
        candidates = recent.of(before % 2 == 0 if balanced else bool(recent.right))
        assert candidates, "until_usable was waited for"
        return candidates[seed % len(candidates)]()


# -- the flow of a GRM that is trained: its settings, and how it plays -------------------------------------------------


def grm_flow(config: RunConfig, cotrain: GrmTrainConfig, judge: JudgeConfig, training: ModelTraining) -> FlowConfig:
    """The settings of the GRM's flow."""
    train = training.train
    return FlowConfig(
        num_steps=train.num_steps,
        groups_per_batch=train.groups_per_batch,
        group_size=train.group_size,
        min_valid_siblings=train.min_valid_siblings,
        max_staleness=train.max_staleness,
        group_deadline_s=config.rollout.group_deadline_s + judge.limits.timeout_s,
        rollout_concurrency=judge.limits.max_concurrency,
        judge_concurrency=judge.limits.max_concurrency,
        seed=config.seed,
        group_prefix=NAME_IN_SEEDS,
        rollout_max_failure_rate=config.rollout.max_failure_rate,
        pause_s=config.rollout.pause_s,
        max_zero_advantage_groups=int(cotrain.dynamic_sampling_batches * train.groups_per_batch),
        algorithm=training.algorithm,
    )


def grm_play(judge: JudgeConfig, grm: Model, engines: ActingEngine, tools: JudgeTools | None = None) -> Play:
    """One judgement of a judging task, sampled as in judging; with the judge's tools an episode."""
    renderer = grm.renderer
    params = SamplingParams(
        max_new_tokens=judge.max_new_tokens,
        temperature=judge.temperature,
        thinking=judge.make_thinking_budget(thinks=thinks(renderer.thinking)),
    )
    sampler = ReasoningEngine(engines, renderer)

    if tools is not None:
        limits, make_env = make_limits(judge, grm.context_tokens), tools.make_env
        player = Player(make_env=make_env, policy=sampler, renderer=renderer, params=params, limits=limits)
        return with_attempts(free_after(player.play, engines), attempts=1 + judge.limits.max_retries)

    async def judged(request: RolloutRequest, judging_task: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        return await play_single_turn(request, judging_task, sampler, renderer, params, on_first_token)

    return judged


def grm_too_long(judge: JudgeConfig, grm: Model) -> Callable[[Prompt], bool]:
    """A function: whether a judging task leaves no room for a critique in the GRM's window."""

    def check(judging_task: Prompt) -> bool:
        return len(grm.renderer.render(judging_task.messages)) + judge.max_new_tokens > grm.context_tokens

    return check
