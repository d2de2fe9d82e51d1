"""All that can be known of a run, and refused, before anything starts. Writes nothing, starts nothing.

Every refusal is a ConfigError that names the key and what to type.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

from grmpipe.config import ConfigError, RunConfig
from grmpipe.critic.parts import CriticModel, find_critic
from grmpipe.data.labelled import load_labelled
from grmpipe.data.prompts import disjoint, load_prompts
from grmpipe.data.stream import PromptStream
from grmpipe.engine_checks import check_installed, check_options, check_tensor_parallel, window_of
from grmpipe.engines import Model, options_of, tensor_parallel_of
from grmpipe.evaluation.held_out import EVAL_METRICS
from grmpipe.judge.grm import estimated_tokens
from grmpipe.judge.lessons import Lessons, rule_of
from grmpipe.judge.own import own_judge
from grmpipe.judge.pattern import PATTERNS
from grmpipe.judge.prompt import JudgePrompt, PrinciplesPrompt
from grmpipe.judge.rule import Rule
from grmpipe.judge.settings import JudgeConfig
from grmpipe.lora_checks import check_lora_targets, check_peft
from grmpipe.meta.model import MetaModel, find_meta
from grmpipe.observe.summary import Summary
from grmpipe.routing_checks import check_routing
from grmpipe.types import Prompt
from grmpipe.weight_route import transport_of
from models.footprint import heads_of
from models.hub import NotHere, find_files, is_hub_name
from models.renderer import Renderer
from models.settings import ModelConfig
from models.tiny.resolve import resolve_model
from models.types import Message
from scheduler.placement import NodeCapacity, Placement, check_capacity, place

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]  # (what, share done)
HELD_OUT_OF = {"tiny://train": "tiny://held_out", "tiny://judgements": "tiny://judgements_held_out"}
CORES_ARE_SHARED = 1 << 20  # threads of one process, as many as one likes


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Prompts to train on and prompts to look at; none is both."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that may start."""

    config: RunConfig
    policy: Model
    grm: Model | None
    prompts: PromptStream
    held_out: tuple[Prompt, ...]
    placement: Placement
    meta: MetaModel | None = None  # guides the vote
    lessons: PromptStream | None = None  # stored ones, for a GRM that learns beside the policy
    critic: CriticModel | None = None  # what advantages ask

    @property
    def is_right(self) -> Rule:
        """The rule that training never sees (unless the user makes it the judge)."""
        return rule_of(self.config.judge)


def prepare(config: RunConfig, progress: Progress) -> Prepared:
    """Seat roles, read data, find models, and see that they fit each other."""
    placement = seat_roles(config)
    check_machine(config, placement)
    check_installed(config)
    check_peft(config)
    data = read_data(config)
    check_objective(config)
    policy = find_model("policy", config, progress)
    grm = find_model("grm", config, progress) if "grm" in config.roles else None
    meta = None
    if grm is not None and "meta" in config.roles:
        with section("meta."):
            meta = find_meta(config, grm, progress)
    critic = None
    if "critic" in config.roles:
        with section("critic."):
            critic = find_critic(config, policy, progress)
    for model in (policy, grm) if grm is not None else (policy,):
        check_lora_targets(model, config)
        if tensor_parallel_of(model.name, placement) > 1:
            check_tensor_parallel(model.name, heads_of(model.path), placement)
    check_policy(config, policy, data)
    check_routing(config, policy, placement)
    if config.judged_by_model:
        check_judge(config, grm, data)
    if config.judge.kind == "own":
        with section("judge."):
            own_judge(config.judge)
    prompts = PromptStream(data.train, seed=config.seed, shuffle=config.data.shuffle, max_epochs=config.data.max_epochs)
    return Prepared(
        config=config,
        policy=policy,
        grm=grm,
        prompts=prompts,
        held_out=data.held_out,
        placement=placement,
        meta=meta,
        lessons=stored_lessons(config, data) if config.cotrain.enabled else None,
        critic=critic,
    )


# -- places --------------------------------------------------------------------------------------------------------


