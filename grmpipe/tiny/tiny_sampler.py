"""A tiny model that speaks: answers of its own, and whole episodes, in batches."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from grmpipe.tiny.calculator import MAX_CALLS, display, parse_call
from grmpipe.tiny.examples import Said, open_with_tools
from grmpipe.tiny.problems import Asks
from grmpipe.tiny.tokenizer import encode_opening, encode_prompt
from grmpipe.tiny.walks import MAX_VISITS, Walk, format_entries, name_visited

MAX_ANSWER_TOKENS = 64
MAX_CRITIQUE_TOKENS = 128
MAX_TURN_TOKENS = 16  # in an episode
BATCH_SIZE = 128
Reply = Callable[[str], Said | None]  # to a turn of the policy; None: the episode has ended


class TinySampler:
    def __init__(self, directory: Path) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)

    def answer(self, contents: Sequence[str], max_new_tokens: int, seed: int, greedy: bool = False) -> list[str]:
        """One answer per message, at temperature 1 or greedy. `seed` makes it repeatable."""
        torch.manual_seed(seed)
        return self._complete([encode_prompt(self.tokenizer, content) for content in contents], max_new_tokens, greedy)

    def play(
        self,
        openings: Sequence[Sequence[Said]],
        replies: Sequence[Reply],
        max_turns: int,
        seed: int,
        greedy: bool = False,
    ) -> list[tuple[Said, ...]]:
        """The messages after each opening."""
        torch.manual_seed(seed)
        said: list[list[Said]] = [[] for _ in openings]
        open_rows = list(range(len(openings)))
        for _ in range(max_turns):
            prompts = [encode_opening(self.tokenizer, [*openings[row], *said[row]]) for row in open_rows]
            still_open = []
            for row, text in zip(open_rows, self._complete(prompts, MAX_TURN_TOKENS, greedy), strict=True):
                said[row].append(Said(role="assistant", text=text))
                reply = replies[row](text)
                if reply is not None:
                    said[row].append(reply)
                    still_open.append(row)
            open_rows = still_open
        return [tuple(messages) for messages in said]

    def _complete(self, prompts: list[list[int]], max_new_tokens: int, greedy: bool) -> list[str]:
        """In batches of similar lengths."""
        texts = [""] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            found = self._generate([prompts[row] for row in rows], max_new_tokens, greedy)
            for row, text in zip(rows, found, strict=True):
                texts[row] = text
        return texts

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], max_new_tokens: int, greedy: bool) -> list[str]:
        padded = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        # top_k=0: the library's default of 50 would sample from another distribution than the policy's.
        how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        output = self.model.generate(**padded, max_new_tokens=max_new_tokens, **how)
        texts: list[str] = self.tokenizer.batch_decode(
            output[:, padded["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return texts


def play_with_calculator(
    policy: TinySampler, problems: Sequence[Asks], seed: int, greedy: bool = False
) -> list[tuple[Said, ...]]:
    """A turn without a call ends an episode."""
    openings = [open_with_tools(problem.question) for problem in problems]
    return policy.play(openings, [show_result] * len(problems), MAX_CALLS + 1, seed, greedy)


def show_result(turn: str) -> Said | None:
    call = parse_call(turn)
    return Said(role="tool", text=display(call.result)) if call else None


def play_in_store(
    policy: TinySampler, walks: Sequence[Walk], seed: int, greedy: bool = False
) -> list[tuple[Said, ...]]:
    """The same in the store of each walk. A turn that asks for no name ends an episode."""
    openings = [(Said(role="user", text=walk.question),) for walk in walks]
    return policy.play(openings, [make_store_reply(walk) for walk in walks], MAX_VISITS + 1, seed, greedy)


def make_store_reply(walk: Walk) -> Reply:
    def show_entries(turn: str) -> Said | None:
        name = name_visited(turn)
        return Said(role="user", text=format_entries(name, walk.graph[name])) if name else None

    return show_entries


def render_view(messages: Sequence[Said]) -> str:
    """What a judge sees of an episode with the calculator."""
    fences = {"assistant": ">", "tool": "|"}
    return "\n".join(
        f"{fences[message.role]} {line}" for message in messages for line in message.text.split("\n") or [""]
    )
