"""The engine's log probs against the trainer's: what is compared, who hears of it, and when."""

import contextlib
import copy
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from support.fakes import FakeStrategy, make_rollout, on_ranks
from support.tiny import tiny_config
from transformers import LlamaForCausalLM

from lightppo.config import PPOConfig
from lightppo.errors import RolloutMismatchError
from lightppo.experience.rollout_check import RolloutCheck
from lightppo.logging.alarms import DriftWatch
from lightppo.models.actor import Actor
from lightppo.trainer.run_callbacks import drift_watch


@pytest.fixture(scope="module")
def actor():
    torch.manual_seed(0)
    return Actor(LlamaForCausalLM(tiny_config()), temperature=0.5)


class Copy:
    """An engine with weights of its own."""

    keeps_weights = True

    def __init__(self, differing=(), unknown=()):
        self.found = list(differing), list(unknown)

    def differing_weights(self):
        return self.found


def config(**options):
    return PPOConfig.from_flat(rollout_engine="vllm", temperature=0.5, **options)


def sampled(actor, shift=0.0, temperature=0.5):
    """Two rollouts whose log probs are the actor's, moved by ``shift`` on one of five tokens."""
    rollouts = []
    for ids, response in (([5, 6], [7, 8, 9]), ([4], [9, 5])):
        with torch.no_grad():
            logits = (
                actor.hf_model(torch.tensor([ids + response])).logits[0, len(ids) - 1 : -1]
                / temperature
            )
        log_probs = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
        rollouts.append(make_rollout(ids, response, log_probs=log_probs))
    rollouts[0].log_probs[1] += shift
    return rollouts


def test_difference_is_over_the_tokens_of_all_ranks(actor):
    mean, largest, tokens = RolloutCheck(actor, Copy(), FakeStrategy(), config()).difference(
        sampled(actor, shift=0.5)
    )
    assert tokens == 5
    assert mean == pytest.approx(0.5 / 5, abs=1e-6)
    assert largest == pytest.approx(0.5, abs=1e-5)

    def rank(strategy):
        own = copy.deepcopy(actor)
        rollouts = [] if strategy.rank else sampled(own, shift=-0.5)
        return RolloutCheck(own, Copy(), strategy, config()).difference(rollouts)

    for mean, largest, tokens in on_ranks(2, rank):
        assert tokens == 5
        assert mean == pytest.approx(0.1, abs=1e-6)
        assert largest == pytest.approx(0.5, abs=1e-5)


def test_each_adapter_is_checked_once(actor):
    engine, strategy = Copy(), FakeStrategy()
    check = RolloutCheck(actor, engine, strategy, config())
    right, wrong = sampled(actor), sampled(actor, shift=0.5)
    check.first(right)
    check.first(wrong)  # of the same weights
    for engine.adapter in ("run-1", "run-2"):
        check.first(right)
        check.first(wrong)
    engine.adapter = "run-3"
    with pytest.raises(RolloutMismatchError, match="are not the trainer's, with adapter run-3: "):
        check.first(wrong)
    assert len(strategy.printed) == 1
    off = RolloutCheck(actor, engine, strategy, config(rollout_check="off"))
    off.first(wrong)


def test_with_samples_ahead_the_first_rollouts_and_those_of_two_adapters_are_due(actor):
    engine, strategy, ahead = Copy(), FakeStrategy(), config().with_options(max_staleness=1)
    engine.adapter = "run-1"
    check = RolloutCheck(actor, engine, strategy, ahead)
    due = [check.is_due()]
    check.first(failed(2))  # nothing to compare
    due.append(check.is_due())
    check.first(sampled(actor))
    due.append(check.is_due())
    for engine.adapter in ("run-2", "run-3"):
        due.append(check.is_due())
        check.first(sampled(actor))
    assert due == [True, True, False, True, False]
    (line,) = strategy.printed
    assert line.endswith("no later one, as training would wait for its samples")


