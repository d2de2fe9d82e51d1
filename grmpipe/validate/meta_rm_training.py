"""Checks of task=train_meta_rm before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.io.key_errors import section
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.catalogs import resolve_model
from grmpipe.evaluation.labelled_judgements import LabelledJudgement, Split, read_examples
from grmpipe.models.hub import find_files
from grmpipe.models.lm.packed_check import check_packable
from grmpipe.models.lm.scalar_head import outline_scalar_head
from grmpipe.roles.find_models import find_model, find_shared_limit
from grmpipe.roles.learners import check_experts, check_parallel, check_shares_no_samples
from grmpipe.roles.machines import check_machine
from grmpipe.roles.roles import Model, ResolvedRole, Roles, resolve_roles
from grmpipe.scheduler.placement import Placement, place
from grmpipe.types import Prompt
from grmpipe.validate.context_limits import check_thinking_budget
from grmpipe.validate.data import HELD_OUT_OF, load_judging_tasks


def prepare_meta_training(config: RunConfig) -> MetaRmTraining:
    """Prepare a training of a meta-RM. Every refusal is a ConfigError that names the key and what to type."""
    check_task(config)
    judge = config.main_judge
    sampled = judge.model
    sampling, learning = (seat(config, role) for role in (sampled, "learner"))
    check_parallel(config, learning)
    check_shares_no_samples(config)
    stored = read_stored(config)
    judging_tasks = {} if stored else read_judging_tasks(config)
    roles = resolve_roles(config, sampling)
    roles.check_installed(joined=config.cluster.address is not None)
    grm = find_model(roles.served[sampled], config)
    check_thinking_budget(judge, roles.served[sampled], grm)
    start_path = find_start(config, grm)
    check_experts(config, start_path)
    return MetaRmTraining(
        config=config,
        grm=grm,
        start_path=start_path,
        judging_tasks=judging_tasks,
        stored=stored,
        sampling=sampling,
        learning=learning,
        roles=roles,
        learner=resolve_roles(config, learning)["learner"],
    )


def check_task(config: RunConfig) -> None:
    if config.main_judge.model not in config.judging.local_roles:
        raise ConfigError(
            "judge.kind: task=train_meta_rm samples a local GRM; type judge.kind=generative, and a grm.engine that "
            "isn't openai"
        )
    if config.resume != "never":
        raise ConfigError(
            "resume: task=train_meta_rm can't be resumed, but its judgements can be used again: type resume=never and "
            "meta_rm.judgements=<its run_dir>/judgements.jsonl"
        )


def seat(config: RunConfig, role: str) -> Placement:
    with section(""):
        placement = place(config.placement, (role,), config.served, config.learners)
    check_machine(config, placement)
    return placement


def read_stored(config: RunConfig) -> tuple[LabelledJudgement, ...]:
    if config.meta_rm.judgements is None:
        return ()
    with section("meta_rm.judgements: "):
        return read_examples(Path(config.meta_rm.judgements))


def read_judging_tasks(config: RunConfig) -> Mapping[Split, Sequence[Prompt]]:
    """Read labelled work for training and for measuring; none is in both."""
    held_out_path = HELD_OUT_OF.get(config.data.path) if config.data.eval_path == "auto" else config.data.eval_path
    if held_out_path is None:
        raise ConfigError("data.eval_path: held-out labelled responses are needed to measure the result; give a file")
    with section("data.path: "):
        train = load_judging_tasks(config, config.main_judge, config.data.path, config.data.num_prompts)
    with section("data.eval_path: "):
        held_out = load_judging_tasks(config, config.main_judge, held_out_path, config.data.num_eval_prompts)
    asked = {judging_task.messages for judging_task in held_out}
    return {
        "train": [judging_task for judging_task in train if judging_task.messages not in asked],
        "held_out": held_out,
    }


def find_start(config: RunConfig, grm: Model) -> str:
    """The directory that training starts from: the GRM, or a model that reads the same tokens."""
    if config.meta_rm.start_path is None:
        directory = grm.path
    else:
        with section("meta_rm.start_"):
            directory = find_files(resolve_model(config.meta_rm.start_path), weights=True)
    with section("meta_rm.start_"):
        check_packable(outline_scalar_head(directory), directory)
        window = find_shared_limit(directory, config, grm)
        if window < grm.context_tokens:
            raise ValueError(
                f"path: its context window of {window} tokens is smaller than the GRM's ({grm.context_tokens})"
            )
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaRmTraining:
    """A checked training of a meta-RM.

    start_path: the model that gets a head, or already has one.
    judging tasks:    the questions for the GRM; `stored`: judgements that need not be sampled.
    """

    config: RunConfig
    grm: Model
    start_path: str
    judging_tasks: Mapping[Split, Sequence[Prompt]]
    stored: tuple[LabelledJudgement, ...]
    sampling: Placement
    learning: Placement
    roles: Roles  # while the GRM samples
    learner: ResolvedRole
