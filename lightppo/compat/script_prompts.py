"""``PromptDataset`` with the seed's arguments, which looks up what is not given in ``strategy.args``."""

from __future__ import annotations

from typing import Any

from lightppo.data import datasets
from lightppo.data.script_options import setting

# arguments → options of scripts
_OPTIONS = {
    name: name
    for name in (
        "input_key",
        "label_key",
        "apply_chat_template",
        "prompt_max_len",
        "truncation",
        "system_prompt",
        "chat_template_kwargs",
        "on_bad_row",
    )
} | {"filter_overlong": "filter_overlong_prompts", "num_workers": "data_num_workers"}


class PromptDataset(datasets.PromptDataset):
    """As the core's; options that are not given are looked up in ``strategy.args``."""

    def __init__(
        self,
        dataset: Any,
        tokenizer: Any,
        strategy: Any = None,
        input_template: str | None = None,
        **options: Any,
    ) -> None:
        found = {name: setting(strategy, of, options.get(name)) for name, of in _OPTIONS.items()}
        options |= {name: value for name, value in found.items() if value is not None}
        options = {name: value for name, value in options.items() if value is not None}
        template = setting(strategy, "input_template", input_template)
        if "prompt_max_len" in options:
            options["prompt_max_len"] = int(options["prompt_max_len"])
        super().__init__(dataset, tokenizer, input_template=template, **options)
        self.data_source_key = setting(
            strategy, "data_source_key", options.get("data_source_key"), self.data_source_key
        )
