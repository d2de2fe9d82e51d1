"""Settings of task=evaluate, of rejection-sampling fine-tuning and of the meta-RM. Frozen, checked; opens no file."""

from __future__ import annotations

from dataclasses import dataclass, field

from models.settings import DTYPES


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of `task=evaluate`, which measures a judge against labels."""

    # Labelled judgements: a .jsonl, .json or .parquet file (docs/evaluating.md lists the schemas), or
    # tiny://judgements_held_out.
    path: str = "tiny://judgements_held_out"
    num_items: int = 512  # [items] Items made for tiny://, or the first ones of a file.
    # [judgements] Numbers of judgements per vote, ascending; only the largest is sampled, the others are subsets.
    ks: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    max_subsets: int = 32  # [subsets] Most subsets of an item's judgements for each smaller k.
    max_concurrency: int = 64  # [items] Most items in flight.

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: is empty; give a file, or type evaluate.path=tiny://judgements_held_out")
        for key, count in (
            ("num_items", self.num_items), ("max_subsets", self.max_subsets), ("max_concurrency", self.max_concurrency)
        ):  # fmt: skip
            if count < 1:
                raise ValueError(f"{key}: must be at least 1, got {count}")
        if not self.ks or min(self.ks) < 1 or sorted(set(self.ks)) != list(self.ks):
            raise ValueError(f"ks: must be numbers from 1 on, each larger than the one before, got {self.ks}")


@dataclass(frozen=True)
class RftConfig:
    """Rejection-sampling fine-tuning: a GRM imitates its own right critiques (SPCT, arXiv 2504.02495, section 3.2)."""

    # [critiques] Critiques sampled per judging task; a task with only right ones is dropped as too easy.
    num_samples: int = 3
    # If no critique is right, sample one with the label shown; if it is right, it is trained without the label.
    hint: bool = True
    num_epochs: int = 2  # [epochs] Passes over the critiques that are kept.
    critiques_per_batch: int = 32  # [critiques] Critiques of one optimizer step.

    def __post_init__(self) -> None:
        for key in ("num_samples", "num_epochs", "critiques_per_batch"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: must be at least 1, got {getattr(self, key)}")


@dataclass(frozen=True)
class MetaRmConfig:
    """The meta-RM: a model with a scalar head and the GRM's tokenizer that judges judgements."""

    # Meta-RM for the votes weighted and best: `meta_rm` in the directory of a run of task=train_meta_rm, a Hugging Face
    # directory or hub name, or tiny://meta_rm.
    path: str | None = None
    dtype: str = "float32"  # Type of the trunk; the head is always float32.
    max_batch_tokens: int = 16384  # Most tokens of a forward pass; a longer judgement has its own pass.
    # Language model or meta-RM that task=train_meta_rm starts from; null: the GRM.
    start_path: str | None = None
    # Labelled judgements that task=train_meta_rm reads instead of sampling: judgements.jsonl of an earlier such run.
    judgements: str | None = None

    def __post_init__(self) -> None:
        for key in ("path", "start_path", "judgements"):
            if getattr(self, key) == "":
                raise ValueError(f"{key}: is empty; give a path, or null for none")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        if self.max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens: must be at least 1, got {self.max_batch_tokens}")
