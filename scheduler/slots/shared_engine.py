"""One engine for all roles of a slot, with a view for each role.

    it belongs to the role whose weights it was last sent; no other role may request tokens

A dead engine is dead for all its roles. The first role that replaces it restarts it, the others use the new one.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from grmpipe.models.types import (
    Completion,
    Engine,
    GroupLink,
    KeepsTrajectories,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightReceipt,
    ignore_first_token,
)
from grmpipe.scheduler.slots.engine_replacement import Restart


@dataclass(slots=True, eq=False)
class SharedEngine:
    """The engine of a slot, and the role whose weights it has or is being sent."""

    engine: Engine
    role: str


class RoleEngine:
    """One role's view of a shared engine. It takes the engine over when it is sent weights."""

    def __init__(self, role: str, shared: SharedEngine) -> None:
        self.shared = shared
        self._role = role

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        completion = await self._own.generate(prompt_ids, params, context, on_first_token)
        spans = tuple(replace(span, model=self._role) for span in completion.versions)
        return replace(completion, versions=spans)

    async def abort(self, request_id: str) -> None:
        """Abort a request of any role; also used to find dead engines."""
        await self.shared.engine.abort(request_id)

    def end_trajectory(self, trajectory_id: str) -> None:
        if isinstance(self.shared.engine, KeepsTrajectories):
            self.shared.engine.end_trajectory(trajectory_id)

    async def pause(self) -> None:
        await self.shared.engine.pause()

    async def resume(self) -> None:
        await self.shared.engine.resume()

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        await self.shared.engine.begin_weights(link)  # the owner of a dead engine doesn't matter
        self.shared.role = self._role

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await self._own.load_bucket(bucket)

    async def commit_weights(self, version: int) -> WeightReceipt:
        return await self._own.commit_weights(version)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        return await self._own.score(token_ids)

    @property
    def _own(self) -> Engine:
        assert self.shared.role == self._role, f"the engine has the weights of {self.shared.role}, not of {self._role}"
        return self.shared.engine


class SharedEngines:
    """The shared engines of a pool: one per slot, with a view for each role."""

    def __init__(
        self, slots: Mapping[str, Mapping[str, str]], owner: str, engines: Mapping[str, Engine], restart: Restart
    ) -> None:
        """slots: slot -> role -> name of its engine for that role. owner: the role that the engines start as, with the
        weights of its files; `engines` and `restart` use its names.
        """
        self._slots, self._owner, self._restart = slots, owner, restart
        self._turns = {name: asyncio.Lock() for name in engines}
        self._shared = {name: SharedEngine(engine, owner) for name, engine in engines.items()}
        self._seen = {
            name: RoleEngine(role, self._shared[names[owner]])
            for names in slots.values()
            for role, name in names.items()
        }

    def list_engines(self, role: str) -> dict[str, Engine]:
        """The engines under the role's names."""
        return {names[role]: self._seen[names[role]] for names in self._slots.values()}

    async def restart(self, name: str) -> Engine:
        """Return a living engine instead of a dead one; `name`: any role's name for it."""
        role, own_name = next(
            (role, names[self._owner]) for names in self._slots.values() for role in names if names[role] == name
        )
        async with self._turns[own_name]:
            if self._seen[name].shared is self._shared[own_name]:
                self._shared[own_name] = SharedEngine(await self._restart(own_name), self._owner)
            self._seen[name] = RoleEngine(role, self._shared[own_name])
            return self._seen[name]
