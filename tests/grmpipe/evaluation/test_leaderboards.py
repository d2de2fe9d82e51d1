"""Benchmarks have the figures of their leaderboards: as independent scripts count rows in the formats as published, and
as means over sections, if all of them are there.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from grmpipe.config.judge import Scale
from grmpipe.data.labelled import load_labelled
from grmpipe.evaluation.judge_accuracy import JudgeEvaluation, Recount, evaluate
from grmpipe.evaluation.judged_items import JudgedItem
from grmpipe.evaluation.leaderboards import PLAN_SPLITS, REWARD_BENCH, REWARD_BENCH_2, RM_BENCH, Leaderboard
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.votes import mean, voted
from grmpipe.models.types import Completion, Message
from grmpipe.types import Failed, Judgement, JudgeReport, Prompt, RankedResponses


def judged(subset: str, number: int, right: bool) -> JudgedItem:
    prompt = Prompt(prompt_id=f"{subset}{number}", messages=(Message(role="user", content=f"{subset} {number}?"),))
    item = RankedResponses(
        item_id=prompt.prompt_id, prompt=prompt, responses=("a", "b"), grades=(1, 0) if right else (0, 1), subset=subset
    )
    verdicts = [voted("rule", rollout_of_text("g", i, "x"), (score,), mean, Scale()) for i, score in enumerate((9, 2))]
    return JudgedItem(item=item, reports=tuple(JudgeReport(verdict=verdict) for verdict in verdicts), num_asked=1)


def evaluated(rights: Mapping[str, str]) -> JudgeEvaluation:
    """rights: by subset, a letter for each item: r for a right one."""
    items = [judged(subset, i, one == "r") for subset, all_ in rights.items() for i, one in enumerate(all_)]
    return evaluate(items, Scale(), Recount(ks=(), vote=mean, most=1, seed=0))


def test_reward_bench_weighs_subsets_within_sections_and_sections_alike() -> None:
    """math-prm counts as much as all code together, and a section as much as any other, however many items it has."""
    rights = dict.fromkeys(REWARD_BENCH.subsets, "r") | {"math-prm": "w", "hep-go": "rrrrrrrr"}
    found = evaluated(rights)
    assert {name: round(one.judged.accuracy, 6) for name, one in found.sections.items()} == {
        "Chat": 1.0, "Chat Hard": 1.0, "Safety": 1.0, "Reasoning": 0.5,
    }  # fmt: skip
    assert found.overall.judged.accuracy == pytest.approx(0.875)
    assert found.over_items.judged.accuracy == pytest.approx(29 / 30)
    assert found.mean_over == "RewardBench's sections Chat, Chat Hard, Safety, Reasoning"


def test_rm_bench_is_the_mean_of_its_domains_and_their_difficulties() -> None:
    found = evaluated(dict.fromkeys(RM_BENCH.subsets, "r") | {"chat/hard": "w", "safety/hard": "wwww"})
    assert found.sections["chat"].judged.accuracy == pytest.approx(2 / 3)
    assert found.overall.judged.accuracy == pytest.approx((2 / 3 + 1 + 1 + 2 / 3) / 4)


@pytest.mark.parametrize("board", [REWARD_BENCH, REWARD_BENCH_2, RM_BENCH])
def test_a_part_of_a_benchmark_is_no_leaderboards_figure(board: Leaderboard) -> None:
    missing, *there = sorted(board.subsets)
    found = evaluated(dict.fromkeys(there, "r") | {there[0]: "www"})
    assert found.overall == found.over_items
    assert found.mean_over == f"items, not {board.name}'s sections: {missing} missing"


def test_subsets_of_no_benchmark_have_a_mean_over_items() -> None:
    found = evaluated({"mine": "rrr", "Math": "w"})
    assert (found.overall.judged.accuracy, found.mean_over, found.sections) == (0.75, "items", {})


# -- rows as published, and independent scripts ------------------------------------------------------------------------

SCALE = Scale()
SAID = Completion(token_ids=(7,), logprobs=(0.0,), text="", finish_reason="stop", versions=())
FAILED = JudgeReport(verdict=Failed(stage="judge", cause="unparseable", attempts=1))
Rows = list[dict[str, Any]]


def load(path: Path, rows: Rows) -> Any:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_labelled(str(path))


def give_scores(texts: Sequence[str], draw: random.Random) -> dict[str, float]:
    """A score for each text, of which many are equal; a few have none."""
    return {text: float(draw.choice((2, 4, 4.5, 7, 9))) for text in texts if draw.random() > 0.03}


def evaluate_scores(items: Any, scores: Mapping[str, float]) -> JudgeEvaluation:
    judged = []
    for item in items:
        given = [(i, scores.get(text)) for i, text in enumerate(item.responses)]
        reports = tuple(
            FAILED
            if score is None
            else JudgeReport(verdict=voted("rule", rollout_of_text("g", i, "x"), (score,), mean, SCALE))
            for i, score in given
        )
        judged.append(JudgedItem(item=item, reports=reports, num_asked=1))
    return evaluate(judged, SCALE, Recount(ks=(), vote=mean, most=1, seed=0))


def list_texts(rows: Rows) -> list[str]:
    """All responses of rows with chosen and rejected ones."""
    fields = (row[field] for row in rows for field in ("chosen", "rejected"))
    return [text for field in fields for text in ([field] if isinstance(field, str) else field)]


def beats(scores: Mapping[str, float], winner: str, loser: str) -> bool:
    return winner in scores and loser in scores and scores[winner] > scores[loser]


def test_reward_bench_has_the_sections_of_its_own_script(tmp_path: Path) -> None:
    draw, counts = random.Random(1), {name: w for own in REWARD_BENCH.sections.values() for name, w in own.items()}
    rows = [
        {"prompt": f"{name} {n}", "chosen": f"c {name} {n}", "rejected": f"r {name} {n}", "subset": name}
        for name in counts
        for n in range(5)
    ]
    scores = give_scores(list_texts(rows), draw)
    by_subset: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        by_subset[row["subset"]].append(beats(scores, row["chosen"], row["rejected"]))
    expected = {
        section: sum(fmean(by_subset[name]) * counts[name] for name in names) / sum(counts[name] for name in names)
        for section, names in REWARD_BENCH.sections.items()
    }
    found = evaluate_scores(load(tmp_path / "rows.jsonl", rows), scores)
    assert {name: one.judged.accuracy for name, one in found.sections.items()} == pytest.approx(expected, abs=1e-12)
    assert found.overall.judged.accuracy == pytest.approx(fmean(expected.values()), abs=1e-12)


def make_ties(number: int) -> Rows:
    """The two rows of a prompt of RewardBench 2's Ties."""
    rights = [f"right {number} {i}" for i in range(4)]
    wrongs = [f"wrong {number} {i}" for i in range(3)]
    ref = {"id": f"ref:{number}", "chosen": [f"ref {number}"], "rejected": [f"not {number} {i}" for i in range(3)]}
    tied = {"id": f"tied:{number}", "chosen": rights, "rejected": wrongs}
    return [{**row, "prompt": f"{row['id']}?", "subset": "Ties"} for row in (ref, tied)]


