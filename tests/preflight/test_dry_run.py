"""`--dry_run` on what researchers do wrong: each mistake is found with its cause and what to do."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support.http_server import JsonServer, ok
from support.ranks import run_ranks
from support.tiny import save_causal_lm, save_reward_model, sums, write_jsonl

from lightppo import PPOTrainer
from lightppo.config import parse_args
from lightppo.errors import UserError
from lightppo.preflight.before_imports import preflight
from lightppo.supervised.objectives import OBJECTIVES

pytestmark = pytest.mark.usefixtures("world")

RIGHT = '''
def reward_func(queries, prompts, labels):
    """One for an answer that ends with the label, and a little for its letters."""
    scores = []
    for query, prompt, label in zip(queries, prompts, labels):
        answer = query[len(prompt):]
        scores.append(float(bool(label) and answer.endswith(label)) + 0.001 * sum(map(ord, answer)) / (1 + len(answer)))
    return scores
'''
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


PAIRS = [
    {"input": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": "a" * (1 + i % 3)} for i in range(12)
]
NO_ANSWER = "{% for m in messages if m.role != 'assistant' %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}"
NO_REASONING = CHAT.replace(
    "{{ m.content }}", "{{ m.content.split('=')[-1] if m.role == 'assistant' else m.content }}"
)


class ModelsLoad(Exception):
    """What is told before takes no longer with large models."""


class Bench:
    """Files of a run without mistakes, and what each mistake changes about them."""

    def __init__(self, folder: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.model, self.monkeypatch = folder, model, monkeypatch
        self.flags = {
            "pretrain": model, "prompt_data": self.rows(sums(12)), "reward_fn": self.reward(RIGHT),
            "prompt_max_len": 20, "generate_max_len": 8, "rollout_batch_size": 4, "train_batch_size": 4,
            "micro_train_batch_size": 2, "actor_learning_rate": 1e-5, "zero_stage": 0, "num_examine": 0,
            "save_path": folder / "run",
        }  # fmt: skip

    def rows(self, rows: list[Any], name: str = "rows.jsonl") -> str:
        return write_jsonl(self.folder / name, rows)

    def file(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def reward(self, source: str) -> str:
        return self.file("reward.py", source)

    def scores(self, body: str) -> str:
        return self.reward(f"import time\ndef reward_func(queries, prompts, labels):\n    {body}\n")

    def chat_model(self, template: str = CHAT, **settings: Any) -> str:
        """A model with a chat template; ``settings`` of its tokenizer."""
        folder = self.folder / "chat_model"
        save_causal_lm(folder)
        path = folder / "tokenizer_config.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"chat_template": template} | settings)
        )
        return str(folder)

    def other_tokenizer(self) -> str:
        """A reward model whose tokenizer has two ids the other way round."""
        folder = self.folder / "other"
        save_reward_model(folder)
        path = folder / "tokenizer.json"
        path.write_text(
            path.read_text().replace('"8": 12', '"8": 13').replace('"9": 13', '"9": 12')
        )
        return str(folder)

    def small_disk(self) -> None:
        self.monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))

    def run(self, **changes: Any) -> None:
        """A dry run with these options."""
        flags = self.flags | changes
        words: list[str] = []
        for name, value in flags.items():
            if value is not None and value is not False:
                values = value if isinstance(value, list) else [] if value is True else [value]
                words += [f"--{name}", *map(str, values)]
        self.start([*words, "--dry_run"])

    def start(self, words: list[str]) -> None:
        config = parse_args(words)
        preflight(config.resolved())
        PPOTrainer.from_config(config).fit()


class OnData(Bench):
    """Of ``lightppo sft``, ``rm`` and ``dpo``: pairs, whose chosen answers are demonstrations."""

    def __init__(self, command: str, *parts: Any) -> None:
        super().__init__(*parts)
        self.command = command
        self.flags = {"pretrain": self.model, "dataset": self.rows(PAIRS), "max_len": 20, "train_batch_size": 4,
                      "micro_train_batch_size": 2, "zero_stage": 0, "save_path": self.folder / "run"}  # fmt: skip

    def changed(self, number: int = 0, **columns: Any) -> dict[str, str]:
        """The rows, with other values in one of them; ``None`` takes a column away."""
        rows = [dict(row) for row in PAIRS]
        rows[number] = {
            name: value for name, value in (rows[number] | columns).items() if value is not None
        }
        return {"dataset": self.rows(rows)}

    def demonstrations(self, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"dataset": self.rows(rows), **more}

    def chats(self, template: str, **more: Any) -> dict[str, Any]:
        return {
            "pretrain": self.chat_model(template),
            "apply_chat_template": True,
            "max_len": 64,
            **more,
        }

    def start(self, words: list[str]) -> None:
        from lightppo.config.supervised_options import COMMANDS
        from lightppo.preflight.before_imports import preflight_supervised
        from lightppo.supervised.trainer import SupervisedTrainer

        config = parse_args(words, kind=COMMANDS[self.command])
        preflight_supervised(config)
        SupervisedTrainer.from_config(config).fit()


class Mistake(NamedTuple):
    """``seed(bench)`` returns the options that it changes; ``said``: all of these are told."""

    seed: Callable[[Bench], dict[str, Any]]
    said: tuple[str, ...]
    refused: bool = True  # else a line to look at
    whole: bool = False  # a line after the step, else one before the models load


def chat(content: str, **more: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "label": "8", **more}


def server(bench: Bench, **answer: Any) -> str:
    running = JsonServer()
    running.reply = lambda path, body, n: ok(**answer)
    bench.monkeypatch.setattr(bench, "server", running, raising=False)
    return running.url


CONFIG = {
    "a flag that is misspelt": Mistake(
        lambda b: {"actor_learning_rat": 1e-6}, ("--actor_learning_rat", "did you mean '--actor_learning_rate'?")
    ),
    "batch sizes that do not divide": Mistake(
        lambda b: {"train_batch_size": 3}, ("--train_batch_size 3 does not divide the 4 samples",)
    ),
    "one sample with GRPO": Mistake(
        lambda b: {"advantage_estimator": "grpo"},
        ("--advantage_estimator grpo compares samples of one prompt: set --n_samples_per_prompt to at least 2",),
    ),
    "a KL loss without a KL": Mistake(
        lambda b: {"use_kl_loss": True, "init_kl_coef": 0}, ("--use_kl_loss", "--init_kl_coef"),
    ),
    "lengths beyond the positions": Mistake(
        lambda b: {"generate_max_len": 60}, ("--generate_max_len 60 = 80 tokens", "has 64 positions: lower one")
    ),
    "a learning rate × 1000": Mistake(
        lambda b: {"actor_learning_rate": 1e-2}, ("--actor_learning_rate 0.01: models", "1e-07 to 1e-05"), refused=False
    ),
    "no episode": Mistake(lambda b: {"num_episodes": 0}, ("--num_episodes must be a whole number ≥1",)),
    "no model there": Mistake(lambda b: {"pretrain": "./no/model"}, ("--pretrain ./no/model: no such folder",)),
    "a disk that is too small": Mistake(
        lambda b: b.small_disk() or {"save_steps": 1},
        ("--ckpt_path", "checkpoints need about", "--max_ckpt_num"),
    ),
    "LoRA on layers that are not there": Mistake(
        lambda b: {"lora_rank": 4, "target_modules": ["query_proj"]}, ("--target_modules", "query_proj", "q_proj")
    ),
    "a resume folder that is no run's": Mistake(
        lambda b: {"resume": b.folder}, ("--resume", "not a folder of checkpoints", "name the --ckpt_path")
    ),
    "bf16 without a master copy": Mistake(lambda b: {"bf16": True}, ("--bf16", "--zero_stage")),
    "an evaluation without data": Mistake(lambda b: {"best_metric": "eval/reward"}, ("--best_metric", "--eval_data")),
    "a file in the place of a folder": Mistake(
        lambda b: {"save_path": b.file("out", "")}, ("--save_path", "is a file, not a folder")
    ),
}  # fmt: skip

DATA = {
    "a wrong prompt column": Mistake(
        lambda b: {"input_key": "question"}, ("--input_key 'question' is not a column", "input, label")
    ),
    "a wrong label column": Mistake(lambda b: {"label_key": "answer"}, ("--label_key 'answer' is not a column",)),
    "labels missing in some rows": Mistake(
        lambda b: {"prompt_data": b.rows([*sums(10), {"input": "1+1="}])},
        ("1 of 11 prompts have no label, first", "rows.jsonl:11", "leave the rows out"), refused=False,
    ),
    "labels of another type in some rows": Mistake(
        lambda b: {"prompt_data": b.rows([*sums(10), {"input": "4+4=", "label": 8}])},
        ("1 of 11 prompts have a label that is not str as most are", "rows.jsonl:11", "in one type"), refused=False,
    ),
    "a prompt that is a number": Mistake(
        lambda b: {"prompt_data": b.rows([{"input": 7}])}, ("rows.jsonl:1: 'input' is int 7", "--on_bad_row skip")
    ),
    "an empty file": Mistake(lambda b: {"prompt_data": b.rows([])}, ("--prompt_data", "rows.jsonl", "empty")),
    "bytes that are no UTF-8": Mistake(
        lambda b: {"prompt_data": b.file("latin.jsonl", '{"input": "é", "label": "1"}\n'.encode("latin-1"))},
        ("latin.jsonl: not UTF-8 text", "position 11"),
    ),
    "a broken line": Mistake(
        lambda b: {"prompt_data": b.file("broken.jsonl", '{"input": "1"}\n{"input": "1",,}\n')},
        ("broken.jsonl:2: not JSON",),
    ),
    "held-out prompts that are trained on": Mistake(
        lambda b: {"eval_data": b.rows(sums(12)[8:], "held_out.jsonl")},
        ("4 of 4 prompts of --eval_data are in --prompt_data too, first", "held_out.jsonl:1", "remove them"),
        refused=False,
    ),
    "prompts that are there twice": Mistake(
        lambda b: {"prompt_data": b.rows(sums(6) * 2)}, ("6 of 12 prompts of --prompt_data are there before",),
        refused=False,
    ),
    "a split that is not there": Mistake(
        lambda b: {"eval_data": str(Path(b.rows(sums(3), "train.jsonl")).parent / "splits"), "eval_split": "test"},
        ("--eval_data",),
    ),
    "prompts that are too long": Mistake(
        lambda b: {"prompt_max_len": 5}, ("--prompt_max_len is 5: raise it, or choose --truncation",)
    ),
    "prompts that are cut": Mistake(
        lambda b: {"prompt_max_len": 4, "truncation": "right"},
        ("prompts are cut to --prompt_max_len 4", "--truncation right"), refused=False,
    ),
    "fewer prompts than a batch": Mistake(
        lambda b: {"rollout_batch_size": 64, "train_batch_size": 64},
        ("--rollout_batch_size 64 is more than the 12 prompts",), refused=False,
    ),
}  # fmt: skip

TEMPLATE = {
    "no {}": Mistake(lambda b: {"input_template": "Question:"}, ("--input_template 'Question:' needs exactly one {}",)),
    "a backslash and an n": Mistake(
        lambda b: {"input_template": "say {}\\n"},
        ("--input_template has a backslash and an n", "$'\\n'"), refused=False,
    ),
    "a blank at the end": Mistake(
        lambda b: {"input_template": "{}a: "},
        ("12 of 12 prompts end with a blank", "rows.jsonl:1", "--input_template"), refused=False,
    ),
    "no chat template": Mistake(
        lambda b: {"apply_chat_template": True}, ("--apply_chat_template: the tokenizer", "has no chat template")
    ),
    "a template that was applied before": Mistake(
        lambda b: {"pretrain": b.chat_model(), "apply_chat_template": True, "prompt_max_len": 40,
                   "prompt_data": b.rows([{"input": "<bos>user 4+4=<eos>assistant ", "label": "8"}])},
        ("1 of 1 prompts hold special tokens inside a message", "rows.jsonl:1", "applied before"), refused=False,
    ),
    "two begin-of-text tokens": Mistake(
        lambda b: {"prompt_data": b.rows([{"input": "<bos><bos>4+4=", "label": "8"}])},
        ("1 of 1 prompts begin with two begin-of-text tokens",), refused=False,
    ),
    "no generation prompt": Mistake(
        lambda b: {"pretrain": b.chat_model(CHAT.partition("{% if")[0]), "apply_chat_template": True,
                   "prompt_max_len": 40},
        ("no generation prompt", "12 of 12 prompts end with end-of-text"), refused=False,
    ),
    "a system prompt that the template drops": Mistake(
        lambda b: {"pretrain": b.chat_model(CHAT.replace("%}{{ m.role", "if m.role != 'system' %}{{ m.role", 1)),
                   "apply_chat_template": True, "system_prompt": "be kind", "prompt_max_len": 40},
        ("--system_prompt: the chat template drops it",),
    ),
    "turns that end with a token which stops nothing": Mistake(
        lambda b: {"pretrain": b.chat_model(CHAT.replace("{{ eos_token }}", "z")), "apply_chat_template": True,
                   "prompt_max_len": 40},
        ("the chat template ends an answer with 'z', at which sampling goes on: --stop 'z'",), refused=False,
    ),
    "turns that end with a special token which stops nothing": Mistake(
        lambda b: {"pretrain": b.chat_model(CHAT.replace("{{ eos_token }}", "<unk>z")), "apply_chat_template": True,
                   "prompt_max_len": 40},
        ("the chat template ends an answer with '<unk>z', at which sampling goes on: --stop '<unk>'",), refused=False,
    ),
    "the template of another model": Mistake(
        lambda b: {"pretrain": b.chat_model("<|im_start|>" + CHAT), "apply_chat_template": True, "prompt_max_len": 60,
                   "generate_max_len": 4},
        ("the chat template writes '<|im_start|>', no token of this tokenizer",), refused=False,
    ),
    "a tokenizer of a larger vocabulary": Mistake(
        lambda b: {"pretrain": save_causal_lm(b.folder / "small", vocab_size=20)},
        ("the tokenizer's largest id is", "20 embedding rows"),
    ),
    "a tokenizer of other characters": Mistake(
        lambda b: {"prompt_data": b.rows([{"input": "ÄÖ+1=", "label": "8"}])},
        ("1 of 1 prompts have tokens that the tokenizer does not know",), refused=False,
    ),
    "a stop string that nobody can write": Mistake(
        lambda b: {"stop": ["</answer>"]}, ("--stop '</answer>': the tokenizer cannot write it",), refused=False
    ),
    "a system prompt for plain text": Mistake(
        lambda b: {"system_prompt": "be kind"}, ("--system_prompt needs chat rows or --apply_chat_template",)
    ),
}  # fmt: skip

REWARD = {
    "None": Mistake(lambda b: {"reward_fn": b.scores("return None")}, ("reward.py:reward_func", "NoneType")),
    "NaN": Mistake(
        lambda b: {"reward_fn": b.scores("return [float('nan')] * len(queries)")},
        ("is nan; it must be a finite number",),
    ),
    "texts": Mistake(
        lambda b: {"reward_fn": b.scores("return ['good'] * len(queries)")},
        ("is 'good'; it must be a finite number",),
    ),
    "too few": Mistake(lambda b: {"reward_fn": b.scores("return [1.0]")}, ("reward_func: 1 scores for 2 samples",)),
    "two dimensions": Mistake(
        lambda b: {"reward_fn": b.scores("import torch; return torch.zeros(len(queries), 1)")},
        ("must have shape (B,), got (2, 1)",),
    ),
    "an error at some rows": Mistake(
        lambda b: {"reward_fn": b.reward("def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
                                         "    return 1 / (extra_info['index'] - 3)\n"),
                   "prompt_data": b.rows([{**row, "extra_info": {"index": i}} for i, row in enumerate(sums(4))])},
        ("reward.py:2 in compute_score: return 1 / (", "ZeroDivisionError"), refused=False,
    ),
    "an argument that the rows lack": Mistake(
        lambda b: {"reward_fn": b.reward("def reward_func(queries, prompts, labels, level): pass")},
        ("missing a required argument: 'level'", "--reward_fn_style"),
    ),
    "the same score for all": Mistake(
        lambda b: {"reward_fn": b.scores("return [0.5] * len(queries)"), "n_samples_per_prompt": 4,
                   "train_batch_size": 16},
        ("gave 0.5 to all of 56 made-up answers", "all 8 scores of the step are 0.5"), refused=False, whole=True,
    ),
    "an answer that is never found": Mistake(
        lambda b: {"reward_fn": b.scores(
            "return [float(f'ANSWER={l}' in q) - 0.1 * ('know' in q) for q, l in zip(queries, labels)]")},
        ("scores labels as answers no higher than ''", "such as '0'", "--label_key"), refused=False,
    ),
    "slow": Mistake(
        lambda b: {"reward_fn": b.scores("time.sleep(1.1); return [float(len(q)) for q in queries]"),
                   "rollout_batch_size": 512, "train_batch_size": 512},
        ("s for one sample", "the 512 of a step would take", "--reward_manager prime"), refused=False,
    ),
    "no such function": Mistake(
        lambda b: {"reward_fn": b.reward("def score(q): pass")}, ("has no 'reward_func'; it has score",)
    ),
    "an import that fails": Mistake(
        lambda b: {"reward_fn": b.reward("import no_such_module\ndef reward_func(queries, prompts, labels): pass")},
        ("reward.py:1 in <module>: import no_such_module", "ModuleNotFoundError"),
    ),
    "labels that no row has": Mistake(
        lambda b: {"prompt_data": b.rows([{"input": "1+1="}]),
                   "reward_fn": b.scores("return [float(l in q) for q, l in zip(queries, labels)]")},
        ("TypeError", "rows have no label: set --label_key"),
    ),
    "no server": Mistake(
        lambda b: {"reward_fn": None, "remote_rm_url": "http://127.0.0.1:9/score", "remote_rm_retries": 0},
        ("http://127.0.0.1:9/score",),
    ),
    "a server that answers with another shape": Mistake(
        lambda b: {"reward_fn": None, "remote_rm_url": server(b, rewards=[1.0]), "remote_rm_retries": 0},
        ("1 scores for 2 samples",),
    ),
    "no reward": Mistake(lambda b: {"reward_fn": None}, ("no reward: set --reward_fn path.py, --remote_rm_url",)),
    "a reward model with another tokenizer": Mistake(
        lambda b: {"reward_fn": None, "reward_pretrain": b.other_tokenizer(), "init_critic_from_actor": True},
        ("--reward_pretrain", "has another tokenizer than the actor: 2 of the actor's tokens",
         "Set --reward_input_tokenizer"),
    ),
    "a reward model without a head": Mistake(
        lambda b: {"reward_fn": None, "reward_pretrain": b.model, "init_critic_from_actor": True},
        ("--reward_pretrain", "score.weight"),
    ),
}  # fmt: skip

PAIRED = {  # the command, then what is wrong
    "rm: a wrong column of the chosen answers": Mistake(
        lambda b: {"chosen_key": "better"}, ("--chosen_key 'better' is not a column", "input, chosen, rejected")
    ),
    "dpo: no column of rejected answers": Mistake(
        lambda b: {"dataset": b.rows([{"input": "1+1=", "chosen": "2"}])}, ("--rejected_key 'rejected' is not a",)
    ),
    "rm: a wrong column of the margin": Mistake(lambda b: {"margin_key": "lead"}, ("--margin_key 'lead' is not a",)),
    "rm: a margin below 0": Mistake(
        lambda b: {"margin_key": "lead", **b.changed(0, lead=-1)}, ("--margin_key 'lead' is int -1; a number ≥ 0",)
    ),
    "rm: margins that are all the same": Mistake(
        lambda b: {"margin_key": "lead", "dataset": b.rows([row | {"lead": 0} for row in PAIRS])},
        ("all margins of 12 pairs are 0: is the right column named (--margin_key)?",), refused=False,
    ),
    "dpo: an empty answer": Mistake(lambda b: b.changed(3, rejected=" "), ("rows.jsonl:4: 'rejected' is empty",)),
    "dpo: equal answers": Mistake(
        lambda b: b.changed(2, rejected="4"), ("rows.jsonl:3: 'chosen' and 'rejected' are the same",)
    ),
    "rm: answers that a cut makes equal": Mistake(
        lambda b: {**b.changed(0, chosen="ab", rejected="ac"), "max_len": 5, "truncation": "right"},
        ("rows.jsonl:1: both answers have the same tokens, after a cut perhaps",),
    ),
    "dpo: pairs in both directions": Mistake(
        lambda b: b.changed(1, input="0+0=", chosen="a", rejected="0"),
        ("1 pairs are there the other way round", "rows.jsonl:1 and", "rows.jsonl:2"), refused=False,
    ),
    "rm: longer answers are the better ones": Mistake(
        lambda b: {"dataset": b.rows([{"input": f"{i}=", "chosen": "aaa", "rejected": "b"} for i in range(20)])},
        ("the chosen answer is the longer one in 20 of 20 pairs",), refused=False,
    ),
    "rm: held-out pairs that are trained on": Mistake(
        lambda b: {"eval_dataset": b.rows(PAIRS[:3], "held_out.jsonl")},
        ("3 of 3 prompts of --eval_dataset are in --dataset too, first", "held_out.jsonl:1"), refused=False,
    ),
    "dpo: a reference with another tokenizer": Mistake(
        lambda b: {"ref_pretrain": b.other_tokenizer()}, ("--ref_pretrain", "has another vocabulary", "'8', '9'")
    ),
    "dpo: no reference there": Mistake(lambda b: {"ref_pretrain": "./no"}, ("--ref_pretrain ./no: no such folder",)),
    "dpo: a learning rate × 1000": Mistake(
        lambda b: {"learning_rate": 1e-3}, ("--learning_rate 0.001: models", "1e-07 to 1e-05"), refused=False
    ),
    "rm: LoRA on layers that are not there": Mistake(
        lambda b: {"lora_rank": 4, "target_modules": ["query_proj"]}, ("--target_modules", "query_proj")
    ),
}  # fmt: skip

DEMONSTRATED = {
    "sft: a wrong column of the answer": Mistake(
        lambda b: {"output_key": "anser"}, ("--output_key 'anser' is not a column",)
    ),
    "sft: no answers": Mistake(lambda b: b.demonstrations([{"input": "1+1="}]), ("rows.jsonl:1: no completion",)),
    "sft: an empty answer": Mistake(
        lambda b: b.demonstrations([{"input": "1+1=", "output": ""}]), ("rows.jsonl:1: 'output' is empty",)
    ),
    "sft: the prompt as its answer": Mistake(
        lambda b: {"output_key": "input"}, ("12 of 12 answers are the prompt once more", "rows.jsonl:1"), refused=False
    ),
    "sft: a column with one value": Mistake(
        lambda b: b.demonstrations([{"input": f"{i}=", "output": "math"} for i in range(5)]),
        ("all 5 answers are 'math': is the right column named (--output_key)?",), refused=False,
    ),
    "sft: a template that drops the answer": Mistake(
        lambda b: b.chats(NO_ANSWER), ("rows.jsonl:1: the chat template drops the text of messages of the role 'assistant'",)
    ),
    "sft: a template that drops the reasoning": Mistake(
        lambda b: b.chats(NO_REASONING, **b.demonstrations([{"input": "1+1?", "output": "so 1+1=2"}])),
        ("rows.jsonl:1: the chat template drops or changes text of the answer: str 'so 1+1=2'",),
    ),
    "sft: a template that rewrites the prompt": Mistake(
        lambda b: b.chats("{{ messages | length }}" + CHAT), ("the chat template writes the prompt differently",)
    ),
    "sft: the template of another model": Mistake(
        lambda b: b.chats("<|im_start|>" + CHAT), ("writes '<|im_start|>', no token of this tokenizer",), refused=False
    ),
    "sft: no generation prompt": Mistake(
        lambda b: b.chats(CHAT.partition("{% if")[0]), ("no generation prompt",), refused=False
    ),
    "sft: no chat template": Mistake(
        lambda b: {"apply_chat_template": True}, ("--apply_chat_template: the tokenizer", "has no chat template")
    ),
    "sft: end-of-text within the answers": Mistake(
        lambda b: b.demonstrations([{"input": "1+1=", "output": "2<eos>"}]),
        ("1 of 1 answers hold special tokens", "whose end-of-text is added"), refused=False,
    ),
    "sft: answers of nothing but special tokens": Mistake(
        lambda b: b.demonstrations([{"input": "1+1=", "output": "é"}]),
        ("1 of 1 answers have no text to learn", "tokens that the tokenizer does not know"), refused=False,
    ),
    "sft: answers that run into their prompt": Mistake(
        lambda b: b.demonstrations([{"input": "what is one", "output": "first"}]),
        ("1 of 1 answers follow a word without a blank or a line", "--input_template"), refused=False,
    ),
    "sft: a length that leaves no answer": Mistake(
        lambda b: {"max_len": 4, "truncation": "right"}, ("(4 of the prompt), the limit is 4: raise --max_len",)
    ),
    "sft: a length that drops all rows": Mistake(
        lambda b: {"max_len": 3, "truncation": "drop"}, ("no row is left to train on", "12 overlong")
    ),
    "sft: a length that drops some rows": Mistake(
        lambda b: {"max_len": 6, "truncation": "drop"},
        ("7 of 12 rows are longer than --max_len 6, and left out",), refused=False,
    ),
    "sft: a length that cuts answers": Mistake(
        lambda b: {"max_len": 7, "truncation": "right"},
        ("2 of 12 rows are cut to --max_len 7: their answers never end",), refused=False,
    ),
    "sft: rows beyond the positions": Mistake(
        lambda b: b.demonstrations([{"input": "1" * 60, "output": "2" * 60}], max_len=200),
        ("--max_len 200: the longest row has 121 tokens, but", "has 64 positions: set --max_len 64"),
    ),
    "sft: rows that are there twice": Mistake(
        lambda b: {"dataset": b.rows(PAIRS * 2)}, ("12 of 24 rows of --dataset are there before",), refused=False
    ),
    "sft: fewer rows than a batch": Mistake(
        lambda b: {"train_batch_size": 64}, ("--train_batch_size 64 is more than the 12 rows",), refused=False
    ),
    "sft: batch sizes that do not divide": Mistake(
        lambda b: {"train_batch_size": 5}, ("--train_batch_size 5 must be a multiple of --micro_train_batch_size 2",)
    ),
    "sft: a broken line": Mistake(
        lambda b: {"dataset": b.file("broken.jsonl", '{"input": "1", "output": "2"}\n{"input"\n')},
        ("broken.jsonl:2: not JSON",),
    ),
    "sft: no file": Mistake(lambda b: {"dataset": "./none.jsonl"}, ("--dataset", "none.jsonl")),
    "sft: a tokenizer of a larger vocabulary": Mistake(
        lambda b: {"pretrain": save_causal_lm(b.folder / "small", vocab_size=20)},
        ("the tokenizer's largest id is", "20 embedding rows"),
    ),
    "sft: a model that knows nothing": Mistake(
        lambda b: {"train_batch_size": 12, "micro_train_batch_size": 12},
        ("the loss of the step, ", "is that of guessing among 43 tokens"), refused=False, whole=True,
    ),
    "sft: a disk that is too small": Mistake(
        lambda b: b.small_disk() or {"save_steps": 1}, ("--ckpt_path", "checkpoints need about"),
    ),
}  # fmt: skip

ON_DATA = PAIRED | DEMONSTRATED
ALL = {f"{part}: {name}": mistake
       for part, table in {"config": CONFIG, "data": DATA, "template": TEMPLATE, "reward": REWARD}.items()
       for name, mistake in table.items()} | ON_DATA  # fmt: skip
SAMPLE = {  # of the suite, mostly what only a dry run tells
    "config: a flag that is misspelt",
    "data: labels missing in some rows",
    "data: held-out prompts that are trained on",
    "data: labels of another type in some rows",
    "template: a template that was applied before",
    "template: no generation prompt",
    "template: a system prompt that the template drops",
    "template: turns that end with a token which stops nothing",
    "rm: margins that are all the same",
    "dpo: pairs in both directions",
    "sft: a template that drops the reasoning",
    "sft: a model that knows nothing",
    "reward: an answer that is never found",
    "reward: the same score for all",
}


def models_load(*parts: Any) -> None:
    raise ModelsLoad


@pytest.fixture
def bench_of(tmp_path, tiny_model, monkeypatch):
    """``bench_of("rm")``."""
    made = []

    def make(command: str) -> Bench:
        parts = tmp_path, tiny_model, monkeypatch
        made.append(OnData(command, *parts) if command in ("sft", "rm", "dpo") else Bench(*parts))
        return made[0]

    yield make
    if hasattr(made[0], "server"):
        made[0].server.close()


@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.long) for n in ALL]
)
def test_a_mistake_is_found_with_its_cause_and_what_to_do(
    bench_of, name, capsys, caplog, monkeypatch
):
    mistake, start, bench = ALL[name], time.monotonic(), bench_of(name.partition(":")[0])
    changes, refusal, code = mistake.seed(bench), "", None
    if not mistake.refused and not mistake.whole:
        monkeypatch.setattr("lightppo.trainer.build.build_models", models_load)
        for objective in OBJECTIVES:
            monkeypatch.setattr(objective, "build_model", models_load)
    try:
        bench.run(**changes)
    except ModelsLoad:
        pass
    except UserError as error:
        refusal = str(error)
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    told = " ".join((printed.out + printed.err + caplog.text + refusal).replace("│", " ").split())
    assert [part for part in mistake.said if part not in told] == [], told
    assert bool(refusal or code == 2) is mistake.refused, told
    assert time.monotonic() - start < 30
    assert not (bench.folder / "run").exists()


@pytest.mark.parametrize("command", ["rm", "dpo"])
def test_training_on_pairs_without_mistakes_is_told_nothing_and_shows_its_rows(
    bench_of, capsys, command
):
    bench = bench_of(command)
    bench.run(
        eval_dataset=bench.rows([{"input": "9=", "chosen": "9", "rejected": "8"}], "held_out.jsonl")
    )
    told = capsys.readouterr().out
    assert "look at this" not in told
    assert "the first row, " in told
    assert (
        "chosen:\n    0+0=[0<eos>]\n6 tokens, 2 of them trained\nrejected:\n    0+0=[a<eos>]\n"
        in told
    )
    assert "tokens: median " in told
    assert "dry run: one step of the 2 longest rows, loss " in told


def test_a_run_without_mistakes_is_told_nothing(bench_of, capsys):
    bench = bench_of("ppo")
    bench.run(eval_data=bench.rows([{"input": "90+9=", "label": "99"}], "held_out.jsonl"))
    assert "look at this" not in capsys.readouterr().out


def test_a_port_of_the_launcher_that_is_in_use(bench_of, tmp_path):
    bench, script = bench_of("sft"), tmp_path / "command.py"
    script.write_text("from lightppo.__main__ import main\n\nmain()\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        rank = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(
            ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"
        )
        env = rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = [f"--{name}={value}" for name, value in bench.flags.items()]
        result = run_ranks(script, "sft", *words, "--dry_run", world_size=1, check=False, env=env)
    assert result.returncode == 1
    assert (
        f"port {port} is in use, by another run perhaps: choose one with --master_port"
        in result.output
    )
    assert "Traceback" not in result.output


def test_there_are_as_many_as_promised():
    assert len(ALL) >= 40
    assert [
        len(table) >= least
        for table, least in ((CONFIG, 10), (DATA, 10), (TEMPLATE, 8), (REWARD, 8))
    ] == [True] * 4
    assert len(ON_DATA) >= 15
    assert ALL.keys() > SAMPLE


ENVIRONMENT = """
class Env:
    def reset(self, level, **row): self.level = level
    def step(self, text): return None
    def get_reward(self): return float(self.level)
"""


def test_an_environment_is_not_asked_about_made_up_answers(bench_of, capsys, monkeypatch):
    """It reads the columns of a row, so rows with one prompt may be several."""
    monkeypatch.setattr("lightppo.trainer.build.build_models", models_load)
    bench = bench_of("ppo")
    rows = [{"input": row["input"], "level": level} for row in sums(6) for level in (1, 2)]
    flags = {"env": f"{bench.file('env.py', ENVIRONMENT)}:Env", "reward_fn": None}
    flags |= {"reward_source": "environment", "prompt_data": bench.rows([*rows, rows[0]])}
    with pytest.raises(ModelsLoad):
        bench.run(**flags)
    said = capsys.readouterr().out
    assert "1 of 13 prompts of --prompt_data are there before" in said
    assert "--reward_source environment scores episodes, so no answers are made up" in said
    assert "the reward fails" not in said
