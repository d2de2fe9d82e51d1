"""A run whose judge is behind an endpoint: no part of it is here, and all its metrics and files still are."""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from forks import Forked

import grmpipe
from grmpipe.config.run_config import ConfigError
from grmpipe.judge.grm import GrmClient, GrmQuestion
from grmpipe.judge.verdict import make_failure
from grmpipe.observe.judge_requests import RequestCounts
from grmpipe.run.errors import RunFailed
from grmpipe.tasks import run_task

FIELDS = [spec.name for spec in fields(RequestCounts)]


class Bill(ThreadingHTTPServer):
    """Counts what it is asked and what it says that it used."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Endpoint)
        self.lock = threading.Lock()
        self.num_requests = 0
        self.revoked_after = math.inf  # requests after which the key is no more
        self.declines_after = 0  # requests after which the filter declines
        self.used: Counter[str] = Counter()
        self.keys: Counter[str] = Counter()  # how often each Idempotency-Key came
        self.answer_s = 0.0
        self.first: dict[str, int] = {}  # key -> the number of its first request

    def next_request(self, key: str) -> int:
        """The number of the request by which the key came first: its answer is that of the first one."""
        with self.lock:
            self.num_requests += 1
            self.keys[key] += 1
            return self.first.setdefault(key, self.num_requests)

    def use(self, usage: Mapping[str, Any]) -> None:
        with self.lock:
            self.used.update(prompt=usage["prompt_tokens"], sampled=usage["completion_tokens"])
            self.used.update(cached=usage["prompt_tokens_details"]["cached_tokens"])


class Endpoint(BaseHTTPRequestHandler):
    """An endpoint that scores long answers higher. One request in 20 gets an answer without a score, the 30th
    none. With another key it refuses.
    """

    server: Bill

    def do_POST(self) -> None:
        number = self.server.next_request(key_of_request := self.headers["Idempotency-Key"])
        time.sleep(self.server.answer_s)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Authorization"].removeprefix("Bearer ")
        declines = number > self.server.declines_after
        status = {"the-key": 200, "key-of-a-filter": 400 if declines else 200}.get(key, 401)
        assert self.path == "/v1/chat/completions"
        length = len(asked["messages"][-1]["content"])
        text = f"Well, answer {number}." if number % 20 == 0 else f"Fine, answer {number}.\nScore: {1 + length % 10}"
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        details = {"cached_tokens": length // 3}
        usage = {"prompt_tokens": length // 2, "prompt_tokens_details": details, "completion_tokens": 5}
        answer: dict[str, Any] = {"model": asked["model"], "choices": [choice], "usage": usage}
        is_first = self.server.keys[key_of_request] == 1
        status = (
            401
            if number > self.server.revoked_after
            else 503
            if number == 30 and is_first and status == 200
            else status
        )
        words = {400: "declined", 401: "no such key", 503: "busy"}
        body = json.dumps(answer if status == 200 else {"error": {"message": words[status]}}).encode()
        if status == 200:
            self.server.use(usage)
        with contextlib.suppress(ConnectionError):  # a run that stops doesn't wait for answers
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def bill() -> Iterator[Bill]:
    server = Bill()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def outside(bill: Bill) -> tuple[str, ...]:
    """The overrides for a judge behind an endpoint."""
    url = f"http://127.0.0.1:{bill.server_port}/v1"
    return "grm.engine=openai", "grm.path=a-judge", f"engine.openai.base_url={url}", "engine.openai.api_key_env=THE_KEY"


def test_remote_judge_is_billed_as_it_reports_and_no_file_holds_a_secret(
    small_run: Callable,
    outside: tuple[str, ...],
    bill: Bill,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("THE_KEY", "the-key")
    monkeypatch.setenv("GATEWAY", "planted-by-environment")
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-0123456789abcdef0123456789abcdef01")
    body = "{gateway: {api_key: '${oc.env:GATEWAY}', note: '${oc.env:GATEWAY}'}, auth: Bearer-planted-as-typed}"
    tracked = ("tracking=wandb", "tracking.wandb.mode=offline")
    monitor = ("judge_monitor.every=1", "tracking.console=true")
    files = small_run(*outside, "train.num_steps=2", *monitor, f"+engine.openai.extra_body={body}", *tracked)
    summary, judging = files.summary, files.summary["judging"]
    assert (summary["status"], summary["versions"]) == ("completed", {"policy": 2, "grm": 0})
    assert judging["counted"] + judging["failed"]["unparseable"] == judging["asked"] >= 32
    assert judging["tokens"] == 5 * judging["asked"]
    requests = judging["requests"]
    assert requests.keys() == {"training", "held_out", "preflight", "monitoring"}
    total = {name: sum(counts[name] for counts in requests.values()) for name in FIELDS}
    assert total["requests"] == bill.num_requests > judging["asked"]
    tokens = {name.removesuffix("_tokens"): count for name, count in total.items() if name.endswith("_tokens")}
    assert tokens == dict(bill.used)
    assert total["retries"] > judging["failed"]["unparseable"] and total["unknown"] == 0
    assert requests["training"]["sampled_tokens"] == judging["tokens"]
    assert requests["preflight"]["requests"] == 8 and requests["held_out"]["requests"] >= 16
    said = f"grm: {bill.num_requests:,} requests (training {requests['training']['requests']}, held-out "
    used = f"{bill.used['prompt']:,} prompt tokens ({bill.used['cached']:,} cached), {bill.used['sampled']:,} sampled"
    for text in (capfd.readouterr().out, (files.run_dir / "run.log").read_text()):
        assert said in text and used in text
    cell = f"<td class=number>{requests['held_out']['prompt_tokens']:,}</td>"
    assert cell in (files.run_dir / "report.html").read_text()
    assert summary["busy_s"]["grm"] > 0
    assert summary["eval"]["final"]["grm_score"] > 0
    (first, *_) = files.lines("judgements")
    assert first["judgements"][0]["completion"]["unseen_tokens"] == 5
    lanes = {event["args"]["name"] for event in json.loads((files.run_dir / "timeline.json").read_text())
             if event["name"] == "thread_name"}  # fmt: skip
    assert any(lane == "grm" for lane in lanes), lanes
    written = [path for path in files.run_dir.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written)
    for path in written:
        text = path.read_text(errors="replace")
        for secret in ("the-key", "planted-by-environment", "planted-as-typed", "s3cret-0123456789", "HTTP Request"):
            assert secret not in text, (path, secret)
    assert files.run_dir.stat().st_mode & 0o077 == 0


def test_an_endpoint_that_refuses_all_first_requests_ends_the_run_with_its_words(
    small_run: Callable, outside: tuple[str, ...], bill: Bill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "key-of-a-filter")
    with pytest.raises(ConfigError, match=r"^judge\.model: all 8 preflight judgements failed as refused; .*declined"):
        small_run(*outside, "judge.max_failure_rate=1")
    assert bill.num_requests == 8


def test_an_endpoint_that_refuses_later_stops_the_run_with_its_words(
    small_run: Callable, outside: tuple[str, ...], bill: Bill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "key-of-a-filter")
    bill.declines_after = 8
    monkeypatch.setattr("grmpipe.run.build.compose_pipeline.VERDICTS_WINDOW", 8)
    with pytest.raises(RunFailed, match=r"verdicts failed .*refused; the last one: .*declined"):
        small_run(*outside, "rollout.pause_s=0.1", "data.num_eval_prompts=1")


def test_an_endpoint_at_which_nobody_listens_fails_the_run_before_it_starts(
    small_run: Callable, outside: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "the-key")
    nowhere = ("engine.openai.base_url=http://127.0.0.1:9/v1", "engine.openai.max_retries=0")
    with pytest.raises(RunFailed, match=r"^judge: all 8 preflight judgements failed, .*127\.0\.0\.1 gave no answer"):
        small_run(*outside, *nowhere)


@pytest.mark.parametrize("task", ["train", "evaluate"])
def test_a_wrong_key_ends_the_run_before_the_first_evaluation_and_names_the_key(
    small_run: Callable, outside: tuple[str, ...], bill: Bill, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setenv("THE_KEY", "revoked")
    words = r"^engine\.openai\.api_key_env: 127.0.0.1 answered HTTP 401: no such key; export a key .* in THE_KEY"
    with pytest.raises(ConfigError, match=words):
        small_run(*outside, f"task={task}", "engine.openai.max_connections=4")
    assert bill.num_requests <= 4  # those that were sent together


@pytest.mark.long
def test_a_key_that_is_revoked_during_a_run_stops_it_with_the_cause_and_keeps_the_checkpoint(
    small_run: Callable, outside: tuple[str, ...], bill: Bill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("THE_KEY", "the-key")
    bill.revoked_after = 100
    with pytest.raises(RunFailed, match=r"engine\.openai\.api_key_env: .*HTTP 401: no such key \(8 times in a row"):
        small_run(*outside, "train.num_steps=40", "train.checkpoint_every=1")
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
    assert bill.num_requests < 200


@pytest.mark.long
def test_after_a_kill_all_requests_are_known_but_for_those_in_flight(
    launched: Callable[..., Forked], outside: tuple[str, ...], bill: Bill, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = (
        "+experiment=quickstart", "cluster=inprocess", "run_dir=run", *outside, "tracking=none", "train.num_steps=3",
        "train.groups_per_batch=4", "train.group_size=4", "train.checkpoint_every=1", "data.num_eval_prompts=16",
    )  # fmt: skip
    process = launched(*command, THE_KEY="the-key")
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "step_1").exists() or bill.num_requests < 90:
        assert process.is_running and time.monotonic() < deadline, process.output
        time.sleep(0.01)
    process.signal(signal.SIGKILL)
    process.wait()
    resumed = launched(*command, "resume=auto", THE_KEY="the-key")
    assert resumed.wait() == 0, resumed.output
    judging = json.loads((run / "summary.json").read_text())["judging"]
    total = {name: sum(counts[name] for counts in judging["requests"].values()) for name in FIELDS}
    assert 0 <= total["requests"] - bill.num_requests <= total["unknown"] <= 64
    assert 0 <= bill.used["sampled"] - total["sampled_tokens"] <= 5 * total["unknown"]
    assert total["requests"] > judging["asked"]


@pytest.mark.long
def test_over_ten_kills_each_judgement_has_one_key_and_only_those_in_flight_are_asked_again(
    launched: Callable[..., Forked], outside: tuple[str, ...], bill: Bill, tmp_path: Path
) -> None:
    """An endpoint that honours keys bills each judgement once; another one those in flight at a kill twice."""
    run, bill.answer_s = tmp_path / "run", 0.05
    command = (
        "+experiment=quickstart", "cluster=inprocess", "run_dir=run", *outside, "tracking=none", "train.num_steps=12",
        "train.groups_per_batch=4", "train.group_size=4", "train.checkpoint_every=1", "data.num_eval_prompts=4",
        "judge_monitor.every=0", "resume=auto",
    )  # fmt: skip
    in_flight = 0
    for _ in range(10):
        process, deadline = launched(*command, THE_KEY="the-key"), time.monotonic() + 120
        wanted = len(answers_on_file(run)) + 10
        while len(answers_on_file(run)) < wanted:
            assert process.is_running and time.monotonic() < deadline, process.output
            time.sleep(0.01)
        process.signal(signal.SIGKILL)
        process.wait()
        in_flight += len(set(bill.first.values()) - answers_on_file(run).keys())
    process = launched(*command, THE_KEY="the-key")
    assert process.wait() == 0, process.output
    on_file, at_starts = answers_on_file(run), {key for key, times in bill.keys.items() if times >= 11}
    assert on_file.keys() <= set(bill.first.values()), "an answer that no key was billed for"
    again = sum(times - 1 for key, times in bill.keys.items() if key not in at_starts)
    void = on_file.total() - len(on_file)  # of what a checkpoint lost: sampled again, asked again, the same answer
    assert 0 < again <= in_flight - 10 * len(at_starts) + void


def answers_on_file(run: Path) -> Counter[int]:
    """The numbers of the endpoint's answers in the run's files, and in how many lines."""
    paths = [path for name in ("judgements", "eval_judgements") if (path := run / f"{name}.jsonl").exists()]
    return Counter(int(number) for path in paths for number in re.findall(r"answer (\d+)\.", path.read_text()))


def test_an_evaluation_whose_key_is_revoked_has_failed_and_says_why(
    small_run: Callable, outside: tuple[str, ...], bill: Bill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("THE_KEY", "the-key")
    bill.revoked_after = 6
    with pytest.raises(RunFailed, match=r"HTTP 401: no such key \(8 times in a row"):
        small_run(*outside, "task=evaluate", "evaluate.ks=[1]", "engine.openai.max_connections=4")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["judging"]["requests"]["evaluation"]["requests"] >= 14


def test_a_judge_outside_is_measured_against_labels_too(
    small_run: Callable, outside: tuple[str, ...], bill: Bill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "the-key")
    files = small_run(*outside, "task=evaluate", "evaluate.num_items=12", "evaluate.ks=[1,2]")
    summary = files.summary
    assert summary["status"] == "completed"
    judging = summary["judging"]
    assert judging["asked"] == judging["counted"] + judging["failed"]["unparseable"] > 24
    assert judging["tokens"] == 5 * judging["asked"] == judging["requests"]["evaluation"]["sampled_tokens"]
    assert judging["requests"].keys() == {"evaluation"}
    assert judging["requests"]["evaluation"]["requests"] == bill.num_requests
    assert 0 <= summary["eval"]["final"]["accuracy_at_2"] <= 1
    assert len(files.lines("judged")) == 12


@pytest.mark.parametrize("what", ["judge", "policy"])
def test_an_evaluation_of_an_endpoint_that_refuses_is_no_number(
    small_run: Callable, outside: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    monkeypatch.setenv("THE_KEY", "key-of-a-filter")
    typed = ("evaluate.num_items=6",)
    if what == "policy":
        typed = ("evaluate.what=policy", "evaluate.prompts={held_out: tiny://held_out}", "data.num_eval_prompts=6")
    with pytest.raises(RunFailed, match=r"verdicts failed \(100%; judge\.max_failure_rate=.* refused; .*declined"):
        small_run(*outside, "task=evaluate", *typed, "rollout.max_new_tokens=8", "objective=eval.final.accuracy")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["objective"]) == ("failed", None)
    assert summary["eval"] == {"initial": {}, "final": {}}
    assert summary["judging"]["failed"] == {"refused": summary["judging"]["asked"]} != {"refused": 0}
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_two_judges_outside_have_keys_of_their_own_and_one_that_refuses_fails_by_its_name(
    small_run: Callable, outside: tuple[str, ...], bill: Bill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A jury with a quorum of one goes on, and says who is absent. Before the first step each has answered."""
    bill.declines_after = 16
    monkeypatch.setenv("THE_KEY", "the-key")
    monkeypatch.setenv("OTHER_KEY", "key-of-a-filter")
    files = small_run(
        *outside, "train.num_steps=1", "data.num_eval_prompts=4",
        "+grm@models.other=path", "models.other.path=b-judge", "models.other.engine=openai",
        "+models.other.engine_options={api_key_env: OTHER_KEY, max_connections: 2}",
        "+judge@judges.second=generative", "judges.second.model=other",
        "reward=jury", "reward.members=[judge,second]", "reward.quorum=1",
    )  # fmt: skip
    judging = files.summary["judging"]["by_judge"]
    assert files.summary["versions"] == {"policy": 1, "grm": 0, "other": 0}
    assert judging["judge"]["failed"].keys() <= {"unparseable"} and judging["judge"]["counted"] > 0
    assert judging["second"]["failed"] == {"refused": judging["second"]["asked"]} and judging["second"]["asked"] >= 16
    assert all(line["verdict"]["absent"] == ["second"] for line in files.lines("judgements"))


