"""The real vLLM in the training processes, against Hugging Face rollouts and the trainer's forward.

Two launches, shared by all tests: one rank at ZeRO 0, two ranks at ZeRO 2 and 3; engines are built one after the other.
"""

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.once import once
from support.ranks import WITH_SUPPORT, run_ranks
from support.tiny import save_causal_lm, save_tokenizer

from lightppo.version import release_of

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

WORKER = Path(__file__).with_name("vllm_worker.py")
HASH_WORKER = Path(__file__).with_name("compile_hash_worker.py")
SHARED_MEMORY = Path("/dev/shm")
# Heads of 32, the smallest that vLLM's attention takes on a CPU; 21 rows of the embedding are no tokens.
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
MODELS = {"untied": {}, "tied": {"tie_word_embeddings": True}}
TOKENS = 43
WITH_ADAPTERS = (
    {"model": "tied", "zero_stage": 3},
    {"model": "tied", "zero_stage": 3, "load_in_4bit": True, "tensor_parallel_size": 2},
)
# Whose checkpoints are unlike Llama's: no head beside the embedding, and recurrent layers.
FAMILIES = ("gemma2", "granitemoehybrid")
# without a GPU vLLM 0.26 has no recurrent layers, and 0.29 to 0.31 have none in float32 where the CPU multiplies bf16
LACKING = ((0, 26), (0, 29), (0, 30), (0, 31))
RUN = FAMILIES[:1] if (release_of("vllm") or ())[:2] in LACKING else FAMILIES
# Experts one by one, layers the other way round, and one that vLLM runs by transformers' class.
MORE_FAMILIES = ("mixtral", "gpt2", "smollm3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("vllm")
    for name, changes in MODELS.items():
        save_causal_lm(root / name, max_position_embeddings=256, **SHAPE, **changes)
    for name in FAMILIES + MORE_FAMILIES:
        save_family(root / name, name)
    return root


def save_family(folder, name):
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        SmolLM3Config,
        SmolLM3ForCausalLM,
    )

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 64}
    shape = {
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
    }
    mixers = {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
    }
    make = {
        "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(head_dim=32, **{**SHAPE, **shape, **ids})),
        "mixtral": lambda: MixtralForCausalLM(
            MixtralConfig(num_local_experts=4, **{**SHAPE, **shape, **ids})
        ),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(
                n_embd=64, n_layer=2, n_head=2, n_positions=256, initializer_range=0.2, **ids
            )
        ),
        "smollm3": lambda: SmolLM3ForCausalLM(
            SmolLM3Config(no_rope_layers=[1, 0], **{**SHAPE, **shape, **ids})
        ),
        "granitemoehybrid": lambda: GraniteMoeHybridForCausalLM(
            GraniteMoeHybridConfig(**mixers, **{**SHAPE, **shape, **ids})
        ),
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make[name]().save_pretrained(folder)
    save_tokenizer(folder)


@pytest.fixture(scope="module")
def one_rank(folder, tmp_path_factory):
    """[untied, tied, one of each family, one in bf16, and one with adapters that vLLM cannot take]."""
    return once(tmp_path_factory, "vllm_one_rank", lambda: see_one_rank(folder))


def see_one_rank(folder: Path) -> list[dict]:
    cases = [
        {"model": "untied", "zero_stage": 0, "extras": True},
        {"model": "tied", "zero_stage": 0},
    ]
    cases += [{"model": name, "zero_stage": 0, "brief": True} for name in RUN]
    cases += [{"model": "untied", "zero_stage": 1, "bf16": True, "brief": True}]
    cases += [{"model": "gpt2", "zero_stage": 0, "adapters": True, "brief": True}]
    return launch(folder, cases)


def launch(folder: Path, cases: list[dict]) -> list[dict]:
    run_ranks(
        WORKER,
        folder,
        *map(json.dumps, cases),
        env=WITH_SUPPORT,
        vllm=True,
        world_size=1,
        timeout=500,
    )
    return json.loads((folder / "rank0of1.json").read_text())


