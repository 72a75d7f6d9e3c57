"""Bits compared as bits."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bit patterns as integers, flat. NaN payloads and the sign of zero count."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS[tensor.element_size()]) if tensor.dtype != torch.bool else flat.view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, numel and bits."""
    return a.dtype == b.dtype and a.numel() == b.numel() and torch.equal(bits(a), bits(b))
