"""The three ways into an Accelerator's collectives: its process group, hooks of its models, DeepSpeed's JSON."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

from zipccl_core import drop_in
from zipccl_core.config import ZipCCLConfig
from zipccl_core.errors import ConfigError, UnsupportedVersionError
from zipccl_core.hooks import CommunicatorState, CompressedAllGather, CompressedReduceScatter, ddp_comm_hook
from zipccl_core.process_group import ZipCCLProcessGroup
from zipccl_core.registration import BACKEND

logger = logging.getLogger("zipccl")

SECTION = "zipccl"
_ADVICE = "Make the Accelerator with the plugin before the process group, and all are compressed"


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
        before = drop_in.snapshot()
        self._install()
        try:
            yield
        except BaseException:
            if not isinstance(dist.group.WORLD, ZipCCLProcessGroup):
                drop_in.restore(before)
            raise

    def _install(self) -> None:
        if self.config.enabled or drop_in.installed():
            _remember()
            drop_in.install(self.config)

    def started(self, accelerator: Accelerator) -> None:
        """Makes sure that it is so.

        Raises:
            UnsupportedVersionError: the group is another, of a device or torch that the drop-in does not know.
        """
        if self.config.enabled and dist.is_initialized() and not isinstance(dist.group.WORLD, ZipCCLProcessGroup):
            take_back()
            raise UnsupportedVersionError(
                f"zipccl compresses groups of gloo and nccl in {drop_in.SUPPORTED}; Accelerate has made one of "
                f"{dist.get_backend()} in torch {torch.__version__}"
            )


class GroupMode(BackendMode):
    """The default group is ZipCCL's already, by an earlier Accelerator or the script's own hand."""

    def __init__(self, config: ZipCCLConfig, group: ZipCCLProcessGroup) -> None:
        super().__init__(config)
        if group.communicator.config != config:
            raise ConfigError(
                "the default process group compresses with another configuration than this ZipCCLPlugin; give both the "
                f"same.\ngroup:  {group.communicator.config.model_dump_json()}\nplugin: {config.model_dump_json()}"
            )

    def _install(self) -> None:
        if dist.get_backend() != BACKEND:  # of that name, groups made later are so by themselves
            super()._install()


class HooksMode(Mode):
    """A native group exists: the models get hooks. Other calls stay native."""

    description = (
        "the process group existed before the plugin, so models are compressed by hooks (DDP's gradients, FSDP2), and "
        "all else stays native"
    )

    def prepared(self, accelerator: Accelerator, model: nn.Module) -> None:
        """Sets the hooks of a model; those that are set already stay."""
        if not self.config.enabled or accelerator.num_processes == 1:
            return
        modules = list(model.modules())
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                self._hook(module)
            elif isinstance(module, FSDPModule):
                self._set_communications(module)
        if not any(isinstance(module, (DistributedDataParallel, FSDPModule)) for module in modules):
            logger.warning(
                "zipccl: %s is neither DDP nor FSDP2: its collectives stay native. %s", type(model).__name__, _ADVICE
            )

    def _hook(self, model: DistributedDataParallel) -> None:
        for hook, state in getattr(model, "_comm_hooks", []):
            if hook is not ddp_comm_hook:
                name = getattr(hook, "__name__", hook)
                logger.warning(
                    "zipccl: DDP has the communication hook %s and takes no other: its gradients stay native. %s",
                    name,
                    _ADVICE,
                )
            elif state.config != self.config:
                raise ConfigError(
                    "the model is compressed with another configuration than this ZipCCLPlugin; give both the same.\n"
                    f"model:  {state.config.model_dump_json()}\nplugin: {self.config.model_dump_json()}"
                )
            return
        model.register_comm_hook(CommunicatorState(model.process_group, self.config), ddp_comm_hook)

    def _set_communications(self, module: FSDPModule) -> None:
        groups = module._get_fsdp_state()._fsdp_param_groups
        communications = [each for group in groups for each in (group._all_gather_comm, group._reduce_scatter_comm)]
        known = (DefaultAllGather, DefaultReduceScatter, CompressedAllGather, CompressedReduceScatter)
        foreign = sorted({type(each).__name__ for each in communications if type(each) not in known})
        if foreign or len(groups) > 1:
            reason = f"communications of its own ({', '.join(foreign)})" if foreign else "several groups of parameters"
            logger.warning("zipccl: an FSDP2 module has %s: its collectives stay native. %s", reason, _ADVICE)
            return
        module.set_custom_all_gather(CompressedAllGather(self.config))
        module.set_custom_reduce_scatter(CompressedReduceScatter(self.config))


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
            if section is not None and not (isinstance(section, dict) and ZipCCLConfig(**section) == self.config):
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
    """As Accelerate finds out."""
    if AcceleratorState._shared_state:
        return bool(AcceleratorState().distributed_type == DistributedType.DEEPSPEED)
    if arguments.get("cpu") or parse_flag_from_env("ACCELERATE_USE_CPU") or "LOCAL_RANK" not in os.environ:
        return False
    given = arguments.get("deepspeed_plugin") is not None or arguments.get("deepspeed_plugins") is not None
    return given or bool(parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"))


_before: tuple[bool, Any] | None = None
"""How groups were made before a plugin changed that."""


def _remember() -> None:
    global _before
    if _before is None:
        _before = drop_in.snapshot()


def take_back() -> None:
    """Makes groups to be made as before the first plugin."""
    global _before
    if _before is not None:
        drop_in.restore(_before)
        _before = None
