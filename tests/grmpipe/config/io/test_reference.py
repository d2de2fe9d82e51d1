"""docs/configuration.md: all keys, each with a sentence, as the dataclasses have them now."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from grmpipe.config.io.reference import PAGE, KeyEntry, list_sections, page
from grmpipe.config.judge_monitor import JudgeMonitorConfig, LimitConfig
from grmpipe.config.run_sections import RunSections
from grmpipe.config.task_settings import PlanConfig
from grmpipe.scheduler.devices import DeviceSpec
from grmpipe.scheduler.placement import PlacementConfig, PoolConfig, RoleConfig

# A run in which every map of named members has one.
FULL = RunSections(
    placement=PlacementConfig(pools={"<name>": PoolConfig()}, roles={"learner": RoleConfig(pool="<name>")}),
    judge_monitor=JudgeMonitorConfig(limits={"<name>": LimitConfig(metric="x", above=1.0)}),
    plan=PlanConfig(devices={"<name>": DeviceSpec(80, 2000, {"bfloat16": 1.0})}),
)
ALIKE = ("models", "judges", "rewards")  # members with the keys of a section that is on the page


@dataclass(frozen=True)
class Inner:
    """Inside."""

    ratio: float = 0.5  # [parts] Parts of a whole.


@dataclass(frozen=True)
class Described:
    """A section."""

    # Numbers.

    wait_s: float = 1.0  # Time until the end.
    # Names that
    # are read.
    names: list[str] = field(default_factory=lambda: ["a"])
    kind: str | None = None  # Which one.
    inner: Inner = field(default_factory=lambda: Inner(ratio=0.25))

    def __post_init__(self) -> None:
        if self.kind not in (None, "left", "right"):
            raise ValueError(f"kind: unknown value {self.kind!r}; known: left, right")


@dataclass(frozen=True)
class Silent:
    """A heading isn't a sentence."""

    # Numbers.

    count: int = 1


@dataclass(frozen=True)
class Muttering:
    """Half a sentence is none."""

    count: int = 1  # of what, anyway


@dataclass(frozen=True)
class Twice:
    """Two comments."""

    # Above the field.
    count: int = 1  # Behind the field.


def leaves(value: object, path: str = "") -> Iterator[str]:
    """Dotted keys of a configuration's values: what is neither a section nor a map of sections."""
    inner = {spec.name: getattr(value, spec.name) for spec in dataclasses.fields(value)}  # type: ignore[arg-type]
    for name, one in inner.items():
        if name in ALIKE:
            continue
        if dataclasses.is_dataclass(one):
            yield from leaves(one, f"{path}{name}.")
        elif isinstance(one, dict) and any(map(dataclasses.is_dataclass, one.values())):
            for member in one.values():
                yield from leaves(member, f"{path}{name}.<name>.")
        else:
            yield f"{path}{name}"


def entries_of(cls: type) -> dict[str, KeyEntry]:
    return {entry.key: entry for section in list_sections(cls) for entry in section.entries}


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_every_key_of_a_run_is_on_the_page_once() -> None:
    on_page: dict[str, list[str]] = {}
    for block in re.split(r"^##+ `?", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]:
        name = re.split(r"[`\n]", block)[0]
        on_page[name] = re.findall(r"^\| `([^`]+)`", block, re.M)
        if "<name>" not in name and (same := re.search(r"The keys are those of \[(.+?)\]", block)):
            on_page[name] = [name + key.removeprefix(same[1]) for key in on_page[same[1]]]
    assert sorted(key for keys in on_page.values() for key in keys) == sorted(leaves(FULL))


def test_a_key_has_its_own_comment_unit_default_and_choices() -> None:
    found = entries_of(Described)
    assert found["wait_s"] == KeyEntry(
        key="wait_s", type="number", default="`1.0`", unit="s", meaning="Time until the end."
    )
    assert found["names"].meaning == "Names that are read."
    assert found["names"].type == "list of texts"
    assert found["kind"].type == "`left`, `right` or null"
    assert (found["inner.ratio"].default, found["inner.ratio"].unit) == ("`0.25`", "parts")


@pytest.mark.parametrize(
    ("cls", "message"),
    [(Silent, "Silent.count: has no sentence"), (Muttering, "got 'of what, anyway'"), (Twice, "Twice.count: has a c")],
)
def test_a_key_without_one_sentence_is_refused(cls: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(list_sections(cls))


def test_a_default_of_a_run_is_that_of_its_section_where_the_section_has_others() -> None:
    found = entries_of(RunSections)
    assert (found["policy.path"].default, found["grm.path"].default) == ("`tiny://policy`", "`tiny://grm`")
    assert found["train.dtype"].default == "`auto`"  # what a user types, not what a placement makes of it


def test_the_page_is_written_without_torch() -> None:
    code = "import sys, grmpipe.config.io.reference; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
