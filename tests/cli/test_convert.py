"""``lightppo convert`` and ``lightppo merge``: equal to the bit to what a run exports."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.adapters import randomize_b
from support.hostile import poison
from support.ranks import run_ranks
from support.tiny import save_causal_lm, sums, write_jsonl

from lightppo import files
from lightppo.__main__ import main


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_model(folder: Path, export: Path) -> None:
    """Weights to the bit, and all files but the model card and the manifest."""
    found, expected = weights(folder), weights(export)
    assert {name: t.dtype for name, t in found.items()} == {
        name: t.dtype for name, t in expected.items()
    }
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
    ):
        assert (folder / name).read_text() == (export / name).read_text(), name


@pytest.mark.parametrize("name", ["one", "two"])  # ZeRO 0; ZeRO 3 on two ranks
def test_a_checkpoint_becomes_what_its_run_has_exported(name, recorded, tmp_path, capsys):
    main(["convert", str(recorded / name), str(tmp_path / "out")])
    assert "global_step4" in capsys.readouterr().out
    assert_same_model(tmp_path / "out", recorded / name)


def test_a_critic_and_an_earlier_step(recorded, tmp_path):
    main(
        ["convert", str(recorded / "two"), str(tmp_path / "out"), "--step", "2", "--part", "critic"]
    )
    from transformers import AutoModelForSequenceClassification

    checkpoint = recorded / "two" / "checkpoints_ppo" / "_critic" / "global_step2"
    files = [checkpoint / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    parts = [torch.load(file, weights_only=False) for file in files]
    masters = torch.cat([part["optimizer_state_dict"]["fp32_flat_groups"][0] for part in parts])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.score.weight.shape == (1, 32)
    assert torch.isin(model.score.weight, masters).all()
    assert not (weights(tmp_path / "out")["score.weight"] == 0).any()


@pytest.fixture(scope="module")
def adapted(recorded, tmp_path_factory) -> Path:
    """A run on two ranks at ZeRO 2 in bf16 with LoRA, an export beside its checkpoint, and a critic's."""
    root = tmp_path_factory.mktemp("adapted")
    flags = {
        "config": recorded / "one" / "run_config.yaml",
        "save_path": root / "run",
        "ckpt_path": root / "ckpt",
    }
    # not the other run's
    flags |= {"rollout_data_dir": root / "rollouts", "skip_rollout": root / "saved"}
    flags |= {
        "bf16": True,
        "zero_stage": 2,
        "lora_rank": 2,
        "benchmark_steps": 2,
        "init_kl_coef": 0.1,
    }
    words = [f"--{name}={value}" for name, value in flags.items() if value is not True]
    run_ranks(
        recorded / "command.py", "ppo", *words, "--bf16", "--save_hf_ckpt", "--save_value_network"
    )
    return root


