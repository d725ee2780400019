"""The server engine over fake servers: sharing out, weight pushes, lost servers, errors on every rank."""

import json
import logging
import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.fake_vllm import FakeVLLM, made_up_ids, tensors_of
from support.ranks import free_port

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt
from lightppo.errors import RolloutError
from lightppo.models.actor import Actor
from lightppo.models.lora import LoraOptions, add_adapters
from lightppo.rollout.engine import RolloutEngine, SamplingParams
from lightppo.rollout.sampling import request_seed
from lightppo.rollout.server_worker import architecture
from lightppo.rollout.vllm_server import VLLMServerRolloutEngine
from lightppo.trainer.launch import run

GREEDY = SamplingParams(max_new_tokens=3, do_sample=False)


class OneRank:
    """What the engine asks of a strategy; ``others`` are what further ranks bring to an ``all_gather_object``."""

    def __init__(self, others=()):
        self.others = others

    def get_rank(self):
        return 0

    def is_rank_0(self):
        return True

    def broadcast_object(self, obj):
        return obj

    def all_gather_object(self, obj):
        return [obj, *self.others]


@pytest.fixture
def fakes(monkeypatch, llama):
    servers = [FakeVLLM(architecture(llama.config)) for _ in range(2)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def build(fakes, llama, tokenizer, tmp_path):
    def make(strategy=None, actor=llama, **options):
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
            vllm_server_start_timeout=options.pop("vllm_server_start_timeout", 0.0),
            prompt_max_len=20,
            generate_max_len=10,
            **options,
        )
        return VLLMServerRolloutEngine(config.resolved(), strategy or OneRank(), actor, tokenizer)

    return make


def completions(server):
    return [body for route, body in server.requests if route == "/v1/completions"]


def failing(text=b"engine is dead", after=0):
    return lambda body, n: (500, text) if n > after else None


class TestGenerate:
    def test_rollouts_in_the_order_of_the_prompts(self, build, prompts, tokenizer):
        engine = build()
        assert isinstance(engine, RolloutEngine)
        sampling = SamplingParams(max_new_tokens=3, n=2, seed=9)
        rollouts = engine.generate(prompts, sampling)
        assert [(r.prompt.index, r.sample_index) for r in rollouts] == [(p.index, i) for p in prompts for i in (0, 1)]
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
            max_new_tokens=4, min_new_tokens=2, temperature=0.7, top_p=0.9, top_k=5, stop=("ab",), stop_token_ids=(7,)
        )
        build(urls=[fakes[0].url]).generate(prompts[:1], sampling)
        (body,) = completions(fakes[0])
        expected = {"max_tokens": 4, "min_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": ["ab"]}
        assert expected.items() <= body.items()
        assert body["stop_token_ids"] == [1, 7]
        assert body["seed"] == request_seed(0, 100, 0)

    def test_servers_get_the_same_number_of_tokens(self, build, fakes, tokenizer):
        # with max_new_tokens 3 they cost 15, 9, 9, 6: longest first, each to the one with less: 15 + 6 and 9 + 9
        lengths = [12, 6, 6, 3]
        prompts = [Prompt("a" * n, tokenizer.encode("a" * n), index=i) for i, n in enumerate(lengths)]
        build(vllm_server_concurrency=4).generate(prompts, GREEDY)
        shares = [sorted(len(body["prompt"]) for body in completions(server)) for server in fakes]
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
        with pytest.raises(ValueError, match="first_token_temperature must be None"):
            engine.generate(prompts, SamplingParams(first_token_temperature=2.0, max_new_tokens=2))
        with pytest.raises(ValueError, match="it exceeds the engine's 30"):
            engine.generate(prompts, SamplingParams(max_new_tokens=19))

    def test_log_probs_that_are_no_numbers_are_an_error(self, build, fakes, prompts):
        def reply(body, n):
            choice = fakes[0].choice(body)
            choice["logprobs"]["token_logprobs"][1] = None
            return 200, json.dumps({"choices": [choice]}).encode()

        fakes[0].replies["/v1/completions"] = reply
        with pytest.raises(FloatingPointError, match="prompt 100, response token 1"):
            build(urls=[fakes[0].url]).generate(prompts[:1], GREEDY)


