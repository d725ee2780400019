"""The commands of ``lightppo``, one module each; ``lightppo/__main__.py`` has their table."""
