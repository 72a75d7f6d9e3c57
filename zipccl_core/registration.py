"""The name `zipccl` among the backends of torch.distributed; what it stands for is imported with the first group."""

from __future__ import annotations

from typing import Any

BACKEND = "zipccl"


def register() -> None:
    """Makes `zipccl` a backend of torch.distributed. Repeating it does nothing."""
    import torch.distributed as dist

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    from zipccl_core.process_group import create

    return create(options, backend_options)