def score_ties_plainly(rows: Rows, scores: Mapping[str, float]) -> float:
    """As the benchmark's card describes it: accuracies of both kinds, and margins of prompts."""
    margins: dict[str, dict[int, tuple[float, float]]] = {"ref": {}, "tied": {}}
    for row in rows:
        kind, number = row["id"].split(":")
        right, wrong = ([scores[text] for text in row[field]] for field in ("chosen", "rejected"))
        margins[kind][int(number)] = (min(right) - max(wrong), max(right) - min(right))
    total = 0.0
    for kind in ("ref", "tied"):
        total += 0.3 * sum(gap > 0 for gap, _ in margins[kind].values()) / len(margins[kind])
    for number, (gap, spread) in margins["tied"].items():
        least = min(gap, margins["ref"][number][0])
        ratio = least / spread - 1 if spread else math.copysign(math.inf, least) if least else math.nan
        bonus = 0.0 if math.isnan(ratio) else math.tanh(ratio)
        total += (0.2 * (gap > spread) + 0.2 * (least > spread) + 0.01 * bonus) / len(margins["tied"])
    return total


def test_reward_bench_2_shares_the_first_place_and_has_its_own_measure_of_ties(tmp_path: Path) -> None:
    draw = random.Random(2)
    names = ("Factuality", "Precise IF", "Math", "Safety", "Focus")
    rows: Rows = [
        {"prompt": f"{name} {n}", "chosen": [f"c {name} {n}"], "rejected": [f"r {name} {n} {i}" for i in range(3)],
         "subset": name, "id": f"{name}{n}"}
        for name in names
        for n in range(12)
    ]  # fmt: skip
    scores = give_scores(list_texts(rows), draw)
    expected = dict.fromkeys(names, 0.0)
    for row in rows:
        given = [scores.get(text) for text in (*row["chosen"], *row["rejected"])]
        if None not in given and given[0] == max(given):
            expected[row["subset"]] += 1 / given.count(given[0]) / 12
    ties = [row for number in range(30) for row in make_ties(number)]
    of_ties = {text: draw.uniform(1, 4) if text[0] in "wn" else draw.uniform(3, 6) for text in list_texts(ties)}
    of_ties |= dict.fromkeys(ties[1]["chosen"], 5.0) | dict.fromkeys(ties[3]["chosen"] + ties[3]["rejected"], 5.0)
    rounded = {text: SCALE.to_score(SCALE.to_reward(score)) for text, score in of_ties.items()}
    expected["Ties"] = score_ties_plainly(ties, rounded)
    found = evaluate_scores(load(tmp_path / "rows.jsonl", rows + ties), scores | of_ties)
    assert {name: one.judged.accuracy for name, one in found.sections.items()} == pytest.approx(expected, abs=1e-12)
    assert found.overall.judged.accuracy == pytest.approx(fmean(expected.values()), abs=1e-12)
    assert found.overall.judged.low < found.overall.judged.accuracy < found.overall.judged.high
    alone = evaluate_scores(load(tmp_path / "ties.jsonl", ties), of_ties)
    assert alone.figures["ties"].mean == pytest.approx(expected["Ties"], abs=1e-12)


