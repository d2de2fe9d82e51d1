"""Playing an episode: token by token, what the environment gets, what truncates it, and that it is always closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.envs.env import Action, EnvFault, Episode, Observation, Opening, PolicyFault
from grmpipe.envs.play import EpisodeLimits, RolloutAborted, RolloutRequest, play
from grmpipe.models.chat.chat_template import LONG_CHARS
from grmpipe.models.types import (
    Completion,
    FinishReason,
    Message,
    ParsedTurn,
    RequestContext,
    SamplingParams,
    ToolCall,
    ToolSpec,
    VersionSpan,
    ignore_first_token,
)
from grmpipe.types import Prompt, Rollout

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))
TOOL = ToolSpec(name="add", description="", parameters={})
Step = Callable[[Action], Observation]


class Characters:
    """A tokenizer of characters: what a message begins with and ends with is a number of its own."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        return (*(-1 for _ in tools), *(ord(one) for message in messages for one in message.content), 0)

    def extend(
        self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
    ) -> tuple[int, ...]:
        return (0, *(() if ended else (9,)), *(ord(one) for message in replies for one in message.content), 0)

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        assert tools
        calls = (ToolCall(name="add", arguments={"a": text}, call_id="c"),) if text.startswith("call") else ()
        return ParsedTurn(content="", tool_calls=calls, errors=("bad",) if text.startswith("bad") else ())


@dataclass
class Policy:
    """Says the texts in order, and remembers the prompts, parameters and contexts it was asked with."""

    texts: list[str]
    finish_reason: FinishReason = "stop"
    stop_text: str = ""
    asked: list[tuple[tuple[int, ...], SamplingParams, RequestContext]] = field(default_factory=list)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        self.asked.append((tuple(prompt_ids), params, context))
        text = self.texts[len(self.asked) - 1]
        cut = len(text) > params.max_new_tokens
        ids = tuple(map(ord, text))[: params.max_new_tokens]
        return Completion(
            token_ids=ids,
            logprobs=(-0.5,) * len(ids),
            text=text[: params.max_new_tokens].removesuffix(self.stop_text),
            stop_text=self.stop_text,
            finish_reason="length" if cut else self.finish_reason,
            versions=(VersionSpan(model="policy", version=0, start=0, end=len(ids)),),
        )


class Scripted:
    """An environment by a function of the action."""

    def __init__(self, step: Step, tools: Sequence[ToolSpec] = (), opening: Exception | str = "") -> None:
        self._step, self._tools, self._opening = step, tools, opening
        self.actions: list[Action] = []
        self.num_closed = 0

    async def open(self, episode: Episode) -> Opening:
        if isinstance(self._opening, Exception):
            raise self._opening
        messages = [Message(role="user", content=self._opening)] if self._opening else episode.prompt.messages
        return Opening(messages=messages, tools=self._tools, state_key="start")

    async def step(self, action: Action) -> Observation:
        assert self.num_closed == 0
        self.actions.append(action)
        return self._step(action)

    async def close(self) -> None:
        self.num_closed += 1


def answers(*replies: str) -> Step:
    """Replies in order, then the end; each step has a reward and a state."""

    def step(action: Action) -> Observation:
        done = action.turn == len(replies)
        messages = () if done else (Message(role="user", content=replies[action.turn]),)
        return Observation(messages=messages, done=done, rewards={"r": action.turn}, state_key=f"after {action.turn}")

    return step


def played(
    env: Scripted,
    policy: Policy,
    *,
    max_turns: int = 9,
    context_tokens: int = 0,
    max_new: int = 50,
    renderer: Characters | None = None,
    keeps_state: bool = False,
) -> Rollout:
    request = RolloutRequest(group_id="g", sibling=1, seed=50)
    limits = EpisodeLimits(max_turns=max_turns, context_tokens=context_tokens, keeps_state=keeps_state)
    params = SamplingParams(max_new_tokens=max_new)
    return asyncio.run(play(request, PROMPT, env, policy, renderer or Characters(), params, limits))


TEXTS = st.text("abc", min_size=1, max_size=6)


