"""The viewer's server: who may see its pages, what each shows, and that a run's texts stay texts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import quote

import pytest
from configs import run_config
from html_rules import Page, colour_schemes, contrast
from journal_mutations import collect_records, write_all_journals, write_mutated
from viewed_run import SCRIPT, answer, evaluate, judge_jointly, judge_labelled_work, make_old, thin_run, write_run

from grmpipe.config.run_config import ConfigError
from grmpipe.models.types import Message
from grmpipe.observe.recorder import Recorder
from grmpipe.run.tasks.list_runs import view_runs
from grmpipe.types import Prompt
from grmpipe.viewer.index import RunIndex
from grmpipe.viewer.pages import link
from grmpipe.viewer.queries import Filter
from grmpipe.viewer.runs import find_runs

aiohttp = pytest.importorskip("aiohttp")
from viewer_client import fetch, opened, visible  # noqa: E402
from yarl import URL  # noqa: E402

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# -- access ------------------------------------------------------------------------------------------------------------


def test_without_the_token_there_is_nothing_and_with_it_a_cookie_that_scripts_cannot_read(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")

    async def run() -> None:
        async with opened(run_dir, admitted=False) as (client, viewer):
            for path in ("/", "/rollouts/run", "/static/style.css", "/state/run", "/?token=wrong", "/nothing"):
                assert (await client.get(path)).status == 401, path
            first = await client.get(
                "/rollouts/run", params={"token": viewer.token, "sort": "oldest"}, allow_redirects=False
            )
            assert (first.status, first.headers["Location"]) == (303, "/rollouts/run?sort=oldest")
            cookie = next(iter(SimpleCookie(first.headers["Set-Cookie"]).values()))
            assert (cookie["httponly"], cookie["samesite"]) == (True, "Strict")
            page = await client.get("/rollouts/run")
            assert page.status == 200
            assert viewer.token not in await page.text()

    asyncio.run(run())


def test_a_page_of_another_name_may_not_ask(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")

    async def run() -> None:
        async with opened(run_dir) as (client, viewer):
            for host in ("evil.example:8707", "127.0.0.1.evil.example"):
                answer = await client.get("/", params={"token": viewer.token}, headers={"Host": host})
                assert answer.status == 403
            assert (await client.get("/", headers={"Host": "localhost:9000"})).status == 200  # through a tunnel

    asyncio.run(run())


def test_a_redirection_stays_on_this_server(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")

    async def run() -> None:
        async with opened(run_dir) as (client, viewer):
            url = URL(f"{client.make_url('/')!s}/evil.example/?token={viewer.token}", encoded=True)
            answer = await client.session.get(url, allow_redirects=False)
            assert answer.headers["Location"] == "/evil.example/"

    asyncio.run(run())


def test_every_answer_has_the_policy_that_forbids_foreign_scripts(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")

    async def run() -> None:
        async with opened(run_dir) as (client, _):
            for path in ("/run/run", "/rollouts/run", "/static/follow.js", "/nothing", "/run/other"):
                answer = await client.get(path)
                assert (
                    "default-src 'none'; style-src 'self'; script-src 'self'"
                    in answer.headers["Content-Security-Policy"]
                )
                assert answer.headers["X-Content-Type-Options"] == "nosniff"

    asyncio.run(run())


# -- pages -------------------------------------------------------------------------------------------------------------


def test_the_page_of_a_run_has_curves_and_where_judge_and_truth_part(tmp_path: Path) -> None:
    (page,) = fetch(write_run(tmp_path / "run"), "/run/run?since=1")
    text = visible(page)
    assert "run mine no end recorded" in text
    for title in ("Reward", "True accuracy", "Failed judgements", "Reward and truth"):
        assert f'aria-label="{title}"' in page
    assert "0.8 to 1 1 0" in text
    assert "before step 1 since step 1" in text
    assert "reward minus truth – 0.05" in text


def test_a_run_that_only_evaluates_has_its_figures_and_its_answers_without_a_choice(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    evaluate(run_dir, prompts="held_out", step=0, score=2.0)
    (run_dir / "figures.txt").write_text("accuracy 41.5\n", encoding="utf-8")
    page, rollouts, missed = map(visible, fetch(run_dir, "/run/run", "/rollouts/run", "/rollouts/run?truth=missed"))
    assert "Figures accuracy 41.5" in page
    assert "0 steps, 1 of evaluations: held_out" in page
    assert "of the first evaluation" in page
    for absent in ("since a step", "Trained rollouts", "No step has reported"):
        assert absent not in page
    for table in (rollouts, missed):
        assert "1 rollouts, page 1 of 1" in table
        assert "of training" not in table


def test_a_run_that_evaluates_a_judge_shows_where_it_was_wrong_and_what_it_said(tmp_path: Path) -> None:
    run_dir = judge_labelled_work(tmp_path / "run")
    asked = "/rollouts/run?evaluation=labelled+work&outcome=wrong"
    page, table, item, failed = fetch(
        run_dir, "/run/run", asked, "/group/run?group=i1&evaluation=labelled+work", "/failures/run?cause=timeout"
    )
    assert "3 of evaluations: labelled work" in visible(page)
    assert f'href="{asked.replace("&", "&amp;")}"' in page
    assert "2 rollouts, page 1 of 1" in visible(table)
    first, second = visible(item).split("i1/1")
    assert "evaluation labelled work: the judge: wrong" in first and "after step" not in first
    assert "score 3 reward – spread – label 1" in first and "a labelled response It is 42" in first
    assert "judge: 3 Too short" in first and "judge: 8 Convincing" in second
    assert "score 8 reward – spread – label 0" in second and SCRIPT not in item
    assert "no verdict: timeout" in visible(failed) and "failed: timeout 120 s" in visible(failed)
    assert "judge Step by step" in visible(failed), "a score per step is none of the response"


def test_any_metric_can_be_drawn(tmp_path: Path) -> None:
    drawn, none = fetch(write_run(tmp_path / "run"), "/run/run?metrics=unpars", "/run/run?metrics=nothing")
    assert 'aria-label="judge/failed_unparseable"' in drawn
    assert "No metric's name holds nothing" in none


def test_the_table_names_what_its_url_asks_for(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    everything, fooled = fetch(run_dir, "/rollouts/run", "/rollouts/run?truth=fooled")
    assert "3 rollouts, page 1 of 1" in visible(everything)
    assert "1 rollouts, page 1 of 1" in visible(fooled)
    assert 'href="/group/run?group=g1"' in everything
    assert 'href="/group/run?group=g1&amp;in=truth%3Dfooled"' in fooled
    assert '<option value="fooled" selected>' in fooled
    assert "no verdict: timeout" in everything


def test_a_group_has_its_siblings_side_by_side_with_their_critiques(tmp_path: Path) -> None:
    (page,) = fetch(write_run(tmp_path / "run"), "/group/run?group=g1")
    text = visible(page)
    assert page.count("<article") == 2
    assert "trained by step 1" in text
    assert "reference 42" in text
    first, second = text.split("g1/1")
    assert "score 8 reward 0.8 spread 2.5 truth 0 advantage 1 tokens 10 step 1" in first
    assert "judge: 8 Convincing" in first
    assert "judge: 3 Too short" in second
    assert "failed: unparseable no verdict in it: no mark" in second


def test_a_reward_function_has_its_name_and_no_score_on_the_pages(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "config.yaml").write_text("judge: {kind: function, function: mylab.brief}\n")
    run, group = map(visible, fetch(run_dir, "/run/run", "/group/run?group=g1"))
    assert "Is the reward function mylab.brief right?" in run
    assert "by the reward that the reward function mylab.brief gave" in run
    group = group.split("keys With scripts")[0]
    assert "score" not in group.replace("score_std", "") and "reward 0.8 spread" in group


def test_a_held_out_answer_has_its_page(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    evaluate(run_dir, prompts="held_out", step=5, score=7.0)
    table, page = fetch(run_dir, "/rollouts/run?evaluation=held_out", "/group/run?group=e1&evaluation=held_out&round=5")
    assert "/group/run?group=e1&amp;evaluation=held_out&amp;round=5" in table
    text = visible(page)
    assert "evaluation held_out, after step 5" in text
    assert "judge: 7 evaluated" in text
    assert "Still there?" in text


def test_an_episode_is_a_conversation_with_calls_faults_and_branches(tmp_path: Path) -> None:
    (page,) = fetch(write_run(tmp_path / "run"), "/group/run?group=g2&sibling=0")
    text = visible(page)
    for words in (
        "turn 1: the policy fault: arguments I look it up",
        "calls lookup({&#34;city&#34;: &#34;Oslo&#34;})",
        "before the branch: tool lookup rain",
        "turn 2: the policy a branch: it doesn&#39;t continue the turn before points 0.5",
        "no verdict: timeout",
    ):
        assert words in text, words


def test_failed_judgements_are_counted_by_cause_and_shown(tmp_path: Path) -> None:
    (page,) = fetch(write_run(tmp_path / "run"), "/failures/run?cause=unparseable")
    text = visible(page)
    assert "judge unparseable 1 33 % no verdict in it:" in text
    assert "timeout 1" in text
    assert "unparseable: 1 rollouts" in text
    assert "no mark" in text


def test_two_runs_are_compared_by_configuration_curves_and_answers(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "x" / "first")
    write_run(tmp_path / "runs" / "x" / "second", lr=3e-4)
    folder, comparison, answers = fetch(
        tmp_path / "runs", "/", "/compare?a=x/first&b=x/second", "/compare?a=x/first&b=x/second&prompt=p1"
    )
    assert "x/first" in visible(folder)
    assert "x/second" in visible(folder)
    assert "train.lr 0.0001 0.0003" in visible(comparison)
    assert 'aria-label="Reward"' in comparison
    assert answers.count("<article") == 4
    assert "B: x/second" in visible(answers)


def test_the_run_that_changed_last_comes_first_with_its_last_evaluation(tmp_path: Path) -> None:
    runs = {name: write_run(tmp_path / "runs" / name) for name in ("old", "new", "older")}
    for seconds, name in enumerate(("older", "old", "new")):
        os.utime(runs[name] / "metrics.jsonl", (0, 86400 * 365 + seconds))
    with (runs["new"] / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        metrics.write('{"step": 9, "eval/reward": 0.25, "eval/true_accuracy": 0.625}\n')
    (page,) = fetch(tmp_path / "runs", "/")
    assert re.findall(r'href="/run/(\w+)"', page) == ["new", "old", "older"]
    assert "9 0.25 0.625 20" in visible(page)
    assert "1971-01-01" in page


def test_a_folder_of_links_to_runs_shows_each_run_once(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / "elsewhere" / name) for name in ("first", "second"))
    folder = tmp_path / "chosen"
    folder.mkdir()
    (folder / "a").symlink_to(first)
    (folder / "b").symlink_to(second)
    (folder / "again").symlink_to(second)
    (folder / "round").symlink_to(folder)
    assert list(find_runs(folder)) == ["a", "again"]
    (tmp_path / "elsewhere" / "latest").symlink_to("second")
    assert list(find_runs(tmp_path / "elsewhere")) == ["first", "second"]
    (page,) = fetch(folder, "/")
    assert 'href="/run/again"' in page


def test_a_link_to_a_folder_of_runs_is_followed_and_a_circle_of_links_ends(tmp_path: Path) -> None:
    write_run(tmp_path / "elsewhere" / "x" / "first")
    folder = tmp_path / "chosen"
    write_run(folder / "own")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(folder)
    (tmp_path / "elsewhere" / "round").symlink_to(tmp_path / "elsewhere")
    assert list(find_runs(folder)) == ["own", "linked/x/first"]
    (page,) = fetch(folder, "/run/linked/x/first")
    assert "linked/x/first mine no end recorded" in visible(page)


def test_the_list_of_runs_has_causes_and_figures_and_sorts_by_its_columns(tmp_path: Path) -> None:
    summaries = {
        "broken": {"status": "failed", "failure": "ValueError: the disk is full\nTraceback", "steps": 3},
        "judged": {"status": "completed", "steps": 0, "eval": {"initial": {}, "final": {
            "accuracy": 0.65, "accuracy_low": 0.51, "accuracy_high": 0.77}, "gsm8k": {"avg@4": 0.5}}},
        "mine": {"status": "completed", "steps": 7},
    }  # fmt: skip
    for name, summary in summaries.items():
        (write_run(tmp_path / "runs" / name) / "summary.json").write_text(json.dumps(summary))
    page, by_steps, by_run, wrong = (
        fetch(tmp_path / "runs", path, status=status)[0]
        for path, status in (("/", 200), ("/?sort=-steps", 200), ("/?sort=run", 200), ("/?sort=size", 400))
    )
    text = visible(page)
    assert "broken mine failed ValueError: the disk is full 3 " in text and "Traceback" not in text
    assert "judged mine completed accuracy 0.65 [0.51, 0.77]; gsm8k avg@4 0.5 1" in text
    assert " mine completed 7" in text  # one name, although its experiment has the same
    assert re.findall(r'href="/run/(\w+)"', by_steps) == ["mine", "broken", "judged"]
    assert re.findall(r'href="/run/(\w+)"', by_run) == ["broken", "judged", "mine"]
    assert 'aria-sort="descending"><a href="/?sort=steps"' in by_steps
    assert "unknown column &#39;size&#39;; known: run" in wrong


def test_a_click_on_a_column_sorts_by_it_and_another_one_turns_it_round(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    plain, down, up = fetch(
        run_dir, "/rollouts/run?truth=", "/rollouts/run?sort=reward%2C+highest", "/rollouts/run?sort=reward%2C+lowest"
    )
    assert '<th scope="col" class="number"><a href="/rollouts/run?sort=reward%2C+highest">' in plain
    assert 'aria-sort="descending"><a href="/rollouts/run?sort=reward%2C+lowest">' in down
    assert 'aria-sort="ascending"><a href="/rollouts/run?sort=reward%2C+highest">' in up
    rows = [re.findall(r"(\d)</a></th>", page) for page in (down, up)]
    assert rows == [["0", "1", "0"], ["1", "0", "0"]]  # g1/0, g1/1, and g2/0 without a reward


def test_filters_are_folded_until_one_is_used(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    paths = ("/rollouts/run", "/rollouts/run?words=it&sort=oldest", "/rollouts/run?score_from=2")
    assert ['<details class="wide" open>' in page for page in fetch(run_dir, *paths)] == [False, False, True]


def test_the_list_of_runs_says_what_a_sweep_varied(tmp_path: Path) -> None:
    for name, lr in (("one", 1e-4), ("two", 3e-4)):
        write_run(tmp_path / "runs" / "mine" / name, lr=lr)
    write_run(tmp_path / "runs" / "alone" / "only", experiment="alone", lr=5e-4)
    (page,) = fetch(tmp_path / "runs", "/")
    text = visible(page)
    assert "mine/one train.lr=0.0001 " in text and "mine/two train.lr=0.0003 " in text
    assert "train.lr=0.0005" not in text


PAGES = ("/run/run", "/rollouts/run?sort=oldest", "/group/run?group=g1", "/group/run?group=g2", "/failures/run")


@pytest.mark.parametrize("thinned", [False, True])
def test_packed_and_thinned_numbers_change_no_page(tmp_path: Path, thinned: bool) -> None:
    plain, run_dir = write_run(tmp_path / "plain" / "run"), write_run(tmp_path / "run", compact=not thinned)
    pages = fetch(thin_run(run_dir, None) if thinned else run_dir, *PAGES)
    assert pages == fetch(plain, *PAGES)


def test_an_old_run_has_its_texts_scores_and_steps_and_no_truth(tmp_path: Path) -> None:
    curves, table, group, episode, failures = map(visible, fetch(make_old(write_run(tmp_path / "run")), *PAGES))
    assert (
        "reward minus truth" in curves and "3 rollouts" in table and "lookup" in episode and "unparseable" in failures
    )
    assert (
        "score 8 reward 0.8 spread 2.5 truth – advantage – tokens 10 step 1" in group and "judge: 8 Convincing" in group
    )


def test_a_group_without_text_says_so_beside_its_scores_and_lengths(tmp_path: Path) -> None:
    run_dir = thin_run(write_run(tmp_path / "run"), 1e-9)
    curves, table, group, episode, failures = map(visible, fetch(run_dir, *PAGES))
    assert "reward minus truth" in curves and "(text dropped: journals.keep)" in table
    assert "score 8 reward 0.8 spread 2.5 truth 0 advantage 1 tokens 10 step 1" in group
    assert "rollouts.jsonl: the text of this group was dropped (journals.keep); scores and lengths stay" in group
    assert "no verdict: timeout" in episode and "unparseable" in failures
    assert not any("Trust me" in page or "Convincing" in page for page in (curves, table, group, failures))


def test_joint_judgement_is_shown_with_each_answer_that_it_judges(tmp_path: Path) -> None:
    run_dir = judge_jointly(write_run(tmp_path / "run"), "first is better")
    (page,) = fetch(run_dir, "/group/run?group=g1")
    assert visible(page).count("first is better") == 2


def test_a_wrong_url_is_answered_with_the_reason(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    assert "score_from: &#39;x&#39; is no number" in fetch(run_dir, "/rollouts/run?score_from=x", status=400)[0]
    assert "no group &#39;g9&#39; in this run" in fetch(run_dir, "/group/run?group=g9", status=404)[0]
    assert "no run &#39;other&#39; here" in fetch(run_dir, "/run/other", status=404)[0]


ASKED = (
    "", "0", "1", "-1", "9" * 20, "9" * 4400, "1e400", "nan", "-inf", "held_out", "labelled work", "g1", "g2", "i1",
    "p1", "any", "timeout", "strict", "fooled", "newest", "\0", "a\0b", "\ud800", "\u202e", '"', '" OR', "a*", "-a",
    "(((", "x:y", "NEAR(a b)", "a " * 1300, '"a" ' * 450, "; DROP TABLE words", "é😀", "2", str(2**63 - 1), str(2**63),
)  # fmt: skip
ASKED_PAGES = (
    "/", "/run/run", "/rollouts/run", "/group/run", "/failures/run", "/compare", "/state/run", "/run/%00",
    "/annotations/run", "/next/run",
)  # fmt: skip


def ask(rng: random.Random) -> URL:
    """A page with any values of its parameters, and of some that it doesn't have."""
    page = rng.choice(ASKED_PAGES)
    names = (*(field.name for field in fields(Filter)), "group", "round", "sibling", "since", "metrics", "other")
    names = (*names, "queue", "in", "a", "b", "select", "form")
    asked = [(name, rng.choice(ASKED)) for name in rng.choices(names, k=rng.randint(0, 3))]
    asked += [("group", rng.choice(("g1", "g2", "i1")))] if page == "/group/run" else []
    asked += [("a", "run"), ("b", "run")] if page == "/compare" else []
    query = "&".join(f"{name}={quote(value.encode('utf-8', 'surrogatepass'))}" for name, value in asked)
    return URL(f"{page}?{query}", encoded=True)


