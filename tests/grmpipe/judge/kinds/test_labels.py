"""Judging tasks: the judge's own prompt, and labels that a rule reads."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from configs import judge_config

from grmpipe.config.judge import JudgeConfig, LabelConfig, Scale
from grmpipe.data.labelled_parts import LabelledParts
from grmpipe.judge.kinds.label_format import describe_label, judged_right, measure_agreement, num_scores
from grmpipe.judge.kinds.labels import JudgingTasks, LabelReward, find_rule
from grmpipe.judge.pointwise_adapter import PointwiseAdapter, judge_alone
from grmpipe.judge.prompt import JudgePrompt
from grmpipe.models.types import Completion, Message
from grmpipe.types import Criterion, Prompt, RankedResponses, Rollout, ScoredResponse, Turn, Verdict

QUESTION = Prompt(prompt_id="q", messages=(Message(role="user", content="6 x 7?"),), reference="42")


def scored(score: float) -> ScoredResponse:
    return ScoredResponse(item_id=f"s{score}", prompt=QUESTION, response="It is 42.", score=score, subset="sums")


def under(rule: str, **judge: object) -> JudgingTasks:
    return JudgingTasks.under(judge_config(kind="label", **judge), LabelConfig(rule=rule))


def test_judging_task_is_the_prompt_of_judging_without_its_label() -> None:
    (judging_task,) = under("exact").of([scored(7)])
    assert judging_task.messages == JudgePrompt.load("tiny").render(QUESTION, "It is 42.")
    assert (judging_task.reference, judging_task.prompt_id, judging_task.source) == ("exactly 7", "s7", "sums")


@pytest.mark.parametrize(("score", "label"), [(10, "at least 8"), (8, "at least 8"), (7, "below 8"), (1, "below 8")])
def test_by_sides_a_label_says_only_whether_the_response_passes(score: int, label: str) -> None:
    (judging_task,) = under("same_side").of([scored(score)])
    assert judging_task.reference == label


@pytest.mark.parametrize(
    ("scores", "label", "right"),
    [
        ((7,), "exactly 7", True), ((8,), "exactly 7", False), ((8,), "at least 8", True), ((7,), "at least 8", False),
        ((7,), "below 8", True), ((8,), "below 8", False), ((3, 5), "best 2 of 2", True),
        ((5, 5), "best 2 of 2", False), ((6, 5, 1), "best 1 of 3", True), ((6, 5, 6), "best 1 of 3", False),
    ],
)  # fmt: skip
def test_ties_are_wrong_and_a_single_score_must_agree_with_its_label(
    scores: tuple[int, ...], label: str, right: bool
) -> None:
    assert judged_right(scores, label) is right


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        ("Score: 7", "graded 7", 1.0), ("Score: 10", "graded 1", -1.0), ("Score: 4", "graded 8.5", 0.0),
        ("Score: hm", "graded 7", -1.0),
    ],
)  # fmt: skip
def test_graded_the_nearer_score_earns_more(text: str, label: str, reward: float) -> None:
    judging_task = dataclasses.replace(QUESTION, reference=label)
    judge = PointwiseAdapter(LabelReward(judge_config(kind="label")))
    verdict = asyncio.run(judge_alone(judge, judging_task, judgement(text))).verdict
    assert isinstance(verdict, Verdict) and verdict.outcome == pytest.approx(reward)


@pytest.mark.parametrize(
    ("scores", "reward", "right"),
    [((1, 9, 5), 1.0, True), ((9, 1, 5), -1.0, False), ((5, 1, 9), -1 / 3, False), ((5, 5, 5), 0.0, False)],
)
def test_graded_responses_earn_by_their_pairs(scores: tuple[int, ...], reward: float, right: bool) -> None:
    label = "graded 0 2.5 2"
    assert measure_agreement(scores, label, Scale()) == pytest.approx(reward)
    assert judged_right(scores, label) is right


def test_a_ranking_with_ties_is_one_graded_task() -> None:
    item = RankedResponses(item_id="r", prompt=QUESTION, responses=("a", "b", "c"), grades=(1.0, 0.0, 1.0))
    tasks = under("graded", protocol="listwise", template="listwise", parser="boxed").of([item])
    (label,) = [task.reference for task in tasks]
    assert label is not None and sorted(label.split()[1:]) == ["0", "1", "1"]
    assert num_scores(label) == 3 and describe_label(label).startswith("The true grades are: ")


def test_a_reference_that_is_no_label_is_refused() -> None:
    with pytest.raises(ValueError, match="not a label"):
        judged_right((5,), "42")


def judgement(text: str, status: str = "finished") -> Rollout:
    completion = Completion(token_ids=(1, 2), logprobs=(0.0, 0.0), text=text, finish_reason="stop", versions=())
    turn = Turn(new_ids=(5,), completion=completion)
    return Rollout(group_id="g", sibling=0, turns=(turn,), status=status)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rollout", "reward"),
    [
        (judgement("Fine.\nScore: 9"), 1.0),
        (judgement("No.\nScore: 3"), -1.0),
        (judgement("Fine, I would say 9"), -1.0),
        (judgement(""), -1.0),
        (judgement("Fine.\nScore: 9", "truncated"), -1.0),
    ],
)
def test_an_unparseable_judgement_is_a_wrong_answer_and_no_failure_of_a_judge(rollout: Rollout, reward: float) -> None:
    config = JudgeConfig(kind="label")
    (judging_task,) = under("same_side").of([scored(10)])
    report = asyncio.run(judge_alone(PointwiseAdapter(LabelReward(config)), judging_task, rollout))
    assert isinstance(report.verdict, Verdict)
    assert report.verdict.outcome == reward
    assert report.failures == ()


RANKED = RankedResponses(
    item_id="r", prompt=QUESTION, responses=("It is 41.", "It is 42.", "It is 43."), grades=(0, 1, 0)
)
LISTWISE = {"protocol": "listwise", "template": "listwise", "parser": "boxed"}
PAIRWISE = {"protocol": "pairwise", "template": "pairwise", "parser": "boxed", "vote": "majority", "num_judgements": 2}


def test_a_judge_of_one_response_learns_nothing_from_rankings_and_says_so_where_nothing_is_left() -> None:
    assert [judging_task.prompt_id for judging_task in under("exact").of([RANKED, scored(7)])] == ["s7"]
    with pytest.raises(ValueError, match=r"judge\.protocol=listwise"):
        under("exact").of([RANKED])


def test_a_list_is_shown_in_a_drawn_order_and_the_label_says_where_the_best_stands() -> None:
    items = [dataclasses.replace(RANKED, item_id=f"r{n}") for n in range(40)]
    judging_tasks = under("exact", **LISTWISE).of(items)
    places = set()
    for judging_task in judging_tasks:
        text = judging_task.messages[0].content
        shown = sorted(RANKED.responses, key=text.index)
        assert judging_task.reference == f"best {shown.index('It is 42.') + 1} of 3"
        places.add(judging_task.reference)
    assert len(places) == 3


def test_a_ranking_is_as_many_pairs_as_there_are_worse_responses() -> None:
    judging_tasks = under("exact", **PAIRWISE).of([RANKED, scored(7)])
    assert [judging_task.prompt_id for judging_task in judging_tasks] == ["r/0", "r/2"]
    for judging_task, other in zip(judging_tasks, ("It is 41.", "It is 43."), strict=True):
        text = judging_task.messages[0].content
        assert judging_task.reference == f"best {1 if text.index('It is 42.') < text.index(other) else 2} of 2"


@pytest.mark.parametrize(
    ("grades", "lists", "pairs"),
    [
        ((1, 1, 0), ["r#0", "r#1"], ["r#0/2", "r#1/2"]),
        ((3, 1, 2), ["r"], ["r/1", "r/2"]),
        ((2, 2, 2), [], []),
    ],
)
def test_each_of_several_best_responses_is_a_task_against_the_lower_ones(
    grades: tuple[float, ...], lists: list[str], pairs: list[str]
) -> None:
    item, other = dataclasses.replace(RANKED, grades=grades), dataclasses.replace(RANKED, item_id="other")
    for protocol, expected, last in ((LISTWISE, lists, 1), (PAIRWISE, pairs, 2)):
        judging_tasks = under("exact", **protocol).of([item, other])
        assert [judging_task.prompt_id for judging_task in judging_tasks[:-last]] == expected
    (first, *_) = under("exact", **LISTWISE).of([dataclasses.replace(RANKED, grades=(1, 1, 0))])
    text = first.messages[0].content
    assert "It is 42." not in text and first.reference == f"best {1 + (text.index('41') > text.index('43'))} of 2"


def test_a_label_that_is_no_whole_score_is_rounded_for_exactness_only() -> None:
    (exact,), (side,) = (under(rule).of([scored(7.5)]) for rule in ("exact", "same_side"))
    assert (exact.reference, side.reference) == ("exactly 8", "below 8")


def test_a_list_judge_reads_a_boxed_judgement_by_the_label_of_its_judging_task() -> None:
    rule = find_rule(judge_config(kind="label", **LISTWISE))
    assert rule("so\n\\boxed{3, 9, 4}", "best 2 of 3")
    assert not rule("so\n\\boxed{9, 9, 4}", "best 2 of 3")
    assert not rule("so\n\\boxed{3, 9}", "best 2 of 3")
    assert rule("so\n\\boxed{8}", "at least 8")


@pytest.mark.parametrize(
    ("judge", "told"),
    [
        ({"protocol": "turns", "template": "turns", "parser": "boxed"}, r"judge\.protocol"),
        (
            {"template": "shared_principles", "parser": "boxed", "principles": "shared"},
            r"judge\.principles\.kind=inline",
        ),
    ],
)
def test_a_judge_whose_judgements_no_label_fits_is_refused(judge: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        under("exact", **judge)


# -- steps and criteria ------------------------------------------------------------------------------------------------

SHORT = Criterion(text="Is short.")
EXACT = Criterion(text="Names the product.", kind="yes_no")
WHY = Criterion(text="Says why.", levels=((0, "No."), (1, "Hints."), (3, "Yes.")))
QUOTED = Criterion(text="Names a number.", kind="yes_no", evidence=True)


def parts(*criteria: Criterion, shares: tuple[float | None, ...], only_side: bool = False) -> LabelledParts:
    texts = ("It is 42.",) if criteria else tuple(f"step {number}" for number in range(len(shares)))
    return LabelledParts(
        item_id="i", prompt=QUESTION, texts=texts, shares=shares, criteria=criteria, is_yes_no=only_side
    )


@pytest.mark.parametrize(
    ("rule", "only_side", "label"),
    [
        ("exact", True, "at least 8; any; below 8"), ("exact", False, "exactly 10; any; exactly 1"),
        ("same_side", False, "at least 8; any; below 8"), ("graded", True, "graded 10; any; graded 1"),
    ],
)  # fmt: skip
def test_a_task_about_steps_has_a_label_for_each(rule: str, only_side: bool, label: str) -> None:
    tasks = under(rule, protocol="steps", template="steps", parser="boxed")
    (task,) = tasks.of([parts(shares=(1.0, None, 0.0), only_side=only_side)])
    asked = JudgePrompt.of(judge_config(protocol="steps", template="steps", parser="boxed"))
    assert task.messages == asked.render(QUESTION, "step 0", "step 1", "step 2")
    assert task.reference == label


@pytest.mark.parametrize(
    ("rule", "only_side", "label"),
    [
        ("exact", False, "exactly 7; exactly 10; exactly 3 from 0 to 3"),
        ("same_side", False, "at least 5.5; exactly 10; at least 1.5 from 0 to 3"),
        ("exact", True, "at least 5.5; exactly 10; at least 1.5 from 0 to 3"),
        ("graded", False, "graded 7.3; exactly 10; graded 2.1 from 0 to 3"),
    ],
)
def test_criteria_are_labelled_in_the_scores_by_which_they_are_judged(rule: str, only_side: bool, label: str) -> None:
    tasks = under(rule, protocol="rubric", template="rubric", parser="boxed")
    (task,) = tasks.of([parts(SHORT, EXACT, WHY, shares=(0.7, 0.7, 0.7), only_side=only_side)])
    assert task.reference == label
    asked = JudgePrompt.of(judge_config(protocol="rubric", template="rubric", parser="boxed"))
    assert task.messages == asked.render(QUESTION, "It is 42.", criteria=(SHORT, EXACT, WHY))


def test_criteria_are_asked_about_as_many_at_a_time_as_in_judging() -> None:
    judge = {"protocol": "rubric", "template": "tiny_criteria", "rubric": {"criteria_per_call": 1}}
    tasks = under("exact", **judge).of([parts(SHORT, EXACT, shares=(1.0, 0.0))])
    assert [(task.prompt_id, task.reference) for task in tasks] == [("i/c0", "exactly 10"), ("i/c1", "exactly 1")]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('Evidence 1: "42"\n\\boxed{10}', 1.0), ("\\boxed{10}", -1.0), ('Evidence 1: "43"\n\\boxed{10}', -1.0),
        ("\\boxed{1}", -1.0),
    ],
)  # fmt: skip
def test_a_criterion_called_met_earns_only_with_words_of_the_response(text: str, reward: float) -> None:
    judge = {"protocol": "rubric", "template": "rubric", "parser": "boxed"}
    (task,) = under("exact", **judge).of([parts(QUOTED, shares=(1.0,))])
    reader = PointwiseAdapter(LabelReward(judge_config(kind="label", **judge)))
    verdict = asyncio.run(judge_alone(reader, task, judgement(text))).verdict
    assert isinstance(verdict, Verdict) and verdict.outcome == reward


def test_a_criterion_called_not_met_needs_no_words() -> None:
    judge = {"protocol": "rubric", "template": "rubric", "parser": "boxed"}
    (task,) = under("exact", **judge).of([parts(QUOTED, shares=(0.0,))])
    reader = PointwiseAdapter(LabelReward(judge_config(kind="label", **judge)))
    verdict = asyncio.run(judge_alone(reader, task, judgement("\\boxed{1}"))).verdict
    assert isinstance(verdict, Verdict) and verdict.outcome == 1
