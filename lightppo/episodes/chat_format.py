"""Conversations as a tokenizer's chat template writes them, in token ids that only grow.

Nothing is ever decoded and rendered again. What stands behind a sampled turn comes from a rendering of its own: a short
conversation whose assistant turn is a sentinel, and the new messages behind it. What that rendering has behind the end
of the sentinel's turn is appended to the ids.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightppo.data.chat_templates import check_roles, check_shown, with_calls
from lightppo.data.rows import name_of_tool
from lightppo.episodes.control_tokens import (
    Breaker,
    ControlTokens,
    spaced_out,
    without_marks,
)
from lightppo.episodes.tool_formats import (
    TEMPLATE_FORMAT,
    TOOL_FORMATS,
    Call,
    ToolFormat,
    find_format,
    vllm_formats,
)
from lightppo.errors import BadRowError, ConfigError
from lightppo.verifiers.thinking import CHANNEL_HEADER, CHANNELS, THINKING

_SENTINEL = "qzsentinel"
_PROBE = "qzprobe"
_QUESTION = {"role": "user", "content": "qzquestion"}
_OUTER_ROLES = ("tool", "user", "system", "developer")
_NAME = re.compile(r"[\w.:-]{1,64}")
_MAX_EXAMPLE = 200  # characters of a rendering in messages
_MAX_ROW_FORMATS = 256  # formats of rows with template options of their own


@dataclass(frozen=True)
class AssistantTurn:
    """Hold what the model said in one turn."""

    text: str  # without thinking, calls and control tokens
    thinking: str | None
    calls: tuple[Call, ...]
    complete: bool  # its end was sampled, outside of thinking; a turn that was cut has no calls
    end: int | None = None  # the id that ended it, of a complete turn


@dataclass(frozen=True)
class _Writing:
    """Write the sentinel's turn for a template: as text, or as the arguments of a call."""

    calls: int  # 0: as text
    as_json: bool = False  # arguments are a string of JSON, not an object
    own_ids: bool = True  # those of the turn's calls; otherwise made ones

    def message(self, sentinel: str, tool_calls: Sequence[Call] = ()) -> dict[str, Any]:
        if not self.calls:
            return {"role": "assistant", "content": sentinel}
        call_names = [_callable_name(call.name) for call in tool_calls][-self.calls :]
        call_names = call_names or ["unknown"] * self.calls
        values = [_PROBE] * (self.calls - 1) + [sentinel]
        arguments: list[Any] = [{"argument": value} for value in values]
        if self.as_json:
            arguments = list(map(json.dumps, arguments))
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "id": call_id,
                    "function": {"name": name, "arguments": call_arguments},
                }
                for call_id, name, call_arguments in zip(
                    self.ids(tool_calls), call_names, arguments, strict=True
                )
            ],
        }

    def ids(self, tool_calls: Sequence[Call]) -> list[str]:
        """Return the ids of the last calls, which the tools' messages repeat."""
        ids = call_ids(tool_calls) if self.own_ids and tool_calls else []
        ids = ids or [made_id(i) for i in range(max(self.calls, len(tool_calls)))]
        return ids[-self.calls :] if self.calls else ids


def _callable_name(name: str) -> str:
    return name if _NAME.fullmatch(name) else "unknown"


def made_id(index: int) -> str:
    """Return an id for a call that has none: nine letters and digits, which is what Mistral's templates demand."""
    return f"call{index:05d}"


def call_ids(tool_calls: Sequence[Call]) -> list[str]:
    """Return the ids of a turn's calls, as messages of its tools name them."""
    return [
        tool_call.id if tool_call.id and _NAME.fullmatch(tool_call.id) else made_id(i)
        for i, tool_call in enumerate(tool_calls)
    ]


@dataclass(frozen=True)
class _Bridge:
    """Lead from a turn to messages of certain roles."""

    writing: _Writing
    end: int  # the token at the turn's end, in the rendering
    begins_next: bool  # that token belongs to what follows: other ends do not replace it
    control: tuple[int, ...]  # the control tokens behind it, for harmless messages


class ObservationError(ValueError):
    """Refuse a message of an environment that cannot be shown to the model. It ends that episode, not the run."""


