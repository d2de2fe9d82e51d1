"""What a planned run is expected to ask of endpoints, at the plan's mean lengths, with its cost."""

from dataclasses import dataclass

from grmpipe.capacity.lower_bound import RoleWork
from grmpipe.capacity.plan.run_facts import RunFacts
from grmpipe.capacity.plan.work import Lengths, judge_work, policy_lengths, shares_asked, teacher_work, writer_work
from grmpipe.models.settings import PriceConfig

NOT_COUNTED = "without retries, preflight judgements and checks of the judge"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRequests:
    """The requests to a model behind an endpoint. judged: of rollouts in training; held_out: of evaluations."""

    model: str
    price: PriceConfig
    judged: float
    held_out: float
    prompt_tokens: float
    sampled_tokens: float

    @property
    def requests(self) -> float:
        return self.judged + self.held_out

    @property
    def cost_usd(self) -> float:
        return self.price.cost_usd(self.prompt_tokens, 0, self.sampled_tokens)

    @property
    def text(self) -> str:
        cost = f"; about {self.cost_usd:,.3g} USD" if self.price.is_known else ""
        return (
            f"{self.model}: {self.judged:,.0f} requests of the steps and {self.held_out:,.0f} of evaluations, "
            f"{self.prompt_tokens:,.0f} prompt tokens, {self.sampled_tokens:,.0f} sampled{cost}"
        )


def expect_requests(facts: RunFacts) -> list[ExpectedRequests]:
    """For each model behind an endpoint."""
    config = facts.config
    per_step = config.train.groups_per_batch * config.train.group_size
    evaluated = count_evaluated(facts) / per_step
    found = []
    for role, price in config.prices.items():
        works = [judge_work(name, facts) for name in config.asked.select_asking(role)]
        for name, judge in config.asked.scalar.items():
            if judge.model == role:
                played = policy_lengths(facts)
                read = Lengths(prompt_tokens=played.prompt_tokens + played.new_tokens, new_tokens=0)
                works.append(read.work(round(per_step * shares_asked(facts)[name]), 1))
        taught = [teacher_work(role, facts)] if role in config.teachers else []  # an evaluation has no teachers
        taught += [writer_work(role, facts)] if role in config.writers else []
        steps = config.train.num_steps
        found.append(
            ExpectedRequests(
                model=role,
                price=price,
                judged=steps * sum(work.requests for work in (*works, *taught)),
                held_out=evaluated * sum(work.requests for work in works),
                prompt_tokens=(steps + evaluated) * sum_prompts(works) + steps * sum_prompts(taught),
                sampled_tokens=(steps + evaluated) * sum_sampled(works) + steps * sum_sampled(taught),
            )
        )
    return found


def sum_prompts(works: list[RoleWork]) -> float:
    return sum(work.requests * work.prompt_tokens for work in works)


def sum_sampled(works: list[RoleWork]) -> float:
    return sum(work.requests * work.new_tokens for work in works)


def count_evaluated(facts: RunFacts) -> float:
    """The answers that held-out evaluations let judge: the first and the last all prompts', the others the anchors'."""
    config, held_out = facts.config, len(facts.data.held_out)
    between = (config.train.num_steps - 1) // config.evaluate.every
    return (2 * held_out + between * min(config.judge_monitor.anchors, held_out)) * config.evaluate.samples(1)


def warn_of_bounds(facts: RunFacts, expected: list[ExpectedRequests]) -> list[str]:
    """A warning for each bound of the budget that is below what is expected."""
    sums = {
        "max_requests": sum(one.requests for one in expected),
        "max_tokens": sum(one.prompt_tokens + one.sampled_tokens for one in expected),
        "max_cost": sum(one.cost_usd for one in expected),
    }
    shown = {"max_requests": "{:,.0f} requests", "max_tokens": "{:,.0f} tokens", "max_cost": "{:,.3g} USD"}
    return [
        f"budget.{key}={bound:g}: the run is expected to take {shown[key].format(sums[key])} and would stop before its "
        "end, with a checkpoint; type a higher bound, or fewer train.num_steps"
        for key, bound in facts.config.budget.bounds.items()
        if sums[key] > bound
    ]
