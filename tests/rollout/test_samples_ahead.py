"""The collectors with --max_staleness, over thousands of small runs: bounds, order, and every sample once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes import FakeStrategy, on_ranks

from lightppo import PPOTrainer
from lightppo.data.records import Prompt, Rollout, group_by_prompt
from lightppo.errors import RewardError
from lightppo.rewards.reward_source import RewardOutput
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampler import (
    REASONS,
    BatchCollector,
    GroupCollector,
    GroupFilter,
    RolloutSampler,
    SamplesAhead,
    dealt_out,
)
from lightppo.trainer.loop import TrainerState
from lightppo.trainer.prompts import EpisodePrompts, RolloutBatchSampler

GROUP = 2  # samples of a prompt
TOO_MANY = 400  # steps of a run that does not end


@dataclass
class Case:
    """What one small run is like."""

    seed: int
    max_staleness: int
    prompts: int
    groups_per_step: int  # B
    groups_per_batch: int  # G
    max_batches: int
    episodes: int
    filters: bool
    world_size: int = 1
    on_exhausted: str = "train_short"
    acceptance: float = 0.6
    failures: float = 0.0  # share of samples that are not scored
    not_finite: float = 0.0  # share of batches
    last_step: int | None = None
    resumes: float = 0.0  # share of steps after which it is started again
    world_sizes: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        return not self.filters and self.groups_per_batch == self.groups_per_step


def random_case(seed: int, world_size: int = 1, **options: Any) -> Case:
    dice = random.Random(seed)
    groups = dice.randint(1, 6) * world_size
    batch = dice.randint(1, 7) * world_size
    filters = dice.random() < 0.7
    if not filters:
        batch = max(batch, groups)
    values = {
        "max_staleness": dice.choice([0, 1, 1]),
        "prompts": dice.randint(world_size, 24 * world_size + 3),
        "groups_per_step": groups,
        "groups_per_batch": batch,
        "max_batches": dice.choice([0, 1, 2, 3]) if filters else 1,
        "episodes": dice.randint(1, 3),
        "filters": filters,
        "world_size": world_size,
        "on_exhausted": dice.choice(["train_short", "reuse"]),
        "acceptance": dice.choice([0.1, 0.5, 0.9, 1.0]),
        "failures": dice.choice([0.0, 0.0, 0.1]),
        "last_step": dice.choice([None, None, dice.randint(1, 6)]),
        "resumes": dice.choice([0.0, 0.3, 1.0]),
    }
    return Case(seed, **values | options)


@dataclass
class Book:
    """What happened in a run on one rank."""

    sampled: list[tuple[int, int]] = field(default_factory=list)  # seed, prompt
    # step, seed, prompt, version, samples
    trained: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # over all ranks
    waits: int = 0  # samples that wait after the last step


def seed_of(group: list[Rollout]) -> int:
    return int(group[0].response_text.split()[0])


class Engine:
    """Samples in the call of ``finish``, and knows how many tickets are open."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.open = 0

    def generate(self, prompts: list[Prompt], sampling: SamplingParams) -> list[Rollout]:
        return self.finish(self.start(prompts, sampling))

    def start(self, prompts: list[Prompt], sampling: SamplingParams) -> Any:
        self.open += 1
        return prompts, sampling

    def finish(self, ticket: Any) -> list[Rollout]:
        self.open -= 1
        prompts, sampling = ticket
        self.book.sampled += [(sampling.seed, prompt.index) for prompt in prompts]
        return [
            Rollout(prompt, j, [1], f"{sampling.seed} {prompt.index} {j}", "stop")
            for prompt in prompts
            for j in range(sampling.n)
        ]


class Scores:
    """A score that depends on the sample alone."""

    name = "luck"

    def __init__(self, case: Case) -> None:
        self.case = case

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        return RewardOutput([self._score(rollout) for rollout in rollouts])

    def _score(self, rollout: Rollout) -> float | None:
        key, index, number = rollout.response_text.split()
        if random.Random(f"finite {self.case.seed} {key}").random() < self.case.not_finite:
            return float("nan")
        is_mixed = random.Random(f"{self.case.seed} {key} {index}").random() < self.case.acceptance
        luck = random.Random(f"{self.case.seed} {rollout.response_text}").random()
        if luck < self.case.failures:
            return None
        return float(is_mixed and number == "0")


class Rows:
    """A dataloader of the run's prompts."""

    def __init__(self, case: Case, strategy: FakeStrategy) -> None:
        self.batch_sampler = RolloutBatchSampler(
            case.prompts,
            case.groups_per_batch,
            rank=strategy.rank,
            world_size=strategy.world_size,
            seed=case.seed,
        )

    def __iter__(self):
        for batch in self.batch_sampler:
            yield [Prompt(f"p{i}", [i + 1], index=i) for i in batch]


