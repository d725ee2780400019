"""Options of models: where they come from, how they load, and LoRA; docs/models.md, docs/lora.md."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

from lightppo.config.contradictions import condition_text
from lightppo.config.rules import reference_is_actor
from lightppo.config.training_options import FROZEN_MODELS
from lightppo.option import Section, option

safe = partial(option, resume_safe=True)
critic = partial(option, needs="critic")
kl = partial(option, needs="init_kl_coef>0")
lora = partial(option, needs="lora_rank>0")


class ModelConfig(Section, of="weights"):
    """Models: where they come from and how they are loaded."""

    pretrain: str | None = option(
        None, "Actor: local path, hub name or fsspec URL of a causal LM.", required=True
    )
    ref_pretrain: str | None = kl(None, "Reference model. None: the initial actor.")
    critic_pretrain: str | None = critic(
        None,
        "Critic. None: the first --reward_pretrain, or --pretrain if there is none, whose values are 0 at first.",
    )
    init_critic_from_actor: bool = critic(
        False, "Start the critic from --pretrain, even with a reward model."
    )
    reward_pretrain: tuple[str, ...] = option(
        (), "Reward models. --reward_fn path.py:name combines several."
    )
    value_head_prefix: str = option(
        "score", "Name of the value head in critic and reward checkpoints."
    )
    init_from_scratch: bool = option(
        False, "Use random weights with the model's config instead of its checkpoint."
    )
    external_lib: str | None = option(
        None, "Module to import before the models, e.g. to register an architecture."
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with a checkpoint.")
    tokenizer_path: str | None = option(
        None, "Tokenizer: local path, hub name or fsspec URL. None: --pretrain's."
    )
    disable_fast_tokenizer: bool = option(
        False, "Use the Python tokenizer instead of the Rust one. Fails if transformers has none."
    )
    bf16: bool = option(
        False,
        "Train in bfloat16 with an fp32 master copy. Off: fp32.",
        needs="zero_stage!=0 and critic_zero_stage!=0",
    )
    fp16: bool = option(
        False,
        "GPU only: float16 with an fp32 master copy and dynamic loss scaling. Closer to the rollout engine than bf16.",
        needs="zero_stage!=0 and critic_zero_stage!=0",
    )
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = option(
        "auto",
        "Attention kernel. auto: sdpa; before torch 2.11 flash_attention_2 if usable (GPU, 16 bits, flash-attn). "
        "Gemma 2: flash_attention_2 or eager.",
        off=("flash_attention_2",),
    )
    flash_attn: bool = option(False, "The same as --attn_implementation flash_attention_2.")
    gradient_checkpointing: bool = option(
        False,
        "Recompute activations in the backward pass: less memory, more time.",
        resume_safe=True,
    )
    gradient_checkpointing_use_reentrant: bool = safe(
        False,
        "Use torch's reentrant checkpointing.",
        needs="gradient_checkpointing",
    )
    activation_offload: bool = safe(
        False, "GPU only: keep activations in CPU memory. They are copied while the GPU computes."
    )
    torch_compile: bool = safe(
        False,
        "Compile the layers of actor, critic and reference: minutes at the start, faster steps on a GPU.",
        needs="zero_stage!=3 and critic_zero_stage!=3 and ref_zero_stage!=3",
    )
    use_liger_kernel: bool | None = safe(
        None,
        "GPU only: use liger-kernel's norms, rotary embeddings and MLPs. None: if it is installed and gives the same "
        "log probs and gradients, without --torch_compile; the log says which.",
    )
    override_config: str | None = option(
        None,
        'JSON that changes the config of all but reward models: {"rope_theta": 1e6}. Dropout set here acts in '
        "training.",
    )

    exclusive = (
        ("flash_attn", "attn_implementation", "contradict each other"),
        ("bf16", "fp16", "contradict each other"),
        (
            "gradient_checkpointing_use_reentrant",
            "aux_loss_coef torch_compile",
            "do not work together",
        ),
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if options.override_config is None:
            return
        try:
            values = json.loads(options.override_config)
        except json.JSONDecodeError:
            values = None
        if isinstance(values, dict):
            yield from _wrong_dropouts(values)
        else:
            yield f"--override_config must be a JSON object, not {options.override_config!r}"


def _wrong_dropouts(overrides: dict[str, Any]) -> Iterator[str]:
    """Refuse rates of ``--override_config``, those of its parts too, that are none."""
    for name, value in overrides.items():
        if isinstance(value, dict):
            yield from _wrong_dropouts(value)
        elif value is None or isinstance(value, bool) or not ("drop" in name or "jitter" in name):
            continue
        elif not (isinstance(value, int | float) and 0 <= value < 1):
            yield f"--override_config {name!r}: a rate is a number of at least 0 and below 1, not {value!r}"


class AdapterConfig(Section, of="weights"):
    """LoRA: small trained matrices next to frozen weights (arXiv:2106.09685); docs/lora.md."""

    lora_rank: int = option(0, "LoRA rank for actor and critic. 0: train all weights.", ge=0)
    lora_alpha: float | None = lora(
        None, "Scale the adapters by this / --lora_rank. None: 16.", gt=0, off=(16,)
    )
    lora_dropout: float | None = lora(
        None, "Dropout before the adapters, in training only. None: 0.", ge=0, lt=1, off=(0,)
    )
    load_in_4bit: bool = lora(
        False, "QLoRA: keep the frozen weights in 4 bits (NF4, bitsandbytes)."
    )
    target_modules: tuple[str, ...] = lora(
        (),
        "Layers with adapters, by the end of their names. None or all-linear: all that can have one, but the head.",
        off=(("all-linear",),),
    )

    exclusive = (
        ("lora_rank", "enable_ema", "are of adapters, and of an average of all weights"),
        (
            "lora_rank",
            "ref_ema_eta ref_reset_steps",
            "cannot go together: the reference is the actor without adapters",
        ),
    )

    @staticmethod
    def facts(config: Any) -> Mapping[str, bool]:
        return {"own_reference": not reference_is_actor(config)}

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        if config.adapter.lora_rank > 0:
            return {"lora_alpha": 16.0, "lora_dropout": 0.0}
        return {}

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if not hasattr(options, "ref_zero_stage") or not reference_is_actor(options.config):
            return
        has_others = options.reward_pretrain or options.teacher_pretrain or options.enable_ema
        if options.ref_zero_stage != (3 if options.zero_stage == 3 else 0) and not has_others:
            yield f"--ref_zero_stage needs {condition_text(FROZEN_MODELS)}"
