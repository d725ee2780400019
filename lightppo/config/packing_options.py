"""Options of packed rows."""

from lightppo.option import Section, option


class PackingConfig(Section, adds_to="training", resume_safe=True):
    """Rows without padding, and prompts that run once."""

    packing_samples: bool | None = option(
        None,
        "Put several sequences in one row, without padding. None: with sdpa or flash_attention_2, if all models "
        "keep the sequences apart exactly; the log says if not.",
    )
    share_prompts: bool = option(
        True,
        "With sdpa: compute a prompt once for all its samples.",
        needs="packing_samples!=False",
    )
