"""Reward models: batches, ranks and lengths; another tokenizer and template, against scoring the text directly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.ranks import run_ranks
from support.tiny import CHARACTERS, save_reward_model, save_tokenizer, tiny_config
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
)

from lightppo.errors import RewardError
from lightppo.models.critic import RewardModel
from lightppo.ranks import Alone
from lightppo.rewards import RewardModelSource, score_rollouts
from lightppo.rewards.reward_model import Retemplated, Retokenized, SameIds, check_same_ids

PAD = 99


class LastToken(nn.Module):
    """Scores a row with its last real id plus a tenth of its length; remembers the shapes it saw."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, sequences, attention_mask):
        assert not self.training
        assert not torch.is_grad_enabled()
        self.seen.append((sequences.tolist(), attention_mask.tolist()))
        lengths = attention_mask.sum(1)
        last = sequences.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
        return (last + lengths / 10).bfloat16().double()


def source(*models, **options):
    return RewardModelSource(
        models, **({"device": "cpu", "pad_token_id": PAD, "micro_batch_size": 2} | options)
    )


def test_scores_prompt_and_response_ids(make_rollout):
    rollouts = [make_rollout(i) for i in range(3)]
    rollouts[2].response_ids = [7]
    model = LastToken()
    # rows [10,3], [11,3,3], [12,7]: 3 + .2, 3 + .3, 7 + .2, each to bf16
    output = source(model).score(rollouts)
    assert output.scores == pytest.approx([3.2, 3.3, 7.2], abs=0.02)
    assert output.metrics == {}
    # longest first, so that rows of one forward are of like lengths
    assert model.seen == [
        ([[11, 3, 3], [10, 3, PAD]], [[1, 1, 1], [1, 1, 0]]),
        ([[12, 7]], [[1, 1]]),
    ]


def test_batches_are_of_like_lengths_and_scores_in_the_order_of_the_samples(
    make_rollout,
):
    rollouts = [make_rollout(i) for i in (0, 5, 1, 4)]  # rows of 2, 7, 3 and 6 ids
    model = LastToken()
    output = source(model).score(rollouts)
    assert [[sum(row) for row in mask] for _, mask in model.seen] == [[7, 6], [3, 2]]
    assert (
        output.scores == source(LastToken(), micro_batch_size=1).score(rollouts[::-1]).scores[::-1]
    )


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 100])
def test_micro_batch_size_changes_nothing(rollouts, micro_batch_size):
    expected = source(LastToken(), micro_batch_size=1).score(rollouts).scores
    assert source(LastToken(), micro_batch_size=micro_batch_size).score(rollouts).scores == expected


def test_several_models_are_combined_over_the_whole_batch(rollouts):
    calls = []

    def combine(scores):
        calls.append([(tensor.shape, tensor.dtype) for tensor in scores])
        return scores[0] - 0.5 * scores[1]

    def length(sequences, attention_mask):
        return attention_mask.sum(1)  # integers: 2, 3, 4, 5, 6

    def four(sequences, attention_mask):
        return torch.full((len(sequences),), 4.0, dtype=torch.bfloat16)

    score_rollouts(source(length, four, reward_fn=combine), rollouts)
    assert calls == [[((5,), torch.float32)] * 2]
    # 2 − 4/2, 3 − 4/2, …
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert rollouts[1].extras == {"reward_model_0": 3.0, "reward_model_1": 4.0}


def test_one_model_may_have_reward_fn(rollouts):
    output = source(LastToken(), reward_fn=lambda scores: -scores[0]).score(rollouts)
    assert output.scores == [-score for score in output.metrics["reward_model_0"]]


@pytest.mark.parametrize("n", [0, 2, 5])
def test_every_rank_does_the_same_number_of_forwards(rollouts, n):
    models = [LastToken(), LastToken()]
    asked = []

    class OneOfMany(Alone):
        def same_count(self, count):
            asked.append(count)
            return 4  # another rank has four micro batches

    alone = source(LastToken()).score(rollouts[:n]).scores if n else []
    output = source(*models, reward_fn=lambda scores: scores[0], ranks=OneOfMany()).score(
        rollouts[:n]
    )
    assert asked == [(n + 1) // 2] * 2  # of each model
    assert [len(model.seen) for model in models] == [4, 4]
    assert models[0].seen[0] == ([[PAD]], [[1]])
    assert output.scores == alone


def test_no_sample_anywhere_no_forward():
    model = LastToken()
    assert source(model).score([]).scores == []
    assert model.seen == []


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (lambda s, m: torch.zeros(len(s), 1), r"shape \(2, 1\)"),
        (lambda s, m: torch.tensor(0.0), r"shape \(\)"),
        (lambda s, m: [0.0] * len(s), "list"),
    ],
)
def test_a_model_of_another_shape_is_an_error(rollouts, answer, got):
    models = (LastToken(), answer)
    with pytest.raises(
        RewardError, match=rf"model 1 must return a tensor of shape \(2,\), got {got}"
    ):
        source(*models, reward_fn=lambda scores: scores[0]).score(rollouts)


