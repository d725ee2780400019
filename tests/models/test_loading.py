"""Loading models and tokenizers, and what makes a loaded model faster or smaller."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families.zoo import random_model
from safetensors.torch import load_file, save_file
from support.ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoConfig,
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from lightppo.compat.script_names import get_llm_for_sequence_regression
from lightppo.config import PPOConfig
from lightppo.errors import ModelLoadError
from lightppo.models.actor import Actor
from lightppo.models.batches import decoder_layers
from lightppo.models.critic import Critic, NewRewardModel, RewardModel
from lightppo.models.kernels.liger import use_liger_kernels
from lightppo.models.kernels.offload import offloading
from lightppo.models.loading import (
    get_tokenizer,
    load_causal_lm,
    load_sequence_classifier,
    valid_vocab_size,
)
from lightppo.models.wrapper import compile_layers, prepare_model

MakeModel = Callable[..., PreTrainedModel]


@pytest.mark.parametrize(
    "path", ["/nowhere/model", "./nowhere", "a/b/c", "~/nowhere", "s3://bucket/model"]
)
def test_missing_model_path_names_path_and_flag(path: str) -> None:
    with pytest.raises(ModelLoadError, match=f"--pretrain {path}"):
        load_causal_lm(path)
    with pytest.raises(ModelLoadError, match=f"--critic_pretrain {path}"):
        load_sequence_classifier(path, kind="critic")


def test_unknown_hub_id_and_empty_path_and_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="--pretrain nobody/no-such-model"):
        load_causal_lm("nobody/no-such-model")
    with pytest.raises(ModelLoadError, match="--pretrain"):
        load_causal_lm("")
    with pytest.raises(ModelLoadError, match=r"--pretrain .*config\.json"):
        load_causal_lm(str(tmp_path))


def test_home_folder_is_expanded(
    causal_lm: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    causal_lm().save_pretrained(tmp_path / "lm")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_causal_lm("~/lm").config.model_type == "llama"


def test_flag_of_the_role_is_named() -> None:
    with pytest.raises(ModelLoadError, match="--ref_pretrain /nowhere"):
        Actor("/nowhere", flag="--ref_pretrain")


def test_missing_weights_are_not_made_up(causal_lm: MakeModel, tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for load in (load_causal_lm, Critic):
        with pytest.raises(
            ModelLoadError, match=r"--\w*pretrain .* 1 weights .*layers\.1\.mlp\.up_proj\.weight"
        ):
            load(str(tmp_path))


def test_a_classifier_is_not_an_actor(classifier: MakeModel, tmp_path: Path) -> None:
    """Also where its embedding would be taken for the head."""
    model = classifier()
    for tied in (False, True):
        model.config.tie_word_embeddings = tied
        model.save_pretrained(tmp_path)
        with pytest.raises(ModelLoadError, match="a LlamaForSequenceClassification, which gives"):
            Actor(str(tmp_path))
    assert Actor(str(tmp_path), init_from_scratch=True).model.get_output_embeddings() is not None


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
def test_a_model_that_reads_both_sides_is_not_an_actor(kind: str, tmp_path: Path) -> None:
    """transformers has a language model of each, whose tokens would see those behind them."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"--ref_pretrain .*type '{kind}' reads .* both"):
        load_causal_lm(str(tmp_path), flag="--ref_pretrain", init_from_scratch=True)
    AutoConfig.for_model(kind, is_decoder=True, **sizes).save_pretrained(tmp_path)
    load_causal_lm(str(tmp_path), init_from_scratch=True)


def test_only_a_critic_is_told_of_estimators(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    for flag, told in (("--pretrain", False), ("--critic_pretrain", True)):
        with pytest.raises(ModelLoadError) as caught:
            load_sequence_classifier(
                str(tmp_path), kind="critic", flag=flag, init_from_scratch=True
            )
        assert ("critic is" in str(caught.value)) is told


def test_a_family_without_a_classifier_or_lm_is_an_error(tmp_path: Path) -> None:
    BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1
    ).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ModelLoadError, match=f"--pretrain {tmp_path}"):
        load_causal_lm(str(tmp_path), init_from_scratch=True)


