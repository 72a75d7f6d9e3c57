"""ZipCCL for Accelerate: `Accelerator(kwargs_handlers=[ZipCCLPlugin()])`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zipccl_accelerate.installation import install, uninstall
    from zipccl_accelerate.plugin import ZipCCLPlugin

__all__ = ["ZipCCLPlugin", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        home = "plugin" if name == "ZipCCLPlugin" else "installation"
        try:
            return getattr(import_module(f"zipccl_accelerate.{home}"), name)
        except ModuleNotFoundError as error:
            if error.name != "accelerate":
                raise
            raise ModuleNotFoundError(
                "Accelerate is not installed: pip install accelerate==1.15.0", name="accelerate"
            ) from error
    raise AttributeError(f"module 'zipccl_accelerate' has no attribute {name!r}")
