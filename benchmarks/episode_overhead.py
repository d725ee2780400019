"""What episodes of one turn cost beside plain rollouts of the same prompts, on this machine's CPU.

    python benchmarks/episode_overhead.py [--pairs 8] [--chat]

Both sample the same tokens with the model of W1 (5 million parameters): 64 prompts, 64 to 128 tokens each. Prints the
ratios of CPU times and of wall times: of each side's least time, and the median and quartiles over all pairs. With
``--chat`` the prompts are chats with a tool.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from make_assets import build_model, build_tokenizer
from workloads import BOS, EOS, PAD, SCALES, SPECIAL_TOKENS, WORKLOADS, prompt_texts

from lightppo import HFRolloutEngine, Reply, SamplingParams, Step
from lightppo.data.records import Prompt
from lightppo.episodes.chat_format import ChatFormat
from lightppo.episodes.environments import Environments
from lightppo.episodes.episode import Limits, PlainText
from lightppo.episodes.episode_engine import EpisodeEngine

TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '</s>\\n' }}{% endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{- '</s>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CHAT_COLUMNS = 640  # of an opening and a turn, in bytes


class Judged:
    """An environment of one turn."""

    def reset(self, **row: Any) -> None: ...

    def step(self, text: str) -> Step:
        return Step(None, reward=float(len(text) % 2), done=True)

    def get_reward(self) -> float:
        return 0.0


class Called:
    """A tool that nobody calls: the first turn is the answer."""

    def reset(self, **row: Any) -> None: ...

    def look_up(self, word: str) -> Reply:
        """Look a word up. Args: word: the word."""
        return Reply("nothing")

    def get_reward(self) -> float:
        return 0.0


class _Alone:
    """One rank."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def is_rank_0(self) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chat", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plain, episodes, prompts, rows = sides(options.chat)
    sampling = SamplingParams(max_new_tokens=128, min_new_tokens=64, seed=3)
    calls = {
        "plain": lambda: plain.generate(prompts, sampling),
        "episodes": lambda: episodes.generate(rows, sampling),
    }
    said = [[one.response_ids for one in call()] for call in calls.values()]
    assert said[0] == said[1], "the two sides sample different tokens"
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for pair in range(options.pairs):
        for name in (list(calls), list(calls)[::-1])[pair % 2]:
            taken[name].append(timed(calls[name]))
    print(f"{len(said[0])} episodes, {sum(map(len, said[0]))} tokens, {options.pairs} pairs")
    for kind, times in (("CPU", 0), ("wall", 1)):
        least = {name: min(one[times] for one in found) for name, found in taken.items()}
        more = (least["episodes"] - least["plain"]) / len(said[0]) * 1e3
        print(
            f"{kind}: plain {least['plain']:.3f} s, episodes {least['episodes']:.3f} s, "
            f"ratio {least['episodes'] / least['plain']:.4f}, {more:.3f} ms per episode"
        )
        sides_of_pairs = zip(taken["episodes"], taken["plain"])
        ratios = [ours[times] / theirs[times] for ours, theirs in sides_of_pairs]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"{kind} of pairs: median {median:.4f}, quartiles {low:.4f} and {high:.4f}")
    episodes.close()


def sides(chat: bool) -> tuple[HFRolloutEngine, EpisodeEngine, list[Prompt], list[Prompt]]:
    """Both engines, and what each plays: the same token ids in the end."""
    scale = SCALES["cpu"]
    tokenizer = chat_tokenizer() if chat else build_tokenizer(scale)
    model = build_model(replace(scale, prompt_tokens=(8, CHAT_COLUMNS)) if chat else scale)
    engine = HFRolloutEngine(_Actor(model), tokenizer, micro_rollout_batch_size=64)
    environments = Environments([Called if chat else Judged])
    (name,) = environments.names
    format = PlainText(tokenizer)
    if chat:
        format = ChatFormat(tokenizer, environments.tools(name))
        format.check()
    limits = Limits(budget=scale.new_tokens, max_opening=CHAT_COLUMNS)
    episodes = EpisodeEngine(
        engine, tokenizer, environments, _Alone(), limits=limits, formats={name: format}
    )
    texts = [text[: scale.prompt_tokens[1]] for text in prompt_texts(WORKLOADS["W1"], scale)]
    ids = [tokenizer(text).input_ids for text in texts]
    rows = [Prompt(text, of_text, index=i) for i, (text, of_text) in enumerate(zip(texts, ids))]
    if not chat:
        return engine, episodes, rows, rows
    chats = [[{"role": "user", "content": text}] for text in texts]
    rows = [replace(row, messages=one) for row, one in zip(rows, chats)]
    prompts = [replace(row, token_ids=format.opening(row.messages)) for row in rows]
    return engine, episodes, prompts, rows


def chat_tokenizer() -> Any:
    """Bytes, and the tokens of ``TEMPLATE``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate((*SPECIAL_TOKENS, *letters))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [*SPECIAL_TOKENS, "<|im_start|>"]
    backend.add_special_tokens([AddedToken(one, normalized=False) for one in special])
    backend.add_tokens(
        [AddedToken(one, normalized=False) for one in ("<tool_call>", "</tool_call>")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class _Actor(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """CPU seconds of all threads, and seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


if __name__ == "__main__":
    main()
