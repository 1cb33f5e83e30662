"""Imports of modules that a user names as `package.module:name`, and of optional packages."""

from __future__ import annotations

import importlib
import json
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

from plait.errors import InputError


class MissingExtraError(InputError, ImportError):
    """Error for a missing package that an optional extra would install."""


def require_extra(what: str, extra: str, **packages: str) -> None:
    """Raise an error if a package that `what` needs is not installed.

    Args:
        what: The field, option or package that needs the packages.
        extra: The extra of Plait that installs them.
        packages: Titles of the packages for the message, keyed by the name that is imported.

    Raises:
        MissingExtraError: A package is not installed. The message contains the command that
            installs the extra.
    """
    missing = [title for name, title in packages.items() if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f"{what}: needs {' and '.join(missing)}, which {verb} not installed; run"
            f" {install_line(extra)}"
        )


def install_line(extra: str) -> str:
    """Return the command that installs an optional extra of Plait.

    Plait is not on a package index, so the command names the folder that Plait was installed from,
    if the folder still exists.
    """
    try:
        origin = json.loads(distribution("plait").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url = urlsplit(origin.get("url", ""))
    folder = Path(unquote(url.path))
    if url.scheme == "file" and (folder / "pyproject.toml").is_file():
        return f"pip install '{folder}[{extra}]'"
    return f"pip install '.[{extra}]' in a clone of Plait"


class NamedImportError(Exception):
    """User-specified name that cannot be imported.

    Attributes:
        rule: What is wrong with the name.
        remedy: What the user can do.
    """

    def __init__(self, rule: str, remedy: str) -> None:
        super().__init__(f"{rule}; {remedy}")
        self.rule = rule
        self.remedy = remedy


def import_named(named: str, *, form: str, example: str) -> tuple[ModuleType, str]:
    """Import the module of `package.module:name` and return it with the name.

    Args:
        named: The text of the user.
        form: Rule that is quoted if the text has another form.
        example: Text of the right form for the message.

    Raises:
        NamedImportError: The text has another form, or the module does not exist. An error inside
            the module is not caught.
    """
    path, _, attribute = named.partition(":")
    if not path or path.startswith(".") or not attribute:
        raise NamedImportError(form, f"write for example {example}")
    try:
        return importlib.import_module(path), attribute
    except ModuleNotFoundError as error:
        # Another name belongs to a failing import inside the user's module.
        if error.name is not None and (path == error.name or path.startswith(f"{error.name}.")):
            raise NamedImportError(
                f"there is no module {error.name!r} here", "run from its folder, or install it"
            ) from None
        raise
