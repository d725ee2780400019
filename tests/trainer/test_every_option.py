"""Every option is set to another value, and something that a user could see must differ.

Looked at is one of three: the trainer that is built (`BUILT`), what a run writes and logs (`RAN`), and what one step
makes of tables (`STEP`). None of them contains the options themselves. Where this machine lacks what an option is for,
the run is refused, and the difference is why.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from support.fakes import FakeEngine
from support.fixtures.option_files import KINDS, config_of, option_files
from support.looks import look
from support.option_changes import (
    BUILT,
    ELSEWHERE,
    GAE,
    RAN,
    REFUSED_HERE,
    REWARDED,
    STEP,
    SUPERVISED,
    VLLM,
    cases,
)
from support.runs import fitted, logged
from support.sampled import sample

from lightppo import PPOTrainer
from lightppo.config.options import TrainingConfig
from lightppo.errors import UserError
from lightppo.http_client import HTTPClient
from lightppo.option import Option
from lightppo.ranks import Alone
from lightppo.rewards.reward_source import close_source
from lightppo.rollout.vllm.colocated import engine_arguments
from lightppo.supervised.trainer import SupervisedTrainer
from lightppo.trainer import start_checks
from lightppo.trainer.build import build_reward

pytestmark = pytest.mark.usefixtures("world")

__all__ = ["config_of", "option_files"]

ROOT = Path(__file__).parents[1]

# of options: what is seen of a run with them, or the text of why there is none
Look = Callable[..., Any]

# Checks of a run that only refuse it, or say something: without them two runs can differ in less, never in more, and
# what the options make of the run is seen in half of the time. tests/preflight has all of them for each option.
LEFT_OUT = (
    "check_files",
    "tell_options",
    "tell_models",
    "check_padded_batches",
    "check_decoding_of",
)


def check_differs(seen: Look, base: dict[str, Any], name: str, value: Any) -> None:
    before, after = seen(**base), seen(**base | {name: value})
    refused = isinstance(after, str)
    refused_here = name in REFUSED_HERE and not (
        name == "fp16" and get_accelerator().is_fp16_supported()  # newer processors
    )
    assert refused == refused_here, after if refused else f"--{name} works here"
    differs = after != before  # pytest would take minutes to write down where
    assert differs, f"--{name} {value} changes nothing"


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Some checks are left out, and a server that is not there is asked again at once."""
    with pytest.MonkeyPatch.context() as patch:
        for check in LEFT_OUT:
            patch.setattr(start_checks, check, lambda run: ())
        patch.setattr(HTTPClient, "_wait", lambda client, seconds: None)
        yield


# -- the trainer that is built ---------------------------------------------------------------------------------------


def once(seen: Look, kept: dict[str, Any]) -> Look:
    """The same, but what was seen once is kept: many options are compared with the same run."""

    def look(**options: Any) -> Any:
        key = repr(sorted(options.items()))
        if key not in kept:
            kept[key] = seen(**options)
        return kept[key]

    return look


@pytest.fixture(scope="module")
def kept() -> dict[str, dict[str, Any]]:
    """What was seen, by what looks; then by the options."""
    return defaultdict(dict)


@pytest.fixture(scope="module")
def built(world, config_of) -> Look:
    """What the trainer of these options holds before its first step."""

    def build(**options: Any) -> Any:
        config = config_of(**options)
        try:
            trainer = PPOTrainer.from_config(config)
        except (UserError, ValueError) as error:
            return str(error)
        try:
            return look(trainer)
        finally:
            trainer.close()

    return once(build, {})


@pytest.mark.parametrize(("base", "name", "value"), cases(BUILT))
def test_the_run_that_is_built_is_another(built, base, name, value):
    check_differs(built, base, name, value)


def test_the_same_options_build_the_same(config_of):
    looks = []
    for _ in range(2):
        trainer = PPOTrainer.from_config(config_of(eval_data="@prompts"))
        looks.append(look(trainer))
        trainer.close()
    same = looks[0] == looks[1]
    assert same


# -- what a run writes and logs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(world, config_of) -> Look:
    """The files of a run and its numbers."""
    return lambda **options: left_by(config_of(**options), PPOTrainer)


def left_by(config: Any, kind: type) -> Any:
    """What a run logs and writes."""
    fitted(config, kind)
    root = Path(config.checkpoint.save_path).parent
    rows = logged(config) if (root / "run" / "metrics.jsonl").exists() else []
    kept = [
        {n: v for n, v in row.items() if n != "time" and not n.startswith("perf/")} for row in rows
    ]
    return (
        sorted({name for row in rows for name in row}),
        repr(kept),
        dict(_files(root)),
    )


def _files(root: Path) -> Iterator[tuple[str, str]]:
    """Every file of a run, and of weights a hash of them; what a name has of the moment is left out."""
    for path in sorted(root.rglob("*")):
        name = re.sub(r"\d{6,}.*", "", str(path.relative_to(root)))
        weights = path.suffix == ".safetensors"
        yield name, hashlib.sha256(path.read_bytes()).hexdigest() if weights else ""


