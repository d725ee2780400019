"""``lightppo convert``: a checkpoint of training → a Hugging Face folder. ``lightppo merge``: an adapter and its base.

Both take one process and no GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightppo.checkpoint import layout
from lightppo.config.arguments import CommandParser
from lightppo.config.cli import exit_on_mistakes
from lightppo.data.folders import check_model, mistyped_path
from lightppo.errors import CheckpointError, ConfigError, ModelLoadError, UserError
from lightppo.files import check_writable
from lightppo.logging.report_page import options_of, recorded_path
from lightppo.logging.run_paths import check_output
from lightppo.redaction import plain

_BASE_KEY = "base_model_name_or_path"  # of an adapter's config
PARTS = ("actor", "critic", "ema", "reference")


def convert(argv: Sequence[str], prog: str = "lightppo convert") -> None:
    """Exit code 2 if there is no such checkpoint, or if it is damaged."""
    parser = CommandParser(
        prog, description="Write a model of a training checkpoint (ZeRO 0 to 3, any number of ranks) as a Hugging Face "
        "folder with its tokenizer. LoRA is merged; the folder also holds the adapter. Needs one process and no GPU."
    )  # fmt: skip
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="--save_path or --ckpt_path of a run, or "
                        "the folder of one checkpoint, such as CKPT_PATH/_actor/global_step20")  # fmt: skip
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
    args = parser.parse_args(argv)
    with exit_on_mistakes(prog, UserError):  # before anything heavy is imported
        if "://" not in args.checkpoint and not Path(args.checkpoint).expanduser().is_dir():
            raise _no_such_run(args.checkpoint)

    def model_and_tokenizer() -> tuple[Any, Any]:
        from lightppo.files import stage_to_local

        folder = find_checkpoint(
            Path(stage_to_local(args.checkpoint)).expanduser(), args.part, args.step
        )
        start = args.base or checkpoint_options(folder).get(_base_option(folder))
        check_output(args.output, {"CHECKPOINT": str(folder), "--base": start})
        print(plain(f"reading {folder}; base: {start}"), flush=True)
        return open_checkpoint(folder, Base.of(args))

    _write(args.output, model_and_tokenizer, prog)


def merge(argv: Sequence[str], prog: str = "lightppo merge") -> None:
    """Exit code 2 if the adapter does not fit."""
    parser = CommandParser(
        prog, description="Merge a LoRA adapter into its base model and write a Hugging Face folder with tokenizer "
        "and generation config. Weights keep their type; they are added in float32."
    )  # fmt: skip
    parser.add_argument(
        "adapter", metavar="ADAPTER", type=Path, help="folder with adapter_config.json"
    )
    parser.add_argument("output", metavar="OUT", type=Path, help="new folder")
    add_base(parser, "dense base model; default: the one that the adapter's config names")
    args = parser.parse_args(argv)

    with exit_on_mistakes(prog, UserError):  # before anything heavy is imported
        _check_adapter(args.adapter)
        if args.base is not None:
            check_model(args.base, "--base")

    def model_and_tokenizer() -> tuple[Any, Any]:
        start = args.base or json.loads((args.adapter / "adapter_config.json").read_text()).get(
            _BASE_KEY
        )
        check_output(args.output, {"ADAPTER": str(args.adapter), "--base": start})
        run = args.adapter.absolute().parent
        if options_of(run).get("load_in_4bit"):
            note = "trained beside weights in 4 bits: merged into the dense ones it is not quite the trained model"
            print(f"note: this adapter was {note}, which {run} is", flush=True)
        model, tokenizer = open_adapter(args.adapter, Base.of(args))
        if model.untrainable is not None:  # it may lack a tower
            raise ModelLoadError(model.untrainable)
        return model, tokenizer

    _write(args.output, model_and_tokenizer, prog)


def _check_adapter(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        return
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder{mistyped_path(str(folder))}. Name the folder of an adapter"
        )
    inside = sorted(str(path.parent) for path in folder.glob("**/adapter_config.json"))
    what = f"name {' or '.join(inside[:3])}" if inside else "it is no folder of an adapter"
    raise ConfigError(f"{folder} has no adapter_config.json: {what}")


@dataclass(frozen=True)
class Base:
    """What the command line says of the model that a checkpoint or an adapter belongs to.

    A checkpoint may be somebody else's: what can run code is taken from here alone.
    """

    base: str | None = None
    trust_remote_code: bool = False
    external_lib: str | None = None
    override_config: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Base:
        """Of :func:`add_base` and :func:`add_override`."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})

    @property
    def loading(self) -> dict[str, Any]:
        """Options of :class:`lightppo.models.pretrained.LoadOptions`."""
        return {"trust_remote_code": self.trust_remote_code, "external_lib": self.external_lib}


