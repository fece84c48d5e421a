"""Loads a function or class that the user names as `path.py:name`."""

import difflib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BUILT_IN_ENVIRONMENT = "math_with_code"
"""Stands for the environment that comes with Laminar where a `path.py:Class` may stand."""


def load_named(named: str, setting: str) -> object:
    """The object called `name` in the file; `setting` is what the user wrote it into, for error messages.

    The file may import its neighbours, as a script may; its folder comes last in sys.path, so that it hides nothing.
    Raises ValueError naming the file, the name and the nearest ones in it; whatever the file itself raises rises.
    """
    path, separator, name = named.rpartition(":")
    if not separator or not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{setting}={named} must be `path.py:name`")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{setting}={named}: no such file {file.absolute()}")
    try:
        module = _import(file.resolve())
    except (Exception, SystemExit) as error:
        raise ValueError(f"{setting}={named}: importing {file} raised {type(error).__name__}: {error}") from error
    if name not in module:
        own = [n for n, value in module.items() if not n.startswith("_") and not isinstance(value, ModuleType)]
        nearest = difflib.get_close_matches(name, own, n=3)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"it has {', '.join(sorted(own)) or 'nothing'}"
        raise ValueError(f"{setting}={named}: {file} defines no {name!r}; {hint}")
    return module[name]


def _import(file: Path) -> dict[str, object]:
    """The names that the file defines. It stays in sys.modules, where dataclasses and pickle look for it."""
    module_name = f"laminar_user_code_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None, f"{file} ends in .py"
    assert spec.loader is not None, f"{file} ends in .py"
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return vars(module)
