"""A reward manager for verl that asks a judge of `task=serve`. A manager is given the prompt's messages and the id of
its group, which a reward function isn't.

The interface was read in verl 0.9.1: verl/experimental/reward_loop/reward_manager/base.py and naive.py, and
`_compute_score` in verl/experimental/agent_loop/agent_loop.py, which calls it for one response at a time.
"""

from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from grmpipe.clients.judge_client import JudgeClient

COLUMNS = ("data_source", "reward_model", "extra_info")  # from which the service takes source and reference


class JudgeRewardManager(RewardManagerBase):  # type: ignore[misc]
    """Settings stand in verl's `reward.reward_kwargs`: judge_url, judge_key_env, judge_timeout_s."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: object,
        reward_router_address: str | None = None,
        reward_model_tokenizer: object = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        given = config.reward.get("reward_kwargs") or {}
        if not given.get("judge_url"):
            raise ValueError(
                "reward.reward_kwargs.judge_url: type +reward.reward_kwargs.judge_url=http://127.0.0.1:8710"
            )
        self._client = JudgeClient(
            given["judge_url"], key_env=given.get("judge_key_env"), timeout_s=given.get("judge_timeout_s", 600.0)
        )

    async def run_single(self, data: Any) -> dict[str, Any]:
        """The reward of a response, from 0 to 1, and the same further keys for each. Raises NotJudgedError where the
        judgement failed.
        """
        item = data[-1:][0]  # of several sequences the last is judged, as in verl's own managers
        columns, tokens_T = item.non_tensor_batch, item.batch["responses"]  # T: padded tokens of the response
        length = int(item.batch["attention_mask"][-tokens_T.shape[-1] :].sum())
        response = self.tokenizer.decode(tokens_T[:length], skip_special_tokens=True)
        verdict = await self._client.ask_one(
            list(columns["raw_prompt"]),
            response,
            **{name: columns[name] for name in COLUMNS if name in columns},
            prompt_id=columns.get("uid"),
            step=columns.get("global_steps"),
        )
        return {
            "reward_score": verdict["reward"],
            "reward_extra_info": {
                "judge_score": verdict["score"],
                "judge_version": verdict["version"],
                "critique": "\n\n".join(verdict["critiques"]),
            },
        }
