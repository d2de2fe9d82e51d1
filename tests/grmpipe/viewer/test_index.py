"""The index of a run: what it takes from the journals, how it grows, and when it starts over."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
from dataclasses import asdict
from pathlib import Path

import pytest
from journal_mutations import collect_records, write_mutated
from viewed_run import SCRIPT, answer, by_judges, evaluate, judge_labelled_work, report, write_run

from grmpipe.models.types import Message
from grmpipe.observe.recorder import Recorder, load_trained
from grmpipe.types import Prompt
from grmpipe.viewer import queries
from grmpipe.viewer.figures import (
    choices,
    counts,
    failures_by_judge,
    keep_figures,
    means_around,
    run_figures,
    truth_by_reward,
)
from grmpipe.viewer.index import IndexProgress, RunIndex
from grmpipe.viewer.queries import LABELLED, Filter, RolloutRow, find_rollouts

PROMPT = Prompt(prompt_id="p9", messages=(Message(role="user", content="More?"),))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def follow(index: RunIndex) -> IndexProgress:
    return [*index.follow()][-1]


def found(index: RunIndex, **wanted: object) -> list[tuple[str, int]]:
    return [(row.group_id, row.sibling) for row in rows(index, **wanted)]


def rows(index: RunIndex, **wanted: object) -> list[RolloutRow]:
    with contextlib.closing(index.read()) as connection:
        return [*find_rollouts(connection, Filter(**wanted)).rows]


def add_rollout(run_dir: Path, text: str, group_id: str = "g3") -> None:
    recorder = Recorder(run_dir)
    recorder.rollout(2, PROMPT, answer(group_id, 0, text))
    recorder.close()


def test_a_rollout_has_what_all_journals_say_of_it(tmp_path: Path) -> None:
    index = RunIndex(write_run(tmp_path / "run"))
    follow(index)
    fooled = next(row for row in rows(index, sort="oldest"))
    assert (fooled.score, fooled.reward, fooled.spread, fooled.votes) == (8.0, 0.8, 2.5, 1)
    assert (fooled.step, fooled.outcome, fooled.advantage, fooled.truth) == (1, "trained", 1.0, 0.0)
    assert (fooled.tokens, fooled.version, fooled.source, fooled.prompt_id) == (10, 0, "math", "p1")
    unjudged = rows(index)[0]
    assert (unjudged.failure, unjudged.score, unjudged.reward, unjudged.faults) == ("timeout", None, None, "arguments")


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"truth": "fooled"}, [("g1", 0)]),
        ({"truth": "missed"}, [("g1", 1)]),
        ({"score_from": 5.0}, [("g1", 0)]),
        ({"spread_from": 1.0}, [("g1", 0)]),
        ({"tokens_from": 15}, [("g1", 1)]),
        ({"source": "tools"}, [("g2", 0)]),
        ({"step_from": 1, "step_to": 1, "sort": "oldest"}, [("g1", 0), ("g1", 1)]),
        ({"step_from": 2}, []),
        ({"failure": "any"}, [("g2", 0)]),
        ({"failure": "unparseable"}, []),
        ({"cause": "unparseable"}, [("g1", 1)]),
        ({"fault": "arguments"}, [("g2", 0)]),
        ({"fault": "argument"}, []),
        ({"sort": "score, lowest"}, [("g1", 1), ("g1", 0), ("g2", 0)]),
        ({"sort": "judge above truth", "truth": "fooled"}, [("g1", 0)]),
        ({"words": "convincing"}, [("g1", 0)]),
        ({"words": "oslo rain"}, [("g2", 0)]),
        ({"words": '"too short"'}, [("g1", 1)]),
        ({"words": '"short too"'}, []),
        ({"words": "6 -trust", "sort": "oldest"}, [("g1", 1)]),
        ({"words": "convinc*"}, [("g1", 0)]),
        ({"words": 'lookup OR " AND ('}, []),
        ({"evaluation": "held_out"}, []),
    ],
)
def test_a_filter_selects_the_matching_answers(
    tmp_path: Path, wanted: dict[str, object], expected: list[tuple[str, int]]
) -> None:
    index = RunIndex(write_run(tmp_path / "run"))
    follow(index)
    assert found(index, **wanted) == expected


def test_a_filter_is_its_url() -> None:
    wanted = Filter(words="a b", step_from=3, score_to=2.5, evaluation="short", page=2)
    query = dict(part.split("=") for part in wanted.url(page=2).replace("+", " ").split("&"))
    assert Filter.parse(query) == wanted
    with pytest.raises(ValueError, match="step_from: 'x' is no whole number"):
        Filter.parse({"step_from": "x"})


def test_the_index_grows_with_the_run_and_waits_for_a_torn_line(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    index = RunIndex(run_dir)
    follow(index)
    add_rollout(run_dir, "fresh words")
    path = run_dir / "rollouts.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert follow(index).share < 1
    assert found(index, words="fresh") == []
    with path.open("ab") as file:
        file.write(whole[-20:])
    assert follow(index).share == 1
    assert found(index, words="fresh") == [("g3", 0)]


def test_a_line_that_cannot_be_read_is_counted_and_the_next_ones_are_there(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    with (run_dir / "rollouts.jsonl").open("ab") as file:
        file.write(b'{"group_id": 7}\n\xff\n')
    add_rollout(run_dir, "after it")
    index = RunIndex(run_dir)
    assert follow(index).unreadable == 2
    assert found(index, words="after") == [("g3", 0)]


@pytest.mark.parametrize(
    ("journal", "wrong"),
    [
        ("rollouts.jsonl", {"sibling": 2**63}),
        ("rollouts.jsonl", {"turns": [{"versions": [{"version": 2**63 - 1}] * 2}]}),
        ("groups.jsonl", {"step": 2**70}),
        ("trained.jsonl", {"advantage": 1e308}),
        ("judgements.jsonl", {"verdict": {"rewards": [{"value": 1e308}]}}),
        ("judgements.jsonl", {"by_judge": {"strict": {"verdict": {"num_judgements": "many"}}}}),
        ("judged.jsonl", {"labels": [0]}),
        ("judged.jsonl", {"labels": [0, 1, 2**70]}),
        ("eval_rollouts.jsonl", {"prompts": ""}),
        ("eval_rollouts.jsonl", {"prompts": LABELLED}),
    ],
)
def test_a_line_with_impossible_values_is_counted_and_changes_nothing(
    tmp_path: Path, journal: str, wrong: dict[str, object]
) -> None:
    records = collect_records(tmp_path)
    clean, run_dir = tmp_path / "clean", tmp_path / "run"
    for folder in (clean, run_dir):
        folder.mkdir()
        for name, own in records.items():
            (folder / name).write_text("".join(json.dumps(one) + "\n" for one in own))
    with (run_dir / journal).open("a") as file:
        file.write(json.dumps({**records[journal][0], **wrong}) + "\n")
    before, after = RunIndex(clean), RunIndex(run_dir)
    assert (follow(before).unreadable, follow(after).unreadable) == (0, 1)
    for evaluation in ("", "held_out", LABELLED):
        assert rows(after, evaluation=evaluation) == rows(before, evaluation=evaluation)


@pytest.mark.parametrize("num_lines", [250, pytest.param(5000, marks=pytest.mark.long)])
def test_no_line_of_any_journal_ends_the_index(tmp_path: Path, num_lines: int) -> None:
    records, rng = collect_records(tmp_path), random.Random(7)
    run_dir = write_mutated(tmp_path / "run", records, rng, num_lines)
    add_rollout(run_dir, "after all of them")
    index = RunIndex(run_dir)
    progress = follow(index)
    assert progress.share == 1
    assert num_lines < progress.unreadable < 7 * num_lines
    assert found(index, words='"after all of them"') == [("g3", 0)]
    with contextlib.closing(sqlite3.connect(index.path)) as connection:
        connection.execute("INSERT INTO words (words) VALUES ('integrity-check')")


def test_a_truth_that_was_written_as_true_is_1(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    path = run_dir / "trained.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "right": bool(line["right"])}) + "\n" for line in lines))
    index = RunIndex(run_dir)
    assert follow(index).unreadable == 0
    assert [row.truth for row in rows(index, sort="oldest")[:2]] == [0.0, 1.0]
    assert [line.right for line in load_trained(path)] == [0.0, 1.0]


def test_half_of_a_character_is_shown_as_unknown(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    add_rollout(run_dir, "half \ud83d of it, whole \U0001f600")
    index = RunIndex(run_dir)
    assert follow(index).unreadable == 0
    assert rows(index, words="half")[0].answer == "half \ufffd of it, whole \U0001f600"


def test_journal_that_was_cut_and_rewritten_is_read_again(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    index, path = RunIndex(run_dir), run_dir / "rollouts.jsonl"
    before = path.read_bytes()
    add_rollout(run_dir, "void words")
    follow(index)
    with path.open("r+b") as file:
        file.truncate(len(before))
    add_rollout(run_dir, "valid words, and more of them", group_id="g4")
    follow(index)
    assert found(index, words="void") == []
    assert found(index, words="valid") == [("g4", 0)]
    assert len(found(index)) == 4


def test_another_run_in_the_same_directory_gets_another_index(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    index = RunIndex(run_dir)
    follow(index)
    (run_dir / "run.json").write_text('{"run_id": "0123", "inputs": {}}')
    (run_dir / "rollouts.jsonl").write_bytes(b"")
    follow(index)
    assert found(index) == []


def test_lines_of_another_run_are_left_out(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "run.json").write_text('{"run_id": "0123", "inputs": {}}')
    recorder = Recorder(run_dir, "4567")
    recorder.rollout(2, PROMPT, answer("g3", 0, "foreign"))
    recorder.close()
    index = RunIndex(run_dir)
    follow(index)
    assert found(index, words="foreign") == []


def test_a_rollout_judged_again_has_its_last_verdict_and_words(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    recorder = Recorder(run_dir)
    recorder.record_verdict(answer("g1", 0, ""), report(2.0))
    recorder.close()
    index = RunIndex(run_dir)
    follow(index)
    assert [row.score for row in rows(index, words="trust")] == [2.0]
    assert found(index, words="convincing") == []


def test_index_filters_answers_by_judge(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    recorder = Recorder(run_dir)
    recorder.record_verdict(answer("g1", 0, ""), by_judges(strict=report(2.0), kind=report(9.0)))
    recorder.close()
    index = RunIndex(run_dir)
    follow(index)
    assert [row.score for row in rows(index, judge="kind")] == [9.0]
    assert found(index, judge="kind", score_from=8.0) == [("g1", 0)]
    assert found(index, judge="strict", score_from=8.0) == []
    with contextlib.closing(index.read()) as connection:
        assert choices(connection)["judge"] == ["kind", "strict"]


def test_held_out_rollouts_of_two_evaluations_are_kept_apart(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    line = json.loads((run_dir / "rollouts.jsonl").read_text().splitlines()[0])
    who = {name: line[name] for name in ("group_id", "sibling")}
    verdicts = {0: 5.0, 10: 7.0}  # step -> score
    journals = {
        "eval_rollouts.jsonl": [{**line, "step": step} for step in verdicts],
        "eval_judgements.jsonl": [
            {**who, "step": step, "verdict": {"rewards": [{"value": 0.5}], "score": score}}
            for step, score in verdicts.items()
        ],
    }
    for name, lines in journals.items():
        (run_dir / name).write_text("".join(json.dumps(one) + "\n" for one in lines))
    index = RunIndex(run_dir)
    follow(index)
    assert [(row.round, row.score) for row in rows(index, evaluation="held_out")] == [(10, 7.0), (0, 5.0)]
    assert len(rows(index)) == 3


def test_the_journals_of_evaluations_give_answers_verdicts_and_truth(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    for prompts, step, score in (("held_out", 0, 2.0), ("held_out", 5, 7.0), ("hard", 5, 1.0)):
        evaluate(run_dir, prompts=prompts, step=step, score=score)
    index = RunIndex(run_dir)
    follow(index)
    known = [(row.round, row.score, row.truth) for row in rows(index, evaluation="held_out", words="held")]
    assert known == [(5, 7.0, 1.0), (0, 2.0, 1.0)]
    assert [row.score for row in rows(index, evaluation="hard")] == [1.0]
    with contextlib.closing(index.read()) as connection:
        assert counts(connection) == {"": 3, "hard": 1, "held_out": 2}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, [("i1", 0), ("i1", 1), ("i2", 0)]),
        ({"outcome": "wrong"}, [("i1", 0), ("i1", 1)]),
        ({"outcome": "failed"}, [("i2", 0)]),
        ({"failure": "timeout"}, [("i2", 0)]),
        ({"cause": "timeout"}, [("i2", 0)]),
        ({"source": "sums", "score_from": 5.0}, [("i1", 1)]),
        ({"words": "trust"}, [("i1", 1)]),
        ({"words": "short"}, [("i1", 0)]),
    ],
)
def test_responses_to_labelled_items_are_found_by_what_the_judge_made_of_them(
    tmp_path: Path, wanted: dict[str, str], expected: list[tuple[str, int]]
) -> None:
    index = RunIndex(judge_labelled_work(tmp_path / "run"))
    follow(index)
    assert found(index, evaluation=LABELLED, sort="oldest", **wanted) == expected
    scores = [(row.score, row.truth, row.failure) for row in rows(index, evaluation=LABELLED, sort="oldest")]
    assert scores == [(3.0, 1.0, ""), (8.0, 0.0, ""), (None, 2.0, "timeout")]


def test_the_index_counts_truth_by_reward_and_failures_by_judge(tmp_path: Path) -> None:
    index = RunIndex(write_run(tmp_path / "run"))
    follow(index)
    with contextlib.closing(index.read()) as connection:
        assert truth_by_reward(connection, "") == [(0.2, 0.4, 1, 1.0), (0.8, 1.0, 1, 0.0)]
        assert failures_by_judge(connection) == [("", "unparseable", 1, 1 / 3, ["no verdict in it:"])]
        since = means_around(connection, 1)[""]
    assert (since[True].reward, since[True].truth, since[True].tokens) == (0.55, 0.5, 15.0)
    assert False not in since


def test_an_old_run_without_trained_jsonl_has_steps_and_no_truth(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "trained.jsonl").unlink()
    index = RunIndex(run_dir)
    follow(index)
    assert [(row.step, row.truth) for row in rows(index, sort="oldest")] == [(1, None), (1, None), (None, None)]


def test_nothing_is_written_into_the_run_and_the_index_is_the_users_alone(tmp_path: Path, cache: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    before = {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    index = RunIndex(run_dir)
    follow(index)
    assert {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()} == before
    assert index.path.is_relative_to(cache)
    assert index.path.stat().st_mode & 0o077 == 0


def test_texts_are_not_kept_twice(tmp_path: Path) -> None:
    index = RunIndex(write_run(tmp_path / "run"))
    follow(index)
    with contextlib.closing(index.read()) as connection:
        assert [row[0] for row in connection.execute("SELECT text FROM words")] == [None] * 6
    assert SCRIPT in rows(index, sort="oldest")[0].answer


def test_counting_stops_at_a_bound_and_the_pages_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PAGE_ROWS", 1)
    monkeypatch.setattr(queries, "COUNTED", 2)
    index = RunIndex(write_run(tmp_path / "run"))
    follow(index)
    with contextlib.closing(index.read()) as connection:
        first, last = (find_rollouts(connection, Filter(page=page, sort="oldest")) for page in (1, 3))
        few = find_rollouts(connection, Filter(truth="fooled"))
    assert (first.total, first.is_more, [row.sibling for row in first.rows]) == ("more than 2", True, [0])
    assert (last.total, last.is_more, [row.group_id for row in last.rows]) == ("3", False, ["g2"])
    assert (few.total, few.num_pages) == ("1", 1)


def test_a_filter_reads_the_table_once_in_its_order(tmp_path: Path) -> None:
    index = RunIndex(write_run(tmp_path / "run"))
    follow(index)
    wanted = Filter(source="math", step_from=1, score_to=9.0, truth="fooled")
    with contextlib.closing(index.read()) as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {queries.select_ids(wanted)}", {**asdict(wanted), "limit": 9})
        assert [row["detail"] for row in plan] == ["SCAN r"]


def test_kept_figures_are_read_again_until_the_index_grows(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    index = RunIndex(run_dir)
    state = follow(index)
    asked = run_figures(index, state)
    keep_figures(index, state)
    run_figures.cache_clear()
    with contextlib.closing(sqlite3.connect(index.path)) as connection, connection:
        connection.execute("UPDATE rollouts SET reward = 0")  # so that asking again would show
    assert run_figures(index, state) == asked
    add_rollout(run_dir, "more")
    assert run_figures(index, follow(index)).counts == {"": 4}
