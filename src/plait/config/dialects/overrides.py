"""Application of `--set a.b=c` to the tree of a file.

An override replaces the file's value of the same setting under any of its names.
"""

from __future__ import annotations

from typing import Any

from plait.config.dialects import keys
from plait.config.dialects.aliases import ALIASES, SHORT_FORMS
from plait.errors import Problem

Tree = dict[str, Any]


def apply_override(tree: Tree, path: tuple[str, ...], value: Any) -> Problem | None:
    """Set a value in a tree, after removing the same setting under its other names.

    Args:
        tree: The file's content, which is modified.
        path: Names of the key, from the outermost section.
        value: New value; None removes the key.

    Returns:
        A problem if the path leads through a value that is not a section.
    """
    dotted = ".".join(path)
    target = _target(dotted)
    # A section written as a number has no keys that could be replaced.
    _expand_short_forms(tree, target)
    for leaf in _leaves(tree, ()):
        name = ".".join(leaf)
        if name != dotted and _target(name) == target:
            _remove(tree, leaf)

    if value is None:
        _remove(tree, path)
        return None

    section = tree
    for depth, name in enumerate(path[:-1], start=1):
        # null and false are the forms of an omitted section.
        if section.get(name) in (None, False):
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            shown = ".".join(path[:depth])
            rule = f"{shown} is {section!r} and has no keys in it"
            return Problem(f"--set {dotted}", value, rule, f"set {shown} itself")
    section[path[-1]] = value
    return None


def _target(path: str) -> str:
    """Return the path of a setting after renaming the key or its section."""
    alias = ALIASES.get(path)
    if alias is not None:
        return alias.target
    section, _, name = path.partition(".")
    if section in ALIASES:
        return f"{ALIASES[section].target}.{name}"
    return path


def _expand_short_forms(tree: Tree, target: str) -> None:
    """Replace a value that stands for a section by the section, if `target` may be in it."""
    for section, expand in SHORT_FORMS.items():
        if section not in tree:
            continue
        names = [path for path, alias in ALIASES.items() if alias.target == target]
        if any(name.startswith(f"{section}.") for name in (target, *names)):
            tree[section] = expand(tree[section])


def _leaves(tree: Tree, prefix: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the paths of all settings. An object that is a setting is not searched."""
    leaves: list[tuple[str, ...]] = []
    for name, value in tree.items():
        path = (*prefix, name)
        # The value of a setting such as `optimizer.params` is an object too.
        if isinstance(value, dict) and ".".join(path) not in keys.schema_fields():
            leaves += _leaves(value, path)
        else:
            leaves.append(path)
    return leaves


def _remove(tree: Tree, path: tuple[str, ...]) -> None:
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            return
        tree = tree[name]
    tree.pop(path[-1], None)
