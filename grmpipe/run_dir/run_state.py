"""The state of a run between two optimizer steps: saved with the weights, found again on resume."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from grmpipe.observe.journal import Mark
from grmpipe.pipeline.interfaces import PipelineState


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run. Seeds are derived from names, so there is no random state to save."""

    pipeline_state: PipelineState = field(default_factory=PipelineState)
    wall_s: float = 0.0  # so far, including before resumes
    totals: Mapping[str, object] = field(default_factory=dict)  # counts of all closed steps
    busy_s: Mapping[str, float] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()  # the cause of each
    run_id: str = ""
    grm_pipeline_states: Mapping[str, PipelineState] = field(default_factory=dict)  # GRMs in training, by role
    journal_marks: Mapping[str, Mark] = field(default_factory=dict)  # journal -> where a resume begins to read
    open_counts: Mapping[str, object] = field(default_factory=dict)  # counts of the step after these
    features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # states of the run's features, by name
    trackers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # states of the run's trackers, by name
    counted_marks: Mapping[str, Mark] = field(default_factory=dict)  # journal -> its end when the counts were taken

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> RunState:
        return msgspec.json.decode(text, type=RunState)
