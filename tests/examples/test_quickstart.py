"""The quickstart's task, data, model, reward and summary."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.tiny import read_jsonl


def read(path: Path) -> list[dict]:
    return read_jsonl(path)


class TestTask:
    def test_split_is_whole_disjoint_and_the_same_everywhere(self, quickstart):
        train, held_out = quickstart("task").split_pairs()
        assert len(train) == 8965
        assert len(held_out) == 1035
        assert set(train).isdisjoint(held_out)
        assert len(set(train) | set(held_out)) == 10_000
        assert held_out[:3] == [(0, 0), (0, 20), (0, 26)]

    def test_a_sum_is_held_out_in_both_orders(self, quickstart):
        _, held_out = quickstart("task").split_pairs()
        assert {(b, a) for a, b in held_out} == set(held_out)

    def test_demonstrations_show_no_held_out_prompt_and_every_other_once(self, quickstart):
        task = quickstart("task")
        train, _ = task.split_pairs()
        shown = [row["input"] for row in task.demonstrations(seed=3)]
        assert sorted(shown) == sorted(task.format_prompt(a, b) for a, b in train)

    def test_six_in_ten_demonstrations_are_wrong_in_one_digit(self, quickstart):
        task = quickstart("task")
        rows = task.demonstrations(seed=1)
        wrong_digits = [
            sum(x != y for x, y in zip(r["output"], task.solve(r["input"]), strict=True))
            for r in rows
        ]
        assert set(wrong_digits) == {0, 1}
        # 8965 draws: standard deviation 0.0052
        assert sum(wrong_digits) / len(rows) == pytest.approx(0.6, abs=0.02)

    def test_demonstrations_come_from_the_seed(self, quickstart):
        task = quickstart("task")
        assert task.demonstrations(1) == task.demonstrations(1)
        assert task.demonstrations(1) != task.demonstrations(2)

    def test_a_wrong_digit_may_be_at_any_place(self, quickstart):
        rng = random.Random(0)
        answers = {quickstart("task").imperfect_answer(7, 35, rng) for _ in range(2000)}
        # the right one, and 3 places with 9 other digits each
        assert len(answers) == 1 + 3 * 9
        assert answers >= {"042", "142", "072", "049"}

    def test_solve(self, quickstart):
        task = quickstart("task")
        assert task.format_prompt(7, 35) == "07+35="
        assert task.solve("07+35=") == "042"
        with pytest.raises(ValueError, match=r"'7\+35='"):
            task.solve("7+35=")


class TestAssets:
    @pytest.fixture
    def assets(self, quickstart, tmp_path) -> Path:
        quickstart("make_assets").main(tmp_path / "assets", seed=1)
        return tmp_path / "assets"

    def test_training_data_has_no_evaluation_prompt(self, assets):
        held_out = {row["input"] for row in read(assets / "eval.jsonl")}
        assert len(held_out) == 1035
        for name in ("sft.jsonl", "prompts.jsonl"):
            shown = {row["input"] for row in read(assets / name)}
            assert len(shown) == 8965
            assert shown.isdisjoint(held_out)

    def test_labels_are_the_sums(self, assets):
        for name in ("prompts.jsonl", "eval.jsonl"):
            for row in read(assets / name):
                a, b = row["input"].rstrip("=").split("+")
                assert row["label"] == f"{int(a) + int(b):03d}"

    def test_tokenizer_and_model_load_as_any_other(self, assets):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(assets / "model")
        # pad 0, bos 1, eos 2, then the characters: "0" is 3, "7" is 10, "+" is 13, "=" is 14
        ids = tokenizer("07+35=")["input_ids"]
        assert ids == [1, 3, 10, 13, 6, 8, 14]
        assert tokenizer.decode([3, 7, 5, 2], skip_special_tokens=True) == "042"
        assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
        assert tokenizer("?")["input_ids"] == [1, tokenizer.unk_token_id]
        assert tokenizer.unk_token_id not in (0, 1, 2)
        model = AutoModelForCausalLM.from_pretrained(assets / "model")
        assert model.config.eos_token_id == 2
        assert 50_000 < model.num_parameters() < 150_000

    def test_same_seed_same_weights(self, quickstart, assets, tmp_path):
        from safetensors.torch import load_file

        quickstart("make_assets").main(tmp_path / "again", seed=1)
        quickstart("make_assets").main(tmp_path / "other", seed=2)
        first, again, other = (
            load_file(folder / "model" / "model.safetensors")["lm_head.weight"]
            for folder in (assets, tmp_path / "again", tmp_path / "other")
        )
        assert (first == again).all()
        assert (first != other).any()


class TestReward:
    def test_only_the_exact_sum_scores(self, quickstart):
        answers = {
            "042": 1.0,
            "42": 0.0,
            "043": 0.0,
            "04": 0.0,
            "042=": 0.0,
            "": 0.0,
            " 042": 0.0,
            "0420": 0.0,
        }
        n = len(answers)
        result = quickstart("reward").reward_func(
            [f"07+35={a}" for a in answers], ["07+35="] * n, ["042"] * n
        )
        assert result["rewards"] == list(answers.values())
        assert result["extra_logs"] == {"accuracy": list(answers.values())}

    def test_an_answer_cut_by_the_token_limit_is_wrong(self, quickstart):
        result = quickstart("reward").reward_func(
            ["07+35=042", "07+35=042"],
            ["07+35="] * 2,
            ["042"] * 2,
            finish_reasons=["length", "stop"],
        )
        assert result["rewards"] == [0.0, 1.0]

    def test_data_of_another_task_is_an_error(self, quickstart):
        reward = quickstart("reward")
        with pytest.raises(ValueError, match=r"'07\+35='.*'42'.*042"):
            reward.reward_func(["07+35=042"], ["07+35="], ["42"])
        with pytest.raises(ValueError, match="'Hello'"):
            reward.reward_func(["Hello you"], ["Hello"], ["you"])

    def test_as_a_reward_source(self, quickstart):
        from lightppo.data.records import Prompt, Rollout
        from lightppo.rewards.function import FunctionReward

        prompt = Prompt("50+51=", [1, 8, 3, 13, 8, 4, 14], label="101")
        rollouts = [
            Rollout(prompt, 0, [4, 3, 4, 2], "101", "stop", None),
            Rollout(prompt, 1, [4, 3, 4, 4], "1011", "length", None),
        ]
        output = FunctionReward(quickstart("reward").reward_func).score(rollouts)
        assert output.scores == [1.0, 0.0]
        assert output.metrics["accuracy"] == [1.0, 0.0]


class TestSummary:
    @pytest.fixture
    def run_dir(self, tmp_path) -> Path:
        def write(path: str, *rows: dict) -> None:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text("".join(json.dumps(row) + "\n" for row in rows))

        def sample(i: int, response: str) -> dict:
            label = str(i + 1)
            return {
                "prompt": f"{i:02d}+01=",
                "response": response,
                "label": label,
                "score": float(response == label),
            }

        write(
            "ppo/metrics.jsonl",
            {
                "step": 0,
                "time": 1.0,
                "eval/accuracy": 0.25,
                "eval/reward": 0.25,
                "eval/response_length": 3.0,
            },
            {
                "step": 1,
                "time": 2.0,
                "rollout/reward": 0.5,
                "rollout/kl": 0.0,
                "rollout/response_length": 3.0,
            },
            {
                "step": 1,
                "time": 2.5,
                "eval/accuracy": 0.5,
                "eval/reward": 0.5,
                "eval/response_length": 3.0,
            },
            {
                "step": 2,
                "time": 3.0,
                "rollout/reward": 0.75,
                "rollout/kl": 0.1,
                "rollout/response_length": 2.9,
            },
            {
                "step": 2,
                "time": 4.0,
                "eval/accuracy": 1.0,
                "eval/reward": 1.0,
                "eval/response_length": 2.8,
            },
        )
        write("ppo/eval/step0.jsonl", *[sample(i, "1") for i in range(6)])
        write("ppo/eval/step2.jsonl", *[sample(i, str(i + 1)) for i in range(6)])
        write("seconds.json", {"install": 1.0, "sft": 2.0, "ppo": 3.5})
        return tmp_path

    def test_first_and_last_evaluation(self, quickstart, run_dir):
        text = quickstart("summarize").summarize(run_dir)
        assert json.loads((run_dir / "summary.json").read_text()) == {
            "eval_before": {"accuracy": 0.25, "reward": 0.25, "response_length": 3.0},
            "eval_after": {"accuracy": 1.0, "reward": 1.0, "response_length": 2.8},
            "steps": 2,
            "seconds": {"install": 1.0, "sft": 2.0, "ppo": 3.5},
        }
        assert (run_dir / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert "accuracy                   0.250       1.000" in text
        # six prompts, three of them evenly spread: numbers 1, 3 and 5
        assert [line for line in text.splitlines() if "+01=" in line] == [
            "01+01=      1 ✗             2 ✓             2",
            "03+01=      1 ✗             4 ✓             4",
            "05+01=      1 ✗             6 ✓             6",
        ]

    @pytest.mark.parametrize(
        "name",
        ["ppo/metrics.jsonl", "ppo/eval/step0.jsonl", "ppo/eval/step2.jsonl", "seconds.json"],
    )
    def test_a_missing_file_is_named(self, quickstart, run_dir, name):
        (run_dir / name).unlink()
        with pytest.raises(SystemExit, match=name):
            quickstart("summarize").main(run_dir)

    def test_a_missing_phase_is_named(self, quickstart, run_dir):
        (run_dir / "seconds.json").write_text('{"install": 1.0, "ppo": 2.0}')
        with pytest.raises(SystemExit, match=r"seconds\.json.*sft"):
            quickstart("summarize").main(run_dir)

    def test_evaluations_on_different_prompts_are_not_compared(self, quickstart, run_dir):
        (run_dir / "ppo/eval/step2.jsonl").write_text(
            '{"prompt": "01+02=", "response": "3", "score": 1.0}\n'
        )
        with pytest.raises(SystemExit, match="different prompts"):
            quickstart("summarize").main(run_dir)
