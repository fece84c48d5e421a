"""Writes the generated pages of docs/ from the code that they describe: `make docs`.

    docs/config.md    every setting          from laminar.settings.all_settings()
    docs/messages.md  every event, command   from laminar/control/messages.py
    docs/metrics.md   every metric           from laminar/observe/metric_names.py

tests/test_docs.py compares the pages with what this would write.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
from pydantic import BaseModel

from laminar.config import Config
from laminar.control import messages, parts
from laminar.observe.metric_names import metrics_page
from laminar.settings import Setting, all_settings, untagged

ROOT = Path(__file__).parents[1]


def main() -> None:
    for name, page in pages().items():
        (ROOT / name).write_text(page, encoding="utf-8")
        print(name)


def pages() -> dict[str, str]:
    """Each generated page, by its path from the repository's root."""
    return {"docs/config.md": config_page(), "docs/messages.md": messages_page(), "docs/metrics.md": metrics_page()}


# ------------------------------------------------------------------------------------------------------- settings


def config_page() -> str:
    lines = [
        "# Settings",
        "",
        "Every setting, with its type, default and meaning. A configuration is a YAML file of these; on the command "
        "line `section.setting=value` overrides the file. Names tell their unit: `_s` is seconds, `_tokens` tokens, "
        "`_bytes` bytes. An unknown key is an error that names the nearest one. `laminar config` prints the same list.",
        "",
        "This page is generated from `laminar/config/`; `make docs` writes it anew.",
    ]
    for section, settings in groupby(all_settings(), key=_section_of):
        lines += ["", f"## {section or 'The run'}", "", *_paragraph(_told_of(section))]
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        lines += [_setting_row(setting) for setting in _merged(settings)]
    return "\n".join(lines) + "\n"


def _section_of(setting: Setting) -> str:
    return setting.name.partition(".")[0] if "." in setting.name else ""


def _merged(settings: Iterator[Setting]) -> list[Setting]:
    """What several kinds of a tagged union have is one row, with all the defaults and meanings that there are."""
    rows: dict[str, list[Setting]] = {}
    for setting in settings:
        rows.setdefault(setting.name, []).append(setting)
    return [_merge(same) for same in rows.values()]


def _merge(same: list[Setting]) -> Setting:
    def all_of(texts: Iterator[str]) -> str:
        return " / ".join(dict.fromkeys(texts))

    if len(same) > 1 and same[0].name.endswith(".kind"):
        kinds = " | ".join(setting.type for setting in same)
        return same[0].model_copy(update={"type": kinds, "meaning": "One of the above."})
    return Setting(
        name=same[0].name,
        type=all_of(setting.type for setting in same),
        default=all_of(setting.default for setting in same),
        meaning=all_of(setting.meaning for setting in same),
    )


def _told_of(section: str) -> str:
    """What a section's docstring says; what each kind's says, where it has several; and those of its optional parts."""
    if not section:
        return ""
    kinds = _models_in(Config.model_fields[section].annotation)
    told = [_one_line(kinds[0].__doc__)] if len(kinds) == 1 else []
    if len(kinds) > 1:
        told += [f"- `kind: {kind.model_fields['kind'].default}`: {_one_line(kind.__doc__)}" for kind in kinds]
    for kind in kinds:
        for name, field in kind.model_fields.items():
            told += [
                f"- `{section}.{name}`: {_one_line(part.__doc__)} {_one_line(field.description)}"
                for part in _models_in(field.annotation)
            ]
    return "\n".join(line for line in told if line)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    candidates = (annotation, *map(untagged, get_args(annotation)))
    return [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _setting_row(setting: Setting) -> str:
    default = "none" if setting.default == "()" else setting.default
    return f"| `{setting.name}` | {_cell(setting.type)} | {_cell(default)} | {_cell(setting.meaning)} |"


# ------------------------------------------------------------------------------------------------------- messages


def messages_page() -> str:
    lines = [
        "# Messages",
        "",
        "Everything that enters the control plane (events: facts) and everything that leaves it (commands: orders). An "
        "event that answers a command carries the command's id. Ids of replicas, prompt groups, trajectories and "
        "commands are counted up over the whole run, restarts included, and never used twice. The event log of a run "
        "(`events/*.jsonl` in its folder) is made of these.",
        "",
        "This page is generated from `laminar/control/messages.py`; `make docs` writes it anew.",
        "",
        "## Events",
        *_tables(get_args(messages.AnyEvent)),
        "",
        "## Commands",
        "",
        "Besides its own fields, every command has an `id: CommandId`.",
        *_tables(get_args(messages.AnyCommand)),
        "",
        "## Parts of messages",
        *_tables(_parts()),
    ]
    return "\n".join(lines) + "\n"


def _tables(records: tuple[type[msgspec.Struct], ...]) -> Iterator[str]:
    for record in records:
        yield from ("", f"### {record.__name__}", "")
        yield from _paragraph(_one_line(record.__doc__))
        fields = [field for field in msgspec.structs.fields(record) if field.name != "id"]
        if fields:
            yield from ("| field | type |", "|---|---|")
            yield from (f"| `{field.name}` | {_cell(_type_name(field.type))} |" for field in fields)
        else:
            yield "No fields."


def _parts() -> tuple[type[msgspec.Struct], ...]:
    """The records that messages are made of, in the order of the file."""
    named = vars(parts).values()
    return tuple(value for value in named if isinstance(value, type) and issubclass(value, msgspec.Struct))


def _type_name(annotation: Any) -> str:
    """As in the file, with `list of` for a tuple of any length, and → from a key to its value."""
    if annotation is type(None):
        return "none"
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple:
        return f"list of {_type_name(arguments[0])}"
    if get_origin(annotation) is dict:
        return " → ".join(map(_type_name, arguments))
    if arguments:
        return " or ".join(map(_type_name, arguments))
    return str(annotation.__name__)


# ----------------------------------------------------------------------------------------------------------- text


def _paragraph(text: str) -> list[str]:
    return [text, ""] if text else []


def _one_line(docstring: str | None) -> str:
    return " ".join((docstring or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
