"""Checks of checkpoints and Hugging Face folders; ``write`` and ``resume`` run in different processes."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from support.rank_checks import (
    LR,
    TinyActor,
    TinyCritic,
    batch,
    causal_lm,
    llama_config,
    make_strategy,
    run,
    sequence_classifier,
    sharded_train_config,
    train_step,
    trained_actor,
    usual,
    whole_weights,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from lightppo import files
from lightppo.checkpoint.engine_state import restore_rng_state, rng_state
from lightppo.checkpoint.layout import latest_tag, list_tags
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import CheckpointError, StorageError

EVERY_VARIANT = {
    "zero0": {"zero_stage": 0},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero1_bf16": {"zero_stage": 1, "bf16": True},
    "zero3_bf16": {"zero_stage": 3, "bf16": True},
    "zero1_fp16": {"zero_stage": 1, "fp16": True},
    "zero3_fp16": {"zero_stage": 3, "fp16": True},
}
VARIANTS = usual(EVERY_VARIANT, "zero0", "zero2", "zero1_bf16", "zero3_fp16")


def digest(role: DeepspeedStrategy, model) -> dict[str, list[float]]:
    """Every weight, exactly."""
    return {name: weight.flatten().tolist() for name, weight in whole_weights(role, model).items()}


def check_write(_: DeepspeedStrategy, work_dir: Path) -> None:
    """Trains 2 steps, saves, trains 2 more; what those gave goes to a file."""
    for name, options in VARIANTS.items():
        role = make_strategy(**options)
        actor, optimizer, scheduler = trained_actor(role)
        for step in (0, 1):
            # of fp16 the second step overflows: the checkpoint holds half of the loss scale of the start
            train_step(
                role,
                actor,
                optimizer,
                scheduler,
                step,
                poison=1e7 if role.fp16 and step == 1 else False,
            )
        torch.manual_seed(50 + role.get_rank())
        client_state = {"step": 2, "rng": role.all_gather_object(rng_state())}
        tag = role.save_ckpt(actor, work_dir / name, client_state=client_state)
        assert tag == "global_step2"
        record = {"random": role.all_gather_object(torch.rand(2).tolist()), "steps": []}
        for step in (2, 3):
            loss, outcome = train_step(role, actor, optimizer, scheduler, step)
            record["steps"].append(
                [loss, outcome.grad_norm, scheduler.get_last_lr()[0], outcome.loss_scale]
            )
        record["weights"] = digest(role, actor)
        if role.is_rank_0():
            (work_dir / f"{name}.json").write_text(json.dumps(record))
    for stage in (0, 3):  # without optimizer
        role = make_strategy(zero_stage=stage)
        ema = role.prepare(TinyActor(causal_lm(seed=5), role.get_ds_eval_config()))
        role.save_ckpt(
            ema, work_dir / f"ema{stage}", tag="global_step2", client_state={"beta": 0.9}
        )


def check_resume(_: DeepspeedStrategy, work_dir: Path) -> None:
    """Another process starts from other weights, loads, trains the same 2 steps: bit for bit the same."""
    for name, options in VARIANTS.items():
        role = make_strategy(**options)
        actor, optimizer, scheduler = trained_actor(role, seed=99)
        path, client_state = role.load_ckpt(actor, work_dir / name)
        assert path == str(work_dir / name / "global_step2")
        assert client_state["step"] == 2
        restore_rng_state(client_state["rng"][role.get_rank()])
        expected = json.loads((work_dir / f"{name}.json").read_text())
        assert role.all_gather_object(torch.rand(2).tolist()) == expected["random"], name
        for step, was in zip((2, 3), expected["steps"], strict=True):
            loss, outcome = train_step(role, actor, optimizer, scheduler, step)
            assert [
                loss,
                outcome.grad_norm,
                scheduler.get_last_lr()[0],
                outcome.loss_scale,
            ] == was, (name, step)
        assert digest(role, actor) == expected["weights"], name
        assert actor.model.global_steps == 4
    for stage in (0, 3):
        role = make_strategy(zero_stage=stage)
        ema = role.prepare(TinyActor(causal_lm(seed=6), role.get_ds_eval_config()))
        _, client_state = role.load_ckpt(ema, work_dir / f"ema{stage}", tag="global_step2")
        assert client_state == {"beta": 0.9}
        expected = {name: p.flatten().tolist() for name, p in causal_lm(seed=5).named_parameters()}
        assert digest(role, ema) == expected


def check_weights_alone(_: DeepspeedStrategy, work_dir: Path) -> None:
    """load_optimizer_states=False: the checkpoint's weights, and a fresh optimizer that steps from them."""
    for stage in (0, 2, 3):
        role = make_strategy(zero_stage=stage)
        actor, optimizer, scheduler = trained_actor(role)
        train_step(role, actor, optimizer, scheduler, 0)
        role.save_ckpt(actor, work_dir / f"alone{stage}", tag="a")
        saved = whole_weights(role, actor)
        other, other_optimizer, other_scheduler = trained_actor(role, seed=9)
        role.load_ckpt(
            other,
            work_dir / f"alone{stage}",
            load_optimizer_states=False,
            load_lr_scheduler_states=False,
        )
        assert other_scheduler.get_last_lr() == [LR] * 2
        for name, weight in whole_weights(role, other).items():
            assert torch.equal(weight, saved[name]), (stage, name)
        train_step(role, other, other_optimizer, other_scheduler, 1)
        # the first AdamW step moves an element by at most lr · (1 + decay), and the masters start at the weights
        for name, weight in whole_weights(role, other).items():
            assert 0 < (weight - saved[name]).abs().max() < 1.2 * LR, (stage, name)
        if stage == 3:
            role.save_ckpt(actor, work_dir / "alone3", tag="b")
            with pytest.raises(CheckpointError, match="latest tag only"):
                role.load_ckpt(other, work_dir / "alone3", tag="a", load_optimizer_states=False)