class _Refused(ConfigError):
    """Say that the template refuses a conversation, or drops part of it."""


class ChatFormat:
    """Write conversations by one tokenizer's template, in token ids that only grow.

    Only caches change: several threads may use one object.

    Args:
        tokenizer: of transformers, with a chat template.
        tools: JSON schemas, as templates take them.
        tool_format: a name in :data:`TOOL_FORMATS`, ``path.py:name``, a name of vLLM's parsers, or ``auto``.
        template_options: what the template takes beside messages: ``{"enable_thinking": False}``. Its ``tools`` are
            shown in place of the others, which are called all the same.
        system_prompt: put before messages without one.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[dict] = (),
        *,
        tool_format: str = "auto",
        template_options: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tool_format = tool_format
        self.system_prompt = system_prompt
        self.control = ControlTokens(tokenizer)
        breaker = Breaker(self.control, itertools.chain.from_iterable(THINKING))
        self.tools = _harmless_values(list(tools), breaker)
        self.template_options = dict(template_options or {})
        if "tools" in self.template_options:
            shown_tools = _harmless_values(self.template_options["tools"], breaker)
            self.template_options["tools"] = shown_tools
        self._known_shapes: set[Any] = set()
        self._of_rows: dict[str, ChatFormat] = {}
        self._bridges: dict[tuple[int, tuple[str, ...]], _Bridge] = {}

    # What the trainer calls, in the order of an episode.

    def check(self) -> None:
        """Look for everything that could go wrong later, on probes.

        Raises:
            ConfigError: it says what cannot work, and what to do.
        """
        try:
            opening = self._render([_QUESTION])
        except _Refused as refusal:
            raise ConfigError(f"the chat template refuses a user message: {refusal}") from None
        if _QUESTION["content"] not in opening:
            raise ConfigError(
                "the chat template drops user messages: give the tokenizer another chat_template"
            )
        self._bridge(0, ("user",))
        if self.tools:
            self._bridge(1, ("tool",))
            self._bridge(2, ("tool", "tool"))
            self._check_format()

    def opening(self, messages: Sequence[dict], *, observed: int = 0) -> list[int]:
        """Return the ids of the first messages, with tools and what opens the model's turn.

        Args:
            messages: of the row, and of the environment behind them.
            observed: how many of the last messages come from an environment; they are made harmless.

        Raises:
            ConfigError: the template refuses the row's messages.
            ObservationError: it refuses those of the environment, or one of them has no text.
        """
        row_length = len(messages) - observed
        harmless_messages = [
            {**message, "content": spaced_out(message["content"])}
            if self.control.among(self.control.encode(message["content"]))
            else message
            for message in self._harmless(messages[row_length:], roles=None)
        ]
        row_messages = messages[:row_length]
        messages = [*messages[:row_length], *harmless_messages]
        if self.system_prompt is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]

        def blame(problem: str) -> ValueError:
            by_environment = observed and self._takes(row_messages)
            return (ObservationError if by_environment else ConfigError)(problem)

        try:
            rendering = with_calls(messages, self._render)
            check_roles(messages, self._render, self._known_shapes)
            check_shown(messages, rendering)
        except _Refused as refusal:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise blame(
                f"the chat template refuses messages of the roles {roles}"
                f"{' with tools' if self.tools else ''}: {refusal}"
            ) from None
        except BadRowError as error:
            raise blame(f"an episode's first messages: {error}") from None
        self._check_tools_are_shown(rendering)
        return self.control.encode(rendering)

    def of_row(self, row_options: Mapping[str, Any]) -> ChatFormat:
        """Return the same for a row with template options of its own; ConfigError if it shows tools that nobody has.

        Where there are other tools, only such as these may be shown; where there are none, the calls are left in the
        text, for the environment to read.
        """
        if not row_options:
            return self
        cache_key = json.dumps(row_options, sort_keys=True, default=str)
        if cache_key not in self._of_rows:
            shown_names = {*map(name_of_tool, row_options.get("tools", ()))}
            callable_names = {*map(name_of_tool, self.tools)}
            if callable_names and (unknown_names := sorted(shown_names - callable_names)):
                raise ConfigError(
                    f"a row's tools have {unknown_names[0]!r}, which its environment has not "
                    f"({', '.join(sorted(callable_names))}): take the column out, or rename it"
                )
            row_format = ChatFormat(
                self.tokenizer,
                self.tools,
                tool_format=self.tool_format,
                template_options=self.template_options | row_options,
                system_prompt=self.system_prompt,
            )
            row_format.check()
            if len(self._of_rows) >= _MAX_ROW_FORMATS:
                self._of_rows.pop(next(iter(self._of_rows)))
            self._of_rows[cache_key] = row_format
        return self._of_rows[cache_key]

    def _takes(self, messages: Sequence[dict]) -> bool:
        """Tell whether the template writes these messages alone, each with its text."""
        try:
            if messages:
                check_roles(messages, self._render, self._known_shapes)
                check_shown(messages, with_calls(messages, self._render))
        except (_Refused, BadRowError):
            return False
        return True

    def parse(
        self, ids: Sequence[int], *, stopped: bool, prompt: Sequence[int] | None = None
    ) -> AssistantTurn:
        """Read a turn.

        Args:
            ids: what was sampled.
            stopped: an end of turn was sampled, as the last id.
            prompt: the ids before it, which tell whether the template opened the thinking. None: as in an opening.
        """
        turn_ids, has_ended = self._without_end(ids, stopped)
        thinking, text, is_open = self._split_thinking(self.control.decode(turn_ids), prompt)
        is_complete = has_ended and not is_open
        tool_calls: Sequence[Call] = ()
        if is_complete and self.tools:
            end_text = self.control.decode(ids[-1:])
            text, tool_calls = self.format.fn(
                text, tools=self.tools, tokenizer=self.tokenizer, end=end_text
            )
        if self._thinking == CHANNELS:
            text = CHANNEL_HEADER.sub("", text)
        return AssistantTurn(
            text=without_marks(self.control.without_special(text)).strip(),
            thinking=None if thinking is None else without_marks(thinking).strip(),
            calls=tuple(
                replace(
                    tool_call,
                    name=without_marks(tool_call.name),
                    arguments=without_marks(tool_call.arguments),
                    problem=without_marks(tool_call.problem),
                )
                for tool_call in tool_calls
            ),
            complete=is_complete,
            end=ids[-1] if is_complete else None,
        )

    def closing(
        self, ids: Sequence[int], *, stopped: bool, prompt: Sequence[int] | None = None
    ) -> list[int]:
        """Return what closes a turn whose end was not sampled: the end of its thinking, the end of the turn. Not to be
        trained."""
        turn_ids, has_ended = self._without_end(ids, stopped)
        *_, is_open = self._split_thinking(self.control.decode(turn_ids), prompt)
        if has_ended and not is_open:
            return []
        closing = []
        if is_open:
            closing = self.control.encode(self._thinking[1])
        end_ids = list(self._plain_ends)
        written_ids = [*turn_ids, *closing]
        count = len(end_ids)  # of the ends that the turn has already
        while count and written_ids[-count:] != end_ids[:count]:
            count -= 1
        return [*closing, *end_ids[count:]]

    def continuation(self, turn: AssistantTurn, messages: Sequence[dict]) -> list[int]:
        """Return what stands behind a closed turn: new messages, made harmless, and what opens the model's next turn.

        Messages of tools answer the turn's calls in their order. Not to be trained.

        Raises:
            ConfigError: the template refuses these messages.
            ObservationError: a message of the model, of a tool without a call, without text, or with control tokens
                that nothing keeps out.
        """
        roles = tuple(str(message.get("role")) for message in messages)
        answer_count = roles.count("tool")
        if answer_count > len(turn.calls):
            raise ObservationError(
                f"{answer_count} messages of tools answer {len(turn.calls)} calls"
            )
        answered_calls = turn.calls[:answer_count]
        bridge = self._bridge(answer_count, roles)
        messages = self._harmless(messages, roles=_OUTER_ROLES)
        ids = self._behind(bridge, answered_calls, messages)
        if self.control.among(ids) != bridge.control:
            # The tokenizer takes other characters for those of a control token.
            messages = [
                {**message, "content": spaced_out(message["content"])} for message in messages
            ]
            ids = self._behind(bridge, answered_calls, messages)
            if self.control.among(ids) != bridge.control:
                raise ObservationError(
                    "the tokenizer reads control tokens in an observation, and nothing that lightppo does keeps them "
                    f"out: {messages[-1]['content'][:_MAX_EXAMPLE]!r}"
                )
        if bridge.begins_next and turn.end != bridge.end:
            return [bridge.end, *ids]
        return ids

    def message(self, turn: AssistantTurn) -> dict[str, Any]:
        """Return the turn as a chat message, for rewards and transcripts. It is never rendered."""
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.thinking:
            message["reasoning_content"] = turn.thinking
        if turn.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call_id,
                    "function": {"name": tool_call.name, "arguments": tool_call.arguments},
                }
                for call_id, tool_call in zip(call_ids(turn.calls), turn.calls, strict=True)
            ]
        return message

    def harmless(self, text: str) -> tuple[str, int]:
        """Return a text without control tokens and markers of this format, and how many were broken in it."""
        return self._breaker(text)

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids that end a turn by this template; engines should stop at all of them."""
        end_ids = {*self._plain_ends[-1:], self._last_end, *self._eos_ids}
        if self.tools:
            end_ids.add(self._bridge(1, ("tool",)).end)
        thinking_end = self.control.encode(self._thinking[1])
        return tuple(sorted(end_id for end_id in end_ids if [end_id] != thinking_end))

    # Rendering.

    def _render(self, messages: Sequence[dict], *, generation: bool = True) -> str:
        if not self._source:
            raise ConfigError(
                "episodes of several turns need a chat template, and the tokenizer has none: take an instruct model, "
                "or put a chat_template.jinja into the model's folder"
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=generation,
                **{"tools": self.tools or None} | self.template_options,
            )
        except Exception as error:  # what a template raises is of any type
            raise _Refused(f"{type(error).__name__}: {error}") from None

    @functools.cached_property
    def _source(self) -> str:
        """Return the template's own text, or an empty one."""
        try:
            shown_tools = self.template_options.get("tools", self.tools)
            return self.tokenizer.get_chat_template(tools=shown_tools or None) or ""
        except (AttributeError, NotImplementedError, ValueError):
            return ""

    def _written(
        self,
        writing: _Writing,
        messages: Sequence[dict],
        *,
        generation: bool,
        calls: Sequence[Call] = (),
    ) -> tuple[str, str]:
        """Return what a rendering has before and behind the sentinel."""
        sentinel = _SENTINEL
        while any(sentinel in str(message.get("content")) for message in messages):
            sentinel += "z"
        conversation = [_QUESTION, writing.message(sentinel, calls), *messages]
        rendering = self._render(conversation, generation=generation)
        text_before, separator, text_behind = rendering.rpartition(sentinel)
        if not separator:
            raise _Refused("the model's turn before the messages is dropped")
        return text_before, text_behind

    def _behind(
        self, bridge: _Bridge, tool_calls: Sequence[Call], messages: Sequence[dict]
    ) -> list[int]:
        """Return the ids behind the end of the sentinel's turn."""
        messages = _with_ids(messages, bridge.writing.ids(tool_calls), tool_calls)
        try:
            _, text_behind = self._written(
                bridge.writing, messages, generation=True, calls=tool_calls
            )
            token_ids = self.control.encode(text_behind)
            return token_ids[token_ids.index(bridge.end) + 1 :]
        except (_Refused, ValueError) as refusal:
            if bridge.writing.own_ids and tool_calls:
                made_bridge = replace(bridge, writing=replace(bridge.writing, own_ids=False))
                return self._behind(made_bridge, tool_calls, messages)
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the chat template refuses new messages of the roles {roles}: {refusal}"
            ) from None

    # Bridges, found once for each shape of a continuation.

    def _bridge(self, call_count: int, roles: tuple[str, ...]) -> _Bridge:
        """Return how to go on from a turn, with messages of these roles, the first of which answer ``calls`` calls."""
        if (call_count, roles) not in self._bridges:
            self._bridges[call_count, roles] = self._find_bridge(call_count, roles)
        return self._bridges[call_count, roles]

    def _find_bridge(self, call_count: int, roles: tuple[str, ...]) -> _Bridge:
        reasons = []
        written_counts = sorted({call_count, min(call_count, 1), 0}, reverse=True)
        for written_count, as_json in itertools.product(written_counts, (False, True)):
            if as_json and not written_count:
                continue
            try:
                return self._try_bridge(_Writing(written_count, as_json), call_count, roles)
            except _Refused as refusal:
                reasons.append(str(refusal))
        raise ConfigError(
            f"the chat template cannot go on with messages of the roles {', '.join(roles)}: {reasons[0]}. Give the "
            "tokenizer a chat_template that can"
            + (", or use an environment with step() instead of tools" if call_count else "")
        )

    def _try_bridge(self, writing: _Writing, call_count: int, roles: tuple[str, ...]) -> _Bridge:
        messages = _probes(roles, writing, call_count)
        probes = [message["content"] for message in messages]
        text_before, text_behind = self._written(writing, messages, generation=True)
        positions = [text_behind.find(probe) for probe in probes]
        if -1 in positions:
            raise _Refused(f"it drops messages of the role {roles[positions.index(-1)]}")
        if positions != sorted(positions):
            raise _Refused("it changes the order of messages")
        behind_ids = self.control.encode(text_behind)
        end_id, begins_next = self._find_end(writing, behind_ids)
        following_ids = behind_ids[behind_ids.index(end_id) + 1 :]
        if not all(probe in self.control.decode(following_ids) for probe in probes):
            raise _Refused("no token stands between the model's turn and the messages")
        whole_ids = self.control.encode(text_before + _SENTINEL + text_behind)
        if whole_ids[len(whole_ids) - len(following_ids) :] != following_ids:
            raise _Refused("the ids behind a turn depend on the turn")
        return _Bridge(writing, end_id, begins_next, self.control.among(following_ids))

    def _find_end(self, writing: _Writing, behind_ids: list[int]) -> tuple[int, bool]:
        """Return the token that ends the sentinel's turn, in the ids behind it; and whether it begins what follows."""
        try:
            alone_ids = self.control.encode(self._written(writing, (), generation=False)[1])
        except _Refused:
            alone_ids = []
        shared_ids = _shared(alone_ids, behind_ids)
        if not writing.calls:
            return self._find_plain_end(alone_ids, behind_ids, shared_ids)
        inside_ends = self.control.among(shared_ids)
        for end_id in inside_ends:
            if end_id in self._own_ends:
                return end_id, False
        if inside_ends and not self._ends_each_call(writing, inside_ends[-1]):
            return inside_ends[-1], True
        following_control = self.control.among(behind_ids[len(shared_ids) :])
        if not following_control:
            raise _Refused("no token ends a turn")
        return following_control[0], True

    def _find_plain_end(
        self, alone_ids: list[int], behind_ids: list[int], shared_ids: list[int]
    ) -> tuple[int, bool]:
        """Return the same of a turn of text. It has an end of its own if something stands behind it as the last turn."""
        inside_ends = self.control.among(shared_ids)
        if set(self._eos_ids) & set(inside_ends):
            return self._eos_ids[0], False
        control_ids = self.control.among(behind_ids)
        if not control_ids:
            raise _Refused("no token ends a turn")
        if control_ids[0] in self._eos_ids or self.control.among(alone_ids):
            return control_ids[0], False
        # Does another role bring another token?
        try:
            messages = [{"role": "system", "content": _PROBE}]
            text_of_other_role = self._written(_Writing(0), messages, generation=True)[1]
        except _Refused:
            return control_ids[0], True
        other_ids = self.control.among(self.control.encode(text_of_other_role))
        return control_ids[0], other_ids[:1] != control_ids[:1]

    def _ends_each_call(self, writing: _Writing, end_id: int) -> bool:
        """Tell whether a token stands between two calls of one turn: then it does not end the turn."""
        two_calls = replace(writing, calls=2)
        try:
            text_before, _ = self._written(two_calls, (), generation=False)
        except _Refused:
            return False
        text_between = text_before.rpartition(_PROBE)[2]
        return end_id in self.control.encode(text_between)

    @functools.cached_property
    def _eos_ids(self) -> tuple[int, ...]:
        eos_id = getattr(self.tokenizer, "eos_token_id", None)
        return () if eos_id is None else (eos_id,)

    @functools.cached_property
    def _own_ends(self) -> tuple[int, ...]:
        """Return the tokens that end a turn of text and belong to it; none where the next message's first token does."""
        bridge = self._bridge(0, ("user",))
        return self._eos_ids if bridge.begins_next else (bridge.end, *self._eos_ids)

    @functools.cached_property
    def _plain_ends(self) -> tuple[int, ...]:
        """Return the tokens that close a turn that was cut: mostly one."""
        bridge = self._bridge(0, ("user",))
        if bridge.begins_next:
            return self._eos_ids
        messages = [{"role": "user", "content": _PROBE}]
        behind_ids = self.control.encode(
            self._written(bridge.writing, messages, generation=True)[1]
        )
        end_ids = behind_ids[: behind_ids.index(bridge.end) + 1]
        if self.control.among(end_ids) == tuple(end_ids):
            return tuple(end_ids)
        return (bridge.end,)

    @functools.cached_property
    def _last_end(self) -> int:
        """Return the token that ends the last turn of a conversation: gpt-oss has one of its own."""
        bridge = self._bridge(0, ("user",))
        try:
            behind_ids = self.control.encode(self._written(_Writing(0), (), generation=False)[1])
        except _Refused:
            return bridge.end
        control_ids = self.control.among(behind_ids)
        if control_ids and bridge.end not in control_ids:
            return control_ids[0]
        return bridge.end

    def _without_end(self, ids: Sequence[int], stopped: bool) -> tuple[Sequence[int], bool]:
        """Return the ids of a turn without its end, and whether it has one."""
        if ids and (stopped or ids[-1] in self.stop_ids):
            return ids[:-1], True
        return ids, False

    # Messages from outside.

    def _harmless(self, messages: Sequence[dict], roles: Sequence[str] | None) -> list[dict]:
        harmless_messages = []
        for message in messages:
            role = message.get("role")
            if roles is not None and role not in roles:
                raise ObservationError(
                    f"an observation has the role {role!r}; it may have: {', '.join(roles)}"
                )
            harmless_text, _ = self._breaker(text_of(message.get("content")))
            harmless_messages.append({"role": role, "content": harmless_text})
        return harmless_messages

    @functools.cached_property
    def _breaker(self) -> Breaker:
        markers = {*itertools.chain.from_iterable(self._known_thinking), *self._scaffold()}
        if self.tools:
            markers |= set(self.format.markers)
        return Breaker(self.control, markers)

    def _scaffold(self) -> set[str]:
        """Return what the template writes around messages that reads like a marker: ``[INST]``, ``</tool_response>``."""
        conversation = [_QUESTION, {"role": "assistant", "content": _SENTINEL}, _QUESTION]
        renderings = [self._render(conversation)]
        if self.tools:
            writing = self._bridge(1, ("tool",)).writing
            text_behind = self._written(writing, _probes(("tool",), writing, 1), generation=True)[1]
            renderings.append(_QUESTION["content"] + text_behind)
        markers: set[str] = set()
        for rendering in renderings:
            # The text before the first message describes the tools.
            rendering = rendering.partition(_QUESTION["content"])[2]
            markers |= set(re.findall(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,40}\]", rendering))
            markers |= set(
                re.findall(r"^\W*[A-Za-z][\w ]{1,30}:(?=\s*$|\s+qz)", rendering, re.MULTILINE)
            )
        probe_texts = (_SENTINEL, _PROBE, _QUESTION["content"])
        own_markers = {marker for marker in markers if any(text in marker for text in probe_texts)}
        return {marker.strip() for marker in markers - own_markers}

    # Thinking.

    @functools.cached_property
    def _thinking(self) -> tuple[str, str]:
        """Return what opens and closes thinking."""
        return next(iter(self._known_thinking), THINKING[0])

    @functools.cached_property
    def _known_thinking(self) -> list[tuple[str, str]]:
        """Return pairs in the template or the vocabulary. Without any, thinking counts only where a turn begins with it."""
        sources = (self._source, "\n".join(self.control.strings.values()))
        return [
            marker_pair
            for source in sources
            for marker_pair in THINKING
            if all(marker in source for marker in marker_pair)
        ]

    @functools.cached_property
    def _opens_thinking(self) -> bool:
        return self._is_open(self.control.encode(self._render([_QUESTION])))

    def _is_open(self, prompt: Sequence[int]) -> bool:
        """Tell whether what opens the model's turn ends in the beginning of its thinking."""
        return self.control.decode(prompt[-16:]).rstrip().endswith(self._thinking[0])

    def _split_thinking(
        self, text: str, prompt: Sequence[int] | None
    ) -> tuple[str | None, str, bool]:
        """Return the thinking, the text outside of it, and whether the thinking goes on at the end."""
        opening, closing = self._thinking
        is_open = self._opens_thinking if prompt is None else self._is_open(prompt)
        if not is_open and not self._known_thinking and not text.lstrip().startswith(opening):
            return None, text, False
        if not is_open and closing in text.partition(opening)[0]:
            is_open = True  # the opening was left out
        thoughts: list[str] = []
        outside: list[str] = []
        while True:
            segment, delimiter, text = text.partition(closing if is_open else opening)
            (thoughts if is_open else outside).append(segment)
            if not delimiter:
                break
            is_open = not is_open
        return "\n".join(thoughts) if thoughts else None, "".join(outside), is_open

    # Formats of calls.

    @functools.cached_property
    def format(self) -> ToolFormat:
        """Return how calls are read."""
        # transformers before 5.14 has none
        has_template = getattr(self.tokenizer, "response_template", None)
        if self.tool_format == TEMPLATE_FORMAT and not has_template:
            raise ConfigError(
                f"--tool_format {TEMPLATE_FORMAT}: the tokenizer has none: leave it out, or name another format"
            )
        if self.tool_format != "auto":
            return find_format(self.tool_format)
        names = [name for name in TOOL_FORMATS if name != TEMPLATE_FORMAT or has_template]
        written_call = self._written_call
        tool_formats = map(TOOL_FORMATS.__getitem__, names)
        for tool_format in itertools.chain(tool_formats, vllm_formats(written_call or "")):
            if self._reads(tool_format, written_call):
                return tool_format
        example = f"; it writes calls as {written_call[:_MAX_EXAMPLE]!r}" if written_call else ""
        raise ConfigError(
            f"--tool_format auto: no format of {', '.join(TOOL_FORMATS)} fits the chat template{example}. Name one of "
            "vLLM's parsers, or a function of your own as path.py:name"
        )

    @functools.cached_property
    def _written_call(self) -> str | None:
        """Return how the template writes a call of the first tool; None where it writes none."""
        writing = self._bridge(1, ("tool",)).writing
        if not writing.calls:
            return None
        tool_call = Call(self.tools[0].get("function", self.tools[0])["name"], {})
        try:
            text_before, text_behind = self._written(
                writing, (), generation=False, calls=[tool_call]
            )
        except _Refused:
            return None
        turn_ids = self.control.encode(text_before + _SENTINEL + text_behind)
        shared_ids = _shared(turn_ids, self.control.encode(self._render([_QUESTION])))
        return self._split_thinking(self.control.decode(turn_ids[len(shared_ids) :]), ())[1]

    def _reads(self, tool_format: ToolFormat, written_call: str | None) -> bool:
        """Tell whether a format reads what the template writes."""
        if written_call is None:
            if tool_format is TOOL_FORMATS[TEMPLATE_FORMAT]:
                return True
            return bool(tool_format.markers) and all(
                marker in self._source for marker in tool_format.markers[:2]
            )
        end_text = self.control.strings.get(self._bridge(1, ("tool",)).end, "")
        turn_text = written_call
        if end_text and end_text in written_call:
            turn_text = written_call.rpartition(end_text)[0]
        _, tool_calls = tool_format.fn(
            turn_text, tools=self.tools, tokenizer=self.tokenizer, end=end_text
        )
        tool_name = self.tools[0].get("function", self.tools[0])["name"]
        read_calls = [(tool_call.name, tool_call.arguments) for tool_call in tool_calls]
        return read_calls == [(tool_name, {"argument": _SENTINEL})]

    def _check_tools_are_shown(self, rendering: str) -> None:
        """Raise ConfigError where neither the template nor the messages name the tools."""
        shown_tools = self.template_options.get("tools", self.tools)
        tool_names = map(name_of_tool, shown_tools)
        if hidden_names := [name for name in tool_names if name not in rendering]:
            raise ConfigError(
                f"the chat template does not show the tools to the model ({', '.join(hidden_names)}), and the first "
                "messages do not name them: describe them in the system message of each prompt (--system_prompt), or give "
                "the tokenizer a chat_template that writes `tools`"
            )

    def _check_format(self) -> None:
        """Raise ConfigError where the format of ``--tool_format`` does not read what the template writes."""
        if (written_call := self._written_call) and not self._reads(self.format, written_call):
            raise ConfigError(
                f"--tool_format {self.tool_format}: it does not read the calls of the chat template, which writes "
                f"{written_call[-_MAX_EXAMPLE:]!r}; take another format, or auto"
            )


