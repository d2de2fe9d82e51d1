"""Thinning of journals: what stays, what a resume finds, and that a kill at any moment loses nothing."""

import json
import math
from pathlib import Path

import pytest

from grmpipe.config.journals import JournalsConfig
from grmpipe.config.task_settings import RejudgeConfig
from grmpipe.data.stream import EndOfData
from grmpipe.models.types import Completion, Message, VersionSpan
from grmpipe.observe.journal import Mark, locate, mark_holds, read_journal, read_thinning
from grmpipe.observe.recorder import JUDGEMENTS, ROLLOUTS, Recorder, load_rollouts, load_verdicts
from grmpipe.observe.run_files import pick_rollouts
from grmpipe.pipeline.interfaces import PipelineState
from grmpipe.run.tasks.rejudge import open_stored
from grmpipe.run_dir.checkpoints import Checkpoints
from grmpipe.run_dir.recorded_run import open_recorded
from grmpipe.run_dir.recovery import find_kept
from grmpipe.run_dir.run_state import RunState
from grmpipe.run_dir.thinning import DRAFT, ThinningJob, plan_thinning, thin_journal, thin_line
from grmpipe.types import (
    Failed,
    FailedJudgement,
    GroupEnd,
    Judgement,
    JudgeReport,
    Prompt,
    RewardSpan,
    Rollout,
    Turn,
    Verdict,
)

TEXT, SHARE = JournalsConfig(keep="text"), JournalsConfig(keep="0.5")


def prompt(index: int) -> Prompt:
    asked = (Message(role="user", content=f"asked {index}"),)
    return Prompt(prompt_id=f"p{index}", messages=asked, reference="forty-two")


class Drawn:
    def at(self, prompt_index: int) -> Prompt:
        if prompt_index > 50:
            raise EndOfData("over")
        return prompt(prompt_index)


def completion(text: str, number: int = 9) -> Completion:
    return Completion(
        token_ids=tuple(range(100, 100 + number)), logprobs=(-0.5,) * number, text=text, finish_reason="stop",
        versions=(VersionSpan(model="m", version=0, start=0, end=number),),
    )  # fmt: skip


def rollout(index: int, sibling: int) -> Rollout:
    turn = Turn(
        new_ids=(1, 2, 3), completion=completion(f"answer {index}.{sibling}"),
        replies=(Message(role="tool", content="a tool's secret"),),
    )  # fmt: skip
    return Rollout(group_id=f"g{index:06}", sibling=sibling, turns=(turn,), status="finished")


def report(index: int, sibling: int) -> JudgeReport:
    spans = (RewardSpan(turn=0, start=0, end=9, value=0.5),)
    judgement = Judgement(
        group_id=f"g{index:06}", siblings=(sibling,), scores=(7.0,), prompt_ids=(1, 2), grm="grm", version=0,
        completion=completion(f"critique {index}.{sibling}"),
    )  # fmt: skip
    failed = FailedJudgement(
        stage="judge", cause="unparseable", attempts=1, detail="no score", prompt_ids=(1,),
        completion=completion("rambling"),
    )  # fmt: skip
    verdict = Verdict(rewards=spans, score=7.0, breakdown={"text": 0.5}, score_std=0.0, num_judgements=1)
    own = JudgeReport(verdict=verdict, judgements=(judgement,), failures=(failed,))
    return JudgeReport(verdict=verdict, judgements=(judgement,), failures=(failed,), by_judge={"text": own})


def write(recorder: Recorder, *groups: int, ended: bool = True) -> None:
    for index in groups:
        for sibling in range(2):
            recorder.rollout(index, prompt(index), rollout(index, sibling))
            recorder.record_verdict(rollout(index, sibling), report(index, sibling))
        if ended:
            end(recorder, index)


def end(recorder: Recorder, *groups: int) -> None:
    for index in groups:
        recorder.group_ended(
            GroupEnd(group_id=f"g{index:06}", prompt_index=index, prompt_id="p", outcome="trained", step=1 + index)
        )


def checkpoint(run_dir: Path, recorder: Recorder, step: int, in_flight: int, keep: int = 2) -> RunState:
    """The next group after those in flight is the one of the step."""
    ids = {index: f"g{index:06}" for index in range(step, step + in_flight)}
    state = RunState(
        pipeline_state=PipelineState(version=step, next_prompt_index=step + in_flight, in_flight=ids),
        journal_marks=recorder.marks(),
        counted_marks=recorder.ends(),
    )
    checkpoints = Checkpoints(directory=run_dir / "checkpoints", keep=keep)
    checkpoints.publish(checkpoints.draft(step), state, [])
    return state


