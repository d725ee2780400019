"""Real vLLM for CPUs and checkpoints with towers: the pushes of a run, in process and to servers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.ranks import READ_BY_VLLM, REPO, run_ranks
from support.tiny import REWARD, read_jsonl, save_tokenizer, sums, write_jsonl
from support.towers import save_with_tower, sums_of, sums_of_tower
from support.vllm_servers import KEY, KEY_VARIABLE, Servers

from lightppo.checkpoint.export import save_model
from lightppo.models.actor import Actor
from lightppo.ranks import Alone
from lightppo.version import release_of

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
# older ones have the processor read a text, too, for which the tiny tokenizer lacks the tokens of sound
without_audio_tokens = pytest.mark.skipif(
    (release_of("vllm") or (0, 28)) < (0, 28),
    reason="this vLLM needs a tokenizer with the tokens of sound",
)

WORKER = Path(__file__).with_name("towers_vllm_worker.py")
SCRIPT = REPO / "examples" / "train_ppo.py"
# heads of 32, the smallest that vLLM's attention takes on a CPU
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
SHAPE["max_position_embeddings"] = 256


def flags(whole: str, folder: Path, **options: object) -> list[str]:
    """The command line of two steps."""
    (folder / "reward.py").write_text(REWARD)
    small = {
        "pretrain": whole,
        "prompt_data": write_jsonl(folder / "prompts.jsonl", sums(8)),
        "reward_fn": folder / "reward.py",
        "save_path": folder / "run",
        "ckpt_path": folder / "ckpt",
        "advantage_estimator": "rloo",
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 4,
        "train_batch_size": 8,
        "micro_train_batch_size": 4,
        "prompt_max_len": 12,
        "generate_max_len": 8,
        "actor_learning_rate": 1e-2,
        "lr_warmup_ratio": 0,
        "l2": 0.1,
        "zero_stage": 2,
    }
    return [f"--{name}={value}" for name, value in (small | options).items()]


def check_run(whole: str, folder: Path) -> None:
    """Two steps whose log probs agreed, or the run would have ended; the export has the tower."""
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "rollout/reward" in row]
    assert len(rows) == 2
    assert max(row["rollout/logp_diff_max"] for row in rows) < 1e-3
    before, after = sums_of(whole), sums_of(folder)
    assert before.keys() == after.keys()
    assert before != after
    assert sums_of_tower(whole) == sums_of_tower(folder)


def save_audio(folder: Path) -> str:
    """Qwen2-Audio with its processor and the names of the published one: vLLM reads it without torchvision."""
    from transformers import WhisperFeatureExtractor

    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    save_with_tower("qwen2_audio", folder, **shape)
    file = folder / "model.safetensors"
    weights = load_file(file)
    twice = "language_model.model.model."  # as transformers 5.19 writes it
    named = {name.replace(twice, "language_model.model."): w for name, w in weights.items()}
    save_file(named, file, metadata={"format": "pt"})
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    for name in ("preprocessor_config.json", "tokenizer_config.json"):
        told = json.loads((folder / name).read_text())
        told["processor_class"] = "Qwen2AudioProcessor"
        (folder / name).write_text(json.dumps(told))
    return str(folder)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gemma3", marks=pytest.mark.long),
        "mistral3",
        pytest.param(
            "qwen3_5",
            marks=[
                pytest.mark.long,
                pytest.mark.skipif(
                    find_spec("torchvision") is None, reason="vLLM's Qwen3.5 needs torchvision"
                ),
            ],
        ),
    ],
)
def test_an_engine_in_process_has_the_language_model_alone(tmp_path, kind):
    whole = save_with_tower(kind, tmp_path / kind, **SHAPE)
    words = flags(whole, tmp_path, rollout_engine="vllm", max_num_seqs=16)
    run_ranks(SCRIPT, *words, world_size=1, vllm=True, timeout=400, env=READ_BY_VLLM)
    check_run(whole, tmp_path / "run")


@without_audio_tokens
def test_an_engine_with_the_whole_checkpoint_keeps_its_tower(tmp_path):
    whole = save_audio(tmp_path / "audio")
    target = tmp_path / "seen.json"
    run_ranks(WORKER, whole, target, world_size=1, vllm=True, timeout=400, env=READ_BY_VLLM)
    seen = json.loads(target.read_text())
    first, *later = seen["towers"]
    assert len(first) > 10
    assert all(tower == first for tower in later)
    assert max(seen["differences"]) < 1e-4 < 1e-2 < seen["stale"]
    assert seen["weights"] == [[[], []], [[], []]]  # none differs, none could not be compared


@without_audio_tokens
def test_servers_of_the_whole_checkpoint(tmp_path):
    whole = save_audio(tmp_path / "audio")
    servers = Servers([whole], tmp_path, more=[[]])
    try:
        servers.wait()
        words = flags(
            whole,
            tmp_path,
            rollout_engine="vllm_server",
            vllm_server_url=servers.urls[0],
            vllm_server_api_key_env=KEY_VARIABLE,
        )
        environment = READ_BY_VLLM | {KEY_VARIABLE: KEY}
        run_ranks(SCRIPT, *words, world_size=1, vllm=True, timeout=400, env=environment)
        check_run(whole, tmp_path / "run")
        text = Actor(whole).hf_model
        del text.whole
        save_model(Alone(), text, None, tmp_path / "text")
        save_tokenizer(tmp_path / "text")
        words = [w if "--pretrain=" not in w else f"--pretrain={tmp_path / 'text'}" for w in words]
        ended = run_ranks(
            SCRIPT, *words, world_size=1, vllm=True, timeout=400, env=environment, check=False
        )
        assert ended.returncode == 1
        assert "which has an image or audio tower; the model of --pretrain" in ended.output
    finally:
        servers.close()
