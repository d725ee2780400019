"""Packed rows: several sequences in one row without padding, a prompt once for all its samples."""

from lightppo.option import register_section
from lightppo.plugin import LAYOUTS, LayoutEntry
from lightppo.table import Table

PACKED_LAYERS: Table = Table("type of layer in packed rows")
"""What can be packed beside full and sliding attention: under its name in ``layer_types`` a function of the Hugging Face
model, whose ``MODULES`` have been changed; it returns why it cannot, or None. The layers get a row's segments,
:func:`lightppo.models.packing.packed_rows.segments_as_mask`, as far as the plugin brings them there."""

NO_POSITIONS = "no position ids"
"""What :data:`PACKED_LAYERS` asks about a model whose forward takes no position ids."""

PACKED_ATTENTION: Table = Table("attention of packed rows")
"""What attends inside packed rows where sdpa cannot: under its name among transformers' attentions a function of the
Hugging Face model that tells whether it does the same as the model's own, and which registers it with transformers. It
takes :func:`lightppo.models.packing.packed_rows.segments_as_mask`."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    LAYOUTS.register(
        "packed",
        LayoutEntry(
            "lightppo.models.packing.packed_layout:PackedLayout",
            arguments=("packing_samples", "share_prompts"),
        ),
    )
    register_section("packing", "lightppo.config.packing_options:PackingConfig", adds_to="training")
