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
from typing import Any, NamedTuple

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
_FEWEST_TOKENS = 16
_GUESSING = 0.95  # of the loss of a model to which all tokens are the same
_LONGEST_SCORE = 15.0  # seconds of one sample
_LONGEST_STEP = 60.0  # seconds of the rewards of a step
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
    config: OptionSet, dataset: Any, held_out: Any, reward_source: RewardSource | None, ranks: Ranks
) -> None:
    """Print what to look at. Collective: rank 0 scores.

    Args:
        config: as asked for, resolved: of PPO, or of training on data.
        dataset: prompts, or rows to learn from; ``held_out`` likewise, or ``None``.
        reward_source: ``None``: reward models, which score answers of their own; without rewards there is nothing to say.
    """
    ranks.print(plain(f"the first row, {dataset.origin(0)}"))
    for line in (*described(dataset, ids=False), lengths(dataset)):
        ranks.print(line)
    examples = [examples_of(dataset, position) for position in range(min(_ROWS, len(dataset)))]
    findings = chain(
        _settings(config, dataset),
        _prompts(dataset, examples),
        _answers(dataset, examples),
        _pairs(dataset, examples),
        _chats(config, dataset),
        _repeated(config, dataset, held_out),
    )
    for finding in findings:
        ranks.print(plain(f"look at this: {finding}"))
    if isinstance(config, PPOConfig) and "environment" in reward_sources(config):
        ranks.print(
            "--reward_source environment scores episodes, so no answers are made up to try it: see the score of the step"
        )
    elif reward_source is not None and not isinstance(reward_source, NoReward):
        if ranks.is_rank_0():
            for finding in list(_scores(config, dataset, reward_source)):
                ranks.print(plain(f"look at this: {finding}"))
        ranks.barrier()


