"""Models in Hugging Face format: folders that transformers reads, written whole or not at all.

``DeepspeedStrategy`` offers this as ``save_model``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lightppo.files import MANIFEST, files_in_use, local_folder
from lightppo.ranks import Ranks
from lightppo.zero3 import (
    find_adapters,
    find_hf_model,
    find_whole,
    full_state_dict,
)

logger = logging.getLogger(__name__)

ADAPTER = "adapter"  # folder inside the export of a model with adapters
SAVING = ".saving"
REPLACED = ".replaced"
_WEIGHT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
)
_MODEL_CARD = """---
library_name: transformers
tags:
- lightppo
---

# {name}

A `{architecture}` saved by lightppo.

```python
{code}
```
{note}"""
_LOAD = """from transformers import {auto_class}

model = {auto_class}.from_pretrained("{name}")"""
_SCORE = """import torch
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{name}").eval()
tokenizer = AutoTokenizer.from_pretrained("{name}")
{text}
with torch.no_grad():
    score = model(torch.tensor([ids])).logits[0, 0].item()"""
_TEXT = """ids = tokenizer("a prompt and an answer")["input_ids"]"""
_CHAT = """messages = [{system}{{"role": "user", "content": "2+2="}}, {{"role": "assistant", "content": "4"}}]
text = tokenizer.apply_chat_template(messages, tokenize=False{options}).rstrip("\\n")
ids = tokenizer(text, add_special_tokens=False)["input_ids"]"""
_END = """
if ids[-1] != {end}:  # the last token in training
    ids.append({end})"""
_PADDED = """
The score is that of the last token. transformers takes the last one that is not the pad token, so pad batches with
`{pad}`, on either side.
"""
_UNPADDED = """
The score is that of the last token. Score texts one by one: the tokenizer has no token that could pad a batch, and
transformers takes the last token that is not the pad token.
"""


def save_model(
    ranks: Ranks,
    model: Any,
    tokenizer: Any | None,
    output_dir: str | os.PathLike[str],
    files: Mapping[str, str] = {},
    **facts: Any,
) -> None:
    """Write all that transformers reads. A new folder appears complete; in an old one, file by file. Collective.

    Published, the config comes last.

    Args:
        files: further files, name → text.
        facts: plain values that its manifest keeps, see :func:`lightppo.files.facts_of`.
    """
    hf_model, prefix = find_hf_model(model)
    state_dict = full_state_dict(model, ranks.is_rank_0())

    def write() -> None:
        files_used = files_in_use()
        folder = local_folder(output_dir)
        needed_bytes = sum(tensor.nbytes for tensor in state_dict.values())
        model_weights = {
            name.removeprefix(prefix): tensor
            for name, tensor in state_dict.items()
            if name.startswith(prefix)
        }
        with files_used.explained(folder, needed_bytes), _place_of(folder) as staging:
            with _with_pad_of_scores(hf_model, tokenizer) as saved_tokenizer:
                _write(hf_model, model_weights, saved_tokenizer, staging)
                model_card = _card(hf_model, saved_tokenizer, folder.name)
            for name, content in {"README.md": model_card, **files}.items():
                (staging / name).write_text(content)
            files_used.seal(staging, **facts)
            written_names = [path.name for path in staging.iterdir()]
        written_names.sort(key=lambda name: name == "config.json")
        files_used.publish(output_dir, *written_names, instead_of=_WEIGHT_FILES)

    ranks.on_rank_0(write, f"save {output_dir}")


def _write(
    hf_model: Any, state_dict: Mapping[str, torch.Tensor], tokenizer: Any | None, folder: Path
) -> None:
    """Write weights, config and tokenizer; under adapters the merged weights, and the adapters beside them."""
    adapters = find_adapters(hf_model)
    model_weights = state_dict if adapters is None else adapters.merged(state_dict)
    if (whole_checkpoint := find_whole(hf_model)) is not None:
        whole_checkpoint.write(hf_model, model_weights, folder)
    else:
        with _savable(hf_model), _dropout_of_checkpoint(hf_model):
            hf_model.save_pretrained(str(folder), state_dict=model_weights)
    if adapters is not None:
        adapters.write(state_dict, folder / ADAPTER)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


@contextlib.contextmanager
def _place_of(output_dir: Path) -> Iterator[Path]:
    """Yield an empty folder, whose files come to ``output_dir`` at the end."""
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir} is a file, not a directory")
    keeps_other_files = (
        output_dir.is_dir() and any(output_dir.iterdir()) and not _is_export(output_dir)
    )
    # A folder with other things in it (checkpoints, say) is filled file by file; any other appears complete.
    staging_folder = output_dir.with_name(f".{output_dir.name}{SAVING}")
    if keeps_other_files:
        staging_folder = output_dir / SAVING
    shutil.rmtree(staging_folder, ignore_errors=True)
    staging_folder.mkdir(parents=True)
    try:
        yield staging_folder
        if keeps_other_files:
            _move_files(staging_folder, output_dir)
        else:
            _take_place(staging_folder, output_dir)
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)


def _class_of(hf_model: Any) -> dict[str, str]:
    """Return the names of what is saved, and of what reads it."""
    if (whole_checkpoint := find_whole(hf_model)) is not None:
        return {
            "architecture": whole_checkpoint.architecture,
            "auto_class": whole_checkpoint.auto_class,
        }
    model_task = "CausalLM" if hf_model.can_generate() else "SequenceClassification"
    return {"architecture": type(hf_model).__name__, "auto_class": f"AutoModelFor{model_task}"}


def _card(hf_model: Any, tokenizer: Any | None, name: str) -> str:
    """Return the README: how transformers reads the model, and where the score of a reward model or a critic is."""
    format_names = {"name": name, **_class_of(hf_model)}
    if hf_model.can_generate() or tokenizer is None or find_whole(hf_model) is not None:
        return _MODEL_CARD.format(**format_names, code=_LOAD.format(**format_names), note="")
    row_form = getattr(hf_model.config, "reward_rows", None) or {}
    system_prompt = row_form.get("system_prompt")
    system = options = ""
    if system_prompt is not None:
        system = f'{{"role": "system", "content": {json.dumps(system_prompt)}}}, '
    template_options = row_form.get("chat_template_kwargs")
    if template_options is not None:
        options = f", **{json.loads(template_options)!r}"
    text_code = _TEXT
    if row_form.get("is_chat"):
        text_code = _CHAT.format(system=system, options=options)
    if row_form:
        text_code += _END.format(end=row_form["end_id"])
    pad_token = tokenizer.pad_token
    pad_note = _UNPADDED if pad_token is None else _PADDED.format(pad=pad_token)
    code = _SCORE.format(**format_names, text=text_code)
    return _MODEL_CARD.format(**format_names, code=code, note=pad_note)


@contextlib.contextmanager
def _with_pad_of_scores(hf_model: Any, tokenizer: Any | None) -> Iterator[Any | None]:
    """Yield the tokenizer to save; a classifier's config and tokenizer have a pad token that no text ends with, or none.

    transformers' classifiers score the last token that is not the pad token, whatever the mask says: where the
    end-of-text pads, the token before it.
    """
    if tokenizer is None or hf_model.can_generate() or find_whole(hf_model) is not None:
        yield tokenizer
        return
    config = hf_model.config.get_text_config()
    saved_tokenizer = copy.deepcopy(tokenizer)
    previous_pad = config.pad_token_id
    end_ids = {tokenizer.eos_token_id, (getattr(config, "reward_rows", None) or {}).get("end_id")}
    eos_ids = config.eos_token_id
    end_ids |= set(eos_ids) if isinstance(eos_ids, list | tuple) else {eos_ids}
    if saved_tokenizer.pad_token_id in end_ids | {None}:
        saved_tokenizer.pad_token = _pad_for(tokenizer, end_ids)
    config.pad_token_id = saved_tokenizer.pad_token_id
    try:
        yield saved_tokenizer
    finally:
        config.pad_token_id = previous_pad


def _pad_for(tokenizer: Any, end_ids: set[int | None]) -> str | None:
    """Return a token that no text ends with: one made for padding, one that nothing becomes, or the first."""
    special_tokens = [
        str(token) for token in tokenizer.added_tokens_decoder.values() if token.special
    ]
    candidates = [token for token in special_tokens if "pad" in token.lower()]
    unknown_id = tokenizer.unk_token_id
    # None: bytes stand for what has no token
    if unknown_id is not None and unknown_id not in tokenizer("\ue000")["input_ids"]:
        candidates.append(tokenizer.unk_token)
    if tokenizer.bos_token is not None:
        candidates.append(tokenizer.bos_token)
    for token in candidates:
        if tokenizer.convert_tokens_to_ids(token) not in end_ids:
            return token
    return None


def _is_export(folder: Path) -> bool:
    """Tell whether all that is in a folder is one export."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    exported = {MANIFEST, *files_in_use().manifest(folder)["files"]}
    return not folder.is_symlink() and files == exported