@pytest.fixture(scope="module")
def two_ranks(folder, tmp_path_factory):
    """[tied, untied with one engine over both ranks, and two with adapters] of each rank."""
    return once(tmp_path_factory, "vllm_two_ranks", lambda: see_two_ranks(folder))


def see_two_ranks(folder: Path) -> list[list[dict]]:
    cases = [
        {"model": "tied", "zero_stage": 3},
        {"model": "untied", "zero_stage": 3, "tensor_parallel_size": 2},
    ]
    cases += [{"adapters": True, "brief": True} | case for case in WITH_ADAPTERS]
    for group in (0, 1):  # what a run that was killed has left, which vLLM refuses
        with suppress(FileExistsError):
            (SHARED_MEMORY / f"-tp:{group}-[0-1]-cpushm_0").open("x").close()
    run_ranks(WORKER, folder, *map(json.dumps, cases), env=WITH_SUPPORT, vllm=True)
    forget_shared_memory()
    return [json.loads((folder / f"rank{rank}of2.json").read_text()) for rank in range(2)]


def forget_shared_memory() -> None:
    """vLLM removes it when Python is taken down, which forks do not; its name is the same for all engines."""
    for left in SHARED_MEMORY.glob("-tp:*-cpushm_*"):
        left.unlink()


@pytest.fixture(
    scope="module",
    params=["one rank, untied", "one rank, tied", "ZeRO 3, tied", "ZeRO 3, shared engine"],
)
def ranks(request, one_rank, two_ranks):
    """What each rank of one case saw."""
    place = request.param.split(", ")[1] in ("tied", "shared engine")
    if request.param.startswith("one rank"):
        return [one_rank[int(place)]]
    return [rank[int(request.param.endswith("shared engine"))] for rank in two_ranks]


def test_greedy_tokens_are_those_of_the_trainer_before_and_after_pushes(ranks):
    for rank in ranks:
        first, second, third = rank["pushes"]
        for pushed in (first, second, third):
            assert pushed["vllm"] == pushed["hf"]
        for pushed, before in ((second, first), (third, second)):
            # until the push the engine has the weights of before
            assert pushed["stale"] == before["vllm"]
            assert pushed["vllm"] != before["vllm"]


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(one_rank, family):
    if family not in RUN:
        pytest.skip("this vLLM has no recurrent layers without a GPU in float32")
    check_family(one_rank[2 + RUN.index(family)])


@pytest.mark.long
def test_more_families(folder):
    cases = [{"model": name, "zero_stage": 0, "brief": True} for name in MORE_FAMILIES]
    for seen in launch(folder, cases):
        check_family(seen)


@pytest.mark.long
def test_recurrent_layers_in_bf16(folder):
    if (release_of("vllm") or ())[:2] == (0, 26):
        pytest.skip("this vLLM has no recurrent layers without a GPU")
    case = {"model": "granitemoehybrid", "zero_stage": 1, "bf16": True, "brief": True}
    [seen] = launch(folder, [case])
    assert seen["weights"][0] == []
    assert seen["difference"] < 0.1


def check_family(seen: dict) -> None:
    for pushed in seen["pushes"]:
        assert pushed["vllm"] == pushed["hf"]
    assert seen["pushes"][0]["vllm"] != seen["pushes"][2]["vllm"]
    assert seen["difference"] < 3e-4
    differing, unknown = seen["weights"]
    assert differing == []
    stored_otherwise = r"experts|mamba\.(A_log|conv1d\.weight)|^lm_head\.weight"
    assert all(re.search(stored_otherwise, name) for name in unknown)


def test_weights_in_bf16_that_have_arrived_do_not_differ(one_rank):
    seen = one_rank[2 + len(RUN)]
    assert seen["weights"] == [[], []]
    assert seen["pushes"][0]["vllm"] != seen["pushes"][2]["vllm"]
    assert seen["difference"] < 0.1


