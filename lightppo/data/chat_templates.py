"""Prompts and chats as text and token ids: chat templates, and what they must not drop.

Rollouts and supervised training use the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lightppo.config.rules import template_kwargs
from lightppo.data.rows import Chat, as_chat, name_of_tool, shared_length, shown_value
from lightppo.errors import BadRowError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rendered:
    """A prompt as text."""

    text: str  # what the model reads
    is_chat: bool = False  # made by a chat template, which adds all special tokens
    messages: Chat | None = None  # the chat behind it, without an added system prompt


@dataclass(frozen=True)
class PromptTemplate:
    """How prompts become text, and text becomes ids, for rollouts and supervised training alike.

    A chat goes through the tokenizer's chat template. Plain text does so with ``apply_chat_template`` (as one user
    message), else through ``input_template`` with its one ``{}``, else it stays.
    """

    tokenizer: PreTrainedTokenizerBase
    apply_chat_template: bool = False
    input_template: str | None = None
    system_prompt: str | None = None  # put before chats without a system message
    # further variables of the chat template, as an object or its text in JSON; those of a row go before
    chat_template_kwargs: Mapping[str, Any] | str | None = None
    # shapes of chats that the template writes whole
    _known_shapes: set[Any] = field(default_factory=set, compare=False, repr=False)

    def __post_init__(self) -> None:
        template = self.input_template
        if template is not None and (self.apply_chat_template or template.count("{}") != 1):
            raise DataError(
                f"--input_template {template!r} needs one {{}}, and no --apply_chat_template beside it"
            )
        if self.apply_chat_template:
            self._check_chat_template("--apply_chat_template")
        variables = template_kwargs(self.chat_template_kwargs, "--chat_template_kwargs")
        if unread := self._unread(variables):
            raise DataError(f"--chat_template_kwargs: the chat template does not read {unread}")
        object.__setattr__(self, "chat_template_kwargs", variables)

    def _check_chat_template(self, reason: str) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            tokenizer_name = (
                getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
            )
            raise DataError(
                f"{reason}: the tokenizer {tokenizer_name} has no chat template; set one, or give text prompts"
            )

    def reads(self, variable_name: str) -> bool:
        """Return whether the chat template has a variable of this name; True where its text is not known."""
        template = getattr(self.tokenizer, "chat_template", None)
        sources = template.values() if isinstance(template, Mapping) else [template]
        sources = [source for source in sources if isinstance(source, str)]
        variable = re.compile(rf"\b{re.escape(variable_name)}\b")
        return not sources or any(map(variable.search, sources))

    def _unread(self, variable_names: Iterable[str]) -> str:
        return ", ".join(repr(name) for name in variable_names if not self.reads(name))

    def render(self, prompt: str | Chat, options: Mapping[str, Any] = {}) -> Rendered:
        """Return the text of one prompt; a chat that ends with an assistant turn is to be continued, not answered.

        ``options`` are those of its row, see :func:`template_options`.
        """
        if isinstance(prompt, str) and not self.apply_chat_template:
            return Rendered(self.plain_text(prompt, options))
        messages = as_chat(prompt, "user")
        if messages[-1]["role"] == "assistant":
            switches = {"add_generation_prompt": False, "continue_final_message": True}
        else:
            switches = {"add_generation_prompt": True}
        text = self.chat_text(messages, options, **switches)
        return Rendered(text, is_chat=True, messages=messages)

    def plain_text(self, prompt: str, options: Mapping[str, Any] = {}) -> str:
        """Return a prompt without a chat template; what only such a template could take is refused."""
        for flag in ("system_prompt", "chat_template_kwargs"):
            if getattr(self, flag):
                raise DataError(
                    f"--{flag} needs chat rows or --apply_chat_template; the prompts are plain text"
                )
        if options:
            raise BadRowError(
                "template",
                f"{next(iter(options))!r} is for a chat template, and the prompt is plain text: set "
                "--apply_chat_template, or take the column out",
            )
        # replace, not str.format: other braces in the template are text
        return (self.input_template or "{}").replace("{}", prompt)

    def chat_text(self, messages: Chat, options: Mapping[str, Any] = {}, **switches: bool) -> str:
        """Write messages through the chat template, with the system prompt; the last turn is closed by default.

        Raises:
            BadRowError: the template refuses the chat, or drops a part of it: a message, a call, a tool. What it
                makes of a last turn of the assistant is left to those who train on it.
        """
        if self.input_template is not None:
            raise DataError(
                "--input_template is for plain text, but the rows are chats; leave it out"
            )
        self._check_chat_template("the rows are chats")
        adds_system_prompt = self.system_prompt is not None and messages[0]["role"] != "system"
        if adds_system_prompt:
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if unread := self._unread(option_name for option_name in options if option_name != "tools"):
            raise BadRowError("template", f"the chat template does not read {unread}")
        variables = {"tokenize": False, "add_generation_prompt": False}
        variables |= {**self.chat_template_kwargs, **options, **switches}
        write = partial(self._apply_template, variables=variables)
        text = with_calls(messages, write)
        if not isinstance(self.tokenizer.chat_template, bool):  # a stand-in, which writes nothing
            if adds_system_prompt and not is_shown(self.system_prompt, text):
                raise DataError(
                    "--system_prompt: the chat template drops it; put it into the user's message, or use another"
                )
            check_roles(messages, write, self._known_shapes)
            check_shown(messages, text, options.get("tools", ()))
        return text

    def _apply_template(self, messages: Chat, variables: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(messages, **variables)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise BadRowError(
                "template", f"the chat template refuses it: {type(error).__name__}: {error}"
            ) from error

    def encode(self, texts: list[str], *, special_tokens: bool) -> list[list[int]]:
        """Return token ids; ``special_tokens`` adds a begin-of-text (chats have it already) but no end-of-text."""
        token_ids = self.tokenizer(texts, add_special_tokens=special_tokens, verbose=False)[
            "input_ids"
        ]
        end_id = self.tokenizer.eos_token_id
        if special_tokens and self.tokenizer("a")["input_ids"][-1:] == [end_id]:
            return [text_ids[:-1] for text_ids in token_ids]
        return token_ids

    def encode_behind(self, text: str) -> list[int]:
        """Return the token ids of a text that stands behind other ids."""
        token_ids = ids_behind(text, partial(self.encode, special_tokens=False))
        if token_ids is None:
            raise BadRowError(
                "template",
                f"the tokenizer joins the end of the prompt to the answer, and cannot write {text[:20]!r} apart: let "
                "the prompt end without a blank",
            )
        return token_ids

    def encode_rendered(self, rendered: list[Rendered]) -> list[list[int]]:
        """Return the token ids of rendered prompts, in their order."""
        token_ids: list[list[int]] = []
        for is_bare, neighbours in groupby(rendered, key=self._is_bare):
            token_ids += self.encode([prompt.text for prompt in neighbours], special_tokens=is_bare)
        return token_ids

    def encode_answered(
        self, rendered: list[tuple[Rendered, Rendered]]
    ) -> Iterator[tuple[list[int], int]]:
        """Yield the ids of prompts with answers, from pairs of prompt and whole, and how many are the prompt's."""
        all_prompt_ids = self.encode_rendered([prompt for prompt, _ in rendered])
        all_ids = self.encode_rendered([example for _, example in rendered])
        for (prompt, example), prompt_ids, token_ids in zip(rendered, all_prompt_ids, all_ids):
            if token_ids[: len(prompt_ids)] != prompt_ids and example.text.startswith(prompt.text):
                # A token would span the boundary. A rollout starts from the prompt's own ids, so training does too.
                token_ids = prompt_ids + self.encode_behind(example.text[len(prompt.text) :])
            yield token_ids, len(prompt_ids)

    def _is_bare(self, rendered: Rendered) -> bool:
        """Return whether a begin-of-text is missing: chats and texts that have it get no second one."""
        begin_of_text = self.tokenizer.bos_token
        return not rendered.is_chat and not (
            begin_of_text and rendered.text.startswith(begin_of_text)
        )