class TestLostServers:
    def test_its_requests_go_to_the_others(self, build, fakes, prompts, caplog):
        engine = build(vllm_server_concurrency=1)
        whole = [r.response_ids for r in engine.generate(prompts, GREEDY)]
        fakes[0].replies["/v1/completions"] = failing(after=len(completions(fakes[0])) + 1)
        with caplog.at_level(logging.WARNING):
            again = [r.response_ids for r in engine.generate(prompts, GREEDY)]
        assert again == whole
        assert f"vLLM server {fakes[0].url}: /v1/completions: HTTP 500: engine is dead; lost until" in caplog.text
        asked = len(completions(fakes[0]))
        engine.generate(prompts, GREEDY)  # it is not asked again
        assert len(completions(fakes[0])) == asked

    def test_it_comes_back_with_the_next_push(self, build, fakes, prompts, llama, caplog):
        engine = build()
        fakes[0].replies["/v1/completions"] = failing()
        engine.generate(prompts, GREEDY)
        assert list(engine.pool.lost) == [0]
        fakes[0].replies.clear()
        with caplog.at_level(logging.INFO, logger="lightppo"):
            engine.sync_weights(llama)
        assert engine.pool.lost == {}
        assert f"vLLM server {fakes[0].url} is used again" in caplog.text
        before = len(completions(fakes[0]))
        engine.generate(prompts, GREEDY)
        assert len(completions(fakes[0])) > before

    def test_a_push_that_fails_loses_a_server_but_not_the_run(self, build, fakes, prompts, llama):
        engine = build()
        fakes[1].replies["lightppo_load"] = failing()
        engine.sync_weights(llama)
        assert list(engine.pool.lost) == [1]
        before = len(completions(fakes[1]))
        assert len(engine.generate(prompts, GREEDY)) == len(prompts)
        assert len(completions(fakes[1])) == before
        # Still away at the next push: looked at once, and no weights are sent.
        fakes[1].replies["lightppo_describe"] = failing()
        loads = fakes[1].count("/pause?mode=abort")
        engine.sync_weights(llama)
        assert fakes[1].count("/pause?mode=abort") == loads

    def test_one_that_was_started_anew_is_not_asked(self, build, fakes, prompts, llama, caplog):
        engine = build()
        fakes[0].described["version"] = None
        engine.generate(prompts, GREEDY)
        assert completions(fakes[0]) == []
        assert f"vLLM server {fakes[0].url} has other weights than were pushed: was it started anew?" in caplog.text
        engine.sync_weights(llama)
        engine.generate(prompts, GREEDY)
        assert completions(fakes[0]) != []

    def test_one_that_was_started_anew_meanwhile_does_not_count(self, build, fakes, prompts):
        engine = build(vllm_server_concurrency=1)
        whole = [r.response_ids for r in engine.generate(prompts, GREEDY)]
        asked = len(completions(fakes[1]))

        def lie(body, n):
            fakes[0].described["version"] = None
            choice = fakes[0].choice(body) | {"token_ids": [3, 3, 3]}
            return 200, json.dumps({"choices": [choice]}).encode()

        fakes[0].replies["/v1/completions"] = lie
        assert [r.response_ids for r in engine.generate(prompts, GREEDY)] == whole
        assert len(completions(fakes[1])) - asked == len(prompts)

    def test_with_none_left_all_are_named(self, build, fakes, prompts, llama):
        engine = build()
        fakes[0].replies["/v1/completions"] = failing()
        fakes[1].replies["/v1/completions"] = failing(b"<html>Bad Gateway")
        with pytest.raises(RolloutError) as caught:
            engine.generate(prompts, GREEDY)
        message = str(caught.value)
        assert message.startswith("--vllm_server_url: none of the 2 servers is left: ")
        for server, reason in zip(fakes, ["engine is dead", "<html>Bad Gateway"]):
            assert f"vLLM server {server.url}: /v1/completions: HTTP 500: {reason}" in message
        assert "start them again by examples/serve_vllm.py" in message
        with pytest.raises(RolloutError, match="none of the 2 servers is left"):
            engine.generate(prompts, GREEDY)
        for server in fakes:
            server.replies["/collective_rpc"] = failing()
        with pytest.raises(RolloutError, match="none of the 2 servers is left"):
            engine.sync_weights(llama)

    def test_a_refusal_is_an_error_at_once(self, build, fakes, prompts):
        engine = build()
        fakes[0].replies["/v1/completions"] = lambda body, n: (401, b"who are you")
        with pytest.raises(RolloutError, match="HTTP 401: who are you; set --vllm_server_api_key_env"):
            engine.generate(prompts, GREEDY)

    def test_what_another_rank_met_ends_the_call_here_too(self, build, fakes, prompts):
        with pytest.raises(RolloutError, match="rank 1: ValueError: prompt 3 has no tokens"):
            build(OneRank([("ValueError: prompt 3 has no tokens", {})])).generate(prompts, GREEDY)

    def test_a_server_that_another_rank_lost_is_lost_here_too(self, build, fakes, prompts):
        engine = build(OneRank([(None, {1: "vLLM server x: gone"})]))
        engine.generate(prompts, GREEDY)
        assert engine.pool.lost == {1: "vLLM server x: gone"}


