"""Loops that run and fail together."""

from __future__ import annotations

import asyncio

import pytest

from grmpipe.scheduler.run_together import (
    RemoteTraceback,
    describe_failure,
    raise_first_failure,
    run_together,
    run_until,
)


async def forever(ended: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(name)


async def crash(error: BaseException) -> None:
    raise error


async def give(value: int) -> int:
    return value


def test_all_results_come_back_by_name() -> None:
    assert asyncio.run(run_together(a=give(1), b=give(2))) == {"a": 1, "b": 2}


def test_the_first_crash_ends_all_and_is_raised_as_itself() -> None:
    ended: list[str] = []
    error = KeyError("first")
    with pytest.raises(KeyError) as caught:
        asyncio.run(run_together(play=forever(ended, "play"), judge=crash(error)))
    assert caught.value is error
    assert ended == ["play"]
    assert "in judge:" in error.__notes__


def test_a_crash_while_being_torn_down_is_not_the_cause() -> None:
    async def fragile() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("second")

    with pytest.raises(KeyError):
        asyncio.run(run_together(a=fragile(), b=crash(KeyError("first"))))


def test_a_loop_cancelled_from_within_is_a_crash() -> None:
    async def waits_for_cancelled() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with pytest.raises(RuntimeError, match="cancelled from within"):
        asyncio.run(run_together(a=waits_for_cancelled(), b=forever([], "b")))


def test_cancellation_reaches_every_loop() -> None:
    ended: list[str] = []

    async def main() -> None:
        both = asyncio.create_task(run_together(a=forever(ended, "a"), b=forever(ended, "b")))
        await asyncio.sleep(0.01)
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both

    asyncio.run(main())
    assert sorted(ended) == ["a", "b"]


def test_the_loops_end_with_the_main_one() -> None:
    ended: list[str] = []

    async def main() -> int:
        await asyncio.sleep(0.01)
        return 7

    assert asyncio.run(run_until(main(), play=forever(ended, "play"), admit=give(0))) == 7
    assert ended == ["play"]


def test_a_crash_of_a_side_loop_ends_the_main_one() -> None:
    ended: list[str] = []
    with pytest.raises(KeyError):
        asyncio.run(run_until(forever(ended, "main"), judge=crash(KeyError("x"))))
    assert ended == ["main"]


def test_failure_is_described_from_outside_in_with_its_causes() -> None:
    async def failing() -> None:
        try:
            raise OSError("disk full")
        except OSError as error:
            raise ValueError("run_dir: can't be written; set run_dir") from error

    with pytest.raises(ValueError) as caught:
        asyncio.run(run_together(train=run_together(save=failing())))
    assert describe_failure(caught.value).splitlines() == [
        "in train:",
        "in save:",
        "run_dir: can't be written; set run_dir",
        "because of OSError: disk full",
    ]


def test_a_traceback_of_another_process_is_shown_only_for_errors_that_are_not_said_to_users() -> None:
    said, crashed = ValueError("policy.path: no such folder"), KeyError("x")
    for error in (said, crashed):
        error.__cause__ = RemoteTraceback("grm-0", "Traceback ..")
    assert describe_failure(said) == "policy.path: no such folder\n(in grm-0)"
    assert describe_failure(crashed).splitlines()[-1] == "Traceback .."


def test_the_main_loop_adds_no_line_of_its_own() -> None:
    async def failing() -> None:
        raise ValueError("train.lr: too high")

    async def inner() -> None:
        await run_until(failing(), play=give(0))

    with pytest.raises(ValueError) as caught:
        asyncio.run(run_until(inner(), health=give(0)))
    assert describe_failure(caught.value) == "train.lr: too high"


def test_first_failure_in_groups_of_tasks_is_described_with_all_its_places() -> None:
    async def main() -> None:
        async def inner() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(failing())

        async def failing() -> None:
            error = ValueError("grm.path: give the name of a model that it serves")
            error.add_note("in the vote:")
            raise error

        await run_together(judge=inner())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert describe_failure(caught.value) == (
        "in judge:\nin the vote:\ngrm.path: give the name of a model that it serves"
    )


def test_a_task_group_raises_its_first_failure_itself() -> None:
    async def main() -> None:
        async def fail() -> None:
            raise ValueError("first") from KeyError("its cause")

        async with raise_first_failure() as tasks:
            tasks.create_task(fail())
            tasks.create_task(asyncio.sleep(1e9))

    with pytest.raises(ValueError, match="first") as caught:
        asyncio.run(main())
    assert isinstance(caught.value.__cause__, KeyError)
