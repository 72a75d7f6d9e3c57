"""Puts the backend into DeepSpeed, and takes it out again.

DeepSpeed has no registry of comm backends: its global `deepspeed.comm.comm.cdb` is made from the class
`TorchBackend`, and an unknown top-level key of its JSON is kept, but read by nobody. So two names are replaced: that
class, and the constructor of `DeepSpeedConfig`, which sees every JSON before the first large collective, whether
DeepSpeed makes the process group, the script has made it already, or `zero.Init` comes first.
"""

from __future__ import annotations

import functools
import logging
from difflib import get_close_matches
from typing import Any

from zipccl_core.config import ZipCCLConfig
from zipccl_core.errors import ConfigError, UnsupportedVersionError
from zipccl_deepspeed.backend import COMMUNICATORS, ZipCCLBackendMixin

SECTION = "zipccl"


class _Installation:
    """What was there before, and what stands in its place."""

    def __init__(self) -> None:
        import deepspeed.comm.comm as comm
        from deepspeed.comm.torch import TorchBackend
        from deepspeed.runtime.config import DeepSpeedConfig

        self.comm, self.config_class = comm, DeepSpeedConfig
        self.original_backend, self.original_init = TorchBackend, DeepSpeedConfig.__init__
        self._adopted: tuple[Any, type] | None = None

    def put_in(self) -> None:
        self.backend = _with_zipccl(self.original_backend)
        self.comm.TorchBackend = self.backend
        if (
            self.comm.cdb is not None
        ):  # the group exists already: its backend changes class, a second one would be a second group
            self._adopted = (self.comm.cdb, type(self.comm.cdb))
            self.comm.cdb.__class__ = _with_zipccl(type(self.comm.cdb))
        original_init = self.original_init

        @functools.wraps(original_init)
        def init(config: Any, *args: Any, **kwargs: Any) -> None:
            original_init(config, *args, **kwargs)
            read_section(config._param_dict)

        self.config_class.__init__ = init

    def take_out(self) -> None:
        COMMUNICATORS.end()
        self.comm.TorchBackend = self.original_backend
        self.config_class.__init__ = self.original_init
        if self._adopted is not None:
            backend, original_class = self._adopted
            backend.__class__ = original_class
        elif type(self.comm.cdb) is self.backend:
            self.comm.cdb.__class__ = self.original_backend


_installation: _Installation | None = None


def install() -> None:
    """Makes DeepSpeed read the `"zipccl"` section. Without a section nothing changes. Repeating it does nothing.

    Raises:
        UnsupportedVersionError: this DeepSpeed is not built as this version of zipccl knows it.
    """
    global _installation
    if _installation is not None:
        return
    try:
        installation = _Installation()
        installation.put_in()
    except (ImportError, AttributeError) as error:
        import deepspeed

        raise UnsupportedVersionError(
            f"zipccl supports deepspeed 0.19; this is {deepspeed.__version__}: {error}"
        ) from error
    _installation = installation


def uninstall() -> None:
    """Restores DeepSpeed exactly as it was before `install()`. Calls under way are finished first. Repeating it does
    nothing."""
    global _installation
    if _installation is not None:
        _installation.take_out()
        _installation = None


def read_section(ds_config: dict[str, Any]) -> None:
    """Takes the `"zipccl"` section of a DeepSpeed JSON, where there is one.

    Raises:
        ConfigError: it is not a mapping, or has a wrong key or value; the message names key, value and what is
            allowed.
    """
    import deepspeed.utils as ds_utils

    for key in ds_config:
        if key != SECTION and get_close_matches(str(key).lower(), [SECTION], cutoff=0.8):
            ds_utils.logger.warning(f"DeepSpeed ignores the key {key!r}; is it meant to be {SECTION!r}?")
    section = ds_config.get(SECTION)
    if section is None:
        return
    if not isinstance(section, dict):
        raise ConfigError(
            f"the {SECTION!r} section of the DeepSpeed JSON must be a mapping: {{}} for the defaults, "
            f'{{"enabled": false}} to switch it off; got {section!r}'
        )
    config = ZipCCLConfig(**section)
    COMMUNICATORS.configure(config)
    state = "is compressed" if config.enabled else "stays native"
    message = f"zipccl: deepspeed.comm {state}: {config.model_dump_json()}"
    ds_utils.log_dist(message, ranks=[0], level=logging.WARNING)  # DeepSpeed shows nothing below


def _with_zipccl(backend: type) -> type:
    """A subclass of a DeepSpeed backend class with the compressed operations, under its name."""
    return type(backend.__name__, (ZipCCLBackendMixin, backend), {"__module__": __name__, "__doc__": backend.__doc__})