@settings(max_examples=50)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=8), TEXTS, st.booleans())
def test_the_new_ids_of_all_turns_are_what_the_engine_saw(
    dialogue: list[tuple[str, str]], last: str, has_tools: bool
) -> None:
    policy = Policy([*(text for text, _ in dialogue), last])
    tools = [TOOL] if has_tools else []
    rollout = played(Scripted(answers(*(reply for _, reply in dialogue)), tools), policy)
    assert list(rollout.prompts()) == [prompt_ids for prompt_ids, _, _ in policy.asked]
    (segment,) = rollout.segments()
    assert [prompt_ids for prompt_ids, _ in segment] == list(rollout.prompts())
    assert rollout.status == "finished" and rollout.num_sampled_tokens == sum(map(len, policy.texts))


def test_each_turn_has_its_seed_its_reward_and_the_state_in_which_it_acted() -> None:
    policy, env = Policy(["a", "b", "c"]), Scripted(answers("x", "y"))
    rollout = played(env, policy)
    assert [params.seed for _, params, _ in policy.asked] == [50, 51, 52]
    assert [turn.state_key for turn in rollout.turns] == ["start", "after 0", "after 1"]
    assert [dict(turn.rewards) for turn in rollout.turns] == [{"r": 0}, {"r": 1}, {"r": 2}]
    assert rollout.env_rewards == {"r": 3}
    assert rollout.answer == "c" and env.num_closed == 1


def test_the_environments_last_message_is_kept_and_never_trained() -> None:
    says = lambda action: Observation(messages=[Message(role="user", content="boom")], done=True)  # noqa: E731
    rollout = played(Scripted(says), Policy(["a"]))
    assert [message.content for message in rollout.turns[-1].replies] == ["boom"]
    ((prompt_ids, _),) = rollout.segments()[0]
    assert list(rollout.prompts()) == [prompt_ids] and ord("m") not in prompt_ids


def test_after_each_turn_but_the_last_the_rollout_so_far_is_given_with_the_replies() -> None:
    given_to: list[Rollout] = []
    request = RolloutRequest(group_id="g", sibling=1, seed=50, attempt=2, on_turn=given_to.append)
    params, env, policy = SamplingParams(max_new_tokens=50), Scripted(answers("x", "y")), Policy(["a", "b", "c"])
    rollout = asyncio.run(play(request, PROMPT, env, policy, Characters(), params, EpisodeLimits(max_turns=9)))
    assert [one.turns for one in given_to] == [rollout.turns[:1], rollout.turns[:2]]
    assert [one.turns[-1].replies[0].content for one in given_to] == ["x", "y"]
    assert [(one.sibling, one.attempt, one.opening) for one in given_to] == [(1, 2, rollout.opening)] * 2


@pytest.mark.parametrize(("max_turns", "names"), [(2, ["g/1", "g/1"]), (1, [""])])
def test_all_turns_of_an_episode_name_it_and_a_single_turn_names_none(max_turns: int, names: list[str]) -> None:
    policy = Policy(["a", "b"])
    played(Scripted(answers("x", "y")), policy, max_turns=max_turns)
    assert [context.trajectory_id for _, _, context in policy.asked] == names


def test_calls_and_what_is_wrong_with_them_reach_the_environment() -> None:
    env = Scripted(answers("x", "y"), tools=[TOOL])
    rollout = played(env, Policy(["call me", "bad one", "done"]))
    assert [len(action.tool_calls) for action in env.actions] == [1, 0, 0]
    assert [action.errors for action in env.actions] == [(), ("bad",), ()]
    assert rollout.turns[0].tool_calls == env.actions[0].tool_calls


def test_a_truncated_call_is_never_executed() -> None:
    env = Scripted(answers("x"), tools=[TOOL])
    rollout = played(env, Policy(["call of too many letters"]), max_new=6)
    assert env.actions == [] and env.num_closed == 1
    assert (rollout.status, rollout.reason) == ("truncated", "tokens")


def test_the_environment_knows_the_last_turn_and_the_turns_end_it() -> None:
    env = Scripted(answers("x", "y", "z"))
    rollout = played(env, Policy(["a", "b"]), max_turns=2)
    assert [action.is_last for action in env.actions] == [False, True]
    assert (rollout.status, rollout.reason) == ("truncated", "turns")


