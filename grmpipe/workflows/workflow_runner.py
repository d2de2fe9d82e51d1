"""A run's workflow: where its episodes run, and the gateway that they share. Plays none before it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from grmpipe.config.dotted_path import found_at
from grmpipe.config.env import EnvConfig
from grmpipe.config.user_code import described
from grmpipe.envs.blame import fault_rules
from grmpipe.envs.isolation.seat_counts import SeatCounts
from grmpipe.envs.play import Play
from grmpipe.workflows.play_workflow import Solver, WorkflowLimits, workflow_play
from grmpipe.workflows.recorder import Recorder
from grmpipe.workflows.server import Gateway, check_gateway_installed


class WorkflowRunner:
    """The workflow that the settings name. Raises ValueError, which begins with the key, for one that can't run.

    counts: what became of the episodes' workflows.
    """

    def __init__(self, config: EnvConfig) -> None:
        place = config.workflow_place
        if place.by_url:
            check_gateway_installed()
        make = cast(Callable[[object, Mapping[str, object]], Solver], found_at(place.path, "runs_in"))
        self._solver = make(getattr(config, place.needs), config.options)
        self._gateway = Gateway()
        self.counts = SeatCounts()
        self._rules = fault_rules(config.policy_errors)
        program = f"the program {' '.join(config.command)}"
        self._owner = program if config.command else described(found_at(config.target, "target"))
        self._limits = WorkflowLimits(episode_s=config.episode_s, step_s=config.step_s, close_s=config.close_s)

    def play(self, recorder: Recorder) -> Play:
        return workflow_play(self._solver, recorder, self._gateway, self._limits, self.counts, self._rules, self._owner)

    async def close(self) -> None:
        await self._solver.close()
        await self._gateway.close()
