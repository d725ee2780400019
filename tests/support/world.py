"""A process group of the test's process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, as under plain ``python``; afterwards all is as it was before."""
    environment = dict(os.environ)
    os.environ["DS_ACCELERATOR"] = "cpu"  # read at import
    import torch.distributed as dist
    from deepspeed import comm
    from deepspeed.utils import groups

    from lightppo.checkpoint.engine_state import restore_rng_state, rng_state
    from lightppo.distributed.deepspeed import DeepspeedStrategy

    generators = rng_state()
    remembered = {name: value for name, value in vars(groups).items() if name.startswith("_")}
    DeepspeedStrategy().setup_distributed()
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DeepSpeed keeps groups for ever; the next world has others
        vars(groups).update(remembered)
        comm.comm.cdb = None
        os.environ.clear()
        os.environ.update(environment)
        restore_rng_state(generators)
