"""The work of a step of a planned run, by role: its requests, their tokens, what learners train on."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from grmpipe.algorithm.distill import BETTER_ANSWER, CRITIQUE
from grmpipe.capacity.lower_bound import META_RM, POLICY, GrmTraining, RoleWork, StepWork
from grmpipe.capacity.plan.run_facts import RunFacts, Sized
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.model_training import find_training
from grmpipe.config.run_config import RunConfig
from grmpipe.config.task_settings import PlanConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.judge.evolving_rubric import MOST_ASKED
from grmpipe.judge.grm import BYTES_PER_TOKEN, estimate_tokens
from grmpipe.judge.prompt import JudgePrompt
from grmpipe.models.lm.flops import PackedSizes
from grmpipe.models.types import Message
from grmpipe.types import Prompt

SAMPLED_PROMPTS = 64  # prompts for their mean length


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What a batch takes beside one forward and backward pass over each micro-batch.

    reference_in_loss: the reference passes each micro-batch within `accumulate`. num_separate: passes without gradients
    that are calls of their own: of the reference for a KL in the reward, of the policy for pi_old. num_updates:
    optimizer steps.
    """

    reference_in_loss: bool = False
    num_separate: int = 0
    num_updates: int = 1

    @property
    def num_forward(self) -> int:
        """The passes without gradients over each packed token."""
        return self.num_separate + self.reference_in_loss


