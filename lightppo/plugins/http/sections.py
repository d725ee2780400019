"""Options of reward servers; docs/rewards.md."""

from functools import partial

from lightppo.option import Section, option

safe = partial(option, resume_safe=True)


class RewardServerConfig(Section, adds_to="reward"):
    """Reward servers of --remote_rm_url."""

    remote_rm_timeout: float = safe(60.0, "Timeout of a request.", "seconds", gt=0)
    remote_rm_retries: int = safe(3, "Retries after a failed request.", ge=0)
    remote_rm_token_env: str | None = safe(
        None, "Environment variable with the servers' bearer token.", needs="server"
    )
