"""Dialogues that tiny policies imitate, and what the shipped ones do in episodes."""

from __future__ import annotations

import random
from functools import cache

import pytest
from transformers import PreTrainedTokenizerFast

from grmpipe.envs.tools.function_tools import load_tools
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.types import Message
from grmpipe.tiny import tools as tiny_tools
from grmpipe.tiny.build import encode
from grmpipe.tiny.calculator import parse_view, right_episode
from grmpipe.tiny.examples import Dialogue, draw_examples, to_messages, with_calculator
from grmpipe.tiny.malformed import draw_malformed_view
from grmpipe.tiny.problems import LARGE, make_problems
from grmpipe.tiny.quality import accuracy, agreement, answers, judge_all, make_passes
from grmpipe.tiny.recipes import POLICY_TOOLS, POLICY_WALK
from grmpipe.tiny.resolve import SHIPPED
from grmpipe.tiny.tasks import CALLS, WALKS, careless_view, right_view
from grmpipe.tiny.tiny_sampler import TinySampler
from grmpipe.tiny.tokenizer import build_tokenizer
from grmpipe.tiny.walks import make_walks


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@cache
def renderer() -> Renderer:
    return Renderer.load(str(SHIPPED / "policy_tools"))


def test_training_sees_the_tokens_that_the_policy_is_shown_in_an_episode() -> None:
    tools = tuple(tool.spec for tool in load_tools(tiny_tools.__name__))
    for problem in make_problems("train", 20, 0, LARGE):
        dialogue = with_calculator(problem, right_episode(problem))
        said = [Message(role=one.role, content=one.text) for one in dialogue.messages[1:]]
        ids = list(renderer().render(said[:1], tools))
        for turn, reply in zip(said[1::2], [*said[2::2], None], strict=True):
            ids += [*renderer().tokenizer.encode(turn.content), tokenizer().eos_token_id]
            ids += renderer().extend([reply], tools) if reply else ()
        assert list(encode(tokenizer(), dialogue).ids) == ids


def test_only_the_assistants_tokens_are_imitated_with_their_end_of_turn() -> None:
    for recipe in (POLICY_TOOLS, POLICY_WALK):
        for dialogue in draw_examples(recipe.mixture, 20, 0):
            assert isinstance(dialogue, Dialogue)
            encoded = encode(tokenizer(), dialogue)
            imitated = [one for one, is_imitated in zip(encoded.ids, encoded.imitated, strict=True) if is_imitated]
            turns = [one.text for one in to_messages(dialogue) if one.role == "assistant"]
            assert tokenizer().decode(imitated) == "".join(f"{turn}<|im_end|>" for turn in turns)


def test_every_dialogue_fits_into_the_window() -> None:
    for recipe in (POLICY_TOOLS, POLICY_WALK):
        lengths = [len(encode(tokenizer(), one).ids) for one in draw_examples(recipe.mixture, 500, 1)]
        assert max(lengths) <= renderer().context_tokens // 2


@pytest.mark.long
def test_shipped_policies_of_episodes_are_poor_and_improvable() -> None:
    problems, walks = make_problems("held_out", 128, 1, LARGE), make_walks("held_out", 128, 1)
    assert 0.25 < accuracy(CALLS, TinySampler(SHIPPED / "policy_tools"), problems) < 0.55
    assert 0.25 < accuracy(WALKS, TinySampler(SHIPPED / "policy_walk"), walks) < 0.55


@pytest.mark.long
def test_the_shipped_judge_of_calls_separates_right_from_wrong_episodes() -> None:
    problems, rng = make_problems("held_out", 96, 2, LARGE), random.Random(0)
    passes = make_passes(CALLS, TinySampler(SHIPPED / "grm_tools"))
    views = [right_view(one, rng) if at % 2 else careless_view(one, rng) for at, one in enumerate(problems)]
    assert agreement(judge_all(CALLS, passes, problems, views)) > 0.85
    malformed = [draw_malformed_view(one, rng) for one in problems]
    assert agreement(judge_all(CALLS, passes, problems, malformed)) > 0.9


def test_most_episodes_of_the_shipped_policy_are_well_formed() -> None:
    views = answers(CALLS, TinySampler(SHIPPED / "policy_tools"), make_problems("held_out", 64, 3, LARGE), seed=0)
    assert sum(parse_view(view) is not None for view in views) > 0.9 * len(views)
