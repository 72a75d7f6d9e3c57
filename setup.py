"""The native CPU kernels: one C extension, built without torch, and optional."""

import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = "zipccl_core/kernels/native"
MODULES = ["block_avx2", "block_portable", "exponent", "module", "reduce", "target", "threads"]
HEADERS = ["block", "exponent", "target", "threads", "window"]

# One build for every Python from 3.10 on; free-threaded ones have no limited API.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")


class OptionalBuildExt(build_ext):
    """Says what it means that the extension could not be built; setuptools then goes on without it."""

    def build_extension(self, ext: Extension) -> None:
        """Builds it, or warns and raises."""
        try:
            super().build_extension(ext)
        except Exception:
            self.warn(
                "the native CPU kernels of zipccl could not be built; its reference kernels do the same work, slower. "
                "Install a C compiler and reinstall zipccl to get them."
            )
            raise


setup(
    ext_modules=[
        Extension(
            "zipccl_core.kernels._native",
            sources=[f"{NATIVE}/{name}.c" for name in MODULES],
            depends=[f"{NATIVE}/{name}.h" for name in HEADERS],
            define_macros=[("Py_LIMITED_API", "0x030A0000")] if LIMITED_API else [],
            py_limited_api=LIMITED_API,
            extra_compile_args=["-std=c11", "-O3", "-pthread", "-fvisibility=hidden"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": OptionalBuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED_API else {},
)
