"""Everything that is over all ranks, on the same samples however they are spread. Usage: global_numbers.py MODEL OUT.pt

Whitening, group and running statistics, value statistics, batch-normalised weights, token selections, metrics, the
adaptive KL coefficient and the early stop. The models of the experience are tables; those of the early stop are real.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightppo.algorithms.kl import AdaptiveKLController
from lightppo.algorithms.losses import PolicyLoss
from lightppo.config import PPOConfig
from lightppo.data.records import Prompt, Rollout
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.experience.batching import Minibatch, ReplayBuffer, plan_step
from lightppo.experience.experience import Experience
from lightppo.experience.maker import ExperienceMaker
from lightppo.experience.normalisation import ValueNorm
from lightppo.experience.token_weights import select_tokens
from lightppo.logging import step_metrics as m
from lightppo.models.actor import ActionScores, Actor

GROUPS, SAMPLES = 6, 3
ESTIMATORS = ("gae", "reinforce", "reinforce++_baseline", "grpo", "gpg", "group_adv_norm")
# what is taken from the old log probs of the samples of rank 1
RATIOS = {"calm": 0.0, "torn": 2.0, "wild": 6.0}


class Table(nn.Module):
    """Log prob, entropy and value of a token follow from its id."""

    temperature = 1.0

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def score_actions(
        self, sequences: Tensor, num_actions: int, attention_mask: Tensor, **_: bool
    ) -> ActionScores:
        actions, real = (
            sequences[:, -num_actions:].double(),
            attention_mask[:, -num_actions:].bool(),
        )
        log_probs = (
            -1 - (actions * 0.37).sin().abs() - self.shift * (actions * 1.3).cos()
        ).masked_fill(~real, 0)
        return ActionScores(
            log_probs.float(),
            real,
            entropy=((actions * 0.71).sin().abs()).float().masked_fill(~real, 0),
        )

    def forward(
        self, sequences: Tensor, num_actions: int, attention_mask: Tensor, include_last: bool
    ) -> Tensor:
        return (sequences * 0.11).sin()[:, -num_actions - 1 :]


def make_rollouts() -> list[list[Rollout]]:
    """Groups of answers of very different lengths, some truncated."""
    generator = torch.Generator().manual_seed(5)
    groups = []
    for g in range(GROUPS):
        prompt = Prompt(f"prompt {g}", [3 + g] * (1 + g), index=g)
        group = []
        for s in range(SAMPLES):
            length = int(torch.randint(1, 9, (1,), generator=generator))
            ids = torch.randint(4, 40, (length,), generator=generator).tolist()
            log_probs = (-1 - 2 * torch.rand(length, generator=generator)).tolist()
            score = float(torch.randn(1, generator=generator)) * 3 + g
            finish = "length" if (g + s) % 4 == 0 else "stop"
            group.append(Rollout(prompt, s, ids, "", finish, log_probs, score))
        groups.append(group)
    return groups


def experience_numbers(
    strategy: DeepspeedStrategy, mine: list[list[Rollout]], estimator: str
) -> dict[str, Any]:
    config = PPOConfig.from_flat(
        advantage_estimator=estimator,
        n_samples_per_prompt=SAMPLES,
        reward_running_norm=True,
        rollout_correction="tis",
        correction_batch_norm=True,
        high_entropy_token_ratio=0.4,
        policy_loss="kl_cov",
        kl_cov_ratio=0.1,
        **({"value_norm": "exp", "value_norm_beta": 0.9} if estimator == "gae" else {}),
    ).resolved()
    kl_ctl = AdaptiveKLController(0.1, target=0.05, horizon=200)
    value_norm = ValueNorm("exp", 0.9) if estimator == "gae" else None
    critic = Table(0.0) if estimator == "gae" else None
    maker = ExperienceMaker(
        Table(0.1), critic, Table(0.0), strategy, kl_ctl, config, value_norm=value_norm
    )
    found: dict[str, Any] = {}
    for step in (1, 2):
        buffer = ReplayBuffer()
        rollouts = [rollout for group in mine for rollout in group]
        buffer.fill(maker.make_experience_list(rollouts))
        if config.algorithm.adv_norm:
            buffer.whiten(strategy)
        select_tokens(
            buffer.items,
            PolicyLoss(policy_loss="kl_cov", options={"kl_cov_ratio": 0.1}),
            strategy,
            step,
        )
        local = m.rollout_summaries(buffer.items)
        status = m.rollout_status(m.merge_summaries(strategy.all_gather_object(local)))
        kl_ctl.update(status["policy_kl"], int(status["samples"]))
        rows = {
            (r.prompt.index, r.sample_index): {
                name: getattr(item, name)[0].double()
                for name in ("advantages", "returns", "loss_weights", "selected")
            }
            for r, item in zip(rollouts, buffer.items, strict=True)
        }
        everywhere = {
            key: row for part in strategy.all_gather_object(rows) for key, row in part.items()
        }
        found[f"rows {step}"], found[f"status {step}"] = everywhere, status
    found["kl coefficient"] = kl_ctl.value
    found["score statistics"] = maker.shaper.states["score_statistics"].state_dict()
    found["value statistics"] = value_norm.state_dict() if value_norm is not None else None
    return found


def early_stops(strategy: DeepspeedStrategy, model_path: str) -> dict[str, tuple[float, bool]]:
    """(mean ratio, whether the weights moved) of an optimizer step, by how far the first samples are off."""
    torch.manual_seed(0)
    actor = Actor(model_path, ds_config=strategy.get_ds_train_config())
    parts = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=1e-2), None))
    script = gradients_script()
    trainer = script.build_trainer(
        strategy, parts, (), None, init_kl_coef=0, early_stop_imp_ratio=4.0
    )
    samples = script.make_samples()
    rank, world = strategy.get_rank(), strategy.world_size
    found = {}
    for name, shift in RATIOS.items():
        rows = []
        for i, sample in enumerate(samples):
            with torch.no_grad():
                old = actor(sample.sequences, sample.num_actions, sample.attention_mask)
            row = Experience(sample.sequences, sample.attention_mask, sample.action_mask)
            row.action_log_probs, row.advantages = (
                old - (shift if i in (1, 3) else 0.0),
                sample.advantages,
            )
            rows.append(row)
        shares = (
            [rows] if world == 1 else [[rows[i] for i in (0, 2, 4, 5, 6, 7)], [rows[1], rows[3]]]
        )
        before = [p.detach().clone() for p in strategy.unwrap_model(actor).parameters()]
        step = Minibatch(plan_step(shares[rank], strategy))
        status = m.optimizer_status([trainer.train_minibatch(step, 1)], strategy)
        after = strategy.unwrap_model(actor).parameters()
        moved = any(not torch.equal(b, a) for b, a in zip(before, after))
        found[name] = (status["ratio"], moved, status["actor_stopped"])
    assert trainer.state.stopped_optimizer_steps == sum(stopped for *_, stopped in found.values())
    return found


def gradients_script() -> Any:
    spec = importlib.util.spec_from_file_location(
        "gradients_script", Path(__file__).with_name("gradients.py")
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main(model_path: str, out: str) -> None:
    strategy = DeepspeedStrategy(max_norm=0.0, zero_stage=0)
    strategy.setup_distributed()
    groups = make_rollouts()
    # Two ranks: four groups and two, out of order; then all and none.
    spreads = (
        [[groups]]
        if strategy.world_size == 1
        else [[groups[4:] + groups[:2], groups[2:4]], [[], groups]]
    )
    found: dict[str, Any] = {}
    for i, spread in enumerate(spreads):
        mine = spread[strategy.get_rank()]
        found |= {(i, name): experience_numbers(strategy, mine, name) for name in ESTIMATORS}
    found["early stop"] = early_stops(strategy, model_path)
    if strategy.is_rank_0():
        torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[-2:])
