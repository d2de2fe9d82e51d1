"""The calibration of a judge: a monotone map from what it says to what labels say, as a file that names the judge; and
the judge that gives its rewards by it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from grmpipe.config.io.resume_rules import list_leaves
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.secrets import seal
from grmpipe.judge.prompt import PROBE, JudgePrompt, PrinciplesPrompt
from grmpipe.judge.verdict import make_failure, report_failures
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.stored_files import compute_checksum
from grmpipe.models.types import Message
from grmpipe.types import (
    Failed,
    Judge,
    JudgeReport,
    JudgeSession,
    JudgeTask,
    Prompt,
    Rollout,
    judge_tasks_of_turn,
)

CALIBRATION = "calibration.json"
CALIBRATED, UNCALIBRATED = "calibrated", "uncalibrated"  # names of both rewards in a verdict's breakdown
# Keys that don't change what a judge says: they decide what fails, or name it. `model` is a role: its files count.
SAYS_NOTHING = ("name", "key", "model", "calibration", "max_failure_rate", "limits")
FILES = ("rubric.path",)
SAMPLE_BYTES = 1 << 20


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """A monotone map, linear between its knots and constant beyond them.

    judge:        what the judge must be, by key (`describe_judge`).
    target:       what a calibrated reward is: the label's score, as a share of the scale (score); the probability that
                  the response is right (right), or that it is better than another one, ties counting half (better).
    said:         knots: the rewards that the judge gives, less the length term. Of a judge of pairs: the share of its
                  votes that a response gets from a pair.
    rewards:      the calibrated rewards there.
    length_slope: how much of a reward goes to one unit of log(1 + characters of the response); 0: lengths don't count.
    length_mean:  the mean of log(1 + characters) over what it was fitted on.
    """

    judge: dict[str, str]
    target: str
    said: tuple[float, ...]
    rewards: tuple[float, ...]
    length_slope: float = 0.0
    length_mean: float = 0.0

    def to_reward(self, said: float, log_length: float) -> float:
        """The calibrated reward. log_length: log(1 + characters)."""
        index = said - self.length_slope * (log_length - self.length_mean)
        return float(np.interp(index, self.said, self.rewards))


def compute_log_length(text: str) -> float:
    return math.log1p(len(text))


def read_calibration(path: str) -> Calibration:
    """Read a file of task=calibrate. Raises ValueError that names it."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}; give {CALIBRATION} of a run of task=calibrate") from error


def read_for(judge: JudgeConfig) -> Calibration | None:
    return None if judge.calibration is None else read_calibration(judge.calibration)


# -- whose calibration it is -----------------------------------------------------------------------------------------


def describe_judge(
    judge: JudgeConfig, model: str | None, path: str | None, renderer: Renderer | None
) -> dict[str, str]:
    """What a judge is, by key: its model and prompts by hash, its template and the settings that aren't the default.

    model: as typed; None: it asks none. path: the local files; None: an endpoint has them. renderer: of its prompts.
    """
    usual, found = dict(list_leaves(dataclasses.asdict(JudgeConfig()))), {}
    for key, value in list_leaves(dataclasses.asdict(judge)):
        if key.split(".")[0] not in SAYS_NOTHING and value != usual.get(key):
            found[key] = _in_words(key, value)
    found["kind"], found["scale"] = judge.kind, f"{judge.scale.low} to {judge.scale.high}"
    if model is not None:
        files = "" if path is None else f" (xxh3 of its files {_hash_model(Path(path))})"
        found["model"] = f"{Path(model).name}{files}"
    if judge.kind == "generative":
        messages = _probe_prompts(judge)
        found |= {key: str(getattr(judge, key)) for key in ("protocol", "template", "parser", "num_judgements", "vote")}
        found["template"] = f"{Path(judge.template).name} (xxh3 of a prompt {_hash(messages)})"
        if renderer is not None:
            found["chat_template"] = f"xxh3 of a prompt's tokens {_hash([renderer.render(one) for one in messages])}"
    return found