class Loop:
    """PPOTrainer's loop without models."""

    sample_ahead = PPOTrainer.sample_ahead
    _prompts_of_next_episode = PPOTrainer._prompts_of_next_episode
    count_prompts_ahead = PPOTrainer.count_prompts_ahead
    episode_steps = PPOTrainer.episode_steps
    _prompts_of = staticmethod(lambda batch: batch)

    def __init__(self, case: Case, strategy: FakeStrategy, book: Book) -> None:
        self.case = case
        self.strategy = strategy
        self.book = book
        self.config = SimpleNamespace(
            training=SimpleNamespace(
                total_training_steps=case.last_step, num_episodes=case.episodes
            ),
            rollout=SimpleNamespace(max_staleness=case.max_staleness),
            sampling=SimpleNamespace(dataset_filter_threshold=None),
        )
        self.state = TrainerState()
        self.prompts = Rows(case, strategy)
        self.next_prompts: EpisodePrompts | None = None
        self.engine = Engine(book)
        self.sampler = self._collector()

    def _collector(self) -> BatchCollector:
        case = self.case
        sampling = SamplingParams(n=GROUP, seed=case.seed)
        sampler = RolloutSampler(
            self.engine, Scores(case), sampling, GROUP if case.failures and case.filters else 1
        )
        options: dict[str, Any] = {"max_staleness": case.max_staleness}
        if case.is_plain:
            return BatchCollector(sampler, self.strategy, **options)
        return GroupCollector(
            sampler,
            self.strategy,
            groups_per_step=case.groups_per_step,
            groups_per_batch=case.groups_per_batch,
            group_filter=GroupFilter() if case.filters else None,
            max_batches=case.max_batches,
            on_exhausted=case.on_exhausted,
            **options,
        )

    @property
    def has_ended(self) -> bool:
        is_last = self.case.last_step is not None and self.state.global_step >= self.case.last_step
        return self.state.episode >= self.case.episodes or is_last

    def steps(self, stop_after: int) -> None:
        """As ``fit``, until the step ``stop_after`` at most."""
        while not self.has_ended:
            episode = self.state.episode
            for prompts in self.episode_steps():
                step = self.state.global_step + 1
                assert step < TOO_MANY
                taken = prompts.taken
                self.strategy.all_gather_object("step")
                assert self.engine.open == 0, "a step begins with something in flight"
                collected = self.sampler.collect(prompts, step)
                if self.case.max_staleness > 0:
                    self.sample_ahead(prompts, step, collected.surplus)
                self.note(collected, step)
                if self.case.max_staleness > 0:
                    self.sampler.finish()
                assert self.engine.open == 0, "a step ends with something in flight"
                ended = prompts.exhausted and collected.surplus == 0
                used = self.strategy.all_reduce(prompts.taken - taken, "sum")
                if self.case.max_staleness > 0:
                    self.count_prompts_ahead(used, ended)
                else:
                    self.state.finish_step(used, last_of_episode=ended)
                if self.state.episode != episode or self.has_ended:
                    break
                if step == stop_after:
                    return
            if self.state.global_step == stop_after:
                return

    def note(self, collected: Any, step: int) -> None:
        self.book.counts.update(collected.counts)
        if collected.not_finite is not None:
            return
        for rollout in collected.rollouts:
            ((version, start, end),) = rollout.versions
            assert (start, end) == (0, 1)
            assert rollout.stale == (version < step - 1)
        self.book.trained += [
            (step, seed_of(group), group[0].prompt.index, group[0].versions[0][0], len(group))
            for group in group_by_prompt(collected.rollouts)
        ]

    def checkpoint(self) -> dict[str, Any]:
        surplus = getattr(self.sampler, "state_dict", lambda: None)()
        return {
            "state": vars(self.state).copy(),
            "ahead": SamplesAhead(self.sampler).state_dict(),
            "surplus": surplus,
        }

    def resume(self, saved: list[dict[str, Any]]) -> None:
        """Go on from the states of all ranks, which may have been others."""
        ahead, surplus = ([state[name] for state in saved] for name in ("ahead", "surplus"))
        rank, world_size = self.strategy.rank, self.strategy.world_size
        if len(saved) != world_size:
            ahead = SamplesAhead(self.sampler).share_out(ahead, world_size)
            if surplus[0] is not None:
                surplus = dealt_out(surplus, world_size)
        self.state = TrainerState(**saved[0]["state"])
        SamplesAhead(self.sampler).load_state_dict(ahead[rank])
        if surplus[0] is not None:
            self.sampler.load_state_dict(surplus[rank])

    @property
    def waiting(self) -> int:
        """Samples of this rank that wait."""
        ahead = self.sampler.ahead
        groups = [group for _, group in getattr(self.sampler, "surplus", [])]
        return sum(map(len, groups)) + (len(ahead.rollouts) if ahead else 0)


