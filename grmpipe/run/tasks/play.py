"""task=play: one episode on the console, in which a person, a script or the policy acts, and what the judge says of it.

Who acts takes the place of the policy's engine, so that all else is a run's own: chat template, environment, limits,
judge, journals. An environment can be tried before there is a policy for it.
"""

import asyncio
import contextlib
import json
import os
import select
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from grmpipe.config.io.key_errors import section
from grmpipe.config.keys.entry_names import POLICY
from grmpipe.config.keys.user_code import format_value
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.task_settings import BY_PERSON, BY_POLICY
from grmpipe.data.prompts import Data
from grmpipe.envs.episode_slots import in_own_slot
from grmpipe.envs.play import RolloutRequest
from grmpipe.envs.retry_episode import ActingEngine
from grmpipe.judge.grm import set_purpose
from grmpipe.judge.judge_in_time import judge_in_time
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.terminal_text import replace_controls
from grmpipe.models.types import Completion, RequestContext, SamplingParams, VersionSpan, ignore_first_token
from grmpipe.observe.console import RunConsole
from grmpipe.observe.recorder import JudgedSibling
from grmpipe.observe.summary import EvalSummary, Status, Summary
from grmpipe.pipeline.counters import Counters
from grmpipe.run.build.compose_pipeline import make_play
from grmpipe.run.build.start import Running, refuse_denied, start
from grmpipe.run.prepare import Prepared, check_env, check_fit
from grmpipe.run.run_context import Run, RunContext
from grmpipe.run.run_prompts import load_held_out, prompts_at
from grmpipe.run.tasks.prepare_evaluation import find_judges
from grmpipe.run.tasks.stats import env_summary, summarize_judging
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.run_together import run_until
from grmpipe.types import Prompt, Rollout, TruncationReason, Turn

HOW = "You act as the policy: type a turn and Enter (a line that ends in \\ goes on); Ctrl-D ends the episode."
UNHURRIED_S = 1e6  # an episode of a person's
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPlay:
    """A checked episode, ready to start. script: the turns of a file; None: a person or the policy acts."""

    prepared: Prepared
    prompt: Prompt
    script: tuple[str, ...] | None = None

    @property
    def config(self) -> RunConfig:
        return self.prepared.config


def prepare_play(config: RunConfig) -> PreparedPlay:
    """Find the prompt, the script and the models. Raises ConfigError."""
    config, by = config.without_adapters(), config.play.by
    check_env(config)
    for judge in config.judging.generative.values():
        if judge.protocol_kind.compares:
            raise ConfigError(
                f"{judge.key}.protocol: {judge.protocol} compares episodes, and one is played; type judge=pointwise"
            )
    prompt = find_prompt(config)
    with section("play.by: "):
        script = None if by in (BY_PERSON, BY_POLICY) else tuple(read_script(Path(by)))
    episode_s = UNHURRIED_S if by == BY_PERSON else config.env.episode_s
    # One attempt: a fault of the environment is to be seen, not played over.
    config = replace(config, env=replace(config.env, attempts=1, episode_s=episode_s))
    if by != BY_POLICY:  # its turns are sampled by two requests, and who writes would be asked twice
        config = replace(config, rollout=replace(config.rollout, thinking_budget_tokens=0))
    prepared = find_judges(config, [prompt], samples_policy=by == BY_POLICY)
    check_fit(prepared, Data(train=(prompt,), held_out=()))
    return PreparedPlay(prepared=prepared, prompt=prompt, script=script)


def find_prompt(config: RunConfig) -> Prompt:
    """The held-out prompt of that number, or the one of data.path where none are held out."""
    with section("data.eval_path: "):
        prompts = load_held_out(config)
    if not prompts:
        with section("data.path: "):
            prompts = prompts_at(config, config.data.path, config.data.num_prompts)
    if config.play.prompt >= len(prompts):
        raise ConfigError(f"play.prompt: there are {len(prompts)} prompts; type play.prompt={len(prompts) - 1} or less")
    return prompts[config.play.prompt]


