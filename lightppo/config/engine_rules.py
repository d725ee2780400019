"""The relations between options of rollout engines: what cannot work, and what would do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lightppo.config.engine_section import EngineConfig
from lightppo.http import check_url, is_loopback, shown_url

if TYPE_CHECKING:
    from lightppo.config.ppo import PPOConfig

_DEFAULTS = EngineConfig()
_EVERYWHERE = ("", "0.0.0.0", "::")
_COLDEST = 0.01  # vLLM raises a lower temperature to this without an error

# Engines that read an option; rollout_engine itself is read by all.
READ_BY: dict[str, tuple[str, ...]] = {
    "rollout_check": ("vllm", "vllm_server"),
    "logp_diff_tolerance": ("vllm", "vllm_server"),
    "tensor_parallel_size": ("vllm",),
    "vllm_dtype": ("vllm",),
    "load_format": ("vllm",),
    "gpu_memory_utilization": ("vllm",),
    "kv_cache_memory_bytes": ("vllm",),
    "max_num_seqs": ("vllm",),
    "max_num_batched_tokens": ("vllm",),
    "max_model_len": ("vllm",),
    "block_size": ("vllm",),
    "enable_prefix_caching": ("vllm",),
    "enforce_eager": ("vllm",),
    "free_cache_engine": ("vllm", "vllm_server"),
    "sleep_level": ("vllm", "vllm_server"),
    "vllm_server_url": ("vllm_server",),
    "vllm_server_api_key_env": ("vllm_server",),
    "vllm_server_timeout": ("vllm_server",),
    "vllm_server_retries": ("vllm_server",),
    "vllm_server_concurrency": ("vllm_server",),
    "vllm_server_start_timeout": ("vllm_server",),
    "vllm_server_sync": ("vllm_server",),
    "vllm_server_sync_dir": ("vllm_server",),
    "vllm_server_sync_address": ("vllm_server",),
}


def problems(config: PPOConfig, world_size: int) -> list[str]:
    """One message per combination that cannot work, or option that does nothing."""
    e = config.engine
    found = [
        f"--{name} has no effect with --rollout_engine {e.rollout_engine}: it is for {' and '.join(engines)}"
        for name, engines in READ_BY.items()
        if getattr(e, name) != getattr(_DEFAULTS, name) and e.rollout_engine not in engines
    ]
    if e.rollout_engine == "hf":
        return found
    return [*found, *_sampling(config), *_in_process(config, world_size), *_servers(config)]


def _sampling(config: PPOConfig) -> list[str]:
    """What vLLM cannot sample."""
    e, found = config.engine.rollout_engine, []
    temperatures = {"temperature": config.rollout.temperature, "eval_temperature": config.evaluation.eval_temperature}
    for flag, value in temperatures.items():
        if 0 < value < _COLDEST:
            found.append(f"--{flag} {value:g}: vLLM samples at {_COLDEST} or above; set 0 (greedy) or at least that")
    if config.sampling.fire_sampling:
        found.append(f"--fire_sampling needs --rollout_engine hf: {e} has one temperature for all tokens of a response")
    if config.engine.rollout_check == "off" and config.engine.logp_diff_tolerance is not None:
        found.append("--logp_diff_tolerance has no effect with --rollout_check off: leave one of them out")
    return found


def _in_process(config: PPOConfig, world_size: int) -> list[str]:
    e, found = config.engine, []
    if e.rollout_engine != "vllm":
        return found
    if world_size % e.tensor_parallel_size:
        found.append(
            f"--tensor_parallel_size {e.tensor_parallel_size} does not divide the {world_size} ranks: every engine is "
            "shared by so many of them"
        )
    longest = config.data.prompt_max_len + config.rollout.generate_max_len
    if e.max_model_len is not None and e.max_model_len < longest:
        found.append(
            f"--max_model_len {e.max_model_len} is less than --prompt_max_len {config.data.prompt_max_len} + "
            f"--generate_max_len {config.rollout.generate_max_len}: set it to at least {longest}, or leave it out"
        )
    if not e.free_cache_engine and e.sleep_level != _DEFAULTS.sleep_level:
        found.append("--sleep_level has no effect with --no_free_cache_engine: leave one of them out")
    if config.model.override_config is not None and e.load_format == "auto":
        found.append("--load_format auto reads --pretrain without --override_config: leave it out")
    if config.model.override_config is not None and config.model.trust_remote_code:
        found.append("--rollout_engine vllm with --trust_remote_code reads --pretrain without --override_config")
    if config.model.pretrain is None and (e.load_format == "auto" or config.model.trust_remote_code):
        found.append("--load_format auto and --trust_remote_code read --pretrain, which is not set")
    if config.model.init_from_scratch and e.load_format == "auto":
        found.append("--load_format auto reads weights that --init_from_scratch does not have: leave it out")
    return found


def _servers(config: PPOConfig) -> list[str]:
    e, found = config.engine, []
    if e.rollout_engine != "vllm_server":
        return found
    if not e.vllm_server_url:
        return ["--rollout_engine vllm_server needs --vllm_server_url: start a server by examples/serve_vllm.py"]
    for url in e.vllm_server_url:
        try:
            check_url(url, "--vllm_server_url", "--vllm_server_api_key_env")
        except ValueError as error:
            found.append(str(error))
        else:
            if "?" in url or "#" in url:
                found.append(f"--vllm_server_url {shown_url(url)}: give http://HOST:PORT, with nothing behind ? or #")
    if found:
        return found
    addresses = [url.rstrip("/") for url in e.vllm_server_url]
    found += [f"--vllm_server_url has {url} twice" for url in sorted(set(addresses)) if addresses.count(url) > 1]
    found += _sync(e, addresses)
    collective = 60 * config.strategy.dist_timeout
    waits = {
        "vllm_server_timeout": 2 * e.vllm_server_timeout + 90,
        "vllm_server_start_timeout": e.vllm_server_start_timeout,
    }
    found += [
        f"--{flag} {getattr(e, flag):g}: the other ranks wait for the one that asks servers, up to {wait:g} s, but no "
        f"longer than --dist_timeout {config.strategy.dist_timeout:g} minutes: lower it, or raise --dist_timeout"
        for flag, wait in waits.items()
        if wait >= collective
    ]
    if not e.free_cache_engine and e.sleep_level != _DEFAULTS.sleep_level:
        found.append("--sleep_level has no effect with --no_free_cache_engine: leave one of them out")
    return found


def _sync(e: EngineConfig, addresses: list[str]) -> list[str]:
    """How weights get to the servers at these addresses."""
    found = []
    remote = [url for url in addresses if not is_loopback(urlsplit(url).hostname or "")]
    by_files = e.vllm_server_sync == "disk" and e.vllm_server_sync_dir is not None
    by_broadcast = e.vllm_server_sync == "collective" and not is_loopback(e.vllm_server_sync_address)
    if remote and not by_files and not by_broadcast:
        found.append(
            f"--vllm_server_url {remote[0]} is on another machine: set --vllm_server_sync collective and "
            "--vllm_server_sync_address to this machine's address there, or --vllm_server_sync disk and "
            "--vllm_server_sync_dir to a folder that both see under the same path"
        )
    if e.vllm_server_sync_address in _EVERYWHERE:
        found.append(
            f"--vllm_server_sync_address {e.vllm_server_sync_address!r}: servers cannot connect to that: give one "
            "address of this machine"
        )
    if e.vllm_server_sync_dir is not None and e.vllm_server_sync != "disk":
        found.append("--vllm_server_sync_dir has no effect without --vllm_server_sync disk: leave it out")
    if e.vllm_server_sync_address != _DEFAULTS.vllm_server_sync_address and e.vllm_server_sync != "collective":
        found.append("--vllm_server_sync_address has no effect without --vllm_server_sync collective: leave it out")
    return found
