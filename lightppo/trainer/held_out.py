"""What an evaluation needs, while a run is built: prompts, what scores the answers, what samples them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightppo.config.evaluation_options import evaluation_config
from lightppo.data.datasets import PromptDataset
from lightppo.ranks import Ranks
from lightppo.rewards.reward_source import RewardSource
from lightppo.rollout.engine import RolloutEngine, SamplingParams
from lightppo.trainer.build import build_prompts, build_reward, sampling_params
from lightppo.trainer.evaluator import Evaluator


def held_out_prompts(config: Any, tokenizer: Any, strategy: Any) -> PromptDataset:
    """Prompts of ``--eval_data``, checked and tokenised."""
    data = config.data
    return build_prompts(
        config, tokenizer, strategy, "eval_data", data.eval_split, data.eval_max_samples
    )


def read_prompts(building: Any) -> None:
    """All of the options that were asked for, also where a dry run takes few."""
    if building.asked.flat().get("eval_data") is not None:
        building.held_out = held_out_prompts(building.asked, building.tokenizer, building.strategy)


def build_judge(building: Any) -> None:
    """What scores evaluations, where it is not what scores training; a run that only evaluates has nothing else."""
    config = building.config
    judging = evaluation_config(config)
    if judging is None:
        return
    flag = "--reward_fn" if config.evaluation.eval_reward_fn is None else "--eval_reward_fn"
    building.judge = build_reward(
        judging, building.reward_models, building.tokenizer, building.strategy, flag
    )
    if config.evaluation.val_only:
        building.reward_source = building.judge


def build_evaluator(building: Any) -> None:
    """With the run's engine and rewards."""
    if building.held_out is not None:
        judge = building.reward_source if building.judge is None else building.judge
        building.evaluator = evaluator_of(
            building.config, building.rollout_engine, judge, building.held_out, building.strategy
        )


def evaluator_of(
    config: Any, engine: RolloutEngine, source: RewardSource, prompts: PromptDataset, ranks: Ranks
) -> Evaluator:
    """Evaluation on held-out prompts as the options say."""
    threshold = config.evaluation.eval_correct_threshold
    return Evaluator(engine, source, prompts, eval_sampling_params(config), ranks, threshold)


def eval_sampling_params(config: Any) -> SamplingParams:
    """How evaluation samples: as training, but for temperature, top-p, top-k and the number of samples."""
    evaluation = config.evaluation
    return replace(
        sampling_params(config),
        n=evaluation.eval_n_samples,
        temperature=evaluation.eval_temperature,
        top_p=evaluation.eval_top_p,
        top_k=evaluation.eval_top_k,
        do_sample=True,
        first_token_temperature=None,
    )


def let_it_read(model: Any, role: str, config: Any, device: Any) -> None:
    """A model that only answers need not be trainable: nothing of it is saved."""
    if role == "actor" and config.flat().get("val_only"):
        model.hf_model.untrainable = None
