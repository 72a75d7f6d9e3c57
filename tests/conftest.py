"""Set-up of the test suite: deepspeed, which prints and warns as it is imported, is imported once here, so that ranks
can be forked afterwards."""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are forked; OpenMP does not survive that with more
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)


def import_deepspeed() -> None:
    """Imports deepspeed without its warnings, and without a compiler: its shared-memory op would be built for two
    minutes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