def read_script(file: Path) -> Iterator[str]:
    """The turns of a file: a JSON text per line. Raises ValueError that names the line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} can't be read ({error}); type play.by={BY_PERSON}, {BY_POLICY}, or a .jsonl file with a turn of "
            "the policy per line"
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)
        except json.JSONDecodeError:
            text = None
        if not isinstance(text, str):
            raise ValueError(
                f'{file}:{number}: expected a turn of the policy as a JSON text, as in "My answer: 4", got '
                f"{format_value(line)}"
            )
        yield text


# -- who acts ----------------------------------------------------------------------------------------------------------

NextTurn = Callable[[int], Awaitable[str | None]]  # number of the turn, from 0 -> what is written; None: nothing more


@dataclass(slots=True)
class WrittenTurns:
    """Samples what somebody writes, as the policy's tokens. num_asked: turns so far; is_over: no more was written."""

    write: NextTurn
    renderer: Renderer
    num_asked: int = field(default=0, init=False)
    is_over: bool = field(default=False, init=False)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """The turn, cut after `max_new_tokens` like one of the policy; without a turn an empty one that is cut."""
        text = await self.write(self.num_asked)
        self.num_asked += 1  # by count: requests of a workflow have ids of another form
        on_first_token()
        self.is_over = text is None
        ids = (*self.renderer.encode_inserted(text), *self.renderer.stop_token_ids[:1]) if text is not None else ()
        is_whole = text is not None and len(ids) <= params.max_new_tokens
        ids = ids[: params.max_new_tokens]
        return Completion(
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            text=self.renderer.decode(ids),
            finish_reason="stop" if is_whole else "length",
            versions=(VersionSpan(model=POLICY, version=0, start=0, end=len(ids)),) if ids else (),
        )

    def end_trajectory(self, trajectory_id: str) -> None:
        """It keeps nothing."""


@dataclass(slots=True)
class ShownEpisode:
    """An engine of which each turn is shown: what the policy reads, by its tokens, and what is written."""

    engine: ActingEngine
    renderer: Renderer
    console: Console
    max_turns: int
    window: int  # tokens; 0: unknown
    shows_written: bool
    _seen: tuple[int, ...] = field(default=(), init=False)
    _turns: int = field(default=0, init=False)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        self._turns += 1
        before = len(self._seen) if tuple(prompt_ids[: len(self._seen)]) == self._seen else 0
        self.show(self.renderer.decode_special(prompt_ids[before:]), "cyan")
        of_window = f" of {self.window:,}" if self.window else ""
        self.show(
            f"-- turn {self._turns} of {self.max_turns}: at most {params.max_new_tokens} tokens, after "
            f"{len(prompt_ids):,}{of_window}",
            "dim",
        )
        completion = await self.engine.generate(prompt_ids, params, context, on_first_token)
        if self.shows_written:
            self.show(self.renderer.decode_special(completion.token_ids), "bold")
        self._seen = (*prompt_ids, *completion.token_ids)
        return completion

    def end_trajectory(self, trajectory_id: str) -> None:
        self.engine.end_trajectory(trajectory_id)

    def show_turn(self, so_far: Rollout) -> None:
        for text in describe_turn(so_far.turns[-1]):
            self.show(f"-- {text}", "yellow")

    def show(self, text: str, style: str = "") -> None:
        self.console.print(Text(replace_controls(text), style=style), soft_wrap=True)


@dataclass(slots=True)
class Person:
    """Writes turns on a terminal, or through a pipe."""

    console: Console
    call_format: str | None  # of calls of tools; None: the policy calls none
    _typed: bytes = field(default=b"", init=False)  # and not read yet

    async def write(self, number: int) -> str | None:
        if number == 0:
            calls = f" Tools, if there are any, are called in the policy's own format ({self.call_format})."
            self.console.print(Text(HOW + calls * (self.call_format is not None), style="dim"), soft_wrap=True)
        lines, goes_on = list[str](), True
        while goes_on:
            print("... " if lines else "> ", end="", flush=True)
            if (line := await self._read_line()) is None:
                return None
            goes_on = line.endswith("\\")
            lines.append(line[:-1] if goes_on else line)
        return "\n".join(lines)

    async def _read_line(self) -> str | None:
        """A line; None at the end of the input. Polls: a thread that waits for a terminal can't be ended by Ctrl-C."""
        while b"\n" not in self._typed:
            while not select.select([sys.stdin], [], [], 0)[0]:  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(POLL_S)
            if not (read := os.read(sys.stdin.fileno(), 1 << 16)):
                return None
            self._typed += read
        line, _, self._typed = self._typed.partition(b"\n")
        return line.decode("utf-8", "replace").removesuffix("\r")


# -- what is said of it ------------------------------------------------------------------------------------------------


def describe_turn(turn: Turn) -> Iterator[str]:
    """What the environment made of a turn."""
    if turn.tool_calls:
        yield "calls: " + "; ".join(f"{call.name}({call.arguments})" for call in turn.tool_calls)
    if turn.completion.stop_text:
        yield f"ended by the stop string {turn.completion.stop_text!r}"
    if turn.rewards:
        yield "rewards: " + ", ".join(f"{name} {value:g}" for name, value in turn.rewards.items())
    if turn.faults:
        yield "faults of the policy: " + ", ".join(turn.faults)


LIMITS: dict[TruncationReason, str] = {
    "tokens": "the tokens of a turn (rollout.max_new_tokens)",
    "turns": "the number of turns (rollout.max_turns)",
    "context": "the policy's window",
    "time": "the time of an episode (env.episode_s)",
}


