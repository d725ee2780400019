"""``lightppo audit``: recomputes the numbers that any trainer wrote."""
