"""A GRM that learns samples as it judges: within its thinking budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from configs import judge_config
from written_turns import Author

from grmpipe.envs.env_factory import env_factory
from grmpipe.envs.play import RolloutRequest
from grmpipe.envs.tools.function_tools import load_tools
from grmpipe.judge.tool_grm import JudgeTools
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.types import Completion, Message, RequestContext, SamplingParams, VersionSpan, ignore_first_token
from grmpipe.roles.roles import Model
from grmpipe.run.features.cotrain.judging_tasks import grm_play
from grmpipe.tiny.resolve import SHIPPED
from grmpipe.train.batching.samples import split_rollout
from grmpipe.types import Prompt

TEMPLATE = Path(__file__).parents[4] / "models" / "chat" / "templates" / "deepseek_r1.jinja"
RENDERER = Renderer.load(str(SHIPPED / "grm"), str(TEMPLATE))


class NeverStops:
    """An engine that writes the same word until it is stopped."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        ids = (RENDERER.encode_markup("a")[0],) * params.max_new_tokens
        span = VersionSpan(model="grm", version=0, start=0, end=len(ids))
        return Completion(
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            text=RENDERER.decode(ids),
            finish_reason="length",
            versions=(span,),
        )


def test_a_grm_that_learns_is_not_trained_on_the_end_of_its_thought() -> None:
    grm = Model(name="grm", path="", renderer=RENDERER, context_tokens=512)
    judge = judge_config(max_new_tokens=60, thinking_tokens=9, answer_start="Score:")
    played = grm_play(judge, grm, NeverStops())
    request = RolloutRequest(group_id="g", sibling=0, seed=1)
    judging_task = Prompt(prompt_id="p", messages=(Message(role="user", content="judge it"),))
    rollout = asyncio.run(played(request, judging_task, ignore_first_token))
    (turn,) = rollout.turns
    inserted = RENDERER.encode_markup("\n</think>\n\nScore:")
    assert turn.completion.inserted == (9, 9 + len(inserted))
    (sample,) = split_rollout(rollout, np.ones(60))
    trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert len(trained) == 60 - len(inserted) and set(trained) == set(RENDERER.encode_markup("a"))


def test_a_grm_that_calls_is_trained_on_its_own_tokens_and_not_on_results() -> None:
    renderer = Renderer.load(str(SHIPPED / "grm_tools"))
    grm = Model(name="grm", path="", renderer=renderer, context_tokens=512)
    engine = Author(
        "add( 30, 4)", "34 is right.\nScore: 9",
        encode=lambda text: (*renderer.encode_markup(text), renderer.stop_token_ids[0]),
    )  # fmt: skip
    judge = judge_config(max_new_tokens=60, tools={"functions": "grmpipe.tiny.tools", "max_calls": 2})
    specs = tuple(tool.spec for tool in load_tools("grmpipe.tiny.tools"))
    make_env = env_factory(judge.tools.make_env())
    played = grm_play(judge, grm, engine, JudgeTools(make_env=make_env, specs=specs))
    judging_task = Prompt(prompt_id="p", messages=(Message(role="user", content="30 + 4 = 34?"),))
    rollout = asyncio.run(played(RolloutRequest(group_id="g", sibling=0, seed=1), judging_task, ignore_first_token))
    first, last = rollout.turns
    assert [reply.content for reply in first.replies] == ["= 34"] and rollout.answer.endswith("Score: 9")
    sampled = (*first.completion.token_ids, *last.completion.token_ids)
    (sample,) = split_rollout(rollout, np.ones(len(sampled)))
    trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert tuple(trained) == sampled and len(sample.token_ids) > len(sampled) + len(last.new_ids)
    assert engine.ended == ["g/0"]
