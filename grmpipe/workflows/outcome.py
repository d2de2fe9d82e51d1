"""What a workflow returned -> the rewards of its turns. Pure."""

from collections.abc import Mapping, Sequence

from grmpipe.config.keys.user_code import format_value, plain_text, to_number
from grmpipe.envs.env import EnvFault

OUTCOME = "outcome"  # name of a reward that the workflow didn't name
COMPLETION_ID = "chatcmpl-"  # what every completion id begins with
Rewards = dict[str, dict[str, float]]  # completion id -> rewards by name


def read_rewards(returned: object, completion_ids: Sequence[str], owner: str = "the workflow") -> Rewards:
    """The rewards by turn. completion_ids: one per turn, in their order in the rollout. owner: the user's code.

    None: no reward; a number: the last turn's `outcome`. A mapping holds, in any mixture, name -> number: rewards of
    the last turn; completion id -> number: a turn's `outcome`; completion id -> {name: number}: its rewards. Raises
    EnvFault (protocol) for anything else, and for two rewards of a turn with one name.
    """
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        return {completion_ids[-1]: {OUTCOME: _number(OUTCOME, returned, owner)}}
    rewards: Rewards = {}
    for key, value in returned.items():
        is_turn, name = key in completion_ids, str(key)
        if not is_turn and name.startswith(COMPLETION_ID):
            raise EnvFault(f"{owner} returned rewards by completion id, and no turn has the id {name}", "protocol")
        turn = name if is_turn else completion_ids[-1]
        named = value if is_turn and isinstance(value, Mapping) else {OUTCOME if is_turn else name: value}
        _add(named, rewards.setdefault(turn, {}), turn, owner)
    return rewards


def plain_rewards(returned: object, owner: str) -> object:
    """What a workflow returned, in plain numbers: None, a number, or a mapping of them and of mappings of them. Raises
    EnvFault (protocol), which names the owner, for anything else.
    """
    if returned is None:
        return None
    if not isinstance(returned, Mapping):
        return _number(OUTCOME, returned, owner)
    return {plain_text(str(key)): _plain(str(key), value, owner) for key, value in returned.items()}


def _plain(key: str, value: object, owner: str) -> object:
    if isinstance(value, Mapping):
        return {plain_text(str(name)): _number(str(name), number, owner) for name, number in value.items()}
    return _number(key, value, owner)


def _add(named: Mapping[str, object], rewards: dict[str, float], turn: str, owner: str) -> None:
    for name, value in named.items():
        if name in rewards:
            raise EnvFault(
                f"{owner} returned two rewards {name} for the turn {turn}: one by its completion id, one for the whole "
                "episode, which is its last turn's; rename one",
                "protocol",
            )
        rewards[name] = _number(name, value, owner)


def _number(name: str, value: object, owner: str) -> float:
    if (number := to_number(value)) is None:
        raise EnvFault(
            f"{owner} returned {format_value(value)} as the reward {name}; return None, a finite number, or "
            f"numbers by name",
            "protocol",
        )
    return number