def test_an_episode_ends_when_the_window_has_no_room_for_one_more_token() -> None:
    policy = Policy(["aaaa", "bbbb", "cccc"])
    rollout = played(Scripted(answers("x", "y")), policy, context_tokens=12)
    # ? 0 aaaa 0 x 0 = 9 tokens: three letters of the second turn fit
    assert (rollout.status, rollout.reason, rollout.answer) == ("truncated", "context", "bbb")
    assert [params.max_new_tokens for _, params, _ in policy.asked] == [50, 3]
    none_left = played(Scripted(answers("x" * 7)), Policy(["aaaa"]), context_tokens=12)
    assert (none_left.reason, len(none_left.turns)) == ("context", 1)


def test_no_turn_begins_after_the_time_of_an_episode() -> None:
    request, limits = RolloutRequest(group_id="g", sibling=1, seed=0), EpisodeLimits(max_turns=5, episode_s=0.0)
    policy, params = Policy(["a", "b"]), SamplingParams(max_new_tokens=5)
    rollout = asyncio.run(play(request, PROMPT, Scripted(answers("x")), policy, Characters(), params, limits))
    assert (rollout.status, rollout.reason, len(rollout.turns)) == ("truncated", "time", 1)


@pytest.mark.parametrize(("text", "role"), [("call it", "tool"), ("plain", "user")])
def test_a_fault_of_the_policy_is_shown_to_it_counted_and_not_the_end(text: str, role: str) -> None:
    def step(action: Action) -> Observation:
        if action.turn == 0:
            raise PolicyFault("no such city", "arguments")
        return Observation(done=True)

    rollout = played(Scripted(step, tools=[TOOL]), Policy([text, "sorry"]))
    (reply,) = rollout.turns[0].replies
    assert (reply.role, reply.content) == (role, "no such city")
    assert [turn.faults for turn in rollout.turns] == [("arguments",), ()]
    assert [turn.state_key for turn in rollout.turns] == ["start", "start"]
    assert rollout.status == "finished"


def test_the_next_prompt_ends_a_turn_that_a_stop_text_ended_and_its_call_is_read_whole() -> None:
    env = Scripted(answers("!"), tools=[TOOL])
    rollout = played(env, Policy(["call it", "so be it"], stop_text="it"))
    assert [action.text for action in env.actions] == ["call ", "so be "]
    assert env.actions[0].tool_calls[0].arguments == {"a": "call it"}
    assert rollout.turns[0].completion.token_ids == tuple(map(ord, "call it"))
    assert rollout.turns[1].new_ids == (0, 9, ord("!"), 0)


def test_a_fault_that_ends_the_episode_keeps_its_turns_and_a_faulty_call_is_no_answer() -> None:
    def step(action: Action) -> Observation:
        if action.turn == 1:
            raise PolicyFault("10 turns", "MaxTurnsExceeded", ends=True)
        return Observation(messages=[Message(role="user", content="go on")])

    rollout = played(Scripted(step, tools=[TOOL]), Policy(["plain", "call it", "never"]))
    assert [turn.faults for turn in rollout.turns] == [(), ("MaxTurnsExceeded",)]
    assert (rollout.status, rollout.turns[1].replies, rollout.answer) == ("finished", (), "")


class Saving(Scripted):
    async def open(self, episode: Episode) -> Opening:
        return replace(await super().open(episode), saved=b"start")


def save(action: Action) -> Observation:
    if action.text == "wrong":
        raise PolicyFault("no")
    said = (Message(role="user", content="go on"),)
    saved = b"" if action.text == "forget" else action.text.encode()
    return Observation(messages=said, done=action.text == "end", saved=saved)


@pytest.mark.parametrize(
    ("texts", "state"), [(["a", "end"], b"end"), (["a", "wrong", "x" * 99], b"a"), (["x" * 99], b"start")]
)
def test_a_rollout_keeps_the_last_state_of_its_environment_if_a_judge_reads_it(texts: list[str], state: bytes) -> None:
    assert played(Saving(save), Policy(texts), keeps_state=True).state == state
    assert played(Saving(save), Policy(texts)).state == b""


