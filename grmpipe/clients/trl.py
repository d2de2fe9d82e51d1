"""A reward function for TRL's trainers that asks a judge of `task=serve`.

How reward functions are called, and what None means, was read in TRL 1.16.0, trl/trainer/grpo_trainer.py:
`_calculate_rewards` and `_generate_and_score_completions`.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from grmpipe.clients.judge_client import JudgeClient, NotJudgedError, RemoteVerdict

log = logging.getLogger(__name__)


class JudgeReward:
    """`reward_funcs=JudgeReward("http://127.0.0.1:8710")`: the reward of each completion from 0 to 1, None where the
    judgement failed. TRL leaves such a completion out of its group's mean, and gives it the advantage 0.

    Completions that follow each other, to the same prompt and with the same columns, are judged as one group. columns:
    those of the dataset that the judge is sent; None: all. Other arguments are those of JudgeClient.
    """

    def __init__(
        self, url: str, *, columns: Sequence[str] | None = None, key_env: str | None = None, timeout_s: float = 600.0
    ) -> None:
        self._client = JudgeClient(url, key_env=key_env, timeout_s=timeout_s)
        self._columns = columns
        self._has_warned = False
        self._seen_causes = set[str]()

    async def __call__(
        self,
        prompts: Sequence[object],
        completions: Sequence[object],
        *,
        completion_ids: object = None,
        trainer_state: object = None,
        environments: object = None,
        log_extra: Callable[[str, list[str]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Sequence[object],
    ) -> list[float | None]:
        self._warn_of_others(log_metric)
        if self._columns is not None:
            for name in self._columns:
                if name not in columns:
                    raise ValueError(
                        f"columns: the dataset has no {name!r}; its columns: {', '.join(columns) or 'none'}"
                    )
            columns = {name: columns[name] for name in self._columns}
        step = getattr(trainer_state, "global_step", None)  # the service writes it down
        rows = [
            (prompt, {"step": step} | {name: columns[name][at] for name in columns})
            for at, prompt in enumerate(prompts)
        ]
        groups = [list(places) for _, places in itertools.groupby(range(len(rows)), key=rows.__getitem__)]
        judged = await asyncio.gather(
            *(self._ask(*rows[places[0]], [completions[at] for at in places]) for places in groups)
        )
        unanswered = [one for one in judged if isinstance(one, NotJudgedError)]
        if unanswered and len(unanswered) == len(judged):
            raise unanswered[0]  # nothing can be learnt from this batch: the service is gone
        verdicts = [
            one
            for answer, places in zip(judged, groups, strict=True)
            for one in (not_judged(answer, len(places)) if isinstance(answer, NotJudgedError) else answer)
        ]
        self._warn_of_failures(verdicts)
        rewards: list[float | None] = [one["reward"] for one in verdicts]
        if log_metric is not None:
            log_metric("judge_failed", rewards.count(None) / len(rewards))
        if log_extra is not None:
            log_extra("judge_failed", [one.get("failed") or "" for one in verdicts])
            log_extra("critique", ["\n\n".join(one["critiques"]) for one in verdicts])
        return rewards

    async def _ask(
        self, prompt: object, columns: dict[str, object], completions: Sequence[object]
    ) -> list[RemoteVerdict] | NotJudgedError:
        try:
            return await self._client.ask(prompt, completions, **columns)
        except NotJudgedError as error:
            log.warning("%d completions have no reward: %s", len(completions), error)
            return error

    def _warn_of_failures(self, verdicts: Sequence[RemoteVerdict]) -> None:
        """Say each cause once, with an example: where all fail, TRL only says that no function gave a reward."""
        for one in verdicts:
            cause = one.get("failed") or ""
            if cause and cause not in self._seen_causes:
                self._seen_causes.add(cause)
                log.warning("a completion has no reward (judge_failed): %s: %s", cause, one.get("detail") or "")

    def _warn_of_others(self, log_metric: Callable[[str, float], None] | None) -> None:
        """None beside the number of another function counts as 0 in TRL's sum, which the trainer doesn't say."""
        functions = getattr(getattr(log_metric, "__self__", None), "reward_funcs", ())
        if len(functions) > 1 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "JudgeReward is one of %d reward functions. Where a judgement fails, TRL counts it as 0 in their sum. "
                "Let the judge be the only reward function, and mix inside grmpipe (reward=mix)",
                len(functions),
            )


def not_judged(error: NotJudgedError, count: int) -> list[RemoteVerdict]:
    return [{"reward": None, "critiques": [], "failed": "no_answer", "detail": str(error)}] * count
