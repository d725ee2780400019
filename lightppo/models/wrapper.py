"""What actor, critic and reward model share: the Hugging Face model inside, how it is prepared and called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightppo.config import PPOConfig
from lightppo.config.options import OptionSet
from lightppo.errors import ConfigError, ModelLoadError
from lightppo.models.adapters.lora import LoraOptions, add_adapters
from lightppo.models.attention.recurrent import run_by_segment
from lightppo.models.batches import Batch, decoder_layers
from lightppo.models.kernels.invariant import make_invariant
from lightppo.models.kernels.layers import accelerate_on_cpu, fuse, is_mixer
from lightppo.models.kernels.liger import use_liger_kernels, use_liger_kernels_if_exact
from lightppo.models.kernels.offload import offload_activations
from lightppo.models.loading import why_untrainable
from lightppo.models.packing import PackedLayout
from lightppo.models.pretrained import disable_dropout
from lightppo.models.router_replay import RouterReplay
from lightppo.plugin import PREPARATIONS

Role = str
"""What a model does in a run: actor, critic, reference, reward, teacher or ema. SFT, RM and DPO train the actor."""


class PretrainedWrapper(nn.Module):
    """A module around one Hugging Face model."""

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        load: Callable[..., PreTrainedModel],
        *,
        bf16: bool = False,
        dtype: torch.dtype = torch.float32,
        use_flash_attention_2: bool = False,
        ds_config: dict[str, Any] | None = None,
        packing_samples: bool | None = False,
        share_prompts: bool = True,
        **load_options: Any,
    ) -> None:
        super().__init__()
        # Scripts switch it on wherever they pack, as theirs packs by nothing else: here what there is.
        if use_flash_attention_2 and packing_samples:
            load_options["attn_implementation"] = "auto"
        elif use_flash_attention_2:
            if load_options.get("attn_implementation", "auto") not in ("auto", "flash_attention_2"):
                raise ModelLoadError(
                    "use_flash_attention_2 (--flash_attn) contradicts attn_implementation: drop one"
                )
            load_options["attn_implementation"] = "flash_attention_2"
        # strategy.prepare puts the DeepSpeed engine in its place
        self.model: nn.Module
        if isinstance(pretrain_or_model, PreTrainedModel):
            option_names = (
                sorted(load_options) + ["bf16"] * bf16 + ["dtype"] * (dtype != torch.float32)
            )
            self.model = _built(pretrain_or_model, option_names)
        else:
            dtype = torch.bfloat16 if bf16 else dtype
            self.model = load(pretrain_or_model, dtype=dtype, ds_config=ds_config, **load_options)
        # On an H100 torch prefers cuDNN's, which makes a plan for each new length (half a second): each decoded token.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Code of modules, in place; names and weights stay, and results but for rounding.
        accelerate_on_cpu(self.model)
        fuse(self.model)
        if any(map(is_mixer, self.model.modules())):
            run_by_segment(self.model)
        self.ds_config = ds_config  # for strategy.prepare; None: the strategy's own
        # (weights, device) → a context around each pass with gradients.
        self.around_pass: Callable[..., AbstractContextManager] | None = None
        self.layout = PackedLayout(self, packing_samples, share_prompts)
        self.router_replay: RouterReplay | None = None  # its routers record and replay choices

    @property
    def hf_model(self) -> PreTrainedModel:
        """Return the Hugging Face model, taken out of the engine."""
        if isinstance(self.model, PreTrainedModel):
            return self.model
        return self.model.module

    @property
    def untrainable(self) -> str | None:
        """Return why ``strategy.create_optimizer`` refuses the model, see :func:`.loading.why_untrainable`."""
        return self.hf_model.untrainable

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Recompute activations in the backward pass; non-reentrant unless the kwargs say ``use_reentrant``."""
        if not self.hf_model.supports_gradient_checkpointing:
            raise ModelLoadError(
                f"{type(self.hf_model).__name__} does not support --gradient_checkpointing"
            )
        checkpointing_options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        _checkpointing_method(self.hf_model, "enable")(checkpointing_options)

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations again."""
        _checkpointing_method(self.hf_model, "disable")()

    def run_rows(self, batch: Batch) -> Tensor:
        """Return logits or hidden states (B, S, ·) of all places."""
        raise NotImplementedError

    def _training_pass(self, batch: Batch) -> AbstractContextManager:
        """Return a context for a forward pass with gradients."""
        if not torch.is_grad_enabled():
            return nullcontext()
        group = self.layout.group
        if group is not None and group.is_active and not batch.is_piece:
            raise ConfigError(
                "--sequence_parallel_size: a loss needs log probs or values of the last actions (num_actions); the whole "
                "output of a model is not divided"
            )
        if self.around_pass is None:
            return nullcontext()
        return self.around_pass(self.hf_model.parameters(), batch.ids.device)


def _checkpointing_method(model: PreTrainedModel, action: Literal["enable", "disable"]) -> Callable:
    """Return transformers' own method, which it renamed in 5.23."""
    return getattr(model, f"activation_checkpointing_{action}", None) or getattr(
        model, f"gradient_checkpointing_{action}"
    )


