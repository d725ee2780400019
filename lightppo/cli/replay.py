"""``lightppo replay``: repeat a step of a run, inspect it, and check that it equals what was recorded.

RUN is the --save_path of a run of `lightppo ppo`, `sft`, `rm` or `dpo`. The folder is only read, without a lock;
the run may still be going. The replay starts at the last checkpoint before the step, or at the beginning. Use as many
processes as the run had. The tape in RUN answers in place of environments and reward servers, which may be gone:

    lightppo replay RUN --step 12
    torchrun --nproc_per_node 2 -m lightppo replay RUN --step 12 --pdb
"""

from __future__ import annotations

import argparse
import os
import pdb
import re
import tempfile
import traceback
from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightppo import tensor_file
from lightppo.checkpoint.layout import download_marks, has_checkpoints, part_folder, tag_of
from lightppo.cli.diff import differences, first_sample, steps_of
from lightppo.config import CheckpointConfig, LoggingConfig, PPOConfig, parse_args
from lightppo.config.cli import CommandParser, exit_on_mistakes
from lightppo.config.evaluation_options import EvaluationConfig
from lightppo.config.options import OptionSet
from lightppo.errors import CheckpointError, ConfigError, ReportError
from lightppo.logging.report_page import (
    KINDS,
    command_of,
    named_run,
    options_of,
    recorded_path,
    starts_of,
)
from lightppo.redaction import GIVE_WHOLE, cut_urls, plain, shown_url
from lightppo.storage import is_url, local_folder, read_apart

MAX_TOKENS = 24  # of a sample
A_YEAR = 365 * 24 * 60.0  # minutes: nobody's wait for a person at a debugger ends
COLUMNS = (
    "rollout_log_probs",
    "action_log_probs",
    "base_action_log_probs",
    "values",
    "returns",
    "advantages",
)


def main(arguments: Sequence[str], program: str = "lightppo replay") -> None:
    """Replay a step: exit code 1 if it differs from what was recorded, 2 if there is no such run or step."""
    parser = CommandParser(
        program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        type=lambda path: Path(named_run(path)),
        help="folder of the run; you may have moved it",
    )
    parser.add_argument(
        "--step",
        type=int,
        help="step to repeat, also one that failed; default: the step of --batch",
    )
    parser.add_argument("--pdb", action="store_true", help="open a debugger on rank 0 before the step trains, with "
                        "`trainer`, `rollouts` and `experience`, and again if it fails")  # fmt: skip
    parser.add_argument("--batch", type=Path, help="train only on this file, which a run with non-finite numbers "
                        "wrote: RUN/nonfinite/stepN_rankR.pt; each rank needs its own")  # fmt: skip
    parser.add_argument(
        "--ask_again",
        action="store_true",
        help="ask environments and reward servers, though the run has a tape of their answers",
    )
    parser.add_argument("--remote_rm_url", nargs="+", default=(), help="full addresses of the run's reward servers; "
                        "a run does not record query strings (?key=…)")  # fmt: skip
    parser.add_argument("--url", nargs="+", default=(), help="full addresses of models, data and other servers that "
                        "the run recorded only in part (…)")  # fmt: skip
    parser.add_argument(
        "--samples", type=int, default=2, help="samples to show per rank; default: 2"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="new folder for metrics.jsonl and rollouts/; default: they are not kept",
    )
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # of the launcher
    request = parser.parse_args(arguments)
    if request.step is None:
        match = request.batch and re.fullmatch(r"step(\d+)_rank\d+\.pt", request.batch.name)
        if not match:
            parser.error("--step is required")
        request.step = int(match[1])
    output = request.output
    with exit_on_mistakes(program):
        check_step(request.run, request.step)
        run_flags = ["--config", str(request.run / "run_config.yaml")]
        run_flags += [*tape_flags(request), *address_flags(request)]
    recorded = parse_args(run_flags, program, KINDS[command_of(recorded_options(request.run))])
    with exit_on_mistakes(program):
        if output is not None and output.is_dir() and any(output.iterdir()):
            raise ConfigError(f"--output {output}: holds files: name a new folder")
        temporary = Path(tempfile.gettempdir(), "lightppo-replay")
        config = replay_config(request, recorded, output or temporary)

    from lightppo.preflight.before_imports import before_imports, preflight, preflight_supervised

    check_run = preflight if isinstance(config, PPOConfig) else preflight_supervised
    before_imports(lambda: check_run(config.resolved()), program)

    from lightppo.trainer import run

    run(lambda: replay(request, config, recorded), program)


