"""What a run's verdicts say of its judge and its teachers: their health, and the judge's bias by position."""

from grmpipe.judge.monitor.position_bias import PositionBias, bias_metrics
from grmpipe.pipeline.service_health import ServiceHealth
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.types import Failed, JudgeReport, Metrics


class JudgeHealth:
    """Pauses judging above the failure rate, and then stops the run.

    teaching: the same of the teachers' scores; None without teachers.
    """

    def __init__(self, health: ServiceHealth, teaching: ServiceHealth | None = None) -> None:
        self._health = health
        self._teaching = teaching
        self._bias: dict[str, PositionBias] = {}  # by judge; of a single one under no name

    async def until_fit(self, clock: ActiveClock) -> None:
        await self._health.until_fit(clock)
        if self._teaching is not None:
            await self._teaching.until_fit(clock)

    def verdict(self, report: JudgeReport) -> None:
        """Count a verdict. Raises Unfit if it stops the run."""
        for name, own in report.own_reports.items():
            self._bias[name] = self._bias.get(name, PositionBias()).with_judgements(own.judgements)
        if self._teaching is not None and report.taught is not None:
            self._teaching.record(report.taught)
        if isinstance(report.verdict, Failed) and report.verdict.stage == "teacher":
            return  # the judge had a verdict
        failed = [name for name, own in report.by_judge.items() if isinstance(own.verdict, Failed)]
        self._health.record(report.verdict, failed)

    def trip(self, cause: str) -> None:
        """Pause for a cause that no verdict shows. Raises Unfit if it stops the run."""
        self._health.trip(cause)

    def bias_metrics(self) -> Metrics:
        """Order flips, ties and wins of the first place since the last call, also by judge if there are several. Empty
        for judges of single responses.
        """
        metrics, self._bias = bias_metrics(self._bias), {}
        return metrics
