"""What is tried of each family, one function per column of docs/models.md: against transformers' own numbers.

A column returns None if everything is right. It raises :class:`Refused` if the trainer itself refuses the part before
the first step, and :class:`OtherWay` if the trainer does it in another way and says so. Any other difference raises
AssertionError: a run would be wrong without a word. Its docstring is what the page says of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from families.zoo import config_of, random_model
from support.adapters import randomize_b
from support.conversations import Conversations
from support.tiny import save_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightppo.checkpoint.export import save_model
from lightppo.data.records import Prompt
from lightppo.episodes.hf_turns import generate_turns
from lightppo.errors import UserError
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import LoraOptions, adapters_off, add_adapters
from lightppo.models.adapters.quantised import dense_weight, quantised_layers
from lightppo.models.attention.row_attention import resolve_attn_implementation
from lightppo.models.critic import Critic
from lightppo.preflight.probes import check_decoding, check_padding, check_training
from lightppo.ranks import Alone
from lightppo.rollout.decoding import can_use_slots
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine

CPU = torch.device("cpu")
NATS = 1e-3  # float32 alone makes 1e-6 to 1e-4 of it in these models
IN_VLLM = 5e-3  # whose kernels sum in other orders
SHARE = 1e-2  # of a gradient's norm


class Refused(Exception):
    """The trainer refuses this part at the start; the message is its reason."""


class OtherWay(Exception):
    """The trainer goes another way, which it prints; the message is its reason."""


class Subject:
    """A family's model, random and saved with a tokenizer, as a run would find it."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.folder = folder
        attention = resolve_attn_implementation("auto", torch.float32, None, config_of(family))
        self.model = random_model(family, attention=attention)
        self.model.save_pretrained(folder)
        save_tokenizer(folder)

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def is_refused(self) -> bool:
        """Whether no run with this model starts, since it neither pads rightly nor packs."""
        actor = self.actor(packing_samples=None)
        reason = actor.layout.try_packing(CPU)
        try:
            if reason is not None:
                check_padding({"--pretrain": actor}, Alone(CPU))
            check_training({"--pretrain": actor}, Alone(CPU))
        except UserError:
            return True
        return False

    def trained(self, **options: Any) -> Actor:
        """An actor as a run begins with."""
        if self.is_refused:
            raise Refused("it cannot be trained, see the columns before")
        return refused(lambda: self.actor(**options))

    def actor(self, **options: Any) -> Actor:
        return Actor(str(self.folder), **options).eval()


# -- numbers that columns compare ---------------------------------------------------------------------------------

LENGTHS = ((3, 9), (14, 2), (6, 12), (1, 5))  # of prompts and responses


def ragged(same_prompts: bool = False) -> tuple[Tensor, Tensor, int]:
    """(sequences (B, S), mask (B, S), A), padded on both sides; ``same_prompts``: two and two."""
    width, actions = max(p for p, _ in LENGTHS), max(r for _, r in LENGTHS)
    generator = torch.Generator().manual_seed(1)
    sequences = torch.zeros(len(LENGTHS), width + actions, dtype=torch.long)
    mask = torch.zeros_like(sequences)
    for row, (prompt, response) in enumerate(LENGTHS):
        columns = slice(width - prompt, width + response)
        ids = torch.randint(3, 43, (prompt + response,), generator=generator)
        sequences[row, columns], mask[row, columns] = ids, 1
    if same_prompts:
        sequences[1::2, :width], mask[1::2, :width] = sequences[::2, :width], mask[::2, :width]
    return sequences, mask, actions


def in_a_batch(actor: Actor, same_prompts: bool = False) -> Tensor:
    """Log probs (B, A) of the real actions."""
    sequences, mask, actions = ragged(same_prompts)
    return actor.score_actions(sequences, actions, mask).log_probs


def alone(actor: Actor, same_prompts: bool = False) -> Tensor:
    """The same, each sequence by itself and without padding, by transformers' own forward."""
    sequences, mask, actions = ragged(same_prompts)
    log_probs = torch.zeros(len(sequences), actions)
    for row, (ids, real) in enumerate(zip(sequences, mask.bool())):
        count = int(real[-actions:].sum())
        scored = of_row(actor.hf_model, ids[real].unsqueeze(0))[-count:]
        first = real[-actions:].nonzero()[0, 0]
        log_probs = log_probs.index_put(
            (torch.tensor(row), torch.arange(first, first + count)), scored
        )
    return log_probs


