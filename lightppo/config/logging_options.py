"""Options of logging: trackers beside metrics.jsonl, samples in the log, profiles."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from lightppo.option import Section, option

wandb = partial(option, needs="use_wandb")


class LoggingConfig(Section, resume_safe=True):
    """Logging."""

    logging_steps: int = option(1, "Log every N steps.", "PPO steps", ge=1)
    debug: bool = option(False, "Show errors with the full traceback instead of one line.")
    peak_tflops: float | None = option(
        None, "Peak speed of one device in the training type, for perf/mfu.", "TFLOP/s", gt=0
    )
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
    metric_names: Literal["lightppo", "verl", "openrlhf", "lightrft"] = option(
        "lightppo",
        "Names of the metrics in trackers; see docs/metrics.md. metrics.jsonl always uses lightppo's.",
        needs="use_wandb or use_tensorboard or use_trackio or use_mlflow",
    )
    profile_steps: tuple[int, ...] = option(
        (), "Steps to trace with torch's profiler, into SAVE_PATH/profile.", "PPO steps", ge=1
    )
    num_examine: int = option(1, "Samples printed per step and data source.", "samples", ge=0)

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if options.use_mlflow is not None and "@" in urlsplit(options.use_mlflow).netloc:
            login = (
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
            yield f"--use_mlflow: a login in an address would be written into logs: set {login}"

    @staticmethod
    def places(config: Any) -> Iterator[str]:
        logging = config.logging
        if logging.use_tensorboard:
            yield f"TensorBoard in {logging.use_tensorboard}"
        if logging.use_mlflow:
            yield f"MLflow in {logging.use_mlflow}"
        if logging.use_trackio:
            yield f"trackio: trackio show --project {logging.use_trackio}"
        if logging.profile_steps:
            yield f"profiles in {config.checkpoint.save_path}/profile"
