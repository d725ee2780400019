"""Faster decoding of the hf engine: continuous batching in slots and, if an option asks for them, CUDA graphs."""

from lightppo.option import register_section
from lightppo.plugin import CHECKS, DECODERS, DECODING_RUNNERS, Check
from lightppo.table import Entry, Table

SLOT_LAYERS: Table = Table(
    "cache layer in decoding slots",
    {"DummyLayer": Entry("lightppo.plugins.decoding.slots:NoSlots")},
)
"""What decodes in slots beside layers of keys and values: under the name of the class of transformers' cache layer a
function of such a layer and the :class:`lightppo.plugins.decoding.slots.Span` of the slots. It returns what has the
methods of :class:`lightppo.plugins.decoding.slots.SlotLayer`."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.decoding"
    DECODERS.register("slots", Entry(f"{here}.slots:slots_for"))
    CHECKS.register("cuda_graphs", Check(f"{here}.graphs:check_device"))
    DECODING_RUNNERS.register("cuda_graphs", Entry(f"{here}.graphs:runner"))
    register_section("decoding", f"{here}.sections:DecodingConfig", adds_to="engine")
