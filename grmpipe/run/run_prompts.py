"""Prompts for training and for evaluation: reads them, separates them, checks that the judge can use them. Trains
nothing.
"""

import logging
from collections.abc import Sequence

from grmpipe.config.data import DataConfig
from grmpipe.config.io.key_errors import section
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.entry_names import POLICY
from grmpipe.config.reward import RewardTree
from grmpipe.config.reward_checks import check_sources
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.demonstrations import Demonstrations, load_demonstrations, make_sample
from grmpipe.data.labelled import load_labelled
from grmpipe.data.labelled_parts import LabelledParts, load_labelled_parts
from grmpipe.data.prompts import Data, disjoint, find_place, identify_prompt, load_prompts
from grmpipe.data.stream import PromptStream
from grmpipe.judge.kinds.function_judge import FunctionJudge
from grmpipe.judge.kinds.labels import JudgingTasks, find_rule
from grmpipe.judge.kinds.rule import RuleBrokenError
from grmpipe.models.chat.renderer import Renderer
from grmpipe.types import Labelled, Prompt, RankedResponses

log = logging.getLogger(__name__)

TRIED_REFERENCES = 200  # in a file of prompts: mathematics takes 3 ms each, which a start shouldn't wait for
HELD_OUT_OF = {
    "tiny://train": "tiny://held_out",
    "tiny://rubric/train": "tiny://rubric/held_out",
    "tiny://tools/train": "tiny://tools/held_out",
    "tiny://walk/train": "tiny://walk/held_out",
    "tiny://comparison/train": "tiny://comparison/held_out",
    "tiny://two_kinds/train": "tiny://two_kinds/held_out",
    "tiny://judgements": "tiny://judgements_held_out",
    "tiny://sums": "tiny://sums_held_out",
}
PROBED = (
    "the empty text, which a policy may answer too: return 0 for a wrong answer, and raise ValueError only for a "
    "reference that can't be used"
)


def read_data(config: RunConfig) -> Data:
    """Read both kinds of prompts, and check that they have what the judge and the rule need."""
    with section("data.path: "):
        prompts = prompts_at(config, config.data.path, config.data.num_prompts)
    with section("data.eval_path: "):
        held_out = load_held_out(config)
    train, num_shared = disjoint(prompts, held_out)
    if not train:
        raise ConfigError(
            f"data.path: every prompt of {config.data.path} is also in data.eval_path; give other prompts"
        )
    if num_shared:
        log.warning("%d prompts are also in the held-out set: they are not trained", num_shared)
    epochs, batch = config.data.max_epochs, config.train.groups_per_batch
    if epochs is not None and epochs * len(train) < batch:
        raise ConfigError(
            f"data.max_epochs: {epochs} x {len(train)} prompts don't fill one batch of "
            f"train.groups_per_batch={batch}; type train.groups_per_batch={epochs * len(train)} or less, "
            "or data.max_epochs=null"
        )
    with section(""):
        sources = {prompt.source for prompt in (*train, *held_out)}
        check_sources(config.rewards, sources)
        for key, source in config.rewards.idle_routes(sources):
            raise ConfigError(
                f"{key}.{source}: no prompt of {config.data.path} has this source; known: "
                f"{', '.join(sorted(sources)[:8])}; leave it out"
            )
    for name, judge in config.asked.judges.items():
        if judge.kind == "rule":
            shown = select_reaching(config.rewards, name, train) if name in config.judging.judges else train
            with section("data.path: "):
                check_references(judge, config.data.path, shown)
        if judge.kind == "function":
            columns = {column for prompt in select_reaching(config.rewards, name, train) for column in prompt.columns}
            with section(f"{judge.key}."):
                FunctionJudge(judge).function.check_columns(columns, config.data.path)
    if config.main_judge.kind != "label":
        note_unknown_truths(config.truth, config.data.path, train)
    return Data(train=train, held_out=held_out)


