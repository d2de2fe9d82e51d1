"""Secrets: found by the name of their key, by their value or by where they came from; removed from what is written and
shown, of which a configuration is the largest part.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

REDACTED = "<redacted>"
SECRET_WORDS = frozenset(
    {
        "key", "apikey", "accesskey", "secretkey", "privatekey", "token", "apitoken", "accesstoken", "authtoken",
        "password", "passwd", "pwd", "passphrase", "secret", "credential", "auth", "authorization", "bearer", "cookie",
    }
)  # fmt: skip
NO_SECRETS = frozenset({"PWD", "SSH_AUTH_SOCK"})  # the shell's: a directory, a socket
USERINFO = re.compile(r"(?<=://)[^\s/?#@'\"]+(?=@)")  # in a URL, such as joe:password
# What gives a text a name: ?api_key=text in a URL, --api-key text and --api-key=text of a program.
NAMED = re.compile(r"(?P<name>(?<=[?&])[\w.-]+=|(?<![\w-])--?[A-Za-z][\w-]*[= ])(?P<text>[^\s&#'\"<][^\s&#'\"]*)")
# Keys of OpenAI and its like, tokens of Hugging Face and GitHub, wherever they stand.
SHAPED = re.compile(r"(?<![\w-])(?:sk-(?=[\w-]*\d)[\w-]{16,}|hf_\w{20,}|gh[opsur]_\w{20,})")
BEARER = re.compile(r"(?<=\bBearer )[\w.~+/=-]{8,}")
OPTION = re.compile(r"--?[A-Za-z][\w-]*")
# The whole of an argument, in which a text has a name: API_KEY=text, --api-key=text, X-Api-Key: text.
NAMED_ARGUMENT = re.compile(r"(?P<name>[\w-]+(?:=|:\s*))(?P<text>[^<\s].*)", re.DOTALL)
SEALED = re.compile(r"<sha256 [0-9a-f]{12}>")
MIN_SECRET_CHARS = 6  # a shorter value would blank out half of a config
TYPED_VARIABLE = re.compile(r"_env=['\"]?(\w+)")
# What a server of tools is given may be a secret under any name. A header may change like one, too.
HEADERS = re.compile(r"env\.mcp\..+\.headers\..+")
GIVEN = re.compile(r"env\.mcp\..+\.(env|headers)\..+")
COMMAND = re.compile(r"env\.(mcp\..+\.)?command")
VARIABLES: set[str] = set()  # whose values are secret whatever they are called: keys such as api_key_env name them


def redact(mapping: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """A copy without secrets, including nested mappings and lists.

    Numbers are kept under any name: max_new_tokens is a count, and no API key is a number.
    """
    secrets = environment_secrets(environ)
    return {key: _redact_value(key, value, secrets) for key, value in mapping.items()}


def mask(text: str, secrets: Sequence[str]) -> str:
    """The text with every secret masked, also within a longer word; what has the shape of one; the user info of URLs,
    and what their parameters and the options of command lines name as secret.
    """
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    text = SHAPED.sub(REDACTED, text)
    text = USERINFO.sub(REDACTED, text) if "://" in text else text
    text = NAMED.sub(_masked_if_secret, text) if "?" in text or "-" in text else text
    return BEARER.sub(REDACTED, text) if "Bearer " in text else text


def keep_secret(values: object, key: str = "") -> None:
    """Count the variables as secret that keys ending in `_env` name, in nested values or typed as `key=value`."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            keep_secret(value, str(name))
    elif isinstance(values, list | tuple):
        for value in values:
            keep_secret(value)
    elif isinstance(values, str):
        VARIABLES.update([values] if key.endswith("_env") else TYPED_VARIABLE.findall(values))


def mask_error(error: BaseException, secrets: Sequence[str]) -> bool:
    """Mask secrets in an error, its notes and the errors behind it, in place. One that can't be masked is behind it no
    more. Returns whether its own text is without secrets now.
    """
    error.args = tuple(mask(one, secrets) if isinstance(one, str) else one for one in error.args)
    error.__dict__.update(
        {name: [mask(note, secrets) for note in notes] for name, notes in vars(error).items() if name == "__notes__"}
    )
    for name in ("__cause__", "__context__"):
        behind, suppressed = getattr(error, name), error.__suppress_context__
        if behind is not None and not mask_error(behind, secrets):
            setattr(error, name, None)
            error.__suppress_context__ = suppressed  # setting a cause changes it
    return mask(str(error), secrets) == str(error)


@contextmanager
def mask_errors() -> Iterator[None]:
    """Context: an error that leaves it shows no secret, neither in its text nor in the errors behind it."""
    try:
        yield
    except BaseException as error:
        if mask_error(error, secrets := environment_secrets()):
            raise
        raise RuntimeError(mask(f"{type(error).__name__}: {error}", secrets)) from None


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without secrets: without what an option, a variable or a header that looks secret is set to."""
    secrets = secrets_in(arguments)
    return [
        argument.removesuffix(secret) + REDACTED if secret else argument
        for argument, secret in zip(arguments, secrets, strict=True)
    ]


def secrets_in(arguments: Sequence[str]) -> list[str]:
    """The secret at the end of each argument of a command line; empty: it has none."""
    return [_secret_after(before, argument) for before, argument in pairwise(("", *arguments))]


def _secret_after(before: str, argument: str) -> str:
    if OPTION.fullmatch(before) and looks_secret(before) and not argument.startswith("-"):
        return argument
    named = NAMED_ARGUMENT.fullmatch(argument)
    return named["text"] if named is not None and looks_secret(named["name"]) else ""


def seal(text: str) -> str:
    """A hash that shows whether a secret is the same without revealing it. A hash stays unchanged."""
    if SEALED.fullmatch(text):
        return text
    return f"<sha256 {hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}>"


def environment_secrets(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Values of environment variables with secret-looking names, and of those that keys name (`keep_secret`); longest
    first, because one may be part of another.
    """
    names = {name for name in environ if looks_secret(name) and name not in NO_SECRETS} | (VARIABLES & environ.keys())
    named = {name: environ[name] for name in names}
    values = {value for value in named.values() if len(value) >= MIN_SECRET_CHARS}
    return tuple(sorted(values, key=len, reverse=True))


