"""What test_weights_nccl.py looks at: pushes from a trainer to servers whose workers are threads, with everything real
but HTTP, the GPUs and NCCL's C functions. Writes what it saw as JSON."""

import hashlib
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
from support.fake_nccl import installed
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from lightppo.errors import RequestError
from lightppo.rollout.vllm import weights
from lightppo.rollout.vllm.weights import Broadcasts, NCCLGroup
from lightppo.rollout.vllm.worker import PushedWeights, Reload
from lightppo.user_code import in_daemon_thread

CPU = torch.device("cpu")
SECONDS = 60.0


class Scaled(QuantizeMethodBase):
    """As vLLM's quantisation at loading: a parameter more than the checkpoint has."""

    def create_weights(self, layer, *args, **kwargs):
        pass

    def apply(self, layer, *args, **kwargs):
        pass

    def process_weights_after_loading(self, layer):
        layer.weight_scale = torch.nn.Parameter(layer.weight.abs().max(), requires_grad=False)


class Model(torch.nn.Module):
    """Two linear layers, one of which vLLM would quantise."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            torch.nn.Linear(4, 3, bias=False),
            torch.nn.Linear(3, 2, bias=False),
        )
        self.second.quant_method = Scaled()
        record_metadata_for_reloading(self)
        self.second.quant_method.process_weights_after_loading(self.second)

    def load_weights(self, pairs):
        parameters, loaded = dict(self.named_parameters(remove_duplicate=False)), set()
        for name, weight in pairs:
            getattr(parameters[name], "weight_loader", default_weight_loader)(
                parameters[name], weight
            )
            loaded.add(name)
        return loaded


def config():
    text = SimpleNamespace(tie_word_embeddings=False)
    text.get_text_config = lambda decoder=False: text
    return SimpleNamespace(hf_config=text, dtype=torch.float32)


class Server:
    """Workers of one server; ``silent`` ones never come."""

    def __init__(self, name, workers=1):
        self.gpus, self.silent = [f"{name}{i}" for i in range(workers)], threading.Event()
        places = [
            SimpleNamespace(parallel_config=SimpleNamespace(rank=r), model_config=config())
            for r in range(workers)
        ]
        self.models = [Model() for _ in places]
        self.engines = [
            PushedWeights(None, place, CPU, model) for place, model in zip(places, self.models)
        ]

    def push_step(self, route, body=None):
        if self.silent.is_set() and route == "/update_weights":
            time.sleep(SECONDS)
        step = {
            "/init_weight_transfer_engine": lambda e: e.init_transfer_engine(
                e.parse_init_info(body["init_info"])
            ),
            "/start_weight_update": PushedWeights.start_weight_update,
            "/update_weights": lambda e: e.update_weights(body["update_info"]),
            "/finish_weight_update": PushedWeights.finish_weight_update,
        }[route]
        with ThreadPoolExecutor(len(self.engines)) as threads:
            list(threads.map(step, self.engines))
        if problems := [engine.problem for engine in self.engines if engine.problem]:
            raise RequestError(problems[0])

    def take(self, told, of_adapter):
        self.push_step("/update_weights", {"update_info": told})

    def has(self, wanted):
        """Whether every worker has these weights, and the scale that belongs to them."""
        state = {**wanted, "second.weight_scale": wanted["second.weight"].abs().max()}
        return all(
            torch.equal(dict(m.named_parameters())[n], w)
            for m in self.models
            for n, w in state.items()
        )


def some_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator)
        for name, p in Model().named_parameters()
        if "scale" not in name
    }


def push(way, servers, pushed):
    """One bucket per weight, to all servers at once, as the engine does; why each failed."""
    problems, buckets = {}, [way.pack([pair]) for pair in pushed.items()]

    def one(server):
        try:
            way.open(server)
            server.push_step("/start_weight_update")
            for bucket in buckets:
                way.send(server, bucket)
            server.push_step("/finish_weight_update")
        except (RuntimeError, TimeoutError) as error:
            problems[server] = f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(servers)) as threads:
        list(threads.map(one, servers))
    way.close()
    return [problems.get(server) for server in servers]


def pushes(nccl):
    """Two pushes to two servers."""
    way, servers, seen = Broadcasts("no address", SECONDS, CPU), [Server("a", 2), Server("b")], []
    for seed in (1, 2):
        wanted = some_weights(seed)
        seen.append([push(way, servers, wanted), [server.has(wanted) for server in servers]])
    return {"pushes": seen, "ids": len(nccl.communicators), "streams": len(set(nccl.streams))}


def failures(nccl):
    """Of one server, beside one that gets its weights all the same."""
    seen, wanted = {}, some_weights(3)
    for name in ("unloadable", "silent"):
        way, failing, other = (
            Broadcasts("no address", 3.0 if name == "silent" else SECONDS, CPU),
            Server("a", 2),
            Server("b"),
        )
        if name == "silent":
            failing.silent.set()
            failing.push_step = limited(failing.push_step)
        else:
            failing.models[1].load_weights = mock.Mock(side_effect=KeyError("of_another_model"))
        start = time.monotonic()
        problems = push(way, [failing, other], wanted)
        seen[name] = [problems, other.has(wanted), time.monotonic() - start < SECONDS / 2]
    seen["left"] = sum(not m.aborted for m in nccl.members.values() if m.rank == 0)
    return seen


def limited(push_step):
    """As over HTTP, which gives up; the request goes on."""

    def limited_step(route, body=None):
        return in_daemon_thread(push_step, route, body).result(3.0)

    return limited_step


def some_tensors():
    floats = torch.randn(7, 3, generator=torch.Generator().manual_seed(3))
    for name in ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2"):
        yield name, floats.to(getattr(torch, name))
    yield from {
        "transposed": floats.T,
        "scalar": torch.tensor(5),
        "bool": floats > 0,
        "empty": torch.empty(0, 4),
    }.items()


def digests(tensors):
    contents = {
        name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors
    }
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def types():
    """All types and shapes, as they are sent and as they come."""
    came = []

    class Listener(Server):
        def push_step(self, route, body=None):
            if route == "/init_weight_transfer_engine":
                self.group = NCCLGroup(body["init_info"], 1, CPU)
            else:
                came.append(digests(self.group.receive(body["update_info"])))

    way, server = Broadcasts("no address", SECONDS, CPU), Listener("a")
    way.open(server)
    way.send(server, way.pack(list(some_tensors())))
    way.close()
    return [digests(some_tensors()), *came]


def without_pynccl():
    way, server = Broadcasts("no address", 3.0, CPU), Server("a")
    with mock.patch.dict(os.environ, VLLM_DISABLE_PYNCCL="1"):
        return push(way, [server], some_weights(4))


def missing_weights():
    """What a reload says got nothing: not what vLLM computes itself."""
    seen = []
    for leave_out in (None, "first.weight"):
        reload = Reload(Model(), config())
        reload.load((name, weight) for name, weight in some_weights(5).items() if name != leave_out)
        seen.append(reload.finish())
    return seen


def missing_of_two_names():
    """As of shared experts, which vLLM keeps in two places and loads by the later name."""
    model = Model()
    model.again = model.first
    reload = Reload(model, config())
    reload.load(
        (name.replace("first", "again"), weight) for name, weight in some_weights(5).items()
    )
    return reload.finish()


def missing_of_a_mixture():
    """As vLLM before 0.32 says which weights it has loaded: without the module that has a mixture's experts."""

    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.Module()
            self.experts.routed_experts = Model()

        def load_weights(self, pairs):
            loaded = self.experts.routed_experts.load_weights(pairs)
            return {f"experts.{name}" for name in loaded}

    seen = []
    for leave_out in (None, "first.weight"):
        reload = Reload(Mixture(), config())
        reload.load((name, weight) for name, weight in some_weights(5).items() if name != leave_out)
        seen.append(reload.finish())
    return seen


def main(path):
    with ExitStack() as stack:
        with mock.patch.dict(os.environ, {"VLLM_NCCL_SO_PATH": "/no/such/libnccl.so"}):
            try:
                NCCLGroup.new_id()
            except RuntimeError as error:
                seen = {"without NCCL": str(error)}
        nccl = installed(stack)
        stack.enter_context(mock.patch.object(weights, "gpu_of", return_value="of the trainer"))
        seen |= pushes(nccl) | {
            "failures": failures(nccl),
            "types": types(),
            "disabled": without_pynccl(),
        }
        seen["missing"] = missing_weights()
        seen["missing of two names"] = missing_of_two_names()
        seen["missing of a mixture"] = missing_of_a_mixture()
    with open(path, "w") as file:
        json.dump(seen, file)


if __name__ == "__main__":
    main(sys.argv[1])
