"""The checks of a run that is being built, in their order: what cannot work ends it before anything takes long.

Each function is a time of :func:`lightppo.trainer.build.build`, called on all ranks together. The checks of other
packages, :data:`lightppo.plugin.CHECKS`, are the last ones of their time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightppo.config import PPOConfig
from lightppo.config.rules import needs_teacher
from lightppo.http_client import check_tokens
from lightppo.logging.run_folder import claim_folders, mark_content
from lightppo.logging.run_notes import tell_models, tell_options
from lightppo.models.adapters.lora import check_packages
from lightppo.models.loading import check_trained_models
from lightppo.models.packing import settle_models
from lightppo.models.run_models import check_vocabularies
from lightppo.plugin import CHECKS
from lightppo.preflight.advice import (
    check_positions_of,
    check_rows,
    tell_advice,
    tell_frozen,
    tell_second_masters,
)
from lightppo.preflight.run_checks import (
    become_dry_run,
    check_decoding_of,
    check_disk,
    check_files,
    check_padded_batches,
    check_places,
    fit_memory,
    look_at_rows,
)
from lightppo.rewards.registry import check_routes
from lightppo.rewards.reward_model import check_reward_tokenizers
from lightppo.rollout.decoding_runners import check_device
from lightppo.rollout.sampling import check_sampled_tokens
from lightppo.trainer.distillation import check_teacher

if TYPE_CHECKING:
    from lightppo.trainer.building import Building


def check_options(run: Building) -> None:
    """Check the options, when the ranks have met."""
    run.options.validate(run.strategy.world_size)
    options = run.config.flat()
    if options["lora_rank"] > 0:
        check_packages(run)
    if options.get("hf_cuda_graphs"):
        check_device(run)
    check_tokens(run)
    if options.get("tape_from"):
        from lightppo.episodes.tape_files import check_folder

        check_folder(run.config, run.strategy.world_size)
    check_files(run)
    run.tell(tell_advice(run))
    check_positions_of(run)
    run.tell(tell_options(run))
    checks_of_packages(run, "options")


def check_tokenizer(run: Building) -> None:
    """Check what the tokenizer is needed for, before folders are written to."""
    check_vocabularies(run)
    check_trained_models(run)
    check_sampled_tokens(run)
    if run.config.flat().get("reward_pretrain"):
        check_reward_tokenizers(run)
    checks_of_packages(run, "tokenizer")


def check_folders(run: Building) -> None:
    """Check servers and memory, make a small run of a dry run, and take the run's folders."""
    if isinstance(run.config, PPOConfig) and needs_teacher(run.config):
        check_teacher(run)
    fit_memory(run)
    become_dry_run(run)
    claim_folders(run)
    checks_of_packages(run, "folders")


def check_data(run: Building) -> None:
    """Check the rows that were read, and mark what the options name."""
    if run.config.flat().get("reward_routes"):
        check_routes(run)
    check_rows(run)
    run.tell(look_at_rows(run))
    mark_content(run)
    checks_of_packages(run, "data")


def check_models(run: Building) -> None:
    """Check the models in their places, and the room for their checkpoints."""
    settle_models(run)
    run.tell(tell_frozen(run))
    run.tell(tell_second_masters(run))
    check_places(run)
    check_disk(run)
    check_padded_batches(run)
    run.tell(tell_models(run))
    checks_of_packages(run, "models")


def check_engine(run: Building) -> None:
    """Check what the rollout engine makes of the first rows, and that it decodes as the actor does."""
    options = run.config.flat()
    if options.get("env") or options.get("tools"):
        from lightppo.episodes.episode_engine import check_openings

        check_openings(run)
    check_decoding_of(run)
    checks_of_packages(run, "engine")


def checks_of_packages(run: Building, when: str) -> None:
    """Run the checks that other packages have for a time, and print what they say."""
    for check in CHECKS.values():
        if check.when == when:
            run.tell(check.fn(run) or ())
