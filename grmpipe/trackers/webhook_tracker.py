"""Alarms and the end of a run, posted to a URL: a channel of Slack, Mattermost or Discord, or any other."""

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from grmpipe.trackers.tracker import TrackedRun, Tracker, TrackerConfig

POST_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2 * POST_TIMEOUT_S  # for a post under way and the one of the end
SHOWN_CHARS = 1_500  # Discord refuses 2,000


@dataclass(frozen=True)
class WebhookConfig(TrackerConfig):
    """A URL that gets alarms and the end of a run as JSON. `text` (Slack, Mattermost) and `content` (Discord) are for
    people; event (alarm or end), run_dir, status and failure for programs.
    """

    url_env: str = "GRMPIPE_WEBHOOK_URL"  # Variable with the URL, which is a secret.

    def open(self, run: TrackedRun) -> Tracker:
        return WebhookTracker(os.environ[self.url_env], run)

    def find_missing(self) -> str:
        if os.environ.get(self.url_env, "").startswith(("http://", "https://")):
            return ""
        return f"set the variable {self.url_env} (tracking.webhook.url_env) to its URL, which begins with https://"


class WebhookTracker(Tracker):
    """Posts in a thread of its own, in order: a slow server holds up no step, and the end for `CLOSE_TIMEOUT_S`."""

    def __init__(self, url: str, run: TrackedRun) -> None:
        self._url, self._run = url, run
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="webhook")
        self._posts: list[Future[None]] = []

    def alarm(self, text: str) -> None:
        self._tell(f"ALARM {text}", event="alarm")

    def end(self, status: str, failure: str | None) -> None:
        self._tell(f"{status}: {failure}" if failure else status, event="end", status=status, failure=failure)

    def close(self) -> None:
        """Raises the error of a post that failed, or TimeoutError if some are left."""
        done, left = wait(self._posts, CLOSE_TIMEOUT_S)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if left:
            raise TimeoutError(f"{len(left)} posts were given up: the server takes more than {POST_TIMEOUT_S:.0f} s")
        for post in done:
            post.result()

    def _tell(self, text: str, **facts: str | None) -> None:
        shown = f"{self._run.name}: {text}"
        shown = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]} .."
        body = {"text": shown, "content": shown, "run_dir": str(self._run.run_dir), **facts}
        self._posts.append(self._thread.submit(self._post, body))

    def _post(self, body: dict[str, str | None]) -> None:
        import httpx  # late: no command should wait for it that posts nothing

        with httpx.Client(timeout=httpx.Timeout(POST_TIMEOUT_S)) as client:
            answer = client.post(self._url, json=body)
        if not answer.is_success:  # in words of ours: httpx would name the URL
            raise RuntimeError(f"the server answered {answer.status_code} {answer.reason_phrase}")
