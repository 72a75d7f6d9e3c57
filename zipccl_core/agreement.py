"""What all ranks of a group must have alike, compared through a store that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zipccl_core.errors import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def check_agreement(store: Store, rank: int, own: str, name: str) -> None:
    """Compares what ranks must have alike with rank 0's, through a store that they share. Blocks until rank 0 is here.

    Raises:
        ConfigError: it differs. A job whose ranks differ would hang, or compute something that no rank was asked for.
    """
    key = "zipccl/configuration"
    if rank == 0:
        store.set(key, own)
        return
    try:
        first = store.get(key).decode()
    except RuntimeError as error:
        raise ConfigError(f"rank 0 of group {name!r} has no configuration; is zipccl installed there?") from error
    if first != own:
        raise ConfigError(
            f"rank {rank} of group {name!r} is configured differently from rank 0.\nrank 0: {first}\nhere: {own}"
        )
