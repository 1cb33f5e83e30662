"""`--set a.b=c` on the tree of a file: it wins over what the file says about the same setting,
whatever name the file uses for it.
"""

from __future__ import annotations

from typing import Any

from plait.config.dialects import keys
from plait.config.dialects.aliases import ALIASES, SHORT_FORMS
from plait.errors import Problem

Tree = dict[str, Any]


def apply_override(tree: Tree, path: tuple[str, ...], value: Any) -> Problem | None:
    """Set `path`, after removing what the file says about the same setting under any other name.
    `null` removes.
    """
    dotted = ".".join(path)
    _expand_short_forms(tree, _target(dotted))
    for other in _leaves(tree, ()):
        if ".".join(other) != dotted and _target(".".join(other)) == _target(dotted):
            _remove(tree, other)
    if value is None:
        _remove(tree, path)
        return None
    here = tree
    for depth, name in enumerate(path[:-1], start=1):
        if here.get(name) in (None, False):  # a section that is left out
            here[name] = {}
        here = here[name]
        if not isinstance(here, dict):
            shown = ".".join(path[:depth])
            return Problem(
                f"--set {dotted}",
                value,
                f"{shown} is {here!r} and has no keys in it",
                f"set {shown} itself",
            )
    here[path[-1]] = value
    return None


def _target(path: str) -> str:
    """The path after renaming, sections included."""
    alias = ALIASES.get(path)
    if alias is not None:
        return alias.target
    head, _, rest = path.partition(".")
    return f"{ALIASES[head].target}.{rest}" if head in ALIASES else path


def _expand_short_forms(tree: Tree, target: str) -> None:
    """Write out a section that stands as one value, where `target` may be in it."""
    for name, expand in SHORT_FORMS.items():
        if name in tree and (
            target.startswith(f"{name}.")
            or any(
                path.startswith(f"{name}.") and a.target == target for path, a in ALIASES.items()
            )
        ):
            tree[name] = expand(tree[name])


def _leaves(tree: Tree, at: tuple[str, ...]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, value in tree.items():
        path = (*at, name)
        found += (
            _leaves(value, path)
            if isinstance(value, dict) and ".".join(path) not in keys.fields()
            else [path]
        )
    return found


def _remove(tree: Tree, path: tuple[str, ...]) -> None:
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            return
        tree = tree[name]
    tree.pop(path[-1], None)