def ended(token_ids: list[int], end_id: int) -> list[int]:
    """Return the ids of a finished answer, of which ``end_id`` is the last."""
    if token_ids[-1:] == [end_id]:
        return token_ids
    return [*token_ids, end_id]


def closed(chat_text: str) -> str:
    """Return a chat without the line break that templates put after the last turn: it is not part of the answer."""
    return chat_text.rstrip("\n")


def ids_behind(text: str, encode: Callable[[list[str]], list[list[int]]]) -> list[int] | None:
    """Return the ids of a text behind other ids; None where the tokenizer cannot say.

    Tokenizers of SentencePiece's kind put a blank before a text, which would stand between the two.
    """
    heads = ("\n", ".", "a")
    text_ids, letter_ids, *head_ids = encode([text, "a", *heads])
    with_letter = encode([head + "a" for head in heads])
    if any(joint_ids == alone + letter_ids for alone, joint_ids in zip(head_ids, with_letter)):
        return text_ids  # it puts nothing there
    with_text = encode([head + text for head in heads])
    for alone, joint_ids in zip(head_ids, with_text):
        if alone and joint_ids[: len(alone)] == alone:
            return joint_ids[len(alone) :]
    return None


# -- what a chat template makes of a chat ----------------------------------------------------------------------------

Write = Callable[[Chat], str]  # a chat through a template; a ValueError where that refuses it


