"""What a dry run looks at beside its one step: prompts as the model reads them, labels, scores of made-up answers.

What is found here may be meant: each line says where it is, what it does and what to set. What is certain is refused.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as OutOfTime
from pathlib import Path
from typing import Any

from lightppo.config import PPOConfig
from lightppo.data.datasets import PromptDataset
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import ConfigError, RewardError
from lightppo.ranks import Ranks
from lightppo.rewards.source import NoReward, RewardSource, in_daemon_thread, score_rollouts
from lightppo.rollout.sampling import end_of_text_ids
from lightppo.storage import stage_to_local

_ROWS = 1000  # prompts that are looked at
_FEWEST_SCORES = 4  # of which it says something that all are equal
_LONGEST_SCORE, _LONGEST_STEP = 15.0, 60.0  # seconds: of one sample, of the rewards of a step
_RIGHT = ("{}", "The answer is {}", "#### {}", "\\boxed{{{}}}", "<think>\nso\n</think>\n<answer>{}</answer>")
_WRONG = ("", "I do not know.")


def rehearse(
    config: PPOConfig, prompts: PromptDataset, held_out: PromptDataset | None, source: RewardSource | None, ranks: Ranks
) -> None:
    """Print what to look at. Collective: rank 0 scores.

    Args:
        config: as asked for, resolved.
        source: ``None``: reward models, which score answers of their own; without rewards there is nothing to say.
    """
    for line in (*_settings(config, prompts), *_rows(prompts), *_chats(config, prompts), *_repeated(prompts, held_out)):
        ranks.print(f"look at this: {line}")
    if source is not None and not isinstance(source, NoReward):
        found = list(_scores(config, prompts, source)) if ranks.is_rank_0() else []
        for line in found:
            ranks.print(f"look at this: {line}")
        ranks.barrier()


def after_step(config: PPOConfig) -> Iterator[str]:
    """What the scores of the step tell; of rank 0."""
    rows = map(json.loads, Path(config.checkpoint.save_path, "metrics.jsonl").read_text().splitlines())
    row = next((row for row in rows if row.get("rollout/samples", 0) >= _FEWEST_SCORES), {})
    if row.get("rollout/reward_std") == 0:
        yield (
            f"look at this: all {row['rollout/samples']:g} scores of the step are {row['rollout/reward']:g}, which "
            "teaches nothing: take easier prompts or a reward with steps between"
        )


# -- options and rows ------------------------------------------------------------------------------------------------


def _settings(config: PPOConfig, prompts: PromptDataset) -> Iterator[str]:
    rate, size, report = config.training.actor_learning_rate, config.rollout.rollout_batch_size, prompts.report
    if rate > 1e-4 and config.adapter.lora_rank == 0:
        yield f"--actor_learning_rate {rate:g}: models of some size are trained with 1e-7 to 1e-5, adapters up to 1e-3"
    if len(prompts) < size:
        yield f"--rollout_batch_size {size} is more than the {len(prompts)} prompts: every step has all of them"
    if report.truncated:
        cut = f"{report.truncated} of {report.kept} prompts are cut to --prompt_max_len {config.data.prompt_max_len}"
        yield f"{cut}: is the question still there (--truncation {config.data.truncation})? Else raise it, or drop"
    for text in config.rollout.stop:
        ids = prompts.tokenizer(text, add_special_tokens=False)["input_ids"]
        if "\\n" in text:
            yield f"--stop {text!r} has a backslash and an n, not a line break: in bash write $'\\n'"
        elif prompts.tokenizer.unk_token_id is not None and prompts.tokenizer.unk_token_id in ids:
            yield f"--stop {text!r}: the tokenizer cannot write it, so it ends no answer"


def _rows(prompts: PromptDataset) -> Iterator[str]:
    """Each kind of mistake with its number of rows and the first of them."""
    some, tokenizer = prompts.__getitems__(list(range(min(_ROWS, len(prompts))))), prompts.tokenizer
    bos, eos, unknown = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id
    marks = [token for token in tokenizer.all_special_tokens if token != tokenizer.unk_token]
    labels = Counter(type(p.label).__name__ for p in some if p.label is not None)
    usual = labels.most_common(1)[0][0] if labels else None

    def in_chat(p: Prompt) -> bool:
        return any(mark in (message["content"] or "") for message in p.messages or () for mark in marks)

    found = {
        "begin with two begin-of-text tokens": (lambda p: bos is not None and p.token_ids[:2] == [bos, bos],
            "leave it out of the rows, or of the chat template"),
        "hold special tokens inside a message": (in_chat, "was a chat template applied before? Give the bare text"),
        "end with end-of-text": (lambda p: p.token_ids[-1] == eos, "the answer comes after the end: leave it out"),
        "end with a blank": (lambda p: p.messages is None and p.text.endswith(" "),
            "words begin with their blank, so answers get odd tokens: cut it off the rows or --input_template"),
        "have tokens that the tokenizer does not know": (lambda p: unknown is not None and unknown in p.token_ids,
            "do the data and the tokenizer of --pretrain belong together?"),
        "have no label": (lambda p: usual is not None and p.label is None,
            "others have one: fill them, or leave the rows out"),
        f"have a label that is not {usual} as most are": (lambda p: type(p.label).__name__ not in (usual, "NoneType"),
            "'8' == 8 is false in Python: write all in one type"),
    }  # fmt: skip
    for what, (is_so, cure) in found.items():
        if at := [position for position, prompt in enumerate(some) if is_so(prompt)]:
            shown = some[at[0]].text[-40:]
            yield f"{len(at)} of {len(some)} prompts {what}, first {prompts.origin(at[0])} (…{shown!r}): {cure}"


def _repeated(prompts: PromptDataset, held_out: PromptDataset | None) -> Iterator[str]:
    ids = Counter(tuple(prompts.ids_of(position)) for position in range(len(prompts)))
    if (more := len(prompts) - len(ids)) > 0:
        yield f"{more} of {len(prompts)} prompts of --prompt_data are there before: they count as often"
    both = [at for at in range(len(held_out or ())) if tuple(held_out.ids_of(at)) in ids]
    if both:
        which = f"{len(both)} of {len(held_out)} prompts of --eval_data are in --prompt_data too"
        yield f"{which}, first {held_out.origin(both[0])}: evaluations measure what was learned by heart; remove them"


# -- chat templates --------------------------------------------------------------------------------------------------


def _chats(config: PPOConfig, prompts: PromptDataset) -> Iterator[str]:
    first, template, r = prompts[0], prompts.template, config.rollout
    if first.messages is None:
        return
    if not prompts.report.truncated:
        system = [m["content"] for m in first.messages if m["role"] == "system"] or [config.data.system_prompt or ""]
        if system[0].strip() not in first.text:
            name = "--system_prompt" if config.data.system_prompt else f"the system message of {prompts.origin(0)}"
            raise ConfigError(f"{name}: the chat template drops it; put it into the user's message, or use another")
    chat = first.messages
    asked = template.chat_text(chat, add_generation_prompt=chat[-1]["role"] != "assistant")
    if chat[-1]["role"] != "assistant" and asked == template.chat_text(chat):
        yield "the chat template has no generation prompt: the model has to write the assistant's header itself"
    mark = "answer 7"
    tail = template.chat_text([*chat, {"role": "assistant", "content": mark}]).rpartition(mark)[2].strip()
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(stage_to_local(config.model.pretrain))
    except OSError:  # a model may have none
        generation = None
    stops = {*end_of_text_ids(prompts.tokenizer, generation), *r.stop_token_ids}
    ids = prompts.tokenizer(tail, add_special_tokens=False)["input_ids"]
    if tail and not stops & set(ids) and not any(stop in tail for stop in r.stop):
        ends = f"the chat template ends an answer with {tail!r}, at which sampling goes on"
        yield f"{ends}: --stop {tail!r}, or the right eos_token in tokenizer_config.json"


# -- scores ----------------------------------------------------------------------------------------------------------


def _scores(config: PPOConfig, prompts: PromptDataset, source: RewardSource) -> Iterator[str]:
    """The labels themselves and nonsense as answers: the ones should score higher, in the time there is."""
    some = prompts.__getitems__(list(range(min(8, len(prompts)))))
    made = [_made_up(prompts.tokenizer, prompt) for prompt in some]
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
        everything, seconds = [], _LONGEST_SCORE
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
    if len({rollout.reward for rollout in scored}) == 1:
        yield (
            f"{source.name} gave {scored[0].reward:g} to all of {len(scored)} made-up answers, right and wrong: does "
            "it read the answer, and in the form in which models give it?"
        )
    elif (labelled := [both for both in made if both[0] and everything]) and not any(map(_tells, labelled)):
        right = max(labelled[0][0], key=lambda rollout: rollout.reward or 0)
        yield (
            f"{source.name} scores labels as answers no higher than {_WRONG[0]!r} and {_WRONG[1]!r}, such as "
            f"{right.response_text!r} with {right.reward}: does it find the answer, and --label_key name the column?"
        )


def _made_up(tokenizer: Any, prompt: Prompt) -> tuple[list[Rollout], list[Rollout]]:
    """Answers with the label in usual forms, where it is short, and without it."""

    def rollout(number: int, text: str) -> Rollout:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return Rollout(prompt, number, [*ids, tokenizer.eos_token_id], text, "stop")

    is_short = isinstance(prompt.label, (str, int, float)) and 0 < len(str(prompt.label)) <= 100
    texts = [form.format(prompt.label) for form in _RIGHT] if is_short else []
    right = [rollout(number, text) for number, text in enumerate(texts)]
    return right, [rollout(number, text) for number, text in enumerate(_WRONG, start=len(right))]


def _tells(answers: tuple[Sequence[Rollout], Sequence[Rollout]]) -> bool:
    right, wrong = ([r.reward for r in part if r.reward is not None] for part in answers)
    return bool(right) and (not wrong or max(right) > max(wrong))
