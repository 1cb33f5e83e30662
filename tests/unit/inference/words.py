"""A tokenizer of printable characters, for models with at least 96 tokens."""

from __future__ import annotations

from typing import Any


class Words:
    """Token n is the character n + 32; 0 is no text."""

    chat_template = "a"
    pad_token_id = 0

    def __len__(self) -> int:
        return 96

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [max(min(ord(char), 126) - 31, 1) for char in text]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token + 31) for token in ids if token or not skip_special_tokens)

    def apply_chat_template(self, turns: list[dict[str, Any]], **_: Any) -> list[int]:
        if turns[0]["role"] not in ("user", "system"):
            raise ValueError(f"no role {turns[0]['role']}")
        return [
            *self("".join(f"{turn['role']}: {turn['content']}\n" for turn in turns))["input_ids"],
            27,
        ]
