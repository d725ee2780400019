"""``--use_liger_kernel`` with stand-ins for Liger's kernels, some of them slightly wrong."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fake_liger import PLACES, FakeLiger
from torch import Tensor
from transformers import PreTrainedModel

from lightppo.config import PPOConfig
from lightppo.errors import ModelLoadError
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic
from lightppo.models.kernels import liger
from lightppo.models.wrapper import prepare_model

MakeModel = Callable[..., PreTrainedModel]
CPU = torch.device("cpu")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeLiger]:
    """Puts a fake Liger beside a GPU that is this CPU."""

    def install(error: str = "", **wrong: float) -> FakeLiger:
        fake = FakeLiger({name.replace("_", " "): by for name, by in wrong.items()}, error)
        for name, module in fake.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(liger, "runs_on", lambda device: True)
        monkeypatch.setattr(liger, "_TRIED", {})
        liger._say.cache_clear()
        return fake

    return install


def prepared(model: Any, role: str = "actor", **options: Any) -> Any:
    prepare_model(model, role, PPOConfig.from_flat(options).resolved(), CPU)
    return model


def gradients_of(model: PreTrainedModel) -> list[Tensor]:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 4, 3]])
    scores = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    loss = scores[0, :-1].gather(1, ids[0, 1:, None]).mean()
    return [scores.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def in_use(model: PreTrainedModel) -> set[str]:
    return {
        name.rsplit(".", 1)[-1] for name, part in model.named_modules() if "forward" in vars(part)
    }


KERNELS = {"mlp", "input_layernorm", "post_attention_layernorm", "self_attn"}


@pytest.mark.parametrize("asked", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", PLACES)
def test_exact_kernels_are_used(
    family: str,
    dtype: torch.dtype,
    asked: bool | None,
    install: Callable[..., FakeLiger],
    causal_lm: MakeModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = gradients_of(Actor(causal_lm(family).to(dtype)).hf_model)
    fake = install()
    before = [dict(vars(place)) for place, _ in PLACES.values()]
    with caplog.at_level(logging.INFO, "lightppo"):
        actor = prepared(Actor(causal_lm(family).to(dtype)), use_liger_kernel=asked)
    assert in_use(actor.hf_model) == KERNELS
    # later models are transformers' own
    assert before == [dict(vars(place)) for place, _ in PLACES.values()]
    name = PLACES[family][1]
    said = [f"Liger's kernels run norms, rotary embeddings and MLPs of {name}Model"]
    assert [record.getMessage() for record in caplog.records] == said * (asked is None)
    fake.calls.clear()
    found = gradients_of(actor.hf_model)
    assert {call: fake.calls.count(call) for call in fake.calls} == {
        "norm": 4,
        "mlp": 2,
        "rotary": 2,
    }
    bound = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(found, plain, atol=bound, rtol=bound)


def test_trying_them_draws_nothing(install: Callable[..., FakeLiger], causal_lm: MakeModel) -> None:
    install()
    actor = Actor(causal_lm())
    state = torch.get_rng_state()
    prepared(actor)
    assert in_use(actor.hf_model) == KERNELS
    assert torch.equal(torch.get_rng_state(), state)


WRONGS = {
    "norm_forward": 1.0002,
    "norm_gradient": 1.0002,
    "mlp_forward": 1.001,
    "mlp_gradient": 0.999,
    "rotary_forward": 1.01,
    "rotary_gradient": -1.0,
    "norm_torch.bfloat16": 1.5,  # in this type alone
}


@pytest.mark.parametrize("wrong", WRONGS)
def test_other_numbers_are_refused(
    wrong: str,
    install: Callable[..., FakeLiger],
    causal_lm: MakeModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(**{wrong: WRONGS[wrong]})
    dtype = torch.bfloat16 if "bfloat16" in wrong else torch.float32
    model = causal_lm().to(dtype)
    plain = gradients_of(Actor(causal_lm().to(dtype)).hf_model)
    with caplog.at_level(logging.INFO, "lightppo"):
        for role in ("actor", "reference"):
            actor = prepared(Actor(model), role)
    (said,) = [record.getMessage() for record in caplog.records]
    kind = str(dtype).removeprefix("torch.")
    assert said.startswith(f"Liger's kernels are not used: in {kind} ")
    assert ("log probs of LlamaModel would differ by" in said) == ("gradient" not in wrong)
    assert not in_use(actor.hf_model)
    torch.testing.assert_close(gradients_of(actor.hf_model), plain, atol=0, rtol=0)
    with pytest.raises(ModelLoadError, match=f"--use_liger_kernel: in {kind} .* leave it out"):
        prepared(Actor(model), use_liger_kernel=True)
    assert not in_use(model)


def test_kernels_for_another_activation_are_refused(
    install: Callable[..., FakeLiger], causal_lm: MakeModel
) -> None:
    """Liger's MLP takes SiLU without a look at the config."""
    install()
    model = causal_lm()
    model.config.hidden_act = "gelu"
    assert "log probs of LlamaModel would differ" in liger.why_not(model, CPU)


