"""How a token is drawn."""

import hashlib

import numpy as np
import pytest
import torch
from support.far_device import FarDevice

from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampling import (
    TokenSampler,
    draw_tokens,
    in_any_order,
    runner_factors,
    token_seeds,
)


def seeds(count: int, *, of: int = 0) -> torch.Tensor:
    """Of tokens of request ``of``."""
    return torch.from_numpy(token_seeds(0, of, 0, count))


def draw(params: SamplingParams, logits: torch.Tensor, *, history=None, step=0, **options):
    sampler = TokenSampler(params, **{"valid_vocab_size": logits.shape[-1], **options})
    return sampler(logits, seeds(len(logits)), step, history)


def shares(params: SamplingParams, logits: torch.Tensor, **options) -> list[float]:
    """How often each token is drawn of one row of logits; the standard deviation is at most 0.0025."""
    tokens, _ = draw(params, logits.expand(40_000, -1), **options)
    return (torch.bincount(tokens, minlength=logits.shape[-1]) / 40_000).tolist()


@pytest.mark.parametrize("vocab_size", [40, 3000])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_are_drawn_on_a_gpu_under_full_determinism(rows: int, vocab_size: int) -> None:
    """Where cumulated sums of numbers are refused; the same tokens are drawn, and everything else stays refused."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(rows, vocab_size)
    params = SamplingParams(top_p=0.8)
    expected = draw(params, logits)
    torch.use_deterministic_algorithms(True)
    try:
        with FarDevice() as far:
            sampler = TokenSampler(params, valid_vocab_size=vocab_size)
            with in_any_order():
                found = [x.cpu() for x in sampler(far.move(logits), far.move(seeds(rows)), 0, None)]
            with pytest.raises(RuntimeError, match="deterministic"):
                far.move(logits).cumsum(0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]


class TestTokenSeeds:
    def test_the_seed_is_a_word_of_the_stream_made_odd(self):
        # The request's text and the first little-endian 64-bit word.
        digest = hashlib.shake_128(b"lightppo/7/42/3").digest(8)
        assert token_seeds(7, 42, 3, 1)[0] == int.from_bytes(digest, "little", signed=True) | 1

    def test_a_longer_request_begins_with_the_same_seeds(self):
        np.testing.assert_array_equal(token_seeds(0, 1, 2, 5), token_seeds(0, 1, 2, 500)[:5])

    @pytest.mark.parametrize("other", [(1, 1, 1), (0, 2, 1), (0, 1, 2), (0, 11, 1)])
    def test_seed_prompt_and_sample_each_change_the_seeds(self, other):
        assert not np.isin(token_seeds(0, 1, 1, 50), token_seeds(*other, 50)).any()


class TestDrawTokens:
    @staticmethod
    def drawn(probs: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        return draw_tokens(probs, seeds, runner_factors(probs.shape[-1]))

    def test_by_hand(self):
        # Two tokens with weights 3 and 1, and seeds 1 and -5: u = (seed · factor mod 2^63) / 2^63 of the first 128
        # bits of SHAKE-128, and the smaller -ln(1 - u) / weight wins.
        factors = np.frombuffer(hashlib.shake_128(b"lightppo/runners").digest(16), dtype="<u8")
        winners = []
        for seed in (1, -5):
            u = [seed * (int(factor) | 1) % 2**63 / 2**63 for factor in factors]
            winners.append(int(np.argmin(-np.log1p(-np.array(u)) / [3.0, 1.0])))
        weights = torch.tensor([[3.0, 1.0]]).expand(2, 2)
        assert self.drawn(weights, torch.tensor([1, -5])).tolist() == winners

    @pytest.mark.parametrize("vocab_size", [4, 128, 129, 1000])
    def test_the_shares_are_the_probabilities(self, vocab_size):
        """Chi square of 200,000 draws; rows need not sum to 1."""
        generator = torch.Generator().manual_seed(vocab_size)
        weights = torch.randn(vocab_size, generator=generator).exp()
        counts = torch.zeros(vocab_size)
        for part in range(10):
            tokens = self.drawn(weights.expand(20_000, -1), seeds(20_000, of=part))
            counts += torch.bincount(tokens, minlength=vocab_size)
        expected = 200_000 * weights / weights.sum()
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        freedom = vocab_size - 1  # the statistic's mean, and half its variance
        assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5

    def test_what_is_drawn_does_not_depend_on_the_last_digits(self):
        """Logits that are rounded otherwise, coarsely; drawing by cumulated sums changed 10 of these 200 tokens."""
        generator = torch.Generator().manual_seed(0)
        logits = 2.5 * torch.randn(200, 49_152, generator=generator)
        rounded = logits + 1e-4 * torch.randn(logits.shape, generator=generator)
        one, other = (self.drawn(x.softmax(-1), seeds(200)) for x in (logits, rounded))
        assert (one != other).sum() <= 1

    def test_rows_and_padding_of_the_vocabulary_do_not_matter(self):
        probs = torch.randn(60, 700, generator=torch.Generator().manual_seed(0)).softmax(-1)
        whole = self.drawn(probs, seeds(60))
        one_by_one = [
            self.drawn(row, seed) for row, seed in zip(probs.split(1), seeds(60).split(1))
        ]
        assert torch.cat(one_by_one).tolist() == whole.tolist()
        padded = torch.nn.functional.pad(probs, (0, 333))
        assert self.drawn(padded, seeds(60)).tolist() == whole.tolist()

    @pytest.mark.parametrize("vocab_size", [6, 2000])
    def test_a_token_of_probability_0_is_never_drawn(self, vocab_size):
        """Seeds whose products are the smallest and the greatest, beside others."""
        weights = torch.zeros(vocab_size)
        places = [0, 3] if vocab_size == 6 else [3, 511, 512, 1023, 1540, 1990]
        weights[places] = torch.rand(len(places), generator=torch.Generator().manual_seed(0))
        factor = int(np.frombuffer(hashlib.shake_128(b"lightppo/runners").digest(16), "<u8")[0]) | 1
        extremes = [pow(factor, -1, 2**64) * word % 2**64 for word in (1, 2**63 - 1)]
        extremes = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in extremes])
        drawn = self.drawn(weights.expand(5002, -1), torch.cat([seeds(5000), extremes]))
        assert set(drawn.tolist()) == set(places)
        alone = torch.nn.functional.one_hot(torch.tensor([0, 0]), vocab_size).float()
        assert self.drawn(alone, extremes).tolist() == [0, 0]

    def test_the_tail_of_a_large_vocabulary_is_reached(self):
        # 2^20 equal tokens behind one of mass 0.75 (2^-22 each): a quarter of all draws, everywhere in the tail.
        probs = torch.full((1, 1 + 2**20), 2.0**-22)
        probs[0, 0] = 0.75
        tokens = self.drawn(probs.expand(400, -1), seeds(400))
        tail = tokens[tokens > 0]
        assert abs(len(tail) - 100) < 5 * 75**0.5
        assert torch.histc(tail.float(), bins=4, min=1, max=2**20).min() > 5
        assert len(set(tail.tolist())) == len(tail)


class TestTokenSampler:
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0]])

    def test_log_prob_is_of_the_unfiltered_distribution_at_the_temperature(self):
        params = SamplingParams(temperature=0.5, top_k=1)
        token, log_prob = draw(params, self.logits)
        # logits / .5 = 2 4 1 -2; log softmax of 4: 4 - ln(e² + e⁴ + e¹ + e⁻²) = 4 - ln(64.8409) = -0.171935
        assert token.item() == 1
        assert log_prob.item() == pytest.approx(-0.171935, abs=1e-5)
        assert log_prob.dtype == torch.float32

    def test_greedy_log_prob_has_temperature_one(self):
        token, log_prob = draw(SamplingParams(temperature=0.0), self.logits)
        # 2 - ln(e¹ + e² + e^.5 + e⁻¹) = 2 - ln(12.12394) = -0.495183
        assert token.item() == 1
        assert log_prob.item() == pytest.approx(-0.495183, abs=1e-5)

    def test_ids_beyond_the_valid_vocabulary_are_not_drawn_but_count_in_the_log_prob(self):
        logits = torch.tensor([[0.0, 0.0, 9.0]]).expand(40, 3)
        tokens, log_probs = draw(SamplingParams(), logits, valid_vocab_size=2)
        assert set(tokens.tolist()) == {0, 1}
        assert log_probs.tolist() == pytest.approx([-np.log(2 + np.exp(9))] * 40, abs=1e-5)
        tokens, _ = draw(SamplingParams(do_sample=False), logits, valid_vocab_size=2)
        assert set(tokens.tolist()) == {0}

    def test_log_probs_are_over_the_vocabulary_of_the_trainer(self):
        logits = torch.tensor([[0.0, 0.0, 9.0]])
        _, log_prob = draw(SamplingParams(), logits, valid_vocab_size=2, log_prob_vocab_size=2)
        assert log_prob.item() == pytest.approx(np.log(0.5), abs=1e-6)

    def test_top_p_keeps_the_smallest_set_with_that_mass(self):
        logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
        # top_p .7 keeps .5 and .3, scaled to .625 and .375
        found = shares(SamplingParams(top_p=0.7), logits)
        assert found == pytest.approx([0.625, 0.375, 0, 0], abs=0.01)

    @pytest.mark.parametrize(
        ("options", "kept"),
        [({"top_p": 0.49}, 1), ({"top_p": 0.51}, 2), ({"top_p": 0.79}, 2), ({"top_p": 0.81}, 3), ({"top_p": 0.94}, 3),
         ({"top_k": 1}, 1), ({"top_k": 2}, 2), ({"top_k": 3}, 3), ({"top_k": 3, "top_p": 0.6}, 2)],
    )  # fmt: skip
    def test_filters_keep_so_many_tokens_and_no_more(self, options, kept):
        # cumulated, by rank: .5 .8 .95 1
        logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log().expand(100, 4)
        tokens, _ = draw(SamplingParams(**options), logits)
        assert set(tokens.tolist()) == set([1, 3, 0, 2][:kept])

    def test_temperature_comes_before_top_p(self):
        logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
        # At temperature .25 p ∝ .0625 .0081 …: the first alone has .88 ≥ .7, so top_p .7 leaves nothing else.
        assert shares(SamplingParams(temperature=0.25, top_p=0.7), logits) == [1, 0, 0, 0]

    @pytest.mark.parametrize(("options", "kept"), [({"min_p": 0.2}, 3), ({"min_p": 0.5}, 2), ({"min_p": 1.0}, 1),
                                                   ({"min_p": 0.2, "temperature": 0.5}, 2)])  # fmt: skip
    def test_min_p_is_a_share_of_the_likeliest_at_the_temperature(self, options, kept):
        # shares .3 1 .1 .6; at ½: .09 1 .01 .36
        logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log().expand(100, 4)
        tokens, log_probs = draw(SamplingParams(**options), logits)
        assert set(tokens.tolist()) == set([1, 3, 0, 2][:kept])
        scaled = (logits[0] / options.get("temperature", 1.0)).log_softmax(0)
        assert torch.allclose(log_probs, scaled[tokens])

    def test_stop_ids_are_suppressed_until_the_minimum(self):
        params = SamplingParams(do_sample=False, min_new_tokens=2)
        tokens = [
            draw(params, self.logits, step=step, suppressed_ids=[1, 7])[0].item()
            for step in range(3)
        ]
        assert tokens == [0, 0, 1]

    @pytest.mark.parametrize("do_sample", [True, False])
    def test_rows_without_any_token_are_marked(self, do_sample):
        logits = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), 0.0]])
        _, log_probs = draw(SamplingParams(do_sample=do_sample), logits)
        assert log_probs.isfinite().tolist() == [True, False, False]
        params = SamplingParams(do_sample=do_sample, min_new_tokens=1)
        _, log_probs = draw(params, logits[:1], suppressed_ids=[0, 1])
        assert not log_probs.isfinite().any()


class TestFirstTokenTemperature:
    # probs at temperature 1: 0.8, 0.2. At 2 the odds 4 become 2: 2/3, 1/3.
    LOGITS = torch.tensor([[0.8, 0.2]]).log()
    PARAMS = SamplingParams(first_token_temperature=2.0)

    def test_only_the_first_token_is_drawn_at_it(self):
        assert shares(self.PARAMS, self.LOGITS) == pytest.approx([2 / 3, 1 / 3], abs=0.01)
        assert shares(self.PARAMS, self.LOGITS, step=1) == pytest.approx([0.8, 0.2], abs=0.01)

    def test_the_log_prob_is_that_of_the_policy(self):
        rows = self.LOGITS.expand(40, 2)
        tokens, log_probs = draw(self.PARAMS, rows)
        assert log_probs[tokens == 1].exp().tolist() == pytest.approx([0.2] * tokens.sum().item())
        # at temperature ½ the odds are 16: 1/17
        params = SamplingParams(temperature=0.5, first_token_temperature=2.0)
        tokens, log_probs = draw(params, rows)
        assert 0 < tokens.sum() < 40
        assert log_probs[tokens == 1].exp().tolist() == pytest.approx(
            [1 / 17] * tokens.sum().item()
        )

    def test_it_goes_before_the_filters(self):
        # top_p 0.7 keeps one token of 0.8, and at 2/3 needs the second as well
        hot = SamplingParams(top_p=0.7, first_token_temperature=2.0)
        assert shares(SamplingParams(top_p=0.7), self.LOGITS) == [1, 0]
        assert shares(hot, self.LOGITS) == pytest.approx([2 / 3, 1 / 3], abs=0.01)

    def test_greedy_has_no_temperature(self):
        params = SamplingParams(temperature=0.0, first_token_temperature=100.0)
        assert shares(params, self.LOGITS) == [1, 0]

    @pytest.mark.parametrize("value", [0.0, -1.0, float("inf")])
    def test_range(self, value):
        with pytest.raises(ValueError, match="first_token_temperature"):
            SamplingParams(first_token_temperature=value)


def test_each_row_has_its_own_minimum_length():
    params = SamplingParams(max_new_tokens=9, min_new_tokens=3)
    logits = torch.tensor([[0.0, 30.0, 0.0, 0.0]]).expand(4, 4)
    step = torch.tensor([1, 2, 3, 4])
    tokens, log_probs = draw(params, logits, step=step, suppressed_ids=[1])
    assert (tokens == 1).tolist() == [False, False, True, True]
    assert log_probs[:2].tolist() == pytest.approx([-30.0, -30.0], abs=1e-4)
