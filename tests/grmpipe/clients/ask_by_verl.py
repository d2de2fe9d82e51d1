"""Rewards as verl's reward loop computes them: `python ask_by_verl.py URL MODEL < texts.json`. The overrides are those
of docs/serving.md.
"""

import asyncio
import json
import sys

import numpy as np
import torch
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.protocol import DataProto

url, model = sys.argv[1:]
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose(
        "ppo_trainer",
        [
            f"actor_rollout_ref.model.path={model}", "reward.reward_manager.source=importlib",
            "reward.reward_manager.module.path=pkg://grmpipe.clients.verl",
            "reward.reward_manager.name=JudgeRewardManager", f"+reward.reward_kwargs.judge_url={url}",
        ],
    )  # fmt: skip
worker = RewardLoopWorker(config)


def make_batch(text: str) -> DataProto:
    tokenizer = worker.input_tokenizer
    ids = torch.tensor([[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]])
    mask = torch.ones(1, 2 + ids.shape[1], dtype=torch.long)
    batch = {"prompts": torch.tensor([[1, 2]]), "responses": ids, "attention_mask": mask}
    columns = {
        "raw_prompt": [{"role": "user", "content": "How many?"}], "uid": "u1", "data_source": "own",
        "reward_model": {"ground_truth": "42"},
    }  # fmt: skip
    return DataProto(
        batch=TensorDict(batch, batch_size=1),
        non_tensor_batch={name: np.array([value]) for name, value in columns.items()},
    )


async def main() -> None:
    asked = (worker.compute_score(make_batch(text)) for text in json.load(sys.stdin))
    found = await asyncio.gather(*asked, return_exceptions=True)
    print(json.dumps([type(one).__name__ if isinstance(one, Exception) else one["reward_score"] for one in found]))


worker.loop.run_until_complete(main())