@pytest.mark.parametrize("num_queries", [200, pytest.param(5000, marks=pytest.mark.long)])
def test_whatever_is_asked_is_answered(tmp_path: Path, num_queries: int) -> None:
    run_dir = write_all_journals(tmp_path).rename(tmp_path / "run")
    (run_dir / "summary.json").write_text("[" * 100_000)
    rng = random.Random(5)
    urls = [URL(f"/rollouts/run?{name}={2**63}") for name in ("page", "step_from", "tokens_to")]
    urls += [URL("/rollouts/run?words=a%00b", encoded=True), URL(f"/run/run?since={2**63}")]
    urls += [ask(rng) for _ in range(num_queries)]

    async def run() -> Counter[int]:
        found = Counter[int]()
        async with opened(run_dir) as (client, _):
            for url in urls:
                answer = await client.get(url)
                assert answer.status in (200, 400, 404), (answer.status, url)
                found[answer.status] += 1
        return found

    assert min(asyncio.run(run()).values()) > num_queries / 50


@pytest.mark.parametrize("num_lines", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_every_page_is_shown_whatever_the_journals_hold(tmp_path: Path, num_lines: int) -> None:
    records, rng = collect_records(tmp_path), random.Random(11)
    run_dir = write_mutated(tmp_path / "run", records, rng, num_lines)
    list(RunIndex(run_dir).follow())
    with contextlib.closing(RunIndex(run_dir).read()) as index:
        groups = [dict(zip(("group", "evaluation", "round"), row, strict=True)) for row in index.execute(
            "SELECT DISTINCT group_id, evaluation, round FROM rollouts WHERE line IS NOT NULL")]  # fmt: skip
    evaluations = sorted({str(one["evaluation"]) for one in groups})
    paths = [
        "/run/run?since=1&metrics=a",
        *(link("failures", "run", cause=cause) for cause in ("unparseable", "timeout")),
    ]
    paths += [link("rollouts", "run", evaluation=one) for one in evaluations]
    paths += [link("group", "run", **one) for one in groups]
    assert len(groups) > 3
    fetch(run_dir, *paths)


def test_no_page_holds_a_character_that_reorders_text(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", experiment="mi\u202ene")
    recorder = Recorder(run_dir)
    prompt = Prompt(prompt_id="p\u202e", messages=(Message(role="user", content="\u202e"),), source="so\u202eurce")
    recorder.rollout(5, prompt, answer("g\u202e9", 0, "\u202e"))
    recorder.close()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "judge/failed_\u202ecause": 1}\n')
    group = "/group/run?group=g%E2%80%AE9"
    pages = fetch(run_dir, "/run/run?metrics=%E2%80%AE", "/rollouts/run?words=%E2%80%AE&source=so%E2%80%AEurce", group)
    assert not any("\u202e" in page for page in pages)
    assert '<option value="so&#8238;urce" selected>so\ufffdurce</option>' in pages[1]


def test_a_line_that_was_damaged_is_said_where_it_would_be(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    path = run_dir / "judgements.jsonl"
    path.write_text(path.read_text().replace("Convincing", "Konvincing"))
    (page,) = fetch(run_dir, "/group/run?group=g1")
    assert "judgements.jsonl, at byte 0: it is damaged" in visible(page)
    assert "It is 42" in visible(page)


EVERY_PAGE = (
    "/",
    "/run/{0}",
    "/rollouts/{0}?words=script",
    "/rollouts/{0}?words=<script>1</script>",
    '/rollouts/{0}?prompt=<script>1</script>&source="><script>1</script>',
    "/group/{0}?group=g1",
    "/group/{0}?group=g2",
    "/failures/{0}",
    "/annotations/{0}",
    "/compare?a={0}&b={0}",
    "/compare?a={0}&b={0}&prompt=p1",
)


def test_a_planted_script_is_text_on_every_page(tmp_path: Path) -> None:
    name = "<script>1<"  # a slash can't be in a name
    run_dir = write_run(tmp_path / "runs" / name, experiment=SCRIPT)
    (run_dir / "summary.json").write_text('{"status": "<script>", "failure": "<script>", "alarms": ["<script>"]}')
    write_run(tmp_path / "runs" / "other")
    for page in fetch(tmp_path / "runs", *(path.format(name) for path in EVERY_PAGE)):
        assert page.count("<script") == 2, page  # our own
        assert '<script src="/static/follow.js" defer></script>' in page
        assert not re.search(r"\son\w+=|javascript:|\sstyle=", page)


def test_every_page_keeps_the_rules_for_keyboard_and_screen_reader(tmp_path: Path) -> None:
    for name in ("run", "other"):
        judge_jointly(write_run(tmp_path / "runs" / name), "both")
    more = ("/run/{0}?since=1&metrics=a", "/failures/{0}?cause=unparseable", "/group/{0}?group=g1&sibling=0")
    paths = [path.format("run").replace("b=run", "b=other") for path in (*EVERY_PAGE, *more)]
    for path, page in zip(paths, fetch(tmp_path / "runs", *paths), strict=True):
        assert Page(page).problems == [], path
    (page,) = fetch(tmp_path / "runs", "/group/run?group=none", status=404)
    assert Page(page).problems == []


def test_texts_and_curves_stand_out_in_light_and_dark_and_the_focus_is_seen() -> None:
    sheets = (ROOT / "grmpipe" / one for one in ("observe/templates/look.css", "viewer/static/style.css"))
    css = "".join(sheet.read_text() for sheet in sheets)
    light, dark = colour_schemes(css)
    for scheme in (light, {**light, **dark}):
        for ground in ("paper", "card"):
            for name in scheme.keys() - {"paper", "card", "rule"}:
                least = 3.0 if re.fullmatch(r"c[1-9]", name) else 4.5  # curves; texts and links
                assert contrast(scheme[name], scheme[ground]) >= least, (name, ground)
    assert re.search(r":focus-visible \{ outline: 2px solid", css)
    assert re.findall(r"([^{}]*)\{[^{}]*outline: (?:none|0)", css) == [
        "\nmain:focus "
    ]  # it gets the focus by the skip link


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "words"), [(False, "is no folder"), (True, "holds no run")])
def test_a_wrong_folder_is_refused_with_what_to_type(tmp_path: Path, make: bool, words: str) -> None:
    folder = tmp_path / "empty"
    if make:
        folder.mkdir()
    with pytest.raises(ConfigError, match=rf"^run_dir: .*{words}; type run_dir="):
        view_runs(run_config(run_dir=str(folder), task="view"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_journal_without_the_right_to_read_it_is_refused(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "rollouts.jsonl").chmod(0)
    with pytest.raises(ConfigError, match=r"rollouts\.jsonl can't be read \(Permission denied\)"):
        view_runs(run_config(run_dir=str(run_dir), task="view"))


def test_a_journal_that_is_no_file_is_refused(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "groups.jsonl").unlink()
    (run_dir / "groups.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"groups\.jsonl can't be read \(Is a directory\)"):
        view_runs(run_config(run_dir=str(run_dir), task="view"))


@contextlib.contextmanager
def served(run_dir: Path, cache: Path) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """The server of a run in a process of its own: its address, its token and its process."""
    script = "import sys; from pathlib import Path; from grmpipe.viewer.server import view; view(Path(sys.argv[1]), 0)"
    command = [sys.executable, "-c", script, str(run_dir)]
    environ = os.environ | {"XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"grmpipe: (http://127\.0\.0\.1:\d+)/\?token=(\S+) shows them; Ctrl-C ends it\n", line)
        assert found, line
        yield found[1], found[2], process
    finally:
        process.kill()
        process.wait()


def test_the_command_says_one_line_serves_a_read_only_run_and_ends_well(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    for path in run_dir.iterdir():
        path.chmod(0o444)
    run_dir.chmod(0o555)
    with served(run_dir, tmp_path / "cache") as (address, token, process):
        ask_until(f"{address}/rollouts/run?token={token}", "3 rollouts")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert process.stdout.read() == ""
    assert sorted(path.name for path in run_dir.iterdir()) == sorted(
        ("config.yaml", "metrics.jsonl", "rollouts.jsonl", "judgements.jsonl", "groups.jsonl", "trained.jsonl")
    )


def ask_until(url: str, words: str) -> str:
    """The page once it has these words: the index is made meanwhile."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    for _ in range(1000):
        with contextlib.suppress(urllib.error.HTTPError):
            page = opener.open(url, timeout=60).read().decode()
            if words in page:
                return page
        time.sleep(0.05)
    raise AssertionError(f"{url} never had {words!r}")
