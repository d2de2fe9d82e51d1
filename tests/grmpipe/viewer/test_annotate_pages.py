"""Annotating in the viewer without script: forms, who may send them, the queue, the list, and what files hold after."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest
from viewed_run import answer, completion, judge_labelled_work, report, write_run

from grmpipe.config.task_settings import AnnotateConfig
from grmpipe.data.labelled import load_labelled
from grmpipe.models.types import Message
from grmpipe.observe.recorder import Recorder
from grmpipe.types import Criterion, JudgedCriterion, Judgement, Prompt, ScoredResponse
from grmpipe.viewer.annotate_pages import read_threshold
from grmpipe.viewer.annotations import make_line
from grmpipe.viewer.runs import find_runs

aiohttp = pytest.importorskip("aiohttp")
from aiohttp.test_utils import TestClient  # noqa: E402
from viewer_client import fetch, opened, visible  # noqa: E402

from grmpipe.viewer.server import Viewer  # noqa: E402

Act = Callable[[TestClient, Viewer], Awaitable[None]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def act(folder: Path, do: Act, **settings: object) -> None:
    async def run() -> None:
        async with opened(folder, settings=AnnotateConfig(**settings)) as (client, viewer):
            await do(client, viewer)

    asyncio.run(run())


async def send(client: TestClient, viewer: Viewer, path: str, status: int = 200, **form: str) -> str:
    """Send a form and follow it; the page that it leads to."""
    answer = await client.post(path, data={"form_token": viewer.form_token, **form})
    text = await answer.text()
    assert answer.status == status, text
    return text


def read_lines(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "annotations.jsonl").read_text().splitlines()]


G1 = "/annotate/run?group=g1&about="


def test_a_rater_annotates_by_forms_and_every_page_shows_what_stands(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")

    async def do(client: TestClient, viewer: Viewer) -> None:
        page = await (await client.get("/group/run?group=g1")).text()
        assert 'name="rater"' in page and 'name="right"' not in page
        assert "give your name first" in await send(client, viewer, f"{G1}0", status=400, right="true")
        page = await send(client, viewer, "/annotate/run?group=g1", rater=" Anna  Ek ")
        assert 'name="rater"' not in page and 'name="right"' in page
        page = await send(client, viewer, f"{G1}0", right="false")
        assert "you: wrong" in visible(page) and "last: g1/0 wrong" in visible(page)
        await send(client, viewer, f"{G1}0", score="2")
        await send(client, viewer, f"{G1}1", note="=1+1 <script>")
        page = await send(client, viewer, f"{G1}1", best="1")
        assert "best of the siblings" in visible(page)
        table = visible(await (await client.get("/rollouts/run")).text())
        assert "Trust me, it is 41 &lt;script&gt;document.title=&#39;owned&#39;&lt;/script&gt; score 2" in table
        listed = await (await client.get("/annotations/run")).text()
        assert "4 annotations: Anna Ek 4" in visible(listed) and "=1+1 &lt;script&gt;" in listed
        assert re.search(r'href="/group/run\?group=g1&amp;sibling=0"', listed)
        last = read_lines(run_dir)[1]
        page = await send(client, viewer, "/annotate/run?group=g1", undoes=str(last["id"]))
        assert "score 2" not in visible(page) and "you: wrong" in visible(page)
        assert "undone before" in await send(client, viewer, "/annotate/run", status=400, undoes=str(last["id"]))
        await send(client, viewer, "/annotate/run", rater="ben")
        page = await (await client.get("/group/run?group=g1")).text()
        assert "you:" not in visible(page)  # what others say moves nobody
        assert "no annotation of yours" in await send(
            client, viewer, "/annotate/run", status=400, undoes=str(read_lines(run_dir)[0]["id"])
        )

    act(tmp_path / "run", do)
    first, second, note, best, undo = read_lines(run_dir)
    assert {name: first[name] for name in ("rater", "run", "group", "sibling", "reference", "source", "right")} == {
        "rater": "Anna Ek", "run": "run", "group": "g1", "sibling": 0, "reference": "42", "source": "math",
        "right": False,
    }  # fmt: skip
    assert str(first["prompt"]).startswith("What is 6 * 7?") and str(first["response"]).startswith("Trust me")
    assert (second["score"], note["note"], best["best"], best["sibling"]) == (2, "=1+1 <script>", 1, None)
    assert (undo["undoes"], {*undo}) == (second["id"], {"time", "id", "rater", "undoes"})


def test_lines_are_labels_that_load_labelled_reads(tmp_path: Path) -> None:
    async def do(client: TestClient, viewer: Viewer) -> None:
        for rater in ("anna", "ben"):
            await send(client, viewer, "/annotate/run", rater=rater)
            await send(client, viewer, f"{G1}0", score="2" if rater == "anna" else "5")
        for form in ({"right": "false"}, {"right": "true"}, {"best": "1"}, {"note": "so"}):
            await send(client, viewer, f"{G1}1", **form)
        undone = read_lines(tmp_path / "run")[2]["id"]
        assert "undone before" in await send(client, viewer, "/annotate/run", status=400, undoes=str(undone))

    act(write_run(tmp_path / "run"), do)
    scored, right, ranked = load_labelled(str(tmp_path / "run" / "annotations.jsonl"))
    assert isinstance(scored, ScoredResponse) and (scored.score, scored.prompt.reference) == (3.5, "42")
    assert scored.ratings == {"anna": 2, "ben": 5}
    assert isinstance(right, ScoredResponse) and (right.is_yes_no, right.score, right.response) == (
        True,
        10,
        "It is 42",
    )
    assert not isinstance(ranked, ScoredResponse)
    assert (ranked.best, ranked.responses[1], ranked.prompt.source) == (1, "It is 42", "math")


@pytest.mark.parametrize(
    ("form_token", "origin", "status"),
    [
        ("", None, 403),
        ("wrong", None, 403),
        (None, "http://127.0.0.1:1", 403),
        (None, "http://evil.example", 403),
        (None, "null", 403),
        (None, "own", 200),
        (None, None, 200),  # a browser without Origin
    ],
)
def test_a_form_of_a_foreign_page_writes_nothing(
    tmp_path: Path, form_token: str | None, origin: str | None, status: int
) -> None:
    run_dir = write_run(tmp_path / "run")

    async def do(client: TestClient, viewer: Viewer) -> None:
        await send(client, viewer, "/annotate/run", rater="anna")
        own = str(client.make_url("/")).rstrip("/")
        headers = {} if origin is None else {"Origin": own if origin == "own" else origin}
        data = {"form_token": viewer.form_token if form_token is None else form_token, "right": "true"}
        assert (await client.post(f"{G1}0", data=data, headers=headers)).status == status
        client.session.cookie_jar.clear()
        assert (await client.post(f"{G1}0", data={"form_token": viewer.form_token, "right": "true"})).status == 401

    act(run_dir, do)
    assert (run_dir / "annotations.jsonl").exists() == (status == 200)


def test_a_run_that_may_not_be_written_to_says_the_key_and_takes_its_annotations_elsewhere(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "annotations.jsonl").mkdir()  # root may write everywhere, but not into a folder

    async def refused(client: TestClient, viewer: Viewer) -> None:
        await send(client, viewer, "/annotate/run?group=g1", rater="anna")
        page = await send(client, viewer, f"{G1}0", status=500, right="true")
        assert "annotations can&#39;t be kept: " in page and "type annotate.dir=" in page
        assert "What you wrote long words" in visible(
            await send(client, viewer, f"{G1}0", status=500, note="long words")
        )

    async def taken(client: TestClient, viewer: Viewer) -> None:
        await send(client, viewer, "/annotate/run", rater="anna")
        await send(client, viewer, f"{G1}0", right="true")

    act(run_dir, refused)
    act(run_dir, taken, dir=str(tmp_path / "mine"))
    assert len(read_lines(tmp_path / "mine" / "run")) == 1


def test_the_queue_leads_through_its_answers_and_writes_their_shares(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")

    async def do(client: TestClient, viewer: Viewer) -> None:
        await send(client, viewer, "/annotate/run", rater="anna")
        asked = await client.get("/next/run")
        seen = [(asked.url.query["group"], asked.url.query["sibling"])]
        assert "queue random: 0 of 3 annotated, share of this one 1" in visible(await asked.text())
        for said in ("true", "false", "true"):
            at = dict(asked.url.query)
            path = f"/annotate/run?{urlencode(at)}&about={at['sibling']}"
            assert (await client.post(path, data={"form_token": viewer.form_token, "note": "so"})).url.query == at
            asked = await client.post(path, data={"form_token": viewer.form_token, "right": said})
            seen.append((asked.url.query.get("group", ""), asked.url.query.get("sibling", "")))
        assert sorted(seen) == [("", ""), ("g1", "0"), ("g1", "1"), ("g2", "0")]
        assert "All answers of the queue random are annotated" in await asked.text()
        ended = await client.get("/next/run")
        assert ended.status == 404 and "annotate.num_items" in await ended.text()
        assert "choose select=random" in await (await client.get("/next/run?select=disagreement")).text()
        last = read_lines(run_dir)[-1]
        undone = await client.post(
            "/annotate/run?group=g1&sibling=0&queue=random",
            data={"form_token": viewer.form_token, "undoes": last["id"]},
        )
        assert (undone.url.query["group"], undone.url.query["queue"]) == (last["group"], "random")
        await send(client, viewer, "/annotate/run?group=g1&about=0", right="true")  # a correction, outside of the queue

    act(run_dir, do)
    assert [line.get("share") for line in read_lines(run_dir)] == [1.0] * 6 + [None, 1.0]


def test_many_annotations_have_several_pages_the_newest_first(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    lines = [make_line("anna", group=f"gone{number}", sibling=0, right=True) for number in range(101)]
    (run_dir / "annotations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = fetch(run_dir, "/annotations/run", "/annotations/run?page=2")
    assert "101 annotations: anna 101" in visible(first)
    assert 'href="/annotations/run?page=2"' in first and 'href="/annotations/run?page=1"' in second
    assert "gone100/0" in first and "gone0/0" not in first and "gone0/0" in second
    gone = fetch(run_dir, "/group/run?group=gone0&sibling=0", status=404)[0]
    assert "no group &#39;gone0&#39; in this run" in gone


def test_next_and_previous_follow_the_table_that_led_to_an_answer(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")

    def around(page: str) -> list[str]:
        nav = page.split('aria-label="Answers before and after"')[1].split("</nav>")[0]
        return [unescape(href) for href in re.findall('href="([^"]*)"', nav)]

    by_tokens = "in=sort%3Dlongest"
    middle, filtered, whole = fetch(
        run_dir,
        f"/group/run?group=g1&sibling=0&{by_tokens}",
        "/group/run?group=g1&sibling=0&in=truth%3Dfooled",
        "/group/run?group=g1",
    )
    assert around(middle) == [
        f"/group/run?group=g1&sibling=1&{by_tokens}", f"/group/run?group=g2&sibling=0&{by_tokens}",
    ]  # fmt: skip
    assert around(filtered) == []
    assert around(whole) == ["/group/run?group=g2"]


def test_near_the_threshold_is_near_the_score_that_passes(tmp_path: Path) -> None:
    run_dir = judge_labelled_work(tmp_path / "run")
    (run_dir / "config.yaml").write_text("data: {labels: {pass_score: 8}}\njudge: {scale: {low: 0, high: 10}}\n")

    async def do(client: TestClient, viewer: Viewer) -> None:
        assert read_threshold(find_runs(run_dir)["run"]) == (8.0, 10.0)
        await send(client, viewer, "/annotate/run", rater="anna")
        asked = await client.get("/next/run?select=threshold")
        assert asked.status == 200, await asked.text()

    act(run_dir, do)


def test_a_labelled_item_is_annotated_like_an_answer(tmp_path: Path) -> None:
    run_dir = judge_labelled_work(tmp_path / "run")

    async def do(client: TestClient, viewer: Viewer) -> None:
        await send(client, viewer, "/annotate/run", rater="anna")
        where = "group=i1&evaluation=labelled+work"
        page = await send(client, viewer, f"/annotate/run?{where}&about=1", right="true")
        assert "you: right" in visible(page)

    act(run_dir, do)
    (line,) = read_lines(run_dir)
    assert (line["evaluation"], line["round"], line["sibling"]) == ("labelled work", 0, 1)


def judge_by_rubric(run_dir: Path, *scores: float, criteria: tuple[str, ...] = ()) -> Path:
    (run_dir / "config.yaml").write_text("judge: {protocol: rubric, scale: {low: 0, high: 10}}\n")
    rubric = (Criterion(text="It rhymes."), Criterion(text="It is\nshort.", weight=2.0))
    prompt = Prompt(prompt_id="p9", messages=(Message(role="user", content="A poem"),), rubric=rubric)
    recorder = Recorder(run_dir)
    recorder.rollout(3, prompt, answer("g9", 0, "Roses are red"))
    one = Judgement(
        group_id="g9", siblings=(0,), scores=scores, prompt_ids=(1,), completion=completion("C"), grm="grm", version=0,
        criteria=criteria,
    )  # fmt: skip
    met = (
        (JudgedCriterion(name="It rhymes", met=None), JudgedCriterion(name="It is short", met=0.9)) if criteria else ()
    )
    recorder.record_verdict(
        answer("g9", 0, ""), replace(report(7.0, one), criteria=met if criteria else (), rubric_version=2)
    )
    recorder.close()
    return run_dir


def test_the_scores_of_a_rubric_stand_by_the_names_of_its_criteria(tmp_path: Path) -> None:
    named = judge_by_rubric(write_run(tmp_path / "run"), 3.0, 9.0)

    async def do(client: TestClient, viewer: Viewer) -> None:
        page = visible(await (await client.get("/group/run?group=g9")).text())
        assert "the judge 3 It rhymes. 9 It is short. C" in page
        await send(client, viewer, "/annotate/run", rater="anna")
        page = await send(client, viewer, "/annotate/run?group=g9&about=0", unmet="1")
        assert "you: not met: It is short." in visible(page)
        assert "outside the judge&#39;s scale, 0 to 10" in await send(
            client, viewer, "/annotate/run?group=g9&about=0", status=400, score="11"
        )

    act(named, do)
    assert read_lines(named)[0]["criterion"] == "It is\nshort."
    (steps,) = fetch(judge_by_rubric(write_run(tmp_path / "steps"), 3.0, 9.0, 4.0), "/group/steps?group=g9")
    assert "the judge C" in visible(steps)  # scores of another rubric than the one that is there


def test_a_judgement_of_some_criteria_shows_theirs(tmp_path: Path) -> None:
    run_dir = judge_by_rubric(write_run(tmp_path / "run"), 9.0, criteria=("It is short",))
    (page,) = fetch(run_dir, "/group/run?group=g9")
    assert "the judge: 9 9 It is short. C" in visible(page)
    assert "version 2 of the rubric, criteria: It rhymes failed; It is short 0.9" in visible(page)
