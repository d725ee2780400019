"""``lightppo replay``: go to a step of a run, do it again, look at it, and say whether it equals what was recorded.

RUN is the --save_path of a run of `lightppo ppo`. It is only read, also while the run goes on: no lock, no file. The
replay begins at the last checkpoint before the step, or at the start, with as many processes as the run had:

    lightppo replay RUN --step 12
    torchrun --nproc_per_node 2 -m lightppo replay RUN --step 12 --pdb
"""

from __future__ import annotations

import argparse
import os
import pdb
import tempfile
import traceback
from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightppo.commands.diff import differences, first_sample, steps_of
from lightppo.config import CheckpointConfig, EvaluationConfig, LoggingConfig, PPOConfig, parse_args
from lightppo.config.cli import exit_on_mistakes
from lightppo.errors import CheckpointError, ConfigError, ReportError
from lightppo.http import shown_url
from lightppo.storage import is_url, local_folder, read_apart
from lightppo.trainer.report import recorded_path, starts_of

SHOWN_TOKENS = 24
A_YEAR = 365 * 24 * 60.0  # minutes: nobody's wait for a person at a debugger ends
SHOWN = ("rollout_log_probs", "action_log_probs", "base_action_log_probs", "values", "returns", "advantages")


def main(argv: Sequence[str], prog: str = "lightppo replay") -> None:
    """Replay a step: exit code 1 if it differs from what was recorded, 2 if there is no such run or step."""
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run; it may have been moved")
    parser.add_argument("--step", type=int, required=True, help="PPO step; also the one in which the run failed")
    parser.add_argument("--pdb", action="store_true", help="stop before the step trains, in a debugger of rank 0 with "
                        "`trainer`, `rollouts` and `experience`; and where it fails")  # fmt: skip
    parser.add_argument("--batch", type=Path, help="train on this file alone, which a run of numbers that are not "
                        "finite has left: RUN/nonfinite/stepN_rankR.pt, on each rank its own")  # fmt: skip
    parser.add_argument("--remote_rm_url", nargs="+", default=(), help="whole addresses of the run's reward servers: "
                        "of a query string (?key=…) a run keeps nothing")  # fmt: skip
    parser.add_argument("--samples", type=int, default=2, help="samples of each rank to show; default: 2")
    parser.add_argument("--output", type=Path, help="new folder for metrics.jsonl and rollouts/; default: none is kept")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # of the launcher
    args = parser.parse_args(argv)
    with exit_on_mistakes(prog):
        check_step(args.run, args.step)
    recorded = parse_args(["--config", str(args.run / "run_config.yaml")], prog)
    with exit_on_mistakes(prog):
        if args.output is not None and args.output.is_dir() and any(args.output.iterdir()):
            raise ConfigError(f"--output {args.output}: holds files: name a new folder")
        config = replay_config(args, recorded, args.output or Path(tempfile.gettempdir(), "lightppo-replay"))

    from lightppo.trainer.preflight import before_imports, preflight

    before_imports(lambda: preflight(config.resolved()), prog)

    from lightppo.trainer import run

    run(lambda: replay(args, config, recorded), prog)


# -- the run that is replayed ----------------------------------------------------------------------------------------


def check_step(run: Path, step: int) -> None:
    """Raises ConfigError if there is no such run, or no such step; says which versions have changed since."""
    from lightppo.trainer.run_folder import versions

    if not (run / "run_config.yaml").is_file():
        raise ConfigError(f"{run} has no run_config.yaml: name the --save_path of a run of `lightppo ppo`")
    last = max(recorded_steps(run), default=0)
    if not 1 <= step <= last + 1:
        raise ConfigError(f"--step {step}: {run} has recorded {last} steps; the next one, {last + 1}, can be tried too")
    now = versions()
    for name, version in starts_of(run)[-1]["versions"].items() if starts_of(run) else ():
        if os.environ.get("RANK", "0") == "0" and now.get(name) != version:
            print(f"note: {run} was made with {name} {version}, this is {now.get(name, 'none')}")


