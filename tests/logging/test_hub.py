"""Models on the hub: what is uploaded, its card, and what is said where that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard, close_session, constants
from safetensors.torch import load
from support.hub import TOKEN, running_hub
from support.runs import fitted, logged, whole_weights

from lightppo.__main__ import main
from lightppo.errors import ConfigError
from lightppo.logging.hub import HubError, model_card

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def hub(monkeypatch):
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        close_session()  # it knew that tests are offline
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
    close_session()


def test_a_run_leaves_its_model_there_and_nothing_else(make_config, hub):
    run = fitted(make_config(push_to_hub="me/sums", total_training_steps=2))
    assert hub.repositories == {"me/sums": True}
    assert sorted(hub.files) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    pushed, trained = load(hub.files["model.safetensors"]), whole_weights(run)
    assert all((trained[name] == tensor).all() for name, tensor in pushed.items())
    card = ModelCard(hub.files["README.md"].decode())
    assert card.data.library_name == "transformers"
    assert "base_model" not in card.data.to_dict()  # a folder of this machine
    assert '.from_pretrained("me/sums")' in card.text
    assert card.text.lstrip().startswith("# sums\n")
    assert "with advantages of `gae`" in card.text
    assert "rollout/reward" in card.text
    assert TOKEN not in card.text


def test_what_will_fail_fails_before_the_first_step(make_config, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    config = make_config(push_to_hub="me/sums")
    with pytest.raises(HubError, match=r"^me/sums: .*401") as caught:
        fitted(config)
    assert str(caught.value).endswith("The token must be allowed to write")
    assert "somebody" not in str(caught.value)
    assert not [row for row in logged(config) if "train/policy_loss" in row]


def test_a_run_whose_upload_fails_says_how_to_repeat_it(make_config, hub, capsys):
    config = make_config(push_to_hub="me/sums", hub_private=False, total_training_steps=1)
    hub.refused = "/commit/"
    with pytest.raises(HubError) as caught:
        fitted(config)
    save_path = config.checkpoint.save_path
    assert str(caught.value).endswith(f"in {save_path}: lightppo push {save_path} me/sums")
    hub.refused = None
    main(["push", save_path, "me/sums", "--public", "--message", "Again"])
    assert hub.messages == ["Again"]
    assert hub.repositories == {"me/sums": False}
    assert f"{hub.url}/me/sums/commit/" in capsys.readouterr().out
    assert "model.safetensors" in hub.files


def test_the_base_stands_in_the_card_where_it_is_a_name_of_the_hub(make_config, hub):
    run = fitted(make_config(total_training_steps=1))
    folder = run.config.checkpoint.save_path
    options = Path(folder, "run_config.resolved.yaml")
    options.write_text(options.read_text().replace(run.config.model.pretrain, "Qwen/Qwen3-0.6B"))
    assert ModelCard(model_card(Path(folder), "me/x")).data.base_model == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("damage", ["no model", "cut"])
def test_what_is_no_whole_model_is_not_uploaded(make_config, hub, tmp_path, capsys, damage):
    folder = tmp_path / "folder"
    folder.mkdir()
    message = "has no model of lightppo"
    if damage == "cut":
        fitted(make_config(total_training_steps=1, save_path=str(folder)))
        (folder / "config.json").write_text("{}")
        message = "is damaged: config.json"
    with pytest.raises(SystemExit) as stopped:
        main(["push", str(folder), "me/sums"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert hub.files == {}


def test_a_name_without_an_owner_is_refused(make_config):
    with pytest.raises(ConfigError, match="--push_to_hub 'sums': give OWNER/NAME"):
        make_config(push_to_hub="sums").validate()
