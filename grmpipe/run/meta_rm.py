"""The meta-RM of a run: found, checked against the GRM, served. Trains nothing, votes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from grmpipe.config.roles import Model, device_of
from grmpipe.config.run_config import RunConfig
from grmpipe.judge.meta_rm import MetaRm
from models.engines.scorer import ScalarScorer, ScorerSpec
from models.hub import find_files
from models.lm.packed_check import check_packable
from models.lm.scalar_head import outline_scalar_head, scalar_config
from models.renderer import Renderer
from models.tiny.resolve import resolve_model
from scheduler.events import EventSink
from scheduler.placement import Placement
from scheduler.processes.actors import Cluster
from scheduler.routing.scorers import ScorerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaModel:
    """A directory with a scalar head, which reads the GRM's own tokens."""

    path: str
    context_tokens: int


def find_meta(config: RunConfig, grm: Model, progress: Callable[[str, float], None]) -> MetaModel:
    """Raises ValueError (`path: ...`) for what has no scalar head, or another tokenizer."""
    assert config.meta.path is not None
    directory = find_files(resolve_model(config.meta.path, progress), weights=True)
    scalar_config(directory)
    check_packable(outline_scalar_head(directory), directory)
    return MetaModel(path=directory, context_tokens=shared_window(directory, config, grm))


def shared_window(directory: str, config: RunConfig, grm: Model) -> int:
    """The window of a model that reads what the GRM read and wrote. Raises ValueError for other tokens."""
    try:
        renderer = Renderer.load(directory, config.grm.chat_template)
    except ValueError as error:
        if not str(error).startswith("chat_template"):
            raise
        raise ValueError(
            f"path: the tokenizer in {directory} has no chat template; copy the GRM's tokenizer files there"
        ) from error
    if not renderer.means_the_same(grm.renderer):
        raise ValueError(
            f"path: {directory} has another tokenizer than the GRM ({config.grm.path}), and a meta-RM reads the GRM's "
            "own tokens; give one that was trained from this GRM or its base (+experiment=train_meta_rm)"
        )
    return renderer.context_tokens


async def start_scorers(
    cluster: Cluster, meta: MetaModel | None, config: RunConfig, placement: Placement, events: EventSink
) -> ScorerPool | None:
    """A process on each seat of the role, seen as one scorer; None where no meta-RM guides the vote."""
    if meta is None:
        return None
    spec = ScorerSpec(
        path=meta.path,
        dtype=config.meta.dtype,
        device=device_of("meta", placement),
        max_batch_tokens=config.meta.max_batch_tokens,
    )
    group = await cluster.start_group("meta", functools.partial(ScalarScorer, spec))
    return ScorerPool(
        "meta",
        group,
        restart=functools.partial(cluster.restart_member, "meta"),
        max_replacements=config.health.max_replacements,
        max_batch_tokens=config.meta.max_batch_tokens,
        events=events,
    )


def guide_of(meta: MetaModel | None, scorers: ScorerPool | None) -> MetaRm | None:
    """What a vote asks."""
    if meta is None or scorers is None:
        return None
    return MetaRm(scorer=scorers, context_tokens=meta.context_tokens)
