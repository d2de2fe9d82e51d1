"""Checks that prompts, answers and thoughts fit the templates and context windows of the policy and the judges."""

import functools
import logging
from collections.abc import Iterable, Sequence

from grmpipe.config.data import RolloutConfig
from grmpipe.config.env import EnvConfig
from grmpipe.config.io.key_errors import section
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.entry_names import POLICY
from grmpipe.config.run_config import ConfigError
from grmpipe.data.prompts import Data
from grmpipe.data.rubrics import name_criteria
from grmpipe.envs.tools.function_tools import check_state, load_tools
from grmpipe.judge.expectation import check_expectation
from grmpipe.judge.grm import BYTES_PER_TOKEN, estimate_tokens, render_prompt
from grmpipe.judge.parse import compile_pattern, form_named, judgement_pattern, scores_in
from grmpipe.judge.prompt import JudgePrompt, PrinciplesPrompt
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.chat.thinking import ThinkingMarkers, thinks
from grmpipe.models.types import Message
from grmpipe.roles.roles import Model, ServedRole
from grmpipe.types import Prompt

log = logging.getLogger(__name__)

EMPTY_ANSWER = Message(role="assistant", content="")


def check_policy(rollout: RolloutConfig, policy: Model, data: Data) -> None:
    """Check that the policy's chat template accepts the prompts, and its window at least one of them with an answer."""
    with section("policy."):
        for prompt in one_of_each_kind((*data.held_out, *data.train)):
            policy.renderer.render(prompt.messages)
    check_stop(rollout.stop, policy.renderer)
    if budget := rollout.thinking_budget_tokens:
        markers = find_thoughts("rollout.thinking_budget_tokens", POLICY, policy.renderer, off="0")
        ending = len(policy.renderer.encode_inserted(markers.end_of_thought()))
        check_room("rollout.max_new_tokens", rollout.max_new_tokens, budget, ending, "an answer")
    check_context_limit(
        name=POLICY,
        context_tokens=policy.context_tokens,
        key="rollout.max_new_tokens",
        new_tokens=rollout.max_new_tokens,
        lengths=((prompt, len(policy.renderer.render(prompt.messages))) for prompt in data.train),
        what="prompt",
    )


def check_stop(stop: Sequence[str], renderer: Renderer) -> None:
    """Check that texts that end a turn can be seen in an answer, which one with a special token in it can't."""
    for text in stop:
        if text in renderer.special:
            continue
        if text in renderer.decode_special(ids := renderer.encode_markup(text)) and text not in renderer.decode(ids):
            raise ConfigError(
                f"rollout.stop: {text!r} has a special token of the policy's tokenizer, which no answer shows; give "
                "the token alone, or a text without it"
            )


def one_of_each_kind(prompts: Iterable[Prompt]) -> list[Prompt]:
    """A prompt for each order of roles, which a template or a chat template may refuse."""
    return list({tuple(message.role for message in prompt.messages): prompt for prompt in prompts}.values())


def check_answer_fits(rollout: RolloutConfig, role: ServedRole) -> None:
    """Check that the policy's window has room for an answer, where the model isn't here to count a prompt's tokens."""
    window = role.resolve_context_limit(role.model.shape.context_tokens)
    if 0 < window <= rollout.max_new_tokens:
        limit = f"{role.option_key('max_context_tokens')}={window}"
        raise ConfigError(
            f"rollout.max_new_tokens: {rollout.max_new_tokens} leave no room for a prompt in the policy's "
            f"window of {window} tokens; type less, or more than {limit}"
        )