def recorded_steps(run: Path) -> dict[int, dict[str, Any]]:
    """What a run recorded of its training, by step."""
    try:
        rows = steps_of(run) if (run / "metrics.jsonl").is_file() else {}
    except ReportError as error:
        raise ConfigError(str(error)) from error
    steps = {step: {n: x for n, x in row.items() if not n.startswith("eval/")} for step, row in rows.items()}
    return {step: row for step, row in steps.items() if row}


def replay_config(args: argparse.Namespace, recorded: PPOConfig, output: Path) -> PPOConfig:
    """The options of the replay: no evaluation, no checkpoint, no other log, and all files in the output."""
    saved = recorded_path(args.run, "ckpt_path")
    if "://" in (url := recorded.resolved().checkpoint.ckpt_path) and saved is None:
        saved = url
    sections = (CheckpointConfig, EvaluationConfig, LoggingConfig)
    changes = {one.name: one.default for section in sections for one in section.options().values()}
    changes |= {"save_path": str(output), "ckpt_path": str(output / "checkpoints"), "num_examine": 0}
    changes |= {"eval_data": None, "rollout_data_dir": str(output / "rollouts"), "benchmark_steps": args.step}
    there = saved is not None and (saved == url or any((saved / "_actor").glob("*/")))
    changes["resume"] = str(saved) if there else "never"
    changes["remote_rm_url"] = whole_urls(args.remote_rm_url, recorded.reward.remote_rm_url)
    if recorded.sampling.skip_rollout is not None:
        changes["skip_rollout"] = str(output / "saved_rollouts")
    if args.pdb:
        changes["dist_timeout"] = A_YEAR
    return recorded.with_options(**changes)


def whole_urls(given: Sequence[str], recorded: Sequence[str]) -> tuple[str, ...]:
    """The reward servers of the run, with what ``--remote_rm_url`` adds to their addresses."""
    if given and [shown_url(url) for url in given] != [shown_url(url) for url in recorded]:
        raise ConfigError(f"--remote_rm_url: the run had {', '.join(recorded)}")
    if cut := [url for url in given or recorded if url.endswith("?…")]:
        raise ConfigError(f"--remote_rm_url {cut[0]}: a run does not keep the part after ?: give its whole address")
    return tuple(given or recorded)


def fetch_marks(strategy: Any, config: PPOConfig) -> PPOConfig:
    """What is at the URL of the checkpoints, in a folder of the replay's own. Collective."""
    if not is_url(url := config.checkpoint.resume):
        return config
    from lightppo.trainer.build import temporary_folder
    from lightppo.trainer.checkpointing import download_marks

    read_apart(temporary_folder(strategy))
    strategy.on_rank_0(lambda: download_marks(url), f"read {url}")
    found = strategy.broadcast_object(any((local_folder(url) / "_actor").glob("*/")))
    return config if found else config.with_options(resume="never")


def link_rollouts(run: Path, folder: str | None, rank: int) -> None:
    """Links to a rank's rollouts that ``--skip_rollout`` has saved; what lacks there is sampled and written beside."""
    saved = recorded_path(run, "skip_rollout")
    for path in saved.glob(f"*_rank{rank}of*.json") if folder and saved is not None else ():
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, path.name).symlink_to(path.absolute())


# -- the replay ------------------------------------------------------------------------------------------------------


