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

import yaml

from lightppo import tensor_file
from lightppo.checkpoint.layout import download_marks, has_checkpoints, part_folder, tag_of
from lightppo.cli.diff import differences, first_sample, steps_of
from lightppo.config import CheckpointConfig, LoggingConfig, PPOConfig, parse_args
from lightppo.config.arguments import CommandParser
from lightppo.config.cli import exit_on_mistakes
from lightppo.config.evaluation_options import EvaluationConfig
from lightppo.config.options import OptionSet
from lightppo.errors import CheckpointError, ConfigError, ReportError
from lightppo.logging.report_page import KINDS, command_of, named_run, recorded_path, starts_of
from lightppo.redaction import GIVE_WHOLE, cut_urls, plain, shown_url
from lightppo.storage import is_url, local_folder, read_apart

SHOWN_TOKENS = 24
A_YEAR = 365 * 24 * 60.0  # minutes: nobody's wait for a person at a debugger ends
SHOWN = (
    "rollout_log_probs",
    "action_log_probs",
    "base_action_log_probs",
    "values",
    "returns",
    "advantages",
)


def main(argv: Sequence[str], prog: str = "lightppo replay") -> None:
    """Replay a step: exit code 1 if it differs from what was recorded, 2 if there is no such run or step."""
    parser = CommandParser(
        prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    args = parser.parse_args(argv)
    if args.step is None:
        found = re.fullmatch(r"step(\d+)_rank\d+\.pt", args.batch.name if args.batch else "")
        args.step = int(found[1]) if found else parser.error("--step is required")
    with exit_on_mistakes(prog):
        check_step(args.run, args.step)
        flags = ["--config", str(args.run / "run_config.yaml"), *tape_flags(args)]
        flags += address_flags(args)
    recorded = parse_args(flags, prog, kind_of(args.run))
    with exit_on_mistakes(prog):
        if args.output is not None and args.output.is_dir() and any(args.output.iterdir()):
            raise ConfigError(f"--output {args.output}: holds files: name a new folder")
        config = replay_config(
            args, recorded, args.output or Path(tempfile.gettempdir(), "lightppo-replay")
        )

    from lightppo.preflight.before_imports import before_imports, preflight, preflight_supervised

    check = preflight if isinstance(config, PPOConfig) else preflight_supervised
    before_imports(lambda: check(config.resolved()), prog)

    from lightppo.trainer import run

    run(lambda: replay(args, config, recorded), prog)


# -- the run that is replayed ----------------------------------------------------------------------------------------


def check_step(run: Path, step: int) -> None:
    """Raises ConfigError if there is no such run, or no such step; says which versions have changed since."""
    from lightppo.logging.run_folder import versions

    if not (run / "run_config.yaml").is_file():
        raise ConfigError(
            f"{run} has no run_config.yaml: name the --save_path of a run of `lightppo ppo`, sft, rm, dpo"
        )
    if yaml.safe_load((run / "run_config.yaml").read_text()).get("val_only"):
        raise ConfigError(
            f"{run} is an evaluation (lightppo eval): it has no training step to replay"
        )
    last = max(recorded_steps(run), default=0)
    if not 1 <= step <= last + 1:
        raise ConfigError(
            f"--step {step}: {run} has recorded {last} steps; the next one, {last + 1}, can be tried too"
        )
    now = versions()
    for name, version in starts_of(run)[-1]["versions"].items() if starts_of(run) else ():
        if os.environ.get("RANK", "0") == "0" and now.get(name) != version:
            print(f"note: {run} was made with {name} {version}, this is {now.get(name, 'none')}")


def tape_flags(args: argparse.Namespace) -> list[str]:
    """Flags by which the run's tape answers, if it has one."""
    if args.ask_again or not (args.run / "tape").is_dir():
        return []
    return ["--tape_from", str(args.run), "--tape", "auto"]


def kind_of(run: Path) -> type[OptionSet]:
    """The command's options that the run's are the most like; other versions have some more or fewer."""
    return KINDS[command_of(yaml.safe_load((run / "run_config.yaml").read_text()))]


def recorded_steps(run: Path) -> dict[int, dict[str, Any]]:
    """What a run recorded of its training, by step."""
    try:
        rows = steps_of(run) if (run / "metrics.jsonl").is_file() else {}
    except ReportError as error:
        raise ConfigError(str(error)) from error
    steps = {
        step: {n: x for n, x in row.items() if not n.startswith("eval/")}
        for step, row in rows.items()
    }
    return {step: row for step, row in steps.items() if row}


def replay_config(args: argparse.Namespace, recorded: OptionSet, output: Path) -> OptionSet:
    """The options of the replay: no evaluation, no checkpoint, no other log, and all files in the output."""
    saved = recorded_path(args.run, "ckpt_path")
    if "://" in (url := recorded.resolved().checkpoint.ckpt_path) and saved is None:
        saved = url
    ours = (CheckpointConfig, EvaluationConfig, LoggingConfig)
    is_ppo = isinstance(recorded, PPOConfig)
    sections = [section for section in recorded.sections().values() if issubclass(section, ours)]
    changes = {one.name: one.default for section in sections for one in section.options().values()}
    changes |= {
        "save_path": str(output),
        "ckpt_path": str(output / "checkpoints"),
        "benchmark_steps": args.step,
    }
    changes["reshape_ckpt"] = recorded.checkpoint.reshape_ckpt
    changes |= {"eval_data" if is_ppo else "eval_dataset": None}
    there = saved is not None and (saved == url or has_checkpoints(saved))
    changes["resume"] = str(saved) if there else "never"
    if args.pdb:
        changes["dist_timeout"] = A_YEAR
    if not is_ppo:
        return recorded.with_options(**changes)
    changes |= {"rollout_data_dir": str(output / "rollouts"), "num_examine": 0}
    if args.ask_again:
        changes["tape_from"] = None
    if recorded.tape.tape_from is None or args.ask_again:
        changes["tape"] = "off"  # nobody reads another one
    if recorded.sampling.skip_rollout is not None:
        changes["skip_rollout"] = str(output / "saved_rollouts")
    return recorded.with_options(**changes)


def address_flags(args: argparse.Namespace) -> list[str]:
    """Flags with the whole addresses of what the run has recorded in part, out of ``--remote_rm_url`` and ``--url``."""
    recorded = yaml.safe_load((args.run / "run_config.yaml").read_text())
    servers = recorded.get("remote_rm_url") or []
    if args.remote_rm_url and list(map(shown_url, args.remote_rm_url)) != list(
        map(shown_url, servers)
    ):
        raise ConfigError(f"--remote_rm_url: the run had {', '.join(map(shown_url, servers))}")
    given = {shown_url(url): url for url in (*args.url, *args.remote_rm_url)}
    flags: list[str] = []
    for name, value in recorded.items():
        if name == "remote_rm_url" and tape_flags(args):
            continue  # the tape answers
        cut = cut_urls(value)
        if missing := [url for url in cut if url not in given]:
            flag = "remote_rm_url" if name == "remote_rm_url" else "url"
            raise ConfigError(f"--{name} {missing[0]}: {GIVE_WHOLE}, by --{flag}")
        if cut:
            values = value if isinstance(value, list) else [value]
            flags += [f"--{name}", *(_completed(text, given) for text in values)]
    return flags


def _completed(text: str, whole: Mapping[str, str]) -> str:
    """A text, also with commas between, with the whole addresses."""
    return ",".join(whole.get(part.strip(), part) for part in text.split(","))


def fetch_marks(strategy: Any, config: OptionSet) -> OptionSet:
    """What is at the URL of the checkpoints, in a folder of the replay's own. Collective."""
    if not is_url(url := config.checkpoint.resume):
        return config
    from lightppo.preflight.run_checks import temporary_folder

    read_apart(temporary_folder(strategy))
    strategy.on_rank_0(lambda: download_marks(url), f"read {url}")
    found = strategy.broadcast_object(has_checkpoints(local_folder(url)))
    if found:
        return config
    return config.with_options(resume="never")


def link_rollouts(run: Path, folder: str | None, rank: int) -> None:
    """Links to a rank's rollouts that ``--skip_rollout`` has saved; what lacks there is sampled and written beside."""
    saved = recorded_path(run, "skip_rollout")
    for path in saved.glob(f"*_rank{rank}of*.json") if folder and saved is not None else ():
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, path.name).symlink_to(path.absolute())


