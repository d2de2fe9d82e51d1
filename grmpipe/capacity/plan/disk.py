"""The disk that the journals of a planned run take, at mean lengths of one turn per rollout."""

from dataclasses import dataclass

from grmpipe.capacity.plan.run_facts import RunFacts
from grmpipe.capacity.plan.work import Lengths, count_judgements, judge_lengths, policy_lengths
from grmpipe.config.journals import ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerToken:
    """What a journal's line takes for a token: its id, its log-prob, its text."""

    id: float
    logprob: float
    text: float = 4.0


# Measured on lines of long answers; numbers of the first one are JSON.
PLAIN, PACKED = BytesPerToken(id=6.0, logprob=14.0), BytesPerToken(id=3.0, logprob=5.0)
ONLY_TEXT, NO_TEXT = BytesPerToken(id=0.0, logprob=0.0), BytesPerToken(id=0.0, logprob=0.0, text=0.0)
LINE_BYTES = 450.0  # a rollout's or a verdict's, without tokens and texts
JUDGEMENT_BYTES = 150.0


def journal_line(facts: RunFacts) -> str:
    """The journals of the whole run, in words."""
    key = "journals.compact"
    config = facts.config.journals
    now, other = (journal_gb(facts, PACKED if config.compact is own else PLAIN) for own in (True, False))
    left = estimate_kept_gb(facts, now)
    outside = (
        "" if len(list_journalled_judges(facts)) == len(facts.config.judging.generative) else ", without judges outside"
    )
    turns = "" if facts.config.env.env_kind.is_single else ", at one turn per rollout"
    limit = config.max_gb
    over = f"; journals.max_gb={limit:g} stops the run" if limit is not None and left > limit else ""
    without = "false" if config.compact else "true"
    kept = "" if config.keep == ALL else f"; journals.keep={config.keep} leaves {left:.2g} GB, up to twice in between"
    return f"  journals: about {now:.2g} GB, {other:.2g} GB with {key}={without}{turns}{outside}{kept}{over}"


def estimate_kept_gb(facts: RunFacts, whole_gb: float) -> float:
    """What journals.keep leaves; what a resume may need, and evaluations, stay whole besides."""
    if (keep := facts.config.journals).keep == ALL:
        return whole_gb
    if (share := keep.kept_share) is None:
        return journal_gb(facts, ONLY_TEXT)
    return share * whole_gb + (1 - share) * journal_gb(facts, NO_TEXT)


def list_journalled_judges(facts: RunFacts) -> list[str]:
    """Judges whose lengths are known: an endpoint's tokenizer isn't here."""
    return [name for name, judge in facts.config.judging.generative.items() if judge.model in facts.models]


def journal_gb(facts: RunFacts, per_token: BytesPerToken) -> float:
    """Rollouts and judgements of all steps, and of the held-out evaluations."""
    config = facts.config
    train, monitored = config.train, config.judge_monitor
    per_step = train.groups_per_batch * train.group_size
    held_out = len(facts.data.held_out)
    looks = train.num_steps // config.evaluate.every
    questions = 2 * held_out + looks * min(monitored.anchors, held_out)
    judged = train.num_steps * per_step + questions * config.evaluate.samples(1)
    rollout = rollout_bytes(policy_lengths(facts), per_token)
    found = judged * (rollout + LINE_BYTES) + questions * config.evaluate.greedy * rollout
    for name in list_journalled_judges(facts):
        per_rollout = count_judgements(name, facts) / per_step
        # Judgements of one line pack their prompt once.
        shared_by = max(1.0, per_rollout) if per_token is PACKED else 1.0
        found += judged * per_rollout * judgement_bytes(judge_lengths(name, facts), per_token, shared_by)
    return found / 1e9


def rollout_bytes(lengths: Lengths, per_token: BytesPerToken) -> float:
    prompt = lengths.prompt_tokens * (per_token.id + per_token.text)
    return LINE_BYTES + prompt + lengths.new_tokens * (per_token.id + per_token.logprob + per_token.text)


def judgement_bytes(lengths: Lengths, per_token: BytesPerToken, shared_by: float) -> float:
    """A judgement keeps the ids of its prompt, not the text."""
    prompt = lengths.prompt_tokens * per_token.id / shared_by
    return JUDGEMENT_BYTES + prompt + lengths.new_tokens * (per_token.id + per_token.logprob + per_token.text)
