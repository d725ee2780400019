"""Every option of strategy, models, data and optimizers reaches the component that it is for."""

from __future__ import annotations

import concurrent.futures
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.runs import fitted
from support.tiny import save_causal_lm, save_reward_model, tiny_config, write_jsonl
from torch import nn
from transformers import get_scheduler

from lightppo.config import PPOConfig
from lightppo.data import prepared_rows
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import ConfigError, DataError, ModelLoadError
from lightppo.logging import run_folder
from lightppo.models import run_models
from lightppo.models.loading import get_tokenizer
from lightppo.rollout import hf
from lightppo.rollout.decoding_runners import CUDAGraphs
from lightppo.trainer import build
from lightppo.trainer.build import build_held_out
from lightppo.trainer.start_checks import check_data, check_options

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def tokenizer(tiny_model):
    return get_tokenizer(tiny_model)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> str:
    return save_reward_model(tmp_path_factory.mktemp("reward_model"))


def models_of(config: PPOConfig) -> build.Models:
    config = config.resolved()
    return build.build_models(config, build.build_strategy(config))


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# -- strategy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "attribute"),
    [
        ("seed", 7, "seed"),
        ("max_norm", 0.5, "max_norm"),
        ("micro_train_batch_size", 1, "micro_train_batch_size"),
        ("train_batch_size", 2, "train_batch_size"),
        ("zero_stage", 3, "zero_stage"),
        ("full_determinism", True, "full_determinism"),
        ("dist_timeout", 5.0, "timeout_minutes"),
        ("grad_accum_dtype", "fp32", "grad_accum_dtype"),
    ],
)
def test_strategy_gets_its_options(make_config, flag, value, attribute):
    assert getattr(build.build_strategy(make_config()), attribute) != value
    assert getattr(build.build_strategy(make_config(**{flag: value})), attribute) == value


def test_strategy_offloads_and_shards(make_config):
    options = {
        "adam_offload": True,
        "param_offload": True,
        "zpg": 2,
        "bf16": True,
        "overlap_comm": True,
    }
    strategy = build.build_strategy(make_config(zero_stage=3, **options))
    zero = strategy.get_ds_train_config()["zero_optimization"]
    assert zero["overlap_comm"]
    assert not strategy.get_ds_train_config(zero_stage=1, param_offload=False)["zero_optimization"][
        "overlap_comm"
    ]
    assert (zero["offload_optimizer"]["device"], zero["offload_param"]["device"]) == ("cpu", "cpu")
    assert zero["zero_hpz_partition_size"] == 2
    assert strategy.get_ds_train_config()["bf16"]["enabled"]


# -- ZeRO stage and offload of each role -----------------------------------------------------------------------------


class Loaded(nn.Module):
    """Stands in for a model: keeps how it was to be loaded."""

    as_loaded = None

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__()
        self.path, self.options, self.ds_config = path, options, options["ds_config"]
        self.hf_model = type("HF", (), {"config": tiny_config()})


@pytest.fixture
def zero_of(monkeypatch, make_config, reward_model):
    """``zero_of(**options)``: the ZeRO section of every model's DeepSpeed configuration."""
    for name in ("Actor", "Critic", "RewardModel"):
        monkeypatch.setattr(run_models, name, Loaded)

    def roles(**options) -> dict[str, dict]:
        config = make_config(
            reward_pretrain=[reward_model], reward_fn=None, enable_ema=True, **options
        )
        config.validate()
        models = models_of(config)
        parts = {
            "actor": models.actor,
            "critic": models.critic,
            "ref": models.reference,
            "ema": models.followers["ema"],
        }
        parts["reward"] = models.reward_models[0]
        return {name: model.ds_config["zero_optimization"] for name, model in parts.items()}

    return roles


def test_each_model_goes_to_its_place_before_the_next_one_loads(
    monkeypatch, make_config, reward_model
):
    """Below ZeRO-3 a host holds one whole model per rank, not all of them."""
    events: list[str] = []
    config = make_config(
        reward_pretrain=[reward_model] * 2, reward_fn=None, enable_ema=True, teacher_pretrain=reward_model,
        advantage_estimator="gae", distill_coef=0.1,
    ).resolved()  # fmt: skip

    class Seen(Loaded):
        def __init__(self, path: str, **options: Any) -> None:
            super().__init__(path, **options)
            events.append("load")

    def into_engine(model: Any, role: str) -> Any:
        events.append(role)
        return model

    for name in ("Actor", "Critic", "RewardModel"):
        monkeypatch.setattr(run_models, name, Seen)
    models = build.build_models(config, build.build_strategy(config), into_engine)
    assert set(models.frozen) == {"teacher"}
    roles = ["actor", "critic", "reference", "reward", "reward", "ema", "teacher"]
    assert events == [event for role in roles for event in ("load", role)]


