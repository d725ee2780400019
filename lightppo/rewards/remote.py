"""Rewards from HTTP servers: POST ``{"query", "prompts", "labels"}``, get ``{"rewards", "scores"?, "extra_logs"?}``.

All values are lists with one entry per sample; ``query`` is prompt + response.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from itertools import count, pairwise

from lightppo.config.reward_options import is_file_alone
from lightppo.data.records import Rollout
from lightppo.errors import NonFiniteRewardError, RefusedError, RequestError, RewardError
from lightppo.http_client import HTTPClient, check_url, read_token
from lightppo.ranks import Alone, Ranks
from lightppo.rewards.function import (
    FunctionReward,
    OnFailure,
    check_failure_options,
    function_source,
)
from lightppo.rewards.reward_source import (
    RewardOutput,
    RewardRequest,
    RewardSource,
    check_output,
    join_outputs,
    output_from_result,
)

logger = logging.getLogger(__name__)


def server_reward(request: RewardRequest) -> RewardSource:
    """Return the source of ``--remote_rm_url``, servers or a Python file."""
    reward_options = request.config.reward
    if is_file_alone(reward_options.remote_rm_url):
        options = request.options_of(FunctionReward)
        return function_source(reward_options.remote_rm_url[0], "--remote_rm_url", options)
    return RemoteReward(
        reward_options.remote_rm_url,
        timeout=reward_options.remote_rm_timeout,
        retries=reward_options.remote_rm_retries,
        token=read_token(env=reward_options.remote_rm_token_env),
        ranks=request.ranks,
        **request.options_of(RemoteReward),
    )


@dataclass(eq=False, repr=False)
class RemoteReward:
    """Split the samples of all ranks over several servers of the same service and ask them in parallel.

    A rank asks only the servers of its share: not each of many ranks asks each server for a sample or two.

    Metrics per sample, with retries or ``on_reward_failure="unscored"``: ``failures`` (failed requests) and
    ``timeouts``, each plus what the server itself sent under that name.
    """

    urls: Sequence[str]
    _: KW_ONLY
    timeout: float = 60.0  # seconds per request
    retries: int = 3  # further tries after a failed request; see HTTPClient
    # What a failed last try is: "error", or "unscored" samples. A refusal is always an error.
    on_reward_failure: OnFailure = "error"
    token: str | None = None  # sent as Authorization: Bearer …
    sleep: Callable[[float], None] | None = None
    name: str = "remote"
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("--remote_rm_url: no URL given")
        for url in self.urls:
            check_url(url)
        check_failure_options(self.on_reward_failure)
        options = {
            "timeout": self.timeout,
            "retries": self.retries,
            "token": self.token,
            "sleep": self.sleep,
        }
        self._calls = count()
        self._servers = [HTTPClient(url, "reward server", **options) for url in self.urls]

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Score the samples; the :class:`RewardError` names every server that gave no usable answer, and why."""
        server_count = len(self._servers)
        sample_count = len(rollouts)
        ranks = self.ranks or Alone()
        # As if the samples of all ranks, equally many, stood in one row: each server has the next equal part of it.
        part_edges = [
            sample_count * ranks.world_size * i // server_count - sample_count * ranks.get_rank()
            for i in range(server_count + 1)
        ]
        rollout_parts = [
            rollouts[max(0, start) : max(0, stop)] for start, stop in pairwise(part_edges)
        ]
        # Calls take turns, so that a few finished samples at a time reach all servers, too.
        call_number = next(self._calls)
        server_shares = [
            (self._servers[(i + call_number) % server_count], rollouts_of_server)
            for i, rollouts_of_server in enumerate(rollout_parts)
            if rollouts_of_server
        ]
        if not server_shares:
            return RewardOutput([])
        with ThreadPoolExecutor(len(server_shares), thread_name_prefix="reward") as executor:
            answers = list(executor.map(self._ask, *zip(*server_shares)))
        if errors := [answer for answer in answers if isinstance(answer, Exception)]:
            message = "; ".join(map(str, errors))
            if all(isinstance(error, NonFiniteRewardError) for error in errors):
                raise NonFiniteRewardError(message)
            raise RewardError(message)
        return join_outputs(answers)

    def close(self) -> None:
        """End waits between tries."""
        for server in self._servers:
            server.close()

    def _ask(
        self, server: HTTPClient, rollouts: list[Rollout]
    ) -> RewardOutput | RequestError | NonFiniteRewardError:
        """Return one server's answer about its share, or why there is none."""
        sample_count = len(rollouts)
        failures: list[RequestError] = []
        request_body = {
            "query": [rollout.prompt.text + rollout.response_text for rollout in rollouts],
            "prompts": [rollout.prompt.text for rollout in rollouts],
            "labels": [rollout.prompt.label for rollout in rollouts],
        }

        def read(result: dict) -> RewardOutput:
            return check_output(
                output_from_result(result, sample_count, self.name), rollouts, self.name
            )

        try:
            output = server.post("", request_body, read, on_failure=failures.append)
        except ValueError as error:
            raise RewardError(f"{error}; labels must be text, numbers, lists or objects") from None
        except RequestError as error:
            if self.on_reward_failure == "error" or isinstance(error, RefusedError):
                if error.answer_error is NonFiniteRewardError:
                    return NonFiniteRewardError(str(error))
                return error
            logger.warning("%s; its %d samples stay unscored", error, sample_count)
            output = RewardOutput([None] * sample_count)
        if self.retries or self.on_reward_failure == "unscored":
            timeouts = sum(failure.timed_out for failure in failures)
            for count_name, number in (("failures", len(failures)), ("timeouts", timeouts)):
                server_counts = output.metrics.get(count_name, [None] * sample_count)
                output.metrics[count_name] = [
                    float(number) + (server_count or 0.0) for server_count in server_counts
                ]
        return output
