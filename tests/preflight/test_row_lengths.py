"""What must fit: prompts and responses the positions of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightppo.config import PPOConfig
from lightppo.config.supervised_options import COMMANDS
from lightppo.errors import ConfigError
from lightppo.preflight.row_lengths import check_longest_row, check_positions, positions_of


def test_prompt_and_response_must_fit_the_positions_of_the_model():
    config = PPOConfig.from_flat(pretrain="models/tiny", prompt_max_len=100, generate_max_len=29)
    check_positions(config, 129)
    check_positions(config, None)
    with pytest.raises(
        ConfigError, match=r"--prompt_max_len 100.*--generate_max_len 29.*129.*models/tiny.*128"
    ):
        check_positions(config, 128)


def test_the_longest_row_must_fit_the_positions_of_the_model():
    config = COMMANDS["sft"].from_flat(pretrain="models/tiny", max_len=200)
    check_longest_row(config, 128, 128)
    check_longest_row(config, 129, None)
    with pytest.raises(ConfigError, match=r"--max_len 200: .* 129 tokens.*models/tiny has 128"):
        check_longest_row(config, 129, 128)


@pytest.mark.parametrize(("kind", "positions"), [("GPT2Config", 17), ("MambaConfig", None)])
def test_limits_have_other_names_or_there_is_none(tmp_path: Path, kind: str, positions: int | None):
    import transformers

    limit = {} if positions is None else {"n_positions": positions}
    getattr(transformers, kind)(**limit).save_pretrained(tmp_path)
    assert positions_of(PPOConfig.from_flat(pretrain=str(tmp_path))) == positions
