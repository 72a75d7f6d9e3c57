"""Drop-in: with `ZIPCCL=1`, groups that a program asks of nccl or gloo are made by zipccl, without a change of it.

Imported by `import torch` where the variable is set, so nothing here is heavy. What is replaced is one function of
torch, through which `init_process_group` and `new_group` make every group.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import distributed_c10d as c10d

from zipccl_core.native_groups import Asked, backends_of, batch_messages
from zipccl_core.registration import BACKEND, register

logger = logging.getLogger("zipccl")

VARIABLE = "ZIPCCL"
SUPPORTED = "torch 2.13"

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_HELPER = "_new_process_group_helper"
_USED = {"group_rank", "backend", "backend_options"}


class _State:
    config: Any = None
    told = False


def wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment switches drop-in on; what cannot be understood is logged, and off."""
    text = environ.get(VARIABLE, "")
    value = text.strip().lower()
    if value not in _ON + _OFF:
        logger.warning(
            "zipccl: %s=%r is ignored; allowed: 1, true, yes, on; 0, false, no, off or empty", VARIABLE, text
        )
    return value in _ON


def install(config: Any = None) -> None:
    """Makes zipccl the maker of nccl and gloo groups from now on. Repeating it only changes the configuration.

    A torch that makes groups in another way is left alone, and that is logged.

    Args:
        config: a ZipCCLConfig, or a mapping of its keys, of groups for which the program passes none; by default the
            default group's, else what the environment says.
    """
    register()
    _State.config = config
    helper = getattr(c10d, _HELPER, None)
    if installed():
        return
    if not callable(helper) or not set(inspect.signature(helper).parameters) >= _USED:
        logger.error(
            "zipccl: this torch makes its groups in a way that is not known; supported: %s. Groups of nccl and gloo "
            "stay native",
            SUPPORTED,
        )
        return
    setattr(c10d, _HELPER, _aliasing(helper))
    batch_messages()


def installed() -> bool:
    """Whether `install` is in force."""
    return hasattr(getattr(c10d, _HELPER, None), "_zipccl_replaces")


def snapshot() -> tuple[bool, Any]:
    """Whether it is in force and with which configuration, for `restore`."""
    return installed(), _State.config


def restore(snapshot: tuple[bool, Any]) -> None:
    """Makes it as it was."""
    was_installed, config = snapshot
    if was_installed:
        install(config)
    else:
        uninstall()


def uninstall() -> None:
    """Takes `install` back. Groups that exist stay as they are."""
    _State.config = None
    replaced = getattr(getattr(c10d, _HELPER, None), "_zipccl_replaces", None)
    if replaced is not None:
        setattr(c10d, _HELPER, replaced)


def _aliasing(helper: Callable[..., Any]) -> Callable[..., Any]:
    """torch's maker of groups, inside of which the name of the backend is another one."""
    signature = inspect.signature(helper)

    @functools.wraps(helper)
    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return helper(*args, **kwargs)  # which says what is wrong
        name = given.arguments["backend"]
        backends = backends_of(name)
        if not backends:
            return helper(*args, **kwargs)
        world = c10d._world
        n_groups = len(world.pg_map)
        given.arguments["backend"] = c10d.Backend(BACKEND)
        given.arguments["backend_options"] = Asked(backends, given.arguments.get("backend_options"), _State.config)
        made = helper(*given.args, **given.kwargs)
        group = made[0]
        if len(world.pg_map) > n_groups:  # else this rank is no member, or the group existed
            world.pg_map[group] = (name, world.pg_map[group][1])
            world.pg_backend_config[group] = ",".join(f"{device}:{backend}" for device, backend in backends.items())
            _tell(str(name), given.arguments["group_rank"], group.communicator.config.enabled)
        return made

    new_process_group_helper._zipccl_replaces = helper  # type: ignore[attr-defined]
    return new_process_group_helper


def _tell(name: str, rank: int, enabled: bool) -> None:
    if _State.told:
        return
    _State.told = True
    if rank == 0:
        by = f"{VARIABLE}=1" if _State.config is None else "installed by the program"
        what = "is active" if enabled else "is installed, but enabled is false, so that everything goes natively"
        asked = "without naming a backend" if name == "undefined" else f"as {name!r}"
        logger.warning(
            "zipccl %s (%s): groups of gloo and nccl are zipccl's from here on, first one asked for %s", what, by, asked
        )
