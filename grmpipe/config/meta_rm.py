"""What a user can set about the meta-RM: the model that guides a vote, and how one is trained. Opens no file."""

from __future__ import annotations

from dataclasses import dataclass

from models.settings import DTYPES


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