@pytest.mark.parametrize(("case", "in_4bit"), enumerate((0, 14)), ids=["dense", "4 bits"])
def test_an_actor_with_adapters(two_ranks, case, in_4bit):
    for rank in two_ranks:
        seen = rank[2 + case]
        assert seen["in_4bit"] == in_4bit
        pushed = [push["vllm"] for push in seen["pushes"]]
        assert pushed == [push["hf"] for push in seen["pushes"]]
        assert pushed[0] != pushed[1] != pushed[2]  # every optimizer step moved the adapters
        assert seen["difference"] < 1e-4
        assert seen["alone"]


ADAPTED = 2 * (64 + 64 + 64 + 32 + 64 + 32 + 64 + 64 + 3 * (64 + 64))
"""Inputs and outputs of all linear layers of both layers."""


@pytest.mark.parametrize("case", [0, 1], ids=["dense", "4 bits, shared engine"])
def test_a_push_sends_the_adapter_alone_and_the_old_one_goes(two_ranks, case):
    for rank in two_ranks:
        seen = rank[2 + case]
        assert seen["sent"] == 4 * 4 * ADAPTED  # bytes of float32 at rank 4
        numbers, pushes = seen["numbers"]
        assert numbers == [pushes]


@pytest.mark.parametrize("case", [0, 1], ids=["dense", "4 bits, shared engine"])
def test_an_old_adapter_stays_while_requests_use_it(two_ranks, case):
    for rank in two_ranks:
        seen = rank[2 + case]
        assert seen["during"] == 2
        found, expected = seen["at once"]
        assert found == expected
        assert found[0] != found[1]
        numbers, pushes = seen["after"]
        assert numbers == [pushes]


def test_the_check_looks_at_each_adapter(two_ranks):
    """The first was right; the second came with other numbers in one layer."""
    for rank in two_ranks:
        assert ", with adapter " in rank[2]["message"]
        named = "Weights that differ: model.layers.1.self_attn.v_proj.weight. "
        assert named in rank[2]["message"]
        assert "could not be compared" in rank[3]["message"]


def test_adapters_that_vllm_cannot_take_are_merged(one_rank):
    seen = one_rank[3 + len(RUN)]
    pushed = [push["vllm"] for push in seen["pushes"]]
    assert pushed == [push["hf"] for push in seen["pushes"]]
    assert pushed[0] != pushed[1]
    assert seen["difference"] < 3e-4
    assert not seen["alone"]


def test_log_probs_are_those_of_the_trainer_at_its_temperature(ranks):
    for rank in ranks:
        assert rank["difference"] < 1e-4


def test_only_tokens_are_sampled(ranks):
    for rank in ranks:
        assert max(max(ids) for _, _, ids, _, _ in rank["sampled"]) < TOKENS


def test_a_corrupted_weight_is_found_and_named(ranks, two_ranks):
    shared = ranks[0] is two_ranks[0][1]  # each rank holds a part of every weight, and only says so
    for rank in ranks:
        message, (mean, largest, _) = rank["corrupted"]["message"], rank["corrupted"]["mended"]
        assert "--logp_diff_tolerance is 0.001" in message
        assert 0 < mean < largest < 1e-4
        named = "Weights that differ: model.layers.1.self_attn.v_proj.weight. "
        assert ("could not be compared" if shared else named) in message


def test_samples_depend_on_neither_batch_nor_ranks(one_rank, two_ranks):
    """One rank with all prompts, two ranks with every second one, and rank 0 with all and rank 1 with none."""
    for alone, together in (
        (one_rank[1], [r[0] for r in two_ranks]),
        (one_rank[0], [r[1] for r in two_ranks]),
    ):
        # the two-rank runs trained on other rows, so their first rollouts, greedy, are what can be the same
        first = sorted(alone["pushes"][0]["vllm"])
        assert sorted(together[0]["pushes"][0]["vllm"] + together[1]["pushes"][0]["vllm"]) == first
        split = sorted(together[0]["sampled"] + together[1]["sampled"])
        assert sorted(together[0]["one rank alone"]) == split
        assert together[1]["one rank alone"] == []


