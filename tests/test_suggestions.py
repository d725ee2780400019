"""What the core says of a name that is not there, with and without a plugin that knows more."""

from lightppo import suggestions
from lightppo.config import PPOConfig


def test_similar_names_are_named_where_no_plugin_knows_more(monkeypatch):
    assert suggestions.nearest("epochs", ["--x"], "flag") == ""
    monkeypatch.setattr(suggestions, "ASKED", {})
    found = suggestions.nearest("train_batchsize", ["train_batch_size", "gamma"])
    assert found == " (did you mean 'train_batch_size'?)"
    one = PPOConfig.sections()["loss"].options()["policy_loss"]
    assert suggestions.wrong_value(one, "x", ValueError("unknown")) == ""