def select_reaching(rewards: RewardTree, judge_name: str, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that may reach a judge: a route sends each source to its own."""
    sources = {prompt.source for prompt in prompts}
    reaching = {source for source in sources if judge_name in rewards.judges(source)}
    return [prompt for prompt in prompts if prompt.source in reaching]


def prompts_at(config: RunConfig, path: str, count: int) -> tuple[Prompt, ...]:
    """Prompts for the policy, or labelled work in the judge's own prompt if a judge is in training."""
    if config.main_judge.kind != "label":
        return load_prompts(path, num_tiny_prompts=count, columns=config.data.columns)
    return load_judging_tasks(config.main_judge, config.data, path, count)


def load_judging_tasks(
    judge: JudgeConfig,
    data: DataConfig,
    path: str,
    count: int,
    others: Sequence[Prompt] = (),
    others_path: str = "data.eval_path",
) -> tuple[Prompt, ...]:
    """Judging tasks from labelled work, as a judge asks them, without those on one of these other prompts."""
    with section(f"{judge.key}."):
        judging_tasks = JudgingTasks.under(judge, data.labels)
    scale, about = (judge.scale.low, judge.scale.high), judge.protocol_kind.scores
    items: Sequence[Labelled | LabelledParts]
    if about == "responses":
        items = load_labelled(
            path, scale=scale, num_tiny=count, columns=data.columns, score_range=data.labels.score_range
        )
    else:
        items = load_labelled_parts(
            path, about=about, scale=scale, columns=data.columns, score_range=data.labels.score_range
        )
    known = {identify_prompt(prompt) for prompt in others}
    kept = [item for item in items if identify_prompt(item.prompt) not in known]
    if not kept:
        raise ValueError(f"every prompt of {path} is also in {others_path}; give other prompts")
    if len(kept) < len(items):
        log.warning(
            "%d judging tasks of %s use prompts of %s: they are not trained", len(items) - len(kept), path, others_path
        )
    ties = sum(isinstance(item, RankedResponses) and len(set(item.grades)) == 1 for item in kept)
    if ties:
        log.warning("%d items of %s are ties of all their responses: no judging task asks for the best", ties, path)
    return judging_tasks.of(kept)


def read_demonstrations(path: str | None, renderer: Renderer, seed: int) -> Demonstrations | None:
    """What the policy imitates beside its rollouts; null: nothing. Checks that its chat template takes each order of
    roles.
    """
    if path is None:
        return None
    with section("algorithm.sft.path: "):
        conversations = load_demonstrations(path)
        for one in {tuple(message.role for message in one): one for one in conversations}.values():
            make_sample(one, renderer, "a demonstration")
    return Demonstrations(conversations, renderer, seed)


def check_canaries(config: RunConfig) -> None:
    """Check that the file of canaries can be read, which the run does at its first evaluation."""
    if (path := config.judge_monitor.canaries_path) is not None:
        with section("judge_monitor.canaries_path: "):
            load_labelled(path)


def load_stored_tasks(config: RunConfig, role: str, data: Data) -> PromptStream | None:
    """The stored judging tasks of a model that learns to judge: a GRM next to the policy, or the policy itself, whose
    tasks are on other prompts than its own. Without a file of them, checks that the policy's prompts have references.
    """
    judge = config.judging.find_training_judge(role)
    if role == POLICY:
        key, path, count = "algorithm.self_judging", config.algorithm.self_judging.data_path, config.data.num_prompts
        others, others_path = (*data.train, *data.held_out), "data.path or data.eval_path"
    else:
        cotrain, key = config.trained_grms[role], f"{config.models[role].key}.train"
        path, count, others, others_path = cotrain.data_path, cotrain.num_items, data.held_out, "data.eval_path"
    with section(f"{judge.key}."):
        JudgingTasks.under(judge, config.data.labels)
    if path is not None:
        with section(f"{key}.data_path: "):
            judging_tasks = load_judging_tasks(judge, config.data, path, count, others, others_path)
        return PromptStream(judging_tasks, seed=config.seed)
    if role != POLICY and config.trained_grms[role].labels_from is not None:
        return None
    if not any(rulable(config.truth, prompt) for prompt in data.train if config.may_ask(role, prompt.source)):
        raise ConfigError(
            f"{key}.data_path: is null, and for no prompt of {config.data.path} that {judge.name} judges can the rule "
            f"{config.truth.rule} separate right from wrong answers; give labelled judgements, or prompts with a "
            "reference"
        )
    return None


def rulable(truth: JudgeConfig, prompt: Prompt) -> bool:
    try:
        check_reference(truth, prompt)
    except RuleBrokenError as error:
        raise ConfigError(f"{error}; it was tried with {PROBED}") from error
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
    check_references(config.truth, path, [prompt for prompt in prompts if prompt.reference is not None])
    return prompts


def check_references(judge: JudgeConfig, path: str, prompts: Sequence[Prompt]) -> None:
    """Check that a judge's rule can use the references of the prompts at `path`. ValueError names file and line; it is
    a ConfigError where the rule itself is at fault.
    """
    for prompt in prompts:
        try:
            check_reference(judge, prompt)
        except RuleBrokenError as error:
            raise ConfigError(f"{error}; it was tried on {find_place(path, prompt)}, with {PROBED}") from error
        except ValueError as error:
            raise ValueError(f"{find_place(path, prompt)}: {error}") from error


def note_unknown_truths(judge: JudgeConfig, path: str, prompts: Sequence[Prompt]) -> None:
    """Say once which prompts have a reference that the rule of the true accuracy can't read: they enter no accuracy."""
    tried = [prompt for prompt in prompts if prompt.reference is not None][:TRIED_REFERENCES]
    unread, first = 0, ""
    for prompt in tried:
        try:
            check_reference(judge, prompt)
        except ValueError as error:
            unread, first = unread + 1, first or f"{find_place(path, prompt)}: {error}"
    if unread:
        log.warning(
            "true accuracy: the rule %s can't read the references of %s of %d prompts tried, which enter none; %s",
            judge.rule, "all" if unread == len(tried) else unread, len(tried), first,
        )  # fmt: skip


def check_reference(judge: JudgeConfig, prompt: Prompt) -> None:
    """Check that a judge's rule can use a prompt's reference. Raises ValueError."""
    if prompt.reference is None:
        raise ValueError(
            f"the prompt has no reference, and the rule {judge.rule} needs one; "
            "add the field reference, or type judge=generative"
        )
    find_rule(judge)("", prompt.reference)