def thin(run_dir: Path, recorder: Recorder, config: JournalsConfig = TEXT) -> ThinningJob | None:
    job = plan_thinning(run_dir, config, seed=0, least_bytes=0)
    if job is not None:
        paths = [run_dir / name for name in job.until]
        drafts = {path.with_name(path.name + DRAFT): thin_journal(path, path.with_name(path.name + DRAFT), job)
                  for path in paths}  # fmt: skip
        recorder.adopt(drafts)
    return job


def kept_by(run_dir: Path, state: RunState) -> dict:
    return find_kept(
        run_dir, state.pipeline_state, Drawn(), marks=state.journal_marks, counted_marks=state.counted_marks
    )


@pytest.fixture(params=[False, True], ids=["plain", "compact"])
def recorder(request: pytest.FixtureRequest, tmp_path: Path) -> Recorder:
    return Recorder(tmp_path, "c1448a5682ce4b21", compact=request.param)


def started(recorder: Recorder, tmp_path: Path) -> RunState:
    """Six groups ended, then two in flight at a checkpoint, which has not counted the last rollout."""
    write(recorder, *range(6))
    write(recorder, 6, 7, ended=False)
    state = checkpoint(tmp_path, recorder, step=6, in_flight=2)
    recorder.rollout(8, prompt(8), rollout(8, 0))
    return state


def test_text_stays_with_lengths_scores_and_causes_and_ids_are_unknown(recorder: Recorder, tmp_path: Path) -> None:
    started(recorder, tmp_path)
    before = (tmp_path / ROLLOUTS).stat().st_size
    thin(tmp_path, recorder)
    lines = list(load_rollouts(tmp_path / ROLLOUTS))
    assert (tmp_path / ROLLOUTS).stat().st_size < before
    assert [line.thinned for line in lines] == ["numbers"] * 11 + [""] * 6, "the line before the mark stays too"
    first = lines[0].rollout.turns[0]
    assert (first.completion.text, first.completion.num_tokens, len(first.new_ids)) == ("answer 0.0", 9, 3)
    assert set(first.completion.token_ids) == {-1} and all(map(math.isnan, first.completion.logprobs))
    assert lines[0].prompt == prompt(0) and lines[-1].rollout == rollout(8, 0)
    (key, judged), *_, (_, last) = load_verdicts(tmp_path / JUDGEMENTS)
    whole = report(0, 0)
    assert key == ("g000000", 0) and judged.verdict == whole.verdict and last == report(7, 1)
    assert judged.judgements[0].completion.text == "critique 0.0" and judged.judgements[0].prompt_ids == (-1, -1)
    assert judged.failures[0].cause == "unparseable" and judged.by_judge["text"].verdict == whole.verdict


def test_a_share_keeps_whole_groups_and_no_text_of_the_others(recorder: Recorder, tmp_path: Path) -> None:
    started(recorder, tmp_path)
    thin(tmp_path, recorder, SHARE)
    lines = list(load_rollouts(tmp_path / ROLLOUTS))[:10]
    dropped = {line.rollout.group_id for line in lines if line.thinned == "text"}
    whole = {line.rollout.group_id for line in lines if not line.thinned}
    assert dropped and whole and not dropped & whole
    verdicts = dict(load_verdicts(tmp_path / JUDGEMENTS))
    for line in lines:
        judged = verdicts[line.rollout.group_id, line.rollout.sibling]
        index = int(line.rollout.group_id[1:])
        if line.thinned:
            assert line.prompt.prompt_id == f"p{index}" and line.rollout.turns[0].completion.num_tokens == 9
            assert judged.verdict == report(index, 0).verdict and judged.judgements[0].scores == (7.0,)
        else:
            sibling = line.rollout.sibling
            assert line.rollout == rollout(index, sibling) and judged == report(index, sibling)
    thinned = [text for name in (ROLLOUTS, JUDGEMENTS) for text in (tmp_path / name).read_text().splitlines()[:10]
               if json.loads(text)["group_id"] in dropped]  # fmt: skip
    words = ("answer", "asked", "forty", "tool's", "critique", "ramb")
    assert not any(word in text for text in thinned for word in words)


