"""Writes the rollouts of another trainer as the journals of a run, which task=rejudge then reads like a run's own.

rejudge.path -> rows -> groups: step, group and equal prompt -> rollouts.jsonl, judgements.jsonl (the old rewards),
groups.jsonl (the steps), config.yaml. One row is in memory at a time, and each distinct prompt.
"""

import filecmp
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from grmpipe.config.io.yaml_io import read_yaml, to_yaml
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.catalogs import is_made, resolve_model
from grmpipe.data.foreign_rollouts import ForeignRollout, Reading, list_files, read_foreign
from grmpipe.data.prompts import identify_prompt, load_prompts
from grmpipe.data.rows import Findings
from grmpipe.judge.pointwise_adapter import NOBODY, rollout_of_messages, rollout_of_text
from grmpipe.judge.verdict import make_failure, outcome, report_score
from grmpipe.models.chat.thinking import KNOWN_MARKERS, ThinkingMarkers
from grmpipe.models.chat.tool_call_checks import quote_start
from grmpipe.models.hub import find_files
from grmpipe.models.types import UNKNOWN_ID, Message
from grmpipe.observe.journal import Journal, Thinning
from grmpipe.observe.recorder import GROUPS, JUDGEMENTS, ROLLOUTS, without_unknown
from grmpipe.observe.records import NUMBERS, THINNED, drop_numbers, encode, encode_report, encode_rollout
from grmpipe.roles.find_models import load_renderer
from grmpipe.run.run_prompts import check_reference
from grmpipe.types import GroupEnd, JudgeReport, Prompt, Rollout

CONFIG = "config.yaml"
JOURNALS = (ROLLOUTS, JUDGEMENTS, GROUPS)


def import_rollouts(config: RunConfig, run_dir: Path) -> tuple[str, ...]:
    """Write the journals of rejudge.path in a directory, or find the same there. Returns what is to be said of them.
    Raises ValueError for what can't be read, ConfigError if the directory holds something else.
    """
    if (run_dir / CONFIG).exists() and read_yaml(run_dir / CONFIG).rejudge.path is None:
        raise ConfigError(f"run_dir: {run_dir} holds a run; rejudge.path needs a run_dir of its own")
    run_dir.mkdir(0o700, parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=run_dir, prefix=".import-") as name:
            draft = Path(name)
            said = write_journals(config, draft)
            (draft / CONFIG).write_text(to_yaml(replace(config, run_dir=str(run_dir))), encoding="utf-8")
            if not (run_dir / ROLLOUTS).exists():
                for file in (JUDGEMENTS, GROUPS, CONFIG, ROLLOUTS):  # the last one says that the others are whole
                    (draft / file).replace(run_dir / file)
            elif not all(filecmp.cmp(draft / file, run_dir / file, shallow=False) for file in JOURNALS):
                raise ConfigError(f"run_dir: {run_dir} holds other rollouts, or other references; type another run_dir")
    finally:
        with suppress(OSError):  # it holds something
            run_dir.rmdir()
    return said


@dataclass(slots=True, kw_only=True)
class Counts:
    """What is said of an import. zeros: failures where the trainer's number is 0."""

    rollouts: int = 0
    left_out: int = 0
    zeros: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def describe(self, files: int, groups: Counter[int]) -> Iterator[str]:
        """groups: rollouts by the place of their group."""
        yield f"{self.rollouts} rollouts in {len(groups)} groups, of {files} file{'s' * (files > 1)}"
        if alone := sum(size == 1 for size in groups.values()):
            yield f"{alone} groups have one rollout, so that nothing is compared within them"
        if self.failures:
            causes = ", ".join(f"{count} {cause}" for cause, count in self.failures.most_common(6))
            yield (
                f"{self.failures.total()} old rewards are failures by the file ({causes}), {self.zeros} of them stand "
                "there as 0; they are compared with nothing"
            )
        if self.left_out:
            yield f"{self.left_out} rollouts failed without a response, and are left out"


