"""What is measured: models, prompts and settings of both sides. No imports but the standard library: both read this.

A workload is the same work on both sides: weights, prompts, samples, epochs, optimizer steps. How a side does it fast
is its own affair: ``SPEED_FLAGS`` are lightppo's, :func:`trl_settings` has TRL's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL_TOKENS = (PAD, BOS, EOS)  # ids 0, 1, 2
SEED = 17
# Small enough that the policy, and with it the length of the responses, stays as it is.
LEARNING_RATE = 1e-7
VLLM_MEMORY = 0.3  # share of a GPU that vLLM gets in the process that trains, TRL's default


@dataclass(frozen=True)
class Scale:
    """Sizes that fit a machine.

    Attributes:
        hidden, layers, heads, kv_heads, intermediate, vocabulary: of the Llama, untied.
        prompt_tokens: shortest and longest prompt.
        new_tokens: longest response.
        end_probability: of end-of-text, at every token.
        bf16: else float32.
        micro_batch_tokens: in one pass of lightppo.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    prompt_tokens: tuple[int, int]
    new_tokens: int
    end_probability: float
    bf16: bool = False
    micro_batch_tokens: int = 2048

    @property
    def body_parameters(self) -> int:
        """Weights that every token is multiplied with: all but embedding, norms and head."""
        attention = 2 * self.hidden * self.hidden * (1 + self.kv_heads / self.heads)
        return int(self.layers * (attention + 3 * self.hidden * self.intermediate))

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocabulary


SCALES = {
    "cpu": Scale(256, 6, 4, 4, 688, 1024, (8, 64), 128, 1 / 46),
    "gpu": Scale(
        896, 24, 14, 2, 4864, 151_936, (64, 512), 512, 1 / 184, bf16=True, micro_batch_tokens=16_384
    ),
    # of gpu_check.py: larger models for its passes, and what tries it on a CPU
    "1.5B": Scale(
        1536,
        28,
        12,
        2,
        8960,
        151_936,
        (64, 512),
        512,
        1 / 184,
        bf16=True,
        micro_batch_tokens=16_384,
    ),
    "7B": Scale(
        3584,
        28,
        28,
        4,
        18_944,
        152_064,
        (64, 512),
        512,
        1 / 184,
        bf16=True,
        micro_batch_tokens=16_384,
    ),
    "tiny": Scale(64, 2, 2, 1, 128, 640, (4, 16), 16, 1 / 8, micro_batch_tokens=256),
    # of SmolLM2-135M-Instruct, whose answers end where they end
    "smollm2": Scale(576, 30, 9, 3, 1536, 49_152, (1, 64), 32, 0.0),
}


@dataclass(frozen=True)
class Workload:
    """Attributes: prompts per iteration, samples of each, epochs, samples per optimizer step, whether with critic.

    ``scale`` is that of a real model, which does not change with the machine; its assets are of real_assets.py.
    ``vllm``: both sides sample with vLLM in the process that trains, which stays awake.
    """

    name: str
    algorithm: str
    prompts: int
    samples_per_prompt: int
    epochs: int = 2
    minibatch: int = 16
    critic: bool = False
    kl_coef: float = 0.05
    scale: str | None = None
    vllm: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} with vLLM" if self.vllm else self.name

    @property
    def samples(self) -> int:
        return self.prompts * self.samples_per_prompt

    @property
    def optimizer_steps(self) -> int:
        """Per iteration."""
        return self.samples * self.epochs // self.minibatch


WORKLOADS = {
    "W1": Workload("W1", "PPO with critic and reference", 64, 1, critic=True),
    "W2": Workload("W2", "GRPO with reference", 16, 8),
}
# beside models of random weights; W3 is in asynchronous.py
REAL_WORKLOADS = {
    "W4": Workload("W4", "GRPO with reference, SmolLM2-135M-Instruct", 16, 8, scale="smollm2"),
}

