"""Trackers beside metrics.jsonl: TensorBoard, Weights & Biases, trackio, MLflow; any number of them at once."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lightppo.config.options import LoggingConfig
from lightppo.errors import ConfigError
from lightppo.logging.metrics_page import NAMES, OWN_AXES, STEPS, global_steps
from lightppo.redaction import without_secrets

logger = logging.getLogger(__name__)

MLFLOW_PAUSE = 60.0  # seconds until a server that did not take something is asked again

NAMESPACES = ("rollout", "train", "eval", "perf", "reward", "alarm")


class TensorBoardSink:
    """TensorBoard event files in ``folder``; after a resume, points of steps done again are purged."""

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(
            log_dir=str(folder), purge_step=start_step + 1 if start_step else None
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for metric, number in metrics.items():
            self.writer.add_scalar(metric, number, step)
        # Its thread writes every two minutes only, and what it holds is lost if the process dies.
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """A Weights & Biases run; goes on with the run of ``run_id`` after a resume. WANDB_MODE=offline works."""

    name = "wandb"

    def __init__(
        self, config: LoggingConfig, run_name: str, options: Mapping[str, Any], run_id: str | None
    ) -> None:
        self.run = _package("wandb").init(
            entity=config.wandb_org,
            project=config.wandb_project,
            group=config.wandb_group,
            name=run_name,
            id=run_id,
            resume="allow",
            config=dict(options),
        )
        self.run_id = self.run.id
        self.names = config.metric_names
        self.run.define_metric("global_step")
        own_axes = STEPS[self.names] if self.names in OWN_AXES else ()
        table = NAMES.get(self.names, {})
        further_namespaces = (name.split("/")[0] for names in table.values() for name in names)
        for namespace in dict.fromkeys((*NAMESPACES, *further_namespaces)):
            step_axis = "global_step"
            if namespace in own_axes:
                self.run.define_metric(step_axis := f"{namespace}/global_step")
            self.run.define_metric(f"{namespace}/*", step_metric=step_axis)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        global_step_numbers = global_steps(metrics, step, self.names)
        self.run.log({"global_step": step, **global_step_numbers, **metrics})

    def close(self) -> None:
        self.run.finish()


class TrackioSink:
    """A run of trackio, which knows runs by their names: one that the user did not name gets a name of its own."""

    name = "trackio"

    def __init__(
        self, config: LoggingConfig, run_name: str, options: Mapping[str, Any], run_id: str | None
    ) -> None:
        self.run_id = run_id or config.wandb_run_name or f"{run_name}-{uuid.uuid4().hex[:6]}"
        self.run = _package("trackio").init(
            config.use_trackio,
            name=self.run_id,
            resume="never" if run_id is None else "allow",
            group=config.wandb_group,
            config=dict(options),
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class MlflowSink:
    """A run of MLflow; rows that a server does not take wait for a later one. Options are its parameters at the start."""

    name = "mlflow"

    def __init__(
        self, config: LoggingConfig, run_name: str, options: Mapping[str, Any], run_id: str | None
    ) -> None:
        self.client, experiment = open_mlflow(config)
        self.mlflow = import_module("mlflow")
        self.waiting = []
        self.next_try = 0.0
        self.refused: set[str] = set()  # names that it cannot hold
        if run_id is not None:
            self.client.update_run(run_id, status="RUNNING")
            self.run_id = run_id
            return
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self.client.create_experiment(mlflow_experiment())
        tags = {"group": config.wandb_group} if config.wandb_group else {}
        run = self.client.create_run(experiment_id, run_name=run_name, tags=tags)
        self.run_id = run.info.run_id
        params = [
            self.mlflow.entities.Param(option_name, str(option_value))
            for option_name, option_value in options.items()
        ]
        for start in range(0, len(params), 100):  # at most, of one call
            self.client.log_batch(self.run_id, params=params[start : start + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        milliseconds = int(1000 * time.time())
        values = {
            mlflow_name(metric_name): float(number) for metric_name, number in metrics.items()
        }
        self.waiting += [
            self.mlflow.entities.Metric(metric_name, number, milliseconds, step)
            for metric_name, number in values.items()
            if metric_name not in self.refused
        ]
        if time.monotonic() < self.next_try:
            return
        try:
            while self.waiting:
                self._send(self.waiting[:1000])  # it takes at most so many in one call
                del self.waiting[:1000]
        except self.mlflow.MlflowException as error:
            self.next_try = time.monotonic() + MLFLOW_PAUSE
            warning = "step %d: MLflow did not take the metrics, which wait; next try in %g s: %s"
            logger.warning(warning, step, MLFLOW_PAUSE, error)

    def _send(self, metrics: list[Any]) -> None:
        """Send metrics; MlflowException where it takes none of them."""
        try:
            self.client.log_batch(self.run_id, metrics=metrics)
        except self.mlflow.MlflowException:
            if len(metric_names := {metric.key for metric in metrics}) == 1:
                raise
            self.client.get_run(self.run_id)  # fails where the server is away
            refused: dict[str, Exception] = {}
            for metric in metrics:  # a name that it cannot hold does not keep the others out
                try:
                    self.client.log_batch(self.run_id, metrics=[metric])
                except self.mlflow.MlflowException as error:
                    refused[metric.key] = error
            if refused.keys() == metric_names:
                raise
            self.refused |= refused.keys()
            for metric_name, error in refused.items():
                warning = "MLflow cannot hold the metric %s, metrics.jsonl has it: %s"
                logger.warning(warning, metric_name, error)

    def close(self) -> None:
        self.next_try = 0.0
        try:
            self.log(0, {})
            self.client.set_terminated(self.run_id)
        except self.mlflow.MlflowException as error:
            logger.warning("MLflow run %s is not ended there: %s", self.run_id, error)
        if self.waiting:
            logger.warning(
                "MLflow did not take %d numbers; metrics.jsonl has them", len(self.waiting)
            )


def mlflow_name(metric: str) -> str:
    """Return a name as MLflow can hold it: it has fewer characters, 250 at most, and takes names for paths."""
    name_parts = re.sub(r"[^\w\-. :/]", "_", metric).split("/")
    full_name = "/".join(re.sub(r"^\.", "_", name_part) or "_" for name_part in name_parts)
    if len(full_name) <= 250:
        return full_name
    return f"{full_name[:241]}_{hashlib.sha256(metric.encode()).hexdigest()[:8]}"


Tracker = TensorBoardSink | WandbSink | TrackioSink | MlflowSink


def open_trackers(
    config: LoggingConfig,
    run_name: str,
    options: Mapping[str, Any],
    start_step: int,
    run_ids: Mapping[str, str],
) -> list[Tracker]:
    """Return those that the options name; ``run_ids``: the runs to go on with, by tracker."""
    trackers: list[Tracker] = []
    if config.use_tensorboard:
        trackers.append(TensorBoardSink(Path(config.use_tensorboard) / run_name, start_step))
    for tracker_class in (WandbSink, TrackioSink, MlflowSink):
        if getattr(config, f"use_{tracker_class.name}"):
            trackers.append(
                tracker_class(config, run_name, options, run_ids.get(tracker_class.name))
            )
    return trackers


# -- packages, logins, servers ---------------------------------------------------------------------------------------


def check_trackers(config: LoggingConfig) -> None:
    """Refuse a package that is missing, a login that is missing, and a server that does not answer."""
    if config.use_wandb:
        _check_wandb()
    if config.use_trackio:
        _package("trackio")
    if config.use_mlflow:
        open_mlflow(config)


def mlflow_experiment() -> str:
    """Return the name of the experiment: that of mlflow's own variable, else lightppo."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or "lightppo"