def add_base(parser: argparse.ArgumentParser, meaning: str) -> None:
    """The options of what a checkpoint or an adapter belongs to."""
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
    """The option of a base whose config the run has changed."""
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


def _write(output: Path, read: Callable[[], tuple[Any, Any]], prog: str) -> None:
    with exit_on_mistakes(prog, UserError):
        check_writable(output, "OUT")
        if output.exists() and any(output.iterdir()):
            raise ConfigError(f"{output} is there already: name a new folder")

        from lightppo.checkpoint.export import save_model
        from lightppo.ranks import Alone

        save_model(Alone(), *read(), output)
        size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
        print(f"{output}: {size / 1e6:,.1f} MB")


def _no_such_run(path: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: no such folder{mistyped_path(path)}. Name the --save_path of a run"
    )


# -- what is where ---------------------------------------------------------------------------------------------------


def find_checkpoint(path: Path, part: str = "actor", step: int | None = None) -> Path:
    """The folder of one model's checkpoint: ``path`` itself, or of a run with this folder the last one, or a step's."""
    if layout.is_checkpoint(path):
        return path
    root = recorded_path(path, "ckpt_path") or path  # of the run with this --save_path
    is_root = Path(layout.part_folder(root)).is_dir()
    folder = Path(layout.part_folder(root, part)) if is_root else root
    if folder.is_dir():
        tag = layout.latest_tag(folder) if step is None else layout.tag_of(step)
        if tag is not None and layout.is_checkpoint(folder / tag):
            return folder / tag
    if not path.is_dir():
        raise _no_such_run(str(path))
    wanted = "" if step is None else f" of step {step}"
    if there := layout.list_tags(folder) if folder.is_dir() else ():
        raise CheckpointError(
            f"{path} holds no checkpoint{wanted} of the {part}; it has {', '.join(there)}"
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
    """What a run kept in a checkpoint beside its models; empty if nothing says it."""
    from lightppo.checkpoint.engine_state import read_client_state

    # The actor's part has it, the other parts do not.
    states = [
        read_client_state(one)
        for one in (folder, layout.beside(folder))
        if (one / layout.CLIENT_STATE).is_file()
    ]
    return next((state for state in states if "config" in state), {})


def checkpoint_options(folder: Path) -> dict[str, Any]:
    """The options of the run that saved a checkpoint."""
    return checkpoint_state(folder).get("config", {})


# -- models out of them ----------------------------------------------------------------------------------------------


def open_checkpoint(folder: Path, given: Base) -> tuple[Any, Any]:
    """Model (an actor or a critic) and tokenizer of a checkpoint, whose manifest is checked before."""
    from lightppo.checkpoint.damage import damage
    from lightppo.checkpoint.engine_state import read_meta
    from lightppo.checkpoint.reshape import load_weights, saved_names
    from lightppo.files import stage_to_local
    from lightppo.models.critic import ROWS_ENTRY
    from lightppo.models.loading import check_trainable, get_tokenizer
    from lightppo.ranks import Alone

    meta = read_meta(folder)
    if found := damage(Alone(), folder):
        raise CheckpointError(f"{folder} is damaged: {'; '.join(found)}")
    state = checkpoint_state(folder)
    options = state.get("config", {})
    _check_repeated(folder, options, given)
    # Value heads of transformers' classifiers, in our wrapper. They always train.
    heads = ("model.score.", "model.classifier.")
    has_value_head = any(name.startswith(heads) for name in saved_names(folder, meta))
    start = given.base or _named(folder, options, _base_option(folder))
    if start is None:
        raise CheckpointError(f"{folder} does not name the model that it started from: set --base")
    words = given.base or _named(folder, options, "tokenizer_path") or start
    has_towers = False
    if not options.get("init_from_scratch"):
        has_towers = check_trainable(stage_to_local(start), flag="--base", **given.loading)
    model = _model_for(meta, options, stage_to_local(start), has_value_head, given, has_towers)
    load_weights(model, folder, meta)
    if has_value_head and state.get(ROWS_ENTRY):
        setattr(model.hf_model.config, ROWS_ENTRY, state[ROWS_ENTRY])
    return model, get_tokenizer(
        stage_to_local(words), model, trust_remote_code=given.trust_remote_code, flag="--base"
    )


def _check_repeated(folder: Path, options: Mapping[str, Any], given: Base) -> None:
    """ConfigError for what the run imported or changed in the config, unless the command line repeats it."""
    kept = {name: options.get(name) for name in ("external_lib", "override_config")}
    missing = [
        f"--{name} {shlex.quote(str(value))}"
        for name, value in kept.items()
        if value and getattr(given, name) is None
    ]
    if missing:
        raise ConfigError(
            f"{folder}: its run had {' '.join(missing)}, which could run somebody else's code and is not taken from a "
            "checkpoint: repeat it here if you trust it"
        )


def _base_option(folder: Path) -> str:
    """Which option of the run names the base of a checkpoint's part."""
    if layout.part_of(folder) == "critic":
        return "critic_pretrain"
    return "pretrain"


def _named(folder: Path, options: Mapping[str, Any], name: str) -> str | None:
    """The folder or hub id that the options of a checkpoint name; it fetches nothing from elsewhere."""
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
    given: Base,
    has_towers: bool,
) -> Any:
    """A model that a checkpoint's weights fit; its own are the base's under adapters and beside towers, else of no
    meaning."""
    from contextlib import nullcontext

    import torch
    from transformers.initialization import no_init_weights

    from lightppo.models.actor import Actor
    from lightppo.models.adapters.lora import LoraOptions, add_adapters
    from lightppo.models.critic import Critic

    if meta["bf16"]:
        dtype = torch.bfloat16
    elif meta.get("fp16"):
        dtype = torch.float16
    else:
        dtype = torch.float32
    settings = {"dtype": dtype, "flag": "--base", **given.loading}
    settings |= {name: options[name] for name in ("init_from_scratch", "seed") if name in options}
    reads_weights = bool(meta["adapters"]) or has_towers
    if not reads_weights:
        settings["init_from_scratch"] = True
    settings["override_config"] = given.override_config
    if has_value_head:
        settings["init_value_head"] = True  # the trained head is in the checkpoint
    if meta["adapters"]:
        settings["load_in_4bit"] = options.get("load_in_4bit", False)
    with nullcontext() if reads_weights else no_init_weights():
        model = (Critic if has_value_head else Actor)(start, **settings)
    if meta["adapters"]:
        alpha = options.get("lora_alpha") or 16.0
        targets = tuple(options.get("target_modules", ()))
        add_adapters(model, LoraOptions(options["lora_rank"], alpha, target_modules=targets))
    return model


