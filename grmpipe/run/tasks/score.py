"""task=score: judges responses that were written elsewhere, those of a file or those that a script hands over.

prompt and responses -> a group -> the judge of a run, with its engines, votes and limits -> a verdict or a failure each
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from grmpipe.config.io.key_errors import section
from grmpipe.config.keys.entry_names import REWARD
from grmpipe.config.keys.user_code import format_value
from grmpipe.config.reward_checks import check_sources
from grmpipe.config.run_config import RunConfig
from grmpipe.config.task_settings import ITEMS_AT_ONCE
from grmpipe.data.prompts import FIELDS, VALUES, VERLS, parse_prompt, refuse_half_characters
from grmpipe.data.rows import CALL, Findings, Row, read_rows
from grmpipe.judge.context_limits import check_template
from grmpipe.judge.grm import set_purpose
from grmpipe.judge.judge_in_time import judge_in_time
from grmpipe.judge.pointwise_adapter import rollout_of_messages, rollout_of_text
from grmpipe.models.types import Message
from grmpipe.observe.plain_json import json_bytes
from grmpipe.observe.progress import counts_text, join_shown, left_at_pace, left_text
from grmpipe.observe.recorder import JUDGEMENTS, ROLLOUTS, JudgedSibling
from grmpipe.observe.summary import EvalSummary, Status, Summary
from grmpipe.pipeline.counters import Counters
from grmpipe.pipeline.health import OutageBreaker
from grmpipe.pipeline.producer import with_version
from grmpipe.run.build.compose_pipeline import compose_health
from grmpipe.run.build.start import Running, refuse_denied, start
from grmpipe.run.prepare import Prepared, check_own_judges
from grmpipe.run.run_context import Run, RunContext
from grmpipe.run.run_prompts import check_references, select_reaching
from grmpipe.run.tasks.prepare_evaluation import check_measurable, find_judges
from grmpipe.run.tasks.stats import summarize_judging
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.run_together import raise_first_failure, run_until
from grmpipe.serve.open_calls import OpenCalls
from grmpipe.types import Metrics, Prompt, Rollout

VERDICTS = "verdicts.jsonl"
RESPONSES = ("response", "responses")  # fields of a row: one, or those of a group
ROLES = ("assistant", "user", "tool")  # of the messages of a response


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """Responses to one prompt, as the siblings of a group."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedScoring:
    """A checked judge, ready to start, and what it judges first: the groups of score.path, or none."""

    prepared: Prepared
    groups: tuple[Responses, ...] = ()

    @property
    def config(self) -> RunConfig:
        return self.prepared.config


def prepare_scoring(config: RunConfig) -> PreparedScoring:
    """Find the models that judge, read the file, and check that they fit each other. Raises ConfigError."""
    config = config.without_adapters()
    for judge in config.judging.judges.values():
        check_measurable(judge)
    groups: tuple[Responses, ...] = ()
    if config.score.path is not None:
        with section("score.path: "):
            groups = tuple(read_groups(Path(config.score.path), config.data.columns))
    prompts = [group.prompt for group in groups]
    if config.score.path is not None:
        with section(""):
            check_sources(config.rewards, {prompt.source for prompt in prompts})
        for name, judge in config.judging.judges.items():
            if judge.kind == "generative":
                check_template(judge, prompts)
            if judge.kind == "rule":
                with section("score.path: "):
                    check_references(judge, config.score.path, select_reaching(config.rewards, name, prompts))
    check_own_judges(config)
    return PreparedScoring(prepared=find_judges(config, prompts, reads_policy=False), groups=groups)


def read_groups(file: Path, columns: Mapping[str, str] | None = None) -> Iterator[Responses]:
    """The groups of a file. columns: field -> the file's own column. Raises ValueError that names file, line and
    field.
    """
    findings, rows, used = Findings(file), 0, (*FIELDS, *VERLS, *RESPONSES)
    for number, where, row in read_rows(file, used, findings, columns=columns, values=(*VALUES, "responses")):
        rows += 1
        yield parse_responses(row, where, f"{file.name}:{number}", findings)
    if not rows:
        raise ValueError(
            f'{file}: is empty; a line looks like {{"prompt": "What is 6 x 7?", "responses": ["42", "41"]}}'
        )
    findings.report()


