"""The queue of answers to annotate: whom it prefers, and that shares keep figures unbiased."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from viewed_run import judge_labelled_work, write_run

from grmpipe.viewer.annotate_pages import GROWS_WITH, Selected, select_answers
from grmpipe.viewer.index import RunIndex
from grmpipe.viewer.queries import LABELLED

NUM = 3000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunIndex:
    """Answers 1 .. 3000 of g: the spread grows, every tenth reward is near .5, judges part on one of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    index = RunIndex(write_run(tmp_path / "run"))
    assert list(index.follow())
    with contextlib.closing(sqlite3.connect(index.path)) as connection, connection:
        connection.execute("DELETE FROM rollouts")
        rows = [(i, i, 0.5 if i % 10 == 0 else 1.0, i / NUM) for i in range(1, NUM + 1)]
        connection.executemany(
            "INSERT INTO rollouts (id, evaluation, round, group_id, sibling, line, reward, spread) "
            "VALUES (?, '', 0, 'g', ?, 0, ?, ?)", rows)  # fmt: skip
        parted = [(i, judge, float(i == 99 and judge == "b")) for i in range(90, 110) for judge in "ab"]
        connection.executemany("INSERT INTO opinions (id, judge, reward) VALUES (?, ?, ?)", parted)
    return index


def select(index: RunIndex, how: str, num_items: int = 300, seed: int = 0) -> list[Selected]:
    return [*select_answers(index, index.progress(), "", how, num_items, seed)]


@pytest.mark.parametrize("how", GROWS_WITH)
def test_means_weighted_by_the_inverse_share_are_those_of_all_answers(index: RunIndex, how: str) -> None:
    """Also when only the first half of the queue is annotated. Four standard errors."""
    numbers, means = np.arange(1, NUM + 1), []
    truth = (numbers % 10 == 0) | (numbers > 2000)  # what two of the queues prefer
    for seed in range(25):
        queue = select(index, how, seed=seed)
        for part in (queue, queue[: len(queue) // 2]):
            weights = [1 / one.share for one in part]
            means.append(np.average([truth[one.sibling - 1] for one in part], weights=weights))
    for of_part in (means[0::2], means[1::2]):
        error = np.std(of_part, ddof=1) / len(of_part) ** 0.5
        assert abs(np.mean(of_part) - truth.mean()) < 4 * error


def test_a_queue_has_its_number_each_once_in_the_same_order_again(index: RunIndex) -> None:
    for how in GROWS_WITH:
        queue = select(index, how)
        assert 200 < len(queue) < 370
        assert len({one.place for one in queue}) == len(queue)
        select_answers.cache_clear()
        assert select(index, how) == queue
    assert select(index, "random", seed=1) != select(index, "random")
    assert len(select(index, "random", num_items=10 * NUM)) == NUM


def test_each_way_prefers_its_answers_and_leaves_none_without_a_share(index: RunIndex) -> None:
    shares = {how: {one.sibling: one.share for one in select(index, how, num_items=2 * NUM)} for how in GROWS_WITH}
    assert all(len(of) == NUM for of in shares.values())  # a share of one half at random is everyone's
    few = {how: {one.sibling: one.share for one in select(index, how)} for how in GROWS_WITH}
    assert few["disagreement"][99] == 1.0
    assert np.mean([*few["split"]]) > 1.1 * NUM / 2
    assert np.mean([number % 10 == 0 for number in few["threshold"]]) > 0.4
    assert {*few["random"].values()} == {0.1}


def test_a_run_without_what_is_asked_for_says_what_to_choose(index: RunIndex) -> None:
    with contextlib.closing(sqlite3.connect(index.path)) as connection, connection:
        connection.execute("DELETE FROM opinions")
        connection.execute("UPDATE rollouts SET spread = 0, reward = NULL")
    select_answers.cache_clear()
    for how in ("disagreement", "split", "threshold"):
        with pytest.raises(ValueError, match="choose select=random"):
            select(index, how)
    with pytest.raises(ValueError, match="unknown value 'best'; known: random, disagreement"):
        select(index, "best")


@pytest.mark.parametrize(("how", "likeliest"), [("split", 0), ("threshold", 1)])
def test_of_labelled_answers_votes_that_part_and_scores_near_the_passing_one_come_first(
    how: str, likeliest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_dir = judge_labelled_work(tmp_path / "run")  # its scores are 3 and 8
    first, *others = [json.loads(line) for line in (run_dir / "judged.jsonl").read_text().splitlines()]
    first["judgements"].append({**first["judgements"][0], "scores": [9.0]})  # the votes on the first answer are 3 and 9
    (run_dir / "judged.jsonl").write_text("".join(json.dumps(item) + "\n" for item in (first, *others)))
    index = RunIndex(run_dir)
    assert list(index.follow())
    shares = {
        one.sibling: one.share
        for seed in range(50)
        for one in select_answers(index, index.progress(), LABELLED, how, 1, seed, (8.0, 10.0))
        if one.group == "i1"
    }
    assert shares[likeliest] > shares[1 - likeliest]
