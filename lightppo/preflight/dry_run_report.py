"""What a dry run looks at beside its one step: rows as the model reads them, labels, scores of made-up answers.

What is found here may be meant: each line says where it is, what it does and what to set. What is certain is refused.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as OutOfTime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lightppo.config import PPOConfig
from lightppo.config.options import OptionSet
from lightppo.config.reward_options import reward_sources
from lightppo.config.supervised_options import SFTConfig
from lightppo.data.examples import Example, examples_of
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RewardError
from lightppo.files import stage_to_local
from lightppo.processes.user_calls import in_daemon_thread
from lightppo.ranks import Ranks
from lightppo.redaction import plain
from lightppo.rewards.reward_source import NoReward, RewardSource, score_rollouts
from lightppo.rollout.sampling import end_of_text_ids

_ROWS = 1000  # that are looked at
_FEWEST = 4  # scores or answers, of which it says something that all are equal
_FEWEST_PAIRS = 20
_MOSTLY_LONGER = 0.9
_FEWEST_TOKENS, _GUESSING = 16, 0.95  # of the loss of a model to which all tokens are the same
_LONGEST_SCORE, _LONGEST_STEP = 15.0, 60.0  # seconds: of one sample, of the rewards of a step
_RIGHT = (
    "{}",
    "The answer is {}",
    "#### {}",
    "\\boxed{{{}}}",
    "<think>\nso\n</think>\n<answer>{}</answer>",
)
_WRONG = ("", "I do not know.")
_LONGEST_IN_FORMS = 100  # characters of a label that stands in "The answer is …"
_MARK = re.compile(r"<\|[^|<>\s]{1,30}\|>|<(?:start|end)_of_turn>")  # as templates write tokens


def rehearse(
    config: OptionSet, rows: Any, held_out: Any, source: RewardSource | None, ranks: Ranks
) -> None:
    """Print what to look at. Collective: rank 0 scores.

    Args:
        config: as asked for, resolved: of PPO, or of training on data.
        rows: prompts, or rows to learn from; ``held_out`` likewise, or ``None``.
        source: ``None``: reward models, which score answers of their own; without rewards there is nothing to say.
    """
    for line in (
        plain(f"the first row, {rows.origin(0)}"),
        *described(rows, ids=False),
        lengths(rows),
    ):
        ranks.print(line)
    some = [examples_of(rows, position) for position in range(min(_ROWS, len(rows)))]
    told = _settings(config, rows), _prompts(rows, some), _answers(rows, some), _pairs(rows, some)
    for line in chain(*told, _chats(config, rows), _repeated(config, rows, held_out)):
        ranks.print(plain(f"look at this: {line}"))
    if isinstance(config, PPOConfig) and "environment" in reward_sources(config):
        ranks.print(
            "--reward_source environment scores episodes, so no answers are made up to try it: see the score of the step"
        )
    elif source is not None and not isinstance(source, NoReward):
        found = list(_scores(config, rows, source)) if ranks.is_rank_0() else []
        for line in found:
            ranks.print(plain(f"look at this: {line}"))
        ranks.barrier()


def after_step(config: OptionSet, tokenizer: Any) -> Iterator[str]:
    """Yield what the numbers of the step tell; of rank 0."""
    rows = [
        json.loads(x)
        for x in Path(config.checkpoint.save_path, "metrics.jsonl").read_text().splitlines()
    ]
    row = next((row for row in rows if row.get("rollout/samples", 0) >= _FEWEST), {})
    if row.get("rollout/reward_std") == 0:
        yield (
            f"look at this: all {row['rollout/samples']:g} scores of the step are {row['rollout/reward']:g}, which "
            "teaches nothing: take easier prompts or a reward with steps between"
        )
    if isinstance(config, SFTConfig) and not config.model.init_from_scratch:
        row = next(row for row in rows if "train/loss" in row)
        loss = row["train/loss"]
        known = len(tokenizer)
        if row["train/tokens"] >= _FEWEST_TOKENS and loss > _GUESSING * math.log(known):
            yield (
                f"look at this: the loss of the step, {loss:.2f}, is that of guessing among {known} tokens: do the "
                "weights of --pretrain, its tokenizer and the language of the data belong together?"
            )


# -- options and rows ------------------------------------------------------------------------------------------------


def described(dataset: Any, ids: bool = True) -> Iterator[str]:
    """Yield the first row: text and tokens, those that are trained in green, or in brackets where there are no colours."""
    fields = dataset.fields
    examples = examples_of(dataset, 0)
    parts = ("prompt", "completion", "label")  # prompts for rollouts have no completion
    keys = {name: " or ".join(getattr(fields, name, ())) for name in parts}
    keys["chosen, rejected"] = ", ".join(fields.pair) if len(examples) > 1 else ""
    yield plain("columns: " + "; ".join(f"{name} {text}" for name, text in keys.items() if text))
    if (margin := dataset[0].get("margin") if len(examples) > 1 else None) is not None:
        yield f"margin: {margin:g}"
    for name, (prompt, _, _, answer, learned) in zip(("chosen", "rejected"), examples):
        if len(examples) > 1:
            yield f"{name}:"
        if not answer:
            template = dataset.template.input_template
            of_text = "as it is" if template is None else f"in --input_template {template!r}"
            chat = (
                prompt.messages
                and f"chat of {len(prompt.messages)} messages by the tokenizer's chat template"
            )
            source = plain(prompt.data_source)
            yield f"prompt: {chat or f'text {of_text}'}; label: {prompt.label!r}; data source: {source}"
        spans = [(False, list(prompt.token_ids))]
        for is_learned, part in itertools.groupby(zip(learned, answer), key=lambda pair: pair[0]):
            spans.append((is_learned, [token for _, token in part]))
        yield from _marked(dataset.tokenizer, [span for span in spans if span[1]], ids)
        if not answer:
            yield f"reward functions also get: {plain(', '.join(prompt.extra)) or 'nothing else'}"


def _marked(tokenizer: Any, spans: Sequence[tuple[bool, list[int]]], ids: bool) -> Iterator[str]:
    left, right = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[", "]")

    def all_of(text: Callable[[list[int]], str], between: str) -> str:
        return between.join(
            f"{left}{text(span)}{right}" if is_trained else text(span) for is_trained, span in spans
        )

    def shown(ids: list[int]) -> str:
        return plain(tokenizer.decode(ids))

    yield textwrap.indent(all_of(shown, ""), "    ")
    pieces = all_of(lambda span: "|".join(shown([i]).replace("\n", "\\n") for i in span), "|")
    counts = (
        [len(span) for _, span in spans],
        [len(span) for is_trained, span in spans if is_trained],
    )
    yield f"{sum(counts[0])} tokens, {sum(counts[1])} of them trained" + f": {pieces}" * ids
    if ids:
        yield f"ids: {all_of(lambda span: ' '.join(map(str, span)), ' ')}"


def lengths(rows: Any) -> str:
    """Return tokens of the rows."""
    middle, most, longest = np.percentile(
        rows.lengths, (50, 95, 100), method="inverted_cdf"
    ).astype(int)
    return f"tokens: median {middle}, 95% up to {most}, longest {longest}"


def _names(config: OptionSet) -> tuple[str, ...]:
    """Return the options of PPO, or what they are called for training on data."""
    if isinstance(config, PPOConfig):
        return (
            "actor_learning_rate",
            "rollout_batch_size",
            "prompt_max_len",
            "prompt_data",
            "eval_data",
            "prompts",
        )
    return "learning_rate", "train_batch_size", "max_len", "dataset", "eval_dataset", "rows"


def fewer_rows(config: OptionSet, rows: Any) -> str | None:
    """Return what to say where a step asks for more rows than there are."""
    _, size, *_, what = _names(config)
    wanted = config.flat()[size]
    if len(rows) >= wanted:
        return None
    return f"--{size} {wanted} is more than the {len(rows)} {what}: every step has all of them"


def _settings(config: OptionSet, rows: Any) -> Iterator[str]:
    flat = config.flat()
    usual = type(config)().flat()
    report = rows.report
    rate, _, limit, _, _, what = _names(config)
    if flat[rate] > 100 * usual[rate] and config.adapter.lora_rank == 0:
        usually = f"{usual[rate] / 10:g} to {usual[rate] * 10:g}"
        yield f"--{rate} {flat[rate]:g}: models of some size are trained with {usually}, adapters up to 1e-3"
    if told := fewer_rows(config, rows):
        yield told
    over = f"--{limit} {flat[limit]}"
    if report.truncated:
        cut = f"{report.truncated} of {report.kept} {what} are cut to {over}"
        lost = "is the question still there" if what == "prompts" else "their answers never end"
        yield f"{cut}: {lost} (--truncation {flat['truncation']})? Else raise it, or drop"
    if left_out := report.dropped.get("overlong"):
        yield f"{left_out} of {report.rows} {what} are longer than {over}, and left out: raise it, or is that meant?"
    for text in flat.get("stop", ()):
        ids = rows.tokenizer(text, add_special_tokens=False)["input_ids"]
        if "\\n" in text:
            yield f"--stop {text!r} has a backslash and an n, not a line break: in bash write $'\\n'"
        elif rows.tokenizer.unk_token_id is not None and rows.tokenizer.unk_token_id in ids:
            yield f"--stop {text!r}: the tokenizer cannot write it, so it ends no answer"


def _prompts(rows: Any, some: Sequence[Sequence[Example]]) -> Iterator[str]:
    tokenizer = rows.tokenizer
    prompts = [one[0].prompt for one in some]
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    unknown = tokenizer.unk_token_id
    marks = [token for token in tokenizer.all_special_tokens if token != tokenizer.unk_token]
    labels = Counter(type(p.label).__name__ for p in prompts if p.label is not None)
    usual = labels.most_common(1)[0][0] if labels else None
    found = {
        "begin with two begin-of-text tokens": (lambda p: bos is not None and p.token_ids[:2] == [bos, bos],
            "leave it out of the rows, or of the chat template"),
        "hold special tokens inside a message": (
            lambda p: any(mark in (message["content"] or "") for message in p.messages or () for mark in marks),
            "was a chat template applied before? Give the bare text"),
        "end with end-of-text": (lambda p: p.token_ids[-1:] == [eos], "the answer comes after the end: leave it out"),
        "end with a blank": (lambda p: p.messages is None and p.text.endswith(" "),
            "words begin with their blank, so answers get odd tokens: cut it off the rows or --input_template"),
        "have tokens that the tokenizer does not know": (lambda p: unknown is not None and unknown in p.token_ids,
            "do the data and the tokenizer of --pretrain belong together?"),
        "have no label": (lambda p: usual is not None and p.label is None,
            "others have one: fill them, or leave the rows out"),
        f"have a label that is not {usual} as most are": (lambda p: type(p.label).__name__ not in (usual, "NoneType"),
            "'8' == 8 is false in Python: write all in one type"),
    }  # fmt: skip
    yield from _told(rows, "prompts", [[p] for p in prompts], lambda p: f"…{p.text[-40:]!r}", found)


def _answers(rows: Any, some: Sequence[Sequence[Example]]) -> Iterator[str]:
    tokenizer = rows.tokenizer
    unknown = rows.tokenizer.unk_token_id
    marks = [token for token in tokenizer.all_special_tokens if token != tokenizer.unk_token]
    found = {
        "hold special tokens": (lambda e: any(mark in e.written for mark in marks),
            "was a template applied before? Give the bare text, whose end-of-text is added"),
        "have tokens that the tokenizer does not know": (lambda e: unknown is not None and unknown in e.answer_ids,
            "do the data and the tokenizer of --pretrain belong together?"),
        "have no text to learn": (
            lambda e: not tokenizer.decode(list(e.answer_ids), skip_special_tokens=True).strip(),
            "only special tokens are trained: fill the rows, or leave them out"),
        "are the prompt once more": (
            lambda e: e.written.strip() == (e.prompt.messages[-1]["content"] if e.prompt.messages else e.prompt.text),
            "is the right column named?"),
        "follow a word without a blank or a line": (
            lambda e: e.prompt.messages is None and e.prompt.text[-1:].isalpha() and e.answer[:1].isalpha(),
            "set --input_template, such as $'{}\\n', or write it into the rows"),
    }  # fmt: skip
    trained = [[e for e in one if e.answer_ids] for one in some]
    yield from _told(rows, "answers", trained, lambda e: f"{e.answer[:40]!r}…", found)
    if len(some) >= _FEWEST and len(all_of := {e.written for one in trained for e in one}) == 1:
        yield f"all {len(some)} answers are {all_of.pop()[:40]!r}: is the right column named (--output_key)?"


def _told(
    rows: Any,
    kind: str,
    some: Sequence[Sequence[Any]],
    text: Callable[[Any], str],
    found: dict[str, Any],
) -> Iterator[str]:
    """Yield each kind of mistake with its number and the first of them."""
    total = sum(map(len, some))
    for what, (is_so, cure) in found.items():
        if at := [
            (position, one) for position, of_row in enumerate(some) for one in of_row if is_so(one)
        ]:
            position, first = at[0]
            shown = f"first {rows.origin(position)} ({text(first)})"
            yield f"{len(at)} of {total} {kind} {what}, {shown}: {cure}"


def _pairs(rows: Any, pairs: Sequence[Sequence[Example]]) -> Iterator[str]:
    """Yield what pairs teach beside what they mean to."""
    if len(pairs[0]) < 2:
        return
    known = {
        tuple((tuple(e.prompt.token_ids), tuple(e.answer_ids)) for e in pair): i
        for i, pair in enumerate(pairs)
    }
    both = [(known[pair[::-1]], i) for pair, i in known.items() if known.get(pair[::-1], i) < i]
    if both:
        first, second = map(rows.origin, both[0])
        yield f"{len(both)} pairs are there the other way round, first {first} and {second}: which answer is better?"
    longer = sum(len(chosen.answer_ids) > len(rejected.answer_ids) for chosen, rejected in pairs)
    if len(pairs) >= _FEWEST_PAIRS and longer >= _MOSTLY_LONGER * len(pairs):
        yield f"the chosen answer is the longer one in {longer} of {len(pairs)} pairs: length may be what is learned"
    margins = {rows[i].get("margin") for i in range(len(pairs))}
    if len(pairs) >= _FEWEST and margins != {None} and len(margins) == 1:
        yield f"all margins of {len(pairs)} pairs are {margins.pop():g}: is the right column named (--margin_key)?"


def _repeated(config: OptionSet, rows: Any, held_out: Any) -> Iterator[str]:
    *_, data, eval_data, what = _names(config)
    plays = isinstance(config, PPOConfig) and config.episodes.env

    def row_of(dataset: Any, position: int, ids: list[int]) -> tuple:
        """Return what makes a row another one: an environment reads its columns, too."""
        if not plays:
            return tuple(ids)
        prompt = dataset[position]
        return (*ids, json.dumps([prompt.label, prompt.extra], sort_keys=True, default=repr))

    seen = Counter(row_of(rows, position, rows.ids_of(position)) for position in range(len(rows)))
    if (more := len(rows) - len(seen)) > 0:
        yield f"{more} of {len(rows)} {what} of --{data} are there before: they count as often"
    known = range(len(rows)) if held_out else ()
    prompts = {row_of(rows, position, rows.prompt_ids_of(position)) for position in known}
    both = [
        at
        for at in range(len(held_out or ()))
        if row_of(held_out, at, held_out.prompt_ids_of(at)) in prompts
    ]
    if both:
        which = f"{len(both)} of {len(held_out)} prompts of --{eval_data} are in --{data} too"
        yield f"{which}, first {held_out.origin(both[0])}: evaluations measure what was learned by heart; remove them"


# -- chat templates --------------------------------------------------------------------------------------------------


def _chats(config: OptionSet, rows: Any) -> Iterator[str]:
    first = examples_of(rows, 0)[0].prompt
    template = rows.template
    tokenizer = rows.tokenizer
    if first.messages is None:
        return
    chat = first.messages
    own = {mark for message in chat for mark in _MARK.findall(message["content"] or "")}
    if foreign := sorted(set(_MARK.findall(first.text)) - own - set(tokenizer.get_vocab())):
        yield f"the chat template writes {foreign[0]!r}, no token of this tokenizer: is it another model's template?"
    asked = template.chat_text(chat, add_generation_prompt=chat[-1]["role"] != "assistant")
    if chat[-1]["role"] != "assistant" and asked == template.chat_text(chat):
        yield "the chat template has no generation prompt: the model has to write the assistant's header itself"
    # Rows of supervised training end with end-of-text, whatever the template writes.
    if not isinstance(config, PPOConfig):
        return
    rollout = config.rollout
    mark = "answer 7"
    tail = (
        template.chat_text([*chat, {"role": "assistant", "content": mark}])
        .rpartition(mark)[2]
        .strip()
    )
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(stage_to_local(config.model.pretrain))
    except OSError:  # a model may have none
        generation = None
    stops = {*end_of_text_ids(tokenizer, generation), *rollout.stop_token_ids}
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    if tail and not stops & set(ids) and not any(stop in tail for stop in rollout.stop):
        ends = f"the chat template ends an answer with {tail!r}, at which sampling goes on"
        # Sampling cannot wait for a special token and text behind it.
        first = tokenizer.decode(ids[:1])
        stop = tail if tokenizer.decode(ids[:1], skip_special_tokens=True) else first
        yield f"{ends}: --stop {stop!r}, or the right eos_token in tokenizer_config.json"


# -- scores ----------------------------------------------------------------------------------------------------------


def _scores(config: PPOConfig, prompts: Any, source: RewardSource) -> Iterator[str]:
    """Yield the labels themselves and nonsense as answers: the ones should score higher, in the time there is."""
    made = [
        _made_up(prompts.tokenizer, prompts[position]) for position in range(min(8, len(prompts)))
    ]
    everything = [rollout for right, wrong in made for rollout in (*right, *wrong)]
    try:
        start = time.monotonic()
        in_daemon_thread(score_rollouts, source, everything[:1]).result(_LONGEST_SCORE)
        if (seconds := time.monotonic() - start) < 1:
            start = time.monotonic()
            score_rollouts(source, everything)
            seconds = (time.monotonic() - start) / len(everything)
        else:
            everything = []
    except OutOfTime:
        everything = []
        seconds = _LONGEST_SCORE
    except RewardError as error:
        yield f"the reward fails on answers that were made up for this check; the model's may be like them: {error}"
        return
    samples = config.rollout.rollout_batch_size * config.sampling.generation_size
    if (whole := seconds * samples) > _LONGEST_STEP:
        yield (
            f"{source.name} took {seconds:.2g} s for one sample; one after the other, the {samples} of a step would "
            f"take {whole / 60:.0f} minutes: make it faster, or --async_rewards, or --reward_manager prime"
        )
    scored = [rollout for rollout in everything if rollout.reward is not None]
    labelled = [both for both in made if both[0] and everything]
    if labelled and len({rollout.reward for rollout in scored}) == 1:
        yield (
            f"{source.name} gave {scored[0].reward:g} to all of {len(scored)} made-up answers, right and wrong: does "
            "it read the answer, and in the form in which models give it?"
        )
    elif labelled and not any(map(_tells, labelled)):
        right = max(labelled[0][0], key=lambda rollout: rollout.reward or 0)
        yield (
            f"{source.name} scores labels as answers no higher than {_WRONG[0]!r} and {_WRONG[1]!r}, such as "
            f"{right.response_text!r} with {right.reward}: does it find the answer, and --label_key name the column?"
        )


def _made_up(tokenizer: Any, prompt: Prompt) -> tuple[list[Rollout], list[Rollout]]:
    """Make answers with the label and without it. A long one, such as a worked solution, is an answer as it is."""

    def rollout(number: int, text: str) -> Rollout:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return Rollout(prompt, number, [*ids, tokenizer.eos_token_id], text, "stop")

    label = _answer_of(prompt.label)
    forms = _RIGHT if len(label) <= _LONGEST_IN_FORMS else _RIGHT[:1]
    texts = [form.format(label) for form in forms] if label else []
    right = [rollout(number, text) for number, text in enumerate(texts)]
    return right, [rollout(number, text) for number, text in enumerate(_WRONG, start=len(right))]


def _answer_of(label: Any) -> str:
    """Return the label as a text that may be an answer; empty where it is none, such as the tests of a program."""
    first = label[0] if isinstance(label, (list, tuple)) and label else label
    text = str(first).strip() if isinstance(first, (str, int, float)) else ""
    try:
        return "" if isinstance(json.loads(text), dict) else text
    except (ValueError, RecursionError):
        return text


def _tells(answers: tuple[Sequence[Rollout], Sequence[Rollout]]) -> bool:
    right, wrong = ([r.reward for r in part if r.reward is not None] for part in answers)
    return bool(right) and (not wrong or max(right) > max(wrong))