def test_a_resume_finds_the_same_work_before_and_after_two_thinnings(recorder: Recorder, tmp_path: Path) -> None:
    first = started(recorder, tmp_path)
    found = kept_by(tmp_path, first)
    assert found[8].uncounted.rollouts == (rollout(8, 0),) and found[6].reports.keys() == {0, 1}
    thin(tmp_path, recorder)
    assert kept_by(tmp_path, first) == found
    end(recorder, 6, 7, 8)
    write(recorder, 9, ended=False)
    second = checkpoint(tmp_path, recorder, step=9, in_flight=1)
    found = kept_by(tmp_path, first), kept_by(tmp_path, second)
    recorder.close()
    resumed = Recorder(tmp_path, "c1448a5682ce4b21")
    resumed.go_on(second.journal_marks, ["g000009"])
    assert resumed.marks()[ROLLOUTS] == second.journal_marks[ROLLOUTS]
    job = thin(tmp_path, resumed)
    needed = {name: first.journal_marks[name].offset for name in (ROLLOUTS, JUDGEMENTS)}
    assert job is not None and job.until == needed, "the older checkpoint needs the rest"
    assert (kept_by(tmp_path, first), kept_by(tmp_path, second)) == found
    third = checkpoint(tmp_path, resumed, step=9, in_flight=1)
    checkpoint(tmp_path, resumed, step=10, in_flight=0)
    thin(tmp_path, resumed)
    assert kept_by(tmp_path, third) == found[1] and found[1][9].rollouts == (rollout(9, 0), rollout(9, 1))
    assert len(list(read_journal(tmp_path / ROLLOUTS))) == 19
    for name, mark in third.journal_marks.items():
        assert mark_holds(tmp_path / name, locate(tmp_path / name, mark))


def test_thinned_rollouts_are_sampled_again_by_a_run_that_lost_its_checkpoints(
    recorder: Recorder, tmp_path: Path
) -> None:
    started(recorder, tmp_path)
    thin(tmp_path, recorder)
    marks = {ROLLOUTS: Mark(), JUDGEMENTS: Mark()}
    found = find_kept(tmp_path, PipelineState(version=0), Drawn(), counted_marks=marks)
    assert found[0].rollouts == () and found[0].renamed, "no id has two meanings"
    assert found[6].rollouts == (rollout(6, 0), rollout(6, 1)) and not found[6].renamed


@pytest.mark.parametrize("until", [0, 300, 640, 1300, 2650, 9999])
def test_a_draft_that_a_kill_left_and_lines_written_meanwhile_cost_nothing(tmp_path: Path, until: int) -> None:
    """The run writes while a draft is made; it is adopted, or the process dies and the journal is what it was."""
    recorder = Recorder(tmp_path, "c1448a5682ce4b21")
    write(recorder, 0, 1, 2)
    path, draft = tmp_path / ROLLOUTS, tmp_path / f"{ROLLOUTS}{DRAFT}"
    job = ThinningJob(run_dir=str(tmp_path), share=None, seed=0, until={ROLLOUTS: until})
    with path.open("ab") as file:
        file.write(b'{"half a li')  # as the child may find it
    before = path.read_bytes()
    copied = thin_journal(path, draft, job)
    assert path.read_bytes() == before
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - len(b'{"half a li'))
    write(recorder, 3)
    if copied:
        recorder.adopt({draft: copied})
    write(recorder, 4)
    lines = list(load_rollouts(path))
    assert [line.rollout.group_id for line in lines] == [f"g{index:06}" for index in range(5) for _ in range(2)]
    assert [line.rollout for line in lines[6:]] == [rollout(index, sibling) for index in (3, 4) for sibling in (0, 1)]
    thinning = read_thinning(path)
    assert sum(bool(line.thinned) for line in lines) in ([0] if until < 640 else [1, 2, 3, 4, 5, 6])
    assert thinning.until == 0 or thinning.until < until
    assert recorder.ends()[ROLLOUTS].offset == path.stat().st_size + thinning.removed


def test_work_is_begun_when_what_may_be_thinned_exceeds_what_was(recorder: Recorder, tmp_path: Path) -> None:
    started(recorder, tmp_path)
    assert plan_thinning(tmp_path, TEXT, seed=0, least_bytes=(tmp_path / JUDGEMENTS).stat().st_size) is None
    thin(tmp_path, recorder)
    end(recorder, 6, 7, 8)
    write(recorder, 10)
    checkpoint(tmp_path, recorder, step=11, in_flight=0, keep=1)
    assert plan_thinning(tmp_path, TEXT, seed=0, least_bytes=1) is None, "not each step: the thinned part is larger"
    for index in range(12, 30):
        write(recorder, index)
    checkpoint(tmp_path, recorder, step=30, in_flight=0, keep=1)
    job = plan_thinning(tmp_path, TEXT, seed=0, least_bytes=1)
    assert job is not None and job.until.keys() == {ROLLOUTS, JUDGEMENTS}


def test_without_a_checkpoint_nothing_may_be_thinned_nor_with_one_that_cant_be_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    write(recorder, 0, 1)
    assert plan_thinning(tmp_path, TEXT, seed=0, least_bytes=0) is None
    checkpoint(tmp_path, recorder, step=2, in_flight=0)
    assert plan_thinning(tmp_path, TEXT, seed=0, least_bytes=0) is not None
    (tmp_path / "checkpoints" / "step_2" / "run_state.json").write_text("{")
    assert plan_thinning(tmp_path, TEXT, seed=0, least_bytes=0) is None


