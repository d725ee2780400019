"""``lightppo convert``: a checkpoint or a GGUF file → a Hugging Face folder. ``lightppo merge``: an adapter and its base.

Both take one process and no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightppo.checkpoint import layout
from lightppo.config.cli import CommandParser, exit_on_mistakes
from lightppo.data.folders import check_model, file_problem, is_gguf, mistyped_path
from lightppo.errors import CheckpointError, ConfigError, ModelLoadError, UserError
from lightppo.files import check_writable
from lightppo.logging.report_page import options_of, recorded_path
from lightppo.logging.run_paths import check_output
from lightppo.redaction import plain

_BASE_KEY = "base_model_name_or_path"  # of an adapter's config
PARTS = ("actor", "critic", "ema", "reference")


def convert(arguments: Sequence[str], program: str = "lightppo convert") -> None:
    """Write a model of a checkpoint; exit code 2 if there is no such checkpoint, or if it is damaged."""
    parser = CommandParser(
        program, description="Write a model of a training checkpoint (ZeRO 0 to 3, any number of ranks) as a Hugging Face "
        "folder with its tokenizer. LoRA is merged; the folder also holds the adapter. A GGUF file becomes such a folder "
        "too, in float32. Needs one process and no GPU."
    )  # fmt: skip
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="--save_path or --ckpt_path of a run, or "
                        "the folder of one checkpoint, such as CKPT_PATH/_actor/global_step20, or a .gguf file")  # fmt: skip
    parser.add_argument("output", metavar="OUT", type=Path, help="new folder")
    parser.add_argument(
        "--step", type=int, help="step of the checkpoint, if CHECKPOINT is a run; default: the last"
    )
    parser.add_argument(
        "--part",
        choices=PARTS,
        default="actor",
        help="model, if CHECKPOINT is a run; default: actor",
    )
    add_base(parser, "initial model of training, for config and tokenizer, with LoRA also for weights; "
             "default: the one that the checkpoint names, if it is no URL")  # fmt: skip
    add_override(parser)
    options = parser.parse_args(arguments)
    path = Path(options.checkpoint).expanduser()
    with exit_on_mistakes(program, UserError):  # before anything heavy is imported
        if is_gguf(path):
            _check_gguf(path, options)
        elif "://" not in options.checkpoint and not path.is_dir():
            raise _no_such_run(options.checkpoint)

    if is_gguf(path):
        _write(options.output, lambda: open_gguf(path), program)
        return

    def model_and_tokenizer() -> tuple[Any, Any]:
        from lightppo.files import stage_to_local

        run_folder = Path(stage_to_local(options.checkpoint)).expanduser()
        folder = find_checkpoint(run_folder, options.part, options.step)
        base_model = options.base or checkpoint_state(folder).get("config", {}).get(
            _base_option(folder)
        )
        check_output(options.output, {"CHECKPOINT": str(folder), "--base": base_model})
        print(plain(f"reading {folder}; base: {base_model}"), flush=True)
        return open_checkpoint(folder, BaseOptions.of(options))

    _write(options.output, model_and_tokenizer, program)


def merge(arguments: Sequence[str], program: str = "lightppo merge") -> None:
    """Merge an adapter into its base; exit code 2 if the adapter does not fit."""
    parser = CommandParser(
        program, description="Merge a LoRA adapter into its base model and write a Hugging Face folder with tokenizer "
        "and generation config. Weights keep their type; they are added in float32."
    )  # fmt: skip
    parser.add_argument(
        "adapter", metavar="ADAPTER", type=Path, help="folder with adapter_config.json"
    )
    parser.add_argument("output", metavar="OUT", type=Path, help="new folder")
    add_base(parser, "dense base model; default: the one that the adapter's config names")
    options = parser.parse_args(arguments)
    adapter = options.adapter
    with exit_on_mistakes(program, UserError):  # before anything heavy is imported
        _check_adapter(adapter)
        if options.base is not None:
            check_model(options.base, "--base")

    def model_and_tokenizer() -> tuple[Any, Any]:
        settings = json.loads((adapter / "adapter_config.json").read_text())
        base_model = options.base or settings.get(_BASE_KEY)
        check_output(options.output, {"ADAPTER": str(adapter), "--base": base_model})
        run_folder = adapter.absolute().parent
        if options_of(run_folder).get("load_in_4bit"):
            note = "trained beside weights in 4 bits: merged into the dense ones it is not quite the trained model"
            print(f"note: this adapter was {note}, which {run_folder} is", flush=True)
        model, tokenizer = open_adapter(adapter, BaseOptions.of(options))
        if model.untrainable is not None:  # it may lack a tower
            raise ModelLoadError(model.untrainable)
        return model, tokenizer

    _write(options.output, model_and_tokenizer, program)


def _check_adapter(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        return
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder{mistyped_path(str(folder))}. Name the folder of an adapter"
        )
    remedy = "it is no folder of an adapter"
    if adapters := sorted(
        str(config_path.parent) for config_path in folder.glob("**/adapter_config.json")
    ):
        remedy = f"name {' or '.join(adapters[:3])}"
    raise ConfigError(f"{folder} has no adapter_config.json: {remedy}")


@dataclass(frozen=True)
class BaseOptions:
    """What the command line says of the model that a checkpoint or an adapter belongs to.

    A checkpoint may be somebody else's: what can run code is taken from here alone.
    """

    base: str | None = None
    trust_remote_code: bool = False
    external_lib: str | None = None
    override_config: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> BaseOptions:
        """Return what options of :func:`add_base` and :func:`add_override` say."""
        names = [field.name for field in fields(cls) if hasattr(options, field.name)]
        return cls(**{name: getattr(options, name) for name in names})

    @property
    def loading(self) -> dict[str, Any]:
        """Return options of :class:`lightppo.models.pretrained.LoadOptions`."""
        return {"trust_remote_code": self.trust_remote_code, "external_lib": self.external_lib}


def add_base(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add the options of what a checkpoint or an adapter belongs to."""
    parser.add_argument("--base", metavar="MODEL", help=meaning)
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run Python code that comes with the base"
    )
    parser.add_argument(
        "--external_lib",
        metavar="MODULE",
        help="Python module to import before the model; default: none",
    )


