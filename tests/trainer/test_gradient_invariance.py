"""The gradient of an optimizer step is that of one plain torch batch: at any micro batch size, padded or packed, with
a prompt once for all its samples or with each, on one or two ranks, at any ZeRO stage. Actor (policy + KL + PTX losses,
temperature 0.7) and critic."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks

from lightppo.algorithms.entries import POLICY_LOSSES

SCRIPT = Path(__file__).parent / "ranks" / "gradients.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gradients_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plain(script, tiny_model) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients by autograd alone: no strategy, no micro batches, one unpadded row after the other."""
    from transformers import AutoModelForCausalLM

    from lightppo.models.critic import Critic

    samples, tokens = script.make_samples(), 0
    actor = AutoModelForCausalLM.from_pretrained(tiny_model)
    critic = Critic(tiny_model, draws_head=True)
    policy = value = kl = 0.0
    for s in samples:
        tokens += int(s.action_mask.sum())
        logits = actor(s.sequences).logits[:, -s.num_actions - 1 : -1] / script.TEMPERATURE
        log_probs = (
            logits.log_softmax(-1).gather(2, s.sequences[:, -s.num_actions :, None]).squeeze(2)
        )
        ratio = (log_probs - s.action_log_probs).exp()
        token_loss = -torch.minimum(ratio * s.advantages, ratio.clamp(0.7, 1.3) * s.advantages)
        d = log_probs - s.base_action_log_probs
        policy = policy + token_loss[s.action_mask].sum()
        kl = kl + ((-d).exp() + d - 1)[s.action_mask].sum()
        hidden = critic.model.base_model(s.sequences).last_hidden_state
        values = critic.model.score(hidden).squeeze(2)[:, -s.num_actions - 1 : -1]
        near = values.clamp(s.values - 0.2, s.values + 0.2)
        errors = torch.maximum((values - s.returns) ** 2, (near - s.returns) ** 2)
        value = value + 0.5 * errors[s.action_mask].sum()
    texts = script.pretrain_batches(1, 0, 1)[0]
    logits = actor(texts["input_ids"]).logits[:, :-1]
    ptx = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), texts["labels"][:, 1:].flatten(), ignore_index=-100
    )
    losses = {"policy": policy / tokens, "kl": kl / tokens, "ptx": ptx, "value": value / tokens}
    (losses["policy"] + 0.1 * losses["kl"] + 0.5 * losses["ptx"]).backward()
    losses["value"].backward()
    return {
        "actor": {n: p.grad for n, p in actor.named_parameters()},
        "critic": {n: p.grad for n, p in critic.named_parameters()},
        "losses": {name: loss.item() for name, loss in losses.items()},
    }


@pytest.fixture(scope="module")
def found(tiny_model, tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("gradients")
    cases = {}
    for world_size in (1, 2):
        path = out / f"{world_size}.pt"
        run_ranks(SCRIPT, tiny_model, path, world_size=world_size, timeout=300)
        cases |= torch.load(path)
    return cases


ROWS = {False: "padded", True: "packed", "shared": "shared"}
CASES = [(w, 0, micro, packed) for w in (1, 2) for micro in (1, 2, 4, "40t") for packed in ROWS]
CASES += [
    (w, stage, 2, packed)
    for w in (1, 2)
    for stage, packed in ((2, False), (3, True), (3, "shared"))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"ranks{c[0]}-zero{c[1]}-micro{c[2]}-{ROWS[c[3]]}"
)
def test_gradient_is_that_of_plain_torch(case, found, plain):
    for name in ("actor", "critic"):
        gradients = found[case][name]
        assert gradients.keys() == plain[name].keys()
        assert max(g.abs().max() for g in gradients.values()) > 1e-3
        for parameter, expected in plain[name].items():
            torch.testing.assert_close(
                gradients[parameter], expected, rtol=1e-4, atol=1e-5, msg=parameter
            )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_logged_losses_are_those_of_the_whole_step(case, found, plain):
    actor, critic = found[case]["actor_status"], found[case]["critic_status"]
    assert actor["policy_loss"] == pytest.approx(plain["losses"]["policy"], abs=1e-5)
    assert actor["kl_loss"] == pytest.approx(plain["losses"]["kl"], abs=1e-5)
    assert actor["ptx_loss"] == pytest.approx(plain["losses"]["ptx"], abs=1e-5)
    assert critic["critic_loss"] == pytest.approx(plain["losses"]["value"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "stage", "micro"), [(1, 0, 4), (1, 0, 2), (1, 3, 2), (2, 0, 4), (2, 3, 2)]
)
def test_fewer_tokens_go_through_the_models_where_prompts_are_shared(world, stage, micro, found):
    for name in ("actor_tokens", "critic_tokens"):
        assert found[world, stage, micro, "shared"][name] < found[world, stage, micro, True][name]


def test_variants_are_all_losses(script):
    assert {f"loss {name}" for name in POLICY_LOSSES} <= script.VARIANTS.keys()


@pytest.mark.slow
def test_every_loss_has_one_gradient_however_it_is_cut_up(script, found):
    """All policy losses with weights and selected tokens, KL losses with gradient also when packed, entropy, totals."""
    for name in script.VARIANTS:
        whole = found[name, 1, 4, False]
        assert max(g.abs().max() for g in whole["actor"].values()) > 1e-4, name
        for world, (micro, packed) in (
            (world, way) for world, ways in script.WAYS.items() for way in ways
        ):
            case = found[name, world, micro, packed]
            for parameter, expected in whole["actor"].items():
                torch.testing.assert_close(
                    case["actor"][parameter],
                    expected,
                    rtol=1e-4,
                    atol=2e-6,
                    msg=f"{name} {world} {micro} {parameter}",
                )
            status = {
                k: v
                for k, v in whole["actor_status"].items()
                if k not in ("actor_lr", "actor_grad_norm")
            }
            assert {k: case["actor_status"][k] for k in status} == pytest.approx(
                status, abs=2e-5
            ), name


@pytest.mark.slow
def test_the_variants_differ(script, found):
    """An option that changed nothing would pass the test above."""
    norms = {}
    for name in script.VARIANTS:
        changes = found[name, 1, 4, False]["actor"]
        norms[name] = round(
            sum(float(g.double().square().sum()) for g in changes.values()) ** 0.5, 6
        )
    straight_through = {norms.pop("kl k1+"), norms.pop("kl k3+")}
    assert straight_through == {norms["kl k2"]}  # other values, the gradient of k2
    assert len(set(norms.values())) == len(norms), norms