@pytest.mark.parametrize("family", ["qwen2", "gemma", "gpt2"])
def test_tied_embeddings_stay_tied(family: str, causal_lm: MakeModel, tmp_path: Path) -> None:
    causal_lm(family).save_pretrained(tmp_path / "lm")
    actor = Actor(str(tmp_path / "lm"))
    model = actor.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    actor(torch.tensor([[5, 6, 7]]), 2).sum().backward()
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
    model.save_pretrained(tmp_path / "again")
    again = Actor(str(tmp_path / "again")).model
    assert torch.equal(again.get_output_embeddings().weight, model.get_input_embeddings().weight)
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_dropout_is_off_in_config_and_modules(
    family: str, causal_lm: MakeModel, tmp_path: Path
) -> None:
    causal_lm(family).save_pretrained(tmp_path)
    for model in (
        Actor(str(tmp_path)).model,
        Actor(causal_lm(family)).model,
        Critic(str(tmp_path)).model,
    ):
        for module in model.modules():
            rates = {k: v for k, v in vars(module).items() if "drop" in k or "jitter" in k}
            assert not any(isinstance(v, float) and v for v in rates.values()), (
                type(module),
                rates,
            )
            assert not isinstance(module, torch.nn.Dropout) or module.p == 0.0


def test_a_number_that_phimoe_chooses_experts_by_is_no_dropout(tmp_path: Path) -> None:
    model = random_model("phimoe")
    model.save_pretrained(tmp_path)
    ids = torch.arange(3, 20)[None]
    loaded = load_causal_lm(str(tmp_path))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert loaded.config.router_jitter_noise == 0.2
    assert loaded.config.input_jitter_noise == 0.0


def test_a_critic_of_a_family_without_a_classifier_says_so(tmp_path: Path) -> None:
    random_model("apertus").save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError,
        match=r"--critic_pretrain .* has no ModelForSequenceClassification of model type 'apertus'",
    ):
        Critic(str(tmp_path))
    random_model("deepseek_v3").save_pretrained(tmp_path / "deepseek")
    assert Critic(str(tmp_path / "deepseek")).model.score.out_features == 1