def add_override(parser: argparse.ArgumentParser) -> None:
    """Add the option of a base whose config the run has changed."""
    parser.add_argument("--override_config", metavar="JSON", type=_json_object,
                        help="changes of the base's config, as in the run; default: none")  # fmt: skip


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _write(output: Path, read_model: Callable[[], tuple[Any, Any]], program: str) -> None:
    with exit_on_mistakes(program, UserError):
        check_writable(output, "OUT")
        if output.exists() and any(output.iterdir()):
            raise ConfigError(f"{output} is there already: name a new folder")

        from lightppo.checkpoint.export import save_model
        from lightppo.ranks import Alone

        save_model(Alone(), *read_model(), output)
        total_bytes = sum(
            file_path.stat().st_size for file_path in output.rglob("*") if file_path.is_file()
        )
        print(f"{output}: {total_bytes / 1e6:,.1f} MB")


def _no_such_run(run_path: str) -> CheckpointError:
    return CheckpointError(
        f"{run_path}: no such folder{mistyped_path(run_path)}. Name the --save_path of a run"
    )


# -- GGUF files ------------------------------------------------------------------------------------------------------


def _check_gguf(path: Path, options: argparse.Namespace) -> None:
    """Refuse a file that cannot be read, and options that only checkpoints have; torch is not needed."""
    from importlib.util import find_spec

    checkpoint_only = {
        "--step": options.step,
        "--part": None if options.part == "actor" else options.part,
        "--base": options.base,
        "--override_config": options.override_config,
    }
    if given := [flag for flag, value in checkpoint_only.items() if value is not None]:
        raise ConfigError(f"{path} is a GGUF file: leave {' and '.join(given)} out")
    if problem := file_problem(path):
        raise ModelLoadError(f"{path} {problem}")
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelLoadError(f"{path} is no GGUF file: download it again")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name, re.IGNORECASE):
        raise ModelLoadError(
            f"{path} is a part of a model: join the parts with llama.cpp's `llama-gguf-split --merge` first"
        )
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ModelLoadError(
            f"{path}: reading GGUF files needs {' and '.join(missing)}: pip install 'lightppo[gguf]'"
        )


