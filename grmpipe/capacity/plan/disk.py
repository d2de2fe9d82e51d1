"""The disk that the journals of a planned run take, at mean lengths of one turn per rollout."""

from dataclasses import dataclass

from grmpipe.capacity.plan.run_facts import RunFacts
from grmpipe.capacity.plan.work import Lengths, count_judgements, judge_lengths, policy_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerToken:
    """What a journal's line takes for a token: its id, its log-prob, its text."""

    id: float
    logprob: float
    text: float = 4.0


# Measured on lines of long answers; numbers of the first one are JSON.
PLAIN, PACKED = BytesPerToken(id=6.0, logprob=14.0), BytesPerToken(id=3.0, logprob=5.0)
LINE_BYTES = 450.0  # of a rollout or a verdict, without tokens and texts
JUDGEMENT_BYTES = 150.0


def journal_line(facts: RunFacts) -> str:
    """The journals of the whole run, in words."""
    key = "journals.compact"
    now, other = (journal_gb(facts, compact=facts.config.journals.compact is own) for own in (True, False))
    outside = (
        "" if len(journalled_judges(facts)) == len(facts.config.judging.generative) else ", without judges outside"
    )
    turns = "" if facts.config.env.env_kind.is_single else ", at one turn per rollout"
    limit = facts.config.journals.max_gb
    over = f"; journals.max_gb={limit:g} stops the run" if limit is not None and now > limit else ""
    without = "false" if facts.config.journals.compact else "true"
    return f"  journals: about {now:.2g} GB, {other:.2g} GB with {key}={without}{turns}{outside}{over}"


def journalled_judges(facts: RunFacts) -> list[str]:
    """Judges whose lengths are known: an endpoint's tokenizer isn't here."""
    return [name for name, judge in facts.config.judging.generative.items() if judge.model in facts.models]


def journal_gb(facts: RunFacts, *, compact: bool) -> float:
    """Rollouts and judgements of all steps, and of the held-out evaluations."""
    config, per_token = facts.config, PACKED if compact else PLAIN
    train, monitored = config.train, config.judge_monitor
    per_step = train.groups_per_batch * train.group_size
    held_out = len(facts.data.held_out)
    looks = train.num_steps // monitored.anchor_every
    questions = 2 * held_out + looks * min(monitored.anchors, held_out)
    judged = train.num_steps * per_step + questions * config.evaluate.samples(1)
    rollout = rollout_bytes(policy_lengths(facts), per_token)
    found = judged * (rollout + LINE_BYTES) + questions * config.evaluate.greedy * rollout
    for name in journalled_judges(facts):
        per_rollout = count_judgements(name, facts) / per_step
        shared_by = max(1.0, per_rollout) if compact else 1.0  # judgements of one line pack their prompt once
        found += judged * per_rollout * judgement_bytes(judge_lengths(name, facts), per_token, shared_by)
    return found / 1e9


def rollout_bytes(lengths: Lengths, per_token: BytesPerToken) -> float:
    prompt = lengths.prompt_tokens * (per_token.id + per_token.text)
    return LINE_BYTES + prompt + lengths.new_tokens * (per_token.id + per_token.logprob + per_token.text)


def judgement_bytes(lengths: Lengths, per_token: BytesPerToken, shared_by: float) -> float:
    """A judgement keeps the ids of its prompt, not the text."""
    prompt = lengths.prompt_tokens * per_token.id / shared_by
    return JUDGEMENT_BYTES + prompt + lengths.new_tokens * (per_token.id + per_token.logprob + per_token.text)
