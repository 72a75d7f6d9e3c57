"""What `import torch` runs where zipccl is installed (entry point `torch.backends`): it waits for deepspeed.

So a `"zipccl"` section of a DeepSpeed JSON takes effect without an import in the user's script.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches it off; `zipccl_deepspeed.install()` does the same by hand.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

# A late module of deepspeed's: `import deepspeed` may be what imports torch, and be half done when this runs.
AWAITED = "deepspeed.runtime.engine"


def autoload() -> None:
    """Arranges for `install()` after deepspeed was imported. No exception leaves: it would break `import torch`."""
    try:
        if AWAITED in sys.modules:
            _install()
        else:
            sys.meta_path.insert(0, _AfterImport(AWAITED, _install))
    except Exception:
        logging.getLogger("zipccl").exception("zipccl: not installed into DeepSpeed, which goes on without it")


def _install() -> None:
    import zipccl_deepspeed

    zipccl_deepspeed.install()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once after a module was imported for the first time."""

    def __init__(self, name: str, action: Any) -> None:
        self._name, self._action = name, action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThen(spec.loader, self._action)
        return spec


class _LoaderThen(importlib.abc.Loader):
    def __init__(self, loader: Any, action: Any) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        try:
            self._action()
        except Exception:
            logging.getLogger("zipccl").exception("zipccl: not installed into DeepSpeed, which goes on without it")
