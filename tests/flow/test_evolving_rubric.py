"""A rubric that evolves, in whole runs: versions by group, resume, judging again, a writer that fails."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grmpipe.cli import compose
from grmpipe.judge.evolving_rubric import Trial, load_version
from grmpipe.run.features import rubric_evolution
from grmpipe.tasks import run_task

EVOLVES = (
    "data.eval_path=null", "train.groups_per_batch=8", "judge.rubric.evolve.every_steps=1",
    "judge.rubric.evolve.labelled_share=1", "train.num_steps=3", "train.checkpoint_every=1",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def all_candidates_enter() -> Iterator[None]:
    """Of so short a run few answers have a phrase: too few for a trial."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rubric_evolution, "LEAST_PAIRS", 1)
        patch.setattr(rubric_evolution, "try_candidate", lambda *trial: Trial(outcome="entered"))
        yield


@pytest.fixture(scope="module")
def evolved(run_once: Callable[..., Any]) -> Any:
    # No group is judged before the step before it is over: the steps after a new version are judged by it.
    return run_once(*EVOLVES, "train.max_staleness=0", experiment="evolving_rubric", run_dir="evolved")


def list_trained(files: Any) -> set[str]:
    return {line["group_id"] for line in files.lines("groups") if line["outcome"] == "trained"}


def read_verdicts(files: Any) -> dict[tuple[str, int], dict]:
    """The last line of each rollout: earlier ones were void."""
    return {(line["group_id"], line["sibling"]): line for line in files.lines("judgements") if "verdict" in line}


def find_versions(files: Any) -> dict[str, set[int]]:
    found = defaultdict(set)
    for (group_id, _), line in read_verdicts(files).items():
        found[group_id].add(line["rubric_version"])
    return found


def test_what_a_writer_finds_becomes_a_version_and_each_group_has_one(evolved: Any) -> None:
    folder, last = evolved.run_dir / "rubrics", int(evolved.steps()[-1]["rubric/version"])
    assert {path.name for path in folder.iterdir()} == {f"{number}.json" for number in range(last + 1)}
    texts = [one.text for one in load_version(folder / f"{last}.json").evolved]
    assert "Says many coins." in texts, "the phrase that the rubric misses, and that the writer was never shown"
    assert set(texts) <= {line["text"] for line in evolved.lines("rubric_candidates")}
    versions = [find_versions(evolved)[group] for group in list_trained(evolved)]
    assert all(len(own) == 1 for own in versions) and len(set().union(*versions)) > 1
    assert "the rubric of judge is version 1 now, with '" in (evolved.run_dir / "run.log").read_text()
    assert "Rubric that evolves" in (evolved.run_dir / "report.html").read_text(encoding="utf-8")


def test_judging_again_takes_each_groups_version(evolved: Any, restored_logging: None) -> None:
    run_task(compose(None, ["task=rejudge", f"run_dir={evolved.run_dir}"]))
    again, trained = type(evolved)(evolved.run_dir / "rejudged" / "again"), list_trained(evolved)
    first, second = read_verdicts(evolved), read_verdicts(again)
    for key, line in first.items():
        if key[0] in trained:
            assert second[key]["rubric_version"] == line["rubric_version"]
            assert second[key]["criteria"] == line["criteria"]


@pytest.mark.long
def test_a_resume_goes_on_with_the_checkpoints_version(
    small_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    async def kill(*round: object) -> None:
        raise Killed

    run = (*EVOLVES, "train.max_staleness=1", "resume=auto")
    with monkeypatch.context() as patch:
        finish = rubric_evolution.RubricEvolution.state

        def stop_later(feature: rubric_evolution.RubricEvolution) -> Any:
            """After the checkpoint with a new version, the next step is cut off."""
            if feature._rubric.number:
                patch.setattr(rubric_evolution.RubricEvolution, "after_step", kill)
            return finish(feature)

        patch.setattr(rubric_evolution.RubricEvolution, "state", stop_later)
        with pytest.raises(Killed):
            small_run(*run, experiment="evolving_rubric")
    files = small_run(*run, experiment="evolving_rubric")
    assert files.summary["status"] == "completed" and len(list_trained(files)) == 24
    versions = [line["rubric/version"] for line in files.steps()]
    assert versions == sorted(versions) and versions[-1] >= 1
    assert all(len(find_versions(files)[group]) == 1 for group in list_trained(files))


@pytest.mark.long
def test_a_writer_that_is_never_asked_is_an_alarm(
    small_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rubric_evolution, "LEAST_PAIRS", 1000)
    files = small_run(*EVOLVES, "train.num_steps=2", experiment="evolving_rubric")
    (alarm,) = [one for one in files.summary["alarms"] if "never asked" in one]
    assert alarm.startswith(
        "The writer of judge.rubric was never asked: it takes 1000 pairs of siblings of which one is"
    )


@pytest.mark.long
def test_a_writer_that_fails_keeps_the_rubric_and_an_alarm_has_the_cause(small_run: Callable[..., Any]) -> None:
    broken = ("train.num_steps=2", "models.rubric_writer.path=tiny://policy")
    files = small_run(*EVOLVES, *broken, experiment="evolving_rubric")
    assert files.summary["status"] == "completed"
    (alarm,) = [one for one in files.summary["alarms"] if "stays at version 0 after step 1" in one]
    first, _ = files.steps()
    failed = first["rubric/writer_failed_unparseable"]
    assert failed > 0 and first["rubric/version"] == 0
    assert f"the writer rubric_writer failed ({failed:g} unparseable): the answer has no JSON list of criteria" in alarm
    assert "stays at version 0" in (files.run_dir / "report.html").read_text()
