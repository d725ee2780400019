"""Rows become prompts and token ids: which columns are read, how prompts become text, how bad rows are treated.

Every row is checked and tokenised once, before training.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from lightppo.config.rules import template_kwargs
from lightppo.errors import BadRowError, ConfigError, DataError
from lightppo.plugin import ENCODERS, PROMPT_FORMS, PromptForm
from lightppo.ranks import Alone, Ranks

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Chat = list[dict[str, Any]]

ORIGIN_COLUMN = "__origin__"  # hidden column: the file and line a row came from
DEFAULT_INPUT_KEY = "input"
PROMPT_KEYS = (
    DEFAULT_INPUT_KEY,
    "prompt",
    "messages",
    "question",
    "query",
    "problem",
    "instruction",
)
LABEL_KEYS = (
    "reward_model.ground_truth",
    "ground_truth",
    "label",
    "answer",
    "solution",
    "solutions",
    "input_output",
)
MEDIA_KEYS = ("images", "image", "videos", "video", "audios", "audio")
TEMPLATE_KEYS = ("tools", "chat_template_kwargs", *MEDIA_KEYS)
"""Columns beside the messages that a chat template may take, and those that nothing here takes."""


# -- which columns are read ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowFields:
    """The keys to try, in order, for each part of a row; the first key with a value in the row counts."""

    prompt: tuple[str, ...]
    label: tuple[str, ...] = ()
    label_required: bool = False  # a row without a label is bad
    # The forms in lightppo.plugin.PROMPT_FORMS that a row may have where it has no such prompt.
    forms: tuple[PromptForm, ...] = ()

    @property
    def rendered(self) -> tuple[str, ...]:
        """Those of what a model reads."""
        return (*self.prompt, *(column for form in self.forms for column in form.columns))

    def columns_in(self, columns: Iterable[str]) -> list[str]:
        """The columns that are needed to render and label a row."""
        return _columns_of((*self.rendered, *self.label, *TEMPLATE_KEYS), columns)

    def rendered_in(self, columns: Iterable[str]) -> list[str]:
        """Those of them that a model reads."""
        return _columns_of((*self.rendered, *TEMPLATE_KEYS), columns)


def _columns_of(keys: Iterable[str], columns: Iterable[str]) -> list[str]:
    needed = {column_of(key, columns) for key in keys}
    return [column for column in columns if column in needed]


def resolve_fields(
    columns: Sequence[str],
    *,
    input_key: str | None = None,
    label_key: str | None = None,
    label_flag: str = "--label_key",
    prompt_keys: Iterable[str] = PROMPT_KEYS,
    has_prompt: bool = False,
) -> RowFields:
    """Decide which keys are read from data with these columns; DataError lists the columns if none fits.

    None, or a default name without a column, tries the known names; ``has_prompt``: rows have one without them, too.
    """
    label = known_keys(LABEL_KEYS, columns)
    if label_key:
        require_column(label_key, columns, label_flag)
        label = (label_key,)
    forms = [form for form in PROMPT_FORMS.values() if set(form.columns) <= set(columns)]
    prompt = known_keys(prompt_keys, columns)
    if (input_key or DEFAULT_INPUT_KEY) != DEFAULT_INPUT_KEY:
        require_column(input_key, columns, "--input_key")
        prompt, forms = (input_key,), []
    if not prompt and not forms and not has_prompt:
        raise _no_prompt_column(columns)
    return RowFields(prompt, label, label_key is not None, tuple(forms))


def _no_prompt_column(columns: Sequence[str]) -> DataError:
    forms = (f", or {' and '.join(form.columns)}" for form in PROMPT_FORMS.values())
    known = f"recognised without it: {', '.join(PROMPT_KEYS)}{''.join(forms)}"
    listed = _listed(columns)
    return DataError(
        f"no column with a prompt: set --input_key to one of the columns: {listed} ({known})"
    )


def known_keys(keys: Iterable[str], columns: Sequence[str]) -> tuple[str, ...]:
    """Those that are columns, or fields of one."""
    return tuple(key for key in dict.fromkeys(keys) if column_of(key, columns))


def require_column(key: str, columns: Sequence[str], flag: str) -> None:
    """DataError unless ``key`` is a column, or a field of one."""
    if column_of(key, columns) is None:
        raise DataError(
            f"{flag} {key!r} is not a column of the data; its columns: {_listed(columns)}"
        )


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(c for c in columns if c != ORIGIN_COLUMN) or "(none)"


def column_of(key: str, columns: Iterable[str]) -> str | None:
    """The column that holds ``key``: itself, or the part before the first dot."""
    columns = set(columns)
    return next((name for name in (key, key.split(".")[0]) if name in columns), None)


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """Value of a column, or of a field inside one by a dotted key (``reward_model.ground_truth``); None if absent."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def first_value(row: Mapping[str, Any], keys: Iterable[str]) -> tuple[str | None, Any]:
    return next(
        ((key, value) for key in keys if (value := lookup(row, key)) is not None), (None, None)
    )


