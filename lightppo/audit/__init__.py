"""``lightppo audit``: recomputes the numbers of a dump, of whichever trainer."""
