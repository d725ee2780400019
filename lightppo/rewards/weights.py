"""Several sources at once: weighted sums of scores, the same for all samples or by data source or label."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.failures import shown
from lightppo.rewards.source import RewardOutput, RewardSource, check_output, close_source, describe_sample

RouteBy = Literal["data_source", "label"]
Routes = Mapping[str, Sequence[tuple[RewardSource, float]]]

DEFAULT_ROUTE = "*"
_COUNTS = ("failures", "timeouts")  # metrics that are also added up over the sources


class RoutedReward:
    """Weighted sums of sources, by data source or label: Σ weight · score over the sources of the sample's route.

    A sample that any source of its route leaves unscored is unscored. Each source's own score is metric ``<name>``, its
    metrics are ``<name>/<metric>``, ``None`` for the samples of other routes; ``failures`` and ``timeouts`` of the
    sources are added up as well. Token scores are added with the same weights.

    Every source is called once per ``score``, with all its samples and also with none, in the order in which the
    routes name them: a reward model under ZeRO-3 acts on all ranks together.

    Args:
        routes: data source or label → (source, weight) pairs. ``"*"`` takes the samples that have no route of their
            own. A source may be on several routes; different sources need different names.
        by: ``"data_source"``, or ``"label"``: a string, or a number as Python writes it.
        name: what errors and metrics call the whole.

    Raises:
        ValueError: no route, a route without sources, equal names, a source twice on a route, or a weight that is not
            finite.
    """

    def __init__(self, routes: Routes, *, by: RouteBy = "data_source", name: str = "routed") -> None:
        if by not in get_args(RouteBy):
            raise ValueError(f"{name}: samples are routed by {' or '.join(get_args(RouteBy))}, not by {by!r}")
        if not routes or not all(routes.values()):
            raise ValueError(f"{name}: every route needs at least one source")
        weights: dict[int, dict[str, float]] = {}  # a source need not be hashable
        sources: dict[int, RewardSource] = {}
        for route, pairs in routes.items():
            for source, weight in pairs:
                if not isinstance(weight, (int, float)) or not math.isfinite(weight):
                    raise ValueError(f"{name}: the weight of {source.name} must be a finite number, got {weight!r}")
                own = weights.setdefault(id(source), {})
                if route in own:
                    raise ValueError(f"{name}: {source.name} is twice on the route {route!r}")
                own[route] = float(weight)
                sources[id(source)] = source
        names = [source.name for source in sources.values()]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"{name}: several sources are named {', '.join(twice)}; give each its own name")
        self.name = name
        self.by: RouteBy = by
        self._routes = list(routes)
        self._plan = [(source, weights[key]) for key, source in sources.items()]

    @property
    def needs_all_ranks(self) -> bool:
        """Whether one of the sources acts on all ranks together."""
        return any(getattr(source, "needs_all_ranks", False) for source, _ in self._plan)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores with every source, also where an earlier one left a sample unscored.

        Raises:
            RewardError: a sample without a route, or a source that failed.
        """
        n = len(rollouts)
        routes = [self._route(rollouts, i) for i in range(n)]
        totals: list[float | None] = [0.0] * n
        token_totals: list[list[float] | None] = [None] * n
        metrics: dict[str, list[float | None]] = {}
        for source, weights in self._plan:
            places = [i for i, route in enumerate(routes) if route in weights]
            share = [rollouts[i] for i in places]
            output = check_output(source.score(share), share, source.name)
            metrics |= _spread(source.name, output, places, n)
            for at, i in enumerate(places):
                weight, total, score = weights[routes[i]], totals[i], output.scores[at]
                totals[i] = None if total is None or score is None else total + weight * score
                row = output.token_scores[at] if output.token_scores is not None else None
                if row is not None:
                    before = token_totals[i] or [0.0] * len(row)
                    token_totals[i] = [a + weight * b for a, b in zip(before, row)]
        for count in _COUNTS:
            names = [f"{source.name}/{count}" for source, _ in self._plan]
            parts = [metrics[name] for name in names if name in metrics]
            if parts:
                metrics[count] = [sum(value for value in row if value is not None) for row in zip(*parts)]
        dense = any(row is not None for row in token_totals)
        return RewardOutput(totals, metrics, token_totals if dense else None)

    def close(self) -> None:
        """Ends what the sources have started."""
        for source, _ in self._plan:
            close_source(source)

    def _route(self, rollouts: Sequence[Rollout], i: int) -> str:
        value = getattr(rollouts[i].prompt, self.by)
        key = value if isinstance(value, str) else repr(value)
        if key in self._routes:
            return key
        if DEFAULT_ROUTE in self._routes:
            return DEFAULT_ROUTE
        raise RewardError(
            f"{self.name}: no reward source is set for the {self.by.replace('_', ' ')} {shown(key)!r} of "
            f"{describe_sample(rollouts, i)}; there are {', '.join(map(repr, self._routes))}. Add it, or "
            f"{DEFAULT_ROUTE!r} for all others"
        )


class CombinedReward(RoutedReward):
    """Weighted sum of sources, the same for all samples: Σ weight · score; see :class:`RoutedReward`.

    Args:
        sources: source → weight. Names must differ.
        name: what errors and metrics call the sum.

    Raises:
        ValueError: no source, equal names, or a weight that is not finite.
    """

    def __init__(self, sources: Mapping[RewardSource, float], name: str = "combined") -> None:
        super().__init__({DEFAULT_ROUTE: list(sources.items())}, name=name)
        self.sources = dict(sources)


def _spread(name: str, output: RewardOutput, places: list[int], n: int) -> dict[str, list[float | None]]:
    """A source's score and metrics as metrics of all n samples."""
    spread: dict[str, list[float | None]] = {}
    for key, values in {name: output.scores, **{f"{name}/{m}": v for m, v in output.metrics.items()}}.items():
        spread[key] = [None] * n
        for at, i in enumerate(places):
            spread[key][i] = values[at]
    return spread
