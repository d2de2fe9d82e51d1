"""YAML and overrides -> RunConfig, and back. The only module that imports OmegaConf."""

import copy
import dataclasses
import functools
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TypeVar

from omegaconf import MISSING, OmegaConf, open_dict
from omegaconf import DictConfig as DictConfig  # the others take it from here
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from grmpipe.config.io.key_errors import explain_moved_key, under_key, unknown_key
from grmpipe.config.io.project import path_in_project
from grmpipe.config.io.resolve_config import fill_sections, resolve_config
from grmpipe.config.io.resume_rules import free_on_resume
from grmpipe.config.keys.secrets import keep_secret, mark_secrets, plain, texts_from_environment, without_secrets
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.run_sections import RunSections

Config = TypeVar("Config")
ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)\}")
NO_FAULTS = "\n  inject_faults: 0.0"  # a key of env that earlier versions wrote, at the value of all runs
OmegaConf.register_new_resolver("project", path_in_project, replace=True)
INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")


def schema() -> object:
    """A mutable copy of RunSections for Hydra to merge YAML and overrides into, typed key by key."""
    return _make_mutable(RunSections)


def build(config: DictConfig) -> RunConfig:
    """The checked configuration. Raises ConfigError that names the key."""
    typed = OmegaConf.to_container(config, resolve=False)
    keep_secret(typed)
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{key}{str(error).splitlines()[0]}") from error
    direct = mark_secrets(values, typed)
    values = mark_secrets(values, typed, texts_from_environment(direct))
    return build_config(typing.cast(Mapping[str, object], values))


def build_config(values: Mapping[str, object]) -> RunConfig:
    """The checked configuration of plain values, as they are typed. Raises ConfigError that names the key."""
    keep_secret(values)
    sections = from_values(RunSections, values)
    try:
        return resolve_config(sections)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def without_section(config: DictConfig, name: str) -> DictConfig:
    with open_dict(config):
        del config[name]
    return config


def find_interpolated_keys(config: DictConfig) -> frozenset[str]:
    """The keys that others take their values from, as `${policy.path}` does."""
    return frozenset(INTERPOLATION.findall(OmegaConf.to_yaml(config)))


