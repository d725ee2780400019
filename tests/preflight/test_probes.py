"""Models that transformers gets wrong in padded batches, or that the hf engine cannot decode, end at the start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families.zoo import random_model as random_family
from support.ranks import REPO, run_ranks
from support.tiny import CHARACTERS, save_tokenizer, sums, write_jsonl
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DogeConfig,
    MambaConfig,
    RecurrentGemmaConfig,
)

from lightppo import PPOTrainer
from lightppo.config.cli import parse_args
from lightppo.config.supervised_options import SFTConfig
from lightppo.data.records import Prompt
from lightppo.errors import ModelLoadError
from lightppo.models.actor import Actor
from lightppo.models.batches import PaddedLayout
from lightppo.preflight import probes
from lightppo.ranks import Alone
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine
from lightppo.supervised.trainer import SupervisedTrainer
from lightppo.version import release_of

pytestmark = pytest.mark.usefixtures("world")

CPU = torch.device("cpu")
DOGE = pytest.mark.skipif(
    release_of("transformers") < (5, 19, 0),
    reason="this transformers decodes Doge wrongly, and it is refused",
)
TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": len(CHARACTERS) + 4,
}
SIZES = TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MAMBA = TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}


@pytest.fixture(autouse=True)
def _nothing_is_tested(tmp_path_factory, monkeypatch):
    """No model has passed its tests yet."""
    monkeypatch.setenv("LIGHTPPO_CACHE", str(tmp_path_factory.mktemp("cache")))


def random_model(config: Any) -> Any:
    """Also of biases, which begin as zeros."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2 or parameter.std() == 0:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@pytest.fixture
def recurrent(tmp_path: Path) -> str:
    """A RecurrentGemma, whose states run over the padding."""
    random_model(
        RecurrentGemmaConfig(**SIZES, num_key_value_heads=2, lru_width=32)
    ).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    return str(tmp_path / "model")


REFUSED = (
    "--pretrain: transformers' model type 'recurrent_gemma' is wrong in padded batches: log probs differ by up to "
    r"[\d.e-]+ nats between a padded batch and its rows alone; no other attention helps: choose another model"
)


def test_ppo_ends_before_its_first_step(recurrent, make_config, tmp_path):
    with pytest.raises(ModelLoadError, match=REFUSED) as error:
        PPOTrainer.from_config(make_config(pretrain=recurrent, advantage_estimator="reinforce"))
    assert error.value.exit_code == 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_reference_is_tried_too(recurrent, make_config):
    options = {"ref_pretrain": recurrent, "init_kl_coef": 0.1, "advantage_estimator": "reinforce"}
    with pytest.raises(ModelLoadError, match=REFUSED.replace("--pretrain", "--ref_pretrain", 1)):
        PPOTrainer.from_config(make_config(**options))


def test_training_on_data_ends_before_its_first_step(recurrent, tmp_path):
    data = write_jsonl(
        tmp_path / "rows.jsonl", [{"input": "1+1=", "output": "2"}, {"input": "1=", "output": "1"}]
    )
    arguments = [f"--pretrain={recurrent}", f"--dataset={data}", f"--save_path={tmp_path / 'run'}"]
    sizes = ["--train_batch_size=2", "--micro_train_batch_size=2", "--zero_stage=0"]
    with pytest.raises(ModelLoadError, match=REFUSED):
        SupervisedTrainer.from_config(parse_args([*arguments, *sizes], kind=SFTConfig))


