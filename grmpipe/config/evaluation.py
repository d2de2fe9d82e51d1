"""Settings of task=evaluate, of rejection-sampling fine-tuning and of the meta-RM. Frozen, checked; opens no file."""

from __future__ import annotations

from dataclasses import dataclass, field

from models.settings import DTYPES


@dataclass(frozen=True)
class EvaluateConfig:
    """How a judge is measured against labels.

    path: a .jsonl, .json or .parquet file, or tiny://judgements_held_out; docs/evaluating.md lists the schemas.
    """

    path: str = "tiny://judgements_held_out"
    num_items: int = 512  # made for tiny://; of a file, the first ones
    ks: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])  # sampled once, at the largest
    max_subsets: int = 32  # of the judgements of an item, for each smaller k: all, or so many drawn by the seed
    width: int = 64  # items in flight

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: is empty; give a file, or type evaluate.path=tiny://judgements_held_out")
        for key, count in (
            ("num_items", self.num_items), ("max_subsets", self.max_subsets), ("width", self.width)
        ):  # fmt: skip
            if count < 1:
                raise ValueError(f"{key}: must be at least 1, got {count}")
        if not self.ks or min(self.ks) < 1 or sorted(set(self.ks)) != list(self.ks):
            raise ValueError(f"ks: must be numbers from 1 on, each larger than the one before, got {self.ks}")


@dataclass(frozen=True)
class FinetuneConfig:
    """A GRM imitates those of its own critiques that were right (SPCT, arXiv 2504.02495, section 3.2)."""

    num_samples: int = 3  # of each lesson; where all are right it is too easy, and dropped
    hint: bool = True  # where none is right, one more sample is shown the label, and trained without it if right
    num_epochs: int = 2  # over what is kept
    critiques_per_batch: int = 32  # of one optimizer step

    def __post_init__(self) -> None:
        for key in ("num_samples", "num_epochs", "critiques_per_batch"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: must be at least 1, got {getattr(self, key)}")


@dataclass(frozen=True)
class MetaConfig:
    """The meta-RM, a model with a scalar head that shares the GRM's tokenizer.

    path:       what guides the votes `weighted` and `best`: `meta` in the directory of a run of task=train_meta, a
                Hugging Face directory or hub name, or tiny://meta.
    start_path: what task=train_meta starts from, a language model or a meta-RM; null: the GRM.
    judgements: labelled ones that task=train_meta reads instead of sampling them: judgements.jsonl of such a run.
    """

    path: str | None = None
    dtype: str = "float32"
    max_batch_tokens: int = 16384  # of a forward pass; a longer judgement goes by itself
    start_path: str | None = None
    judgements: str | None = None

    def __post_init__(self) -> None:
        for key in ("path", "start_path", "judgements"):
            if getattr(self, key) == "":
                raise ValueError(f"{key}: is empty; give a path, or null for none")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        if self.max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens: must be at least 1, got {self.max_batch_tokens}")
