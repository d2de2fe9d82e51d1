"""Labelled judgements: sampled from a GRM, written to a file, read back."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec

from grmpipe.judge.grm import GrmClient, GrmQuestion
from grmpipe.judge.kinds.label_format import judged_right, num_scores
from grmpipe.pipeline.health import OutageBreaker
from grmpipe.scheduler.run_together import raise_first_failure
from grmpipe.types import Failed, Judgement, Prompt

Split = Literal["train", "held_out"]


class LabelledJudgement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parsed judgement, and whether it agrees with the label of what it judged.

    label: the item's, in the format of grmpipe/judge/kinds/label_format.py.
    """

    split: Split
    item_id: str
    subset: str
    label: str
    scores: tuple[float, ...]  # in the order shown
    right: bool
    text: str
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the meta-RM reads."""
        return self.prompt_ids + self.sampled_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledExamples:
    """The labelled judgements of all items. A failed judgement is no example: no vote ever sees it."""

    examples: tuple[LabelledJudgement, ...]
    failed: Mapping[str, int]  # cause -> number
    num_tokens: int


async def sample(
    client: GrmClient, judging_tasks: Mapping[Split, Sequence[Prompt]], num_judgements: int, breaker: OutageBreaker
) -> SampledExamples:
    """Sample `num_judgements` of each item, all concurrently. Raises Unfit."""

    async def ask(judging_task: Prompt, index: int) -> list[Judgement | Failed]:
        await breaker.until_fit()
        results = await client.judgement(make_question(client, judging_task), index, 0)
        breaker.record(results[-1])
        return results

    asked = [
        (split, judging_task, index)
        for split, some in judging_tasks.items()
        for judging_task in some
        for index in range(num_judgements)
    ]  # fmt: skip
    async with raise_first_failure() as tasks:
        answers = [tasks.create_task(ask(judging_task, index)) for _, judging_task, index in asked]
    examples: list[LabelledJudgement] = []
    failed = Counter[str]()
    for (split, judging_task, _), answer in zip(asked, answers, strict=True):
        examples += [make_example(split, judging_task, one) for one in answer.result() if isinstance(one, Judgement)]
        failed.update(one.cause for one in answer.result() if isinstance(one, Failed))
    num_tokens = sum(len(example.sampled_ids) for example in examples)
    return SampledExamples(examples=tuple(examples), failed=failed, num_tokens=num_tokens)


def make_question(client: GrmClient, judging_task: Prompt) -> GrmQuestion:
    assert judging_task.reference is not None, f"{judging_task.prompt_id}: judging tasks have labels"
    count = num_scores(judging_task.reference)
    return GrmQuestion(
        group_id=judging_task.prompt_id,
        name=judging_task.prompt_id,
        siblings=tuple(range(count)),
        num_scores=count,
        prompt=client.grm.prompt(judging_task.messages),
    )


def make_example(split: Split, judging_task: Prompt, judgement: Judgement) -> LabelledJudgement:
    label = judging_task.reference or ""
    return LabelledJudgement(
        split=split,
        item_id=judging_task.prompt_id,
        subset=judging_task.source,
        label=label,
        scores=judgement.scores,
        right=judged_right(judgement.scores, label),
        text=judgement.completion.text,
        prompt_ids=judgement.prompt_ids,
        sampled_ids=judgement.completion.token_ids,
    )


def batches(
    examples: Sequence[LabelledJudgement], num_items: int, num_steps: int, seed: int
) -> Iterator[list[LabelledJudgement]]:
    """`num_steps` batches with all judgements of `num_items` items each, in a new order in each epoch."""
    by_item: dict[str, list[LabelledJudgement]] = {}
    for example in examples:
        by_item.setdefault(example.item_id, []).append(example)
    draw, waiting = random.Random(f"meta {seed}"), list[str]()
    for _ in range(num_steps):
        while len(waiting) < num_items:
            epoch = list(by_item)
            draw.shuffle(epoch)
            waiting += epoch
        items, waiting = waiting[:num_items], waiting[num_items:]
        yield [example for item in items for example in by_item[item]]


def write_examples(path: Path, examples: Sequence[LabelledJudgement]) -> None:
    """Write one example per line."""
    path.write_bytes(msgspec.json.Encoder().encode_lines(examples))


def read_examples(path: Path) -> tuple[LabelledJudgement, ...]:
    """Read what `write_examples` wrote. ValueError names the line and the field."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    examples: list[LabelledJudgement] = []
    for number, line in enumerate(lines, start=1):
        try:
            examples.append(msgspec.json.decode(line, type=LabelledJudgement))
        except msgspec.ValidationError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {number}: not JSON in UTF-8 ({error})") from error
    for split in get_args(Split):
        if not any(example.split == split for example in examples):
            raise ValueError(f'{path}: holds no judgement whose "split" is "{split}"')
    return tuple(examples)