# -- the run that is replayed ----------------------------------------------------------------------------------------


def check_step(run: Path, step: int) -> None:
    """Raise ConfigError if there is no such run, or no such step; say which versions have changed since."""
    from lightppo.logging.run_folder import versions

    if not (run / "run_config.yaml").is_file():
        raise ConfigError(
            f"{run} has no run_config.yaml: name the --save_path of a run of `lightppo ppo`, sft, rm, dpo"
        )
    if recorded_options(run).get("val_only"):
        raise ConfigError(
            f"{run} is an evaluation (lightppo eval): it has no training step to replay"
        )
    last_step = max(recorded_steps(run), default=0)
    if not 1 <= step <= last_step + 1:
        raise ConfigError(
            f"--step {step}: {run} has recorded {last_step} steps; the next one, {last_step + 1}, can be tried too"
        )
    if os.environ.get("RANK", "0") != "0":
        return
    present = versions()
    for recorded_start in starts_of(run)[-1:]:
        for package, version in recorded_start["versions"].items():
            if present.get(package) != version:
                print(
                    f"note: {run} was made with {package} {version}, this is {present.get(package, 'none')}"
                )


def recorded_options(run: Path) -> dict[str, Any]:
    return options_of(run, "run_config.yaml")


def tape_flags(request: argparse.Namespace) -> list[str]:
    """Return flags by which the run's tape answers, if it has one."""
    if request.ask_again or not (request.run / "tape").is_dir():
        return []
    return ["--tape_from", str(request.run), "--tape", "auto"]


def recorded_steps(run: Path) -> dict[int, dict[str, Any]]:
    """Return what a run recorded of its training, by step."""
    try:
        metric_rows = steps_of(run) if (run / "metrics.jsonl").is_file() else {}
    except ReportError as error:
        raise ConfigError(str(error)) from error
    values_by_step = {}
    for step, metric_row in metric_rows.items():
        if values := {
            metric: metric_row[metric] for metric in metric_row if not metric.startswith("eval/")
        }:
            values_by_step[step] = values
    return values_by_step


def replay_config(request: argparse.Namespace, recorded: OptionSet, output: Path) -> OptionSet:
    """Return the options of the replay: no evaluation, checkpoint or other log, and all files in the output."""
    is_ppo = isinstance(recorded, PPOConfig)
    changes: dict[str, Any] = {}
    for section in recorded.sections().values():
        if issubclass(section, (CheckpointConfig, EvaluationConfig, LoggingConfig)):
            changes |= {option.name: option.default for option in section.options().values()}
    changes |= {
        "save_path": str(output),
        "ckpt_path": str(output / "checkpoints"),
        "benchmark_steps": request.step,
        "reshape_ckpt": recorded.checkpoint.reshape_ckpt,
        "eval_data" if is_ppo else "eval_dataset": None,
        "resume": "never",
    }
    checkpoints = recorded_path(request.run, "ckpt_path")
    checkpoint_url = recorded.resolved().checkpoint.ckpt_path
    if checkpoints is None and "://" in checkpoint_url:
        changes["resume"] = checkpoint_url
    elif checkpoints is not None and has_checkpoints(checkpoints):
        changes["resume"] = str(checkpoints)
    if request.pdb:
        changes["dist_timeout"] = A_YEAR
    if not is_ppo:
        return recorded.with_options(**changes)
    changes |= {"rollout_data_dir": str(output / "rollouts"), "num_examine": 0}
    if request.ask_again:
        changes["tape_from"] = None
    if recorded.tape.tape_from is None or request.ask_again:
        changes["tape"] = "off"  # nobody reads another one
    if recorded.sampling.skip_rollout is not None:
        changes["skip_rollout"] = str(output / "saved_rollouts")
    return recorded.with_options(**changes)


