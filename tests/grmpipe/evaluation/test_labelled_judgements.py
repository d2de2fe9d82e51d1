"""Labelled judgements: what is sampled, what is kept of it, and the quality of votes over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from configs import judge_config
from msgspec.structs import replace

from grmpipe.config.judge import JudgeConfig
from grmpipe.evaluation.labelled_judgements import (
    LabelledJudgement,
    SampledExamples,
    batches,
    read_examples,
    sample,
    write_examples,
)
from grmpipe.judge.grm import GrmClient, GrmPrompt
from grmpipe.models.types import Completion, EngineRefused, Message, RequestContext, SamplingParams, VersionSpan
from grmpipe.pipeline.health import OutageBreaker, ServiceHealth, Unfit
from grmpipe.run.tasks.train_meta_rm import measure
from grmpipe.types import Prompt


class WrittenGrm:
    """A GRM with written answers, by prompt and index of the judgement."""

    name, context_tokens, thinking, thinks = "grm", 1000, None, False

    def __init__(self, texts: dict[str, list[str]]) -> None:
        self._texts = texts
        self.asked = Counter[str]()

    def prompt(self, messages: Sequence[Message]) -> GrmPrompt:
        (message,) = messages
        token_ids = tuple(message.content.encode())
        return GrmPrompt(messages=tuple(messages), token_ids=token_ids, num_tokens=len(token_ids))

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return contextlib.nullcontext()

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        index = int(context.request_id.rpartition("/j")[2].partition(".")[0])
        self.asked[context.request_id] += 1
        text = self._texts[prompt.messages[-1].content][index]
        ids = tuple(text.encode())
        span = VersionSpan(model="grm", version=0, start=0, end=len(ids))
        return Completion(token_ids=ids, logprobs=(0.0,) * len(ids), text=text, finish_reason="stop", versions=(span,))


def judging_task(name: str, label: str) -> Prompt:
    return Prompt(
        prompt_id=name, messages=(Message(role="user", content=f"judge {name}"),), source="s", reference=label
    )


def example(item_id: str, score: float, right: bool, split: str = "held_out") -> LabelledJudgement:
    return LabelledJudgement(
        split=split, item_id=item_id, subset="", label="at least 8", scores=(score,), right=right, text="",
        prompt_ids=(1,), sampled_ids=(2, 3),
    )  # type: ignore[arg-type]  # fmt: skip


async def sampled(client: GrmClient, judging_tasks: Any, num_judgements: int) -> SampledExamples:
    health = ServiceHealth(
        "judging", max_failure_rate=0.2, window=8, pause_s=0.0, counted="judgements", key="judge.max_failure_rate"
    )
    return await sample(client, judging_tasks, num_judgements, OutageBreaker(health))


def test_a_grm_that_is_down_stops_the_sampling_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    grm = WrittenGrm({})

    async def refuses(*_: object) -> None:
        grm.asked["?"] += 1
        raise EngineRefused("out of memory")

    monkeypatch.setattr(grm, "ask", refuses)
    tasks = {"train": [judging_task(str(number), "at least 8") for number in range(50)]}
    with pytest.raises(Unfit, match=r"judge\.max_failure_rate=0\.2\).*refused; the last one: out of memory"):
        asyncio.run(sampled(GrmClient(grm, judge_config(max_concurrency=2), seed=0), tasks, 2))


def test_judgements_are_labelled_and_hold_what_the_grm_read_and_wrote() -> None:
    grm = WrittenGrm({"judge a": ["Score: 9", "Score: 2"], "judge b": ["Score: 3", "Score: 10"]})
    client = GrmClient(grm, JudgeConfig(), seed=0)
    judging_tasks = {"train": [judging_task("a", "at least 8")], "held_out": [judging_task("b", "exactly 3")]}
    found = asyncio.run(sampled(client, judging_tasks, 2))
    assert [(e.split, e.item_id, e.scores, e.right) for e in found.examples] == [
        ("train", "a", (9.0,), True), ("train", "a", (2.0,), False),
        ("held_out", "b", (3.0,), True), ("held_out", "b", (10.0,), False),
    ]  # fmt: skip
    first = found.examples[0]
    assert bytes(first.token_ids) == b"judge aScore: 9" and first.subset == "s"
    assert not found.failed and found.num_tokens == len(b"Score: 9" * 3 + b"Score: 10")


def test_an_unparseable_judgement_is_asked_again_and_never_an_example() -> None:
    grm = WrittenGrm({"judge a": ["Score: 9", "no idea"]})
    client = GrmClient(grm, judge_config(max_retries=1), seed=0)
    found = asyncio.run(sampled(client, {"train": [judging_task("a", "at least 8")]}, 2))
    assert [e.text for e in found.examples] == ["Score: 9"]
    assert found.failed == {"unparseable": 2} and grm.asked.total() == 3


def test_examples_come_back_from_their_file(tmp_path: Path) -> None:
    examples = (example("a", 9.0, True, "train"), example("b", 1.0, False))
    write_examples(tmp_path / "judgements.jsonl", examples)
    assert read_examples(tmp_path / "judgements.jsonl") == examples


def test_a_bad_line_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "judgements.jsonl"
    write_examples(path, [example("a", 9.0, True, "train"), example("b", 1.0, False)])
    good = path.read_text().splitlines()
    for line, words in (
        ("{", "line 2: not JSON"),
        ('{"split": "train"}', "line 2: Object missing required field `item_id`"),
        (good[1].replace('"held_out"', '"test"'), r"line 2: Invalid enum value 'test' - at `\$\.split`"),
        (good[1].replace("[2,3]", '["2"]'), r"line 2: Expected `int`, got `str` - at `\$\.sampled_ids"),
    ):
        path.write_text(f"{good[0]}\n{line}\n")
        with pytest.raises(ValueError, match=words):
            read_examples(path)
    path.write_text(good[0])
    with pytest.raises(ValueError, match='holds no judgement whose "split" is "held_out"'):
        read_examples(path)
    with pytest.raises(ValueError, match="can't be read"):
        read_examples(tmp_path / "none.jsonl")


def test_the_meta_rm_turns_a_vote_where_the_wrong_judgements_are_loud() -> None:
    """A wrong answer (below 8 is right): two judgements of four pass it, and their scores lift the mean to 8."""
    loud = [example("x", 10.0, False), example("x", 10.0, False)]
    sober = [example("x", 5.0, True), example("x", 7.0, True)]
    judgements = [replace(one, label="below 8") for one in (*loud, *sober)] + [example("y", 9.0, True)]
    told = measure(judgements, [0.1, 0.2, 0.9, 0.8, 0.7], k_meta=0)
    assert (told["vote_mean"], told["vote_best"], told["vote_weighted"]) == (0.5, 1.0, 1.0)
    assert (told["auc"], told["accuracy"], told["base_rate"]) == (1.0, 1.0, 0.6)
    assert measure(judgements, [0.9, 0.2, 0.1, 0.1, 0.7], k_meta=1)["vote_best"] == 0.5


def test_batches_hold_whole_items_and_each_once_an_epoch() -> None:
    examples = [example(item, score, True, "train") for item in "abcde" for score in (1.0, 2.0)]
    drawn = list(batches(examples, num_items=2, num_steps=5, seed=0))
    assert all(len(batch) == 4 for batch in drawn)
    assert Counter(e.item_id for batch in drawn for e in batch) == dict.fromkeys("abcde", 4)
    assert list(batches(examples, 2, 5, seed=0)) == drawn != list(batches(examples, 2, 5, seed=1))


def test_the_file_is_readable_by_others(tmp_path: Path) -> None:
    write_examples(tmp_path / "j.jsonl", [example("ü", 9.0, True)])
    row = json.loads((tmp_path / "j.jsonl").read_text(encoding="utf-8"))
    assert row["item_id"] == "ü" and row["scores"] == [9.0] and row["sampled_ids"] == [2, 3]
