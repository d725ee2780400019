"""Overrides, replacements and attributes in the seed's style: they run, act, and give the trainer's own numbers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support import whole_step as losses
from support.fakes import FakeEngine
from support.own_methods import KL_LOSS, OwnCheckpoints, OwnFit, OwnSteps, OwnTraining
from support.ranks import run_ranks
from support.runs import trained_rows
from support.sampled import PROMPTS, sample
from support.tiny import save_tokenizer, sums, write_jsonl

from lightppo import PolicyLoss, PPOTrainer, ValueLoss
from lightppo.algorithms.masking import LossNormalizer
from lightppo.compat.own_steps import seed_means
from lightppo.compat.script_members import PromptText
from lightppo.config.rules import MicroBatchSpec
from lightppo.distributed import signals
from lightppo.errors import ConfigError
from lightppo.experience.experience import Experience
from lightppo.models.batches import recomputes

pytestmark = pytest.mark.usefixtures("world")

OWN_STEPS = Path(__file__).parent / "ranks" / "own_steps.py"

SEED_ARGS = {
    "use_kl_loss": False,
    "kl_estimator": "k3",
    "aux_loss_coef": 0.0,
    "max_ckpt_num": 3,
    "max_ckpt_mem": 1000,
}


def the_seeds_policy_loss(log_probs, old_log_probs, advantages, action_mask=None):
    ratio = (log_probs - old_log_probs).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return ((loss * action_mask).sum(-1) / action_mask.sum(-1)).mean()


def the_seeds_value_loss(values, old_values, returns, action_mask=None):
    near = old_values + (values - old_values).clamp(-0.2, 0.2)
    loss = torch.max((near - returns) ** 2, (values - returns) ** 2)
    return 0.5 * ((loss * action_mask).sum(-1) / action_mask.sum(-1)).mean()


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]


# -- overrides -------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(make_config, tmp_path):
    """``trained(cls, **options)``: what the first step of a fresh run logs."""

    def train(
        cls: type[PPOTrainer], replace: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        places = {
            name: str(tmp_path / f"{len(list(tmp_path.iterdir()))}{name}")
            for name in ("save_path", "ckpt_path")
        }
        same = {
            "loss_agg_mode": "seq-mean-token-mean",
            "total_training_steps": 1,
            "packing_samples": False,
        }
        trainer = cls.from_config(make_config(**same, **places, **options))
        for name, value in (replace or {}).items():
            setattr(trainer, name, value)
        trainer.fit()
        return metrics_of(Path(places["save_path"]))[0]

    return train


@pytest.mark.parametrize("options", [{}, KL_LOSS])
def test_halves_in_the_seeds_form_have_the_trainers_gradient(trained, options):
    """Four samples in two micro batches: each counts by its share, as the seed's accumulation divides."""
    own, ours = trained(OwnSteps, **options), trained(PPOTrainer, **options)
    for model in ("actor", "critic"):
        assert own[f"train/{model}_norm"] == pytest.approx(
            ours[f"train/{model}_grad_norm"], rel=1e-4
        )
    assert own["train/critic_loss"] == pytest.approx(ours["train/critic_loss"], rel=1e-4)


def test_one_half_in_the_seeds_form_beside_one_of_the_trainer(made, parts, tmp_path):
    """The seed's actor half puts the KL of its pass, a number, where samples have theirs."""

    class OwnActor(OwnSteps):
        training_step_critic = PPOTrainer.training_step_critic

    trainer = made(OwnActor, args=SEED_ARGS | KL_LOSS)
    trainer.fit(trainer.args, [PROMPTS])
    assert all(
        {"train/actor_norm", "train/critic_grad_norm"} <= row.keys()
        for row in trained_rows(tmp_path / "run")
    )