@pytest.mark.long
def test_ranks_at_zero_3_end_together(recurrent, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels): return [0.0] * len(queries)"
    )
    flags = {
        "pretrain": recurrent,
        "prompt_data": write_jsonl(tmp_path / "prompts.jsonl", sums(8)),
        "zero_stage": 3,
    }
    flags |= {
        "reward_fn": tmp_path / "reward.py",
        "save_path": tmp_path / "run",
        "prompt_max_len": 12,
    }
    flags |= {
        "generate_max_len": 5,
        "rollout_batch_size": 4,
        "train_batch_size": 4,
        "micro_train_batch_size": 2,
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    words += ["--advantage_estimator=reinforce"]
    result = run_ranks(REPO / "examples" / "train_ppo.py", *words, world_size=2, check=False)
    assert result.returncode == 2
    assert "model type 'recurrent_gemma' is wrong in padded batches" in result.output
    assert "Traceback" not in result.output


def test_the_line_names_an_attention_that_helps(monkeypatch):
    model = SimpleNamespace(hf_model=random_model(DogeConfig(**SIZES)), layout=PaddedLayout())

    def problem(wrapper: Any, device: torch.device) -> str | None:
        return "wrong" if wrapper.hf_model.config._attn_implementation == "sdpa" else None

    monkeypatch.setattr(probes, "padding_problem", problem)
    with pytest.raises(
        ModelLoadError, match="padded batches: wrong; set --attn_implementation eager"
    ):
        probes.check_padding({"--pretrain": model}, Alone())
    assert model.hf_model.config._attn_implementation == "sdpa"
    model.layout.packs = True
    probes.check_padding({"--pretrain": model, "--critic_pretrain": None}, Alone())
    # the language-model loss is padded
    with pytest.raises(ModelLoadError, match="wrong in padded batches"):
        probes.check_padding({"--pretrain": model}, Alone(), always_padded=True)


def test_a_model_whose_training_draws_at_random_is_refused_by_its_flag():
    models = {"--pretrain": Actor(random_family("phimoe")), "--ref_pretrain": None}
    with pytest.raises(
        ModelLoadError, match="--pretrain: transformers' model type 'phimoe' cannot be trained: log"
    ):
        probes.check_training(models, Alone(CPU))
    probes.check_training({"--ref_pretrain": models["--pretrain"]}, Alone(CPU))


# -- decoding with a cache ---------------------------------------------------------------------------------------------


def decoding(config: Any, tokenizer: Any) -> tuple[HFRolloutEngine, Actor]:
    actor = Actor(random_model(config), valid_vocab_size=len(CHARACTERS) + 4)
    return HFRolloutEngine(actor, tokenizer, micro_rollout_batch_size=2), actor


@DOGE
def test_a_mask_with_a_row_for_each_head_is_decoded(tiny_tokenizer):
    """Doge's; a forward pass and decoding agree."""
    engine, actor = decoding(DogeConfig(**SIZES, num_key_value_heads=2), tiny_tokenizer)
    assert probes.decoding_problem(engine, actor, CPU) is None
    assert engine.last_stats == {}


def test_a_family_without_a_cache_for_decoding_is_refused_at_the_start(tiny_tokenizer):
    engine, actor = decoding(MambaConfig(**MAMBA), tiny_tokenizer)
    # since transformers 5.24 it takes one, and is wrong with it
    reasons = "it fails: .* takes a DynamicCache|log probs while decoding differ by up to"
    with pytest.raises(ModelLoadError, match=rf"--rollout_engine hf .* 'mamba': ({reasons})"):
        probes.check_decoding(engine, actor, Alone(CPU))


@DOGE
def test_a_cache_of_the_last_loop_alone_is_refused(tiny_tokenizer):
    """Dory's, with which bfloat16 would hide that answers come from other numbers."""
    engine, actor = decoding(DogeConfig(**SIZES, num_key_value_heads=2), tiny_tokenizer)
    actor.hf_model.config.recurrent_kv_cache_mode = "per_loop"
    probes.check_decoding(engine, actor, Alone(CPU))
    actor.hf_model.config.recurrent_kv_cache_mode = "last_loop"
    with pytest.raises(
        ModelLoadError, match=r"--rollout_engine hf: .*'last_loop'.* set --override_config"
    ):
        probes.check_decoding(engine, actor, Alone(CPU))


@pytest.mark.skipif("dory" not in CONFIG_MAPPING, reason="this transformers has no Dory")
def test_layers_that_run_several_times_are_decoded(tiny_tokenizer):
    actor = Actor(random_family("dory"), valid_vocab_size=len(CHARACTERS) + 4)
    engine = HFRolloutEngine(actor, tiny_tokenizer, micro_rollout_batch_size=2)
    prompts = [Prompt("", list(range(3, 3 + length)), index=length) for length in (9, 2, 5)]
    for rollout in engine.generate(prompts, SamplingParams(max_new_tokens=8, n=2, seed=1)):
        ids = torch.tensor([rollout.prompt.token_ids + rollout.response_ids])
        expected = actor.score_actions(ids, len(rollout.response_ids)).log_probs[0]
        torch.testing.assert_close(
            torch.tensor(rollout.log_probs), expected.detach(), atol=1e-3, rtol=0
        )


@DOGE
def test_other_log_probs_while_decoding_are_refused(tiny_tokenizer):
    engine, actor = decoding(DogeConfig(**SIZES), tiny_tokenizer)
    actor.train()
    actor.temperature = 0.7
    assert probes.decoding_problem(engine, actor, CPU) is None
    assert actor.training
    whole, seen = engine.to_rollouts, []

    def shifted(*args: Any) -> Any:
        for rollout in whole(*args):
            rollout.log_probs[-1] += 0.05
            seen.append(rollout)
            yield rollout

    engine.to_rollouts = lambda *args: [*shifted(*args)]
    assert "log probs while decoding differ by up to 0.05 nats" in probes.decoding_problem(
        engine, actor, CPU
    )
    assert len(seen) == 2
