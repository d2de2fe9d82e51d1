"""Rewards of tasks of verifiers with a judge that is plugged in by its id: `python ask_by_verifiers.py URL MODEL <
texts.json`. my_judge.py is that of docs/serving.md.
"""

import asyncio
import json
import sys

import verifiers.v1 as vf

url = sys.argv[1]


class Data(vf.TaskData):
    answer: str = "42"


class Counting(vf.Task[Data, vf.State, vf.TaskConfig]):
    pass


CONFIG = vf.TaskConfig(judges=[{"id": "my-judge", "base_url": url, "answer_field": "answer"}])


async def score(text: str) -> float:
    task = Counting(Data(prompt="How many?"), CONFIG)
    node = vf.MessageNode(message=vf.AssistantMessage(content=text), sampled=True)
    agent = vf.AgentInfo(config=vf.AgentConfig())
    trace = vf.Trace(task=vf.TraceTask(type="Counting", data=task.data), agent=agent, nodes=[node])
    await task.score(trace)
    assert trace.info["judge_calls"][0]["response"]["parsed"] == trace.reward
    return trace.reward


async def main() -> None:
    found = await asyncio.gather(*(score(text) for text in json.load(sys.stdin)), return_exceptions=True)
    print(json.dumps([type(one).__name__ if isinstance(one, Exception) else one for one in found]))


asyncio.run(main())
