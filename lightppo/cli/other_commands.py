"""What a command line, a shell script or a YAML file of another trainer says: the program, its options, the ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightppo.config.cli import dotted
from lightppo.errors import ConfigError


class Program(NamedTuple):
    """A program of another trainer."""

    trainer: str  # the first word of titles in other_trainers.txt
    command: str  # ours that trains so
    called: str  # pattern of its name on a command line
    marks: str  # pattern of options that it alone has
    means: Mapping[str, Any] = {}  # our options that it alone asks for


# What a command does not say: by trainer, an option without which to say it, and the text.
REMARKS = {
    "TRL": (
        "apply_chat_template",
        "TRL renders chats by itself: add --apply_chat_template if a row holds messages.",
    ),
    "verl": (
        "reward_fn",
        'verl has scores by data_source: --reward_routes \'{"openai/gsm8k": {"math": 1}}\' names one for each.',
    ),
}

_CHATS = {"apply_chat_template": True}  # it renders every prompt by the tokenizer's template

# By the names that --from takes. Where several fit, the first one counts.
PROGRAMS = {
    "trl-grpo": Program(
        "TRL",
        "ppo",
        r"trl grpo\b|\bgrpo\w*\.py",
        "num_generations|scale_rewards|reward_funcs|num_iterations",
        {"advantage_estimator": "grpo"},
    ),
    "trl-rloo": Program(
        "TRL",
        "ppo",
        r"trl rloo\b|\brloo\w*\.py",
        "rloo_k|normalize_advantages",
        {"advantage_estimator": "rloo"},
    ),
    "trl-dpo": Program(
        "TRL", "dpo", r"trl dpo\b|\bdpo\w*\.py", "precompute_ref_log_probs|f_divergence_type"
    ),
    "trl-reward": Program(
        "TRL", "rm", r"trl reward\b|\breward(_modeling)?\.py", "center_rewards_coefficient"
    ),
    "trl-sft": Program(
        "TRL",
        "sft",
        r"trl sft\b|\bsft\w*\.py",
        "packing|completion_only_loss|assistant_only_loss|dataset_text_field",
    ),
    "verl-sft": Program(
        "verl",
        "sft",
        r"verl\.trainer\.\w*sft\w*",
        r"data\.(messages_key|pad_mode|response_key)",
        _CHATS,
    ),
    "verl": Program(
        "verl",
        "ppo",
        r"verl\.trainer\.main_ppo|\bmain_dapo\b",
        r"actor_rollout_ref\..*|algorithm\.adv_estimator",
        _CHATS,
    ),
    "openrlhf-sft": Program(
        "OpenRLHF",
        "sft",
        r"openrlhf\.cli\.train_sft\b|\btrain_sft\.py",
        r"data\.multiturn|(model\.)?pretrain_mode(_enable)?",
    ),
    "openrlhf-rm": Program(
        "OpenRLHF",
        "rm",
        r"openrlhf\.cli\.train_rm\b|\btrain_rm\.py",
        r"model\.margin_loss_enable|(model\.)?compute_fp32_loss(_enable)?",
    ),
    "openrlhf-dpo": Program(
        "OpenRLHF",
        "dpo",
        r"openrlhf\.cli\.train_dpo\b|\btrain_dpo\.py",
        r"model\.(ipo_enable|beta)|ipo",
    ),
    "slime": Program(
        "slime",
        "ppo",
        r"\bslime\b.*\btrain(_async)?\.py",
        "hf_checkpoint|rollout_max_response_len|num_rollout",
    ),
    "lightrft": Program(
        "LightRFT",
        "ppo",
        r"\btrain_colocate\.py",
        "engine_(type|tp_size|mem_util)|advantages_norm",
    ),
    "openrlhf": Program(
        "OpenRLHF",
        "ppo",
        r"openrlhf\.cli\.train_ppo\w*|\btrain_ppo(_ray)?\.py",
        r"algo\.(advantage|kl)\..*|rollout\.n_samples_per_prompt|vllm_num_engines|actor_num_nodes"
        r"|(actor|critic)\.(model_name_or_path|adam\..*|num_nodes)",
    ),
    "areal": Program(
        "AReaL",
        "ppo",
        r"\b(gsm8k|boba|countdown)_(rl|grpo|ppo)\.py",
        r"gconfig\..*|actor\.(kl_ctl|eps_clip|ppo_n_minibatches)|ppo\..*",
        _CHATS,
    ),
    "areal-dpo": Program(
        "AReaL", "dpo", r"\bhhrlhf_dpo\.py", r"train_dataset\.type=dpo|actor\.beta", _CHATS
    ),
    "areal-rm": Program("AReaL", "rm", r"\bhhrlhf_rw\.py", r"train_dataset\.type=rw", _CHATS),
    "areal-sft": Program("AReaL", "sft", r"\bgsm8k_sft\.py", r"train_dataset\.type=sft", _CHATS),
}


@dataclass
class OtherCommand:
    """The options of a program of another trainer, by their own names."""

    program: str
    values: dict[str, Any]
    ranks: int = 1  # of the launcher
    nodes: int = 1
    notes: list[str] = field(default_factory=list)


def read(text: str, program: str | None = None) -> OtherCommand:
    """Read a command line, or the file of this name: YAML, or a script.

    Raises:
        ConfigError: it names no program that lightppo knows, and no options that one alone has.
    """
    file_path = Path(text)
    if len(text) < 4096 and file_path.suffix and not re.search(r"\s", text):
        content = _content(file_path)
        if file_path.suffix in (".yaml", ".yml"):
            values = file_values(file_path)
            if program_name := program or _program_by_marks(values):
                return OtherCommand(program_name, values)
            raise ConfigError(_unknown(text))
        text = content
    commands = [_read_command(words, program) for words in commands_of(text)]
    if not any(command.program for command, _ in commands):
        raise ConfigError(_unknown(text))

    def certainty(candidate: tuple[OtherCommand, bool]) -> tuple[bool, bool, int]:
        command, is_named = candidate
        return is_named, bool(command.program), len(command.values)

    return max(commands, key=certainty)[0]


def _read_command(words: Sequence[str], program: str | None) -> tuple[OtherCommand, bool]:
    """Return a command; and whether it names the program, in place of options that one alone has."""
    command_line = " ".join(words)
    named_programs = [name for name in PROGRAMS if re.search(PROGRAMS[name].called, command_line)]
    start = _first_argument(words, PROGRAMS[named_programs[0]].called if named_programs else "")
    command = OtherCommand("", {})
    _read_launcher(words[:start], command)
    _read_arguments(words[start:], command)
    command.program = program or "".join(named_programs[:1]) or _program_by_marks(command.values)
    return command, bool(named_programs)


def _first_argument(words: Sequence[str], called: str) -> int:
    """Return where the options of the program begin: behind its name, else behind the last script."""
    for position in range(len(words), 0, -1):
        if called and re.search(f"({called})$", " ".join(words[max(0, position - 2) : position])):
            return position
    scripts = [number for number, word in enumerate(words, 1) if word.endswith(".py")]
    return max(scripts, default=0)


def _program_by_marks(values: Mapping[str, Any]) -> str:
    """Return the program that alone has one of these options, or values; an empty text if there is none."""
    option_texts = [*values, *(f"{name}={value}" for name, value in values.items())]
    for name, program in PROGRAMS.items():
        if any(re.fullmatch(program.marks, option_text) for option_text in option_texts):
            return name
    return ""


def _unknown(text: str) -> str:
    single_line = " ".join(text.split())
    if re.match(r"(python\S* -m )?lightppo\b", single_line):
        return f"{single_line[:57]!r} is a command of lightppo: there is nothing to translate"
    if len(single_line) >= 60:
        single_line = f"{single_line[:57]}..."
    return f"{single_line!r} names no program that lightppo knows: say which it is by --from, one of {', '.join(PROGRAMS)}"


# -- the words of a script -------------------------------------------------------------------------------------------


def commands_of(script: str) -> Iterator[list[str]]:
    """Yield the words of each command, with the script's own variables and arrays in place; others stay as written."""
    inserted: list[str] = []  # what the shell would run and put there

    def placeholder(match: re.Match[str]) -> str:
        inserted.append(match[0])
        return f"\0{len(inserted) - 1}\0"

    script = re.sub(r"(?m)^\s*#.*$|\d?>&\d", "", script)
    script = re.sub(r"\$\([^()]*\)|`[^`]*`", placeholder, script)
    script = re.sub(r"(?m)(?<=\s)#[^'\"\n]*$", "", re.sub(r"\\\r?\n", " ", script))
    variables: dict[str, list[str]] = {}

    def define_array(match: re.Match[str]) -> str:
        variables.setdefault(match[1], []).extend(_split(match[2].replace("\n", " ")))
        return ""

    script = re.sub(r"(?ms)^[ \t]*(\w+)\+?=\((.*?)\)[ \t]*$", define_array, script)
    for is_end, word_group in groupby(
        _split(script), lambda shell_word: not shell_word.strip(";&|\n")
    ):
        words = [] if is_end else list(word_group)
        words = words[words[:1] in (["export"], ["exec"]) :]
        while words and (assigned := re.fullmatch(r"(?s)([A-Za-z_]\w*)=(.*)", words[0])):
            variables[assigned[1]] = _expanded(assigned[2], variables)
            words = words[1:]
        words = _without_files(
            [part for shell_word in words for part in _expanded(shell_word, variables)]
        )
        words = [
            re.sub(r"\0(\d+)\0", lambda match: inserted[int(match[1])], shell_word)
            for shell_word in words
        ]
        if words:
            yield words


