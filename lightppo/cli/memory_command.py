"""``lightppo memory``: the GPU and host memory that a run needs, when it peaks, and what would make it fit."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightppo.config import ModelConfig, PPOConfig, parse_args
from lightppo.config.cli import CommandParser, exit_on_mistakes
from lightppo.data.folders import check_model
from lightppo.errors import ConfigError, UserError
from lightppo.preflight.advice import second_masters, with_second_masters

if TYPE_CHECKING:
    from lightppo.preflight.budget import Estimate, Machine

_UNITS = {"GB": 10**9, "GIB": 2**30, "MB": 10**6, "MIB": 2**20}


def main(arguments: Sequence[str], program: str = "lightppo memory") -> None:
    """Print the table; exit code 1 if the run does not fit."""
    parser = CommandParser(
        program,
        description=__doc__,
        allow_abbrev=False,
        epilog="All options of lightppo ppo, too; only --pretrain is required.",
    )
    parser.add_argument(
        "--gpus", type=int, help="GPUs per node; 0: ranks on the CPU. Default: as on this machine"
    )
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes; default: 1")
    parser.add_argument(
        "--gpu_memory",
        help="memory per GPU, such as 80GB or 24GiB; default: as on this machine, or 80GB",
    )
    parser.add_argument(
        "--host_memory",
        help="memory per host of ranks on the CPU, such as 16GB; default: as on this machine",
    )
    parser.add_argument(
        "--json", action="store_true", help="parts, phases and peak as JSON, in bytes"
    )
    request, run_flags = parser.parse_known_args(arguments)
    with exit_on_mistakes(program):
        for option_name, lower_limit in {"gpus": 0, "nodes": 1}.items():
            count = getattr(request, option_name)
            if count is not None and count < lower_limit:
                raise ConfigError(f"--{option_name} {count}: must be at least {lower_limit}")
        placement = _place(request)
        config = parse_args(run_flags, program, world_size=placement["world_size"], unfed=True)
        _check_models(config.model)
        from lightppo.preflight import budget, fitting

        _import_as_a_rank()
        machine = budget.Machine(
            **placement, library_bytes=budget.library_bytes(placement["per_node"])
        )
        resolved, estimate, advice = _fit(config, machine)
    if request.json:
        phases = {
            phase: dict(zip(("gpu", "host"), estimate.of_phase(phase))) for phase in budget.PHASES
        }
        content = asdict(estimate) | {
            "phases": phases,
            "peak": estimate.peak(),
            "max_tokens_per_micro_batch": resolved.training.max_tokens_per_micro_batch,
            "fits": estimate.fits,
            "advice": advice,
        }
        print(json.dumps(content, default=sorted, indent=1))
    else:
        output_lines = [
            *budget.table(estimate),
            *masters_note(resolved, machine, estimate),
            *fitting.passes_note(config, resolved),
        ]
        if advice:
            output_lines += [f"this does not fit into {budget.gigabytes(machine.limit)}:", *advice]
        print("\n".join(output_lines))
    raise SystemExit(0 if estimate.fits else 1)


def _fit(config: PPOConfig, machine: Machine) -> tuple[PPOConfig, Estimate, list[str]]:
    """Return the options as a GPU runs them, what they need, and the advice where that does not fit."""
    from lightppo.preflight import budget, fitting

    try:
        resolved = fitting.with_fitting_passes(config, machine)
        estimate = budget.estimate(resolved, machine)
        advice = [] if estimate.fits else fitting.advice(resolved, machine)
    except UserError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # of the model's own code, on a device that holds no data
        raise ConfigError(
            f"the memory of this run cannot be computed ({type(error).__name__}: {error}); lightppo ppo --dry_run "
            "measures it"
        ) from error
    return resolved, estimate, advice


def _import_as_a_rank() -> None:
    """Import what a rank has imported before its models load; what that takes is counted."""
    import datasets  # noqa: F401

    import lightppo.trainer.build  # noqa: F401
    from lightppo.distributed.device import import_deepspeed, name_accelerator

    name_accelerator()
    import_deepspeed()


def masters_note(config: PPOConfig, machine: Machine, estimate: Estimate) -> Iterator[str]:
    """Yield a line where one rank keeps weights twice, with what the peak would be less without."""
    from lightppo.preflight import budget

    if roles := with_second_masters(config, machine.world_size):
        stage_options = {"actor": "zero_stage", "critic": "critic_zero_stage"}
        changed = config.with_options(**{stage_options[role]: 0 for role in roles}).resolved()
        of_host = not machine.gpus
        _, peak = estimate.peak(of_host=of_host)
        _, lower_peak = budget.estimate(changed, machine).peak(of_host=of_host)
        yield f"note: {second_masters(config)} {budget.gigabytes(peak - lower_peak)} less"


def _place(request: argparse.Namespace) -> dict[str, Any]:
    """Return where the run is to go, by the command line and this machine: fields of ``budget.Machine``."""
    gpu_memory = parse_size(request.gpu_memory, "--gpu_memory")
    host_memory = parse_size(request.host_memory, "--host_memory")
    import torch

    local_gpus = torch.cuda.device_count()
    gpus = local_gpus if request.gpus is None else request.gpus
    ranks_per_node = gpus or int(os.environ.get("WORLD_SIZE", "1"))
    placement = {
        "world_size": ranks_per_node * request.nodes,
        "gpus": gpus > 0,
        "per_node": ranks_per_node,
    }
    if not gpus:
        from lightppo.preflight.budget import host_bytes

        return placement | {"host_bytes": host_memory or host_bytes()}
    if host_memory is not None:
        raise ConfigError("--host_memory is for ranks on the CPU: add --gpus 0, or leave it out")
    if gpu_memory is None and local_gpus:
        gpu_memory = torch.cuda.get_device_properties(0).total_memory
    return placement | {"device_bytes": gpu_memory or 80 * 10**9}


def _check_models(models: ModelConfig) -> None:
    """Raise ConfigError where a config is not there; weights are not read."""
    model_paths = [("--pretrain", models.pretrain), ("--ref_pretrain", models.ref_pretrain)]
    model_paths += [("--critic_pretrain", models.critic_pretrain)]
    model_paths += [("--reward_pretrain", model_path) for model_path in models.reward_pretrain]
    try:
        for flag, model_path in model_paths:
            if model_path is not None:
                check_model(model_path, flag, weights=False)
    except UserError as error:
        raise ConfigError(str(error)) from error


def parse_size(text: str | None, flag: str = "--gpu_memory") -> int | None:
    """Return the bytes of ``80GB`` (10^9) or ``24GiB`` (2^30)."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM]i?B|)", text.strip(), re.IGNORECASE)
    example = "80GB, or 24GiB"
    if match and match[2]:
        byte_count = int(float(match[1]) * _UNITS[match[2].upper()])
        if byte_count > 0:
            return byte_count
    elif match:
        example = f"{match[1]}GB, or {match[1]}GiB: a number alone has no unit"
    raise ConfigError(f"{flag} {text}: write {example}")
