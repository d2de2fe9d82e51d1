"""The model of a meta-RM: finds it, and checks it against the GRM. Loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grmpipe.config.roles import Model
from grmpipe.config.run_config import RunConfig
from grmpipe.data.catalogs import resolve_model
from models.chat.renderer import Renderer
from models.hub import find_files


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaRmModel:
    """A directory of a model with a scalar head. It reads the GRM's tokens."""

    path: str
    context_tokens: int


def find_meta_rm(config: RunConfig, grms: Sequence[Model], progress: Callable[[str, float], None]) -> MetaRmModel:
    """Find the meta-RM of these GRMs. Raises ValueError (`path: ...`) if it has no scalar head, or another tokenizer
    than one whose votes it weights.
    """
    assert config.meta_rm.path is not None
    directory = find_files(resolve_model(config.meta_rm.path, progress), weights=True)
    from models.lm.packed_check import check_packable  # late: seconds, which few runs need
    from models.lm.scalar_head import outline_scalar_head, scalar_config

    scalar_config(directory)
    check_packable(outline_scalar_head(directory), directory)
    windows = [shared_context_limit(directory, config, grm) for grm in grms]
    return MetaRmModel(path=directory, context_tokens=min(windows))


def shared_context_limit(directory: str, config: RunConfig, grm: Model) -> int:
    """The context window of a model that reads what the GRM read and wrote. Raises ValueError for another tokenizer."""
    try:
        renderer = Renderer.load(directory, config.models[grm.name].chat_template)
    except ValueError as error:
        if not str(error).startswith("chat_template"):
            raise
        raise ValueError(
            f"path: the tokenizer in {directory} has no chat template; copy the GRM's tokenizer files there"
        ) from error
    if not renderer.means_the_same(grm.renderer):
        raise ValueError(
            f"path: {directory} has a different tokenizer than {grm.name} ({config.models[grm.name].path}), "
            "and a meta-RM reads the GRM's own tokens; give one that was trained from this GRM or its base "
            "(+experiment=train_meta_rm)"
        )
    return renderer.context_tokens
