"""Episodes of two ranks under ZeRO-3. Usage: episodes.py MODEL FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

from lightppo.data.records import Prompt
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.episodes.environments import Environments
from lightppo.episodes.episode import Limits, PlainText
from lightppo.episodes.episode_engine import EpisodeEngine
from lightppo.errors import RolloutError
from lightppo.models.actor import Actor
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine

COUNTING = Path(__file__).parents[1] / "counting.py"
SAMPLING = SamplingParams(max_new_tokens=60, n=2, seed=3, ignore_eos=True)


def main(folder: str, output: str) -> None:
    strategy = DeepspeedStrategy(zero_stage=3, micro_train_batch_size=1, train_batch_size=2)
    strategy.setup_distributed()
    rank = strategy.get_rank()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    actor = Actor(folder, ds_config=strategy.get_ds_eval_config(zero_stage=3))
    actor = strategy.prepare(actor)
    hf = HFRolloutEngine(
        actor, tokenizer, gather_parameters=lambda: strategy.gathered_parameters(actor)
    )
    engine = EpisodeEngine(
        hf,
        tokenizer,
        Environments([f"{COUNTING}:Counting"]),
        strategy,
        limits=Limits(budget=60, max_opening=20, max_turn_tokens=2),
        formats={"Counting": PlainText(tokenizer)},
        failure_limit=1.0,
    )

    def prompt(**columns: str) -> Prompt:
        return Prompt("1+1=", tokenizer.encode("1+1="), index=rank, label="2", extra=columns)

    seen = {
        "turns": engine.generate([prompt(turns="1" if rank == 0 else "8")], SAMPLING),
        "nothing": engine.generate([prompt()] if rank == 0 else [], SAMPLING),
        "failed": engine.generate([prompt(fails="yes" if rank == 0 else "")], SAMPLING),
    }
    seen = {
        "turns": [len(one.turns) for one in seen["turns"]],
        "nothing": [one.response_ids for one in seen["nothing"]],
        "failed": [one.response_ids for one in seen["failed"]],
    }
    engine.failure_limit = 0.4
    try:
        engine.generate([prompt(fails="yes" if rank == 0 else "")], SAMPLING)
    except RolloutError as error:
        seen["too many"] = str(error)
    engine.close()
    Path(output, f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