def test_an_environment_without_the_state_that_a_judge_reads_is_at_fault() -> None:
    for env, stage in ((Scripted(save), "open"), (Saving(save), "step")):
        with pytest.raises(EnvFault, match=rf"^{stage} returned no state.*judge\.tools\.state=false") as fault:
            played(env, Policy(["a", "forget"]), keeps_state=True)
        assert fault.value.cause == "protocol"


@pytest.mark.parametrize(
    ("status", "faults", "answer"),
    [
        ("finished", ("budget",), ""),
        ("truncated", ("malformed",), ""),
        ("truncated", (), "Score: 10"),
        ("finished", ("malformed",), "Score: 10"),
    ],
)
def test_a_last_turn_with_a_call_that_could_not_be_read_holds_no_answer(
    status: Literal["finished", "truncated"], faults: tuple[str, ...], answer: str
) -> None:
    (turn,) = played(Scripted(lambda action: Observation(done=True)), Policy(["Score: 10"])).turns
    assert Rollout(group_id="g", sibling=0, turns=(replace(turn, faults=faults),), status=status).answer == answer


@pytest.mark.parametrize(
    "env",
    [
        Scripted(answers(), opening="<end>"),
        Scripted(answers("<end>")),
    ],
    ids=["open", "step"],
)
def test_messages_that_the_chat_template_refuses_are_a_fault_of_the_environment(env: Scripted) -> None:
    class Strict(Characters):
        def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
            if any("<end>" in message.content for message in messages):
                raise ValueError("it spells markup")
            return super().render(messages, tools)

        def extend(
            self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
        ) -> tuple[int, ...]:
            return self.render(replies, tools)

    request, params = RolloutRequest(group_id="g", sibling=1, seed=0), SamplingParams(max_new_tokens=5)
    with pytest.raises(EnvFault, match="the chat template doesn't take: it spells markup") as fault:
        asyncio.run(play(request, PROMPT, env, Policy(["a", "b"]), Strict(), params, EpisodeLimits(max_turns=5)))
    assert fault.value.cause == "protocol" and env.num_closed == 1


def raising(error: Exception) -> Step:
    def step(action: Action) -> Observation:
        raise error

    return step


@pytest.mark.parametrize(
    ("env", "finish_reason", "error"),
    [
        (Scripted(raising(EnvFault("gone", "died"))), "stop", EnvFault),
        (Scripted(lambda action: Observation()), "stop", EnvFault),
        (Scripted(answers(), opening=EnvFault("no seat", "capacity")), "stop", EnvFault),
        (Scripted(answers()), "abort", RolloutAborted),
    ],
    ids=["step fails", "no reply and no end", "open fails", "abort"],
)
def test_environment_is_closed_once_however_the_episode_ends(
    env: Scripted, finish_reason: FinishReason, error: type[Exception]
) -> None:
    with pytest.raises(error):
        played(env, Policy(["a"], finish_reason))
    assert env.num_closed == 1


def test_an_environment_is_closed_when_its_episode_is_cancelled() -> None:
    env = Scripted(answers())

    class Hanging(Policy):
        async def generate(self, *args: object, **kwargs: object) -> Completion:
            await asyncio.sleep(3600)
            raise AssertionError

    async def go() -> None:
        request, params = RolloutRequest(group_id="g", sibling=1, seed=0), SamplingParams(max_new_tokens=5)
        limits = EpisodeLimits(max_turns=5)
        playing = asyncio.create_task(play(request, PROMPT, env, Hanging([]), Characters(), params, limits))
        await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.wait([playing])

    asyncio.run(go())
    assert env.num_closed == 1


class Placed(Characters):
    """Remembers, of each text, whether it was rendered in the event loop's thread."""

    def __init__(self) -> None:
        self.in_loop: list[bool] = []

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        self.in_loop.append(threading.current_thread() is threading.main_thread())
        return super().render(messages, tools)

    def extend(
        self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
    ) -> tuple[int, ...]:
        self.in_loop.append(threading.current_thread() is threading.main_thread())
        return super().extend(replies, tools, ended=ended)


def test_an_environments_long_texts_are_rendered_outside_of_the_loop() -> None:
    long = "a" * LONG_CHARS
    renderer = Placed()
    env = Scripted(answers("short", long), opening=long)
    played(env, Policy(["x", "y", "z"]), renderer=renderer)

    assert renderer.in_loop == [False, True, False]
