"""Options of algorithms: advantages, KL, losses, corrections, distillation; docs/algorithms.md."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

from lightppo.algorithms.entries import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    TIMES_RATIO,
)
from lightppo.algorithms.option_values import Rejection, weights_of_parts
from lightppo.config.rules import (
    NORM_WORDS,
    norm_problem,
    reasons_for_a_pass,
)
from lightppo.errors import ConfigError
from lightppo.http_client import check_url
from lightppo.option import Section, option
from lightppo.redaction import shown_value

safe = partial(option, resume_safe=True)
critic = partial(option, needs="critic")
kl = partial(option, needs="init_kl_coef>0")
trained = partial(option, needs="trained_scores")
whitens_batch = partial(option, needs="whitening and adv_norm_scope=batch")


class AlgorithmConfig(Section, own=ADVANTAGE_ESTIMATORS, of="training"):
    """Algorithm: advantages, KL, reference."""

    advantage_estimator: str = option(
        "gae",
        "How rewards become advantages: gae with a critic, rloo, grpo and others.",
        names=ADVANTAGE_ESTIMATORS,
    )
    gamma: float = option(1.0, "Discount per token.", ge=0, le=1, needs="discounting")
    lambd: float = critic(0.95, "GAE's λ.", ge=0, le=1)
    bootstrap_truncated: bool = critic(
        False, "gae: continue truncated responses with the critic's last value."
    )
    group_std_norm: bool = option(
        True, "Divide by the group's standard deviation.", needs="group_deviation"
    )
    grpo_std_eps: float | None = option(
        None,
        "Added to the group's standard deviation. None: 1e-6.",
        ge=0,
        needs="group_deviation and group_std_norm",
    )
    grpo_std_scope: Literal["group", "batch"] = option(
        "group",
        "Standard deviation to divide by: of the group, or of all scores.",
        needs="group_deviation and group_std_norm",
    )
    adv_norm: bool | None = option(None, "Whiten advantages. None: as the estimator defines it.")
    init_kl_coef: float = option(0.01, "KL coefficient. 0: no reference model is loaded.", ge=0)
    kl_target: float | None = kl(
        None, "Adapt the coefficient towards this KL. None: constant.", gt=0
    )
    kl_horizon: int = option(
        10000,
        "Horizon of the adaptive coefficient.",
        "samples over all ranks",
        ge=1,
        needs="kl_target",
    )
    kl_estimator: str | None = option(
        None,
        "KL estimator per token (joschu.net/blog/kl-approx). None: k1 in the reward, k2 in the loss.",
        names=KL_ESTIMATORS,
    )
    kl_clip: float | None = kl(None, "Clip KL estimates to ± this.", "nats", gt=0)
    use_kl_loss: bool | None = kl(
        None,
        "Put the KL in the loss instead of the reward. None: on for estimators that divide by a group's deviation.",
        off=(False,),
    )
    use_kl_in_reward: bool | None = trained(
        None, "Put the KL in the reward. None: on unless it is in the loss.", off=(False,)
    )
    freezing_actor_steps: int = critic(
        -1,
        "Train only the critic up to and including this step; -1: never. The actor's schedule begins behind it.",
        "PPO steps",
        ge=-1,
        off=(0,),
    )
    adv_norm_scope: Literal["batch", "group"] = option(
        "batch",
        "Whiten over the batch of all ranks, or within each group.",
        needs="whitening and n_samples_per_prompt>1",
    )
    adv_std_unbiased: bool = whitens_batch(False, "Divide the variance by n - 1 instead of n.")
    advantage_clip: float | None = option(None, "Clip advantages to ± this.", gt=0, off=(0,))
    adv_norm_by: tuple[str, ...] = option(
        (),
        f"In place of whitening: normalise advantages by mean and deviation of all tokens or of each group's: {NORM_WORDS}",
    )
    gdpo_rewards: tuple[str, ...] = option(
        (),
        "gdpo: the rewards, NAME or NAME=WEIGHT, by the names that they have in reward/: sources of --reward_source, "
        "or numbers that a reward function gives beside the score.",
        needs="advantage_estimator=gdpo",
    )
    ref_ema_eta: float | None = kl(
        None,
        "After each step set the reference to (1 - η)·reference + η·actor.",
        gt=0,
        le=1,
        off=(0,),
    )
    ref_reset_steps: int | None = kl(
        None, "Copy the actor to the reference every N steps.", "PPO steps", ge=1
    )
    enable_ema: bool = option(
        False, "Keep an exponential moving average of the actor and save it at the end."
    )
    ema_beta: float = option(0.992, "Decay of the moving average.", ge=0, lt=1, needs="enable_ema")
    ptx_coef: float = option(
        0.05,
        "Weight of the language-model loss on --pretrain_data.",
        ge=0,
        needs="pretrain_data",
        off=(0,),
    )

    exclusive = (
        ("use_kl_loss", "use_kl_in_reward", "would count the KL twice"),
        ("ref_ema_eta", "ref_reset_steps", "both move the reference"),
    )

    @staticmethod
    def facts(config: Any) -> Mapping[str, bool]:
        if config.algorithm.adv_norm_by:
            return {"whitening": False}
        return {}

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        if config.algorithm.adv_norm_by:
            return {"adv_norm": False}
        return {}

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        yield from _advantage_norm(options)
        yield from _kl_estimator(options)
        yield from _gdpo(options)

    @staticmethod
    def passes(options: Any) -> Iterator[str]:
        if options.init_kl_coef > 0 and options.kl_estimator == "full" and options.use_kl_in_reward:
            yield "--kl_estimator full needs the distributions of a pass"


def _advantage_norm(options: Any) -> Iterator[str]:
    yield from norm_problem("adv_norm_by", options.adv_norm_by)
    if options.adv_norm_by and options.adv_norm:
        yield "--adv_norm_by takes the place of --adv_norm: leave one out"


def _kl_estimator(options: Any) -> Iterator[str]:
    name = options.kl_estimator
    times_ratio = name in KL_ESTIMATORS and KL_ESTIMATORS[name].as_loss == TIMES_RATIO
    if times_ratio and not options.use_kl_loss:
        plain = name.removesuffix("_ratio")
        yield f"--kl_estimator {name} is of --use_kl_loss: in the reward the ratio is 1; set {plain}"


# What changes the sum of the rewards, which gdpo does not read.
_OF_THE_SUM = (
    "reward_bias",
    "reward_scaling",
    "max_reward_clip",
    "reward_running_norm",
    "stop_properly_penalty",
    "overlong_buffer_len",
    "mask_no_eos_with_zero",
    "use_dense_reward",
    "reward_clip_range",
    "check_xml_format",
    "reward_norm_by",
)


def _gdpo(options: Any) -> Iterator[str]:
    try:
        weights = weights_of_parts(options.gdpo_rewards)
    except ConfigError as error:
        yield str(error)
        return
    if options.advantage_estimator != "gdpo":
        return
    if len(weights) < 2:
        yield "--advantage_estimator gdpo normalises several rewards: name at least two by --gdpo_rewards, or use grpo"
    if options.init_kl_coef > 0 and options.use_kl_in_reward:
        yield "--use_kl_in_reward adds to the sum of the rewards, and gdpo reads each one: set --use_kl_loss"
    flat = options.config.flat()
    for declaration in options.config.all_options():
        if declaration.name in _OF_THE_SUM and declaration.is_set(flat[declaration.name]):
            yield f"--{declaration.name} changes the sum of the rewards, and gdpo reads each one: leave it out"


# -- losses ------------------------------------------------------------------------------------------------------------

clips = partial(option, needs="clipping")


class LossConfig(Section, own=POLICY_LOSSES, of="training"):
    """Losses: policy, entropy, value; early stop."""

    policy_loss: str | None = option(
        None,
        "Policy loss, such as ppo, gspo, cispo. None: the estimator's default, ppo for most.",
        names=POLICY_LOSSES,
    )
    loss_agg_mode: str | None = option(
        None,
        "How token losses are combined. None: default of the estimator or loss, mostly token-mean.",
        names=LOSS_AGG_MODES,
    )
    eps_clip: float | None = clips(
        None, "Clip range of the ratio. None: the loss's default, 0.2 for ppo.", gt=0, le=1
    )
    eps_clip_low: float | None = clips(None, "Lower clip range. None: --eps_clip.", gt=0, le=1)
    eps_clip_high: float | None = clips(
        None, "Upper clip range (clip-higher). None: --eps_clip.", gt=0
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus in the actor's loss.", ge=0)
    aux_loss_coef: float = option(
        0.0, "Weight of the load-balancing loss of a mixture of experts.", ge=0
    )
    old_log_probs: Literal["auto", "forward", "rollout"] = option(
        "auto",
        "Log probs before the update: from a forward pass, or from the rollout. auto: skip the pass if the "
        "result would be the same, as with one optimizer step per rollout or float32 rollouts by the actor.",
    )
    router_replay: Literal["off", "rollout", "old"] = option(
        "off",
        "Experts of each token in training: as in the rollout, as in the pass for the old log probs, or as the router "
        "chooses then (off). For mixtures of experts.",
    )
    value_clip: float | None = critic(
        0.2, "Clip range of values around the old ones. None: off.", gt=0, off=(None,)
    )
    value_huber_delta: float | None = critic(
        None, "Use a linear (Huber) value loss for errors above this. None: squared.", gt=0
    )
    value_norm: Literal["exp", "ma"] | None = option(
        None,
        "Train the critic on returns normalised by an exponential or plain moving average. None: raw returns.",
        needs="critic",
    )
    value_norm_beta: float | None = option(
        None, "Decay of exp. None: 0.99995.", gt=0, lt=1, needs="value_norm=exp"
    )
    high_entropy_token_ratio: float | None = option(
        None,
        "Apply the policy loss only to this share of the tokens, those of highest entropy. None: all.",
        gt=0,
        le=1,
        off=(0,),
    )
    early_stop_imp_ratio: float | None = option(
        5.0,
        "Skip an optimizer step of the actor if its mean probability ratio is above this. None: off.",
        gt=1,
    )
    early_stop_kl: float | None = option(
        None,
        "Skip an optimizer step of the actor if the KL from old to new policy is above this. None: off.",
        "nats per token",
        gt=0,
    )

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        if config.loss.value_norm == "exp":
            return {"value_norm_beta": 0.99995}
        return {}

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        yield from _router_replay(options)
        if options.old_log_probs != "rollout":
            return
        try:
            for reason in reasons_for_a_pass(options):
                yield f"--old_log_probs rollout: {reason}; set auto or forward"
        except ConfigError:  # of a value that its section refuses
            return

    @staticmethod
    def passes(options: Any) -> Iterator[str]:
        if options.high_entropy_token_ratio is not None:
            yield "--high_entropy_token_ratio needs the entropy of a pass"
        if options.router_replay == "old":
            yield "--router_replay old records the experts of a pass"


def _router_replay(options: Any) -> Iterator[str]:
    """Refuse what chooses experts in another way, or samples without recording them."""
    if options.router_replay == "off":
        return
    if options.torch_compile:
        yield "--router_replay and --torch_compile: a compiled layer chooses by itself: leave one out"
    if options.router_replay != "rollout":
        return
    unrecorded = {
        "env": "a turn's experts are not recorded",
        "tools": "a turn's experts are not recorded",
        "hf_cuda_graphs": "a captured step does not say what it chose",
        "batch_invariant": "sampling and training choose the same experts",
        "skip_rollout": "its files have no experts",
    }
    for name, reason in unrecorded.items():
        if getattr(options, name, None):
            yield f"--router_replay rollout and --{name}: {reason}: leave one out"
    if getattr(options, "tensor_parallel_size", 1) > 1:
        yield "--router_replay rollout needs --tensor_parallel_size 1: other ranks' experts are not passed on"


# -- corrections -------------------------------------------------------------------------------------------------------

corrected = partial(option, needs="rollout_correction!=none")


class CorrectionConfig(Section, of="training"):
    """Correction: differences between rollout engine and trainer."""

    rollout_correction: str | None = option(
        None,
        "How to weight tokens by π_old / π_rollout (trainer / engine). None: decoupled with --max_staleness, else none. "
        "With --env the last digits depend on the time of replies, except with --batch_invariant.",
        names=CORRECTIONS,
    )
    correction_low: float | None = corrected(
        None,
        "Lower bound of the weight. None: the correction's default.",
        ge=0,
        below="correction_high",
    )
    correction_high: float | None = corrected(
        None, "Upper bound of the weight. None: the correction's default.", gt=0
    )
    correction_veto: float | None = corrected(
        None,
        "Do not train on a response with a token weight below this; 1e-4 is usual. None: off.",
        gt=0,
        lt=1,
    )
    correction_batch_norm: bool = corrected(
        False, "Divide weights by their mean over the rollout batch of all ranks."
    )
    correction_agg: Literal["mean", "sum", "max"] = option(
        "mean",
        "What of a response's ratios is within the bounds: geometric mean, product, or the largest one.",
        needs="rollout_correction=geo_tis|geo_mis",
    )
    rollout_rejection: tuple[str, ...] = option(
        (),
        "Leave tokens out of the policy loss unless all of these are within bounds, NAME=HIGH or NAME=LOW:HIGH "
        "such as token_ratio=0.5:2 seq_mean_k3=0.01. Names: token, seq_sum, seq_mean or seq_max, with _ratio, "
        "_k1, _k2, _k3 or _k3r; opsm; m2po.",
    )

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        usual_correction = "decoupled" if config.rollout.max_staleness > 0 else "none"
        correction = config.correction.rollout_correction or usual_correction
        entry = CORRECTIONS.find(correction)
        return {
            "rollout_correction": correction,
            "correction_low": entry.low,
            "correction_high": entry.high,
        }

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        try:
            for text in options.rollout_rejection:
                Rejection.parse(text)
        except ConfigError as error:
            yield str(error)

    @staticmethod
    def passes(options: Any) -> Iterator[str]:
        if options.rollout_correction != "none":
            yield f"--rollout_correction {options.rollout_correction} compares with a pass"
        for text in options.rollout_rejection:
            if Rejection.parse(text).entry.over_rollout:
                yield f"--rollout_rejection {text} compares all tokens before the update"


# -- distillation ------------------------------------------------------------------------------------------------------

teacher = partial(option, needs="teacher_pretrain or teacher_url")


class DistillConfig(Section, of="training"):
    """Distillation: a teacher judges each token of the student's own samples."""

    teacher_pretrain: str | None = option(
        None,
        "Teacher: local path, hub name or fsspec URL of a causal LM with the vocabulary of --pretrain.",
    )
    teacher_url: tuple[str, ...] = safe(
        (), "Teacher: addresses of vLLM servers that share the samples."
    )
    teacher_api_key_env: str | None = safe(
        None, "Environment variable with these servers' API key.", needs="teacher_url"
    )
    distill_coef: float = teacher(
        1.0, "Weight of the teacher's term, relative to the reward's.", gt=0
    )
    distill_by: Literal["advantage", "loss"] = teacher(
        "advantage",
        "advantage: add log π_teacher - log π of the sampled token; loss: add a divergence over all tokens.",
    )
    distill_discount: float = teacher(
        0.0,
        "Discount of later tokens' terms in a token's advantage.",
        ge=0,
        le=1,
        also="distill_by=advantage",
    )
    distill_topk: int | None = teacher(
        None,
        "Take the divergence over the teacher's K most likely tokens, which one pass over the rollout finds. None: all.",
        ge=1,
        also="distill_by=loss",
    )
    distill_tail: Literal["rest", "renormalise", "drop"] = teacher(
        "rest",
        "All other tokens: rest: count as one more; renormalise: both models' K sum to 1; drop: are left out.",
        also="distill_topk",
    )
    distill_beta: float = teacher(
        1.0,
        "Divergence in the loss: 1 is KL(student || teacher), 0 KL(teacher || student), between them Jensen-Shannon.",
        ge=0,
        le=1,
        also="distill_by=loss",
    )

    exclusive = (("teacher_pretrain", "teacher_url", "both name the teacher"),)

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        """Refuse a teacher that is not there, or cannot do what is asked."""
        is_alone = options.advantage_estimator == "on_policy_distill"
        if is_alone and not (options.teacher_pretrain or options.teacher_url):
            name = f"--advantage_estimator {shown_value(options.advantage_estimator)}"
            yield f"{name} learns from a teacher alone: set --teacher_pretrain or --teacher_url"
        if options.distill_tail == "drop" and options.distill_beta > 0:
            yield "--distill_tail drop leaves a sum that may fall below 0 unless --distill_beta is 0: set one of them"
        if not options.teacher_url:
            return
        if options.distill_by == "loss" and options.distill_topk is None:
            likeliest = "--teacher_url gives the --distill_topk likeliest"
            yield f"--distill_by loss over all tokens needs --teacher_pretrain; {likeliest}"
        if options.temperature not in (0, 1):
            yield (
                f"--teacher_url gives log probs at --temperature 1, not {options.temperature:g}: "
                "set 1, or --teacher_pretrain"
            )
        for url in options.teacher_url:
            try:
                check_url(url, "--teacher_url", "--teacher_api_key_env")
            except ValueError as error:
                yield str(error)