def test_the_process_is_left_as_it_was(ranks):
    assert all(rank["undisturbed"] for rank in ranks)


def test_seeds(one_rank):
    seen = one_rank[0]["sampling"]
    assert sorted(seen["backwards"]) == sorted(seen["whole"])
    assert seen["alone"] == seen["whole"][6:8]
    assert seen["crowd"] == [ids for _, _, ids, _, _ in seen["backwards"]]
    assert seen["other seed"] != seen["whole"]
    assert len({tuple(ids) for ids in seen["twice"]}) > 1
    assert seen["twice"][:2] == [ids for _, _, ids, _, _ in seen["whole"][:2]]
    assert [row[:2] for row in seen["whole"]] == [[100 + i, n] for i in range(8) for n in range(2)]
    assert seen["finished"] == 16


def test_one_seed_for_a_whole_call(one_rank):
    """The same call gives the same samples, whatever was sampled between: so does a resumed run."""
    seen, seeded = one_rank[0]["sampling"]["unseeded"], one_rank[0]["sampling"]["whole"]
    assert seen["again"] == seen["first"] != seeded
    assert seen["other seed"] != seen["first"]
    # what it costs: a response depends on the others of its call
    assert seen["others"] != seen["first"][:6]
    assert seen["difference"] < 1e-4
    assert seen["undisturbed"]
    assert [row[:2] for row in seen["first"]] == [row[:2] for row in seeded]


@pytest.mark.parametrize(
    "how", ["stop ids", "stop strings", "min tokens", "ignore eos", "penalty", "bad words"]
)
def test_same_tokens_texts_and_reasons_as_hugging_face(one_rank, how):
    vllm, hf = one_rank[0]["sampling"]["like hf"][how]
    assert vllm == hf
    reasons = {reason for _, _, _, reason, _ in hf}
    if how in ("stop ids", "stop strings", "min tokens"):
        assert "stop" in reasons
    if how == "ignore eos":
        assert reasons == {"length"}


def test_filters_do_not_change_what_log_probs_mean(one_rank):
    assert one_rank[0]["sampling"]["filtered difference"] < 1e-4


def test_turns_depend_on_their_conversation_alone(one_rank):
    seen = one_rank[0]["sampling"]["conversations"]
    assert seen["greedy"] == seen["greedy hf"]
    assert seen["late"] == seen["sampled"]
    assert seen["nothing"]  # another seed gives other conversations
    first = {(index, sample): ids for index, sample, ids, *_ in seen["first turns"]}
    for index, sample, ids in seen["sampled"]:
        assert ids[:5] == first[index, sample][:5]


def test_what_cannot_be_sampled_is_refused(one_rank):
    messages = one_rank[0]["sampling"]["refused"]
    assert "120 tokens" in messages["long"]
    assert "--max_model_len" in messages["long"]
    assert "prompt 8 has no tokens" in messages["empty"]
    assert "999" in messages["stop id"]
    assert "first_token_temperature" in messages["first token"]


def test_compiled_code_is_found_again(folder, tmp_path):
    """By two ranks at the same time, and at the next start."""
    seen = []
    for start in ("first", "second"):
        words = (folder / "untied", tmp_path / start)
        run_ranks(
            HASH_WORKER,
            *words,
            vllm=True,
            timeout=200,
            env={"LIGHTPPO_CACHE": str(tmp_path / "cache")},
        )
        seen += [json.loads((tmp_path / f"{start}-rank{rank}.json").read_text()) for rank in (0, 1)]
    assert seen == seen[:1] * 4
    same, other = seen[0]
    assert same[:2] != other[:2]
    assert same[1] != other[1]
    assert not list(Path(same[0]).glob("*.safetensors"))  # no weights, which might be old ones
