"""The server engine over fake servers: sharing out, weight pushes, lost servers, errors on every rank."""

import base64
import json
import logging
import math
import os
import resource
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from support.conversations import Conversations
from support.fake_vllm import FakeVLLM, answers, made_up_ids
from support.fakes import FakeStrategy
from support.ranks import free_port

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt
from lightppo.errors import (
    ConfigError,
    RefusedError,
    RequestError,
    RolloutError,
    RolloutMismatchError,
    UnreachableError,
)
from lightppo.experience.rollout_check import RolloutCheck
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import LoraOptions, add_adapters
from lightppo.rollout.engine import RolloutEngine, SamplingParams
from lightppo.rollout.sampling import request_seed
from lightppo.rollout.vllm import servers as vllm_server
from lightppo.rollout.vllm.servers import VLLMServer, VLLMServerRolloutEngine
from lightppo.rollout.vllm.weights import architecture, full_weights, trainer_fingerprints
from lightppo.trainer import run

GREEDY = SamplingParams(max_new_tokens=3, do_sample=False)
SLEEP_LEVEL = "lightppo.rollout.vllm.colocated.sleep_level"
GENERATE = "/inference/v1/generate"
STEPS = [
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
]
PUSH = ["/pause?mode=abort", *STEPS[:3], "lightppo_problem", STEPS[3], "lightppo_problem"]
PUSH += ["/lightppo/weights", "/resume"]


def beside(other):
    """A strategy of rank 0; ``other`` is what a second rank brings to a collective."""
    return FakeStrategy(exchange=lambda rank, value: [value, other])