def address_flags(request: argparse.Namespace) -> list[str]:
    """Return flags with the whole addresses of what the run has recorded in part, from ``--remote_rm_url`` and ``--url``."""
    recorded = recorded_options(request.run)
    servers = list(map(shown_url, recorded.get("remote_rm_url") or []))
    if request.remote_rm_url and list(map(shown_url, request.remote_rm_url)) != servers:
        raise ConfigError(f"--remote_rm_url: the run had {', '.join(servers)}")
    addresses = {shown_url(url): url for url in (*request.url, *request.remote_rm_url)}
    flags: list[str] = []
    for option_name, value in recorded.items():
        if option_name == "remote_rm_url" and tape_flags(request):
            continue  # the tape answers
        shortened_urls = cut_urls(value)
        for shortened_url in shortened_urls:
            if shortened_url not in addresses:
                address_flag = "remote_rm_url" if option_name == "remote_rm_url" else "url"
                raise ConfigError(
                    f"--{option_name} {shortened_url}: {GIVE_WHOLE}, by --{address_flag}"
                )
        if shortened_urls:
            recorded_texts = value if isinstance(value, list) else [value]
            flags.append(f"--{option_name}")
            for address in recorded_texts:  # also with commas between
                parts = [
                    addresses.get(address_part.strip(), address_part)
                    for address_part in address.split(",")
                ]
                flags.append(",".join(parts))
    return flags


def fetch_marks(strategy: Any, config: OptionSet) -> OptionSet:
    """Bring what is at the URL of the checkpoints to a folder of the replay's own. Collective."""
    url = config.checkpoint.resume
    if not is_url(url):
        return config
    from lightppo.preflight.run_checks import temporary_folder

    read_apart(temporary_folder(strategy))
    strategy.on_rank_0(lambda: download_marks(url), f"read {url}")
    if strategy.broadcast_object(has_checkpoints(local_folder(url))):
        return config
    return config.with_options(resume="never")


def link_rollouts(run: Path, folder: str | None, rank: int) -> None:
    """Link to a rank's rollouts that ``--skip_rollout`` has saved; what lacks there is sampled and written beside."""
    saved_folder = recorded_path(run, "skip_rollout")
    for path in (
        saved_folder.glob(f"*_rank{rank}of*.json") if folder and saved_folder is not None else ()
    ):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, path.name).symlink_to(path.absolute())


# -- the replay ------------------------------------------------------------------------------------------------------


class Replayed:
    """What the trainer of a replay does beside training: it shows one step, and stops in it. It changes no number."""

    request: argparse.Namespace

    def print_all(self, *lines: str) -> None:
        """Print what each rank says. Collective."""
        for rank, rank_text in enumerate(self.strategy.all_gather_object("\n".join(lines))):
            prefix = f"-- rank {rank}, " if self.strategy.world_size > 1 else ""
            self.strategy.print(prefix + plain(rank_text))

    def stop(self, rollouts: Sequence[Any], experience: Sequence[Any]) -> None:
        """Open with ``--pdb`` a debugger on rank 0, while the others wait; ``q`` ends all of them. Collective."""
        if not self.request.pdb:
            return
        quits = False
        trainer = self
        if self.strategy.is_rank_0():
            try:
                pdb.Pdb(nosigint=True).set_trace()
                print(
                    f"step {trainer.request.step}: {len(rollouts)} samples, trained on in {len(experience)} rows"
                )
            except BdbQuit:
                quits = True
        if self.strategy.broadcast_object(quits):
            raise SystemExit(0)

    def batch_file(self) -> Path:
        """Return the file of this rank."""
        path = self.request.batch
        if self.strategy.world_size > 1:
            prefix = path.stem.rpartition("_rank")[0]
            path = path.with_name(f"{prefix}_rank{self.strategy.get_rank()}{path.suffix}")
        if not path.is_file():
            raise ConfigError(f"--batch {path}: no such file")
        return path

    def finish(self) -> None:
        """Evaluate and save nothing."""


