"""Rewards as TRL's GRPOTrainer computes them: `python ask_by_trl.py URL MODEL < texts.json`."""

import json
import sys
from math import isnan

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from grmpipe.clients.trl import JudgeReward

url, model = sys.argv[1:]
texts = json.load(sys.stdin)
row = {"prompt": [{"role": "user", "content": "How many?"}], "answer": "42"}
config = GRPOConfig(
    output_dir="out", use_cpu=True, bf16=False, report_to="none", num_generations=len(texts),
    per_device_train_batch_size=len(texts),
)  # fmt: skip
trainer = GRPOTrainer(model=model, reward_funcs=JudgeReward(url), args=config, train_dataset=Dataset.from_list([row]))
completions = [[{"role": "assistant", "content": text}] for text in texts]
rewards = trainer._calculate_rewards([row] * len(texts), [row["prompt"]] * len(texts), completions, [[1]] * len(texts))[
    :, 0
]
print(json.dumps([None if isnan(one) else one for one in rewards.tolist()]))
