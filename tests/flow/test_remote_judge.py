"""A run whose judge is behind an endpoint: no part of it is here, and all its metrics and files still are."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grmpipe.run.errors import RunFailed


class Endpoint(BaseHTTPRequestHandler):
    """An endpoint that scores long answers higher; counts 5 tokens each. Without its key it refuses."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = self.headers["Authorization"] == "Bearer the-key" and self.path == "/v1/chat/completions"
        score = 1 + len(asked["messages"][-1]["content"]) % 10
        choice = {"message": {"content": f"Fine.\nScore: {score}"}, "finish_reason": "stop"}
        answer = {"model": asked["model"], "choices": [choice], "usage": {"completion_tokens": 5}}
        body = json.dumps(answer if known else {"error": {"message": "no such key"}}).encode()
        with contextlib.suppress(ConnectionError):  # a run that stops doesn't wait for answers
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def outside() -> Iterator[tuple[str, ...]]:
    """The overrides for a judge behind an endpoint."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    yield "grm.engine=openai", "grm.path=a-judge", f"engine.openai.base_url={url}", "engine.openai.api_key_env=THE_KEY"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_judge_outside_judges_the_run_and_planted_secrets_are_in_no_file(
    small_run: Callable, outside: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "the-key")
    monkeypatch.setenv("GATEWAY", "planted-by-environment")
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-0123456789abcdef0123456789abcdef01")
    body = "{gateway: {api_key: '${oc.env:GATEWAY}', note: '${oc.env:GATEWAY}'}, auth: Bearer-planted-as-typed}"
    tracked = ("tracking=wandb", "tracking.wandb_mode=offline")
    files = small_run(*outside, "train.num_steps=2", f"+engine.openai.extra_body={body}", *tracked)
    summary, judging = files.summary, files.summary["judging"]
    assert (summary["status"], summary["versions"]) == ("completed", {"policy": 2, "grm": 0})
    assert judging["counted"] == judging["asked"] >= 32
    assert judging["tokens"] == 5 * judging["asked"]
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


def test_an_endpoint_that_refuses_stops_the_run_with_its_words(
    small_run: Callable, outside: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "another")
    with pytest.raises(RunFailed, match=r"verdicts failed .*refused; the last one: .*no such key"):
        small_run(*outside, "judge.failure_window=8", "judge.pause_s=0.1", "data.num_eval_prompts=1")


def test_a_judge_outside_is_measured_against_labels_too(
    small_run: Callable, outside: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "the-key")
    files = small_run(*outside, "task=evaluate", "evaluate.num_items=12", "evaluate.ks=[1,2]")
    summary = files.summary
    assert summary["status"] == "completed"
    assert summary["judging"]["asked"] == summary["judging"]["counted"] > 24
    assert summary["judging"]["tokens"] == 5 * summary["judging"]["asked"]
    assert 0 <= summary["eval"]["final"]["accuracy_at_2"] <= 1
    assert len(files.lines("judged")) == 12


def test_an_endpoint_that_refuses_is_right_about_nothing(
    small_run: Callable, outside: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "another")
    summary = small_run(*outside, "task=evaluate", "evaluate.num_items=6", "evaluate.ks=[1]").summary
    assert summary["judging"]["failed"] == {"refused": summary["judging"]["asked"]}
    assert (summary["eval"]["final"]["accuracy"], summary["eval"]["final"]["failed_share"]) == (0.0, 1.0)


def test_two_judges_outside_have_keys_of_their_own_and_one_that_refuses_fails_by_its_name(
    small_run: Callable, outside: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A jury with a quorum of one goes on, and says who is absent."""
    monkeypatch.setenv("THE_KEY", "the-key")
    monkeypatch.setenv("OTHER_KEY", "another")
    files = small_run(
        *outside, "train.num_steps=1", "data.num_eval_prompts=4",
        "+grm@grms.other=path", "grms.other.path=b-judge", "grms.other.engine=openai",
        "+grms.other.engine_options={api_key_env: OTHER_KEY, max_connections: 2}",
        "+judge@judges.second=generative", "judges.second.model=other",
        "reward=jury", "reward.members=[judge,second]", "reward.quorum=1",
    )  # fmt: skip
    judging = files.summary["judging"]["by_judge"]
    assert files.summary["versions"] == {"policy": 1, "grm": 0, "other": 0}
    assert (judging["judge"]["failed"], judging["judge"]["counted"]) == ({}, judging["judge"]["asked"])
    assert judging["second"]["failed"] == {"refused": judging["second"]["asked"]} and judging["second"]["asked"] >= 16
    assert all(line["verdict"]["absent"] == ["second"] for line in files.lines("judgements"))
