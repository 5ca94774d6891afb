"""The keys that a plugin's configuration class takes, read from its source without importing it.

Importing a plugin may need packages that this interpreter lacks, and takes time. The source is enough for names; types
and values are checked by the class itself when the server starts. Where the source does not tell, nothing is checked
here.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nemo_gym._util.suggest import nearest
from nemo_gym.config.files import find_plugin
from nemo_gym.config.keys import SERVER_KEYS
from nemo_gym.config.servers import ServerBlock
from nemo_gym.config.strict import refuse
from nemo_gym.contract.errors import ConfigError

CORE_BASES = frozenset({"SimpleResourcesServer", "SimpleResponsesAPIAgent", "SimpleResponsesAPIModel"})
"""The suite's own base classes, whose members a plugin does not define itself."""


@dataclass(frozen=True)
class _Class:
    """A class statement and the file it is in."""

    file: Path
    node: ast.ClassDef


class _UnknownSource(Exception):
    """Something that the source does not show."""


def check_server_keys(server: ServerBlock, roots: Sequence[Path], warnings: list[str]) -> None:
    """Raise `ConfigError` for keys of a server's block that its configuration class does not know."""
    known = config_keys(server, roots)
    if known is None:
        return
    allowed = known | SERVER_KEYS
    unknown = [key for key in server.values if key not in allowed]
    if unknown:
        listed = ", ".join(f"'{key}'{nearest(key, allowed)}" for key in unknown)
        problem = ConfigError(
            f"{server.where}: unknown key {listed}; {server.implementation} takes:"
            f" {', '.join(sorted((known | {'host', 'port'}) - {'name'}))} (or error_on_unknown_keys=false)",
            keys=[".".join((*server.path, key)) for key in unknown],
        )
        refuse(problem, server.source, warnings)


def entrypoint(server: ServerBlock, roots: Sequence[Path]) -> Path:
    """The Python file that runs a server; raises `ConfigError` when it does not exist."""
    folder = find_plugin(server.server_type, server.implementation, roots)
    path = folder / str(server.values.get("entrypoint") or "app.py")
    if not path.is_file():
        raise server.wrong("entrypoint", f" '{path.name}' does not exist in {folder}")
    return path


def config_keys(server: ServerBlock, roots: Sequence[Path]) -> frozenset[str] | None:
    """Field names of the server's configuration class; ``None`` when it takes any, or the source does not tell."""
    try:
        config = _annotation_of(_running_class(entrypoint(server, roots)), "config", roots)
        return frozenset(_fields(config, roots, set()))
    except _UnknownSource:
        return None


def class_constant(server: ServerBlock, name: str, roots: Sequence[Path]) -> list[str] | None:
    """A class attribute of the server that lists words (``topologies = ("none", Topology.AGENT_IN_ENV)``)."""
    try:
        return _constant(_running_class(entrypoint(server, roots)), name, roots)
    except _UnknownSource:
        return None


def defines(server: ServerBlock, names: Collection[str], roots: Sequence[Path]) -> bool | None:
    """Whether a server's class, or a base of it outside the core, defines one of ``names``; ``None`` where the source
    does not tell."""
    try:
        return _defines(_running_class(entrypoint(server, roots)), names, roots)
    except _UnknownSource:
        return None


def _defines(cls: _Class, names: Collection[str], roots: Sequence[Path]) -> bool:
    if cls.node.name in CORE_BASES:
        return False
    functions = (node.name for node in cls.node.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    attributes = (name for name, _, _ in _assignments(cls))
    if any(name in names for name in (*functions, *attributes)):
        return True
    return any(_defines(base, names, roots) for base in _base_classes(cls, roots))


@lru_cache(maxsize=256)
def _module(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, OSError) as error:
        raise _UnknownSource(str(error)) from error


@lru_cache(maxsize=256)
def _classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(_module(path)) if isinstance(node, ast.ClassDef)}


@lru_cache(maxsize=256)
def _imports(path: Path) -> tuple[ast.ImportFrom, ...]:
    return tuple(node for node in ast.walk(_module(path)) if isinstance(node, ast.ImportFrom))


@lru_cache(maxsize=256)
def _running_class(path: Path) -> _Class:
    """The class whose ``run_webserver()`` the file calls."""
    for node in ast.walk(_module(path)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="run_webserver")):
                if name in _classes(path):
                    return _Class(path, _classes(path)[name])
                break
    raise _UnknownSource("run_webserver")


