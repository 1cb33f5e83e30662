"""Rendering of conversations by a tokenizer's chat template.

Transformers ignores tools and settings that a template does not read. `ChatTemplate` refuses them,
because the text would silently lack them.
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
"""Spans (begin, end) of a text in characters. The end is exclusive."""

DATE = datetime(2024, 7, 26)
"""Date that templates write instead of today's.

The tokens of a row are therefore the same in every process and run.
"""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_RESERVED_VARIABLES = {
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "strftime_now",
}
"""Variables of the template that a row may not set."""


class ChatTemplate:
    """Chat template of a tokenizer with the tools and settings of one conversation.

    Templates that write the current date write the constant `DATE` instead.

    Args:
        tokenizer: A tokenizer with a chat template.
        tools: JSON schemas of functions, which the template lists for the model.
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
        self._tokenizer = tokenizer
        self._tools = tools or None
        self._settings = dict(settings or {})
        self.name = str(getattr(tokenizer, "name_or_path", "") or "the tokenizer")
        self.text = str(tokenizer.get_chat_template(tools=self._tools))
        # The text of the template is searched, because rendering would ignore unknown variables.
        if self._tools is not None and not re.search(r"\btools\b", self.text):
            rule = f"the chat template of {self.name} does not read `tools`"
            raise InputError(f"{rule}; leave them out, or use a template that does")
        for setting in self._settings:
            is_read = re.search(rf"\b{re.escape(setting)}\b", self.text) is not None
            if setting in _RESERVED_VARIABLES or not is_read:
                raise InputError(
                    f"chat_template_kwargs: the chat template of {self.name} does not read"
                    f" {setting!r}; leave it out"
                )
        # Only calls with a literal format can be replaced. `reads_clock` reports the others.
        self.text = _CLOCK.sub(lambda call: json.dumps(DATE.strftime(call.group(2))), self.text)

    @property
    def marks_answers(self) -> bool:
        """True if the template marks the text of answers with `{% generation %}`."""
        return _GENERATION.search(self.text) is not None

    def reads_clock(self) -> bool:
        """Return True if the template reads the clock in a form that `DATE` cannot replace."""
        return "strftime_now" in self.text

    def render(self, messages: list[Message], *, prompts: bool = False) -> str:
        """Return the conversation as a string.

        Args:
            messages: The conversation, with `role` and `content` of each message.
            prompts: Whether the text ends with the beginning of an answer, as generation needs.

        Raises:
            InputError: The template raises an error, e.g. for a role that it does not support.
        """
        return self._render(messages, add_generation_prompt=prompts)[0]

    def render_marked(self, messages: list[Message]) -> tuple[str, Spans]:
        """Return (conversation as a string, spans inside `{% generation %}`).

        Only templates with `marks_answers` have such spans.

        Raises:
            InputError: See `render`.
        """
        return self._render(messages, return_assistant_tokens_mask=True)

    def _render(self, messages: list[Message], **arguments: Any) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        if not messages:
            return "", []
        variables = {**self._tokenizer.special_tokens_map, **self._settings, **arguments}

        try:
            texts, spans = render_jinja_template(
                [messages],
                tools=self._tools,
                chat_template=self.text,
                **variables,
            )
        except Exception as error:  # a template is a program, and may raise any error
            rule = f"the chat template refuses a conversation ({first_line(error)})"
            raise InputError(f"{rule}; correct the row") from error

        # Only rendering with a mask of the answers returns spans.
        if not spans:
            return str(texts[0]), []
        return str(texts[0]), list(spans[0])
