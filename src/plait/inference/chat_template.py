"""A tokenizer's chat template: what a row gives it is what it reads.

Transformers ignores tools and settings that a template does not name. Here they are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from plait.errors import InputError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Spans = list[tuple[int, int]]
"""First and last character of parts of a text."""

DATE = datetime(2024, 7, 26)
"""The date of every row whose template writes today's: the tokens of a row are the same in every process and run."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_TAKEN = {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "strftime_now"}
"""What is not a row's to set."""


class ChatTemplate:
    """The template of one conversation, with its tools and settings. Its clock stands still, at `DATE`.

    Args:
        tokenizer: Has a chat template.
        tools: JSON schemas of functions.
        settings: Further arguments of the template, by name.

    Raises:
        InputError: The template does not read `tools` or one of the settings.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: list[Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self._tools, self._settings = tokenizer, tools or None, dict(settings or {})
        self.name = str(getattr(tokenizer, "name_or_path", "") or "the tokenizer")
        self.text = str(tokenizer.get_chat_template(tools=self._tools))
        if self._tools is not None and not re.search(r"\btools\b", self.text):
            raise InputError(f"the chat template of {self.name} does not read `tools`; leave them out, or use a template that does")
        for setting in self._settings:
            if setting in _TAKEN or not re.search(rf"\b{re.escape(setting)}\b", self.text):
                raise InputError(f"chat_template_kwargs: the chat template of {self.name} does not read {setting!r}; leave it out")
        self.text = _CLOCK.sub(lambda found: json.dumps(DATE.strftime(found.group(2))), self.text)

    @property
    def marks_answers(self) -> bool:
        """Whether the template says which text is generated: `{% generation %}`."""
        return _GENERATION.search(self.text) is not None

    def reads_clock(self) -> bool:
        """Return whether the text depends on when it is written."""
        return "strftime_now" in self.text

    def render(self, messages: list[Message], *, prompts: bool = False) -> str:
        """Return the conversation as a text, with the beginning of an answer for `prompts`. Raises InputError."""
        return self._written(messages, add_generation_prompt=prompts)[0]

    def render_marked(self, messages: list[Message]) -> tuple[str, Spans]:
        """Return the conversation as a text, and its parts in `{% generation %}`. Raises InputError."""
        return self._written(messages, return_assistant_tokens_mask=True)

    def _written(self, messages: list[Message], **arguments: Any) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        if not messages:
            return "", []
        given = {**self._tokenizer.special_tokens_map, **self._settings, **arguments}
        try:
            texts, spans = render_jinja_template([messages], tools=self._tools, chat_template=self.text, **given)
        except Exception as error:  # a template is a program, which raises what it likes for roles that it does not expect
            raise InputError(f"the chat template refuses a conversation ({first_line(error)}); correct the row") from error
        return str(texts[0]), list(spans[0]) if spans else []
