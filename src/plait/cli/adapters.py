"""`--adapter` of the commands that run a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.errors import InputError

Adapters = Annotated[list[Path] | None, typer.Option(metavar="FOLDER", help="LoRA of PEFT, on the model.")]


def one_of(given: list[Path] | None) -> Path | None:
    """Raises InputError for several."""
    if given and len(given) > 1:
        raise InputError(
            f"--adapter: {len(given)} were given, and one may be; make one of them with PEFT (add_weighted_adapter), or merge one"
        )
    return given[0] if given else None