def _take_place(staging: Path, output_dir: Path) -> None:
    replaced = output_dir.with_name(f".{output_dir.name}{REPLACED}")
    if output_dir.is_dir() and any(output_dir.iterdir()):
        shutil.rmtree(replaced, ignore_errors=True)
        files_in_use().rename(output_dir, replaced)
    files_in_use().rename(staging, output_dir)
    shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def _savable(hf_model: Any) -> Iterator[None]:
    """Hide the progress bar of each save; put ``do_sample`` in the generation config of a model that samples.

    Some hub models have sampling settings without it, which transformers reads but refuses to write.
    """
    from transformers.utils import logging as hf_logging

    shows_progress = hf_logging.is_progress_bar_enabled()
    original_config = getattr(hf_model, "generation_config", None)
    hf_logging.disable_progress_bar()
    try:
        if original_config is not None:
            original_config.validate(strict=True)
    except ValueError as error:
        logger.warning(
            "saving the generation config with do_sample=True, since it has sampling settings: %s",
            error,
        )
        hf_model.generation_config = copy.deepcopy(original_config)
        hf_model.generation_config.do_sample = True
    try:
        yield
    finally:
        if original_config is not None:
            hf_model.generation_config = original_config
        if shows_progress:
            hf_logging.enable_progress_bar()