def test_a_damaged_line_is_kept_to_the_byte_and_still_reported(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "c1448a5682ce4b21")
    write(recorder, 0, 1, 2)
    checkpoint(tmp_path, recorder, step=3, in_flight=0)
    path = tmp_path / ROLLOUTS
    damaged = path.read_bytes().replace(b"answer 1.0", b"answer 9.9")
    path.write_bytes(damaged)
    thin(tmp_path, recorder)
    assert damaged.splitlines()[2] in path.read_bytes().splitlines()
    with pytest.raises(ValueError, match=r"rollouts\.jsonl:3: it is damaged"):
        list(load_rollouts(path))


@pytest.mark.parametrize(
    "line",
    [b'{"turns":7,"token_ids":null}\n', b'{"turns":[3]}\n', b'{"by_judge":[]}\n', b'{"completion":{"logprobs":1}}\n'],
)
def test_a_line_of_another_kind_is_kept_to_the_byte(line: bytes) -> None:
    assert thin_line(line, ThinningJob(run_dir="", share=None, seed=0, until={})) == line


def test_a_thinned_run_cant_be_trained_again_and_says_why(recorder: Recorder, tmp_path: Path) -> None:
    write(recorder, *range(4))
    checkpoint(tmp_path, recorder, step=4, in_flight=0)
    assert len(open_recorded(tmp_path).steps) == 4
    thin(tmp_path, recorder)
    with pytest.raises(ValueError, match=r"was thinned: journals\.keep dropped .* journals\.keep=all"):
        open_recorded(tmp_path)


@pytest.mark.parametrize("keep", ["none", "0", "1", "1.5", "-0.1", "nan"])
def test_a_value_that_keeps_nothing_known_is_refused_by_its_key(keep: str) -> None:
    with pytest.raises(ValueError, match="keep: must be all, text or a share"):
        JournalsConfig(keep=keep)
    assert (SHARE.kept_share, TEXT.kept_share, JournalsConfig().kept_share) == (0.5, None, None)


def test_a_failed_verdict_keeps_its_cause(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    write(recorder, 0, ended=False)
    failed = Failed(stage="judge", cause="timeout", attempts=2, detail="of the server")
    recorder.record_verdict(rollout(0, 0), JudgeReport(verdict=failed))
    end(recorder, 0)
    write(recorder, 1)
    checkpoint(tmp_path, recorder, step=2, in_flight=0)
    thin(tmp_path, recorder, JournalsConfig(keep="1e-9"))
    reports = [found for _, found in load_verdicts(tmp_path / JUDGEMENTS)]
    assert reports[2].verdict == Failed(stage="judge", cause="timeout", attempts=2)


def test_judging_again_reads_what_a_run_that_goes_on_thins_meanwhile(recorder: Recorder, tmp_path: Path) -> None:
    started(recorder, tmp_path)
    stored = open_stored(tmp_path, RejudgeConfig(), seed=0)
    thin(tmp_path, recorder, SHARE)
    assert [stored.run.group(name).rollouts[0] for name in stored.steps] == [rollout(index, 0) for index in range(9)]


def test_judging_again_counts_the_groups_whose_text_is_gone_and_takes_the_others(
    recorder: Recorder, tmp_path: Path
) -> None:
    started(recorder, tmp_path)
    thin(tmp_path, recorder, SHARE)
    stored = open_stored(tmp_path, RejudgeConfig(), seed=0)
    assert stored.num_without_text + len(stored.steps) == 9 and stored.num_without_text >= 2
    for name in stored.steps:
        group = stored.run.group(name)
        assert group.rollouts[0].answer == f"answer {int(name[1:])}.0" and group.prompt == prompt(int(name[1:]))
    gone = Recorder(tmp_path / "gone")
    write(gone, *range(4))
    checkpoint(tmp_path / "gone", gone, step=4, in_flight=0)
    thin(tmp_path / "gone", gone, JournalsConfig(keep="1e-9"))
    with pytest.raises(ValueError, match=r"holds no text of these groups: journals\.keep dropped it"):
        open_stored(tmp_path / "gone", RejudgeConfig(steps=[1, 2]), seed=0)


def test_the_report_shows_rollouts_that_have_their_text(recorder: Recorder, tmp_path: Path) -> None:
    started(recorder, tmp_path)
    thin(tmp_path, recorder, JournalsConfig(keep="1e-9"))
    shown = pick_rollouts(tmp_path)
    assert shown and all(one.rollout.answer for one in shown)
