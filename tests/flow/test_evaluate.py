"""task=evaluate from the configuration to its files, on the tiny GRM; and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grmpipe import RunReader, read_run
from grmpipe.config.run_config import ConfigError
from grmpipe.models.types import EngineDied
from grmpipe.run.errors import RunFailed

EVALUATE = ("task=evaluate", "evaluate.num_items=24", "evaluate.ks=[1,2,4]")


def test_the_tiny_grm_agrees_with_its_labels_and_leaves_files_that_say_so(
    small_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    files = small_run(*EVALUATE, "objective=eval.final.accuracy_at_4")
    summary, result = files.summary, json.loads((files.run_dir / "evaluation.json").read_text())
    assert summary["status"] == "completed"
    assert summary["objective"] == summary["eval"]["final"]["accuracy_at_4"] > 0.8
    assert set(result["overall"]["by_k"]) == {"1", "2", "4"}
    assert sum(subset["judged"]["num_items"] for subset in result["subsets"].values()) == 24
    assert summary["judging"]["tokens"] == result["num_tokens"] > 0
    judged = files.lines("judged")
    right = [line for line in judged if line["outcome"] == "right"]
    assert len(right) / 24 == pytest.approx(result["overall"]["judged"]["accuracy"])
    assert all("Score:" in one["text"] for line in right for one in line["judgements"])
    assert "overall" in capsys.readouterr().out


def test_a_rule_is_measured_without_any_model(small_run: Callable) -> None:
    summary = small_run(*EVALUATE, "judge=rule", "evaluate.ks=[1]").summary
    assert summary["eval"]["final"]["accuracy"] > 0.4  # it scores 1 or 10, and passes malformed texts
    assert (summary["judging"]["asked"], summary["versions"]) == (0, {})


def test_a_policy_that_judges_is_measured_on_its_own_engines(small_run: Callable) -> None:
    summary = small_run(*EVALUATE, "judge.model=policy", "policy=tiny_judge", "evaluate.ks=[1]").summary
    assert summary["status"] == "completed"
    assert summary["eval"]["final"]["accuracy"] > 0.8


def test_a_judge_that_no_reward_uses_is_measured_beside_the_first_and_compared_with_it(
    small_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    weak = ("+grm@models.weak=tiny_weak", "+judge@judges.b=generative", "judges.b.model=weak")
    files = small_run(*EVALUATE, *weak, "objective=eval.final.b_difference")
    final, result = files.summary["eval"]["final"], json.loads((files.run_dir / "evaluation.json").read_text())
    assert list(result["by_judge"]) == ["judge", "b"] and set(result["by_judge"]["b"]["overall"]["by_k"]) == set("124")
    assert files.summary["objective"] == pytest.approx(final["b_accuracy"] - final["grm_accuracy"])
    assert final["b_difference_low"] < final["b_difference"] < final["b_difference_high"]
    (compared,) = result["comparisons"]
    assert (compared["judge"], compared["against"], compared["num_items"]) == ("b", "judge", 24)
    assert compared["tokens"] == result["by_judge"]["b"]["num_tokens"] / 24 and compared["seconds"] > 0
    lines = {line["item_id"]: line["by_judge"] for line in files.lines("judged")}
    for item in compared["parted"]:
        assert lines[item["item_id"]]["b"]["outcome"] == item["outcome"]
        assert lines[item["item_id"]]["judge"]["outcome"] == item["against_outcome"]
    assert set(files.summary["judging"]["by_judge"]) == {"judge", "b"}
    assert f"b and judge part on {len(compared['parted'])} of 24 items" in capsys.readouterr().out
    again = small_run(*EVALUATE, f"evaluate.against={files.run_dir}", "evaluate.num_items=12", run_dir="again")
    final = again.summary["eval"]["final"]
    assert (final["difference"], final["difference_p"]) == (0, 1), "the same judge under the same seed"
    (earlier,) = json.loads((again.run_dir / "evaluation.json").read_text())["comparisons"]
    assert (earlier["num_items"], earlier["against_tokens"]) == (12, result["num_tokens"] / 24)


def test_a_route_is_measured_by_the_source_of_the_items(small_run: Callable, tmp_path: Path) -> None:
    two_judges = ("judge=rule", "+judge@judges.chat=rule", "reward=route", "reward.route={math: judge, chat: chat}")
    rows = [
        {"prompt": f"{source} 6 x 7?", "response": answer, "score": 10, "reference": "42", "source": source}
        for source, answer in (("math", "42"), ("chat", "43"), ("chat", "42"))
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    measured = (f"evaluate.path={path}", "evaluate.ks=[1]")
    final = small_run(*EVALUATE, *two_judges, *measured).summary["eval"]["final"]
    assert (final["grm_accuracy"], final["chat_accuracy"]) == (1.0, 0.5)
    path.write_text(json.dumps({**rows[0], "source": "code"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"reward\.route: no judge for prompts of the source 'code'"):
        small_run(*EVALUATE, *two_judges, *measured, run_dir="refused")


def test_a_users_own_file_is_judged(small_run: Callable, tmp_path: Path) -> None:
    question = "Ida has 6 coins. She wins 4. How many coins does Ida have?"
    good, bad = "Steps: 6 + 4 = 10. Answer: 10", "Steps: 6 - 4 = 2. Answer: 2"
    (tmp_path / "own.csv").write_text(f"instruction,good,bad,kind\n{question},{good},{bad},mine\n", encoding="utf-8")
    columns = "data.columns={prompt: instruction, chosen: good, rejected: bad, subset: kind}"
    files = small_run(*EVALUATE, f"evaluate.path={tmp_path / 'own.csv'}", columns)
    (judged,) = files.lines("judged")
    assert (judged["outcome"], judged["subset"]) == ("right", "mine")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("evaluate.path=no.jsonl",), "evaluate.path: no.jsonl: no such file"),
        (("evaluate.path=tiny://labels",), "evaluate.path: tiny://labels: unknown labelled data"),
        (("judge.temperature=0",), "evaluate.ks: greedy judgements are all the same"),
        (("evaluate.ks=[4,2]",), "evaluate.ks: must be numbers from 1 on"),
        (("judge=rubric",), "judge.protocol: rubric judges by the prompt's criteria"),
        (("evaluate.against=nowhere",), "evaluate.against: nowhere has no judged.jsonl"),
        (("evaluate.against=''",), "evaluate.against: is empty"),
    ],
)
def test_an_evaluation_that_cant_be_measured_is_refused_by_its_key(
    small_run: Callable, overrides: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        small_run(*EVALUATE, *overrides)
    assert told in str(raised.value)


ROWS = [
    {"prompt": "Leo has 6 books. He buys 5. How many books does Leo have?", "reference": 11, "source": "one step"},
    {"prompt": "Ida has 6 coins. She wins 4. How many coins does Ida have?", "reference": 10, "source": "one step"},
    {"prompt": "Max has 9 hats. He loses 2. He wins 4. How many hats does Max have?", "reference": 11, "source": "two"},
    {"prompt": "Write a poem about a coin."},
]


def prompts_at(path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return f"evaluate.prompts={{mine: {path}}}"


def test_a_policy_is_measured_by_a_rule_next_to_a_judge(
    small_run: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = small_run(
        "task=evaluate", "evaluate.what=both", prompts_at(tmp_path / "mine.jsonl"), "judge=rule", "evaluate.ks=[1]",
        "evaluate.num_items=8", "evaluate.num_samples=3", "evaluate.pass_k=[1,2]",
        "objective=eval.mine.pass_at_2",
    )  # fmt: skip
    summary = files.summary
    mine = summary["eval"]["mine"]
    assert summary["status"] == "completed" and summary["versions"] == {"policy": 0}
    assert set(summary["eval"]) == {"initial", "final", "mine"} and 0 <= summary["eval"]["final"]["accuracy"] <= 1
    assert (mine["prompts"], mine["prompts_left_out"], mine["answers"], mine["failed_verdicts"]) == (3, 1, 12, 0)
    assert summary["objective"] == mine["pass_at_2"] >= mine["pass_at_1"]
    assert mine["pass_at_1"] == pytest.approx(mine["avg_at_3"])
    assert mine["avg_at_3_low"] < mine["avg_at_3"] < mine["avg_at_3_high"] or mine["avg_at_3"] in (0, 1)
    answers = files.lines("eval_rollouts")
    assert sorted((line["prompt"]["prompt_id"], str(line["sample"])) for line in answers) == sorted(
        (f"mine.jsonl:{row}", sample) for row in (1, 2, 3) for sample in ("0", "1", "2", "None")
    )
    rewards = {line["group_id"]: line["reward"] for line in files.lines("eval_judgements")}
    assert len(rewards) == len(answers) and {line["prompts"] for line in answers} == {"mine"}
    sampled = [rewards[line["group_id"]] for line in answers if line["sample"] is not None]
    assert sum(sampled) / len(sampled) == pytest.approx(mine["avg_at_3"])
    assert all(rewards[line["group_id"]] == float(line["right"]) and line["answer"] for line in answers)
    result = json.loads((files.run_dir / "policy_evaluation.json").read_text())["mine"]
    assert {name: one["num_prompts"] for name, one in result["by_source"].items()} == {"one step": 2, "two": 1}
    check_tables(read_run(files.run_dir), summary["eval"], files.lines("judged"))
    out = capsys.readouterr().out
    page = (files.run_dir / "report.html").read_text()
    for shown in ("avg@3", "pass@2", "greedy", "one step"):
        assert shown in out and shown in page
    assert "left out without a reference: 1" in " ".join(out.split())
    assert "right, in percent of all items" in page


def test_a_policy_is_measured_by_rewards_on_no_scale(
    small_run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "any_reward.py").write_text("def of(response): return -3.5 * len(response)")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = small_run(
        "task=evaluate", "evaluate.what=policy", prompts_at(tmp_path / "mine.jsonl"), "evaluate.num_samples=2",
        "judge=function", "judge.function=any_reward.of", "objective=eval.mine.avg_at_2",
    ).summary["eval"]["mine"]  # fmt: skip
    assert mine["prompts"] == 4 and mine["avg_at_2"] < -3.5 and mine["greedy"] < -3.5
    assert "true_pass_at_2" in mine and "pass_at_2" not in mine
    assert "pass@k needs the range of the rewards" in " ".join(capsys.readouterr().out.split())


def check_tables(run: RunReader, measured: dict, judged: list[dict]) -> None:
    """The tables of the figures and the items, against summary.json and judged.jsonl."""
    figures = {(row.about, row.name, row.part, row.figure): row for row in run.figures}
    own = figures["policy", "mine", "", "avg_at_3"]
    assert (own.value, own.low, own.high, own.count) == (
        *(pytest.approx(measured["mine"][f"avg_at_3{end}"]) for end in ("", "_low", "_high")), 3,
    )  # fmt: skip
    assert figures["policy", "mine", "one step", "greedy"].count == 2
    accuracy = figures["judge", "", "", "accuracy"]
    assert (accuracy.value, accuracy.low, accuracy.count) == (
        measured["final"]["accuracy"], measured["final"]["accuracy_low"], 8,
    )  # fmt: skip
    subsets = {row.part: row.count for row in run.figures if row.about == "judge" and row.part}
    assert sum(subsets.values()) == 8, "items by subset"
    assert run.figures.to_arrow().num_rows == len(figures) > 8
    items = run.judged_items.to_arrow().to_pylist()
    assert [(one["item_id"], one["outcome"]) for one in items] == [(one["item_id"], one["outcome"]) for one in judged]
    assert [one["scores"] for one in items] == [[*one["scores"].values()] for one in judged]
    first = next(iter(run.judged_items))
    assert first.scores[0] == judged[0]["scores"]["0"] and first.question
    for one in items:
        assert len(one["responses"]) == len(one["labels"]) == len(one["scores"]), "judged by a rule: none failed"
        if len(one["labels"]) > 1:
            assert sorted(one["labels"]) == [*(0.0 for _ in one["labels"][1:]), 1.0]
            others = [score for score, label in zip(one["scores"], one["labels"], strict=True) if not label]
            assert (one["scores"][one["labels"].index(1)] > max(others)) == (one["outcome"] == "right")


def test_summary_names_what_broke(small_run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise EngineDied("grm-0", "out of memory")

    monkeypatch.setattr("grmpipe.run.build.start_models.start_engines", broken)
    with pytest.raises(RunFailed, match="out of memory"):
        small_run(*EVALUATE)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
