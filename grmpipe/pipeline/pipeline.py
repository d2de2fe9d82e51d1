"""The flow, and nothing else. One loop for synchronous and asynchronous training.

                          producer                        flight                     consumer
    prompts -> [admit] -> play -> judge -> (group ends) -> ready -> train: take .. take, step -> push weights -> [room]
                  ^                                                                                                |
                  +------------------------------------------------------------------------------------------------+

admit   consumes prompts,  produces open groups;         waits for room (admission), and for judge and policy to be fit.
play    consumes siblings, produces rollouts;            waits for the policy's engines.
judge   consumes rollouts, produces verdicts;            waits for the GRM's engines; sits when its members are there.
expire  consumes nothing,  ends groups at their deadline.
train   consumes groups,   produces steps and versions;  waits for groups, oldest first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from grmpipe.data.stream import EndOfData
from grmpipe.pipeline.counters import Tally
from grmpipe.pipeline.generation import Producer
from grmpipe.pipeline.group_buffer import Flight
from grmpipe.pipeline.interfaces import Cut, FlowConfig, Kept, Parts, StepReport
from grmpipe.pipeline.stall_times import Waits
from grmpipe.pipeline.training import Consumer
from grmpipe.types import JudgedGroup
from scheduler.admission import Admission
from scheduler.clock import ActiveClock
from scheduler.supervise import run_until


class Pipeline:
    """Runs the flow from a cut until `num_steps` are done, the prompts are over, or somebody interrupts."""

    def __init__(
        self,
        parts: Parts,
        config: FlowConfig,
        after_step: Callable[[StepReport], Awaitable[None]],
        cut: Cut | None = None,
        kept: Mapping[int, Kept] | None = None,
    ) -> None:
        """`kept` holds, by draw, the work that a resume found."""
        cut = cut or Cut()
        self.clock = ActiveClock()
        self.tally = Tally()
        self.after_step = after_step
        self.admission = Admission(
            groups_per_batch=config.groups_per_batch,
            max_staleness=config.max_staleness,
            last_version=config.num_steps,
            version=cut.version,
            dropped=cut.dropped,
        )
        self.flight = Flight(
            self.admission,
            Waits(config.max_staleness),
            parts.journal,
            config.max_no_signal_groups,
            config.algorithm,
        )
        self.producer = Producer(parts, config, self.flight, self.clock, self.tally, cut, kept or {})
        playing = self.producer.playing.meter
        self.consumer = Consumer(parts, config, self.flight, self.clock, playing, self._stepped, cut)

    @property
    def version(self) -> int:
        """Completed optimizer steps of this flow."""
        return self.admission.version

    @property
    def open_batch(self) -> tuple[JudgedGroup, ...]:
        """Groups that were taken and not stepped."""
        return tuple(self.consumer.batch)

    def cut(self) -> Cut:
        """The flow as it stands. Groups taken into the open batch count as in flight: they weren't stepped."""
        in_flight = {group.draw: group.group_id for group in self.flight.groups.values()}
        return Cut(
            version=self.version,
            next_draw=self.producer.next_draw,
            in_flight=self.producer.to_restore | in_flight,
            dropped=dict(self.admission.dropped),
            max_staleness_trained=self.consumer.max_staleness_trained,
            judge_version=self.producer.judge_version,
        )

    def interrupt(self) -> None:
        """Stop at the next place between two steps: `run` raises Interrupted."""
        self.consumer.interrupt()

    async def run(self) -> None:
        """Returns when all steps are done or the prompts are over. The first crash of any stage ends it, as itself."""
        try:
            await run_until(
                self.consumer.run(),
                admit=self.producer.admit(),
                play=self.producer.playing.run(),
                judge=self.producer.judging.run(),
                expire=self.producer.expiring.run(),
            )
        except EndOfData:
            await self.consumer.give_up()

    async def _stepped(self, report: StepReport) -> None:
        self.tally.waited(report.waits)
        await self.after_step(report)