def stages(zero: dict[str, dict]) -> dict[str, int]:
    return {name: section["stage"] for name, section in zero.items()}


def test_frozen_models_are_sharded_with_the_actor_only_at_stage_3(zero_of):
    assert stages(zero_of(zero_stage=2)) == {
        "actor": 2,
        "critic": 2,
        "ref": 0,
        "ema": 0,
        "reward": 0,
    }
    assert set(stages(zero_of(zero_stage=3)).values()) == {3}


def test_each_role_has_a_stage_of_its_own(zero_of):
    base = {"actor": 2, "critic": 2, "ref": 0, "ema": 0, "reward": 0}
    assert stages(zero_of(zero_stage=2, critic_zero_stage=1)) == base | {"critic": 1}
    assert stages(zero_of(zero_stage=2, ref_zero_stage=3)) == base | {
        "ref": 3,
        "ema": 3,
        "reward": 3,
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, set()),
        ({"adam_offload": True}, {("actor", "offload_optimizer"), ("critic", "offload_optimizer")}),
        ({"param_offload": True}, {("actor", "offload_param"), ("critic", "offload_param")}),
        ({"ref_offload": True}, {(name, "offload_param") for name in ("ref", "ema", "reward")}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",  # sets have no order
)
def test_trained_and_frozen_models_are_offloaded(zero_of, options, expected):
    zero = zero_of(zero_stage=3, **options)
    assert {
        (name, key)
        for name, section in zero.items()
        for key in section
        if key.startswith("offload")
    } == expected


def test_a_critic_and_a_reward_model_load_at_stages_of_their_own(make_config, reward_model):
    models = models_of(
        make_config(reward_pretrain=[reward_model], reward_fn=None, zero_stage=1, ref_zero_stage=3)
    )
    assert all(hasattr(p, "ds_tensor") for p in models.reward_models[0].parameters())
    assert not any(hasattr(p, "ds_tensor") for p in models.critic.parameters())


# -- models ----------------------------------------------------------------------------------------------------------


def test_models_of_a_run(make_config):
    models = models_of(make_config())
    assert same_weights(models.actor, models.reference)
    assert (models.critic is not None, models.reward_models, models.followers) == (True, [], {})
    assert models_of(make_config(init_kl_coef=0)).reference is None
    grpo = models_of(
        make_config(advantage_estimator="grpo", n_samples_per_prompt=2, enable_ema=True)
    )
    assert grpo.critic is None
    assert same_weights(grpo.actor, grpo.followers["ema"])


def test_reference_and_critic_from_checkpoints_of_their_own(make_config, tmp_path):
    other = save_causal_lm(tmp_path / "other", seed=9)
    models = models_of(make_config(ref_pretrain=other, critic_pretrain=other))
    body = lambda model: model.hf_model.base_model  # noqa: E731
    assert not same_weights(models.actor, models.reference)
    assert same_weights(body(models.critic), body(models.reference))


def test_critic_starts_from_the_reward_model_or_from_the_actor(make_config, reward_model):
    options = {"reward_pretrain": [reward_model], "reward_fn": None}
    models = models_of(make_config(**options))
    assert same_weights(models.critic, models.reward_models[0])  # with its head

    models = models_of(make_config(**options, init_critic_from_actor=True))
    assert same_weights(models.critic.hf_model.base_model, models.actor.hf_model.base_model)
    assert models.critic.hf_model.score.weight.count_nonzero() == 0  # a new one
    assert models.reward_models[0].hf_model.score.weight.count_nonzero() > 0