def find_difference(calibration: Calibration, judge: Mapping[str, str]) -> str:
    """What differs between the calibrated judge and this one, in words; empty if nothing does."""
    was = calibration.judge
    return "; ".join(
        f"{key}: {was.get(key, 'the default')} was calibrated, and here it is {judge.get(key, 'the default')}"
        for key in sorted(was.keys() | judge.keys())
        if was.get(key) != judge.get(key)
    )


def _in_words(key: str, value: object) -> str:
    """Files and free-form options, which may hold a secret, as hashes."""
    if key.startswith("custom.options."):
        return seal(str(value))
    if key in FILES and Path(str(value)).is_file():
        return f"{Path(str(value)).name} (xxh3 {compute_checksum(Path(str(value)))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _probe_prompts(judge: JudgeConfig) -> list[tuple[Message, ...]]:
    """The prompts of an example: what the template, the files that it includes and the judge's settings make of it."""
    principles = PrinciplesPrompt.of(judge)
    asked = [] if principles is None else [principles.render(PROBE)]
    return [*asked, JudgePrompt.of(judge).probe_messages]


def _hash(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())


def _hash_model(path: Path) -> str:
    """A hash of a model's weights by samples: sizes, and both ends of each file, which every training changes."""
    hashed = xxhash.xxh3_64()
    found = [*path.glob("*.safetensors"), *path.glob("*.bin")] if path.is_dir() else [path]
    for file in sorted(found):
        with file.open("rb") as stream:
            size = file.stat().st_size
            hashed.update(f"{file.name} {size} ".encode())
            hashed.update(stream.read(SAMPLE_BYTES))
            stream.seek(max(0, size - SAMPLE_BYTES))
            hashed.update(stream.read())
    return hashed.hexdigest()


# -- the calibrated judge --------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class CalibrationInUse:
    """The calibration by which a judge's rewards are made; of a judge that learns it is refitted with its weights."""

    now: Calibration


@dataclasses.dataclass(frozen=True, slots=True)
class CalibratedJudge:
    """A judge whose rewards are calibrated; scores, judgements and failures stay those of the judge. A group has one
    calibration.

    thoughts: whether the judge sees those of the policy, which then count in its length.
    """

    judge: Judge
    calibration: CalibrationInUse
    thoughts: bool

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        return CalibratedSession(self, self.judge.open(prompt, group_id, size))


class CalibratedSession:
    """The judge's own session, with calibrated rewards in its reports."""

    def __init__(self, judge: CalibratedJudge, session: JudgeSession) -> None:
        self._judge = judge
        self._session = session
        self._calibration = judge.calibration.now
        self._lengths: dict[int, float] = {}

    def begin(self) -> Sequence[JudgeTask]:
        return self._session.begin()

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        self._lengths[rollout.sibling] = compute_log_length(rollout.show_text(thoughts=self._judge.thoughts))
        return self._session.add(rollout)

    def add_turn(self, so_far: Rollout) -> Sequence[JudgeTask]:
        return judge_tasks_of_turn(self._session, so_far)

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        reports = await self._session.judge(judge_task, priority)
        return {sibling: self._calibrate(report, self._lengths[sibling]) for sibling, report in reports.items()}

    def _calibrate(self, report: JudgeReport, length: float) -> JudgeReport:
        verdict = report.verdict
        if isinstance(verdict, Failed):
            return report
        if len(verdict.rewards) != 1:
            detail = (
                f"judge.calibration: a map of one reward can't calibrate the {len(verdict.rewards)} of this verdict"
            )
            return dataclasses.replace(report, verdict=report_failures(make_failure("broken", detail)).verdict)
        reward = self._calibration.to_reward(verdict.outcome, length)
        calibrated = dataclasses.replace(
            verdict,
            rewards=(dataclasses.replace(verdict.rewards[0], value=reward),),
            breakdown={**verdict.breakdown, CALIBRATED: reward, UNCALIBRATED: verdict.outcome},
        )
        return dataclasses.replace(report, verdict=calibrated)