class TestWeights:
    def test_every_push_brings_the_whole_model_to_every_server(self, build, fakes, make_llama, tmp_path):
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
            assert all(torch.equal(second[name], value) for name, value in llama.state_dict().items())
            assert torch.equal(second["model.embed_tokens.weight"], second["lm_head.weight"])  # tied, under both names
            assert torch.equal(first["lm_head.weight"] + 1.0, second["lm_head.weight"])
        versions = [body["kwargs"]["version"] for _, body in fakes[0].requests if body.get("method") == "lightppo_load"]
        assert len(set(versions)) == 2
        assert engine.version == versions[-1]
        assert list(tmp_path.iterdir()) == []
        assert engine.last_stats["sync_seconds"] > 0

    def test_adapters_are_merged(self, build, fakes, llama, tmp_path_factory):
        pytest.importorskip("peft")
        folder = str(tmp_path_factory.mktemp("model"))
        llama.save_pretrained(folder)
        actor = Actor(folder)
        add_adapters(actor, LoraOptions(rank=2, alpha=4), seed=0)
        with torch.no_grad():
            for name, parameter in actor.hf_model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        build(actor=actor)
        pushed = fakes[0].loaded[0]
        assert pushed.keys() == llama.state_dict().keys()
        name = "model.layers.0.self_attn.q_proj.weight"
        lora_a = next(p for n, p in actor.hf_model.named_parameters() if "layers.0.self_attn.q_proj.lora_A" in n)
        # W + alpha / rank · B A, and all entries of B are 0.1
        expected = llama.state_dict()[name] + 2 * 0.1 * lora_a.sum(dim=0)
        assert torch.allclose(pushed[name], expected, atol=1e-6)

    def test_weights_in_several_files(self, build, fakes, llama, monkeypatch):
        monkeypatch.setattr("lightppo.rollout.weight_files.FILE_BYTES", 5000)
        build()
        files = next(b["kwargs"]["files"] for _, b in fakes[0].requests if b.get("method") == "lightppo_load")
        assert len(files) > 3
        assert fakes[0].loaded[0].keys() == llama.state_dict().keys()

    @pytest.mark.parametrize("where", ["shm", "auto"])
    def test_shared_memory_is_left_as_it_was(self, build, fakes, where):
        build(vllm_server_sync=where, vllm_server_sync_dir=None)
        (files,) = (b["kwargs"]["files"] for _, b in fakes[0].requests if b.get("method") == "lightppo_load")
        own = f"lightppo-weights-{os.getpid()}-"  # others may be at a push of theirs
        assert files[0].startswith(f"/dev/shm/{own}")
        assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(own)]

    def test_files_of_a_failed_push_are_removed(self, build, fakes, tmp_path):
        fakes[0].replies["lightppo_load"] = failing()
        with pytest.raises(RolloutError, match=f"vLLM server {fakes[0].url}: /collective_rpc: HTTP 500"):
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

    def test_weights_that_the_server_cannot_take(self, build, fakes):
        answer = json.dumps({"results": [{"error": "AssertionError: shape"}]}).encode()
        fakes[1].replies["lightppo_load"] = lambda body, n: (200, answer)
        with pytest.raises(RolloutError, match=f"{fakes[1].url} could not load the weights: AssertionError: shape"):
            build()

    def test_a_folder_that_does_not_exist(self, build, tmp_path):
        with pytest.raises(RolloutError, match=r"--vllm_server_sync disk: .*nowhere cannot be written: No such file"):
            build(vllm_server_sync_dir=str(tmp_path / "nowhere"))

    def test_no_room(self, build, monkeypatch):
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(RolloutError, match=r"the weights need 0\.0 GB, .* has 0\.0 GB free: make room"):
            build()

    def test_weights_that_differ_are_asked_for(self, build, fakes):
        engine = build()
        answers = [{"differing": ["a.weight"], "unknown": []}, {"differing": [], "unknown": ["b"]}]
        for server, answer in zip(fakes, answers):
            content = json.dumps({"results": [answer]}).encode()
            server.replies["lightppo_differing"] = lambda body, n, content=content: (200, content)
        assert engine.differing_weights() == (["a.weight"], ["b"])


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
            assert all(torch.equal(second[name], value) for name, value in llama.state_dict().items())
            assert torch.equal(first["lm_head.weight"] + 1.0, second["lm_head.weight"])
        assert not torch.distributed.is_initialized()

    def test_a_server_that_fails_is_lost_and_the_others_get_the_weights(self, collective, fakes, llama):
        engine = collective()
        fakes[1].replies["lightppo_load"] = failing()
        engine.sync_weights(llama)
        assert list(engine.pool.lost) == [1]
        assert f"{fakes[1].url}: /collective_rpc: HTTP 500: engine is dead" in engine.pool.lost[1]
        assert fakes[1].count("/collective_rpc") == 3 + 2  # a broadcast has one try
        assert len(fakes[0].loaded) == 2
        fakes[1].replies.clear()
        engine.sync_weights(llama)
        assert engine.pool.lost == {}

    def test_one_that_is_away_is_not_waited_for(self, collective, fakes, llama):
        engine = collective()
        fakes[0].replies["lightppo_describe"] = failing()
        engine.sync_weights(llama)
        assert list(engine.pool.lost) == [0]
        assert len(fakes[1].loaded) == 2

    def test_one_that_says_it_has_what_it_did_not_take_is_lost(self, collective, fakes, llama):
        engine = collective(vllm_server_timeout=20.0)
        fakes[0].replies["lightppo_load"] = lambda body, n: (
            200,
            json.dumps({"results": [{"version": body["kwargs"]["version"]}]}).encode(),
        )
        engine.sync_weights(llama)
        assert engine.pool.lost == {
            0: f"vLLM server {fakes[0].url}: its workers did not come for 5 s (0.25 of --vllm_server_timeout)"
        }

    def test_an_address_of_another_machine(self, collective):
        message = r"--vllm_server_sync_address 192\.0\.2\.1: this machine cannot listen there"
        with pytest.raises(RolloutError, match=message):
            collective(vllm_server_sync_address="192.0.2.1")

    def test_fingerprints_come_this_way_too(self, collective, fakes):
        engine = collective()
        seen = []

        def compare(body, n):
            seen.append(tensors_of(None, body["kwargs"]["broadcast"]))
            return 200, json.dumps({"results": [{"differing": ["a.weight"], "unknown": []}]}).encode()

        for server in fakes:
            server.replies["lightppo_differing"] = compare
        assert engine.differing_weights() == (["a.weight"], [])
        assert "lm_head.weight:1" in seen[0]
        assert seen[0].keys() == seen[1].keys()


