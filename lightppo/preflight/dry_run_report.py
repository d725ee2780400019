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
from lightppo.ranks import Ranks
from lightppo.redaction import plain
from lightppo.rewards.reward_source import NoReward, RewardSource, score_rollouts
from lightppo.rollout.sampling import end_of_text_ids
from lightppo.user_code import in_daemon_thread

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
    first_rows = [examples_of(rows, position) for position in range(min(_ROWS, len(rows)))]
    findings_of_rows = (
        _settings(config, rows),
        _prompts(rows, first_rows),
        _answers(rows, first_rows),
        _pairs(rows, first_rows),
    )
    for line in chain(*findings_of_rows, _chats(config, rows), _repeated(config, rows, held_out)):
        ranks.print(plain(f"look at this: {line}"))
    if isinstance(config, PPOConfig) and "environment" in reward_sources(config):
        ranks.print(
            "--reward_source environment scores episodes, so no answers are made up to try it: see the score of the step"
        )
    elif source is not None and not isinstance(source, NoReward):
        findings = list(_scores(config, rows, source)) if ranks.is_rank_0() else []
        for line in findings:
            ranks.print(plain(f"look at this: {line}"))
        ranks.barrier()


def after_step(config: OptionSet, tokenizer: Any) -> Iterator[str]:
    """Yield what the numbers of the step tell; of rank 0."""
    rows = [
        json.loads(line)
        for line in Path(config.checkpoint.save_path, "metrics.jsonl").read_text().splitlines()
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
        vocabulary = len(tokenizer)
        if row["train/tokens"] >= _FEWEST_TOKENS and loss > _GUESSING * math.log(vocabulary):
            yield (
                f"look at this: the loss of the step, {loss:.2f}, is that of guessing among {vocabulary} tokens: do the "
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
    opening, closing = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[", "]")

    def all_of(text: Callable[[list[int]], str], between: str) -> str:
        return between.join(
            f"{opening}{text(span)}{closing}" if is_trained else text(span)
            for is_trained, span in spans
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
    _, size, *_, noun = _names(config)
    batch_size = config.flat()[size]
    if len(rows) >= batch_size:
        return None
    return f"--{size} {batch_size} is more than the {len(rows)} {noun}: every step has all of them"


def _settings(config: OptionSet, rows: Any) -> Iterator[str]:
    flat = config.flat()
    usual = type(config)().flat()
    report = rows.report
    rate, _, limit, _, _, noun = _names(config)
    if flat[rate] > 100 * usual[rate] and config.adapter.lora_rank == 0:
        usually = f"{usual[rate] / 10:g} to {usual[rate] * 10:g}"
        yield f"--{rate} {flat[rate]:g}: models of some size are trained with {usually}, adapters up to 1e-3"
    if shortage := fewer_rows(config, rows):
        yield shortage
    over = f"--{limit} {flat[limit]}"
    if report.truncated:
        cut = f"{report.truncated} of {report.kept} {noun} are cut to {over}"
        consequence = (
            "is the question still there" if noun == "prompts" else "their answers never end"
        )
        yield f"{cut}: {consequence} (--truncation {flat['truncation']})? Else raise it, or drop"
    if left_out := report.dropped.get("overlong"):
        yield f"{left_out} of {report.rows} {noun} are longer than {over}, and left out: raise it, or is that meant?"
    for text in flat.get("stop", ()):
        ids = rows.tokenizer(text, add_special_tokens=False)["input_ids"]
        if "\\n" in text:
            yield f"--stop {text!r} has a backslash and an n, not a line break: in bash write $'\\n'"
        elif rows.tokenizer.unk_token_id is not None and rows.tokenizer.unk_token_id in ids:
            yield f"--stop {text!r}: the tokenizer cannot write it, so it ends no answer"


def _prompts(rows: Any, some: Sequence[Sequence[Example]]) -> Iterator[str]:
    tokenizer = rows.tokenizer
    prompts = [examples[0].prompt for examples in some]
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    unknown = tokenizer.unk_token_id
    marks = [token for token in tokenizer.all_special_tokens if token != tokenizer.unk_token]
    labels = Counter(type(prompt.label).__name__ for prompt in prompts if prompt.label is not None)
    usual = labels.most_common(1)[0][0] if labels else None
    mistakes = {
        "begin with two begin-of-text tokens": (lambda row: bos is not None and row.token_ids[:2] == [bos, bos],
            "leave it out of the rows, or of the chat template"),
        "hold special tokens inside a message": (
            lambda row: any(mark in (message["content"] or "") for message in row.messages or () for mark in marks),
            "was a chat template applied before? Give the bare text"),
        "end with end-of-text": (lambda row: row.token_ids[-1:] == [eos], "the answer comes after the end: leave it out"),
        "end with a blank": (lambda row: row.messages is None and row.text.endswith(" "),
            "words begin with their blank, so answers get odd tokens: cut it off the rows or --input_template"),
        "have tokens that the tokenizer does not know": (lambda row: unknown is not None and unknown in row.token_ids,
            "do the data and the tokenizer of --pretrain belong together?"),
        "have no label": (lambda row: usual is not None and row.label is None,
            "others have one: fill them, or leave the rows out"),
        f"have a label that is not {usual} as most are": (lambda row: type(row.label).__name__ not in (usual, "NoneType"),
            "'8' == 8 is false in Python: write all in one type"),
    }  # fmt: skip
    yield from _mistake_lines(
        rows,
        "prompts",
        [[prompt] for prompt in prompts],
        lambda prompt: f"…{prompt.text[-40:]!r}",
        mistakes,
    )


def _question(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"] if prompt.messages else prompt.text


def _answers(rows: Any, row_examples: Sequence[Sequence[Example]]) -> Iterator[str]:
    tokenizer = rows.tokenizer
    unknown = rows.tokenizer.unk_token_id
    marks = [token for token in tokenizer.all_special_tokens if token != tokenizer.unk_token]
    mistakes = {
        "hold special tokens": (lambda row: any(mark in row.written for mark in marks),
            "was a template applied before? Give the bare text, whose end-of-text is added"),
        "have tokens that the tokenizer does not know": (lambda row: unknown is not None and unknown in row.answer_ids,
            "do the data and the tokenizer of --pretrain belong together?"),
        "have no text to learn": (
            lambda row: not tokenizer.decode(list(row.answer_ids), skip_special_tokens=True).strip(),
            "only special tokens are trained: fill the rows, or leave them out"),
        "are the prompt once more": (
            lambda row: row.written.strip() == _question(row.prompt),
            "is the right column named?"),
        "follow a word without a blank or a line": (
            lambda row: row.prompt.messages is None and row.prompt.text[-1:].isalpha() and row.answer[:1].isalpha(),
            "set --input_template, such as $'{}\\n', or write it into the rows"),
    }  # fmt: skip
    trained = [[example for example in examples if example.answer_ids] for examples in row_examples]
    yield from _mistake_lines(
        rows, "answers", trained, lambda example: f"{example.answer[:40]!r}…", mistakes
    )
    if (
        len(row_examples) >= _FEWEST
        and len(all_of := {example.written for examples in trained for example in examples}) == 1
    ):
        yield f"all {len(row_examples)} answers are {all_of.pop()[:40]!r}: is the right column named (--output_key)?"


def _mistake_lines(
    rows: Any,
    kind: str,
    some: Sequence[Sequence[Any]],
    text: Callable[[Any], str],
    mistakes: dict[str, Any],
) -> Iterator[str]:
    """Yield each kind of mistake with its number and the first of them."""
    total = sum(map(len, some))
    for description, (is_so, cure) in mistakes.items():
        if matches := [
            (position, item)
            for position, of_row in enumerate(some)
            for item in of_row
            if is_so(item)
        ]:
            position, first_item = matches[0]
            first_match = f"first {rows.origin(position)} ({text(first_item)})"
            yield f"{len(matches)} of {total} {kind} {description}, {first_match}: {cure}"


def _pairs(rows: Any, pairs: Sequence[Sequence[Example]]) -> Iterator[str]:
    """Yield what pairs teach beside what they mean to."""
    if len(pairs[0]) < 2:
        return
    position_of_pair = {
        tuple((tuple(example.prompt.token_ids), tuple(example.answer_ids)) for example in pair): i
        for i, pair in enumerate(pairs)
    }
    both = [
        (position_of_pair[pair[::-1]], i)
        for pair, i in position_of_pair.items()
        if position_of_pair.get(pair[::-1], i) < i
    ]
    if both:
        forward, backward = map(rows.origin, both[0])
        yield f"{len(both)} pairs are there the other way round, first {forward} and {backward}: which answer is better?"
    longer = sum(len(chosen.answer_ids) > len(rejected.answer_ids) for chosen, rejected in pairs)
    if len(pairs) >= _FEWEST_PAIRS and longer >= _MOSTLY_LONGER * len(pairs):
        yield f"the chosen answer is the longer one in {longer} of {len(pairs)} pairs: length may be what is learned"
    margins = {rows[i].get("margin") for i in range(len(pairs))}
    if len(pairs) >= _FEWEST and margins != {None} and len(margins) == 1:
        yield f"all margins of {len(pairs)} pairs are {margins.pop():g}: is the right column named (--margin_key)?"


def _repeated(config: OptionSet, rows: Any, held_out: Any) -> Iterator[str]:
    *_, data, eval_data, noun = _names(config)
    plays = isinstance(config, PPOConfig) and config.episodes.env

    def row_of(dataset: Any, position: int, ids: list[int]) -> tuple:
        """Return what makes a row another one: an environment reads its columns, too."""
        if not plays:
            return tuple(ids)
        prompt = dataset[position]
        return (*ids, json.dumps([prompt.label, prompt.extra], sort_keys=True, default=repr))

    counts = Counter(row_of(rows, position, rows.ids_of(position)) for position in range(len(rows)))
    if (repeated := len(rows) - len(counts)) > 0:
        yield f"{repeated} of {len(rows)} {noun} of --{data} are there before: they count as often"
    positions = range(len(rows)) if held_out else ()
    prompts = {row_of(rows, position, rows.prompt_ids_of(position)) for position in positions}
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
    prompt = examples_of(rows, 0)[0].prompt
    template = rows.template
    tokenizer = rows.tokenizer
    if prompt.messages is None:
        return
    chat = prompt.messages
    marks_of_messages = {
        mark for message in chat for mark in _MARK.findall(message["content"] or "")
    }
    if foreign := sorted(
        set(_MARK.findall(prompt.text)) - marks_of_messages - set(tokenizer.get_vocab())
    ):
        yield f"the chat template writes {foreign[0]!r}, no token of this tokenizer: is it another model's template?"
    prompt_text = template.chat_text(chat, add_generation_prompt=chat[-1]["role"] != "assistant")
    if chat[-1]["role"] != "assistant" and prompt_text == template.chat_text(chat):
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
        first_token = tokenizer.decode(ids[:1])
        stop = tail if tokenizer.decode(ids[:1], skip_special_tokens=True) else first_token
        yield f"{ends}: --stop {stop!r}, or the right eos_token in tokenizer_config.json"


# -- scores ----------------------------------------------------------------------------------------------------------


def _scores(config: PPOConfig, prompts: Any, source: RewardSource) -> Iterator[str]:
    """Yield the labels themselves and nonsense as answers: the ones should score higher, in the time there is."""
    answers_by_prompt = [
        _made_up(prompts.tokenizer, prompts[position]) for position in range(min(8, len(prompts)))
    ]
    everything = [rollout for right, wrong in answers_by_prompt for rollout in (*right, *wrong)]
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
    if (step_seconds := seconds * samples) > _LONGEST_STEP:
        yield (
            f"{source.name} took {seconds:.2g} s for one sample; one after the other, the {samples} of a step would "
            f"take {step_seconds / 60:.0f} minutes: make it faster, or --async_rewards, or --reward_manager prime"
        )
    scored = [rollout for rollout in everything if rollout.reward is not None]
    labelled = [both for both in answers_by_prompt if both[0] and everything]
    if labelled and len({rollout.reward for rollout in scored}) == 1:
        yield (
            f"{source.name} gave {scored[0].reward:g} to all of {len(scored)} made-up answers, right and wrong: does "
            "it read the answer, and in the form in which models give it?"
        )
    elif labelled and not any(map(_separates, labelled)):
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
    value = label[0] if isinstance(label, (list, tuple)) and label else label
    text = str(value).strip() if isinstance(value, (str, int, float)) else ""
    try:
        return "" if isinstance(json.loads(text), dict) else text
    except (ValueError, RecursionError):
        return text


def _separates(answers: tuple[Sequence[Rollout], Sequence[Rollout]]) -> bool:
    right, wrong = (
        [rollout.reward for rollout in rollouts if rollout.reward is not None]
        for rollouts in answers
    )
    return bool(right) and (not wrong or max(right) > max(wrong))