@functools.lru_cache(maxsize=4096)  # each record that is written asks it of every variable
def looks_secret(name: str) -> bool:
    """apiKey, HF_TOKEN, auth_tokens, db-password: whether a name contains a secret's word as a whole word, so
    `tokenizer` and `keyboard` don't.

    `api_key_env` doesn't either: it holds the name of a variable.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    return words[-1:] != ["env"] and any(
        word in SECRET_WORDS or word.removesuffix("s") in SECRET_WORDS for word in words
    )


def _masked_if_secret(found: re.Match[str]) -> str:
    """A count stays as it is: --max-num-batched-tokens 2048."""
    is_secret = looks_secret(found["name"]) and not re.fullmatch(r"[-+.\d]+", found["text"])
    return found["name"] + REDACTED if is_secret else found[0]


def _redact_value(key: str, value: object, secrets: Sequence[str]) -> object:
    if isinstance(value, Mapping):
        return {name: _redact_value(f"{key} {name}", entry, secrets) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_value(key, entry, secrets) for entry in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return REDACTED if looks_secret(key) else mask(str(value), secrets)


# -- a configuration ---------------------------------------------------------------------------------------------------


class FromEnvironment(str):
    """A value that came from the environment. typed: its text in the configuration, such as `${oc.env:NAME}`."""

    typed: str

    def __new__(cls, value: str, typed: str = "") -> FromEnvironment:
        text = super().__new__(cls, value)
        text.typed = typed
        return text


def mark_secrets(value: Any, typed: Any, known: frozenset[str] = frozenset()) -> Any:
    """The resolved values, with those from the environment as FromEnvironment.

    typed: the same before interpolations were resolved. known: values from the environment that other keys may refer
           to.
    """
    if isinstance(typed, str):
        if not came_from_environment(value, typed, known):
            return value
        return all_noted(value, typed)
    if isinstance(value, Mapping):
        return {name: mark_secrets(entry, typed[name], known) for name, entry in value.items()}
    if isinstance(value, list):
        return [mark_secrets(entry, one, known) for entry, one in zip(value, typed, strict=True)]
    return value


def came_from_environment(value: Any, typed: str, known: frozenset[str]) -> bool:
    if "${" not in typed:
        return False
    return "oc.env" in typed or (isinstance(value, str) and any(text in value for text in known))


def all_noted(value: Any, typed: str) -> Any:
    """The result of one interpolation, as FromEnvironment; parts of a mapping or list have no text of their own."""
    if isinstance(value, Mapping):
        return {name: all_noted(entry, "") for name, entry in value.items()}
    if isinstance(value, list):
        return [all_noted(entry, "") for entry in value]
    return FromEnvironment(value, typed) if isinstance(value, str) and value else value


def texts_from_environment(value: Any) -> frozenset[str]:
    if isinstance(value, Mapping):
        return frozenset().union(*(texts_from_environment(entry) for entry in value.values()))
    if isinstance(value, list):
        return frozenset().union(*(texts_from_environment(entry) for entry in value))
    return frozenset({str(value)}) if isinstance(value, FromEnvironment) else frozenset()


def plain(value: Any) -> Any:
    """The same values with plain strings, for code that takes no subclass of str."""
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, FromEnvironment) else value


def without_secrets(config: object, stays_typed: Callable[[str], bool]) -> dict[str, Any]:
    """A configuration of dataclasses as nested values. Hashes stand for texts under secret-looking names, for
    those from the environment in free-form sections (`extra_body`, `options`), and for what a server of tools gets as
    variables or headers.

    stays_typed: whether a key's interpolation is written instead of its value.
    """
    secrets = environment_secrets()

    def written(value: Any, key: str, free_form: bool) -> Any:
        if dataclasses.is_dataclass(value):
            names = (spec.name for spec in dataclasses.fields(value))
            return {name: written(getattr(value, name), f"{key}.{name}".lstrip("."), False) for name in names}
        if isinstance(value, Mapping):
            return {name: written(entry, f"{key}.{name}", True) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            is_command = COMMAND.fullmatch(key) and all(isinstance(entry, str) for entry in value)
            return [written(entry, key, free_form) for entry in (mask_arguments(value) if is_command else value)]
        if not isinstance(value, str):
            return value
        from_environment = isinstance(value, FromEnvironment)
        if may_be_secret(key) or (from_environment and free_form):
            return seal(value)
        if isinstance(value, FromEnvironment) and value.typed and stays_typed(key):
            return value.typed
        return mask(str(value), secrets)

    values: dict[str, Any] = written(config, "", False)
    return values


def may_be_secret(key: str) -> bool:
    """Whether texts under a key are written as hashes only."""
    return is_secret_key(key) or GIVEN.fullmatch(key) is not None


def is_secret_key(key: str) -> bool:
    """Whether any name on the path to a value looks like a secret's, or the value is a header."""
    return any(looks_secret(name) for name in key.split(".")) or HEADERS.fullmatch(key) is not None