def of_row(model: nn.Module, ids: Tensor) -> Tensor:
    """Log probs (S - 1,) of the tokens of one sequence (1, S) under its predecessors."""
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def gradients(model: nn.Module, log_probs: Tensor) -> dict[str, Tensor]:
    """Of the log probs, each with another weight."""
    model.zero_grad()
    weights = torch.arange(1, log_probs.numel() + 1).view_as(log_probs) / log_probs.numel()
    (log_probs * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def agree(found: Tensor, expected: Tensor, what: str) -> None:
    apart = (found - expected).abs().max().item()
    assert apart <= NATS, f"{what} differ by up to {apart:.2g} nats"


def gradients_agree(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    names = sorted(
        name
        for name in found.keys() | expected.keys()
        if not same_gradient(found.get(name), expected.get(name))
    )
    assert not names, f"{what} differ in {len(names)} weights, such as {names[0]}"


def same_gradient(found: Tensor | None, expected: Tensor | None) -> bool:
    """No gradient is as good as one of zeros."""
    if found is None or expected is None:
        given = expected if found is None else found
        return given is None or not given.any()
    return (found - expected).norm() <= SHARE * expected.norm() + 1e-6


def trained_alike(actor: Actor, what: str, same_prompts: bool = False) -> None:
    """Log probs of a batch and their gradients are those of the sequences alone."""
    together, apart = in_a_batch(actor, same_prompts), alone(actor, same_prompts)
    agree(together, apart, f"log probs {what}")
    of_batch = gradients(actor.hf_model, together)
    of_rows = gradients(actor.hf_model, apart)
    gradients_agree(of_batch, of_rows, f"gradients {what}")


def refused(attempt: Callable[[], Any]) -> Any:
    try:
        return attempt()
    except (UserError, ValueError) as error:
        raise Refused(str(error)) from error


# -- the columns --------------------------------------------------------------------------------------------------


def loads(subject: Subject) -> None:
    """tensors and log probs with transformers' own"""
    loaded = refused(subject.actor).hf_model
    assert type(loaded) is type(subject.model)
    same_tensors(loaded.state_dict(), subject.model.state_dict())
    ids = ragged()[0][:1]
    agree(of_row(loaded, ids), of_row(subject.model, ids), "log probs")


def same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:3]
    differing = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not differing, f"{len(differing)} tensors differ, such as {differing[0]}"


def critic(subject: Subject) -> None:
    """values in a padded batch with those of each sequence alone"""
    model = refused(lambda: Critic(str(subject.folder)))
    refused(lambda: check_padding({"--critic_pretrain": model}, Alone(CPU)))
    refused(lambda: check_training({"--critic_pretrain": model}, Alone(CPU)))
    sequences, mask, actions = ragged()
    together = model(sequences, actions, mask)
    for row, (ids, real) in enumerate(zip(sequences, mask.bool())):
        count = int(real[-actions:].sum())
        apart = model(ids[real].unsqueeze(0), count)[0]
        agree(together[row][real[-actions:]], apart, "values of a padded batch")


def padded(subject: Subject) -> None:
    """log probs and gradients in a batch padded on both sides with those of each sequence alone; training, evaluation"""
    actor = subject.actor()
    refused(lambda: check_padding({"--pretrain": actor}, Alone(CPU)))
    refused(lambda: check_training({"--pretrain": actor}, Alone(CPU)))
    trained_alike(actor, "of a padded batch")
    expected = in_a_batch(actor)
    agree(in_a_batch(actor.train()), expected, "log probs in training")


def packs(subject: Subject, same_prompts: bool = False) -> None:
    """the same in a row without padding. `pads`: without `--packing_samples` the run pads, and says why"""
    actor = subject.actor(packing_samples=None)
    if reason := actor.layout.try_packing(CPU):
        raise OtherWay(reason)
    trained_alike(actor, "of a packed row", same_prompts)


def shares_prompts(subject: Subject) -> None:
    """the same in a row in which equal prompts stand once"""
    actor = subject.actor(packing_samples=None)
    if reason := actor.layout.try_packing(CPU):
        raise OtherWay(f"it does not pack: {reason}")
    if not actor.layout.shares_prompts:
        raise OtherWay("every sample brings its prompt along")
    trained_alike(actor, "of shared prompts", same_prompts=True)


SAMPLING = SamplingParams(max_new_tokens=10, temperature=1.0, n=2, seed=3)


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(2)
    lengths = (3, 17, 1, 9, 6)
    ids = [torch.randint(3, 43, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt("", row, index=number) for number, row in enumerate(ids)]


def decodes(subject: Subject) -> None:
    """log probs of the `hf` engine with a forward pass. `in batches`: an ended response waits for its batch"""
    actor = subject.actor(valid_vocab_size=43)
    engine = HFRolloutEngine(actor, subject.tokenizer, micro_rollout_batch_size=3)
    refused(lambda: check_decoding(engine, actor, Alone(CPU)))
    sampled_alike(engine, actor, SAMPLING)
    sampled_alike(engine, actor, replace(SAMPLING, temperature=0.0, n=1))
    turns_alike(engine, actor)
    if not can_use_slots(actor.hf_model.config):
        raise OtherWay("batch by batch: its cache has more than keys and values of all positions")


@torch.no_grad()
def sampled_alike(engine: Any, actor: Actor, sampling: SamplingParams, nats: float = NATS) -> None:
    rollouts = engine.generate(prompts(), sampling)
    assert len(rollouts) == 5 * sampling.n
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt.token_ids + rollout.response_ids])
        expected = actor.score_actions(ids, len(rollout.response_ids)).log_probs[0]
        apart = (expected - torch.tensor(rollout.log_probs)).abs().max().item()
        assert apart <= nats, f"log probs while decoding differ by up to {apart:.2g} nats"


