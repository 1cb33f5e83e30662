"""Sizes in bytes, as users write them."""

import pytest

from plait.errors import InputError
from plait.sizes import GIB, KIB, MIB, parse_bytes


def test_sizes():
    sizes = {
        "100000": 100_000,
        "7B": 7,
        "512 MiB": 512 * MIB,
        "2GiB": 2 * GIB,
        "1.5gib": 3 * GIB // 2,
        "1TiB": 1024 * GIB,
        "8g": 8 * GIB,
        "512M": 512 * MIB,
        "4k": 4 * KIB,
        "2GB": 2 * 10**9,
        "2.5 MB": 2_500_000,
        "1tb": 10**12,
    }
    assert {text: parse_bytes(text, "--cpu-budget") for text in sizes} == sizes
    for text in ("", "GiB", "-1GiB", "0", "0.4", "2 G i B", "1e9", "2PiB", "nan"):
        with pytest.raises(InputError, match="--cpu-budget .*: pass a size such as 2GiB"):
            parse_bytes(text, "--cpu-budget")