class TestStart:
    def test_a_server_that_is_not_there(self, build, fakes):
        url = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(RolloutError, match=rf"vLLM server {url}: .*waited 0 s \(--vllm_server_start_timeout\)"):
            build(urls=[fakes[0].url, url])

    def test_a_script_ends_with_one_line(self, build, capsys):
        url = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(SystemExit) as caught:
            run(lambda: build(urls=[url]))
        assert caught.value.code == 1
        assert (
            f"error: --vllm_server_url: vLLM server {url}: /collective_rpc: ConnectionError" in capsys.readouterr().err
        )

    def test_a_server_that_is_still_starting_is_waited_for(self, build, fakes, llama):
        port = free_port()
        late = []
        timer = threading.Timer(0.5, lambda: late.append(FakeVLLM(architecture(llama.config), port)))
        timer.start()
        engine = build(urls=[f"http://127.0.0.1:{port}"], vllm_server_start_timeout=60.0)
        assert engine.version is not None
        timer.join()
        late[0].close()

    def test_another_model(self, build, fakes):
        fakes[1].described["architecture"] = fakes[1].described["architecture"] | {"vocab_size": 31, "hidden_size": 64}
        with pytest.raises(RolloutError) as caught:
            build()
        message = str(caught.value)
        assert f"vLLM server {fakes[1].url} serves some-model, which is not the model of --pretrain" in message
        assert "vocab_size 31 for 30, hidden_size 64 for 32" in message

    def test_too_short_sequences(self, build, fakes):
        fakes[0].described["max_model_len"] = 29
        with pytest.raises(RolloutError, match=r"takes 29 tokens, .* may have 30: start it with --max-model-len 30"):
            build()

    def test_another_type_is_warned_of(self, build, fakes, caplog):
        fakes[0].described["dtype"] = "bfloat16"
        build()
        assert f"{fakes[0].url} computes in bfloat16, the actor in float32" in caplog.text

    def test_the_key_comes_from_a_variable_and_is_never_shown(self, build, fakes, monkeypatch, caplog):
        monkeypatch.setenv("MY_KEY", "s3cret")
        fakes[0].replies["/v1/completions"] = failing(b"s3cret is not my key")
        engine = build(vllm_server_api_key_env="MY_KEY", urls=[fakes[0].url])
        assert fakes[0].headers["Authorization"] == "Bearer s3cret"
        with pytest.raises(RolloutError) as caught:
            engine.generate([Prompt("a", [3])], GREEDY)
        assert "s3cret" not in str(caught.value) + caplog.text
        with pytest.raises(ValueError, match="--vllm_server_api_key_env: environment variable NO_KEY is not set"):
            build(vllm_server_api_key_env="NO_KEY")


