"""Corrections, rejections, rarely used estimators and policy losses."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    _register_options()


def _register_options() -> None:
    register_section("correction", "lightppo.config.algorithms_options:CorrectionConfig")
    for name, kind, owner in (
        ("old_log_probs", "OldLogProbsConfig", "loss"),
        ("high_entropy", "HighEntropyConfig", "loss"),
        ("early_stop", "EarlyStopConfig", "loss"),
        ("prompt_filter", "PromptFilterConfig", "sampling"),
        ("score_norm", "ScoreNormConfig", "reward"),
        ("adv_norm", "AdvantageNormConfig", "algorithm"),
        ("kl_estimators", "KLConfig", "algorithm"),
        ("gdpo", "PartsConfig", "algorithm"),
    ):
        register_section(name, f"lightppo.config.algorithms_options:{kind}", adds_to=owner)
