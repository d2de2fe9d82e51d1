"""Splits a batch's groups over its updates. Pure."""

import random
from collections.abc import Iterable

from grmpipe.models.seeds import derive_seed


def shuffle_into_updates(group_ids: Iterable[str], num_updates: int, seed: int, version: int) -> list[set[str]]:
    """`num_updates` nearly equal sets, shuffled with `seed` for the batch after `version`. With fewer ids the last ones
    are empty: their updates are skipped.

    The order of the ids doesn't matter: groups arrive by length, and the longest would always come last, when the
    weights have moved most.
    """
    ids = sorted(set(group_ids))
    random.Random(derive_seed(seed, f"updates after version {version}")).shuffle(ids)
    return [set(ids[update::num_updates]) for update in range(num_updates)]
