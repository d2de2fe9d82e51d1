"""Engine and learner share a GPU's memory in time. Marked gpu, like all of this folder."""

from __future__ import annotations

import asyncio

import pytest
import torch

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import Completion, RequestContext, SamplingParams
from grmpipe.tiny.resolve import resolve_model
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.offload import OffloadingLearner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

POLICY = resolve_model("tiny://policy")


def test_an_engine_that_slept_gave_its_weights_back_and_draws_as_before() -> None:
    async def go() -> tuple[int, list[Completion]]:
        engine = EmbeddedEngine(
            EngineSpec(path=POLICY, role="policy", device="cuda"), EmbeddedConfig(max_batch_rows=64)
        )
        context = RequestContext(request_id="r", group_id="g", role="policy")
        try:
            drawn = [await engine.generate((5, 6, 7), SamplingParams(max_new_tokens=32), context)]
            await engine.pause()
            freed = await engine.sleep()
            await engine.wake()
            await engine.resume()
            return freed, [*drawn, await engine.generate((5, 6, 7), SamplingParams(max_new_tokens=32), context)]
        finally:
            engine.close()

    freed, (before, after) = asyncio.run(go())
    assert freed > 0
    assert after == before


def test_a_learner_that_waits_on_the_host_has_freed_its_weights_and_scores_as_before() -> None:
    learner = OffloadingLearner(
        LearnerSpec(
            model_path=POLICY, train=TrainConfig(), algorithm=AlgorithmConfig(kl_coefficient=0.1), max_new_tokens=8,
            device="cuda",
        )
    )  # fmt: skip
    scored = learner.score((5, 6, 7, 8))
    assert learner.keep_on_device("weights") > 0, "the reference"
    assert learner.keep_on_device("nothing") > 0
    learner.keep_on_device("weights")
    assert learner.score((5, 6, 7, 8)) == scored