def alter(role: DeepspeedStrategy, meta: Path, old: str, new: str) -> None:
    """A checkpoint that was saved by another run."""
    role.barrier()
    if role.is_rank_0():
        meta.write_text(meta.read_text().replace(old, new))
        files.seal(meta.parent)
    role.barrier()


def check_damage_and_full_disks(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """All ranks say the same of a damaged checkpoint, and of a disk that is full for one of them."""
    role = make_strategy(zero_stage=2)
    actor, *_ = trained_actor(role)
    directory = work_dir / "damage"
    role.save_ckpt(actor, directory, tag="a")
    names = json.loads((directory / "a" / files.MANIFEST).read_text())["files"]
    assert {
        "mp_rank_00_model_states.pt",
        "client_state.pt",
        "lightppo_checkpoint.json",
    } < names.keys()
    assert len([name for name in names if name.endswith("optim_states.pt")]) == 2  # of both ranks
    role.load_ckpt(actor, directory)

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.MonkeyPatch.context() as patch:
        if role.get_rank() == 1:
            patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(full))
        with pytest.raises(StorageError) as error:
            role.save_ckpt(actor, directory, tag="b")
    told = str(error.value)
    assert re.match(
        rf"rank 1: {directory}: the disk is full: [\d.,]+ [bkM]\w+ are needed, .* are free: lower --max",
        told,
    )
    left = sorted(p.name for p in directory.iterdir() if p.suffix != ".py")
    assert left == ["a", "latest"], left  # the old one is there, half a one is not

    if role.is_rank_0():
        for name, change in (
            ("mp_rank_00_model_states.pt", flipped),
            ("client_state.pt", lambda content: content[:-1]),
        ):
            (directory / "a" / name).write_bytes(change((directory / "a" / name).read_bytes()))
        (directory / "a" / sorted(names)[-1]).unlink()
    role.barrier()
    with pytest.raises(CheckpointError) as error:
        role.load_ckpt(actor, directory)
    told = role.all_gather_object(str(error.value))
    assert told[0] == told[1]
    assert f"{directory}/a is damaged: client_state.pt has " in told[0]
    assert (
        f"mp_rank_00_model_states.pt has other content than was written; {sorted(names)[-1]} is missing"
        in told[0]
    )


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def check_links(_: DeepspeedStrategy, work_dir: Path) -> None:
    """A step folder that is a link, or a file: it loads, and goes at its time; what the link leads to stays."""
    role = make_strategy(zero_stage=2)
    actor, *_ = trained_actor(role)
    directory, elsewhere = work_dir / "links", work_dir / "elsewhere"
    role.save_ckpt(actor, directory, tag="a")
    if role.is_rank_0():
        (directory / "a").rename(elsewhere)
        (directory / "a").symlink_to(elsewhere)
        (directory / "b").symlink_to(work_dir / "nowhere")
        (directory / "c").write_text("no folder")
    role.barrier()
    role.load_ckpt(actor, directory, tag="a")
    for tag in ("a", "b", "c"):  # in its place
        role.save_ckpt(actor, directory, tag=tag)
    links = [p.name for p in directory.iterdir() if p.is_symlink()]
    assert (links, list_tags(directory)) == ([], ["a", "b", "c"])
    role.barrier()
    if role.is_rank_0():
        (directory / "c").rename(work_dir / "c")
        (directory / "c").symlink_to("../c")
    role.barrier()
    role.save_ckpt(actor, directory, tag="d", max_num=1)  # the others are removed
    assert sorted(p.name for p in directory.iterdir() if p.suffix != ".py") == ["d", "latest"]
    for kept in (elsewhere, work_dir / "c"):
        assert (kept / "lightppo_checkpoint.json").is_file()
    role.barrier()
    if role.is_rank_0():
        (directory / "latest").unlink()
        (directory / "latest").mkdir()
    role.barrier()
    with pytest.raises(CheckpointError, match="latest is a folder, and must be a file"):
        role.load_ckpt(actor, directory)
    with pytest.raises(StorageError, match="latest is a folder, and a file is to be written there"):
        role.save_ckpt(actor, directory, tag="e")


