"""An engine whose turns a test writes, such as calls of tools and then a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grmpipe.models.types import Completion, RequestContext, SamplingParams, VersionSpan, ignore_first_token


def encode_letters(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


class Author:
    """An engine that writes its turns in order, the last one again and again. encode: the tokens of a turn."""

    def __init__(self, *turns: str, encode: Callable[[str], tuple[int, ...]] = encode_letters) -> None:
        self.turns, self._encode = turns, encode
        self.asked: list[tuple[tuple[int, ...], SamplingParams, RequestContext]] = []
        self.ended: list[str] = []

    @property
    def prompts(self) -> list[str]:
        """What it was asked, if its tokens are letters."""
        return ["".join(map(chr, prompt_ids)) for prompt_ids, _, _ in self.asked]

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        number = int(context.request_id.rpartition("/t")[2])
        self.asked.append((tuple(prompt_ids), params, context))
        text = self.turns[min(number, len(self.turns) - 1)]
        whole = self._encode(text)
        ids = whole[: params.max_new_tokens]
        return Completion(
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            text=text[: params.max_new_tokens],
            finish_reason="length" if len(ids) < len(whole) else "stop",
            versions=(VersionSpan(model="grm", version=3, start=0, end=len(ids)),),
        )

    def end_trajectory(self, trajectory_id: str) -> None:
        self.ended.append(trajectory_id)
