"""Options of reward servers; docs/rewards.md."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from lightppo.http_client import check_url
from lightppo.option import Section, option

safe = partial(option, resume_safe=True)


class RewardServerConfig(Section, adds_to="reward"):
    """Reward servers of --remote_rm_url."""

    remote_rm_timeout: float = safe(60.0, "Timeout of a request.", "seconds", gt=0)
    remote_rm_retries: int = safe(3, "Retries after a failed request.", ge=0)
    remote_rm_token_env: str | None = safe(
        None, "Environment variable with the servers' bearer token.", needs="server"
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        """Addresses of services that nobody can be reached at."""
        if options.by_hand:
            return  # a script has made its rewards by hand
        # A tape answers instead of the servers, which may be gone.
        asked = () if getattr(options, "tape_from", None) else options.remote_rm_url
        for url in asked:
            if (
                len(options.remote_rm_url) == 1
                and "://" not in url
                and url.split(":")[0].endswith(".py")
            ):
                continue
            try:
                check_url(url)
            except ValueError as error:
                yield str(error)