# What makes lightppo fast and does not change what it computes; drawing by groups changes which samples share a step.
SPEED_FLAGS: dict[str, list[str]] = {
    "W1": ["--packing_samples", "--micro_rollout_batch_size", "64"],
    "W2": ["--packing_samples", "--micro_rollout_batch_size", "128", "--shuffle", "groups"],
}
SPEED_FLAGS["W4"] = SPEED_FLAGS["W2"]
_ALGORITHM_FLAGS = {
    "W1": ["--advantage_estimator", "gae", "--critic_learning_rate", str(LEARNING_RATE)],
    "W2": ["--advantage_estimator", "grpo", "--use_kl_loss", "--kl_estimator", "k3"],
}
_ALGORITHM_FLAGS["W4"] = _ALGORITHM_FLAGS["W2"]


def prompt_texts(workload: Workload, scale: Scale, seed: int = SEED) -> list[str]:
    """The prompts of every iteration: words of the tokenizer, one token each."""
    rng = random.Random(f"{seed} {workload.name}")
    words = range(len(SPECIAL_TOKENS), scale.vocabulary)
    return [
        " ".join(f"w{rng.choice(words)}" for _ in range(rng.randint(*scale.prompt_tokens)))
        for _ in range(workload.prompts)
    ]


def questions(workload: Workload, seed: int = SEED) -> list[tuple[str, int]]:
    """Return the questions of a real model, and their answers."""
    rng = random.Random(f"{seed} {workload.name}")
    pairs = [divmod(pair, 90) for pair in rng.sample(range(90 * 90), workload.prompts)]
    pairs = [(a + 10, b + 10) for a, b in pairs]
    return [(f"What is {a} plus {b}? Reply with the number only.", a + b) for a, b in pairs]


def lightppo_flags(
    workload: Workload, scale: Scale, assets: Path, output: Path, iterations: int
) -> list[str]:
    """The command line of ``examples/train_ppo.py``."""
    values: dict[str, Any] = {
        "pretrain": assets / "model",
        "prompt_data": assets / f"{workload.name}.jsonl",
        "reward_fn": Path(__file__).with_name("even_words.py"),
        "prompt_max_len": scale.prompt_tokens[1],
        "generate_max_len": scale.new_tokens,
        "rollout_batch_size": workload.prompts,
        "n_samples_per_prompt": workload.samples_per_prompt,
        "train_batch_size": workload.minibatch,
        "max_epochs": workload.epochs,
        "max_tokens_per_micro_batch": scale.micro_batch_tokens,
        "num_episodes": iterations,  # an episode is one iteration: all prompts once
        "init_kl_coef": workload.kl_coef,
        "actor_learning_rate": LEARNING_RATE,
        "lr_scheduler": "constant",
        "lr_warmup_ratio": 0,
        "num_examine": 0,
        "resume": "never",
        "save_path": output,
        "ckpt_path": output / "checkpoints",
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    # bf16 needs master weights, which ZeRO 0 does not have; and it is for a GPU
    precision = ["--bf16", "--zero_stage", "1"] if scale.bf16 else ["--zero_stage", "0"]
    engine = ["--hf_cuda_graphs"] if scale.bf16 else []
    if workload.vllm:
        engine = ["--rollout_engine", "vllm", "--gpu_memory_utilization", str(VLLM_MEMORY)]
        engine += ["--no_free_cache_engine", "--max_num_seqs", str(workload.samples)]
    further = [*_ALGORITHM_FLAGS[workload.name], *SPEED_FLAGS[workload.name]]
    return [*flags, *further, *precision, *engine]


def trl_settings(workload: Workload, scale: Scale, iterations: int, *, cpu: bool) -> dict[str, Any]:
    """Arguments of TRL's PPOConfig or GRPOConfig: what its documentation advises, one micro batch per minibatch."""
    shared = {
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "seed": SEED,
        "bf16": scale.bf16,
        "use_cpu": cpu,
        "gradient_checkpointing": False,
        "gradient_accumulation_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "dataloader_num_workers": 0,
        "temperature": 1.0,
    }
    if workload.critic:
        return shared | {
            "per_device_train_batch_size": workload.samples,
            "num_mini_batches": workload.samples // workload.minibatch,
            "num_ppo_epochs": workload.epochs,
            "total_episodes": workload.samples * iterations,
            # whole: 40 GB of logits on a GPU
            "local_rollout_forward_batch_size": 16 if scale.bf16 else workload.samples,
            "response_length": scale.new_tokens,
            "stop_token": "eos",
            "kl_coef": workload.kl_coef,
            "num_sample_generations": 0,
            "logging_steps": 1,
        }
    if workload.vllm:
        shared |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            # on a CPU a share of its memory, most of which others have
            "vllm_gpu_memory_utilization": 0.05 if cpu else VLLM_MEMORY,
            "vllm_max_model_length": scale.prompt_tokens[1] + scale.new_tokens,
            "vllm_importance_sampling_correction": False,  # lightppo's default
        }
    return shared | {
        "per_device_train_batch_size": workload.minibatch,
        "steps_per_generation": workload.samples // workload.minibatch,
        "num_generations": workload.samples_per_prompt,
        "num_iterations": workload.epochs,
        "max_steps": workload.optimizer_steps * iterations,
        "max_completion_length": scale.new_tokens,
        "beta": workload.kl_coef,
        "logging_steps": workload.optimizer_steps,
    }


