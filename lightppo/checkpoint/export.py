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
        use = files_in_use()
        local = local_folder(output_dir)
        needed = sum(tensor.nbytes for tensor in state_dict.values())
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in state_dict.items()
            if name.startswith(prefix)
        }
        with use.explained(local, needed), _place_of(local) as staging:
            with _with_pad_of_scores(hf_model, tokenizer) as words:
                _write(hf_model, own, words, staging)
                card = _card(hf_model, words, local.name)
            for name, text in {"README.md": card, **files}.items():
                (staging / name).write_text(text)
            use.seal(staging, **facts)
            written = [path.name for path in staging.iterdir()]
        written.sort(key=lambda name: name == "config.json")
        use.publish(output_dir, *written, instead_of=_WEIGHT_FILES)

    ranks.on_rank_0(write, f"save {output_dir}")


def _write(
    hf_model: Any, state_dict: Mapping[str, torch.Tensor], tokenizer: Any | None, folder: Path
) -> None:
    """Write weights, config and tokenizer; under adapters the merged weights, and the adapters beside them."""
    adapters = find_adapters(hf_model)
    whole = state_dict if adapters is None else adapters.merged(state_dict)
    if (around := find_whole(hf_model)) is not None:
        around.write(hf_model, whole, folder)
    else:
        with _savable(hf_model), _dropout_of_checkpoint(hf_model):
            hf_model.save_pretrained(str(folder), state_dict=whole)
    if adapters is not None:
        adapters.write(state_dict, folder / ADAPTER)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


@contextlib.contextmanager
def _place_of(output_dir: Path) -> Iterator[Path]:
    """Yield an empty folder, whose files come to ``output_dir`` at the end."""
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir} is a file, not a directory")
    inside = output_dir.is_dir() and any(output_dir.iterdir()) and not _is_export(output_dir)
    # A folder with other things in it (checkpoints, say) is filled file by file; any other appears complete.
    staging = output_dir / SAVING if inside else output_dir.with_name(f".{output_dir.name}{SAVING}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        if inside:
            _move_files(staging, output_dir)
        else:
            _take_place(staging, output_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _class_of(hf_model: Any) -> dict[str, str]:
    """Return the names of what is saved, and of what reads it."""
    if (around := find_whole(hf_model)) is not None:
        return {"architecture": around.architecture, "auto_class": around.auto_class}
    task = "CausalLM" if hf_model.can_generate() else "SequenceClassification"
    return {"architecture": type(hf_model).__name__, "auto_class": f"AutoModelFor{task}"}


def _card(hf_model: Any, tokenizer: Any | None, name: str) -> str:
    """Return the README: how transformers reads the model, and where the score of a reward model or a critic is."""
    names = {"name": name, **_class_of(hf_model)}
    if hf_model.can_generate() or tokenizer is None or find_whole(hf_model) is not None:
        return _MODEL_CARD.format(**names, code=_LOAD.format(**names), note="")
    rows = getattr(hf_model.config, "reward_rows", None) or {}
    prompt = rows.get("system_prompt")
    system = "" if prompt is None else f'{{"role": "system", "content": {json.dumps(prompt)}}}, '
    kwargs = rows.get("chat_template_kwargs")
    options = "" if kwargs is None else f", **{json.loads(kwargs)!r}"
    text = _CHAT.format(system=system, options=options) if rows.get("is_chat") else _TEXT
    text += _END.format(end=rows["end_id"]) if rows else ""
    pad = tokenizer.pad_token
    note = _UNPADDED if pad is None else _PADDED.format(pad=pad)
    return _MODEL_CARD.format(**names, code=_SCORE.format(**names, text=text), note=note)


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
    words = copy.deepcopy(tokenizer)
    before = config.pad_token_id
    ends = {tokenizer.eos_token_id, (getattr(config, "reward_rows", None) or {}).get("end_id")}
    eos = config.eos_token_id
    ends |= set(eos) if isinstance(eos, list | tuple) else {eos}
    if words.pad_token_id in ends | {None}:
        words.pad_token = _pad_for(tokenizer, ends)
    config.pad_token_id = words.pad_token_id
    try:
        yield words
    finally:
        config.pad_token_id = before


def _pad_for(tokenizer: Any, ends: set[int | None]) -> str | None:
    """Return a token that no text ends with: one made for padding, one that nothing becomes, or the first."""
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    candidates = [token for token in special if "pad" in token.lower()]
    unknown = tokenizer.unk_token_id
    if (
        unknown is not None and unknown not in tokenizer("\ue000")["input_ids"]
    ):  # bytes stand for it
        candidates.append(tokenizer.unk_token)
    candidates += [token for token in (tokenizer.bos_token,) if token is not None]
    return next(
        (token for token in candidates if tokenizer.convert_tokens_to_ids(token) not in ends), None
    )


def _is_export(folder: Path) -> bool:
    """Whether all that is in a folder is one export."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return not folder.is_symlink() and files == {
        MANIFEST,
        *files_in_use().manifest(folder)["files"],
    }


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

    shown = hf_logging.is_progress_bar_enabled()
    original = getattr(hf_model, "generation_config", None)
    hf_logging.disable_progress_bar()
    try:
        if original is not None:
            original.validate(strict=True)
    except ValueError as error:
        logger.warning(
            "saving the generation config with do_sample=True, since it has sampling settings: %s",
            error,
        )
        hf_model.generation_config = copy.deepcopy(original)
        hf_model.generation_config.do_sample = True
    try:
        yield
    finally:
        if original is not None:
            hf_model.generation_config = original
        if shown:
            hf_logging.enable_progress_bar()


@contextlib.contextmanager
def _dropout_of_checkpoint(hf_model: Any) -> Iterator[None]:
    """Give the config the dropout of the checkpoint again inside, where loading has set it to 0 for training here."""
    config = hf_model.config
    changed = []
    own = getattr(hf_model, "own_dropout", ())  # lightppo.models.loading
    for part, rates in zip((config, config.get_text_config()), own):
        for name, rate in rates.items():
            if getattr(part, name, None) == 0.0:
                changed.append((part, name))
                setattr(part, name, rate)
    try:
        yield
    finally:
        for part, name in changed:
            setattr(part, name, 0.0)


def _move_files(staging: Path, output_dir: Path) -> None:
    """Move the manifest away first and in last: between, the folder is no whole export."""
    files = files_in_use()
    new = sorted(staging.iterdir(), key=lambda path: path.name == MANIFEST)
    new_names = {path.name for path in new}
    if (output_dir / MANIFEST).exists():
        files.remove(output_dir / MANIFEST)
    for path in new:
        target = output_dir / path.name
        if target.is_dir():
            files.remove(target)
        if path.name == MANIFEST:
            # shards of an earlier, larger save would be loaded as part of this model
            for pattern in _WEIGHT_FILES:
                for old in output_dir.glob(pattern):
                    if old.name not in new_names:
                        files.remove(old)
        files.rename(path, target)