@pytest.mark.parametrize("combined", [torch.zeros(()), torch.zeros(5, 1), [0.0] * 5])
def test_reward_fn_of_another_shape_is_an_error(rollouts, combined):
    with pytest.raises(RewardError, match=r"--reward_fn must return a tensor of shape \(5,\)"):
        source(LastToken(), reward_fn=lambda scores: combined).score(rollouts)


def test_nan_names_the_sample(rollouts):
    def nan_at_length_four(sequences, attention_mask):
        lengths = attention_mask.sum(1).float()
        return lengths.masked_fill(lengths == 4, float("nan"))

    with pytest.raises(RewardError, match=r"^reward_model: the score of sample 2 \(prompt row 102"):
        score_rollouts(source(nan_at_length_four), rollouts)


def test_a_sample_without_tokens_is_an_error(rollouts):
    rollouts[1].prompt.token_ids, rollouts[1].response_ids = [], []
    with pytest.raises(RewardError, match=r"sample 1 \(prompt row 101.* has no token"):
        source(LastToken()).score(rollouts)


@pytest.mark.parametrize(
    ("n_models", "options", "named"),
    [
        (0, {}, "0 reward models"),
        (2, {}, "2 reward models.*--reward_fn"),
        (1, {"micro_batch_size": 0}, "micro_batch_size"),
        (1, {"reward_max_length": 1}, "--reward_max_length"),
        (1, {"reward_truncation": "right"}, "--reward_truncation"),
        (1, {"pad_token_id": None}, "pad_token_id or inputs"),
        (1, {"inputs": [SameIds(0)] * 2}, "2 inputs for 1 reward models"),
    ],
)
def test_bad_options_are_refused(n_models, options, named):
    with pytest.raises(ValueError, match=named):
        source(*[LastToken()] * n_models, **options)


def test_long_rows_are_an_error_or_cut_and_counted(rollouts):
    with pytest.raises(
        RewardError, match=r"sample 3 \(prompt row 103, .* 5 tokens .* --reward_max_length 4"
    ):
        source(LastToken(), reward_max_length=4).score(rollouts)
    model = LastToken()
    inputs = [SameIds(PAD, bos_token_id=13)]  # the prompt of sample 3 is the one id 13
    options = {
        "inputs": inputs,
        "reward_max_length": 4,
        "reward_truncation": "left",
        "micro_batch_size": 5,
    }
    output = source(model, **options).score(rollouts)
    assert output.metrics == {"input_truncated": [0.0, 0.0, 0.0, 1.0, 1.0]}
    # begin-of-text stays
    assert model.seen[0][0][:3] == [[12, 3, 3, 3], [13, 3, 3, 3], [3, 3, 3, 3]]
    assert source(LastToken(), reward_max_length=6).score(rollouts).metrics == {
        "input_truncated": [0.0] * 5
    }


def test_each_model_has_its_own_inputs(rollouts):
    class Reversed(SameIds):
        def encode(self, rollouts):
            return [row[::-1] for row in super().encode(rollouts)]

    models = [LastToken(), LastToken()]
    source(*models, inputs=[SameIds(PAD), Reversed(77)], reward_fn=lambda scores: scores[0]).score(
        rollouts[:2]
    )
    assert [model.seen[0][0] for model in models] == [
        [[11, 3, 3], [10, 3, PAD]],
        [[3, 3, 11], [3, 10, 77]],
    ]


# --- what they read


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORKER = Path(__file__).parent / "ranks" / "uneven_models.py"


