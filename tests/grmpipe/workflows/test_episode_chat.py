"""Recording: token by token, what continues and what is rendered again, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grmpipe.envs.play import RolloutAborted, RolloutRequest
from grmpipe.models.chat.chat_template import LONG_CHARS
from grmpipe.models.types import EngineRefused, Message, ToolCall, ToolSpec
from grmpipe.types import Prompt, Rollout
from grmpipe.workflows.chat import ChatOptions, ChatRefused, ChatReply
from grmpipe.workflows.episode_chat import EpisodeChat, EpisodeChats
from grmpipe.workflows.play_workflow import Ending, make_rollout

ADD = ToolSpec(name="add", description="", parameters={"type": "object"})
PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))


def user(content: str) -> Message:
    return Message(role="user", content=content)


def recorded(chats: EpisodeChats, request: RolloutRequest, talk: Callable[[EpisodeChat], Awaitable[None]]) -> Rollout:
    """The rollout of what a function asks."""

    async def play() -> Rollout:
        episode = chats.open(request)
        await talk(episode)
        episode.end()
        return make_rollout(request, PROMPT, episode, Ending())

    return asyncio.run(play())


def run(chats: EpisodeChats, request: RolloutRequest, talk: Callable[[EpisodeChat], Awaitable[None]]) -> EpisodeChat:
    """The episode after what a function asks."""

    async def play() -> EpisodeChat:
        episode = chats.open(request)
        await talk(episode)
        return episode

    return asyncio.run(play())


def test_continued_conversation_is_one_segment_of_recorded_ids(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    engine = make_engine(["add 1 2", "3, I say"])

    async def talk(episode: EpisodeChat) -> None:
        messages = [user("?")]
        reply = await episode.chat(messages, [ADD])
        assert reply.tool_calls == (ToolCall(name="add", arguments={"a": 1, "b": 2}, call_id="call_1"),)
        result = Message(role="tool", content="3", tool_call_id="call_1", name="add")
        equal_tools = [ToolSpec(name="add", description="", parameters={"type": "object"})]
        assert (await episode.chat([*messages, reply, result], equal_tools)).content == "3, I say"

    rollout = recorded(make_chats(engine), request_of, talk)
    first, second = rollout.turns
    assert list(rollout.prompts()) == [prompt for prompt, _ in engine.said]
    assert (first.rewritten, second.rewritten) == (False, False) and rollout.opening == ()
    assert [message.content for message in first.replies] == ["3"] and first.tool_calls[0].name == "add"
    assert (rollout.status, rollout.reason) == ("finished", "")
    contexts = [context for _, _, context in engine.asked]
    assert [context.request_id for context in contexts] == ["g/1/t0", "g/1/t1"]
    assert {context.trajectory_id for context in contexts} == {"g/1"}
    assert [(params.seed, params.temperature, params.top_p) for _, params, _ in engine.asked] == [
        (50, 0.7, 0.9),
        (51, 0.7, 0.9),
    ]


@pytest.mark.parametrize(
    ("change", "new"),
    [
        (lambda reply: [user("?"), Message(role="assistant", content="a!"), user("b")], ["a!", "b"]),
        (lambda reply: [user("summary"), reply, user("b")], ["summary", "b"]),
        (lambda reply: [user("?"), user("b")], ["b"]),
        (lambda reply: [user("?"), user(reply.content), user("b")], ["a", "b"]),
    ],
    ids=["an edited reply", "compaction", "a dropped reply", "another role"],
)
def test_a_history_that_was_rewritten_opens_a_segment(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest, change: Callable, new: list[str]
) -> None:
    engine = make_engine(["a", "c"])

    async def talk(episode: EpisodeChat) -> None:
        reply = await episode.chat([user("?")])
        await episode.chat(change(reply))

    rollout = recorded(make_chats(engine), request_of, talk)
    assert [turn.rewritten for turn in rollout.turns] == [False, True]
    assert list(rollout.prompts()) == [prompt for prompt, _ in engine.said]
    assert [message.content for message in rollout.turns[0].replies] == new
    assert [turn.completion.text for turn in rollout.turns] == ["a", "c"], "only what the policy sampled is trained"


def test_reply_with_stripped_white_space_continues_with_the_recorded_ids(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    engine = make_engine([" a\n", "c"])

    async def talk(episode: EpisodeChat) -> None:
        reply = await episode.chat([user("?")])
        await episode.chat([user("?"), Message(role="assistant", content=reply.content.strip()), user("b")])

    rollout = recorded(make_chats(engine), request_of, talk)
    assert [turn.rewritten for turn in rollout.turns] == [False, False]
    assert list(rollout.prompts()) == [prompt for prompt, _ in engine.said]


def test_a_stop_text_is_kept_as_tokens_and_the_end_of_its_turn_comes_with_the_next_prompt(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    engine = make_engine(["find <a>b</a> invented", "add 1 2; and more", "c"])

    async def talk(episode: EpisodeChat) -> None:
        messages = [user("?")]
        reply = await episode.chat(messages, options=ChatOptions(stop=("</a>",), logprobs=True))
        assert (reply.content, reply.finish_reason) == ("find <a>b", "stop")
        assert "".join(one.token for one in reply.logprobs) == "find <a>b</a>"
        assert {one.logprob for one in reply.logprobs} == {-0.5}
        assert not (await episode.chat([*messages, reply, user("found")], options=ChatOptions(stop=(";",)))).logprobs
        with pytest.raises(ChatRefused, match="stop: a text is empty"):
            await episode.chat(messages, options=ChatOptions(stop=("",)))

    rollout = recorded(make_chats(engine), request_of, talk)
    first, second = rollout.turns
    assert list(rollout.prompts()) == [prompt for prompt, _ in engine.said]
    assert first.completion.token_ids == tuple(map(ord, "find <a>b</a>"))
    assert not second.rewritten and second.new_ids[:2] == (-9, -2)  # the end of a turn, a user's message
    assert second.completion.answer == "add 1 2"


def test_a_stop_text_that_ends_a_call_belongs_to_the_call(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    async def talk(episode: EpisodeChat) -> None:
        reply = await episode.chat([user("?")], [ADD], ChatOptions(stop=(" 2",)))
        assert reply.content == "" and reply.tool_calls[0].arguments == {"a": 1, "b": 2}

    recorded(make_chats(make_engine(["add 1 2 invented"])), request_of, talk)


def test_other_tools_open_a_segment(make_engine: Callable, make_chats: Callable, request_of: RolloutRequest) -> None:
    async def talk(episode: EpisodeChat) -> None:
        reply = await episode.chat([user("?")])
        await episode.chat([user("?"), reply, user("b")], [ADD])

    rollout = recorded(make_chats(make_engine(["a", "c"])), request_of, talk)
    assert [turn.rewritten for turn in rollout.turns] == [False, True]


def test_parallel_calls_are_branches_and_the_chain_that_ends_last_comes_last(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    engine = make_engine(["plan", "sub one", "sub two", "whole"])

    async def talk(episode: EpisodeChat) -> None:
        plan = await episode.chat([user("?")])
        branch = [user("?"), plan]
        one, two = await asyncio.gather(
            episode.chat([*branch, user("one")]), episode.chat([user("other agent"), user("two")])
        )
        await episode.chat([*branch, user("one"), one, user(two.content)])

    rollout = recorded(make_chats(engine), request_of, talk)
    assert [turn.completion.text for turn in rollout.turns] == ["sub two", "plan", "sub one", "whole"]
    assert [turn.rewritten for turn in rollout.turns] == [False, True, False, False]
    assert Counter(rollout.prompts()) == Counter(prompt for prompt, _ in engine.said)
    assert rollout.answer == "whole"


def test_two_continuations_of_one_turn_keep_its_recorded_ids(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    engine = make_engine(["plan", "one", "two"])

    async def talk(episode: EpisodeChat) -> None:
        plan = await episode.chat([user("?")])
        await asyncio.gather(*(episode.chat([user("?"), plan, user(name)]) for name in ("1", "2")))

    rollout = recorded(make_chats(engine), request_of, talk)
    plan, _, two = rollout.turns
    assert [turn.rewritten for turn in rollout.turns] == [False, False, True]
    recorded_ids = plan.new_ids + plan.completion.token_ids
    assert two.new_ids[: len(recorded_ids)] == recorded_ids
    assert list(rollout.prompts()) == [prompt for prompt, _ in engine.said]


MOVES = st.lists(st.tuples(st.sampled_from(["extend", "rewrite", "both"]), st.integers(0, 9)), min_size=1, max_size=8)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=MOVES, seed=st.integers(0, 999))
def test_rollout_of_any_workflow_holds_exactly_what_the_engine_saw(
    make_engine: Callable,
    make_chats: Callable,
    request_of: RolloutRequest,
    moves: list[tuple[str, int]],
    seed: int,
) -> None:
    chance = random.Random(seed)
    engine = make_engine([chance.choice(["a", "b", "add 1 2", "bad"]) for _ in range(40)])

    async def talk(episode: EpisodeChat) -> None:
        talks: list[list[Message]] = [[user("?")]]

        async def ask(messages: list[Message]) -> None:
            reply = await episode.chat(messages, [ADD])
            talks.append([*messages, reply, user(chance.choice("xy"))])

        await ask(talks[0])
        for move, which in moves:
            messages = talks[which % len(talks)]
            if move == "both":
                await asyncio.gather(ask(messages), ask([*messages, user("z")]))
            else:
                await ask(messages if move == "extend" else [user("so far"), *messages[-2:]])

    rollout = recorded(make_chats(engine), request_of, talk)
    turns = [(prompt, turn.completion.token_ids) for prompt, turn in zip(rollout.prompts(), rollout.turns, strict=True)]
    assert Counter(turns) == Counter(engine.said)
    for segment in rollout.segments():
        for (before, turn), (after, _) in itertools.pairwise(segment):
            begun = before + turn.completion.token_ids
            assert after[: len(begun)] == begun


def test_max_tokens_may_only_lower_the_runs(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    engine = make_engine(["a long text", "a"])

    async def talk(episode: EpisodeChat) -> None:
        cut = await episode.chat([user("?")], options=ChatOptions(max_tokens=3))
        assert (cut.content, cut.finish_reason) == ("a l", "length")
        await episode.chat([user("?"), cut, user("go on")], options=ChatOptions(max_tokens=1000))
        with pytest.raises(ChatRefused, match="max_tokens"):
            await episode.chat([user("?")], options=ChatOptions(max_tokens=0))

    rollout = recorded(make_chats(engine), request_of, talk)
    assert [params.max_new_tokens for _, params, _ in engine.asked] == [3, 50]
    assert [turn.rewritten for turn in rollout.turns] == [False, True], "a cut turn has no end that another continues"


@pytest.mark.parametrize(("window", "reason"), [(0, "tokens"), (20, "context")])
def test_a_call_in_a_cut_completion_is_never_given_back(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest, window: int, reason: str
) -> None:
    async def talk(episode: EpisodeChat) -> None:
        reply = await episode.chat([user("?")], [ADD])
        assert (reply.tool_calls, reply.finish_reason) == ((), "length")

    chats = make_chats(make_engine(["add 1 2" + " " * 90]), context_tokens=window)
    rollout = recorded(chats, request_of, talk)
    assert (rollout.status, rollout.reason) == ("truncated", reason) and rollout.turns[0].tool_calls == ()


def test_a_call_that_cannot_be_read_stays_text_and_is_counted(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    async def talk(episode: EpisodeChat) -> None:
        assert (await episode.chat([user("?")], [ADD])).content == "bad {"

    rollout = recorded(make_chats(make_engine(["bad {"])), request_of, talk)
    assert rollout.turns[0].faults == ("malformed",)


def test_full_window_is_refused_and_a_shorter_history_continues(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    async def talk(episode: EpisodeChat) -> None:
        reply = await episode.chat([user("?")])
        with pytest.raises(ChatRefused, match="context window has 30 tokens") as refused:
            await episode.chat([user("?"), reply, user("x" * 40)])
        assert (refused.value.code, episode.refusal) == ("context_length_exceeded", refused.value)
        await episode.chat([user("short")])
        assert episode.refusal is None

    rollout = recorded(make_chats(make_engine(["a", "b"]), context_tokens=30), request_of, talk)
    assert rollout.status == "finished"


@pytest.mark.parametrize(
    ("limits", "code"), [({"max_turns": 1}, "turn_limit_exceeded"), ({"episode_s": 0.3}, "time_limit_exceeded")]
)
def test_no_turn_begins_beyond_the_turns_or_the_time_of_an_episode(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest, limits: dict, code: str
) -> None:
    engine = make_engine(["a", "b"])

    async def talk(episode: EpisodeChat) -> None:
        reply = await episode.chat([user("?")])
        await asyncio.sleep(0.3)
        with pytest.raises(ChatRefused) as refused:
            await episode.chat([user("?"), reply, user("more")])
        assert refused.value.code == code

    episode = run(make_chats(engine, **limits), request_of, talk)
    assert episode.refusal is not None and len(engine.asked) == 1


def test_final_refusal_outlives_an_answer_to_a_parallel_call(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    async def talk(episode: EpisodeChat) -> None:
        await asyncio.gather(*(episode.chat([user(name)]) for name in "abc"), return_exceptions=True)

    episode = run(make_chats(make_engine(), max_turns=2), request_of, talk)
    assert episode.refusal is not None and episode.refusal.reason == "turns" and len(episode.calls) == 2


def test_the_end_of_a_session_aborts_calls_in_flight_and_refuses_later_ones(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    engine = make_engine(["a"])

    async def talk(episode: EpisodeChat) -> None:
        engine.held = asyncio.Event()
        asking = asyncio.ensure_future(episode.chat([user("?")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        episode.end()
        for late in (asking, episode.chat([user("?")])):
            with pytest.raises(ChatRefused) as refused:
                await late
            assert refused.value.code == "session_ended"

    episode = run(make_chats(engine), request_of, talk)
    assert (engine.aborted, episode.calls) == (1, [])


def test_a_cancelled_call_is_aborted_and_no_turn(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    engine = make_engine(["lost", "kept"])

    async def talk(episode: EpisodeChat) -> None:
        engine.held = asyncio.Event()
        asking = asyncio.ensure_future(episode.chat([user("?")]))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait({asking})
        engine.held = None
        await episode.chat([user("?")])

    rollout = recorded(make_chats(engine), request_of, talk)
    assert [turn.completion.text for turn in rollout.turns] == ["kept"] and engine.aborted == 1
    assert [context.request_id for _, _, context in engine.asked] == ["g/1/t0", "g/1/t1"]


@pytest.mark.parametrize("error", [EngineRefused("too long"), RolloutAborted("gone"), AssertionError("ours")])
def test_an_error_of_the_engine_ends_the_session_and_stays_its_own(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest, error: Exception
) -> None:
    async def talk(episode: EpisodeChat) -> None:
        with pytest.raises(ChatRefused, match="can't answer"):
            await episode.chat([user("?")])
        with pytest.raises(ChatRefused, match="has ended"):
            await episode.chat([user("?")])

    episode = run(make_chats(make_engine(error=error)), request_of, talk)
    assert episode.failed.exception() is error


def test_messages_that_the_template_refuses_are_an_invalid_request(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    async def talk(episode: EpisodeChat) -> None:
        with pytest.raises(ChatRefused, match="takes no markup") as refused:
            await episode.chat([user("markup")])
        assert (refused.value.code, refused.value.reason) == ("invalid_request", "")

    run(make_chats(make_engine()), request_of, talk)


def test_the_time_without_a_request_belongs_to_the_turn_before_it(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    async def talk(episode: EpisodeChat) -> None:
        await asyncio.sleep(0.02)
        reply: ChatReply = await episode.chat([user("?")])
        await asyncio.sleep(0.04)
        await episode.chat([user("?"), reply, user("more")])

    class Spans:
        def span(self, lane: str, name: str, start_s: float, end_s: float, **args: str | int | float) -> None:
            seen.append((lane, name, end_s - start_s, args))

    seen: list[tuple[str, str, float, dict[str, str | int | float]]] = []
    rollout = recorded(make_chats(make_engine(["a", "b"]), events=Spans()), request_of, talk)
    assert [(lane, name, args) for lane, name, _, args in seen] == [
        ("env", "open", {"episode": "g/1", "attempt": 0}),
        ("env", "step", {"episode": "g/1", "turn": 0}),
        ("env", "step", {"episode": "g/1", "turn": 1}),
    ]
    assert [took_s for _, _, took_s, _ in seen] == pytest.approx(
        [rollout.boot_s, *(turn.env_s for turn in rollout.turns)], abs=1e-3
    )
    assert rollout.boot_s > 0.015 and rollout.turns[0].env_s > 0.035
    assert rollout.turns[1].env_s < rollout.turns[0].env_s


def test_a_short_message_after_a_long_conversation_is_rendered_where_it_is(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = make_chats(make_engine(["a"]))
    extend, in_loop = chats.renderer.extend, list[bool]()

    def placed(*args: object, **kwargs: object) -> tuple[int, ...]:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return extend(*args, **kwargs)

    monkeypatch.setattr(chats.renderer, "extend", placed)

    async def talk(episode: EpisodeChat) -> None:
        opening = user("a" * LONG_CHARS)
        reply = await episode.chat([opening])
        await episode.chat([opening, reply, user("more")])

    run(chats, request_of, talk)
    assert in_loop == [True]


def test_long_messages_leave_the_loop_free_and_no_call_beyond_the_limit_comes_of_it(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    chats = make_chats(engine, max_turns=1)
    render, in_loop = chats.renderer.render, list[bool]()

    def placed(*args: object) -> tuple[int, ...]:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return render(*args)

    monkeypatch.setattr(chats.renderer, "render", placed)

    async def talk(episode: EpisodeChat) -> None:
        calls = (episode.chat([user(name * LONG_CHARS)]) for name in "ab")
        _, refused = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(refused, ChatRefused) and refused.reason == "turns"

    run(chats, request_of, talk)
    assert in_loop == [False, False] and len(engine.asked) == 1
