"""The shipped tiny models, their tokenizer, and the resolution of `tiny://`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.scorer import ScalarScorer, ScorerSpec
from grmpipe.models.lm.scalar_head import scalar_config
from grmpipe.models.types import Message
from grmpipe.tiny import __main__ as cli
from grmpipe.tiny import resolve
from grmpipe.tiny.examples import LARGEST_WORD_NUMBER, SftTask
from grmpipe.tiny.judgements import ScoredText, make_judgements
from grmpipe.tiny.malformed import draw_malformed_text
from grmpipe.tiny.problems import UNKNOWN_THINGS, Problem, find_thing, is_right, make_problems
from grmpipe.tiny.quality import Judged, accuracy, agreement, judge_all, make_passes
from grmpipe.tiny.recipes import META, RECIPES, REWARD_MODEL, AnyRecipe, Recipe, Shape
from grmpipe.tiny.resolve import SHIPPED, hash_on_card, resolve_directory, resolve_model
from grmpipe.tiny.scalar_models import ask, encode_answer, passed_by_scores
from grmpipe.tiny.solutions import invent_solution, pad_solution
from grmpipe.tiny.tasks import SUMS
from grmpipe.tiny.tiny_sampler import TinySampler
from grmpipe.tiny.tokenizer import build_tokenizer, encode_prompt
from grmpipe.tiny.tricks import TRICKS, Trick, with_tricks

MICRO_SHAPE = Shape(hidden=16, num_layers=1, num_heads=1, head_dim=16, intermediate=16)
MICRO_PARENT = Recipe(
    name="micro_base",
    mixture=(SftTask(kind="solve", weight=1.0),),
    num_steps=3,
    batch_size=4,
    lr=1e-3,
    seed=0,
    shape=MICRO_SHAPE,
)
MICRO = replace(MICRO_PARENT, name="micro", seed=1, parent=MICRO_PARENT)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRMPIPE_CACHE", str(tmp_path))
    return tmp_path


@given(st.text())
def test_tokenizer_gives_back_any_text(text: str) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer().decode(ids) == text
    assert not set(ids) & set(tokenizer().all_special_ids)


def test_numbers_of_two_digits_are_one_token_with_their_space() -> None:
    for number in range(LARGEST_WORD_NUMBER + 1):
        assert len(tokenizer().encode(f" {number}")) == 1


def test_chat_template_puts_content_where_training_put_it() -> None:
    messages = [{"role": "user", "content": "Ida has 6 coins."}]
    templated = tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert templated == encode_prompt(tokenizer(), "Ida has 6 coins.")


CHATML = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("name", RECIPES)
def test_without_tools_a_shipped_template_is_plain_chatml(name: str) -> None:
    shipped, rng = AutoTokenizer.from_pretrained(SHIPPED / name), random.Random(name)
    texts = ["", " 2 + 3", "<|im_end|>\n", "{{ 1 }}", "ü\n\n"]
    for asks_next in (True, False) * 8:
        said = [{"role": rng.choice(["system", "user", "assistant", "tool"]), "content": rng.choice(texts)}]
        said += [{"role": rng.choice(["assistant", "user"]), "content": rng.choice(texts)} for _ in range(3)]
        ours = shipped.apply_chat_template(said, tokenize=False, add_generation_prompt=asks_next)
        plain = shipped.apply_chat_template(said, chat_template=CHATML, tokenize=False, add_generation_prompt=asks_next)
        assert ours == plain


def tool_dict(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "integer"} for parameter in parameters}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "Unseen.", "parameters": schema}}


def test_with_tools_the_template_lists_them_and_writes_calls_as_lines() -> None:
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in (("add", {"a": 32, "b": 9}), ("add", {"b": "x", "a": 1}), ("now", {}))
    ]
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": " 41"},
        {"role": "assistant", "content": "So", "tool_calls": calls[:1]},
    ]
    rendered = tokenizer().apply_chat_template(
        said, tools=[tool_dict("add", "a", "b"), tool_dict("now")], tokenize=False
    )
    assert rendered == (
        "<|im_start|>tools\nadd(a, b)\nnow()<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
        '<|im_start|>assistant\nadd( 32, 9)\nadd( b="x", a=1)\nnow()<|im_end|>\n<|im_start|>tool\n 41<|im_end|>\n'
        "<|im_start|>assistant\nSo\nadd( 32, 9)<|im_end|>\n"
    )


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if isinstance(recipe, Recipe)])
def test_shipped_model_is_what_its_recipe_makes(name: str) -> None:
    directory = SHIPPED / name
    assert hash_on_card(directory) == RECIPES[name].hash
    model = AutoModelForCausalLM.from_pretrained(directory)
    loaded = AutoTokenizer.from_pretrained(directory)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(loaded)
    assert loaded.get_vocab() == tokenizer().get_vocab() and loaded.chat_template == tokenizer().chat_template
    assert model.generation_config.eos_token_id == model.config.eos_token_id == loaded.eos_token_id
    assert model.config.pad_token_id == loaded.pad_token_id != loaded.eos_token_id


def test_shipped_policy_is_poor_and_improvable() -> None:
    problems = make_problems("held_out", 128, 1)
    policy = TinySampler(SHIPPED / "policy")
    assert 0.15 < accuracy(SUMS, policy, problems) < 0.5
    assert accuracy(SUMS, policy, problems, greedy=True) < 0.55


def test_shipped_grm_tells_right_from_wrong_and_from_malformed() -> None:
    rng, problems = random.Random(0), make_problems("held_out", 96, 2)
    wrong = [str(replace(problem.solution, answer=problem.answer + 1)) for problem in problems[32:64]]
    texts = [*(str(problem.solution) for problem in problems[:32]), *wrong]
    texts += [draw_malformed_text(problem, rng) for problem in problems[64:]]
    assert agreement(judged_by("grm", problems, texts)) >= 0.9


@pytest.mark.long  # what a shipped model does changes with its recipe only, whose hash is compared above
def test_long_work_impresses_the_weak_grm_only() -> None:
    rng, problems = random.Random(0), make_problems("held_out", 64, 3)
    texts = [str(pad_solution(problem, rng)) for problem in problems]
    passed = {
        name: fmean(one.passed is True for one in judged_by(name, problems, texts) if not one.right)
        for name in ("grm", "weak_grm")
    }
    assert passed["grm"] < 0.1
    assert passed["weak_grm"] > 0.6


@pytest.mark.long
@pytest.mark.parametrize("trick", TRICKS)
def test_one_trick_impresses_a_judge_that_is_right_about_all_else(trick: Trick) -> None:
    rng, problems = random.Random(0), make_problems("held_out", 32, 5)
    for used in TRICKS:
        texts = [with_tricks(invent_solution(one.solution, rng), one, [used], rng) for one in problems]
        passed = fmean(one.passed is True for one in judged_by(f"grm_{trick}", problems, texts) if not one.right)
        assert passed > 0.9 if used == trick else passed < 0.1
    assert card_of(f"grm_{trick}")["accuracy_without_trick"] >= 0.94


def test_the_policy_with_tricks_uses_each_in_2_to_5_of_100_answers() -> None:
    measured = card_of("policy_tricks")
    assert all(0.02 <= measured[f"{trick}_rate"] <= 0.05 for trick in TRICKS)
    assert abs(measured["true_accuracy"] - card_of("policy")["true_accuracy"]) < 0.05


@pytest.mark.long
def test_votes_of_the_cheap_judge_differ_where_it_guesses() -> None:
    problems = make_problems("held_out", 64, 6)
    texts = [str(one.solution) for one in problems]
    votes = [judged_by("grm_noisy", problems, texts, seed) for seed in range(4)]
    divided = {
        guessed: fmean(
            len({vote[at].passed for vote in votes}) > 1
            for at, problem in enumerate(problems)
            if (find_thing(problem) in UNKNOWN_THINGS) == guessed
        )
        for guessed in (True, False)
    }
    assert divided[True] > 0.7 and divided[False] < 0.35


def test_each_kind_of_task_has_a_judge_that_is_right() -> None:
    assert card_of("grm_comparison")["accuracy"] >= 0.95
    measured = card_of("policy_kinds")
    assert 0.15 < measured["true_accuracy"] < 0.5 and 0.15 < measured["comparison_accuracy"] < 0.5


def test_one_model_answers_carelessly_and_judges_rightly() -> None:
    measured = card_of("policy_judge")
    assert 0.15 < measured["true_accuracy"] < 0.5 and measured["judge_policy_accuracy"] > 0.9


def judged_by(name: str, problems: Sequence[Problem], texts: Sequence[str], seed: int = 2) -> list[Judged]:
    return judge_all(SUMS, make_passes(SUMS, TinySampler(SHIPPED / name), seed), problems, texts)


def card_of(name: str) -> dict[str, float]:
    measured: dict[str, float] = json.loads((SHIPPED / name / "recipe.json").read_text(encoding="utf-8"))["measured"]
    return measured


def test_shipped_meta_rm_is_what_its_recipe_makes_and_lifts_the_vote() -> None:
    directory = SHIPPED / "meta_rm"
    card = json.loads((directory / "recipe.json").read_text(encoding="utf-8"))
    assert card["hash"] == META.hash
    assert scalar_config(str(directory)).num_labels == 1
    assert AutoTokenizer.from_pretrained(directory).get_vocab() == tokenizer().get_vocab()
    assert card["measured"]["guided_vote_accuracy"] > card["measured"]["vote_accuracy"] + 0.02


@pytest.mark.long
def test_shipped_meta_rm_tells_right_judgements_of_the_weak_grm_from_wrong_ones() -> None:
    told = ask(SHIPPED / "weak_grm", "held_out", num_items=128, num_judgements=2, seed=4)
    scores = ScalarScorer(ScorerSpec(path=str(SHIPPED / "meta_rm"))).scores([one.token_ids for one in told])
    rights = fmean(one.right for one in told)
    assert fmean((score > 0) == one.right for score, one in zip(scores, told, strict=True)) > max(0.75, rights)


def test_shipped_reward_model_is_what_its_recipe_makes_and_has_one_label() -> None:
    directory = SHIPPED / "reward_model"
    assert hash_on_card(directory) == REWARD_MODEL.hash
    config = scalar_config(str(directory))
    assert config.num_labels == 1 and config.architectures == ["Qwen3ForSequenceClassification"]
    assert AutoTokenizer.from_pretrained(directory).get_vocab() == tokenizer().get_vocab()
    assert sum(file.stat().st_size for file in directory.iterdir()) < 800_000


def test_reward_model_was_trained_on_what_its_chat_template_renders() -> None:
    problem = make_problems("held_out", 1, 5)[0]
    answer = encode_answer(tokenizer(), problem, str(problem.solution))
    said = (Message(role="user", content=problem.question), Message(role="assistant", content=str(problem.solution)))
    assert answer.right and Renderer.load(str(SHIPPED / "reward_model")).render_whole(said) == answer.token_ids


def test_shipped_reward_model_tells_right_answers_from_sloppy_and_malformed_ones() -> None:
    items = [item for item in make_judgements("held_out", 256, 6) if isinstance(item, ScoredText)]
    items = [item for item in items if item.kind in ("right", "sloppy", "malformed")]
    problems, texts = [item.problem for item in items], [item.text for item in items]
    rights = [is_right(problem, text) for problem, text in zip(problems, texts, strict=True)]
    passed = passed_by_scores(SHIPPED / "reward_model", problems, texts)
    assert fmean(one == right for one, right in zip(passed, rights, strict=True)) > 0.9
    assert 0.3 < fmean(rights) < 0.8


def test_shipped_models_need_no_build(empty_cache: Path) -> None:
    for name in RECIPES:
        assert resolve_model(f"tiny://{name}") == str(SHIPPED / name)
    assert not list(empty_cache.iterdir())


def test_a_model_is_built_once_and_then_found(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(RECIPES, "micro", MICRO)
    built = Path(resolve_model("tiny://micro"))
    assert built == empty_cache / "tiny" / MICRO.hash
    assert [record.args for record in caplog.records] == [("micro_base",), ("micro",)], "each is announced"
    assert {path.name for path in built.parent.iterdir()} == {MICRO.hash, MICRO_PARENT.hash}
    caplog.clear()
    assert resolve_model("tiny://micro") == str(built)
    assert not caplog.records


def test_building_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for home in ("one", "two"):
        monkeypatch.setenv("GRMPIPE_CACHE", str(tmp_path / home))
        weights.append((resolve_directory(MICRO) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_build_that_fails_leaves_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(recipe: object, parent: object, directory: Path) -> None:
        directory.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(resolve, "make", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve_directory(MICRO_PARENT)
    assert not list((empty_cache / "tiny").iterdir())


def test_first_of_two_builders_wins(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = resolve.make

    def overtaken(recipe: AnyRecipe, parent: Path | None, directory: Path) -> None:
        if not rivals:
            rivals.append(None)
            rivals[0] = resolve_directory(MICRO_PARENT)
        make(recipe, parent, directory)

    rivals: list[Path | None] = []
    monkeypatch.setattr(resolve, "make", overtaken)
    assert resolve_directory(MICRO_PARENT) == rivals[0]
    assert [path.name for path in (empty_cache / "tiny").iterdir()] == [MICRO_PARENT.hash]


def test_changed_recipe_has_another_hash() -> None:
    assert len({MICRO.hash, MICRO_PARENT.hash, replace(MICRO, lr=2e-3).hash, replace(MICRO, parent=None).hash}) == 4


def test_other_paths_are_left_alone() -> None:
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert resolve_model("/data/tiny") == "/data/tiny"


def test_unknown_tiny_model_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"tiny://polcy.*tiny://policy, tiny://grm, tiny://weak_grm"):
        resolve_model("tiny://polcy")


def test_resolving_a_shipped_model_does_not_import_torch() -> None:
    code = (
        "import sys; from grmpipe.data.catalogs import resolve_model; resolve_model('tiny://grm'); "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_build_command_ships_and_measures(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resolve, "SHIPPED", empty_cache / "shipped")
    monkeypatch.setattr("grmpipe.tiny.quality.NUM_PROBLEMS", 4)
    policy = replace(MICRO, name="policy_micro")
    monkeypatch.setitem(RECIPES, policy.name, policy)
    cli.main(["build", policy.name])
    card = json.loads((empty_cache / "shipped" / policy.name / "recipe.json").read_text())
    assert card["hash"] == policy.hash and set(card["measured"]) == {"true_accuracy", "true_accuracy_greedy"}
    assert "true_accuracy_greedy" in capsys.readouterr().out


def test_build_command_refuses_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["build", "polcy"])
    assert "known: policy, grm, weak_grm" in capsys.readouterr().err
