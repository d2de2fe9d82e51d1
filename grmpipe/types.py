"""What flows through the pipeline: one frozen type per stage. A field exists only once it is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np

from grmpipe.models.types import Completion, Message, TokenScores, ToolCall, VersionSpan

InfraCause = Literal["timeout", "refused", "died"]
INFRA_CAUSES: tuple[InfraCause, ...] = get_args(InfraCause)
DataCause = Literal["unparseable", "truncated", "too_long", "undecided", "abstained", "out_of_range"]
EnvCause = Literal["boot", "unreachable", "died", "timeout", "capacity", "protocol", "broken"]
Cause = InfraCause | DataCause | EnvCause
CriterionKind = Literal["graded", "yes_no"]
CRITERION_KINDS: tuple[CriterionKind, ...] = get_args(CriterionKind)
FailureStage = Literal["rollout", "judge", "env", "teacher"]
TruncationReason = Literal["", "tokens", "turns", "context", "time"]
Metrics = dict[str, float]  # name -> value of one step; names are `area/what_unit`


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One criterion of a rubric.

    weight:    among the others; below 0: a fault, which costs what a merit of this weight earns.
    essential: a response that doesn't meet it earns at most `judge.rubric.essential_cap`.
    name:      by which metrics and the viewer name it, unique within a rubric; empty: made from its text.
    kind:      how it is scored: on the judge's scale, or by its levels if it has any (graded), or met or not (yes_no).
    levels:    what single scores mean, from the lowest to the highest: (score, description).
    evidence:  whether the judge must quote the response where it is met.
    from_step: the step of training, from 1, with whose groups it begins; 0: it holds from the start.
    """

    text: str
    weight: float = 1.0
    essential: bool = False
    tags: tuple[str, ...] = ()
    name: str = ""
    kind: CriterionKind = "graded"
    levels: tuple[tuple[int, str], ...] = ()
    evidence: bool = False
    from_step: int = 0

    @property
    def whole_text(self) -> str:
        """The text and its levels, as a judge reads them."""
        return "\n".join([self.text, *(f"   {score}: {meaning}" for score, meaning in self.levels)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of the policy. `reference` and `rubric` are for judges; they never enter the policy's prompt.

    info:    what the row holds for the environment: a JSON object, which neither policy nor judge sees.
    columns: further columns of the row, for reward functions.
    is_chat: whether the row has messages instead of a text.
    step:    the step of training that it is drawn for, from 1, by which criteria begin; None: all have begun.
    self_judging: whether it is a judging task among a run's prompts, by which a policy that judges itself learns to.
    """

    prompt_id: str
    messages: tuple[Message, ...]
    source: str = ""
    reference: str | None = None
    rubric: tuple[Criterion, ...] = ()
    info: Mapping[str, object] = field(default_factory=dict)
    columns: Mapping[str, object] = field(default_factory=dict)
    is_chat: bool = False
    step: int | None = None
    self_judging: bool = False


# Kinds of faults: a call that can't be read; a call after the last one that was allowed.
MALFORMED, OVER_BUDGET = "malformed", "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call of the policy, and the environment's answer to it.

    new_ids:    tokens of the prompt after those of the turn before (its prompt and completion); the whole prompt in the
                first turn, and after a rewritten history.
    rewritten:  whether the history was rewritten, so that the prompt doesn't continue the turn before.
    tool_calls: calls in the completion, as the environment got them.
    replies:    the environment's messages after it. Those at the end of an episode are only judged and shown. Before a
                rewritten history: what is new in it, with assistant's messages that differ from what the policy wrote.
    rewards:    the environment's, for this turn, by name.
    state_key:  names the state in which the policy acted; equal for siblings in the same state; empty: unknown.
    faults:     what the policy did wrong here, by kind: malformed, unknown_tool, arguments, tool, raised.
    env_s:      time in the environment after the completion.
    """

    new_ids: tuple[int, ...]
    completion: Completion
    rewritten: bool = False
    tool_calls: tuple[ToolCall, ...] = ()
    replies: tuple[Message, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    state_key: str = ""
    faults: tuple[str, ...] = ()
    env_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sibling, played to its end. A truncated one is judged like any other.

    reason:  the limit that truncated it: tokens of a turn, number of turns, context window, time of the episode.
    opening: the messages that the environment began with, if they aren't the prompt's.
    attempt: earlier episodes of this sibling that the environment failed (`env_failures`).
    boot_s:  time until the environment was open.
    took_s:  time of the whole episode, sampling included.
    state:   the environment's last one, for judges whose tools read it (judge.tools.state); empty: none does.
    """

    group_id: str
    sibling: int
    turns: tuple[Turn, ...]
    status: Literal["finished", "truncated"]
    reason: TruncationReason = ""
    opening: tuple[Message, ...] = ()
    attempt: int = 0
    boot_s: float = 0.0
    took_s: float = 0.0
    env_failures: tuple[Failed, ...] = ()
    state: bytes = field(default=b"", repr=False)

    @property
    def text(self) -> str:
        """The policy's text of all turns, in order, with its thoughts."""
        return "\n".join(turn.completion.text for turn in self.turns)

    @property
    def answer(self) -> str:
        """The last turn without its thought, as rules read it. Empty if the thought was truncated, or if the episode
        was truncated at a tool call or ended with a faulty one: the arguments of a call are no answer.
        """
        last = self.turns[-1]
        is_cut = self.status == "truncated" or bool(last.faults)
        called = last.tool_calls or OVER_BUDGET in last.faults
        called = called or (self.status == "truncated" and MALFORMED in last.faults)
        return "" if is_cut and called else last.completion.answer

    def show_text(self, *, thoughts: bool) -> str:
        """The policy's text of all turns, as a judge of single turns sees it."""
        return self.text if thoughts else "\n".join(turn.completion.answer for turn in self.turns)

    def prompts(self) -> Iterator[tuple[int, ...]]:
        """The whole prompt of each turn, in order."""
        so_far: tuple[int, ...] = ()
        for turn in self.turns:
            prompt_ids = turn.new_ids if turn.rewritten else so_far + turn.new_ids
            yield prompt_ids
            so_far = prompt_ids + turn.completion.token_ids

    def segments(self) -> list[list[tuple[tuple[int, ...], Turn]]]:
        """Runs of turns, each with its whole prompt, that can be trained as one sequence: each prompt continues where
        the turn before it ended.

        A history that was rewritten (a chat template that drops reasoning, an agent that sums up) breaks the sequence:
        the turn was sampled after other tokens than those of the turns before it, so it starts a new segment.
        """
        segments: list[list[tuple[tuple[int, ...], Turn]]] = []
        for prompt_ids, turn in zip(self.prompts(), self.turns, strict=True):
            if turn.rewritten or not segments:
                segments.append([])
            segments[-1].append((prompt_ids, turn))
        return segments

    @property
    def oldest_version(self) -> int:
        return min(turn.completion.oldest_version for turn in self.turns)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def env_s(self) -> float:
        """Time in the environment, with its boot."""
        return self.boot_s + sum(turn.env_s for turn in self.turns)

    @property
    def env_rewards(self) -> Mapping[str, float]:
        """Sum over the turns of each of the environment's rewards."""
        total: dict[str, float] = {}
        for turn in self.turns:
            for name, reward in turn.rewards.items():
                total[name] = total.get(name, 0.0) + reward
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunRollout:
    """A rollout between two turns.

    so_far: the rollout, as if it had been truncated there.
    saved:  the environment's state at that point; empty: a resume repeats the actions.
    """

    so_far: Rollout
    saved: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One sample of the GRM that could be parsed. `siblings` and `scores` are in the order shown, on the judge's scale.

    turn:     the turn of the rollout that it is about; None: all of it.
    criteria: the names of those that `scores` are of, where it has only some of a rubric.
    unread:   criteria without a score although the judgement was asked for it, and why.
    quotes:   the evidence for criteria that need some, by name: what the response has.
    """

    group_id: str
    siblings: tuple[int, ...]
    scores: tuple[float, ...]
    prompt_ids: tuple[int, ...]
    completion: Completion
    grm: str
    version: int
    turn: int | None = None
    criteria: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    quotes: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_forced(self) -> bool:
        """Whether the thinking budget ended its thought."""
        return self.completion.inserted is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A failure in place of a result; never a number. Infrastructure causes: timeout, refused, died.

    turn: the turn of the rollout, for a judgement of one turn.
    """

    stage: FailureStage
    cause: Cause
    attempts: int
    detail: str = ""
    turn: int | None = None

    @property
    def is_outage(self) -> bool:
        """Whether the service failed, not its answer: it was asked, and refused, timed out or died."""
        return self.attempts > 0 and self.cause in INFRA_CAUSES


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedJudgement(Failed):
    """A judgement that was generated but is unusable (unparseable, truncated). Kept for reading and training."""

    prompt_ids: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpan:
    """A reward of `value` for the tokens [start, end) of a turn. An outcome reward is one span over the last turn.

    share: this step's share of a verdict that is a mean of steps (shares sum to 1): the step's own reward is value /
           share. None: values add up.
    """

    turn: int
    start: int
    end: int
    value: float
    share: float | None = None

    @property
    def place(self) -> str:
        """The same for all rewards of these tokens."""
        return f"{self.turn}:{self.start}-{self.end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """What a teacher gives to the tokens of a rollout's completions.

    by_turn: one entry per turn, with a row per token of its completion. Rows of tokens that weren't sampled mean
             nothing.
    """

    teacher: str
    by_turn: tuple[TokenScores, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of the vote over judgements.

    rewards:   spans in reward units (scaled, mixed). Their sum, the outcome, is the reward of the whole response: on
               [0, 1], except for rewards of an environment, which have no scale. Empty: the run has no rewards.
    normalised: the spans that training uses instead, for a mix whose components are normalised within the group:
               without a scale, and 0 for a response without siblings. Empty: training uses `rewards`.
    score:     the judge's own scale (1 to 10 for a generative judge), which people read.
    breakdown: each component's reward by name, before weighting; for a scalar reward model also its `raw_score`.
    score_std: the population standard deviation of the votes, in score units (0 for a single vote).
    grm_version: completed optimizer steps of the models that judge, and new versions of their rubrics, together.
    absent:    members of a jury that gave no verdict, although enough others did.
    teacher:   the teacher's log-probs, where the policy has a teacher.
    """

    rewards: tuple[RewardSpan, ...]
    score: float
    breakdown: Mapping[str, float]
    score_std: float
    num_judgements: int
    grm_version: int = 0
    absent: tuple[str, ...] = ()
    normalised: tuple[RewardSpan, ...] = ()
    teacher: TeacherScores | None = field(default=None, compare=False)

    @property
    def outcome(self) -> float:
        """The reward of the whole response, as all metrics and bounds use it: never a normalised one."""
        return sum(span.value for span in self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAudit:
    """The vote where the early stop would have ended, next to the full vote. Scores on the judge's scale."""

    stopped_after: int  # judgements; all of them if it would not have stopped
    stopped_score: float
    full_score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeEvent:
    """What a cascade did with some siblings of a group. It is in the report of only one of them.

    rollouts:  siblings for which it decided whether to ask the second judge.
    unsure:    those about which the first judge was unsure.
    escalated: siblings that the second judge saw because of that.
    audited:   siblings with verdicts of both judges, although the first one was sure.
    error:     the sum of the absolute differences of both rewards, over the audited.
    flipped:   the audited that only one of the judges passes.
    """

    cascade: str
    rollouts: int = 0
    unsure: int = 0
    escalated: int = 0
    audited: int = 0
    error: float = 0.0
    flipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCriterion:
    """What became of a criterion of a rubric.

    met:      how far, from 0 to 1, by the vote; None: its judgement failed.
    shared:   whether it is one for all prompts, of `judge.rubric.path`.
    left_out: whether no sibling of the group is judged by it.
    fault:    whether it costs where it is met.
    caps:     whether it is essential and not met, so that the reward is at most `judge.rubric.essential_cap`.
    """

    name: str
    met: float | None
    tags: tuple[str, ...] = ()
    shared: bool = False
    left_out: bool = False
    fault: bool = False
    caps: bool = False


# Judge -> name of a criterion, or place of a step -> how far it is met, or how right, from 0 to 1.
RewardsByPart = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReport:
    """The result of judging a rollout: the verdict or its failure, and the judgements behind it for the journal.

    Judgements of several siblings at once are in the report of only one of them, so they are counted once.

    principles:   what the GRM wrote for the whole group before its judgements.
    saved_tokens: a lower bound: tokens of judgements never requested, at the mean length of the others.
    audit:        for a rollout that was judged in full to check the early stop.
    by_judge:     each judge's own report by name, where there are several; the fields above then cover all of them.
    cascades:     what cascades did, one entry for each decision and each audit.
    taught:       what the rollout's teacher gave, or why it gave nothing; None: none was asked.
    criteria:     what became of each criterion, for a judge by a rubric; also where the verdict failed.
    rubric_version: of a rubric that evolves, the version by which the judge judged; None: it doesn't.
    """

    verdict: Verdict | Failed
    judgements: tuple[Judgement, ...] = ()
    failures: tuple[Failed, ...] = ()  # single judgements that failed, including those retried
    principles: Completion | None = None
    saved_tokens: int = 0
    audit: StopAudit | None = None
    by_judge: Mapping[str, JudgeReport] = field(default_factory=dict)
    cascades: tuple[CascadeEvent, ...] = ()
    taught: TeacherScores | Failed | None = field(default=None, compare=False)
    criteria: tuple[JudgedCriterion, ...] = ()
    rubric_version: int | None = None

    @property
    def own_reports(self) -> Mapping[str, JudgeReport]:
        """Each judge's report by its name; with a single judge this report itself, under an empty name."""
        return self.by_judge or {"": self}

    @property
    def rewards_by_part(self) -> RewardsByPart:
        """Without judges of whole responses, and parts that have no score."""
        found = dict[str, Mapping[str, float]]()
        for name, own in self.own_reports.items():
            spans = own.verdict.rewards if isinstance(own.verdict, Verdict) else ()
            parts = {one.name: one.met for one in own.criteria if one.met is not None} or {
                span.place: span.value / span.share for span in spans if span.share
            }
            if parts:
                found[name] = parts
        return found

    @property
    def critiques(self) -> tuple[str, ...]:
        """The texts of all judgements that count."""
        return tuple(one.completion.text for own in self.own_reports.values() for one in own.judgements)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """The siblings of one prompt, in sibling order, with their verdicts. `version`: the lowest of the sampled
    tokens.

    by_part: what judges of criteria, or of steps, say of each (`JudgeReport.rewards_by_part`); empty: not kept.
    """

    group_id: str
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    verdicts: tuple[Verdict | Failed, ...]
    by_part: tuple[RewardsByPart, ...] = ()

    @property
    def version(self) -> int:
        return min(rollout.oldest_version for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnd:
    """How a group ended: a line of groups.jsonl.

    prompt_index: the index of its prompt in the order of the data.
    step:    the one that trained it; None if it was dropped.
    cause:   why it was dropped; None if it was trained.
    version: the lowest of its sampled tokens; None if it was dropped.
    early:   whether the learner trained on it before the next group of the batch was ready (early start).
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
class TrainedRollout:
    """What training made of a rollout: a line of trained.jsonl.

    step:      the one that trained it.
    reward:    the outcome of its verdict; None: the verdict failed, so it was in no update.
    advantage: the mean over its trained tokens, as the loss had it; None: it has none.
    right:     how right it is by the rule, from 0 to 1; None without a reference that the rule can use.
    rollout_s: from its first request to its end. judging_s: from there to its verdict, waiting included. None: not
               measured, because it began before a resume.
    """

    group_id: str
    sibling: int
    step: int
    reward: float | None = None
    advantage: float | None = None
    right: float | None = None
    rollout_s: float | None = None
    judging_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedResponses:
    """At least two responses to a prompt, and their true order: for measuring and training judges.

    grades:  one per response, higher is better, equal ones are ties. Only their order counts: they have no scale.
    ratings: rater -> that rater's grades, which `grades` are the mean of; empty: one rater without a name.
    """

    item_id: str
    prompt: Prompt
    responses: tuple[str, ...]
    grades: tuple[float, ...]
    subset: str = ""
    ratings: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def best(self) -> int | None:
        """The index of the single highest grade; None where several responses share it."""
        highest = max(self.grades)
        return self.grades.index(highest) if self.grades.count(highest) == 1 else None

    @property
    def labels(self) -> tuple[float, ...]:
        return self.grades


def mark_best(best: int, count: int) -> tuple[float, ...]:
    """The grades of `count` responses of which only the best is known: 1 for it, 0 for the others."""
    return tuple(float(place == best) for place in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponse:
    """One response to a prompt, and its true score on the judge's scale.

    is_yes_no: whether the label is only right or wrong: the high or the low end of the scale.
    ratings:   rater -> that rater's score on the judge's scale; empty: one rater without a name.
    """

    item_id: str
    prompt: Prompt
    response: str
    score: float
    subset: str = ""
    is_yes_no: bool = False
    ratings: Mapping[str, float] = field(default_factory=dict)

    @property
    def responses(self) -> tuple[str, ...]:
        return (self.response,)

    @property
    def labels(self) -> tuple[float, ...]:
        return (self.score,)


Labelled = RankedResponses | ScoredResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A sequence of tokens to train on. Entry t of mask, log-probs and advantages belongs to token_ids[t].

    loss_mask:        1 on sampled tokens that are trained, 0 elsewhere.
    sampler_logprobs: natural log, as the engine reported them; 0 where loss_mask is 0.
    advantages:       0 where loss_mask is 0.
    versions:         spans over token_ids, for the tokens of completions only, inserted ones included.
    num_turns:        how many of the rollout's turns it holds.
    experts_TLK:      int16, the experts to which the sampler sent each token, per layer with experts (-1: unknown);
                      None if unknown for all tokens.
    teacher:          a teacher's log-probs, if one scored the rollout; zeros where loss_mask is 0.
    """

    group_id: str
    sibling: int
    segment: int
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    num_turns: int = 1
    experts_TLK: np.ndarray | None = field(default=None, compare=False)
    teacher: TokenScores | None = field(default=None, compare=False)

    def of_completions(self) -> np.ndarray:
        """[T] bool: whether a token belongs to a completion, as those that a thinking budget inserted do. A critic's
        values and the KL in a reward have an entry for each such token.
        """
        found_T = np.zeros(len(self.token_ids), dtype=bool)
        for span in self.versions:
            found_T[span.start : span.end] = True
        return found_T


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherEntries:
    """What teachers give to the entries of a micro-batch. E: entries, K: likely tokens.

    taught_E:        float32, 1 for entries that are trained and that a teacher scored, 0 elsewhere.
    logprobs_E:      float32, for the sampled token.
    top_ids_EK, top_logprobs_EK: int64 and float32, the teacher's most likely tokens; None: only the sampled token is
                     compared.
    """

    taught_E: np.ndarray
    logprobs_E: np.ndarray
    top_ids_EK: np.ndarray | None = None
    top_logprobs_EK: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples packed end to end for one forward pass, and the entries of its loss. T: packed tokens, S: samples, E:
    entries, R: rollouts, L: layers with experts, K: experts per token.

    Arrays are sent between processes as they are.

    Samples of a group share prefixes: a sample holds only the tokens after its prefix; its parent and further ancestors
    hold the prefix among their tokens. An entry is a token of one sample, in the order of rollouts; a packed token that
    several samples train has an entry for each of them, with its own advantage. A token that nothing predicts is never
    trained: the loss_mask at position 0 is 0.
    """

    token_ids_T: np.ndarray  # int64
    position_ids_T: np.ndarray  # int64, within the sample, including its prefix
    sample_lengths_S: np.ndarray  # int64, tokens that each sample holds, sums to T
    parents_S: np.ndarray  # int64, the sample that holds the last token of each one's prefix; itself without a prefix
    prefix_lengths_S: np.ndarray  # int64, more than that of the parent; 0: no prefix
    places_E: np.ndarray  # int64, the packed token of each entry
    rollout_lengths_R: np.ndarray  # int64, entries of each rollout, sums to E
    loss_mask_E: np.ndarray  # float32, 0 or 1
    sampler_logprobs_E: np.ndarray  # float32
    advantages_E: np.ndarray  # float32
    versions_E: np.ndarray  # int32, version that sampled the token; -1 if none did
    teacher: TeacherEntries | None = None
    experts_TLK: np.ndarray | None = None  # int16, to replay; -1: chosen by the learner's own router


@dataclass(frozen=True, slots=True, kw_only=True)
class OldPass:
    """The pass over a micro-batch with the weights at the start of a batch's updates."""

    logprobs_T: np.ndarray  # float32, log pi_old; 0 for untrained tokens
    experts_TLK: np.ndarray | None = None  # chosen in this pass, if the updates replay them


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTotals:
    """Sizes of a whole batch, over all micro-batches and ranks. Known only when the batch is closed."""

    num_loss_tokens: int
    num_sequences: int  # rollouts with at least one trained token
    num_groups: int
    oldest_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTask:
    """One unit of a judge's work: the siblings it judges together, in sibling order.

    members:   the siblings whose verdicts need it; none for work that needs no rollout.
    turn:      the turn that it judges, for a judge of single turns; the rollout may still go on.
    judge:     the one that does it, where there are several.
    part:      that judge's own task, where there are several. It may have fewer members than this one: where the reward
               of a sibling depends on the verdicts of others, those siblings are members here, too.
    """

    members: tuple[int, ...]
    turn: int | None = None
    judge: str = ""
    part: JudgeTask | None = None


@runtime_checkable
class JudgeSession(Protocol):
    """The judging of one group, from its admission on. Used once; it ends with the group.

    A pointwise judge has one task per rollout, a listwise one a single task for all siblings, a pairwise one a task per
    pair. The results are reports per sibling, each given once, when it is final.
    """

    def begin(self) -> Sequence[JudgeTask]:
        """Judge tasks that can be done at the admission of the group."""
        ...

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        """Add an ended rollout. Returns the judge tasks that it makes possible."""
        ...

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        """Do a judge task. Returns the reports that are final now, by sibling; none for a sibling with unfinished
        tasks.

        The lowest priority goes first. Failures are returned as values; only a programming error raises. After a
        resume, judge tasks whose members all have verdicts are skipped.
        """
        ...


@runtime_checkable
class TurnwiseJudgeSession(JudgeSession, Protocol):
    """A judge session that judges turns while the rollout goes on."""

    def add_turn(self, so_far: Rollout) -> Sequence[JudgeTask]:
        """Add a rollout that goes on after its last turn, with the replies to it. Returns the judge tasks that it makes
        possible. Their results are part of the report on the whole rollout, which is given only after `add`. Once an
        episode is played again (another `attempt`), its earlier turns no longer count.
        """
        ...


def judge_tasks_of_turn(session: JudgeSession, so_far: Rollout) -> Sequence[JudgeTask]:
    """The judge tasks that an ended turn makes possible: none if the judge waits for the end of the rollout."""
    return session.add_turn(so_far) if isinstance(session, TurnwiseJudgeSession) else ()


@runtime_checkable
class Judge(Protocol):
    """Opens a judge session for each group."""

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        """Open the session of a group. `size`: the number of its siblings."""
        ...
