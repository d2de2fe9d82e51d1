"""The user's code in errors, and the numbers that it returns."""

from __future__ import annotations

import asyncio
import functools
import re

import numpy as np
import pytest

from grmpipe.config.keys.user_code import (
    UserCodeError,
    called,
    described,
    noted,
    number_of,
    plain_text,
    shown,
    words_of,
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
    assert re.fullmatch(rf".*test_user_code\.{name} \(.*test_user_code\.py:\d+\)", described(code))
    assert described(len) == "builtins.len"


def test_exception_is_reported_with_the_line_of_the_users_file() -> None:
    class Silent(BaseException):
        __str__ = Users.__str__

    for error, said in ((Silent(), "Silent: it has no text"), (KeyError("x" * 9000), "characters left out")):
        try:
            raise error
        except BaseException as caught:
            words = words_of(caught)
        assert said in words and re.search(r"\(.*test_user_code\.py:\d+\)$", words) and len(words) < 3000


@pytest.mark.parametrize("value", [None, "1", b"1", [1], np.zeros(2), np.str_("1"), float("nan"), 10**400, 1j, Users()])
def test_value_that_is_no_finite_number_becomes_none_and_is_described(value: object) -> None:
    assert number_of(value) is None
    assert len(shown(value)) < 200


def test_half_characters_become_question_marks() -> None:
    assert plain_text("ü\ud800") == "ü?"


def test_what_would_end_the_process_becomes_an_error_and_a_cancellation_from_outside_stays_one() -> None:
    async def go(asked: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        with called("my.code"):
            if asked:
                task.cancel()
                await asyncio.sleep(0)
            raise asyncio.CancelledError

    for error in (SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(UserCodeError, match=f"my.code raised {type(error).__name__}"), called("my.code"):
            raise error
    with pytest.raises(UserCodeError, match="CancelledError"):
        asyncio.run(go(False))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(go(True))


def test_a_noted_exception_keeps_its_type() -> None:
    with pytest.raises(KeyError) as error, noted("my.code"):
        raise KeyError("x")
    assert re.fullmatch(r"in my\.code, .*test_user_code\.py:\d+:", error.value.__notes__[0])