def test_random_weights_are_for_models_without_a_checkpoint_of_their_own(make_config, tmp_path):
    other = save_causal_lm(tmp_path / "other", seed=9)
    loaded = models_of(make_config(ref_pretrain=other, critic_pretrain=other))
    scratch = models_of(
        make_config(init_from_scratch=True, ref_pretrain=other, critic_pretrain=other)
    )
    assert not same_weights(scratch.actor, loaded.actor)
    assert same_weights(scratch.reference, loaded.reference)
    assert same_weights(scratch.critic.hf_model.base_model, loaded.critic.hf_model.base_model)
    # random too: the reference is the actor's own start
    alike = models_of(make_config(init_from_scratch=True))
    assert same_weights(alike.reference, alike.actor)
    assert not same_weights(alike.critic.hf_model.base_model, loaded.critic.hf_model.base_model)


def test_random_weights_overridden_configs_and_eager_attention(make_config):
    loaded, scratch = models_of(make_config()), models_of(make_config(init_from_scratch=True))
    assert not same_weights(loaded.actor, scratch.actor)
    models = models_of(
        make_config(override_config='{"rms_norm_eps": 0.25}', attn_implementation="eager")
    )
    config = models.actor.hf_model.config
    assert (config.rms_norm_eps, config._attn_implementation) == (0.25, "eager")
    assert (
        models.critic.hf_model.config.rms_norm_eps,
        models.reference.hf_model.config.rms_norm_eps,
    ) == (0.25, 0.25)


