"""What a run says about itself: its options, the sizes of its models, where its files are, what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightppo.callbacks import Callback
from lightppo.checkpoint.layout import has_checkpoints
from lightppo.config import PPOConfig
from lightppo.config.options import OptionSet, public_options
from lightppo.data.datasets import PromptDataset
from lightppo.files import local_folder
from lightppo.zero3 import parameter_count

_MODELS = {
    "--pretrain": "actor",
    "--critic_pretrain": "critic",
    "--ref_pretrain": "reference",
    "--teacher_pretrain": "teacher",
}


def tell_options(building: Any) -> Iterator[str]:
    """Yield those that were set."""
    yield described(building.given)


def tell_models(building: Any) -> Iterator[str]:
    """Yield their sizes; where files will be."""
    sizes = building.sizes
    if isinstance(building.config, PPOConfig):
        yield f"models: {model_sizes(building)}"
    else:
        yield f"model: {sizes['export']:,} parameters, {sizes['actor']:,} train"
    yield f"files: {places(building.config)}"


def described(config: OptionSet) -> str:
    """Return the options that were set, and differ from the defaults and from what None means, by section."""
    resolved = config.resolved()
    values = config.flat()
    resolved_values = resolved.flat()
    public_values = public_options(resolved)
    section_lines = ["options that differ from the defaults (all are in run_config.yaml):"]

    def is_meant_by_none(option_name: str) -> bool:
        return (
            resolved.with_options(**{option_name: None}).known()[option_name]
            == resolved_values[option_name]
        )

    for title, section in config.sections().items():
        option_texts = []
        for option_name, option in section.options().items():
            if values[option_name] == option.default:
                continue
            if option.default is not None or not is_meant_by_none(option_name):
                option_texts.append(f"{option_name}={public_values[option_name]!r}")
        if option_texts:
            section_lines.append(f"  {title}: {' '.join(option_texts)}")
    return "\n".join(section_lines)


def model_sizes(building: Any) -> str:
    """Return the parameters of each model, and how many of them train where not all do."""
    size_texts = []
    reward_models = 0
    for flag, model in building.models.items():
        reward_models += flag.startswith("--reward_pretrain")
        role = _MODELS.get(flag, f"reward model {reward_models}")
        parameters = parameter_count(model)
        size_text = f"{role} {parameters:,} parameters"
        trained = parameter_count(model, trained_only=True)
        if role in ("actor", "critic") and trained < parameters:
            size_text += f" ({trained:,} train)"
        size_texts.append(size_text)
    if (average := building.sizes.get("ema")) is not None:
        size_texts.append(f"moving average {average:,} parameters")
    return ", ".join(size_texts)


def places(config: OptionSet) -> str:
    """Return where a run writes to."""
    checkpoint = config.checkpoint
    saves = checkpoint.save_steps > 0 or checkpoint.save_epochs or checkpoint.save_seconds
    # A run that goes on from checkpoints, or was stopped, has some, and writes one at its end.
    saves = saves or (
        checkpoint.resume != "never" and has_checkpoints(local_folder(checkpoint.ckpt_path))
    )
    place_texts = [
        f"model and logs in {checkpoint.save_path}",
        f"checkpoints in {checkpoint.ckpt_path}" if saves else "no checkpoints (--save_steps)",
    ]
    place_texts += [
        place_text for section in config.parts() for place_text in section.places(config)
    ]
    return ", ".join(place_texts)


def has_chats(prompts_dataloader: Any) -> bool:
    """Tell whether prompts are rendered by the chat template though no option says so, as rows that are chats are."""
    dataset = getattr(prompts_dataloader, "dataset", None)
    return isinstance(dataset, PromptDataset) and dataset[0].messages is not None


class ClosingLines(Callback):
    """Where everything is, and what to do next."""

    def on_end(self, run: Any, error: BaseException | None) -> None:
        if error is None and run.keeps and run.owns_parts and not run.only_evaluates:
            for line in closing_lines(run):
                run.strategy.print(line)


def closing_lines(run: Any) -> Iterator[str]:
    """Yield what to do next, of a run that has ended."""
    config = run.config
    folder = local_folder(run.config.checkpoint.save_path)
    yield f"files: {places(config)}"
    if not isinstance(config, PPOConfig):
        return
    if config.data.apply_chat_template or config.data.input_template or has_chats(run.prompts):
        yield f"chat, with the template of the run: lightppo chat {folder}"
    else:
        yield (
            f"""generate: python -c "from transformers import pipeline; print(pipeline('text-generation', """
            f"""'{folder}')('PROMPT'))\""""
        )
    if config.data.eval_data:
        evaluation_flags = f"--pretrain {folder} --save_path {folder}_eval --resume never"
        yield f"evaluate: lightppo eval --config {folder / 'run_config.yaml'} {evaluation_flags}"
    if run.saves and (limits := run.reached_limits()):
        yield f"go on: the same command with larger limits than {limits}"
