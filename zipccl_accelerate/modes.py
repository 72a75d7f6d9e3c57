"""The three ways into an Accelerator's collectives: its process group, hooks of its models, DeepSpeed's JSON."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from zipccl_core import drop_in
from zipccl_core.config import ZipCCLConfig
from zipccl_core.errors import ConfigError, UnsupportedVersionError
from zipccl_core.hooks import CommunicatorState, CompressedAllGather, CompressedReduceScatter, ddp_comm_hook
from zipccl_core.process_group import ZipCCLProcessGroup

logger = logging.getLogger("zipccl")

SECTION = "zipccl"


class Mode:
    """What is done for one Accelerator, when."""

    description = ""

    def __init__(self, config: ZipCCLConfig) -> None:
        self.config = config

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Around its constructor."""
        yield

    def started(self, accelerator: Accelerator) -> None:
        """After its constructor."""

    def prepared(self, accelerator: Accelerator, model: nn.Module) -> None:
        """With each model that its `prepare` returns."""


class BackendMode(Mode):
    """No process group exists: those that Accelerate and torch make from now on compress by themselves, whatever is
    called, FSDP1 and `accelerator.gather` too."""

    description = "collectives of its process groups are compressed"

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Groups go on being made so: FSDP2's mesh makes its own later."""
        installed = drop_in.installed()  # by ZIPCCL=1
        drop_in.install(self.config)
        try:
            yield
        except BaseException:
            if installed:
                drop_in.install()
            else:
                drop_in.uninstall()
            raise

    def started(self, accelerator: Accelerator) -> None:
        """Makes sure that it is so.

        Raises:
            UnsupportedVersionError: the group is another, of a device or torch that the drop-in does not know.
        """
        if dist.is_initialized() and not isinstance(dist.group.WORLD, ZipCCLProcessGroup):
            raise UnsupportedVersionError(
                f"zipccl compresses groups of gloo and nccl in {drop_in.SUPPORTED}; Accelerate has made one of "
                f"{dist.get_backend()} in torch {torch.__version__}"
            )


class GroupMode(Mode):
    """The default group is of the backend `zipccl` already, by an earlier Accelerator or the script's own hand."""

    description = "collectives of its process groups are compressed"

    def __init__(self, config: ZipCCLConfig, group: ZipCCLProcessGroup) -> None:
        super().__init__(config)
        if group.communicator.config != config:
            raise ConfigError(
                "the default process group compresses with another configuration than this ZipCCLPlugin; give both the "
                f"same.\ngroup:  {group.communicator.config.model_dump_json()}\nplugin: {config.model_dump_json()}"
            )


class HooksMode(Mode):
    """A native group exists: the models get hooks. Other calls stay native."""

    description = (
        "the process group existed before the plugin, so models are compressed by hooks (DDP's gradients, FSDP2), and "
        "all else stays native"
    )

    def __init__(self, config: ZipCCLConfig) -> None:
        super().__init__(config)
        self._done: WeakSet[nn.Module] = WeakSet()

    def prepared(self, accelerator: Accelerator, model: nn.Module) -> None:
        """Sets the hooks of a model once."""
        if model in self._done:
            return
        self._done.add(model)
        found = False
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                found = True
                self._hook(accelerator, module)
            elif isinstance(module, FSDPModule):
                found = True
                module.set_custom_all_gather(CompressedAllGather(self.config))
                module.set_custom_reduce_scatter(CompressedReduceScatter(self.config))
        if not found and accelerator.num_processes > 1:
            logger.warning(
                "zipccl: %s is neither DDP nor FSDP2: its collectives stay native. Make the Accelerator with the "
                "plugin before the process group, and all are compressed",
                type(model).__name__,
            )

    def _hook(self, accelerator: Accelerator, model: DistributedDataParallel) -> None:
        handler = accelerator.ddp_handler
        if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
            logger.warning(
                "zipccl: DDP has the communication hook %s already and takes only one: its gradients stay native. Make "
                "the Accelerator with the plugin before the process group, and they are compressed",
                handler.comm_hook,
            )
            return
        model.register_comm_hook(CommunicatorState(model.process_group, self.config), ddp_comm_hook)


class DeepSpeedMode(Mode):
    """DeepSpeed reads a section of its JSON; the plugin writes it there."""

    description = 'DeepSpeed has a "zipccl" section'

    def started(self, accelerator: Accelerator) -> None:
        """Writes the section.

        Raises:
            ConfigError: there is one already, which says something else.
        """
        import zipccl_deepspeed

        zipccl_deepspeed.install()
        plugins = accelerator.state.deepspeed_plugins
        for plugin in plugins.values() if isinstance(plugins, dict) else [plugins]:
            section = plugin.deepspeed_config.get(SECTION)
            if section is not None and ZipCCLConfig(**section) != self.config:
                raise ConfigError(
                    f"the DeepSpeed JSON has a {SECTION!r} section that differs from the ZipCCLPlugin; leave one of "
                    f"them out.\nsection: {section}\nplugin:  {self.config.model_dump_json()}"
                )
            plugin.deepspeed_config[SECTION] = _without_auto(self.config.model_dump(mode="json"))


def _without_auto(value: Any) -> Any:
    """A section without the values `"auto"`, which are defaults: Accelerate would want to fill them in."""
    if isinstance(value, dict):
        return {key: _without_auto(item) for key, item in value.items() if item != "auto"}
    return value


def mode_for(config: ZipCCLConfig, arguments: Mapping[str, Any]) -> Mode:
    """The mode for an Accelerator that will be made with these arguments."""
    if _uses_deepspeed(arguments):
        return DeepSpeedMode(config)
    if not dist.is_initialized():
        return BackendMode(config)
    world = dist.group.WORLD
    return GroupMode(config, world) if isinstance(world, ZipCCLProcessGroup) else HooksMode(config)


def _uses_deepspeed(arguments: Mapping[str, Any]) -> bool:
    if arguments.get("deepspeed_plugin") is not None or arguments.get("deepspeed_plugins") is not None:
        return True
    if AcceleratorState._shared_state:
        return bool(AcceleratorState().distributed_type == DistributedType.DEEPSPEED)
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
