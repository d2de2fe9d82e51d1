"""Journals: what is written is read back, and a full disk or a kill costs at most one line."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grmpipe.models.types import AskedAnswer, Completion, Message, TokenScores, VersionSpan
from grmpipe.observe.all_trackers import JsonlSink
from grmpipe.observe.journal import AppendFile, Journal, Mark, read_journal
from grmpipe.observe.recorder import Recorder, load_group_ends, load_rollouts, load_trained, load_verdicts
from grmpipe.types import (
    CRITERION_KINDS,
    CascadeEvent,
    Criterion,
    Failed,
    FailedJudgement,
    GroupEnd,
    JudgedCriterion,
    Judgement,
    JudgeReport,
    Prompt,
    RewardSpan,
    Rollout,
    StopAudit,
    TeacherScores,
    TrainedRollout,
    Turn,
    Verdict,
)

TEXT = st.text(st.characters(), max_size=20)  # also lone surrogates, newlines and controls: models sample them
IDS = st.lists(st.integers(0, 200_000), max_size=6).map(tuple)
FLOAT32 = st.floats(width=32, allow_nan=False, max_value=0.0)
FLOATS = st.floats(allow_nan=False)
COUNTS = st.integers(0, 1000)
CAUSES = st.sampled_from(["timeout", "refused", "died", "unparseable", "truncated", "too_long", "undecided"])
MESSAGES = st.lists(st.builds(Message, role=TEXT, content=TEXT), max_size=2).map(tuple)
SPANS = st.lists(
    st.builds(VersionSpan, model=TEXT, version=COUNTS, start=COUNTS, end=COUNTS), min_size=1, max_size=2
).map(tuple)
COMPLETIONS = st.builds(
    Completion,
    token_ids=IDS,
    logprobs=st.lists(FLOAT32, max_size=6).map(tuple),
    text=TEXT,
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
    versions=SPANS,
    unseen_tokens=COUNTS,
    thought_tokens=COUNTS,
    thought_chars=COUNTS,
    inserted=st.none() | st.tuples(COUNTS, COUNTS),
    asked=st.none() | st.builds(AskedAnswer, start=COUNTS, end=COUNTS, text_start=COUNTS),
)
LEVELS = st.lists(st.tuples(COUNTS, TEXT), max_size=2).map(tuple)
RUBRICS = st.lists(
    st.builds(
        Criterion, text=TEXT, weight=FLOATS, name=TEXT, levels=LEVELS, evidence=st.booleans(),
        kind=st.sampled_from(CRITERION_KINDS),
    ),
    max_size=2,
).map(tuple)  # fmt: skip
PROMPTS = st.builds(Prompt, prompt_id=TEXT, messages=MESSAGES, source=TEXT, reference=st.none() | TEXT, rubric=RUBRICS)
SAMPLED = COMPLETIONS.map(
    lambda one: dataclasses.replace(one, logprobs=(*one.logprobs, *[-0.5] * 6)[: len(one.token_ids)])
)
TURNS = st.builds(Turn, new_ids=IDS, completion=SAMPLED, replies=MESSAGES)
ROLLOUTS = st.builds(
    Rollout,
    state=st.binary(max_size=9),
    group_id=TEXT,
    sibling=COUNTS,
    turns=st.lists(TURNS, min_size=1, max_size=2).map(tuple),
    status=st.sampled_from(["finished", "truncated"]),
)
JUDGEMENTS = st.builds(
    Judgement,
    group_id=TEXT,
    siblings=IDS,
    scores=st.lists(FLOATS, max_size=3).map(tuple),
    prompt_ids=IDS,
    completion=COMPLETIONS,
    grm=TEXT,
    version=COUNTS,
    turn=st.none() | COUNTS,
    criteria=st.lists(TEXT, max_size=2).map(tuple),
    unread=st.dictionaries(TEXT, TEXT, max_size=2),
)
CRITERIA = st.builds(
    JudgedCriterion, name=TEXT, met=st.none() | FLOATS, tags=st.lists(TEXT, max_size=2).map(tuple),
    shared=st.booleans(), left_out=st.booleans(),
)  # fmt: skip
FAILED = st.builds(
    Failed,
    stage=st.sampled_from(["rollout", "judge"]),
    cause=CAUSES,
    attempts=COUNTS,
    detail=TEXT,
    turn=st.none() | COUNTS,
)
FAILED_JUDGEMENTS = st.builds(
    FailedJudgement,
    stage=st.just("judge"),
    cause=CAUSES,
    attempts=COUNTS,
    detail=TEXT,
    prompt_ids=IDS,
    completion=COMPLETIONS,
)
REWARDS = st.builds(RewardSpan, turn=COUNTS, start=COUNTS, end=COUNTS, value=FLOATS)
VERDICTS = st.builds(
    Verdict,
    rewards=st.lists(REWARDS, max_size=2).map(tuple),
    score=FLOATS,
    breakdown=st.dictionaries(TEXT, FLOATS, max_size=2),
    score_std=FLOATS,
    num_judgements=COUNTS,
    absent=st.lists(TEXT, max_size=2).map(tuple),
    normalised=st.lists(REWARDS, max_size=2).map(tuple),
)
OWN_REPORTS = st.builds(
    JudgeReport,
    verdict=VERDICTS | FAILED | FAILED_JUDGEMENTS,
    judgements=st.lists(JUDGEMENTS, max_size=2).map(tuple),
    failures=st.lists(FAILED | FAILED_JUDGEMENTS, max_size=2).map(tuple),
    principles=st.none() | COMPLETIONS,
    saved_tokens=COUNTS,
    audit=st.none() | st.builds(StopAudit, stopped_after=COUNTS, stopped_score=FLOATS, full_score=FLOATS),
    criteria=st.lists(CRITERIA, max_size=2).map(tuple),
)
TALLIES = st.builds(CascadeEvent, cascade=TEXT, rollouts=COUNTS, audited=COUNTS, error=FLOATS)


def composed_of(whole: JudgeReport, by_judge: dict[str, JudgeReport], events: list[CascadeEvent]) -> JudgeReport:
    """A report of several judges: it has the judgements and failures of all of them."""
    reports = by_judge.values()
    return dataclasses.replace(
        whole,
        judgements=tuple(judgement for report in reports for judgement in report.judgements),
        failures=tuple(failure for report in reports for failure in report.failures),
        by_judge=by_judge,
        cascades=tuple(events),
    )


NAMED_REPORTS = st.dictionaries(TEXT.filter(bool), OWN_REPORTS, min_size=1, max_size=3)
REPORTS = OWN_REPORTS | st.builds(composed_of, OWN_REPORTS, NAMED_REPORTS, st.lists(TALLIES, max_size=2))
ANY_EXAMPLE = settings(max_examples=60, suppress_health_check=list(HealthCheck))


def plain_rollout(group_id: str = "g0", num_tokens: int = 3) -> Rollout:
    completion = Completion(
        token_ids=tuple(range(num_tokens)),
        logprobs=tuple((-np.random.default_rng(0).exponential(size=num_tokens)).astype(np.float32).tolist()),
        text="Answer: 2",
        finish_reason="stop",
        versions=(VersionSpan(model="policy", version=4, start=0, end=num_tokens),),
    )
    return Rollout(
        group_id=group_id, sibling=1, turns=(Turn(new_ids=(1, 2), completion=completion),), status="truncated"
    )


PROMPT = Prompt(prompt_id="p0", messages=(Message(role="user", content="1 + 1?"),), reference="2", step=3)


@ANY_EXAMPLE
@given(prompt_index=COUNTS, prompt=PROMPTS, rollout=ROLLOUTS, compact=st.booleans())
def test_a_rollout_comes_back_equal(
    tmp_path_factory: pytest.TempPathFactory, prompt_index: int, prompt: Prompt, rollout: Rollout, compact: bool
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    Recorder(run_dir, compact=compact).rollout(prompt_index, prompt, rollout)
    (back,) = load_rollouts(run_dir / "rollouts.jsonl")
    assert (back.prompt_index, back.prompt, back.rollout) == (prompt_index, prompt, rollout)


@ANY_EXAMPLE
@given(rollout=ROLLOUTS, report=REPORTS, compact=st.booleans())
def test_a_report_comes_back_equal(
    tmp_path_factory: pytest.TempPathFactory, rollout: Rollout, report: JudgeReport, compact: bool
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    Recorder(run_dir, compact=compact).record_verdict(rollout, report)
    ((who, back),) = load_verdicts(run_dir / "judgements.jsonl")
    assert (who, back) == ((rollout.group_id, rollout.sibling), report)
    assert type(back.verdict) is type(report.verdict)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_teachers_scores_come_back_to_the_last_bit(tmp_path: Path, compact: bool, top_k: int) -> None:
    random, by_turn = np.random.default_rng(0), []
    for num_tokens in (4, 0, 2):
        shape = (num_tokens, top_k)
        by_turn.append(
            TokenScores(
                logprobs_N=-random.exponential(size=num_tokens).astype(np.float32),
                top_ids_NK=random.integers(0, 1 << 18, shape).astype(np.int32) if top_k else None,
                top_logprobs_NK=-random.exponential(size=shape).astype(np.float32) if top_k else None,
            )
        )
    scores = TeacherScores(teacher="t", by_turn=tuple(by_turn))
    verdict = Verdict(rewards=(), score=0.0, breakdown={}, score_std=0.0, num_judgements=0, teacher=scores)
    Recorder(tmp_path, compact=compact).record_verdict(plain_rollout(), JudgeReport(verdict=verdict, taught=scores))
    ((_, back),) = load_verdicts(tmp_path / "judgements.jsonl")
    assert isinstance(back.verdict, Verdict) and back.verdict.teacher is not None
    assert back.verdict.teacher.teacher == "t"
    for own, other in zip(back.verdict.teacher.by_turn, by_turn, strict=True):
        for name in ("logprobs_N", "top_ids_NK", "top_logprobs_NK"):
            np.testing.assert_array_equal(getattr(own, name), getattr(other, name))


def test_what_failed_is_noted_without_the_secrets_in_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "hunter2-hunter2")
    said = "refused hunter2-hunter2 at http://host/mcp?apiKey=typed-in-the-url"
    failure = Failed(stage="env", cause="died", attempts=1, detail=said)
    rollout = Rollout(group_id="g", sibling=0, turns=(), status="finished", env_failures=(failure,))
    Recorder(tmp_path).rollout(0, PROMPT, rollout)
    noted = (tmp_path / "rollouts.jsonl").read_text()
    assert "hunter2" not in noted and "typed" not in noted
    assert "refused <redacted> at http://host/mcp?apiKey=<redacted>" in noted


def test_group_ends_come_back_and_leave_out_what_is_not_known(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    trained = GroupEnd(group_id="g0", prompt_index=0, prompt_id="p0", outcome="trained", step=3, version=2, early=True)
    dropped = GroupEnd(group_id="g1", prompt_index=1, prompt_id="p1", outcome="dropped", cause="stale")
    recorder.group_ended(trained)
    recorder.group_ended(dropped)
    always = ["group_id", "prompt_index", "prompt_id", "outcome"]
    told = [list(record) for record in read_journal(tmp_path / "groups.jsonl")]
    assert told == [[*always, "step", "version", "early"], [*always, "cause"]]
    assert list(load_group_ends(tmp_path / "groups.jsonl")) == [trained, dropped]
    assert not {"step", "early"} & list(read_journal(tmp_path / "groups.jsonl"))[1].keys()


def test_a_torn_last_line_is_ignored_then_cut_off_by_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    Recorder(tmp_path).rollout(0, PROMPT, plain_rollout("whole"))
    whole = path.read_bytes()
    for torn in (whole[:-1], whole[:40], b"{"):
        path.write_bytes(whole + torn)
        assert [line.rollout.group_id for line in load_rollouts(path)] == ["whole"]
    Recorder(tmp_path).rollout(1, PROMPT, plain_rollout("next"))
    assert [line.rollout.group_id for line in load_rollouts(path)] == ["whole", "next"]


def test_a_torn_tail_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n' + b"x" * 200_000)
    Journal(path).append({"a": 2})
    assert path.read_bytes().startswith(b'{"a":1}\n{"a":2,"xxh3":"')
    assert list(read_journal(path)) == [{"a": 1}, {"a": 2}]


def test_a_broken_line_amid_whole_ones_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\nrubbish\n{"a":2}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:2: .*remove that line"):
        list(read_journal(path))


def test_two_writers_of_one_journal_tear_no_line_and_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    one, other = Journal(path), Journal(path)
    for number in range(50):
        one.append({"one": number})
        other.append({"other": number})
    assert len(list(read_journal(path))) == 100


def test_no_damaged_line_is_read_as_another(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    Recorder(tmp_path, "a-run").rollout(7, PROMPT, plain_rollout())
    whole = (tmp_path / "rollouts.jsonl").read_bytes()
    (meant,) = load_rollouts(tmp_path / "rollouts.jsonl")
    for place in range(len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            read = list(load_rollouts(path))
        except ValueError as error:
            assert str(error).startswith(f"{path}:1: ")
        else:
            assert read in ([meant], [])  # [] if it became two lines


def test_damaged_line_is_reported_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    recorder = Recorder(tmp_path)
    for number in range(3):
        recorder.group_ended(
            GroupEnd(group_id=f"g{number}", prompt_index=number, prompt_id="p", outcome="dropped", cause="stale")
        )
    first, second, third = path.read_bytes().splitlines(keepends=True)
    for odd in (
        second.replace(b"g1", b"g9"),
        b'{"prompt_index":1}\n',
        b'{"groqp_id":"g1"}\n',
        b"[]\n",
        b"[" * 5000 + b"\n",
    ):
        path.write_bytes(first + odd + third)
        with pytest.raises(ValueError, match=r"groups\.jsonl:2: .*remove that line to read the rest"):
            list(load_group_ends(path))
    path.write_bytes(b'{"prompt_index":0}\n')
    for load in (load_rollouts, load_verdicts, load_group_ends):
        with pytest.raises(ValueError, match=r"groups\.jsonl:1: not a line of this journal \((Key|Validation)Error"):
            list(load(path))


def test_lines_of_another_run_are_left_out_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b'{"of": "a version without run ids"}\n')
    Journal(path, run_id="ours").append({"a": 1})
    Journal(path, run_id="theirs").append({"a": 2})
    assert list(read_journal(path, run_id="ours")) == [{"of": "a version without run ids"}, {"a": 1}]
    assert "rollouts.jsonl: 1 lines of other runs are left out" in caplog.text
    assert len(list(read_journal(path))) == 3


def test_reading_begins_at_a_mark_unless_the_lines_before_it_were_changed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    journal = Journal(path)
    for number in range(4):
        journal.append({"a": number})
    mark = journal.mark()
    journal.append({"a": 4})
    assert list(read_journal(path, since=mark)) == [{"a": 4}]
    assert list(read_journal(path, since=Mark())) == [{"a": number} for number in range(5)]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[4].replace(b"4", b"5", 1)]))
    with pytest.raises(ValueError, match=r"x\.jsonl:6: "):
        list(read_journal(path, since=mark))
    path.write_bytes(b"".join(lines[1:]))  # lines have equal lengths, so the mark is between two of them
    assert len(list(read_journal(path, since=mark))) == 4
    path.write_bytes(b"")
    assert list(read_journal(path, since=mark)) == []


def test_marks_stand_before_the_first_line_of_what_has_not_ended(tmp_path: Path) -> None:
    recorder, report = Recorder(tmp_path), JudgeReport(verdict=Failed(stage="judge", cause="timeout", attempts=2))
    assert recorder.marks()["rollouts.jsonl"] == Mark()
    for name in ("ends", "stays", "later"):
        recorder.rollout(0, PROMPT, plain_rollout(name))
        recorder.record_verdict(plain_rollout(name), report)
    recorder.group_ended(GroupEnd(group_id="ends", prompt_index=0, prompt_id="p", outcome="trained", step=1))
    marks = recorder.marks()
    behind = load_rollouts(tmp_path / "rollouts.jsonl", since=marks["rollouts.jsonl"])
    assert [line.rollout.group_id for line in behind] == ["stays", "later"]
    judged = load_verdicts(tmp_path / "judgements.jsonl", since=marks["judgements.jsonl"])
    assert [who[0] for who, _ in judged] == ["stays", "later"]
    resumed = Recorder(tmp_path)
    resumed.go_on(marks, ["stays", "later"])
    resumed.group_ended(GroupEnd(group_id="stays", prompt_index=1, prompt_id="p", outcome="trained", step=2))
    assert resumed.marks()["rollouts.jsonl"] == marks["rollouts.jsonl"]
    resumed.group_ended(GroupEnd(group_id="later", prompt_index=2, prompt_id="p", outcome="trained", step=2))
    assert resumed.marks()["rollouts.jsonl"].offset == (tmp_path / "rollouts.jsonl").stat().st_size


def test_a_bad_line_of_the_metrics_is_left_out_of_what_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2, "x\n{"step":"two"}\n{"steq":2}\n{"step":3}\n{"step":4}\n')
    JsonlSink(path).truncate_after(3)
    assert path.read_text() == '{"step":1}\n{"step":3}\n'
    assert "metrics.jsonl:2: " in caplog.text


def test_a_missing_journal_is_empty(tmp_path: Path) -> None:
    assert list(read_journal(tmp_path / "none.jsonl")) == []


def test_the_disk_being_full_raises_nothing_counts_and_leaves_whole_lines(tmp_path: Path) -> None:
    (tmp_path / "judgements.jsonl").symlink_to("/dev/full")
    recorder = Recorder(tmp_path)
    report = JudgeReport(verdict=Failed(stage="judge", cause="timeout", attempts=2))
    for _ in range(3):
        recorder.record_verdict(plain_rollout(), report)
        recorder.rollout(0, PROMPT, plain_rollout())
    assert recorder.failures == {"judgements.jsonl": 3}
    assert len(list(load_rollouts(tmp_path / "rollouts.jsonl"))) == 3


def test_a_rollout_that_is_not_on_file_has_no_verdict_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume samples it again under its name: the verdict would become the new one's."""
    recorder = Recorder(tmp_path)
    report = JudgeReport(verdict=Failed(stage="judge", cause="timeout", attempts=1))
    lost, kept = plain_rollout("g0"), plain_rollout("g1")
    with monkeypatch.context() as full:
        full.setattr(Journal, "append", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
        recorder.rollout(0, PROMPT, lost)
    recorder.rollout(1, PROMPT, kept)
    for rollout in (lost, kept):
        recorder.record_verdict(rollout, report)
    assert recorder.failures == {"rollouts.jsonl": 1, "judgements.jsonl": 1}
    assert [key for key, _ in load_verdicts(tmp_path / "judgements.jsonl")] == [("g1", 1)]
    recorder.rollout(0, PROMPT, lost)
    recorder.record_verdict(lost, report)
    assert [key for key, _ in load_verdicts(tmp_path / "judgements.jsonl")] == [("g1", 1), ("g0", 1)]


def test_half_a_write_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half_full = AppendFile(tmp_path / "x.jsonl")
    half_full.append(b"first\n")
    file = half_full.open()

    class HalfFull:
        tell, truncate, seek, fileno = file.tell, file.truncate, file.seek, file.fileno

        def write(self, piece: bytes) -> int:
            return file.write(piece[: len(piece) // 2]) or 0

    monkeypatch.setattr(half_full, "_file", HalfFull())
    with pytest.raises(OSError, match="disk full"):
        half_full.append(b"second\n")
    monkeypatch.setattr(half_full, "_file", file)
    half_full.append(b"third\n")
    assert half_full.path.read_bytes() == b"first\nthird\n"


def test_a_run_dir_that_cannot_be_written_fails_no_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    recorder = Recorder(tmp_path / "file")
    recorder.rollout(0, PROMPT, plain_rollout())
    recorder.close()
    assert recorder.failures["rollouts.jsonl"] == 1


def test_each_line_is_with_the_operating_system_when_the_call_returns(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.rollout(0, PROMPT, plain_rollout())
    record = json.loads((tmp_path / "rollouts.jsonl").read_text())
    assert record["prompt"]["messages"] == [{"role": "user", "content": "1 + 1?"}]
    assert record["turns"][0]["versions"] == [{"model": "policy", "version": 4, "start": 0, "end": 3}]


def test_log_probs_are_written_short_and_read_back_exactly(tmp_path: Path) -> None:
    rollout = plain_rollout(num_tokens=500)
    Recorder(tmp_path).rollout(0, PROMPT, rollout)
    (record,) = read_journal(tmp_path / "rollouts.jsonl")
    assert max(len(f"{value!r}") for value in record["turns"][0]["logprobs"]) <= 16
    (back,) = load_rollouts(tmp_path / "rollouts.jsonl")
    assert back.rollout.turns[0].completion.logprobs == rollout.turns[0].completion.logprobs
    assert all(math.isfinite(value) for value in back.rollout.turns[0].completion.logprobs)


def test_recording_a_short_rollout_takes_well_under_a_fifth_of_a_millisecond(tmp_path: Path) -> None:
    recorder, rollout = Recorder(tmp_path), plain_rollout(num_tokens=50)
    times_s = []
    for _ in range(200):
        start_s = time.perf_counter()
        recorder.rollout(0, PROMPT, rollout)
        times_s.append(time.perf_counter() - start_s)
    assert sorted(times_s)[20] < 0.2e-3  # the tenth percentile, because others share the machine
    print(f"median {sorted(times_s)[100] * 1e6:.0f} us")


def test_what_was_trained_comes_back_and_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    whole = TrainedRollout(
        group_id="g0", sibling=0, step=1, reward=0.5, advantage=-0.25, right=1.0, rollout_s=0.5, judging_s=2.0
    )
    lost = TrainedRollout(group_id="g0", sibling=1, step=1)
    Recorder(tmp_path).record_training([whole, lost])
    assert list(load_trained(tmp_path / "trained.jsonl")) == [whole, lost]
    assert list(read_journal(tmp_path / "trained.jsonl"))[1] == {"group_id": "g0", "sibling": 1, "step": 1}


def test_a_step_that_does_not_fit_the_disk_leaves_no_line_of_what_it_trained(tmp_path: Path) -> None:
    line = TrainedRollout(group_id="g0", sibling=0, step=1)
    recorder = Recorder(tmp_path)
    recorder.record_training([line])
    size = (tmp_path / "trained.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2 * 3, limits[1]))
    try:
        recorder.record_training([line] * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert recorder.failures == {"trained.jsonl": 1}
    assert list(load_trained(tmp_path / "trained.jsonl")) == [line]
