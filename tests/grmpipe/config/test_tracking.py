"""Settings of tracking: the table of trackers, one of the user's own, and what is refused."""

from __future__ import annotations

import pytest

from grmpipe.config.tracking import TrackingConfig
from grmpipe.trackers.wandb_tracker import WandbConfig


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (
            {"trackers": ["wandb", "comet"]},
            "trackers: unknown value 'comet'; known: wandb, tensorboard, mlflow, trackio, swanlab, opentelemetry, "
            "prometheus, webhook; or the",
        ),
        ({"trackers": ["wandb", "wandb"]}, "trackers: wandb stands there 2 times; leave one"),
        ({"trackers": ["my_module.MyTracker"]}, "trackers: my_module can't be imported"),
        ({"trackers": ["json.dumps", "math.pi"]}, r"trackers: math.pi must be a function that takes \(run\)"),
        ({"table_every": -1}, "table_every: must be 0"),
    ],
)
def test_bad_settings_name_the_key(bad: dict[str, list[str] | int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TrackingConfig(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"mode": "disabled"}, "mode: unknown mode 'disabled'; known: auto, online, offline; .* type tracking=none"),
        ({"project": ""}, "project: is empty"),
    ],
)
def test_bad_settings_of_wandb_name_the_key(bad: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        WandbConfig(**bad)  # type: ignore[arg-type]