class ChatFormats:
    """Make the formats of a tokenizer's template for agent programs, by the tools that these bring.

    Args:
        options: as of :class:`ChatFormat`.

    Raises:
        ConfigError: the template cannot write conversations without tools.
    """

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self._known: dict[str, ChatFormat] = {}
        self.of([])

    def of(self, tools: Sequence[dict], kwargs: Mapping[str, Any] | None = None) -> ChatFormat:
        """Return the one with these tools, for a row with such variables of the template; ConfigError if the template cannot
        write their calls."""
        cache_key = json.dumps(tools)
        if cache_key not in self._known:
            chat_format = ChatFormat(self.tokenizer, tools, **self.options)
            chat_format.check()
            self._known[cache_key] = chat_format
        return self._known[cache_key].of_row(kwargs or {})

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Return those of all formats: as no tools are known yet, of turns with calls and without."""
        probe = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object"}}
        try:
            with_calls = self.of([{"type": "function", "function": probe}]).stop_ids
        except ConfigError:  # a program with tools will be refused
            with_calls = ()
        return tuple(sorted({*self.of([]).stop_ids, *with_calls}))


def _harmless_values(json_value: Any, breaker: Breaker) -> Any:
    """Return a JSON value without control tokens in any of its texts."""
    if isinstance(json_value, str):
        return breaker(json_value)[0]
    if isinstance(json_value, Mapping):
        return {
            _harmless_values(member_name, breaker): _harmless_values(item, breaker)
            for member_name, item in json_value.items()
        }
    if isinstance(json_value, list):
        return [_harmless_values(item, breaker) for item in json_value]
    return json_value


def text_of(content: Any) -> str:
    """Return the content of a message as one text, so that nothing forms where its parts meet."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(content_part, str)
        or (isinstance(content_part, Mapping) and isinstance(content_part.get("text"), str))
        for content_part in content
    ):
        return "".join(
            content_part if isinstance(content_part, str) else content_part["text"]
            for content_part in content
        )
    raise ObservationError(f"an observation is no text, but {content!r:.80}")