def logged_rows(config: OptionSet) -> list[dict[str, Any]]:
    """Return the metrics that the run has written."""
    text = Path(config.checkpoint.save_path, "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def after_step(config: OptionSet, tokenizer: Any) -> Iterator[str]:
    """Yield what the numbers of the step tell; of rank 0."""
    logged = logged_rows(config)
    metrics = next(
        (metrics for metrics in logged if metrics.get("rollout/samples", 0) >= _FEWEST), {}
    )
    if metrics.get("rollout/reward_std") == 0:
        yield (
            f"look at this: all {metrics['rollout/samples']:g} scores of the step are {metrics['rollout/reward']:g}, "
            "which teaches nothing: take easier prompts or a reward with steps between"
        )
    if isinstance(config, SFTConfig) and not config.model.init_from_scratch:
        metrics = next(metrics for metrics in logged if "train/loss" in metrics)
        loss = metrics["train/loss"]
        vocabulary = len(tokenizer)
        if metrics["train/tokens"] >= _FEWEST_TOKENS and loss > _GUESSING * math.log(vocabulary):
            yield (
                f"look at this: the loss of the step, {loss:.2f}, is that of guessing among {vocabulary} tokens: do the "
                "weights of --pretrain, its tokenizer and the language of the data belong together?"
            )


# -- options and rows ------------------------------------------------------------------------------------------------


def described(dataset: Any, ids: bool = True) -> Iterator[str]:
    """Yield the first row: text and tokens, those that are trained in green, or in brackets where there are no colours."""
    fields = dataset.fields
    examples = examples_of(dataset, 0)
    is_pair = len(examples) > 1
    # Prompts for rollouts have no completion.
    names = ("prompt", "completion", "label")
    columns = {answer_name: " or ".join(getattr(fields, answer_name, ())) for answer_name in names}
    if is_pair:
        columns["chosen, rejected"] = ", ".join(fields.pair)
    descriptions = [f"{answer_name} {column}" for answer_name, column in columns.items() if column]
    yield plain("columns: " + "; ".join(descriptions))
    if is_pair and (margin := dataset[0].get("margin")) is not None:
        yield f"margin: {margin:g}"
    for answer_name, example in zip(("chosen", "rejected"), examples):
        prompt = example.prompt
        if is_pair:
            yield f"{answer_name}:"
        if not example.answer_ids:
            yield f"{_prompt_form(dataset, prompt)}; label: {prompt.label!r}; data source: {plain(prompt.data_source)}"
        spans = [(False, list(prompt.token_ids))]
        trained_tokens = zip(example.learned, example.answer_ids)
        for is_trained, span in itertools.groupby(trained_tokens, key=lambda pair: pair[0]):
            spans.append((is_trained, [token for _, token in span]))
        yield from _marked(dataset.tokenizer, [span for span in spans if span[1]], ids)
        if not example.answer_ids:
            yield f"reward functions also get: {plain(', '.join(prompt.extra)) or 'nothing else'}"


def _prompt_form(dataset: Any, prompt: Prompt) -> str:
    if prompt.messages:
        return f"prompt: chat of {len(prompt.messages)} messages by the tokenizer's chat template"
    template = dataset.template.input_template
    if template is None:
        return "prompt: text as it is"
    return f"prompt: text in --input_template {template!r}"


def _marked(
    tokenizer: Any, spans: Sequence[tuple[bool, list[int]]], show_ids: bool
) -> Iterator[str]:
    opening = "["
    closing = "]"
    if sys.stdout.isatty():
        opening = "\033[32m"
        closing = "\033[0m"

    def marked(text: Callable[[list[int]], str], separator: str) -> str:
        texts = [
            f"{opening}{text(span)}{closing}" if is_trained else text(span)
            for is_trained, span in spans
        ]
        return separator.join(texts)

    def decoded(tokens: list[int]) -> str:
        return plain(tokenizer.decode(tokens))

    def pieces(span: list[int]) -> str:
        return "|".join(decoded([token]).replace("\n", "\\n") for token in span)

    yield textwrap.indent(marked(decoded, ""), "    ")
    total = sum(len(span) for _, span in spans)
    trained = sum(len(span) for is_trained, span in spans if is_trained)
    summary = f"{total} tokens, {trained} of them trained"
    if not show_ids:
        yield summary
        return
    yield f"{summary}: {marked(pieces, '|')}"
    yield f"ids: {marked(lambda span: ' '.join(map(str, span)), ' ')}"


def lengths(dataset: Any) -> str:
    """Return tokens of the rows."""
    median, upper_limit, longest = np.percentile(
        dataset.lengths, (50, 95, 100), method="inverted_cdf"
    ).astype(int)
    return f"tokens: median {median}, 95% up to {upper_limit}, longest {longest}"


class _OptionNames(NamedTuple):
    """Options of PPO, and what they are called for training on data."""

    learning_rate: str = "learning_rate"
    batch_size: str = "train_batch_size"
    max_len: str = "max_len"
    data: str = "dataset"
    eval_data: str = "eval_dataset"
    rows: str = "rows"


def _names(config: OptionSet) -> _OptionNames:
    if not isinstance(config, PPOConfig):
        return _OptionNames()
    return _OptionNames(
        "actor_learning_rate",
        "rollout_batch_size",
        "prompt_max_len",
        "prompt_data",
        "eval_data",
        "prompts",
    )


def fewer_rows(config: OptionSet, dataset: Any) -> str | None:
    """Return what to say where a step asks for more rows than there are."""
    option_names = _names(config)
    batch_size = config.flat()[option_names.batch_size]
    if len(dataset) >= batch_size:
        return None
    return (
        f"--{option_names.batch_size} {batch_size} is more than the {len(dataset)} {option_names.rows}: every step "
        "has all of them"
    )


def _settings(config: OptionSet, dataset: Any) -> Iterator[str]:
    options = config.flat()
    report = dataset.report
    option_names = _names(config)
    learning_rate = options[option_names.learning_rate]
    usual_rate = type(config)().flat()[option_names.learning_rate]
    if learning_rate > 100 * usual_rate and config.adapter.lora_rank == 0:
        usual_range = f"{usual_rate / 10:g} to {usual_rate * 10:g}"
        yield (
            f"--{option_names.learning_rate} {learning_rate:g}: models of some size are trained with {usual_range}, "
            "adapters up to 1e-3"
        )
    if shortage := fewer_rows(config, dataset):
        yield shortage
    length_limit = f"--{option_names.max_len} {options[option_names.max_len]}"
    if report.truncated:
        consequence = "their answers never end"
        if option_names.rows == "prompts":
            consequence = "is the question still there"
        yield (
            f"{report.truncated} of {report.kept} {option_names.rows} are cut to {length_limit}: {consequence} "
            f"(--truncation {options['truncation']})? Else raise it, or drop"
        )
    if overlong := report.dropped.get("overlong"):
        yield (
            f"{overlong} of {report.rows} {option_names.rows} are longer than {length_limit}, and left out: raise "
            "it, or is that meant?"
        )
    unknown = dataset.tokenizer.unk_token_id
    for stop_text in options.get("stop", ()):
        if "\\n" in stop_text:
            yield f"--stop {stop_text!r} has a backslash and an n, not a line break: in bash write $'\\n'"
        elif unknown is not None and unknown in _tokens(dataset.tokenizer, stop_text):
            yield f"--stop {stop_text!r}: the tokenizer cannot write it, so it ends no answer"


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _marks(tokenizer: Any) -> list[str]:
    return [token for token in tokenizer.all_special_tokens if token != tokenizer.unk_token]


def _prompts(dataset: Any, examples: Sequence[Sequence[Example]]) -> Iterator[str]:
    tokenizer = dataset.tokenizer
    prompts = [row_examples[0].prompt for row_examples in examples]
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    unknown = tokenizer.unk_token_id
    marks = _marks(tokenizer)
    labels = Counter(type(prompt.label).__name__ for prompt in prompts if prompt.label is not None)
    usual_type = max(labels, key=labels.get, default=None)
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
        "have no label": (lambda row: labels and row.label is None,
            "others have one: fill them, or leave the rows out"),
        f"have a label that is not {usual_type} as most are": (
            lambda row: type(row.label).__name__ not in (usual_type, "NoneType"),
            "'8' == 8 is false in Python: write all in one type"),
    }  # fmt: skip
    prompts_by_row = [[prompt] for prompt in prompts]
    yield from _mistake_lines(
        dataset, "prompts", prompts_by_row, lambda prompt: f"…{prompt.text[-40:]!r}", mistakes
    )


