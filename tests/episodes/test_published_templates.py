"""Published chat templates, where TRL is installed, and prime-rl's renderers, where they are."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from support.chats import CHATML, TOOLS, chat_tokenizer

from lightppo.episodes.chat_format import AssistantTurn, ChatFormat
from lightppo.episodes.tool_formats import TOOL_FORMATS, Call
from lightppo.errors import ConfigError

QUESTION = {"role": "user", "content": "Guess the number."}
ENDS = (
    "<|im_end|> <|eot_id|> <|return|> <turn|> <end_of_turn> <｜end▁of▁sentence｜> <|END_OF_TURN_TOKEN|> <|end|> "
    "<|endoftext|> </s>"
)
# Everything that reads like a control token of one of the families.
CONTROL = re.compile(
    r"<\|[^|<>{}\n]{1,40}\|>|<｜[^｜<>\n]{1,40}｜>|</?(?:think|tool_call|tool_response|arg_key|arg_value)>"
    r"|<\|[a-z_\"]+>|<[a-z_\"]+\|>|<(?:start|end)_of_turn>"
)
# Only lists of parts, with pictures, are text for these.
PICTURES = {"idefics3", "llava_next", "smolvlm"}
FORMATS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "qwen_xml",
    "llama3_1": "llama3",
}
DROP_TOOLS = {"phi3", "phi3_5", "cohere2", "gemma3", "llama3", "deepseekv3", "deepseek_r1_distill"}


def published() -> dict[str, str]:
    spec = importlib.util.find_spec("trl")
    folders = spec.submodule_search_locations if spec else []
    paths = [path for folder in folders for path in Path(folder, "chat_templates").glob("*.jinja")]
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(paths)}


PUBLISHED = published()
needs_templates = pytest.mark.skipif(not PUBLISHED, reason="TRL's templates are not installed")


def tokenizer_for(source: str, more: str = ""):
    added = {*CONTROL.findall(source), *more.split(), "<|endoftext|>", "</s>", "<s>"}
    end = next(end for end in ENDS.split() if end in added)
    return chat_tokenizer(source, added=" ".join(sorted(added)), end=end)


@needs_templates
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_bridge_is_exact(name):
    """Its ids are those of a whole rendering, whatever the template makes of the turn before."""
    chat = ChatFormat(tokenizer_for(PUBLISHED[name]))
    if name.removesuffix("_training") in PICTURES:
        with pytest.raises(ConfigError, match="drops user messages"):
            chat.check()
        return
    chat.check()
    new = {"role": "user", "content": "No, higher."}
    ids = chat.continuation(AssistantTurn("", None, (), True, chat.stop_ids[0]), [new])
    messages = [QUESTION, {"role": "assistant", "content": "Five, I think."}, new]
    whole = chat.control.encode(
        chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    )
    assert whole[len(whole) - len(ids) :] == ids
    assert "No, higher." in chat.tokenizer.decode(ids)


@needs_templates
@pytest.mark.parametrize("name", sorted(DROP_TOOLS))
def test_templates_without_tools_are_refused(name):
    with pytest.raises(ConfigError, match="does not show the tools"):
        ChatFormat(tokenizer_for(PUBLISHED[name]), TOOLS).check()


@needs_templates
@pytest.mark.parametrize("name", FORMATS)
def test_the_format_of_calls_is_found(name):
    chat = ChatFormat(tokenizer_for(PUBLISHED[name]), TOOLS)
    chat.check()
    assert chat.format is TOOL_FORMATS[FORMATS[name]]


# Renderers by hand, of the same families: their bridge is the oracle.

HAND_WRITTEN = {
    "qwen3": "Qwen3RendererConfig",
    "qwen3_5_think": "Qwen35RendererConfig",
    "qwen3_6": "Qwen36RendererConfig",
    "qwen3_8": "Qwen38RendererConfig",
    "llama3_2": "Llama3RendererConfig",
    "gemma4_v5": "Gemma4RendererConfig",
    "nemotron_3_nano": "Nemotron3RendererConfig",
    "nemotron_3_ultra": "Nemotron3UltraRendererConfig",
    "chatml": "Qwen3RendererConfig",
}
# What renderers look up in a vocabulary beside what is in the template.
VOCABULARY = (
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <|endoftext|> <|im_start|> <|im_end|> "
    "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
)
VOCABULARIES = {
    "gemma4_v5": "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> "
    '<|tool_response> <tool_response|> <|"|> <|think|> <|image> <image|> <|image|> <|audio|> <|audio> <audio|>',
    "llama3_2": "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> "
    "<|python_tag|>",
}


@pytest.mark.skipif(importlib.util.find_spec("renderers") is None, reason="needs renderers")
@pytest.mark.parametrize("name", [name for name in HAND_WRITTEN if name in {*PUBLISHED, "chatml"}])
def test_the_same_ids_as_renderers_by_hand(name):
    configs = importlib.import_module("renderers.configs")
    source = PUBLISHED.get(name, CHATML)
    tokenizer = tokenizer_for(source, VOCABULARIES.get(name, VOCABULARY))
    config = getattr(configs, HAND_WRITTEN[name])()
    theirs = importlib.import_module("renderers").create_renderer(tokenizer, config)
    theirs.effective_thinking_retention = "all"  # otherwise it renders the history again
    ours = ChatFormat(tokenizer, TOOLS, tool_format="hermes")
    prompt = ours.opening([QUESTION])
    thought = ours.control.encode("so" + ours._thinking[1]) if ours._is_open(prompt) else []
    user = [{"role": "user", "content": "No, higher."}]
    calls = (Call("guess", {"x": 5}), Call("look_up", {"word": "a"}))
    results = [
        {"role": "tool", "content": text, "name": call.name, "tool_call_id": f"call{i:05d}"}
        for i, (text, call) in enumerate(zip(["higher", ""], calls, strict=True))
    ]

    def compare(action, turn, messages):
        own = [*prompt, *action, *ours.closing(action, stopped=turn.complete, prompt=prompt)]
        own += ours.continuation(turn, [dict(message) for message in messages])
        bridged = theirs.bridge_to_next_turn(prompt, action, messages, tools=TOOLS)
        assert own == bridged.token_ids

    say = [*thought, *ours.control.encode("Five.")]
    end = ours._plain_ends[-1]
    compare([*say, end], AssistantTurn("", None, (), True, end), user)
    compare(say, AssistantTurn("", None, (), False), user)
    for count in (1, 2):
        end = ours._bridge(count, ("tool",) * count).end
        turn = AssistantTurn("", None, calls[:count], True, end)
        compare([*say, end], turn, results[:count])
    if name not in ("llama3_2", "gemma4_v5"):
        start = [] if thought else ours.control.encode("<think>")
        compare([*start, *ours.control.encode("so")], AssistantTurn("", None, (), False), user)