def _find(name: str, path: Path, roots: Sequence[Path]) -> _Class:
    """Return the class that a name means in a file: defined there, or imported from below a root or from beside it."""
    if node := _classes(path).get(name):
        return _Class(path, node)
    for statement in _imports(path):
        for alias in statement.names:
            if (alias.asname or alias.name) == name:
                return _find(alias.name, _module_file(statement, path, roots), roots)
            if alias.name == "*":
                with contextlib.suppress(_UnknownSource):
                    return _find(name, _module_file(statement, path, roots), roots)
    raise _UnknownSource(name)


def _module_file(statement: ast.ImportFrom, path: Path, roots: Sequence[Path]) -> Path:
    relative = Path(*(statement.module or "").split("."))
    bases = [path.parents[statement.level - 1]] if statement.level else [*roots, path.parent]
    for base in bases:
        for candidate in ((base / relative).with_suffix(".py"), base / relative / "__init__.py"):
            if candidate.is_file():
                return candidate
    raise _UnknownSource(statement.module or "")


def _base_classes(cls: _Class, roots: Sequence[Path]) -> Iterator[_Class]:
    """The bases, without those of pydantic and the standard library, which add no fields."""
    for base in cls.node.bases:
        target = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(target, ast.Attribute):
            raise _UnknownSource(ast.unparse(target))
        if isinstance(target, ast.Name) and target.id not in ("BaseModel", "ABC", "Generic", "Protocol", "object"):
            yield _find(target.id, cls.file, roots)


def _assignments(cls: _Class) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """Name, annotation and value of each assignment in the class's body."""
    for statement in cls.node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                yield name, annotation, value
            case ast.Assign(targets=targets, value=value):
                yield from ((ast.unparse(target), None, value) for target in targets)


def _annotation_of(cls: _Class, attribute: str, roots: Sequence[Path]) -> _Class:
    for name, annotation, _ in _assignments(cls):
        if name == attribute and annotation is not None:
            if isinstance(annotation, ast.Name):
                return _find(annotation.id, cls.file, roots)
            raise _UnknownSource(ast.unparse(annotation))
    for base in _base_classes(cls, roots):
        with contextlib.suppress(_UnknownSource):
            return _annotation_of(base, attribute, roots)
    raise _UnknownSource(attribute)


def _fields(cls: _Class, roots: Sequence[Path], seen: set[tuple[Path, str]]) -> set[str]:
    if (cls.file, cls.node.name) in seen:
        return set()
    seen.add((cls.file, cls.node.name))
    names: set[str] = set()
    for name, annotation, value in _assignments(cls):
        if annotation is not None:
            if "ClassVar" not in ast.unparse(annotation):
                names |= {name, *_aliases(value)}
        elif name == "model_config" and value is not None:
            text = ast.unparse(value)
            if "extra='allow'" in text or "'extra': 'allow'" in text:
                raise _UnknownSource("takes any key")
    for keyword in cls.node.keywords:
        if keyword.arg == "extra" and ast.unparse(keyword.value) == "'allow'":
            raise _UnknownSource("takes any key")
    for base in _base_classes(cls, roots):
        names |= _fields(base, roots, seen)
    return names


def _aliases(value: ast.expr | None) -> set[str]:
    """Other spellings that a ``Field(alias=…, validation_alias=…)`` gives."""
    found: set[str] = set()
    if isinstance(value, ast.Call):
        for keyword in value.keywords:
            if keyword.arg in ("alias", "validation_alias"):
                found |= {
                    node.value
                    for node in ast.walk(keyword.value)
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                }
    return found


def _constant(cls: _Class, name: str, roots: Sequence[Path]) -> list[str] | None:
    for assigned, _, value in _assignments(cls):
        if assigned == name and value is not None:
            return [_word(node) for node in _elements(value)]
    for base in _base_classes(cls, roots):
        if (found := _constant(base, name, roots)) is not None:
            return found
    return None


def _elements(value: ast.expr) -> list[ast.expr]:
    if isinstance(value, ast.Call) and value.args:
        return _elements(value.args[0])
    if isinstance(value, ast.Tuple | ast.List | ast.Set):
        return list(value.elts)
    raise _UnknownSource(ast.unparse(value))


def _word(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Attribute):
        return node.attr.lower()
    raise _UnknownSource(ast.unparse(node))
