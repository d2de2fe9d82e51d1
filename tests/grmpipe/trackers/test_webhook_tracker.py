"""A real server on loopback gets alarms and the end; one that is slow, wrong or away fails the tracker only."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from grmpipe.config.tracking import TrackingConfig
from grmpipe.trackers import webhook_tracker
from grmpipe.trackers.tracker import TrackedRun, Tracker
from grmpipe.trackers.webhook_tracker import WebhookConfig


class Channel(BaseHTTPRequestHandler):
    """Keeps what it gets; /broken answers 500, /hangs never."""

    got: list[dict[str, object]]
    may_end: threading.Event

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/hangs":
            self.may_end.wait(30)
        self.got.append(json.loads(body))
        self.send_response(500 if self.path == "/broken" else 200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def channel() -> Iterator[tuple[str, type[Channel]]]:
    class Own(Channel):
        pass

    Own.got, Own.may_end = [], threading.Event()
    server = HTTPServer(("127.0.0.1", 0), Own)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", Own
    Own.may_end.set()
    server.shutdown()
    server.server_close()


def opened(url: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    monkeypatch.setenv("MY_CHANNEL", url)
    return WebhookConfig(url_env="MY_CHANNEL").open(
        TrackedRun(run_dir=run_dir, config={"experiment_name": "first"}, state={})
    )


def test_a_channel_gets_alarms_in_order_and_the_end(
    channel: tuple[str, type[Channel]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = channel
    tracker = opened(f"{url}/hook", tmp_path / "run_7", monkeypatch)
    tracker.log(1, {"x": 1.0})
    tracker.alarm("step 3: scores rise, truth falls")
    tracker.alarm("x" * 5000)
    tracker.end("failed", "the engine died: out of memory")
    tracker.close()
    alarm, long, end = server.got
    assert alarm == {
        "text": "first/run_7: ALARM step 3: scores rise, truth falls",
        "content": "first/run_7: ALARM step 3: scores rise, truth falls",
        "run_dir": str(tmp_path / "run_7"),
        "event": "alarm",
    }
    assert len(str(long["content"])) < 2000, "Discord refuses longer ones"
    assert end["text"] == "first/run_7: failed: the engine died: out of memory"
    assert (end["event"], end["status"], end["failure"]) == ("end", "failed", "the engine died: out of memory")


def test_a_server_that_fails_or_hangs_is_an_error_of_the_tracker_that_does_not_name_the_url(
    channel: tuple[str, type[Channel]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = channel
    broken = opened(f"{url}/broken", tmp_path, monkeypatch)
    broken.end("completed", None)
    with pytest.raises(RuntimeError, match=r"^the server answered 500") as error:
        broken.close()
    assert url not in str(error.value)
    monkeypatch.setattr(webhook_tracker, "CLOSE_TIMEOUT_S", 0.2)
    hangs = opened(f"{url}/hangs", tmp_path, monkeypatch)
    began_s = time.monotonic()
    hangs.alarm("a")
    hangs.end("completed", None)
    assert time.monotonic() - began_s < 5.0, "a step must not wait for a server"
    with pytest.raises(TimeoutError, match="2 posts were given up"):
        hangs.close()


def test_without_a_url_a_run_is_refused_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRMPIPE_WEBHOOK_URL", "hooks.example.com/1")
    assert TrackingConfig(trackers=["webhook"]).find_missing() == (
        "tracking.trackers: webhook can't be used here; set the variable GRMPIPE_WEBHOOK_URL "
        "(tracking.webhook.url_env) to its URL, which begins with https://"
    )
    monkeypatch.setenv("GRMPIPE_WEBHOOK_URL", "https://hooks.example.com/1")
    assert TrackingConfig(trackers=["webhook"]).find_missing() == ""