# -- the replay ------------------------------------------------------------------------------------------------------


class Replayed:
    """What the trainer of a replay does beside training: it shows one step, and stops in it. It changes no number."""

    request: argparse.Namespace

    def tell(self, *lines: str) -> None:
        """Print what each rank says. Collective."""
        for rank, of_rank in enumerate(self.strategy.all_gather_object("\n".join(lines))):
            self.strategy.print(
                f"-- rank {rank}, " * (self.strategy.world_size > 1) + plain(of_rank)
            )

    def stop(self, rollouts: Sequence[Any], experience: Sequence[Any]) -> None:
        """With ``--pdb`` a debugger on rank 0, while the others wait; ``q`` ends all of them. Collective."""
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
        """Of this rank."""
        path = self.request.batch
        if self.strategy.world_size > 1:
            path = path.with_name(
                f"{path.stem.rpartition('_rank')[0]}_rank{self.strategy.get_rank()}{path.suffix}"
            )
        if not path.is_file():
            raise ConfigError(f"--batch {path}: no such file")
        return path

    def finish(self) -> None:
        """Nothing is evaluated or saved."""


class ReplayedOnData(Replayed):
    """Of ``lightppo sft``, ``rm`` and ``dpo``."""

    def training_step(self, micro_batches: Sequence[Any]) -> dict[str, float]:
        step = self.state.global_step + 1
        texts = []
        if step != self.request.step:
            return super().training_step(micro_batches)
        if self.request.batch is not None:
            micro_batches, texts = self.kept()
        lines = [
            f"step {step}: {len(micro_batches)} micro batches, this rank's means without dropout:"
        ]
        ids = [part.get("sequences", part.get("input_ids")) for part in micro_batches]
        texts = texts or [self.tokenizer.batch_decode(rows) for rows in ids]
        for number, (part, found) in enumerate(
            zip(micro_batches, self.looked_at(micro_batches)), start=1
        ):
            values = ", ".join(f"{name} {value:.6g}" for name, value in found.items())
            lines += [f"  micro batch {number}: {len(part['attention_mask'])} rows, {values}"]
        lines += [
            f"  {text}"
            for text in [text for part in texts for text in part][: self.request.samples]
        ]
        self.tell("\n".join(lines))
        self.stop([text for part in texts for text in part], micro_batches)
        status = super().training_step(micro_batches)
        self.strategy.print(
            "all together: " + ", ".join(f"{name} {value:.6g}" for name, value in status.items())
        )
        if self.request.batch is not None:
            raise StopReplay
        return status

    def kept(self) -> tuple[list[Any], list[list[str]]]:
        """``--batch``."""
        saved = tensor_file.read(self.batch_file())
        self.tell("{}, of step {step} and rank {rank}".format(self.batch_file(), **saved["facts"]))
        return saved["micro_batches"], saved["texts"]

    def looked_at(self, micro_batches: Sequence[Any]) -> list[dict[str, float]]:
        """Means of each micro batch, from passes that draw no random number. Collective."""
        import torch

        self.model.eval()
        with torch.no_grad():
            found = [
                {name: tensor.to(self.strategy.device) for name, tensor in part.items()}
                for part in micro_batches
            ]
            passes = [
                self.objective.loss(self.model, part, max(1, self.objective.count(part)), 1)
                for part in found
            ]
        return [
            {"loss": float(loss)} | {n: float(x) for n, x in means.items()}
            for loss, means in passes
        ]