def parse_responses(row: Row, where: str, group_id: str, findings: Findings) -> Responses:
    """The prompt and the responses of a row: texts, or lists of messages for episodes of several turns. Raises
    ValueError that begins with `where`.
    """
    given = [field for field in RESPONSES if row.get(field) is not None]
    if len(given) != 1:
        raise ValueError(
            f"{where}: expected exactly one of the fields response and responses; its fields: {', '.join(row)}"
        )
    found = [row["response"]] if given == ["response"] else row["responses"]
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise ValueError(
            f"{where}: responses: expected a list of texts, or of lists of messages, got {format_value(found)}"
        )
    prompt = parse_prompt(
        {name: value for name, value in row.items() if name not in RESPONSES}, where, group_id, findings
    )
    rollouts = tuple(
        parse_response(one, f"{where}: responses[{place}]", group_id, place) for place, one in enumerate(found)
    )
    return Responses(prompt=prompt, rollouts=rollouts)


def parse_response(response: object, where: str, group_id: str, sibling: int) -> Rollout:
    """A response as a rollout without tokens. An empty text is one: a policy may write nothing."""
    if isinstance(response, str):
        refuse_half_characters([("text", response)], where)
        return rollout_of_text(group_id, sibling, response)
    if not isinstance(response, Sequence) or not response:
        raise ValueError(f"{where}: expected a text, or a list of messages, got {format_value(response)}")
    messages = [parse_message(one, f"{where}[{place}]") for place, one in enumerate(response)]
    if not any(message.role == "assistant" for message in messages):
        raise ValueError(f"{where}: expected a message with role assistant, which is judged; none of them has it")
    return rollout_of_messages(group_id, sibling, messages)


def parse_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise ValueError(f"{where}: expected an object with role and content, a text, got {format_value(message)}")
    if message.get("role") not in ROLES:
        raise ValueError(f"{where}.role: expected one of {', '.join(ROLES)}, got {format_value(message.get('role'))}")
    refuse_half_characters([("content", message["content"])], where)
    return Message(role=message["role"], content=message["content"])


