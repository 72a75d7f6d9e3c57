"""What all ranks of a group must have alike, compared through a store that they share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from zipccl_core.errors import ConfigError

if TYPE_CHECKING:
    from datetime import timedelta

    from torch._C._distributed_c10d import Store


logger = logging.getLogger("zipccl")


def check_agreement(store: Store, rank: int, own: str, name: str, patience: timedelta | None = None) -> None:
    """Compares what ranks must have alike with rank 0's, through a store that they share.

    Blocks until rank 0 is here; where patience is limited, only so long, and then goes on with a warning.

    Raises:
        ConfigError: it differs. A job whose ranks differ would hang, or compute something that no rank was asked for.
    """
    key = "zipccl/configuration"
    if rank == 0:
        store.set(key, own)
        return
    try:
        if patience is not None:
            store.wait([key], patience)
        first = store.get(key).decode()
    except RuntimeError as error:
        question = f"rank 0 of group {name!r} has said nothing of its configuration; is zipccl installed and on there?"
        if patience is None:
            raise ConfigError(question) from error
        logger.warning("zipccl: rank %d waited %s s: %s", rank, patience.total_seconds(), question)
        return
    if first != own:
        raise ConfigError(
            f"rank {rank} of group {name!r} is configured differently from rank 0.\nrank 0: {first}\nhere: {own}"
        )
