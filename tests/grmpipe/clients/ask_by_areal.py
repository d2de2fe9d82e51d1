"""Rewards of episodes of AReaL's RLVRWorkflow: `python ask_by_areal.py URL MODEL < texts.json`."""

import asyncio
import json
import sys
from dataclasses import dataclass

from areal.api import ModelRequest, ModelResponse
from areal.api.cli_args import GenerationHyperparameters

from grmpipe.clients.areal import JudgedRLVRWorkflow

url, model = sys.argv[1:]
workflow = JudgedRLVRWorkflow(url, gconfig=GenerationHyperparameters(max_new_tokens=8), tokenizer=model)


@dataclass
class Engine:
    text: str

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        tokenizer = workflow.tokenizer
        ids = [*tokenizer.encode(self.text, add_special_tokens=False), tokenizer.eos_token_id]
        return ModelResponse(
            input_tokens=request.input_ids, output_tokens=ids, output_logprobs=[0.0] * len(ids),
            output_versions=[0] * len(ids), stop_reason="stop",
        )  # fmt: skip


async def main() -> None:
    data = {"messages": [{"role": "user", "content": "How many?"}], "answer": "42"}
    asked = (workflow.arun_episode(Engine(text), data) for text in json.load(sys.stdin))
    found = await asyncio.gather(*asked, return_exceptions=True)
    print(json.dumps([type(one).__name__ if isinstance(one, Exception) else one["rewards"].item() for one in found]))


asyncio.run(main())