def seat_roles(config: RunConfig) -> Placement:
    """Every role on its slots, whatever this machine has."""
    with section(""):
        placement = place(config.placement, config.roles)
    check_options(config, placement)
    if config.cluster.address is None:  # the machines of a joined cluster are known when it is joined
        with section(""):
            transport_of(config, placement, same_machine=True)
            if config.cotrain.enabled:
                transport_of(config, placement, same_machine=True, learner="grm_learner", engines="grm")
    if config.cotrain.enabled:
        check_grm_stays_awake(placement)
    if config.task == "finetune" and placement.time_sharing_roles:
        pool = placement.seats["learner"][0].pool
        raise ConfigError(
            f"placement.pools.{pool}.time_shared: fine-tuning samples first and learns then, without turns; "
            f"set placement.pools.{pool}.time_shared=false"
        )
    return placement


def check_grm_stays_awake(placement: Placement) -> None:
    """Its weights are pushed between any two moments."""
    pool = placement.seats["grm"][0].pool
    if placement.elastic_slots(pool):
        raise ConfigError(
            f"cotrain.enabled: the pool {pool} is elastic, and an engine that sleeps takes no weights of a GRM that "
            f"learns; set placement.pools.{pool}.elastic=false, or placement.roles.grm.pool to another"
        )


def check_machine(config: RunConfig, placement: Placement) -> None:
    """Does this machine have the slots? A cluster that is joined is asked when it is joined."""
    if config.cluster.address is None:
        with section(""):
            check_capacity(placement, [this_machine(config.cluster.kind)])


def this_machine(cluster_kind: str) -> NodeCapacity:
    import torch

    cores = CORES_ARE_SHARED if cluster_kind == "inprocess" else os.cpu_count() or 1
    return NodeCapacity(name="this machine", cpus=cores, gpus=torch.cuda.device_count())


# -- data ----------------------------------------------------------------------------------------------------------


def read_data(config: RunConfig) -> Data:
    """Prompts of both kinds; what the judge and the rule can't do without is there."""
    with section("data.path: "):
        prompts = prompts_at(config, config.data.path, config.data.num_prompts)
    with section("data.eval_path: "):
        held_out = load_held_out(config)
    train, num_shared = disjoint(prompts, held_out)
    if not train:
        raise ConfigError(f"data.path: every prompt of {config.data.path} is in data.eval_path as well; give others")
    if num_shared:
        log.warning("%d prompts are in the held-out set as well: they are not trained", num_shared)
    check_amount(config, len(train))
    if config.judge.kind == "rule" or "rule" in config.judge.mix:
        with section("data.path: "):
            for prompt in train:
                check_reference(config, prompt)
    return Data(train=train, held_out=held_out)


def prompts_at(config: RunConfig, path: str, count: int) -> tuple[Prompt, ...]:
    """What the policy is asked: prompts, or labelled work in the judge's own prompt where a judge is in training."""
    if config.judge.kind != "label":
        return load_prompts(path, num_tiny_prompts=count)
    return lessons_at(config, path, count)


def lessons_at(config: RunConfig, path: str, count: int) -> tuple[Prompt, ...]:
    judge = config.judge
    with section("judge."):
        lessons = Lessons.under(judge, config.labels)
    return lessons.of(load_labelled(path, scale=(judge.score_min, judge.score_max), num_tiny=count))


def stored_lessons(config: RunConfig, data: Data) -> PromptStream | None:
    """Of cotrain.data_path. Without it the policy's own prompts must say what is right."""
    cotrain = config.cotrain
    with section("judge."):
        Lessons.under(config.judge, config.labels)
    if cotrain.data_path is not None:
        with section("cotrain.data_path: "):
            lessons = lessons_at(config, cotrain.data_path, cotrain.num_items)
        return PromptStream(lessons, seed=config.seed)
    if not any(rulable(config, prompt) for prompt in data.train):
        raise ConfigError(
            f"cotrain.data_path: is null, and of no prompt in {config.data.path} can the rule {config.judge.rule} tell "
            "right answers from wrong ones; give labelled judgements, or prompts with a reference"
        )
    return None