@pytest.fixture
def fakes(monkeypatch, llama):
    servers = [FakeVLLM(architecture(llama.config)) for _ in range(2)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def build(fakes, llama, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("lightppo.rollout.vllm.servers.START_SECONDS", 0.0)

    def make(strategy=None, actor=llama, requests_per_server=1024, **options):
        urls = options.pop("urls", [server.url for server in fakes])
        options = {
            "vllm_server_retries": 0,
            "vllm_server_sync": "disk",
            "vllm_server_sync_dir": str(tmp_path),
        } | options
        config = PPOConfig.from_flat(
            pretrain="some-model",
            prompt_data="prompts.jsonl",
            rollout_engine="vllm_server",
            vllm_server_url=urls,
            prompt_max_len=options.pop("prompt_max_len", 20),
            generate_max_len=10,
            **options,
        )
        engine = VLLMServerRolloutEngine(
            config.resolved(), strategy or FakeStrategy(), actor, tokenizer
        )
        engine.requests_per_server = requests_per_server
        return engine

    return make


def completions(server):
    return server.bodies(GENERATE)


def asked_for(server, adapter):
    """Requests that name an adapter in their query."""
    return [body for path, body in server.requests if path.endswith(f"&adapter={adapter}")]


def failing(text=b"engine is dead", after=0):
    return lambda body, n: (500, text) if n > after else None


def admit_failing(server):
    server.replies["lightppo_admit"] = failing()


def test_log_probs_of_servers_are_compared_with_the_trainers(build, fakes, prompts, llama):
    for fake in fakes:
        fake.replies["lightppo_fingerprints"] = answers(
            {"results": [{"prints": {}, "packed": {}, "dtype": "float32"}]}
        )
    engine, actor = build(), Actor(llama)
    check = RolloutCheck(actor, engine, FakeStrategy(), engine.config)
    with pytest.raises(
        RolloutMismatchError, match=r"not the trainer's.*--logp_diff_tolerance is 0\.001"
    ):
        # -0.5 each, say the servers
        check.first(engine.generate(prompts, SamplingParams(max_new_tokens=3, seed=9)))


class TestGenerate:
    def test_rollouts_in_the_order_of_the_prompts(self, build, prompts, tokenizer):
        engine = build()
        assert isinstance(engine, RolloutEngine)
        sampling = SamplingParams(max_new_tokens=3, n=2, seed=9)
        rollouts = engine.generate(prompts, sampling)
        assert [(r.prompt.index, r.sample_index) for r in rollouts] == [
            (p.index, i) for p in prompts for i in (0, 1)
        ]
        for r in rollouts:
            seed = request_seed(9, r.prompt.index, r.sample_index)
            assert r.response_ids == made_up_ids(r.prompt.token_ids, seed, 3, 30)
            assert r.response_text == tokenizer.decode(r.response_ids, skip_special_tokens=True)
            assert r.log_probs == [-0.5] * 3
            assert r.finish_reason == "length"
        assert engine.last_stats["generated_tokens"] == 60
        assert engine.last_stats["prompt_tokens"] == 2 * sum(len(p.token_ids) for p in prompts)

    def test_parameters_are_those_of_the_engine_interface(self, build, fakes, prompts):
        sampling = SamplingParams(
            max_new_tokens=4,
            min_new_tokens=2,
            temperature=0.7,
            top_p=0.9,
            top_k=5,
            stop=("ab",),
            stop_token_ids=(7,),
        )
        build(urls=[fakes[0].url]).generate(prompts[:1], sampling)
        (body,) = completions(fakes[0])
        body = body["sampling_params"]
        expected = {
            "max_tokens": 4,
            "min_tokens": 2,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "stop": ["ab"],
        }
        assert expected.items() <= body.items()
        assert body["stop_token_ids"] == [1, 7]
        assert body["seed"] == request_seed(0, 100, 0)

    def test_servers_get_the_same_number_of_tokens(self, build, fakes, tokenizer):
        # with max_new_tokens 3 they cost 15, 9, 9, 6: longest first, each to the one with less: 15 + 6 and 9 + 9
        lengths = [12, 6, 6, 3]
        prompts = [
            Prompt("a" * n, tokenizer.encode("a" * n), index=i) for i, n in enumerate(lengths)
        ]
        build(requests_per_server=4).generate(prompts, GREEDY)
        shares = [
            sorted(len(body["token_ids"]) for body in completions(server)) for server in fakes
        ]
        assert sorted(shares) == [[3, 12], [6, 6]]

    def test_no_prompts(self, build):
        assert build().generate([], GREEDY) == []

    def test_each_is_reported_when_it_is_done(self, build, prompts):
        reported = []
        rollouts = build().generate(prompts, GREEDY, on_finished=reported.extend)
        assert {id(r) for r in reported} == {id(r) for r in rollouts}
        assert len(reported) == len(prompts)

    def test_a_stop_id_and_a_first_temperature_that_cannot_be(self, build, prompts):
        engine = build()
        with pytest.raises(ValueError, match=r"stop_token_ids \[30\]"):
            engine.generate(prompts, SamplingParams(stop_token_ids=(30,), max_new_tokens=2))
        with pytest.raises(ValueError, match="first_token_temperature"):
            engine.generate(prompts, SamplingParams(first_token_temperature=2.0, max_new_tokens=2))
        with pytest.raises(ValueError, match="--max_model_len"):
            engine.generate(prompts, SamplingParams(max_new_tokens=19))

    def test_log_probs_that_are_no_numbers_are_an_error(self, build, fakes, prompts):
        def reply(body, n):
            choice = fakes[0].choice(body)
            choice["logprobs"]["content"][1]["logprob"] = -9999.0  # what vLLM makes of NaN
            return 200, json.dumps({"choices": [choice]}).encode()

        fakes[0].replies[GENERATE] = reply
        with pytest.raises(FloatingPointError, match="prompt 100, response token 1"):
            build(urls=[fakes[0].url]).generate(prompts[:1], GREEDY)


class TestTurns:
    sampling = SamplingParams(max_new_tokens=6, seed=9)

    def played(self, engine, prompts, **options) -> Conversations:
        conversations = Conversations(prompts, turns=3, samples=2, **options)
        engine.generate_turns(conversations, self.sampling)
        return conversations

    def test_a_conversation_stays_on_its_server(self, build, fakes, tokenizer):
        prompts = [Prompt("ab", tokenizer.encode("ab"), index=i) for i in range(6)]
        played = self.played(build(prompt_max_len=40), prompts, late=True)
        of_server = [[body["token_ids"] for body in completions(server)] for server in fakes]
        assert all(of_server)
        turns = [turn for one in played.all for turn in one.asked]
        assert sum(map(len, of_server)) == len(turns)
        for one in played.all:
            homes = {
                home
                for turn in one.asked
                for home, asked in enumerate(of_server)
                if turn.number and turn.token_ids in asked
            }
            assert len(homes) <= 1

    def test_it_goes_on_elsewhere_if_that_is_lost(self, build, fakes, tokenizer, caplog):
        prompts = [Prompt("ab", tokenizer.encode("ab"), index=i) for i in range(6)]
        whole = self.played(build(prompt_max_len=40), prompts).ids()
        fakes[0].replies[GENERATE] = failing(after=len(completions(fakes[0])) + 5)
        engine = build(prompt_max_len=40)
        assert self.played(engine, prompts).ids() == whole
        assert list(engine.lost) == [0]

    def test_what_another_rank_met_ends_turns_here_too(self, build, fakes):
        with pytest.raises(RolloutError, match="rank 1: ValueError: no"):
            self.played(build(beside(("ValueError: no", {}))), [])


class TestTickets:
    """Requests that are under way while the trainer does something else."""

    short = SamplingParams(max_new_tokens=2, do_sample=False)  # of an evaluation

    @pytest.fixture
    def opened(self, fakes):
        """Answers of three tokens wait for the event."""
        opened = threading.Event()
        for server in fakes:
            server.replies[GENERATE] = lambda body, n: (
                (opened.wait(60) if body["sampling_params"]["max_tokens"] == 3 else None) and None
            )
        yield opened
        opened.set()

    def test_an_evaluation_in_between_sees_the_same_weights(self, build, fakes, prompts, opened):
        engine, finished = build(), []
        ticket = engine.start(prompts, GREEDY, finished.extend)
        evaluated = engine.generate(prompts, self.short)
        assert (ticket.done(), finished) == (False, [])
        opened.set()
        sampled = engine.finish(ticket)
        assert len(finished) == len(prompts)
        for rollouts, sampling in ((sampled, GREEDY), (evaluated, self.short)):
            again = engine.generate(prompts, sampling)
            assert [r.response_ids for r in rollouts] == [r.response_ids for r in again]
        assert {server.version for server in fakes} == {engine.version}

    def test_a_server_that_dies_meanwhile_is_lost_for_both(self, build, fakes, prompts, opened):
        engine = build(requests_per_server=1)
        ticket = engine.start(prompts, GREEDY)
        fakes[0].replies[GENERATE] = failing()
        evaluated = engine.generate(prompts, self.short)
        assert list(engine.lost) == [0]
        opened.set()
        sampled = engine.finish(ticket)
        assert [len(r.response_ids) for r in sampled] == [3] * len(prompts)
        assert [len(r.response_ids) for r in evaluated] == [2] * len(prompts)

    def test_failures_are_raised_where_all_ranks_meet(self, build, fakes, prompts):
        for server in fakes:
            server.replies[GENERATE] = answers(b"too long", status=400)
        engine = build()
        ticket = engine.start(prompts, GREEDY)
        with pytest.raises(RolloutError, match="too long"):
            engine.finish(ticket)


class TestLostServers:
    def test_its_requests_go_to_the_others(self, build, fakes, prompts, caplog):
        engine = build(requests_per_server=1)
        whole = [r.response_ids for r in engine.generate(prompts, GREEDY)]
        fakes[0].replies[GENERATE] = failing(after=len(completions(fakes[0])) + 1)
        with caplog.at_level(logging.WARNING):
            again = [r.response_ids for r in engine.generate(prompts, GREEDY)]
        assert again == whole
        assert (
            f"vLLM server {fakes[0].url}: /inference/v1/generate: HTTP 500: engine is dead; lost until"
            in caplog.text
        )
        asked = len(completions(fakes[0]))
        engine.generate(prompts, GREEDY)  # it is not asked again
        assert len(completions(fakes[0])) == asked

    def test_it_comes_back_with_the_next_push(self, build, fakes, prompts, llama, caplog):
        engine = build()
        fakes[0].replies[GENERATE] = failing()
        engine.generate(prompts, GREEDY)
        assert list(engine.lost) == [0]
        fakes[0].replies.clear()
        with caplog.at_level(logging.INFO, logger="lightppo"):
            engine.sync_weights(llama)
        assert engine.lost == {}
        assert f"vLLM server {fakes[0].url} is used again" in caplog.text
        before = len(completions(fakes[0]))
        engine.generate(prompts, GREEDY)
        assert len(completions(fakes[0])) > before

    @pytest.mark.parametrize("step", [*STEPS, "/resume"])
    def test_a_push_that_fails_loses_a_server_but_not_the_run(
        self, build, fakes, prompts, llama, step
    ):
        engine = build()
        fakes[1].replies[step] = failing()
        engine.sync_weights(llama)
        assert list(engine.lost) == [1]
        assert f"{step}: HTTP 500: engine is dead" in engine.lost[1]
        before = len(completions(fakes[1]))
        assert len(engine.generate(prompts, GREEDY)) == len(prompts)
        assert len(completions(fakes[1])) == before
        assert fakes[1].routes()[-1] == "/resume"
        # Still away at the next push: looked at once, and no weights are sent.
        admit_failing(fakes[1])
        loads = fakes[1].routes().count("/update_weights")
        engine.sync_weights(llama)
        assert fakes[1].routes().count("/update_weights") == loads

    def test_what_its_workers_say_loses_it_too(self, build, fakes, llama):
        engine = build()
        problems = [{"problem": None}, {"problem": "ValueError: no layer of that name"}]
        fakes[0].replies["lightppo_problem"] = answers({"results": problems})
        engine.sync_weights(llama)
        assert list(engine.lost) == [0]
        assert "/update_weights: ValueError: no layer of that name" in engine.lost[0]

    def test_what_a_killed_trainer_has_begun_is_ended_first(self, build, fakes):
        assert fakes[0].answer("/start_weight_update", {})[0] == 200
        engine = build()
        assert engine.lost == {}
        assert fakes[0].loaded[0].keys() == fakes[1].loaded[0].keys()

    def test_one_that_was_started_anew_does_not_count(self, build, fakes, prompts, llama, caplog):
        engine = build()
        whole = [r.response_ids for r in engine.generate(prompts, GREEDY)]
        fakes[0].version = "default"
        reported = []
        assert [
            r.response_ids for r in engine.generate(prompts, GREEDY, on_finished=reported.extend)
        ] == whole
        assert len(reported) == len(prompts)
        assert (
            f"vLLM server {fakes[0].url} has other weights than were pushed: was it started anew?"
            in caplog.text
        )
        before = len(completions(fakes[0]))
        engine.sync_weights(llama)
        engine.generate(prompts, GREEDY)
        assert len(completions(fakes[0])) > before

    def test_with_none_left_all_are_named(self, build, fakes, prompts, llama):
        engine = build()
        fakes[0].replies[GENERATE] = failing()
        fakes[1].replies[GENERATE] = failing(b"<html>Bad Gateway")
        with pytest.raises(RolloutError) as caught:
            engine.generate(prompts, GREEDY)
        message = str(caught.value)
        assert message.startswith("--vllm_server_url: ")
        for server, reason in zip(fakes, ["engine is dead", "<html>Bad Gateway"]):
            assert (
                f"vLLM server {server.url}: /inference/v1/generate: HTTP 500: {reason}" in message
            )
        assert "start them again by `lightppo serve-vllm`" in message
        with pytest.raises(RolloutError, match="--vllm_server_url"):
            engine.generate(prompts, GREEDY)
        for server in fakes:
            admit_failing(server)
        with pytest.raises(RolloutError, match="--vllm_server_url"):
            engine.sync_weights(llama)

    def test_a_refusal_is_an_error_at_once(self, build, fakes, prompts):
        engine = build()
        fakes[0].replies[GENERATE] = lambda body, n: (401, b"who are you")
        with pytest.raises(
            RolloutError, match="HTTP 401: who are you; set --vllm_server_api_key_env"
        ):
            engine.generate(prompts, GREEDY)

    def test_every_rank_expects_the_version_that_rank_0_pushed(self, build, fakes, prompts):
        strategy = FakeStrategy()
        told = [(None, {}, "of rank 0", "of rank 0"), False]
        strategy.is_rank_0, strategy.broadcast_object = lambda: False, lambda obj: told.pop(0)
        engine = build(strategy)
        for server in fakes:
            server.version = "of rank 0"
        assert len(engine.generate(prompts, GREEDY)) == len(prompts)
        assert engine.lost == {}

    def test_what_another_rank_met_ends_the_call_here_too(self, build, fakes, prompts):
        with pytest.raises(RolloutError, match="rank 1: ValueError: prompt 3 has no tokens"):
            build(beside(("ValueError: prompt 3 has no tokens", {}))).generate(prompts, GREEDY)

    def test_a_server_that_another_rank_lost_is_lost_here_too(self, build, fakes, prompts):
        engine = build(beside((None, {1: "vLLM server x: gone"})))
        engine.generate(prompts, GREEDY)
        assert engine.lost == {1: "vLLM server x: gone"}


@pytest.fixture
def adapted(llama, tmp_path_factory):
    """An actor with adapters of rank 2 whose B is 0.1 everywhere."""
    pytest.importorskip("peft")
    folder = str(tmp_path_factory.mktemp("model"))
    llama.save_pretrained(folder)
    actor = Actor(folder)
    add_adapters(actor, LoraOptions(rank=2, alpha=4), seed=0)
    with torch.no_grad():
        for name, parameter in actor.hf_model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    return actor


class TestAdaptersAlone:
    @pytest.fixture
    def fakes(self, fakes):
        for server in fakes:
            server.obstacle = None
        return fakes

    @pytest.fixture
    def build(self, build, adapted):
        def make(**options):
            return build(FakeStrategy(), actor=adapted, **{"lora_rank": 2} | options)

        return make

    @pytest.mark.parametrize("sync", ["disk", "collective"])
    def test_frozen_weights_come_once_and_each_push_is_the_adapter(
        self, build, fakes, llama, adapted, prompts, sync
    ):
        engine = build(vllm_server_sync=sync, vllm_server_sync_dir=None)
        first = engine.adapter
        with torch.no_grad():
            for name, parameter in adapted.hf_model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.3)
        engine.sync_weights(adapted)
        assert engine.last_stats["sync_bytes"] == sum(
            p.nbytes for p in adapted.parameters() if p.requires_grad
        )
        for server in fakes:
            (frozen,) = server.loaded
            assert all(torch.equal(frozen[n], value) for n, value in llama.state_dict().items())
            assert list(server.adapters) == [first, engine.adapter]
            name = "model.layers.0.self_attn.q_proj.lora_B.weight"
            assert (server.adapters[first][name] == 0.1).all()
            assert (server.adapters[engine.adapter][name] == 0.3).all()
            # what is computed meanwhile goes on
            assert server.routes().count("/pause?mode=abort") == 1
            described = server.bodies("/collective_rpc")[-1]["args"][1]
            assert (described["r"], described["lora_alpha"]) == (2, 4)
        engine.generate(prompts, GREEDY)
        assert all(
            body["model"] == engine.adapter
            for server in fakes
            for body in asked_for(server, engine.adapter)
        )
        assert sum(map(len, (asked_for(s, engine.adapter) for s in fakes)))

    def test_a_server_that_was_started_anew_gets_the_frozen_weights_again(
        self, build, fakes, prompts, adapted
    ):
        engine = build()
        fakes[1].described["version"] = None
        fakes[1].adapters.clear()
        engine.generate(prompts, GREEDY)
        assert list(engine.lost) == [1]
        assert "has other weights than were pushed" in engine.lost[1]
        engine.sync_weights(adapted)
        assert engine.lost == {}
        assert [len(server.loaded) for server in fakes] == [1, 2]
        assert len(fakes[1].adapters) == 1

    def test_one_that_takes_no_adapters_later_is_lost(self, build, fakes, adapted):
        engine = build()
        fakes[1].obstacle = "vLLM was started without LoRA"
        engine.sync_weights(adapted)
        assert (
            "started without LoRA; start it by `lightppo serve-vllm` --lora_rank 2"
            in (engine.lost[1])
        )

    def test_what_was_asked_is_not_changed(self, build, fakes):
        fakes[0].obstacle = "vLLM has no adapters for GPT2LMHeadModel"
        with pytest.raises(ConfigError) as caught:
            build(vllm_lora_push="adapter")
        server = f"vLLM server {fakes[0].url}: vLLM has no adapters for GPT2LMHeadModel"
        remedies = "start it by `lightppo serve-vllm` --lora_rank 2, or set --vllm_lora_push merged"
        assert str(caught.value) == f"--vllm_lora_push adapter: {server}; {remedies}"

    def test_dropped_weights_are_sent_again(self, build, fakes, adapted, monkeypatch):
        for server in fakes:
            server.described["sleep_mode"] = True
        for level, pushes in ((1, 1), (2, 2)):
            monkeypatch.setattr(SLEEP_LEVEL, lambda config, level=level: level)
            for server in fakes:
                server.loaded.clear()
            engine = build()
            engine.sleep()
            engine.wake()
            assert [len(server.loaded) for server in fakes] == [pushes] * 2
        assert fakes[0].routes().count("/sleep?level=1") == 1


class TestWeights:
    def test_every_push_brings_the_whole_model_to_every_server(
        self, build, fakes, make_llama, tmp_path
    ):
        llama = make_llama(tie_word_embeddings=True)
        for server in fakes:
            server.described["architecture"] = architecture(llama.config)
        engine = build(actor=llama)
        with torch.no_grad():
            llama.lm_head.weight.add_(1.0)
        engine.sync_weights(llama)
        for server in fakes:
            first, second = server.loaded
            assert first.keys() == second.keys() == llama.state_dict().keys()
            assert all(
                torch.equal(second[name], value) for name, value in llama.state_dict().items()
            )
            # tied, under both names
            assert torch.equal(second["model.embed_tokens.weight"], second["lm_head.weight"])
            assert torch.equal(first["lm_head.weight"] + 1.0, second["lm_head.weight"])
        versions = [body["version"] for body in fakes[0].bodies("/lightppo/weights")]
        assert len(set(versions)) == 2
        assert engine.version == versions[-1]
        assert list(tmp_path.iterdir()) == []
        assert engine.last_stats["sync_seconds"] > 0

    @pytest.mark.parametrize("asked", ["auto", "merged"])
    def test_adapters_are_merged(self, build, fakes, llama, adapted, asked):
        fakes[0].obstacle = None  # of two, one takes them
        strategy, actor = FakeStrategy(), adapted
        build(strategy, actor=actor, lora_rank=2, vllm_lora_push=asked)
        assert [
            f"{fakes[1].url}: vLLM was started without LoRA" in said for said in strategy.printed
        ] == ([True] if asked == "auto" else [])
        pushed = fakes[0].loaded[0]
        assert pushed.keys() == llama.state_dict().keys()
        name = "model.layers.0.self_attn.q_proj.weight"
        lora_a = next(
            p
            for n, p in actor.hf_model.named_parameters()
            if "layers.0.self_attn.q_proj.lora_A" in n
        )
        # W + alpha / rank · B A, and all entries of B are 0.1
        expected = llama.state_dict()[name] + 2 * 0.1 * lora_a.sum(dim=0)
        assert torch.allclose(pushed[name], expected, atol=1e-6)

    @pytest.mark.parametrize("sync", ["disk", "collective"])
    def test_in_several_buckets(self, build, fakes, llama, monkeypatch, tmp_path, sync):
        monkeypatch.setattr("lightppo.rollout.vllm.weights.BUCKET_BYTES", 5000)
        most = []

        def count(body, n):
            most.append(len(list(tmp_path.glob("*/*"))))

        fakes[0].replies["/update_weights"] = count
        build(vllm_server_sync=sync, vllm_server_sync_dir=str(tmp_path) if sync == "disk" else None)
        assert len(most) > 3
        assert max(most) == (2 if sync == "disk" else 0)
        for server in fakes:
            assert server.loaded[0].keys() == llama.state_dict().keys()
            assert all(
                torch.equal(server.loaded[0][name], value)
                for name, value in llama.state_dict().items()
            )

    @pytest.mark.parametrize("where", ["shm", "auto"])
    def test_shared_memory_is_left_as_it_was(self, build, fakes, where):
        build(vllm_server_sync=where, vllm_server_sync_dir=None)
        (told,) = fakes[0].bodies("/update_weights")
        own = f"lightppo-weights-{os.getpid()}-"  # others may be at a push of theirs
        assert told["update_info"]["path"].startswith(f"/dev/shm/{own}")
        assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(own)]

    def test_without_room_in_shared_memory_auto_takes_the_disk(
        self, build, fakes, monkeypatch, tmp_path
    ):
        monkeypatch.setattr("lightppo.rollout.vllm.weights.SHARED_MEMORY", tmp_path / "missing")
        build(vllm_server_sync="auto", vllm_server_sync_dir=None)
        (told,) = fakes[0].bodies("/update_weights")
        assert not told["update_info"]["path"].startswith("/dev/shm")

    def test_the_server_is_paused_and_told_in_order(self, build, fakes):
        build()
        assert fakes[0].routes() == ["lightppo_admit", *PUSH]
        # the tokenizer has all 30 ids
        assert fakes[0].bodies("/collective_rpc")[0]["args"] == [None, None]

    def test_files_of_a_failed_push_are_removed(self, build, fakes, tmp_path):
        fakes[0].replies["/update_weights"] = failing()
        with pytest.raises(
            RolloutError, match=f"vLLM server {fakes[0].url}: /update_weights: HTTP 500"
        ):
            build()  # the first push must reach all servers
        assert list(tmp_path.iterdir()) == []

    def test_what_a_killed_run_left_is_removed(self, build, tmp_path):
        ended = subprocess.Popen(["true"])
        ended.wait()
        folders = {name: tmp_path / f"lightppo-weights-{pid}-{name}"
                   for name, pid in {"old": ended.pid, "new": ended.pid, "running": os.getpid()}.items()}  # fmt: skip
        for folder in folders.values():
            folder.mkdir()
            (folder / "weights-00000.safetensors").write_bytes(b"x")
        for name in ("old", "running"):
            os.utime(folders[name], (0, 0))
        build()
        assert sorted(tmp_path.iterdir()) == sorted([folders["new"], folders["running"]])

    def test_after_an_error_in_the_weights_nothing_is_generated(
        self, build, llama, monkeypatch, prompts
    ):
        engine = build()

        def weights(*args):
            yield "a", torch.ones(2)
            raise ZeroDivisionError

        monkeypatch.setattr("lightppo.rollout.vllm.servers.full_weights", weights)
        with pytest.raises(ZeroDivisionError):
            engine.sync_weights(llama)
        with pytest.raises(RolloutError, match=r"--vllm_server_url: .*weights"):
            engine.generate(prompts, GREEDY)

    def test_a_folder_that_does_not_exist(self, build, tmp_path):
        with pytest.raises(RolloutError, match=r"--vllm_server_sync disk: .*nowhere: No such file"):
            build(vllm_server_sync_dir=str(tmp_path / "nowhere"))

    def test_no_room(self, build, monkeypatch, tmp_path):
        def save_file(tensors, path):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("safetensors.torch.save_file", save_file)
        with pytest.raises(
            RolloutError, match=r"--vllm_server_sync disk: .*No space left on device"
        ):
            build()
        assert list(tmp_path.iterdir()) == []

    def test_weights_that_differ_are_named(self, build, fakes, llama):
        engine = build()
        prints = {
            name: values[0] for name, values in trainer_fingerprints(full_weights(llama)).items()
        }
        for server, odd in zip(fakes, ["model.norm.weight", "lm_head.weight"]):
            theirs = prints | {odd: prints[odd] + 1}
            theirs.pop("model.embed_tokens.weight")
            coded = {
                n: base64.b64encode(value.detach().numpy().tobytes()).decode()
                for n, value in theirs.items()
            }
            answer = {"prints": coded, "packed": {}, "dtype": "float32"}
            server.replies["lightppo_fingerprints"] = answers({"results": [answer]})
        assert engine.differing_weights() == (
            ["lm_head.weight", "model.norm.weight"],
            ["model.embed_tokens.weight"],
        )
        fakes[1].replies["lightppo_fingerprints"] = failing()
        with pytest.raises(RolloutError, match="engine is dead"):
            engine.differing_weights()

    def test_a_part_of_a_weight_cannot_be_compared(self, build, fakes, llama):
        described = {"results": [fakes[0].described] * 2}
        for server in fakes:
            server.replies["lightppo_admit"] = answers(described)
        assert build().differing_weights() == ([], sorted(llama.state_dict()))


