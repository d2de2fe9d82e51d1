"""in_flight/: which rollouts go on after a resume, and from which turn."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from grmpipe.envs.play import RolloutRequest
from grmpipe.models.types import Completion, Message, VersionSpan
from grmpipe.pipeline.interfaces import PipelineState, RecoveredGroup
from grmpipe.run_dir.begun_rollouts import BegunRollouts
from grmpipe.types import BegunRollout, Prompt, Rollout, Turn

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))
STATE = PipelineState(version=3, next_prompt_index=8, in_flight={5: "g000005", 6: "g000006~2"})


def turn(number: int, version: int) -> Turn:
    completion = Completion(
        token_ids=(number, 7),
        logprobs=(-0.5, -1.0),
        text=f"turn {number}",
        finish_reason="stop",
        versions=(VersionSpan(model="policy", version=version, start=0, end=2),),
    )
    return Turn(new_ids=(1, 2), completion=completion, replies=(Message(role="user", content="go on"),))


def rollout(group_id: str, sibling: int, *versions: int, status: str = "truncated") -> Rollout:
    """Of a turn for each version."""
    turns = tuple(turn(number, version) for number, version in enumerate(versions))
    return Rollout(group_id=group_id, sibling=sibling, turns=turns, status=status)  # type: ignore[arg-type]


def begin(
    run_dir: Path, whole: Rollout, *, run_id: str = "ours", compact: bool = False, saves_after: Sequence[int] = range(9)
) -> None:
    """Play it, with a state that is saved after these numbers of turns, until the process is killed."""
    begun = BegunRollouts(run_dir, run_id, compact=compact)

    async def play(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        for number in sorted(set(range(1, len(whole.turns) + 1)) & set(saves_after)):
            so_far = replace(whole, turns=whole.turns[:number])
            request.on_resumable(BegunRollout(so_far=so_far, saved=b"state %d" % number))
        raise KeyboardInterrupt

    request = RolloutRequest(group_id=whole.group_id, sibling=whole.sibling, seed=0)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(begun.resume(play)(request, PROMPT, lambda: None))


def gone_on(begun: BegunRollouts, group_id: str, sibling: int) -> BegunRollout | None:
    """What an episode after the resume is asked to go on from."""
    asked: list[BegunRollout | None] = []

    async def play(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        asked.append(request.begun)
        return rollout(group_id, sibling, 3)

    request = RolloutRequest(group_id=group_id, sibling=sibling, seed=0)
    asyncio.run(begun.resume(play)(request, PROMPT, lambda: None))
    return asked[0]


@pytest.mark.parametrize("compact", [False, True])
def test_a_rollout_goes_on_after_its_last_turn(tmp_path: Path, compact: bool) -> None:
    begin(tmp_path, whole := rollout("g000005", 1, 2, 3), compact=compact)
    begun = BegunRollouts(tmp_path, "ours")
    groups = begun.restore(STATE, {})
    assert groups == {5: RecoveredGroup(group_id="g000005", begun_version=2)} and len(begun) == 1
    assert gone_on(begun, "g000005", 1) == BegunRollout(so_far=whole, saved=b"state 2")
    assert gone_on(begun, "g000005", 1) is None, "only once"
    assert [*(tmp_path / "in_flight").iterdir()] == [], "it has ended"


def test_turns_of_later_versions_than_the_checkpoint_are_sampled_again(tmp_path: Path) -> None:
    begin(tmp_path, whole := rollout("g000005", 0, 3, 4, 3))
    begin(tmp_path, rollout("g000005", 2, 4))
    begun = BegunRollouts(tmp_path, "ours")
    begun.restore(STATE, {})
    first = replace(whole, turns=whole.turns[:1])
    assert gone_on(begun, "g000005", 0) == BegunRollout(so_far=first, saved=b"state 1")
    assert gone_on(begun, "g000005", 2) is None


def test_turns_after_which_nothing_was_saved_are_on_file_with_the_next_one(tmp_path: Path) -> None:
    begin(tmp_path, whole := rollout("g000005", 0, 3, 3, 3, 3), saves_after=(1, 3))
    begin(tmp_path, rollout("g000005", 1, 3, 3, 4), saves_after=(1, 3))
    begun = BegunRollouts(tmp_path, "ours")
    begun.restore(STATE, {})
    assert gone_on(begun, "g000005", 0) == BegunRollout(so_far=replace(whole, turns=whole.turns[:3]), saved=b"state 3")
    found = gone_on(begun, "g000005", 1)
    assert found is not None and (len(found.so_far.turns), found.saved) == (1, b"state 1"), "before what is void"


def test_what_was_played_again_after_a_resume_replaces_the_turns_from_there(tmp_path: Path) -> None:
    begin(tmp_path, rollout("g000005", 0, 3, 3, 4, 4))
    begin(tmp_path, again := replace(rollout("g000005", 0, 2, 2), turns=(turn(0, 2), turn(9, 2))))
    begun = BegunRollouts(tmp_path, "ours")
    begun.restore(STATE, {})
    assert gone_on(begun, "g000005", 0) == BegunRollout(so_far=again, saved=b"state 2")


def test_a_group_that_was_renamed_goes_on_beside_its_finished_siblings(tmp_path: Path) -> None:
    begin(tmp_path, rollout("g000006~1", 0, 1))
    begin(tmp_path, rollout("g000006~1", 1, 2))
    finished = rollout("g000006~2", 1, 3, status="finished")
    begun = BegunRollouts(tmp_path, "ours")
    kept = {6: RecoveredGroup(group_id="g000006~2", renamed=True, rollouts=(finished,))}
    groups = begun.restore(STATE, kept)
    assert groups == {6: replace(kept[6], begun_version=1)}
    assert gone_on(begun, "g000006~2", 1) is None
    assert gone_on(begun, "g000006~2", 0) is not None


def test_what_can_not_go_on_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a group that ended, whose requests killed engines, of another run, and a damaged file."""
    begin(tmp_path, rollout("g000004", 0, 3))
    begin(tmp_path, rollout("g000006", 0, 3))
    begin(tmp_path, rollout("g000005", 0, 3), run_id="another")
    begin(tmp_path, rollout("g000009", 0, 3))
    (path := tmp_path / "in_flight" / "g000009-0.jsonl").write_bytes(path.read_bytes().replace(b"turn 0", b"turn 1"))
    begin(tmp_path, rollout("g000008", 0, 3))
    begun = BegunRollouts(tmp_path, "ours")
    groups = begun.restore(STATE, {6: RecoveredGroup(group_id="g000006", killed_engines=True)})
    assert len(begun) == 1 and groups[8] == RecoveredGroup(group_id="g000008", begun_version=3)
    assert [path.name for path in (tmp_path / "in_flight").iterdir()] == ["g000008-0.jsonl"]
    assert re.search(r"g000009-0\.jsonl.*it is damaged", caplog.text) and not begun.failures


def test_a_run_whose_directory_was_deleted_writes_nothing_and_goes_on(tmp_path: Path) -> None:
    begin(tmp_path / "deleted", rollout("g000005", 0, 3))
    assert not (tmp_path / "deleted").exists()