class ReplayedOnData(Replayed):
    """A replay of ``lightppo sft``, ``rm`` and ``dpo``."""

    def training_step(self, micro_batches: Sequence[Any]) -> dict[str, float]:
        step = self.state.global_step + 1
        if step != self.request.step:
            return super().training_step(micro_batches)
        if self.request.batch is None:
            batches_of_ids = [
                micro_batch.get("sequences", micro_batch.get("input_ids"))
                for micro_batch in micro_batches
            ]
            row_texts = [
                row_text
                for rows in batches_of_ids
                for row_text in self.tokenizer.batch_decode(rows)
            ]
        else:
            path = self.batch_file()
            saved_batch = tensor_file.read(path)
            self.print_all(
                "{}, of step {step} and rank {rank}".format(path, **saved_batch["facts"])
            )
            micro_batches = saved_batch["micro_batches"]
            row_texts = [row_text for rows in saved_batch["texts"] for row_text in rows]
        lines = [
            f"step {step}: {len(micro_batches)} micro batches, this rank's means without dropout:"
        ]
        means = self.means_of(micro_batches)
        for number, (micro_batch, numbers) in enumerate(zip(micro_batches, means), start=1):
            rows = len(micro_batch["attention_mask"])
            lines.append(f"  micro batch {number}: {rows} rows, {_status_text(numbers)}")
        lines += [f"  {row_text}" for row_text in row_texts[: self.request.samples]]
        self.print_all(*lines)
        self.stop(row_texts, micro_batches)
        status = super().training_step(micro_batches)
        self.strategy.print(f"all together: {_status_text(status)}")
        if self.request.batch is not None:
            raise StopReplay
        return status

    def means_of(self, micro_batches: Sequence[Any]) -> list[dict[str, float]]:
        """Return the means of each micro batch, from passes that draw no random number. Collective."""
        import torch

        self.model.eval()
        means = []
        with torch.no_grad():
            for micro_batch in micro_batches:
                micro_batch = {
                    number_name: tensor.to(self.strategy.device)
                    for number_name, tensor in micro_batch.items()
                }
                count = max(1, self.objective.count(micro_batch))
                loss_share, numbers = self.objective.loss(self.model, micro_batch, count, 1)
                numbers = {"loss": loss_share} | numbers
                means.append(
                    {number_name: float(number) for number_name, number in numbers.items()}
                )
        return means


class ReplayedPPO(Replayed):
    """A replay of ``lightppo ppo``."""

    optimizer_steps = 0  # of the step that is shown
    epoch = 0  # the pass over its samples

    def make_experience(self, collected: Any, step: int) -> None:
        super().make_experience(collected, step)
        if step == self.request.step:
            experience_rows = list(self.replay_buffer.items)
            # --buffer_limit may have dropped the first ones.
            dropped = max(
                0, len(collected.rollouts) + len(collected.repeated) - len(experience_rows)
            )
            samples = list(zip(collected.rollouts[dropped:], experience_rows))
            self.samples_shown = samples[: self.request.samples]
            self.print_all(self.described(collected.rollouts))
            if self.request.batch is not None:
                self.train_alone(collected.rollouts)
            self.stop(collected.rollouts, experience_rows)

    def described(self, rollouts: Sequence[Any]) -> str:
        """Return this rank's samples: scores of all, then some with their tokens."""
        from lightppo.logging.samples import examined

        scores = [
            f"{rollout.prompt.index}.{rollout.sample_index}:{rollout.reward:.4g}"
            for rollout in rollouts
        ]
        sample_lines = [
            f"step {self.request.step}: {len(rollouts)} samples, as prompt.sample:score {' '.join(scores)}"
        ]
        for rollout, experience_row in self.samples_shown:
            sample_lines.append(f"{_name(rollout)}: {examined(rollout)}")
            response_ids = rollout.response_ids
            tokens = [repr(self.tokenizer.decode([token])) for token in response_ids[:MAX_TOKENS]]
            sample_lines.append(f"  {len(response_ids)} tokens: {' '.join(tokens)}")
            for column in COLUMNS:
                if (numbers := getattr(experience_row, column)) is not None:
                    sample_lines.append(f"  {column} {_numbers_text(numbers[0])}")
        return "\n".join(sample_lines)

    def minibatches(self, step: int, epoch: int) -> Any:
        self.epoch = epoch
        return super().minibatches(step, epoch)

    def train_minibatch(self, minibatch: Any, global_steps: int = 0) -> list[Mapping[str, float]]:
        statuses = super().train_minibatch(minibatch, global_steps)
        if global_steps == self.request.step:
            self.optimizer_steps += 1
            self.print_all(
                f"optimizer step {self.optimizer_steps}, pass {self.epoch + 1}, the mean of:",
                *(
                    f"  micro batch {number}: {_status_text(status)}"
                    for number, status in enumerate(statuses, start=1)
                ),
            )
        return statuses

    def train_alone(self, rollouts: Sequence[Any]) -> None:
        """Take the optimizer step of ``--batch``, then end. Collective."""
        from lightppo.logging.skipped_batches import load_batch

        path = self.batch_file()
        minibatch, sample_texts, facts = load_batch(path)
        batches = [*minibatch.micro_batches, *(minibatch.critic_micro_batches or ())]
        self.print_all(
            f"{path}, of step {facts['step']} and rank {facts['rank']}: {len(sample_texts)} samples",
            *(
                f"  micro batch {number}: not finite: {experience.non_finite() or 'none'}"
                for number, experience in enumerate(batches, start=1)
            ),
        )
        for experience in batches:
            experience.to_device(self.strategy.device)
        self.stop(rollouts, batches)
        # The step was left out before there were advantages, so only the passes over its samples can be repeated.
        if batches[0].part is None:
            self.experience_maker.run_models(batches[0])
            self.print_all(f"run again: not finite: {batches[0].non_finite() or 'none'}")
        else:
            self.train_minibatch(minibatch, self.request.step)
        raise StopReplay

    def save_logs_and_checkpoints(self, args: Any, global_step: int, *rest: Any) -> None:
        super().save_logs_and_checkpoints(args, global_step, *rest)
        if global_step == self.request.step:
            title = f"after step {global_step}: probability of tokens, new / old"
            self.print_all(title, *self.ratios())

    def ratios(self) -> list[str]:
        """Return what the step made of the tokens of the samples that were shown. Collective."""
        import torch

        from lightppo.experience.experience import Experience
        from lightppo.ranks import level

        lines = []
        self.actor.eval()
        samples = level(self.samples_shown, self.strategy, lambda: (None, Experience.placeholder()))
        for rollout, experience_row in samples:
            experience_row = replace(experience_row).to_device(self.strategy.device)
            experts = experience_row.experts
            with torch.no_grad():
                scores = self.actor.score_actions(
                    experience_row.sequences,
                    experience_row.num_actions,
                    experience_row.attention_mask,
                    **({} if experts is None else {"experts": experts}),
                )
            old_log_probs = experience_row.action_log_probs
            if old_log_probs is None:
                old_log_probs = experience_row.rollout_log_probs
            if rollout is not None and old_log_probs is not None:
                ratios = (scores.log_probs - old_log_probs).exp()
                lines.append(f"  {_name(rollout)}: {_numbers_text(ratios[0])}")
        return lines