def _question(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"] if prompt.messages else prompt.text


def _answers(dataset: Any, examples: Sequence[Sequence[Example]]) -> Iterator[str]:
    tokenizer = dataset.tokenizer
    unknown = tokenizer.unk_token_id
    special_tokens = _marks(tokenizer)
    mistakes = {
        "hold special tokens": (lambda row: any(mark in row.written for mark in special_tokens),
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
    trained = [[example for example in answers if example.answer_ids] for answers in examples]
    yield from _mistake_lines(
        dataset, "answers", trained, lambda example: f"{example.answer[:40]!r}…", mistakes
    )
    written_texts = {example.written for answers in trained for example in answers}
    if len(examples) >= _FEWEST and len(written_texts) == 1:
        yield f"all {len(examples)} answers are {written_texts.pop()[:40]!r}: is the right column named (--output_key)?"


def _mistake_lines(
    dataset: Any,
    kind: str,
    items_by_row: Sequence[Sequence[Any]],
    description_of: Callable[[Any], str],
    mistakes: dict[str, Any],
) -> Iterator[str]:
    """Yield each kind of mistake with its number and the first of them."""
    numbered_items = [
        (position, item)
        for position, numbered_items in enumerate(items_by_row)
        for item in numbered_items
    ]
    for description, (is_mistake, cure) in mistakes.items():
        if matches := [(position, item) for position, item in numbered_items if is_mistake(item)]:
            position, item = matches[0]
            origin = f"{dataset.origin(position)} ({description_of(item)})"
            yield f"{len(matches)} of {len(numbered_items)} {kind} {description}, first {origin}: {cure}"


def _pairs(dataset: Any, pairs: Sequence[Sequence[Example]]) -> Iterator[str]:
    """Yield what pairs teach beside what they mean to."""
    if len(pairs[0]) < 2:
        return
    positions = {
        tuple((tuple(example.prompt.token_ids), tuple(example.answer_ids)) for example in pair): i
        for i, pair in enumerate(pairs)
    }
    reversed_pairs = [
        (positions[pair[::-1]], position)
        for pair, position in positions.items()
        if positions.get(pair[::-1], position) < position
    ]
    if reversed_pairs:
        first, second = map(dataset.origin, reversed_pairs[0])
        yield (
            f"{len(reversed_pairs)} pairs are there the other way round, first {first} and {second}: which answer is "
            "better?"
        )
    longer = sum(len(chosen.answer_ids) > len(rejected.answer_ids) for chosen, rejected in pairs)
    if len(pairs) >= _FEWEST_PAIRS and longer >= _MOSTLY_LONGER * len(pairs):
        yield f"the chosen answer is the longer one in {longer} of {len(pairs)} pairs: length may be what is learned"
    margins = {dataset[i].get("margin") for i in range(len(pairs))}
    if len(pairs) >= _FEWEST and margins != {None} and len(margins) == 1:
        yield f"all margins of {len(pairs)} pairs are {margins.pop():g}: is the right column named (--margin_key)?"


def _repeated(config: OptionSet, rows: Any, held_out: Any) -> Iterator[str]:
    option_names = _names(config)
    plays = isinstance(config, PPOConfig) and config.episodes.env

    def identity(dataset: Any, position: int, ids: list[int]) -> tuple:
        """Return what makes a row another one: an environment reads its columns, too."""
        if not plays:
            return tuple(ids)
        prompt = dataset[position]
        return (*ids, json.dumps([prompt.label, prompt.extra], sort_keys=True, default=repr))

    positions = range(len(rows))
    distinct = {identity(rows, position, rows.ids_of(position)) for position in positions}
    if repeated := len(rows) - len(distinct):
        yield f"{repeated} of {len(rows)} {option_names.rows} of --{option_names.data} are there before: they count as often"
    if not held_out:
        return
    prompts = {identity(rows, position, rows.prompt_ids_of(position)) for position in positions}
    shared_positions = [
        position
        for position in range(len(held_out))
        if identity(held_out, position, held_out.prompt_ids_of(position)) in prompts
    ]
    if shared_positions:
        yield (
            f"{len(shared_positions)} of {len(held_out)} prompts of --{option_names.eval_data} are in "
            f"--{option_names.data} too, first {held_out.origin(shared_positions[0])}: evaluations measure what was "
            "learned by heart; remove them"
        )


# -- chat templates --------------------------------------------------------------------------------------------------


def _chats(config: OptionSet, dataset: Any) -> Iterator[str]:
    prompt = examples_of(dataset, 0)[0].prompt
    template = dataset.template
    tokenizer = dataset.tokenizer
    if prompt.messages is None:
        return
    chat = prompt.messages
    messages = " ".join(message["content"] or "" for message in chat)
    foreign = {*_MARK.findall(prompt.text)} - {*_MARK.findall(messages)} - {*tokenizer.get_vocab()}
    if foreign:
        yield f"the chat template writes {min(foreign)!r}, no token of this tokenizer: is it another model's template?"
    is_answered = chat[-1]["role"] == "assistant"
    if not is_answered and template.chat_text(chat) == template.chat_text(
        chat, add_generation_prompt=True
    ):
        yield "the chat template has no generation prompt: the model has to write the assistant's header itself"
    # Rows of supervised training end with end-of-text, whatever the template writes.
    if not isinstance(config, PPOConfig):
        return
    rollout = config.rollout
    marker = "answer 7"
    answered = template.chat_text([*chat, {"role": "assistant", "content": marker}])
    answer_end = answered.rpartition(marker)[2].strip()
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(stage_to_local(config.model.pretrain))
    except OSError:  # a model may have none
        generation = None
    stop_ids = {*end_of_text_ids(tokenizer, generation), *rollout.stop_token_ids}
    end_ids = _tokens(tokenizer, answer_end)
    if (
        answer_end
        and not stop_ids & set(end_ids)
        and not any(stop in answer_end for stop in rollout.stop)
    ):
        # Sampling cannot wait for a special token and text behind it.
        stop = answer_end
        if not tokenizer.decode(end_ids[:1], skip_special_tokens=True):
            stop = tokenizer.decode(end_ids[:1])
        yield (
            f"the chat template ends an answer with {answer_end!r}, at which sampling goes on: --stop {stop!r}, or "
            "the right eos_token in tokenizer_config.json"
        )


# -- scores ----------------------------------------------------------------------------------------------------------


def _scores(config: PPOConfig, prompts: Any, reward_source: RewardSource) -> Iterator[str]:
    """Yield the labels themselves and nonsense as answers: the ones should score higher, in the time there is."""
    attempts = [
        _made_up(prompts.tokenizer, prompts[position]) for position in range(min(8, len(prompts)))
    ]
    rollouts = [rollout for right, wrong in attempts for rollout in (*right, *wrong)]
    try:
        start_time = time.monotonic()
        in_daemon_thread(score_rollouts, reward_source, rollouts[:1]).result(_LONGEST_SCORE)
        if (seconds := time.monotonic() - start_time) < 1:
            start_time = time.monotonic()
            score_rollouts(reward_source, rollouts)
            seconds = (time.monotonic() - start_time) / len(rollouts)
        else:
            rollouts = []
    except OutOfTime:
        rollouts = []
        seconds = _LONGEST_SCORE
    except RewardError as error:
        yield f"the reward fails on answers that were made up for this check; the model's may be like them: {error}"
        return
    samples = config.rollout.rollout_batch_size * config.sampling.generation_size
    if (step_seconds := seconds * samples) > _LONGEST_STEP:
        yield (
            f"{reward_source.name} took {seconds:.2g} s for one sample; one after the other, the {samples} of a step "
            f"would take {step_seconds / 60:.0f} minutes: make it faster, or --async_rewards, or --reward_manager "
            "prime"
        )
    scores = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    labelled = [attempt for attempt in attempts if attempt[0] and rollouts]
    if labelled and len(set(scores)) == 1:
        yield (
            f"{reward_source.name} gave {scores[0]:g} to all of {len(scores)} made-up answers, right and wrong: does "
            "it read the answer, and in the form in which models give it?"
        )
    elif labelled and not any(_best(right) > _best(wrong) for right, wrong in labelled):
        best_answer = max(labelled[0][0], key=lambda rollout: rollout.reward or 0)
        yield (
            f"{reward_source.name} scores labels as answers no higher than {_WRONG[0]!r} and {_WRONG[1]!r}, such as "
            f"{best_answer.response_text!r} with {best_answer.reward}: does it find the answer, and --label_key name "
            "the column?"
        )


def _best(rollouts: Sequence[Rollout]) -> float:
    """Return the highest score; below all others without one."""
    scores = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return max(scores, default=-math.inf)


def _made_up(tokenizer: Any, prompt: Prompt) -> tuple[list[Rollout], list[Rollout]]:
    """Make answers with the label and without it. A long one, such as a worked solution, is an answer as it is."""
    label = _answer_of(prompt.label)
    forms = _RIGHT if len(label) <= _LONGEST_IN_FORMS else _RIGHT[:1]
    right_answers = [form.format(label) for form in forms] if label else []
    rollouts = [
        Rollout(
            prompt, number, [*_tokens(tokenizer, answer), tokenizer.eos_token_id], answer, "stop"
        )
        for number, answer in enumerate((*right_answers, *_WRONG))
    ]
    return rollouts[: len(right_answers)], rollouts[len(right_answers) :]


def _answer_of(label: Any) -> str:
    """Return the label as a text that may be an answer; empty where it is none, such as the tests of a program."""
    if isinstance(label, (list, tuple)) and label:
        label = label[0]
    if not isinstance(label, (str, int, float)):
        return ""
    text = str(label).strip()
    try:
        return "" if isinstance(json.loads(text), dict) else text
    except (ValueError, RecursionError):
        return text
