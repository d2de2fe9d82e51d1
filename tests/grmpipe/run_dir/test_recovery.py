"""What a resume, a replay and a second judging find in journals of which a line was changed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from journal_mutations import collect_records, mutate_line

from grmpipe.config.task_settings import RejudgeConfig
from grmpipe.observe.recorder import GROUPS, JUDGEMENTS, ROLLOUTS, decode_recorded
from grmpipe.pipeline.interfaces import PipelineState
from grmpipe.run.tasks.rejudge import open_stored
from grmpipe.run_dir.begun_rollouts import BegunRollouts
from grmpipe.run_dir.recorded_run import open_recorded
from grmpipe.run_dir.recovery import find_kept, void_group_ends, void_steps_after
from grmpipe.types import Prompt

STATE = PipelineState(version=1, next_prompt_index=0, in_flight={0: "g1", 1: "g2"})
USED = {ROLLOUTS: 3, JUDGEMENTS: 3, GROUPS: 1}  # journal -> its lines


class PromptsOf:
    """Gives the prompts of recorded rollouts."""

    def __init__(self, lines: list[bytes]) -> None:
        recorded = [decode_recorded(json.loads(line)) for line in lines]
        self._prompts = {line.prompt_index: line.prompt for line in recorded}

    def at(self, prompt_index: int) -> Prompt:
        return self._prompts[prompt_index]


@pytest.mark.parametrize("num_changes", [60, pytest.param(3000, marks=pytest.mark.long)])
def test_a_changed_line_is_read_or_named(tmp_path: Path, num_changes: int) -> None:
    records, rng = collect_records(tmp_path), random.Random(13)
    whole = {name: [json.dumps(one).encode() + b"\n" for one in records[name][:count]] for name, count in USED.items()}
    prompts, run_dir = PromptsOf(whole[ROLLOUTS]), tmp_path / "run"
    begun = run_dir / "in_flight" / "g000001-0.jsonl"
    begun.parent.mkdir(parents=True)

    def read_recorded() -> None:
        run = open_recorded(run_dir)
        assert all(run.batch(step) for step in range(1, 1 + len(run.steps)))
        assert isinstance(run.max_staleness, int)

    def read_stored() -> None:
        stored = open_stored(run_dir, RejudgeConfig(), 0)
        assert all(stored.run.group(group_id).rollouts for group_id in stored.steps)

    readers: tuple[Callable[[], object], ...] = (
        read_recorded,
        read_stored,
        lambda: find_kept(run_dir, STATE, prompts),
        lambda: BegunRollouts(run_dir).restore(STATE, {}),
        lambda: void_steps_after(run_dir, 1, {}),
        lambda: void_group_ends(run_dir, STATE),
    )
    ends = Counter[str]()
    for _ in range(num_changes):
        journal = rng.choice([*USED])
        place = rng.randrange(USED[journal])
        for name, lines in whole.items():
            changed = mutate_line(records[name][place], rng) if name == journal else b""
            (run_dir / name).write_bytes(
                b"".join(changed if changed and at == place else line for at, line in enumerate(lines))
            )
        begun.write_bytes(mutate_line({"first": 0, "saved": "", **records[ROLLOUTS][0]}, rng))
        for read in readers:
            try:
                read()
                ends["read"] += 1
            except ValueError as error:
                assert ".jsonl" in str(error), (error, (run_dir / journal).read_bytes())
                ends["named"] += 1
    assert min(ends["read"], ends["named"]) > num_changes / 2