@pytest.mark.parametrize(("base", "name", "value"), cases(RAN))
def test_the_run_does_something_else(ran, kept, base, name, value):
    check_differs(once(ran, kept["ran"]), base, name, value)


def test_the_same_options_run_the_same(ran):
    assert ran(max_samples=8) == ran(max_samples=8)


# -- what is made of options alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "name", "value"), cases(REWARDED))
def test_the_reward_source_is_another(config_of, parts, kept, base, name, value):
    def made(**options: Any) -> Any:
        source = build_reward(config_of(**options).resolved(), [], parts["tokenizer"], Alone())
        try:
            return look(source)
        finally:
            close_source(source)

    check_differs(once(made, kept["rewarded"]), base, name, value)


@pytest.mark.parametrize(("base", "name", "value"), cases(VLLM))
def test_the_arguments_of_vllm_are_others(config_of, base, name, value):
    check_differs(
        lambda **options: engine_arguments(config_of(**options).resolved(), None, True),
        base,
        name,
        value,
    )


# -- training on data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "base", "name", "value"),
    [
        pytest.param(command, *case.values, id=case.id)
        for command, changes in SUPERVISED.items()
        for case in cases(changes)
    ],
)
def test_training_on_data_is_another(config_of, kept, command, base, name, value):
    def run(**options: Any) -> Any:
        return left_by(config_of(command, **options), SupervisedTrainer)

    check_differs(once(run, kept[command]), base, name, value)


# -- one step of tables ----------------------------------------------------------------------------------------------


class Engine(FakeEngine):
    """Every second answer is truncated; log probs of its own."""

    def generate(self, prompts, sampling):
        return [
            dataclasses.replace(
                rollout,
                log_probs=[-1.0, -1.5],
                finish_reason="length" if rollout.sample_index else "stop",
            )
            for rollout in super().generate(prompts, sampling)
        ]


def plain(value: Any) -> Any:
    """Nested plain values, to be compared; what a clock measured is left out."""
    if torch.is_tensor(value):
        return value.detach().double().flatten().tolist()
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items() if "time" not in str(key)}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value)


@pytest.fixture
def outcome(trainer_with, parts) -> Callable[..., Any]:
    """``outcome(**options)``: all that a step shows; each time from the same weights and optimizer states."""
    models = [parts["actor"], parts["critic"]]
    weights = [copy.deepcopy(model.state_dict()) for model, _, _ in models]
    states = [copy.deepcopy(part.state_dict()) for _, *rest in models for part in rest]

    def restore() -> None:
        for (model, *_), kept in zip(models, weights):
            model.load_state_dict(kept)
        for part, kept in zip([part for _, *rest in models for part in rest], states):
            part.load_state_dict(copy.deepcopy(kept))

    def run(**options: Any) -> Any:
        restore()
        torch.manual_seed(0)
        trainer = trainer_with(rollout_engine=(engine := Engine()), **options)
        sample(trainer)
        items = [plain(vars(item)) for item in trainer.replay_buffer.items]
        status = trainer.train(1)
        trainer.control_kl(status)
        after = [plain(dict(model.named_parameters())) for model, *_ in models]
        return plain(engine.calls), items, plain(status), trainer.kl_ctl.value, after

    yield run
    restore()


def test_the_same_options_make_the_same(outcome, kept):
    """Else every difference below would say nothing."""
    for base, _ in STEP:
        assert once(outcome, kept["step"])(**base) == outcome(**base)


@pytest.mark.parametrize(("base", "name", "value"), cases(STEP))
def test_a_step_makes_something_else(outcome, kept, base, name, value):
    check_differs(once(outcome, kept["step"]), base, name, value)


def test_an_option_that_nothing_reads_would_be_noticed(outcome, monkeypatch):
    """The comparison above fails for it."""
    dead = Option("dead", int, 3, "Nothing.", owner="training")
    monkeypatch.setattr(TrainingConfig, "_declared", TrainingConfig._declared | {"dead": dead})
    assert outcome(**GAE) == outcome(**GAE | {"dead": 4})


# -- all options -----------------------------------------------------------------------------------------------------


def test_no_option_is_left_out():
    tables = [BUILT, RAN, REWARDED, STEP, VLLM, *SUPERVISED.values()]
    changed = {name for table in tables for _, changes in table for name in changes}
    options = {one.name for kind in KINDS.values() for one in kind.all_options()}
    assert changed | ELSEWHERE.keys() == options
    assert not changed & ELSEWHERE.keys()
    assert changed >= REFUSED_HERE


@pytest.mark.parametrize(("name", "file"), ELSEWHERE.items())
def test_another_test_sets_it(name, file):
    assert re.search(rf"\b{name}\b", (ROOT / file).read_text())