def _probes(roles: Sequence[str], writing: _Writing, call_count: int) -> list[dict]:
    """Return messages of some roles with texts that can be found again."""
    tool_calls = [Call("unknown", {})] * call_count
    messages = [{"role": role, "content": f"{_PROBE}{index}z"} for index, role in enumerate(roles)]
    return _with_ids(messages, writing.ids(tool_calls), tool_calls)


def _with_ids(
    messages: Sequence[dict], ids_of_calls: Sequence[str], tool_calls: Sequence[Call]
) -> list[dict]:
    """Return messages of tools with the names and ids of the calls that they answer."""
    answer_numbers = itertools.count()
    named_messages = []
    for message in messages:
        if message["role"] == "tool":
            number = next(answer_numbers)
            call_name = "unknown"
            if number < len(tool_calls):
                call_name = _callable_name(tool_calls[number].name)
            call_id = (
                ids_of_calls[min(number, len(ids_of_calls) - 1)]
                if ids_of_calls
                else made_id(number)
            )
            message = {**message, "name": call_name, "tool_call_id": call_id}
        named_messages.append(message)
    return named_messages


def _shared(left: Any, right: Any) -> Any:
    """Return what two texts, or two lists of ids, begin with alike."""
    item_pairs = zip(left, right, strict=False)
    shared_length = sum(
        1 for _ in itertools.takewhile(lambda item_pair: item_pair[0] == item_pair[1], item_pairs)
    )
    return left[:shared_length]
