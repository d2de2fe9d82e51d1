"""A judge that asks a GRM: opens the judge session of its protocol for each group."""

import functools
from collections.abc import Callable
from typing import cast

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.judge_protocols import PROTOCOLS
from grmpipe.config.keys.dotted_path import find_at
from grmpipe.judge.calibration import read_for
from grmpipe.judge.checked_judge import CheckedJudge
from grmpipe.judge.evolving_rubric import EvolvingRubric
from grmpipe.judge.grm import Grm, GrmClient
from grmpipe.judge.meta_rm import MetaRm
from grmpipe.judge.pointwise_adapter import judge_alone
from grmpipe.judge.prompt import JudgePrompt, PrinciplesPrompt
from grmpipe.judge.protocols.group_session import Decode, JudgeContext
from grmpipe.judge.votes import JudgeVote
from grmpipe.types import Judge, JudgeReport, JudgeSession, Prompt, Rollout

Open = Callable[[JudgeContext, Prompt, str, int], JudgeSession]


class GenerativeJudge:
    """A judge by `judge.protocol`. Raises ValueError for settings that lack something they need.

    seed:   makes every judgement repeatable by its request_id.
    meta:   weights the judgements in the votes `weighted` and `best`.
    decode: the policy's tokens as text, for a protocol that scores steps.
    evolving: the rubric, if it changes in the run.
    """

    def __init__(
        self,
        grm: Grm,
        config: JudgeConfig,
        seed: int,
        meta_rm: MetaRm | None = None,
        decode: Decode | None = None,
        evolving: EvolvingRubric | None = None,
    ) -> None:
        self._open = cast(Open, find_at(config.protocol_kind.session, "judge.protocol"))
        self._context = JudgeContext(
            client=GrmClient(grm, config, seed),
            config=config,
            template=JudgePrompt.of(config),
            principles_template=PrinciplesPrompt.of(config),
            vote=JudgeVote(config, meta_rm),
            decode=decode,
            seed=seed,
            calibration=read_for(config) if config.compares_pairs else None,
            evolving=evolving,
        )

        self._own: Judge | None = None  # a protocol of the user's, behind its door
        if config.protocol not in PROTOCOLS:
            opens = functools.partial(self._open, self._context)
            self._own = CheckedJudge(opens, self._open, f"{config.key}.protocol")

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        if self._own is not None:
            return self._own.open(prompt, group_id, size)
        return self._open(self._context, prompt, group_id, size)

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        """Judge a rollout without siblings."""
        return await judge_alone(self, prompt, rollout, priority)