def from_values(cls: type[Config], values: Mapping[str, object], path: str = "") -> Config:
    """A (nested) frozen dataclass from plain values. An error of a section's own check is prefixed with the section's
    key.
    """
    hints = typing.get_type_hints(cls)
    known = [spec.name for spec in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(unknown_key(f"{path}{name}", [f"{path}{other}" for other in known]))
    built = {name: _value(hints[name], value, f"{path}{name}") for name, value in values.items()}
    try:
        return cls(**built)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(under_key(path, str(error))) from error


def overlaid(section: Config, values: Mapping[str, object], path: str) -> Config:
    """A section with some of its values replaced, typed and checked like values set there."""
    known = [spec.name for spec in dataclasses.fields(section)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(unknown_key(f"{path}{name}", [f"{path}{other}" for other in known]))
    try:
        old, new = plain(dataclasses.asdict(section)), plain(values)  # type: ignore[call-overload]
        typed = OmegaConf.merge(OmegaConf.structured(_make_mutable(type(section))), old, new)
        merged = OmegaConf.to_container(typed)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}{error.full_key}: {str(error).splitlines()[0]}") from error
    return from_values(type(section), typing.cast(Mapping[str, object], merged), path)


def to_yaml(config: RunConfig) -> str:
    """The configuration as YAML, without secrets (see grmpipe/config/keys/secrets.py)."""
    return OmegaConf.to_yaml(OmegaConf.create(without_secrets(fill_sections(config), free_on_resume)))


def read_yaml(path: Path) -> RunConfig:
    """Read a run's config.yaml. A value from a variable that isn't set here stays as typed."""
    try:
        return build(_sections_of(path))
    except (ValueError, TypeError, OmegaConfBaseException, YAMLError, OSError) as error:
        raise ConfigError(f"{path} can't be read: {str(error).splitlines()[0]}") from error


def read_yaml_with(path: Path, composed: DictConfig, changed: Sequence[str]) -> RunConfig:
    """A run's config.yaml with the values of some composed keys or whole sections. Raises ConfigError that names the
    key.
    """
    sections, values = _sections_of(path), OmegaConf.to_container(composed)
    for key in changed:
        OmegaConf.update(sections, key, _at(values, key), merge=False, force_add=True)
    return build(sections)


def differs(path: Path, composed: DictConfig, key: str) -> bool:
    """Whether a composed value or section isn't that of a run's config.yaml."""
    return _at(OmegaConf.to_container(_sections_of(path), resolve=True), key) != _at(
        OmegaConf.to_container(composed, resolve=True), key
    )


def _sections_of(path: Path) -> DictConfig:
    text = ENVIRONMENT.sub(
        lambda found: found[0] if found[1] in os.environ else "\\" + found[0],
        path.read_text("utf-8").replace(NO_FAULTS, ""),
    )
    return typing.cast(DictConfig, OmegaConf.create(text))


def _at(values: object, key: str) -> object:
    """The value at a dotted key; None if there is none."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def find_missing_keys(path: Path) -> list[str]:
    """Keys missing from a run's config.yaml because its end is cut off; none if it is whole. read_yaml reports a file
    that can't be read at all.
    """
    there = _written_keys(path)
    known = list(_keys(dataclasses.asdict(RunSections())))
    if there is None or (known[-1] in there and path.read_bytes().endswith(b"\n")):
        return []
    return [key for key in known if key not in there] or [f"the end of {known[-1]}"]


def explain_old_key(path: Path) -> str:
    """The error of the first key of an earlier version in a run's config.yaml; empty if there is none."""
    return next((unknown_key(key, ()) for key in _written_keys(path) or () if explain_moved_key(key)), "")


def _written_keys(path: Path) -> list[str] | None:
    """The keys in a run's config.yaml; None if it can't be read at all."""
    try:
        written = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")))
    except (OmegaConfBaseException, YAMLError, ValueError, OSError):
        return None
    return list(_keys(written if isinstance(written, dict) else {}))


def _keys(values: Mapping[typing.Any, object], path: str = "") -> Iterator[str]:
    """Dotted keys in their order, without sections."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _value(hint: object, value: object, path: str) -> object:
    """The value as its type hint says: rebuilds dataclasses at any depth of dicts."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_values(hint, typing.cast(Mapping[str, object], value), f"{path}.")
    if typing.get_origin(hint) is dict:
        inner = typing.get_args(hint)[1]
        items = typing.cast(Mapping[str, object], value).items()
        return {key: _value(inner, item, f"{path}.{key}") for key, item in items}
    return value


def _make_mutable(cls: type) -> type:
    """A mutable copy of a dataclass: OmegaConf makes frozen dataclasses read-only, also for the YAML that fills
    them.
    """
    hints = typing.get_type_hints(cls)
    fields = []
    for spec in dataclasses.fields(cls):
        hint, value = _mutable_hint(hints[spec.name]), _default(spec)
        if dataclasses.is_dataclass(value):
            fields.append((spec.name, hint, field(default_factory=functools.partial(_fill, hint, value))))
        else:
            fields.append((spec.name, hint, field(default_factory=functools.partial(copy.copy, value))))
    return dataclasses.make_dataclass(cls.__name__, fields)


def _default(spec: dataclasses.Field[object]) -> object:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return MISSING if spec.default is dataclasses.MISSING else spec.default


def _fill(section: object, values: object) -> object:
    """Fill a mutable section with its owner's defaults; its own sections fill themselves."""
    plain = {f.name: getattr(values, f.name) for f in dataclasses.fields(values)}  # type: ignore[arg-type]
    return section(**{k: v for k, v in plain.items() if not dataclasses.is_dataclass(v)})  # type: ignore[operator]


def _mutable_hint(hint: object) -> object:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _make_mutable(hint)
    if typing.get_origin(hint) is dict:
        key, value = typing.get_args(hint)
        return dict[key, _mutable_hint(value)]  # type: ignore[valid-type, misc]
    return hint
