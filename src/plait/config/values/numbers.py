"""Types of numbers, booleans and paths in configuration files.

A quoted number is a number: YAML reads `1e-4` as text. Booleans are not numbers.

Only true and false are booleans. pydantic would also accept "yes", "off" and 1, which DeepSpeed
reads differently: "no" is a non-empty string there, and therefore true.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from plait.files import is_url


def _refuse_bool(value: object) -> object:
    # Python's bool is a subclass of int, so pydantic would accept true as 1.
    if isinstance(value, bool):
        raise PydanticCustomError("number", "true and false are not numbers; write a number")
    return value


MAX_INT = 2**63 - 1
"""Largest integer that torch and the file formats can store."""
MAX_PROCESSES = 2**20
"""Maximum of each degree of parallelism, and of the processes on one machine."""

Flag = Annotated[bool, Field(strict=True)]
"""Boolean that accepts only true and false."""
NotNegative = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, allow_inf_nan=False)]
"""Finite number of at least 0."""
Fraction = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, lt=1)]
"""Number of at least 0 and below 1, such as a momentum."""
Finite = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]
"""Finite number."""
Integer = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=-MAX_INT, le=MAX_INT)]
"""Integer. 1e3 is accepted, 1.5 is not."""
NotNegativeInteger = Annotated[Integer, Field(ge=0)]
"""Integer of at least 0."""
Steps = Annotated[Integer, Field(ge=1)]
"""Number of steps, at least 1."""

MAX_NAME_BYTES = 255
"""Linux's limit on the name of a file."""
MAX_PATH_BYTES = 4096
"""Linux's limit on a path, including the terminating zero byte."""


def _check_path(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise PydanticCustomError(
            "place",
            "the path of a file or folder, and it is empty; set a path, or leave the key out",
        )

    longest_name = max(len(name.encode()) for name in value.split("/"))
    if len(value.encode()) >= MAX_PATH_BYTES or longest_name > MAX_NAME_BYTES:
        raise PydanticCustomError(
            "place",
            "a path of at most {path} bytes, {part} between two slashes; shorten it",
            {"part": MAX_NAME_BYTES, "path": MAX_PATH_BYTES - 1},
        )
    return value


def _refuse_url(value: str) -> str:
    if is_url(value):
        raise PydanticCustomError(
            "place",
            "a folder that this machine sees, and this one is a URL; name a folder (a store's URL"
            " goes into run.checkpoints)",
        )
    return value


PathOrURL = Annotated[str, BeforeValidator(_check_path)]
"""Path of a file or folder, URL of a store, or name on a hub."""
LocalPath = Annotated[PathOrURL, AfterValidator(_refuse_url)]
"""Path in a file system of this machine."""