def rulable(config: RunConfig, prompt: Prompt) -> bool:
    try:
        check_reference(config, prompt)
    except ValueError:
        return False
    return True


def load_held_out(config: RunConfig) -> tuple[Prompt, ...]:
    path = config.data.eval_path
    if path == "auto":
        path = HELD_OUT_OF.get(config.data.path)
    if path is None:
        return ()
    count = config.data.num_eval_prompts
    prompts = prompts_at(config, path, count)[:count]
    for prompt in prompts:
        if prompt.reference is not None:
            check_reference(config, prompt)
    return prompts


def check_reference(config: RunConfig, prompt: Prompt) -> None:
    """Can the rule work with it? Raises ValueError."""
    if prompt.reference is None:
        raise ValueError(
            f"prompt {prompt.prompt_id} has no reference, and the rule {config.judge.rule} judges by it; "
            "add the field reference, or type judge=generative"
        )
    try:
        rule_of(config.judge)("", prompt.reference)
    except ValueError as error:
        raise ValueError(f"prompt {prompt.prompt_id}: {error}") from error


def check_amount(config: RunConfig, num_prompts: int) -> None:
    """Is there a batch in it?"""
    epochs, batch = config.data.max_epochs, config.train.groups_per_batch
    if epochs is not None and epochs * num_prompts < batch:
        raise ConfigError(
            f"data.max_epochs: {epochs} x {num_prompts} prompts fill no batch of train.groups_per_batch={batch}; "
            f"type train.groups_per_batch={epochs * num_prompts} or less, or data.max_epochs=null"
        )


def check_objective(config: RunConfig) -> None:
    """Is it a number that summary.json can hold? Whether it will is known at the end."""
    looks = [f"eval.{when}.{name}" for when in ("initial", "final") for name in EVAL_METRICS]
    first = config.objective.split(".")[0]
    known = config.objective in looks if first == "eval" else first in {spec.name for spec in fields(Summary)}
    if not known:
        near = difflib.get_close_matches(config.objective, looks, n=1) or looks[-2:-1]
        raise ConfigError(
            f"objective: {config.objective!r} is no number of summary.json; did you mean {near[0]}? "
            f"Of eval there are {', '.join(looks)}"
        )


# -- models --------------------------------------------------------------------------------------------------------


def find_model(name: str, config: RunConfig, progress: Progress, *, weights: bool = True) -> Model:
    """Make a tiny model or fetch one from the hub if need be; its tokenizer can chat.

    Raises NotHere for a hub name that can't be had now; any other mistake is a ConfigError.
    """
    options = options_of(name, config)
    with section(f"{name}."):
        directory = find_files(resolve_model(options.path, progress), weights=weights)
        renderer = Renderer.load(directory, options.chat_template)
    check_vocabulary(name, options, renderer)
    window = window_of(name, config, renderer.context_tokens)
    # The machines of a joined cluster have caches of their own: they go by the hub name.
    by_name = config.cluster.address is not None and is_hub_name(options.path)
    return Model(name=name, path=options.path if by_name else directory, renderer=renderer, context_tokens=window)


def check_vocabulary(name: str, options: ModelConfig, renderer: Renderer) -> None:
    """A tokenizer that gives ids which the model has no row for is another model's."""
    if renderer.num_token_ids > renderer.vocab_size:
        raise ConfigError(
            f"{name}.path: the tokenizer in {options.path} gives ids up to {renderer.num_token_ids - 1}, the model "
            f"there has {renderer.vocab_size} rows (vocab_size in config.json): they don't belong together; give a "
            "directory with the model's own tokenizer"
        )


def check_policy(config: RunConfig, policy: Model, data: Data) -> None:
    """Its chat template takes the prompts, and its window takes at least one of them with an answer."""
    kinds = {tuple(message.role for message in prompt.messages): prompt for prompt in (*data.held_out, *data.train)}
    with section("policy."):
        for prompt in kinds.values():
            policy.renderer.render(prompt.messages)
    check_window(
        name="policy",
        context_tokens=policy.context_tokens,
        key="rollout.max_new_tokens",
        new_tokens=config.rollout.max_new_tokens,
        lengths=((prompt, len(policy.renderer.render(prompt.messages))) for prompt in data.train),
        what="prompt",
    )


