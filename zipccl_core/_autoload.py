"""What `import torch` runs where zipccl is installed (entry point `torch.backends`): two registrations, no work.

It makes the backend name `zipccl` known to torch.distributed, and lets a `"zipccl"` section of a DeepSpeed JSON take
effect without an
import in the user's script. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches it off; `zipccl_core.register()` and
`zipccl_deepspeed.install()` do the same by hand.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

BACKEND = "zipccl"


def autoload() -> None:
    """Registers the backend, and `zipccl_deepspeed.install` for when deepspeed is imported. An exception here would
    break `import torch`, so none leaves."""
    try:
        register()
        # a late module of deepspeed: `import deepspeed` may be what imports torch, and be half done by now
        _AfterImport.watch("deepspeed.runtime.engine", _install_into_deepspeed)
    except Exception:
        logging.getLogger("zipccl").exception("zipccl: could not be registered with torch; it stays off")


def register() -> None:
    """Makes `zipccl` a backend of torch.distributed. Repeating it does nothing."""
    import torch.distributed as dist

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    from zipccl_core.process_group import create

    return create(options, backend_options)


def _install_into_deepspeed() -> None:
    import zipccl_deepspeed

    zipccl_deepspeed.install()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once after a module was imported for the first time."""

    def __init__(self, name: str, action: Any) -> None:
        self._name, self._action = name, action

    @classmethod
    def watch(cls, name: str, action: Any) -> None:
        if name in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, cls(name, action))

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThen(spec.loader, self._action, self._name)
        return spec


class _LoaderThen(importlib.abc.Loader):
    def __init__(self, loader: Any, action: Any, name: str) -> None:
        self._loader, self._action, self._name = loader, action, name

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        try:
            self._action()
        except Exception:
            logging.getLogger("zipccl").exception(
                "zipccl: could not be installed into %s, which goes on without it", self._name
            )