def test_attention_and_dtype_are_the_ones_asked_for(causal_lm: MakeModel, tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    for name in ("eager", "sdpa"):
        assert (
            load_causal_lm(str(tmp_path), attn_implementation=name).config._attn_implementation
            == name
        )
        critic = load_sequence_classifier(
            str(tmp_path), kind="critic", attn_implementation=name, dtype=torch.bfloat16
        )
        assert critic.config._attn_implementation == name
        assert {p.dtype for p in critic.parameters()} == {torch.bfloat16}
    assert load_causal_lm(str(tmp_path)).config._attn_implementation == "sdpa"
    assert load_causal_lm(str(tmp_path)).dtype == torch.float32


def test_unknown_attention_is_named(causal_lm: MakeModel, tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"--pretrain .*flash_9"):
        Actor(str(tmp_path), attn_implementation="flash_9")


def test_the_seed_flag_asks_for_flash_attention(
    causal_lm: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    causal_lm().save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for wrapper in (Actor, Critic):
        with pytest.raises(ModelLoadError, match="--flash_attn"):
            wrapper(str(tmp_path), use_flash_attention_2=True, bf16=True)


def test_init_from_scratch_needs_only_a_config_and_is_seeded(
    causal_lm: MakeModel, tmp_path: Path
) -> None:
    model = causal_lm()
    model.config.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    first = load_causal_lm(str(tmp_path), init_from_scratch=True, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    again = load_causal_lm(str(tmp_path), init_from_scratch=True, seed=1)
    other = load_causal_lm(str(tmp_path), init_from_scratch=True, seed=2)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    critics = [
        NewRewardModel(str(tmp_path), init_from_scratch=True, seed=s).model for s in (1, 1, 2)
    ]
    for name, weight in critics[0].named_parameters():
        assert torch.equal(weight, critics[1].get_parameter(name)), name
    assert not torch.equal(critics[0].score.weight, critics[2].score.weight)
    with pytest.raises(ModelLoadError, match=f"--pretrain {tmp_path}"):
        load_causal_lm(str(tmp_path))


def test_external_lib_is_imported_first(
    causal_lm: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    causal_lm().save_pretrained(tmp_path)
    (tmp_path / "lib_for_models.py").write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'my_llama'\n"
        "class MyModel(LlamaForCausalLM):\n    config_class = MyConfig\n"
        "AutoConfig.register('my_llama', MyConfig)\nAutoModelForCausalLM.register(MyConfig, MyModel)\n"
    )
    config = (tmp_path / "config.json").read_text().replace('"llama"', '"my_llama"')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelLoadError, match="my_llama"):
        load_causal_lm(str(tmp_path))
    with pytest.raises(ModelLoadError, match="--external_lib lib_for_models"):
        load_causal_lm(str(tmp_path), external_lib="lib_for_models")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        type(load_causal_lm(str(tmp_path), external_lib="json, lib_for_models")).__name__
        == "MyModel"
    )


def test_sharded_and_torch_checkpoints_are_read(classifier: MakeModel, tmp_path: Path) -> None:
    model = classifier()
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    assert torch.equal(RewardModel(str(tmp_path / "shards")).model.score.weight, model.score.weight)
    model.config.save_pretrained(tmp_path / "torch")
    torch.save(model.state_dict(), tmp_path / "torch" / "pytorch_model.bin")
    assert torch.equal(RewardModel(str(tmp_path / "torch")).model.score.weight, model.score.weight)
    next((tmp_path / "shards").glob("model-00002*")).unlink()
    with pytest.raises(ModelLoadError, match=r"--reward_pretrain .*model-00002"):
        RewardModel(str(tmp_path / "shards"))


def test_a_new_head_replaces_one_with_several_outputs_but_nothing_else(
    classifier: MakeModel, tmp_path: Path
) -> None:
    classifier(num_labels=3).save_pretrained(tmp_path)
    assert Critic(str(tmp_path), init_value_head=True).model.score.weight.shape == (1, 32)
    wider = {"intermediate_size": 40}
    with pytest.raises(ModelLoadError, match=r"--critic_pretrain .*model\.layers\.0\.mlp"):
        Critic(str(tmp_path), init_value_head=True, override_config=wider)


def test_init_value_head_false_needs_a_head(causal_lm: MakeModel, tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"--critic_pretrain .*init_value_head"):
        Critic(str(tmp_path), init_value_head=False)


def test_the_seed_constructor(causal_lm: MakeModel, classifier: MakeModel, tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path / "lm")
    classifier().save_pretrained(tmp_path / "rm")
    assert isinstance(
        get_llm_for_sequence_regression(str(tmp_path / "lm"), "critic", seed=1), Critic
    )
    assert isinstance(get_llm_for_sequence_regression(str(tmp_path / "rm"), "reward"), RewardModel)
    with pytest.raises(ValueError, match=r"model_type .*'value'"):
        get_llm_for_sequence_regression(str(tmp_path / "lm"), "value")
    with pytest.raises(TypeError, match="lora_rnk"):
        get_llm_for_sequence_regression(str(tmp_path / "lm"), "critic", lora_rnk=1)


def test_loading_is_quiet(
    causal_lm: MakeModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    causal_lm().save_pretrained(tmp_path)
    Critic(str(tmp_path))  # a package that is imported only now may warn of something
    capfd.readouterr()
    Critic(str(tmp_path))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert logging.getLogger("transformers").level != logging.ERROR  # put back


def test_stage_3_before_the_process_group_is_an_error(causal_lm: MakeModel, tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"strategy\.setup_distributed"):
        Actor(str(tmp_path), ds_config={"zero_optimization": {"stage": 3}})
    # not sharded at load time
    actor = Actor(str(tmp_path), ds_config={"zero_optimization": {"stage": 2}})
    assert actor.ds_config == {"zero_optimization": {"stage": 2}}


def test_algorithms_stay_without_transformers() -> None:
    code = "import sys, lightppo, lightppo.models; assert not {'transformers', 'deepspeed'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# ---------------------------------------------------------------------------------------------------------------------
# under ZeRO-3


WORKER = Path(__file__).with_name("zero3_worker.py")


@pytest.fixture
def weights(ragged: tuple[Tensor, Tensor, int]) -> Tensor:
    return torch.linspace(-1, 1, 4 * ragged[2]).view(4, ragged[2])


def test_loading_under_zero3(
    causal_lm: Callable[..., PreTrainedModel],
    classifier: Callable[..., PreTrainedModel],
    ragged: tuple[Tensor, Tensor, int],
    weights: Tensor,
    tmp_path: Path,
) -> None:
    models = {name: causal_lm(name) for name in ("llama", "qwen2", "mixtral")}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    models["reward"] = classifier()
    models["reward"].save_pretrained(tmp_path / "reward")
    renamed = load_file(tmp_path / "reward" / "model.safetensors")
    renamed["value_head.weight"] = renamed.pop("score.weight")
    save_file(renamed, tmp_path / "reward" / "model.safetensors", metadata={"format": "pt"})
    sequences, mask, num_actions = ragged
    batch = {"sequences": sequences, "mask": mask, "num_actions": num_actions, "weights": weights}
    torch.save(batch, tmp_path / "batch.pt")

    run_ranks(WORKER, tmp_path, timeout=400)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]

    for seen in ranks:
        for name in (*models, "critic", "scratch"):
            assert seen[name]["held"] == 0, name  # no full parameter stays on a rank
            # a shard is half of a parameter; odd sizes are padded by one element
            assert seen[name]["total"] / 2 <= seen[name]["shards"] < seen[name]["total"] * 0.51, (
                name
            )
        for name, model in models.items():
            assert seen[name]["weights"].keys() == dict(model.named_parameters()).keys(), name
            for key, weight in model.named_parameters():
                assert torch.equal(seen[name]["weights"][key], weight), (name, key)
        for name in ("critic", "scratch"):
            for key, weight in ranks[0][name]["weights"].items():
                assert torch.equal(seen[name]["weights"][key], weight), (name, key)
        # as without sharding
        assert torch.equal(seen["critic"]["weights"]["score.weight"], seen["plain_head"])
        assert seen["bf16_buffers"].pop("embedding") == torch.bfloat16
        for key, buffer in models["llama"].named_buffers():  # frequencies of rotary embeddings
            assert torch.equal(seen["bf16_buffers"][key], buffer), key
        assert seen["zero3_while_alive"] is True
        assert seen["zero3_after_plain"] is False
    scratch = ranks[0]["scratch"]["weights"]["lm_head.weight"]
    assert not torch.equal(scratch, models["llama"].lm_head.weight)
    assert float(scratch.std()) > 0.1  # initializer_range 0.2

    # The packed forward of the sharded engines, with checkpointing, against one padded process of plain torch.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightppo.models.wrapper.fuse", lambda model: None)
        actor, critic = (
            Actor(str(tmp_path / "llama")),
            Critic(str(tmp_path / "llama"), seed=7, draws_head=True),
        )
    for wrapper in (actor, critic):
        name = type(wrapper).__name__
        out = wrapper(sequences, num_actions, mask)
        (out * weights).sum().backward()
        for seen in ranks:
            torch.testing.assert_close(seen[f"{name}_out"], out.detach(), atol=1e-5, rtol=1e-5)
            gradients = seen[f"{name}_grads"]
            assert len(gradients) == 3
            for key, gradient in gradients.items():
                torch.testing.assert_close(
                    gradient, wrapper.model.get_parameter(key).grad, atol=1e-4, rtol=1e-5
                )


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers


Save = Callable[..., str]
FULL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def llama(rows: int) -> PreTrainedModel:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, **sizes))


