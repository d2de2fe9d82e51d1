"""A prompt's rubric is read from its row, or the row is refused with its place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grmpipe.data.prompts import load_prompts
from grmpipe.data.rubrics import load_shared_rubric, name_criteria, parse_rubric
from grmpipe.observe.records import decode, encode
from grmpipe.types import Criterion, Prompt


def write(path: Path, rubric: object, field: str = "rubric") -> str:
    file = path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "Write a poem.", field: rubric}) + "\n")
    return str(file)


def test_criteria_are_texts_or_texts_with_weights(tmp_path: Path) -> None:
    (prompt,) = load_prompts(write(tmp_path, ["It rhymes.", {"text": "It is short.", "weight": 3}]))
    assert prompt.rubric == (Criterion(text="It rhymes."), Criterion(text="It is short.", weight=3.0))
    (prompt,) = load_prompts(write(tmp_path, [{"text": "It rhymes.", "weight": None}]))  # as Parquet has it
    assert prompt.rubric == (Criterion(text="It rhymes.", weight=1.0),)


def test_a_prompt_without_a_rubric_has_no_criteria(tmp_path: Path) -> None:
    (prompt,) = load_prompts(write(tmp_path, None))
    assert prompt.rubric == ()


@pytest.mark.parametrize(
    ("rubric", "said"),
    [
        ("It rhymes.", r"line 1: rubric: expected a list"),
        ([""], r"line 1: rubric\[0\]: expected a text"),
        (["It rhymes.", {"weight": 1}], r"rubric\[1\].text: expected a text"),
        ([{"text": "It rhymes.", "weight": 0}], r"rubric\[0\].weight: expected a number above 0"),
        ([{"text": "It rhymes.", "weight": "much"}], r"rubric\[0\].weight"),
        ([{"text": "It rhymes.", "weight": 10**400}], r"rubric\[0\].weight"),
        ([{"text": "It rhymes.", "weight": True}], r"rubric\[0\].weight"),
        ([{"text": "It rhymes.", "weight": -1}], r"rubric: no criterion has a weight above 0"),
        ([{"text": "a", "weight": -1, "essential": True}], r"rubric\[0\].essential: a fault \(weight -1\) can't"),
        ([{"text": "a", "from_step": -1}], r"rubric\[0\].from_step: expected a step of training, 0 or more, got -1"),
        ([{"text": "a", "from_step": 1.5}], r"rubric\[0\].from_step: expected a step of training"),
        ([{"text": "a", "from_step": True}], r"rubric\[0\].from_step: expected a step of training"),
        ([{"text": "a", "essential": "yes"}], r"rubric\[0\].essential: expected true or false"),
        ([{"text": "a", "tags": "form"}], r"rubric\[0\].tags: expected a list"),
        ([{"text": "a", "criterion": "b"}], r"rubric\[0\]: has text and criterion; give one"),
        ([{"text": "a", "weight": 1, "points": 2}], r"rubric\[0\]: has weight and points; give one"),
        (
            {"criteria": "a", "score1_description": " ", "score2_description": "b"},
            r"score1_description: expected a text",
        ),
        ("1. It rhymes.\n2. It is short. [Principle]", r"line 1: rubric: expected a list .* end with \[Hard Rule\]"),
        ([{"text": "a", "name": "n"}, {"text": "b", "name": "n"}], r"rubric\[1\].name: 'n' is also the name of \[0\]"),
        ([{"text": "a", "name": ""}], r"rubric\[0\].name: expected a text"),
        ([{"text": "a", "kind": "count"}], r"rubric\[0\].kind: expected graded or yes_no, .*; a count is graded, by"),
        ([{"text": "a", "kind": ["yes_no"]}], r"rubric\[0\].kind: expected graded"),
        ([{"text": "a", "kind": "yes_no", "levels": {"0": "b", "1": "c"}}], r"rubric\[0\].kind: yes_no has no levels"),
        ([{"text": "a", "levels": ["b"]}], r"rubric\[0\].levels: expected texts by score"),
        ([{"text": "a", "levels": {"low": "b"}}], r"rubric\[0\].levels: expected texts by score"),
        ([{"text": "a", "levels": {"1": "b"}}], r"rubric\[0\].levels: a single level tells nothing apart"),
        ([{"text": "a", "levels": {"1": "b", "2": 3}}], r"rubric\[0\].levels.2: expected a text"),
        ([{"text": "a", "evidence": "yes"}], r"rubric\[0\].evidence: expected true or false"),
    ],
)
def test_a_bad_rubric_names_its_place(tmp_path: Path, rubric: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_prompts(write(tmp_path, rubric))


def test_published_rubrics_are_read_as_they_are(tmp_path: Path) -> None:
    health_bench = [
        {"criterion": "Names the dose.", "points": 7, "tags": ["axis:accuracy"]},
        {"criterion": "Advises against a doctor.", "points": -5, "tags": ["level:example"]},
    ]
    (prompt,) = load_prompts(write(tmp_path, health_bench, "rubrics"))
    assert prompt.rubric == (
        Criterion(text="Names the dose.", weight=7, tags=("axis:accuracy",)),
        Criterion(text="Advises against a doctor.", weight=-5, tags=("level:example",)),
    )
    as_rewards = [{"title": "Dose", "description": "Essential Criteria: Names the dose.", "weight": 5}]
    (prompt,) = load_prompts(write(tmp_path, as_rewards))
    assert prompt.rubric == (Criterion(name="Dose", text="Essential Criteria: Names the dose.", weight=5),)
    levels = {f"score{level}_description": f"It rhymes {level} times." for level in range(1, 6)}
    (prompt,) = load_prompts(write(tmp_path, {"criteria": "Does it rhyme?"} | levels))
    (criterion,) = prompt.rubric
    assert criterion.text == "Does it rhyme?" and criterion.levels[4] == (5, "It rhymes 5 times.")
    assert criterion.whole_text.splitlines()[::5] == ["Does it rhyme?", "   5: It rhymes 5 times."]
    assert criterion.weight == 1
    text = "1. The response has two\n   paragraphs. [Hard Rule]\n\n2. The response is clear. [Principle]\n\n"
    (prompt,) = load_prompts(write(tmp_path, text))
    assert prompt.rubric == (
        Criterion(text="The response has two\n   paragraphs.", tags=("hard rule",)),
        Criterion(text="The response is clear.", tags=("principle",)),
    )


def test_a_criterion_has_a_name_a_kind_levels_and_evidence(tmp_path: Path) -> None:
    rubric = [
        {"text": "It is short.", "name": "short", "kind": "yes_no", "evidence": True},
        {"text": "How many rhymes?", "levels": {"2": "Two or more.", "0": "None.", "1": None}},
    ]
    (prompt,) = load_prompts(write(tmp_path, rubric))
    assert prompt.rubric == (
        Criterion(text="It is short.", name="short", kind="yes_no", evidence=True),
        Criterion(text="How many rhymes?", levels=((0, "None."), (2, "Two or more."))),
    )
    assert decode(json.loads(json.dumps(encode(prompt))), Prompt) == prompt


def test_every_criterion_is_named_and_no_two_alike() -> None:
    texts = ["It rhymes.", "It rhymes.", "It is short, and it says all that is asked.", "..."]
    rubric = [Criterion(text=text) for text in texts] + [Criterion(text="x", name="It rhymes")]
    assert name_criteria(rubric) == (
        "It rhymes (2)",
        "It rhymes (3)",
        "It is short, and it says",
        "criterion",
        "It rhymes",
    )


def test_titles_of_published_sets_may_repeat(tmp_path: Path) -> None:
    titled = [{"title": "Dose", "description": text, "weight": 1} for text in ("Names it.", "Explains it.")]
    (prompt,) = load_prompts(write(tmp_path, titled))
    assert [one.name for one in prompt.rubric] == ["Dose", ""]


def test_a_row_has_one_rubric(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "a", "rubric": ["b"], "rubrics": ["c"]}) + "\n")
    with pytest.raises(ValueError, match="rubric and rubrics: give one of them"):
        load_prompts(str(file))


def test_a_file_adds_criteria_by_source_to_those_of_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "rubric.json"
    file.write_text(json.dumps({"math": ["It is right."], "default": [{"text": "It is short.", "weight": 2}]}))
    rubric, own = load_shared_rubric(str(file)), Criterion(text="It is short.", weight=5)
    prompt = Prompt(prompt_id="p", messages=(), source="chat", rubric=(Criterion(text="It rhymes."),))
    assert rubric.join(prompt) == (*prompt.rubric, Criterion(text="It is short.", weight=2))
    assert rubric.join(replace(prompt, source="math")) == (*prompt.rubric, Criterion(text="It is right."))
    assert rubric.join(replace(prompt, rubric=(own,))) == (own,), "a prompt's own counts"
    file.write_text(json.dumps([{"text": "It is short.", "name": "short"}]))
    named = replace(own, text="Short it is.", name="short")
    assert load_shared_rubric(str(file)).join(replace(prompt, rubric=(named,))) == (named,), "by its name, too"
    file.write_text(json.dumps({"criteria": "Is it short?", "score1_description": "No.", "score2_description": "Yes."}))
    assert load_shared_rubric(str(file)).default == (Criterion(text="Is it short?", levels=((1, "No."), (2, "Yes."))),)
    assert load_shared_rubric(None).join(prompt) == prompt.rubric


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "path: .*: not JSON"),
        ("[]", "has no criteria"),
        ('{"math": [{"text": "a", "weight": -1}]}', r"rubric.json, math: rubric: no criterion has a weight above 0"),
        (None, "can't be read: No such file"),
    ],
)
def test_a_bad_file_of_criteria_says_what_is_wrong(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "rubric.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        load_shared_rubric(str(tmp_path / "rubric.json"))


@pytest.mark.parametrize(
    ("field", "near"), [("wieght", "weight"), ("point", "points"), ("essencial", "essential"), ("evidnce", "evidence")]
)
def test_a_misspelt_field_of_a_criterion_is_named_and_others_of_published_sets_are_not(field: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"^row 3: rubric\[0\]\.{field}: unknown field; did you mean {near}\?$"):
        parse_rubric({"rubric": [{"text": "It rhymes.", field: 2}]}, "row 3")
    further = {"criterion": "It rhymes.", "points": 2, "tags": [], "axis": "form", "id": "c1"}
    assert parse_rubric({"rubrics": [further]}, "row 3")[0].weight == 2
