"""The statistics that vLLM's core reports at every step. Changes nothing in vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.types import Pressure

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerBase
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class PressureGauge:
    """The last readings. AsyncLLM takes `make_logger` as a stat logger."""

    def __init__(self) -> None:
        self.pressure = Pressure(num_running=0, num_waiting=0, kv_share=0.0, num_preempted=0)

    def update(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        last, preempted = self.pressure, 0 if iteration is None else iteration.num_preempted_reqs
        self.pressure = Pressure(
            num_running=last.num_running if scheduler is None else scheduler.num_running_reqs,
            num_waiting=last.num_waiting if scheduler is None else scheduler.num_waiting_reqs,
            kv_share=last.kv_share if scheduler is None else scheduler.kv_cache_usage,
            num_preempted=last.num_preempted + preempted,
        )

    def make_logger(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        from vllm.v1.metrics.loggers import StatLoggerBase

        gauge = self

        class Logger(StatLoggerBase):
            def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
                return None

            def record(
                self,
                scheduler_stats: SchedulerStats | None,
                iteration_stats: IterationStats | None,
                mm_cache_stats: MultiModalCacheStats | None = None,
                engine_idx: int = 0,
            ) -> None:
                gauge.update(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                return None

        return Logger(vllm_config, engine_index)
