"""Options of data: prompts, held-out prompts, and text for the PTX loss; docs/data.md."""

from functools import partial
from typing import Literal

from lightppo.option import Section, option

safe = partial(option, resume_safe=True)


class DataConfig(Section):
    """Data: prompts."""

    prompt_data: str | None = option(
        None, "Prompts: file, folder, hub name or URL; separate several with commas.", required=True
    )
    prompt_split: str = option("train", "Split of --prompt_data.")
    input_key: str = option("input", "Column with the prompt: text, or a list of chat messages.")
    label_key: str | None = option(
        None, "Column with the ground truth. None: detected from the row."
    )
    input_template: str | None = option(None, "Text around the prompt; {} stands for the prompt.")
    apply_chat_template: bool = option(False, "Render prompts with the tokenizer's chat template.")
    system_prompt: str | None = option(None, "System message added to chats that have none.")
    chat_template_kwargs: str | None = option(
        None,
        "Variables of the chat template as a JSON object, such as '{\"enable_thinking\": false}'.",
    )
    data_source_key: str = option(
        "data_source", "Column that names a row's data source, for evaluation and rewards."
    )
    data_shuffle: bool = option(
        True, "Shuffle the prompts anew in each episode. Off: in the data's order."
    )
    max_samples: int = option(
        1000000, "Maximum number of rows taken from --prompt_data.", "prompts", ge=1
    )
    prompt_max_len: int = option(1024, "Maximum prompt length.", "tokens", ge=1)
    truncation: Literal["error", "left", "right", "middle", "drop"] = option(
        "error", "If a prompt is longer: stop, cut a side or the middle, or drop it. Counted."
    )
    filter_overlong_prompts: bool = option(
        False, "Drop and count longer prompts, regardless of --truncation."
    )
    on_bad_row: Literal["error", "skip"] = option(
        "error", "If a row cannot be used: stop, or skip and count it."
    )
    data_num_workers: int = safe(0, "Tokenizer processes. 0: tokenize in the main process.", ge=0)
    dataloader_pin_memory: bool = safe(True, "Pin batches in memory on a GPU machine.")
    eval_data: str | None = safe(None, "Held-out prompts. None: no evaluation.")
    eval_split: str = safe("test", "Split of --eval_data. Files without splits have only one.")
    eval_max_samples: int = safe(
        1000000, "Maximum number of rows taken from --eval_data.", "prompts", ge=1
    )
    prompt_data_probs: str | None = option(
        None, "Sampling probabilities of several --prompt_data, e.g. 0.7,0.3."
    )
    prompt_metadata: str | None = option(
        None,
        "File with extra columns for all prompts, also for evaluation, joined by query_id or id: AReaL's code tests.",
    )
    pretrain_data: str | None = option(None, "Text for the PTX loss.", needs="ptx_coef>0")
    pretrain_data_probs: str | None = option(
        None,
        "Sampling probabilities of several --pretrain_data.",
        needs="pretrain_data",
        off=("1.0", "1"),
    )
    pretrain_split: str = option("train", "Split of --pretrain_data.", needs="pretrain_data")
    output_key: str | None = option(
        None,
        "Column with the answer in --pretrain_data. None: --input_key holds the whole text.",
        needs="pretrain_data",
    )

    exclusive = (("input_template", "apply_chat_template", "both render the prompt"),)