def open_gguf(path: Path) -> tuple[Any, Any]:
    """Return a GGUF file's causal LM in float32, and its tokenizer with the chat template."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.initialization import no_init_weights

    from lightppo.models.loading import check_loaded, fit_to_model, quiet
    from lightppo.models.pretrained import errors_name

    print(plain(f"reading {path}"), flush=True)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with errors_name(str(path), "CHECKPOINT"), quiet():
        read, loading_info = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, output_loading_info=True
        )
        check_loaded(read, loading_info, str(path), any_head=False)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    # What was read counts as quantized, and cannot be saved: its weights go into a new model, without a copy.
    vars(read.config).pop("quantization_config", None)  # older transformers have none
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    reader = GGUFReader(path)
    tokenizer = _as_in_the_file(tokenizer, reader)
    if tokenizer.eos_token_id is None:
        raise ModelLoadError(
            f"{path} names no token that ends a text (tokenizer.ggml.eos_token_id)"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    fit_to_model(tokenizer, model, str(path), "CHECKPOINT")
    for left_out in _left_out(reader, model.config, tokenizer):
        print(plain(f"note: {left_out}"), flush=True)
    return model, tokenizer


# of tokenizer.ggml.pre: texts are split as GPT-2's, or as those with each digit alone
_SPLIT_AS_GPT2 = ("gpt-2", "jais", "mpt", "olmo", "phi-2")
_SPLIT_WITH_DIGITS = ("command-r", "refact", "smollm", "starcoder")


def _as_in_the_file(tokenizer: Any, reader: Any) -> Any:
    """Return the tokenizer without a token that transformers has made up, and with the file's digits and BOS."""
    from tokenizers import Tokenizer, pre_tokenizers

    count = len(reader.get_field("tokenizer.ggml.tokens").data)
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    own_tokens = [token for token in description["added_tokens"] if token["id"] < count]
    if own_tokens != description["added_tokens"]:
        # <|endoftext|> where the file names no unknown token: its id is beyond the embedding
        backend = Tokenizer.from_str(json.dumps(description | {"added_tokens": own_tokens}))
        template = tokenizer.chat_template
        tokenizer = type(tokenizer)(tokenizer_object=backend, chat_template=template)
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        token_id = _content(reader, f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(token_id)))
    if _content(reader, "tokenizer.ggml.pre") in _SPLIT_WITH_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    if _content(reader, "tokenizer.ggml.add_bos_token") and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True
    return tokenizer


def _content(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _left_out(reader: Any, config: Any, tokenizer: Any) -> Iterator[str]:
    """Yield what the folder lacks of the model, each with what to do."""
    if not tokenizer.chat_template:
        yield "the file has no chat template, which --apply_chat_template needs"
    names = [*reader.fields, *(tensor.name for tensor in reader.tensors)]
    scaling = re.compile(r"rope\.scaling\.factor|rope_(freq|factor)s")
    scaled = [name for name in names if scaling.search(name)]
    rope = getattr(config, "rope_parameters", None) or {}
    if scaled and rope.get("rope_type", "default") == "default":
        yield (
            f"the file scales its rotary positions ({scaled[0]}), which transformers' reader leaves out: copy "
            "rope_parameters of the original model into config.json"
        )
    split = _content(reader, "tokenizer.ggml.pre")
    pre_tokenizer = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]
    is_gpt2 = (pre_tokenizer or {}).get("type") == "ByteLevel"
    if is_gpt2 and split not in (None, *_SPLIT_AS_GPT2):
        yield (
            f"the file splits texts as {split!r} does, and the folder as GPT-2 does: some texts get other tokens; copy "
            "tokenizer.json of the original model"
        )


# -- what is where ---------------------------------------------------------------------------------------------------


