"""Options of LoRA and of weights in 4 bits; docs/lora.md."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from lightppo.option import Section, option

lora = partial(option, needs="lora_rank>0")


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

    conditions = {
        "own_reference": "a reference model of its own (no --lora_rank, or another --ref_pretrain)"
    }
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
        return {"lora_alpha": 16.0, "lora_dropout": 0.0} if config.adapter.lora_rank > 0 else {}

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if not hasattr(options, "ref_zero_stage") or not reference_is_actor(options.config):
            return
        if options.ref_zero_stage != (3 if options.zero_stage == 3 else 0):
            yield f"--ref_zero_stage needs {AdapterConfig.conditions['own_reference']}"


def reference_is_actor(config: Any) -> bool:
    """Whether the reference is the actor with its adapters off, and no model of its own."""
    trains_adapters, compares = config.adapter.lora_rank > 0, config.algorithm.init_kl_coef > 0
    return (
        trains_adapters and compares and config.model.ref_pretrain in (None, config.model.pretrain)
    )
