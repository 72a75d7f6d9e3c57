"""The native CPU kernels: the C extension `_native`, built with the package where there is a compiler. Nothing else
imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zipccl_core.errors import WireFormatError
from zipccl_core.kernels import Kernels, Window

try:
    from zipccl_core.kernels import _native
except ModuleNotFoundError as error:
    if error.name != "zipccl_core.kernels._native":
        raise
    _BUILT = False
except ImportError as error:
    if "_native" not in str(error):
        raise
    _BUILT = False
else:
    _BUILT = True

if TYPE_CHECKING:
    from torch import Tensor


class _Native:
    """Hands addresses to C, which releases the GIL. The memory is the caller's and outlives the call."""

    name = "native"

    def encode(
        self, values: Tensor, static: Tensor, dynamic: Tensor, count: Tensor, window: Window, threads: int
    ) -> None:
        base = -1 if window.base is None else window.base
        table = None if window.table is None else bytes(window.table)
        capacity = dynamic.numel()
        n_escapes = _native.encode(
            values.data_ptr(), values.numel(), static.data_ptr(), dynamic.data_ptr(), capacity, base, table, threads
        )
        count.fill_(n_escapes if n_escapes >= 0 else capacity + 1)

    def decode(self, static: Tensor, escapes: Tensor, values: Tensor, params: Tensor, threads: int) -> None:
        code = _native.decode(
            static.data_ptr(),
            escapes.data_ptr(),
            escapes.numel(),
            values.numel(),
            params.data_ptr(),
            values.data_ptr(),
            threads,
        )
        if code:
            raise WireFormatError(f"damaged frame: {_native.message(code)}")

    def accumulate(self, values: Tensor, total: Tensor, first: bool, threads: int) -> None:
        assert total.dtype == torch.float32, "addresses of another dtype would be written beyond"
        assert total.numel() == values.numel()
        _native.accumulate(values.data_ptr(), values.numel(), total.data_ptr(), first, threads)

    def round(self, total: Tensor, divisor: float, values: Tensor, threads: int) -> None:
        assert total.dtype == torch.float32
        assert total.numel() == values.numel()
        _native.round_(total.data_ptr(), total.numel(), divisor, values.data_ptr(), threads)


KERNELS: Kernels | None = _Native() if _BUILT else None
