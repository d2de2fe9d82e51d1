"""A workflow for AReaL that asks a judge of `task=serve`.

The interface was read in AReaL 1.0.4: areal/workflow/rlvr.py; areal/api/reward_api.py, whose wrapper gives 0 after four
times 15 s and isn't used here; `_execute_workflow` in areal/infra/workflow_executor.py, which rejects a group where an
episode raises; and `Normalization` in areal/utils/data.py, which needs whole groups.
"""

from collections.abc import Sequence
from typing import Any

from areal.workflow.rlvr import RLVRWorkflow

from grmpipe.clients.judge_client import JudgeClient


class JudgedRLVRWorkflow(RLVRWorkflow):  # type: ignore[misc]
    """RLVRWorkflow with the judge at `url` in place of a reward function; further arguments are those of RLVRWorkflow.

    columns: those of the dataset that the judge is sent; None: all.
    """

    def __init__(
        self,
        url: str,
        *args: Any,
        columns: Sequence[str] | None = None,
        key_env: str | None = None,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        super().__init__(self._judge, *args, **options)
        self._client = JudgeClient(url, key_env=key_env, timeout_s=timeout_s)
        self._columns = columns
        self.async_reward_fn = self._judge

    async def _judge(
        self, prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], /, **data: Any
    ) -> float:
        """Raises NotJudgedError where the judgement failed."""
        names = data if self._columns is None else self._columns
        verdict = await self._client.ask_one(
            self.data_extract_prompt_fn(data),
            self.tokenizer.decode(completion_ids, skip_special_tokens=True),  # `completion` ends in the end token
            **{name: data[name] for name in names},
        )
        return float(verdict["reward"])