def find_checkpoint(path: Path, part: str = "actor", step: int | None = None) -> Path:
    """Return the folder of a model's checkpoint: ``path`` itself, or of a run with this folder the last one, or a step's."""
    if layout.is_checkpoint(path):
        return path
    checkpoint_root = recorded_path(path, "ckpt_path") or path  # of the run with this --save_path
    is_root = Path(layout.part_folder(checkpoint_root)).is_dir()
    folder = Path(layout.part_folder(checkpoint_root, part)) if is_root else checkpoint_root
    checkpoint_tags = layout.list_tags(folder) if folder.is_dir() else ()
    if folder.is_dir():
        checkpoint_tag = layout.latest_tag(folder) if step is None else layout.tag_of(step)
        if checkpoint_tag is not None and layout.is_checkpoint(folder / checkpoint_tag):
            return folder / checkpoint_tag
    if not path.is_dir():
        raise _no_such_run(str(path))
    if checkpoint_tags:
        of_step = "" if step is None else f" of step {step}"
        raise CheckpointError(
            f"{path} holds no checkpoint{of_step} of the {part}; it has {', '.join(checkpoint_tags)}"
        )
    if (path / "config.json").is_file() and not is_root:
        raise CheckpointError(
            f"{path} is a Hugging Face folder already: there is nothing to convert"
        )
    raise CheckpointError(
        f"{path} holds no checkpoint of the {part}: name the --save_path or --ckpt_path of a run that saved some "
        "(--save_steps)"
    )


def checkpoint_state(folder: Path) -> dict[str, Any]:
    """Return what a run kept in a checkpoint beside its models; empty if nothing says it."""
    from lightppo.checkpoint.engine_state import read_client_state

    # The actor's part has it, the other parts do not.
    for part_folder in (folder, layout.beside(folder)):
        if (part_folder / layout.CLIENT_STATE).is_file():
            state = read_client_state(part_folder)
            if "config" in state:
                return state
    return {}


# -- models out of them ----------------------------------------------------------------------------------------------


def open_checkpoint(folder: Path, base_options: BaseOptions) -> tuple[Any, Any]:
    """Return model (an actor or a critic) and tokenizer of a checkpoint, whose manifest is checked before."""
    from lightppo.checkpoint.damage import damage
    from lightppo.checkpoint.engine_state import read_meta
    from lightppo.checkpoint.reshape import load_weights, saved_names
    from lightppo.files import stage_to_local
    from lightppo.models.critic import ROWS_ENTRY
    from lightppo.models.loading import check_trainable, get_tokenizer
    from lightppo.ranks import Alone

    metadata = read_meta(folder)
    if problems := damage(Alone(), folder):
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems)}")
    state = checkpoint_state(folder)
    options = state.get("config", {})
    _check_repeated(folder, options, base_options)
    # Value heads of transformers' classifiers, in our wrapper. They always train.
    head_prefixes = ("model.score.", "model.classifier.")
    has_value_head = any(
        weight_name.startswith(head_prefixes) for weight_name in saved_names(folder, metadata)
    )
    base_model = base_options.base or _recorded_model(folder, options, _base_option(folder))
    if base_model is None:
        raise CheckpointError(f"{folder} does not name the model that it started from: set --base")
    tokenizer_path = (
        base_options.base or _recorded_model(folder, options, "tokenizer_path") or base_model
    )
    has_towers = False
    if not options.get("init_from_scratch"):
        has_towers = check_trainable(
            stage_to_local(base_model), flag="--base", **base_options.loading
        )
    model = _model_for(
        metadata, options, stage_to_local(base_model), has_value_head, base_options, has_towers
    )
    load_weights(model, folder, metadata)
    if has_value_head and state.get(ROWS_ENTRY):
        setattr(model.hf_model.config, ROWS_ENTRY, state[ROWS_ENTRY])
    trust = base_options.trust_remote_code
    tokenizer = get_tokenizer(
        stage_to_local(tokenizer_path), model, trust_remote_code=trust, flag="--base"
    )
    return model, tokenizer


def _check_repeated(folder: Path, options: Mapping[str, Any], base_options: BaseOptions) -> None:
    """Raise ConfigError for what the run imported or changed in the config, unless the command line repeats it."""
    missing = [
        f"--{option_name} {shlex.quote(str(options[option_name]))}"
        for option_name in ("external_lib", "override_config")
        if options.get(option_name) and getattr(base_options, option_name) is None
    ]
    if missing:
        raise ConfigError(
            f"{folder}: its run had {' '.join(missing)}, which could run somebody else's code and is not taken from a "
            "checkpoint: repeat it here if you trust it"
        )


def _base_option(folder: Path) -> str:
    """Return which option of the run names the base of a checkpoint's part."""
    if layout.part_of(folder) == "critic":
        return "critic_pretrain"
    return "pretrain"


