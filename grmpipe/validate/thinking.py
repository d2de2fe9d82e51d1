"""Checks that a thinking budget can be kept by the model that judges. Samples nothing.

Every refusal is a ConfigError that names the key and what to type.
"""

from __future__ import annotations

import logging

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.roles import Model, ServedRole
from grmpipe.config.run_config import ConfigError
from models.chat.thinking import thinks

log = logging.getLogger(__name__)


def check_thinking_budget(judge: JudgeConfig, role: ServedRole, grm: Model | None) -> None:
    """Check that a judge's `thinking_tokens` can end a thought of its model. `grm`: None for one that isn't here."""
    key = judge.key
    if not judge.thinking.max_tokens:
        note_default_budget(judge, role, grm)
        return
    if role.engine.endpoint is not None:
        raise ConfigError(
            f"{key}.thinking.max_tokens: an endpoint takes messages, not tokens, so a thought can't be ended "
            f"here; type "
            f"{key}.thinking.max_tokens=null and give the endpoint's own field for a budget, such as "
            f"+{role.option_key('extra_body')}={{thinking_token_budget: {judge.thinking.max_tokens}}} (vLLM)"
        )
    if grm is None:
        return
    if (markers := grm.renderer.thinking) is None:
        raise ConfigError(
            f"{key}.thinking.max_tokens: neither the tokenizer nor the chat template of {role.key} has markers of "
            f"thoughts; type {key}.thinking.max_tokens=null for a model that doesn't think, or name its markers: "
            f"{role.key}.thinking_markers=['<think>','</think>']"
        )
    if markers.is_off:
        raise ConfigError(
            f"{key}.thinking.max_tokens: the chat template of {role.key} begins each answer with an empty "
            f"thought, so the "
            f"model doesn't think; type {role.key}.chat_template_kwargs.enable_thinking=true, or "
            f"{key}.thinking.max_tokens=null"
        )
    check_room(judge, len(grm.renderer.encode_markup(markers.end_of_thought(judge.thinking.answer_start))))


def note_default_budget(judge: JudgeConfig, role: ServedRole, grm: Model | None) -> None:
    """Log how long a model that thinks may think before its verdict."""
    if grm is None or not thinks(grm.renderer.thinking):
        return
    if (budget := judge.thinking_budget(thinks=True)) is not None:
        log.info("%s: %s may think for %d tokens before its verdict", judge.key, role.key, budget.num_tokens)
        return
    log.warning(
        "%s may think before its verdict, and a judgement that reaches %s.max_new_tokens=%d is none; "
        "%s.thinking.max_tokens ends long thoughts, and %s.chat_template_kwargs.enable_thinking=false all of them, if "
        "its chat template knows that",
        role.key, judge.key, judge.max_new_tokens, judge.key, role.key,
    )  # fmt: skip


def check_room(judge: JudgeConfig, num_inserted: int) -> None:
    assert judge.thinking.max_tokens, "a budget that was typed"
    least = judge.thinking.max_tokens + num_inserted
    if judge.max_new_tokens <= least:
        raise ConfigError(
            f"{judge.key}.max_new_tokens: {judge.max_new_tokens} leave no tokens for a verdict after "
            f"{judge.thinking.max_tokens} of thinking and {num_inserted} that end it; type "
            f"{judge.key}.max_new_tokens={least + 512}"
        )
