"""TRL's GRPOTrainer on the tiny task or on SmolLM2's short questions, as a user of TRL would write it; against_trl.py
and served_judge.py start it. Of grmpipe it takes the problems, the rules and, with --judge, the client of a service.

It has its own environment. Install torch first and alone: a range in a later install would take the newest build.

    python -m venv .trl
    .trl/bin/pip install torch==2.13.0
    .trl/bin/pip install -r benchmarks/trl_requirements.txt

The tiny task's judge is a reward function: one batched `generate` over all completions of a step; or that of a service.
SmolLM2's reward is the function of `+experiment=smollm2`, and adapters learn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))

from grmpipe.clients.trl import JudgeReward
from grmpipe.judge.kinds.rule import contains_reference
from grmpipe.tiny.problems import is_right, judge_prompt, make_problems, parse_score
from grmpipe.tiny.short_answers import make_short_questions, right_and_brief

MAX_CRITIQUE_TOKENS = 128
WARMUP_STEPS = 5
LOOK_BATCH = 128
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What differs between the tasks. lora_rank: 0 for all weights. decays: the rate, linearly to 0."""

    group_size: int
    max_new_tokens: int
    lr: float
    lora_rank: int = 0
    decays: bool = False


TASKS = {
    "tiny": Task(group_size=8, max_new_tokens=64, lr=3e-4),
    "smollm2": Task(group_size=4, max_new_tokens=12, lr=5e-4, lora_rank=16, decays=True),
}


SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
GREEDY = {"do_sample": False}


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    contents: Sequence[str],
    max_new_tokens: int,
    sampling: Mapping[str, object] = SAMPLED,
) -> list[str]:
    """One batch, by default sampled at temperature 1 from all tokens."""
    padded = tokenizer.apply_chat_template(
        [[{"role": "user", "content": content}] for content in contents],
        add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    output = model.generate(**padded, max_new_tokens=max_new_tokens, **sampling)
    return tokenizer.batch_decode(output[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)


def make_reward(directory: str) -> Callable[..., list[float]]:
    """The GRM's score from 0 to 1; an unparseable judgement gives 0."""
    grm = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)

    def grm_reward(completions: list, question: list[str], **_: object) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        asked = [judge_prompt(*pair) for pair in zip(question, texts, strict=True)]
        scores = [parse_score(critique) for critique in answer(grm, tokenizer, asked, MAX_CRITIQUE_TOKENS)]
        return [0.0 if score is None else (score - 1) / 9 for score in scores]

    return grm_reward


def make_brief_reward() -> Callable[..., list[float]]:
    references = {one.question: one.answer for one in make_short_questions("train")}

    def brief_reward(completions: list, question: list[str], **_: object) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [right_and_brief(text, references[asked]) for text, asked in zip(texts, question, strict=True)]

    return brief_reward


class KeptJudgeReward(JudgeReward):
    """Writes down each reward as TRL is given it: a line per completion."""

    def __init__(self, url: str, file: Path) -> None:
        super().__init__(url, columns=())
        self._file = file

    async def __call__(self, prompts: list, completions: list, **columns: object) -> list[float | None]:
        rewards = await super().__call__(prompts, completions, **columns)
        rows = zip(prompts, completions, rewards, strict=True)
        lines = [json.dumps([prompt[0]["content"], text[0]["content"], reward]) for prompt, text, reward in rows]
        with self._file.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        return rewards


def choose_reward(args: argparse.Namespace) -> Callable[..., object]:
    if args.task == "smollm2":
        return make_brief_reward()
    return KeptJudgeReward(args.judge, args.out / "rewards.jsonl") if args.judge else make_reward(args.grm)


# -- time ----------------------------------------------------------------------------------------------------------


class Timed(GRPOTrainer):
    """Sums up the seconds of the parts of a step."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.spent_s: dict[str, float] = defaultdict(float)

    @contextmanager
    def spending(self, stage: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.spent_s[stage] += time.perf_counter() - began_s

    def _generate(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        with self.spending("generate"):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        with self.spending("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def compute_loss(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        with self.spending("forward"):
            return super().compute_loss(*args, **kwargs)

    def training_step(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        with self.spending("training_step"):
            return super().training_step(*args, **kwargs)


class Watch(TrainerCallback):
    """Seconds of each step, and evaluations on held-out problems, which no step's seconds include."""

    def __init__(self, look: Callable[[], float], every: int) -> None:
        self.trainer: Timed | None = None
        self.steps: list[dict[str, float]] = []
        self.looks: dict[int, float] = {}
        self._look, self._every, self._since_s, self._since_cpu_s = look, every, 0.0, 0.0

    def on_train_begin(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        self.looks[0] = self._look()
        self._since_s, self._since_cpu_s = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        assert self.trainer is not None
        cpu_s = time.process_time() - self._since_cpu_s
        self.steps.append({"step": time.perf_counter() - self._since_s, "cpu": cpu_s, **self.trainer.spent_s})
        self.trainer.spent_s.clear()
        if state.global_step % self._every == 0:
            self.looks[state.global_step] = self._look()
        self._since_s, self._since_cpu_s = time.perf_counter(), time.process_time()


def make_look(
    task: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int
) -> Callable[..., float]:
    """True accuracy on held-out problems; it doesn't change the training's random numbers."""
    asked: list[tuple[str, Callable[[str], bool]]]
    if task == "tiny":
        asked = [(one.question, partial(is_right, one)) for one in make_problems("held_out", count, 0)]
    else:
        asked = [
            (one.question, lambda text, reference=one.answer: contains_reference(text, reference))
            for one in make_short_questions("held_out")[:count]
        ]
    asked.sort(key=lambda one: len(one[0]))
    questions = [question for question, _ in asked]

    def look(sampling: Mapping[str, object] = SAMPLED) -> float:
        model.eval()
        with torch.random.fork_rng():
            texts: list[str] = []
            for at in range(0, len(questions), LOOK_BATCH):
                some = questions[at : at + LOOK_BATCH]
                texts += answer(model, tokenizer, some, TASKS[task].max_new_tokens, sampling)
        model.train()
        return fmean(is_right(text) for (_, is_right), text in zip(asked, texts, strict=True))

    return look


# -- the run -------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> tuple[Watch, dict[str, float]]:
    """Returns what was seen of the steps, and the greedy true accuracy before and after."""
    torch.set_num_threads(args.threads)
    task = TASKS[args.task]
    model = AutoModelForCausalLM.from_pretrained(args.policy, dtype=torch.float32)
    if task.lora_rank:
        torch.manual_seed(args.seed)
        lora = LoraConfig(r=task.lora_rank, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS)
        model = get_peft_model(model, lora)
    tokenizer = AutoTokenizer.from_pretrained(args.policy, padding_side="left")
    questions = args.questions.read_text(encoding="utf-8").splitlines()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=task.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def share_of_rate(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / (WARMUP_STEPS + 1)
        return 1 - (step - WARMUP_STEPS) / (args.steps - WARMUP_STEPS) if task.decays else 1.0

    config = GRPOConfig(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=args.groups * task.group_size,
        num_generations=task.group_size,
        max_completion_length=task.max_new_tokens,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # the token mean
        scale_rewards="group",
        shuffle_dataset=False,  # the questions come in the same order as for the other side
        gradient_checkpointing=False,  # on by default, and slower if there is enough memory
        use_transformers_continuous_batching=args.continuous_batching,
        bf16=False,
        use_cpu=True,
        seed=args.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    look = make_look(args.task, model, tokenizer, args.held_out)
    greedy = {"first": look(GREEDY)}
    watch = Watch(look, args.look_every)
    trainer = Timed(
        model=model,
        reward_funcs=choose_reward(args),
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": question}], "question": question} for question in questions]
        ),
        processing_class=tokenizer,
        callbacks=[watch],
        optimizers=(optimizer, LambdaLR(optimizer, share_of_rate)),
    )
    watch.trainer = trainer
    trainer.train()
    trainer.save_model(str(args.out / "policy"))
    return watch, greedy | {"last": look(GREEDY)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the policy and trl.json")
    parser.add_argument("--task", choices=[*TASKS], default="tiny")
    parser.add_argument("--policy", required=True)
    parser.add_argument("--grm", help="the judge of the tiny task")
    parser.add_argument("--judge", help="the address of a service that judges instead")
    parser.add_argument("--questions", type=Path, required=True, help="one per line, in the order of training")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--look-every", type=int, required=True)
    parser.add_argument("--held-out", type=int, required=True)
    parser.add_argument("--continuous-batching", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    watch, greedy = train(args)
    found = {"steps": watch.steps, "looks": watch.looks, "greedy": greedy}
    (args.out / "trl.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
