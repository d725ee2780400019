"""How a tokenizer's chat template writes conversations, in token ids that only grow.

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
_SHOWN = 200  # characters of a rendering in messages
_MOST_KEPT = 256  # formats of rows with template options of their own


@dataclass(frozen=True)
class AssistantTurn:
    """What the model said in one turn."""

    text: str  # without thinking, calls and control tokens
    thinking: str | None
    calls: tuple[Call, ...]
    complete: bool  # its end was sampled, outside of thinking; a turn that was cut has no calls
    end: int | None = None  # the id that ended it, of a complete turn


@dataclass(frozen=True)
class _Writing:
    """How the sentinel's turn is written for a template: as text, or as the arguments of a call."""

    calls: int  # 0: as text
    as_json: bool = False  # arguments are a string of JSON, not an object
    own_ids: bool = True  # those of the turn's calls; otherwise made ones

    def message(self, sentinel: str, calls: Sequence[Call] = ()) -> dict[str, Any]:
        if not self.calls:
            return {"role": "assistant", "content": sentinel}
        names = [call.name for call in calls][-self.calls :]
        arguments = [{"argument": _PROBE}] * (self.calls - 1) + [{"argument": sentinel}]
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "id": id,
                    "function": {
                        "name": name if _NAME.fullmatch(name) else "unknown",
                        "arguments": f'{{"argument": "{each["argument"]}"}}'
                        if self.as_json
                        else each,
                    },
                }
                for id, name, each in zip(
                    self.ids(calls), names or ["unknown"] * self.calls, arguments, strict=True
                )
            ],
        }

    def ids(self, calls: Sequence[Call]) -> list[str]:
        """Return the ids of the last calls, which the tools' messages repeat."""
        ids = call_ids(calls) if self.own_ids and calls else []
        ids = ids or [made_id(i) for i in range(max(self.calls, len(calls)))]
        return ids[-self.calls :] if self.calls else ids


def made_id(index: int) -> str:
    """Return an id for a call that has none: nine letters and digits, which is what Mistral's templates demand."""
    return f"call{index:05d}"


def call_ids(calls: Sequence[Call]) -> list[str]:
    """Return the ids of a turn's calls, as messages of its tools name them."""
    return [
        call.id if call.id and _NAME.fullmatch(call.id) else made_id(i)
        for i, call in enumerate(calls)
    ]


@dataclass(frozen=True)
class _Bridge:
    """What leads from a turn to messages of certain roles."""

    writing: _Writing
    end: int  # the token at the turn's end, in the rendering
    begins_next: bool  # that token belongs to what follows: other ends do not replace it
    control: tuple[int, ...]  # the control tokens behind it, for harmless messages


class ObservationError(ValueError):
    """A message from an environment that cannot be shown to the model. It ends that episode, not the run."""


class _Refused(ConfigError):
    """The template refuses a conversation, or drops part of it."""


