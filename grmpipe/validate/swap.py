"""Checks whether the roles of elastic slots can share one engine that swaps their weights. Starts none.

Every refusal is a ConfigError that names the key and what to type.
"""

from __future__ import annotations

from collections.abc import Sequence

from grmpipe.config.engine_kinds import engines_that
from grmpipe.config.roles import Model, Roles, ServedRole
from grmpipe.config.run_config import ConfigError


def check_shared_engine(roles: Roles) -> None:
    """Check that roles on one engine use the same kind, which swaps weights, and no options that exclude each other."""
    for first, others in sharing(roles):
        for role in (first, *others):
            if not role.engine.swaps_weights or type(role.engine) is not type(first.engine):
                able = " or ".join(engines_that(lambda kind: kind.swaps_weights))
                raise ConfigError(
                    f"slots.balance.swap: weights needs engine={able}, but {role.name} is on "
                    f"{role.model.engine}, where "
                    "each role needs a separate engine; type slots.balance.swap=auto"
                )
        for role in (first, *others):
            if role.model.lora.in_engines:
                raise ConfigError(
                    f"{role.key}.lora.sync: {role.name} shares its engine with {', '.join(role.shares_with)} by "
                    "swapping weights, and adapters alone would be on top of other weights; "
                    f"type {role.key}.lora.sync=merged, or slots.balance.swap=auto"
                )
        for other in others:
            refuse(first.engine.different_options(other.engine), first, other)


def check_swap(roles: Roles, models: Sequence[Model]) -> None:
    """Check that models on one engine differ only in their weights."""
    found = {model.name: model for model in models}
    for first, others in sharing(roles):
        for other in (other for other in others if first.name in found and other.name in found):
            refuse(differences(first, other, found[first.name], found[other.name]), first, other)


def sharing(roles: Roles) -> list[tuple[ServedRole, list[ServedRole]]]:
    """The first role and the other roles of each shared engine."""
    seen: set[str] = set()
    found = []
    for role in roles.seated:
        if role.shares_with and role.name not in seen:
            found.append((role, [roles.served[name] for name in role.shares_with]))
            seen |= {role.name, *role.shares_with}
    return found


def differences(one: ServedRole, other: ServedRole, model: Model, others_model: Model) -> list[str]:
    """The differences between two roles that exclude one engine for both."""
    different = one.engine.different_models(model.path, others_model.path)
    if one.dtype != other.dtype:
        different.append(f"dtype ({one.dtype}, {other.dtype})")
    if not model.renderer.means_the_same(others_model.renderer):
        different.append("the tokens of their vocabularies")
    ends = model.renderer.stop_token_ids, others_model.renderer.stop_token_ids
    if set(ends[0]) != set(ends[1]):
        different.append(f"the tokens that end a turn ({ends[0]}, {ends[1]})")
    return different


def refuse(different: list[str], one: ServedRole, other: ServedRole) -> None:
    if not different:
        return
    sleeping = f"engine.{one.model.engine}.sleep_mode=true slots.balance.swap=sleep"
    raise ConfigError(
        f"slots.balance.swap: ({one.name}, {other.name}) can't share the engines of the elastic pool "
        f"{one.pool}, since they "
        f"differ in {', '.join(different)}; type "
        f"{sleeping if one.device == 'cuda' else 'slots.balance.swap=auto'}: each "
        "role then has separate engines"
    )
