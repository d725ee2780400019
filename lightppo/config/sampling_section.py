"""The options of sampling: which of the sampled groups are trained on, replay and dumps of rollouts."""

from typing import Literal

from lightppo.config.fields import option, section


@section
class SamplingConfig:
    """Selection: which of the sampled groups are trained on; replay and dumps of rollouts."""

    generation_size: int | None = option(
        None,
        "Responses sampled per prompt; the best --n_samples_per_prompt of them are trained on. None: just those.",
        unit="samples per prompt",
        ge=1,
    )
    best_of_n_tie: Literal["shorter", "longer"] = option(
        "shorter", "Of responses with equal scores, best of n takes the shorter or the longer one."
    )
    gen_batch_size: int | None = option(
        None,
        "Prompts in one generation batch; groups over --rollout_batch_size wait for the next steps. None: "
        "--rollout_batch_size.",
        unit="prompts over all ranks",
        ge=1,
    )
    dynamic_sampling: bool = option(
        False, "Train on groups that can teach something only, and sample further prompts in the place of the others."
    )
    filter_metric: str = option(
        "score", "What groups are judged by: score, acc, seq_reward, seq_final_reward, or any number of the rewards."
    )
    filter_range: tuple[float, float] | None = option(
        None, "Keep groups whose mean is inside, ends excluded. None: groups whose samples are not all equal."
    )
    max_num_gen_batches: int = option(
        10,
        "Most generation batches of one step of --dynamic_sampling; 0: any number.",
        unit="batches",
        ge=0,
        resume_safe=True,
    )
    on_exhausted: Literal["train_short", "raise", "reuse"] = option(
        "train_short",
        "Too few groups after --max_num_gen_batches: train on those, stop the run, or train on some of them twice.",
        resume_safe=True,
    )
    dataset_filter_threshold: float | None = option(
        None, "At the end of an episode, leave out the prompts with a mean score above this from then on."
    )
    dataset_max_filter_percentage: float = option(
        0.1, "Largest share of the prompts that one episode leaves out so, the best solved ones.", gt=0, lt=1
    )
    fire_sampling: bool = option(False, "Sample the first token of each response at --fire_temperature.")
    fire_temperature: float | None = option(None, "Temperature of that token. None: 10.", gt=0)
    rollout_data_dir: str | None = option(
        None, "Folder for stepN.jsonl: every sample that the step trains on.", resume_safe=True
    )
    skip_rollout: str | None = option(
        None,
        "Debugging: folder where rollouts are saved, and read by the next run instead of sampling.",
        resume_safe=True,
    )
    skip_rollout_reuse: bool = option(
        False, "The first rollout of --skip_rollout is that of every step, whatever the prompts are.", resume_safe=True
    )