def with_calls(messages: Chat, write: Write) -> str:
    """Write a chat through a template, arguments of calls as objects; as texts, where the template cannot write objects."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    arguments = [call.get("function", call).get("arguments") for call in calls]
    objects = [each for each in arguments if isinstance(each, Mapping)]
    refusal = None
    text = ""
    try:
        text = write(messages)
    except ValueError as error:
        refusal = error
    contents = "\n".join(message.get("content") or "" for message in messages)
    in_python = [str(each) for each in objects if str(each) != json.dumps(each)]
    if objects and (refusal or any(each in text and each not in contents for each in in_python)):
        try:
            return write(_with_texts(messages))
        except ValueError as error:
            raise (refusal or error) from None
    if refusal:
        raise refusal
    return text


def _with_texts(messages: Chat) -> Chat:
    """Return the same with arguments of calls as texts of JSON."""

    def as_text(call: Mapping[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": as_text(call["function"])}
        return {**call, "arguments": json.dumps(call.get("arguments") or {}, ensure_ascii=False)}

    chat = []
    for message in messages:
        if tool_calls := message.get("tool_calls"):
            message = message | {"tool_calls": list(map(as_text, tool_calls))}
        chat.append(message)
    return chat


def check_roles(messages: Chat, write: Write, known_shapes: set[Any]) -> None:
    """Refuse roles whose messages a template drops: a short text may be found by chance, a probe is not.

    ``known_shapes``: shapes of chats that were looked at before.
    """
    shape = tuple(
        (message["role"], bool(message.get("content")), bool(message.get("tool_calls")))
        for message in messages
    )
    if shape in known_shapes:
        return
    probes = [
        message | {"content": f"qz{i}probe"} if message.get("content") else message
        for i, message in enumerate(messages)
    ]
    try:
        rendering = with_calls(probes, write)
    except ValueError:  # it wants something of the texts
        known_shapes.add(shape)
        return
    for i, message in enumerate(messages):
        if message.get("content") and f"qz{i}probe" not in rendering:
            beside = " beside calls" * bool(message.get("tool_calls"))
            raise BadRowError(
                "template",
                f"the chat template drops the text of messages of the role {message['role']!r}{beside}: write them in "
                "another role",
            )
    known_shapes.add(shape)


THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message whose text is the thinking before its content."""


def check_shown(messages: Chat, text: str, tools: Iterable[Any] = ()) -> None:
    """Refuse a rendering without the text of a message, or without the name of a call or tool.

    Thinking of earlier turns may be dropped. A last turn of the assistant is for :func:`check_answer`.
    """
    for i, message in enumerate(messages, start=1):
        if i == len(messages) and message["role"] == "assistant":
            continue
        content = message.get("content") or ""
        if message["role"] == "assistant":
            content = content.rpartition("</think>")[2]
        if not is_shown(content, text):
            raise BadRowError(
                "template",
                f"the chat template does not write the text of message {i} ({message['role']}) as it is",
            )
        _check_calls(message, text)
    if hidden := [tool_name for tool_name in map(name_of_tool, tools) if tool_name not in text]:
        raise BadRowError(
            "template", f"the chat template does not show the tools ({', '.join(hidden)})"
        )