class ReplayedPPO(Replayed):
    """Of ``lightppo ppo``."""

    optimizer_steps = 0  # of the step that is shown

    def make_experience(self, collected: Any, step: int) -> None:
        super().make_experience(collected, step)
        if step == self.request.step:
            rows = list(self.replay_buffer.items)
            # --buffer_limit may have dropped the first ones.
            first = max(0, len(collected.rollouts) + len(collected.repeated) - len(rows))
            self.shown = list(zip(collected.rollouts[first:], rows))[: self.request.samples]
            self.tell(self.described(collected.rollouts))
            if self.request.batch is not None:
                self.train_alone(collected.rollouts)
            self.stop(collected.rollouts, rows)

    def described(self, rollouts: Sequence[Any]) -> str:
        """This rank's samples: scores of all, then some with their tokens."""
        from lightppo.logging.samples import examined

        scores = " ".join(f"{r.prompt.index}.{r.sample_index}:{r.reward:.4g}" for r in rollouts)
        lines = [
            f"step {self.request.step}: {len(rollouts)} samples, as prompt.sample:score {scores}"
        ]
        for rollout, row in self.shown:
            lines.append(f"{_name(rollout)}: {examined(rollout)}")
            tokens = [self.tokenizer.decode([i]) for i in rollout.response_ids[:SHOWN_TOKENS]]
            lines.append(f"  {len(rollout.response_ids)} tokens: {' '.join(map(repr, tokens))}")
            lines += [
                f"  {name} {_numbers(x[0])}"
                for name in SHOWN
                if (x := getattr(row, name)) is not None
            ]
        return "\n".join(lines)

    def train_minibatch(self, minibatch: Any, global_steps: int = 0) -> list[Mapping[str, float]]:
        statuses = super().train_minibatch(minibatch, global_steps)
        if global_steps == self.request.step:
            self.optimizer_steps += 1
            lines = [
                ", ".join(f"{name} {value:.6g}" for name, value in status.items())
                for status in statuses
            ]
            lines = [
                f"  micro batch {number}: {line}" for number, line in enumerate(lines, start=1)
            ]
            self.tell(
                f"optimizer step {self.optimizer_steps}, pass {self.epoch + 1}, the mean of:",
                *lines,
            )
        return statuses

    def train_alone(self, rollouts: Sequence[Any]) -> None:
        """The optimizer step of ``--batch``, then the end. Collective."""
        from lightppo.logging.skipped_batches import load_batch

        path = self.batch_file()
        batch, texts, facts = load_batch(path)
        parts = [*batch.micro_batches, *(batch.critic_micro_batches or ())]
        lines = [
            f"  micro batch {i}: not finite: {part.non_finite() or 'none'}"
            for i, part in enumerate(parts, 1)
        ]
        self.tell(
            f"{path}, of step {facts['step']} and rank {facts['rank']}: {len(texts)} samples",
            *lines,
        )
        for part in parts:
            part.to_device(self.strategy.device)
        self.stop(rollouts, parts)
        # The step was left out before there were advantages, so only the passes over its samples can be repeated.
        if parts[0].part is None:
            self.experience_maker.run_models(parts[0])
            self.tell(f"run again: not finite: {parts[0].non_finite() or 'none'}")
        else:
            self.train_minibatch(batch, self.request.step)
        raise StopReplay

    def save_logs_and_checkpoints(self, args: Any, global_step: int, *rest: Any) -> None:
        super().save_logs_and_checkpoints(args, global_step, *rest)
        if global_step == self.request.step:
            self.tell(f"after step {global_step}: probability of tokens, new / old", *self.ratios())

    def ratios(self) -> list[str]:
        """What the step made of the tokens of the samples that were shown. Collective."""
        import torch

        from lightppo.experience.experience import Experience
        from lightppo.ranks import level

        lines = []
        self.actor.eval()
        for rollout, row in level(
            self.shown, self.strategy, lambda: (None, Experience.placeholder())
        ):
            row = replace(row).to_device(self.strategy.device)
            with torch.no_grad():
                new = self.actor.score_actions(
                    row.sequences, row.num_actions, row.attention_mask
                ).log_probs
            old = row.rollout_log_probs if row.action_log_probs is None else row.action_log_probs
            if rollout is not None and old is not None:
                lines.append(f"  {_name(rollout)}: {_numbers((new - old).exp()[0])}")
        return lines


