"""Where a compiled kernel is kept on disk: in a folder named by every source that the kernel is made of.

numba looks for changes in a kernel's own file alone. A kernel calls functions of other files and takes constants from
them, and one that was compiled from what they used to say would be wrong without a word.
"""

import ast
import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from numba import config, njit

F = TypeVar("F", bound=Callable[..., Any])

COMPILE_TIMEOUT_S = 300.0
"""A process waits this long for another one that compiles the same kernel, then compiles it for itself."""


@contextlib.contextmanager
def kept_by_content(function: Any) -> Iterator[bool]:
    """Within, numba keeps what it compiles of `function` in a folder; says whether one can be written.

    Processes that start together compile a kernel once: the others wait and find it.
    """
    before = config.CACHE_DIR
    with contextlib.ExitStack() as stack:
        try:
            folder = _root() / _digest(function.__module__)
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(Timeout):
                stack.enter_context(FileLock(folder / f"{function.__name__}.lock", timeout=COMPILE_TIMEOUT_S))
            can_be_kept = os.access(folder, os.W_OK)
        except (OSError, RuntimeError):  # the latter where a user has no home
            can_be_kept = False
        if can_be_kept:
            config.CACHE_DIR = str(folder)
        try:
            yield can_be_kept
        finally:
            config.CACHE_DIR = before


def kept(**options: Any) -> Callable[[F], F]:
    """Decorates a function that numba compiles with these options at its first call, and keeps where that can be."""

    def decorate(function: F) -> F:
        with kept_by_content(function) as can_be_kept:
            compiled: Any = njit(cache=can_be_kept, **options)(function)
        if can_be_kept:
            compiled._cache.save_overload = _where_there_is_room(compiled._cache.save_overload)
        return compiled  # type: ignore[no-any-return]

    return decorate


def _where_there_is_room(save: Callable[..., None]) -> Callable[..., None]:
    """A disk may be full by the time that a kernel is compiled; it serves all the same."""

    def save_or_not(*arguments: Any) -> None:
        with contextlib.suppress(OSError):
            save(*arguments)

    return save_or_not


def _root() -> Path:
    # As the cache of models, which a lower room cannot ask.
    from_environment = os.environ.get("SPECDEC_CACHE")
    root = Path(from_environment).expanduser() if from_environment else Path.home() / ".cache" / "specdec"
    return root / "kernels"


def _digest(module_name: str) -> str:
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(_sources(module_name, set())):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(module_name: str, found: set[Path]) -> set[Path]:
    """The files of a module and of all of its own package that it imports, directly or not."""
    path = Path(sys.modules[module_name].__file__ or "")
    if path not in found:
        found.add(path)
        for imported in _imports(path):
            if imported in sys.modules and imported.partition(".")[0] == __name__.partition(".")[0]:
                _sources(imported, found)
    return found


@cache
def _imports(path: Path) -> frozenset[str]:
    """Names of modules, and of what may be one, that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return frozenset(names)