# -- the parts of a row; BadRowError where one is missing, of the wrong type, or empty -------------------------------


def read_prompt(row: Mapping[str, Any], fields: RowFields) -> tuple[str | Chat, str | None]:
    """A row's prompt (without a chat's final answer) and its key (None: it is in no column of its own)."""
    key, value = first_value(row, fields.prompt)
    if key is None:
        return _prompt_of_form(row, fields), None
    prompt = text_or_chat(value, repr(key))
    if key == "messages" and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        if len(prompt) == 1:
            raise BadRowError("missing", "'messages' has an answer but no prompt")
        prompt = prompt[:-1]
    return prompt, key


def _prompt_of_form(row: Mapping[str, Any], fields: RowFields) -> str | Chat:
    for form in fields.forms:
        if all(row.get(column) is not None for column in form.columns):
            return form.fn(row)
    raise no_prompt(fields)


def no_prompt(fields: RowFields) -> BadRowError:
    """What to raise for a row without a prompt."""
    return BadRowError(
        "missing", f"no prompt: {' and '.join(map(repr, fields.prompt))} missing or null"
    )


def other_columns(row: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """What reward functions get of a row whose prompt is in column ``key``.

    A conversation's own column stays: its last turn is not in the prompt.
    """
    hidden = {ORIGIN_COLUMN} if key in (None, "messages") else {ORIGIN_COLUMN, key}
    return {name: value for name, value in row.items() if name not in hidden}


def read_label(row: Mapping[str, Any], fields: RowFields) -> Any:
    """The ground truth of a row, any JSON value or None."""
    key, value = first_value(row, fields.label)
    if key is None and fields.label_required:
        raise BadRowError("missing", f"no label: {fields.label[0]!r} missing or null")
    return value


def as_chat(prompt: str | Chat, role: str) -> Chat:
    """A chat as it is, a text as one message."""
    return prompt if isinstance(prompt, list) else [{"role": role, "content": prompt}]


def text_or_chat(value: Any, where: str) -> str | Chat:
    if isinstance(value, str):
        if not value.strip():
            raise BadRowError("empty", f"{where} is empty")
        return value
    if isinstance(value, list | tuple):
        return checked_chat(value, where)
    raise BadRowError(
        "wrong_type", f"{where} is {shown_value(value)}; text or a list of chat messages is needed"
    )


def checked_chat(value: Sequence[Any], where: str) -> Chat:
    """Checked messages of ``role`` and text ``content``, without the None fields that Arrow adds.

    Arguments of calls are objects: OpenAI's form, a text of JSON, would be written as a text in a text.
    """
    if not value:
        raise BadRowError("empty", f"{where} is an empty list of messages")
    chat: Chat = []
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            needed = "a message has a role (text) and a content"
            raise BadRowError("wrong_type", f"{where}[{i}] is {shown_value(message)}; {needed}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise BadRowError(
                "wrong_type", f"{where}[{i}].content is {shown_value(content)}; only text is read"
            )
        chat.append({k: v for k, v in message.items() if v is not None or k == "content"})
        if calls := chat[-1].get("tool_calls"):
            chat[-1]["tool_calls"] = _checked_calls(calls, f"{where}[{i}].tool_calls")
    last = chat[-1].get("content")
    if last is not None and not last.strip() and not chat[-1].get("tool_calls"):
        raise BadRowError("empty", f"{where}: the last message is empty")
    return chat


def _checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    calls = _from_json(calls, where)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRowError("wrong_type", f"{where} is {shown_value(calls)}; a list is needed")
    found = []
    for i, call in enumerate(calls):
        call = {key: value for key, value in call.items() if value is not None}
        is_nested = isinstance(call.get("function"), Mapping)
        function = dict(call["function"]) if is_nested else call
        if not isinstance(function.get("name"), str):
            raise BadRowError("wrong_type", f"{where}[{i}] has no name of a function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _from_json(arguments.strip() or "{}", f"{where}[{i}].arguments")
        if not isinstance(arguments, Mapping | None):
            raise BadRowError(
                "wrong_type",
                f"{where}[{i}].arguments is {shown_value(arguments)}; an object is needed",
            )
        function["arguments"] = arguments or {}
        found.append(call | {"function": function} if is_nested else function)
    return found


def _from_json(value: Any, where: str) -> Any:
    """What a text of JSON means; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRowError("wrong_type", f"{where} is not JSON: {error}") from error


def without_nulls(value: Any, feature: Any) -> Any:
    """A value of a table without the fields that are null, which Arrow adds to each struct that lacks them.

    ``feature`` is of ``datasets``; within columns of JSON a null was written, and stays.
    """
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        return {
            key: without_nulls(each, feature.get(key))
            for key, each in value.items()
            if each is not None
        }
    within = _within(feature)
    if isinstance(value, list) and within is not None:
        return [without_nulls(each, within) for each in value]
    return value


def chat_without_nulls(value: Any, feature: Any) -> Any:
    """The same of a column: what the messages of a chat have themselves is left to :func:`checked_chat`."""
    within = _within(feature)
    if isinstance(value, list) and isinstance(within, Mapping):
        return [
            {key: without_nulls(part, within.get(key)) for key, part in (each or {}).items()}
            for each in value
        ]
    return without_nulls(value, feature)


def _within(feature: Any) -> Any:
    """The feature of a list's values; None: it is no list."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row gives the chat template beside its messages: ``tools``, and all of ``chat_template_kwargs``."""
    for key in MEDIA_KEYS:
        if (media := row.get(key)) is not None and (not hasattr(media, "__len__") or len(media)):
            raise BadRowError(
                "wrong_type",
                f"{key!r} is {shown_value(media)}; models read text alone here: take the column out, or its rows",
            )
    try:
        options = template_kwargs(row.get("chat_template_kwargs"), "'chat_template_kwargs'")
    except ConfigError as error:
        raise BadRowError("wrong_type", str(error)) from error
    if (tools := row.get("tools")) is None:
        return options
    tools = _from_json(tools, "'tools'") if tools else []
    if not isinstance(tools, list) or not all(map(name_of_tool, tools)):
        raise BadRowError(
            "wrong_type",
            f"'tools' is {shown_value(tools)}; a list of JSON schemas with a name each is needed, or rename the column",
        )
    tools = [{k: v for k, v in tool.items() if v is not None} for tool in tools]
    return options | ({"tools": tools} if tools else {})


def name_of_tool(tool: Any) -> str | None:
    function = tool.get("function") or tool if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and name else None


def shown_value(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


# -- prompts as text and ids -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rendered:
    """A prompt as text."""

    text: str  # what the model reads
    is_chat: bool  # made by a chat template, which adds all special tokens
    messages: Chat | None  # the chat behind it, without an added system prompt; None for plain text


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
        if self.input_template is not None:
            self._check_input_template(self.input_template)
        if self.apply_chat_template:
            self._check_chat_template("--apply_chat_template")
        kwargs = template_kwargs(self.chat_template_kwargs, "--chat_template_kwargs")
        if unknown := self._unread(kwargs):
            raise DataError(f"--chat_template_kwargs: the chat template does not read {unknown}")
        object.__setattr__(self, "chat_template_kwargs", kwargs)

    def _check_input_template(self, template: str) -> None:
        if self.apply_chat_template or template.count("{}") != 1:
            raise DataError(
                f"--input_template {template!r} needs one {{}}, and no --apply_chat_template beside it"
            )

    def _check_chat_template(self, reason: str) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            name = getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
            raise DataError(
                f"{reason}: the tokenizer {name} has no chat template; set one, or give text prompts"
            )

    def reads(self, name: str) -> bool:
        """Whether the chat template has a variable of this name; True where its text is not known."""
        template = getattr(self.tokenizer, "chat_template", None)
        texts = template.values() if isinstance(template, Mapping) else [template]
        known = [text for text in texts if isinstance(text, str)]
        return not known or any(re.search(rf"\b{re.escape(name)}\b", text) for text in known)

    def _unread(self, names: Iterable[str]) -> str:
        return ", ".join(repr(name) for name in names if not self.reads(name))

    def render(self, prompt: str | Chat, options: Mapping[str, Any] = {}) -> Rendered:
        """Text of one prompt; a chat that ends with an assistant turn is to be continued, not answered.

        ``options`` are those of its row, see :func:`template_options`.
        """
        if isinstance(prompt, str) and not self.apply_chat_template:
            return Rendered(self.plain_text(prompt, options), is_chat=False, messages=None)
        messages = as_chat(prompt, "user")
        continued = messages[-1]["role"] == "assistant"
        own = {"continue_final_message": True} if continued else {}
        text = self.chat_text(messages, options, add_generation_prompt=not continued, **own)
        return Rendered(text, True, messages)

    def plain_text(self, prompt: str, options: Mapping[str, Any] = {}) -> str:
        """A prompt without a chat template; what only such a template could take is refused."""
        flags = {
            "--system_prompt": self.system_prompt,
            "--chat_template_kwargs": self.chat_template_kwargs,
        }
        if given := [flag for flag, value in flags.items() if value]:
            raise DataError(
                f"{given[0]} needs chat rows or --apply_chat_template; the prompts are plain text"
            )
        if options:
            raise BadRowError(
                "template",
                f"{next(iter(options))!r} is for a chat template, and the prompt is plain text: set "
                "--apply_chat_template, or take the column out",
            )
        # replace, not str.format: other braces in the template are text
        return (self.input_template or "{}").replace("{}", prompt)

    def chat_text(self, messages: Chat, options: Mapping[str, Any] = {}, **own: Any) -> str:
        """Messages through the chat template, with the system prompt; the last turn is closed by default.

        Raises:
            BadRowError: the template refuses the chat, or drops a part of it: a message, a call, a tool. What it
                makes of a last turn of the assistant is left to those who train on it.
        """
        if self.input_template is not None:
            raise DataError(
                "--input_template is for plain text, but the rows are chats; leave it out"
            )
        self._check_chat_template("the rows are chats")
        added = self.system_prompt if messages[0]["role"] != "system" else None
        if added is not None:
            messages = [{"role": "system", "content": added}, *messages]
        if unknown := self._unread(name for name in options if name != "tools"):
            raise BadRowError("template", f"the chat template does not read {unknown}")
        given = {"tokenize": False, "add_generation_prompt": False} | self.chat_template_kwargs
        given |= {**options, **own}

        def written(chat: Chat) -> str:
            return self._template(chat, given)

        text = with_calls(messages, written)
        if not isinstance(self.tokenizer.chat_template, bool):  # a stand-in, which writes nothing
            if added and not is_shown(added, text):
                raise DataError(
                    "--system_prompt: the chat template drops it; put it into the user's message, or use another"
                )
            check_roles(messages, written, self._known_shapes)
            check_shown(messages, text, options.get("tools", ()))
        return text

    def _template(self, messages: Chat, given: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(messages, **given)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise BadRowError(
                "template", f"the chat template refuses it: {type(error).__name__}: {error}"
            ) from error

    def encode(self, texts: list[str], *, special_tokens: bool) -> list[list[int]]:
        """Token ids; ``special_tokens`` adds a begin-of-text (chats have it already) but no end-of-text."""
        ids = self.tokenizer(texts, add_special_tokens=special_tokens, verbose=False)["input_ids"]
        eos = [self.tokenizer.eos_token_id]
        if special_tokens and self.tokenizer("a")["input_ids"][-1:] == eos:
            return [row[:-1] for row in ids]
        return ids

    def encode_behind(self, text: str) -> list[int]:
        """Token ids of a text that stands behind other ids."""
        ids = ids_behind(text, partial(self.encode, special_tokens=False))
        if ids is None:
            raise BadRowError(
                "template",
                f"the tokenizer joins the end of the prompt to the answer, and cannot write {text[:20]!r} apart: let "
                "the prompt end without a blank",
            )
        return ids

    def encode_rendered(self, rendered: list[Rendered]) -> list[list[int]]:
        """Token ids of rendered prompts, in their order."""
        ids: list[list[int]] = []
        for is_bare, group in groupby(rendered, key=self._is_bare):
            ids += self.encode([one.text for one in group], special_tokens=is_bare)
        return ids

    def encode_answered(
        self, rendered: list[tuple[Rendered, Rendered]]
    ) -> Iterator[tuple[list[int], int]]:
        """Ids of prompts with their answers, from pairs of prompt and whole, and how many of them are the prompt's."""
        prompts = self.encode_rendered([prompt for prompt, _ in rendered])
        wholes = self.encode_rendered([whole for _, whole in rendered])
        for (prompt, whole), prompt_ids, ids in zip(rendered, prompts, wholes):
            if ids[: len(prompt_ids)] != prompt_ids and whole.text.startswith(prompt.text):
                # A token would span the boundary. A rollout starts from the prompt's own ids, so training does too.
                ids = prompt_ids + self.encode_behind(whole.text[len(prompt.text) :])
            yield ids, len(prompt_ids)

    def _is_bare(self, rendered: Rendered) -> bool:
        """Whether a begin-of-text is missing: chats and texts that have it get no second one."""
        bos = self.tokenizer.bos_token
        return not rendered.is_chat and not (bos and rendered.text.startswith(bos))


def ended(ids: list[int], end_id: int) -> list[int]:
    """The ids of a finished answer, of which ``end_id`` is the last."""
    return ids if ids[-1:] == [end_id] else [*ids, end_id]


def closed(chat_text: str) -> str:
    """A chat without the line break that templates put after the last turn: it is not part of the answer."""
    return chat_text.rstrip("\n")


def ids_behind(text: str, encode: Callable[[list[str]], list[list[int]]]) -> list[int] | None:
    """Ids of a text behind other ids; None where the tokenizer cannot say.

    Tokenizers of SentencePiece's kind put a blank before a text, which would stand between the two.
    """
    others = ("\n", ".", "a")
    ids, letter, *before = encode([text, "a", *others])
    both = encode([other + "a" for other in others])
    if any(two == one + letter for one, two in zip(before, both)):
        return ids  # it puts nothing there
    whole = encode([other + text for other in others])
    cut = (two[len(one) :] for one, two in zip(before, whole) if one and two[: len(one)] == one)
    return next(cut, None)


# -- what a chat template makes of a chat ----------------------------------------------------------------------------

Written = Callable[[Chat], str]  # a chat through a template; a ValueError where that refuses it


def with_calls(messages: Chat, written: Written) -> str:
    """A chat through a template, arguments of calls as objects; as texts, where the template cannot write objects."""
    calls = [call.get("function", call) for m in messages for call in m.get("tool_calls") or ()]
    refusal, text = None, ""
    try:
        text = written(messages)
    except ValueError as error:
        refusal = error
    objects = [each for call in calls if isinstance(each := call.get("arguments"), Mapping)]
    said = "\n".join(message.get("content") or "" for message in messages)
    in_python = (str(each) for each in objects if str(each) != json.dumps(each))
    if objects and (refusal or any(each in text and each not in said for each in in_python)):
        try:
            return written(_with_texts(messages))
        except ValueError as error:
            raise (refusal or error) from None
    if refusal:
        raise refusal
    return text


def _with_texts(messages: Chat) -> Chat:
    """The same with arguments of calls as texts of JSON."""

    def as_text(call: Mapping[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": as_text(call["function"])}
        return {**call, "arguments": json.dumps(call.get("arguments") or {}, ensure_ascii=False)}

    return [
        message | {"tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def check_roles(messages: Chat, written: Written, known: set[Any]) -> None:
    """Refuses roles whose messages a template drops: a short text may be found by chance, a probe is not.

    ``known``: shapes of chats that were looked at before.
    """
    shape = tuple(
        (message["role"], bool(message.get("content")), bool(message.get("tool_calls")))
        for message in messages
    )
    if shape in known:
        return
    probes = [
        message | {"content": f"qz{i}probe"} if message.get("content") else message
        for i, message in enumerate(messages)
    ]
    try:
        text = with_calls(probes, written)
    except ValueError:  # it wants something of the texts
        known.add(shape)
        return
    for i, message in enumerate(messages):
        if message.get("content") and f"qz{i}probe" not in text:
            beside = " beside calls" * bool(message.get("tool_calls"))
            raise BadRowError(
                "template",
                f"the chat template drops the text of messages of the role {message['role']!r}{beside}: write them in "
                "another role",
            )
    known.add(shape)


THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message whose text is the thinking before its content."""


def check_shown(messages: Chat, text: str, tools: Iterable[Any] = ()) -> None:
    """Refuses a rendering without the text of a message, or without the name of a call or tool.

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
    if hidden := [name for name in map(name_of_tool, tools) if name not in text]:
        raise BadRowError(
            "template", f"the chat template does not show the tools ({', '.join(hidden)})"
        )


def check_answer(message: Mapping[str, Any], text: str) -> None:
    """Refuses a rendering without a part of a turn that is trained on, its thinking included."""
    for part in re.split("</?think>", message.get("content") or ""):
        if not is_shown(part, text):
            what = "thinking" if "</think>" in message["content"] else "text"
            raise BadRowError(
                "template",
                f"the chat template drops or changes {what} of the answer: {shown_value(part)}",
            )
    for key in THOUGHTS:
        if isinstance(thought := message.get(key), str) and not is_shown(thought, text):
            raise BadRowError(
                "template",
                f"the chat template does not write {key!r} of the answer, which would not be learned",
            )
    _check_calls(message, text)


def _check_calls(message: Mapping[str, Any], text: str) -> None:
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        keys = arguments if isinstance(arguments, Mapping) else ()
        if lost := [key for key in (function["name"], *keys) if key not in text]:
            raise BadRowError(
                "template",
                f"the chat template does not write calls of tools: {lost[0]!r} of {function['name']!r} is not there",
            )


def is_shown(content: str, text: str) -> bool:
    """Whether a rendering has a content, perhaps with other white space, or as a text in JSON."""
    content = content.strip()
    if content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text:
        return True
    return "".join(content.split()) in "".join(text.split())


# -- all rows of a dataset -------------------------------------------------------------------------------------------

BadRowPolicy = Literal["error", "skip"]
CHUNK_ROWS = 1000  # rows tokenised in one call
NAMED_ROWS = 5  # skipped rows that the log names


class Encoded(NamedTuple):
    """One usable row."""

    token_ids: Any  # prompt and completion
    prompt_length: int  # how many of these tokens are the prompt
    truncated: bool
    first_answer: int = 0  # of a pair: how many tokens after the prompt are its first answer
    # Whether each token is learned; nothing where all behind the prompt are.
    learned: Any = ()


# A row that is used, the reason why an option leaves it out (``--truncation drop``), or why it is bad.
Outcome = Encoded | str | BadRowError
EncodeChunk = Callable[[list[dict[str, Any]]], list[Outcome]]


@dataclass
class DatasetReport:
    """How many rows the data has, and how they were treated."""

    rows: int = 0
    kept: int = 0
    truncated: int = 0  # rows kept, but cut
    # by reason: missing, wrong_type, empty, overlong, template
    dropped: dict[str, int] = field(default_factory=dict)
    # each bad row that was skipped, with its origin
    bad: list[str] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(self.dropped.items())) or "0"
        return f"{self.rows} rows: {self.kept} kept, {self.truncated} of them truncated; dropped: {dropped}"

    def warn(self) -> None:
        """Log which rows are not as they were; DataError if none is left."""
        first = "".join(f"\n  {text}" for text in self.bad[:NAMED_ROWS])
        if not self.kept:
            raise DataError(f"no row is left to train on. {self}{first}")
        if self.bad:
            logger.warning("bad rows skipped, the first of them:%s", first)
        logger.warning("%s", self)


@dataclass(frozen=True)
class PreparedRows:
    """The N kept rows: ids in one flat array, because a million prompts as lists would be a billion Python objects."""

    row_numbers: np.ndarray  # (N,) in the dataset
    prompt_lengths: np.ndarray  # (N,) how many ids of a row are the prompt
    truncated: np.ndarray  # (N,) whether the row was cut
    # (N,) how many ids after a row's prompt are the first answer of a pair
    first_answers: np.ndarray
    offsets: np.ndarray  # (N + 1,) where a row's ids begin in flat_ids
    flat_ids: np.ndarray  # of all rows
    flat_learned: (
        np.ndarray
    )  # whether each of these ids is learned; none, where all behind a prompt are
    report: DatasetReport

    def __len__(self) -> int:
        return len(self.row_numbers)

    def token_ids(self, position: int) -> list[int]:
        """Ids of the kept row at this position."""
        return self.flat_ids[self.offsets[position] : self.offsets[position + 1]].tolist()

    def learned(self, position: int) -> np.ndarray:
        """Whether each id of the kept row at this position is learned. (S,)"""
        start, end = self.offsets[position], self.offsets[position + 1]
        if len(self.flat_learned):
            return self.flat_learned[start:end]
        return np.arange(end - start) >= self.prompt_lengths[position]


def origin_of(row: Mapping[str, Any], number: int) -> str:
    """A row's file and line if the loader kept them, else its number in the dataset, from 1."""
    return row.get(ORIGIN_COLUMN) or f"row {number + 1}"


def check_choice(name: str, value: Any, choices: Any) -> None:
    """DataError unless the value is one of a ``Literal``."""
    if value not in get_args(choices):
        raise DataError(f"{name} is {value!r}; one of {', '.join(get_args(choices))}")


def columns_of(dataset: Any) -> list[str]:
    """Names of columns; refuses anything but a non-empty map-style dataset."""
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "__len__"):
        kind = type(dataset).__name__
        raise TypeError(f"a datasets.Dataset is needed (see blending_datasets), not {kind}")
    if len(dataset) == 0:
        raise DataError(
            "the dataset is empty: no rows in --prompt_data / --eval_data / --pretrain_data"
        )
    return dataset.column_names


def prepare_rows(
    dataset: Dataset,
    columns: list[str],
    encode_chunk: EncodeChunk,
    *,
    on_bad_row: BadRowPolicy = "error",
    num_workers: int = 0,
    ranks: Ranks | None = None,
) -> PreparedRows:
    """Encode all rows in order; ``columns`` are what ``encode_chunk`` (rows -> one outcome each) reads.

    ``on_bad_row`` ``error`` raises at the first bad row, naming file and line; ``skip`` counts and logs bad rows.
    ``num_workers`` and ``ranks`` are for ``lightppo.plugin.ENCODERS``. Collective with them.
    """
    check_choice("--on_bad_row", on_bad_row, BadRowPolicy)
    rows = Rows(dataset, columns, encode_chunk, on_bad_row)
    arrays, dropped, bad = ENCODERS.last(rows, num_workers, ranks or Alone())
    lengths, truncated = arrays.pop("lengths"), int(arrays["truncated"].sum())
    report = DatasetReport(len(dataset), len(lengths), truncated, dict(dropped), bad)
    if report.kept < report.rows or report.truncated:
        report.warn()
    return PreparedRows(offsets=np.cumsum([0, *lengths], dtype=np.int64), report=report, **arrays)


# Arrays of the rows that are kept, why others are not, and the text of each bad one.
EncodedRows = tuple[dict[str, np.ndarray], Counter[str], list[str]]


@dataclass(frozen=True)
class Rows:
    """All rows of a dataset, and how one of them is encoded."""

    dataset: Dataset
    columns: list[str]
    encode_chunk: EncodeChunk
    on_bad_row: BadRowPolicy

    def outcomes(self, rows: range) -> Iterator[Outcome]:
        """Of these rows, chunk by chunk."""
        read = self.dataset.select_columns(self.columns)
        for start in range(rows.start, rows.stop, CHUNK_ROWS):
            chunk = range(start, min(start + CHUNK_ROWS, rows.stop))
            yield from self.encode_chunk(read.__getitems__(chunk))

    def encoded(self, rows: range, outcomes: Iterable[Outcome]) -> EncodedRows:
        """What becomes of these rows. DataError names the first bad one, unless bad rows are skipped."""
        dropped: Counter[str] = Counter()
        bad: list[str] = []
        kept: dict[int, Encoded] = {}  # by row number
        for number, outcome in zip(rows, outcomes):
            if isinstance(outcome, Encoded):
                ids = np.asarray(outcome.token_ids, dtype=np.int32)
                flags = np.asarray(outcome.learned, dtype=bool)[: len(ids)]
                kept[number] = outcome._replace(token_ids=ids, learned=flags)
            elif isinstance(outcome, BadRowError):
                dropped[outcome.reason] += 1
                bad.append(self._refused(number, outcome))
            else:
                dropped[outcome] += 1
        arrays = {
            "row_numbers": np.array(list(kept), dtype=np.int64),
            "prompt_lengths": np.array(
                [row.prompt_length for row in kept.values()], dtype=np.int64
            ),
            "truncated": np.array([row.truncated for row in kept.values()], dtype=bool),
            "first_answers": np.array([row.first_answer for row in kept.values()], dtype=np.int64),
            "lengths": np.array([len(row.token_ids) for row in kept.values()], dtype=np.int64),
            "flat_ids": np.concatenate([np.int32([]), *(row.token_ids for row in kept.values())]),
            "flat_learned": np.concatenate(
                [np.zeros(0, bool), *(row.learned for row in kept.values())]
            ),
        }
        return arrays, dropped, bad

    def _refused(self, number: int, error: BadRowError) -> str:
        """What the report says of a bad row, if bad rows are skipped."""
        message = f"{origin_of(self.dataset[number], number)}: {error}"
        if self.on_bad_row == "error":
            cure = "give the tokenizer another chat_template" * (error.reason == "template")
            raise DataError(
                f"{message} ({cure or 'mend the row'}, or leave such rows out with --on_bad_row skip)"
            ) from error
        return message


def encode_all(rows: Rows, num_workers: int, ranks: Ranks) -> EncodedRows:
    """On each rank all rows, in this process."""
    numbers = range(len(rows.dataset))
    return rows.encoded(numbers, rows.outcomes(numbers))
