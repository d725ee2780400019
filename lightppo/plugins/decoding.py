"""Faster decoding of the hf engine: continuous batching in slots and, if an option asks for them, CUDA graphs."""

from lightppo.option import register_section
from lightppo.table import Entry, Table

SLOT_LAYERS: Table = Table(
    "cache layer in decoding slots",
    {"DummyLayer": Entry("lightppo.rollout.slots:NoSlots")},
)
"""What decodes in slots beside layers of keys and values: under the name of the class of transformers' cache layer a
function of such a layer and the :class:`lightppo.rollout.slots.Span` of the slots. It returns what has the
methods of :class:`lightppo.rollout.slots.SlotLayer`."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section(
        "decoding", "lightppo.config.decoding_options:DecodingConfig", adds_to="engine"
    )
