"""Read signatures out of Python sources without importing them, and say where two differ."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Parameter:
    """One parameter; default: None where it has none, else the value's text."""

    name: str
    kind: Literal["positional-only", "positional", "*", "keyword", "**"]
    default: str | None

    def __str__(self) -> str:
        name = self.name if self.kind not in ("*", "**") else self.kind + self.name
        default = "" if self.default is None else f"={self.default}"
        return f"{name}{default}" + (" [keyword only]" if self.kind == "keyword" else "")


@dataclass(frozen=True)
class Found:
    """A function or class, and the module that defines it."""

    module: Module
    node: Definition


@dataclass(frozen=True, eq=False)
class Module:
    """One parsed source file; name as in an import, package: it is an __init__.py."""

    name: str
    path: pathlib.Path
    package: bool

    @cached_property
    def bound(self) -> dict[str, ast.AST]:
        """What each name at module level is bound to last; stars as "*module"."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        names: dict[str, ast.AST] = {}
        for node in _statements(tree.body):
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                if not _is_overload(node):
                    names[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    star = f"*{'.' * node.level}{node.module or ''}"
                    names[star if alias.name == "*" else alias.asname or alias.name] = node
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        names[target.id] = node
        return names

    @cached_property
    def used(self) -> frozenset[str]:
        """The names that the module's own code reads."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        return frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name))

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the full name of the module that an import names."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        base = parts[: len(parts) - node.level + self.package]
        return ".".join([*base, *([node.module] if node.module else [])])


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those under its if, try and with too."""
    for node in body:
        yield node
        for name in ("body", "handlers", "orelse", "finalbody"):
            inner = getattr(node, name, ())
            if isinstance(node, ast.If | ast.Try | ast.With):
                for part in inner:
                    yield from _statements(part.body if hasattr(part, "type") else [part])


def _is_overload(node: ast.AST) -> bool:
    names = (getattr(d, "id", getattr(d, "attr", "")) for d in getattr(node, "decorator_list", ()))
    return "overload" in names


@dataclass(frozen=True)
class Sources:
    """Folders that hold Python packages, searched in order as sys.path is."""

    roots: tuple[pathlib.Path, ...]
    _cache: dict[str, Module | None] = field(default_factory=dict, repr=False, compare=False)

    def module(self, name: str) -> Module | None:
        """Return a module of these folders, None where they hold none of that name."""
        if name not in self._cache:
            self._cache[name] = self._look_up(name)
        return self._cache[name]

    def _look_up(self, name: str) -> Module | None:
        for root in self.roots:
            base = root.joinpath(*name.split("."))
            for path, package in ((base / "__init__.py", True), (base.with_suffix(".py"), False)):
                if path.is_file():
                    return Module(name, path, package)
        return None

    def modules(self) -> Iterator[Module]:
        """Yield every module of these folders."""
        for root in self.roots:
            for path in sorted(root.rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                result = self.module(name)
                if result is not None:
                    yield result

    def find(self, module: str, name: str, _seen: frozenset[str] = frozenset()) -> Found | None:
        """Return what `from module import name` would give, imports and aliases followed.

        None where there is no such name, or it is neither a function nor a class.
        """
        here = self.module(module)
        if here is None or f"{module}.{name}" in _seen:
            return None
        seen = _seen | {f"{module}.{name}"}
        node = here.bound.get(name)
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            return Found(here, node)
        if isinstance(node, ast.ImportFrom):
            real = next(a.name for a in node.names if (a.asname or a.name) == name)
            return self.find(here.absolute(node), real, seen)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            return self.find(module, node.value.id, seen)
        for key, star in here.bound.items():
            if key.startswith("*") and isinstance(star, ast.ImportFrom):
                result = self.find(here.absolute(star), name, seen)
                if result is not None:
                    return result
        return None

    def members(self, found: Found) -> dict[str, ast.AST]:
        """Return what the body of a class binds, and where a base is of these folders, its too."""
        assert isinstance(found.node, ast.ClassDef)
        names: dict[str, ast.AST] = {}
        for base in reversed(found.node.bases):
            if isinstance(base, ast.Name):
                parent = self.find(found.module.name, base.id)
                if parent is not None and isinstance(parent.node, ast.ClassDef):
                    names |= self.members(parent)
        for node in _statements(found.node.body):
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and not _is_overload(node):
                names[node.name] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names[node.target.id] = node
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        names[target.id] = names.get(node.value.id, node)
        return names


def parameters(node: ast.AST) -> list[Parameter]:
    """List the parameters of a function, in order; a constant default as its value."""
    assert isinstance(node, _FUNCTIONS)
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(a.defaults))
    defaults += a.defaults
    result = [
        Parameter(x.arg, "positional-only" if x in a.posonlyargs else "positional", _text(d))
        for x, d in zip(plain, defaults, strict=True)
    ]
    if a.vararg:
        result.append(Parameter(a.vararg.arg, "*", None))
    result += [
        Parameter(x.arg, "keyword", _text(d))
        for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    if a.kwarg:
        result.append(Parameter(a.kwarg.arg, "**", None))
    return result


def _text(node: ast.expr | None) -> str | None:
    if node is None:
        return None
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return ast.unparse(node)


def differences(ours: Sequence[Parameter], theirs: Sequence[Parameter]) -> list[str]:
    """Say in words where two parameter lists differ; [] where they are equal."""
    mine, right = {p.name: p for p in ours}, {p.name: p for p in theirs}
    result = [f"has no {p}" for p in theirs if p.name not in mine]
    result += [f"{p} is not the library's" for p in ours if p.name not in right]
    result += [f"{p}, the library's is {right[p.name]}" for p in ours if p != right.get(p.name, p)]
    if not result and [p.name for p in ours] != [p.name for p in theirs]:
        result.append(f"order {', '.join(mine)}; the library's is {', '.join(right)}")
    return result


def compare(ours: Sources, theirs: Sources, module: str, name: str) -> list[str]:
    """Say where an emulated function or class is not as the library's own of that name.

    Of a class every public method, property and annotated field that is emulated is compared, and
    its constructor.
    """
    mine, right = ours.find(module, name), theirs.find(module, name)
    if mine is None:
        return [f"{module}.{name} is neither a function nor a class"]
    if right is None:
        return [f"the library has no {module}.{name}"]
    if type(mine.node) is not type(right.node):
        return [f"{module}.{name} is a {_what(mine.node)}, the library's is a {_what(right.node)}"]
    if not isinstance(mine.node, ast.ClassDef):
        result = _same(name, mine.node, right.node)
        inner = {n.name: n for n in mine.node.body if isinstance(n, _FUNCTIONS)}
        for node in right.node.body:  # a function that it makes and gives out
            if isinstance(node, _FUNCTIONS) and node.name in inner:
                result += _same(f"{name}.{node.name}", inner[node.name], node)
        return result
    members, wanted = ours.members(mine), theirs.members(right)
    names = [n for n in members if not n.startswith("_")]
    if "__init__" in members or "__init__" in wanted:
        names.insert(0, "__init__")
    result = []
    for member in names:
        if member not in members:
            result.append(f"{name} has no {member}")
        elif member not in wanted:
            result.append(f"the library's {name} has no {member}")
        else:
            result += _same(f"{name}.{member}", members[member], wanted[member])
    return result


def _what(node: ast.AST) -> str:
    """Say what a definition is, a method with how it is bound."""
    if isinstance(node, ast.ClassDef):
        return "class"
    if isinstance(node, _FUNCTIONS):
        bound = {"property", "staticmethod", "classmethod", "cached_property"}
        kwargs = {getattr(d, "id", getattr(d, "attr", "")) for d in node.decorator_list}
        return next(iter(sorted(bound & kwargs)), "function")
    return "field"


def _same(name: str, ours: ast.AST, theirs: ast.AST) -> list[str]:
    if _what(ours) != _what(theirs):
        return [f"{name} is a {_what(ours)}, the library's is a {_what(theirs)}"]
    if isinstance(ours, _FUNCTIONS):
        return [f"{name}: {d}" for d in differences(parameters(ours), parameters(theirs))]
    if isinstance(ours, ast.AnnAssign) and isinstance(theirs, ast.AnnAssign):
        mine, right = _text(ours.value), _text(theirs.value)
        if mine != right:
            return [f"{name} = {mine}, the library's is {right}"]
    return []