def run(case: Case) -> list[Book]:
    """What happened on each rank; started again after some steps, if the case says so."""
    saved: list[dict[str, Any]] | None = None
    dice = random.Random(case.seed)
    books: list[list[Book]] = []
    world_size = case.world_size
    while True:
        stop = (saved[0]["state"]["global_step"] if saved else 0) + 1
        while dice.random() >= case.resumes and stop < TOO_MANY:
            stop += 1

        def on_rank(strategy: FakeStrategy, saved=saved, stop=stop) -> tuple[Book, Any, bool]:
            book = Book()
            loop = Loop(case, strategy, book)
            if saved is not None:
                loop.resume(saved)
            loop.steps(stop)
            book.waits = loop.waiting
            return book, loop.checkpoint(), loop.has_ended

        results = [on_rank(FakeStrategy())] if world_size == 1 else on_ranks(world_size, on_rank)
        books.append([book for book, _, _ in results])
        saved = [checkpoint for _, checkpoint, _ in results]
        assert len({str(state["state"]) for state in saved}) == 1
        if results[0][2]:
            break
        if case.world_sizes:
            world_size = dice.choice(case.world_sizes)
    ranks = range(max(map(len, books)))
    whole = [joined([part[rank] for part in books if rank < len(part)]) for rank in ranks]
    for book, last in zip(whole, books[-1]):
        book.waits = last.waits
    return whole


def joined(parts: list[Book]) -> Book:
    book = Book()
    for part in parts:
        book.sampled += part.sampled
        book.trained += part.trained
        book.counts.update(part.counts)
    return book


def check(case: Case, books: list[Book]) -> None:
    """Every epoch, prompt and sample is trained on, rejected with a reason or lost with its batch, once and in time."""
    sampled = Counter(sample for book in books for sample in book.sampled)
    trained = Counter((key, index) for book in books for _, key, index, _, _ in book.trained)
    assert set(sampled.values()) <= {1}
    assert set(trained.values()) <= {1}
    assert trained.keys() <= sampled.keys()
    by_prompt = Counter(index for _, index in sampled)
    is_whole = case.last_step is None
    if is_whole:
        assert by_prompt == dict.fromkeys(range(case.prompts), case.episodes)
    counts = books[0].counts  # over all ranks
    samples = sum(sampled.values()) * GROUP
    in_training = sum(size for book in books for *_, size in book.trained)
    waiting = sum(book.waits for book in books)
    assert waiting == 0 or not is_whole
    if not case.failures and not case.not_finite and (is_whole or not waiting):
        assert counts["generated_samples"] == samples
        rejected = sum(counts[reason] for reason in REASONS) * GROUP
        assert samples == in_training + rejected
    for book in books:
        for step, _, _, version, _ in book.trained:
            assert case.not_finite or 0 <= step - 1 - version <= bound(case)


def bound(case: Case) -> int:
    """The steps that a sample waits at most."""
    if case.groups_per_batch <= case.groups_per_step:
        if case.max_staleness == 0:
            # ranks share evenly, and one of them may hold more of the oldest groups
            return 0 if case.is_plain else 1 + (case.world_size > 1)
        return 1
    # the surplus of a large batch, as without --max_staleness
    return -(-(case.groups_per_batch - 1) // case.groups_per_step) + (case.world_size > 1)


def check_order(case: Case, books: list[Book]) -> None:
    """Prompts are taken in the order of the data, and trained on in that order on each rank."""
    for rank, book in enumerate(books):
        place = (case.prompts, case.groups_per_batch)
        sampler = RolloutBatchSampler(*place, rank=rank, world_size=len(books), seed=case.seed)
        order = []
        for episode in range(case.episodes):
            sampler.set_epoch(episode)
            order += [index for batch in sampler for index in batch]
        assert [index for _, index in book.sampled] == order[: len(book.sampled)]
        places = {sample: place for place, sample in enumerate(book.sampled)}
        in_training = [places[key, index] for _, key, index, _, _ in book.trained]
        assert in_training == sorted(in_training)


def check_cases(cases: Iterable[Case]) -> None:
    for case in cases:
        try:
            books = run(case)
        except RewardError:  # in a step no sample was scored
            assert case.failures
            continue
        check(case, books)
        if not case.world_sizes:
            check_order(case, books)


def test_every_sample_is_used_once_and_in_time():
    check_cases(random_case(seed) for seed in range(1000))


@pytest.mark.parametrize("world_size", [2, 3])
def test_on_several_ranks(world_size):
    check_cases(random_case(seed, world_size) for seed in range(150))


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_in_thousands_of_runs(world_size):
    check_cases(random_case(seed, world_size) for seed in range(1000, 5000))


def test_the_oldest_groups_go_first_though_one_rank_holds_more_of_them():
    check_cases([random_case(247, 2, prompts=51, groups_per_step=8, groups_per_batch=6)])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_score_that_is_not_finite_costs_its_batch_alone(world_size):
    check_cases(random_case(seed, world_size, not_finite=0.2, failures=0.0) for seed in range(150))


def test_it_goes_on_with_another_number_of_ranks():
    check_cases(
        random_case(seed, 2, resumes=0.5, world_sizes=(1, 2), groups_per_step=4, groups_per_batch=4)
        for seed in range(150)
    )
