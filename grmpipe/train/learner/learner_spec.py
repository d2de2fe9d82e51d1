"""The spec of a learner. Imports no torch."""

from dataclasses import dataclass, field

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.settings import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """What a rank needs to build its learner.

    temperature: the rollouts'. The sampler's log-probs are after temperature, so the learner's must be too.
    transport: how weights leave the learner, a name in TRANSPORTS or the dotted path of a user's own.
    sync_dir: folder for a transport that needs one; every engine must be able to read it.
    delta: whether pushes are of what changed since the last one, where engines have it.
    checkpoint_names: whether weights are sent under the names in the model's checkpoints instead of the module's names.
    first_version: version of the first batch that it trains on; earlier ones train only the critic.
    lora: adapters that are trained instead of the model's weights; adapter_dir: where they are exported.
    seed: for new adapters; the same on all ranks.
    """

    model_path: str
    train: TrainConfig
    algorithm: AlgorithmConfig
    max_new_tokens: int
    device: str = ""  # "cpu" or "cuda"; empty: chosen by torch
    sync_dtype: str = "float32"  # in which engines get weights
    bucket_bytes: int = 0  # most weights sent at once; 0: chosen by the size of the model
    checkpoint_names: bool = False
    transport: str = "object_store"
    sync_dir: str = ""
    delta: bool = False
    temperature: float = 1.0
    first_version: int = 0
    master_dtype: str = "float32"
    lora: LoraConfig = field(default_factory=LoraConfig)
    adapter_dir: str = ""
    seed: int = 0

    @property
    def frozen_dtype(self) -> str:
        """The dtype of weights that are never updated: a reference, the weights beside adapters."""
        return choose_frozen_dtype(self.train.dtype, self.master_dtype)


def choose_frozen_dtype(dtype: str, master_dtype: str = "float32") -> str:
    """The dtype in which weights are held that are never updated, by the one they compute in (`train.dtype`)."""
    return "bfloat16" if dtype == "bfloat16" else master_dtype
