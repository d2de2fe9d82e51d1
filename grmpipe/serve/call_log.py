"""What a service was asked, on file, and its answers to questions that come again."""

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path

from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import Journal, read_what_can_be
from grmpipe.observe.recorder import JUDGEMENTS, JudgedSibling, load_verdicts
from grmpipe.observe.summary import ServingSummary
from grmpipe.types import JudgeReport, Verdict

log = logging.getLogger(__name__)

CALLS = "calls.jsonl"
LATEST = 10_000  # calls that percentiles of seconds are of


class CallLog:
    """Writes a line of calls.jsonl for each call that was answered: who asked whom, when, and which group of the other
    journals it became.

    cache_size: answers that are kept for equal questions, the latest; 0: none.
    """

    def __init__(self, run_dir: Path, run_id: str, guard: Guard, cache_size: int) -> None:
        self._journal = Journal(run_dir / CALLS, run_id=run_id)
        self.imputations = Imputations(run_dir, run_id, guard)
        self._guard = guard
        self._cache_size = cache_size
        self._answers = OrderedDict[str, tuple[JudgedSibling, ...]]()  # by question
        self._counts = Counter[str]()
        self._seconds = deque[float](maxlen=LATEST)

    def read_answers(self) -> None:
        """Take the answers of an earlier process of the service, if any are kept."""
        groups: dict[str, str] = {}  # question -> group_id
        for call in read_what_can_be(self._journal.path) if self._cache_size else ():
            if call.get("keep"):
                groups.pop(call["question"], None)
                groups[call["question"]] = call["group_id"]
        wanted = dict(list(groups.items())[-self._cache_size :]) if self._cache_size else {}
        found: dict[str, dict[int, JudgeReport]] = {group_id: {} for group_id in wanted.values()}
        for (group_id, sibling), report in load_verdicts(self._journal.path.with_name(JUDGEMENTS)) if wanted else ():
            if group_id in found:
                found[group_id][sibling] = report
        for question, group_id in wanted.items():
            reports = sorted(found[group_id].items())
            self._keep(question, [JudgedSibling(group_id=group_id, sibling=at, report=one) for at, one in reports])

    def find_answer(self, question: str, version: int) -> Sequence[JudgedSibling] | None:
        """version: of the judges, by which the answer must be."""
        if (found := self._answers.get(question)) is None:
            return None
        self._answers.move_to_end(question)
        verdicts = (one.report.verdict for one in found)
        return found if all(isinstance(one, Verdict) and one.grm_version == version for one in verdicts) else None

    def record(
        self, judged: Sequence[JudgedSibling], *, judge: str, client: str, step: object, question: str, keep: bool,
        from_cache: bool, seconds: float,
    ) -> None:  # fmt: skip
        """keep: whether an equal question may get the same answer. A failure is none: it is judged again."""
        keep = keep and bool(judged) and not any(one.failed for one in judged)
        self._seconds.append(seconds)
        self._counts.update({"calls": 1, "responses": len(judged), "from_cache": int(from_cache)})
        with self._guard.watch(CALLS):
            self._journal.append({
                "group_id": judged[0].group_id, "judge": judge, "client": client, "step": step, "question": question,
                "keep": keep, "from_cache": from_cache, "seconds": round(seconds, 6),
            })  # fmt: skip
        if keep and not from_cache:
            self._keep(question, judged)

    def summarize(self) -> ServingSummary:
        """Of this process."""
        ordered = sorted(self._seconds)
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        return ServingSummary(
            calls=self._counts["calls"],
            responses=self._counts["responses"],
            from_cache=self._counts["from_cache"],
            seconds={name: ordered[int(share * (len(ordered) - 1))] for name, share in shares.items() if ordered},
            imputed=dict(self.imputations.causes),
        )

    def close(self) -> None:
        self._journal.close()
        self.imputations.close()

    def _keep(self, question: str, judged: Sequence[JudgedSibling]) -> None:
        if self._cache_size:
            self._answers[question] = tuple(judged)
            self._answers.move_to_end(question)
            while len(self._answers) > self._cache_size:
                self._answers.popitem(last=False)


# -- responses without a verdict whose trainer got the mean of their siblings ------------------------------------------


IMPUTED = "imputed.jsonl"


class Imputations:
    """They stand apart from judgements.jsonl: none of them is a verdict. causes: of the failed judgements, counted."""

    def __init__(self, run_dir: Path, run_id: str, guard: Guard) -> None:
        self.causes = Counter[str]()
        self._journal = Journal(run_dir / IMPUTED, run_id=run_id)
        self._guard = guard

    def record(self, *, judge: str, client: str, group_id: str, cause: str, detail: str, mean: float, of: int) -> None:
        """group_id: of the failed judgement in judgements.jsonl. of: how many siblings the mean is of."""
        self.causes[cause] += 1
        log.warning(
            "%s has no verdict (%s): its trainer gets %.6g, the mean of %d siblings (serve.on_failure=mean_of_group)",
            group_id, cause, mean, of,
        )  # fmt: skip
        with self._guard.watch(IMPUTED):
            self._journal.append({
                "group_id": group_id, "judge": judge, "client": client, "failed": cause, "detail": detail,
                "mean_of_siblings": mean, "num_siblings": of,
            })  # fmt: skip

    def close(self) -> None:
        self._journal.close()
