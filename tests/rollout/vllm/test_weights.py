"""What engines are pushed: the names, shapes and values of the checkpoint; and how torch.distributed carries them."""

import hashlib
import multiprocessing
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.broadcasts import worker
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightppo.errors import RolloutError
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import LoraOptions, add_adapters
from lightppo.models.adapters.quantised import quantise
from lightppo.models.heads import head_names
from lightppo.rollout.vllm import weights
from lightppo.rollout.vllm.weights import (
    Broadcasts,
    GlooGroup,
    adapter_weights,
    buckets,
    differing_weights,
    full_weights,
    gpu_of,
    trainer_fingerprints,
)

CPU = torch.device("cpu")
SECONDS = 60.0


def tiny_mixtral():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return MixtralForCausalLM(MixtralConfig(vocab_size=20, **sizes, **heads))


@pytest.mark.parametrize("bucket_numel", [1, 3000, 1 << 26])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_as_the_checkpoint_on_disk(tmp_path, make_llama, family, bucket_numel, monkeypatch):
    """Experts are one tensor in memory and one each on disk."""
    monkeypatch.setattr(weights, "GATHERED_NUMEL", bucket_numel)
    model = make_llama() if family == "llama" else tiny_mixtral()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    pushed = list(full_weights(model))
    assert len(pushed) == len(saved)
    for name, tensor in pushed:
        assert torch.equal(tensor, saved[name]), name


def test_tied_weights_come_under_both_names(make_llama):
    pushed = dict(full_weights(make_llama(tie_word_embeddings=True)))
    assert torch.equal(pushed["lm_head.weight"], pushed["model.embed_tokens.weight"])


def test_weights_in_4_bits_without_adapters_are_refused():
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes))
    quantise(model, head_names(model))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM .*4 bits"):
        list(full_weights(model))


def test_order_is_that_of_the_modules(make_llama, monkeypatch):
    monkeypatch.setattr(weights, "GATHERED_NUMEL", 1000)
    names = [name for name, _ in full_weights(make_llama())]
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers)


def test_differing_weights_are_named(make_llama):
    """An engine that fuses q, k and v, and pads its vocabulary."""
    weights = {name: tensor.clone() for name, tensor in full_weights(make_llama())}
    trainer = trainer_fingerprints(weights.items())
    attention = "model.layers.0.self_attn"
    weights[f"{attention}.k_proj.weight"][2, 3] += 1
    weights["model.norm.weight"][0] = float("nan")
    engine = {name: prints[0] for name, prints in trainer_fingerprints(weights.items()).items()}
    parts = [engine.pop(f"{attention}.{part}_proj.weight") for part in "qkv"]
    engine[f"{attention}.qkv_proj.weight"] = torch.cat(parts)
    engine["lm_head.weight"] = torch.cat([engine["lm_head.weight"], torch.ones(2)])
    del engine["model.layers.1.mlp.up_proj.weight"]
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    differing, unknown = differing_weights(trainer, engine, packed)
    assert sorted(differing) == [f"{attention}.k_proj.weight", "model.norm.weight"]
    assert unknown == ["model.layers.1.mlp.up_proj.weight"]


