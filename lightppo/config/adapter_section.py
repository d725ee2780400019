"""The options of LoRA adapters."""

from lightppo.config.fields import option, section


@section
class AdapterConfig:
    """LoRA: small trained matrices beside frozen weights (arXiv:2106.09685); docs/lora.md."""

    lora_rank: int = option(0, "Rank of the adapters of actor and critic; 0: all weights are trained.", ge=0)
    lora_alpha: float | None = option(None, "Adapters are scaled by this / --lora_rank. None: 16.", gt=0)
    lora_dropout: float | None = option(
        None, "Dropout before the adapters, in training forwards only. None: 0.", ge=0, lt=1
    )
    load_in_4bit: bool = option(
        False,
        "QLoRA: hold the frozen weights of actor, critic and reference in 4 bits (NF4); needs --lora_rank and "
        "bitsandbytes.",
    )
    target_modules: tuple[str, ...] = option(
        (),
        "Linear layers with an adapter, by the end of their names, e.g. q_proj v_proj. None given: all but the head.",
    )