def test_the_rows_of_one_forward_pass_are_compared(actor):
    rollouts = sampled(actor)[::-1]
    rollouts[1].log_probs[0] += 0.5
    RolloutCheck(actor, Copy(), FakeStrategy(), config(micro_rollout_batch_size=1)).first(rollouts)
    with pytest.raises(RolloutMismatchError):
        RolloutCheck(actor, Copy(), FakeStrategy(), config(micro_rollout_batch_size=2)).first(
            rollouts
        )


def test_greedy_rollouts_record_log_probs_at_temperature_1(actor):
    check = RolloutCheck(actor, Copy(), FakeStrategy(), config(do_sample=False))
    assert check.difference(sampled(actor, temperature=1.0))[1] < 1e-5
    assert actor.temperature == 0.5


def test_the_actor_keeps_its_mode(actor):
    actor.train()
    RolloutCheck(actor, Copy(), FakeStrategy(), config()).first(sampled(actor))
    assert actor.training
    actor.eval()


def test_a_mismatch_is_an_error_that_names_weights(actor):
    engine = Copy(differing=[f"layer{i}.weight" for i in range(7)])
    with pytest.raises(
        RolloutMismatchError, match=r"layer0\.weight.*layer4\.weight and 2 more"
    ) as caught:
        RolloutCheck(actor, engine, FakeStrategy(), config()).first(sampled(actor, shift=0.5))
    assert "0.1 nats apart on average, 0.5 at most" in str(caught.value)
    assert "--logp_diff_tolerance is 0.001" in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Copy(), "All weights are the same"),
        (Copy(unknown=["a.weight"]), "1 could not be compared, first a.weight"),
        (type("Silent", (), {"keeps_weights": True})(), "cannot say which weights differ"),
    ],
)
def test_a_mismatch_without_names(actor, engine, words):
    with pytest.raises(RolloutMismatchError, match=words):
        RolloutCheck(actor, engine, FakeStrategy(), config()).first(sampled(actor, shift=0.5))


def test_log_probs_that_are_no_numbers_are_a_mismatch(actor):
    with pytest.raises(RolloutMismatchError):
        RolloutCheck(actor, Copy(), FakeStrategy(), config()).first(sampled(actor, shift=math.nan))


@pytest.mark.parametrize(
    ("device", "options", "tolerance"),
    [
        ("cpu", {}, 0.001),
        ("cuda", {}, 0.01),
        ("cpu", {"vllm_dtype": "float16"}, 0.02),
        ("cuda", {"fp16": True}, 0.02),
        ("cuda", {"bf16": True}, 0.1),
        ("cuda", {"bf16": True, "vllm_dtype": "float32"}, 0.1),
        ("cpu", {"fp16": True, "vllm_dtype": "bfloat16"}, 0.1),
        ("cuda", {"bf16": True, "logp_diff_tolerance": 0.05}, 0.05),
    ],
)
def test_the_tolerance_is_of_the_coarser_type(actor, device, options, tolerance):
    strategy = FakeStrategy()
    strategy.device = torch.device(device)
    assert RolloutCheck(actor, Copy(), strategy, config(**options)).tolerance == tolerance


def test_a_larger_tolerance_and_warn_and_off(actor, caplog):
    wrong = sampled(actor, shift=0.5)
    strategy = FakeStrategy()
    RolloutCheck(actor, Copy(), strategy, config(logp_diff_tolerance=0.2)).first(wrong)
    assert "differ by 0.1 on average" in strategy.printed[0]
    with caplog.at_level(logging.WARNING):
        RolloutCheck(actor, Copy(), FakeStrategy(), config(rollout_check="warn")).first(wrong)
    assert "not the trainer's" in caplog.text
    RolloutCheck(actor, Copy(), FakeStrategy(), config(rollout_check="off")).first(wrong)


def test_only_the_first_rollouts_are_compared(actor):
    check = RolloutCheck(actor, Copy(), FakeStrategy(), config())
    check.first(sampled(actor))
    check.first(sampled(actor, shift=0.5))


def failed(count):
    """Episodes whose environments failed."""
    return [make_rollout([5, 6], [], log_probs=[], turns=[]) for _ in range(count)]


