"""The page that Prometheus fetches: the latest metrics of a real server, for those who have the token."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from grmpipe.config.tracking import TrackingConfig
from grmpipe.trackers.prometheus_tracker import PrometheusConfig, PrometheusTracker, list_lines
from grmpipe.trackers.tracker import TrackedRun


def opened(config: PrometheusConfig, run_dir: Path) -> tuple[PrometheusTracker, str]:
    tracker = PrometheusTracker(config, TrackedRun(run_dir=run_dir, config={}, state={}))
    return tracker, f"http://127.0.0.1:{tracker.port}/metrics"


def test_the_page_has_the_latest_value_of_each_metric_until_the_run_ends(tmp_path: Path) -> None:
    tracker, url = opened(PrometheusConfig(port=0), tmp_path / "run_1")
    tracker.log(4, {"train/reward": 0.5, "eval/true_accuracy": 0.25})
    tracker.log(5, {"train/reward": 0.625, "train/grad_norm": float("nan")})
    tracker.alarm("scores rise")
    answer = httpx.get(url)
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert answer.text.splitlines() == [
        "# TYPE grmpipe_step gauge",
        'grmpipe_step{run="run_1"} 5',
        "# TYPE grmpipe_alarms_total counter",
        'grmpipe_alarms_total{run="run_1"} 1',
        "# TYPE grmpipe_metric gauge",
        'grmpipe_metric{run="run_1",name="eval/true_accuracy"} 0.25',
        'grmpipe_metric{run="run_1",name="train/grad_norm"} nan',
        'grmpipe_metric{run="run_1",name="train/reward"} 0.625',
    ]
    assert httpx.get(url.replace("/metrics", "/")).status_code == 404
    again, second = opened(PrometheusConfig(port=0), tmp_path)
    again.close()
    tracker.close()
    for gone in (url, second):
        with pytest.raises(httpx.ConnectError):
            httpx.get(gone)


def test_a_port_that_is_taken_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    tracker, _ = opened(PrometheusConfig(port=0), tmp_path)
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{tracker.port}; set tracking\.prometheus\.port"):
        opened(PrometheusConfig(port=tracker.port), tmp_path)
    tracker.close()


def test_with_a_token_only_those_who_have_it_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGE_TOKEN", "s3cret-token")
    config = PrometheusConfig(host="0.0.0.0", port=0, token_env="PAGE_TOKEN")
    tracker, url = opened(config, tmp_path)
    for header, status in (("Bearer s3cret-token", 200), ("Bearer other", 401), ("", 401), ("s3cret-token", 401)):
        assert httpx.get(url, headers={"Authorization": header}).status_code == status
    tracker.close()
    monkeypatch.delenv("PAGE_TOKEN")
    assert TrackingConfig(trackers=["prometheus"], prometheus=config).find_missing() == (
        "tracking.trackers: prometheus can't be used here; set the variable PAGE_TOKEN (tracking.prometheus.token_env)"
    )


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"host": "0.0.0.0"}, r"host: 0\.0\.0\.0 can be reached .* tracking\.prometheus\.token_env"),
        ({"port": 70000}, "port: must be from 0"),
    ],
)
def test_bad_settings_name_the_key(bad: dict[str, str | int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PrometheusConfig(**bad)  # type: ignore[arg-type]


def test_names_that_prometheus_has_a_meaning_for_are_escaped() -> None:
    lines = list(list_lines('a"b\\', 1, {"judge/x\ny/score": 1.0}, 0))
    assert lines[1] == 'grmpipe_step{run="a\\"b\\\\"} 1'
    assert lines[-1] == 'grmpipe_metric{run="a\\"b\\\\",name="judge/x\\ny/score"} 1'
