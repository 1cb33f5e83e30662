"""A tokenizer of printable characters, for models with at least 96 tokens."""


class Words:
    """Token n is the character n + 32; 0 is no text."""

    chat_template = "a"
    pad_token_id = 0

    def __len__(self):
        return 96

    def __call__(self, text):
        return {"input_ids": [max(min(ord(char), 126) - 31, 1) for char in text]}

    def decode(self, ids, *, skip_special_tokens=False):
        return "".join(chr(token + 31) for token in ids if token or not skip_special_tokens)

    def apply_chat_template(self, turns, **_):
        if turns[0]["role"] not in ("user", "system"):
            raise ValueError(f"no role {turns[0]['role']}")
        return [
            *self("".join(f"{turn['role']}: {turn['content']}\n" for turn in turns))["input_ids"],
            27,
        ]