class TestCollective:
    @pytest.fixture
    def collective(self, build):
        def make(**options):
            options = {
                "vllm_server_sync": "collective",
                "vllm_server_sync_dir": None,
                "vllm_server_timeout": 60.0,
            } | options
            return build(**options)

        return make

    def test_every_push_brings_the_whole_model_to_every_server(self, collective, fakes, llama):
        engine = collective()
        with torch.no_grad():
            llama.lm_head.weight.add_(1.0)
        engine.sync_weights(llama)
        for server in fakes:
            first, second = server.loaded
            assert first.keys() == second.keys() == llama.state_dict().keys()
            assert all(
                torch.equal(second[name], value) for name, value in llama.state_dict().items()
            )
            assert torch.equal(first["lm_head.weight"] + 1.0, second["lm_head.weight"])
        assert not torch.distributed.is_initialized()

    def test_a_server_that_fails_is_lost_and_the_others_get_the_weights(
        self, collective, fakes, llama
    ):
        engine = collective()
        for step in ("/init_weight_transfer_engine", "/update_weights"):
            fakes[1].replies[step] = failing()
            engine.sync_weights(llama)
            assert list(engine.lost) == [1]
            assert f"{fakes[1].url}: {step}: HTTP 500: engine is dead" in engine.lost[1]
            assert len(fakes[0].loaded) == len(fakes[1].loaded) + 1
            fakes[1].replies.clear()
            engine.sync_weights(llama)
            assert engine.lost == {}
            fakes[0].loaded.pop()

    def test_one_that_is_away_is_not_waited_for(self, collective, fakes, llama):
        engine = collective()
        admit_failing(fakes[0])
        engine.sync_weights(llama)
        assert list(engine.lost) == [0]
        assert len(fakes[1].loaded) == 2

    @pytest.mark.parametrize("step", ["/init_weight_transfer_engine", "/update_weights"])
    def test_one_that_says_it_has_what_it_did_not_take_is_lost(
        self, collective, fakes, llama, step
    ):
        engine = collective(vllm_server_timeout=2.0)
        fakes[0].replies[step] = answers({})
        with torch.no_grad():
            # more than the kernel takes at once
            llama.lm_head.weight = torch.nn.Parameter(torch.zeros(30, 1 << 16))
        engine.sync_weights(llama)
        assert list(engine.lost) == [0]
        assert f"{fakes[0].url}: the weights did not get there: " in engine.lost[0]
        assert len(fakes[1].loaded) == 2

    def test_an_address_of_another_machine(self, collective):
        message = r"--vllm_server_sync_address 192\.0\.2\.1"
        with pytest.raises(RolloutError, match=message):
            collective(vllm_server_sync_address="192.0.2.1")


