"""Hashes and seeds that must be the same on every rank and in every version."""

from __future__ import annotations

import hashlib
from typing import Any

GOLDEN_RATIO = 0x9E3779B97F4A7C15
"""Increment of SplitMix64: 2^64 divided by the golden ratio."""
WORD_MASK = (1 << 64) - 1


def sha256_of(text: str) -> str:
    """Return the SHA-256 of a string in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def seed_of(text: str) -> int:
    """Return a seed of 63 bits, as many as torch accepts, from the hash of a string."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def mix_bits(value: Any) -> Any:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), modulo 2^64.

    All bits of the result depend on all bits of `value`, an integer or an array of uint64.
    """
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD_MASK
    return value ^ (value >> 31)
