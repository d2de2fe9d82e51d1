"""Responses from elsewhere: which rows are read, and what is said of those that aren't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grmpipe.data.rows import Findings
from grmpipe.models.types import Message
from grmpipe.observe.recorder import JudgedSibling
from grmpipe.run.tasks.score import parse_responses, read_groups, to_line
from grmpipe.serve.service import describe
from grmpipe.types import JudgedCriterion, JudgeReport, Verdict

USER = {"role": "user", "content": "why?"}


def test_responses_are_the_siblings_of_a_group_and_columns_stay_with_the_prompt() -> None:
    row = {"prompt": "6 x 7?", "responses": ["42", ""], "reference": 42, "level": 3}
    found = parse_responses(row, "judge", "g", Findings(Path("judge")))
    assert [(one.group_id, one.sibling, one.answer) for one in found.rollouts] == [("g", 0, "42"), ("g", 1, "")]
    assert (found.prompt.reference, found.prompt.columns["level"]) == ("42", 3)
    assert "responses" not in found.prompt.columns, "a reward function would be given them"


def test_an_episode_keeps_what_its_tools_said() -> None:
    episode = [
        {"role": "user", "content": "hint"}, {"role": "assistant", "content": "add(1, 2)"},
        {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."},
    ]  # fmt: skip
    (rollout,) = parse_responses(
        {"prompt": "1 + 2?", "responses": [episode]}, "judge", "g", Findings(Path("judge"))
    ).rollouts
    assert rollout.opening == (Message(role="user", content="hint"),)
    assert [turn.completion.text for turn in rollout.turns] == ["add(1, 2)", "It is 3."]
    assert rollout.turns[0].replies == (Message(role="tool", content="3"),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"responses": None}, r"exactly one of the fields response and responses; its fields: prompt"),
        ({"response": "x"}, r"exactly one of the fields response and responses"),
        ({"responses": "42"}, r"responses: expected a list of texts, or of lists of messages, got '42'"),
        ({"responses": []}, r"responses: expected a list of texts"),
        ({"responses": [7]}, r"responses\[0\]: expected a text, or a list of messages, got 7"),
        ({"responses": ["a", []]}, r"responses\[1\]: expected a text, or a list of messages"),
        ({"responses": [[USER]]}, r"responses\[0\]: expected a message with role assistant"),
        (
            {"responses": [[{"role": "system", "content": "x"}]]},
            r"responses\[0\]\[0\]\.role: expected one of assistant",
        ),
        ({"responses": [[{"role": "assistant", "content": None}]]}, r"responses\[0\]\[0\]: .*content, a text"),
        ({"responses": ["\ud83d"]}, r"responses\[0\]: text: half of a surrogate pair"),
        ({"prompt": ""}, r"prompt: expected a text that isn't empty"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, r"the last one must have role user"),
        ({"reference": float("nan")}, r"reference: expected a text or a finite number"),
        ({"rubric": ["a", 3]}, r"rubric\[1\]"),
    ],
)
def test_what_can_not_be_judged_is_refused_by_its_field(change: dict[str, Any], words: str) -> None:
    row = {"prompt": "6 x 7?", "responses": ["42"]} | change
    with pytest.raises(ValueError, match=rf"^judge: {words}|^judge: .*{words}"):
        parse_responses(row, "judge", "g", Findings(Path("judge")))


def test_a_file_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n\n{"prompt": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 3: expected exactly one"):
        list(read_groups(file))
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="is empty; a line looks like"):
        list(read_groups(file))


def test_a_verdict_by_a_rubric_shows_its_criteria_by_name() -> None:
    verdict = Verdict(rewards=(), score=7.0, breakdown={}, score_std=0.0, num_judgements=1)
    met = (JudgedCriterion(name="kind", met=0.5), JudgedCriterion(name="short", met=None))
    plain, by_rubric = JudgeReport(verdict=verdict), JudgeReport(verdict=verdict, criteria=met)
    group = parse_responses({"prompt": "6 x 7?", "response": "42"}, "judge", "g", Findings(Path("judge")))
    for report, shown in (
        (plain, None),
        (by_rubric, {"kind": 0.5, "short": None}),
        (JudgeReport(verdict=verdict, by_judge={"a": by_rubric, "b": plain}), {"a/kind": 0.5, "a/short": None}),
    ):
        one = JudgedSibling(group_id="g", sibling=0, report=report)
        (line,) = to_line(group, [one])["verdicts"]  # type: ignore[misc]
        assert line.get("criteria") == describe(one).get("criteria") == shown
    met = (JudgedCriterion(name="kind", met=0.0, caps=True), JudgedCriterion(name="flatters", met=1.0, fault=True))
    one = JudgedSibling(group_id="g", sibling=0, report=JudgeReport(verdict=verdict, criteria=met))
    (line,) = to_line(group, [one])["verdicts"]  # type: ignore[misc]
    for said in (line, describe(one)):
        assert (said["faults"], said["capped_by"]) == (["flatters"], ["kind"])