def check_rotation_and_errors(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    role = make_strategy(zero_stage=2)
    actor, *_ = trained_actor(role)
    directory = work_dir / "rotation"
    for tag in ("a", "b", "c", "d"):
        role.save_ckpt(actor, directory, tag=tag, max_num=2, protected_tags=("a",))
    assert list_tags(directory) == ["a", "d"]
    assert latest_tag(directory) == "d"
    role.save_ckpt(actor, directory, tag="d", max_num=2)  # the same tag again
    assert list_tags(directory) == ["a", "d"]
    # nothing fits, the newest stays
    role.save_ckpt(actor, directory, tag="e", max_num=9, max_mem=1e-9)
    assert list_tags(directory) == ["e"]
    role.barrier()
    if role.is_rank_0():
        (directory / "f.incomplete").mkdir()
    role.save_ckpt(actor, directory, tag="f")
    assert sorted(p.name for p in directory.iterdir() if p.is_dir()) == ["e", "f"]
    role.barrier()

    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        role.load_ckpt(actor, work_dir / "nowhere")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        role.load_ckpt(actor, work_dir)
    with pytest.raises(CheckpointError, match=r"lightppo_checkpoint.json is missing"):
        role.load_ckpt(actor, directory, tag="a")
    frozen = role.prepare(TinyActor(causal_lm(), role.get_ds_eval_config(zero_stage=0)))
    meta = directory / "e" / "lightppo_checkpoint.json"
    alter(role, meta, '"zero_stage": 2', '"zero_stage": 0')
    with pytest.raises(CheckpointError, match="optimizer=True, this run has optimizer=False"):
        role.load_ckpt(frozen, directory, tag="e")
    with pytest.raises(CheckpointError, match="zero_stage=0, this run has zero_stage=2"):
        role.load_ckpt(actor, directory, tag="e")
    alter(role, meta, '"world_size": 2', '"world_size": 4')
    with pytest.raises(
        CheckpointError,
        match=r"world_size=4, .*has world_size=2, .*: set --reshape_ckpt, resume with",
    ):
        role.load_ckpt(actor, directory, tag="e")
    with pytest.raises(ValueError, match="max_ckpt_num"):
        role.save_ckpt(actor, directory, max_num=0)
    with pytest.raises(ValueError, match=r"strategy.prepare\(\)"):
        role.save_ckpt(causal_lm(), directory)
    role.barrier()
    if role.is_rank_0():
        (directory / "latest").write_text("gone")
        (work_dir / "a_file").write_text("")
    role.barrier()
    with pytest.raises(
        CheckpointError,
        match=r"'gone', which is not a whole checkpoint; whole ones here: f, e|e, f",
    ):
        role.load_ckpt(actor, directory)
    # on every rank, none waits
    with pytest.raises(RuntimeError, match=r"rank 0 could not prepare .*a_file"):
        role.save_ckpt(actor, work_dir / "a_file" / "inside")
    with pytest.raises(RuntimeError, match=r"rank 0 could not save .*a_file is a file"):
        role.save_model(actor, None, work_dir / "a_file")


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def same_weights(
    loaded: torch.nn.Module, weights: dict[str, torch.Tensor], prefix: str = ""
) -> None:
    got = dict(loaded.named_parameters())
    assert {f"{prefix}{name}" for name in got} == set(weights)
    for name, param in got.items():
        assert torch.equal(param.float(), weights[f"{prefix}{name}"]), name


def check_save_model(_: DeepspeedStrategy, work_dir: Path) -> None:
    """Actor (tied and not) and critic at every stage, prepared and plain, load with plain transformers."""
    for name, options in VARIANTS.items():
        role = make_strategy(**options)
        actor, optimizer, scheduler = trained_actor(role)
        train_step(role, actor, optimizer, scheduler, 0)
        output_dir = work_dir / "hf" / name
        # without do_sample transformers refuses to save it
        role.unwrap_model(actor).generation_config.top_k = 17
        role.save_model(actor, tokenizer(), output_dir)
        loaded = AutoModelForCausalLM.from_pretrained(output_dir)
        assert loaded.dtype == role.dtype
        assert (loaded.generation_config.top_k, loaded.generation_config.do_sample) == (17, True)
        assert not role.unwrap_model(actor).generation_config.do_sample
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        same_weights(loaded, whole_weights(role, actor))
        assert AutoTokenizer.from_pretrained(output_dir)("one two")["input_ids"] == [3, 4]
        assert "AutoModelForCausalLM" in (output_dir / "README.md").read_text()
        assert not [p.name for p in output_dir.parent.iterdir() if p.name.endswith(".saving")]
        _, outcome = train_step(role, actor, optimizer, scheduler, 1)  # training goes on
        assert not outcome.skipped
    for stage in (1, 3):
        role = make_strategy(zero_stage=stage)
        critic = TinyCritic(sequence_classifier(), sharded_train_config(role))
        engine, _, _ = role.prepare((critic, role.create_optimizer(critic, lr=LR), None))
        output_dir = work_dir / "hf" / f"critic{stage}"
        role.save_model(engine, None, output_dir)
        loaded = AutoModelForSequenceClassification.from_pretrained(output_dir)
        assert loaded.config.num_labels == 1
        same_weights(loaded, whole_weights(role, engine), prefix="model.")
        # back into a critic with other weights, sharded, and its masters: a step with lr → 0 changes nothing
        other = TinyCritic(sequence_classifier(seed=4), sharded_train_config(role))
        optimizer = role.create_optimizer(other, lr=1e-12)
        other_engine, optimizer, _ = role.prepare((other, optimizer, None))
        role.load_model(other_engine, output_dir)
        assert digest(role, other_engine) == digest(role, engine)
        role.backward(other_engine(batch(0)).sum(), other_engine, optimizer)
        role.optimizer_step(optimizer, other_engine)
        for name, weight in whole_weights(role, other_engine).items():
            torch.testing.assert_close(weight, whole_weights(role, engine)[name], atol=1e-7, rtol=0)


def check_folders_and_bad_models(_: DeepspeedStrategy, work_dir: Path) -> None:
    role = make_strategy()
    plain = causal_lm(tied=False)
    output_dir = work_dir / "shared_folder"
    role.barrier()
    if role.is_rank_0():
        (output_dir / "checkpoints").mkdir(parents=True)
        (output_dir / "checkpoints" / "keep").write_text("me")
        (output_dir / "model-00001-of-00002.safetensors").write_text("an older, larger model")
    role.barrier()
    role.save_model(plain, tokenizer(), output_dir)
    assert (output_dir / "checkpoints" / "keep").read_text() == "me"
    assert not (output_dir / "model-00001-of-00002.safetensors").exists()
    assert not (output_dir / ".saving").exists()
    untied = AutoModelForCausalLM.from_pretrained(output_dir)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    same_weights(untied, {name: p.detach() for name, p in plain.named_parameters()})

    target = causal_lm(seed=3, tied=False)
    role.load_model(target, output_dir / "model.safetensors")
    same_weights(target, {name: p.detach() for name, p in plain.named_parameters()})
    with pytest.raises(
        ValueError, match=r"1 weights missing \['score.weight'\], 1 unexpected \['lm_head.weight'\]"
    ):
        role.load_model(sequence_classifier(), output_dir)
    smaller = llama_config(tied=False)
    smaller.vocab_size = 50
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight' is \(61, 32\), the model's \(50, 32\)"
    ):
        role.load_model(type(plain)(smaller), output_dir)
    with pytest.raises(FileNotFoundError, match=r"no model at .*nowhere"):
        role.load_model(target, work_dir / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no"):
        role.load_model(target, output_dir / "checkpoints")
    with pytest.raises(ValueError, match=r"Linear .* one Hugging Face model"):
        role.save_model(torch.nn.Linear(2, 2), None, work_dir / "linear")


if __name__ == "__main__":
    run([value for name, value in list(globals().items()) if name.startswith("check_")])
