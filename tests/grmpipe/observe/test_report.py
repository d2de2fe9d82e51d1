"""The report of a run: what it shows, from which files, and that text of a model stays text."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from journal_mutations import collect_records, mutate_line

from grmpipe.models.types import Completion, Message, ToolCall, VersionSpan
from grmpipe.observe import report as report_room
from grmpipe.observe.console import REPORT
from grmpipe.observe.recorder import Recorder
from grmpipe.observe.report import render, write_report
from grmpipe.observe.run_files import NEVER_ENDED, config_text, read_ends, read_run, show_turns
from grmpipe.observe.summary import (
    CascadeSummary,
    EvalSummary,
    GroupsSummary,
    JudgeSummary,
    JudgingSummary,
    ServingSummary,
    Summary,
)
from grmpipe.types import Failed, Judgement, JudgeReport, Prompt, RewardSpan, Rollout, Turn, Verdict

HOSTILE = "</pre></title></style><script>alert(1)</script><img src=https://evil.example/x onerror=alert(2)>{{ 7 * 7 }}"


class Seen(HTMLParser):
    """The elements, attributes and texts that a browser would find."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(run_dir: Path, bottleneck: str | None = None) -> Seen:
    assert write_report(run_dir, bottleneck)
    seen = Seen()
    seen.feed((run_dir / REPORT).read_text(encoding="utf-8"))
    return seen


def text_of(run_dir: Path) -> str:
    return " ".join(" ".join(page_of(run_dir).words).split())


def completion(text: str) -> Completion:
    return Completion(
        token_ids=(1, 2),
        logprobs=(-0.5, -0.5),
        text=text,
        finish_reason="stop",
        versions=(VersionSpan(model="policy", version=3, start=0, end=2),),
    )


def record(run_dir: Path, group_id: str, answer: str, critique: str, score: float | None, spread: float = 0.0) -> None:
    """One rollout and its verdict in the journals; score None: judging failed; no critique: a rule judged."""
    rollout = Rollout(
        group_id=group_id,
        sibling=0,
        turns=(Turn(new_ids=(1,), completion=completion(answer), replies=()),),
        status="finished",
    )
    prompt = Prompt(
        prompt_id="p", messages=(Message(role="user", content=f"asked {answer}"),), source="s", reference="7"
    )
    judgement = Judgement(
        group_id=group_id,
        siblings=(0,),
        scores=(score or 0.0,),
        prompt_ids=(1,),
        completion=completion(critique),
        grm="grm",
        version=0,
    )
    verdict: Verdict | Failed = Failed(stage="judge", cause="unparseable", detail=critique, attempts=1)
    if score is not None:
        rewards = (RewardSpan(turn=0, start=0, end=2, value=score / 10),)
        verdict = Verdict(rewards=rewards, score=score, breakdown={}, score_std=spread, num_judgements=1)
    recorder = Recorder(run_dir)
    recorder.rollout(0, prompt, rollout)
    recorder.record_verdict(
        rollout, JudgeReport(verdict=verdict, judgements=(judgement,) if score is not None and critique else ())
    )
    recorder.close()


def record_of_two(run_dir: Path, group_id: str) -> None:
    """A rollout that the judge scored and that a second judge could not read: a jury went on without it."""
    rollout = Rollout(
        group_id=group_id, sibling=0, turns=(Turn(new_ids=(1,), completion=completion("an answer")),),
        status="finished",
    )  # fmt: skip
    judgement = Judgement(
        group_id=group_id, siblings=(0,), scores=(9.0,), prompt_ids=(1,), completion=completion("well done"), grm="g",
        version=0,
    )  # fmt: skip
    rewards = (RewardSpan(turn=0, start=0, end=2, value=0.9),)
    own = Verdict(rewards=rewards, score=9.0, breakdown={}, score_std=0.0, num_judgements=1)
    lost = Failed(stage="judge", cause="unparseable", detail="it ends with 'hm'", attempts=1)
    report = JudgeReport(
        verdict=replace(own, breakdown={"judge": 0.9}, absent=("second",)),
        judgements=(judgement,),
        failures=(lost,),
        by_judge={
            "judge": JudgeReport(verdict=own, judgements=(judgement,)),
            "second": JudgeReport(verdict=lost, failures=(lost,)),
        },
    )
    recorder = Recorder(run_dir)
    recorder.rollout(0, Prompt(prompt_id="p", messages=(Message(role="user", content="asked"),)), rollout)
    recorder.record_verdict(rollout, report)
    recorder.close()


