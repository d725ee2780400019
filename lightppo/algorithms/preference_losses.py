"""Preference losses by name. Free of torch, as the command line reads them; the functions are in ``preferences``."""

from __future__ import annotations

from dataclasses import dataclass

from lightppo.option import Option
from lightppo.table import Entry, Table


@dataclass(frozen=True)
class PreferenceLossEntry(Entry):
    """A loss of pairs without a reward model: of how far the policy leads its reference, and ``beta``."""

    # log probs of an answer are means over its tokens, where --average_log_probs says nothing
    of_means: bool = False


_PREFERENCES = "lightppo.algorithms.preferences"

PREFERENCE_LOSSES: Table[PreferenceLossEntry] = Table(
    "--preference_loss",
    {
        "dpo": PreferenceLossEntry(
            f"{_PREFERENCES}:dpo_loss",
            options=(
                Option(
                    "label_smoothing", float, 0.0, "assumed share of pairs with swapped answers; above 0: cDPO.",
                    ge=0, lt=0.5,
                ),
            ),
        ),
        "ipo": PreferenceLossEntry(f"{_PREFERENCES}:ipo_loss", of_means=True),
    },
)  # fmt: skip