def test_rounding_in_bf16_is_no_difference():
    """A head of a usual size, whose outputs the engine rounds; one row that is another one is still found."""
    head = (
        torch.randn(32_000, 896, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    )
    trainer = trainer_fingerprints([("lm_head.weight", head), ("other.weight", head)])
    wrong = head.clone()
    wrong[7] = head[8]

    def engine_print(weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(weights.probe_vector(896).bfloat16()[None], weight)[
            0
        ].float()

    engine = {"lm_head.weight": engine_print(head), "other.weight": engine_print(wrong)}
    assert differing_weights(trainer, engine, {}, "bfloat16") == (["other.weight"], [])


def test_an_actor_is_looked_into(make_llama):
    model = make_llama()
    assert [n for n, _ in full_weights(Wrapped(model))] == [n for n, _ in full_weights(model)]


class Wrapped(torch.nn.Module):
    engine_attribute = "model"

    def __init__(self, model):
        super().__init__()
        self.model = model


def test_buckets(monkeypatch):
    monkeypatch.setattr(weights, "BUCKET_BYTES", 40)
    tensors = [(str(i), torch.zeros(n)) for i, n in enumerate([4, 6, 1, 100, 1])]  # of 4 bytes each
    assert [[name for name, _ in bucket] for bucket in buckets(tensors)] == [
        ["0", "1"],
        ["2"],
        ["3"],
        ["4"],
    ]
    assert list(buckets([])) == []


def some_tensors():
    """Of all types and odd shapes, and one that is more than the kernel takes at once."""
    generator = torch.Generator().manual_seed(3)
    floats = torch.randn(7, 3, generator=generator)
    yield "float32", floats
    for name in ("bfloat16", "float16", "float64", "float8_e4m3fn"):
        yield name, floats.to(getattr(torch, name))
    yield "transposed", floats.T
    yield "scalar", torch.tensor(5)
    yield "bool", floats > 0
    yield "empty", torch.empty(0, 4)
    yield "odd bytes", torch.arange(13, dtype=torch.uint8)
    yield "large", torch.randn(4000, 1000, generator=generator)


def digests(tensors):
    contents = {
        name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors
    }
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def test_an_adapter_of_rank_16_is_less_than_a_hundredth_of_a_model_of_8_billion_weights():
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    with torch.device("meta"):
        actor = Actor(LlamaForCausalLM(LlamaConfig(**shape, **heads)))
    add_adapters(actor, LoraOptions(rank=16))
    merged = sum(tensor.nbytes for _, tensor in full_weights(actor))
    alone = sum(tensor.nbytes for _, tensor in adapter_weights(actor))
    assert merged == 4 * 8_030_261_248
    # rank 16 × (inputs + outputs) of q, k, v, o, gate, up, down; 32 layers
    each = 2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert alone == 4 * 16 * 32 * each
    assert alone < 0.01 * merged


class Server:
    """A server whose workers are threads here; ``change`` is what they get in place of what they should know."""

    def __init__(self, workers=1, **change):
        self.gpus, self.change, self.seen, self.info = [None] * workers, change, [], None

    def push_step(self, route, body):
        with ThreadPoolExecutor(len(self.gpus)) as threads:
            if route == "/init_weight_transfer_engine":
                self.info = body["init_info"] | self.change
                ranks = range(1, len(self.gpus) + 1)
                self.groups = list(threads.map(lambda rank: GlooGroup.join(self.info, rank), ranks))
            else:
                self.seen += threads.map(
                    lambda group: digests(group.receive(body["update_info"])), self.groups
                )

    def take(self, told, of_adapter):
        self.push_step("/update_weights", {"update_info": told})


def listening():
    return {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


@pytest.fixture
def way():
    made = Broadcasts("127.0.0.1", SECONDS, CPU)
    yield made
    made.close()


def test_two_servers_get_the_same_in_every_push(way):
    servers, before, expected = [Server(2), Server()], listening(), digests(some_tensors())
    for _ in range(2):
        for server in servers:
            way.open(server)
        assert {address.ip for address in listening() - before} == {"127.0.0.1"}
        packed = way.pack(list(some_tensors()))
        for server in servers:
            way.send(server, packed)
            assert server.seen == [expected] * len(server.gpus)
            server.seen.clear()
        way.close()
        for server in servers:
            server.groups.clear()
    assert not distributed.is_initialized()
    deadline = time.monotonic() + SECONDS
    while listening() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert listening() <= before


def test_every_push_has_a_key_and_a_port_of_its_own(way):
    servers = [Server(), Server()]
    for server in servers:
        way.open(server)
    first, second = (server.info for server in servers)
    assert first["key"] != second["key"]
    assert first["port"] != second["port"]
    assert len(first["key"]) == 32


def test_a_worker_without_the_key_gets_nothing(way):
    with pytest.raises(RuntimeError, match="member 0 of the group"):
        way.open(Server(key="another"))


def test_a_trainer_without_the_key_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listens = {"master_listen_fd": os.dup(listener.fileno()), "use_libuv": False}
        store = distributed.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, **listens
        )
    store.set("0", "0" * 64)
    with pytest.raises(RuntimeError, match="member 0 of the group"):
        GlooGroup.join(
            {"address": "127.0.0.1", "port": port, "key": "k", "size": 2, "seconds": SECONDS}, 1
        )


def test_an_address_of_another_machine():
    with pytest.raises(RolloutError, match=r"--vllm_server_sync_address 192\.0\.2\.1"):
        Broadcasts("192.0.2.1", SECONDS, CPU).open(Server())


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RuntimeError):
        GlooGroup.join(
            {"address": "127.0.0.1", "port": port, "key": "k", "size": 2, "seconds": 0.5}, 1
        )


class TestKilled:
    @pytest.fixture
    def workers(self):
        """Two workers of one server in processes of their own."""
        context, workers = multiprocessing.get_context("spawn"), []
        for rank in (1, 2):
            ours, theirs = context.Pipe()
            process = context.Process(target=worker, args=(theirs, rank), daemon=True)
            process.start()
            workers.append(SimpleNamespace(process=process, say=ours.send, hear=ours.recv))
        assert [w.hear() for w in workers] == ["ready"] * 2
        yield workers
        for w in workers:
            w.process.kill()
            w.process.join(30)

    @pytest.fixture
    def server(self, workers, way):
        def push_step(route, body):
            for w in workers:
                w.say(body["init_info"])
            assert [w.hear() for w in workers] == ["joined"] * 2

        made = Server(2)
        made.push_step = push_step
        way.open(made)
        made.push_step = lambda route, body: [w.say("go") for w in workers if w.process.is_alive()]
        return made

    def test_one_of_two_workers_ends_the_push_for_both(self, workers, server, way):
        killed, other = workers
        killed.process.kill()
        killed.process.join(30)
        with pytest.raises(RuntimeError):
            way.send(server, [("a", torch.ones(1 << 24, dtype=torch.uint8))])
        way.close()
        assert other.hear().startswith("error: ")

    def test_a_trainer_that_is_gone_ends_the_wait(self, workers, server, way):
        way.close()
        server.push_step("/update_weights", {})
        assert all(w.hear().startswith("error: ") for w in workers)


def test_nccl_needs_a_gpu_of_its_own_for_everybody_and_vllm(monkeypatch):
    """vLLM's own group; here none of it is there, so that only the choice is looked at."""
    made = []

    class Noted:
        new_id = staticmethod(lambda: "the id")
        close = list

        def __init__(self, *of):
            made.append(of)

    monkeypatch.setattr(weights, "NCCLGroup", Noted)
    server, told, way = Server(), [], Broadcasts("127.0.0.1", 0.2, CPU)
    server.push_step = lambda route, body: told.append(body["init_info"]["transport"])

    def transport(own, theirs, has_vllm=True):
        monkeypatch.setattr(weights, "gpu_of", lambda device: own)
        monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: has_vllm or None)
        server.gpus = theirs
        with suppress(RuntimeError, TimeoutError):  # gloo: the workers do not come
            way.open(server)
        return told[-1]

    assert transport("a", ["b", "c"]) == "nccl"
    ((told_to_all, rank, device),) = made
    assert (told_to_all["id"], told_to_all["size"], rank, device) == ("the id", 3, 0, CPU)
    assert transport("a", ["b", "a"]) == "gloo"
    assert transport("a", ["b", None]) == "gloo"
    assert transport(None, ["b"]) == "gloo"
    assert transport("a", ["b"], has_vllm=False) == "gloo"
    assert gpu_of(CPU) is None
