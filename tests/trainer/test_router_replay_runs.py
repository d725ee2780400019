"""``--router_replay`` in whole runs of a mixture of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families.zoo import random_model
from support.runs import fitted, trained_rows, whole_weights
from support.tiny import save_tokenizer

from lightppo.errors import ConfigError
from lightppo.models.router_replay import ReplayPass, unknown

pytestmark = pytest.mark.usefixtures("world")

GRPO = {"advantage_estimator": "grpo", "init_kl_coef": 0.0, "n_samples_per_prompt": 2}
TWO_STEPS = GRPO | {"train_batch_size": 4, "total_training_steps": 2}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mixture")
    random_model("qwen3_moe").save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


class Seen:
    """What the passes of a trainer's actor were told, and what they recorded."""

    def __init__(self, actor: Any) -> None:
        self.passes: list[ReplayPass] = []
        if actor.router_replay is None:
            return
        entered = actor.router_replay.entered

        def noted(replay_pass: ReplayPass) -> Any:
            self.passes.append(replay_pass)
            return entered(replay_pass)

        actor.router_replay.entered = noted

    def known(self) -> list[torch.Tensor]:
        """Whether each token's choice was given, (T,) of each pass that replayed."""
        choices = [
            replay_pass.choices for replay_pass in self.passes if replay_pass.choices is not None
        ]
        return [(c != unknown(c.dtype)).all(-1).all(-1) for c in choices]


def trained(make_config: Any, mixture: str, **options: Any) -> tuple[Any, Any, Seen]:
    from lightppo import PPOTrainer

    config = make_config(pretrain=mixture, **TWO_STEPS | options)
    trainer = PPOTrainer.from_config(config)
    seen = Seen(trainer.actor)
    trainer.fit()
    return config, trainer, seen


@pytest.mark.parametrize(("replayed", "packing"), [("old", True), ("rollout", False)])
def test_training_uses_the_experts_that_were_chosen(make_config, mixture, replayed, packing):
    options = {"router_replay": replayed, "packing_samples": packing}
    config, _, seen = trained(make_config, mixture, **options)
    known = seen.known()
    assert known
    if not packing:  # all but padding and the last token of each response
        assert all(0.4 < is_known.float().mean() < 1 for is_known in known)
    shares = [row["train/replaced_experts"] for row in trained_rows(config)]
    # the first of two optimizer steps has the weights that chose, the second one chooses otherwise here and there
    assert 0 < max(shares) < 0.5


@pytest.mark.parametrize("replayed", ["old", "rollout"])
def test_weights_that_chose_are_trained_as_without_replay(make_config, mixture, replayed, tmp_path):
    """In float32 engine, old log probs and training agree on every expert: nothing changes, to the last bit."""
    options = {"train_batch_size": 8, "total_training_steps": 1, "old_log_probs": "forward"}
    weights = []
    for name in ("off", replayed):
        folder = str(tmp_path / name)
        config, trainer, _ = trained(
            make_config, mixture, router_replay=name, save_path=folder, **options
        )
        weights.append(whole_weights(trainer))
    assert [row["train/replaced_experts"] for row in trained_rows(config)] == [0.0]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def test_models_without_experts_are_refused_at_the_start(make_config):
    with pytest.raises(ConfigError, match="--router_replay: model type 'llama' has no experts"):
        fitted(make_config(router_replay="old", **GRPO))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torch_compile": True}, "a compiled layer chooses by itself"),
        ({"batch_invariant": True}, "sampling and training choose the same experts"),
        ({"skip_rollout": "folder"}, "its files have no experts"),
    ],
)
def test_what_does_not_record_is_refused(make_config, options, message):
    config = make_config(router_replay="rollout", **GRPO | options)
    with pytest.raises(ConfigError, match=message):
        fitted(config)