def write_journals(config: RunConfig, folder: Path) -> tuple[str, ...]:
    assert config.rejudge.path is not None
    path = Path(config.rejudge.path)
    files, other_files = list_files(path)
    findings, known, counts = Findings(path), KnownPrompts(config), Counts()
    reading = Reading(findings=findings, reward=config.rejudge.reward, find=known.find_by_template)
    for file in JOURNALS:
        (folder / file).touch()
    rollouts, judgements, ends = (Journal(folder / file) for file in JOURNALS)
    prompts: dict[tuple[tuple[Message, ...], str | None], int] = {}
    groups: dict[tuple[int | None, str, int], int] = {}
    sizes: Counter[int] = Counter()
    for found in (one for file in files for one in read_foreign(file, reading)):
        if found.failure and not found.reply:
            counts.left_out += 1
            continue
        prompt = known.complete(found.prompt)
        index = prompts.setdefault((prompt.messages, prompt.reference), len(prompts))
        prompt = replace(prompt, prompt_id=f"p{index:06d}")
        group = groups.setdefault((found.step, found.group, index), len(groups))
        rollout = make_rollout(found, f"g{group:06d}", sizes[group])
        record = drop_numbers(encode_rollout(rollout)) | {"prompt_index": index, "prompt": encode(prompt)}
        # Nobody can train on it, which the first line says of all.
        rollouts.append(record | {THINNED: NUMBERS} | (Thinning(until=1).to_record() if not counts.rollouts else {}))
        who = {"group_id": rollout.group_id, "sibling": rollout.sibling}
        judgements.append(who | encode_report(make_report(found, rollout)))
        if found.step is not None and not sizes[group]:
            end = GroupEnd(
                group_id=rollout.group_id,
                prompt_index=index,
                prompt_id=prompt.prompt_id,
                outcome="trained",
                step=found.step,
            )
            ends.append(without_unknown({**encode(end), "early": None}))
        sizes[group] += 1
        counts.rollouts += 1
        if found.failure:
            counts.failures[found.failure.partition(":")[0] if ": " in found.failure else found.failure] += 1
            counts.zeros += found.reward == 0
    findings.report()
    for journal in (rollouts, judgements, ends):
        journal.close()
    if not counts.rollouts:
        raise ValueError(f"{path}: holds no rollouts with a response")
    said = [*counts.describe(len(files), sizes), *known.describe()]
    if other_files:
        said.append(f"{len(other_files)} files of evaluations, or of the same rollouts, are left out: {other_files[0]}")
    return tuple(said)


def make_rollout(found: ForeignRollout, group_id: str, sibling: int) -> Rollout:
    """The rollout, with one unknown token in each turn, so that its turns have advantages."""
    reply = found.reply
    if isinstance(reply, str):
        made = rollout_of_text(group_id, sibling, reply)
    else:
        made = rollout_of_messages(group_id, sibling, reply)
    turns = []
    for place, turn in enumerate(made.turns):
        completion = replace(
            turn.completion,
            token_ids=(UNKNOWN_ID,),
            logprobs=(0.0,),
            versions=(replace(NOBODY, end=1),),
            thought_chars=count_thought(turn.completion.text, found.begun if place == 0 else ""),
        )
        turns.append(replace(turn, completion=completion))
    if found.is_truncated:
        return replace(made, turns=tuple(turns), status="truncated", reason="tokens")
    return replace(made, turns=tuple(turns))


def count_thought(text: str, begun: str) -> int:
    """The length of the thought that a response begins with. begun: what the prompt's template began."""
    for begin, end in KNOWN_MARKERS:
        in_prompt = begin in begun and end not in begun
        if in_prompt or text.lstrip().startswith(begin):
            return ThinkingMarkers(open=begin, close=end, in_prompt=in_prompt).split_thought(text).num_chars
    return 0