class TestStart:
    def test_a_server_that_is_not_there(self, build, fakes):
        url = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(RolloutError, match=rf"vLLM server {url}: .*waited 0 s: start it"):
            build(urls=[fakes[0].url, url])

    def test_a_script_ends_with_one_line(self, build, capsys):
        url = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(SystemExit) as caught:
            run(lambda: build(urls=[url]))
        assert caught.value.code == 1
        assert (
            f"error: --vllm_server_url: vLLM server {url}: /collective_rpc: Connection refused"
            in capsys.readouterr().err
        )

    def test_a_server_that_is_still_starting_is_waited_for(self, build, fakes, llama, monkeypatch):
        port = free_port()
        late = []
        timer = threading.Timer(
            0.5, lambda: late.append(FakeVLLM(architecture(llama.config), port))
        )
        timer.start()
        monkeypatch.setattr("lightppo.rollout.vllm.servers.START_SECONDS", 60.0)
        engine = build(urls=[f"http://127.0.0.1:{port}"])
        assert engine.version is not None
        timer.join()
        late[0].close()

    def test_another_model(self, build, fakes):
        fakes[1].described["architecture"] = fakes[1].described["architecture"] | {
            "vocab_size": 31,
            "hidden_size": 64,
        }
        with pytest.raises(RolloutError) as caught:
            build()
        message = str(caught.value)
        assert (
            f"vLLM server {fakes[1].url} serves some-model, which is not the model of --pretrain"
            in message
        )
        assert "vocab_size 31 for 30, hidden_size 64 for 32" in message

    def test_too_short_sequences(self, build, fakes):
        fakes[0].described["max_model_len"] = 29
        with pytest.raises(RolloutError, match="--max-model-len 30"):
            build()

    def test_another_type_is_warned_of(self, build, fakes, caplog):
        fakes[0].described["dtype"] = "bfloat16"
        build()
        assert f"{fakes[0].url} computes in bfloat16, the actor in float32" in caplog.text

    def test_one_that_was_started_anew_in_another_type_is_lost(self, build, fakes, llama, caplog):
        """Until the next push of weights, at which it may be right again."""
        engine = build()
        fakes[1].described["dtype"] = "bfloat16"
        engine.sync_weights(llama)
        lost = f"{fakes[1].url} computes in bfloat16, in float32 when the run started: start it with --dtype float32"
        assert list(engine.lost) == [1]
        assert lost in engine.lost[1]
        fakes[1].described["dtype"] = "float32"
        engine.sync_weights(llama)
        assert engine.lost == {}

    def test_the_key_comes_from_a_variable_and_is_never_shown(
        self, build, fakes, monkeypatch, caplog
    ):
        monkeypatch.setenv("MY_KEY", "s3cret")
        fakes[0].replies[GENERATE] = failing(b"s3cret is not my key")
        engine = build(vllm_server_api_key_env="MY_KEY", urls=[fakes[0].url])
        assert fakes[0].headers[-1]["Authorization"] == "Bearer s3cret"
        with pytest.raises(RolloutError) as caught:
            engine.generate([Prompt("a", [3])], GREEDY)
        assert "s3cret" not in str(caught.value) + caplog.text
        with pytest.raises(ValueError, match=r"--vllm_server_api_key_env: .*NO_KEY"):
            build(vllm_server_api_key_env="NO_KEY")


