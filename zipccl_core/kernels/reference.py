"""The reference kernels: torch operations, any device, slow and obviously right. The oracle of every test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zipccl_core.errors import WireFormatError
from zipccl_core.kernels import BLOCK, BLOCK_NBYTES, Kernels, Window, sections

if TYPE_CHECKING:
    from torch import Tensor

ESCAPE = 0
SEVEN, SIX_AND_ZERO, TABLE = 0, 1, 2


class _Reference:
    name = "reference"

    def encode(
        self, values: Tensor, static: Tensor, dynamic: Tensor, count: Tensor, window: Window, threads: int
    ) -> None:
        numel = values.numel()
        n_blocks, meta_at, blocks_at = sections(numel)
        bits = torch.zeros(n_blocks * BLOCK, dtype=torch.int32, device=values.device)
        bits[:numel] = values.to(torch.int32) & 0xFFFF
        bits = bits.view(n_blocks, BLOCK)
        exists = (torch.arange(n_blocks * BLOCK, device=values.device) < numel).view(n_blocks, BLOCK)

        exponent = (bits >> 7) & 0xFF
        if window.table is not None:
            base, mode = torch.zeros_like(exponent[:, 0]), torch.full_like(exponent[:, 0], TABLE)
        elif window.base is not None:
            base, mode = torch.full_like(exponent[:, 0], window.base), torch.zeros_like(exponent[:, 0])
        else:
            base, mode = choose_windows(exponent[:, ::8], exists[:, ::8])
        code = torch.where(exists, _encode(exponent, base, mode, window.table), 7)

        code, exponent = _plane_order(code), _plane_order(exponent)
        escaped = code == ESCAPE
        counts = escaped.sum(1)
        count.copy_(counts.sum())
        if int(count) > dynamic.numel():
            return

        static.zero_()
        offsets = counts.cumsum(0) - counts
        static[: 4 * n_blocks].view(torch.int32).copy_(offsets)
        static[meta_at : meta_at + 2 * n_blocks].view(n_blocks, 2).copy_(torch.stack([base, mode], dim=1))
        blocks = static[blocks_at:].view(n_blocks, BLOCK_NBYTES)
        blocks[:, :BLOCK] = ((bits >> 8) & 0x80) | (bits & 0x7F)
        weight = 1 << torch.arange(8, dtype=torch.int32, device=values.device)
        for plane in range(3):
            plane_bits = ((code >> plane) & 1).view(n_blocks, 128, 8)
            blocks[:, BLOCK + 128 * plane : BLOCK + 128 * (plane + 1)] = (plane_bits * weight).sum(2)
        dynamic[: -(-int(count) // 128) * 128].zero_()
        dynamic[: int(count)] = exponent[escaped].to(torch.uint8)

    def decode(self, static: Tensor, escapes: Tensor, values: Tensor, params: Tensor, threads: int) -> None:
        numel = values.numel()
        n_blocks, meta_at, blocks_at = sections(numel)
        blocks = static[blocks_at:].view(n_blocks, BLOCK_NBYTES).to(torch.int32)
        meta = static[meta_at : meta_at + 2 * n_blocks].view(n_blocks, 2).to(torch.int32)
        base, mode = meta[:, 0], meta[:, 1]
        _require(((mode >= SEVEN) & (mode <= TABLE)).all(), "a block has an unknown mode")
        lowest, highest = (
            (mode == SIX_AND_ZERO).to(torch.int32),
            torch.tensor([249, 250, 0], device=base.device)[mode.long()],
        )
        _require(((base >= lowest) & (base <= highest)).all(), "a block has a window base that is not allowed")

        code = torch.zeros(n_blocks, BLOCK, dtype=torch.int32, device=static.device)
        position = torch.arange(8, device=static.device)
        for plane in range(3):
            plane_bytes = blocks[:, BLOCK + 128 * plane : BLOCK + 128 * (plane + 1)]
            code |= ((plane_bytes.unsqueeze(2) >> position) & 1).view(n_blocks, BLOCK) << plane
        escaped = code == ESCAPE
        counts = escaped.sum(1)
        offsets = static[: 4 * n_blocks].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        _require((offsets == counts.cumsum(0) - counts).all(), "offsets of escapes do not match the planes")
        _require(int(counts.sum()) == escapes.numel(), "number of escapes does not match the planes")

        exponent = _natural_order(_decode(code, base, mode, params))
        exponent_in_order = _plane_order(exponent)
        exponent_in_order[escaped] = escapes.to(torch.int32)
        exponent = _natural_order(exponent_in_order).view(-1)
        sm = blocks[:, :BLOCK].reshape(-1)
        fillers = torch.arange(n_blocks * BLOCK, device=static.device) >= numel
        _require(
            ((_natural_order(code).view(-1) == 7) & (sm == 0))[fillers].all(),
            "fillers of the last block are not fillers",
        )
        bits = ((sm & 0x80) << 8) | (exponent << 7) | (sm & 0x7F)
        values.copy_(bits[:numel].to(torch.int16))

    def accumulate(self, values: Tensor, total: Tensor, first: bool, threads: int) -> None:
        addend = values.view(torch.bfloat16)
        total.copy_(addend) if first else total.add_(addend)

    def round(self, total: Tensor, divisor: float, values: Tensor, threads: int) -> None:
        quotient = total / divisor if divisor != 1 else total
        values.view(torch.bfloat16).copy_(quotient)
        values.masked_fill_(quotient.isnan(), 0x7FC0)  # torch's own NaN differs between its vectorised and scalar code


def choose_windows(sample: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
    """Base and mode for each block from its sampled exponents: section 3 of the wire format, "Choosing base and mode",
    step by step.

    Args:
        sample: int32, shape (n_blocks, 128).
        exists: bool, same shape: false for fillers.
    """

    def start(member: Tensor) -> Tensor:
        size = member.sum(1)
        floor = (torch.where(member, sample, 0).amax(1) - 12).clamp(min=0)
        total = torch.where(member, torch.maximum(sample, floor[:, None]), 0).sum(1)
        return ((256 * total) // size.clamp(min=1) - 819) >> 8

    def best(candidates: list[Tensor], width: int) -> tuple[Tensor, Tensor]:
        base, covered = candidates[0], torch.full_like(candidates[0], -1)
        for candidate in candidates:
            inside = (sample >= candidate[:, None]) & (sample < candidate[:, None] + width) & exists
            base = torch.where(inside.sum(1) > covered, candidate, base)
            covered = torch.maximum(covered, inside.sum(1))
        return base, covered

    seven = start(exists).clamp(0, 248)
    base7, n7 = best([(seven + step).clamp(0, 248) for step in (0, -1, 1)], 7)
    not_zero = exists & (sample != 0)
    n_zeros = exists.sum(1) - not_zero.sum(1)
    six = start(not_zero) + 1
    base6, n6 = best([(six + step).clamp(1, 250) for step in (0, -1, 1)], 6)
    use_six = (n_zeros > 0) & (n_zeros < exists.sum(1)) & (n6 + n_zeros > n7)
    return torch.where(use_six, base6, base7).to(torch.int32), use_six.to(torch.int32)


def _encode(exponent: Tensor, base: Tensor, mode: Tensor, table: tuple[int, ...] | None) -> Tensor:
    if table is not None:
        lookup = torch.zeros(256, dtype=torch.int32, device=exponent.device)
        lookup[list(table)] = torch.arange(7, 0, -1, dtype=torch.int32, device=exponent.device)
        return lookup[exponent.long()]
    distance = (exponent - base[:, None]) & 0xFF
    seven = 7 - distance.clamp(max=7)
    six = torch.where(distance < 6, 7 - distance, (exponent == 0).to(torch.int32))
    return torch.where(mode[:, None] == SIX_AND_ZERO, six, seven)


def _decode(code: Tensor, base: Tensor, mode: Tensor, params: Tensor) -> Tensor:
    window = base[:, None] + 7 - code
    zero_coded = (mode[:, None] == SIX_AND_ZERO) & (code == 1)
    table = torch.cat([params[:7].to(torch.int32), params.new_zeros(1, dtype=torch.int32)])
    return torch.where(mode[:, None] == TABLE, table[7 - code.long()], torch.where(zero_coded, 0, window))


def _plane_order(block_values: Tensor) -> Tensor:
    """From value order (k, w, r) to the order of bits in a plane (w, k, r)."""
    return block_values.view(-1, 4, 32, 8).transpose(1, 2).reshape(-1, BLOCK)


def _natural_order(block_values: Tensor) -> Tensor:
    """From the order of bits in a plane back to value order."""
    return block_values.view(-1, 32, 4, 8).transpose(1, 2).reshape(-1, BLOCK)


def _require(condition: Tensor | bool, message: str) -> None:
    if not bool(condition):
        raise WireFormatError(f"damaged frame: {message}")


KERNELS: Kernels = _Reference()
