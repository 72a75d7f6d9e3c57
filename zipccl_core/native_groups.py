"""Groups of gloo and NCCL as torch makes and uses them: what a program asked for, and how their messages are batched.

Imported by `import torch` where `ZIPCCL=1`, so nothing here is heavy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

ALIASED = frozenset({"gloo", "nccl"})
"""The backends whose groups become zipccl's."""

_BATCH = "batch_isend_irecv"


class Asked(NamedTuple):
    """What a program asked for, in the place of its backend options.

    Attributes:
        backends: native backend by type of device.
        options: the program's own: native options, a ZipCCLConfig, or None.
        config: of `install`.
    """

    backends: Mapping[str, str]
    options: Any
    config: Any


def backends_of(name: Any) -> dict[str, str]:
    """Native backend by type of device, of a group of gloo and NCCL that was asked for by this name; empty for all
    others."""
    text = str(name).lower()
    if text != "undefined" and not ALIASED.issuperset(part.rpartition(":")[2] for part in text.split(",")):
        return {}
    if getattr(c10d, "_use_torchcomms_enabled", bool)():
        return {}
    try:
        backends = c10d.BackendConfig(c10d.Backend(name)).get_device_backend_map()
    except Exception:
        return {}  # torch says what is wrong with it
    found = {str(device): str(backend) for device, backend in backends.items()}
    return found if ALIASED.issuperset(found.values()) else {}


def batch_messages() -> None:
    """Lets `batch_isend_irecv` send a zipccl group's messages between GPUs as one batch. Repeating it does nothing.

    torch batches those of its own type of group only; NCCL needs it, since two ranks that both send first would wait
    for each other.
    """
    native = getattr(c10d, _BATCH, None)
    if not callable(native) or hasattr(native, "_zipccl_replaces"):
        return

    @functools.wraps(native)
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        if not isinstance(p2p_op_list, list) or not p2p_op_list:
            return native(p2p_op_list)
        batch = getattr(getattr(p2p_op_list[0], "group", None), "batch_of", None)
        works = batch(p2p_op_list) if batch is not None else None
        return native(p2p_op_list) if works is None else works

    batch_isend_irecv._zipccl_replaces = native  # type: ignore[attr-defined]
    if getattr(dist, _BATCH, None) is native:
        setattr(dist, _BATCH, batch_isend_irecv)
    setattr(c10d, _BATCH, batch_isend_irecv)