class ChatFormat:
    """How one tokenizer's template writes conversations, in token ids that only grow.

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
            shown = _harmless_values(self.template_options["tools"], breaker)
            self.template_options["tools"] = shown
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
        first = len(messages) - observed
        harmless = [
            {**message, "content": spaced_out(message["content"])}
            if self.control.among(self.control.encode(message["content"]))
            else message
            for message in self._harmless(messages[first:], roles=None)
        ]
        own = messages[:first]
        messages = [*messages[:first], *harmless]
        if self.system_prompt is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            text = with_calls(messages, self._render)
            check_roles(messages, self._render, self._known_shapes)
            check_shown(messages, text)
        except _Refused as refusal:
            roles = ", ".join(str(message.get("role")) for message in messages)
            kind = ObservationError if observed and self._takes(own) else ConfigError
            raise kind(
                f"the chat template refuses messages of the roles {roles}"
                f"{' with tools' if self.tools else ''}: {refusal}"
            ) from None
        except BadRowError as error:
            kind = ObservationError if observed and self._takes(own) else ConfigError
            raise kind(f"an episode's first messages: {error}") from None
        self._check_tools_are_shown(text)
        return self.control.encode(text)

    def of_row(self, options: Mapping[str, Any]) -> ChatFormat:
        """Return the same for a row with template options of its own; ConfigError if it shows tools that nobody has.

        Where there are other tools, only such as these may be shown; where there are none, the calls are left in the
        text, for the environment to read.
        """
        if not options:
            return self
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in self._of_rows:
            shown, callable_ = (
                {*map(name_of_tool, some)} for some in (options.get("tools", ()), self.tools)
            )
            if callable_ and (unknown := sorted(shown - callable_)):
                raise ConfigError(
                    f"a row's tools have {unknown[0]!r}, which its environment has not ({', '.join(sorted(callable_))}): "
                    "take the column out, or rename it"
                )
            made = ChatFormat(
                self.tokenizer,
                self.tools,
                tool_format=self.tool_format,
                template_options=self.template_options | options,
                system_prompt=self.system_prompt,
            )
            made.check()
            if len(self._of_rows) >= _MOST_KEPT:
                self._of_rows.pop(next(iter(self._of_rows)))
            self._of_rows[key] = made
        return self._of_rows[key]

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
        ended = self._ended(ids, stopped)
        body = ids[:-1] if ended else ids
        thinking, text, is_open = self._split_thinking(self.control.decode(body), prompt)
        complete = ended and not is_open
        calls: Sequence[Call] = ()
        if complete and self.tools:
            end = self.control.decode(ids[-1:])
            text, calls = self.format.fn(text, tools=self.tools, tokenizer=self.tokenizer, end=end)
        if self._thinking == CHANNELS:
            text = CHANNEL_HEADER.sub("", text)
        return AssistantTurn(
            text=without_marks(self.control.without_special(text)).strip(),
            thinking=None if thinking is None else without_marks(thinking).strip(),
            calls=tuple(
                replace(
                    call,
                    name=without_marks(call.name),
                    arguments=without_marks(call.arguments),
                    problem=without_marks(call.problem),
                )
                for call in calls
            ),
            complete=complete,
            end=ids[-1] if complete else None,
        )

    def closing(
        self, ids: Sequence[int], *, stopped: bool, prompt: Sequence[int] | None = None
    ) -> list[int]:
        """Return what closes a turn whose end was not sampled: the end of its thinking, the end of the turn. Not to be
        trained."""
        ended = self._ended(ids, stopped)
        body = ids[:-1] if ended else ids
        *_, is_open = self._split_thinking(self.control.decode(body), prompt)
        if ended and not is_open:
            return []
        closing = self.control.encode(self._thinking[1]) if is_open else []
        ends = list(self._plain_ends)
        written = [*body, *closing] if is_open else list(body)
        done = next(n for n in range(len(ends), -1, -1) if not n or written[-n:] == ends[:n])
        return [*closing, *ends[done:]]

    def continuation(self, turn: AssistantTurn, messages: Sequence[dict]) -> list[int]:
        """Return what stands behind a closed turn: new messages, made harmless, and what opens the model's next turn.

        Messages of tools answer the turn's calls in their order. Not to be trained.

        Raises:
            ConfigError: the template refuses these messages.
            ObservationError: a message of the model, of a tool without a call, without text, or with control tokens
                that nothing keeps out.
        """
        roles = tuple(str(message.get("role")) for message in messages)
        answers = roles.count("tool")
        if answers > len(turn.calls):
            raise ObservationError(f"{answers} messages of tools answer {len(turn.calls)} calls")
        calls = turn.calls[:answers]
        bridge = self._bridge(answers, roles)
        messages = self._harmless(messages, roles=_OUTER_ROLES)
        ids = self._behind(bridge, calls, messages)
        if self.control.among(ids) != bridge.control:
            # The tokenizer takes other characters for those of a control token.
            messages = [
                {**message, "content": spaced_out(message["content"])} for message in messages
            ]
            self._count(len(messages))
            ids = self._behind(bridge, calls, messages)
            if self.control.among(ids) != bridge.control:
                raise ObservationError(
                    "the tokenizer reads control tokens in an observation, and nothing that lightppo does keeps them "
                    f"out: {messages[-1]['content'][:_SHOWN]!r}"
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
                    "id": id,
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for id, call in zip(call_ids(turn.calls), turn.calls, strict=True)
            ]
        return message

    def harmless(self, text: str) -> tuple[str, int]:
        """Return a text without control tokens and markers of this format, and how many were broken in it."""
        return self._breaker(text)

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids that end a turn by this template; engines should stop at all of them."""
        ends = {
            *self._plain_ends[-1:],
            self._last_end,
            getattr(self.tokenizer, "eos_token_id", None),
        }
        if self.tools:
            ends.add(self._bridge(1, ("tool",)).end)
        closer = self.control.encode(self._thinking[1])
        return tuple(sorted(end for end in ends if end is not None and [end] != closer))

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
            tools = self.template_options.get("tools", self.tools)
            return self.tokenizer.get_chat_template(tools=tools or None) or ""
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
        before, separator, behind = self._render(conversation, generation=generation).rpartition(
            sentinel
        )
        if not separator:
            raise _Refused("the model's turn before the messages is dropped")
        return before, behind

    def _behind(
        self, bridge: _Bridge, calls: Sequence[Call], messages: Sequence[dict]
    ) -> list[int]:
        """Return the ids behind the end of the sentinel's turn."""
        messages = _with_ids(messages, bridge.writing.ids(calls), calls)
        try:
            _, text = self._written(bridge.writing, messages, generation=True, calls=calls)
            ids = self.control.encode(text)
            return ids[ids.index(bridge.end) + 1 :]
        except (_Refused, ValueError) as refusal:
            if bridge.writing.own_ids and calls:
                made = replace(bridge, writing=replace(bridge.writing, own_ids=False))
                return self._behind(made, calls, messages)
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the chat template refuses new messages of the roles {roles}: {refusal}"
            ) from None

    # Bridges, found once for each shape of a continuation.

    def _bridge(self, calls: int, roles: tuple[str, ...]) -> _Bridge:
        """Return how to go on from a turn, with messages of these roles, the first of which answer ``calls`` calls."""
        if (calls, roles) not in self._bridges:
            self._bridges[calls, roles] = self._find_bridge(calls, roles)
        return self._bridges[calls, roles]

    def _find_bridge(self, calls: int, roles: tuple[str, ...]) -> _Bridge:
        reasons = []
        counts = sorted({calls, min(calls, 1), 0}, reverse=True)
        for count, as_json in itertools.product(counts, (False, True)):
            if as_json and not count:
                continue
            try:
                return self._try_bridge(_Writing(count, as_json), calls, roles)
            except _Refused as refusal:
                reasons.append(str(refusal))
        raise ConfigError(
            f"the chat template cannot go on with messages of the roles {', '.join(roles)}: {reasons[0]}. Give the "
            "tokenizer a chat_template that can"
            + (", or use an environment with step() instead of tools" if calls else "")
        )

    def _try_bridge(self, writing: _Writing, calls: int, roles: tuple[str, ...]) -> _Bridge:
        messages = _probes(roles, writing, calls)
        probes = [message["content"] for message in messages]
        before, behind = self._written(writing, messages, generation=True)
        positions = [behind.find(probe) for probe in probes]
        if -1 in positions:
            raise _Refused(f"it drops messages of the role {roles[positions.index(-1)]}")
        if positions != sorted(positions):
            raise _Refused("it changes the order of messages")
        ids = self.control.encode(behind)
        end, begins_next = self._find_end(writing, ids)
        rest = ids[ids.index(end) + 1 :]
        if not all(probe in self.control.decode(rest) for probe in probes):
            raise _Refused("no token stands between the model's turn and the messages")
        whole = self.control.encode(before + _SENTINEL + behind)
        if whole[len(whole) - len(rest) :] != rest:
            raise _Refused("the ids behind a turn depend on the turn")
        return _Bridge(writing, end, begins_next, self.control.among(rest))

    def _find_end(self, writing: _Writing, behind: list[int]) -> tuple[int, bool]:
        """Return the token that ends the sentinel's turn, in the ids behind it; and whether it begins what follows."""
        try:
            alone = self.control.encode(self._written(writing, (), generation=False)[1])
        except _Refused:
            alone = []
        shared = _shared(alone, behind)
        if not writing.calls:
            return self._find_plain_end(alone, behind, shared)
        inside = self.control.among(shared)
        for id in inside:
            if id in self._own_ends:
                return id, False
        if inside and not self._ends_each_call(writing, inside[-1]):
            return inside[-1], True
        following = self.control.among(behind[len(shared) :])
        if not following:
            raise _Refused("no token ends a turn")
        return following[0], True

    def _find_plain_end(
        self, alone: list[int], behind: list[int], shared: list[int]
    ) -> tuple[int, bool]:
        """Return the same of a turn of text. It has an end of its own if something stands behind it as the last turn."""
        inside = self.control.among(shared)
        eos = getattr(self.tokenizer, "eos_token_id", None)
        if eos in inside:
            return eos, False
        control = self.control.among(behind)
        if not control:
            raise _Refused("no token ends a turn")
        if control[0] == eos or self.control.among(alone):
            return control[0], False
        # Does another role bring another token?
        try:
            messages = [{"role": "system", "content": _PROBE}]
            other = self._written(_Writing(0), messages, generation=True)[1]
        except _Refused:
            return control[0], True
        return control[0], self.control.among(self.control.encode(other))[:1] != control[:1]

    def _ends_each_call(self, writing: _Writing, id: int) -> bool:
        """Tell whether a token stands between two calls of one turn: then it does not end the turn."""
        two = replace(writing, calls=2)
        try:
            before, _ = self._written(two, (), generation=False)
        except _Refused:
            return False
        between = before.rpartition(_PROBE)[2]
        return id in self.control.encode(between)

    @functools.cached_property
    def _own_ends(self) -> tuple[int, ...]:
        """Return the tokens that end a turn of text and belong to it; none where the next message's first token does."""
        bridge = self._bridge(0, ("user",))
        ends = [] if bridge.begins_next else [bridge.end]
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return (*ends, *([eos] if eos is not None else ()))

    @functools.cached_property
    def _plain_ends(self) -> tuple[int, ...]:
        """Return the tokens that close a turn that was cut: mostly one."""
        bridge = self._bridge(0, ("user",))
        if bridge.begins_next:
            eos = getattr(self.tokenizer, "eos_token_id", None)
            return () if eos is None else (eos,)
        messages = [{"role": "user", "content": _PROBE}]
        behind = self.control.encode(self._written(bridge.writing, messages, generation=True)[1])
        ends = behind[: behind.index(bridge.end) + 1]
        if self.control.among(ends) == tuple(ends):
            return tuple(ends)
        return (bridge.end,)

    @functools.cached_property
    def _last_end(self) -> int | None:
        """Return the token that ends the last turn of a conversation: gpt-oss has one of its own."""
        bridge = self._bridge(0, ("user",))
        try:
            behind = self.control.encode(self._written(_Writing(0), (), generation=False)[1])
        except _Refused:
            return bridge.end
        control = self.control.among(behind)
        if control and bridge.end not in control:
            return control[0]
        return bridge.end

    def _ended(self, ids: Sequence[int], stopped: bool) -> bool:
        return bool(ids) and (stopped or ids[-1] in self.stop_ids)

    # Messages from outside.

    def _harmless(self, messages: Sequence[dict], roles: Sequence[str] | None) -> list[dict]:
        harmless_messages = []
        for message in messages:
            role = message.get("role")
            if roles is not None and role not in roles:
                raise ObservationError(
                    f"an observation has the role {role!r}; it may have: {', '.join(roles)}"
                )
            text, _ = self._breaker(text_of(message.get("content")))
            harmless_messages.append({"role": role, "content": text})
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
        texts = [self._render(conversation)]
        if self.tools:
            writing = self._bridge(1, ("tool",)).writing
            behind = self._written(writing, _probes(("tool",), writing, 1), generation=True)[1]
            texts.append(_QUESTION["content"] + behind)
        markers: set[str] = set()
        for text in texts:
            # The text before the first message describes the tools.
            text = text.partition(_QUESTION["content"])[2]
            markers |= set(re.findall(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,40}\]", text))
            markers |= set(
                re.findall(r"^\W*[A-Za-z][\w ]{1,30}:(?=\s*$|\s+qz)", text, re.MULTILINE)
            )
        own = (_SENTINEL, _PROBE, _QUESTION["content"])
        return {each.strip() for each in markers if not any(word in each for word in own)}

    # Thinking.

    @functools.cached_property
    def _thinking(self) -> tuple[str, str]:
        """Return what opens and closes thinking."""
        return next(iter(self._known_thinking), THINKING[0])

    @functools.cached_property
    def _known_thinking(self) -> list[tuple[str, str]]:
        """Return pairs in the template or the vocabulary. Without any, thinking counts only where a turn begins with it."""
        known = (self._source, "\n".join(self.control.strings.values()))
        return [
            pair for text in known for pair in THINKING if all(marker in text for marker in pair)
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
        opener, closer = self._thinking
        is_open = self._opens_thinking if prompt is None else self._is_open(prompt)
        if not is_open and not self._known_thinking and not text.lstrip().startswith(opener):
            return None, text, False
        if not is_open and closer in text.partition(opener)[0]:
            is_open = True  # the opening was left out
        thoughts: list[str] = []
        outside: list[str] = []
        while True:
            piece, mark, text = text.partition(closer if is_open else opener)
            (thoughts if is_open else outside).append(piece)
            if not mark:
                break
            is_open = not is_open
        return "\n".join(thoughts) if thoughts else None, "".join(outside), is_open

    # Formats of calls.

    @functools.cached_property
    def format(self) -> ToolFormat:
        """Return how calls are read."""
        if self.tool_format != "auto":
            return find_format(self.tool_format)
        entries = [entry for name, entry in TOOL_FORMATS.items() if name != TEMPLATE_FORMAT]
        if getattr(self.tokenizer, "response_template", None):
            entries.insert(0, TOOL_FORMATS[TEMPLATE_FORMAT])
        written = self._written_call
        for entry in itertools.chain(entries, vllm_formats(written or "")):
            if self._reads(entry, written):
                return entry
        shown = f"; it writes calls as {written[:_SHOWN]!r}" if written else ""
        raise ConfigError(
            f"--tool_format auto: no format of {', '.join(TOOL_FORMATS)} fits the chat template{shown}. Name one of "
            "vLLM's parsers, or a function of your own as path.py:name"
        )

    @functools.cached_property
    def _written_call(self) -> str | None:
        """Return how the template writes a call of the first tool; None where it writes none."""
        writing = self._bridge(1, ("tool",)).writing
        if not writing.calls:
            return None
        call = Call(self.tools[0].get("function", self.tools[0])["name"], {})
        try:
            before, behind = self._written(writing, (), generation=False, calls=[call])
        except _Refused:
            return None
        turn = self.control.encode(before + _SENTINEL + behind)
        opening = _shared(turn, self.control.encode(self._render([_QUESTION])))
        return self._split_thinking(self.control.decode(turn[len(opening) :]), ())[1]

    def _reads(self, entry: ToolFormat, written: str | None) -> bool:
        """Tell whether a format reads what the template writes."""
        if written is None:
            if entry is TOOL_FORMATS[TEMPLATE_FORMAT]:
                return True
            return bool(entry.markers) and all(each in self._source for each in entry.markers[:2])
        end = self.control.strings.get(self._bridge(1, ("tool",)).end, "")
        turn = written.rpartition(end)[0] if end and end in written else written
        _, calls = entry.fn(turn, tools=self.tools, tokenizer=self.tokenizer, end=end)
        name = self.tools[0].get("function", self.tools[0])["name"]
        return [(call.name, call.arguments) for call in calls] == [(name, {"argument": _SENTINEL})]

    def _check_tools_are_shown(self, opening: str) -> None:
        """Raise ConfigError where neither the template nor the messages name the tools."""
        tools = self.template_options.get("tools", self.tools)
        if hidden := [name for name in map(name_of_tool, tools) if name not in opening]:
            raise ConfigError(
                f"the chat template does not show the tools to the model ({', '.join(hidden)}), and the first messages "
                "do not name them: describe them in the system message of each prompt (--system_prompt), or give the "
                "tokenizer a chat_template that writes `tools`"
            )

    def _check_format(self) -> None:
        """Raise ConfigError where the format of ``--tool_format`` does not read what the template writes."""
        if (written := self._written_call) and not self._reads(self.format, written):
            raise ConfigError(
                f"--tool_format {self.tool_format}: it does not read the calls of the chat template, which writes "
                f"{written[-_SHOWN:]!r}; take another format, or auto"
            )


class ChatFormats:
    """The formats of a tokenizer's template for agent programs, by the tools that these bring.

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
        key = json.dumps(tools)
        if key not in self._known:
            made = ChatFormat(self.tokenizer, tools, **self.options)
            made.check()
            self._known[key] = made
        return self._known[key].of_row(kwargs or {})

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Return those of all formats: as no tools are known yet, of turns with calls and without."""
        probe = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object"}}
        try:
            with_calls = self.of([{"type": "function", "function": probe}]).stop_ids
        except ConfigError:  # a program with tools will be refused
            with_calls = ()
        return tuple(sorted({*self.of([]).stop_ids, *with_calls}))


def _harmless_values(value: Any, breaker: Breaker) -> Any:
    """Return a JSON value without control tokens in any of its texts."""
    if isinstance(value, str):
        return breaker(value)[0]
    if isinstance(value, Mapping):
        return {
            _harmless_values(key, breaker): _harmless_values(each, breaker)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_harmless_values(each, breaker) for each in value]
    return value


def text_of(content: Any) -> str:
    """Return the content of a message as one text, so that nothing forms where its parts meet."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("text"), str))
        for part in content
    ):
        return "".join(part if isinstance(part, str) else part["text"] for part in content)
    raise ObservationError(f"an observation is no text, but {content!r:.80}")


def _probes(roles: Sequence[str], writing: _Writing, calls: int) -> list[dict]:
    """Return messages of some roles with texts that can be found again."""
    called = [Call("unknown", {})] * calls
    messages = [{"role": role, "content": f"{_PROBE}{i}z"} for i, role in enumerate(roles)]
    return _with_ids(messages, writing.ids(called), called)


def _with_ids(messages: Sequence[dict], ids: Sequence[str], calls: Sequence[Call]) -> list[dict]:
    """Return messages of tools with the names and ids of the calls that they answer."""
    answers = itertools.count()
    result = []
    for message in messages:
        if message["role"] == "tool":
            place = next(answers)
            if place < len(calls) and _NAME.fullmatch(calls[place].name):
                name = calls[place].name
            else:
                name = "unknown"
            id = ids[min(place, len(ids) - 1)] if ids else made_id(place)
            message = {**message, "name": name, "tool_call_id": id}
        result.append(message)
    return result


def _shared(left: Any, right: Any) -> Any:
    """Return what two texts, or two lists of ids, begin with alike."""
    pairs = zip(left, right, strict=False)
    count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return left[:count]
