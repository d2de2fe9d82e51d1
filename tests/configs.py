"""Configurations of runs for tests, from sections as a user types them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from grmpipe.config.io.resolve_config import fill_sections, resolve_config
from grmpipe.config.io.yaml_io import from_values
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.config.run_sections import RunSections

BLOCKS = {
    "thinking_tokens": "thinking.budget_tokens",
    "answer_start": "thinking.answer_start",
    "structured": "format.structured",
    "ask_verdict": "format.ask_verdict",
    "show_thoughts": "format.show_thoughts",
    "show_truncation": "format.show_truncation",
    "truncation": "format.truncation",
    "score_min": "scale.low",
    "score_max": "scale.high",
    "k_meta": "votes.k_meta",
    "abstain_above_std": "votes.abstain_above_std",
    "pairs": "split.pairs",
    "step_end": "split.step_end",
    "principles_template": "principles.template",
    "principles_max_new_tokens": "principles.max_new_tokens",
    "max_retries": "limits.max_retries",
    "timeout_s": "limits.timeout_s",
    "min_tokens_per_s": "limits.min_tokens_per_s",
    "max_concurrency": "limits.max_concurrency",
    "function_batch": "function_call.batch",
    "score_range": "function_call.score_range",
    "target": "custom.target",
    "options": "custom.options",
    "principles": "principles.kind",
}


def judge_config(**settings: Any) -> JudgeConfig:
    """A judge from settings without their blocks."""
    return from_values(JudgeConfig, in_blocks(settings))


def in_blocks(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A judge's settings in their blocks: timeout_s is limits.timeout_s, principles is principles.kind."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        block, _, key = BLOCKS.get(name, name).partition(".")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if key and not (block == name and isinstance(value, Mapping)):
            nested.setdefault(block, {})[key] = value
        else:
            nested[block] = value
    return nested


def run_config(**sections: Any) -> RunConfig:
    """The configuration of these sections, and of the defaults of all others."""
    return resolve_config(RunSections(**sections))


def with_sections(config: RunConfig, **sections: Any) -> RunConfig:
    """The same configuration with other sections."""
    return resolve_config(dataclasses.replace(fill_sections(config), **sections))
