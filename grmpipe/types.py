"""What flows through the pipeline: one frozen type per stage. A field exists only once it is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from models.types import Completion, Message, VersionSpan

InfraCause = Literal["timeout", "refused", "died"]
DataCause = Literal["unparseable", "truncated", "too_long", "undecided"]
Cause = InfraCause | DataCause
Stage = Literal["rollout", "judge"]
Metrics = dict[str, float]  # name -> value of one step; names are `area/what_unit`


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """What an answer is to be judged by, and how much it counts beside the others."""

    text: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the policy is asked. `reference` and `rubric` are for judges; they never enter the policy's prompt."""

    prompt_id: str
    messages: tuple[Message, ...]
    source: str = ""
    reference: str | None = None
    rubric: tuple[Criterion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call of the policy. `replies` is what the environment said to it (empty at the end)."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    replies: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sibling, played to its end. `truncated` means that max tokens ended it: judged like any other."""

    group_id: str
    sibling: int
    turns: tuple[Turn, ...]
    status: Literal["finished", "truncated"]

    @property
    def text(self) -> str:
        """What the policy wrote, turn after turn."""
        return "\n".join(turn.completion.text for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        return min(turn.completion.oldest_version for turn in self.turns)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One sample of the GRM that parsed. `siblings` and `scores` stand in the order shown, on the judge's scale."""

    group_id: str
    siblings: tuple[int, ...]
    scores: tuple[float, ...]
    prompt_ids: tuple[int, ...]
    completion: Completion
    grm: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Something that gave no result. Never a number. Infrastructure causes: timeout, refused, died."""

    stage: Stage
    cause: Cause
    attempts: int
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedJudgement(Failed):
    """A judgement that was generated and is no use (unparseable, truncated): kept, it can be read and trained on."""

    prompt_ids: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpan:
    """`value` for the tokens [start, end) of a turn. An outcome reward is one span over the last turn.

    share: of a verdict that is a mean of steps, this step's part in it (the shares sum to 1): it earned value / share.
           None: the values stand for themselves, however many there are.
    """

    turn: int
    start: int
    end: int
    value: float
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the vote over judgements came to.

    rewards:   spans in reward units (scaled, mixed), which training uses.
    score:     the judge's own scale (1 to 10 for a generative judge), which people read.
    breakdown: each component's reward by name, before weighting.
    score_std: of the votes: their population standard deviation in score units (0 for a single vote).
    grm_version: completed optimizer steps of the GRM that judged: 0 where it doesn't learn in this run.
    """

    rewards: tuple[RewardSpan, ...]
    score: float
    breakdown: Mapping[str, float]
    score_std: float
    num_judgements: int
    grm_version: int = 0

    @property
    def outcome(self) -> float:
        return sum(span.value for span in self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAudit:
    """Where the early stop would have ended, beside the vote over all judgements. Scores on the judge's scale."""

    stopped_after: int  # judgements; as many as there are where it would not have stopped
    stopped_score: float
    full_score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReport:
    """What a rollout's judging came to: the verdict or its failure, and the evidence for the journal.

    What was asked about several siblings at once stands in the report of one of them only: it is counted once.

    principles:   what the GRM wrote for the whole group, ahead of its judgements.
    saved_tokens: an estimate from below: judgements that were never asked, at the mean length of those that were.
    audit:        of a rollout that was judged in full to try the early stop.
    """

    verdict: Verdict | Failed
    judgements: tuple[Judgement, ...] = ()
    failures: tuple[Failed, ...] = ()  # of single judgements, re-asked ones included
    principles: Completion | None = None
    saved_tokens: int = 0
    audit: StopAudit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """Siblings of one prompt, in sibling order, with their verdicts. `version` is the lowest of the sampled tokens."""

    group_id: str
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    verdicts: tuple[Verdict | Failed, ...]

    @property
    def version(self) -> int:
        return min(rollout.oldest_version for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnd:
    """How a group ended: a line of groups.jsonl.

    prompt_index: the index of its prompt in the order of the data.
    step:    that trained it; None where it was dropped.
    cause:   why it was dropped; None where it was trained.
    version: the lowest of its sampled tokens; None where it was dropped.
    early:   whether the learner went on with what it had before the next group of the batch came.
    """

    group_id: str
    prompt_index: int
    prompt_id: str
    outcome: Literal["trained", "dropped"]
    step: int | None = None
    cause: str | None = None
    version: int | None = None
    early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedResponses:
    """Two responses or more to a prompt, and which of them is truly the best: for measuring and training judges."""

    item_id: str
    prompt: Prompt
    responses: tuple[str, ...]
    best: int  # index into responses
    subset: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponse:
    """One response to a prompt, and the score it truly deserves, on the judge's scale."""

    item_id: str
    prompt: Prompt
    response: str
    score: int
    subset: str = ""


Labelled = RankedResponses | ScoredResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A stretch of tokens to learn from. Entry t of mask, log-probs and advantages belongs to token_ids[t].

    loss_mask:        1 on sampled tokens that are trained, 0 elsewhere.
    sampler_logprobs: natural log, as the engine reported them; 0 where loss_mask is 0.
    advantages:       0 where loss_mask is 0.
    versions:         spans over token_ids, sampled stretches only.
    experts_TLK:      int16, where the sampler sent each token, by layer with experts (-1: not known); None where it is
                      known of no token.
    """

    group_id: str
    sibling: int
    segment: int
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    experts_TLK: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples packed end to end. T: packed tokens, S: samples, L: layers with experts, K: experts a token.

    Arrays cross process borders as they are.

    Samples that begin alike, the siblings of a prompt, share their prefix: the first of them has it among its tokens,
    the others go on from there with tokens of their own. Every trained token is some sample's own, so a sum over a
    sample is one over its own tokens. What nothing predicts is never trained: the loss_mask at position 0 is 0.
    """

    token_ids_T: np.ndarray  # int64
    position_ids_T: np.ndarray  # int64, in the sample, its prefix included
    sample_lengths_S: np.ndarray  # int64, of own tokens, sums to T
    prefix_starts_S: np.ndarray  # int64, where in T the tokens stand that come before a sample's own
    prefix_lengths_S: np.ndarray  # int64; 0: none do
    loss_mask_T: np.ndarray  # float32, 0 or 1
    sampler_logprobs_T: np.ndarray  # float32
    advantages_T: np.ndarray  # float32
    versions_T: np.ndarray  # int32, of the policy that sampled the token; -1 where none did
    experts_TLK: np.ndarray | None = None  # int16, to replay; -1 where the learner's own router chooses


@dataclass(frozen=True, slots=True, kw_only=True)
class OldPass:
    """What the weights that a batch's updates start from say of a micro-batch."""

    logprobs_T: np.ndarray  # float32, log pi_old; 0 where nothing is trained
    experts_TLK: np.ndarray | None = None  # that they chose, where the updates are to replay them


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTotals:
    """Sizes of a whole batch, over all micro-batches and ranks; known only when the batch is closed."""

    num_loss_tokens: int
    num_sequences: int  # with at least one trained token
    num_groups: int
    oldest_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTask:
    """What a judge does at once: the siblings it judges together, in sibling order.

    No members: what can be done before any rollout has ended. `component`: of a mixture, which part of it sits.
    """

    members: tuple[int, ...]
    component: str = ""


class JudgeSession(Protocol):
    """The judging of one group, from its admission on. Used once; it goes when the group ends.

    A pointwise judge sits for every rollout by itself, a listwise one once for all siblings, a pairwise one for every
    pair. What comes of it are reports per sibling, each given once, when it is final.
    """

    def begin(self) -> Sequence[JudgeTask]:
        """What to do now, at the admission of the group."""
        ...

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        """A rollout has ended. What can be judged with it that could not before."""
        ...

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        """Hold it. Returns the reports that are final now, by sibling; none for a sibling that has more to wait for.

        The lowest priority goes first. Failures come back as values; only a programming error raises. After a resume,
        judge tasks whose members all have verdicts already are left out.
        """
        ...


@runtime_checkable
class Judge(Protocol):
    """Opens a judge session for each group."""

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        """`size`: the siblings that will come."""
        ...


@runtime_checkable
class Env(Protocol):
    """One episode. An instance is used once."""

    def start(self) -> tuple[Message, ...]:
        """The messages that the policy sees first."""
        ...

    async def step(self, text: str) -> tuple[Message, ...]:
        """What the environment answers to the policy's turn; empty ends the episode."""
        ...
