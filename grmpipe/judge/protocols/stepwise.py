"""The judge session of rollouts step by step: a score per step, rewarded on the tokens of that step.

Rollouts are cut on token boundaries. A step is a turn or, if `step_end` isn't empty, ends with the token that completes
`step_end`. A step without a word joins the one before it; after `max_steps` steps the rest belongs to the last one. A
turn's thought belongs to its first step, whose text doesn't show it. So each sampled token is in exactly one step.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grmpipe.judge.protocols.group_session import Decode
from grmpipe.judge.protocols.pointwise import PointwiseSession, ScoredParts
from grmpipe.judge.trajectory import Passage, Trajectory, branch_at, show_opening, show_replies
from grmpipe.judge.votes import Weights
from grmpipe.models.types import UNKNOWN_ID
from grmpipe.types import Failed, Prompt, RewardSpan, Rollout

MOST_STEPS = 32  # in a turn: a judge that must score more in one list loses count


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseStep:
    """Tokens [start, end) of a turn, and their text, without the thought that they may begin with."""

    turn: int
    start: int
    end: int
    text: str

    @property
    def place(self) -> str:
        """As `RewardSpan.place`."""
        return f"{self.turn}:{self.start}-{self.end}"


def split_steps(
    rollout: Rollout, step_end: str, decode: Decode, *, max_steps: int = MOST_STEPS, thoughts: bool = False
) -> tuple[ResponseStep, ...]:
    """The steps of a rollout: at least one per turn that has tokens; `max_steps` counts within a turn.

    thoughts: whether thoughts are cut into steps like answers.
    """
    steps: list[ResponseStep] = []
    for index, turn in enumerate(rollout.turns):
        completion = turn.completion
        token_ids, begin = completion.token_ids, 0 if thoughts else completion.thought_tokens
        # A text that was not sampled, or whose ids were dropped, has no tokens to cut at.
        if not step_end or begin == len(token_ids) or UNKNOWN_ID in token_ids[:1]:
            text = completion.text if thoughts else completion.answer
            steps.append(ResponseStep(turn=index, start=0, end=len(token_ids), text=text))
            continue
        cuts = [begin + cut for cut in find_cuts(token_ids[begin:], step_end, decode)[: max_steps - 1]]
        texts = [decode(token_ids[start:end]) for start, end in itertools.pairwise([begin, *cuts, len(token_ids)])]
        texts[0] = texts[0].lstrip("\n") if begin else texts[0]
        steps += [
            ResponseStep(turn=index, start=start, end=end, text=text)
            for (start, end), text in zip(itertools.pairwise([0, *cuts, len(token_ids)]), texts, strict=True)
        ]
    return tuple(steps)


def find_cuts(token_ids: Sequence[int], step_end: str, decode: Decode) -> list[int]:
    """Indices where one step ends and another begins: never at the end of the tokens, never before a step without a
    word.
    """
    cuts: list[int] = []
    start = 0
    for place, token_id in enumerate(token_ids, start=1):
        if step_end[-1] in decode([token_id]) and step_end in decode(token_ids[start:place]):
            cuts.append(place)
            start = place
    kept: list[int] = []
    for cut, following in itertools.pairwise([*cuts, len(token_ids)]):
        if decode(token_ids[cut:following]).strip():
            kept.append(cut)
    if kept and not decode(token_ids[: kept[0]]).strip():
        del kept[0]
    return kept


class StepwiseSession(PointwiseSession):
    """Like pointwise, with a score per step. What the environment says stands with the step that it answers."""

    def scored_parts_of(self, rollout: Rollout) -> ScoredParts | Failed:
        context = self._context
        assert context.decode is not None
        config = context.config
        steps = split_steps(rollout, config.split.step_end, context.decode, thoughts=config.format.show_thoughts)
        share = 1 / len(steps)
        return ScoredParts(
            shown=tuple(show_steps(self._prompt, rollout, steps)),
            weights=Weights((share,) * len(steps)),
            places=tuple(
                RewardSpan(turn=step.turn, start=step.start, end=step.end, value=0.0, share=share) for step in steps
            ),
        )


def show_steps(prompt: Prompt, rollout: Rollout, steps: Sequence[ResponseStep]) -> Iterator[Trajectory]:
    """Each step; the first one after the environment's opening, the last one of a turn with the replies to it."""
    for number, step in enumerate(steps):
        opening = show_opening(prompt, rollout) if number == 0 else ()
        begins_turn = number == 0 or steps[number - 1].turn != step.turn
        branch = branch_at(rollout, step.turn) if begins_turn else ()
        ends_turn = number + 1 == len(steps) or steps[number + 1].turn != step.turn
        after = show_replies(rollout, step.turn) if ends_turn else ()
        text = Passage(voice="policy", text=step.text, turn=step.turn)
        yield Trajectory(passages=(*opening, *branch, text, *after))
