"""What a workflow returned -> the rewards of its turns. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grmpipe.config.user_code import number_of, plain_text, shown
from grmpipe.envs.env import EnvFault

OUTCOME = "outcome"  # name of a reward that the workflow didn't name
COMPLETION_ID = "chatcmpl-"  # what every completion id begins with
Rewards = dict[str, dict[str, float]]  # completion id -> rewards by name


def rewards_of(returned: object, completion_ids: Sequence[str]) -> Rewards:
    """The rewards by turn. completion_ids: of all turns, in their order in the rollout.

    None: no reward; a number: the last turn's `outcome`. A mapping holds, in any mixture, name -> number: rewards of
    the last turn; completion id -> number: a turn's `outcome`; completion id -> {name: number}: its rewards. Raises
    EnvFault (protocol) for anything else.
    """
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        return {completion_ids[-1]: {OUTCOME: _number(OUTCOME, returned)}}
    rewards: Rewards = {}
    for key, value in returned.items():
        turn, name = (key, OUTCOME) if key in completion_ids else (completion_ids[-1], str(key))
        if turn != key and name.startswith(COMPLETION_ID):
            raise EnvFault(f"the workflow returned rewards by completion id, and no turn has the id {name}", "protocol")
        named = value if turn == key and isinstance(value, Mapping) else {name: value}
        rewards.setdefault(turn, {}).update({str(one): _number(str(one), number) for one, number in named.items()})
    return rewards


def plain_rewards(returned: object, owner: str, name: str = OUTCOME) -> object:
    """What a workflow returned, in plain numbers: None, a number, or a mapping of them. Raises EnvFault (protocol),
    which names the owner, for anything else.
    """
    if returned is None and name == OUTCOME:
        return None
    if isinstance(returned, Mapping):
        return {plain_text(str(key)): plain_rewards(value, owner, str(key)) for key, value in returned.items()}
    if (number := number_of(returned)) is None:
        raise EnvFault(
            f"{owner} returned {shown(returned)} as the reward {name}; return None, a finite number, or numbers by "
            "name",
            "protocol",
        )
    return number


def _number(name: str, value: object) -> float:
    if (number := number_of(value)) is None:
        raise EnvFault(
            f"the workflow returned {shown(value)} as the reward {name}, and it must be a number", "protocol"
        )
    return number
