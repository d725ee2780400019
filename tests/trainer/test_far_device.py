"""A PPO step on a device that is no GPU but as far away: nothing mixes devices, and the host waits for it seldom."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fakes import FakeEngine, FakeReward, FakeStrategy, make_rollout
from support.far_device import FAR, FarDevice
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from lightppo import PPOTrainer
from lightppo.algorithms.advantages import advantage_fn
from lightppo.algorithms.correction import correction_weights, rejection_mask
from lightppo.algorithms.entries import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    REJECTIONS,
)
from lightppo.algorithms.kl import mismatch_terms
from lightppo.algorithms.losses import GPTLMLoss, PolicyLoss, ValueLoss
from lightppo.algorithms.masking import LossNormalizer, whiten
from lightppo.config import PPOConfig
from lightppo.config.rules import needs_critic
from lightppo.data.records import Rollout
from lightppo.distributed.deepspeed import StepOutcome, average_into
from lightppo.experience.token_weights import rejections_of
from lightppo.logging.samples import Samples
from lightppo.models import batches
from lightppo.models.actor import Actor
from lightppo.models.batches import to_device
from lightppo.models.critic import Critic, NewRewardModel, RewardModel
from lightppo.rewards.reward_model import RewardModelSource
from lightppo.supervised import objectives
from lightppo.trainer import training_losses

TINY = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
}


@pytest.fixture
def far() -> Iterator[FarDevice]:
    with FarDevice() as device:
        yield device


def model(wrapper: type, far: FarDevice, packs: bool = True) -> Any:
    config = LlamaConfig(**TINY, num_attention_heads=2, num_labels=1)
    family = AutoModelForCausalLM if wrapper is Actor else AutoModelForSequenceClassification
    torch.manual_seed(0)
    inner = family.from_config(config, attn_implementation="sdpa")
    return far.move(wrapper(inner, packing_samples=packs))


class FarStrategy(FakeStrategy):
    """Trains with plain torch; counts the waits between the micro batches of an optimizer step."""

    micro_train_batch_size, train_batch_size = 1, 4

    def __init__(self, far: FarDevice) -> None:
        super().__init__()
        self.device, self.far = FAR, far
        self.left: dict[int, int] = {}
        self.between: list[Counter[str]] = []

    def all_reduce(self, data: Any, op: str = "mean") -> Any:  # what is near travels too
        if isinstance(data, Tensor):
            return data.detach().to(FAR).to(data.device)
        return super().all_reduce(data, op)

    def accumulate(self, model: nn.Module, micro_batches: int) -> None:
        self.left[id(model)] = micro_batches
        self.before = Counter(self.far.waits)

    # asked behind each micro batch of the actor
    def completes_step(self, model: nn.Module) -> bool:
        self.between.append(Counter(self.far.waits) - self.before)
        return self.left[id(model)] == 1

    def backward(self, loss: Tensor, model: nn.Module, optim: Any = None) -> None:
        loss.backward()

    def optimizer_step(
        self, optim: Any, model: nn.Module, scheduler: Any = None, name: str = ""
    ) -> StepOutcome | None:
        self.left[id(model)] -= 1
        if self.left[id(model)]:
            return None
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False))
        optim.step()
        optim.zero_grad()
        return StepOutcome(norm, skipped=not math.isfinite(norm))


def samples() -> list[Rollout]:
    """Two of each of two prompts."""
    found = []
    for i, prompt in enumerate(([5, 6, 7], [5, 6, 8, 9])):
        baseline = make_rollout(prompt, [10], index=i, reward=0.5)
        for j in range(2):
            ids = [10 + i + j + k for k in range(2 + i + j)]
            facts = {"reward": float(i + j), "log_probs": [-3.5 - k / 10 for k in range(len(ids))]}
            facts |= {
                "finish_reason": ("stop", "length")[j],
                "token_rewards": [0.1] * len(ids),
                "baseline": baseline,
            }
            found.append(make_rollout(prompt, ids, index=i, sample_index=j, **facts))
    return found


@pytest.fixture
def trainer(far: FarDevice, tmp_path: Path) -> Callable[..., PPOTrainer]:
    def make(packs: bool = True, **options: Any) -> PPOTrainer:
        small = {
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "prompt_max_len": 12,
            "generate_max_len": 5,
        }
        small |= {
            "train_batch_size": 4,
            "micro_train_batch_size": 1,
            "micro_rollout_batch_size": 2,
            "num_examine": 0,
        }
        small |= {"packing_samples": packs, "pretrain": "tiny", "zero_stage": 0}
        paths = {"save_path": str(tmp_path / "run"), "ckpt_path": str(tmp_path / "ckpt")}
        config = PPOConfig.from_flat(small | paths | options)
        actor, reference = model(Actor, far, packs), model(Actor, far, packs)
        critic = model(Critic, far, packs) if needs_critic(config) else None
        optim = [
            x and torch.optim.AdamW(x.parameters(), lr=1e-3, foreach=False) for x in (actor, critic)
        ]
        tokenizer = type(
            "Tokenizer",
            (),
            {"pad_token_id": 0, "decode": staticmethod(str), "__len__": lambda _: 48},
        )()
        models = (
            actor,
            critic,
            None,
            reference if config.algorithm.init_kl_coef > 0 else None,
            None,
        )
        return PPOTrainer(FarStrategy(far), *models, *optim, None, None, config=config, tokenizer=tokenizer,
                          rollout_engine=FakeEngine(), reward_source=FakeReward({}))  # fmt: skip

    return make


GRPO = {"advantage_estimator": "grpo", "init_kl_coef": 0.01}
STEPS = {
    "gae": {"value_norm": "ma", "entropy_coef": 0.1, "bootstrap_truncated": True},
    "the entropy of a sample": GRPO,
    "kl loss, log probs of training": GRPO
    | {"use_kl_loss": True, "kl_estimator": "k3", "early_stop_kl": 9.0, "shuffle": "groups"},
}


@pytest.mark.parametrize("name", STEPS)
def test_the_host_does_not_wait_between_micro_batches(
    trainer: Callable, name: str, monkeypatch: Any
) -> None:
    run = trainer(**STEPS[name])
    monkeypatch.setattr(batches, "_KEPT_ASIDE", 0)  # as if its tensors were large
    run.strategy.far.kept_aside = 0
    if name == "the entropy of a sample":
        monkeypatch.setattr(training_losses, "_ENTROPY_SAMPLE", 2)
    record = next(callback for callback in run.callbacks if isinstance(callback, Samples))
    for step in (1, 2):  # the first one also tries what a model can do
        run.replay_buffer.clear()
        before = run.strategy.far.waits.total()
        experience = run.experience_maker.make_experience_list(samples())
        making = run.strategy.far.waits.total() - before
        run.replay_buffer.fill(experience)
        run.experience_maker.normalize(run.replay_buffer, run.actor_loss_fn, step)
        record.pick(step, samples(), run.replay_buffer.items)
        status = run.ppo_train(step)
        record.on_step_end(None, step, {})
    assert run.strategy.between[-1] == {}
    assert making <= 15, making  # whatever the number of micro batches
    assert all(isinstance(value, float | int) for value in status.values())


def test_a_loop_of_ones_own_gets_numbers(trainer: Callable) -> None:
    run = trainer()
    run.replay_buffer.fill(run.experience_maker.make_experience_list(samples()))
    status = run.training_step(run.replay_buffer.sample(), 1)
    assert {"policy_loss", "critic_loss", "entropy"} <= status.keys()
    assert all(type(value) is float for value in status.values())


@pytest.mark.long
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        *(
            {"kl_estimator": name} | kind
            for name in ("k1", "full")
            for kind in ({}, GRPO | {"use_kl_loss": True})
        ),
        *({"policy_loss": name} | GRPO for name in ("clip_cov", "kl_cov")),
        {"high_entropy_token_ratio": 0.5},
        {"use_dense_reward": True, "reward_delta": True},
        {"overlong_buffer_len": 2, "reward_running_norm": True},
        {"mask_too_long": True, "adv_norm": True, "adv_norm_scope": "group", "advantage_clip": 1.0}
        | GRPO,
        {
            "rollout_correction": "tis",
            "correction_batch_norm": True,
            "correction_veto": 0.1,
            "full_determinism": True,
        },
        {"rollout_rejection": ["m2po=0.1", "seq_mean_k1=9.0", "opsm=9.0"]},
        {
            "buffer_cpu_offload": False,
            "max_tokens_per_micro_batch": 16,
            "micro_batch_specs": ["critic_train=1"],
        },
    ],
    ids=lambda options: " ".join(map(str, options)) if isinstance(options, dict) else str(options),
)
def test_nothing_mixes_devices(trainer: Callable, options: dict[str, Any], packs: bool) -> None:
    run = trainer(packs, **options)
    run.replay_buffer.fill(run.experience_maker.make_experience_list(samples()))
    run.experience_maker.normalize(run.replay_buffer, run.actor_loss_fn, 1)
    assert math.isfinite(run.ppo_train(1)["policy_loss"])


# -- formulas: (2, 3) tokens -----------------------------------------------------------------------------------------

TOKENS = torch.tensor([[-1.0, -2.0, -0.5], [-0.2, -1.5, 0.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses(name: str, far: FarDevice) -> None:
    log_probs, old, mask = (
        far.move(x) for x in (TOKENS.clone().requires_grad_(), TOKENS - 0.1, MASK)
    )
    chosen = (
        {}
        if POLICY_LOSSES.find(name).selection is None
        else {"selected": far.move(MASK & (TOKENS < -1))}
    )
    loss, metrics = PolicyLoss(policy_loss=name)(
        log_probs, old, old, mask, LossNormalizer(5, 2), **chosen
    )
    loss.backward()
    assert {x.device for x in (loss, *metrics.values())} == {FAR}
    assert far.waits == {}


def test_value_loss(far: FarDevice) -> None:
    values, mask = far.move(TOKENS.clone().requires_grad_()), far.move(MASK)
    loss, _ = ValueLoss(0.2, huber_delta=1.0)(
        values, values.detach(), values.detach() + 1, mask, LossNormalizer(5, 2)
    )
    loss.backward()
    assert far.waits == {}


@pytest.fixture
def deterministic() -> Iterator[None]:
    """As with ``--full_determinism``."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_estimators(name: str, gamma: float, far: FarDevice, deterministic: None) -> None:
    """Once for a rollout, so that some waits do no harm."""
    tokens, mask, rows = far.move(TOKENS), far.move(MASK), far.move(torch.tensor([1.0, 2.0]))
    inputs = {
        "values": tokens,
        "baseline_scores": rows,
        "group_ids": far.move(torch.tensor([4, 4])),
    }
    found = advantage_fn(ADVANTAGE_ESTIMATORS.find(name))(
        token_rewards=tokens,
        action_mask=mask,
        scores=rows,
        score_norms=tokens.abs(),
        gamma=gamma,
        lambd=0.9,
        **inputs,
    )
    assert {x.device for x in found} == {FAR}
    assert far.waits.total() <= 12


