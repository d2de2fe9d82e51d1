"""Packed lines: every reader sees what it sees in plain ones, and nothing but ids and log-probs is touched."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from grmpipe import read_run
from grmpipe.capacity.simulate.simulated_answers import lengths_in
from grmpipe.models.types import Completion, Message, ToolCall, VersionSpan
from grmpipe.observe import run_files
from grmpipe.observe.recorder import JUDGEMENTS, ROLLOUTS, EvalRecorder, Recorder
from grmpipe.observe.records import pack_numbers, unpack_numbers
from grmpipe.pipeline.interfaces import PipelineState
from grmpipe.run_dir.recorded_run import open_recorded
from grmpipe.run_dir.recovery import find_kept
from grmpipe.types import (
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

# A user's names that are ours elsewhere: they stay as they are.
OWN = {"token_ids": 2, "logprobs": [1.5], "turns": [{"token_ids": 1}]}
PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),), reference="2", info=OWN)
RNG = np.random.default_rng(0)


def completion(num_tokens: int) -> Completion:
    return Completion(
        token_ids=tuple(RNG.zipf(1.3, num_tokens).clip(0, 150_000).tolist()),
        logprobs=tuple((-RNG.exponential(size=num_tokens)).astype(np.float32).tolist()),
        text="four chars " * (num_tokens // 3),
        finish_reason="stop",
        versions=(VersionSpan(model="policy", version=0, start=0, end=num_tokens),),
    )


def rollout(group_id: str, sibling: int, num_tokens: int = 7) -> Rollout:
    call = ToolCall(name="count", arguments=OWN)
    turns = (
        Turn(new_ids=(1, 2, 3), completion=completion(num_tokens), tool_calls=(call,)),
        Turn(new_ids=(), completion=completion(2)),
    )
    return Rollout(group_id=group_id, sibling=sibling, turns=turns, status="finished")


def report(
    group_id: str, sibling: int, num_tokens: int = 5, prompt_tokens: int = 40, judgements: int = 2
) -> JudgeReport:
    prompt_ids = completion(prompt_tokens).token_ids
    verdict = Verdict(
        rewards=(RewardSpan(turn=1, start=0, end=2, value=0.5 * sibling),), score=5.0, breakdown={}, score_std=0.0,
        num_judgements=2,
    )  # fmt: skip
    judgement = Judgement(
        group_id=group_id, siblings=(sibling,), scores=(5.0,), prompt_ids=prompt_ids, completion=completion(num_tokens),
        grm="grm", version=0,
    )  # fmt: skip
    failed = FailedJudgement(
        stage="judge", cause="unparseable", attempts=1, prompt_ids=prompt_ids, completion=completion(num_tokens)
    )
    others = (dataclasses.replace(judgement, completion=completion(num_tokens)) for _ in range(judgements - 1))
    whole = JudgeReport(verdict=verdict, judgements=(judgement, *others), failures=(failed,), principles=completion(4))
    return dataclasses.replace(whole, by_judge={"turns": whole, "lost": JudgeReport(verdict=failed)})


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """The journals of one trained group, plain and packed."""
    rollouts, reports = [rollout("g", n) for n in range(2)], [report("g", n) for n in range(2)]
    for name in ("plain", "packed"):
        for n in range(2):
            compact = (name == "packed") == (n == 1)
            recorder, evaluations = (
                Recorder(tmp_path / name, compact=compact),
                EvalRecorder(tmp_path / name, compact=compact),
            )
            recorder.rollout(0, PROMPT, rollouts[n])
            recorder.record_verdict(rollouts[n], reports[n])
            answers = evaluations.of_evaluation("held_out", 1)
            answers.rollout(PROMPT, rollouts[n], n, 1.0)
            answers.record_verdict(rollouts[n], reports[n])
        recorder.group_ended(
            GroupEnd(group_id="g", prompt_index=0, prompt_id="p", outcome="trained", step=1, version=0)
        )
    return tmp_path / "plain", tmp_path / "packed"


class Drawn:
    def at(self, prompt_index: int) -> Prompt:
        return PROMPT


def test_every_reader_finds_the_same_in_both_forms(both: tuple[Path, Path]) -> None:
    plain, packed = both
    assert (plain / ROLLOUTS).read_bytes() != (packed / ROLLOUTS).read_bytes()
    for name in ("rollouts", "episodes", "judgements", "eval_rollouts", "eval_judgements"):
        found, wanted = (list(getattr(read_run(run_dir), name)) for run_dir in (packed, plain))
        assert found == wanted and len(found) >= 2, name
    assert open_recorded(packed).batch(1) == open_recorded(plain).batch(1)
    in_flight = PipelineState(version=1, next_prompt_index=1, in_flight={0: "g"})
    kept = find_kept(packed, in_flight, Drawn())
    assert kept == find_kept(plain, in_flight, Drawn()) and len(kept[0].rollouts) == len(kept[0].reports) == 2
    assert lengths_in(packed) == lengths_in(plain)
    assert run_files.read_run(packed).shown == run_files.read_run(plain).shown != []


def test_a_torn_packed_line_is_cut_off_by_the_next_process_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / ROLLOUTS
    Recorder(tmp_path, compact=True).rollout(0, PROMPT, whole := rollout("g", 0))
    line = path.read_bytes()
    for torn in (line[:-1], line[: line.index(b'"packed"') + 20]):
        path.write_bytes(line + torn)
        assert [row.rollout for row in read_run(tmp_path).rollouts] == [whole]
        Recorder(tmp_path, compact=True).rollout(0, PROMPT, rollout("next", 0))
        assert [row.rollout.group_id for row in read_run(tmp_path).rollouts] == ["g", "next"]
    middle = line.index(b'"packed"') + 20
    path.write_bytes(line[:middle] + bytes([line[middle] ^ 1]) + line[middle + 1 :])
    with pytest.raises(ValueError, match=r"rollouts\.jsonl:1: it is damaged"):
        list(read_run(tmp_path).rollouts)


BOMB = base64.b64encode(zlib.compress(bytes(1 << 26))).decode()


@pytest.mark.parametrize(
    "change",
    [
        {"packed": "eJw="},
        {"packed": "?"},
        {"packed": BOMB},
        {"turns": []},
        {"turns": [{"token_ids": 10**12, "logprobs": 3, "new_ids": 3}]},
        {"turns": [{"token_ids": -1, "logprobs": 3, "new_ids": 3}]},
        {"turns": [{"token_ids": True, "logprobs": 3, "new_ids": 3}]},
        {"packed": None, "thinned": "numbers", "turns": [{"token_ids": 10**12, "logprobs": 3, "new_ids": 3}]},
    ],
)
def test_packed_numbers_that_do_not_fit_their_line_are_an_error_that_names_it(tmp_path: Path, change: dict) -> None:
    Recorder(tmp_path, compact=True).rollout(0, PROMPT, rollout("g", 0))
    record = json.loads((tmp_path / ROLLOUTS).read_text())
    del record["xxh3"]  # changed on purpose
    record = {name: value for name, value in (record | change).items() if value is not None}
    (tmp_path / ROLLOUTS).write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=r"rollouts\.jsonl:1: "):
        list(read_run(tmp_path).rollouts)


def test_packing_touches_ids_and_log_probs_only_and_unpacking_twice_changes_nothing(tmp_path: Path) -> None:
    Recorder(tmp_path, compact=True).rollout(0, PROMPT, rollout("g", 0))
    record = json.loads((tmp_path / ROLLOUTS).read_text())
    assert record["prompt"]["info"] == record["turns"][0]["tool_calls"][0]["arguments"] == OWN
    assert (record["turns"][0]["token_ids"], record["turns"][1]["new_ids"]) == (7, 0)
    unpacked = unpack_numbers(record)
    assert unpack_numbers(json.loads(json.dumps(unpacked))) == unpacked
    assert unpack_numbers(pack_numbers(json.loads(json.dumps(unpacked)))) == unpacked


def test_long_answers_with_four_judgements_take_less_than_half_of_the_disk(tmp_path: Path) -> None:
    sizes = {}
    answer, judged = rollout("g", 0, 1000), report("g", 0, 500, 2000, judgements=4)
    for compact in (True, False):
        recorder = Recorder(tmp_path / str(compact), compact=compact)
        recorder.rollout(0, PROMPT, answer)
        recorder.record_verdict(answer, judged)
        sizes[compact] = [(tmp_path / str(compact) / name).stat().st_size for name in (ROLLOUTS, JUDGEMENTS)]
    assert sum(sizes[True]) < 0.5 * sum(sizes[False])