def test_value_head_by_its_name(make_config, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_reward_model(tmp_path / "rm")
    weights = load_file(f"{folder}/model.safetensors")
    weights["v_head.weight"] = weights.pop("score.weight")
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    options = {"reward_pretrain": [folder], "reward_fn": None}
    with pytest.raises(ModelLoadError, match=r"v_head\.weight.*--value_head_prefix"):
        models_of(make_config(**options))
    models = models_of(make_config(**options, value_head_prefix="v_head"))
    assert torch.equal(models.critic.hf_model.score.weight, weights["v_head.weight"])
    assert torch.equal(models.reward_models[0].hf_model.score.weight, weights["v_head.weight"])


def test_normalized_rewards(make_config, tmp_path):
    folder = save_reward_model(tmp_path / "rm", mean=3.0, std=2.0)
    ids = torch.tensor([[5, 6, 7]])
    raw, normalized = (
        models_of(
            make_config(reward_pretrain=[folder], reward_fn=None, normalize_reward=on)
        ).reward_models[0](ids)
        for on in (False, True)
    )
    assert torch.allclose(normalized, (raw - 3) / 2)


def test_temperature_reaches_the_models(make_config):
    models = models_of(make_config(temperature=0.5))
    assert (models.actor.temperature, models.reference.temperature) == (0.5, 0.5)
    # greedy sampling divides by nothing: the loss is that of temperature 1
    assert models_of(make_config(temperature=0)).actor.temperature == 1


@pytest.mark.parametrize(("flag", "half"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bits_are_the_type_of_all_but_the_moving_average(make_config, flag, half):
    models = models_of(make_config(**{flag: True}, zero_stage=1, enable_ema=True))
    of_roles = {name: getattr(models, name) for name in ("actor", "critic", "reference")}
    of_roles |= models.followers
    kinds = {name: next(model.parameters()).dtype for name, model in of_roles.items()}
    assert kinds == {"actor": half, "critic": half, "reference": half, "ema": torch.float32}


def layer_calls(model: Any) -> int:
    """How often the first layer runs in a forward and a backward pass."""
    calls = []
    model.train()
    layer = model.hf_model.base_model.layers[0]
    handle = layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    model(torch.tensor([[5, 6, 7]]), num_actions=2).sum().backward()
    handle.remove()
    return len(calls)


def test_gradient_checkpointing_runs_the_layers_again(make_config):
    models = models_of(make_config())
    assert (layer_calls(models.actor), layer_calls(models.critic)) == (1, 1)
    for reentrant in (False, True):
        options = {
            "gradient_checkpointing": True,
            "gradient_checkpointing_use_reentrant": reentrant,
        }
        models = models_of(make_config(**options))
        for model in (models.actor, models.critic):
            layer = model.hf_model.base_model.layers[0]
            assert layer._gradient_checkpointing_func.keywords["use_reentrant"] is reentrant
    assert (layer_calls(models.actor), layer_calls(models.critic)) == (2, 2)


REMOTE_MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_checkpoint_runs_only_if_asked_to(make_config, tmp_path, monkeypatch):
    for module in ("dynamic_module_utils", "utils.hub"):
        monkeypatch.setattr(
            f"transformers.{module}.HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False
        )
    folder = Path(save_causal_lm(tmp_path / "model"))
    (folder / "own.py").write_text(REMOTE_MODEL)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own_llama", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    options = {"pretrain": str(folder), "advantage_estimator": "grpo", "n_samples_per_prompt": 2}
    with pytest.raises(ModelLoadError, match=r"(?s)--pretrain .*trust_remote_code"):
        models_of(make_config(**options))
    models = models_of(make_config(**options, trust_remote_code=True))
    assert {type(model.hf_model).__name__ for model in (models.actor, models.reference)} == {
        "OwnForCausalLM"
    }


def test_tokenizers_in_python(make_config, tmp_path):
    from transformers import ByT5Tokenizer

    folder = Path(save_causal_lm(tmp_path / "model", vocab_size=400))
    config = make_config(pretrain=str(folder), disable_fast_tokenizer=True)
    actor = models_of(config).actor
    with pytest.raises(ModelLoadError, match=r"--pretrain.*--disable_fast_tokenizer"):
        build.build_tokenizer(config, actor)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    ByT5Tokenizer().save_pretrained(folder)
    assert not build.build_tokenizer(config, actor).is_fast


def test_a_tokenizer_of_its_own(make_config, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    folder = Path(save_causal_lm(tmp_path / "model"))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    config = make_config(pretrain=str(folder))
    actor = models_of(config).actor
    with pytest.raises(ModelLoadError, match="--pretrain"):
        build.build_tokenizer(config, actor)
    config = config.with_options(tokenizer_path=str(tmp_path / "tokenizer"))
    assert build.build_tokenizer(config, actor).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ModelLoadError, match="--tokenizer_path"):
        build.build_tokenizer(config.with_options(tokenizer_path=str(tmp_path / "nowhere")), actor)


# -- data ------------------------------------------------------------------------------------------------------------


def prompts_of(config: PPOConfig, tokenizer: Any, read: Any = build.build_prompts) -> list[str]:
    dataset = read(config, tokenizer, DeepspeedStrategy())
    return [dataset[i].text for i in range(len(dataset))]


@pytest.fixture
def splits(tmp_path) -> str:
    """A folder with a file for each split."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "test", "validation"):
        write_jsonl(
            folder / f"{name}.jsonl", [{"input": f"{name} {i}", "label": str(i)} for i in range(3)]
        )
    return str(folder)


def test_splits(make_config, tokenizer, splits):
    config = make_config(prompt_data=splits, eval_data=splits)
    assert prompts_of(config, tokenizer) == ["train 0", "train 1", "train 2"]
    assert prompts_of(config, tokenizer, build_held_out) == ["test 0", "test 1", "test 2"]
    config = make_config(prompt_data=splits, eval_data=splits, prompt_split="test", eval_split="validation",
                         prompt_max_len=16)  # fmt: skip
    assert prompts_of(config, tokenizer)[0] == "test 0"
    assert prompts_of(config, tokenizer, build_held_out)[0] == "validation 0"


def test_number_of_rows(make_config, tokenizer, splits):
    config = make_config(prompt_data=splits, eval_data=splits, max_samples=2, eval_max_samples=1)
    assert prompts_of(config, tokenizer) == ["train 0", "train 1"]
    assert prompts_of(config, tokenizer, build_held_out) == ["test 0"]


def test_overlong_prompts_are_dropped_cut_or_refused(make_config, tokenizer, splits, capsys):
    options = {
        "prompt_data": f"{splits}/train.jsonl,{splits}/validation.jsonl",
        "prompt_max_len": 8,
    }
    # "validation 0" has 12 characters
    assert len(prompts_of(make_config(**options, filter_overlong_prompts=True), tokenizer)) == 3
    assert "6 rows: 3 kept, 0 of them truncated; dropped: 3 overlong" in capsys.readouterr().out
    assert prompts_of(make_config(**options, truncation="left"), tokenizer)[3] == "dation 0"
    # the more special one wins
    config = make_config(**options, truncation="left", filter_overlong_prompts=True)
    assert len(prompts_of(config, tokenizer)) == 3


def test_columns_and_templates(make_config, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"task": "1+1=", "gold": "2"}])
    config = make_config(
        prompt_data=path, input_key="task", label_key="gold", input_template="sum {}"
    )
    dataset = build.build_prompts(config, tokenizer, DeepspeedStrategy())
    assert (dataset[0].text, dataset[0].label) == ("sum 1+1=", "2")


def test_columns_of_the_data_source_and_of_routes(make_config, tokenizer, tmp_path):
    rows = [
        {"input": "1+1=", "origin": {"set": "sums"}, "task": "math"},
        {"input": "2", "origin": {"set": None}},
    ]
    rows[1]["task"] = None
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    config = make_config(prompt_data=path, data_source_key="origin.set")
    dataset = build.build_prompts(config, tokenizer, DeepspeedStrategy())
    assert [dataset[i].data_source for i in range(2)] == ["sums", "default"]
    with pytest.raises(DataError, match=r"--data_source_key 'source' .*: input, origin, task"):
        build.build_prompts(
            config.with_options(data_source_key="source"), tokenizer, DeepspeedStrategy()
        )
    tests = write_jsonl(
        tmp_path / "tests.jsonl", [{"query_id": n, "level": n + 1} for n in range(2)]
    )
    path_of_ids = write_jsonl(
        tmp_path / "ids.jsonl", [{"input": "1+1=", "query_id": str(n)} for n in range(2)]
    )
    joined = make_config(prompt_data=path_of_ids, prompt_metadata=tests)
    assert build.build_prompts(joined, tokenizer, DeepspeedStrategy())[1].extra == {
        "query_id": "1",
        "level": 2,
    }
    routes = {"reward_fn": None, "reward_routes": '{"math": {"format": 1}, "*": {"format": 2}}'}
    by_task = make_config(**routes, prompt_data=path, reward_routes_by="task")
    prompts = build.build_prompts(by_task, tokenizer, DeepspeedStrategy())
    assert prompts[0].extra["task"] == "math"
    source = build.build_reward(by_task, [], tokenizer, DeepspeedStrategy())
    assert source.by == "task"
    other, strategy = by_task.with_options(reward_routes_by="tusk"), DeepspeedStrategy()
    building = build.Building(other, other, other, strategy, rows={"prompt_data": prompts})
    with pytest.raises(ConfigError, match=r"--reward_routes_by 'tusk'"):
        check_data(building)


def test_probabilities_of_the_sources(make_config, tokenizer, splits):
    options = {"prompt_data": f"{splits}/train.jsonl,{splits}/test.jsonl"}
    assert len(prompts_of(make_config(**options), tokenizer)) == 6
    texts = prompts_of(make_config(**options, prompt_data_probs="0.9,0.1"), tokenizer)
    assert (
        sum(text.startswith("train") for text in texts)
        > sum(text.startswith("test") for text in texts)
        >= 3
    )


def test_tokenising_processes(make_config, tokenizer, monkeypatch):
    asked = []

    class Pool(concurrent.futures.ProcessPoolExecutor):
        def __init__(self, workers: int, *more: Any, **options: Any) -> None:
            asked.append(workers)
            super().__init__(workers, *more, **options)

    monkeypatch.setattr(prepared_rows, "ProcessPoolExecutor", Pool)
    alone = prompts_of(make_config(), tokenizer)
    assert asked == []
    assert prompts_of(make_config(data_num_workers=2), tokenizer) == alone
    assert asked == [2]


def test_rollout_batches(make_config, tokenizer):
    def batches(**options: Any) -> list[list[int]]:
        config = make_config(**options)
        prompts = build.build_prompts(config, tokenizer, DeepspeedStrategy())
        return [
            [p.index for p in batch]
            for batch in build.prompts_dataloader(config, prompts, DeepspeedStrategy())
        ]

    assert [len(batch) for batch in batches(rollout_batch_size=5)] == [5, 5, 2]
    assert sorted(i for batch in batches() for i in batch) == list(range(12))
    assert batches() != batches(seed=1)
    assert [i for batch in batches(data_shuffle=False) for i in batch] == list(range(12))


# -- optimizers and schedules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 3 rollouts per episode; 4 prompts × 2 samples = 8 samples a rollout
        ({"train_batch_size": 8}, 3),
        ({"train_batch_size": 4}, 6),
        ({"ppo_n_minibatches": 4}, 12),
        ({"train_batch_size": 4, "max_epochs": 2}, 12),
        ({"train_batch_size": 4, "num_episodes": 5}, 30),
        ({"train_batch_size": 4, "num_episodes": 5, "total_training_steps": 7}, 14),
        # stops early, the schedule stays
        ({"train_batch_size": 4, "num_episodes": 5, "benchmark_steps": 7}, 30),
    ],
    ids=str,
)
def test_optimizer_steps_of_a_run(make_config, options, expected):
    config = make_config(
        **{"n_samples_per_prompt": 2, "train_batch_size": None, **options}
    ).resolved()
    assert build.optimizer_steps(config, 3) == expected
    assert build.optimizer_steps(config, 3, "critic") == expected


def test_frozen_steps_are_not_in_the_schedule_of_the_actor(make_config):
    config = make_config(
        n_samples_per_prompt=2, train_batch_size=4, num_episodes=5, freezing_actor_steps=6
    ).resolved()
    steps = {role: build.optimizer_steps(config, 3, role) for role in ("actor", "critic")}
    assert steps == {"actor": 2 * (15 - 6), "critic": 2 * 15}
    never_trains = config.with_options(freezing_actor_steps=99)
    assert build.optimizer_steps(never_trains, 3) == 0


def rates(config: PPOConfig, steps: int = 10) -> list[float]:
    """Learning rate of each optimizer step."""
    _, optimizer, scheduler = build.with_optimizer(
        nn.Linear(2, 2), 1.0, steps, config, DeepspeedStrategy()
    )
    seen = []
    for _ in range(steps + 1):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_warm_up(make_config):
    constant = {"lr_scheduler": "constant"}
    assert rates(make_config(**constant, lr_warmup_ratio=0))[:3] == [1, 1, 1]
    # a share of 0.35 of 10 steps, rounded up: 4
    assert rates(make_config(**constant, lr_warmup_ratio=0.35))[:6] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1, 1]
    )
    # steps win over the share
    config = make_config(**constant, lr_warmup_ratio=0.5, lr_warmup_steps=2)
    assert rates(config)[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert rates(make_config(**constant, lr_warmup_ratio=0.5, lr_warmup_steps=0))[0] == 1


@pytest.mark.parametrize(
    ("options", "middle", "end"),
    [
        ({"lr_scheduler": "constant"}, 1, 1),
        ({"lr_scheduler": "linear"}, 0.5, 0),
        ({"lr_scheduler": "cosine"}, 0.5, 0),
        # 0.1 + (1 - 0.1)·½ half way
        ({}, 0.55, 0.1),
        ({"min_lr_ratio": 0.4}, 0.7, 0.4),
    ],
    ids=str,
)
def test_schedules(make_config, options, middle, end):
    seen = rates(make_config(**options, lr_warmup_steps=0))
    assert (seen[0], seen[5], seen[10]) == pytest.approx((1, middle, end))


def test_a_run_of_one_step_trains(make_config):
    assert rates(make_config(), steps=1)[0] == 0.5


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "cosine_with_min_lr"])
@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (10, 3), (97, 3), (4, 4), (3, 5)])
def test_behind_the_warm_up_rates_are_those_of_transformers(make_config, kind, steps, warmup):
    config = make_config(lr_scheduler=kind, lr_warmup_steps=warmup)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    theirs = get_scheduler(
        "constant_with_warmup" if kind == "constant" else kind,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs={"min_lr_rate": 0.1} if kind == "cosine_with_min_lr" else {},
    ).lr_lambdas[0]
    assert rates(config, steps)[warmup:] == [theirs(step) for step in range(warmup, steps + 1)]


def test_adamw(make_config):
    model = nn.Linear(2, 2)
    config = make_config(adam_betas=(0.5, 0.6), l2=0.125)
    _, optimizer, _ = build.with_optimizer(model, 0.25, 10, config, DeepspeedStrategy())
    assert {group["betas"] for group in optimizer.param_groups} == {(0.5, 0.6)}
    # vectors do not decay
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.125, 0]
    assert optimizer.param_groups[0]["initial_lr"] == 0.25
    assert build.with_optimizer(None, 0.25, 10, config, DeepspeedStrategy()) == (None, None, None)


# -- steps of decoding that are captured -----------------------------------------------------------------------------


def test_hf_cuda_graphs_reach_the_engine_and_are_refused_without_a_gpu(make_config):
    from support.fakes import FakeStrategy

    config, strategy = make_config(hf_cuda_graphs=True), FakeStrategy()
    with pytest.raises(ConfigError, match="--hf_cuda_graphs: there is no CUDA device"):
        check_options(
            build.Building(
                options=config, resolved_options=config, config=config.resolved(), strategy=strategy
            )
        )
    for asked, runner in ((config, CUDAGraphs), (make_config(), type(None))):
        assert isinstance(
            build.build_rollout_engine(asked.resolved(), strategy, nn.Linear(1, 1), None).runner,
            runner,
        )


# -- rows that decode together ---------------------------------------------------------------------------------------


def test_rows_of_the_hf_engine_follow_the_gpu_with_least_room_unless_they_are_set(
    make_config, monkeypatch
):
    from support.fakes import FakeStrategy

    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 30, 2 << 30))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 1 << 30)
    seen: list[Any] = []

    class Ranks(FakeStrategy):
        def all_reduce(self, data: Any, op: str = "mean") -> Any:
            seen.append((data, op))
            return 16  # of another rank

    def rows(strategy: Any, **options: Any) -> int:
        options = {
            "rollout_batch_size": 64,
            "train_batch_size": 64,
            "micro_rollout_batch_size": None,
        } | options
        config = make_config(**options).resolved()
        return build.build_rollout_engine(
            config, strategy, nn.Linear(1, 1), None
        ).micro_rollout_batch_size

    (ranks := Ranks()).device = torch.device("cuda", 0)
    assert rows(ranks) == 16
    assert "16 rows at a time" in ranks.printed[-1]
    ((computed, op),) = seen
    assert (computed > 0, computed % 8, op) == (True, 0, "min")
    assert rows(ranks, micro_rollout_batch_size=5) == 5
    assert rows(FakeStrategy()) == 8
    assert len(seen) == 1

    def of_a_user(*parts: Any) -> Any:  # as docs/extending.md has it
        return hf.build(*parts)

    assert rows(ranks, rollout_engine=of_a_user) == 16


# -- the run's own options -------------------------------------------------------------------------------------------


def test_options_of_the_run_are_kept_and_can_be_read_again(make_config, tmp_path):
    from lightppo.config import parse_args

    config = make_config(stop=["x", "y"], kl_target=0.5).resolved()
    run_folder.save_run_config(config, DeepspeedStrategy())
    assert parse_args(["--config", str(tmp_path / "run" / "run_config.yaml")]).flat() == {
        **config.flat(),
        "config": str(tmp_path / "run" / "run_config.yaml"),
    }


def test_what_a_gpu_has_decided_is_kept_beside_the_options(make_config, tmp_path, monkeypatch):
    def fit(building: Any) -> None:
        building.config = building.config.with_options(max_tokens_per_micro_batch=64)

    monkeypatch.setattr("lightppo.trainer.start_checks.fit_memory", fit)
    fitted(make_config(micro_train_batch_size=None, total_training_steps=1))
    kept = [
        yaml.safe_load((tmp_path / "run" / f"run_config{name}.yaml").read_text())
        for name in ("", ".resolved")
    ]
    sizes = ("micro_train_batch_size", "max_tokens_per_micro_batch")
    assert [[each[name] for name in sizes] for each in kept] == [[None, None], [4, 64]]


def test_a_run_folder_that_cannot_be_written_is_named(make_config, tmp_path):
    from lightppo.errors import ConfigError

    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"--save_path {tmp_path}/file/run"):
        run_folder.save_run_config(
            make_config(save_path=str(tmp_path / "file" / "run")), DeepspeedStrategy()
        )


# -- what makes models faster or smaller -----------------------------------------------------------------------------


def test_torch_compile_reaches_actor_critic_and_reference(make_config):
    models = models_of(make_config(torch_compile=True, packing_samples=True))
    for model in (models.actor, models.critic, models.reference):
        assert all(
            layer._compiled_call_impl is not None for layer in model.hf_model.base_model.layers
        )
    models = models_of(make_config())
    assert models.actor.hf_model.base_model.layers[0]._compiled_call_impl is None


@pytest.mark.parametrize("option", ["activation_offload", "use_liger_kernel"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="refused without a GPU only")
def test_what_needs_a_gpu_is_refused_without(make_config, option):
    with pytest.raises(ModelLoadError, match=f"--{option}"):
        models_of(make_config(**{option: True}))


@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 3},
        {"gradient_checkpointing": True, "gradient_checkpointing_use_reentrant": True},
    ],
    ids=str,
)
def test_torch_compile_where_it_cannot_work(make_config, options):
    with pytest.raises(ConfigError, match="--torch_compile"):
        make_config(torch_compile=True, **options).validate()
