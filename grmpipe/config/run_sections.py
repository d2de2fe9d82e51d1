"""All that a user can set for a run, by section, as it is typed."""

import re
from dataclasses import dataclass, field

from grmpipe.config.budget import BudgetConfig
from grmpipe.config.critic import CriticConfig
from grmpipe.config.data import DataConfig, RolloutConfig
from grmpipe.config.env import EnvConfig
from grmpipe.config.grm import GrmConfig
from grmpipe.config.journals import JournalsConfig
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.judge_monitor import JudgeMonitorConfig
from grmpipe.config.reward import RewardConfig
from grmpipe.config.task_settings import (
    AnnotateConfig,
    CalibrateConfig,
    EvaluateConfig,
    MetaRmConfig,
    PlanConfig,
    PlayConfig,
    ProbeConfig,
    RejudgeConfig,
    ScoreConfig,
    ServeConfig,
    SimulateConfig,
)
from grmpipe.config.tracking import TrackingConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.settings import EngineConfig, PolicyConfig
from grmpipe.scheduler.placement import ClusterConfig, PlacementConfig
from grmpipe.scheduler.slots.engine_replacement import HealthConfig
from grmpipe.scheduler.weights.weight_push import SyncConfig

TASKS = (
    "train", "train_judge_rft", "train_meta_rm", "evaluate", "calibrate", "probe_judge", "score", "serve",
    "rejudge", "play", "plan", "simulate", "report", "runs", "view", "doctor", "new",
)  # fmt: skip
RESUMES = ("never", "auto")


# task=new: a project of your own to begin with.
@dataclass(frozen=True)
class NewConfig:
    """The new project."""

    dir: str | None = None  # Folder of the new project, which must be empty or not there.


@dataclass(frozen=True)
class RunKeys:
    """The keys of a run outside all sections."""

    # The task: train a model, imitate a GRM's own right critiques, train a meta-RM, measure a judge, calibrate it, try
    # tricks on it (probe_judge), judge a file of responses (score), serve the judge to other programs, judge a run's
    # rollouts again, plan or simulate the run, write a run's report, show runs in a browser, check what is installed,
    # or write a new project.
    task: str = "train"
    experiment_name: str = "default"  # Name of the run, and of its folder in runs/.
    seed: int = 0  # Seed of all random draws: the order of prompts, sampling, judging, the split of batches.
    # Directory of the run; null: a new one, runs/<experiment_name>/<date>_<time>.
    run_dir: str | None = None
    # Continue the run in run_dir (null: the experiment's newest of the same task) from its last complete checkpoint, if
    # there is one (auto), or start a new run (never).
    resume: str = "never"
    # Path to a number in summary.json, which the run returns to a sweep.
    objective: str = "eval.final.grm_score"

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task: unknown task {self.task!r}; known: {', '.join(TASKS)}")
        if self.resume not in RESUMES:
            raise ValueError(
                f"resume: unknown value {self.resume!r}; known: {', '.join(RESUMES)}; to continue a run type "
                "resume=auto run_dir=<its folder>"
            )
        if not re.fullmatch(r"[\w-][\w.-]*", self.experiment_name):  # it names a folder under runs/
            raise ValueError(
                "experiment_name: may hold letters, digits, '_', '-' and, not as the first, '.', got "
                f"{self.experiment_name!r}"
            )
        if self.run_dir == "":
            raise ValueError("run_dir: is empty; give a directory, or type run_dir=null for a new one in runs/")


@dataclass(frozen=True)
class NamedSections:
    """The models, judges and compositions: the first one of each kind has a section, further ones have names."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    grm: GrmConfig = field(default_factory=lambda: GrmConfig(path="tiny://grm"))
    # Further models that judge: `+grm@models.<name>=<file>`. The name is the role of its engines in the placement.
    models: dict[str, GrmConfig] = field(default_factory=dict)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    # Further judges: `+judge@judges.<name>=<file>`.
    judges: dict[str, JudgeConfig] = field(default_factory=dict)
    reward: RewardConfig = field(default_factory=RewardConfig)
    # Further compositions, which others name: `+reward@rewards.<name>=<file>`.
    rewards: dict[str, RewardConfig] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotsConfig:
    """The processes on slots: those that die are replaced."""

    health: HealthConfig = field(default_factory=HealthConfig)


@dataclass(frozen=True)
class SharedSections:
    """The sections that a run reads as they are typed."""

    meta_rm: MetaRmConfig = field(default_factory=MetaRmConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    slots: SlotsConfig = field(default_factory=SlotsConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    journals: JournalsConfig = field(default_factory=JournalsConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    judge_monitor: JudgeMonitorConfig = field(default_factory=JudgeMonitorConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    rejudge: RejudgeConfig = field(default_factory=RejudgeConfig)
    annotate: AnnotateConfig = field(default_factory=AnnotateConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    play: PlayConfig = field(default_factory=PlayConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    new: NewConfig = field(default_factory=NewConfig)


@dataclass(frozen=True)
class RunSections(SharedSections, NamedSections, RunKeys):
    """All that a user can set, by section."""
