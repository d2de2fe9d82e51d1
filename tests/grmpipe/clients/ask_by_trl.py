"""Rewards as TRL's GRPOTrainer computes them: `python ask_by_trl.py URL MODEL < texts.json`. Fails unless its
advantages are those of a group without the responses whose judgement failed.
"""

import json
import sys
from math import isnan
from statistics import fmean

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from grmpipe.clients.trl import JudgeReward

url, model = sys.argv[1:]
texts = json.load(sys.stdin)
row = {"prompt": [{"role": "user", "content": "How many?"}], "answer": "42"}
config = GRPOConfig(
    output_dir="out", use_cpu=True, bf16=False, report_to="none", num_generations=len(texts),
    per_device_train_batch_size=len(texts), max_completion_length=4, scale_rewards="none",
)  # fmt: skip
trainer = GRPOTrainer(model=model, reward_funcs=JudgeReward(url), args=config, train_dataset=Dataset.from_list([row]))
completions = [[{"role": "assistant", "content": text}] for text in texts]
compute = trainer._calculate_rewards
found = []


def judge_given(inputs, prompts, sampled, token_ids):
    """The rewards of the given texts instead of those that the trainer sampled."""
    rewards = compute(inputs, prompts, completions, token_ids)
    found.extend(rewards[:, 0].tolist())
    return rewards


trainer._calculate_rewards = judge_given
advantages = trainer._generate_and_score_completions([row] * len(texts))["advantages"].tolist()
judged = [one for one in found if not isnan(one)]
for reward, advantage in zip(found, advantages, strict=True):
    expected = 0.0 if isnan(reward) else reward - fmean(judged)
    assert abs(advantage - expected) < 1e-6, (found, advantages)
print(json.dumps([None if isnan(one) else one for one in found]))