class ScoringRun(Run[PreparedScoring]):
    """Starts the judge alone, judges the groups of the file, then serves whoever watches the run."""

    is_policy_run = False

    def __init__(self, prepared: PreparedScoring, context: RunContext) -> None:
        super().__init__(prepared, context)
        self._running: Running | None = None
        self._counters = Counters()
        self._judged: list[tuple[Responses, list[JudgedSibling]]] = []
        self._calls = itertools.count()
        self._clock = ActiveClock()  # of the deadlines of groups
        self._open = OpenCalls[list[JudgedSibling]](self._config.serve.orphan_s)

    async def run(self) -> Status:
        self._running = running = await self._start()
        with refuse_denied():
            return await run_until(self._work(), **running.background())

    async def _start(self) -> Running:
        running = await start(self._prepared.prepared, self._observers, self._run_dir, plays=False)
        running.maintenance.stops(self._clock)
        return running

    async def _work(self) -> Status:
        if self._prepared.groups:
            await self._judge_file()
        await self._context.watcher.serve(self._judge_call)
        return "completed"

    async def _judge_file(self) -> None:
        """Judge all groups, ITEMS_AT_ONCE at a time. Raises Unfit in an outage of the judge, and BudgetSpent."""
        for name in (ROLLOUTS, JUDGEMENTS):  # of a process that a budget ended; paid_answers.jsonl has what it paid for
            (self._run_dir / name).unlink(missing_ok=True)
        breaker, places = OutageBreaker(compose_health(self._config)), asyncio.Semaphore(ITEMS_AT_ONCE)
        groups = self._prepared.groups
        done: list[list[JudgedSibling] | None] = [None] * len(groups)

        async def judge(place: int, group: Responses) -> None:
            async with places:
                await breaker.until_fit()
                done[place] = judged = await self._judge(REWARD, group, place, place)
                for one in judged:
                    breaker.record(one.report.verdict)

        def describe(took_s: float) -> str:
            ended = sum(one is not None for one in done)
            return join_shown(
                "judging", counts_text("groups", ended, len(done)), left_text(left_at_pace(ended, len(done), took_s))
            )

        with self._observers.progress.show_while(describe):
            async with raise_first_failure() as tasks:
                for place, group in enumerate(groups):
                    tasks.create_task(judge(place, group))
        breaker.check()
        self._judged = [(group, one) for group, one in zip(groups, done, strict=True) if one is not None]
        lines = (json_bytes(to_line(group, one)) + b"\n" for group, one in self._judged)
        (self._run_dir / VERDICTS).write_bytes(b"".join(lines))
        for text in describe_verdicts([one for _, judged in self._judged for one in judged]):
            self._observers.note(text)
        if words := self._counters.judging.rubric.describe():
            self._observers.note(words)

    async def _judge_call(self, row: Row, name: str = REWARD, priority: int | None = None) -> list[JudgedSibling]:
        """Judge the responses of a row. name: of the judge. priority: the lowest goes first; None: the first asked.
        Raises ValueError for what can't be judged.
        """
        number = next(self._calls)
        group = parse_responses(row, str(CALL), f"call{number}", Findings(CALL))
        if name in self._config.rewards.entries:
            check_sources(self._config.rewards.below(name), {group.prompt.source})
        said = group.prompt.prompt_id if row.get("prompt_id") is not None else ""
        if said:
            group = replace(group, rollouts=tuple(replace(one, group_id=said) for one in group.rollouts))
        rank = number if priority is None else priority
        return await self._open.ask([name, row], said, lambda: self._judge(name, group, number, rank))

    async def _judge(self, name: str, group: Responses, number: int, priority: int) -> list[JudgedSibling]:
        """The verdicts or failures, in the order of the responses, within the deadline of a group in a run. number: of
        the group in the order of the file, or of the calls.
        """
        limit, recorder = self._clock.timeout(self._config.rollout.group_deadline_s), self._observers.recorder
        for rollout in group.rollouts:
            recorder.rollout(number, group.prompt, rollout)
        try:
            with set_purpose("evaluation"):  # here: who asks from another thread has another context
                assert self._running is not None
                judge = self._running.find_judge(name)
                reports = await judge_in_time(judge, group.prompt, group.rollouts, limit, priority)
            reports = tuple(with_version(report, self._version) for report in reports)
            for rollout, report in zip(group.rollouts, reports, strict=True):
                recorder.record_verdict(rollout, report)
                self._counters.report(report)
        finally:
            recorder.forget(group.rollouts[0].group_id)
        return [
            JudgedSibling(group_id=rollout.group_id, sibling=rollout.sibling, report=report)
            for rollout, report in zip(group.rollouts, reports, strict=True)
        ]

    @property
    def _version(self) -> int:
        """Of the models that judge, see Verdict.grm_version."""
        return 0

    async def close(self) -> None:
        await self._open.close()
        if self._running is not None:
            await self._running.close()

    @property
    def _metrics(self) -> Metrics:
        rewards = [one.reward for _, judged in self._judged for one in judged]
        if not rewards:
            return {}
        known = [reward for reward in rewards if reward is not None]
        shares = {"responses": float(len(rewards)), "failed_share": 1 - len(known) / len(rewards)}
        mean = {"reward": fmean(known)} if known else {}
        return shares | mean | self._counters.judging.rubric.metrics()

    def results(self) -> Summary:
        return Summary(
            steps=0,
            versions=dict.fromkeys(self._config.judging.roles, self._version),
            eval=EvalSummary(final=self._metrics),
            judging=summarize_judging(self._counters),
            engines_replaced=self._running.maintenance.count_replaced() if self._running is not None else {},
        )


def to_line(group: Responses, judged: Sequence[JudgedSibling]) -> dict[str, object]:
    """A line of verdicts.jsonl: the verdicts on the responses of a row, in their order."""
    return {
        "prompt_id": group.prompt.prompt_id,
        "source": group.prompt.source,
        "verdicts": [
            {
                "reward": one.reward, "score": one.score, "failed": one.failed, "detail": one.detail,
                "critiques": list(one.critiques), **one.encode_criteria(),
            }
            for one in judged
        ],
    }  # fmt: skip


def describe_verdicts(judged: Sequence[JudgedSibling]) -> Iterator[str]:
    """What the console says of the verdicts."""
    rewards = [one.reward for one in judged if one.reward is not None]
    if rewards:
        low, mean, high = min(rewards), fmean(rewards), max(rewards)
        yield f"{len(rewards)} verdicts: mean reward {mean:.3g}, from {low:.3g} to {high:.3g}; {VERDICTS} has them"
    causes = Counter(one.failed for one in judged if one.failed)
    if causes:
        shown = ", ".join(f"{count} {cause}" for cause, count in causes.most_common())
        yield f"{causes.total()} of {len(judged)} responses have no verdict: {shown}"
