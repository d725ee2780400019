"""The PTX loss: batches of any dataloader, and the text of ``--pretrain_data``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.tiny import write_jsonl
from torch.utils.data import DataLoader

from lightppo import PPOTrainer
from lightppo.algorithms.losses import IGNORE_INDEX
from lightppo.config import PPOConfig
from lightppo.distributed import distributed
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.distributed.distributed import RankSampler
from lightppo.models.loading import get_tokenizer
from lightppo.trainer.pretraining import (
    Pretraining,
    as_lm_batch,
    build_pretrain,
    endless,
)

pytestmark = pytest.mark.usefixtures("world")
CPU = torch.device("cpu")

IDS, MASK = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
UNPADDED = [[5, 6, 7], [8, 9, IGNORE_INDEX]]


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": IDS, "attention_mask": MASK},
        ([2, 2], IDS, MASK),
        [[2, 2], IDS, MASK, {"input": ["a", "b"]}],
        ([2, 2], IDS[:, None], MASK[:, None]),  # (B, 1, S)
    ],
    ids=["mapping", "tuple", "list", "extra dimension"],
)
def test_language_model_batches_in_all_forms(batch):
    found = as_lm_batch(batch, CPU)
    assert found["input_ids"].tolist() == IDS.tolist()
    assert found["attention_mask"].tolist() == MASK.tolist()
    assert found["labels"].tolist() == UNPADDED


def test_labels_of_the_dataset_win():
    labels = torch.tensor([[-100, 6, 7], [-100, 9, -100]])
    found = as_lm_batch({"input_ids": IDS, "attention_mask": MASK, "labels": labels}, CPU)
    assert found["labels"].tolist() == labels.tolist()


def test_language_model_batches_go_to_the_device():
    found = as_lm_batch({"input_ids": IDS, "attention_mask": MASK}, torch.device("meta"))
    assert {t.device.type for t in found.values()} == {"meta"}


def test_endless_goes_round_and_reshuffles():
    sampler = RankSampler(range(4), 1, 0, seed=3)
    rounds = list(itertools.islice(endless(DataLoader(range(4), batch_size=2, sampler=sampler)), 6))
    orders = [torch.cat(rounds[i : i + 2]).tolist() for i in (0, 2, 4)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_endless_takes_a_plain_list_and_an_endless_iterator():
    assert list(itertools.islice(endless([1, 2]), 5)) == [1, 2, 1, 2, 1]
    assert list(itertools.islice(endless(itertools.cycle([1, 2])), 3)) == [1, 2, 1]


def test_an_iterator_that_ends_says_so():
    batches = endless(iter([1, 2]))
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(ValueError, match=r"iterator.*pretraining"):
        next(batches)


def test_pretraining_data_without_a_batch_is_an_error_not_a_hang():
    empty = DataLoader(range(3), batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match="pretraining dataloader"):
        next(endless(empty))


# -- the text of a run -----------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tiny_model):
    return get_tokenizer(tiny_model)


@pytest.fixture
def splits(tmp_path) -> str:
    """A folder with a file for each split."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "test", "validation"):
        write_jsonl(
            folder / f"{name}.jsonl", [{"input": f"{name} {i}", "label": str(i)} for i in range(3)]
        )
    return str(folder)


def pretrain_texts(config: PPOConfig, tokenizer: Any) -> list[str]:
    loader = build_pretrain(config, tokenizer, DeepspeedStrategy())
    return sorted(
        tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in loader.dataset
    )


def test_pretraining_data(make_config, tokenizer, splits):
    assert PPOTrainer.from_config(make_config()).loss_terms == {}
    assert pretrain_texts(make_config(pretrain_data=splits), tokenizer) == [
        "train 0",
        "train 1",
        "train 2",
    ]
    config = make_config(pretrain_data=splits, pretrain_split="test")
    assert pretrain_texts(config, tokenizer) == ["test 0", "test 1", "test 2"]
    files = f"{splits}/train.jsonl,{splits}/test.jsonl"
    texts = pretrain_texts(
        make_config(pretrain_data=files, pretrain_data_probs="0.9,0.1"), tokenizer
    )
    assert (
        sum(text.startswith("train") for text in texts)
        > sum(text.startswith("test") for text in texts)
        >= 3
    )


def test_pretraining_answers_have_a_loss_of_their_own(make_config, tokenizer, splits):
    config = make_config(pretrain_data=f"{splits}/train.jsonl", output_key="label")
    row = build_pretrain(config, tokenizer, DeepspeedStrategy()).dataset[1]
    assert (
        tokenizer.decode(row["input_ids"][row["labels"] != -100], skip_special_tokens=True) == "1"
    )


def test_batches_are_pinned_only_where_there_is_a_gpu(make_config, tokenizer, splits, monkeypatch):
    def pins(**options: Any) -> bool:
        return build_pretrain(
            make_config(pretrain_data=splits, **options), tokenizer, DeepspeedStrategy()
        ).pin_memory

    assert not pins()
    monkeypatch.setattr(distributed, "on_cuda", lambda: True)
    assert pins()
    assert not pins(dataloader_pin_memory=False)


def test_another_number_of_ranks_goes_on_at_the_same_row() -> None:
    """Rounded up to a batch of all ranks."""

    class Ranks:
        def __init__(self, world_size: int) -> None:
            self.world_size = world_size

    before = Pretraining(0.1, Ranks(3))
    before.taken = 5
    after = Pretraining(0.1, Ranks(2), iter(range(9)))
    after.load_state_dict(before.state_dict())
    after.catch_up()
    assert after.taken == 8
    assert next(after.batches) == 8