class StopReplay(Exception):
    """The batch has been run."""


def _name(rollout: Any) -> str:
    return f"prompt {rollout.prompt.index}, sample {rollout.sample_index}"


def _numbers_text(numbers: Any) -> str:
    return " ".join(f"{number:.4g}" for number in numbers[:MAX_TOKENS].tolist())


def _status_text(status: Mapping[str, float]) -> str:
    return ", ".join(f"{metric} {value:.6g}" for metric, value in status.items())


def build_trainer(request: argparse.Namespace, config: OptionSet) -> Any:
    """Build the trainer of the replay. Collective."""
    if isinstance(config, PPOConfig):
        from lightppo.trainer.build import build
        from lightppo.trainer.ppo_trainer import PPOTrainer

        bases = (ReplayedPPO, PPOTrainer)
    else:
        from lightppo.supervised.trainer import SupervisedTrainer, build

        bases = (ReplayedOnData, SupervisedTrainer)
    return build(config, type("ReplayedTrainer", bases, {"request": request}))


def replay(request: argparse.Namespace, config: OptionSet, recorded: OptionSet) -> None:
    """Build, go to the step, do it, compare. Collective.

    Raises:
        SystemExit: code 1, the step differs from what was recorded; code 0, the user quit the debugger.
    """
    from lightppo.config.options import public_options
    from lightppo.preflight.run_checks import temporary_folder
    from lightppo.trainer.build import build_strategy

    (strategy := build_strategy(config)).setup_distributed()
    if request.output is None:
        config = replay_config(request, recorded, Path(temporary_folder(strategy)))
    config = fetch_marks(strategy, config)
    if isinstance(config, PPOConfig):
        link_rollouts(request.run, config.sampling.skip_rollout, strategy.get_rank())
    trainer = build_trainer(request, config)
    trainer.resume(public_options(recorded.resolved()), before=request.step)
    start = trainer.state.global_step
    check_start(request.run, start, trainer)
    trainer.strategy.print(
        f"replay: {request.run} is only read; from step {start + 1} on, to {request.step}"
    )
    try:
        trainer.fit()
    except StopReplay:
        return trainer.close()
    except Exception as error:
        if request.pdb and trainer.strategy.is_rank_0():
            traceback.print_exception(error)
            pdb.post_mortem(error.__traceback__)
        raise
    if trainer.state.global_step < request.step:
        raise ConfigError(
            f"--step {request.step}: {request.run} ends after step {trainer.state.global_step}"
        )
    weight_lines, same_weights = compare_weights(trainer, config.checkpoint.resume)
    lines = []
    same_records = True
    if trainer.strategy.is_rank_0():
        steps = range(start + 1, request.step + 1)
        lines, same_records = compare_steps(request.run, Path(config.checkpoint.save_path), steps)
    trainer.strategy.print("\n".join([*lines, *weight_lines]))
    if not trainer.strategy.broadcast_object(same_records and same_weights):
        raise SystemExit(1)


