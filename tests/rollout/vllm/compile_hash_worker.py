"""What vLLM's compiled code is found by, of the model in a folder and of one with another shape; as JSON."""

import json
import os
import sys

from transformers import AutoConfig, AutoTokenizer
from vllm import envs
from vllm.engine.arg_utils import EngineArgs

from lightppo.config import PPOConfig
from lightppo.rollout.vllm.colocated import described_model, engine_arguments


def found_by(model, tokenizer):
    config = PPOConfig.from_flat(
        rollout_engine="vllm", prompt_max_len=64, generate_max_len=64
    ).resolved()
    folder = described_model(model, tokenizer)
    arguments = engine_arguments(config, model, on_gpu=False) | {
        "distributed_executor_backend": None
    }
    made = EngineArgs(model=folder, dtype="float32", **arguments).create_engine_config()
    return [folder, made.compute_hash(), json.dumps(envs.compile_factors(), sort_keys=True)]


def main(source, path):
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoConfig.from_pretrained(source)
    seen = [found_by(model, tokenizer)]
    model.intermediate_size *= 2
    seen.append(found_by(model, tokenizer))
    with open(f"{path}-rank{os.environ['RANK']}.json", "w") as file:
        json.dump(seen, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
