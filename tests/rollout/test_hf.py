"""Rollouts by the actor itself: the protocol of engines, sampling, batches, adapters."""

from __future__ import annotations

import contextlib
import inspect
import math
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
import torch
from support.decoders import check_greedy
from support.fixtures.character_models import EOS_ID, ids_by_key, lfm2, mistral, trainer_log_probs
from transformers import BloomConfig, BloomForCausalLM

from lightppo.data.records import Prompt
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import AdaptersOff, LoraOptions, add_adapters
from lightppo.models.batches import cache_argument
from lightppo.rollout.engine import RolloutEngine, SamplingParams
from lightppo.rollout.hf import HFRolloutEngine
from lightppo.rollout.vllm.weights import full_weights


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
        ("min_new_tokens", 1025),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("min_p", 1.1),
        ("n", 0),
        ("stop", ("",)),
        ("stop", "END"),
        ("stop_token_ids", (-1,)),
        ("bad_words", (" ",)),
    ],
)
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("params", "greedy", "log_prob_temperature"),
    [
        (SamplingParams(temperature=0.7), False, 0.7),
        (SamplingParams(temperature=0.0), True, 1.0),
        (SamplingParams(temperature=0.7, do_sample=False), True, 1.0),
    ],
)
def test_temperature_zero_or_no_sampling_is_greedy(params, greedy, log_prob_temperature):
    assert params.greedy is greedy
    assert params.log_prob_temperature == log_prob_temperature


def test_lists_become_tuples_so_that_parameters_stay_hashable():
    assert hash(SamplingParams(stop=["a"], stop_token_ids=[3])) == hash(
        SamplingParams(stop=("a",), stop_token_ids=(3,))
    )


def test_hf_engine_is_a_rollout_engine(llama, tokenizer, actor_of):
    assert isinstance(HFRolloutEngine(actor_of(llama), tokenizer), RolloutEngine)


