"""A judge for tasksets of verifiers, and with them prime-rl, that asks one of `task=serve`.

The interface was read in verifiers 0.4.0: verifiers/v1/judge.py, verifiers/v1/judges/reference.py and `Task.score` in
verifiers/v1/task.py, where what a judge raises becomes an error of the rollout.
"""

from verifiers.v1.configs.judge import JudgeConfig
from verifiers.v1.judge import Judge, JudgeResponse, JudgeView, judge_question, judge_response
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from grmpipe.clients.judge_client import JudgeClient

__all__ = ["GrmpipeJudge", "GrmpipeJudgeConfig"]


class GrmpipeJudgeConfig(JudgeConfig):  # type: ignore[misc]
    """base_url: the service; api_key_var: the environment variable that holds its key, empty for none."""

    name: str = "grmpipe"
    base_url: str = "http://127.0.0.1:8710"
    api_key_var: str = ""
    timeout_s: float = 600.0
    """Seconds that a judgement may take, with its retries."""
    question_field: str = ""
    """Field of the task that holds the question; empty: its prompt."""
    answer_field: str = ""
    """Field of the task that holds the reference; empty: none."""
    view: JudgeView = "last_reply"


class GrmpipeJudge(Judge[float, GrmpipeJudgeConfig]):  # type: ignore[misc]
    """The reward of a rollout, from 0 to 1. Raises NotJudgedError where the judgement failed."""

    async def score(self, task: TaskData, trace: Trace) -> float:
        config = self.config
        prompt, response = judge_question(task, config.question_field), judge_response(trace, config.view)
        reference = getattr(task, config.answer_field) if config.answer_field else None
        client = JudgeClient(config.base_url, key_env=config.api_key_var or None, timeout_s=config.timeout_s)
        verdict = await client.ask_one(prompt, response, reference=reference)
        critique = "\n\n".join(verdict["critiques"])
        trace.record_judge_call(
            name=self.reward_name,
            request={"prompt": prompt, "response": response, "reference": reference},
            response=JudgeResponse(text=critique, parsed=verdict["reward"]),
        )
        return float(verdict["reward"])
