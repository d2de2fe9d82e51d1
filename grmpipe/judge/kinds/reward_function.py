"""Calls of a user's reward function: which arguments it gets, by whose convention, and how its results are read.

def brief(prompt, response, **columns) -> float | bool | dict          # our own; `responses` for lists
def brief(completions, **columns) -> list[float | None]                # TRL's; prompts, completion_ids
def brief(data_source, solution_str, ground_truth, extra_info)         # verl's; in the plural for lists
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from grmpipe.config.keys.dotted_path import find_at
from grmpipe.config.keys.user_code import BadValueError, describe_code, format_value, to_number
from grmpipe.data.prompts import find_ground_truth
from grmpipe.models.types import Message
from grmpipe.types import Prompt, Rollout

# The parameter by which a convention is recognised -> whether all its arguments are lists.
CONVENTIONS = {"response": False, "responses": True, "completions": True, "solution_str": False, "solution_strs": True}
SINGULAR = {
    "prompts": "prompt", "responses": "response", "completions": "completion", "data_sources": "data_source",
    "solution_strs": "solution_str", "ground_truths": "ground_truth", "extra_infos": "extra_info",
}  # fmt: skip
REWARD_KEYS = ("reward", "score")  # in a dict that a function returns: ours, verl's
WRITE = "write `def reward(prompt, response, **columns) -> float`, or take the parameters of TRL or verl"
RETURN = "return a number, True or False, None for no verdict, or a dict with `reward`"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenReward:
    """What a function says of a response. reward: None for no verdict. metrics: its further numbers, by name.
    left_out: what else its dict held, such as texts and NaN, by name: a verdict has numbers only.
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A reward function and the arguments that it takes.

    owner:    its key, name, file and line.
    is_batch: whether it takes and returns lists.
    names:    its parameters. required: those without a default. takes_all: whether it takes any further one.
    """

    function: Callable[..., object]
    owner: str
    is_batch: bool
    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool
    show_thoughts: bool = False

    @property
    def is_async(self) -> bool:
        called = self.function if inspect.isroutine(self.function) else type(self.function).__call__
        return inspect.iscoroutinefunction(called)

    def check_columns(self, columns: Iterable[str], path: str) -> None:
        """Raises ValueError that begins with the key for a parameter that neither a rollout nor a column fills."""
        known = {*columns, *ROW_FIELDS, *SINGULAR, *SINGULAR.values(), "completion_ids"}
        if lacking := [name for name in self.required if name not in known]:
            raise ValueError(
                f"{self.owner}: nothing fills its parameter {lacking[0]!r}; add a column of that name to {path}, which "
                f"has {', '.join(sorted(columns)) or 'no further one'}, or give the parameter a default"
            )

    def arguments(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> dict[str, object]:
        """By name. A column that this row lacks is None where the function has no default for it."""
        wanted = self.names
        if self.takes_all:
            row = (name for name in OWN_FIELDS if ROW_FIELDS[name](prompt))
            wanted += ("prompts" if self.is_batch else "prompt", "completion_ids", *row, *prompt.columns)
        found = {name: [self._value(SINGULAR.get(name, name), prompt, one) for one in rollouts] for name in wanted}
        given = {name: values for name, values in found.items() if name in self.required or values[0] is not None}
        return dict(given) if self.is_batch else {name: values[0] for name, values in given.items()}

    def _value(self, name: str, prompt: Prompt, rollout: Rollout) -> object:
        if name in ("response", "solution_str") or (name == "completion" and not prompt.is_chat):
            return rollout.turns[-1].completion.text if self.show_thoughts else rollout.answer
        if name == "completion":
            return to_messages(rollout, thoughts=self.show_thoughts)
        if name == "completion_ids":
            return [token_id for turn in rollout.turns for token_id in turn.completion.token_ids]
        if name == "prompt":
            return [plain(message) for message in prompt.messages] if prompt.is_chat else prompt.messages[-1].content
        if name in prompt.columns:
            return prompt.columns[name]
        return ROW_FIELDS[name](prompt) if name in ROW_FIELDS else None

    def read(self, given: object, count: int) -> list[GivenReward]:
        """One result for each of `count` responses. Raises BadValueError."""
        if not self.is_batch:
            return [read_reward(given)]
        if (as_list := getattr(given, "tolist", None)) is not None:  # an array of numpy or torch
            given = as_list()
        if not isinstance(given, list | tuple) or len(given) != count:
            what = f"{len(given)} values" if isinstance(given, list | tuple) else format_value(given)
            raise BadValueError(f"returned {what} for {count} responses; return a list with one value for each")
        return [read_reward(one) for one in given]


# What a row of data has besides its columns, by a name of its own and by verl's.
ROW_FIELDS: dict[str, Callable[[Prompt], object]] = {
    "prompt_id": lambda prompt: prompt.prompt_id,
    "source": lambda prompt: prompt.source,
    "reference": lambda prompt: prompt.reference,
    "info": lambda prompt: dict(prompt.info),
    "data_source": lambda prompt: prompt.source,
    "ground_truth": lambda prompt: prompt.reference if (truth := find_ground_truth(prompt.columns)) is None else truth,
    "extra_info": lambda prompt: dict(prompt.info),
}
OWN_FIELDS = ("prompt_id", "source", "reference", "info")


def reward_function(path: str, key: str, *, show_thoughts: bool = False) -> RewardFunction:
    """What a dotted path names. key: where it is configured. Raises ValueError that begins with `function`."""
    function = find_at(path, "function")
    if not callable(function) or inspect.isclass(function):
        raise ValueError(f"function: {path} is no function; {WRITE}")
    owner = f"{key}: {describe_code(function)}"
    parameters = inspect.signature(function).parameters
    by_name = [one for one in parameters.values() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    names = tuple(one.name for one in by_name)
    recognised = [name for name in CONVENTIONS if name in names]
    if len(recognised) != 1 or any(one.kind is one.POSITIONAL_ONLY for one in parameters.values()):
        raise ValueError(
            f"function: {describe_code(function)} takes {', '.join(parameters) or 'nothing'}: one parameter must "
            f"be the "
            f"response, by one of the names {', '.join(CONVENTIONS)}, and each must have a name to give it by; {WRITE}"
        )
    return RewardFunction(
        function=function,
        owner=owner,
        is_batch=CONVENTIONS[recognised[0]],
        names=names,
        required=tuple(one.name for one in by_name if one.default is one.empty),
        takes_all=any(one.kind is one.VAR_KEYWORD for one in parameters.values()),
        show_thoughts=show_thoughts,
    )


def read_reward(given: object) -> GivenReward:
    """What a function returned for a response. Raises BadValueError for what is no reward."""
    if given is None:
        return GivenReward(reward=None)
    if not isinstance(given, Mapping):
        return GivenReward(reward=reward_in(given))
    key = next((key for key in REWARD_KEYS if key in given), None)
    if key is None:
        raise BadValueError(f"returned {format_value(given)}, a dict without {' or '.join(REWARD_KEYS)}; {RETURN}")
    further = {str(name): value for name, value in given.items() if name != key and value is not None}
    metrics = {name: number for name, value in further.items() if (number := to_number(value)) is not None}
    left_out = {name: value for name, value in further.items() if name not in metrics}
    return GivenReward(reward=None if given[key] is None else reward_in(given[key]), metrics=metrics, left_out=left_out)


def reward_in(value: object) -> float:
    if (number := to_number(value)) is None:
        raise BadValueError(f"returned {format_value(value)}; {RETURN}")
    return number


def to_messages(rollout: Rollout, *, thoughts: bool) -> list[dict[str, str]]:
    """The episode after the prompt, as chat messages."""
    found: list[dict[str, str]] = []
    for turn in rollout.turns:
        text = turn.completion.text if thoughts else turn.completion.answer
        found += [{"role": "assistant", "content": text}, *(plain(reply) for reply in turn.replies)]
    return found


def plain(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}