class Replayed:
    """What the trainer of a replay does beside training: it shows one step, and stops in it. It changes no number."""

    asked: argparse.Namespace
    optimizer_steps = 0  # of the step that is shown

    def make_experience(self, collected: Any, step: int) -> None:
        super().make_experience(collected, step)
        if step == self.asked.step:
            rows = list(self.replay_buffer.items)
            first = max(0, len(collected.rollouts) + len(collected.repeated) - len(rows))  # by --buffer_limit
            self.shown = list(zip(collected.rollouts[first:], rows))[: self.asked.samples]
            self.tell(self.described(collected.rollouts))
            if self.asked.batch is not None:
                self.train_alone(collected.rollouts)
            self.stop(collected.rollouts, rows)

    def tell(self, *lines: str) -> None:
        """Print what each rank says. Collective."""
        for rank, of_rank in enumerate(self.strategy.all_gather_object("\n".join(lines))):
            self.strategy.print(f"-- rank {rank}, " * (self.strategy.world_size > 1) + of_rank)

    def described(self, rollouts: Sequence[Any]) -> str:
        """This rank's samples: scores of all, then some with their tokens."""
        from lightppo.experience.samples import examined

        scores = " ".join(f"{r.prompt.index}.{r.sample_index}:{r.reward:.4g}" for r in rollouts)
        lines = [f"step {self.asked.step}: {len(rollouts)} samples, as prompt.sample:score {scores}"]
        for rollout, row in self.shown:
            lines.append(f"{_name(rollout)}: {examined(rollout)}")
            tokens = [self.tokenizer.decode([i]) for i in rollout.response_ids[:SHOWN_TOKENS]]
            lines.append(f"  {len(rollout.response_ids)} tokens: {' '.join(map(repr, tokens))}")
            lines += [f"  {name} {_numbers(x[0])}" for name in SHOWN if (x := getattr(row, name)) is not None]
        return "\n".join(lines)

    def stop(self, rollouts: Sequence[Any], experience: Sequence[Any]) -> None:
        """With ``--pdb`` a debugger on rank 0, while the others wait; ``q`` ends all of them. Collective."""
        if not self.asked.pdb:
            return
        quits, trainer = False, self
        if self.strategy.is_rank_0():
            try:
                pdb.Pdb(nosigint=True).set_trace()
                print(f"step {trainer.asked.step}: {len(rollouts)} samples, trained on in {len(experience)} rows")
            except BdbQuit:
                quits = True
        if self.strategy.broadcast_object(quits):
            raise SystemExit(0)

    def train_minibatch(self, minibatch: Any, global_steps: int = 0) -> list[Mapping[str, float]]:
        statuses = super().train_minibatch(minibatch, global_steps)
        if global_steps == self.asked.step:
            self.optimizer_steps += 1
            lines = [", ".join(f"{name} {value:.6g}" for name, value in status.items()) for status in statuses]
            lines = [f"  micro batch {number}: {line}" for number, line in enumerate(lines, start=1)]
            self.tell(f"optimizer step {self.optimizer_steps}, pass {self.epoch + 1}, the mean of:", *lines)
        return statuses

    def train_alone(self, rollouts: Sequence[Any]) -> None:
        """The optimizer step of ``--batch``, then the end. Collective."""
        from lightppo.experience.batching import load_batch

        path = self.asked.batch
        if self.strategy.world_size > 1:
            path = path.with_name(f"{path.stem.rpartition('_rank')[0]}_rank{self.strategy.get_rank()}{path.suffix}")
        if not path.is_file():
            raise ConfigError(f"--batch {path}: no such file")
        batch, texts, facts = load_batch(path)
        parts = [*batch.micro_batches, *(batch.critic_micro_batches or ())]
        lines = [f"  micro batch {i}: not finite: {part.non_finite() or 'none'}" for i, part in enumerate(parts, 1)]
        self.tell(f"{path}, of step {facts['step']} and rank {facts['rank']}: {len(texts)} samples", *lines)
        for part in parts:
            part.to_device(self.strategy.device)
        self.stop(rollouts, parts)
        if parts[0].part is None:  # it was left out before there were advantages: all that there is are the passes
            self.experience_maker.run_models(parts[0])
            self.tell(f"run again: not finite: {parts[0].non_finite() or 'none'}")
        else:
            self.train_minibatch(batch, self.asked.step)
        raise StopReplay

    def save_logs_and_checkpoints(self, args: Any, global_step: int, *rest: Any) -> None:
        super().save_logs_and_checkpoints(args, global_step, *rest)
        if global_step == self.asked.step:
            self.tell(f"after step {global_step}: probability of tokens, new / old", *self.ratios())

    def ratios(self) -> list[str]:
        """What the step made of the tokens of the samples that were shown. Collective."""
        import torch

        from lightppo.experience.experience import Experience
        from lightppo.ranks import level

        lines = []
        self.actor.eval()
        for rollout, row in level(self.shown, self.strategy, lambda: (None, Experience.placeholder())):
            row = replace(row).to_device(self.strategy.device)
            with torch.no_grad():
                new = self.actor.score_actions(row.sequences, row.num_actions, row.attention_mask).log_probs
            old = row.rollout_log_probs if row.action_log_probs is None else row.action_log_probs
            if rollout is not None and old is not None:
                lines.append(f"  {_name(rollout)}: {_numbers((new - old).exp()[0])}")
        return lines

    def _saves_at_stop(self) -> bool:
        return False

    def _end(self) -> None:
        """Nothing is evaluated or saved."""
        self.recorder.close()
        self.close()