@torch.no_grad()
def turns_alike(engine: HFRolloutEngine, actor: Actor) -> None:
    """The same of conversations, whose turns begin with what was computed before."""
    conversations = Conversations(prompts(), turns=3)
    generate_turns(engine, conversations, replace(SAMPLING, n=1))
    for conversation in conversations.all:
        for turn, answer in zip(conversation.asked, conversation.answers):
            ids = torch.tensor([turn.token_ids + answer.response_ids])
            expected = actor.score_actions(ids, len(answer.response_ids)).log_probs[0]
            agree(torch.tensor(answer.log_probs), expected, "log probs in a conversation")


def lora(subject: Subject) -> None:
    """adapters change the model, all get gradients, can be switched off, and are the same when merged"""
    actor = subject.trained()
    before = in_a_batch(actor)
    refused(lambda: add_adapters(actor, LoraOptions(rank=4)))
    agree(in_a_batch(actor), before, "log probs with new adapters")
    check_adapters(subject, actor, before)


def check_adapters(subject: Subject, actor: Actor, before: Tensor) -> None:
    """Of an actor with new adapters, whose log probs are ``before``."""
    randomize_b(actor.hf_model, scale=0.1)
    with_adapters = in_a_batch(actor)
    assert (with_adapters - before).abs().max() > 10 * NATS, "adapters do nothing"
    with torch.no_grad(), adapters_off(actor.hf_model):
        agree(in_a_batch(actor), before, "log probs with adapters off")
    learn = gradients(actor.hf_model, with_adapters)
    trained = [name for name, p in actor.hf_model.named_parameters() if p.requires_grad]
    still = [name for name in trained if name not in learn or not learn[name].any()]
    assert not still, f"{len(still)} adapters get no gradient, such as {still[0]}"
    assert learn.keys() == set(trained)
    merged = exported(subject, actor)
    agree(in_a_batch(Actor(merged)), with_adapters.detach(), "log probs of merged weights")


def exported(subject: Subject, actor: Actor) -> Any:
    """The actor as the trainer saves it and transformers reads it."""
    folder = subject.folder.with_name(f"{subject.folder.name}-exported")
    shutil.rmtree(folder, ignore_errors=True)
    save_model(Alone(CPU), actor, subject.tokenizer, folder)
    attention = actor.hf_model.config._attn_implementation
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float32
    )