def trl_optimizer_steps(settings: dict[str, Any]) -> int:
    """Optimizer steps per iteration that such settings come to."""
    if "num_mini_batches" in settings:
        return settings["num_mini_batches"] * settings["num_ppo_epochs"]
    return (
        settings["steps_per_generation"]
        * settings["num_iterations"]
        // settings["gradient_accumulation_steps"]
    )


def training_flops(
    workload: Workload,
    scale: Scale,
    prompt_tokens: float,
    generated_tokens: float,
    *,
    shared: bool = False,
) -> float:
    """Floating-point operations that the training of one iteration needs on real tokens.

    6 per parameter and token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), for actor and critic, and the
    attention's 6 · layers · hidden · (mean sequence length) per token, half of the full square as it is causal. The
    head counts for response tokens of the actor alone.

    Args:
        workload: what was run.
        scale: its sizes.
        prompt_tokens: per iteration, each sample's.
        generated_tokens: per iteration.
        shared: a prompt goes through the models once for all its samples: its tokens count once.
    """
    models = 2 if workload.critic else 1
    return (
        3
        * workload.epochs
        * _forward_flops(workload, scale, prompt_tokens, generated_tokens, models, 1, shared)
    )


def iteration_flops(
    workload: Workload,
    scale: Scale,
    prompt_tokens: float,
    generated_tokens: float,
    *,
    shared: bool = False,
) -> float:
    """The same of a whole iteration: generation, the log probs of actor and reference, values, training."""
    bodies, heads = (4, 3) if workload.critic else (3, 3)
    forwards = _forward_flops(
        workload, scale, prompt_tokens, generated_tokens, bodies, heads, shared
    )
    return forwards + training_flops(
        workload, scale, prompt_tokens, generated_tokens, shared=shared
    )


def _forward_flops(
    workload: Workload,
    scale: Scale,
    prompt_tokens: float,
    generated_tokens: float,
    bodies: int,
    heads: int,
    shared: bool,
) -> float:
    """Of forward passes over all samples: so many through the layers, so many of them through the head too."""
    sequence = (prompt_tokens + generated_tokens) / workload.samples
    attention = 2 * scale.layers * scale.hidden * sequence
    tokens = generated_tokens + prompt_tokens / (workload.samples_per_prompt if shared else 1)
    body = tokens * (2 * scale.body_parameters + attention)
    return bodies * body + heads * 2 * scale.head_parameters * generated_tokens