def check_answer(message: Mapping[str, Any], answer_text: str) -> None:
    """Refuse a rendering without a part of a turn that is trained on, its thinking included."""
    for content_part in re.split("</?think>", message.get("content") or ""):
        if not is_shown(content_part, answer_text):
            kind = "thinking" if "</think>" in message["content"] else "text"
            raise BadRowError(
                "template",
                f"the chat template drops or changes {kind} of the answer: {shown_value(content_part)}",
            )
    for thought_key in THOUGHTS:
        thought = message.get(thought_key)
        if isinstance(thought, str) and not is_shown(thought, answer_text):
            raise BadRowError(
                "template",
                f"the chat template does not write {thought_key!r} of the answer, which would not be learned",
            )
    _check_calls(message, answer_text)


def _check_calls(message: Mapping[str, Any], text: str) -> None:
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        needed_names = [function["name"], *(arguments if isinstance(arguments, Mapping) else ())]
        for needed_name in needed_names:
            if needed_name not in text:
                raise BadRowError(
                    "template",
                    f"the chat template does not write calls of tools: {needed_name!r} of {needed_names[0]!r} is not there",
                )


def is_shown(content: str, rendering: str) -> bool:
    """Return whether a rendering has a content, perhaps with other white space, or as a text in JSON."""
    content = content.strip()
    if content in rendering or json.dumps(content, ensure_ascii=False)[1:-1] in rendering:
        return True
    return "".join(content.split()) in "".join(rendering.split())


# -- the assistant's turns ---------------------------------------------------------------------------------------------

_PROBE = "qzturn"
Span = tuple[int, int]


def assistant_turns(
    template: PromptTemplate, messages: Chat, options: Mapping[str, Any]
) -> tuple[str, list[Span]]:
    """Return a whole chat as text, and begin and end of each turn with what ends it. A first turn answers nothing.

    Raises:
        BadRowError: the template writes a turn, or what is before it, differently once the chat goes on.
    """
    chat_text = closed(template.chat_text(messages, options))
    spans: list[Span] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not i:
            continue
        try:
            begin, end = _span(template, messages, i, chat_text, options)
            check_answer(message, chat_text[begin:end])
        except BadRowError as error:
            cure = "; without --multiturn the last turn alone is learned" * (i + 1 < len(messages))
            raise BadRowError(error.reason, f"message {i + 1}: {error}{cure}") from error
        spans.append((begin, end))
    if not spans:
        raise BadRowError("missing", "no turn of the assistant answers anything")
    return chat_text, spans


def _span(
    template: PromptTemplate, messages: Chat, i: int, chat_text: str, options: Mapping[str, Any]
) -> Span:
    earlier = template.chat_text(messages[:i], options)
    question = template.chat_text(messages[:i], options, add_generation_prompt=True)
    probe_message = {"role": "assistant", "content": _PROBE}
    probed = template.chat_text([*messages[:i], probe_message], options)
    begin = min(shared_length(question, chat_text), shared_length(question, probed))
    # A thought that was switched off stands in the last turn alone.
    is_rewritten = begin < len(question) and not question.rstrip().endswith("</think>")
    if begin < len(closed(earlier)) or is_rewritten:
        raise BadRowError("template", differs(question, chat_text, begin))
    answered = closed(template.chat_text(messages[: i + 1], options))
    if chat_text.startswith(answered):
        return begin, len(answered)
    ending = closed(probed.rpartition(_PROBE)[2])
    position = chat_text.find(ending, begin)
    if not ending or position < 0:
        raise BadRowError(
            "template", differs(answered, chat_text, shared_length(answered, chat_text))
        )
    return begin, position + len(ending)


def differs(question: str, answered: str, begin: int) -> str:
    """Say where a chat template writes a chat in another way once it goes on."""
    end = begin + 40
    return (
        f"the chat template writes the prompt differently once it is answered ({question[begin:end]!r} becomes "
        f"{answered[begin:end]!r}); no loss can be placed"
    )