def save_other_tokenizer(folder, template=TEMPLATE, bos=True):
    """One id per character too, but all ids differ from those of ``save_tokenizer``; with tokens for a chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>", "<unk>", "<system>", "<user>", "<assistant>", "<end>"]
    vocab = {token: i for i, token in enumerate([*special, *reversed(CHARACTERS)])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=special[4:],
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return save_other_tokenizer(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Folder of a reward model with the other tokenizer; its scores spread widely, so that a wrong row is seen."""
    folder = tmp_path_factory.mktemp("judge")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = tiny_config(
            num_labels=1, vocab_size=len(CHARACTERS) + 8, initializer_range=0.3, pad_token_id=2
        )
        LlamaForSequenceClassification(config).save_pretrained(folder)
    save_other_tokenizer(folder)
    return str(folder)


@pytest.fixture
def asked(make_rollout):
    """A finished plain-text sample, a cut one, chats with a system message, and ending in the assistant's words."""
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "2+2="}]
    begun = [{"role": "user", "content": "say abc"}, {"role": "assistant", "content": "ab"}]
    rollouts = [
        make_rollout(0, "a longer answer"),
        make_rollout(1, "cut off her"),
        make_rollout(2, "4", messages=chat),
        make_rollout(3, "c", messages=begun),
        make_rollout(4, "5 not", messages=chat),
        make_rollout(5, "cd", messages=begun),
    ]
    for i in (1, 4, 5):
        rollouts[i].finish_reason = "length"
    for rollout in rollouts:
        rollout.prompt.text = rollout.prompt.text.replace(":", "")
    return rollouts


TEXTS = [
    "<s><user>question 0 <end><assistant>a longer answer<end>",
    "<s><user>question 1 <end><assistant>cut off her",  # open, as the token limit left it
    "<s><system>be kind<end><user>2+2=<end><assistant>4<end>",
    "<s><user>say abc<end><assistant>abc<end>",
    "<s><system>be kind<end><user>2+2=<end><assistant>5 not",
    "<s><user>say abc<end><assistant>abcd",
]