class StopReplay(Exception):
    """The batch has been run."""


def _name(rollout: Any) -> str:
    return f"prompt {rollout.prompt.index}, sample {rollout.sample_index}"


def _numbers(row: Any) -> str:
    return " ".join(f"{value:.4g}" for value in row[:SHOWN_TOKENS].tolist())


def replay(args: argparse.Namespace, config: PPOConfig, recorded: PPOConfig) -> None:
    """Build, go to the step, do it, compare. Collective.

    Raises:
        SystemExit: code 1, the step differs from what was recorded; code 0, the user quit the debugger.
    """
    from lightppo import PPOTrainer
    from lightppo.trainer.build import build, build_strategy, temporary_folder
    from lightppo.trainer.run_folder import public_options

    class ReplayedTrainer(Replayed, PPOTrainer):
        pass

    ReplayedTrainer.asked = args
    (strategy := build_strategy(config)).setup_distributed()
    if args.output is None:
        config = replay_config(args, recorded, Path(temporary_folder(strategy)))
    config = fetch_marks(strategy, config)
    link_rollouts(args.run, config.sampling.skip_rollout, strategy.get_rank())
    trainer = ReplayedTrainer.from_run(build(config))
    trainer.resume(public_options(recorded.resolved()), before=args.step)
    start = trainer.state.global_step
    check_start(args.run, start, trainer)
    trainer.strategy.print(f"replay: {args.run} is only read; from step {start + 1} on, to {args.step}")
    try:
        trainer.fit()
    except StopReplay:
        return trainer._end()
    except Exception as error:
        if args.pdb and trainer.strategy.is_rank_0():
            traceback.print_exception(error)
            pdb.post_mortem(error.__traceback__)
        raise
    if trainer.state.global_step < args.step:
        raise ConfigError(f"--step {args.step}: {args.run} ends after step {trainer.state.global_step}")
    lines, equal = [], True
    if trainer.strategy.is_rank_0():
        lines, equal = compared(args.run, Path(config.checkpoint.save_path), range(start + 1, args.step + 1))
    trainer.strategy.print("\n".join(lines))
    if not trainer.strategy.broadcast_object(equal):
        raise SystemExit(1)


def check_start(run: Path, start: int, trainer: Any) -> None:
    """The start of the run is as it was: its first step, files, and ranks."""
    starts = starts_of(run)
    if start or not starts:
        return
    if first := starts[0]["step"]:
        raise CheckpointError(f"{run} went on from step {first} of another run, and has no checkpoint before this step")
    if (ranks := starts[0]["ranks"]) != (now := trainer.strategy.world_size):
        raise CheckpointError(f"{run} had {ranks} ranks, and this is {now}: torchrun --nproc_per_node {ranks} …")
    content = {name: mark for name, mark in starts[0]["content"].items() if name != "save_path"}
    if changed := [name for name, mark in content.items() if trainer.content.get(name, mark) != mark]:
        raise ConfigError(f"--{', --'.join(changed)}: other content than {run} had")


def compared(run: Path, output: Path, steps: Sequence[int]) -> tuple[list[str], bool]:
    """What to say of the replayed steps beside the recorded ones, and whether they are equal."""
    then, now = recorded_steps(run), recorded_steps(output)
    found = differences([(step, then[step], now[step]) for step in steps if step in then and step in now])
    lines = [f"step {step} was not recorded" for step in steps[-1:] if step not in then]
    if sample := first_sample([recorded_path(run, "rollout_data_dir"), output / "rollouts"], steps):
        lines.append(f"differs from the recorded samples: {sample}")
    if found:
        name, ((step, a, b), *_) = next(iter(found.items()))
        lines.append(f"step {step} differs from what was recorded: first {name}: was {a}, is {b}")
    elif not lines:
        lines.append(f"step {steps[-1]} is equal to what was recorded: {len(then[steps[-1]])} numbers")
    return lines, not (found or sample)
