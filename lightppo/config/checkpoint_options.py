"""Options of checkpoints, of models for transformers, and of the end by a signal; docs/checkpoints.md."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from lightppo.errors import StagingError
from lightppo.files import check_file_url, is_url
from lightppo.option import Option, Section, option
from lightppo.redaction import GIVE_WHOLE, cut_urls
from lightppo.suggestions import nearest

critic = partial(option, needs="critic")
saved = partial(option, needs="save_steps>0 or save_epochs or save_seconds")


class CheckpointConfig(Section, resume_safe=True):
    """Checkpoints and the final model."""

    save_path: str = option(
        "./ckpt",
        "Folder or fsspec URL of the run: final model, metrics.jsonl, run_config.yaml, eval/.",
        resume_safe=False,
    )
    ckpt_path: str | None = option(
        None,
        "Folder or URL of the checkpoints: _actor, _critic, global_stepN_hf. None: SAVE_PATH/checkpoints_ppo.",
    )
    save_steps: int = option(-1, "Save a checkpoint every N steps; -1: never.", "PPO steps", ge=-1)
    disable_ds_ckpt: bool = saved(False, "Leave the resumable state out of checkpoints.")
    max_ckpt_num: int = option(
        3, "Maximum number of checkpoints; the oldest is removed first.", ge=1
    )
    max_ckpt_mem: float = option(
        100000000.0,
        "Maximum disk space of all checkpoints; the oldest is removed first.",
        "GB",
        gt=0,
    )
    resume: str = option(
        "auto",
        "auto: continue from the last checkpoint; never; or a checkpoint path.",
        off=("never",),
    )
    load_checkpoint: bool = option(True, "--no_load_checkpoint means --resume never.")
    resume_changes: tuple[str, ...] = option(
        (),
        "Names of options that may differ from those of the checkpoint, though they have no star here. Options that "
        "make the model cannot be named.",
    )
    reshape_ckpt: bool = option(
        False, "Also resume a checkpoint from a different number of processes or ZeRO stage."
    )
    save_value_network: bool = critic(False, "Also save the critic with the final model.")
    save_epochs: int | None = option(None, "Save a checkpoint every N episodes.", "episodes", ge=1)
    save_seconds: float | None = option(None, "Save a checkpoint every N seconds.", "seconds", gt=0)
    hf_save_steps: int = option(
        -1, "Export the actor in HF format every N steps; -1: never.", "PPO steps", ge=-1
    )
    save_hf_ckpt: bool = option(
        False,
        "Also export the actor in HF format with each checkpoint.",
        needs="save_steps>0 or save_epochs or save_seconds",
    )
    push_to_hub: str | None = option(
        None,
        "Model repository OWNER/NAME on the Hugging Face hub, which gets the final model. Set HF_TOKEN, or run "
        "`hf auth login`.",
    )
    hub_private: bool = option(
        True, "Make the repository of --push_to_hub private, if it is new.", needs="push_to_hub"
    )
    signal_grace: float = option(
        25.0,
        "Maximum wait for the current step after a signal. SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 end the run "
        "after that step and save it; if it takes longer, the run ends unsaved. torchrun, deepspeed, Slurm and "
        "Kubernetes kill 30 s after SIGTERM.",
        "seconds",
        gt=0,
    )

    exclusive = (("resume", "no_load_checkpoint", "contradict each other"),)

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        saves = options.save_steps > 0 or options.save_epochs or options.save_seconds
        if saves and options.disable_ds_ckpt and not options.save_hf_ckpt:
            yield "--disable_ds_ckpt without --save_hf_ckpt leaves nothing to save at --save_steps/epochs/seconds"
        if options.push_to_hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", options.push_to_hub):
            yield f"--push_to_hub {options.push_to_hub!r}: give OWNER/NAME"
        yield from _fixed_changes(options)
        yield from _cut_addresses(options)
        yield from _folders(options)


def makes_model(declaration: Option, sections: Mapping[str, type[Section]]) -> bool:
    """Tell whether a checkpoint's weights are of no use under another value of this option."""
    is_other_model = declaration.name.startswith(("ref_", "reward_"))
    is_safe = declaration.resume_safe or is_other_model
    return sections[declaration.owner].of == "weights" and not is_safe


def _fixed_changes(options: Any) -> Iterator[str]:
    """Refuse --resume_changes of what is no option, or of what a checkpoint's weights depend on."""
    declared = {declaration.name: declaration for declaration in options.config.all_options()}
    for name in options.config.checkpoint.resume_changes:
        if name not in declared:
            yield f"--resume_changes {name}: no option has this name{nearest(name, declared)}"
        elif makes_model(declared[name], options.config.sections()):
            yield f"--resume_changes {name}: it makes the model, and must stay as it was"


def _folders(options: Any) -> Iterator[str]:
    """Refuse URLs of folders that cannot be used, or are not to be shown."""
    folders = {
        name: getattr(options.config.checkpoint, name)
        for name in ("save_path", "ckpt_path", "resume")
    }
    for name, url in folders.items():
        try:
            if url is not None and is_url(url):
                check_file_url(url, f"--{name}")
                if urlsplit(url).password:
                    what = "a password in a URL would be written into logs"
                    yield f"--{name}: {what}: set FSSPEC_{url.split(':')[0].upper()}_PASSWORD"
        except StagingError as error:
            yield str(error)


def _cut_addresses(options: Any) -> Iterator[str]:
    """Refuse addresses out of the files of a run, which lack what may be a secret."""
    flat = options.config.flat()
    models = {
        declaration.name
        for declaration in options.config.all_options()
        if declaration.owner in ("model", "distill")
    }
    unread = {"prompt_data", "pretrain_data"} if flat.get("val_only") else set()
    unread |= {"remote_rm_url"} if flat.get("tape_from") else set()  # a tape answers
    unread |= flat.keys() - models if getattr(options, "unfed", False) else set()
    for name, value in flat.items():
        if name not in unread and (cut := cut_urls(value)):
            yield f"--{name} {cut[0]}: {GIVE_WHOLE}: --{name} URL wins over --config"