@pytest.mark.long
def test_a_half_in_the_seeds_form_reads_the_load_balancing_loss(trained, tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    class OwnActor(OwnSteps):
        training_step_critic = PPOTrainer.training_step_critic

    folder = tmp_path / "experts"
    tokenizer = save_tokenizer(folder)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        **shape,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    # rows of one length
    options = {"pretrain": str(folder), "aux_loss_coef": 0.5, "ignore_eos": True}
    own, ours = trained(OwnActor, **options), trained(PPOTrainer, **options)
    assert own["train/actor_norm"] == pytest.approx(ours["train/actor_grad_norm"], rel=1e-4)
    without = trained(OwnActor, **options | {"aux_loss_coef": 0.0})
    assert own["train/actor_norm"] != pytest.approx(without["train/actor_norm"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.long
def test_halves_in_the_seeds_form_have_the_trainers_gradient_on_two_ranks(assets, tmp_path):
    """The last rollout has three prompts, so one rank trains on a placeholder beside its only sample."""
    prompts = write_jsonl(tmp_path / "prompts.jsonl", sums(7))
    run_ranks(OWN_STEPS, json.dumps(assets | {"prompt_data": prompts}), tmp_path, world_size=2)
    own, ours = (metrics_of(tmp_path / name) for name in ("own", "ours"))
    assert [row["rollout/samples"] for row in own] == [4, 3]
    for mine, expected in zip(own, ours):
        for model in ("actor", "critic"):
            assert mine[f"train/{model}_norm"] == pytest.approx(
                expected[f"train/{model}_grad_norm"], rel=1e-4
            )


def test_losses_in_the_seeds_form_have_the_trainers_gradient(trained):
    class Loss(torch.nn.Module):
        def forward(
            self, log_probs, old_log_probs, advantages, action_mask=None, entropy_mask=None
        ):
            assert entropy_mask is None
            return the_seeds_policy_loss(log_probs, old_log_probs, advantages, action_mask)

        def get_last_stats(self):
            return {"my_number": 2.5}

    ours = trained(PPOTrainer)
    own = trained(PPOTrainer, {"actor_loss_fn": Loss(), "critic_loss_fn": the_seeds_value_loss})
    for name in (
        "policy_loss",
        "critic_loss",
        "actor_grad_norm",
        "critic_grad_norm",
        "ratio",
        "approx_kl",
    ):
        assert own[f"train/{name}"] == pytest.approx(ours[f"train/{name}"], rel=1e-4, abs=1e-7), (
            name
        )
    assert own["train/my_number"] == pytest.approx(2.5)


def test_the_means_that_the_seed_gives_are_per_sample_and_the_kl_per_token():
    item = Experience(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 2, dtype=torch.bool))
    item.info = {"reward": torch.tensor([1.0, 3.0]), "response_length": torch.tensor([2.0, 1.0])}
    item.info |= {"kl": torch.tensor([0.3, 0.9]), "mine": torch.zeros(2)}
    means = {name: value.item() for name, value in seed_means(item).items()}
    assert means == {
        "reward": 2,
        "response_length": 1.5,
        "kl": pytest.approx((2 * 0.3 + 1 * 0.9) / 3),
    }


def test_a_status_is_averaged_over_all_its_names(made, parts, monkeypatch):
    """Two micro batches make a step, and only the second one ends it."""
    monkeypatch.setattr(parts["strategy"], "micro_train_batch_size", 2)
    trainer = made(OwnTraining, kl_target=0.5, kl_horizon=100)
    trainer.fit(trainer.args, [PROMPTS])
    logged = trained_rows(Path(trainer.config.checkpoint.save_path))
    assert len(logged) == 2
    for row in logged:
        assert {
            "train/policy_loss",
            "train/actor_lr",
            "train/critic_loss",
            "train/values",
            "rollout/kl",
        } <= row.keys()
        assert row["train/actor_grad_norm"] > 0  # of the optimizer step
        assert row["train/critic_skipped"] == 0
    assert trainer.kl_ctl.value != 0.001  # the controller gets the KL of a ppo_train of one's own


def test_a_loop_of_ones_own_sees_the_kl_that_only_training_makes(made, parts, monkeypatch):
    monkeypatch.setattr(parts["strategy"], "micro_train_batch_size", 2)
    options = {"args": {"use_kl_loss": True, "use_kl_in_reward": False}, "init_kl_coef": 0.1}
    trainer = made(OwnTraining, **options)
    assert trainer.experience_maker.old_log_probs == "training"  # one optimizer step per rollout
    with torch.no_grad():
        next(trainer.strategy.unwrap_model(trainer.actor).parameters()).add_(torch.randn(1))
    sample(trainer)
    assert trainer.ppo_train(1)["kl"] != 0


def test_a_fit_of_ones_own_gets_texts_and_labels(made, parts):
    """The texts are the prompts: rows, labels and groups stay what they were, and each step samples anew."""
    loader = parts["strategy"].setup_dataloader(PROMPTS, 2, False, True, collate_fn=list)
    trainer = made(OwnFit)
    trainer.fit(trainer.args, loader, None, 0, 1)
    calls = trainer.rollout_engine.calls
    assert [sorted(indices) for indices, _ in calls] == [[0, 1], [0, 1]]
    assert calls[0][1].seed != calls[1][1].seed
    assert isinstance(trainer.rollout_engine, FakeEngine)
    logged = trained_rows(Path(trainer.config.checkpoint.save_path))
    assert [row["step"] for row in logged] == [1, 2]
    assert trainer.prompts_dataloader.dataset is PROMPTS
    (texts, labels), *_ = list(trainer.prompts_dataloader)
    assert sorted(texts) == ["a", "b"]
    assert labels == [None, None]
    assert trainer.recorder.sinks == []  # the records have ended with it


def test_a_fit_of_ones_own_in_a_run_from_a_config(make_config, tmp_path):
    """What ``fit()`` leaves out comes from the run: options, prompts, its length, and where a resumed one begins."""

    class Run(OwnFit):
        def save_logs_and_checkpoints(self, args, global_step, *rest):
            seen.append((global_step, args.train_batch_size))
            super().save_logs_and_checkpoints(args, global_step, *rest)

    seen: list[tuple[int, int]] = []
    Run.from_config(make_config(save_steps=1, num_episodes=1)).fit()
    assert seen == [(1, 4), (2, 4), (3, 4)]  # 12 prompts in batches of 4
    assert (tmp_path / "ckpt" / "_actor" / "global_step3").is_dir()
    resumed = Run.from_config(make_config(save_steps=1, num_episodes=2))
    resumed.fit()
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in trained_rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert resumed.prompts.batch_sampler.epoch == 1  # its own order in each episode


def test_checkpoints_of_ones_own_at_the_end_of_a_run(make_config, tmp_path):
    options = {"save_steps": 2, "num_episodes": 2}
    OwnCheckpoints.from_config(make_config(total_training_steps=3, **options)).fit()
    assert (tmp_path / "run" / "config.json").is_file()  # the final model
    for part in ("_actor", "_critic"):
        tags = {path.name for path in (tmp_path / "ckpt" / part).glob("global_step*")}
        assert tags == {"global_step2", "global_step3"}
    resumed = OwnCheckpoints.from_config(make_config(total_training_steps=4, **options))
    assert resumed.state.global_step == 3
    resumed.fit()
    assert [row["step"] for row in trained_rows(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_checkpoint_of_ones_own_when_a_signal_stops_the_run(made, tmp_path, capsys):
    class Stopped(OwnCheckpoints):
        def _save_checkpoint(self, args, tag, client_states):
            saved.append((args.save_steps, tag, sorted(client_states)))

        def ppo_train(self, global_steps=0):
            signals.request(signal.SIGTERM)
            return super().ppo_train(global_steps)

    saved: list[tuple] = []
    trainer = made(Stopped, args=SEED_ARGS)
    with pytest.raises(SystemExit) as ended:
        trainer.fit(trainer.args, [PROMPTS])
    assert ended.value.code == 128 + signal.SIGTERM
    assert f"saved in {tmp_path / 'ckpt'}" in capsys.readouterr().out
    ((steps, tag, states),) = saved
    assert (steps, tag) == (2, "global_step1")
    assert {"trainer", "kl_ctl", "alarms"} <= set(states)


# -- losses ----------------------------------------------------------------------------------------------------------


def batch() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    return (*(torch.randn(2, 3) for _ in range(3)), mask)


def test_a_policy_loss_in_both_forms():
    new, old, advantages, mask = batch()
    loss_fn, plain = PolicyLoss(0.1), losses.PolicyLoss(0.1, 0.1)
    expected, metrics = plain(new, old, advantages, mask)
    assert PolicyLoss(clip_eps=0.1) == loss_fn
    assert ValueLoss(clip_eps=0.3).value_clip == 0.3
    assert torch.equal(loss_fn(new, old, advantages, action_mask=mask), expected)
    assert loss_fn.get_last_stats() == {name: value.item() for name, value in metrics.items()}
    whole, _ = loss_fn(new, old, advantages, mask, LossNormalizer(8, 4))
    assert torch.equal(whole, plain(new, old, advantages, mask, LossNormalizer(8, 4))[0])
    some = torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()
    weighted, _ = plain(new, old, advantages, mask, weights=some.float())
    assert torch.equal(loss_fn(new, old, advantages, mask, some), weighted)
    assert torch.equal(loss_fn(new, old, advantages, mask, entropy_mask=some), weighted)
    assert (
        loss_fn(new, old, advantages).item()
        == plain(new, old, advantages, torch.ones_like(mask))[0].item()
    )
    summed = PolicyLoss(loss_agg_mode="seq-mean-token-sum-norm", horizon=4.0)
    constant = LossNormalizer(4, 2, scale=4.0)
    assert summed(new, old, advantages, mask) == losses.PolicyLoss(
        loss_agg_mode="seq-mean-token-sum-norm"
    )(new, old, advantages, mask, constant)[0]  # fmt: skip


def test_a_value_loss_in_both_forms():
    values, old, returns, mask = batch()
    expected, _ = losses.ValueLoss(0.3)(values, old, returns, mask)
    assert torch.equal(ValueLoss(0.3)(values, old, returns, action_mask=mask), expected)
    found, _ = ValueLoss(0.3)(values, old, returns, mask, LossNormalizer(4, 2))
    assert torch.equal(found, expected)


def test_a_loss_in_the_seeds_form_does_not_see_rows_without_a_trained_token(made):
    trainer = made(PPOTrainer)
    trainer.actor_loss_fn, trainer.critic_loss_fn = the_seeds_policy_loss, the_seeds_value_loss
    new, old, advantages, mask = batch()
    mask[1] = False
    new.requires_grad_()
    for loss_fn, alone in (
        (trainer.policy_loss, the_seeds_policy_loss),
        (trainer.value_loss, the_seeds_value_loss),
    ):
        loss, _ = loss_fn(new, old, advantages, mask, LossNormalizer(3, 1))
        assert loss.item() == pytest.approx(
            alone(new[:1], old[:1], advantages[:1], mask[:1]).item()
        )
        nothing, _ = loss_fn(new, old, advantages, torch.zeros_like(mask), LossNormalizer(3, 1))
        nothing.backward()
        assert nothing.item() == 0
        assert not new.grad.any()


def test_a_loss_in_the_seeds_form_and_weights_of_tokens(made):
    def with_mask(log_probs, old_log_probs, advantages, action_mask=None, entropy_mask=None):
        seen.append(entropy_mask)
        return the_seeds_policy_loss(log_probs, old_log_probs, advantages, action_mask)

    seen: list[Any] = []
    trainer, (new, old, advantages, mask) = made(PPOTrainer), batch()
    trainer.actor_loss_fn = with_mask
    kept = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    trainer.policy_loss(new, old, advantages, mask, LossNormalizer(4, 2), weights=kept)
    assert torch.equal(seen[0], kept.bool())
    with pytest.raises(ConfigError, match="--rollout_correction"):
        trainer.policy_loss(new, old, advantages, mask, LossNormalizer(4, 2), weights=0.5 * kept)
    trainer.actor_loss_fn = the_seeds_policy_loss
    with pytest.raises(ConfigError, match="takes no weights"):
        trainer.policy_loss(new, old, advantages, mask, LossNormalizer(4, 2), weights=kept)
    trainer.actor_loss_fn = lambda log_probs, old_log_probs, advantages, action_mask: (
        log_probs.sum(),
        1.0,
        2.0,
    )
    with pytest.raises(ConfigError, match="actor_loss_fn returned tuple"):
        trainer.policy_loss(new, old, advantages, mask, LossNormalizer(4, 2))


def test_a_loss_on_text_in_the_seeds_form(made):
    trainer = made(PPOTrainer)
    logits, labels = torch.randn(1, 4, 7), torch.tensor([[1, 2, 3, -100]])
    trainer.ptx_loss_fn = torch.nn.Module()
    trainer.ptx_loss_fn.forward = lambda logits, labels: logits.sum() * 0 + 2.0
    assert trainer.pretrain_loss.num_tokens(labels) == 2
    # 2 of 8 tokens on 2 ranks
    assert trainer.pretrain_loss(logits, labels, 8, 2).item() == pytest.approx(1.0)


# -- attributes ------------------------------------------------------------------------------------------------------


def test_a_controller_with_value_and_update_only(made, tmp_path):
    class Controller:
        value = 0.25

        def update(self, current, n_steps):
            self.value += 0.5
            self.seen = (current, n_steps)

    trainer = made(PPOTrainer)
    trainer.kl_ctl = Controller()
    trainer.fit(trainer.args, [PROMPTS])
    assert trainer.kl_ctl.value == 1.25
    assert trainer.kl_ctl.seen[1] == 4
    assert trainer.experience_maker.kl_ctl is trainer.kl_ctl
    assert [row["train/kl_coef"] for row in trained_rows(tmp_path / "run")] == [0.25, 0.75]
    state = trainer.client_state()["kl_ctl"]
    other = made(PPOTrainer)
    with pytest.raises(ValueError, match="KL is Controller"):
        other.states["kl_ctl"].load_state_dict(state)
    other.kl_ctl = Controller()
    other.states["kl_ctl"].load_state_dict(state)
    assert other.kl_ctl.value == 1.25
    with pytest.raises(ValueError, match="kl_ctl is fixed, here Controller"):
        other.states["kl_ctl"].load_state_dict({"kind": "fixed", "value": 1.0})


def test_sizes_that_are_set_act(made, parts, monkeypatch):
    monkeypatch.setattr(parts["strategy"], "micro_train_batch_size", 2)
    seen: list[int] = []

    class Counted(PPOTrainer):
        def training_step(self, experience, global_steps, entropy_mask=None):
            seen.append(len(experience))
            return super().training_step(experience, global_steps)

    trainer = made(Counted)
    trainer.micro_train_batch_size = 1
    trainer.micro_rollout_batch_size = 3
    sample(trainer)
    trainer.ppo_train(1)
    assert seen == [1, 1, 1, 1]
    assert (trainer.replay_buffer.sample_batch_size, trainer.strategy.micro_train_batch_size) == (
        1,
        1,
    )
    texts = [PromptText.of(prompt) for prompt in PROMPTS]
    parts_of_four = trainer.experience_maker.make_experience_list(
        texts, None, **trainer.generate_kwargs
    )
    assert [len(part) for part in parts_of_four] == [3, 1]
    trainer.prompt_max_len = 1
    with pytest.raises(ValueError, match="prompt_max_len 1"):
        trainer.experience_maker.make_experience_list(["1+1="])
    with pytest.raises(ConfigError, match="micro_train_batch_size"):
        trainer.micro_train_batch_size = 0


def test_a_micro_batch_that_is_set_replaces_what_a_gpu_has_decided(made):
    trainer = made(PPOTrainer)
    trainer.options = trainer.config  # as they were given
    trainer.use_config(trainer.config.with_options(max_tokens_per_micro_batch=64))
    assert trainer.specs["actor_train"] == MicroBatchSpec(64, "tokens")
    trainer.micro_train_batch_size = 1
    assert trainer.specs["actor_train"] == MicroBatchSpec(1)


def test_a_largest_norm_that_is_set_clips(made):
    trainer = made(PPOTrainer)
    trainer.max_norm = 1e-4
    assert trainer.max_norm == 1e-4
    for optimizer in (trainer.actor_optim, trainer.critic_optim):
        optimizer.state.clear()
    sample(trainer)
    assert trainer.ppo_train(1)["actor_grad_norm"] > 1e-4  # before clipping
    for optimizer in (trainer.actor_optim, trainer.critic_optim):
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        # (1 - beta1) of the gradient
        assert 0 < torch.nn.utils.get_total_norm(moments) <= 0.1 * 1e-4 * 1.01
    trainer.max_norm = 1.0


def test_switches_that_are_set_act(made, tmp_path):
    trainer = made(PPOTrainer)
    trainer.save_hf_ckpt, trainer.disable_ds_ckpt = True, True
    trainer.gradient_checkpointing = True
    assert recomputes(trainer.actor.hf_model)
    trainer.gradient_checkpointing = False
    assert not recomputes(trainer.actor.hf_model)
    trainer.kl_target = 0.5
    trainer.dataloader_pin_memory = False
    trainer.aux_loss = True
    assert (trainer.aux_loss, trainer.dataloader_pin_memory) == (True, False)
    trainer.aux_loss = False
    assert not trainer.aux_loss
    trainer.fit(trainer.args, [PROMPTS])
    assert trainer.kl_ctl.target == 0.5
    assert (tmp_path / "ckpt" / "global_step2_hf" / "config.json").is_file()
    assert not (tmp_path / "ckpt" / "_actor").exists()


class Tracker:
    """A Weights & Biases run and a TensorBoard writer."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, metrics: dict[str, float]) -> None:
        self.rows.append(metrics)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append({name: value, "global_step": step})


def test_trackers_that_are_set_get_the_numbers(made, tmp_path):
    trainer = made(
        PPOTrainer, args={"use_tensorboard": str(tmp_path / "tb"), "wandb_run_name": "run"}
    )
    trainer._wandb, trainer._tensorboard = Tracker(), Tracker()
    trainer.fit(trainer.args, [PROMPTS])
    for tracker in (trainer._wandb, trainer._tensorboard):
        steps = [row["global_step"] for row in tracker.rows if "train/policy_loss" in row]
        assert steps == [1, 2]
    trainer._wandb = None
    assert trainer._wandb is None


def test_calls_of_models_that_are_split_over_ranks_are_refused(made):
    trainer = made(OwnSteps, args=SEED_ARGS)
    ids = torch.tensor([[5, 6, 7]])
    plain = trainer.actor(ids, 2)
    assert torch.equal(trainer.actor(ids, 2, ring_attn_group=None, logps_allgather=True), plain)
    with pytest.raises(ConfigError, match="ring_attn_group"):
        trainer.actor(ids, 2, ring_attn_group=object())


def test_an_average_on_cuda_is_made_where_the_models_are(made):
    trainer = made(PPOTrainer)
    weights = [p.clone() for p in trainer.strategy.unwrap_model(trainer.initial_model).parameters()]
    trainer.strategy.moving_average(trainer.actor, trainer.initial_model, 1.0, "cuda")
    after = trainer.strategy.unwrap_model(trainer.initial_model).parameters()
    assert all(torch.equal(old, new) for old, new in zip(weights, after))


def test_a_batch_on_the_device_is_not_pinned_again():
    """As torch's DataLoader does with what the replay buffer has put on a GPU."""
    far = Experience.placeholder("meta")
    assert far.pin_memory() is far
