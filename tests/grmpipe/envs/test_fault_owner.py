"""Whose fault it is: each row of the table in docs/agents.md, by the one function that decides."""

from __future__ import annotations

import errno
import signal

import pytest

from grmpipe.config.keys.user_code import UserCodeError
from grmpipe.envs.env import EnvFault, PolicyFault
from grmpipe.envs.fault_owner import (
    KNOWN_POLICY_ERRORS,
    FaultRules,
    RaisedElsewhere,
    fault_of,
    fault_rules,
    policys_end,
    readable,
)

BOX, OWN = FaultRules(in_box=True), FaultRules(policy_errors=("builtins.LookupError",))
NO_RULES = FaultRules()
FULL = OSError(errno.ENOSPC, "No space left on device")


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def named(path: str) -> Exception:
    module, _, name = path.rpartition(".")
    error: Exception = type(name, (Exception,), {"__module__": module})("10 turns")
    return error


@pytest.mark.parametrize(
    ("error", "rules", "kind", "ends"),
    [
        (PolicyFault("no", "path"), NO_RULES, "path", False),
        (PolicyFault("no", "path", ends=True), NO_RULES, "path", True),
        *((named(path), NO_RULES, path.rpartition(".")[2], True) for path in KNOWN_POLICY_ERRORS),
        (KeyError("x"), OWN, "LookupError", True),
        (caused(RuntimeError("x"), KeyError("x")), OWN, "LookupError", True),
        (caused(UserCodeError("the tool t raised it"), KeyError("x")), OWN, "LookupError", True),
        (RaisedElsewhere("x", ["builtins.KeyError", "builtins.LookupError"]), OWN, "LookupError", True),
        (FULL, BOX, "limit", True),
        (caused(RuntimeError("x"), FULL), BOX, "limit", True),
        (OSError(errno.EMFILE, "Too many open files"), BOX, "limit", True),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), BOX, "limit", True),
        (RuntimeError("can't start new thread"), BOX, "limit", True),
        (MemoryError(), BOX, "limit", True),
    ],
)
def test_policy_is_blamed_for_its_own_faults(error: BaseException, rules: FaultRules, kind: str, ends: bool) -> None:
    fault = fault_of(error, "my.step", rules, has_acted=True)
    assert isinstance(fault, PolicyFault) and (fault.kind, fault.ends) == (kind, ends)
    before = fault_of(error, "my.open", rules, has_acted=False)
    assert isinstance(before, EnvFault), "before its first turn nothing is its doing"


@pytest.mark.parametrize(
    ("error", "rules", "cause"),
    [
        (EnvFault("no seat", "capacity"), NO_RULES, "capacity"),
        (EnvFault("its own word", "flaky"), NO_RULES, "broken"),  # type: ignore[arg-type]
        (caused(EnvFault("no seat", "capacity"), FULL), BOX, "capacity"),
        (KeyError("x"), NO_RULES, "broken"),
        (ValueError("x"), OWN, "broken"),
        (SystemExit(3), NO_RULES, "broken"),
        (FULL, NO_RULES, "broken"),
        (MemoryError(), NO_RULES, "broken"),
        (ConnectionError("x"), BOX, "broken"),
    ],
)
def test_environment_is_blamed_for_its_own_faults(error: BaseException, rules: FaultRules, cause: str) -> None:
    fault = fault_of(error, "my.step", rules, has_acted=True)
    assert isinstance(fault, EnvFault) and fault.cause == cause


def test_own_exceptions_count_under_the_name_by_which_they_are_imported_too() -> None:
    rules = fault_rules(["os.error", "nowhere.Error"])
    assert set(rules.policy_errors) == {"os.error", "builtins.OSError", "nowhere.Error"}


@pytest.mark.parametrize(
    ("number", "limit", "is_policys"),
    [
        (signal.SIGKILL, "2 s of CPU time", True),
        (signal.SIGINT, "", True),
        (signal.SIGTERM, "", True),
        (signal.SIGKILL, "", False),
        (signal.SIGSEGV, "", False),
        (0, "", False),
    ],
)
def test_an_end_of_a_box_is_the_policys_if_a_limit_or_a_program_asked_for_it(
    number: int, limit: str, is_policys: bool
) -> None:
    assert bool(policys_end(number, limit)) == is_policys


def test_a_fault_is_read_without_its_middle_and_its_kind_is_a_word() -> None:
    fault = readable(PolicyFault("a" * 99, kind=None), 10)  # type: ignore[arg-type]
    assert (str(fault), fault.kind) == ("aaaaa\n[89 characters left out]\naaaaa", "NoneType")