@pytest.mark.parametrize("name", [*CORRECTIONS, *REJECTIONS])
def test_corrections_and_rejections(name: str, far: FarDevice) -> None:
    tokens, other, mask = far.move(TOKENS), far.move(TOKENS - 0.1), far.move(MASK)
    if name in CORRECTIONS:
        found = correction_weights(name, tokens, other, mask, veto=0.1)
    else:
        config = PPOConfig.from_flat(pretrain="tiny", rollout_rejection=[f"{name}=1.5"])
        both = rejections_of(config, in_training=True) + rejections_of(config, in_training=False)
        found = rejection_mask(both, tokens, other, mask, advantages=tokens)
    assert found.device == FAR
    # m2po compares all ranks' tokens, bit by bit
    assert far.waits.total() <= (2 * 64 if name == "m2po" else 2)


def test_whitening_and_the_mismatch_of_engines(far: FarDevice) -> None:
    tokens, mask = far.move(TOKENS), far.move(MASK)
    assert whiten(tokens, mask).device == FAR
    assert {x.device for x in mismatch_terms(tokens, tokens - 0.1, mask).values()} == {FAR}


# -- other models ------------------------------------------------------------------------------------------------------


def test_a_moving_average(far: FarDevice) -> None:
    average_into(model(Actor, far), model(Actor, far), 0.9)
    assert far.waits == {}


