"""The requests that a role's engines can have in flight at once, and the tokens of the longest: bounds, no means.

A mean request is in work.py. Memory must hold what the bounds allow.
"""

import math
from dataclasses import dataclass

from grmpipe.capacity.lower_bound import POLICY
from grmpipe.capacity.plan.run_facts import RunFacts
from grmpipe.capacity.plan.work import assume_tool_use, judge_questions, num_tokens, shares_asked
from grmpipe.config.model_training import find_training
from grmpipe.judge.context_limits import longest_response


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """The most requests at once of one engine, and the most tokens of one, prompt and answer together."""

    requests: int
    tokens: int


def requests_in_flight(role: str, facts: RunFacts) -> InFlight:
    """What each engine of a role can have in flight: the requests of all that asks it, divided over its replicas, where
    slots don't move between roles; at most the rows of its options and the window of its model. A teacher scores, which
    keeps no keys and values.
    """
    config, served, hosted = facts.config, facts.roles.served[role], facts.list_hosted(role)
    asking = {name: longest_judgement(name, facts).tokens for one in hosted for name in config.asked.select_asking(one)}
    requests, tokens = sum(count_judgements_at_once(name, facts) for name in asking), max(asking.values(), default=0)
    if config.models[role].plays:
        requests, tokens = requests + count_rollouts_at_once(facts), max(tokens, longest_rollout(facts).tokens)
    for trained, cotrain in ((one, config.trained_grms[one]) for one in hosted if one in config.trained_grms):
        requests += cotrain.prompts_per_batch * cotrain.group_size
        tokens = max(tokens, longest_judgement(config.judging.find_training_judge(trained).name, facts).tokens)
    if not served.is_elastic:
        requests = -(-requests // served.num_replicas)
    return InFlight(requests=min(requests, served.engine.max_rows), tokens=tokens)


def count_rollouts_at_once(facts: RunFacts, *, judged: bool = False) -> int:
    """The most rollouts at once: of the groups that admission opens, or of a held-out evaluation, which plays all of
    its answers at once. judged: without the greedy ones, which no judge sees.
    """
    config, train = facts.config, facts.config.train
    admitted = (train.max_staleness + 1) * train.groups_per_batch * train.group_size
    answers = config.evaluate.samples(1) + (config.evaluate.greedy and not judged)
    return max(min(admitted, config.rollout.max_concurrency), len(facts.data.held_out) * answers)


def count_judgements_at_once(name: str, facts: RunFacts) -> int:
    """The most judgements of one judge at once: of all rollouts that are in flight together."""
    group_size, judge = facts.config.train.group_size, facts.config.asked.judges[name]
    groups = count_rollouts_at_once(facts, judged=True) / group_size
    requests = math.ceil(groups * judge.judgements_of_group(group_size) * shares_asked(facts)[name] - 1e-9)
    return min(requests, judge.limits.max_concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """The tokens of a role's longest request and of its longest answer."""

    prompt: int
    answer: int
    window: int  # 0: unknown

    @property
    def tokens(self) -> int:
        return min(self.prompt + self.answer, self.window or self.prompt + self.answer)

    def batch_tokens(self, groups: int, group_size: int, shares: bool) -> int:
        """The packed tokens of a batch of these. shares: a group has its prompt once."""
        if not shares:
            return groups * group_size * self.tokens
        prompt = min(self.prompt, self.tokens)  # one that is longer than the window is skipped
        return groups * (prompt + group_size * (self.tokens - prompt))


def longest_rollout(facts: RunFacts) -> Longest:
    """A rollout; its answer holds all turns, and what the environment showed."""
    sized = facts.models[POLICY]
    return Longest(
        prompt=max((num_tokens(sized, prompt.messages) for prompt in facts.longest_prompts), default=0),
        answer=longest_response(facts.config.rollout, facts.config.env, sized.context_tokens),
        window=sized.context_tokens,
    )


def longest_judgement(name: str, facts: RunFacts) -> Longest:
    """A judgement of one judge, which is shown full responses."""
    config, judge = facts.config, facts.config.asked.judges[name]
    sized = facts.models[judge.model]
    asked = judge_questions(judge, facts.longest_prompts)
    question = max((num_tokens(sized, messages) for messages in asked), default=0)
    response = longest_response(config.rollout, config.env, facts.models[POLICY].context_tokens)
    principles = judge.principles.max_new_tokens if judge.principles.kind == "shared" else 0
    use = assume_tool_use(judge, config.plan)
    results = math.ceil(judge.tools.max_calls * 2 * use.tokens) if use is not None else 0
    shown = judge.responses_shown(config.train.group_size) * response + principles + results
    return Longest(prompt=question + shown, answer=judge.max_new_tokens, window=sized.context_tokens)


def count_batch_tokens(model: str, facts: RunFacts) -> int:
    """The most packed tokens of a batch of the learner of a served model: of the rollouts, or of the judgements."""
    config, train = facts.config, find_training(facts.config, model).train
    longest = longest_rollout(facts)
    if model in config.trained_grms:
        longest = longest_judgement(config.judging.find_training_judge(model).name, facts)
    return longest.batch_tokens(train.groups_per_batch, train.group_size, train.prefix_sharing)