def record_episode(run_dir: Path, said: str = "41") -> None:
    """An episode of two turns, each with a reward of the judge's: a call, what the tool said, an answer."""
    called = Turn(
        new_ids=(1,),
        completion=completion("let me add"),
        tool_calls=(ToolCall(name="add", arguments={"a": said}),),
        replies=(Message(role="tool", name="add", content=said),),
        rewards={"first": 0.25},
        faults=("arguments",),
        env_s=0.5,
    )
    rollout = Rollout(
        group_id="g1",
        sibling=0,
        turns=(called, Turn(new_ids=(1,), completion=completion("so it is 41"))),
        status="truncated",
        reason="turns",
        opening=(Message(role="system", content="You may add."),),
    )
    spans = tuple(RewardSpan(turn=turn, start=0, end=2, value=value, share=0.5) for turn, value in ((0, 0.1), (1, 0.4)))
    verdict = Verdict(rewards=spans, score=5.5, breakdown={}, score_std=0.0, num_judgements=2)
    judgements = [
        Judgement(
            group_id="g1", siblings=(0,), scores=(score,), prompt_ids=(1,), completion=completion(text), grm="g",
            version=0, turn=turn,
        )
        for turn, (text, score) in enumerate((("a needless call", 2.0), ("that is right", 9.0)))
    ]  # fmt: skip
    recorder = Recorder(run_dir)
    recorder.rollout(0, Prompt(prompt_id="p", messages=(Message(role="user", content="32 + 9?"),)), rollout)
    recorder.record_verdict(rollout, JudgeReport(verdict=verdict, judgements=tuple(judgements)))
    recorder.close()