@pytest.mark.parametrize("mode", ["error", "warn"])
def test_failed_episodes_are_passed_over(actor, caplog, mode):
    """Also where a step begins with more of them than rows are compared."""
    for count in (1, 8):
        strategy = FakeStrategy()
        check = RolloutCheck(actor, Copy(), strategy, config(rollout_check=mode))
        check.first(failed(count) + sampled(actor))
        assert len(strategy.printed) == 1
    wrong = RolloutCheck(actor, Copy(), FakeStrategy(), config(rollout_check=mode))
    with pytest.raises(RolloutMismatchError) if mode == "error" else contextlib.nullcontext():
        wrong.first(failed(8) + sampled(actor, shift=0.5))
    assert ("not the trainer's" in caplog.text) == (mode == "warn")


def test_where_all_episodes_failed_the_next_batch_is_compared(actor):
    engine, strategy = Copy(), FakeStrategy()
    check = RolloutCheck(actor, engine, strategy, config())
    engine.adapter = "run-1"
    check.first(failed(3))
    assert not strategy.printed
    with pytest.raises(RolloutMismatchError):
        check.first(sampled(actor, shift=0.5))

    def rank(strategy):  # one rank's episodes all failed: both ranks have compared, and only once
        own = copy.deepcopy(actor)
        check = RolloutCheck(own, Copy(), strategy, config())
        check.first(failed(2) if strategy.rank else sampled(own))
        check.first(sampled(own, shift=0.5))

    on_ranks(2, rank)


def test_engines_that_sample_with_the_actor_are_not_compared(actor):
    strategy = FakeStrategy()
    RolloutCheck(actor, object(), strategy, config()).first(sampled(actor, shift=0.5))
    assert strategy.collectives == 0


def test_drift_is_warned_of_and_again_when_it_has_doubled(caplog):
    drift, run = DriftWatch(0.001), SimpleNamespace(strategy=FakeStrategy())
    warned = []
    with caplog.at_level(logging.WARNING):
        for step, mean in enumerate([0.0005, math.nan, 0.002, 0.003, 0.005]):
            caplog.clear()
            drift.on_step_end(run, step, {"rollout/logp_diff_mean": mean})
            warned += [step] * ("drift" in caplog.text)
        drift.on_step_end(run, 9, {})
        caplog.clear()
        of_older_policy = {"rollout/logp_diff_mean": 0.5}
        drift.on_step_end(run, 10, of_older_policy | {"rollout/logp_diff_on_policy": 0.001})
        assert caplog.text == ""
        drift.on_step_end(run, 11, of_older_policy | {"rollout/logp_diff_on_policy": 0.1})
        assert "rollout/logp_diff_on_policy is 0.1" in caplog.text
    assert warned == [2, 4]


@pytest.mark.parametrize(("options", "watched"), [({}, True), ({"rollout_check": "off"}, False)])
def test_every_engine_is_watched_unless_it_is_off(options, watched):
    for engine in ("hf", "vllm"):
        run = SimpleNamespace(
            config=PPOConfig.from_flat(rollout_engine=engine, **options), strategy=FakeStrategy()
        )
        assert (drift_watch(run) is not None) == watched


def test_the_first_batch_is_compared_before_it_is_scored(actor):
    """Around the sampling."""
    stand_around = RolloutCheck(actor, Copy(), FakeStrategy(), config()).rollouts
    right = sampled(actor)
    assert stand_around([], 1, 0, lambda: right) is right
    stand_around = RolloutCheck(actor, Copy(), FakeStrategy(), config()).rollouts
    with pytest.raises(RolloutMismatchError):
        stand_around([], 1, 0, lambda: sampled(actor, shift=0.5))


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 0.001),
        ({"bf16": True}, 0.1),
        ({"vllm_dtype": "bfloat16"}, 0.1),
        ({"vllm_dtype": "float32"}, 0.001),
    ],
)
def test_tolerance_by_type(actor, options, tolerance):
    assert RolloutCheck(actor, Copy(), FakeStrategy(), config(**options)).tolerance == tolerance
