"""Right dumps: what functions of other trainers made, and the formula by which each is right, as flags."""

from __future__ import annotations

from pathlib import Path

RIGHT = Path(__file__).parents[1] / "audit" / "right"  # see make_right_dumps.py there

_VERL = "--init_kl_coef 0.1 --eps_clip_high 0.28 --dual_clip 1.5 --rollout_correction tis --correction_high 1.1"
_OPENRLHF = "--init_kl_coef 0.1 --n_samples_per_prompt 4"
RIGHT_DUMPS = {
    "verl_gae.pt": f"--lambd 0.95 {_VERL}",
    "verl_grpo.pt": f"--advantage_estimator grpo {_VERL}",
    "verl_rloo.pt": f"--advantage_estimator rloo {_VERL}",
    "verl_reinforce_plus_plus.pt": f"--advantage_estimator reinforce++ {_VERL}",
    "slime_grpo.pt": "--n_samples_per_prompt 4",
    "slime_ppo.pt": "--advantage_estimator gae --lambd 0.95 --adv_norm --init_kl_coef 0.1",
    "slime_reinforce_plus_plus.pt": "--advantage_estimator reinforce++ --adv_norm --init_kl_coef 0.1",
    "slime_reinforce_plus_plus_baseline.pt": (
        "--advantage_estimator reinforce++_baseline --adv_norm --n_samples_per_prompt 4"
    ),
    "openrlhf_gae.pt": f"--lambd 0.95 {_OPENRLHF}",
    "openrlhf_reinforce_baseline.pt": f"--advantage_estimator reinforce_baseline {_OPENRLHF}",
    "openrlhf_group_norm.pt": f"--advantage_estimator group_norm {_OPENRLHF}",
    "prime_rl.jsonl": "",
    "trl_group.parquet": "--reward_columns luck length=0.5",
    "trl_batch.parquet": "--reward_columns luck length=0.5 --grpo_std_scope batch",
}
