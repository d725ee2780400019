"""``--help``: one screen of the usual options of a command, or all options by section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args, get_origin

from lightppo.config.option_needs import condition_text
from lightppo.config.options import OptionSet, PPOConfig
from lightppo.option import Option, Section, choices, range_text, shown_default

# What --help shows: the options that most people set, on one screen.
_SCREEN = {
    "Run": "config save_path save_steps eval_steps use_wandb",
    "Model": "pretrain bf16 lora_rank gradient_checkpointing zero_stage",
    "Data": "prompt_data eval_data input_key label_key apply_chat_template prompt_max_len",
    "Reward (one of them)": "reward_fn reward_source reward_pretrain remote_rm_url",
    "Rollout": "rollout_engine rollout_batch_size n_samples_per_prompt generate_max_len temperature",
    "Algorithm": "advantage_estimator policy_loss init_kl_coef use_kl_loss",
    "Training": "train_batch_size micro_train_batch_size max_epochs num_episodes actor_learning_rate "
    "critic_learning_rate packing_samples",
}
_ALL = "--help all shows all options"


def help_text(prog: str, everything: bool, kind: type[OptionSet] = PPOConfig) -> str:
    """One screen of the usual options, or all of them by section with unit, range, default and what they need."""
    usage = "--pretrain MODEL --dataset FILE"
    screen = getattr(kind, "screen", {})
    what = kind.__doc__
    if kind is PPOConfig:
        usage = "--pretrain MODEL --prompt_data FILE --reward_fn FILE.py"
        screen = _SCREEN
        what = "Train a causal language model with PPO."
    lines = [f"usage: {prog} {usage} [--config FILE.yaml] [flags]"]
    if everything:
        lines += ["", f"{what} One process per GPU (or CPU rank): deepspeed, torchrun or python."]
        for section in kind.sections().values():
            lines += ["", *_section_lines(section)]
    else:
        lines += [*_screen_lines(kind, screen), f"{_ALL}, docs/flags.md their table."]
    return "\n".join(lines) + "\n"


def _screen_lines(kind: type[OptionSet], screen: Mapping[str, str]) -> Iterator[str]:
    options = {option.name: option for option in kind.all_options()}
    for title, names in screen.items():
        yield f"{title}:"
        for option in map(options.__getitem__, names.split()):
            text = option.help.partition(". ")[0].rstrip(".")
            shown = "required" if option.required else shown_default(option.default)
            is_noted = option.required or option.default not in (None, (), False)
            yield f"  --{option.name:<23} {text}{f' [{shown}]' * is_noted}"


def section_help(usage: str, section: type[Section]) -> str:
    """How a program is called, and the options of one section."""
    return "\n".join([f"usage: {usage}", "", *_section_lines(section)]) + "\n"


def _section_lines(section: type[Section]) -> Iterator[str]:
    yield section.__doc__ or ""
    for option in section.options().values():
        conditions = " and ".join(map(condition_text, option.needs))
        needs = f"needs {conditions}" if conditions else ""
        notes = "; ".join(
            filter(None, ["required" * option.required, option.unit, range_text(option), needs])
        )
        yield f"  {_spelled(option)}"
        yield f"      {option.help}{f' [{notes}]' * bool(notes)} (default: {shown_default(option.default)})"


def _spelled(option: Option) -> str:
    if option.kind is bool:
        return f"--{option.name}, --no_{option.name}"
    several = " ..." if get_origin(option.kind) is tuple else ""
    kind = get_args(option.kind)[0] if several else option.kind
    values = "|".join(map(str, choices(option)))
    return f"--{option.name} {values or _METAVARS[kind] + several}"


_METAVARS = {int: "N", float: "NUMBER", str: "TEXT"}
