"""What a user names as `package.module:name`."""

from __future__ import annotations

import importlib
from types import ModuleType


class NotImportable(Exception):
    """`rule` says what is wrong with a name, `remedy` what to do."""

    def __init__(self, rule: str, remedy: str) -> None:
        super().__init__(f"{rule}; {remedy}")
        self.rule, self.remedy = rule, remedy


def module_of(named: str, *, form: str, example: str) -> tuple[ModuleType, str]:
    """The module, imported, and the name in it. `form` is the rule for a text of another form, and `example` one of this.

    Raises NotImportable for such a text and for a module that is not there; an error inside of the module is its own.
    """
    path, _, attribute = named.partition(":")
    if not path or path.startswith(".") or not attribute:
        raise NotImportable(form, f"write for example {example}")
    try:
        return importlib.import_module(path), attribute
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(f"{error.name}.")):
            raise NotImportable(f"there is no module {error.name!r} here", "run from its folder, or install it") from None
        raise
