"""Files of torch.save: what is in them is never run, and a damaged one is named in one line."""

from __future__ import annotations

import ast
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from support.hostile import Payload, poison
from support.tiny import save_causal_lm

from lightppo import tensor_file
from lightppo.errors import CheckpointError

PACKAGE = Path(__file__).parents[1] / "lightppo"
# Between processes of one user, over pipes and torch's collectives: what comes was made by this program.
OWN_PROCESSES = {
    "processes/fork_server.py",  # a worker, what the trainer sends; its answers are JSON
    "distributed/distributed.py",
}


class Own:
    """A class that no file may hold unless the reader lists it."""

    def __init__(self) -> None:
        self.scale = 3


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_payload_does_not_run(tmp_path, mapped, zipped):
    file, mark = tmp_path / "a.pt", tmp_path / "ran"
    torch.save(
        {"x": torch.ones(2), "more": Payload(mark)}, file, _use_new_zipfile_serialization=zipped
    )
    with pytest.raises(CheckpointError) as error:
        tensor_file.read(file, mapped=mapped)
    assert str(error.value).startswith(
        f"{file} is not loaded: it names posix.system, which is no tensor"
    )
    assert "\n" not in str(error.value)
    assert not mark.exists()


def test_a_plain_pickle_does_not_run(tmp_path):
    file, mark = tmp_path / "a.pt", tmp_path / "ran"
    for protocol, reason in ((2, r"is not loaded: it names posix\.system"), (4, "cannot be read")):
        file.write_bytes(pickle.dumps(Payload(mark), protocol=protocol))
        with pytest.raises(CheckpointError, match=rf"a\.pt {reason}"):
            tensor_file.read(file)
    assert not mark.exists()


def test_only_listed_classes(tmp_path):
    file = tmp_path / "a.pt"
    torch.save({"x": torch.ones(2), "own": Own()}, file)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"it names {__name__}\.Own, which is no tensor"):
            tensor_file.read(file)
        assert tensor_file.read(file, [Own])["own"].scale == 3
    with tensor_file.others_read_safely([Own]):
        tensor_file.read(file, [Own])  # does not take away what is allowed around it
        assert torch.load(file)["own"].scale == 3


@pytest.mark.parametrize(
    "variable", ["TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]
)
def test_a_library_that_asks_for_all_does_not_get_it(tmp_path, monkeypatch, variable):
    file, mark = tmp_path / "a.pt", tmp_path / "ran"
    torch.save({"more": Payload(mark)}, file)
    monkeypatch.setenv(variable, "1")
    with tensor_file.others_read_safely(), pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=False)
    assert not mark.exists()
    assert os.environ[variable] == "1"


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "EOFError"), (b"text", "cannot be read"), (None, "is missing")]
)
def test_a_file_that_is_none_is_named_in_one_line(tmp_path, content, reason):
    file = tmp_path / "a.pt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as error:
        tensor_file.read(file, mapped=True)
    assert str(error.value).startswith(f"{file} ")
    assert "\n" not in str(error.value)


def test_nothing_else_unpickles():
    """``torch.load`` and ``pickle.load`` stand in one file; but for pipes between processes of one program."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name) and (name := ast.unparse(node)) in (
                *("torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler"),
                *(
                    "torch.jit.load",
                    "joblib.load",
                    "pandas.read_pickle",
                    "numpy.load",
                    "np.load",
                    "dill.load",
                ),
            ):
                found.add((path.relative_to(PACKAGE).as_posix(), name))
    assert found == {("tensor_file.py", "torch.load")} | {
        (name, "pickle.loads") for name in OWN_PROCESSES
    }


def test_a_model_in_a_pickle_does_not_run(tmp_path):
    """``--pretrain`` and ``load_model`` with ``pytorch_model.bin``, whole and in shards."""
    from lightppo.checkpoint.engine_state import load_model
    from lightppo.errors import UserError
    from lightppo.models.critic import Critic
    from lightppo.models.loading import load_causal_lm

    folder, mark = Path(save_causal_lm(tmp_path / "model")), tmp_path / "ran"
    model = load_causal_lm(str(folder))
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "pytorch_model-00001-of-00001.bin"):
        torch.save(model.state_dict(), folder / name)
        load_causal_lm(str(folder))
        poison(folder / name, mark)
        readers = (
            lambda: load_causal_lm(str(folder)),
            lambda: Critic(str(folder)),
            lambda: load_model(None, model, folder),
        )
        for reader in readers:
            with pytest.raises(UserError) as error:
                reader()
            assert str(folder) in str(error.value)
            assert "is not loaded: it names posix.system, which is no tensor" in str(error.value)
            assert "\n" not in str(error.value)
        (folder / name).unlink()
        shard = "pytorch_model-00001-of-00001.bin"
        index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), shard)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert not mark.exists()