def test_protocol_module_loads_neither_torch_nor_transformers():
    code = "import sys, lightppo.rollout.engine as e; print('torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split()[-2:] == ["False", "False"]


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Statistic and its 99.9 % bound; cells expecting fewer than 5 are merged into one."""
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    df = len(expected) - 1
    bound = df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3  # Wilson-Hilferty
    return ((counts - expected) ** 2 / expected).sum().item(), bound


class TestAgainstTheModel:
    def test_greedy_equals_generate(self, model, engine_of, prompts):
        rollouts = engine_of(model, 4).generate(
            prompts, SamplingParams(max_new_tokens=12, temperature=0.0)
        )
        # some end early, so that rows leave the batch
        assert len({len(r.response_ids) for r in rollouts}) > 1
        check_greedy(model, rollouts, new_tokens=12)

    @pytest.mark.parametrize("name", ["past_key_values", "cache"])
    def test_whatever_the_model_calls_its_cache(self, name, llama, engine_of, prompts):
        """transformers 5.24 renamed the argument; a model with code of its own has either name."""
        sampling = SamplingParams(max_new_tokens=12, temperature=0.0)
        expected = [r.response_ids for r in engine_of(llama, 4).generate(prompts, sampling)]
        forward, own, given = llama.forward, cache_argument(llama), []

        def renamed(**kwargs):
            given.append(kwargs.pop(name))
            return forward(**kwargs, **{own: given[-1]})

        taken = inspect.signature(forward)
        parameters = [
            parameter.replace(name=name if parameter.name == own else parameter.name)
            for parameter in taken.parameters.values()
        ]
        renamed.__signature__ = taken.replace(parameters=parameters)
        llama.forward = renamed
        got = [r.response_ids for r in engine_of(llama, 4).generate(prompts, sampling)]
        assert got == expected
        assert all(cache is not None for cache in given)

    def test_log_probs_equal_a_full_forward(self, model, engine_of, prompts):
        sampling = SamplingParams(
            max_new_tokens=12, temperature=0.7, top_p=0.9, top_k=20, repetition_penalty=1.1, n=2
        )
        for rollout in engine_of(model).generate(prompts, sampling):
            expected = trainer_log_probs(model, rollout, 0.7)
            torch.testing.assert_close(torch.tensor(rollout.log_probs), expected, atol=1e-4, rtol=0)

    def test_greedy_log_probs_have_temperature_one(self, model, engine_of, prompts):
        for rollout in engine_of(model).generate(
            prompts, SamplingParams(max_new_tokens=5, do_sample=False)
        ):
            expected = trainer_log_probs(model, rollout, 1.0)
            torch.testing.assert_close(torch.tensor(rollout.log_probs), expected, atol=1e-4, rtol=0)

    def test_samples_follow_the_distribution_of_the_model(self, make_llama, engine_of, tokenizer):
        model, n = make_llama(scale=8.0), 6000
        prompt = Prompt("cafe", tokenizer.encode("cafe"))
        sampling = SamplingParams(max_new_tokens=2, temperature=0.8, ignore_eos=True, n=n, seed=11)
        rollouts = engine_of(model, 2000).generate([prompt], sampling)
        sampled = torch.tensor([r.response_ids for r in rollouts])  # (n, 2)
        continued = torch.tensor([[*prompt.token_ids, i] for i in range(30)])
        with torch.no_grad():
            first = (model(continued[:1, :-1]).logits[0, -1] / 0.8).softmax(-1)
            second = first @ (model(continued).logits[:, -1] / 0.8).softmax(-1)  # Σ_i p(i) p(·|i)
            colder = (model(continued[:1, :-1]).logits[0, -1] / 0.7).softmax(-1)
        for position, probs in enumerate((first, second)):
            statistic, bound = chi_square(
                torch.bincount(sampled[:, position], minlength=30), n * probs
            )
            assert statistic < bound
        statistic, bound = chi_square(torch.bincount(sampled[:, 0], minlength=30), n * colder)
        assert statistic > bound  # the test would see a temperature that is off by .1

    def test_two_samples_of_a_prompt_are_independent(self, make_llama, engine_of, tokenizer):
        model = make_llama(scale=8.0)
        prompts = [Prompt("cafe", tokenizer.encode("cafe"), index=i) for i in range(3000)]
        rollouts = engine_of(model, 2000).generate(prompts, SamplingParams(max_new_tokens=1, n=2))
        pairs = torch.tensor([r.response_ids[0] for r in rollouts]).view(-1, 2)
        with torch.no_grad():
            probs = model(torch.tensor([prompts[0].token_ids])).logits[0, -1].softmax(-1)
        counts = torch.bincount(pairs[:, 0] * 30 + pairs[:, 1], minlength=900)
        statistic, bound = chi_square(counts, 3000 * torch.outer(probs, probs).flatten())
        assert statistic < bound


class TestIndependenceOfTheBatch:
    sampling = SamplingParams(
        max_new_tokens=12, temperature=0.9, top_p=0.95, repetition_penalty=1.2, n=3, seed=5
    )

    @pytest.fixture
    def reference(self, model, engine_of, prompts):
        return engine_of(model, 8).generate(prompts, self.sampling)

    @pytest.mark.parametrize("micro_batch", [1, 3, 64])
    def test_micro_batch_size(self, model, engine_of, prompts, reference, micro_batch):
        assert ids_by_key(
            engine_of(model, micro_batch).generate(prompts, self.sampling)
        ) == ids_by_key(reference)

    def test_order_and_ranks(self, model, engine_of, prompts, reference):
        engine = engine_of(model, 8)
        shuffled = [prompts[i] for i in (3, 9, 0, 7, 1, 8, 2, 6, 5, 4)]
        assert ids_by_key(engine.generate(shuffled, self.sampling)) == ids_by_key(reference)
        halves = [engine.generate(half, self.sampling) for half in (prompts[:5], prompts[5:])]
        assert ids_by_key(halves[0] + halves[1]) == ids_by_key(reference)

    def test_other_seed_other_samples_same_seed_same_samples(
        self, model, engine_of, prompts, reference
    ):
        assert ids_by_key(engine_of(model).generate(prompts, self.sampling)) == ids_by_key(
            reference
        )
        other = SamplingParams(
            max_new_tokens=12, temperature=0.9, top_p=0.95, repetition_penalty=1.2, n=3, seed=6
        )
        assert ids_by_key(engine_of(model).generate(prompts, other)) != ids_by_key(reference)

    def test_global_random_state_is_neither_read_nor_changed(
        self, model, engine_of, prompts, reference
    ):
        torch.manual_seed(123)
        before = torch.get_rng_state()
        assert ids_by_key(engine_of(model).generate(prompts, self.sampling)) == ids_by_key(
            reference
        )
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_prompt_given_twice_is_a_prompt_with_twice_the_samples(
        self, model, engine_of, prompts
    ):
        once = engine_of(model).generate(prompts[:1], SamplingParams(max_new_tokens=8, n=4))
        twice = engine_of(model).generate(
            [prompts[0], prompts[0]], SamplingParams(max_new_tokens=8, n=2)
        )
        assert [r.response_ids for r in twice] == [r.response_ids for r in once]
        assert [r.sample_index for r in twice] == [0, 1, 0, 1]


def bloom():
    torch.manual_seed(0)
    return BloomForCausalLM(
        BloomConfig(
            vocab_size=30, hidden_size=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=EOS_ID,
            initializer_range=0.2, hidden_dropout=0.0, attention_dropout=0.0,
        )
    )  # fmt: skip


@pytest.mark.parametrize("build", [mistral, bloom, lfm2])
def test_sliding_windows_alibi_and_recurrent_states(build, engine_of, prompts):
    """Caches that forget, models without position ids, layers whose state has no rows to take out."""
    model = build().eval()
    sampling = SamplingParams(max_new_tokens=16, n=2)
    rollouts = engine_of(model, 8).generate(prompts, sampling)
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}  # rows end at different times
    assert ids_by_key(rollouts) == ids_by_key(engine_of(model, 1).generate(prompts, sampling))
    for rollout in rollouts:
        expected = trainer_log_probs(model, rollout, 1.0)
        torch.testing.assert_close(torch.tensor(rollout.log_probs), expected, atol=1e-4, rtol=0)


class TestRecords:
    def test_order_and_samples(self, llama, engine_of, prompts):
        rollouts = engine_of(llama, 3).generate(prompts, SamplingParams(max_new_tokens=4, n=2))
        assert [r.prompt.index for r in rollouts] == [i for i in range(100, 110) for _ in range(2)]
        assert [r.sample_index for r in rollouts] == [0, 1] * 10
        assert all(r.prompt is prompts[i // 2] for i, r in enumerate(rollouts))

    def test_finish_reason_text_and_lengths(self, llama, engine_of, prompts, tokenizer):
        rollouts = engine_of(llama).generate(prompts, SamplingParams(max_new_tokens=8, n=4))
        reasons = {r.finish_reason for r in rollouts}
        assert reasons == {"stop", "length"}
        for r in rollouts:
            assert len(r.log_probs) == len(r.response_ids)
            assert EOS_ID not in r.response_ids[:-1]
            assert (r.response_ids[-1] == EOS_ID) == (r.finish_reason == "stop")
            assert r.finish_reason == "stop" or len(r.response_ids) == 8
            assert r.response_text == tokenizer.decode(r.response_ids, skip_special_tokens=True)

    def test_an_end_at_the_last_allowed_token_is_an_end(self, model, engine_of, prompts):
        """Stopped by the token that a free response has in its fourth place, with room for four."""
        greedy = {"max_new_tokens": 4, "do_sample": False, "ignore_eos": True}
        free = engine_of(model, 4).generate(prompts, SamplingParams(**greedy))
        last = next(r.response_ids[3] for r in free if r.response_ids[3] not in r.response_ids[:3])
        stopped = engine_of(model, 4).generate(
            prompts, SamplingParams(stop_token_ids=(last,), **greedy)
        )
        assert any(len(r.response_ids) == 4 and r.finish_reason == "stop" for r in stopped)
        assert all((r.finish_reason == "stop") == (r.response_ids[-1] == last) for r in stopped)

    def test_stats(self, llama, engine_of, prompts):
        engine = engine_of(llama, 4)
        rollouts = engine.generate(prompts, SamplingParams(max_new_tokens=6, ignore_eos=True, n=2))
        # 20 sequences in 5 rounds of 4 slots; the texts have 3+1+12+4+8+10+2+4+3+7 = 54 characters.
        assert len(rollouts) == 20
        stats = dict(engine.last_stats)
        assert stats.pop("seconds") > 0
        # In a round two prompts, once each, in one forward that gives the first tokens; then 5 tokens go in.
        padding = (12 - 10) + (8 - 7) + (4 - 4) + (3 - 3) + (2 - 1)
        assert stats == {
            "generated_tokens": 120,
            "prompt_tokens": 108,
            "decode_steps": 30,
            "decode_positions": 54 + padding + 100,
        }

    def test_decoding_ends_when_every_row_has_ended(self, llama, engine_of, prompts):
        engine = engine_of(llama, 10)
        rollouts = engine.generate(
            prompts, SamplingParams(max_new_tokens=50, stop_token_ids=tuple(range(30)))
        )
        assert all(len(r.response_ids) == 1 for r in rollouts)
        assert engine.last_stats["decode_steps"] == 1

    def test_progress_bar_only_on_request(self, llama, engine_of, prompts, capsys):
        sampling = SamplingParams(max_new_tokens=2)
        engine_of(llama).generate(prompts, sampling)
        assert "rollout" not in capsys.readouterr().err
        engine_of(llama, progress=True).generate(prompts, sampling)
        assert "rollout" in capsys.readouterr().err


class TestLimitsAndStops:
    def test_stop_string_cuts_the_text_and_keeps_the_ids(
        self, llama, engine_of, prompts, tokenizer
    ):
        free = engine_of(llama).generate(
            prompts, SamplingParams(max_new_tokens=12, ignore_eos=True)
        )
        stopped = engine_of(llama).generate(
            prompts, SamplingParams(max_new_tokens=12, ignore_eos=True, stop=("a", "7"))
        )
        assert {r.finish_reason for r in stopped} == {"stop", "length"}
        for whole, cut in zip(free, stopped):
            assert cut.response_ids == whole.response_ids[: len(cut.response_ids)]
            assert not set(cut.response_text) & {"a", "7"}
            if cut.finish_reason == "stop":
                assert tokenizer.decode(cut.response_ids[-1:]) in ("a", "7")
            else:
                assert cut.response_text == whole.response_text

    def test_end_of_text_list_of_the_generation_config(self, llama, engine_of, prompts):
        llama.generation_config.eos_token_id = [EOS_ID, 5, 6]
        rollouts = engine_of(llama).generate(prompts, SamplingParams(max_new_tokens=12, n=4))
        assert {r.response_ids[-1] for r in rollouts if r.finish_reason == "stop"} == {EOS_ID, 5, 6}

    def test_minimum_length(self, llama, engine_of, prompts):
        sampling = SamplingParams(max_new_tokens=8, min_new_tokens=4, stop_token_ids=(5,), n=4)
        rollouts = engine_of(llama).generate(prompts, sampling)
        # four others, then at the soonest a stop id
        assert min(len(r.response_ids) for r in rollouts) == 5
        assert not any({EOS_ID, 5} & set(r.response_ids[:4]) for r in rollouts)

    def test_bad_words(self, llama, engine_of, prompts, tokenizer):
        def sampled_pairs(**params) -> Counter:
            sampling = SamplingParams(max_new_tokens=20, ignore_eos=True, n=8, **params)
            rollouts = engine_of(llama, 40).generate(prompts, sampling)
            return Counter(pair for r in rollouts for pair in pairwise(r.response_ids))

        free = sampled_pairs()
        # ids 0, 1, 2 have no text
        pair = max((p for p in free if min(p) > 2), key=free.__getitem__)
        b_id = tokenizer.encode("b")[0]
        assert free[pair] >= 5
        assert any(b_id in p for p in free)
        banned = sampled_pairs(bad_words=(tokenizer.decode(pair), "b"))
        assert pair not in banned
        assert not any(b_id in p for p in banned)
        assert any(pair[0] in p for p in banned)  # its first half alone is no bad word

    def test_padded_vocabulary_is_never_sampled(self, make_llama, engine_of, prompts, tokenizer):
        model = make_llama(vocab_size=64)  # 34 rows more than the tokenizer has ids
        assert len(tokenizer) == 30
        rollouts = engine_of(model).generate(prompts, SamplingParams(max_new_tokens=12, n=4))
        assert max(i for r in rollouts for i in r.response_ids) < 30
        rollouts = engine_of(model, valid_vocab_size=10).generate(
            prompts, SamplingParams(max_new_tokens=12, n=4)
        )
        assert max(i for r in rollouts for i in r.response_ids) == 9
        rollouts = engine_of(model, valid_vocab_size=64).generate(
            prompts, SamplingParams(max_new_tokens=12, n=4)
        )
        assert max(i for r in rollouts for i in r.response_ids) > 30

    def test_log_probs_are_over_the_vocabulary_that_the_actor_trains(
        self, make_llama, engine_of, prompts
    ):
        model = make_llama(vocab_size=64)
        engine = engine_of(model)
        engine.actor.valid_vocab_size = 28  # two fewer than the tokenizer's
        rollouts = engine.generate(prompts, SamplingParams(max_new_tokens=12, n=4))
        assert max(i for r in rollouts for i in r.response_ids) == 27
        ids = rollouts[0].prompt.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        expected = logits[:28].log_softmax(-1)[rollouts[0].response_ids[0]].item()
        assert rollouts[0].log_probs[0] == pytest.approx(expected, abs=1e-4)

    def test_prompt_beyond_the_positions_of_the_model(self, model, engine_of, tokenizer):
        long = Prompt("a" * 60, tokenizer.encode("a" * 60), index=17)
        # 64 fit
        assert (
            len(
                engine_of(model).generate([long], SamplingParams(max_new_tokens=4, ignore_eos=True))
            )
            == 1
        )
        with pytest.raises(
            ValueError, match=r"prompt 17 .*64 positions.*--prompt_max_len.*--generate_max_len"
        ):
            engine_of(model).generate([long], SamplingParams(max_new_tokens=5))

    def test_empty_prompt_is_named(self, llama, engine_of):
        with pytest.raises(ValueError, match="prompt 3 "):
            engine_of(llama).generate([Prompt("", [], index=3)], SamplingParams())

    def test_diverged_weights_are_an_error(self, llama, engine_of, prompts):
        with torch.no_grad():
            llama.lm_head.weight[4] = float("nan")
        with pytest.raises(FloatingPointError, match=r"prompt 1\d\d, response token 0"):
            engine_of(llama).generate(prompts, SamplingParams(max_new_tokens=4))

    def test_encoder_decoder_is_refused(self, llama, engine_of, prompts):
        llama.config.is_encoder_decoder = True
        with pytest.raises(ValueError, match="decoder-only"):
            engine_of(llama).generate(prompts, SamplingParams(max_new_tokens=4))


class TestModelState:
    def test_modes_and_checkpointing_come_back(self, llama, engine_of, prompts):
        llama.train()
        llama.model.norm.eval()  # a module that somebody keeps in evaluation mode
        llama.gradient_checkpointing_enable()
        llama.config.use_cache = False
        modes = [m.training for m in llama.modules()]
        checkpointing = [m for m in llama.modules() if getattr(m, "gradient_checkpointing", False)]
        during = []
        handle = llama.register_forward_hook(
            lambda module, args, output: during.append(
                (
                    module.training,
                    any(m.gradient_checkpointing for m in checkpointing),
                    output.logits.requires_grad,
                )
            )
        )
        engine_of(llama).generate(prompts[:2], SamplingParams(max_new_tokens=3, ignore_eos=True))
        handle.remove()
        assert during == [(False, False, False)] * 3
        assert [m.training for m in llama.modules()] == modes
        assert checkpointing
        assert all(m.gradient_checkpointing for m in checkpointing)
        llama(torch.tensor([[3, 4, 5]])).logits.sum().backward()  # and it trains on
        assert llama.lm_head.weight.grad is not None

    def test_modes_come_back_after_an_error(self, llama, engine_of, prompts):
        llama.train()
        with torch.no_grad():
            llama.lm_head.weight.fill_(float("nan"))
        with pytest.raises(FloatingPointError):
            engine_of(llama).generate(prompts, SamplingParams(max_new_tokens=2))
        assert all(m.training for m in llama.modules())

    def test_deepspeed_engine_is_unwrapped_and_sync_takes_a_new_actor(
        self, make_llama, engine_of, prompts, actor_of
    ):
        sampling = SamplingParams(max_new_tokens=6)
        first, second = make_llama(seed=0), make_llama(seed=1)
        engine = engine_of(actor_of(first).__class__(module=first))
        before = ids_by_key(engine.generate(prompts, sampling))
        assert before == ids_by_key(engine_of(first).generate(prompts, sampling))
        engine.sync_weights(actor_of(second))
        after = ids_by_key(engine.generate(prompts, sampling))
        assert after == ids_by_key(engine_of(second).generate(prompts, sampling))
        assert after != before

    @pytest.mark.parametrize("count", [0, 1, 10])
    def test_parameters_are_gathered_once_also_without_prompts(
        self, llama, engine_of, prompts, count
    ):
        events = []

        @contextlib.contextmanager
        def gather():
            events.append("enter")
            yield
            events.append("leave")

        llama.register_forward_pre_hook(lambda *_: events.append("forward"))
        engine = engine_of(llama, 2, gather_parameters=gather)
        rollouts = engine.generate(
            prompts[:count], SamplingParams(max_new_tokens=2, ignore_eos=True)
        )
        assert len(rollouts) == count
        micro_batches = -(-count // 2)
        assert events == ["enter"] + ["forward"] * (2 * micro_batches) + ["leave"]


# ---------------------------------------------------------------------------------------------------------------------
# adapters


SAMPLING = {
    "greedy": SamplingParams(max_new_tokens=12, temperature=0.0),
    "sampled": SamplingParams(max_new_tokens=12, n=2, seed=4),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_rollouts_are_those_of_the_merged_model(make_llama, tokenizer, prompts, name):
    def rollouts(actor):
        engine = HFRolloutEngine(actor, tokenizer, micro_rollout_batch_size=4)
        return [(r.response_ids, r.log_probs) for r in engine.generate(prompts, SAMPLING[name])]

    actor = Actor(make_llama())
    before = rollouts(actor)
    add_adapters(actor, LoraOptions(rank=4, dropout=0.5))  # dropout is off in rollouts
    actor.train()
    assert [ids for ids, _ in rollouts(actor)] == [ids for ids, _ in before]

    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    merged = make_llama()
    merged.load_state_dict(dict(full_weights(actor)))
    ours, theirs = rollouts(actor), rollouts(Actor(merged))
    assert [ids for ids, _ in ours] == [ids for ids, _ in theirs]
    assert [ids for ids, _ in ours] != [ids for ids, _ in before]
    for (_, a), (_, b) in zip(ours, theirs):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-4, rtol=0)

    actor.eval()
    ids = torch.tensor([prompts[2].token_ids])
    reference, separate = (
        AdaptersOff(actor).score_actions(ids, 5),
        Actor(make_llama()).eval().score_actions(ids, 5),
    )
    assert torch.equal(reference.log_probs, separate.log_probs)
    assert not torch.equal(actor.score_actions(ids, 5).log_probs, reference.log_probs)