def describe_end(rollout: Rollout, *, is_over: bool) -> str:
    """is_over: whether nothing more was written, so that the last turn is empty."""
    number = len(rollout.turns) - is_over
    turns = f"{number} turn{'s' * (number != 1)}"
    if is_over:
        return f"the episode was cut after {turns}: nothing more was written"
    if rollout.status != "truncated":
        return f"the episode ended after {turns}"
    return f"the episode was cut after {turns}, by {LIMITS.get(rollout.reason, rollout.reason)}"


def describe_judged(one: JudgedSibling) -> Iterator[str]:
    """What the judge says of the episode."""
    yield from one.critiques
    for name, met in one.criteria.items():
        yield f"{name}: {'failed' if met is None else f'{met:g}'}"
    if one.failed:
        yield f"no verdict: {one.failed} ({one.detail})"
    else:
        score = "" if one.score is None else f"score {one.score:g}, "
        yield f"{score}reward {one.reward:g}" if one.reward is not None else "no reward"


class PlayRun(Run[PreparedPlay]):
    """Starts the environment and the judge, and the policy's engines if it plays."""

    is_policy_run = False

    def __init__(self, prepared: PreparedPlay, context: RunContext) -> None:
        super().__init__(prepared, context)
        self._running: Running | None = None
        self._counters = Counters()
        self._judged: JudgedSibling | None = None
        self._truth: float | None = None

    async def run(self) -> Status:
        self._running = running = await start(self._prepared.prepared, self._observers, self._run_dir)
        with refuse_denied():
            return await run_until(self._play(running), **running.background())

    async def _play(self, running: Running) -> Status:
        ready, config, recorder = self._prepared, self._config, self._observers.recorder
        sink = self._observers.console
        console = sink.console if sink is not None else RunConsole(highlight=False)
        shown = self._make_actor(running, console)
        play = in_own_slot(
            make_play(ready.prepared, shown, running.envs, config.evaluate.temperature), running.envs.slots
        )
        request = RolloutRequest(group_id=ready.prompt.prompt_id, sibling=0, seed=config.seed, on_turn=shown.show_turn)
        with self._observers.progress.show_while(""):  # its line would be drawn over what is typed
            rollout = await play(request, ready.prompt, ignore_first_token)
        recorder.rollout(0, ready.prompt, rollout)
        self._counters.envs.rollout(rollout)
        for message in rollout.turns[-1].replies:
            shown.show(f"{message.role}: {message.content}", "cyan")
        shown.show_turn(rollout)
        shown.show(
            f"-- {describe_end(rollout, is_over=isinstance(shown.engine, WrittenTurns) and shown.engine.is_over)}",
            "yellow",
        )
        await self._judge(running, rollout, shown)
        return "completed"

    def _make_actor(self, running: Running, console: Console) -> ShownEpisode:
        ready, renderer = self._prepared, self._prepared.prepared.policy.renderer
        by = self._config.play.by
        engine: ActingEngine
        if by == BY_POLICY:
            engine = running.policy.router
        elif (script := ready.script) is not None:

            async def read_script_on(number: int) -> str | None:
                return script[number] if number < len(script) else None

            engine = WrittenTurns(read_script_on, renderer)
        else:
            engine = WrittenTurns(Person(console, renderer.tool_parser_name).write, renderer)
        return ShownEpisode(
            engine=engine,
            renderer=renderer,
            console=console,
            max_turns=self._config.rollout.max_turns,
            window=ready.prepared.policy.context_tokens,
            shows_written=by != BY_PERSON,
        )

    async def _judge(self, running: Running, rollout: Rollout, shown: ShownEpisode) -> None:
        prompt, recorder = self._prepared.prompt, self._observers.recorder
        limit = ActiveClock().timeout(self._config.rollout.group_deadline_s)
        with set_purpose("evaluation"):
            (report,) = await judge_in_time(running.judge, prompt, [rollout], limit, 0)
        recorder.record_verdict(rollout, report)
        self._counters.report(report)
        self._judged = JudgedSibling(group_id=rollout.group_id, sibling=0, report=report)
        for text in describe_judged(self._judged):
            shown.show(f"judge: {text}", "green")
        if prompt.reference is not None:
            with contextlib.suppress(ValueError):  # a reference that the rule can't use
                self._truth = float(self._prepared.prepared.is_right(rollout.answer, prompt.reference))
                shown.show(f"the rule that sees the reference: {'right' if self._truth else 'wrong'}", "green")

    async def close(self) -> None:
        if self._running is not None:
            await self._running.close()

    def results(self) -> Summary:
        figures = {"reward": self._judged.reward if self._judged else None, "true_accuracy": self._truth}
        return Summary(
            steps=0,
            versions=dict.fromkeys(self._config.judging.roles, 0),
            eval=EvalSummary(final={name: value for name, value in figures.items() if value is not None}),
            judging=summarize_judging(self._counters),
            engines_replaced=self._running.maintenance.count_replaced() if self._running is not None else {},
            envs=env_summary(self._counters.envs),
        )