def check_judge(config: RunConfig, grm: Model | None, data: Data) -> None:
    """Its template takes the prompts, and its window takes at least one of them with a full answer and a critique.

    A full one: who could write what the judge can't read would escape it. `grm` is None for a judge outside.
    """
    template = check_template(config.judge, (*data.train, *data.held_out))
    ahead = config.judge.principles == "ahead"
    num_shown = config.judge.responses_shown(config.train.group_size)
    cut = config.judge.too_long == "cut_response_middle"
    principle_tokens = config.judge.principles_max_new_tokens if ahead else 0
    extra_tokens = principle_tokens + (0 if cut else num_shown * config.rollout.max_new_tokens)

    def length(prompt: Prompt) -> int:
        text = template.render(prompt, *[""] * num_shown, principles="" if ahead else None)
        weighed = len(grm.renderer.render((Message(role="user", content=text),))) if grm else estimated_tokens(text)
        return weighed + extra_tokens

    with section("grm."):
        length(data.train[0])
    check_window(
        name="grm",
        context_tokens=grm.context_tokens if grm else window_of("grm", config, 0),
        key="judge.max_new_tokens",
        new_tokens=config.judge.max_new_tokens,
        lengths=((prompt, length(prompt)) for prompt in data.train),
        what="question with an answer of rollout.max_new_tokens",
    )


def check_template(judge: JudgeConfig, prompts: Sequence[Prompt]) -> JudgePrompt:
    """The judge's templates can be had, and the prompts have what these show. Raises ConfigError."""
    with section("judge."):
        template = JudgePrompt.of(judge)
        principles = PrinciplesPrompt(judge.principles_template) if judge.principles == "ahead" else None
        for prompt in [prompt for prompt in prompts if prompt.reference is None][:1]:
            template.render(prompt, "", principles=None if principles is None else "")
            if principles is not None:
                principles.render(prompt)
        if judge.protocol == "rubric":
            check_rubrics(prompts)
        if judge.structured:
            PATTERNS[judge.parser](judge.scale, 1)
    return template


def check_rubrics(prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        if not prompt.rubric:
            raise ValueError(
                f"protocol: rubric judges by the prompt's criteria, and prompt {prompt.prompt_id} has none; add the "
                "field rubric (a list of texts), or type judge=pointwise"
            )


def check_window(
    *, name: str, context_tokens: int, key: str, new_tokens: int, lengths: Iterable[tuple[Prompt, int]], what: str
) -> None:
    """At least one prompt leaves room for `new_tokens`: it ends at the first that does. A run skips the others.

    A window of 0 isn't known, and takes all.
    """
    too_long = []
    for prompt, num_tokens in lengths:
        if not context_tokens or num_tokens + new_tokens <= context_tokens:
            return
        too_long.append((num_tokens, prompt.prompt_id))
    length, prompt_id = min(too_long)
    room = context_tokens - length
    shorter = "shorter prompts, a shorter judge.template" if name == "grm" else "shorter prompts"
    way_out = f"type {key}={room} or less" if room > 0 else f"give {shorter}, or a model with a larger window"
    raise ConfigError(
        f"{key}: {new_tokens} new tokens after even the shortest {what} ({prompt_id}: {length} tokens) exceed the "
        f"{context_tokens} tokens of {name}; {way_out}"
    )


@contextmanager
def section(path: str) -> Iterator[None]:
    """A ValueError of what is checked inside gets the section's key in front, unless it names its section itself."""
    try:
        yield
    except ConfigError:
        raise
    except NotHere as error:
        raise ModelNotHere(f"{path}{error}") from error
    except ValueError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(path) else f"{path}{text}") from error


class ModelNotHere(ConfigError):
    """A hub name that can't be had now. task=plan goes on without it."""
