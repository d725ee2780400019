"""Recurrent layers (gated delta net, Mamba, short convolutions) in packed rows and decoding slots; sinks, capped scores,
chunks and alibi in packed rows."""

from lightppo.plugin import MODULES
from lightppo.plugins.decoding import SLOT_LAYERS
from lightppo.plugins.packing import NO_POSITIONS, PACKED_ATTENTION, PACKED_LAYERS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    MODULES.register("recurrent", Entry("lightppo.models.attention.mixers:run_by_segment"))
    MODULES.register("alibi", Entry("lightppo.models.attention.alibi:run_by_sequence"))
    PACKED_LAYERS.register(NO_POSITIONS, Entry("lightppo.models.attention.alibi:why_not"))
    PACKED_ATTENTION.register(
        "packed_alibi", Entry("lightppo.models.attention.alibi:attends_with_alibi")
    )
    for kind in ("linear_attention", "conv", "hybrid"):
        PACKED_LAYERS.register(kind, Entry("lightppo.models.attention.mixers:why_not"))
    for kind in ("mlp", "moe"):
        PACKED_LAYERS.register(kind, Entry("lightppo.models.attention.mixers:position_wise"))
    PACKED_LAYERS.register("chunked_attention", Entry("lightppo.models.attention.chunks:why_not"))
    PACKED_ATTENTION.register(
        "packed_chunks", Entry("lightppo.models.attention.chunks:attends_in_chunks")
    )
    PACKED_ATTENTION.register(
        "packed_eager", Entry("lightppo.models.attention.eager:attends_by_own_code")
    )
    for kind in ("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"):
        SLOT_LAYERS.register(kind, Entry("lightppo.models.attention.recurrent_slots:slots_of"))