@pytest.mark.parametrize(
    ("error", "reason"),
    [("no Triton\n here", "trying them failed: RuntimeError: no Triton here"), ("", "no kernels")],
    ids=["fails", "unknown family"],
)
def test_what_liger_cannot_do(
    error: str,
    reason: str,
    install: Callable[..., FakeLiger],
    causal_lm: MakeModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(error)
    family = "llama" if error else "gemma2"
    with caplog.at_level(logging.INFO, "lightppo"):
        actor = prepared(Actor(causal_lm(family)))
    assert reason in caplog.text
    assert not in_use(actor.hf_model)
    with pytest.raises(ModelLoadError, match=reason):
        prepared(Actor(causal_lm(family)), use_liger_kernel=True)


def test_a_liger_that_does_not_fit_this_transformers(
    install: Callable[..., FakeLiger],
    causal_lm: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install()
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    with caplog.at_level(logging.INFO, "lightppo"):
        assert not in_use(prepared(Actor(causal_lm())).hf_model)
    assert "Liger's kernels are not used: liger-kernel cannot be imported" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_real_ones_are_exact(name: str, dtype: torch.dtype, causal_lm: MakeModel) -> None:
    pytest.importorskip("liger_kernel")
    assert liger.why_not(causal_lm(name).to(dtype), torch.device("cuda")) is None


def test_errors_that_are_not_of_the_model_end_the_run(
    install: Callable[..., FakeLiger], causal_lm: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()

    def fail(*_: Any) -> None:
        raise torch.distributed.DistError("a rank is gone")

    monkeypatch.setattr(liger, "numbers_of", fail)
    with pytest.raises(torch.distributed.DistError):
        prepared(Actor(causal_lm()))


def test_too_little_memory_to_try(
    install: Callable[..., FakeLiger], causal_lm: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(liger, "numbers_of", fail)
    assert not in_use(prepared(Actor(causal_lm())).hf_model)
    assert liger.why_not(causal_lm(), CPU) == "there is no memory to try them"


def test_models_of_one_family_are_tried_once(
    install: Callable[..., FakeLiger],
    causal_lm: MakeModel,
    classifier: MakeModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = install()
    with caplog.at_level(logging.INFO, "lightppo"):
        prepared(Actor(causal_lm()))
        tried = len(fake.calls)
        critic = prepared(Critic(classifier()), "critic")
        reference = prepared(Actor(causal_lm()), "reference")
        reward = prepared(Critic(classifier()), "reward")
    assert len(fake.calls) == tried > 0
    assert in_use(critic.hf_model) == in_use(reference.hf_model) == KERNELS
    assert not in_use(reward.hf_model)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("options", [{"use_liger_kernel": False}, {"torch_compile": True}], ids=str)
def test_switched_off(
    options: dict[str, Any],
    install: Callable[..., FakeLiger],
    causal_lm: MakeModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = install()
    with caplog.at_level(logging.INFO, "lightppo"):
        actor = prepared(Actor(causal_lm()), **options)
    assert not in_use(actor.hf_model)
    assert not fake.calls
    assert not caplog.records


@pytest.mark.parametrize("lacks", ["package", "GPU"])
def test_without_it_nothing_is_said(
    lacks: str,
    install: Callable[..., FakeLiger],
    causal_lm: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install()
    if lacks == "package":
        monkeypatch.setitem(sys.modules, "liger_kernel", None)
    else:
        monkeypatch.setattr(liger, "runs_on", lambda device: False)
    with caplog.at_level(logging.INFO, "lightppo"):
        assert not in_use(prepared(Actor(causal_lm())).hf_model)
    assert not caplog.records
    expected = "pip install liger-kernel" if lacks == "package" else "no CUDA device"
    with pytest.raises(ModelLoadError, match=f"--use_liger_kernel: .*{expected}"):
        prepared(Actor(causal_lm()), use_liger_kernel=True)


def test_a_run_on_a_cpu_does_not_look(causal_lm: MakeModel) -> None:
    assert not in_use(prepared(Actor(causal_lm())).hf_model)


def test_wide_models_with_many_layers_and_experts_are_tried_small(causal_lm: MakeModel) -> None:
    model = causal_lm("mixtral")
    model.config.num_hidden_layers = 48
    model.config.num_local_experts = 128
    model.config.vocab_size = 150_000
    model.config.layer_types = ["full_attention"] * 48
    small = liger.small_copy(model, torch.bfloat16, CPU)
    assert sum(weight.numel() for weight in small.parameters()) < 400_000
    assert len(small.layers) == 2
    assert small.config.hidden_size == model.config.hidden_size
    assert {weight.dtype for weight in small.parameters()} == {torch.bfloat16}
    assert model.config.num_hidden_layers == 48


def test_families_are_tried_as_they_are(family: str, causal_lm: MakeModel) -> None:
    """Also those that Liger does not know today."""
    numbers = liger.numbers_of(liger.small_copy(causal_lm(family), torch.float32, CPU))
    assert len(numbers) > 10
    assert all(value.isfinite().all() for value in numbers.values())