def test_a_reward_model_is_waited_for_once_per_micro_batch(far: FarDevice) -> None:
    source = RewardModelSource(
        [model(RewardModel, far)], device=FAR, pad_token_id=0, micro_batch_size=2
    )
    source.score(samples())
    far.waits.clear()
    source.score(samples())
    assert far.waits.total() == 2


# chosen, then rejected
PAIRS = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0], [5, 6, 9, 9], [5, 6, 7, 0]])
OBJECTIVES = {
    "SFT": (Actor, {}),
    "RewardModelling": (NewRewardModel, {}),
    "DPO": (Actor, {"beta": 0.1}),
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_supervised_losses_wait_for_nothing(kind: str, far: FarDevice) -> None:
    wrapper, _ = OBJECTIVES[kind]
    objective, trained = object.__new__(getattr(objectives, kind)), model(wrapper, far)
    real = (PAIRS != 0).long()
    batch = {"sequences": PAIRS, "attention_mask": real, "action_mask": real[:, 2:].bool()}
    if kind == "SFT":
        objective.loss_fn = GPTLMLoss()
        batch = {
            "input_ids": PAIRS,
            "attention_mask": real,
            "labels": PAIRS.masked_fill(real == 0, -100),
        }
    if kind == "DPO":
        objective.loss_fn = partial(PREFERENCE_LOSSES.find("dpo").fn, beta=0.1, label_smoothing=0.0)
        objective.config = SimpleNamespace(
            preference=SimpleNamespace(beta=0.1, average_log_probs=False)
        )
    for _ in range(2):  # the first pass also tries what the model can do
        far.waits.clear()
        moved = {name: to_device(tensor, FAR) for name, tensor in batch.items()}
        loss, metrics = objective.loss(trained, moved, 2.0, 1)
        loss.backward()
    assert far.waits == {}
    assert {x.device for x in (loss, *metrics.values())} == {FAR}
