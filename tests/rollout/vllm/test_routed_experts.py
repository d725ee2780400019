"""The experts of vLLM's tokens, in process and by a server: training with them has log probs nearer to vLLM's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families.zoo import random_model
from support.ranks import REPO, run_ranks
from support.tiny import read_jsonl, save_tokenizer, sums, write_jsonl
from support.vllm_servers import KEY, KEY_VARIABLE, Servers

from lightppo.version import release_of

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.vllm]
recording = pytest.mark.skipif(
    (release_of("vllm") or (0, 30)) < (0, 30),
    reason="without a GPU this vLLM does not say what its routers choose",
)

REWARD = "def reward_func(queries, prompts, labels):\n    return [float(query.count('1')) for query in queries]\n"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routed")
    random_model("qwen3_moe").save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    write_jsonl(folder / "prompts.jsonl", sums(16))
    return folder


def test_experts_of_requests_are_kept_until_they_are_taken_once() -> None:
    from lightppo.rollout.vllm.routed_experts import RoutedExperts

    routed = RoutedExperts.__new__(RoutedExperts)
    requests = {
        f"{name}-0a1b2c3d": SimpleNamespace(block_ids=([i],)) for i, name in enumerate("abc")
    }
    routed._runner = SimpleNamespace(requests=requests)
    routed._group, routed._block_size, routed._unknown = 0, 2, 255
    routed._store = torch.arange(6, dtype=torch.uint8).view(6, 1, 1)
    routed._finished, routed._taken, routed.records = {}, set(), True

    def step(*ended: str) -> None:
        names = [f"{name}-0a1b2c3d" for name in ended]
        routed._execute(lambda step: None, SimpleNamespace(finished_req_ids=names))
        for name in names:
            del requests[name]

    assert routed.take("a", 2).flatten().tolist() == [0, 1]  # ended in the step before
    step("a", "b")
    routed._store.zero_()  # others have their blocks
    assert routed.take("b", 1).flatten().tolist() == [2]
    for name in "ab":
        with pytest.raises(RuntimeError, match=f"forgotten which experts request {name} went to"):
            routed.take(name, 1)
    with pytest.raises(RuntimeError, match="did not record the experts of all tokens of request c"):
        routed.take("c", 3)
    assert not routed._finished


def first_step(folder: Path, name: str, *flags: str) -> dict[str, Any]:
    run_ranks(
        REPO / "examples" / "train_ppo.py",
        *(f"--pretrain={folder}/model", f"--prompt_data={folder}/prompts.jsonl"),
        *(f"--reward_fn={folder}/reward.py", f"--save_path={folder}/{name}"),
        *("--advantage_estimator=grpo", "--n_samples_per_prompt=4", "--init_kl_coef=0"),
        *("--rollout_batch_size=8", "--train_batch_size=16", "--micro_train_batch_size=8"),
        *("--prompt_max_len=12", "--ignore_eos", "--num_examine=0", "--benchmark_steps=1"),
        *("--old_log_probs=forward", *flags),
        vllm=True,
        world_size=1,
        env={KEY_VARIABLE: KEY},
    )
    return read_jsonl(folder / name / "metrics.jsonl")[0]


@recording
def test_in_bf16_replay_brings_log_probs_nearer_to_those_of_vllm(mixture: Path) -> None:
    flags = ("--rollout_engine=vllm", "--bf16", "--zero_stage=2", "--rollout_check=off")
    flags += ("--kv_cache_memory_bytes=33554432", "--generate_max_len=100")
    off = first_step(mixture, "off", *flags)
    replayed = first_step(mixture, "replayed", *flags, "--router_replay=rollout")
    for name in ("rollout/logp_diff_mean", "rollout/logp_diff_max", "rollout/mismatch_k3_kl"):
        assert replayed[name] < off[name], name
    assert replayed["rollout/logp_diff_max"] < 0.5 * off["rollout/logp_diff_max"]
    assert 0 < replayed["train/replaced_experts"] < 0.2


@recording
def test_a_server_sends_experts_with_its_answers(mixture: Path) -> None:
    servers = Servers([str(mixture / "model")], mixture, more=[[]])
    try:
        servers.wait()
        step = first_step(
            *(mixture, "served", "--rollout_engine=vllm_server", "--generate_max_len=40"),
            *(f"--vllm_server_url={servers.urls[0]}", "--zero_stage=0"),
            *(f"--vllm_server_api_key_env={KEY_VARIABLE}", "--router_replay=rollout"),
            "--actor_learning_rate=1e-2",
        )
    finally:
        servers.close()
    assert (
        step["rollout/logp_diff_max"] < 1e-3
    )  # float32: they choose the same before the first step
    assert 0 < step["train/replaced_experts"] < 0.5