def test_rm_bench_has_the_matrix_of_its_own_script(tmp_path: Path) -> None:
    draw = random.Random(3)
    domains = ("chat", "math", "code", "safety-refuse", "safety-response")
    rows = [
        {"prompt": f"{name} {n}", "domain": name, **{field: [f"{field} {name} {n} {i}" for i in range(3)]
         for field in ("chosen", "rejected")}}
        for name in domains
        for n in range(6)
    ]  # fmt: skip
    scores = {text: float(draw.choice((2, 4, 4.5, 7, 9))) for text in list_texts(rows)}
    expected = {}
    for domain in ("chat", "math", "code", "safety"):
        own = [row for row in rows if row["domain"].startswith(domain)]
        wins = {
            (i, j): fmean(beats(scores, row["chosen"][i], row["rejected"][j]) for row in own)
            for i, j in product(range(3), repeat=2)
        }
        hard = fmean(wins[i, j] for i, j in wins if i < j)
        normal = fmean(wins[i, i] for i in range(3))
        easy = fmean(wins[i, j] for i, j in wins if i > j)
        expected[domain] = fmean((hard, normal, easy))
    found = evaluate_scores(load(tmp_path / "rows.jsonl", rows), scores)
    assert {name: one.judged.accuracy for name, one in found.sections.items()} == pytest.approx(expected, abs=1e-12)
    assert found.overall.judged.accuracy == pytest.approx(fmean(expected.values()), abs=1e-12)


def test_rmb_has_pairs_and_best_of_n_of_both_goals(tmp_path: Path) -> None:
    draw, rows = random.Random(4), []
    for goal, n in product(("Helpfulness/Code/Documentation", "Harmlessness/S1"), range(9)):
        talk = [{"role": "user", "content": f"{goal} {n}?"}]
        texts = [f"{goal} {n} {i}" for i in range(6)]
        answers = [{"llm_name": "m", "answer": text} for text in texts]
        rows += [
            {"conversation_input": talk, "chosen": answers[0], "reject": answers[1],
             "category_path": f"Pairwise_set/{goal}"},
            {"conversation_input": talk, "bon_best": answers[2], "loser_list": answers[3 : 5 + n % 2],
             "category_path": f"BoN_set/{goal}"},
        ]  # fmt: skip
    texts = [
        one["answer"]
        for row in rows
        for value in row.values()
        for one in (value if isinstance(value, list) else [value])
        if isinstance(one, dict) and "answer" in one
    ]
    scores = give_scores(texts, draw)
    expected: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        folder, goal = row["category_path"].split("/")[:2]
        best, losers = row.get("chosen", row.get("bon_best")), row.get("loser_list", [row.get("reject")])
        right = all(beats(scores, best["answer"], loser["answer"]) for loser in losers)
        expected[f"{folder.removesuffix('_set')} {goal}"].append(right)
    found = evaluate_scores(load(tmp_path / "rows.jsonl", rows), scores)
    by_section = {name: fmean(own) for name, own in expected.items()}
    assert {name: one.judged.accuracy for name, one in found.sections.items()} == pytest.approx(by_section, abs=1e-12)
    assert found.overall.judged.accuracy == pytest.approx(fmean(by_section.values()), abs=1e-12)


