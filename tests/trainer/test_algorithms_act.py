"""Options of the algorithm in a whole trainer: what of them shows only where its parts meet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fakes import FakeEngine, FakeStrategy, on_ranks
from support.sampled import PROMPTS, SCORES, collected, sample
from support.tiny import tiny_config

from lightppo import PPOTrainer
from lightppo.algorithms.entries import POLICY_LOSSES
from lightppo.algorithms.kl import KLEstimate
from lightppo.algorithms.losses import PolicyLoss
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import ConfigError, RewardError
from lightppo.experience.experience import Experience
from lightppo.experience.token_weights import select_tokens
from lightppo.logging.step_metrics import METRICS, with_namespace
from lightppo.models.actor import ActionScores
from lightppo.rewards.reward_source import RewardOutput
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampler import RolloutSampler
from lightppo.trainer.training_losses import kl_to_reference
from lightppo.user_code import load_python_function

pytestmark = pytest.mark.usefixtures("world")

GRPO = {"advantage_estimator": "grpo", "init_kl_coef": 0.0}
ONE_STEP = {"train_batch_size": 4, "max_epochs": 1}


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.hf_model.named_parameters()}


def put_back(model: Any, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.hf_model.named_parameters():
            p.copy_(weights[name])


@pytest.fixture
def kept(parts):
    """Weights of actor and reference as they were, put back after the test."""
    models = (parts["actor"][0], parts["reference"])
    before = [weights_of(model) for model in models]
    yield
    for model, weights in zip(models, before):
        put_back(model, weights)


# -- advantages ------------------------------------------------------------------------------------------------------


def test_forms_of_whitening(trainer_with):
    raw = collected(trainer_with(adv_norm=False), "advantages")
    scaled = collected(trainer_with(adv_norm_by=("std=batch",)), "advantages")
    assert torch.allclose(scaled, raw / raw.square().mean().sqrt(), atol=1e-4)
    unbiased = collected(trainer_with(adv_std_unbiased=True), "advantages")
    assert torch.allclose(unbiased, (raw - raw.mean()) / raw.std(correction=1), atol=1e-5)
    by_group = collected(trainer_with(adv_norm_scope="group"), "advantages")
    for rows in (slice(0, 2), slice(2, 4)):
        part = raw[rows]
        assert torch.allclose(
            by_group[rows], (part - part.mean()) / (part.std(correction=0) + 1e-5), atol=1e-5
        )


def test_group_advantages_without_the_standard_deviation(trainer_with):
    seen = collected(trainer_with(**GRPO, group_std_norm=False), "advantages")[:, 0]
    assert seen.tolist() == [-0.5, 0.5, -2, 2]


# -- greedy baseline and dense rewards -------------------------------------------------------------------------------


class Sources:
    """Scores by (prompt, whether greedy); dense ones too."""

    name = "sources"

    def __init__(self, greedy: dict[int, float | None], tokens: list | None = None) -> None:
        self.greedy, self.tokens = greedy, tokens

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        own = len(rollouts) - len(self.greedy)
        scores = [SCORES[r.prompt.index, r.sample_index] for r in rollouts[:own]]
        return RewardOutput(
            scores + [self.greedy[r.prompt.index] for r in rollouts[own:]], token_scores=self.tokens
        )


def test_remax_compares_with_the_greedy_answer(trainer_with):
    trainer = trainer_with(
        Sources({0: 0.25, 1: 4.0}), advantage_estimator="remax", init_kl_coef=0.0
    )
    assert collected(trainer, "advantages")[:, 0].tolist() == [-0.25, 0.75, -1.0, 3.0]
    (sampled, _), (greedy, sampling) = (
        trainer.rollout_engine.calls[0],
        trainer.rollout_engine.calls[1],
    )
    assert sampled == greedy == [0, 1]
    assert (sampling.n, sampling.temperature) == (1, 0.0)
    assert trainer.ppo_train(1)["reward/greedy_baseline"] == 2.125


def test_a_group_whose_baseline_is_unscored_is_left_out_and_counted():
    sampler = RolloutSampler(
        FakeEngine(), Sources({0: None, 1: 1.0}), SamplingParams(n=2), greedy_baseline=True
    )
    batch = sampler.score(sampler.generate(PROMPTS, step=1))
    assert [r.prompt.index for r in batch.rollouts] == [1, 1]
    assert (batch.counts["unscored"], batch.counts["small_group"]) == (0, 2)


TOKENS = [[0.0, 1.0], [2.0, 3.0], [0.0, 0.0], [1.0, 5.0]]


def test_dense_rewards_are_what_is_trained_on(trainer_with):
    options = {"advantage_estimator": "reinforce", "init_kl_coef": 0.0, "adv_norm": False}
    trainer = trainer_with(Sources({}, TOKENS), **options, use_dense_reward=True)
    assert collected(trainer, "advantages").tolist() == [
        [1.0, 1.0],
        [5.0, 3.0],
        [0.0, 0.0],
        [6.0, 5.0],
    ]
    delta = trainer_with(Sources({}, TOKENS), **options, use_dense_reward=True, reward_delta=True)
    assert collected(delta, "advantages").tolist() == [
        [1.0, 1.0],
        [3.0, 1.0],
        [0.0, 0.0],
        [5.0, 4.0],
    ]


def test_token_scores_and_the_flag_belong_together(trainer_with):
    with pytest.raises(RewardError, match="--use_dense_reward"):
        collected(trainer_with(Sources({}, TOKENS)), "advantages")
    missing = [*TOKENS[:2], None, TOKENS[3]]
    with pytest.raises(RewardError, match=r"--use_dense_reward.*sample 2.*row 1"):
        collected(trainer_with(Sources({}, missing), use_dense_reward=True), "advantages")


# -- the training pass gives the old log probs -----------------------------------------------------------------------


def test_a_rollout_without_a_trained_token_leaves_the_kl_coefficient(make_config):
    """All responses are cut by the limit, so no KL is measured; the run goes on."""
    options = {"mask_too_long": True, "kl_target": 0.1, "init_kl_coef": 0.1, "generate_max_len": 1}
    trainer = PPOTrainer.from_config(make_config(**options, min_new_tokens=1, benchmark_steps=1))
    trainer.fit()
    assert trainer.state.global_step == 1
    assert trainer.kl_ctl.value == 0.1


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    "kl",
    [
        {"use_kl_loss": True, "init_kl_coef": 0.1},
        {"use_kl_loss": True, "init_kl_coef": 0.1, "kl_estimator": "k3_ratio"},
        {"init_kl_coef": 0.0},
    ],
    ids=["loss", "ratio", "none"],
)
def test_the_on_policy_shortcut_changes_nothing_but_the_number_of_passes(trainer_with, parts, kl):
    (actor, optimizer, schedule), passes = parts["actor"], []
    with torch.no_grad():  # a policy that has left its reference: its KL is not 0, in no estimate
        parts["reference"].hf_model.get_output_embeddings().weight.mul_(-1)
    for _ in range(3):  # past the warm-up, which begins at 0
        schedule.step()
    options = {"advantage_estimator": "reinforce", "adv_norm": False} | kl
    found = []
    for source in ("auto", "forward"):
        trainer = trainer_with(
            **options, **ONE_STEP, micro_train_batch_size=3, old_log_probs=source
        )
        hook = actor.hf_model.register_forward_hook(lambda *_: passes.append(1))
        before = weights_of(actor)
        optimizer.state.clear()  # Adam starts anew
        sample(trainer, PROMPTS, step=1)
        status = trainer.ppo_train(1)
        hook.remove()
        change = {
            name: (p - before[name]) / status["actor_lr"] for name, p in weights_of(actor).items()
        }
        found.append((status, change, len(passes)))
        passes.clear()
        put_back(actor, before)
    (short, short_change, short_passes), (long, long_change, long_passes) = found
    assert short_passes < long_passes
    assert short.keys() == long.keys()
    rate = {"actor_lr"}  # the schedule has moved on
    assert {name: short[name] for name in short.keys() - rate} == pytest.approx(
        {name: long[name] for name in long.keys() - rate}, abs=1e-4
    )
    for name, expected in long_change.items():
        torch.testing.assert_close(short_change[name], expected, rtol=1e-2, atol=2e-2)


# -- early stop ------------------------------------------------------------------------------------------------------


def test_the_kl_loss_has_the_ratio_to_the_policy_that_sampled():
    """k3 of d = 0.5 is 0.1065307 and ρ is 2; without old log probs the policy in training has sampled."""
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    ids, mask = torch.ones(1, 2).long(), torch.ones(1, 1).bool()
    rows = Experience(ids, ids, mask, base_action_log_probs=torch.tensor([[-1.5]]))
    found = []
    for old in (torch.tensor([[-1.0 - math.log(2)]]), None):
        rows, scores = replace(rows, action_log_probs=old), ActionScores(log_probs, mask)
        kl = kl_to_reference(KLEstimate("k3_ratio"), scores, rows)
        found += [kl.item(), torch.autograd.grad(kl.sum(), log_probs)[0].item()]
    # the slope is ρ·d in both
    assert found == pytest.approx([2 * 0.1065307, 2 * 0.5, 0.1065307, 0.5])


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("options", "stops"),
    [({"early_stop_imp_ratio": 5.0}, True), ({"early_stop_imp_ratio": 30.0}, False),
     ({"early_stop_imp_ratio": None}, False), ({"early_stop_imp_ratio": None, "early_stop_kl": 1.0}, True)],
    ids=str,
)  # fmt: skip
def test_a_step_too_far_from_the_sampling_policy_is_not_taken(trainer_with, parts, options, stops):
    actor = parts["actor"][0]
    trainer = trainer_with(**options)
    sample(trainer, PROMPTS, step=1)
    # as if the policy had moved: ρ = e^3 ≈ 20, its KL e^3 - 1 - 3
    for item in trainer.replay_buffer.items:
        item.action_log_probs = item.action_log_probs - 3.0
    before = weights_of(actor)
    status = trainer.ppo_train(1)
    same = all(torch.equal(before[name], p) for name, p in weights_of(actor).items())
    assert (same, status["actor_stopped"], trainer.state.stopped_optimizer_steps) == (
        stops,
        float(stops),
        int(stops),
    )
    assert status["critic_skipped"] == 0  # the critic goes on
    # the gradient is gone: the next step is that of its own samples alone
    if stops:
        trainer.replay_buffer.clear()
        sample(trainer, PROMPTS, step=2)
        assert trainer.ppo_train(2)["actor_stopped"] == 0
        assert trainer.client_state()["trainer"]["stopped_optimizer_steps"] == 1


class RecordingEngine(FakeEngine):
    """Gives log probs to its answers, by default -1 each."""

    log_probs = [[-1.0, -1.0]] * 4

    def generate(self, prompts: list[Prompt], sampling: SamplingParams) -> list[Rollout]:
        answers = super().generate(prompts, sampling)
        return [replace(rollout, log_probs=own) for rollout, own in zip(answers, self.log_probs)]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"rollout_rejection": ["opsm=0.2"]}, 1 / 4),
        ({"rollout_rejection": ["opsm=0.4"]}, 0),
        ({"rollout_rejection": ["seq_max_k1=0.2"], "old_log_probs": "rollout"}, 2 / 4),
    ],
    ids=str,
)
def test_rejections_in_training(trainer_with, options, share):
    """Of the answers of prompt 0 the engine thought more by 0.3 per token; the first has A < 0, which opsm wants."""
    engine = RecordingEngine()
    of_the_actor = collected(
        trainer_with(rollout_engine=engine, **GRPO, old_log_probs="forward"), "action_log_probs"
    )
    engine.log_probs = (of_the_actor + torch.tensor([0.3, 0.3, 0.0, 0.0])[:, None]).tolist()
    trainer = trainer_with(rollout_engine=engine, **GRPO, **ONE_STEP, **options)
    sample(trainer, PROMPTS, step=1)
    status = trainer.ppo_train(1)
    assert status["rejected_ratio"] == pytest.approx(share)
    assert "loss_weight" not in status


def test_rejections_before_training(trainer_with):
    trainer = trainer_with(
        rollout_engine=RecordingEngine(), **GRPO, **ONE_STEP, rollout_rejection=["token_ratio=1e-9"]
    )
    sample(trainer, PROMPTS, step=1)
    status = trainer.ppo_train(1)
    assert status["loss_weight_zero"] == 1
    assert status["policy_loss"] == 0
    assert "rejected_ratio" not in status


def test_the_optimal_token_baseline_of_a_model(trainer_with, parts):
    """Its norms are those of the model's whole distributions."""
    trainer = trainer_with(advantage_estimator="optimal_token_baseline", init_kl_coef=0.0)
    got = collected(trainer, "advantages")
    batch = Experience.collate(trainer.replay_buffer.items)
    with torch.no_grad():
        scores = parts["actor"][0].score_actions(
            batch.sequences, batch.num_actions, batch.attention_mask, logits=True
        )
    p = scores.logits.double().softmax(-1).view(4, 2, -1)
    chosen = batch.sequences[:, -2:, None]
    one_hot = torch.zeros_like(p).scatter(-1, chosen, 1.0)
    energy = (one_hot - p).square().sum(-1).cumsum(1)  # (4, 2)
    rewards = torch.tensor([0.0, 1.0, 3.0, 7.0])[:, None]
    for rows in (slice(0, 2), slice(2, 4)):
        w, r = energy[rows], rewards[rows]
        torch.testing.assert_close(
            got[rows].double(), r - (w * r).sum(0) / w.sum(0), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("estimator", ["abs", "k2"])
def test_the_adaptive_coefficient_gets_the_true_kl(trainer_with, parts, estimator, monkeypatch):
    """Not the number that the reward takes: |d| is 0 or more also where the policy is nearer than the target."""
    trainer = trainer_with(kl_target=0.1, kl_horizon=100, kl_estimator=estimator)
    sample(trainer, PROMPTS, step=1)
    for item in trainer.replay_buffer.items:
        item.base_action_log_probs = item.action_log_probs + torch.tensor([[0.5, -0.25]])
    status = trainer.ppo_train(1)
    assert status["policy_kl"] == pytest.approx(-0.125)  # mean of -0.5 and 0.25


# -- policy losses that select tokens --------------------------------------------------------------------------------


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_trains_and_its_metrics_are_documented(trainer_with, name):
    trainer = trainer_with(policy_loss=name)
    sample(trainer)
    assert (trainer.replay_buffer[0].selected is not None) == (
        POLICY_LOSSES[name].selection is not None
    )
    status = trainer.ppo_train(1)
    assert with_namespace(status).keys() <= METRICS.keys()
    assert status["actor_grad_norm"] > 0


OWN = """
import torch

from lightppo import estimator, policy_loss


@estimator(per_sample=True, min_group_size=2)
def centred(groups, **_):
    return groups.advantage


@policy_loss(eps_clip=None, selection="{here}:every_token")
def linear(x):
    assert x.selected.any()
    return -x.log_ratio * x.advantages, x.metrics(x.beyond_limit(x.log_ratio), mine=x.log_ratio + 3)


def every_token(log_probs, advantages, uniforms, **_):
    return torch.ones_like(log_probs, dtype=torch.bool)
"""


@pytest.mark.usefixtures("kept")
def test_an_estimator_and_a_loss_of_a_file_train(trainer_with, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN.replace("{here}", str(path)))
    trainer = trainer_with(advantage_estimator=f"{path}:centred", policy_loss=f"{path}:linear")
    sample(trainer)
    status = trainer.ppo_train(1)
    assert status["actor_grad_norm"] > 0
    assert with_namespace(status)["train/mine"] == pytest.approx(3.0, abs=0.1)


@pytest.mark.usefixtures("kept")
def test_functions_train_as_the_file_with_them_does(trainer_with, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN.replace("{here}", str(path)))
    results, weights = [], None
    for algorithm in ((f"{path}:centred", f"{path}:linear"), of_file(path, "centred", "linear")):
        trainer = trainer_with(advantage_estimator=algorithm[0], policy_loss=algorithm[1])
        weights = weights or weights_of(trainer.actor)
        put_back(trainer.actor, weights)
        sample(trainer)
        status = trainer.ppo_train(1)
        results.append({name: status[name] for name in ("policy_loss", "actor_grad_norm", "mine")})
    assert results[0] == results[1]
    assert results[0]["actor_grad_norm"] > 0


def of_file(path: Path, *names: str) -> list[Callable]:
    return [load_python_function(f"{path}:{name}", name) for name in names]


def one_row(ids: list[int], seed: int) -> Experience:
    generator = torch.Generator().manual_seed(seed)
    a = len(ids)
    mask = torch.ones(1, a, dtype=torch.bool)
    mask[0, 1] = False
    normal = lambda: torch.randn(1, a, generator=generator)  # noqa: E731
    ones = torch.ones(1, a + 1, dtype=torch.long)
    return Experience(
        torch.tensor([[1, *ids]]), ones, mask, action_log_probs=normal(), advantages=normal()
    )


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_the_selection_depends_on_the_tokens_not_on_ranks_or_order(name):
    rows = lambda: [one_row([5 + i, 6, 7 + 2 * i, 8], seed=i) for i in range(12)]  # noqa: E731
    options = (
        {"clip_cov_ratio": 0.1, "clip_cov_low": -9.0, "clip_cov_high": 9.0}
        if name == "clip_cov"
        else {}
    )
    options = options or {"kl_cov_ratio": 0.1}
    loss = PolicyLoss(policy_loss=name, options=options)

    def chosen(
        items: list[Experience], strategy: FakeStrategy, seed: int = 3
    ) -> dict[tuple, list[bool]]:
        select_tokens(items, loss, strategy, seed)
        return {tuple(item.sequences[0].tolist()): item.selected[0].tolist() for item in items}

    whole = chosen(rows(), FakeStrategy())
    assert sum(map(sum, whole.values())) == 3  # ⌊0.1·36⌋ of the trained tokens
    assert not any(row[1] for row in whole.values())  # the hole
    assert chosen(rows()[::-1], FakeStrategy()) == whole
    halves = on_ranks(2, lambda strategy: chosen(rows()[strategy.rank :: 2], strategy))
    assert halves[0] | halves[1] == whole
    uneven = on_ranks(2, lambda strategy: chosen(rows() if strategy.rank else [], strategy))
    assert uneven[1] == whole
    if name == "clip_cov":  # drawn anew for each rollout
        assert any(chosen(rows(), FakeStrategy(), seed) != whole for seed in range(4, 8))


# -- mixture of experts ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    from support.tiny import save_tokenizer
    from transformers import MixtralConfig, MixtralForCausalLM

    folder, llama = tmp_path_factory.mktemp("mixtral"), tiny_config().to_dict()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")  # fmt: skip
    own = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    MixtralForCausalLM(
        MixtralConfig(**{name: llama[name] for name in names}, **own)
    ).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def test_the_load_balancing_loss_of_a_mixture(make_config, mixture):
    from lightppo import PPOTrainer

    grpo = {**GRPO, "n_samples_per_prompt": 2, "total_training_steps": 1}
    found = []
    for coef, micro in ((0.5, 8), (0.5, 1), (0.0, 8)):
        options = {
            "save_path": f"{make_config().checkpoint.save_path}{len(found)}",
            "micro_train_batch_size": micro,
        }
        config = make_config(
            pretrain=mixture, aux_loss_coef=coef, actor_learning_rate=0.0, **grpo, **options
        )
        trainer = PPOTrainer.from_config(config)
        prompts = [
            Prompt(text, trainer.tokenizer(text)["input_ids"], "1", i)
            for i, text in enumerate(("1+", "2+3"))
        ]
        sample(trainer, prompts, step=1)
        found.append(trainer.ppo_train(1))
    whole, cut_up, without = found
    # 1 where the experts share evenly, per the formula of the models
    assert whole["aux_loss"] >= 0.9
    # a product of means: near, not equal
    assert cut_up["aux_loss"] == pytest.approx(whole["aux_loss"], rel=0.2)
    assert "aux_loss" not in without
    assert whole["actor_grad_norm"] != without["actor_grad_norm"]


def test_a_model_without_router_is_refused_at_the_start(make_config):
    with pytest.raises(ConfigError, match="--aux_loss_coef: LlamaForCausalLM"):
        PPOTrainer.from_config(make_config(aux_loss_coef=0.1))
