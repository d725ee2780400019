"""How a token is drawn, and when a response ends."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.far_device import FarDevice

from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampling import (
    StopCriteria,
    TokenSampler,
    end_of_text_ids,
    in_any_order,
    inverse_cdf,
    request_uniforms,
)


def draw(
    params: SamplingParams, logits: torch.Tensor, uniforms, *, history=None, step=0, **options
):
    sampler = TokenSampler(params, **{"valid_vocab_size": logits.shape[-1], **options})
    u = torch.as_tensor(uniforms, dtype=torch.float64)
    return sampler(logits, u, step, history)


@pytest.mark.parametrize("vocab_size", [40, 3000])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_are_drawn_on_a_gpu_under_full_determinism(rows: int, vocab_size: int) -> None:
    """Where cumulated sums of numbers are refused; the same tokens are drawn, and everything else stays refused."""
    torch.manual_seed(0)
    logits, uniforms = 3 * torch.randn(rows, vocab_size), torch.rand(rows, dtype=torch.float64)
    params = SamplingParams(top_p=0.8)
    expected = draw(params, logits, uniforms)
    torch.use_deterministic_algorithms(True)
    try:
        with FarDevice() as far:
            sampler = TokenSampler(params, valid_vocab_size=vocab_size)
            with in_any_order():
                found = [x.cpu() for x in sampler(far.move(logits), far.move(uniforms), 0, None)]
            with pytest.raises(RuntimeError, match="deterministic"):
                far.move(logits).cumsum(0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]


class TestRequestUniforms:
    def test_the_number_is_the_top_52_bits_of_the_stream(self):
        # The key's text and the first little-endian 64-bit word, 12 low bits dropped, over 2^52.
        word = int.from_bytes(hashlib.shake_128(b"lightppo/7/42/3").digest(8), "little")
        assert request_uniforms(7, 42, 3, 1)[0] == (word >> 12) / 2**52

    def test_a_longer_request_begins_with_the_same_numbers(self):
        np.testing.assert_array_equal(
            request_uniforms(0, 1, 2, 5), request_uniforms(0, 1, 2, 500)[:5]
        )

    @pytest.mark.parametrize("other", [(1, 1, 1), (0, 2, 1), (0, 1, 2), (0, 11, 1)])
    def test_seed_prompt_and_sample_each_change_the_numbers(self, other):
        assert not np.isin(request_uniforms(0, 1, 1, 50), request_uniforms(*other, 50)).any()

    def test_uniform_in_the_unit_interval(self):
        u = np.concatenate([request_uniforms(0, i, 0, 100) for i in range(1000)])
        assert u.min() >= 0
        assert u.max() < 1
        # 100,000 numbers in 10 bins of 10,000 ± 95: each within five standard deviations.
        counts = np.histogram(u, bins=10, range=(0, 1))[0]
        assert abs(counts - 10_000).max() < 475


class TestInverseCdf:
    def test_by_hand(self):
        # p = .2 0 .5 .3, cdf .2 .2 .7 1: u < .2 → 0; .2 ≤ u < .7 → 2 (1 has no mass); u ≥ .7 → 3.
        probs = torch.tensor([[2.0, 0.0, 5.0, 3.0]]).expand(6, 4)  # not normalised: total 10
        u = torch.tensor([0.0, 0.19, 0.2, 0.69, 0.7, 1 - 2.0**-52], dtype=torch.float64)
        assert inverse_cdf(probs, u).tolist() == [0, 0, 2, 2, 3, 3]

    def test_zero_mass_at_both_ends_is_never_drawn(self):
        totals = torch.rand(2000, generator=torch.Generator().manual_seed(0))
        probs = torch.stack([torch.zeros_like(totals), totals, torch.zeros_like(totals)], dim=1)
        for u in (0.0, 1 - 2.0**-52):
            assert (inverse_cdf(probs, torch.full((2000,), u, dtype=torch.float64)) == 1).all()


class TestTokenSampler:
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0]])

    def test_log_prob_is_of_the_unfiltered_distribution_at_the_temperature(self):
        params = SamplingParams(temperature=0.5, top_k=1)
        token, log_prob = draw(params, self.logits, [0.99])
        # logits / .5 = 2 4 1 -2; log softmax of 4: 4 - ln(e² + e⁴ + e¹ + e⁻²) = 4 - ln(64.8409) = -0.171935
        assert token.item() == 1
        assert log_prob.item() == pytest.approx(-0.171935, abs=1e-5)
        assert log_prob.dtype == torch.float32

    def test_greedy_log_prob_has_temperature_one(self):
        token, log_prob = draw(SamplingParams(temperature=0.0), self.logits, [0.0])
        # 2 - ln(e¹ + e² + e^.5 + e⁻¹) = 2 - ln(12.12394) = -0.495183
        assert token.item() == 1
        assert log_prob.item() == pytest.approx(-0.495183, abs=1e-5)

    def test_ids_beyond_the_valid_vocabulary_are_not_drawn_but_count_in_the_log_prob(self):
        logits = torch.tensor([[0.0, 0.0, 9.0]])
        token, log_prob = draw(SamplingParams(), logits, [1 - 2.0**-52], valid_vocab_size=2)
        assert token.item() == 1
        assert log_prob.item() == pytest.approx(-np.log(2 + np.exp(9)), abs=1e-5)
        assert (
            draw(SamplingParams(do_sample=False), logits, [0.0], valid_vocab_size=2)[0].item() == 0
        )

    def test_log_probs_are_over_the_vocabulary_of_the_trainer(self):
        logits = torch.tensor([[0.0, 0.0, 9.0]])
        _, log_prob = draw(
            SamplingParams(), logits, [0.0], valid_vocab_size=2, log_prob_vocab_size=2
        )
        assert log_prob.item() == pytest.approx(np.log(0.5), abs=1e-6)

    def test_top_p_keeps_the_smallest_set_with_that_mass(self):
        logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(5, 4)
        # top_p .7 keeps .5 and .3, scaled to .625 and .375: u .62 → 0, .63 → 1.
        tokens, _ = draw(SamplingParams(top_p=0.7), logits, [0.0, 0.62, 0.63, 0.9, 0.9999])
        assert tokens.tolist() == [0, 0, 1, 1, 1]

    @pytest.mark.parametrize(
        ("options", "kept"),
        [({"top_p": 0.49}, 1), ({"top_p": 0.51}, 2), ({"top_p": 0.79}, 2), ({"top_p": 0.81}, 3), ({"top_p": 0.94}, 3),
         ({"top_k": 1}, 1), ({"top_k": 2}, 2), ({"top_k": 3}, 3), ({"top_k": 3, "top_p": 0.6}, 2)],
    )  # fmt: skip
    def test_filters_keep_so_many_tokens_and_no_more(self, options, kept):
        uniforms = np.linspace(0, 1, 100, endpoint=False)
        # cumulated, by rank: .5 .8 .95 1
        logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log().expand(100, 4)
        assert set(draw(SamplingParams(**options), logits, uniforms)[0].tolist()) == set(
            [1, 3, 0, 2][:kept]
        )

    def test_temperature_comes_before_top_p(self):
        logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
        # At temperature .25 p ∝ .0625 .0081 …: the first alone has .88 ≥ .7, so top_p .7 leaves nothing else.
        assert draw(SamplingParams(temperature=0.25, top_p=0.7), logits, [0.9999])[0].item() == 0

    @pytest.mark.parametrize(("options", "kept"), [({"min_p": 0.2}, 3), ({"min_p": 0.5}, 2), ({"min_p": 1.0}, 1),
                                                   ({"min_p": 0.2, "temperature": 0.5}, 2)])  # fmt: skip
    def test_min_p_is_a_share_of_the_likeliest_at_the_temperature(self, options, kept):
        uniforms = torch.linspace(0, 1 - 1e-9, 100, dtype=torch.float64)
        # shares .3 1 .1 .6; at ½: .09 1 .01 .36
        logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log().expand(100, 4)
        tokens, log_probs = draw(SamplingParams(**options), logits, uniforms)
        assert set(tokens.tolist()) == set([1, 3, 0, 2][:kept])
        scaled = (logits[0] / options.get("temperature", 1.0)).log_softmax(0)
        assert torch.allclose(log_probs, scaled[tokens])

    def test_stop_ids_are_suppressed_until_the_minimum(self):
        params = SamplingParams(do_sample=False, min_new_tokens=2)
        tokens = [
            draw(params, self.logits, [0.0], step=step, suppressed_ids=[1, 7])[0].item()
            for step in range(3)
        ]
        assert tokens == [0, 0, 1]

    @pytest.mark.parametrize("do_sample", [True, False])
    def test_rows_without_any_token_are_marked(self, do_sample):
        logits = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), 0.0]])
        _, log_probs = draw(SamplingParams(do_sample=do_sample), logits, [0.5] * 3)
        assert log_probs.isfinite().tolist() == [True, False, False]
        params = SamplingParams(do_sample=do_sample, min_new_tokens=1)
        _, log_probs = draw(params, logits[:1], [0.5], suppressed_ids=[0, 1])
        assert not log_probs.isfinite().any()


class TestFirstTokenTemperature:
    # probs at temperature 1: 0.8, 0.2. At 2 the odds 4 become 2: 2/3, 1/3.
    LOGITS = torch.tensor([[0.8, 0.2]]).log()
    PARAMS = SamplingParams(first_token_temperature=2.0)

    @pytest.mark.parametrize(
        ("u", "first", "later"), [(0.6, 0, 0), (0.7, 1, 0), (0.79, 1, 0), (0.81, 1, 1)]
    )
    def test_only_the_first_token_is_drawn_at_it(self, u, first, later):
        assert draw(self.PARAMS, self.LOGITS, [u])[0].item() == first
        assert draw(self.PARAMS, self.LOGITS, [u], step=1)[0].item() == later

    def test_the_log_prob_is_that_of_the_policy(self):
        token, log_prob = draw(self.PARAMS, self.LOGITS, [0.7])
        assert token.item() == 1
        assert log_prob.exp().item() == pytest.approx(0.2)
        # at temperature ½ the odds are 16: 1/17
        token, log_prob = draw(
            SamplingParams(temperature=0.5, first_token_temperature=2.0), self.LOGITS, [0.7]
        )
        assert token.item() == 1
        assert log_prob.exp().item() == pytest.approx(1 / 17)

    def test_it_goes_before_the_filters(self):
        # top_p 0.7 keeps one token of 0.8, and at 2/3 needs the second as well
        cold, hot = (
            SamplingParams(top_p=0.7),
            SamplingParams(top_p=0.7, first_token_temperature=2.0),
        )
        assert draw(cold, self.LOGITS, [0.99])[0].item() == 0
        assert draw(hot, self.LOGITS, [0.99])[0].item() == 1

    def test_greedy_has_no_temperature(self):
        params = SamplingParams(temperature=0.0, first_token_temperature=100.0)
        assert draw(params, self.LOGITS, [0.99])[0].item() == 0

    @pytest.mark.parametrize("value", [0.0, -1.0, float("inf")])
    def test_range(self, value):
        with pytest.raises(ValueError, match="first_token_temperature"):
            SamplingParams(first_token_temperature=value)


def test_each_row_has_its_own_minimum_length():
    params = SamplingParams(max_new_tokens=9, min_new_tokens=3)
    logits = torch.tensor([[0.0, 30.0, 0.0, 0.0]]).expand(4, 4)
    step = torch.tensor([1, 2, 3, 4])
    tokens, log_probs = draw(params, logits, [0.5] * 4, step=step, suppressed_ids=[1])
    assert (tokens == 1).tolist() == [False, False, True, True]
    assert log_probs[:2].tolist() == pytest.approx([-30.0, -30.0], abs=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# ends of responses


def criteria(tokenizer, **params) -> StopCriteria:
    return StopCriteria(tokenizer, SamplingParams(**params), eos_ids=[1], vocab_size=30)


def lengths_until_end(stop: StopCriteria, ids: list[int]) -> int | None:
    rows = torch.tensor([0])
    for length in range(1, len(ids) + 1):
        if stop.ended(torch.tensor([ids]), rows, length).item():
            return length
    return None


@pytest.mark.parametrize(
    ("configured", "expected"),
    [(None, [1]), (1, [1]), (5, [1, 5]), ([7, 5, 1], [1, 5, 7])],
    ids=str,
)
def test_end_of_text_ids_of_tokenizer_and_model(tokenizer, configured, expected):
    assert end_of_text_ids(tokenizer, SimpleNamespace(eos_token_id=configured)) == expected


def test_end_of_text_ids_without_a_generation_config(tokenizer):
    assert end_of_text_ids(tokenizer, None) == [1]


def test_ids_end_a_response_and_ignore_eos_leaves_only_the_stop_ids(tokenizer):
    text = [3, 1, 4, 9, 5]
    assert lengths_until_end(criteria(tokenizer), text) == 2
    assert lengths_until_end(criteria(tokenizer, ignore_eos=True), text) is None
    assert lengths_until_end(criteria(tokenizer, ignore_eos=True, stop_token_ids=(9,)), text) == 4


def test_unknown_stop_id_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"stop_token_ids \[30\]"):
        criteria(tokenizer, stop_token_ids=(3, 30))