class TestSleep:
    def test_servers_that_cannot_sleep_stay_awake(self, build, fakes, caplog):
        with caplog.at_level(logging.INFO, logger="lightppo"):
            engine = build()
        assert caplog.text.count("stay awake while the trainer trains") == 1
        engine.sleep()
        engine.wake()
        assert not {"/sleep?level=1", "/sleep?level=2", "/wake_up"} & set(fakes[0].routes())

    @pytest.mark.parametrize(("level", "loads"), [(1, 1), (2, 2)])
    def test_those_that_can_do_and_dropped_weights_are_pushed_anew(self, build, fakes, prompts, level, loads):
        for server in fakes:
            server.described["sleep_mode"] = True
        engine = build(sleep_level=level)
        engine.sleep()
        engine.sleep()
        engine.generate(prompts, GREEDY)
        for server in fakes:
            routes = server.routes()
            assert routes.count(f"/sleep?level={level}") == 1
            assert routes.count("/wake_up") == 1
            assert routes.index("/wake_up") < routes.index("/v1/completions")
            assert len(server.loaded) == loads

    def test_not_if_told_so(self, build, fakes):
        for server in fakes:
            server.described["sleep_mode"] = True
        build(free_cache_engine=False).sleep()
        assert "/sleep?level=2" not in fakes[0].routes()

    def test_one_that_does_not_wake_is_lost(self, build, fakes, prompts):
        for server in fakes:
            server.described["sleep_mode"] = True
        engine = build(sleep_level=1)
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
