"""The files of a user's module and of all modules beside it that it imports, found without running any of them."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

# Not the user's own: Python's and installed packages, and this one, whose state a sweep records as a whole.
_INSTALLED = tuple(
    {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_PACKAGE = Path(__file__).resolve().parents[1]


def source_files(module: str) -> list[Path]:
    """The module's file first; empty if there is none. Of an installed module its own file only."""
    first = _find(module)
    if first is None:
        return []
    parts, file = module.split("."), first.resolve()
    root = Path(*file.parts[: -len(parts) - (file.name == "__init__.py")])
    if _others(file) or _below(root, parts) != file:
        return [first]
    found, left = {file: module}, [file]
    while left:
        file = left.pop()
        facts = file.stat()
        for name in _imported(file, found[file], facts.st_mtime_ns, facts.st_size):
            path = _below(root, name.split("."))
            if path is not None and path not in found and not _others(path):
                found[path] = name
                left.append(path)
    return [first, *sorted(path for path in found if path != first.resolve())]


def _others(path: Path) -> bool:
    """Whether the file is installed, or a part of this package."""
    folders = (*_INSTALLED, _PACKAGE)
    return "site-packages" in path.parts or any(path.is_relative_to(folder) for folder in folders)


def _find(module: str) -> Path | None:
    """The file that importing the module reads, or has read."""
    known = getattr(sys.modules.get(module), "__file__", None)
    if known:
        return Path(known)
    folders = [Path(folder or ".") for folder in [*sys.path, ""]]  # as `plugins.load_object` searches
    return next((path for folder in folders if (path := _below(folder, module.split(".")))), None)


def _below(folder: Path, parts: Sequence[str]) -> Path | None:
    place = folder.joinpath(*parts)
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((file.resolve() for file in files if file.is_file()), None)


@lru_cache(maxsize=1024)
def _imported(file: Path, module: str, modified: int, size: int) -> tuple[str, ...]:
    """Names in the file's imports that may be modules. ``modified`` and ``size``: the file's, for the cache."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the import reports it
        return ()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return tuple(dict.fromkeys(name for node in ast.walk(tree) for name in _names(node, package)))


def _names(node: ast.AST, package: str) -> Iterator[str]:
    """``import a.b`` imports a and a.b; ``from a import b`` may import a.b, too."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _with_parents(alias.name)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".") if package else []
        base = parents[: len(parents) - node.level + 1] if node.level else []
        whole = ".".join([*base, *([node.module] if node.module else [])])
        yield from _with_parents(whole)
        yield from (f"{whole}.{alias.name}" if whole else alias.name for alias in node.names)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".") if name else []
    yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))
