"""GroupCollector: refilling, surplus, exhaustion, and agreement of ranks that are threads."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from support.fakes import FakeEngine, FakeReward, FakeStrategy, on_ranks

from lightppo.data.records import Prompt
from lightppo.errors import RewardError
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampler import (
    BestOfN,
    CollectedStep,
    GroupCollector,
    GroupFilter,
    RolloutSampler,
    deal,
)

HARD, MIXED, EASY = 0, 1, 2  # all wrong, one of two right, all right


def table(kinds: Iterable[int]) -> dict[tuple[int, int], float]:
    """Scores of two samples of each prompt, by what kind it is."""
    return {
        (i, j): float(kind == EASY or (kind == MIXED and j == 1))
        for i, kind in enumerate(kinds)
        for j in (0, 1)
    }


class Episode:
    """Prompts ``first .. last`` in batches, every rank its share."""

    def __init__(
        self, count: int, batch_size: int, strategy: FakeStrategy | None = None, first: int = 0
    ) -> None:
        rank, world = (strategy.rank, strategy.world_size) if strategy else (0, 1)
        batches = [range(i, min(i + batch_size, count)) for i in range(first, count, batch_size)]
        self.batches = [
            [Prompt(f"p{i}", [i + 1], index=i) for i in batch[rank::world]] for batch in batches
        ]
        self.served: list[int] = []

    @property
    def exhausted(self) -> bool:
        return not self.batches

    def take(self) -> list[Prompt]:
        prompts = self.batches.pop(0)
        self.served += [p.index for p in prompts]
        return prompts


def collector(
    kinds, strategy=None, *, groups=2, keep=True, scores=None, **options
) -> GroupCollector:
    rewards = FakeReward(table(kinds) if scores is None else scores)
    return GroupCollector(
        RolloutSampler(FakeEngine(), rewards, SamplingParams(n=2)),
        strategy or FakeStrategy(),
        groups_per_step=groups,
        group_filter=GroupFilter() if keep else None,
        **{"max_batches": 0, **options},
    )


def trained(step: CollectedStep) -> list[int]:
    """Prompts of the groups, each once; fails where a group is not whole."""
    pairs = [(r.prompt.index, r.sample_index) for r in step.rollouts]
    assert pairs == [(i, j) for i in dict.fromkeys(i for i, _ in pairs) for j in (0, 1)]
    return list(dict.fromkeys(i for i, _ in pairs))


# -- one rank --------------------------------------------------------------------------------------------------------


def test_rejected_groups_are_replaced_and_the_surplus_waits():
    kinds = [HARD, EASY, MIXED, HARD, MIXED, MIXED, MIXED, EASY]
    own, episode = collector(kinds), Episode(8, 2)
    first = own.collect(episode, 1)
    # Batches 0 1 | 2 3 | 4 5: none, one and two accepted; 5 is one too many.
    assert trained(first) == [2, 4]
    assert episode.served == [0, 1, 2, 3, 4, 5]
    assert [group[0].prompt.index for _, group in own.surplus] == [5]
    expected = {
        "num_gen_batches": 3,
        "trained_groups": 2,
        "surplus_groups": 1,
        "generated_samples": 12,
    }
    expected |= {
        "rejected_equal": 3,
        "rejected_low": 0,
        "rejected_high": 0,
        "rejected_unmeasured": 0,
    }
    expected |= {"kept_share": 0.5, "stale_groups": 0, "staleness": 0, "reused_groups": 0}
    assert {name: first.counts[name] for name in expected} == expected

    second = own.collect(episode, 2)
    assert trained(second) == [5, 6]
    assert (second.counts["stale_groups"], second.counts["staleness"]) == (1, 0.5)
    assert (second.counts["num_gen_batches"], second.surplus, episode.exhausted) == (1, 0, True)


def test_an_oversampled_batch_feeds_several_steps_without_a_filter():
    own, episode = collector([HARD] * 6, keep=False, max_batches=1), Episode(6, 6)
    seen = [own.collect(episode, step) for step in (1, 2, 3)]
    assert [trained(step) for step in seen] == [[0, 1], [2, 3], [4, 5]]
    assert [step.surplus for step in seen] == [4, 2, 0]
    assert [step.counts["num_gen_batches"] for step in seen] == [1, 0, 0]
    assert [step.counts["staleness"] for step in seen] == [0, 1, 2]
    assert "kept_share" not in seen[0].counts
    assert len(own.sampler.engine.calls) == 1


def test_the_end_of_an_episode_is_a_short_step_and_may_be_an_empty_one():
    own, episode = (
        collector([MIXED, EASY, HARD], on_exhausted="raise", max_batches=5),
        Episode(3, 2),
    )
    step = own.collect(episode, 1)
    assert (trained(step), step.groups, episode.exhausted) == ([0], 1, True)
    own, episode = collector([EASY, HARD], on_exhausted="reuse", max_batches=5), Episode(2, 2)
    step = own.collect(episode, 1)
    assert (trained(step), step.groups, step.counts["kept_share"]) == ([], 0, 0)


@pytest.mark.parametrize(("policy", "repeated"), [("train_short", []), ("reuse", [0, 1])])
def test_too_few_groups_after_the_last_batch(policy, repeated):
    own, episode = (
        collector([MIXED, EASY, HARD, EASY, MIXED], on_exhausted=policy, max_batches=2),
        Episode(5, 2),
    )
    step = own.collect(episode, 1)
    assert (trained(step), step.repeated) == ([0], repeated)
    assert step.groups == 1 + bool(repeated)
    assert step.counts["reused_groups"] == bool(repeated)
    assert not episode.exhausted
    assert own.strategy.printed == [
        "step 1: 1 of 2 groups accepted after 2 generation batches (--max_num_gen_batches); 4 were sampled; "
        f"--on_exhausted {policy}"
    ]


def test_reuse_goes_round_and_has_nothing_to_use_without_a_group():
    own = collector([MIXED, MIXED, EASY, EASY], groups=5, on_exhausted="reuse", max_batches=1)
    step = own.collect(Episode(6, 4), 1)
    # 2 groups for 5 places: 0, 1 and again 0, 1, 0; two samples each
    assert (step.repeated, step.groups) == ([0, 1, 2, 3, 0, 1], 5)
    own = collector([EASY, EASY], on_exhausted="reuse", max_batches=1)
    assert own.collect(Episode(4, 2), 1).groups == 0
    assert own.strategy.printed == [
        "step 1: 0 of 2 groups accepted after 1 generation batches (--max_num_gen_batches); 2 were sampled; "
        "--on_exhausted reuse finds none to train on again: this step trains on nothing"
    ]


def test_raise_says_what_to_do():
    own = collector([MIXED, EASY, EASY, EASY], on_exhausted="raise", max_batches=1)
    with pytest.raises(
        RewardError, match=r"step 7: 1 of 2 groups .*--max_num_gen_batches.* --filter_range"
    ):
        own.collect(Episode(4, 2), 7)


def test_a_metric_that_no_sample_has_is_an_error():
    own = collector([MIXED, MIXED])
    own.group_filter = GroupFilter("acc")
    with pytest.raises(
        RewardError, match=r"--filter_metric acc: no sample of step 1 has it; .* gives score"
    ):
        own.collect(Episode(2, 2), 1)


def test_nothing_scored_is_an_error_and_no_endless_search():
    own = collector([], scores={})
    with pytest.raises(RewardError, match="step 3: none of the samples was scored"):
        own.collect(Episode(50, 2), 3)
    assert len(own.sampler.engine.calls) == 1


def test_unscored_groups_are_replaced_from_the_surplus():
    scores = {key: score for key, score in table([MIXED] * 3).items() if key[0] != 0}
    step = collector([], scores=scores, keep=False, max_batches=1).collect(Episode(3, 3), 1)
    assert (trained(step), step.counts["unscored"]) == ([1, 2], 2)


def test_best_of_n_comes_before_the_filter():
    # Prompt 0: 0 1 1, of which 1 1 are the best and equal; prompt 1: 0 0 1, of which 0 1 are and differ.
    scores = {(0, 0): 0.0, (0, 1): 1.0, (0, 2): 1.0, (1, 0): 0.0, (1, 1): 0.0, (1, 2): 1.0}
    sampler = BestOfN(FakeEngine(), FakeReward(scores), SamplingParams(n=3), group_size=2)
    own = GroupCollector(sampler, FakeStrategy(), groups_per_step=2, group_filter=GroupFilter())
    step = own.collect(Episode(2, 2), 1)
    assert [(r.prompt.index, r.sample_index) for r in step.rollouts] == [(1, 0), (1, 2)]
    assert (step.counts["not_best"], step.counts["generated_samples"]) == (2, 6)
    assert len(step.scored) == 6  # all that was sampled


def test_the_surplus_is_saved_and_comes_back():
    kinds, episode = [MIXED] * 8, Episode(8, 6)
    own = collector(kinds)
    own.collect(episode, 1)
    assert len(own.surplus) == 4
    other = collector(kinds)
    other.load_state_dict(own.state_dict())
    assert other.surplus == own.surplus
    first, second = own.collect(episode, 2), other.collect(Episode(8, 6, first=6), 2)
    assert (first.rollouts, first.surplus) == (second.rollouts, second.surplus)
    assert second.counts["staleness"] == 1
    # the prompt is one object for its samples, as it was
    assert len({id(r.prompt) for r in other.surplus[0][1]}) == 1


def test_a_greedy_baseline_survives_being_saved():
    scores = table([MIXED] * 2)
    for baseline in (True, False):
        sampler = RolloutSampler(
            FakeEngine(), FakeReward(scores), SamplingParams(n=2), greedy_baseline=baseline
        )
        own = GroupCollector(sampler, FakeStrategy(), groups_per_step=1)
        own.collect(Episode(2, 2), 1)
        state = own.state_dict()
        own.load_state_dict(state)
        assert own.state_dict() == state
        rewards = {r.baseline.reward if r.baseline else None for r in own.surplus[0][1]}
        assert rewards == ({0.0} if baseline else {None})


# -- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "needed", "expected"),
    [
        ([5, 1, 4], 8, [4, 1, 3]),
        ([5, 1, 4], 6, [3, 1, 2]),
        ([0, 4], 4, [0, 4]),
        ([3, 3], 4, [2, 2]),
        ([3, 3], 5, [3, 2]),
        ([1, 0], 4, [1, 0]),
        ([0, 0], 4, [0, 0]),
        ([7], 4, [4]),
    ],
)
def test_shares_are_as_even_as_the_ranks_can_make_them(available, needed, expected):
    assert deal(needed, [0] * len(available), room=available) == expected


@pytest.mark.parametrize(
    ("available", "missing", "expected"),
    [([2, 0, 1], 3, [1, 0, 2]), ([0, 0], 4, [0, 0]), ([1, 0], 3, [3, 0]), ([2, 2], 0, [0, 0])],
)
def test_repeats_even_the_ranks_out(available, missing, expected):
    assert deal(missing, available, [missing if groups else 0 for groups in available]) == expected


@pytest.mark.parametrize("spoilt", [0, 1])
def test_all_groups_of_one_rank_are_rejected_and_none_of_the_other(spoilt):
    # Rank 0 has the even prompts, rank 1 the odd ones.
    kinds = [HARD if i % 2 == spoilt else MIXED for i in range(16)]

    def run(strategy):
        own, episode = collector(kinds, strategy, groups=4), Episode(16, 4, strategy)
        return (
            [own.collect(episode, step) for step in (1, 2)],
            len(own.sampler.engine.calls),
            own.surplus,
        )

    ranks = on_ranks(2, run)
    for rank, (steps, calls, surplus) in enumerate(ranks):
        assert calls == 4  # two batches for each step, on both
        assert [len(trained(step)) for step in steps] == ([0, 0] if rank == spoilt else [4, 4])
        assert surplus == []
        assert [step.groups for step in steps] == [4, 4]
        assert all(step.counts == ranks[0][0][i].counts for i, step in enumerate(steps))


def test_every_accepted_group_is_trained_on_once_at_any_number_of_ranks():
    kinds = [(HARD, MIXED, EASY, MIXED, MIXED)[i * 7 % 5] for i in range(40)]
    wanted = [i for i, kind in enumerate(kinds) if kind == MIXED]
    for world_size in (1, 2, 4):

        def run(strategy):
            own, episode = collector(kinds, strategy, groups=4), Episode(40, 8, strategy)
            seen, sizes, step = [], [], 0
            while not episode.exhausted or sizes[-1][1]:
                step += 1
                collected = own.collect(episode, step)
                seen += trained(collected)
                sizes.append((collected.groups, collected.surplus))
            return seen, episode.served, [groups for groups, _ in sizes]

        ranks = on_ranks(world_size, run)
        assert sorted(i for seen, *_ in ranks for i in seen) == wanted
        assert sorted(i for _, served, _ in ranks for i in served) == list(range(40))
        assert ranks[0][2] == [4] * 6  # 24 groups
        assert all(rank[2] == ranks[0][2] for rank in ranks)


@pytest.mark.parametrize("policy", ["train_short", "raise", "reuse"])
def test_ranks_agree_on_exhaustion(policy):
    def run(strategy):
        own = collector([MIXED, HARD] * 4, strategy, groups=4, max_batches=1, on_exhausted=policy)
        try:
            step = own.collect(Episode(8, 4, strategy), 1)
        except RewardError as error:
            return str(error)
        return len(step.rollouts), len(step.repeated), step.groups

    first, second = on_ranks(2, run)
    if policy == "raise":
        assert first == second
        assert first.startswith("step 1: 2 of 4 groups accepted after 1 generation batches")
    else:
        assert first == (4, 4 * (policy == "reuse"), 4 if policy == "reuse" else 2)
        assert second == (0, 0, first[2])


def test_an_error_that_only_the_ranks_together_can_see_is_raised_on_all():
    def run(strategy, scores):
        own = collector([], strategy, scores=scores, max_batches=1)
        try:
            return own.collect(Episode(4, 4, strategy), 1).groups
        except RewardError as error:
            return str(error)

    only_rank_1 = {key: 1.0 for key in table([HARD] * 4) if key[0] % 2}
    assert on_ranks(2, lambda strategy: run(strategy, only_rank_1)) == [0, 0]
    message = "step 1: none of the samples was scored, so there is nothing to train on"
    assert on_ranks(2, lambda strategy: run(strategy, {})) == [message] * 2


def test_a_score_that_is_not_finite_on_one_rank_leaves_the_step_out_on_all():
    def run(strategy):
        scores = table([MIXED] * 8) | {(1, 0): float("nan")}  # prompt 1 is rank 1's
        own = collector([], strategy, scores=scores, groups=4)
        step = own.collect(Episode(8, 4, strategy), 1)
        return step.groups, step.not_finite, len(own.sampler.engine.calls)

    first, second = on_ranks(2, run)
    assert first == second
    assert first[0] == 0
    assert first[1].startswith("rank 1: table: the score of sample 0 (prompt row 1, sample_index 0")
    assert first[2] == 1


def test_an_episode_ends_for_all_ranks_when_one_has_no_prompts_left():
    def run(strategy):
        episode = Episode(4, 4, strategy)
        if strategy.rank == 0:
            episode.batches.append([Prompt("p8", [9], index=8)])  # more than the other rank has
        own = collector([EASY] * 9, strategy, groups=4)
        step = own.collect(episode, 1)
        return step.groups, len(own.sampler.engine.calls), step.counts["num_gen_batches"]

    assert on_ranks(2, run) == [(0, 1, 1)] * 2