def open_mlflow(config: LoggingConfig) -> tuple[Any, Any]:
    """Return a client of the server or folder, and the experiment, or None where there is none yet."""
    server_uri = config.use_mlflow
    # Ranks wait meanwhile: by default four minutes for a server that is gone, 16 for one that does not answer.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    if "://" not in server_uri or server_uri.startswith("file:"):
        # MLflow only maintains it; it needs no server
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = _package("mlflow")
    try:
        client = mlflow.MlflowClient(server_uri)
        return client, client.get_experiment_by_name(mlflow_experiment())
    except (mlflow.MlflowException, ImportError) as error:  # mlflow-skinny has no sqlalchemy
        raise ConfigError(
            f"--use_mlflow {server_uri}: {error} (a database needs a server: `mlflow server`)"
        ) from error


def _package(package: str) -> Any:
    sys.argv = [without_secrets(word) for word in sys.argv]  # wandb records them
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"--use_{package} needs {package}: pip install 'lightppo[{package}]' ({error})"
        ) from error


def _check_wandb() -> None:
    wandb = _package("wandb")
    if wandb.setup().settings.mode in ("offline", "disabled", "dryrun"):
        return
    try:
        if wandb.login(prompt=False, verify=False):
            return
    except wandb.Error as error:
        raise ConfigError(f"--use_wandb: {error}") from error
    raise ConfigError(
        "--use_wandb: not logged in: run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
    )
