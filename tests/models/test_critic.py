"""Critics and reward models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.critic import Critic, NewRewardModel, RewardModel

Batch = tuple[Tensor, Tensor, int]
MakeModel = Callable[..., PreTrainedModel]


def plain_values(model: PreTrainedModel, row: Tensor) -> Tensor:
    """(n,) -> (n,): the score at each position of one unpadded row."""
    return model.score(model.base_model(input_ids=row[None]).last_hidden_state)[0, :, 0]


def values_and_gradients(critic: Critic, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    sequences, mask, num_actions = batch
    critic.train()
    values = critic(sequences, num_actions, mask)
    weights = torch.linspace(-1, 1, values.numel()).view_as(values)
    (values * weights).sum().div(mask[:, -num_actions:].sum()).backward()
    return values.detach(), {n: p.grad for n, p in critic.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packing_samples", [False, True])
def test_batch_equals_single_unpadded_rows(
    family: str, attention: str, packing_samples: bool, classifier: MakeModel, ragged: Batch
) -> None:
    sequences, mask, num_actions = ragged
    critic = Critic(classifier(family, attention), packing_samples=packing_samples)
    with torch.no_grad():
        values = critic(sequences, num_actions, mask, include_last=True)
        assert values.shape == (4, num_actions + 1)
        for b in range(len(sequences)):
            real = mask[b].bool()
            expected = torch.zeros(sequences.shape[1])
            expected[real] = plain_values(critic.model, sequences[b][real])
            torch.testing.assert_close(
                values[b], expected[-num_actions - 1 :], atol=1e-5, rtol=1e-5
            )
        torch.testing.assert_close(
            critic(sequences, num_actions, mask), values[:, :-1], atol=1e-5, rtol=1e-5
        )


def test_packed_equals_padded_with_gradients(
    family: str, attention: str, classifier: MakeModel, ragged: Batch
) -> None:
    padded, padded_grads = values_and_gradients(Critic(classifier(family, attention)), ragged)
    packed, packed_grads = values_and_gradients(
        Critic(classifier(family, attention), packing_samples=True), ragged
    )
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=0)
    assert padded_grads.keys() == packed_grads.keys()
    assert max(float(g.abs().max()) for g in padded_grads.values()) > 1e-2
    for name, grad in padded_grads.items():
        torch.testing.assert_close(packed_grads[name], grad, atol=1e-5, rtol=0, msg=name)


def test_value_comes_before_the_action(classifier: MakeModel) -> None:
    # S = 5, A = 2: the actions are tokens 3 and 4; their values are the scores at positions 2 and 3
    row = torch.tensor([[5, 6, 7, 8, 9]])
    critic = Critic(classifier())
    with torch.no_grad():
        scores = plain_values(critic.model, row[0])
        torch.testing.assert_close(critic(row, 2)[0], scores[2:4], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(
            critic(row, 2, include_last=True)[0], scores[2:5], atol=1e-6, rtol=1e-6
        )
        torch.testing.assert_close(critic(row)[0], scores, atol=1e-6, rtol=1e-6)


def test_rows_packed_by_the_caller(classifier: MakeModel, ragged: Batch) -> None:
    sequences, mask, num_actions = ragged
    critic = Critic(classifier())
    row, lengths, actions = sequences[mask.bool()][None], [11, 15, 8, 19], [10, 1, 3, 10]
    with torch.no_grad():
        every = critic(sequences, attention_mask=mask)  # (B, S)
        torch.testing.assert_close(
            critic(row, packed_seq_lens=lengths)[0], every[mask.bool()], atol=1e-5, rtol=1e-5
        )
        real = mask[:, -num_actions:].bool()
        before = every[:, -num_actions - 1 : -1][real]
        torch.testing.assert_close(
            critic(row, actions, packed_seq_lens=lengths)[0], before, atol=1e-5, rtol=1e-5
        )
        assert critic(row, actions, packed_seq_lens=lengths, include_last=True).shape == (1, 24 + 4)


@pytest.mark.parametrize("packing_samples", [False, True])
def test_return_output_gives_the_base_model_output(
    packing_samples: bool, classifier: MakeModel, ragged: Batch
) -> None:
    sequences, mask, num_actions = ragged
    critic = Critic(classifier(), packing_samples=packing_samples)
    values, output = critic(sequences, num_actions, mask, return_output=True)
    assert values.shape == (4, 10)
    assert output.last_hidden_state.shape == ((1, 53, 32) if packing_samples else (4, 24, 32))


def test_critic_from_a_causal_lm_saves_as_a_plain_classifier(
    family: str, causal_lm: MakeModel, ragged: Batch, tmp_path: Path
) -> None:
    sequences, mask, _ = ragged
    causal_lm(family).save_pretrained(tmp_path / "lm")
    critic = Critic(str(tmp_path / "lm"), draws_head=True)
    critic.model.save_pretrained(tmp_path / "critic")
    options = {
        "output_loading_info": True,
        "attn_implementation": critic.hf_model.config._attn_implementation,
    }
    plain, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", **options)
    assert plain.config.num_labels == 1
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    row = sequences[3][mask[3].bool()]
    with torch.no_grad():
        torch.testing.assert_close(
            plain(row[None]).logits[0], critic(row[None])[0, -1:], atol=1e-6, rtol=1e-6
        )
        again = Critic(str(tmp_path / "critic"))  # and its head is kept, not drawn again
        torch.testing.assert_close(again(row[None]), critic(row[None]), atol=1e-6, rtol=1e-6)


def test_a_new_head_of_a_critic_is_zero_and_learns(causal_lm: MakeModel, tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    critic = Critic(str(tmp_path))
    values = critic(torch.tensor([[5, 6, 7]]))
    assert values.tolist() == [[0.0, 0.0, 0.0]]
    (values - 1).square().sum().backward()
    assert critic.model.score.weight.grad.abs().sum() > 0


def test_new_head_of_a_reward_model_is_normal_with_the_documented_variance(
    causal_lm: MakeModel, tmp_path: Path
) -> None:
    causal_lm().save_pretrained(tmp_path)
    torch.manual_seed(123)
    first = NewRewardModel(str(tmp_path), seed=7).model.score.weight
    torch.manual_seed(456)
    again = NewRewardModel(str(tmp_path), seed=7).model.score.weight
    assert torch.equal(again, first)  # its own generator
    assert not torch.equal(NewRewardModel(str(tmp_path), seed=8).model.score.weight, first)
    # torch.randn with the seed, times 1 / sqrt(32 + 1)
    expected = torch.randn(1, 32, generator=torch.Generator().manual_seed(7)) / 33**0.5
    torch.testing.assert_close(first, expected)


def test_critic_from_a_reward_model_keeps_or_renews_the_head(
    classifier: MakeModel, tmp_path: Path
) -> None:
    model = classifier()
    model.save_pretrained(tmp_path)
    assert torch.equal(Critic(str(tmp_path)).model.score.weight, model.score.weight)
    assert not torch.equal(
        Critic(str(tmp_path), init_value_head=True).model.score.weight, model.score.weight
    )


def test_normalize_reward_uses_the_statistics_of_the_reward_model(
    classifier: MakeModel, tmp_path: Path
) -> None:
    model = classifier()
    model.config.mean, model.config.std = 0.5, 2.0
    model.save_pretrained(tmp_path / "rm")
    row = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        raw = Critic(str(tmp_path / "rm"))(row)
        normalised = Critic(str(tmp_path / "rm"), normalize_reward=True)(row)
        torch.testing.assert_close(normalised, (raw - 0.5) / 2.0)
        other = classifier()  # no statistics: values as they are
        torch.testing.assert_close(Critic(other, normalize_reward=True)(row), Critic(other)(row))


def test_gradient_checkpointing_gives_the_same_gradients(
    classifier: MakeModel, ragged: Batch
) -> None:
    critic = Critic(classifier())
    critic.gradient_checkpointing_enable()
    calls = []
    critic.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    _, grads = values_and_gradients(critic, ragged)
    assert len(calls) == 2
    _, expected = values_and_gradients(Critic(classifier()), ragged)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-6, rtol=1e-6, msg=name)


def test_several_outputs_are_refused(classifier: MakeModel) -> None:
    with pytest.raises(ModelLoadError, match=r"critic .* 3"):
        Critic(classifier(num_labels=3))


# ---------------------------------------------------------------------------------------------------------------------
# reward models


def rename_head(folder: Path, prefix: str, with_bias: bool = False) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[f"{prefix}.weight"] = weights.pop("score.weight")
    if with_bias:
        weights[f"{prefix}.bias"] = torch.zeros(1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_score_is_at_the_last_real_token(family: str, classifier: MakeModel, ragged: Batch) -> None:
    sequences, mask, _ = ragged
    model = RewardModel(classifier(family))
    with torch.no_grad():
        scores = model(sequences, mask)
        for b in range(len(sequences)):
            row = sequences[b][mask[b].bool()]
            # what transformers itself says
            expected = model.model(input_ids=row[None]).logits[0, 0]
            torch.testing.assert_close(scores[b], expected, atol=1e-5, rtol=1e-5)
    assert scores.dtype == torch.float32


def test_a_row_without_tokens_is_named(classifier: MakeModel, ragged: Batch) -> None:
    sequences, mask, _ = ragged
    mask = mask.clone()
    mask[2] = 0
    with pytest.raises(ValueError, match=r"rows \[2\]"):
        RewardModel(classifier())(sequences, mask)


def test_normalize_reward(classifier: MakeModel, tmp_path: Path) -> None:
    model = classifier()
    row = torch.tensor([[5, 6, 7]])
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"--normalize_reward: .* mean and std"):
        RewardModel(str(tmp_path), normalize_reward=True)
    model.config.mean, model.config.std = 0.5, 2.0
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        raw = RewardModel(str(tmp_path))(row)
        torch.testing.assert_close(
            RewardModel(str(tmp_path), normalize_reward=True)(row), (raw - 0.5) / 2.0
        )
    model.config.std = 0.0
    with pytest.raises(ModelLoadError, match=r"--normalize_reward: .* std 0\.0"):
        RewardModel(model, normalize_reward=True)


def test_a_causal_lm_is_not_a_reward_model(causal_lm: MakeModel, tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"--reward_pretrain .* score\.weight"):
        RewardModel(str(tmp_path))
    # to be trained
    assert RewardModel(str(tmp_path), init_value_head=True)(torch.tensor([[5, 6]])).shape == (1,)


@pytest.mark.parametrize("prefix", ["value_head", "v_head.summary"])
def test_head_under_another_name(prefix: str, classifier: MakeModel, tmp_path: Path) -> None:
    model = classifier()
    model.save_pretrained(tmp_path)
    rename_head(tmp_path, prefix)
    with pytest.raises(
        ModelLoadError, match=rf"--reward_pretrain .*{prefix}\.weight: .*--value_head_prefix"
    ):
        RewardModel(str(tmp_path))
    loaded = RewardModel(str(tmp_path), value_head_prefix=prefix)
    assert torch.equal(loaded.model.score.weight, model.score.weight)
    loaded.model.save_pretrained(tmp_path / "again")  # under transformers' own name
    assert "score.weight" in load_file(tmp_path / "again" / "model.safetensors")


def test_a_head_with_a_bias_is_not_cut_down_silently(classifier: MakeModel, tmp_path: Path) -> None:
    classifier().save_pretrained(tmp_path)
    rename_head(tmp_path, "value_head", with_bias=True)
    with pytest.raises(ModelLoadError, match=r"--reward_pretrain .*value_head .*bias"):
        RewardModel(str(tmp_path), value_head_prefix="value_head")


def test_several_labels_are_refused(classifier: MakeModel, tmp_path: Path) -> None:
    classifier(num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"--reward_pretrain .*\(3, 32\)"):
        RewardModel(str(tmp_path))


def test_packed_rows_that_share_prompts_have_the_scores_of_padded_ones(
    family, attention, classifier, ragged
) -> None:
    """Two answers to each prompt, with the gradients."""
    sequences, mask, num_actions = ragged
    sequences, mask = sequences.repeat(2, 1), mask.repeat(2, 1)
    sequences[4:, -num_actions:] = sequences[:4, -num_actions:].flip(0)
    mask[4:, -num_actions:] = mask[:4, -num_actions:].flip(0)
    found = {}
    for packing in (False, True):
        model = RewardModel(classifier(family, attention), packing_samples=packing)
        scores = model.train()(sequences, mask, num_actions)
        (scores * torch.linspace(-1, 1, 8)).sum().backward()
        found[packing] = (
            scores.detach(),
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        )
    assert found[True][0].shape == (8,)
    torch.testing.assert_close(found[True][0], found[False][0], atol=1e-5, rtol=1e-5)
    assert found[True][1].keys() == found[False][1].keys()
    for name, grad in found[False][1].items():
        torch.testing.assert_close(found[True][1][name], grad, atol=2e-5, rtol=1e-4, msg=name)