def make_report(found: ForeignRollout, rollout: Rollout) -> JudgeReport:
    """The old reward as a verdict, or its failure."""
    if found.failure or found.reward is None:
        return JudgeReport(verdict=make_failure("died", found.failure))
    return report_score(outcome(rollout, found.reward), found.reward, found.parts or {"reward": found.reward})


class KnownPrompts:
    """The prompts of data.path, whose references and columns the file's equal prompts get."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        with_system, without_system = defaultdict[object, list[Prompt]](list), defaultdict[object, list[Prompt]](list)
        data = config.data
        self._prompts = (
            load_prompts(data.path, num_tiny_prompts=data.num_prompts, seed=config.seed, columns=data.columns)
            if data.path
            else ()
        )
        for prompt in self._prompts:
            with_system[identify_prompt(prompt)].append(prompt)
            without_system[drop_system(prompt)].append(prompt)
        # A chat template may write a system message of its own.
        self._tables: Sequence[tuple[Callable[[Prompt], object], Mapping[object, list[Prompt]]]] = (
            (identify_prompt, with_system), (drop_system, without_system),
        )  # fmt: skip
        self._rendered: dict[str, Prompt] | None = None
        self._counts: Counter[str] = Counter()

    def complete(self, prompt: Prompt) -> Prompt:
        """The prompt with what data.path has of an equal one, where the file itself has nothing."""
        found = next((table[key(prompt)] for key, table in self._tables if key(prompt) in table), [])
        references = {one.reference for one in found}
        if prompt.reference is None:
            outcome = "missing" if not references - {None} else "joined" if len(references) == 1 else "ambiguous"
            self._counts[outcome] += 1
        if not found or len(references) > 1:
            return prompt
        one = found[0]
        return replace(
            prompt,
            reference=one.reference if prompt.reference is None else prompt.reference,
            source=prompt.source or one.source,
            rubric=prompt.rubric or one.rubric,
            info=prompt.info or one.info,
            columns={**one.columns, **prompt.columns},
        )

    def find_by_template(self, text: str) -> Sequence[Message] | None:
        """The messages of the prompt of data.path that the policy's chat template makes this text of."""
        if self._rendered is None:
            self._rendered = {}
            if self._prompts and not is_made(self._config.data.path):
                policy = self._config.policy
                renderer = load_renderer(find_files(resolve_model(policy.path), weights=False), policy)
                for one in self._prompts:
                    ids = renderer.render(one.messages)
                    self._rendered |= {renderer.decode(ids): one, renderer.decode_special(ids): one}
        found = self._rendered.get(text)
        return None if found is None else found.messages

    def describe(self) -> Iterator[str]:
        if not self._counts or (is_made(self._config.data.path) and not self._counts["joined"]):
            return
        yield (
            f"references by equal prompts of data.path: {self._counts['joined']} rollouts have one now, "
            f"{self._counts['missing']} have none there, {self._counts['ambiguous']} have several different ones"
        )


def drop_system(prompt: Prompt) -> tuple[tuple[str, str], ...]:
    return tuple(one for one in identify_prompt(prompt) if one[0] != "system")


def check_all_references(judge: JudgeConfig, prompts: Sequence[Prompt], way_out: str) -> None:
    """Raise ValueError if a rule can't use the references of stored prompts. way_out: what to type if one has none."""
    if lacking := [prompt for prompt in prompts if prompt.reference is None]:
        raise ValueError(
            f"{len(lacking)} of {len(prompts)} prompts have no reference (first: {show_prompt(lacking[0])}), which the "
            f"rule of {judge.key} needs; type {way_out}"
        )
    for prompt in prompts:
        try:
            check_reference(judge, prompt)
        except ValueError as error:
            raise ValueError(f"{error} (the prompt: {show_prompt(prompt)})") from error


def show_prompt(prompt: Prompt) -> str:
    return repr(quote_start(prompt.messages[-1].content))