def test_adapters_out_of_a_checkpoint(adapted, tmp_path):
    """Under bf16, where a sum that is rounded twice would differ."""
    main(["convert", str(adapted / "ckpt"), str(tmp_path / "out")])
    export = adapted / "ckpt" / "global_step2_hf"
    assert_same_model(tmp_path / "out", export)
    ours, theirs = (
        load_file(at / "adapter" / "adapter_model.safetensors") for at in (tmp_path / "out", export)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("which", ["run", "run_critic"])
def test_an_adapter_is_merged_as_in_an_export(which, adapted, recorded, tmp_path):
    """Into weights of bf16, as training held them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(recorded / "model", dtype=torch.bfloat16)
    model.generation_config.update(temperature=0.5, do_sample=True)
    model.save_pretrained(tmp_path / "base")
    shutil.copy(recorded / "model" / "tokenizer.json", tmp_path / "base")
    shutil.copy(recorded / "model" / "tokenizer_config.json", tmp_path / "base")
    main(
        [
            "merge",
            str(adapted / which / "adapter"),
            str(tmp_path / "out"),
            "--base",
            str(tmp_path / "base"),
        ]
    )
    found, expected = weights(tmp_path / "out"), weights(adapted / which)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    if which == "run":
        assert (
            json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"]
            == 0.5
        )


def test_a_merged_adapter_computes_as_beside_its_base(tiny_model, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapted = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=9, target_modules=["q_proj", "up_proj"], use_rslora=True)
    )
    randomize_b(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    main(["merge", str(tmp_path / "adapter"), str(tmp_path / "out")])
    ids = torch.arange(4, 24)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        expected = adapted(ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-5, atol=1e-5)
        with adapted.disable_adapter():
            assert (adapted(ids).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("places", "stays_tied"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, False),
        ({"target_modules": ["embed_tokens"]}, False),
        ({"target_modules": ["embed_tokens", "lm_head"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        ({"target_modules": ["q_proj"]}, True),
    ],
)
def test_an_adapter_of_a_tied_head_or_embedding(places, stays_tied, tmp_path):
    """The other one stays as it is, as beside the base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = save_causal_lm(tmp_path / "base", tie_word_embeddings=True)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, **places))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
    adapted.eval().save_pretrained(tmp_path / "adapter")
    main(["merge", str(tmp_path / "adapter"), str(tmp_path / "out")])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.config.tie_word_embeddings == stays_tied
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("command", ["sft", "rm"])
def test_a_checkpoint_of_training_on_data(command, recorded, tmp_path):
    """Whose checkpoints are in another folder; a reward model has a head."""
    answers = {"output": "8", "chosen": "8", "rejected": "9"}
    rows = write_jsonl(
        tmp_path / "rows.jsonl", [{"input": row["input"]} | answers for row in sums(8)]
    )
    flags = {
        "pretrain": recorded / "model",
        "dataset": rows,
        "max_steps": 2,
        "save_steps": 1,
        "learning_rate": 1e-2,
    }
    flags |= {
        "train_batch_size": 4,
        "micro_train_batch_size": 4,
        "save_path": tmp_path / "run",
        "zero_stage": 1,
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    run_ranks(recorded / "command.py", command, *words, world_size=1)
    main(["convert", str(tmp_path / "run"), str(tmp_path / "out")])
    found, expected = weights(tmp_path / "out"), weights(tmp_path / "run")
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert ("score.weight" in found) == (command == "rm")
    forms = [
        json.loads((tmp_path / folder / "config.json").read_text()).get("reward_rows")
        for folder in ("out", "run")
    ]
    assert forms[0] == forms[1]
    assert (forms[0] is not None) == (command == "rm")


def fails(*words: str, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_be_converted(recorded, copied, tiny_model, tmp_path, capsys):
    run, out = copied("one"), tmp_path / "out"
    assert "is there already: name a new folder" in fails("convert", run, run, capsys=capsys)
    assert "no checkpoint of step 3 of the actor; it has global_step2, global_step4" in fails(
        "convert", run, out, "--step", "3", capsys=capsys
    )
    assert "no checkpoint of the ema" in fails("convert", run, out, "--part", "ema", capsys=capsys)
    assert "--base /nowhere: no such folder" in fails(
        "convert", run, out, "--base", "/nowhere", capsys=capsys
    )
    wider = save_causal_lm(tmp_path / "wider", hidden_size=64)
    assert "holds another model" in fails("convert", run, out, "--base", wider, capsys=capsys)
    deeper = save_causal_lm(tmp_path / "deeper", num_hidden_layers=3)
    assert "holds another model: it has no" in fails(
        "convert", run, out, "--base", deeper, capsys=capsys
    )
    states = run / "checkpoints_ppo" / "_actor" / "global_step4" / "mp_rank_00_model_states.pt"
    states.write_bytes(states.read_bytes()[:-1] + b"?")
    assert "global_step4 is damaged: mp_rank_00_model_states.pt" in fails(
        "convert", run, out, capsys=capsys
    )
    assert not out.exists()


def test_what_cannot_be_merged(adapted, tmp_path, capsys):
    adapter, out = adapted / "run" / "adapter", tmp_path / "out"
    assert "has no adapter_config.json" in fails("merge", adapted, out, capsys=capsys)
    other = save_causal_lm(tmp_path / "wider", hidden_size=64)
    assert f"adapter does not fit --base {other}" in fails(
        "merge", adapter, out, "--base", other, capsys=capsys
    )
    config = json.loads((Path(other) / "config.json").read_text())
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (Path(other) / "config.json").write_text(json.dumps(config | {"quantization_config": packed}))
    told = fails("merge", adapter, out, "--base", other, capsys=capsys)
    assert "is quantised, and cannot hold a merged adapter" in told


@pytest.mark.parametrize("name", ["one", "two"])
def test_nothing_in_a_checkpoint_is_run(name, copied, tmp_path, capsys):
    """With a manifest that fits, as whoever wrote the file would make it."""
    folder, mark, seen = copied(name), tmp_path / "ran", set()
    for part in ("actor", "critic"):
        checkpoint = folder / "checkpoints_ppo" / f"_{part}" / "global_step4"
        for file in sorted(checkpoint.glob("*.pt")):
            whole = file.read_bytes()
            poison(file, mark)
            files.seal(checkpoint)
            told = fails("convert", checkpoint, tmp_path / "out", capsys=capsys)
            assert f"{file} is not loaded: it names posix.system" in told
            assert not (tmp_path / "out").exists()
            file.write_bytes(whole)
            seen.add(file.name.split("_")[0])
    assert seen == ({"mp", "client"} if name == "one" else {"zero", "client"})
    assert not mark.exists()


@pytest.fixture
def altered(copied, tmp_path, monkeypatch):
    """``altered(option=value)``: a checkpoint that says so of its run, sealed again; ``evil`` leaves a file."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    checkpoint = copied("one") / "checkpoints_ppo" / "_actor" / "global_step4"
    shutil.rmtree(checkpoint.parent.parent / "global_step4_hf", ignore_errors=True)

    def alter(**options) -> Path:
        file = checkpoint / "client_state.pt"
        state = torch.load(file, weights_only=False)
        state["config"] |= options
        torch.save(state, file)
        files.seal(checkpoint)
        return checkpoint

    return alter


@pytest.mark.parametrize("command", ["convert", "chat"])
@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("external_lib", "evil", "its run had --external_lib evil, which could run somebody"),
        (
            "override_config",
            '{"bos_token_id": 3}',
            "its run had --override_config '{\"bos_token_id",
        ),
        (
            "pretrain",
            "memory://evil/model",
            "had --pretrain memory://evil/model; a checkpoint fetches",
        ),
        (
            "tokenizer_path",
            "memory://evil/words",
            "had --tokenizer_path memory://evil/words; a chec",
        ),
    ],
)
def test_options_in_a_checkpoint_run_nothing(
    command, option, value, told, altered, tmp_path, capsys
):
    words = [altered(**{option: value})] + [tmp_path / "out"] * (command == "convert")
    assert told in fails(command, *words, capsys=capsys)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_options_of_the_command_line_hold(altered, recorded, tmp_path, capsys):
    checkpoint = altered(
        external_lib="json", override_config='{"bos_token_id": 3}', pretrain="memory://evil"
    )
    out, base = tmp_path / "out", recorded / "model"
    changed = ["--override_config", '{"bos_token_id": 4}', "--external_lib", "evil"]
    assert "is no JSON object" in fails(
        "convert", checkpoint, out, "--override_config", "[]", capsys=capsys
    )
    main(["convert", str(checkpoint), str(out), "--base", str(base), *changed])
    assert f"base: {base}" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["bos_token_id"] == 4
    assert (tmp_path / "ran").exists()


def test_nothing_in_an_adapter_is_run(adapted, recorded, tmp_path, capsys):
    adapter, mark = (
        shutil.copytree(adapted / "run" / "adapter", tmp_path / "adapter"),
        tmp_path / "ran",
    )
    file = adapter / "adapter_model.bin"
    torch.save(load_file(adapter / "adapter_model.safetensors"), file)
    (adapter / "adapter_model.safetensors").unlink()
    poison(file, mark)
    told = fails("merge", adapter, tmp_path / "out", "--base", recorded / "model", capsys=capsys)
    assert f"{adapter} is not loaded: it names posix.system" in told
    assert not mark.exists()


@pytest.mark.long
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (1, True), (2, False), (3, True)])
def test_every_stage_on_two_ranks(stage, bf16, lora, recorded, tmp_path):
    flags = {
        "config": recorded / "one" / "run_config.yaml",
        "save_path": tmp_path / "run",
        "zero_stage": stage,
    }
    flags |= {"benchmark_steps": 2} | ({"lora_rank": 2} if lora else {"enable_ema": True})
    # not the other run's
    flags |= {"rollout_data_dir": tmp_path / "rollouts", "skip_rollout": tmp_path / "saved"}
    words = [f"--{name}={value}" for name, value in flags.items() if value is not True]
    words += [f"--{name}" for name, value in (flags | {"bf16": bf16}).items() if value is True]
    run_ranks(recorded / "command.py", "ppo", *words, "--save_hf_ckpt", "--save_value_network")
    main(["convert", str(tmp_path / "run"), str(tmp_path / "out")])
    assert_same_model(tmp_path / "out", tmp_path / "run" / "checkpoints_ppo" / "global_step2_hf")
    main(["convert", str(tmp_path / "run"), str(tmp_path / "critic"), "--part", "critic"])
    found, expected = weights(tmp_path / "critic"), weights(tmp_path / "run_critic")
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    if not lora:  # the run's own model is the average
        main(["convert", str(tmp_path / "run"), str(tmp_path / "ema"), "--part", "ema"])
        found, expected = weights(tmp_path / "ema"), weights(tmp_path / "run")
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_the_output_is_not_in_what_is_read(recorded, adapted, tmp_path, capsys):
    checkpoint = recorded / "one" / "checkpoints_ppo" / "_actor" / "global_step4"
    adapter = adapted / "ckpt" / "global_step2_hf" / "adapter"
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    (tmp_path / "inside").symlink_to(checkpoint / "new")
    cases = {
        f"convert {checkpoint} {checkpoint}/new": f"CHECKPOINT {checkpoint}",
        f"convert {recorded}/one {tmp_path}/inside": f"CHECKPOINT {checkpoint}",
        f"merge {adapter} {adapter}/merged": f"ADAPTER {adapter}",
        f"merge {adapter} {base}/merged": f"--base {base}",
        f"convert {recorded}/one org/name --base org/name": "--base org/name, and the run would write over it",
    }
    before = {folder: sorted(folder.iterdir()) for folder in (checkpoint, adapter, Path(base))}
    for line, said in cases.items():
        with pytest.raises(SystemExit) as end:
            main(line.split())
        told = capsys.readouterr().err
        assert end.value.code == 2
        assert said in told, told
        assert "name another OUT" in told
    assert {folder: sorted(folder.iterdir()) for folder in before} == before