@pytest.mark.parametrize(
    ("limits", "raised", "connections"),
    [
        ((1024, 524_288), (1536, 524_288), 1024),
        ((256, resource.RLIM_INFINITY), (1536, resource.RLIM_INFINITY), 1024),
        ((1024, 1024), None, 512),
        ((256, 300), (300, 300), 150),
        ((20_000, 20_000), None, 1024),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, 1024),
    ],
)
def test_connections_leave_files_for_the_rest_of_the_process(
    monkeypatch, limits, raised, connections
):
    told = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: told.append(limit))
    assert vllm_server.connections_at_a_time() == connections
    assert told == ([] if raised is None else [raised])


class TestSleep:
    def test_servers_that_cannot_sleep_stay_awake(self, build, fakes, caplog):
        with caplog.at_level(logging.INFO, logger="lightppo"):
            engine = build()
        assert caplog.text.count("stay awake while the trainer trains") == 1
        engine.sleep()
        engine.wake()
        assert not {"/sleep?level=1", "/sleep?level=2", "/wake_up"} & set(fakes[0].routes())

    @pytest.mark.parametrize(("level", "loads"), [(1, 1), (2, 2)])
    def test_those_that_can_do_and_dropped_weights_are_pushed_anew(
        self, build, fakes, prompts, monkeypatch, level, loads
    ):
        monkeypatch.setattr(SLEEP_LEVEL, lambda config: level)
        for server in fakes:
            server.described["sleep_mode"] = True
        engine = build()
        engine.sleep()
        engine.sleep()
        engine.generate(prompts, GREEDY)
        for server in fakes:
            routes = [route.partition("?weights=")[0] for route in server.routes()]
            assert routes.count(f"/sleep?level={level}") == 1
            assert routes.count("/wake_up") == 1
            assert routes.index("/wake_up") < routes.index(GENERATE)
            assert len(server.loaded) == loads

    def test_not_if_told_so(self, build, fakes):
        for server in fakes:
            server.described["sleep_mode"] = True
        build(free_cache_engine=False).sleep()
        assert "/sleep?level=2" not in fakes[0].routes()

    def test_one_that_does_not_wake_is_lost(self, build, fakes, prompts, monkeypatch):
        monkeypatch.setattr(SLEEP_LEVEL, lambda config: 1)
        for server in fakes:
            server.described["sleep_mode"] = True
        engine = build()
        engine.sleep()
        fakes[0].replies["/wake_up"] = failing()
        assert len(engine.generate(prompts, GREEDY)) == len(prompts)
        assert completions(fakes[0]) == []

    def test_after_close_the_servers_go_on(self, build, fakes):
        engine = build()
        asked = len(fakes[0].requests)
        engine.close()
        engine.close()
        assert len(fakes[0].requests) == asked