def longest_response(rollout: RolloutConfig, env: EnvConfig, policy_tokens: int) -> int:
    """Most tokens of what a judge reads of a rollout: of an answer, or of an episode with its observations, which the
    policy's window bounds as well. policy_tokens: that window; 0: unknown.
    """
    if env.env_kind.is_single:
        return rollout.max_new_tokens
    observation_tokens = -(-env.max_observation_chars // BYTES_PER_TOKEN)
    episode_tokens = rollout.max_turns * (rollout.max_new_tokens + observation_tokens) - observation_tokens
    return min(episode_tokens, policy_tokens) if policy_tokens else episode_tokens


def check_judge(
    judge: JudgeConfig,
    role: ServedRole,
    grm: Model | None,
    data: Data,
    group_size: int,
    response_tokens: int,
    env: EnvConfig,
) -> None:
    """Check that a judge's template accepts the prompts, and its window at least one of them with a full response and a
    critique.

    A full response, because a policy that writes more than the judge can read would escape it, or have a tool write
    it. `grm`: None for a remote judge. response_tokens: see longest_response.
    """
    prompts = (*data.train, *data.held_out)
    template = check_template(judge, prompts)
    ahead, by_criteria = judge.principles.kind == "shared", judge.protocol_kind.scores == "criteria"
    num_shown = judge.responses_shown(group_size)
    shown_tokens = 0 if judge.format.truncation == "middle" else num_shown * response_tokens
    extra_tokens = shown_tokens + (judge.principles.max_new_tokens if ahead else 0)

    with section(f"{judge.key}.tools."):
        specs = tuple(tool.spec for tool in load_tools(judge.tools.functions)) if judge.tools.functions else ()
        check_state(judge.tools.functions, is_given=judge.tools.state)

    def length(prompt: Prompt, *, whole: bool = False) -> int:
        """With the longest of its criteria, if it has any: a judgement is about one at least; whole: with all."""
        empty, rubric = ("",) * max(num_shown, len(template.blanks)), template.find_rubric(prompt)
        longest = [max(rubric, key=lambda one: len(one.whole_text))] if by_criteria and not whole else None
        messages = template.render(prompt, *empty, principles="" if ahead else None, criteria=longest)
        if grm is not None and specs:
            return len(grm.renderer.render(messages, specs)) + extra_tokens
        if grm is not None:
            return len(render_prompt(grm.renderer, messages)) + extra_tokens
        return sum(estimate_tokens(message.content) for message in messages) + extra_tokens

    with section(f"{judge.key}."):
        split = None if grm is None else functools.partial(split_verdict, grm.renderer)
        check_expectation(judge, form_named(judge.parser, judge.pattern), split)
    what, cut = describe_longest(judge, env)
    check_prefill(judge, role, template)
    check_thinking_budget(judge, role, grm)
    with section(f"{role.key}."):
        for prompt in one_of_each_kind(prompts):
            length(prompt)
    window = grm.context_tokens if grm else role.resolve_context_limit(0)
    if by_criteria and window and not judge.rubric.criteria_per_call:
        long = [one for one in prompts if length(one, whole=True) + judge.max_new_tokens > window]
        if long:
            log.warning(
                "%s.rubric.criteria_per_call: the rubrics of %d of %d prompts (first: %s) don't fit the window of %d "
                "tokens with a full response; where they don't, they are judged in several calls",
                judge.key, len(long), len(prompts), long[0].prompt_id, window,
            )  # fmt: skip
    check_context_limit(
        name=role.name,
        context_tokens=window,
        key=f"{judge.key}.max_new_tokens",
        new_tokens=judge.max_new_tokens,
        lengths=((prompt, length(prompt)) for prompt in data.train),
        what=what,
        cut=cut,
    )


def split_verdict(renderer: Renderer, verdict: str) -> list[str]:
    """The texts of the tokens of a verdict, after a label and alone."""
    token_ids = (*renderer.encode_inserted(f"Score: {verdict}"), *renderer.encode_markup(verdict))
    return [renderer.decode([token_id]) for token_id in token_ids]


def describe_longest(judge: JudgeConfig, env: EnvConfig) -> tuple[str, str]:
    """What a judge reads at most, and how to make it shorter; empty: by the keys that it names anyway."""
    if judge.format.truncation == "middle":
        return "question in the template, without any of the response,", ""
    if env.env_kind.is_single:
        return "question with an answer of rollout.max_new_tokens", ""
    return (
        "question with an episode of rollout.max_turns x (rollout.max_new_tokens + env.max_observation_chars)",
        f"type smaller ones of these, or {judge.key}.format.truncation=middle",
    )


def check_scalar_judge(
    judge: JudgeConfig, key: str, model: Model, data: Data, response_tokens: int, env: EnvConfig
) -> None:
    """Check that a reward model's chat template accepts the prompts, and its window at least one of them with a full
    answer, or with an episode and what its environment showed. key: the model's section.
    """

    def length(prompt: Prompt) -> int:
        return len(model.renderer.render_whole((*prompt.messages, EMPTY_ANSWER)))

    kinds = {tuple(message.role for message in prompt.messages): prompt for prompt in (*data.held_out, *data.train)}
    with section(f"{key}."):
        for prompt in kinds.values():
            length(prompt)
    cut = ""
    if not env.env_kind.is_single:
        cut = (
            "type a smaller rollout.max_turns, rollout.max_new_tokens or env.max_observation_chars, or give a reward "
            "model with a larger window"
        )
    check_context_limit(
        name=model.name,
        context_tokens=model.context_tokens,
        key="rollout.max_new_tokens",
        new_tokens=response_tokens,
        lengths=((prompt, length(prompt)) for prompt in data.train),
        what=f"prompt that {judge.key} reads",
        cut=cut,
    )


def check_template(judge: JudgeConfig, prompts: Sequence[Prompt]) -> JudgePrompt:
    """Check that a judge's templates load, that the prompts have the fields they show, and that they can show the
    prompts' messages. Raises ConfigError.
    """
    with section(f"{judge.key}."):
        template = JudgePrompt.of(judge)
        principles = PrinciplesPrompt.of(judge)
        if judge.protocol_kind.scores == "criteria":
            check_rubrics(judge, template, prompts)
        without_reference = [prompt for prompt in prompts if prompt.reference is None][:1]
        for prompt in (*without_reference, *one_of_each_kind(prompts)):
            template.render(prompt, *template.blanks, principles=None if principles is None else "")
            if principles is not None:
                principles.render(prompt)
        form = form_named(judge.parser, judge.pattern)
        num_scores = form.num_scores or (1 if judge.protocol_kind.gives_one_score else 2)
        compile_pattern(form, judge.scale, num_scores)
        if template.example and scores_in(form, template.example, num_scores, judge.scale) == "unparseable":
            key = "pattern" if judge.pattern else "parser"
            raise ValueError(
                f"{key}: {judge.pattern or judge.parser} can't read {template.example!r}, as template {judge.template} "
                f"asks for it; type a judge.{key} that reads it, or a judge.template for another form of verdicts"
            )
        if judge.format.structured or judge.format.ask_verdict:
            judgement_pattern(form, judge.scale)
    return template


def check_rubrics(judge: JudgeConfig, template: JudgePrompt, prompts: Sequence[Prompt]) -> None:
    """Check that each prompt has criteria, and that the judge can answer them."""
    low, high, words = judge.scale.low, judge.scale.high, judge.parser == "yes_no"
    for prompt in prompts:
        rubric = template.find_rubric(prompt)
        for name, one in zip(name_criteria(rubric), rubric, strict=True):
            where = f"criterion {name!r} of prompt {prompt.prompt_id}"
            if words and (one.levels or one.evidence):
                what = "has levels" if one.levels else "asks for evidence"
                raise ValueError(f"parser: {where} {what}, and yes_no reads one word; type judge=rubric")
            levels = [level for level, _ in one.levels] or [low]
            if not low <= levels[0] <= levels[-1] <= high:
                raise ValueError(
                    f"scale: {where} has levels from {levels[0]} to {levels[-1]}, and the judge gives {low} to {high}; "
                    f"type judge.scale.low={min(low, levels[0])} judge.scale.high={max(high, levels[-1])}"
                )
        if not rubric:
            raise ValueError(
                f"protocol: {judge.protocol} judges by the prompt's criteria, and prompt {prompt.prompt_id} has none; "
                "add the field rubric (a list of texts), type judge.rubric.path=<file of criteria for all prompts>, or "
                "judge=pointwise"
            )


def check_context_limit(
    *,
    name: str,
    context_tokens: int,
    key: str,
    new_tokens: int,
    lengths: Iterable[tuple[Prompt, int]],
    what: str,
    cut: str = "",
) -> None:
    """Check that at least one prompt leaves room for `new_tokens`; stops at the first that does. A run skips the
    others.

    A window of 0 is unknown and accepts all. cut: another way out, in words.
    """
    too_long = []
    for prompt, num_tokens in lengths:
        if not context_tokens or num_tokens + new_tokens <= context_tokens:
            return
        too_long.append((num_tokens, prompt.prompt_id))
    length, prompt_id = min(too_long)
    room = context_tokens - length
    shorter = "shorter prompts" if name == POLICY else "shorter prompts, a shorter judge.template"
    way_out = f"type {key}={room} or less" if room > 0 else f"give {shorter}, or a model with a larger window"
    way_out = cut or way_out
    raise ConfigError(
        f"{key}: {new_tokens} new tokens after the shortest {what} ({prompt_id}: {length} tokens) exceed the "
        f"{context_tokens} tokens of {name}; {way_out}"
    )


def check_prefill(judge: JudgeConfig, role: ServedRole, template: JudgePrompt) -> None:
    """Check that the judge's answer can begin with a given text."""
    key, endpoint = f"{judge.key}.prefill", role.engine.endpoint
    if template.has_own_turn:
        if judge.tools.is_set:
            raise ConfigError(
                f"{judge.key}.template: {judge.template} asks for a second turn of the judge by itself, and one with "
                f"tools has as many as it calls; type another template, or {judge.key}.tools.functions='' "
                f"{judge.key}.tools.mcp={{}}"
            )
        for other, is_set in ((key, judge.prefill), (f"{judge.key}.format.ask_verdict", judge.format.ask_verdict)):
            if is_set:
                raise ConfigError(
                    f"{other}: template {judge.template} has two turns of the judge, and asks for the second one by "
                    f"itself; type {other}={'false' if is_set is True else repr('')}"
                )
    if judge.prefill and endpoint is not None and not endpoint.continues:
        raise ConfigError(
            f"{key}: an endpoint begins the answer by itself; type {key}='', or for a server that goes on with the "
            f"last message (vLLM, SGLang) '+{role.option_key('extra_body')}={{continue_final_message: true, "
            "add_generation_prompt: false}'"
        )


def check_thinking_budget(judge: JudgeConfig, role: ServedRole, grm: Model | None) -> None:
    """Check that a judge's `thinking` budget can end a thought of its model. `grm`: None for one that isn't here."""
    key = judge.key
    if not judge.thinking.budget_tokens:
        note_default_budget(judge, role, grm)
        return
    if role.engine.endpoint is not None:
        raise ConfigError(
            f"{key}.thinking.budget_tokens: an endpoint takes messages, not tokens, so a thought can't be ended "
            f"here; type "
            f"{key}.thinking.budget_tokens=null and give the endpoint's own field for a budget, such as "
            f"+{role.option_key('extra_body')}={{thinking_token_budget: {judge.thinking.budget_tokens}}} (vLLM)"
        )
    if grm is None:
        return
    markers = find_thoughts(f"{key}.thinking.budget_tokens", role.key, grm.renderer, off="null")
    ending = len(grm.renderer.encode_inserted(markers.end_of_thought(judge.thinking.answer_start)))
    check_room(f"{key}.max_new_tokens", judge.max_new_tokens, judge.thinking.budget_tokens, ending, "a verdict")


def find_thoughts(key: str, model: str, renderer: Renderer, off: str) -> ThinkingMarkers:
    """The markers of a model that has a thinking budget. `off`: the value of `key` without one. Raises ConfigError."""
    if (markers := renderer.thinking) is None:
        raise ConfigError(
            f"{key}: neither the tokenizer nor the chat template of {model} has markers of thoughts; type {key}={off} "
            f"for a model that doesn't think, or name its markers: {model}.thinking_markers=['<think>','</think>']"
        )
    if markers.is_off:
        raise ConfigError(
            f"{key}: the chat template of {model} begins each answer with an empty thought, so the model doesn't "
            f"think; type {model}.chat_template_kwargs.enable_thinking=true, or {key}={off}"
        )
    return markers


def note_default_budget(judge: JudgeConfig, role: ServedRole, grm: Model | None) -> None:
    """Log how long a model that thinks may think before its verdict."""
    if grm is None or not thinks(grm.renderer.thinking):
        return
    if (budget := judge.make_thinking_budget(thinks=True)) is not None:
        log.info("%s: %s may think for %d tokens before its verdict", judge.key, role.key, budget.num_tokens)
        return
    log.warning(
        "%s may think before its verdict, and a judgement that reaches %s.max_new_tokens=%d is none; "
        "%s.thinking.budget_tokens ends long thoughts, and %s.chat_template_kwargs.enable_thinking=false all of them, "
        "if its chat template knows that",
        role.key, judge.key, judge.max_new_tokens, judge.key, role.key,
    )  # fmt: skip


def check_room(key: str, max_new_tokens: int, budget_tokens: int, num_inserted: int, what: str) -> None:
    """Check that `what` has tokens left after a thought that was ended."""
    least = budget_tokens + num_inserted
    if max_new_tokens <= least:
        raise ConfigError(
            f"{key}: {max_new_tokens} leave no tokens for {what} after {budget_tokens} of thinking and {num_inserted} "
            f"that end it; type {key}={least + 512}"
        )
