"""Options of trackers beside metrics.jsonl, of recorded samples and of profiles."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from lightppo.option import Section, option

wandb = partial(option, needs="use_wandb")


class TrackerConfig(Section, adds_to="logging", resume_safe=True):
    """TensorBoard, Weights & Biases, trackio, MLflow."""

    use_tensorboard: str | None = option(None, "Folder for TensorBoard.")
    use_wandb: bool = option(
        False,
        "Log to Weights & Biases; log in with `wandb login` or WANDB_API_KEY. The flag also takes a key, but "
        "others may see it in the process list.",
        secret=True,
    )
    wandb_org: str | None = wandb(None, "W&B entity.")
    wandb_group: str | None = option(
        None,
        "Group in W&B and trackio; a tag in MLflow.",
        needs="use_wandb or use_trackio or use_mlflow",
    )
    wandb_project: str = wandb("lightppo", "W&B project.")
    wandb_run_name: str | None = option(
        None,
        "Run name in every tracker. None: the name of --save_path.",
        needs="use_wandb or use_tensorboard or use_trackio or use_mlflow",
    )
    use_trackio: str | None = option(
        None, "Project in trackio, which stores it in TRACKIO_DIR or as set by its other variables."
    )
    use_mlflow: str | None = option(
        None, "Where MLflow logs: a folder, or a server address. Log in with MLflow's variables."
    )
    mlflow_experiment: str = option("lightppo", "MLflow experiment.", needs="use_mlflow")
    metric_names: Literal["lightppo", "verl", "openrlhf", "lightrft"] = option(
        "lightppo",
        "Names of the metrics in trackers; see docs/metrics.md. metrics.jsonl always uses lightppo's.",
        needs="use_wandb or use_tensorboard or use_trackio or use_mlflow",
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if options.use_mlflow is not None and "@" in urlsplit(options.use_mlflow).netloc:
            login = (
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
            yield f"--use_mlflow: a login in an address would be written into logs: set {login}"

    @staticmethod
    def places(config: Any) -> Iterator[str]:
        asked = config.logging
        if asked.use_tensorboard:
            yield f"TensorBoard in {asked.use_tensorboard}"
        if asked.use_mlflow:
            yield f"MLflow in {asked.use_mlflow}"
        if asked.use_trackio:
            yield f"trackio: trackio show --project {asked.use_trackio}"


class ProfileConfig(Section, adds_to="logging", resume_safe=True):
    """Traces of steps."""

    profile_steps: tuple[int, ...] = option(
        (), "Steps to trace with torch's profiler, into SAVE_PATH/profile.", "PPO steps", ge=1
    )

    @staticmethod
    def places(config: Any) -> Iterator[str]:
        if config.logging.profile_steps:
            yield f"profiles in {config.checkpoint.save_path}/profile"


class ExamplesConfig(Section, adds_to="logging", resume_safe=True):
    """Samples in the log."""

    num_examine: int = option(1, "Samples printed per step and data source.", "samples", ge=0)


class SamplesConfig(Section, adds_to="sampling", resume_safe=True):
    """Samples in files."""

    record_samples: int = option(
        16,
        "Samples kept in SAVE_PATH/rollouts with numbers per token, in whole groups; 0: none.",
        "samples per step",
        ge=0,
    )
    rollout_data_dir: str | None = option(
        None, "Folder for stepN.jsonl, with every sample that the step trains on."
    )


class ReplayConfig(Section, adds_to="sampling", resume_safe=True):
    """Rollouts of an earlier run."""

    skip_rollout: str | None = option(
        None,
        "Debugging: save rollouts in this folder; the next run reads them instead of sampling.",
    )
    skip_rollout_reuse: bool = option(
        False, "Use the first saved rollout in every step.", needs="skip_rollout"
    )

    @staticmethod
    def is_stale(config: Any) -> bool:
        return config.sampling.skip_rollout is not None

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        given = vars(options)
        selects = given.get("dynamic_sampling") or given.get("gen_batch_size") not in (
            None,
            options.rollout_batch_size,
        )
        if options.skip_rollout_reuse and selects:
            yield "--skip_rollout_reuse repeats the first groups: leave --dynamic_sampling and --gen_batch_size out"


class SkippedConfig(Section, adds_to="training", resume_safe=True):
    """Steps without a finite gradient."""

    max_skipped_steps: int = option(
        3,
        "End the run and keep the batch after N steps in a row without a finite gradient; 0: never.",
        "PPO steps",
        ge=0,
    )