def compare_weights(trainer: Any, checkpoints: str) -> tuple[list[str], bool]:
    """Return what to say of the weights beside those of the run's checkpoint of this step, and whether they are equal.

    Nothing where there is none. The checkpoint is loaded into the trainer, which is of no more use then. Collective.
    """
    checkpoint_tag = tag_of(trainer.state.global_step)
    is_there = (
        checkpoints != "never"
        and (local_folder(part_folder(checkpoints)) / checkpoint_tag).is_dir()
    )
    if not trainer.strategy.broadcast_object(is_there):
        return [], True

    def own_weights() -> list[Any]:
        """Return this rank's parts of all weights."""
        from lightppo.zero3 import get_engine, own_part

        modules = [
            get_engine(model, "comparing weights").module
            for model in trainer.checkpointer.models.values()
        ]
        return [own_part(weight) for module in modules for weight in module.parameters()]

    trained = [weight.clone() for weight in own_weights()]
    trainer.checkpointer.load(checkpoints, checkpoint_tag)
    counts = {"differ": 0, "total": 0}
    for weight, saved_weight in zip(trained, own_weights(), strict=True):
        counts["differ"] += int((weight != saved_weight).sum())
        counts["total"] += weight.numel()
    counts = trainer.strategy.all_reduce(counts, "sum")
    differing_count = int(counts["differ"])
    if not differing_count:
        return [f"all weights are as in {checkpoint_tag}"], True
    weight_count = int(counts["total"])
    result_line = f"differs from what was saved: {differing_count} of {weight_count} weights are not as in {checkpoint_tag}"
    return [result_line], False


def check_start(run: Path, start_step: int, trainer: Any) -> None:
    """Check that the start of the run is as it was: its first step, files, and ranks."""
    starts = starts_of(run)
    if start_step or not starts:
        return
    recorded = starts[0]
    if recorded["step"]:
        raise CheckpointError(
            f"{run} went on from step {recorded['step']} of another run, and has no checkpoint before this step"
        )
    ranks = recorded["ranks"]
    if ranks != trainer.strategy.world_size:
        raise CheckpointError(
            f"{run} had {ranks} ranks, and this is {trainer.strategy.world_size}: torchrun --nproc_per_node {ranks} …"
        )
    changed = [
        option_name
        for option_name, content_mark in recorded["content"].items()
        if option_name != "save_path"
        and trainer.content.get(option_name, content_mark) != content_mark
    ]
    if changed:
        raise ConfigError(f"--{', --'.join(changed)}: other content than {run} had")


def compare_steps(run: Path, output: Path, steps: Sequence[int]) -> tuple[list[str], bool]:
    """Return what to say of the replayed steps beside the recorded ones, and whether they are equal."""
    recorded = recorded_steps(run)
    repeated = recorded_steps(output)
    differing = differences(
        [
            (step, recorded[step], repeated[step])
            for step in steps
            if step in recorded and step in repeated
        ]
    )
    last_step = steps[-1]
    result_lines = []
    if last_step not in recorded:
        result_lines.append(f"step {last_step} was not recorded")
    sample = first_sample([recorded_path(run, "rollout_data_dir"), output / "rollouts"], steps)
    if sample:
        result_lines.append(f"differs from the recorded samples: {sample}")
    if differing:
        metric, ((step, recorded_value, repeated_value), *_) = next(iter(differing.items()))
        result_lines.append(
            f"step {step} differs from what was recorded: first {metric}: was {recorded_value}, is {repeated_value}"
        )
    elif not result_lines:
        result_lines.append(
            f"step {last_step} is equal to what was recorded: {len(recorded[last_step])} numbers"
        )
    return result_lines, not (differing or sample)
