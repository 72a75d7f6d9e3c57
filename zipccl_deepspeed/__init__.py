"""ZipCCL for DeepSpeed: a `"zipccl"` section in the DeepSpeed JSON makes `deepspeed.comm` carry compressed tensors.

Where zipccl is installed the section works by itself. `install()` does the same by hand, `uninstall()` undoes it,
`stats()` counts. The names are imported when they are first used, so that what `import torch` runs costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zipccl_deepspeed.backend import stats
    from zipccl_deepspeed.installation import install, uninstall

__all__ = ["install", "stats", "uninstall"]


def __getattr__(name: str) -> Any:
    if name == "stats":
        from zipccl_deepspeed import backend

        return backend.stats
    if name in __all__:
        from zipccl_deepspeed import installation

        return getattr(installation, name)
    raise AttributeError(f"module 'zipccl_deepspeed' has no attribute {name!r}")
