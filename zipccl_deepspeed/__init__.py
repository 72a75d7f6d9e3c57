"""ZipCCL for DeepSpeed: a `"zipccl"` section in the DeepSpeed JSON makes `deepspeed.comm` carry compressed tensors.

Where zipccl is installed the section works by itself. `install()` does the same by hand, `uninstall()` undoes it,
`stats()` counts.
"""

from zipccl_deepspeed.backend import stats
from zipccl_deepspeed.install import install, uninstall

__all__ = ["install", "stats", "uninstall"]
