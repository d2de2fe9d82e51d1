"""Configurations of runs for tests, from sections as a user types them."""

from __future__ import annotations

import dataclasses
from typing import Any

from grmpipe.config.resolve_config import resolve_config, typed_sections
from grmpipe.config.run_config import RunConfig
from grmpipe.config.run_sections import RunSections


def run_config(**sections: Any) -> RunConfig:
    """The configuration of these sections, and of the defaults of all others."""
    return resolve_config(RunSections(**sections))


def with_sections(config: RunConfig, **sections: Any) -> RunConfig:
    """The same configuration with other sections."""
    return resolve_config(dataclasses.replace(typed_sections(config), **sections))