def _recorded_model(folder: Path, options: Mapping[str, Any], name: str) -> str | None:
    """Return the folder or hub id that the options of a checkpoint name; it fetches nothing from elsewhere."""
    path = options.get(name)
    if path is not None and "://" in path:
        raise CheckpointError(
            f"{folder}: its run had --{name} {path}; a checkpoint fetches from no URL: give it by --base if you trust it"
        )
    return path


def _model_for(
    meta: Mapping[str, Any],
    options: Mapping[str, Any],
    start: str,
    has_value_head: bool,
    base_options: BaseOptions,
    has_towers: bool,
) -> Any:
    """Return a model that a checkpoint's weights fit; its own are the base's under adapters and beside towers, else of no
    meaning."""
    import torch
    from transformers.initialization import no_init_weights

    from lightppo.models.actor import Actor
    from lightppo.models.adapters.lora import LoraOptions, add_adapters
    from lightppo.models.critic import Critic

    settings = {"dtype": torch.float32, "flag": "--base", **base_options.loading}
    if meta["bf16"]:
        settings["dtype"] = torch.bfloat16
    elif meta.get("fp16"):
        settings["dtype"] = torch.float16
    settings |= {
        option_name: options[option_name]
        for option_name in ("init_from_scratch", "seed")
        if option_name in options
    }
    settings["override_config"] = base_options.override_config
    if has_value_head:
        settings["init_value_head"] = True  # the trained head is in the checkpoint
    if meta["adapters"]:
        settings["load_in_4bit"] = options.get("load_in_4bit", False)
    model_class = Critic if has_value_head else Actor
    if not meta["adapters"] and not has_towers:
        settings["init_from_scratch"] = True
        with no_init_weights():
            return model_class(start, **settings)
    model = model_class(start, **settings)
    if meta["adapters"]:
        alpha = options.get("lora_alpha") or 16.0
        targets = tuple(options.get("target_modules", ()))
        add_adapters(model, LoraOptions(options["lora_rank"], alpha, target_modules=targets))
    return model


def open_adapter(folder: Path, base_options: BaseOptions) -> tuple[Any, Any]:
    """Return merged model and tokenizer; the tokenizer is the base's if the folder has none."""
    from lightppo.models.adapters.lora import load_merged
    from lightppo.models.loading import get_tokenizer

    model = load_merged(folder, base_options.base, **base_options.loading)
    tokenizer_path = model.config.name_or_path
    if (folder / "tokenizer_config.json").is_file():
        tokenizer_path = str(folder)
    trust = base_options.trust_remote_code
    return model, get_tokenizer(tokenizer_path, model, trust_remote_code=trust, flag="--base")


def open_model(name: str, base_options: BaseOptions) -> tuple[Any, Any, dict[str, Any]]:
    """Return causal LM, tokenizer, and options of the run that it is of, out of whatever a run has left, or the hub has."""
    from lightppo.files import stage_to_local
    from lightppo.models.adapters.lora import is_adapter
    from lightppo.models.loading import get_tokenizer, load_causal_lm

    path = Path(name).expanduser()
    options = {}
    if is_adapter(path):
        return *open_adapter(path, base_options), options_of(path.absolute().parent)
    if path.is_dir() and not (path / "config.json").is_file():
        folder = find_checkpoint(path)
        # What --save_hf_ckpt wrote.
        path = layout.export_of(folder)
        options = checkpoint_state(folder).get("config", {})
        if not (path / "config.json").is_file():
            model, tokenizer = open_checkpoint(folder, base_options)
            return model.hf_model, tokenizer, options
        name = str(path)
    for option_name in ("base", "override_config"):
        if (value := getattr(base_options, option_name)) is not None:
            raise ConfigError(
                f"--{option_name} {value}: {name} is a whole model, and needs none: leave --{option_name} out"
            )
    local_path = stage_to_local(name)
    model = load_causal_lm(local_path, dtype="auto", flag="MODEL", **base_options.loading)
    trust = base_options.trust_remote_code
    tokenizer = get_tokenizer(local_path, model, flag="MODEL", trust_remote_code=trust)
    return model, tokenizer, options or options_of(path)
