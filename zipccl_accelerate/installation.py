"""Puts the plugin into Accelerate, and takes it out again.

Accelerate knows its kwargs handlers by their exact classes and has no hook for others. So `Accelerator.__init__` is
wrapped, which takes our handler out before Accelerate sees it, and `prepare` and `prepare_model`, which hand models to
it. An Accelerator without the plugin is as it was.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import accelerate
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import KwargsHandler
from torch import nn

from zipccl_accelerate import modes
from zipccl_core.errors import UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from zipccl_accelerate.modes import Mode
    from zipccl_core.config import ZipCCLConfig

logger = logging.getLogger("zipccl")

_MODE = "_zipccl_mode"  # of an Accelerator with the plugin
_originals: dict[str, Callable[..., Any]] = {}


class Handler(KwargsHandler, ABC):  # type: ignore[misc]  # accelerate has no types
    """A kwargs handler that Accelerate does not know: what `ZipCCLPlugin` is."""

    @property
    @abstractmethod
    def config(self) -> ZipCCLConfig:
        """What is to be compressed, and how."""


def install() -> None:
    """Makes Accelerators take a `ZipCCLPlugin`. Making a plugin does this; repeating it does nothing.

    Raises:
        UnsupportedVersionError: this Accelerate is not built as this version of zipccl knows it.
    """
    if _originals:
        return
    try:
        found = {name: getattr(Accelerator, name) for name in ("__init__", "prepare", "prepare_model")}
        if "kwargs_handlers" not in inspect.signature(found["__init__"]).parameters:
            raise AttributeError("Accelerator has no argument kwargs_handlers")
    except AttributeError as error:
        raise UnsupportedVersionError(
            f"zipccl supports accelerate 1.15; this is {accelerate.__version__}: {error}"
        ) from error
    _originals.update(found)
    Accelerator.__init__ = _with_plugin(found["__init__"])
    Accelerator.prepare = _with_models(found["prepare"])
    Accelerator.prepare_model = _with_models(found["prepare_model"])


def uninstall() -> None:
    """Restores Accelerate as it was before `install()`, and how groups are made. Accelerators and groups that exist
    keep what they have."""
    modes.take_back()
    for name, original in _originals.items():
        setattr(Accelerator, name, original)
    _originals.clear()


def _with_plugin(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        handlers = list(bound.arguments.get("kwargs_handlers") or [])
        plugins = [handler for handler in handlers if isinstance(handler, Handler)]
        if len(plugins) > 1:
            raise ValueError("You can only pass one ZipCCLPlugin in `kwargs_handlers`.")
        bound.arguments["kwargs_handlers"] = [each for each in handlers if not isinstance(each, Handler)] or None
        if not plugins:
            if not dist.is_initialized():
                modes.take_back()
            return original(*bound.args, **bound.kwargs)
        mode = modes.mode_for(plugins[0].config, bound.arguments)
        with mode.starting():
            original(*bound.args, **bound.kwargs)
        mode.started(self)
        setattr(self, _MODE, mode)
        if mode.config.enabled and self.num_processes == 1:
            _tell_alone()
        elif mode.config.enabled and self.is_main_process:
            logger.warning("zipccl: %s: %s", mode.description, mode.config.model_dump_json())
        return None

    return init


def _tell_alone() -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    hint = ""
    if world_size > 1:
        hint = f", though WORLD_SIZE is {world_size}: on CPUs, say Accelerator(cpu=True) or ACCELERATE_USE_CPU=true"
    logger.warning("zipccl: this Accelerator has one process: there is nothing to compress%s", hint)


def _with_models(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, *args, **kwargs)
        mode: Mode | None = getattr(self, _MODE, None)
        if mode is not None:
            for result in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
                if isinstance(result, nn.Module):
                    mode.prepared(self, result)
        return prepared

    return prepare