def test_ppe_counts_pairs_that_people_or_answers_decide(tmp_path: Path) -> None:
    draw = random.Random(5)
    people = [
        {"prompt": f"{n}?", "response_1": f"a{n}", "response_2": f"b{n}", "language": "English",
         "winner": draw.choice(("model_a", "model_b", "tie", "tie (bothbad)"))}
        for n in range(40)
    ]  # fmt: skip
    scores = give_scores([row[field] for row in people for field in ("response_1", "response_2")], draw)
    right = [
        beats(scores, *(row["response_1"], row["response_2"])[:: 1 if row["winner"] == "model_a" else -1])
        for row in people
        if not row["winner"].startswith("tie")
    ]
    found = evaluate_scores(load(tmp_path / "people.jsonl", people), scores)
    assert found.overall.judged.accuracy == pytest.approx(fmean(right), abs=1e-12)
    assert found.num_ties == len(people) - len(right) > 0
    correct = [
        {"prompt": f"{n}?", **{f"response_{i + 1}": f"{n} {i}" for i in range(4)}, "category": "math",
         "scores": [True, False, True, False], "sampled_conflict_pairs": [[0, 1], [3, 2], [0, 3]]}
        for n in range(15)
    ]  # fmt: skip
    scores = give_scores([row[f"response_{i}"] for row in correct for i in range(1, 5)], draw)
    right = [
        beats(scores, *(f"{n} {i}" for i in sorted(pair, key=lambda i: not row["scores"][i])))
        for n, row in enumerate(correct)
        for pair in row["sampled_conflict_pairs"]
    ]
    found = evaluate_scores(load(tmp_path / "correct.jsonl", correct), scores)
    assert found.overall.judged.accuracy == pytest.approx(fmean(right), abs=1e-12)


# -- judges that compare -----------------------------------------------------------------------------------------------

Games = tuple[str | None, str | None]  # what a judge says of A and B, and of B and A: A, B, tie; None: nothing


def evaluate_games(items: Any, games: Sequence[Games]) -> JudgeEvaluation:
    """games: by item, in the places of its responses."""
    judged = []
    for item, said in zip(items, games, strict=True):
        judgements = []
        for order, winner in zip(((0, 1), (1, 0)), said, strict=True):
            if winner is not None:
                shown = {"A": (9.0, 2.0), "B": (2.0, 9.0), "tie": (5.0, 5.0)}[winner]
                judgements.append(
                    Judgement(
                        group_id="g", siblings=order, scores=shown, prompt_ids=(), completion=SAID, grm="g", version=0
                    )
                )
        first = JudgeReport(verdict=FAILED.verdict, judgements=tuple(judgements))
        judged.append(JudgedItem(item=item, reports=(first, FAILED), num_asked=1))
    return evaluate(judged, SCALE, Recount(ks=(), vote=mean, most=1, seed=0))


def draw_games(count: int, draw: random.Random) -> list[Games]:
    kinds = ("A", "A", "B", "B", "tie", None)
    return [(draw.choice(kinds), draw.choice(kinds)) for _ in range(count)]


SOURCES = ("mmlu-pro-law", "mmlu-pro-math", "livebench-reasoning", "livebench-math", "livecodebench")


def make_judge_bench(draw: random.Random) -> Rows:
    return [
        {"pair_id": f"{source}{n}", "source": source, "question": f"{source} {n}?", "response_A": f"a {source} {n}",
         "response_B": f"b {source} {n}", "label": draw.choice(("A>B", "B>A"))}
        for source in SOURCES
        for n in range(8)
    ]  # fmt: skip