def open_adapter(folder: Path, given: Base) -> tuple[Any, Any]:
    """Merged model and tokenizer; the tokenizer is the base's if the folder has none."""
    from lightppo.models.adapters.lora import load_merged
    from lightppo.models.loading import get_tokenizer

    model = load_merged(folder, given.base, **given.loading)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    path = str(folder) if has_tokenizer else model.config.name_or_path
    return model, get_tokenizer(
        path, model, trust_remote_code=given.trust_remote_code, flag="--base"
    )


def open_model(name: str, given: Base) -> tuple[Any, Any, dict[str, Any]]:
    """Causal LM, tokenizer, and options of the run that it is of, out of whatever a run has left, or the hub has."""
    from lightppo.files import stage_to_local
    from lightppo.models.adapters.lora import is_adapter
    from lightppo.models.loading import get_tokenizer, load_causal_lm

    path = Path(name).expanduser()
    options = {}
    if is_adapter(path):
        return *open_adapter(path, given), options_of(path.absolute().parent)
    if path.is_dir() and not (path / "config.json").is_file():
        folder = find_checkpoint(path)
        # What --save_hf_ckpt wrote.
        path = layout.export_of(folder)
        options = checkpoint_options(folder)
        if not (path / "config.json").is_file():
            model, tokenizer = open_checkpoint(folder, given)
            return model.hf_model, tokenizer, options
        name = str(path)
    for flag in ("base", "override_config"):
        if (value := getattr(given, flag)) is not None:
            raise ConfigError(
                f"--{flag} {value}: {name} is a whole model, and needs none: leave --{flag} out"
            )
    model = load_causal_lm(
        local := stage_to_local(name), dtype="auto", flag="MODEL", **given.loading
    )
    tokenizer = get_tokenizer(local, model, flag="MODEL", trust_remote_code=given.trust_remote_code)
    return model, tokenizer, options or options_of(path)
