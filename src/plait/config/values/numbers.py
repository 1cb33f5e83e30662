"""Numbers as files write them: `1e-4` in quotes (or from YAML, which reads it as text) is a number,
true and false are not.

Booleans are only true and false. pydantic would also accept "yes", "off" and 1, which DeepSpeed
reads differently: "no" is a non-empty string, and therefore true.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from plait.files import is_url


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("number", "true and false are not numbers; write a number")
    return value


Flag = Annotated[bool, Field(strict=True)]
"""Boolean that accepts only true and false."""
NotNegative = Annotated[float, BeforeValidator(_not_bool), Field(ge=0, allow_inf_nan=False)]
"""0 or more, finite."""
Fraction = Annotated[float, BeforeValidator(_not_bool), Field(ge=0, lt=1)]
"""0 or more, below 1: a momentum."""
Finite = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
"""Any number but inf and nan."""
LARGEST = 2**63 - 1
"""Of a whole number: what torch and the file formats hold."""
MOST_PROCESSES = 2**20
"""Of one kind of parallelism, or on one machine."""
Whole = Annotated[int, BeforeValidator(_not_bool), Field(ge=-LARGEST, le=LARGEST)]
"""A whole number; 1e3 is one, 1.5 is not."""
Count = Annotated[Whole, Field(ge=0)]
"""0, 1, 2, ..."""
Steps = Annotated[Whole, Field(ge=1)]
"""1, 2, ..."""


def _place(value: object) -> object:
    if isinstance(value, str):
        if not value.strip():
            raise PydanticCustomError(
                "place",
                "the name of a file or folder, and this one is empty; write one, or leave the"
                " key out",
            )
        if len(value.encode()) >= LONGEST_PATH or any(
            len(part.encode()) > LONGEST_NAME for part in value.split("/")
        ):
            numbers = {"part": LONGEST_NAME, "path": LONGEST_PATH - 1}
            raise PydanticCustomError(
                "place",
                "a path of at most {path} bytes, {part} between two slashes; shorten it",
                numbers,
            )
    return value


LONGEST_NAME = 255
LONGEST_PATH = 4096
"""Bytes of a name in a folder, and of a path with its end mark: Linux's."""
Place = Annotated[str, BeforeValidator(_place)]
"""A file or folder, by a name that one can have."""


def _on_this_machine(value: str) -> str:
    if is_url(value):
        raise PydanticCustomError(
            "place",
            "a folder that this machine sees, and this one is a URL; name a folder (a store's URL"
            " goes into run.checkpoints)",
        )
    return value


LocalPlace = Annotated[Place, AfterValidator(_on_this_machine)]
"""Path of a file or folder of a file system, which a store's URL cannot replace."""
