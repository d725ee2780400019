"""Rewards of episodes: the environment's, no score of failed ones, and answers that are on the tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightppo.config.reward_options import is_file_alone
from lightppo.data.records import Rollout
from lightppo.episodes.tape import REWARD, Tape, digest_of, first_difference, tape_of
from lightppo.episodes.tape_files import Entry, TapeError
from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.ranks import Ranks
from lightppo.redaction import without_secrets
from lightppo.rewards.reward_source import (
    RewardOutput,
    RewardRequest,
    RewardSource,
    check_output,
    close_source,
)

Key = tuple[int, int, int]  # prompt, sample, how often it was asked for before


def environment_reward(request: RewardRequest) -> RewardSource:
    """Return the source of ``--reward_source environment``."""
    return EnvironmentReward(of_turns=request.config.episodes.env_reward == "turns")


class EnvironmentReward:
    """Score by what the environments gave: the rewards of an episode's turns and of its end, added up.

    With ``of_turns`` each turn's reward also stands on the turn's last sampled token (that of the end on the last
    turn's), as a token score.
    """

    name = "environment"
    per_sample = True

    def __init__(self, of_turns: bool = False) -> None:
        self.of_turns = of_turns

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        if plain_rollout := next((rollout for rollout in rollouts if rollout.turns is None), None):
            raise RewardError(
                f"prompt {plain_rollout.prompt.index} is no episode: --reward_source environment needs --env"
            )
        scores = [
            None if has_failed(rollout) else sum(turn["reward"] for turn in rollout.turns)
            for rollout in rollouts
        ]
        if not self.of_turns:
            return RewardOutput(scores)
        return RewardOutput(scores, token_scores=[_token_scores(rollout) for rollout in rollouts])


def has_failed(rollout: Rollout) -> bool:
    """Tell whether it is an episode whose environment failed: no token of it was kept."""
    return rollout.turns is not None and not rollout.response_ids


def _token_scores(rollout: Rollout) -> list[float] | None:
    if has_failed(rollout):
        return None
    scores = [0.0] * len(rollout.response_ids)
    for turn in rollout.turns:
        scores[turn["end"]] += turn["reward"]
    return scores


def unless_failed(source: RewardSource) -> RewardSource:
    """Return the source that does not see failed episodes."""
    return source if isinstance(source, EnvironmentReward) else UnlessFailed(source)


class UnlessFailed:
    """Ask another source about all but episodes whose environment failed: they have no score."""

    def __init__(self, source: RewardSource) -> None:
        self.source = source
        self.name = source.name
        self.needs_all_ranks = getattr(source, "needs_all_ranks", False)
        self.per_sample = getattr(source, "per_sample", False)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        played_indices = [
            index for index, rollout in enumerate(rollouts) if not has_failed(rollout)
        ]
        answer = self.source.score([rollouts[index] for index in played_indices])
        if len(played_indices) == len(rollouts):
            return answer

        def spread(values: list[Any] | None) -> list[Any] | None:
            if values is None:
                return None
            spread_values: list[Any] = [None] * len(rollouts)
            for sample_index, sample_value in zip(played_indices, values):
                spread_values[sample_index] = sample_value
            return spread_values

        return RewardOutput(
            spread(answer.scores),
            {column_name: spread(values) for column_name, values in answer.metrics.items()},
            spread(answer.token_scores),
            {column_name: spread(texts) for column_name, texts in answer.texts.items()},
        )

    def close(self) -> None:
        close_source(self.source)


# -- on the tape ---------------------------------------------------------------------------------------------------------


def taped(
    make_source: Callable[[], RewardSource], name: str, is_certain: bool, request: RewardRequest
) -> RewardSource:
    """Return the source with the tape around it, where a tape has its answers; see ``RewardRequest.around``.

    A tape that plays needs no source.
    """
    tape = tape_of(request.ranks, request.config)
    if tape is None:
        return make_source()
    # A function that scores only evaluations has an entry of its own.
    if request.flag != "--reward_fn":
        name = f"{name} of {request.flag}"
    if tape.plays:  # of a source that is not on the tape, the run itself is asked
        is_on_tape = name in tape.sources
        if is_on_tape:
            return TapedReward(None, name, tape, request.ranks)
        return make_source()
    is_file = name == "server" and is_file_alone(request.config.reward.remote_rm_url)
    of_episode = request.config.flat().get("env_contract") == "trl"  # it asks their objects
    is_kept = is_certain and not is_file
    if not (is_kept or of_episode or request.config.tape.tape == "all"):
        return make_source()
    return TapedReward(make_source(), name, tape, request.ranks)


class TapedReward:
    """Write down what a source answers, or answer in its place.

    A batch of which the tape has every answer is not sent; of any other batch all samples are, because a source may
    compare them.

    Args:
        source: None where the tape plays.
        kind: the name of the source in ``--reward_source``.
    """

    def __init__(self, source: RewardSource | None, kind: str, tape: Tape, ranks: Ranks) -> None:
        self.source = source
        self.kind = kind
        self.tape = tape
        self.ranks = ranks
        if source is not None:
            tape.sources[kind] = source.name
        self.name = tape.sources[kind]  # which names its metrics
        self.needs_all_ranks = getattr(source, "needs_all_ranks", False)
        self.per_sample = getattr(source, "per_sample", False)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Score as the source does.

        Raises:
            TapeError: a tape that plays has no answer for a sample, or one for another response.
        """
        if not self.tape.is_on:
            if self.source is None:
                raise TapeError(
                    f"{self.kind} is asked outside a run, and a tape plays in its place"
                )
            return self.source.score(rollouts)
        keys = [self._key(rollout) for rollout in rollouts]
        entries = [self.tape.reward(self.kind, *key) for key in keys]
        if self.tape.plays:
            for rollout, key, entry in zip(rollouts, keys, entries):
                self._require(rollout, key, entry)
        if self._are_there(rollouts, entries):
            self.tape.answered += len(entries)
            return _output_of(entries)
        return self._ask_source(rollouts, keys)

    def close(self) -> None:
        if self.source is not None:
            close_source(self.source)

    def _key(self, rollout: Rollout) -> Key:
        sample_place = (rollout.prompt.index, rollout.sample_index)
        return (*sample_place, self.tape.number_of_asking(self.kind, *sample_place))

    def _are_there(self, rollouts: Sequence[Rollout], entries: Sequence[Entry | None]) -> bool:
        """Tell whether each sample has an answer for its response. Collective if the source is."""
        are_answered = all(
            entry is not None
            and (self.tape.plays or "failure" not in entry or entry["failure"]["goes_on"])
            and ("failure" in entry or entry["response"] == digest_of(rollout.response_ids))
            for rollout, entry in zip(rollouts, entries)
        )
        if self.needs_all_ranks:
            return bool(self.ranks.all_reduce(int(are_answered), "min"))
        return are_answered

    def _require(self, rollout: Rollout, key: Key, entry: Entry | None) -> None:
        question = f"reward of {self.kind}, prompt {key[0]}, sample {key[1]}"
        if entry is None:
            raise self.tape.lacks(question)
        if "failure" in entry or entry["response"] == digest_of(rollout.response_ids):
            return
        taped_tokens = entry.get("tokens")
        difference = (
            f": {first_difference(taped_tokens, rollout.response_ids)}" if taped_tokens else ""
        )
        raise TapeError(
            f"{question}: the tape judges another response than this run has sampled in step "
            f"{self.tape.step}{difference}. Another machine or version rounds otherwise; --skip_rollout keeps samples"
        )

    def _ask_source(self, rollouts: list[Rollout], keys: Sequence[Key]) -> RewardOutput:
        """Return what the source answers; it is written down, failures too."""
        try:
            output = check_output(self.source.score(rollouts), rollouts, self.source.name)
        except RewardError as error:
            goes_on = isinstance(error, NonFiniteRewardError)
            text = without_secrets(str(error))
            failure = {"kind": type(error).__name__, "text": text, "goes_on": goes_on}
            self.tape.write({"kind": REWARD, "source": self.kind, "of": keys, "failure": failure})
            raise
        numbered_rollouts = zip(keys, rollouts, range(len(rollouts)))
        self.tape.write(
            *(self._entry(key, rollout, output, index) for key, rollout, index in numbered_rollouts)
        )
        return output

    def _entry(
        self, key: Key, rollout: Rollout, output: RewardOutput, index: int
    ) -> dict[str, Any]:
        prompt_index, stream, question_number = key
        entry: dict[str, Any] = {"kind": REWARD, "source": self.kind, "prompt": prompt_index}
        entry |= {"sample": stream, "number": question_number, "score": output.scores[index]}
        entry |= {
            "metrics": {
                column_name: values[index] for column_name, values in output.metrics.items()
            }
        }
        entry |= {
            "texts": {column_name: texts[index] for column_name, texts in output.texts.items()}
        }
        if output.token_scores is not None:
            entry["token_scores"] = output.token_scores[index]
        entry["response"] = digest_of(rollout.response_ids)
        if rollout.turns is None:  # the turns of an episode are on the tape
            entry["tokens"] = rollout.response_ids
        return entry


def _output_of(entries: Sequence[Entry]) -> RewardOutput:
    """Return the answer that was given; raise the error that was raised."""
    if failed_entry := next((entry for entry in entries if "failure" in entry), None):
        failure = failed_entry["failure"]
        error_type = NonFiniteRewardError if failure["goes_on"] else RewardError
        raise error_type(failure["text"])

    def columns(column_name: str) -> dict[str, list[Any]]:
        names = dict.fromkeys(
            entry_column for entry in entries for entry_column in entry[column_name]
        )
        return {
            entry_column: [entry[column_name].get(entry_column) for entry in entries]
            for entry_column in names
        }

    token_scores = None
    if any("token_scores" in entry for entry in entries):
        token_scores = [entry.get("token_scores") for entry in entries]
    scores = [entry["score"] for entry in entries]
    return RewardOutput(scores, columns("metrics"), token_scores, columns("texts"))