def scored_directly(folder, texts):
    """What transformers alone says about each text, one at a time, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        rows = [
            tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            for text in texts
        ]
        return [model(input_ids=row).logits[0, 0].item() for row in rows]


def judged(folder, inputs, rollouts, **options):
    options = {"device": "cpu", "micro_batch_size": 4, "inputs": [inputs]} | options
    return RewardModelSource([RewardModel(folder)], **options).score(rollouts).scores


def test_the_text_is_that_of_the_models_template(other, asked):
    rows = Retemplated(other).encode(asked)
    assert [other.decode(row) for row in rows] == TEXTS
    template = Retemplated(other)
    assert template.encode([asked[2]])[0] == other.apply_chat_template(
        [*asked[2].prompt.messages, {"role": "assistant", "content": "4"}], return_dict=False
    )


def test_what_rows_say_to_a_template_is_said_to_the_models_too(other, asked, monkeypatch):
    """As far as this template reads it: the row's options are for the actor's."""
    tools = [{"name": "kind", "parameters": {}}]
    asked[2].prompt.extra = {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    assert other.decode(Retemplated(other).encode([asked[2]])[0]) == TEXTS[2]
    monkeypatch.setattr(other, "chat_template", "{{ tools[0].name }}" + other.chat_template)
    assert other.decode(Retemplated(other).encode([asked[2]])[0]).startswith("kind")


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_scores_are_those_of_the_text_scored_directly(judge, other, asked, micro_batch_size):
    expected = scored_directly(judge, TEXTS)
    scores = judged(judge, Retemplated(other), asked, micro_batch_size=micro_batch_size)
    assert scores == pytest.approx(expected, abs=1e-5)
    closed = scored_directly(judge, [text + "<end>" for text in TEXTS])
    assert abs(closed[1] - expected[1]) > 0.01  # so the test sees where an answer ends
    assert len({round(score, 3) for score in expected}) == len(expected)


def test_plain_text_in_other_ids(judge, other, asked, tmp_path):
    # cut: no end-of-text
    texts = ["<s>question 0 a longer answer</s>", "<s>question 1 cut off her"]
    # a template put begin-of-text there: still once
    asked[1].prompt.text = "<s>" + asked[1].prompt.text
    rows = Retokenized(other).encode(asked[:2])
    assert [other.decode(row) for row in rows] == texts
    assert judged(judge, Retokenized(other), asked[:2]) == pytest.approx(
        scored_directly(judge, texts), abs=1e-5
    )
    # a tokenizer without a template reads plain-text prompts that way
    bare = save_other_tokenizer(tmp_path, template=None)
    assert Retemplated(bare).encode(asked[:2]) == rows
    with pytest.raises(
        RewardError, match=r"--reward_input_tokenizer: sample 0 \(prompt row 102.* no chat template"
    ):
        Retemplated(bare).encode([asked[2]])


def test_a_template_that_refuses_names_the_sample(other, asked, tmp_path):
    refusing = save_other_tokenizer(tmp_path, "{{ raise_exception('no system') }}")
    with pytest.raises(RewardError, match=r"--reward_input_tokenizer: sample 0 .*: no system"):
        Retemplated(refusing).encode(asked)
    asked[3].prompt.messages[-1]["content"] = [{"type": "image"}]
    with pytest.raises(RewardError, match=r"sample 3 .* is not text"):
        Retemplated(other).encode(asked)


def test_a_long_chat_is_cut_on_the_left_and_keeps_its_beginning(judge, other, asked):
    options = {"reward_max_length": 12, "reward_truncation": "left"}
    scores = judged(judge, Retemplated(other), asked[:1], **options)
    # 12 tokens: begin-of-text, the last 10 letters and the end of the turn
    assert scores == pytest.approx(scored_directly(judge, ["<s>ger answer<end>"]), abs=1e-5)


def test_a_value_head_model_with_statistics(judge, other, asked, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    model.config.mean, model.config.std = 0.25, 4.0
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["value_head.weight"] = weights.pop("score.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reward = RewardModel(str(tmp_path), value_head_prefix="value_head", normalize_reward=True)
    source = RewardModelSource(
        [reward], device="cpu", micro_batch_size=2, inputs=[Retemplated(other)]
    )
    expected = [(score - 0.25) / 4.0 for score in scored_directly(judge, TEXTS)]
    assert source.score(asked).scores == pytest.approx(expected, abs=1e-5)


def test_ids_of_another_tokenizer_are_refused(other, tmp_path):
    own = save_tokenizer(tmp_path)
    check_same_ids(own, own, "here")
    with pytest.raises(ValueError, match=r"--reward_pretrain there .*--reward_input_tokenizer"):
        check_same_ids(own, other, "there")


def test_uneven_ranks_under_zero3(judge, other, asked, tmp_path):
    """Two models, one in the actor's ids and one in its own; ranks with 6 and 0, 5 and 1 samples."""
    plain = save_reward_model(tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(plain)
    for rollout in asked:
        rollout.prompt.token_ids = tokenizer.encode(rollout.prompt.text)
        rollout.response_ids = tokenizer.encode(rollout.response_text)
    rows = [
        {"text": r.prompt.text, "ids": r.prompt.token_ids, "messages": r.prompt.messages}
        | {
            "response": r.response_text,
            "response_ids": r.response_ids,
            "finish_reason": r.finish_reason,
        }
        for r in asked
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    splits = [6, 0, 5]
    run_ranks(WORKER, tmp_path, plain, judge, json.dumps(splits), timeout=300)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    expected = judged(judge, Retemplated(other), asked)
    with torch.no_grad():
        one_by_one = [
            RewardModel(plain)(torch.tensor([r.prompt.token_ids + r.response_ids])).item()
            for r in asked
        ]
    for i, split in enumerate(splits):
        mine, theirs = ranks[0]["outputs"][i], ranks[1]["outputs"][i]
        assert (len(mine["judge"]), len(theirs["judge"])) == (split, 6 - split)
        assert mine["judge"] + theirs["judge"] == pytest.approx(expected, abs=1e-5)
        assert mine["plain"] + theirs["plain"] == pytest.approx(one_by_one, abs=1e-5)
        total = [a - 2 * b for a, b in zip(mine["plain"] + theirs["plain"], expected)]
        assert mine["scores"] + theirs["scores"] == pytest.approx(total, abs=1e-5)
    for rank in ranks:
        assert rank["sharded"]


def test_a_module_scores_in_evaluation_mode(rollouts):
    class Mode(torch.nn.Module):
        def forward(self, sequences, attention_mask):
            return torch.full((len(sequences),), float(self.training))

    source = RewardModelSource([Mode().train()], pad_token_id=9)
    assert set(source.score(rollouts).scores) == {0.0}