class TestSharingOut:
    """Two servers that answer when the test lets them."""

    @pytest.fixture
    def gate(self, fakes):
        """Answers of the first server wait for the event; which were asked."""
        opened = threading.Event()
        fakes[0].replies[GENERATE] = lambda body, n: (opened.wait(60), None)[1]
        yield opened
        opened.set()

    def test_a_fast_server_takes_from_a_slow_one(self, build, fakes, prompts, gate):
        engine, seen = build(requests_per_server=1), []

        def on_finished(rollouts):
            seen.extend(rollouts)
            if len(seen) == len(prompts) - 1:  # the first server is still at its first request
                gate.set()

        engine.generate(prompts, GREEDY, on_finished=on_finished)
        assert [len(completions(server)) for server in fakes] == [1, len(prompts) - 1]

    def test_what_a_lost_server_leaves_late_is_taken_over(self, build, fakes, prompts, gate):
        engine, seen = build(requests_per_server=2), []
        fakes[0].replies[GENERATE] = lambda body, n: (gate.wait(60), (500, b"late"))[1]

        def on_finished(rollouts):
            seen.extend(rollouts)
            if len(seen) == len(prompts) - 2:
                gate.set()

        assert len(engine.generate(prompts, GREEDY, on_finished=on_finished)) == len(prompts)
        assert "late" in engine.lost[0]

    @pytest.mark.parametrize(
        ("of_all", "ranks"), [(2, 1), (7, 3), (3, 4)], ids=["alone", "a share", "one at least"]
    )
    def test_no_more_requests_in_flight_than_allowed(self, build, fakes, prompts, of_all, ranks):
        # of 7 rank 1 has 2, of 3 rank 3 has none
        strategy, expected = FakeStrategy(), {1: 2, 3: 2, 4: 1}[ranks]
        strategy.world_size, strategy.get_rank = ranks, lambda: ranks - 1
        lock, now, most = threading.Lock(), [0], [0]
        # as many at a time are reached: all must be inside to get on
        both = threading.Barrier(expected)

        def reply(body, n):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            both.wait(60)
            with lock:
                now[0] -= 1

        fakes[0].replies[GENERATE] = reply
        prompts = prompts[: len(prompts) // 2 * 2]
        build(strategy, urls=[fakes[0].url], requests_per_server=of_all).generate(prompts, GREEDY)
        assert most == [expected]

    @pytest.mark.parametrize(("connections", "each"), [(5, 2), (1, 1)])
    def test_servers_share_the_connections_of_a_process(
        self, build, fakes, prompts, monkeypatch, connections, each
    ):
        monkeypatch.setattr(vllm_server, "connections_at_a_time", lambda: connections)
        lock, now, most = threading.Lock(), [0, 0], [0, 0]
        # as many at a time are reached: all must be inside to get on
        everybody = threading.Barrier(2 * each)

        def reply_of(i):
            def reply(body, n):
                with lock:
                    now[i] += 1
                    most[i] = max(most[i], now[i])
                everybody.wait(60)
                with lock:
                    now[i] -= 1

            return reply

        for i, fake in enumerate(fakes):
            fake.replies[GENERATE] = reply_of(i)
        engine = build()
        engine.generate(prompts[: len(prompts) // 4 * 4], GREEDY)
        assert most == [each, each]
        engine.lose({1: "gone"})
        assert engine.requests_at_a_time() == connections  # of the server that is left

    def test_ranks_prefer_different_servers(self, build, fakes, prompts):
        strategy = FakeStrategy()
        engine = build(strategy)
        for rank in (0, 1):
            strategy.get_rank = lambda rank=rank: rank
            engine.generate(prompts[:1], GREEDY)
            assert [len(completions(server)) for server in fakes] == [1, rank]

    def test_an_error_ends_the_requests_that_wait(self, build, fakes, prompts):
        def fail(rollouts):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            build(requests_per_server=1).generate(prompts, GREEDY, on_finished=fail)
        assert sum(len(completions(server)) for server in fakes) < len(prompts)


class TestOneServer:
    ASKED = {"max_tokens": 3, "seed": 5, "logprobs": 0}

    @pytest.fixture
    def server(self, fakes):
        made = VLLMServer(fakes[0].url, (28, None), timeout=20.0, retries=0, key="s3cret-Key/+==")
        fakes[0].version = "v1"
        yield made
        made.close()

    def complete(self, server):
        return server.complete(self.ASKED, [4, 7], 30, "v1")

    def test_a_completion_is_asked_by_ids_and_read_by_ids(self, server, fakes):
        completion = self.complete(server)
        assert completion == (made_up_ids([4, 7], 5, 3, 30), [-0.5] * 3, "length")
        assert completions(fakes[0]) == [{"token_ids": [4, 7], "sampling_params": self.ASKED}]
        assert fakes[0].headers[-1]["Authorization"] == "Bearer s3cret-Key/+=="

    @pytest.mark.parametrize(
        ("status", "advice"),
        [
            (401, "set --vllm_server_api_key_env"),
            (403, "set --vllm_server_api_key_env"),
            (404, "start it by `lightppo serve-vllm`"),
            (422, "HTTP 422"),
        ],
    )
    def test_what_no_retry_mends_says_what_to_do(self, server, fakes, status, advice):
        for route, ask in {
            GENERATE: lambda: self.complete(server),
            "lightppo_admit": server.admit,
        }.items():
            fakes[0].replies[route] = answers(b"<html>s3cret-Key/+== is wrong", status)
            with pytest.raises(RefusedError) as caught:
                ask()
            message = str(caught.value)
            assert message.startswith(f"vLLM server {fakes[0].url}: ")
            assert f"HTTP {status}: <html>*** is wrong" in message
            assert advice in message

    GOOD = {
        "token_ids": [1],
        "finish_reason": "stop",
        "logprobs": {"content": [{"logprob": -1.0}]},
    }
    LIES = {
        "no_choices": {"text": "abc"},
        "no_choice": {"choices": []},
        "two_choices": {"choices": [GOOD, GOOD]},
        "no_ids": {"choices": [{"text": "abc", "finish_reason": "stop"}]},
        "no_log_probs": {"choices": [GOOD | {"logprobs": None}]},
        "aborted": {"choices": [GOOD | {"finish_reason": "abort"}]},
        "no_tokens": {"choices": [GOOD | {"token_ids": []}]},
        "too_many": {"choices": [GOOD | {"token_ids": [1] * 4}]},
        "unknown_id": {"choices": [GOOD | {"token_ids": [30]}]},
        "negative_id": {"choices": [GOOD | {"token_ids": [-1]}]},
        "true_as_id": {"choices": [GOOD | {"token_ids": [True]}]},
        "text_as_ids": {"choices": [GOOD | {"token_ids": "abc"}]},
        "fewer_log_probs": {"choices": [GOOD | {"token_ids": [1, 2]}]},
        "text_log_probs": {"choices": [GOOD | {"logprobs": {"content": ["x"]}}]},
    }

    @pytest.mark.parametrize("lie", LIES)
    def test_an_answer_that_cannot_be_used_loses_the_server(self, server, fakes, lie):
        fakes[0].replies[GENERATE] = answers(self.LIES[lie])
        with pytest.raises(RequestError, match=f"{server.name}: {GENERATE}"):
            self.complete(server)

    def test_log_probs_that_are_no_numbers_stay_so(self, server, fakes):
        choice = self.GOOD | {"logprobs": {"content": [{"logprob": -9999.0, "rank": None}]}}
        fakes[0].replies[GENERATE] = answers({"choices": [choice]})
        _, (log_prob,), _ = self.complete(server)
        assert math.isnan(log_prob)

    def test_a_silent_server_is_left_at_the_limit(self, fakes):
        never = threading.Event()
        fakes[0].replies[GENERATE] = lambda body, n: (never.wait(60), None)[1]
        server = VLLMServer(fakes[0].url, (None, None), timeout=1.0, retries=3)
        with pytest.raises(RequestError, match="not complete after 1 s"):
            self.complete(server)
        never.set()
        assert len(fakes[0].requests) == 1  # the wait was long enough

    def test_a_closed_port_is_unreachable(self):
        server = VLLMServer(f"http://127.0.0.1:{free_port()}", (None, None), timeout=5.0, retries=0)
        with pytest.raises(UnreachableError, match="/inference/v1/generate: Connection refused"):
            self.complete(server)

    @pytest.mark.parametrize(
        "answer", [{}, {"results": None}, {"results": []}, {"results": ["CPUWorker"]}, [1]]
    )
    def test_an_rpc_without_results(self, server, fakes, answer):
        fakes[0].replies["lightppo_admit"] = answers(answer)
        with pytest.raises(RequestError, match=f"{server.name}: /collective_rpc"):
            server.admit()

    def test_another_version_of_lightppo_is_refused(self, server, fakes):
        fakes[0].described["protocol"] = 0
        with pytest.raises(RefusedError, match=r"lightppo serve-vllm"):
            server.admit()

    def test_workers_that_differ_lose_the_server(self, server, fakes):
        other = fakes[0].described | {"max_model_len": 5}
        fakes[0].replies["lightppo_admit"] = answers({"results": [fakes[0].described, other]})
        with pytest.raises(RequestError, match=f"{server.name}: .*max_model_len"):
            server.admit()