def _without_files(words: Sequence[str]) -> Iterator[str]:
    """Yield the words without ``> file``."""
    for previous, shell_word in zip(["", *words], words):
        if not re.match(r"\d?[<>]", shell_word) and not re.fullmatch(r"\d?[<>]+", previous):
            yield shell_word


def _split(text: str) -> list[str]:
    shell_lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    shell_lexer.whitespace = " \t\r"
    shell_lexer.whitespace_split = True
    shell_lexer.commenters = ""
    try:
        return list(shell_lexer)
    except ValueError as error:
        raise ConfigError(f"the command cannot be read: {error}") from error


def _expanded(word: str, variables: Mapping[str, list[str]]) -> list[str]:
    """Return a word with the variables that are known; an array alone is all of its words."""
    array_match = re.fullmatch(r"\$\{?(\w+)(\[[@*]\])?\}?", word)
    if array_match and array_match[1] in variables:
        return [part for item in variables[array_match[1]] for part in _expanded(item, variables)]

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in variables:
            return " ".join(variables[name])
        return match[2] or match[0]  # its default

    return [re.sub(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)", value, word)]


# -- options ---------------------------------------------------------------------------------------------------------

_RANKS = {"num_processes", "nproc_per_node", "num_gpus", "nproc"}


def _read_launcher(words: Sequence[str], command: OtherCommand) -> None:
    """Read the number of ranks that torchrun, accelerate or deepspeed start."""
    launcher_text = re.sub(r"(--[\w-]+)[= ]", r"\1 ", " ".join(words)).replace("-", "_")
    counts = {
        option_name: int(count)
        for option_name, count in re.findall(r"__(\w+) (\d+)", launcher_text)
    }
    command.ranks = next(
        (counts[option_name] for option_name in _RANKS if option_name in counts), 1
    )
    node_options = ("nnodes", "num_nodes", "num_machines")
    command.nodes = next(
        (counts[option_name] for option_name in node_options if option_name in counts), 1
    )
    if "num_processes" not in counts:  # on each node
        command.ranks *= command.nodes


def _read_arguments(words: Sequence[str], command: OtherCommand) -> None:
    """Read ``--name value``, ``--name a b``, ``--name=value``, ``--name``, ``name=value`` and files of ``--config``."""
    name = ""  # of the option to which a value belongs
    values: dict[str, Any] = {}
    for argument in words:
        option = re.fullmatch(r"(?s)--?([A-Za-z][\w.-]*)(?:=(.*))?", argument)
        override = re.fullmatch(r"(?s)[+~]{0,2}([A-Za-z_][\w.@/]*)=(.*)", argument)
        if argument in ("--", "$@", "${@}"):
            continue
        if option:
            name = option[1].replace("-", "_")
            values[name] = True
            if option[2] is not None:
                values[name] = option[2]
                name = ""
        elif re.fullmatch(r"\$\{\w+\[[@*]\]\}", argument):
            command.notes.append(f"{argument} is set elsewhere: its options are missing here")
        elif override and not (name and values[name] is True and "." not in override[1]):
            values[override[1]] = override[2]
            name = ""
        elif not name:
            command.notes.append(f"{argument!r} is no option: it was left out")
        elif values[name] is True:
            values[name] = argument
        elif isinstance(values[name], list):
            values[name].append(argument)
        else:
            values[name] = [values[name], argument]
    for config_key in ("config", "config_file"):
        if isinstance(config_path := values.get(config_key), str) and config_path.endswith(
            (".yaml", ".yml")
        ):
            del values[config_key]
            try:
                values = file_values(Path(config_path)) | values
            except ConfigError as error:
                command.notes.append(f"{error}: its options are missing here")
    command.values = values


def file_values(yaml_path: Path) -> dict[str, Any]:
    """Return the options of a YAML file, nested keys with dots between, and ``${other.key}`` in place."""
    try:
        values = yaml.safe_load(_content(yaml_path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{yaml_path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{yaml_path} holds no options: it must be a mapping")
    options = dotted(values)
    for _ in range(5):  # a reference to a reference
        options = {option_name: _resolved(value, options) for option_name, value in options.items()}
    return options


def _content(file_path: Path) -> str:
    try:
        return file_path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{file_path} cannot be read: {reason}") from error


def _resolved(reference_text: Any, options: Mapping[str, Any]) -> Any:
    reference = re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+)(?:, *(.*))?\}", str(reference_text))
    if reference is None:
        return reference_text
    return options.get(reference[1], reference_text if reference[2] is None else reference[2])