def count_passes(algorithm: AlgorithmConfig, groups_per_batch: int) -> Passes:
    """The passes of the learner that trains with these settings (BatchTrainer, Learner)."""
    has_reference = algorithm.kl_coefficient > 0
    num_updates = min(algorithm.updates_per_batch, groups_per_batch)
    has_old_pass = num_updates > 1 and algorithm.proximal == "recomputed"
    return Passes(
        reference_in_loss=has_reference and not algorithm.kl_in_reward,
        num_separate=(has_reference and algorithm.kl_in_reward) + has_old_pass,
        num_updates=num_updates,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Means over the judgements of a judge with tools: turns that call; the seconds and the tokens of the results of
    each.
    """

    turns: float
    seconds: float
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Means over a role's requests. tools: of those that call some."""

    prompt_tokens: float
    new_tokens: float
    tools: ToolUse | None = None

    def work(self, requests: int, shared_by: float) -> RoleWork:
        """The work of this many requests, of which some have the same prompt. What tools return is read like a prompt,
        and is no other request's.
        """
        results = self.tools.turns * self.tools.tokens if self.tools is not None else 0.0
        whole = self.prompt_tokens + results
        return RoleWork(
            requests=requests,
            prompt_tokens=whole,
            new_tokens=self.new_tokens,
            prompt_shared_by=whole / (self.prompt_tokens / shared_by + results),
            outside_s=self.tools.turns * self.tools.seconds if self.tools is not None else 0.0,
        )


def assume_tool_use(judge: JudgeConfig, plan: PlanConfig) -> ToolUse | None:
    """Half of what a judgement may call, a call in a turn, and half of the longest result. None: it has no tools."""
    if not judge.tools.is_set:
        return None
    tokens = judge.tools.max_result_chars / 2 / BYTES_PER_TOKEN
    return ToolUse(turns=judge.tools.max_calls / 2, seconds=plan.tool_s, tokens=tokens)


def step_work(facts: RunFacts) -> StepWork:
    """The work of a step at mean lengths: those that are set, else half of the maximum."""
    config, train = facts.config, facts.config.train
    rollouts = math.ceil(train.groups_per_batch * compute_answer_share(config) * train.group_size - 1e-9)
    own = policy_lengths(facts).work(rollouts, sharers(POLICY, train.group_size, facts))
    trained = [own]
    if config.self_judging_share:
        asked = judge_lengths(config.judging.find_training_judge(POLICY).name, facts)
        judged = train.groups_per_batch * train.group_size - rollouts
        trained.append(asked.work(judged, sharers(POLICY, train.group_size, facts)))
    learner_tokens, passes = sum(count_learner_tokens(work, train) for work in trained), policy_passes(config)
    judging = {
        host: [work for role in facts.list_hosted(host) for work in estimate_judging(role, facts)]
        for host in dict.fromkeys((POLICY, *config.asked.host_roles))
    }
    judging[POLICY] = [*trained, *judging[POLICY]]
    played = policy_lengths(facts)
    return StepWork(
        engines={role: together(works) for role, works in judging.items()},
        learner_tokens=learner_tokens,
        groups=train.groups_per_batch,
        max_staleness=train.max_staleness,
        learner_forward_tokens=passes.num_forward * learner_tokens,
        learner_updates=passes.num_updates,
        starts_early=starts_early(facts),
        critic_tokens=rollouts * (played.prompt_tokens + played.new_tokens) if config.critic.enabled else 0.0,
        critic_updates=config.critic.updates(config.algorithm, train),
        scorer_tokens=scorer_tokens(facts),
        grm_learners={config.learners[role]: grm_training(role, facts) for role in config.trained_grms},
    )


def count_learner_tokens(work: RoleWork, train: TrainConfig) -> float:
    """The tokens of groups' samples as the learner packs them."""
    prompts = work.requests / train.group_size if train.prefix_sharing else work.requests
    return prompts * work.prompt_tokens + work.requests * work.new_tokens


def compute_answer_share(config: RunConfig) -> float:
    """The share of the groups that answer a prompt of the run, and don't judge."""
    return 1 - config.self_judging_share


def learner_flops(facts: RunFacts) -> float | None:
    """The operations of the policy's learner in a step, at mean lengths. None if the model's size is unknown."""
    config, footprint = facts.config, facts.models[POLICY].footprint
    if footprint is None:
        return None
    model, num_forward = footprint.flops(config.policy.lora), policy_passes(config).num_forward
    group = pack_group(facts)
    return config.train.groups_per_batch * (model.count_training(group) + num_forward * model.forward(group))


def pack_group(facts: RunFacts, *, shares: bool | None = None) -> PackedSizes:
    """The samples of a group as a learner packs them, at mean lengths. shares: they hold their prompt once; None: as
    configured for the policy's learner.
    """
    train, played = facts.config.train, policy_lengths(facts)
    shares = train.prefix_sharing if shares is None else shares
    return pack_siblings(played, train.group_size, shares)


def pack_judgement(role: str, facts: RunFacts) -> PackedSizes:
    """The samples of one judging task as the learner of a judging model packs them, at mean lengths."""
    asked = judge_lengths(facts.config.judging.find_training_judge(role).name, facts)
    return pack_siblings(asked, facts.config.trained_grms[role].group_size, facts.config.train.prefix_sharing)


def pack_siblings(lengths: Lengths, count: int, shares: bool) -> PackedSizes:
    prompt, answer = round(lengths.prompt_tokens), round(lengths.new_tokens)
    return PackedSizes(
        lengths_S=[prompt + answer, *[answer if shares else prompt + answer] * (count - 1)],
        prefixes_S=[0, *[prompt if shares else 0] * (count - 1)],
        head_rows=count * answer,
    )


def starts_early(facts: RunFacts) -> bool:
    """Whether the policy's learner trains groups while others roll out (BatchTrainer, TimeSharedTrainer)."""
    whole_batch = facts.config.algorithm.estimator_kind.need == "batch" or policy_passes(facts.config).num_updates > 1
    return not whole_batch and not facts.placement.time_sharing_roles


def policy_passes(config: RunConfig) -> Passes:
    """The passes of the policy's learner."""
    return count_passes(config.algorithm, config.train.groups_per_batch)


def sharers(role: str, requests: int, facts: RunFacts) -> int:
    """The requests that compute their prompt once, of those with the same one."""
    return requests if facts.roles.served[role].engine.caches_prompts else 1


def together(works: Sequence[RoleWork]) -> RoleWork:
    """The work of several kinds of requests on the same engines: their sum, at their mean lengths."""
    requests = sum(work.requests for work in works)
    if not requests:
        return works[0]
    prompt_tokens = sum(work.requests * work.prompt_tokens for work in works)
    return RoleWork(
        requests=requests,
        prompt_tokens=prompt_tokens / requests,
        new_tokens=sum(work.requests * work.new_tokens for work in works) / requests,
        prompt_shared_by=prompt_tokens / sum(work.requests * work.prefilled_tokens for work in works),
        outside_s=sum(work.requests * work.outside_s for work in works) / requests,
    )


def policy_lengths(facts: RunFacts) -> Lengths:
    """The mean lengths of a rollout's turn."""
    config = facts.config
    prompts = facts.data.train[:SAMPLED_PROMPTS]
    prompt_tokens = fmean(num_tokens(facts.models[POLICY], prompt.messages) for prompt in prompts)
    return Lengths(
        prompt_tokens=prompt_tokens, new_tokens=config.plan.rollout_tokens or config.rollout.max_new_tokens / 2
    )


# -- judges --------------------------------------------------------------------------------------------------------


def estimate_judging(role: str, facts: RunFacts) -> list[RoleWork]:
    """The judgements of a model in a step: for every judge that asks it, and for its learner; what it teaches, and the
    criteria that it writes.
    """
    asked = [judge_work(name, facts) for name in facts.config.asked.select_asking(role)]
    if role in facts.config.teachers:
        asked.append(teacher_work(role, facts))
    if role in facts.config.writers:
        asked.append(writer_work(role, facts))
    return [*asked, estimate_training_requests(role, facts)] if role in facts.config.trained_grms else asked


def teacher_work(role: str, facts: RunFacts) -> RoleWork:
    """The rollouts that a teacher scores in a step: those on the prompts of its sources. Each is a prompt to it."""
    train, prompts, played = facts.config.train, facts.data.train, policy_lengths(facts)
    taught = sum(facts.config.algorithm.distill.find_teacher(prompt.source) == role for prompt in prompts)
    whole = played.prompt_tokens + played.new_tokens + context_tokens(facts)
    requests = math.ceil(train.groups_per_batch * train.group_size * taught / len(prompts) - 1e-9)
    return Lengths(prompt_tokens=whole, new_tokens=1).work(requests, 1)


def writer_work(role: str, facts: RunFacts) -> RoleWork:
    """The criteria that a model writes in a step, at most: it reads a question and two answers at a time."""
    judges = [one for one in facts.config.judging.judges.values() if one.rubric.evolve.writer == role]
    played, new_tokens = policy_lengths(facts), max(one.principles.max_new_tokens for one in judges)
    requests = math.ceil(sum(MOST_ASKED / one.rubric.evolve.every_steps for one in judges))
    return Lengths(prompt_tokens=played.prompt_tokens + 2 * played.new_tokens, new_tokens=new_tokens).work(requests, 1)


def context_tokens(facts: RunFacts) -> float:
    """What a teacher reads more than the policy, of what models write: at most one critique and one answer."""
    fields, judges = facts.config.algorithm.distill.context_fields, facts.config.judging.generative
    critiques = [judge_lengths(name, facts).new_tokens for name in judges] if CRITIQUE in fields else []
    return max(critiques, default=0.0) + (policy_lengths(facts).new_tokens if BETTER_ANSWER in fields else 0.0)


def judge_work(name: str, facts: RunFacts) -> RoleWork:
    """The judgements of one judge in a step, at most: of the rollouts that the composition may show it."""
    judge = facts.config.asked.judges[name]
    shared_by = sharers(judge.model, judge.num_judgements, facts)
    return judge_lengths(name, facts).work(count_judgements(name, facts), shared_by)


def count_judgements(name: str, facts: RunFacts) -> int:
    """The requests for judgements of one judge in a step, at most."""
    train, judge = facts.config.train, facts.config.asked.judges[name]
    whole = train.groups_per_batch * compute_answer_share(facts.config) * judge.judgements_of_group(train.group_size)
    return math.ceil(whole * shares_asked(facts)[name] * count_calls(name, facts) - 1e-9)


def count_calls(name: str, facts: RunFacts) -> float:
    """The mean calls of a judgement: several where `judge.rubric.criteria_per_call` divides the rubrics."""
    judge = facts.config.asked.judges[name]
    if not (per_call := judge.rubric.criteria_per_call):
        return 1.0
    template = JudgePrompt.of(judge)
    sizes = [len(template.find_rubric(prompt)) for prompt in prompts_judged(name, facts)]
    return fmean(max(1, math.ceil(size / per_call)) for size in sizes)


def shares_asked(facts: RunFacts) -> dict[str, float]:
    """Judge -> the largest share of the rollouts that it judges, by the sources of the prompts."""
    prompts = facts.data.train
    sources = {source: count / len(prompts) for source, count in Counter(prompt.source for prompt in prompts).items()}
    config, watching = facts.config, dict[str, float]()
    for watcher, share in config.watchers.items():
        for name in config.rewards.list_judges(watcher):
            watching[name] = watching.get(name, 0.0) + share
    asked = config.rewards.compute_asked_shares(sources)
    return {name: asked.get(name, 0.0) + watching.get(name, 0.0) for name in config.asked.judges}


def prompts_judged(name: str, facts: RunFacts) -> list[Prompt]:
    """Some prompts whose responses a judge is shown; any, if it is shown none."""
    config, prompts = facts.config, facts.data.train
    judged = {source: name in config.rewards.compute_source_shares(source) for source in {
        prompt.source for prompt in prompts
    }}  # fmt: skip
    return ([prompt for prompt in prompts if judged[prompt.source]] or list(prompts))[:SAMPLED_PROMPTS]


def judge_lengths(name: str, facts: RunFacts) -> Lengths:
    """The mean lengths of a judge's prompts and judgements."""
    config = facts.config
    judge = config.asked.judges[name]
    shown = judge.responses_shown(config.train.group_size) * policy_lengths(facts).new_tokens
    return Lengths(
        prompt_tokens=judge_prompt_tokens(name, facts) + shown,
        new_tokens=config.plan.judgement_tokens or judge.max_new_tokens / 2,
        tools=assume_tool_use(judge, config.plan),
    )


def judge_prompt_tokens(name: str, facts: RunFacts) -> float:
    """The mean tokens of a judge's prompt without the judged answer."""
    judge = facts.config.asked.judges[name]
    asked = judge_questions(judge, prompts_judged(name, facts))
    return fmean(num_tokens(facts.models.get(judge.model), messages) for messages in asked)


def judge_questions(judge: JudgeConfig, prompts: Sequence[Prompt]) -> list[tuple[Message, ...]]:
    """The messages with which a judge asks about empty answers."""
    template = JudgePrompt.of(judge)
    return [template.render(prompt, *template.blanks, principles="") for prompt in prompts]


def num_tokens(sized: Sized | None, messages: tuple[Message, ...]) -> int:
    """sized: None: only an endpoint has the model."""
    if sized is not None and sized.model is not None:
        return len(sized.model.renderer.render(messages))
    return sum(estimate_tokens(message.content) for message in messages)


def scorer_tokens(facts: RunFacts) -> dict[str, float]:
    """The tokens that models with a scalar head read in a step, by role.

    A scalar reward model reads prompts and rollouts; a meta-RM the prompts and judgements of the judges whose votes it
    weights.
    """
    config, shares = facts.config, shares_asked(facts)
    rollouts, played = config.train.groups_per_batch * config.train.group_size, policy_lengths(facts)
    found = dict.fromkeys(config.asked.scorer_roles, 0.0)
    for name, judge in config.asked.scalar.items():
        if judge.model in found:
            found[judge.model] += shares[name] * rollouts * (played.prompt_tokens + played.new_tokens)
    if config.uses_meta_rm:
        works = [judge_work(name, facts) for name in config.asked.weighted]
        found[META_RM] = sum(work.requests * (work.prompt_tokens + work.new_tokens) for work in works)
    return found


# -- judging models that learn ---------------------------------------------------------------------------------------


def estimate_training_requests(role: str, facts: RunFacts) -> RoleWork:
    """The judgements that a model in training samples to learn from, in a step of the policy."""
    cotrain = facts.config.trained_grms[role]
    asked = judge_lengths(facts.config.judging.find_training_judge(role).name, facts)
    requests = cotrain.grm_steps_per_policy_step * cotrain.prompts_per_batch * cotrain.group_size
    return asked.work(math.ceil(requests), sharers(role, cotrain.group_size, facts))


def grm_training(role: str, facts: RunFacts) -> GrmTraining:
    """The work of a judging model's learner in a step of the policy, after its warm-up."""
    cotrain, asked = facts.config.trained_grms[role], estimate_training_requests(role, facts)
    prompts = asked.requests / cotrain.group_size if facts.config.train.prefix_sharing else asked.requests
    tokens = prompts * asked.prompt_tokens + asked.requests * asked.new_tokens
    passes = count_passes(find_training(facts.config, role).algorithm, cotrain.prompts_per_batch)
    return GrmTraining(
        model=role,
        steps=cotrain.grm_steps_per_policy_step,
        tokens=tokens,
        forward_tokens=passes.num_forward * tokens,
    )


# -- in words --------------------------------------------------------------------------------------------------------


def assumptions(facts: RunFacts) -> str:
    """The sources of lengths and costs, in one line."""
    judges = facts.config.judging.generative
    local = [name for name, judge in judges.items() if judge.model in facts.models]
    per = {name: "judgement" if len(judges) == 1 else f"judgement of {name}" for name in local}
    lengths = [
        f"{policy_lengths(facts).new_tokens:.0f} tokens per rollout",
        *(f"{judge_lengths(name, facts).new_tokens:.0f} tokens per {what}" for name, what in per.items()),
    ]
    return f"estimated from the devices' data sheets; {', '.join(lengths)} on average"
