"""What a mistyped or unknown name may have meant; arguments of small commands."""

from lightppo.suggestions import ASKED


def register() -> None:
    """Let the core ask this plugin what names mean."""
    for function in ("nearest", "meant"):
        ASKED[function] = f"lightppo.plugins.hints.meant_names:{function}"