def write_metrics(run_dir: Path, *lines: Mapping[str, float]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def step(number: int, **more: float) -> dict[str, float]:
    named = {"train/grm_score": 5.0 + number, "train/true_accuracy": 0.5, "time/step_s": 2.0, "stall/verdicts_s": 1.0}
    return {"step": number, **named, **{name.replace("__", "/"): value for name, value in more.items()}}


def summary(**changes: object) -> Summary:
    known = {"status": "completed", "steps": 2, "versions": {"policy": 2}, "wall_s": 75.0}
    return Summary(**{**known, **changes})  # type: ignore[arg-type]


def test_a_run_shows_its_ends_its_bottleneck_its_alarms_and_its_failures_by_cause(tmp_path: Path) -> None:
    write_metrics(tmp_path, step(1), step(2, alarm__hacking=1.0))
    summary(
        eval=EvalSummary(initial={"true_accuracy": 0.25}, final={"true_accuracy": 0.875}),
        judging=JudgingSummary(
            asked=200, counted=198, failed={"unparseable": 2}, asked_verdicts=30, asked_verdicts_read=28
        ),
        busy_s={"grm": 3.0},
        bottleneck="the learner waited for judging",
        alarms=("the score rises, the truth falls",),
        restarts=("step 7: learner-0 died",),
    ).write(tmp_path / "summary.json")
    text = text_of(tmp_path)
    for told in (
        "completed", "1 min 15 s", "0.25 → 0.875", "the learner waited for judging", "the score rises, the truth falls",
        "Began again at its last checkpoint; step 7: learner-0 died",
        "unparseable 2 (1 %)", "verdicts asked for 30, 28 read", "waits for verdicts 50 %",
        "grm 75 %", "True accuracy", "GRM score",
    ):  # fmt: skip
        assert told in text, told
    assert (tmp_path / REPORT).read_text().count('class="band"') == 2, "the alarm is marked beside score and truth"


def test_the_page_of_a_service_says_what_it_answered_and_nothing_of_steps(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: serve\n", encoding="utf-8")
    summary(
        steps=0,
        serving=ServingSummary(
            calls=1200, responses=9600, from_cache=3, seconds={"p50": 0.25, "p99": 2.5}, imputed={"timeout": 2}
        ),
    ).write(tmp_path / "summary.json")
    text = text_of(tmp_path)
    for told in (
        "calls 1,200", "responses 9,600", "calls answered from the cache 3", "seconds of a call, p50 0.25",
        "seconds of a call, p99 2.5", "responses that got the mean of their group 2", "Rollouts and judgements",
    ):  # fmt: skip
        assert told in text, told
    for untrue in ("Learning", "Wait times", "No step has", "steps 0"):
        assert untrue not in text, untrue


JUDGES = {  # judge, its title on the page, what its number is called
    "{kind: function, function: mylab.brief, function_call: {score_range: null}}": (
        "The reward function mylab.brief", "Reward",
    ),
    "{kind: function, function: mylab.brief, function_call: {score_range: [0, 5]}}": (
        "The reward function mylab.brief", "Score",
    ),
    "{kind: rule, rule: contains_reference}": ("The rule contains_reference", "Score"),
    "{kind: env}": ("The environment", "Reward"),
    "{kind: scalar}": ("The reward model", "Score"),
    "{kind: generative, function: unused}": ("The judge", "GRM score"),
    "{": ("The judge", "GRM score"),
}  # fmt: skip


@pytest.mark.parametrize("judge", JUDGES)
def test_what_gives_the_reward_is_called_by_what_it_is(tmp_path: Path, judge: str) -> None:
    title, number = JUDGES[judge]
    (tmp_path / "config.yaml").write_text(f"judge: {judge}\nreward: {{kind: single, judge: null}}\n")
    write_metrics(tmp_path, step(1, train__reward=0.5, eval__reward=0.5, eval__grm_score=0.5), step(2, train__reward=1))
    text = text_of(tmp_path)
    assert f"{title} Failed" in text and "None of 0" not in text
    assert f"{number} the training reward, by {title[0].lower()}{title[1:]} " in text
    assert ("grm" in text.partition("All metrics")[0].lower()) == (number == "GRM score")


def test_failures_of_what_writes_no_judgements_have_no_share_of_them(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("judge: {kind: function, function: mylab.brief}\n")
    write_metrics(tmp_path, {**step(1), "judge/asked": 45, "judge/failed_broken": 45})
    text = text_of(tmp_path)
    assert "failed verdicts 45" in text and "Failed verdicts by cause broken 45 " in text
    assert "45 (" not in text and "judgements 45" not in text


def several(number: int) -> dict[str, float]:
    own = {
        "judge/judge/asked": 8.0,
        "judge/judge/score_mean": 6.5,
        "judge/second/asked": 8.0,
        "judge/second/tokens": 50.0,
    }
    rest = {"judge/second/failed_unparseable": 2.0, "cascade/reward/escalated_share": 0.25, "reward/judge_mean": 0.6}
    return {**step(number), "train/reward": 0.55, **own, **rest, "cascade/reward/rollouts": 8.0}


def test_several_judges_have_a_row_each_and_say_whose_judgement_is_whose(tmp_path: Path) -> None:
    by_judge = {
        "judge": JudgeSummary(asked=20, tokens=1200, score_mean=6.25),
        "second": JudgeSummary(asked=20, failed={"unparseable": 3}, tokens=800),
    }
    cascade = CascadeSummary(rollouts=40, escalated_share=0.25, unsure_share=0.5, audited=3, audit_error=0.04)
    write_metrics(tmp_path, several(1), several(2))
    judging = JudgingSummary(asked=40, counted=37, by_judge=by_judge, cascades={"reward": cascade})
    summary(judging=judging).write(tmp_path / "summary.json")
    record_of_two(tmp_path, "g1")
    text = text_of(tmp_path)
    for told in (
        "The judges", "judge 20 none 1,200 6.25", "second 20 3 unparseable (15 %) 800 –",
        "reward 40 50 % 25 % 3 0.04 –",
        "Scores by judge", "Reward by part", "Escalated", "judge: 9 well done",
        "second judge failed: unparseable it ends with 'hm'", "rewards: judge 0.9",
        "Judgements without a verdict of second it ends with 'hm'",
    ):  # fmt: skip
        assert told in text, told
    assert "GRM score" not in text, "the reward is that of all judges together"


def test_report_of_a_killed_run_shows_each_judge(tmp_path: Path) -> None:
    write_metrics(tmp_path, several(1), several(2))
    run = read_run(tmp_path)
    assert run.judging.by_judge["second"] == JudgeSummary(asked=16, tokens=100, failed={"unparseable": 4})
    assert run.judging.by_judge["judge"].score_mean == 6.5
    assert run.judging.cascades["reward"].escalated_share == 0.25
    assert not run.judging.failed, "failures by judge are no causes of their own"
    assert "second 16 4 unparseable (25 %) 100 –" in text_of(tmp_path)


def test_an_evaluation_has_one_value_of_each_metric(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.75}\n')
    judging = JudgingSummary(asked=8, counted=0, failed={"too_long": 8})
    summary(steps=0, eval=EvalSummary(final={"accuracy": 0.75}), judging=judging).write(tmp_path / "summary.json")
    text = text_of(tmp_path)
    assert "accuracy 0.75 judgements 8 failed 100 %" in text
    assert "too_long 8 (100 %)" in text


def test_a_failed_run_tells_its_first_cause_and_the_end_of_its_log(tmp_path: Path) -> None:
    summary(status="failed", failure="the gradient norm is nan").write(tmp_path / "summary.json")
    (tmp_path / "run.log").write_text("INFO: early\nERROR: late words\n")
    (tmp_path / "config.yaml").write_text("task: train\nexperiment_name: ppo\n")
    text = text_of(tmp_path)
    assert f"ppo, {tmp_path.name}" in text, "which experiment: directories have dates for names"
    assert "First cause the gradient norm is nan" in text
    assert "ERROR: late words" in text


def test_report_of_a_killed_run_reads_its_files_and_ignores_torn_lines(tmp_path: Path) -> None:
    write_metrics(
        tmp_path, {"step": 0, "eval/true_accuracy": 0.3}, step(1, judge__failed_timeout=3.0, judge__asked=30.0)
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "train/grm_sc')
    run = read_run(tmp_path)
    assert (run.status, run.steps, run.judging.asked, run.judging.failed) == (NEVER_ENDED, 1, 30, {"timeout": 3})
    assert run.eval_initial == {"true_accuracy": 0.3}
    assert not run.eval_final
    words = " ".join(page_of(tmp_path, "the learner waited for rollouts").words)
    assert "the learner waited for rollouts" in words
    assert "resume=auto" in words


def test_an_empty_directory_has_a_page_too(tmp_path: Path) -> None:
    assert "No rollout has been judged." in text_of(tmp_path)


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "rollouts.jsonl", "judgements.jsonl", "config.yaml"])
def test_files_that_are_no_json_leave_out_only_what_they_held(tmp_path: Path, name: str) -> None:
    write_metrics(tmp_path, step(1), step(2))
    record(tmp_path, "g1", "an answer", "a critique", 9.0)
    summary().write(tmp_path / "summary.json")
    (tmp_path / name).write_bytes(b"\xff\x00{]\n[1]\n")
    assert write_report(tmp_path)


def test_an_answer_that_a_rule_judged_has_no_empty_critique(tmp_path: Path) -> None:
    record(tmp_path, "g1", "an answer", "", 9.0)
    assert write_report(tmp_path)
    assert "<div></div>" not in (tmp_path / "report.html").read_text().replace("\n", "").replace("  ", "")
    assert "an answer" in text_of(tmp_path)


def test_text_of_models_is_escaped(tmp_path: Path) -> None:
    write_metrics(tmp_path, {**step(1), f"reward/{HOSTILE}": 1.0}, {**step(2), f"reward/{HOSTILE}": 2.0})
    record(tmp_path, HOSTILE, HOSTILE, HOSTILE, 9.0)
    record(tmp_path, "g2", "x", HOSTILE, None)
    told = {
        "failure": HOSTILE,
        "status": "failed",
        "bottleneck": HOSTILE,
        "alarms": (HOSTILE,),
        "restarts": (HOSTILE,),
        "busy_s": {HOSTILE: 1.0},
    }
    judging = JudgingSummary(asked=9, failed={HOSTILE: 1})
    summary(judging=judging, eval=EvalSummary(final={HOSTILE: 1.0}), **told).write(tmp_path / "summary.json")
    for name in ("config.yaml", "run.log"):
        (tmp_path / name).write_text(HOSTILE + "\n")
    seen = page_of(tmp_path)
    assert not seen.tags & {"script", "img", "iframe", "object", "link", "base", "form", "a"}
    assert not [name for name in seen.attributes if name.startswith("on") or name in ("src", "href", "srcset")]
    assert any(HOSTILE in words for words in seen.words), "it is there to be read"
    page = (tmp_path / REPORT).read_text()
    assert "default-src 'none'" in page, "and if something slipped through, the browser would not run it"


def test_control_characters_cannot_hide_or_reorder_what_stands_there(tmp_path: Path) -> None:
    record(tmp_path, "g1", "right\u202etfel \x1b[2J\x00", "lone \ud800 surrogate", 9.0)
    page = (page_of(tmp_path), (tmp_path / REPORT).read_text(encoding="utf-8"))[1]
    assert not {"\u202e", "\x1b", "\x00"} & set(page)


def test_an_episode_is_shown_turn_by_turn_with_what_is_known_of_each(tmp_path: Path) -> None:
    record_episode(tmp_path)
    text = text_of(tmp_path)
    parts = (
        "opening: system", "You may add.", "turn 1: the policy", "judged 0.2", "first 0.25", "fault: arguments",
        "environment 0.5 s", "let me add", 'add({"a": "41"})', "tool add", "41", "turn 2: the policy", "judged 0.8",
        "so it is 41", "truncated: turns",
    )  # fmt: skip
    places = [text.find(part) for part in parts]
    assert -1 not in places, dict(zip(parts, places, strict=True))
    in_order = [text.index(part) for part in ("let me add", 'add({"a": "41"})', "tool add", "so it is 41")]
    assert in_order == sorted(in_order)
    assert "score 5.5, reward 0.5" in text
    said = [text.find(part) for part in ("the judge on turn 1: 2", "a needless call", "the judge on turn 2: 9")]
    assert -1 not in said and said == sorted(said)


def test_text_of_tools_is_escaped(tmp_path: Path) -> None:
    record_episode(tmp_path, HOSTILE)
    seen = page_of(tmp_path)
    assert not seen.tags & {"script", "img", "iframe", "object", "link", "base", "form", "a"}
    assert sum(HOSTILE in words for words in seen.words) >= 1


def test_few_rollouts_are_shown_and_they_tell_the_ends_and_what_went_wrong(tmp_path: Path) -> None:
    record(tmp_path, "g0", "first", "fine", 5.0)
    for number in range(1, 30):
        record(tmp_path, f"g{number}", f"answer {number}", "fine", float(1 + number % 9), spread=float(number == 20))
    record(tmp_path, "g30", "spoilt", "no score in it", None)
    record(tmp_path, "g31", "the last one", "fine", 4.0)
    shown = {one.why: one for one in read_run(tmp_path).shown}
    assert len(shown) <= 6
    assert shown["early"].rollout.text == "first"
    assert shown["late, scored highest"].score == 9.0
    assert shown["late, scored lowest"].score == 1.0
    assert shown["late, judged most differently"].rollout.group_id == "g20"
    assert next(shown["late, judging failed"].critiques).text.startswith("judge failed: unparseable")
    assert shown["the last"].rollout.text == "the last one"
    early = shown["early"]
    assert (early.version, early.prompt.reference, early.verdict and early.verdict.outcome) == (3, "7", 0.5)


def test_long_journal_is_read_at_its_ends_and_no_line_twice(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(f'{{"line": {number}}}\n' for number in range(1000)) + '{"torn')
    first, last = ([record["line"] for record in end] for end in read_ends(path, dict, 200))
    assert first == [*range(len(first))] and 10 < len(first) < 30
    assert last == [*range(1000 - len(last), 1000)] and 10 < len(last) < 30
    first, last = ([record["line"] for record in end] for end in read_ends(path, dict, 8000))
    assert [*first, *last] == [*range(1000)]


def test_a_very_long_text_is_cut_in_its_middle(tmp_path: Path) -> None:
    record(tmp_path, "g1", "begins " + "x" * 100_000 + " ends", "fine", 9.0)
    text = text_of(tmp_path)
    assert "begins" in text and " ends" in text and "characters left out" in text
    assert (tmp_path / REPORT).stat().st_size < 60_000


def test_no_secret_gets_onto_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-very-secret")
    (tmp_path / "config.yaml").write_text("api_key: abcdef\nurl: http://x?k=sk-very-secret\nmax_new_tokens: 64\n")
    (tmp_path / "run.log").write_text("asked with sk-very-secret\n")
    page_of(tmp_path)
    page = (tmp_path / REPORT).read_text()
    assert "sk-very-secret" not in page
    assert "abcdef" not in page
    assert "max_new_tokens: 64" in page
    assert config_text(b"keyboard: qwerty", ()) == "keyboard: qwerty"


def test_failing_report_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not write_report(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert not write_report(tmp_path / "file")

    def broken(run: object) -> str:
        raise RuntimeError("no template")

    monkeypatch.setattr(report_room, "render", broken)
    assert not write_report(tmp_path)
    assert not (tmp_path / REPORT).exists()


def test_a_page_replaces_the_one_of_before(tmp_path: Path) -> None:
    assert "no end recorded" in text_of(tmp_path)
    summary().write(tmp_path / "summary.json")
    assert "no end recorded" not in text_of(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [REPORT, "summary.json"]


def fields_of(record: dict, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = [(value, (*path, name)) for name, value in record.items() if isinstance(value, dict)]
    return [(*path, name) for name in record] + [field for below in inner for field in fields_of(*below)]


def test_a_summary_with_a_field_of_a_wrong_type_gives_a_page_without_that_field(tmp_path: Path) -> None:
    write_metrics(tmp_path, step(1))
    summary(
        eval=EvalSummary(initial={"true_accuracy": 0.25}, final={"true_accuracy": 0.875}),
        judging=JudgingSummary(asked=200, counted=198, failed={"unparseable": 2}),
        groups=GroupsSummary(submitted=3, trained=2, dropped={"stale": 1}),
        busy_s={"grm": 3.0},
        alarms=("it rings",),
    ).write(tmp_path / "summary.json")
    whole = (tmp_path / "summary.json").read_text()
    for path in fields_of(json.loads(whole)):
        for wrong in ("text", None, [1], {"a": ["b"]}, math.nan):
            record = part = json.loads(whole)
            for name in path[:-1]:
                part = part[name]
            part[path[-1]] = wrong
            (tmp_path / "summary.json").write_text(json.dumps(record))
            report_room.make_sections(read_run(tmp_path))
        if len(path) == 1:
            assert write_report(tmp_path), path


def test_metrics_of_wrong_types_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": "one"}\n{"step": null}\n{"step": 2, "time/step_s": "fast"}\n')
    assert [line["step"] for line in read_run(tmp_path).metrics] == [2]
    assert write_report(tmp_path)


@pytest.mark.parametrize("num_runs", [4, pytest.param(150, marks=pytest.mark.long)])
def test_a_report_is_written_whatever_the_journals_hold(tmp_path: Path, num_runs: int) -> None:
    records, rng = collect_records(tmp_path), random.Random(17)
    records |= {
        "judge_requests.jsonl": [
            {"n": 1, "model": "grm", "purpose": "held_out"},
            {"n": 1, "prompt": 812, "cached": 640, "sampled": 233},
        ],
        "changes.jsonl": [{"step": 1, "key": "train.lr", "old": 1e-4, "new": 1e-5}],
    }
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "summary.json").write_text("[" * 100_000)
    for _ in range(num_runs):
        for name, own in records.items():
            lines = [mutate_line(rng.choice(own), rng) for _ in range(3)]
            lines += [json.dumps(one).encode() + b"\n" for one in own]
            (run_dir / name).write_bytes(b"".join(lines))
        assert render(read_run(run_dir)).endswith("</html>")


def turn_of(text: str, *replies: Message, rewritten: bool = False) -> Turn:
    return Turn(new_ids=(1,), completion=completion(text), replies=replies, rewritten=rewritten)


def test_a_branch_of_an_episode_is_named() -> None:
    first, branch = show_turns([turn_of("x"), turn_of("x", rewritten=True)], None)
    assert (first.facts, branch.facts) == ([], ["a branch: it doesn't continue the turn before"])


def test_the_history_of_a_branch_stands_before_it_with_what_the_agent_wrote_as_the_assistant() -> None:
    edited = Message(role="assistant", content="2!", tool_calls=(ToolCall(name="add", arguments={"a": 1}),))
    turns = [turn_of("2", edited, Message(role="user", content="b")), turn_of("c", rewritten=True)]
    first, branch = show_turns(turns, None)
    assert (first.replies, first.history) == ([], [])
    by = "assistant, as the agent wrote it, not the policy"
    assert [(one.by, one.text) for one in branch.history] == [(by, '2!\nadd({"a": 1})'), ("user", "b")]
