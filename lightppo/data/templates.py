"""From a prompt to the text and the token ids the model sees: chat template, input template, system prompt."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightppo.data.rows import Chat
from lightppo.errors import BadRowError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendered:
    """A prompt as text.

    Attributes:
        text: what the model reads.
        is_chat: made by a chat template, which has put all special tokens in place.
        messages: the chat behind it, without the added system prompt; None for plain text.
    """

    text: str
    is_chat: bool
    messages: Chat | None


@dataclass(frozen=True)
class PromptTemplate:
    """How prompts become text, and text becomes ids; the same for rollouts and for supervised training.

    A chat goes through the tokenizer's chat template always: it has no other form as text. Plain text does so with
    ``apply_chat_template`` (as one user message), else through ``input_template``, else it stays as it is.

    Args:
        tokenizer: a Hugging Face tokenizer.
        apply_chat_template: render plain text as a user message too.
        input_template: text with one ``{}`` where the prompt goes.
        system_prompt: system message put before chats that have none of their own.

    Raises:
        DataError: options that contradict each other, or a tokenizer without a chat template.
    """

    tokenizer: PreTrainedTokenizerBase
    apply_chat_template: bool = False
    input_template: str | None = None
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        if self.input_template is not None:
            if self.apply_chat_template:
                raise DataError("--input_template and --apply_chat_template both render the prompt: set one")
            if self.input_template.count("{}") != 1:
                raise DataError(f"--input_template {self.input_template!r} needs exactly one {{}} for the prompt")
            if "\\n" in self.input_template:
                logger.warning(
                    "--input_template has a backslash and an n, not a line break; in bash write $'...\\n...'"
                )
        if self.apply_chat_template and not self._has_template:
            raise DataError(f"--apply_chat_template: {self._name} has no chat template; use --input_template instead")

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def _name(self) -> str:
        return f"the tokenizer {getattr(self.tokenizer, 'name_or_path', '') or type(self.tokenizer).__name__}"

    def render(self, prompt: str | Chat) -> Rendered:
        """Text of one prompt.

        Raises:
            BadRowError: the chat template refuses the messages.
            DataError: the options do not fit the data (not a matter of one row).
        """
        if isinstance(prompt, str) and not self.apply_chat_template:
            if self.system_prompt is not None:
                raise DataError("--system_prompt needs chat rows or --apply_chat_template; the prompts are plain text")
            # replace, not str.format: other braces in the template are text
            text = prompt if self.input_template is None else self.input_template.replace("{}", prompt)
            return Rendered(text, is_chat=False, messages=None)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        # A prompt that ends in the assistant's words is to be continued, not answered.
        continued = messages[-1]["role"] == "assistant"
        return Rendered(self.chat_text(messages, add_generation_prompt=not continued), True, messages)

    def chat_text(self, messages: Chat, *, add_generation_prompt: bool) -> str:
        """Messages through the chat template, system prompt added; without a generation prompt they are continued."""
        self._check_chat()
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        if not add_generation_prompt:
            options["continue_final_message"] = True
        return self._apply(self._with_system(messages), options)

    def finished_chat_text(self, messages: Chat) -> str:
        """A whole conversation through the chat template, its last turn closed."""
        self._check_chat()
        return self._apply(self._with_system(messages), {"tokenize": False, "add_generation_prompt": False})

    def _check_chat(self) -> None:
        if self.input_template is not None:
            raise DataError("--input_template is for plain text, but the rows are chats; leave it out")
        if not self._has_template:
            raise DataError(f"the rows are chats, but {self._name} has no chat template; set one, or give text prompts")

    def _with_system(self, messages: Chat) -> Chat:
        if self.system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _apply(self, messages: Chat, options: dict[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise BadRowError("template", f"the chat template refuses it: {type(error).__name__}: {error}") from error

    def encode(self, texts: list[str], *, special_tokens: bool) -> list[list[int]]:
        """Token ids of texts.

        Args:
            texts: rendered texts.
            special_tokens: let the tokenizer put its begin-of-text in front (plain text). Never for chats, whose
                template did it. An end-of-text that the tokenizer appends is taken off: a prompt goes on.
        """
        if not texts:
            return []
        ids = self.tokenizer(texts, add_special_tokens=special_tokens, verbose=False)["input_ids"]
        eos_id = self.tokenizer.eos_token_id
        if special_tokens and eos_id is not None and self.tokenizer("a")["input_ids"][-1] == eos_id:
            ids = [row[:-1] for row in ids]
        return [list(row) for row in ids]

    def encode_rendered(self, rendered: list[Rendered]) -> list[list[int]]:
        """Token ids of rendered prompts, in their order."""
        bos = self.tokenizer.bos_token
        plain = [i for i, r in enumerate(rendered) if not r.is_chat and not (bos and r.text.startswith(bos))]
        chosen = set(plain)
        whole = [i for i in range(len(rendered)) if i not in chosen]  # their begin-of-text, if any, is in the text
        ids: list[list[int]] = [[] for _ in rendered]
        for group, special_tokens in ((plain, True), (whole, False)):
            encoded = self.encode([rendered[i].text for i in group], special_tokens=special_tokens)
            for i, row in zip(group, encoded):
                ids[i] = row
        return ids
