"""The user's code in errors, and the numbers that it returns."""

from __future__ import annotations

import asyncio
import functools
import re

import numpy as np
import pytest

from grmpipe.config.keys.user_code import (
    UserCodeError,
    call_guarded,
    describe_code,
    describe_error,
    format_value,
    note_owner,
    plain_text,
    to_number,
)


class Users:
    def method(self) -> None: ...

    def __str__(self) -> str:
        raise ValueError

    __repr__ = __str__


def function() -> None: ...


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (function, "function"),
        (functools.partial(function, 1), "function"),
        (Users, "Users"),
        (Users(), "Users"),
        (Users().method, r"Users\.method"),
        (functools.cache(function), "function"),
    ],
)
def test_code_is_described_by_its_dotted_name_its_file_and_its_line(code: object, name: str) -> None:
    assert re.fullmatch(rf".*test_user_code\.{name} \(.*test_user_code\.py:\d+\)", describe_code(code))
    assert describe_code(len) == "builtins.len"


def test_exception_is_reported_with_the_line_of_the_users_file() -> None:
    class Silent(BaseException):
        __str__ = Users.__str__

    for error, said in ((Silent(), "Silent: it has no text"), (KeyError("x" * 9000), "characters left out")):
        try:
            raise error
        except BaseException as caught:
            words = describe_error(caught)
        assert said in words and re.search(r"\(.*test_user_code\.py:\d+\)$", words) and len(words) < 3000


@pytest.mark.parametrize("value", [None, "1", b"1", [1], np.zeros(2), np.str_("1"), float("nan"), 10**400, 1j, Users()])
def test_value_that_is_no_finite_number_becomes_none_and_is_described(value: object) -> None:
    assert to_number(value) is None
    assert len(format_value(value)) < 200


def test_half_characters_become_question_marks() -> None:
    assert plain_text("ü\ud800") == "ü?"


def test_an_exit_of_the_users_code_becomes_an_error_and_a_cancellation_from_outside_stays_one() -> None:
    async def go(asked: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        with call_guarded("my.code"):
            if asked:
                task.cancel()
                await asyncio.sleep(0)
            raise asyncio.CancelledError

    for error in (SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(UserCodeError, match=f"my.code raised {type(error).__name__}"), call_guarded("my.code"):
            raise error
    with pytest.raises(UserCodeError, match="CancelledError"):
        asyncio.run(go(False))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(go(True))


def test_a_noted_exception_keeps_its_type() -> None:
    with pytest.raises(KeyError) as error, note_owner("my.code"):
        raise KeyError("x")
    assert re.fullmatch(r"in my\.code, .*test_user_code\.py:\d+:", error.value.__notes__[0])
