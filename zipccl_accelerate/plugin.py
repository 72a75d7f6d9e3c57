"""ZipCCLPlugin: a kwargs handler for `Accelerator(kwargs_handlers=[ZipCCLPlugin()])`."""

from __future__ import annotations

from typing import Any

from zipccl_core.errors import UnsupportedVersionError


class ZipCCLPlugin:
    """Will make an Accelerator's DDP, FSDP2 and DeepSpeed collectives compressed.

    Raises:
        UnsupportedVersionError: always, in this version.
    """

    def __init__(self, **fields: Any) -> None:
        raise UnsupportedVersionError(
            "zipccl_accelerate does not work in this version of zipccl. Today, use the torch.distributed backend "
            '(torch.distributed.init_process_group("zipccl") before Accelerator()) or a "zipccl" section '
            "in your DeepSpeed JSON."
        )
