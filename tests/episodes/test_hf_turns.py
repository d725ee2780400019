"""Turns of conversations on the HF engine: the same tokens whatever else is decoded, and whatever is kept."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support.conversations import Conversations, FixedTurns, InTurn
from support.fixtures.character_models import EOS_ID, ids_by_key, lfm2, mistral, trainer_log_probs

from lightppo.data.records import Prompt, Rollout
from lightppo.episodes import hf_turns
from lightppo.episodes.hf_turns import EndedRows, TurnQueue, generate_turns
from lightppo.models.kernels.invariant import make_invariant
from lightppo.rollout import decoding as decode
from lightppo.rollout.decoding import SlotCache
from lightppo.rollout.decoding_runners import CUDAGraphs, InvariantSteps
from lightppo.rollout.engine import SamplingParams, Turn


class Uncaptured(CUDAGraphs):
    """The same steps, as they are."""

    def warm_up(self, step):
        step()

    def capture(self, step):
        return step


class TestTurns:
    """Conversations of one to three turns; what stands between two depends on what was sampled."""

    sampling = SamplingParams(max_new_tokens=8, temperature=0.9, seed=5)

    def played(self, engine, prompts, sampling=sampling, **options) -> Conversations:
        conversations = Conversations(prompts, turns=3, samples=2, **options)
        generate_turns(engine, conversations, sampling)
        return conversations

    @pytest.mark.parametrize("build", [None, mistral, lfm2])
    def test_a_turn_depends_on_its_conversation_alone(self, build, llama, engine_of, prompts):
        model = llama if build is None else build().eval()
        expected = self.played(engine_of(model, 8), prompts)
        assert {len(one.answers) for one in expected.all} == {1, 2, 3}
        for slots, late in ((1, False), (3, True), (64, True)):
            again = self.played(engine_of(model, slots), prompts[::-1], late=late)
            assert again.ids() == expected.ids()
        for one in expected.all:
            for turn, answer in zip(one.asked, one.answers):
                assert len(answer.response_ids) <= turn.max_new_tokens
                cut = len(answer.response_ids) == turn.max_new_tokens
                assert (answer.finish_reason == "stop") == (answer.response_ids[-1] == EOS_ID)
                assert cut or answer.finish_reason == "stop"
                whole = Prompt("", turn.token_ids, index=turn.prompt.index)
                rollout = Rollout(whole, 0, answer.response_ids, "", "stop")
                log_probs = trainer_log_probs(model, rollout, 0.9)
                got = torch.tensor(answer.log_probs)
                torch.testing.assert_close(got, log_probs, atol=1e-4, rtol=0)

    def test_with_batch_invariant_log_probs_do_not_depend_on_when_turns_come(
        self, llama, engine_of, prompts
    ):
        """To the last bit; without it the last digits are those of the batch."""
        log_probs = {}
        for invariant in (False, True):
            model = copy.deepcopy(llama)
            if invariant:
                make_invariant(model, torch.device("cpu"))
            for slots, late in ((8, False), (3, True)):
                engine = engine_of(model, slots, runner=InvariantSteps() if invariant else None)
                played = self.played(engine, prompts[:4], late=late)
                log_probs[invariant, late] = [
                    answer.log_probs for one in played.all for answer in one.answers
                ]
        assert log_probs[True, False] == log_probs[True, True]
        assert log_probs[False, False] != log_probs[False, True]

    def test_first_turns_are_responses_and_later_ones_go_on_in_their_random_numbers(
        self, llama, engine_of, prompts
    ):
        engine = engine_of(llama, 4)
        sampling = SamplingParams(max_new_tokens=5, temperature=0.9, seed=5, n=2)
        responses = ids_by_key(engine.generate(prompts, sampling))
        played = self.played(engine, prompts)
        for one in played.all:
            assert one.answers[0].response_ids == responses[one.prompt.index, one.sample_index]
        # A turn whose stream began anew would draw the numbers of the first turn again.
        again = [one for one in played.all if len(one.answers) == 3][:4]
        source = FixedTurns([replace(one.asked[1], sampled=0) for one in again])
        generate_turns(engine, source, self.sampling)
        second = {tuple(one.answers[1].response_ids) for one in again}
        assert len(source.answers) == 4
        assert {tuple(rollout.response_ids) for rollout in source.answers} != second

    @pytest.mark.parametrize("late", [False, True])
    def test_a_follow_up_runs_its_new_tokens_alone(
        self, llama, engine_of, prompts, monkeypatch, late
    ):
        """What is kept between turns changes neither tokens nor log probs; without room nothing is copied."""
        stats, played = {}, {}
        config = llama.config
        token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        for name, limit in {"nothing": 0, "little": 160 * token, "all": 1 << 40}.items():
            monkeypatch.setattr(TurnQueue, "keeps_rows", name != "nothing")
            monkeypatch.setattr(hf_turns, "free_bytes", lambda device, limit=limit: limit)
            engine = engine_of(llama, 4)
            played[name] = self.played(engine, prompts, late=late)
            stats[name] = engine.last_stats
        assert played["nothing"].ids() == played["little"].ids() == played["all"].ids()
        for one, other in zip(played["nothing"].all, played["all"].all):
            for left, right in zip(one.answers, other.answers):
                got = torch.tensor(right.log_probs)
                torch.testing.assert_close(got, torch.tensor(left.log_probs), atol=1e-4, rtol=0)
        positions = [one["decode_positions"] for one in stats.values()]
        assert positions[0] > positions[1] > positions[2]
        sampled = {one["generated_tokens"] for one in stats.values()}
        answers = [answer for one in played["all"].all for answer in one.answers]
        assert sampled == {sum(len(answer.response_ids) for answer in answers)}

    def test_nothing_is_copied_where_the_answer_comes_before_the_slot_is_needed(
        self, llama, engine_of, prompts, monkeypatch
    ):
        copied, copy = [], EndedRows._copy
        monkeypatch.setattr(EndedRows, "_copy", lambda *args: (copied.append(args), copy(*args)))
        stats = {}
        for slots in (64, 4):
            engine = engine_of(llama, slots)
            played = self.played(engine, prompts)
            stats[slots] = engine.last_stats
            assert bool(copied) == (slots == 4)
        # each token of a conversation goes through the model once, but for the padding of prompts
        once = sum(len(one.prompt.token_ids) + len(one.ids) for one in played.all)
        assert stats[64]["decode_positions"] < 1.2 * once

    def test_rows_stay_in_their_slots_while_other_slots_run_as_one(self, llama, engine_of, prompts):
        """A runner has steps write to slots that nobody decodes in."""
        expected = self.played(engine_of(llama, 64), prompts)
        for slots in (64, 5):
            engine = engine_of(llama, slots, runner=Uncaptured())
            again = self.played(engine, prompts, late=True)
            assert again.ids() == expected.ids()
            for one, other in zip(again.all, expected.all):
                for left, right in zip(one.answers, other.answers):
                    got = torch.tensor(left.log_probs)
                    torch.testing.assert_close(
                        got, torch.tensor(right.log_probs), atol=1e-4, rtol=0
                    )

    def test_rows_whose_conversation_has_ended_are_not_copied(
        self, llama, engine_of, prompts, monkeypatch
    ):
        monkeypatch.setattr(EndedRows, "_copy", None)
        for turns in (
            [Turn(prompt, 0, prompt.token_ids, 5, final=True) for prompt in prompts],
            Conversations(prompts, turns=1),
        ):
            source = FixedTurns(turns) if isinstance(turns, list) else turns
            generate_turns(engine_of(llama, 2), source, self.sampling)

    def test_turns_that_come_one_by_one_go_through_the_model_together(
        self, llama, engine_of, prompts, monkeypatch
    ):
        passes, through = [], TurnQueue._prefill

        def counted(queue, groups):
            passes[-1] += 1
            return through(queue, groups)

        monkeypatch.setattr(TurnQueue, "_prefill", counted)
        played = []
        for steps in (0, 4):
            passes.append(0)
            monkeypatch.setattr(hf_turns, "GATHER_STEPS", steps)
            played.append(self.played(engine_of(llama, 64), prompts, late=True))
        assert played[0].ids() == played[1].ids()
        assert passes[1] < passes[0]

    def test_buffers_shrink_with_the_conversations_that_are_left(
        self, llama, engine_of, prompts, monkeypatch
    ):
        rows, make_room = [], SlotCache.make_room

        def watched(cache, slots, at_least):
            rows.append(slots)
            return make_room(cache, slots, at_least)

        monkeypatch.setattr(SlotCache, "make_room", watched)
        monkeypatch.setattr(decode, "CPU_COLUMNS", 1)
        played = self.played(engine_of(llama, 64), prompts)
        assert max(rows) <= len(played.all)
        assert min(rows) < len(played.all) / 2

    def test_a_conversation_that_begins_anew_is_not_taken_for_the_old_one(
        self, llama, engine_of, prompts
    ):
        old = Turn(prompts[0], 0, [*prompts[0].token_ids, 7, 8, 9], 5)
        new = replace(old, token_ids=[*prompts[1].token_ids, 9, 8])
        turns = InTurn([old, new])
        generate_turns(engine_of(llama, 2), turns, self.sampling)
        alone = FixedTurns([new])
        generate_turns(engine_of(llama, 2), alone, self.sampling)
        assert turns.answers[1].response_ids == alone.answers[0].response_ids

    def test_penalties_see_the_whole_conversation(self, llama, engine_of, prompts):
        """Prompts that come later may be longer than all that the decoder began with."""
        sampling = SamplingParams(max_new_tokens=8, seed=5, repetition_penalty=1.5)
        expected = self.played(engine_of(llama, 8), prompts, sampling)
        assert (
            self.played(engine_of(llama, 2), prompts, sampling, late=True).ids() == expected.ids()
        )
        assert self.played(engine_of(llama, 8), prompts).ids() != expected.ids()

    def test_no_prompts(self, llama, engine_of):
        assert self.played(engine_of(llama, 8), []).ids() == {}

    def test_a_turn_that_is_too_long_is_named(self, llama, engine_of, prompts):
        conversations = Conversations(prompts[:1], turns=1)
        conversations.all[0].ids = [5] * 60
        with pytest.raises(ValueError, match=r"prompt 100 has 63 tokens, with the response 68"):
            generate_turns(engine_of(llama), conversations, self.sampling)