def test_a_judge_that_fails_the_last_evaluation_leaves_a_checkpoint_from_which_only_that_is_done_again(
    small_run: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    judge = GrmClient.judgement
    asked: list[str] = []

    async def judgement(client: GrmClient, question: GrmQuestion, *more: Any) -> Any:
        asked.append(question.group_id)
        if is_down and question.group_id.startswith("held-out-2"):
            return [make_failure("died", "no such host", attempts=3)]
        return await judge(client, question, *more)

    monkeypatch.setattr(GrmClient, "judgement", judgement)
    is_down = True
    with pytest.raises(RunFailed, match="the evaluation at step 2 has no figures: 16 of 16 .*no such host"):
        small_run("train.num_steps=2")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["objective"]) == ("failed", 2, None)
    assert summary["eval"]["initial"]["grm_score"] > 0 and summary["eval"]["final"] == {}
    is_down = False
    asked.clear()
    again = small_run("train.num_steps=2", "resume=auto").summary
    assert (again["status"], again["steps"]) == ("completed", 2) and again["eval"]["final"]["grm_score"] > 0
    assert all(group_id.startswith(("held-out-2", "dry-")) for group_id in asked)


PRICE = ("grm.price.input=2", "grm.price.cached=0.5", "grm.price.output=10")


def test_a_training_stops_at_its_budget_with_a_checkpoint_and_goes_on_once_it_is_raised(
    small_run: Callable, outside: tuple[str, ...], bill: Bill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """75 requests end within the second step."""
    monkeypatch.setenv("THE_KEY", "the-key")
    small = (*outside, *PRICE, "train.num_steps=2", "data.num_eval_prompts=4", "judge.num_judgements=2")
    with pytest.raises(RunFailed, match=r"^budget\.max_requests: 75 of 75 requests are spent; raise it, .*resume=auto"):
        small_run(*small, "budget.max_requests=75", "train.checkpoint_every=5")
    run = tmp_path / "run"
    judging = json.loads((run / "summary.json").read_text())["judging"]
    spending = judging["spending"]
    assert spending["requests"] == bill.num_requests == 75
    assert judging["failed"].keys() <= {"unparseable"}, "what isn't asked is no failure of the judge"
    assert (spending["left_requests"], spending["unknown_requests"]) == (0, 0)
    assert (run / "checkpoints" / "latest").exists()
    with pytest.raises(ConfigError, match=r"^budget\.max_requests: 75 of 75 requests are spent"):
        small_run(*small, "budget.max_requests=75", "resume=auto")
    assert bill.num_requests == 75
    files = small_run(*small, "budget.max_requests=500", "resume=auto")
    spending = files.summary["judging"]["spending"]
    assert files.summary["status"] == "completed"
    assert spending["requests"] == bill.num_requests < 500
    assert spending["tokens"] == bill.used["prompt"] + bill.used["sampled"]
    paid = 2 * (bill.used["prompt"] - bill.used["cached"]) + 0.5 * bill.used["cached"] + 10 * bill.used["sampled"]
    assert spending["cost_usd"] == pytest.approx(paid / 1e6)
    again = {bill.first[key] for key, times in bill.keys.items() if times > 1} - {30}  # that one was busy
    # Only the first question is asked again on purpose. Its four requests come first, together with others.
    assert len(again) <= 4 and max(again) <= 8


@pytest.mark.parametrize(
    "task", ["score", *(pytest.param(task, marks=pytest.mark.long) for task in ("evaluate", "rejudge"))]
)
def test_an_evaluation_ends_at_its_budget_and_its_resume_pays_nothing_twice(
    small_run: Callable,
    outside: tuple[str, ...],
    bill: Bill,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    task: str,
) -> None:
    monkeypatch.setenv("THE_KEY", "the-key")
    rows = [{"prompt": f"{n} x 7?", "responses": ["a", "bb", "ccc"]} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    typed = {
        "evaluate": ("evaluate.num_items=12", "evaluate.ks=[3]", "evaluate.path=tiny://judgements_held_out"),
        "score": ("score.path=rows.jsonl", "judge.num_judgements=3"),
        "rejudge": ("judge.num_judgements=3",),
    }[task]
    run = tmp_path / ("run/rejudged/again" if task == "rejudge" else "run")
    small = (*outside, *typed, f"task={task}", "engine.openai.max_connections=7")
    if task == "rejudge":
        small_run("judge=rule", "train.num_steps=1", "data.num_eval_prompts=1")

    def evaluate(*more: str) -> None:
        if task == "rejudge":
            run_task(grmpipe.compose(None, [*small, "run_dir=run", "judge=generative", *more]))
        else:
            small_run(*small, *more)

    with pytest.raises(RunFailed, match=r"^budget\.max_requests: 20 of 20 requests are spent; raise it"):
        evaluate("budget.max_requests=20")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["judging"]["spending"]["requests"] == bill.num_requests == 20
    assert summary["judging"]["spending"]["unknown_requests"] == 0
    assert summary["eval"]["final"] == {}, "what isn't judged is no number"
    with pytest.raises(ConfigError, match=r"^budget\.max_requests: 20 of 20 requests are spent"):
        evaluate("budget.max_requests=20", "resume=auto")
    evaluate("budget.max_requests=500", "resume=auto")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["judging"]["spending"]["requests"] == bill.num_requests > 20
    again = {bill.first[key] for key, times in bill.keys.items() if times > 1}
    assert again <= {30}, "the one that was busy"
    assert not (run / "paid_answers.jsonl").exists(), "nothing is left to resume"


def test_an_evaluation_in_a_training_that_a_budget_ends_is_no_number_and_the_checkpoint_is_kept(
    small_run: Callable, outside: tuple[str, ...], bill: Bill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """16 judgements of the first evaluation, 16 of the only step; the last evaluation doesn't fit."""
    monkeypatch.setenv("THE_KEY", "the-key")
    small = (*outside, *PRICE, "train.num_steps=1", "journals.max_gb=1")
    words = r"the evaluation at step 1 has no figures: budget\.max_tokens: .* tokens are spent"
    with pytest.raises(RunFailed, match=words):
        small_run(*small, "budget.max_tokens=4000", "judge.max_new_tokens=20")
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    spending = summary["judging"]["spending"]
    assert summary["steps"] == 1 and summary["eval"]["final"] == {}
    assert spending["tokens"] == bill.used["prompt"] + bill.used["sampled"] <= 4000
    assert (run / "checkpoints" / "latest").exists()
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["budget/tokens"] == spending["tokens"] and line["budget/left_tokens"] == 4000 - spending["tokens"]
    report = (run / "report.html").read_text()
    assert f"At endpoints: spent {spending['requests']} requests, {spending['tokens']:,} tokens, " in report


@pytest.mark.long
def test_after_a_kill_the_budget_goes_on_and_what_was_in_flight_counts_as_unknown(
    launched: Callable[..., Forked], outside: tuple[str, ...], bill: Bill, tmp_path: Path
) -> None:
    run, bill.answer_s = tmp_path / "run", 0.05
    command = (
        "+experiment=quickstart", "cluster=inprocess", "run_dir=run", *outside, *PRICE, "tracking=none",
        "train.num_steps=9", "train.groups_per_batch=4", "train.group_size=4", "data.num_eval_prompts=16",
        "judge_monitor.every=0", "judge.num_judgements=2", "budget.max_requests=150", "budget.max_tokens=1000000",
    )  # fmt: skip
    process, deadline = launched(*command, THE_KEY="the-key"), time.monotonic() + 120
    while bill.num_requests < 100:
        assert process.is_running and time.monotonic() < deadline, process.output
        time.sleep(0.01)
    process.signal(signal.SIGKILL)
    process.wait()
    resumed = launched(*command, "resume=auto", THE_KEY="the-key")
    assert resumed.wait() == 1 and "budget.max_requests: 150 of 150 requests are spent" in resumed.output
    spending = json.loads((run / "summary.json").read_text())["judging"]["spending"]
    unknown = spending["unknown_requests"]
    assert spending["requests"] == 150 and 0 <= 150 - bill.num_requests <= unknown <= 64
    used = bill.used["prompt"] + bill.used["sampled"]
    assert 0 <= used - spending["tokens"] <= spending["unknown_tokens"]
    assert 1_000_000 - spending["left_tokens"] == spending["tokens"] + spending["unknown_tokens"]
    first_questions, busy = set(range(1, 17)), {30}
    again = {bill.first[key] for key, times in bill.keys.items() if times > 1} - first_questions - busy
    assert len(again) <= unknown, "no answer that came was paid twice"
