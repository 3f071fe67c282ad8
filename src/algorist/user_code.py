"""A user's own function, called in one way for rewards, losses, advantages; and the files of a recipe's ``plugins``."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from algorist.errors import ConfigError
from algorist_grader.user_code import find_file, functions_of, import_file, no_function, own_line, run_again


def load_function(target: str, key: str) -> Callable[..., Any]:
    """Return the function that ``key=file.py:function`` names; what it raises is a user's mistake, with the line that raised it.

    Raises:
        ConfigError: No such file or function, or the file cannot be imported.
    """
    path, name = find_file(target, f"{key}={target}")
    try:
        module = import_file(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}={target}: {path} cannot be imported: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}={target}: {path} {no_function(name, functions_of(module))}")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{target} raised {type(error).__name__} in {own_line(error)}: {error}"
            ) from error

    return called


_PLUGINS: dict[str, str] = {}
"""Name of a file → hash of its content, of the files that were imported last."""


def load_plugins(files: Sequence[str]) -> None:
    """Import the Python files of a recipe's ``plugins``, which register what they define; again where others were imported since.

    Raises:
        ConfigError: No such file, or it cannot be imported.
    """
    paths = {file: find_file(f"{file}:", f"plugins={file}")[0] for file in files}
    contents = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths.values()}
    if not files or contents == _PLUGINS:
        return
    _PLUGINS.clear()
    for file, path in paths.items():
        try:
            run_again(path)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"plugins={file}: {path.name} cannot be imported: {type(error).__name__} in {own_line(error)}: {error}"
            ) from error
    _PLUGINS.update(contents)