def test_padding_side_and_ids(save_tokenizer: Save) -> None:
    tokenizer = get_tokenizer(save_tokenizer(**FULL))
    # 4 special tokens, then the digits: "1" is 5
    assert tokenizer(["1", "1+2"], padding=True, add_special_tokens=False).input_ids == [
        [0, 0, 5],
        [5, 14, 6],
    ]
    assert get_tokenizer(save_tokenizer(**FULL), padding_side="right").padding_side == "right"


def test_eos_pads_where_there_is_no_pad_token(
    save_tokenizer: Save, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="lightppo.models.loading"):
        tokenizer = get_tokenizer(save_tokenizer(eos_token="</s>"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert "has no pad token; EOS '</s>' pads" in caplog.text
    assert tokenizer.bos_token_id is None  # a model without BOS is fine
    assert tokenizer("1").input_ids == [5]


def test_no_eos_is_an_error(save_tokenizer: Save) -> None:
    with pytest.raises(ModelLoadError, match=r'--pretrain .*"eos_token"'):
        get_tokenizer(save_tokenizer(pad_token="<pad>"))
    with pytest.raises(ModelLoadError, match="eos_token"):
        get_tokenizer(save_tokenizer())


@pytest.mark.parametrize("path", ["/nowhere/tokenizer", "./nowhere"])
def test_missing_path(path: str) -> None:
    with pytest.raises(ModelLoadError, match=f"--reward_pretrain {path}"):
        get_tokenizer(path, flag="--reward_pretrain")


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    llama(8).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=f"--pretrain {tmp_path}"):
        get_tokenizer(str(tmp_path))


def test_tokenizer_must_fit_the_embedding(save_tokenizer: Save) -> None:
    path = save_tokenizer(**FULL)  # 19 entries, ids 0 to 18
    with pytest.raises(ModelLoadError, match=r"--pretrain .* 18 embedding rows"):
        get_tokenizer(path, llama(18))
    narrow = llama(64)
    narrow.lm_head = nn.Linear(
        8, 18, bias=False
    )  # as Inkling 2 has it: no logits of rows that only pad
    with pytest.raises(ModelLoadError, match=r"largest id is 18, but the model has logits of 18 "):
        get_tokenizer(path, narrow)
    tokenizer = get_tokenizer(path, llama(19))
    assert valid_vocab_size(tokenizer) == 19
    padded = llama(64)  # rows beyond the tokenizer are fine, and never to be sampled
    assert valid_vocab_size(get_tokenizer(path, padded)) == 19 < padded.config.vocab_size


@pytest.mark.parametrize(
    "wrap", [lambda m: m, Actor, nn.DataParallel], ids=["hf", "actor", "engine"]
)
def test_the_model_learns_the_pad_token(
    save_tokenizer: Save, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    model = llama(32)
    assert model.config.pad_token_id is None
    get_tokenizer(save_tokenizer(**FULL), wrap(model))
    assert model.config.pad_token_id == 0
    assert model.generation_config.pad_token_id == 0


def test_a_thing_that_is_no_model(save_tokenizer: Save) -> None:
    with pytest.raises(TypeError, match="not Linear"):
        get_tokenizer(save_tokenizer(**FULL), nn.Linear(1, 1))


def test_log_probs_ignore_padding_rows(save_tokenizer: Save) -> None:
    tokenizer = get_tokenizer(save_tokenizer(**FULL))
    torch.manual_seed(0)
    actor = Actor(llama(64), valid_vocab_size=valid_vocab_size(tokenizer))
    rows = torch.tensor([[5, 14, 6, token] for token in range(19)])
    with torch.no_grad():
        total = actor(rows, 1).exp().sum()
    torch.testing.assert_close(total, torch.tensor(1.0))


# ---------------------------------------------------------------------------------------------------------------------
# compiled layers, kernels, offloaded activations


Batch = tuple[torch.Tensor, torch.Tensor, int]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients_of(model: Actor | Critic, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    sequences, mask, num_actions = batch
    model.zero_grad()
    out = model(sequences, num_actions, mask)
    out.square().sum().backward()
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("packing", [False, True])
def test_compiled_layers_give_the_same(packing: bool, causal_lm: MakeModel, ragged: Batch) -> None:
    """In training; decoding does not compile."""
    from lightppo.rollout.hf import generation_mode

    plain = gradients_of(Actor(causal_lm(), packing_samples=packing), ragged)
    actor, counter = Actor(causal_lm(), packing_samples=packing), CompileCounter()
    names = [name for name, _ in actor.named_parameters()]
    compile_layers(actor.hf_model, backend=counter)
    with generation_mode(actor.hf_model):
        actor.hf_model(ragged[0])
    assert counter.frame_count == 0
    # the compiler takes the model's own norms and rotary embeddings, which round otherwise
    torch.testing.assert_close(gradients_of(actor, ragged), plain, atol=1e-4, rtol=1e-3)
    assert counter.frame_count > 0
    assert names == [name for name, _ in actor.named_parameters()]


def test_layers_are_found_by_the_names_that_transformers_gives(
    family: str, causal_lm: MakeModel
) -> None:
    assert len(decoder_layers(causal_lm(family))) == 2


def test_a_model_that_names_no_layers(causal_lm: MakeModel) -> None:
    model = causal_lm()
    model._no_split_modules = None
    with pytest.raises(ModelLoadError, match="--torch_compile: LlamaForCausalLM"):
        compile_layers(model)


def test_offloaded_activations_give_the_same(
    causal_lm: MakeModel, classifier: MakeModel, ragged: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is kept for the backward pass moves, but for the weights."""
    moved: list[torch.Tensor] = []

    class Watched(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pack: Callable, unpack: Callable) -> None:
            super().__init__(lambda tensor: self.see(tensor, pack(tensor)), unpack)

        def see(self, tensor: torch.Tensor, kept: tuple) -> tuple:
            if not isinstance(kept[0], torch.nn.Parameter):
                moved.append(tensor)
                assert kept[1].data_ptr() != tensor.data_ptr()
            return kept

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", Watched)
    for model in (
        Actor(causal_lm()),
        Actor(causal_lm(), packing_samples=True),
        Critic(classifier()),
    ):
        plain = gradients_of(model, ragged)
        model.around_pass = offloading
        moved.clear()
        torch.testing.assert_close(gradients_of(model, ragged), plain, atol=0, rtol=0)
        assert len(moved) > 20
        places = {tensor.untyped_storage().data_ptr() for tensor in moved}
        assert not places & {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        moved.clear()
        with torch.no_grad():  # nothing is kept
            model(ragged[0], ragged[2], ragged[1])
        assert not moved


def test_what_needs_a_gpu_says_so(causal_lm: MakeModel) -> None:
    actor = Actor(causal_lm())
    asked = PPOConfig.from_flat(activation_offload=True).resolved()
    with pytest.raises(ModelLoadError, match="--activation_offload"):
        prepare_model(actor, "actor", asked, torch.device("cpu"))
    prepare_model(actor, "reference", asked, torch.device("cpu"))
    assert actor.around_pass is None
    prepare_model(actor, "actor", asked, torch.device("cuda"))
    assert actor.around_pass is offloading
    if not torch.cuda.is_available():
        with pytest.raises(ModelLoadError, match="--use_liger_kernel"):
            use_liger_kernels(causal_lm())
