"""The reward source of a run or a script: one of those in ``lightppo.plugin.REWARDS``, or a weighted sum of several.

docs/extending.md shows how to add a source. Heavy packages are loaded when a source needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightppo.config.evaluation_options import evaluation_config
from lightppo.config.reward_options import (
    ANY_ROUTE,
    given_sources,
    is_file_alone,
    names_in,
    reward_plan,
    reward_sources,
)
from lightppo.data.records import Rollout
from lightppo.errors import ConfigError, NonFiniteRewardError, RewardError
from lightppo.plugin import REWARDS
from lightppo.rewards.function import function_source
from lightppo.rewards.reward_source import (
    RewardOutput,
    RewardRequest,
    RewardSource,
    check_output,
    close_source,
    describe_sample,
    is_source,
    shown,
)
from lightppo.user_code import finite

Routes = Mapping[str, Sequence[tuple[RewardSource, float]]]  # route → sources and their weights


def source_of(request: RewardRequest) -> RewardSource:
    """Return the source that the options of a run name: one, or a weighted sum of several."""
    route_plan = reward_plan(request.config)
    if route_plan is None:
        names = given_sources(request.config) or ["function"]
        return source_named(names[-1], request)
    sources = {
        source_name: source_named(source_name, request) for source_name in names_in(route_plan)
    }
    routes = {
        route: [(sources[source_name], weight) for source_name, weight in weights.items()]
        for route, weights in route_plan.items()
    }
    if list(routes) != [ANY_ROUTE]:
        return RoutedReward(routes, by=request.config.verifier.reward_routes_by)
    if list(route_plan[ANY_ROUTE].values()) == [1.0]:
        return routes[ANY_ROUTE][0][0]
    return CombinedReward(dict(routes[ANY_ROUTE]))


def asks_outside(config: Any) -> bool:
    """Tell whether a run asks what a tape may answer: environments, tools, or sources of rewards outside the run."""
    options = config.flat()
    judging_config = evaluation_config(config)
    if options.get("env") or options.get("tools"):
        return True
    source_names = reward_sources(config)
    if judging_config is not None:
        source_names = source_names + reward_sources(judging_config)
    taped_kinds = ["yes"]
    if options["tape"] == "all" or options["tape_from"]:
        taped_kinds.append("perhaps")
    return any(REWARDS[source_name].outside in taped_kinds for source_name in source_names)


def source_named(name: str, request: RewardRequest) -> RewardSource:
    """Return the source of a name in ``REWARDS``, with what is around those outside the run."""
    entry = REWARDS.find(name)

    def make() -> RewardSource:
        source = entry.fn(request)
        if not is_source(source):
            raise ValueError(
                f"--reward_source {name}: its function gives {source!r}, and not an object with name and score(rollouts)"
            )
        return source

    if entry.outside == "no" or request.around is None:
        return make()
    return request.around(make, name, entry.outside == "yes", request)


def build_reward_source(
    *,
    remote_rm_url: Sequence[str] | str | None = None,
    reward_fn: str | Callable[..., Any] | RewardSource | None = None,
    reward_models: Sequence[Callable[..., Any]] = (),
    remote_options: Mapping[str, Any] | None = None,
    function_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
) -> RewardSource:
    """Make a reward source of servers, of a function, or of models.

    Args:
        remote_rm_url: servers, or one ``path.py[:name]``, by default its ``reward_func`` or ``compute_score``.
        reward_fn: a function, a :class:`RewardSource` or a file with either; with reward models, the function that
            combines their tensors, in a file by default ``reward_fn``.
        remote_options, function_options, model_options: further arguments of
            :class:`~lightppo.rewards.remote.RemoteReward`, :class:`~lightppo.rewards.function.FunctionReward` and
            :class:`~lightppo.rewards.reward_model.RewardModelSource`.
    """
    server_urls = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or ())
    if server_urls and (reward_models or reward_fn is not None):
        second_flag = "--reward_pretrain" if reward_models else "--reward_fn"
        raise ValueError(
            f"--remote_rm_url and {second_flag} are both set; rewards come from one of them"
        )
    if reward_models:
        from lightppo.rewards.reward_model import source_of_models  # loads torch

        return source_of_models(reward_models, reward_fn, model_options or {})
    if is_file_alone(server_urls):
        return function_source(server_urls[0], "--remote_rm_url", function_options)
    if server_urls:
        from lightppo.rewards.remote import RemoteReward  # loads requests

        return RemoteReward(server_urls, **(remote_options or {}))
    if reward_fn is None:
        raise ValueError(
            "no rewards: set --remote_rm_url (http(s) URL or path.py), --reward_fn or --reward_pretrain"
        )
    return function_source(reward_fn, "--reward_fn", function_options)


# -- sums ----------------------------------------------------------------------------------------------------------------


def check_routes(building: Any) -> None:
    """Raise ConfigError where ``--reward_routes_by`` is no column of the prompts."""
    options = building.config.flat()
    prompts_by_flag = {
        "--prompt_data": building.rows.get("prompt_data"),
        "--eval_data": building.held_out,
    }
    for flag, prompts in prompts_by_flag.items():
        columns = [] if prompts is None else prompts.dataset.column_names
        if columns and (column := options["reward_routes_by"]) not in (
            "label",
            "data_source",
            *columns,
        ):
            raise ConfigError(
                f"--reward_routes_by {column!r} is not a column of {flag}; its columns: {columns}"
            )


class RoutedReward:
    """Add up sources with weights, by a column of the data: Σ weight · score over the sources of the sample's route.

    If one source of its route leaves a sample unscored, the sample is unscored. Token scores are added with the same
    weights. Each source's own score is metric ``<name>`` and its metrics are ``<name>/<metric>``, ``None`` for samples
    of other routes; ``failures`` and ``timeouts`` are also added up. Every ``score`` calls each source once, also
    without samples, in the order of the routes: a reward model under ZeRO-3 acts on all ranks together.

    Args:
        routes: value of the column → (source, weight) pairs; ``"*"`` takes the samples without a route of their own.
        by: ``"data_source"``, ``"label"`` or a column of the data: a string, or a number as Python writes it.
    """

    def __init__(self, routes: Routes, *, by: str = "data_source", name: str = "routed") -> None:
        if not routes or not all(routes.values()):
            raise ValueError(f"{name}: every route needs at least one source")
        # By identity, because a source need not be hashable.
        plan_by_identity: dict[int, tuple[RewardSource, dict[str, float]]] = {}
        for route, pairs in routes.items():
            for source, weight in pairs:
                weights = plan_by_identity.setdefault(id(source), (source, {}))[1]
                if finite(weight) is None:
                    raise ValueError(
                        f"{name}: the weight of {source.name} must be a finite number, got {weight!r}"
                    )
                if route in weights:
                    raise ValueError(f"{name}: {source.name} is twice on the route {route!r}")
                weights[route] = float(weight)
        self._plan = list(plan_by_identity.values())
        counts = Counter(source.name for source, _ in self._plan)
        repeated = sorted(source_name for source_name, count in counts.items() if count > 1)
        if repeated:
            raise ValueError(
                f"{name}: several sources are named {', '.join(repeated)}; give each its own name"
            )
        self.name = name
        self.by = by
        self._routes = list(routes)

    @property
    def needs_all_ranks(self) -> bool:
        """Tell whether one of the sources acts on all ranks together."""
        return any(getattr(source, "needs_all_ranks", False) for source, _ in self._plan)

    @property
    def per_sample(self) -> bool:
        """Tell whether each of the sources judges every sample alone."""
        return all(getattr(source, "per_sample", False) for source, _ in self._plan)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Score with every source, even if an earlier source left a sample unscored."""
        samples = len(rollouts)
        routes = [self._route(rollouts, i) for i in range(samples)]
        score_totals: list[float | None] = [0.0] * samples
        token_totals: list[list[float] | None] = [None] * samples
        metric_columns: dict[str, list[float | None]] = {}
        text_columns: dict[str, list[str | None]] = {}
        # Raised at the end, because other ranks may wait in the next source.
        non_finite_error: NonFiniteRewardError | None = None
        for source, weights in self._plan:
            positions = [i for i, route in enumerate(routes) if route in weights]
            route_rollouts = [rollouts[i] for i in positions]
            try:
                output = check_output(source.score(route_rollouts), route_rollouts, source.name)
            except NonFiniteRewardError as error:
                non_finite_error = error
                continue
            source_metrics = {f"/{name}": values for name, values in output.metrics.items()}
            source_texts = {f"/{name}": values for name, values in output.texts.items()}
            for target, columns in (
                (metric_columns, {"": output.scores} | source_metrics),
                (text_columns, source_texts),
            ):
                for suffix, values in columns.items():
                    value_of_sample = dict(zip(positions, values))
                    column = [value_of_sample.get(i) for i in range(samples)]
                    target[f"{source.name}{suffix}"] = column
            for i, score, token_scores in zip(
                positions, output.scores, output.token_scores or [None] * len(positions)
            ):
                weight = weights[routes[i]]
                if score is None or score_totals[i] is None:
                    score_totals[i] = None
                else:
                    score_totals[i] += weight * score
                if token_scores is not None:
                    sums = token_totals[i] or [0.0] * len(token_scores)
                    token_totals[i] = [
                        token_total + weight * token_score
                        for token_total, token_score in zip(sums, token_scores)
                    ]
        if non_finite_error is not None:
            raise non_finite_error
        for count_name in ("failures", "timeouts"):
            source_counts = [
                metric_columns[key]
                for source, _ in self._plan
                if (key := f"{source.name}/{count_name}") in metric_columns
            ]
            if source_counts:
                metric_columns[count_name] = [
                    sum(value for value in sample_values if value is not None)
                    for sample_values in zip(*source_counts)
                ]
        output = RewardOutput(score_totals, metric_columns, texts=text_columns)
        if any(sample_values is not None for sample_values in token_totals):
            output.token_scores = token_totals
        return output

    def close(self) -> None:
        """End what the sources have started."""
        for source, _ in self._plan:
            close_source(source)

    def _route(self, rollouts: Sequence[Rollout], i: int) -> str:
        prompt = rollouts[i].prompt
        if self.by in ("data_source", "label"):
            column_value = getattr(prompt, self.by)
        else:
            column_value = prompt.extra.get(self.by)
        route = column_value
        if not isinstance(column_value, str):
            route = repr(column_value)
        if route in self._routes:
            return route
        if ANY_ROUTE in self._routes:
            return ANY_ROUTE
        raise RewardError(
            f"{self.name}: no reward source for the {self.by.replace('_', ' ')} {shown(route)!r} of "
            f"{describe_sample(rollouts, i)}; there are {', '.join(map(repr, self._routes))}. Add it, or "
            f"{ANY_ROUTE!r} for all others"
        )


class CombinedReward(RoutedReward):
    """Add up sources with weights (source → weight), the same for all samples; see :class:`RoutedReward`."""

    def __init__(self, sources: Mapping[RewardSource, float], name: str = "combined") -> None:
        super().__init__({ANY_ROUTE: list(sources.items())}, name=name)
        self.sources = dict(sources)