class StopReplay(Exception):
    """The batch has been run."""


def _name(rollout: Any) -> str:
    return f"prompt {rollout.prompt.index}, sample {rollout.sample_index}"


def _numbers(row: Any) -> str:
    return " ".join(f"{value:.4g}" for value in row[:SHOWN_TOKENS].tolist())


def built(args: argparse.Namespace, config: OptionSet) -> Any:
    """The trainer of the replay. Collective."""
    if isinstance(config, PPOConfig):
        from lightppo.trainer.build import build
        from lightppo.trainer.ppo_trainer import PPOTrainer

        kind = type("ReplayedTrainer", (ReplayedPPO, PPOTrainer), {"request": args})
        return build(config, kind)
    from lightppo.supervised.trainer import SupervisedTrainer, build

    return build(
        config, type("ReplayedTrainer", (ReplayedOnData, SupervisedTrainer), {"request": args})
    )


def replay(args: argparse.Namespace, config: OptionSet, recorded: OptionSet) -> None:
    """Build, go to the step, do it, compare. Collective.

    Raises:
        SystemExit: code 1, the step differs from what was recorded; code 0, the user quit the debugger.
    """
    from lightppo.config.options import public_options
    from lightppo.preflight.run_checks import temporary_folder
    from lightppo.trainer.build import build_strategy

    (strategy := build_strategy(config)).setup_distributed()
    if args.output is None:
        config = replay_config(args, recorded, Path(temporary_folder(strategy)))
    config = fetch_marks(strategy, config)
    if isinstance(config, PPOConfig):
        link_rollouts(args.run, config.sampling.skip_rollout, strategy.get_rank())
    trainer = built(args, config)
    trainer.resume(public_options(recorded.resolved()), before=args.step)
    start = trainer.state.global_step
    check_start(args.run, start, trainer)
    trainer.strategy.print(
        f"replay: {args.run} is only read; from step {start + 1} on, to {args.step}"
    )
    try:
        trainer.fit()
    except StopReplay:
        return trainer.close()
    except Exception as error:
        if args.pdb and trainer.strategy.is_rank_0():
            traceback.print_exception(error)
            pdb.post_mortem(error.__traceback__)
        raise
    if trainer.state.global_step < args.step:
        raise ConfigError(
            f"--step {args.step}: {args.run} ends after step {trainer.state.global_step}"
        )
    of_weights, same_weights = compared_weights(trainer, config.checkpoint.resume)
    lines = []
    equal = True
    if trainer.strategy.is_rank_0():
        lines, equal = compared(
            args.run, Path(config.checkpoint.save_path), range(start + 1, args.step + 1)
        )
    trainer.strategy.print("\n".join([*lines, *of_weights]))
    if not trainer.strategy.broadcast_object(equal and same_weights):
        raise SystemExit(1)