def four_bits(subject: Subject) -> None:
    """log probs and the adapters' gradients with those of the same numbers in dense layers"""
    actor = subject.trained(load_in_4bit=True)
    dense = subject.actor()
    with torch.no_grad():
        for name, layer in quantised_layers(actor.hf_model).items():
            weight = dense.hf_model.get_parameter(f"{name}.weight")
            rounded = dense_weight(layer)
            lost = ((rounded - weight).norm() / weight.norm()).item()
            assert lost < 0.2, f"4 bits lose {lost:.0%} of {name}"
            weight.copy_(rounded)
    before = in_a_batch(actor)
    agree(before, in_a_batch(dense), "log probs in 4 bits and of the same numbers")
    for model in (actor, dense):
        refused(lambda model=model: add_adapters(model, LoraOptions(rank=4)))
        randomize_b(model.hf_model, scale=0.1)
    in_4bit = gradients(actor.hf_model, in_a_batch(actor))
    gradients_agree(in_4bit, gradients(dense.hf_model, in_a_batch(dense)), "gradients in 4 bits")
    check_adapters(subject, actor, before.detach())


def zero3(subject: Subject) -> None:
    """log probs, gradients and gathered tensors with those without it; every weight is sharded"""
    from deepspeed.utils import safe_get_full_grad

    from lightppo.distributed.deepspeed import DeepspeedStrategy
    from lightppo.zero3 import full_state_dict

    strategy = DeepspeedStrategy(
        zero_stage=3, micro_train_batch_size=4, train_batch_size=4, max_norm=0.0
    )
    strategy.setup_distributed()
    config = strategy.get_ds_train_config(is_actor=True)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # as of a large model
    plain = subject.actor()
    actor = subject.trained(ds_config=config)
    optimizer = strategy.create_optimizer(actor, lr=0.0)
    actor, optimizer, _ = strategy.prepare((actor, optimizer, None))
    sharded, expected = in_a_batch(actor), in_a_batch(plain)
    agree(sharded, expected, "log probs under ZeRO-3")
    weights = torch.arange(1, sharded.numel() + 1).view_as(sharded) / sharded.numel()
    strategy.backward((sharded * weights).sum(), actor, optimizer)
    found = {name: safe_get_full_grad(p) for name, p in actor.hf_model.named_parameters()}
    gradients_agree(found, gradients(plain.hf_model, expected), "gradients under ZeRO-3")
    whole = full_state_dict(actor, True)
    same_tensors(whole, plain.hf_model.state_dict())


def export(subject: Subject) -> None:
    """what was trained with what `AutoModelForCausalLM` reads, and its class"""
    actor = subject.trained()
    with torch.no_grad():
        for parameter in actor.hf_model.parameters():
            parameter.mul_(1.25)
    again = exported(subject, actor)
    assert type(again) is type(subject.model), f"it comes back as {type(again).__name__}"
    same_tensors(again.state_dict(), actor.hf_model.state_dict())


def vllm_push(subject: Subject) -> None:
    """vLLM's log probs with the trainer's, before and after all weights have changed"""
    from lightppo.config import PPOConfig
    from lightppo.distributed.deepspeed import DeepspeedStrategy
    from lightppo.experience.rollout_check import RolloutCheck
    from lightppo.trainer.build import build_rollout_engine

    strategy = DeepspeedStrategy(zero_stage=0, micro_train_batch_size=1, train_batch_size=5)
    strategy.setup_distributed()
    actor = subject.trained(valid_vocab_size=43)
    config = PPOConfig.from_flat(
        pretrain=str(subject.folder),
        rollout_engine="vllm",
        zero_stage=0,
        rollout_batch_size=5,
        train_batch_size=5,
        micro_rollout_batch_size=5,
        prompt_max_len=40,
        generate_max_len=24,
        max_num_seqs=16,
    ).resolved()
    engine = refused(lambda: build_rollout_engine(config, strategy, actor, subject.tokenizer))
    check = RolloutCheck(actor, engine, strategy, config)
    refused(lambda: check.first(engine.generate(prompts(), SAMPLING)))
    sampled_alike(engine, actor, SAMPLING, IN_VLLM)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for parameter in actor.hf_model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * parameter.abs().mean() * noise)
    engine.sync_weights(actor)
    sampled_alike(engine, actor, SAMPLING, IN_VLLM)


COLUMNS: dict[str, Callable[[Subject], None]] = {
    "loads": loads,
    "padded equals unpadded": padded,
    "packs": packs,
    "shares prompts": shares_prompts,
    "decodes": decodes,
    "critic": critic,
    "LoRA": lora,
    "4 bits": four_bits,
    "ZeRO-3": zero3,
    "export": export,
    "vLLM push": vllm_push,
}