def test_judge_bench_counts_a_pair_by_both_orders(tmp_path: Path) -> None:
    draw = random.Random(6)
    rows = make_judge_bench(draw)
    games = draw_games(len(rows), draw)
    rights = []
    for row, (first, second) in zip(rows, games, strict=True):
        flipped = {"A": "B", "B": "A"}.get(second or "", second)  # of the responses, not of the places
        decisions = [{"A": "A>B", "B": "B>A", "tie": "A=B", None: None}[one] for one in (first, flipped)]
        opposite = {"A>B": "B>A", "B>A": "A>B"}[row["label"]]
        rights.append(decisions.count(row["label"]) > decisions.count(opposite))
    found = evaluate_games(load(tmp_path / "rows.jsonl", rows), games)
    assert found.overall.judged.accuracy == pytest.approx(fmean(rights), abs=1e-12)
    law = [right for row, right in zip(rows, rights, strict=True) if row["source"].startswith("mmlu-pro")]
    assert found.sections["mmlu-pro"].judged.accuracy == pytest.approx(fmean(law), abs=1e-12)
    both = [(row["label"][0], *one) for row, one in zip(rows, games, strict=True) if None not in one]
    right_in_both = [(first, second) == (best, "BA"["AB".index(best)]) for best, first, second in both]
    assert found.figures["both_orders_accuracy"].mean == pytest.approx(fmean(right_in_both), abs=1e-12)
    alike = [(first, second) in (("A", "B"), ("B", "A"), ("tie", "tie")) for _, first, second in both]
    assert found.figures["consistency"].mean == pytest.approx(fmean(alike), abs=1e-12)


def test_judge_bench_plays_one_game_with_a_judge_of_single_responses(tmp_path: Path) -> None:
    draw = random.Random(7)
    rows = make_judge_bench(draw)
    scores = {row[f"response_{one}"]: float(draw.choice((2, 4, 7))) for row in rows for one in "AB"}
    decisions = ["A>B" if scores[row["response_A"]] > scores[row["response_B"]] else "B>A" for row in rows]
    expected = fmean(decision == row["label"] for decision, row in zip(decisions, rows, strict=True))
    found = evaluate_scores(load(tmp_path / "rows.jsonl", rows), scores)
    assert found.overall.judged.accuracy == pytest.approx(expected, abs=1e-12)


def make_plan(split: str) -> Rows:
    def play(kind: str, n: int) -> dict[str, Any]:
        said = (("user", f"{split} {n}?"), ("tool_call", "{}"), ("tool_response", "x"), ("assistant", f"{kind} {n}"))
        return {"messages": [{"role": role, "content": content} for role, content in said]}

    return [
        {"query": f"{split} {n}?", "tools": [{"type": "function"}], "uuid": f"{split}{n}",
         "chosen": play("good", n), "reject": play("bad", n)}
        for n in range(7)
    ]  # fmt: skip


def test_plan_reward_bench_is_the_mean_of_its_splits_over_both_orders(tmp_path: Path) -> None:
    draw, expected, items, all_games = random.Random(8), {}, [], []
    for split in PLAN_SPLITS:
        rows = make_plan(split)
        own = load(tmp_path / f"{split}.jsonl", rows)
        games = draw_games(len(rows), draw)
        points = []
        for item, (first, second) in zip(own, games, strict=True):
            chosen = "AB"[item.best]
            in_second = "BA"[item.best]
            points += [
                0.5 if one == "tie" else float(one == right) for one, right in ((first, chosen), (second, in_second))
            ]
        expected[split] = fmean(points)
        items += own
        all_games += games
    # An item without any verdict has lost both games, as one with two unreadable ones.
    found = evaluate_games(items, all_games)
    assert {name: one.judged.accuracy for name, one in found.sections.items()} == pytest.approx(expected, abs=1e-12)
    assert found.overall.judged.accuracy == pytest.approx(fmean(expected.values()), abs=1e-12)
    scores = {text: float(draw.choice((2, 4))) for item in items for text in item.responses}
    single = [
        0.5 if (gap := scores[item.responses[item.best]] - scores[item.responses[1 - item.best]]) == 0 else gap > 0
        for item in items
    ]
    by_scores = evaluate_scores(items, scores)
    assert by_scores.over_items.judged.accuracy == pytest.approx(fmean(one == 1 for one in single), abs=1e-12)
    assert by_scores.overall.judged.accuracy == pytest.approx(fmean(single), abs=1e-12)