def compared_weights(trainer: Any, saved: str) -> tuple[list[str], bool]:
    """What to say of the weights beside those of the run's checkpoint of this step, and whether they are equal.

    Nothing where there is none. The checkpoint is loaded into the trainer, which is of no more use then. Collective.
    """
    tag = tag_of(trainer.state.global_step)
    is_there = saved != "never" and (local_folder(part_folder(saved)) / tag).is_dir()
    if not trainer.strategy.broadcast_object(is_there):
        return [], True
    models = trainer.checkpointer.models
    before = {name: [part.clone() for part in own_parts(model)] for name, model in models.items()}
    trainer.checkpointer.load(saved, tag)
    counts = {"differ": 0, "total": 0}
    for name, model in models.items():
        for old, new in zip(before[name], own_parts(model), strict=True):
            counts["differ"] += int((old != new).sum())
            counts["total"] += new.numel()
    counts = trainer.strategy.all_reduce(counts, "sum")
    total = int(counts["total"])
    differ = int(counts["differ"])
    if differ:
        return [
            f"differs from what was saved: {differ} of {total} weights are not as in {tag}"
        ], False
    return [f"all weights are as in {tag}"], True


def own_parts(model: Any) -> list[Any]:
    """This rank's parts of a model's weights."""
    from lightppo.zero3 import get_engine, own_part

    module = get_engine(model, "comparing weights").module
    return [own_part(weight) for weight in module.parameters()]


def check_start(run: Path, start: int, trainer: Any) -> None:
    """The start of the run is as it was: its first step, files, and ranks."""
    starts = starts_of(run)
    if start or not starts:
        return
    if first := starts[0]["step"]:
        raise CheckpointError(
            f"{run} went on from step {first} of another run, and has no checkpoint before this step"
        )
    if (ranks := starts[0]["ranks"]) != (now := trainer.strategy.world_size):
        raise CheckpointError(
            f"{run} had {ranks} ranks, and this is {now}: torchrun --nproc_per_node {ranks} …"
        )
    content = {name: mark for name, mark in starts[0]["content"].items() if name != "save_path"}
    if changed := [
        name for name, mark in content.items() if trainer.content.get(name, mark) != mark
    ]:
        raise ConfigError(f"--{', --'.join(changed)}: other content than {run} had")


def compared(run: Path, output: Path, steps: Sequence[int]) -> tuple[list[str], bool]:
    """What to say of the replayed steps beside the recorded ones, and whether they are equal."""
    then = recorded_steps(run)
    now = recorded_steps(output)
    found = differences(
        [(step, then[step], now[step]) for step in steps if step in then and step in now]
    )
    lines = [f"step {step} was not recorded" for step in steps[-1:] if step not in then]
    if sample := first_sample([recorded_path(run, "rollout_data_dir"), output / "rollouts"], steps):
        lines.append(f"differs from the recorded samples: {sample}")
    if found:
        name, ((step, recorded, repeated), *_) = next(iter(found.items()))
        lines.append(
            f"step {step} differs from what was recorded: first {name}: was {recorded}, is {repeated}"
        )
    elif not lines:
        lines.append(
            f"step {steps[-1]} is equal to what was recorded: {len(then[steps[-1]])} numbers"
        )
    return lines, not (found or sample)
