"""Reads a configuration: a YAML file, dotted overrides on top, validated; an error names the key and the fix."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

from laminar.config import Config

CONFIG_FILE = "config.json"
"""The resolved configuration, in a run's folder beside everything else that the run writes."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of `path` with `a.b=c` overrides. Raises ValueError for everything a user can get wrong."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{path} {what}; name a YAML file, as those that come with Laminar in configs/")
    for override in overrides:
        if "=" not in override.lstrip("="):
            raise ValueError(f"{override!r} is no override; write it as section.setting=value")
    try:
        tree = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(tree, resolve=True)
    except (YAMLError, OmegaConfBaseException, OSError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as YAML with overrides {list(overrides)}: {error}") from error
    return parse_config(values, str(path))


def parse_config(values: Any, source: str) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [_explain(details) for details in error.errors()]
        raise ValueError("\n".join([f"{source}: {len(lines)} setting(s) do not fit:", *lines])) from error


class Setting(BaseModel):
    """One row of `laminar config`."""

    name: str
    type: str
    default: str
    meaning: str


def all_settings() -> list[Setting]:
    return list(_settings_of(Config, ""))


def _settings_of(section: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        candidates: tuple[Any, ...] = (field.annotation, *map(untagged, get_args(field.annotation)))
        nested = [t for t in candidates if _is_section(t)]
        if nested:
            for part in nested:
                yield from _settings_of(part, f"{prefix}{name}.")
        else:
            default = "(required)" if field.is_required() else _plain(field.default)
            yield Setting(
                name=f"{prefix}{name}",
                type=_type_name(field.annotation),
                default=default,
                meaning=" ".join((field.description or "").split()),
            )


def untagged(annotation: Any) -> Any:
    """A kind of a tagged union without its tag."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _plain(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _type_name(annotation: Any) -> str:
    """As a user would say it: `int`, `list of path`, `a | b`, `int or none`."""
    if annotation is NoneType:
        return "none"
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _type_name(arguments[0])
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, arguments))
    if get_origin(annotation) is tuple:
        return f"list of {_type_name(arguments[0])}"
    if arguments:
        return " or ".join(map(_type_name, arguments))
    name = str(annotation.__name__)
    return {"str": "text", "Path": "path"}.get(name, name)


def _explain(details: ErrorDetails) -> str:
    kinds = _kinds(Config)
    place = ".".join(str(part) for part in details["loc"] if part not in kinds)
    if details["type"] == "extra_forbidden":
        return f"  {place}: no such setting{_nearest(place)}"
    if details["type"] == "missing":
        return f"  {place}: this setting is required"
    message = details["msg"].removeprefix("Value error, ")
    return f"  {place}: {message} (got {details['input']!r})" if place else f"  {message}"


def _kinds(section: type[BaseModel]) -> frozenset[str]:
    """The kinds of every tagged union: pydantic names the chosen one within a setting's place, and nobody writes it."""
    found: set[str] = set()
    for name, field in section.model_fields.items():
        if name == "kind":
            found.add(str(field.default))
        for part in (field.annotation, *map(untagged, get_args(field.annotation))):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= _kinds(part)
    return frozenset(found)


def _nearest(place: str) -> str:
    """The nearest name anywhere: people mistype the last word, and they forget the section too."""
    names = [setting.name for setting in all_settings()]
    if any(name == place or name.startswith(f"{place}.") for name in names):
        section = place.partition(".")[0]
        return f" with this {section}.kind; `laminar config` tells which settings each kind has"
    near = difflib.get_close_matches(place, names, n=1, cutoff=0.6)
    if not near:
        by_leaf = {name.rpartition(".")[2]: name for name in names}
        near = [by_leaf[leaf] for leaf in difflib.get_close_matches(place.rpartition(".")[2], by_leaf, n=1, cutoff=0.6)]
    return f"; did you mean {near[0]}?" if near else "; `laminar config` lists them all"
