"""The viewer on a large run: makes a run of n rollouts, and measures index, pages and memory. Needs no engine.

    python benchmarks/view_scale.py --rollouts 100000 --dir /tmp/view-scale

The lines have the fields and the sizes of a run whose answers have about 400 tokens, and four judgements of 100 each.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

GROUP_SIZE, GROUPS_PER_STEP, VOTES = 8, 16, 4
ANSWER_TOKENS, CRITIQUE_TOKENS, PROMPT_TOKENS = 400, 100, 60
SYLLABLES = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "xu", "za")
WORDS = ["".join(syllables) for syllables in product(SYLLABLES, repeat=3)]


def text(random_: random.Random, num_words: int) -> str:
    return " ".join(random_.choices(WORDS, k=num_words))


def completion(random_: random.Random, num_tokens: int, version: int, model: str) -> dict[str, object]:
    return {
        "text": text(random_, num_tokens * 3 // 4),
        "finish_reason": "stop",
        "token_ids": random_.choices(range(150_000), k=num_tokens),
        "logprobs": [-round(random_.expovariate(3), 9) for _ in range(num_tokens)],
        "versions": [{"model": model, "version": version, "start": 0, "end": num_tokens}],
    }


def rollout_line(
    random_: random.Random, who: dict[str, object], step: int, prompt: dict[str, object]
) -> dict[str, object]:
    length = max(20, int(random_.gauss(ANSWER_TOKENS, 150)))
    turn = {
        **completion(random_, length, step - 1, "policy"),
        "new_ids": random_.choices(range(150_000), k=PROMPT_TOKENS),
    }
    return {**who, "status": "finished", "turns": [{**turn, "replies": []}], "prompt_index": 0, "prompt": prompt}


def judgement_line(random_: random.Random, who: dict[str, object]) -> tuple[dict[str, object], float, float]:
    truth = float(random_.random() < 0.5)
    scores = [min(10, max(1, round(random_.gauss(4 + 3 * truth, 2)))) for _ in range(VOTES)]
    mean = sum(scores) / VOTES
    reward = (mean - 1) / 9
    judgements = [
        {"group_id": who["group_id"], "siblings": [who["sibling"]], "scores": [score], "grm": "grm", "version": 0,
         "prompt_ids": random_.choices(range(150_000), k=PROMPT_TOKENS + ANSWER_TOKENS),
         "completion": completion(random_, CRITIQUE_TOKENS, 0, "grm")}
        for score in scores
    ]  # fmt: skip
    spread = (sum((score - mean) ** 2 for score in scores) / VOTES) ** 0.5
    verdict = {
        "rewards": [{"turn": 0, "start": 0, "end": 1, "value": reward, "share": None}],
        "score": mean, "breakdown": {}, "score_std": spread, "num_judgements": VOTES, "grm_version": 0,
    }  # fmt: skip
    return {**who, "verdict": verdict, "judgements": judgements, "failures": []}, reward, truth


def make_run(run_dir: Path, num_rollouts: int) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("experiment_name: scale\n")
    random_, names = random.Random(0), ("rollouts", "judgements", "groups", "trained", "metrics")
    out = {name: (run_dir / f"{name}.jsonl").open("w") for name in names}

    def write(name: str, line: dict[str, object]) -> None:
        out[name].write(json.dumps(line, separators=(",", ":")) + "\n")

    for group in range(num_rollouts // GROUP_SIZE):
        step, group_id = group // GROUPS_PER_STEP + 1, f"g{group:06d}"
        messages = [{"role": "user", "content": text(random_, PROMPT_TOKENS)}]
        prompt = {"prompt_id": f"p{group % 5000}", "messages": messages, "source": f"source{group % 5}"}
        for sibling in range(GROUP_SIZE):
            who = {"group_id": group_id, "sibling": sibling}
            write("rollouts", rollout_line(random_, who, step, {**prompt, "reference": "42"}))
            judged, reward, truth = judgement_line(random_, who)
            write("judgements", judged)
            write("trained", {**who, "step": step, "reward": reward, "advantage": reward - 0.5, "right": truth})
        end = {"group_id": group_id, "prompt_index": group, "prompt_id": prompt["prompt_id"], "outcome": "trained"}
        write("groups", {**end, "step": step, "version": step - 1})
        if group % GROUPS_PER_STEP == 0:
            write("metrics", {"step": step, "train/reward": random_.random(), "train/true_accuracy": random_.random()})
    for file in out.values():
        file.close()