@contextlib.contextmanager
def _dropout_of_checkpoint(hf_model: Any) -> Iterator[None]:
    """Give the config the dropout of the checkpoint again inside, where loading has set it to 0 for training here."""
    config = hf_model.config
    changed_rates = []
    checkpoint_rates = getattr(hf_model, "own_dropout", ())  # lightppo.models.loading
    for config_part, rates in zip((config, config.get_text_config()), checkpoint_rates):
        for rate_name, rate in rates.items():
            if getattr(config_part, rate_name, None) == 0.0:
                changed_rates.append((config_part, rate_name))
                setattr(config_part, rate_name, rate)
    try:
        yield
    finally:
        for config_part, rate_name in changed_rates:
            setattr(config_part, rate_name, 0.0)


def _move_files(staging: Path, output_dir: Path) -> None:
    """Move the manifest away first and in last: between, the folder is no whole export."""
    files = files_in_use()
    new_files = sorted(staging.iterdir(), key=lambda new_file: new_file.name == MANIFEST)
    new_names = {new_file.name for new_file in new_files}
    if (output_dir / MANIFEST).exists():
        files.remove(output_dir / MANIFEST)
    for new_file in new_files:
        target_path = output_dir / new_file.name
        if target_path.is_dir():
            files.remove(target_path)
        if new_file.name == MANIFEST:
            # shards of an earlier, larger save would be loaded as part of this model
            for pattern in _WEIGHT_FILES:
                for old_file in output_dir.glob(pattern):
                    if old_file.name not in new_names:
                        files.remove(old_file)
        files.rename(new_file, target_path)