def _built(model: PreTrainedModel, option_names: Sequence[str]) -> PreTrainedModel:
    """Take dropout out of a model that a script has built; raise ModelLoadError for options of loading."""
    if option_names:
        raise ModelLoadError(
            f"{', '.join(option_names)}: only for loading by path, but a built model was given"
        )
    disable_dropout(model)
    if not hasattr(model, "untrainable"):
        tensors = dict(model.named_parameters())
        model.untrainable = why_untrainable(model.config, tensors, type(model).__name__)
    return model


# -- changes of a loaded model before it goes to its engine, as options ask --------------------------------------------


def prepare_model(
    model: PretrainedWrapper,
    role: Role,
    config: OptionSet,
    device: torch.device,
) -> None:
    """Change a loaded model in place: what options ask for, then :data:`lightppo.plugin.PREPARATIONS`."""
    model_options = config.model
    if role in ("actor", "critic"):
        if model_options.gradient_checkpointing:
            use_reentrant = model_options.gradient_checkpointing_use_reentrant
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if config.adapter.lora_rank > 0:
            add_adapters(model, LoraOptions.of(config.adapter), config.strategy.seed)
        if model_options.activation_offload:
            offload_activations(model, device)
    # A reward model stays as it is.
    changes_code = role in ("actor", "critic", "reference", "teacher")
    if changes_code and model_options.use_liger_kernel:
        use_liger_kernels(model.hf_model, device)
    chooses = model_options.use_liger_kernel is None and not model_options.torch_compile
    if changes_code and chooses and find_spec("liger_kernel") is not None:
        use_liger_kernels_if_exact(model.hf_model, device)
    engine = getattr(config, "engine", None)
    if engine and engine.batch_invariant and role in ("actor", "reference"):
        make_invariant(model.hf_model, device)
    if changes_code and model_options.torch_compile:
        compile_layers(model.hf_model)
    for preparation in PREPARATIONS.values():
        preparation.fn(model, role, config, device)
    # last, as it looks at what checkpoints layers and what runs in routers
    if role == "actor" and engine and config.loss.router_replay != "off":
        model.router_replay = RouterReplay(model.hf_model)


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile each layer, in place, for rows of any length; names and weights stay."""
    layers = decoder_layers(model)
    if not layers:
        raise ModelLoadError(
            f"--torch_compile: {type(model).__name__} does not say which of its modules are layers"
        )
    # One by one: that compiles a single block, and leaves out the head, which makes log probs by chunks.
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)


def prepare_alone(model: PretrainedWrapper, role: Role, **options: Any) -> None:
    """Prepare a model that a script has made as a run with these options does, where they ask for anything."""
    if any(options.values()):
        config = PPOConfig.from_flat(options).resolved()
        prepare_model(model, role, config, torch.device("cpu"))


def adapter_options(
    rank: int, alpha: float, dropout: float, target_modules: str | Sequence[str] | None
) -> dict[str, Any]:
    """Return the options of adapters of this rank; none for 0."""
    if rank <= 0:
        return {}
    module_names = (
        (target_modules,)
        if isinstance(target_modules, str)
        else tuple(target_modules or ("all-linear",))
    )
    return {
        "lora_rank": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": module_names,
    }
