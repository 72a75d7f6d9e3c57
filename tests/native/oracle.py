"""Section 3 of docs/wire-format.md once more, value by value and independent of every kernel: an oracle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def align(n: int) -> int:
    return -(-n // 128) * 128


def static_nbytes(numel: int) -> int:
    n_blocks = -(-numel // 1024)
    return align(4 * n_blocks) + align(2 * n_blocks) + 1408 * n_blocks


def encode(values: np.ndarray, base: int | None = None, table: Sequence[int] | None = None) -> tuple[bytes, bytes]:
    """The static part and the escapes of bfloat16 values given as uint16."""
    offsets, meta, blocks, escapes = bytearray(), bytearray(), bytearray(), bytearray()
    for begin in range(0, len(values), 1024):
        block = [int(v) for v in values[begin : begin + 1024]]
        if table is not None:
            block_base, mode = 0, 2
        elif base is not None:
            block_base, mode = base, 0
        else:
            block_base, mode = choose([v >> 7 & 255 for v in block[::8]])
        offsets += len(escapes).to_bytes(4, "little")
        meta += bytes([block_base, mode])
        encoded, block_escapes = encode_block(block, block_base, mode, table)
        blocks += encoded
        escapes += block_escapes
    static = offsets.ljust(align(len(offsets)), b"\0") + meta.ljust(align(len(meta)), b"\0") + blocks
    return bytes(static), bytes(escapes)


def encode_block(block: list[int], base: int, mode: int, table: Sequence[int] | None) -> tuple[bytes, bytes]:
    sign_mantissa = [v >> 15 << 7 | v & 127 for v in block] + [0] * (1024 - len(block))
    exponents = [v >> 7 & 255 for v in block]
    codes = [code_of(e, base, mode, table) for e in exponents] + [7] * (1024 - len(block))
    planes = [bytearray(128) for _ in range(3)]
    escapes = bytearray()
    for w in range(32):
        for k in range(4):
            for r in range(8):
                i = 256 * k + 8 * w + r
                for j in range(3):
                    planes[j][4 * w + k] |= (codes[i] >> j & 1) << r
                if codes[i] == 0:
                    escapes.append(exponents[i])
    return bytes(sign_mantissa) + b"".join(planes), bytes(escapes)


def code_of(exponent: int, base: int, mode: int, table: Sequence[int] | None) -> int:
    t = (exponent - base) % 256
    if mode == 0:
        return 7 - min(t, 7)
    if mode == 1:
        return 7 - t if t < 6 else int(exponent == 0)
    assert table is not None
    return 7 - table.index(exponent) if exponent in table else 0


def choose(sample: list[int]) -> tuple[int, int]:
    """Base and mode of a block with these sampled exponents."""

    def start(members: list[int]) -> int:
        floor = max(max(members) - 12, 0)
        return (256 * sum(max(e, floor) for e in members) // len(members) - 819) >> 8

    def best(first: int, low: int, high: int, width: int) -> tuple[int, int]:
        candidates = [min(max(base, low), high) for base in (first, first - 1, first + 1)]
        counts = [sum(base <= e < base + width for e in sample) for base in candidates]
        return candidates[counts.index(max(counts))], max(counts)

    base, n7 = best(min(max(start(sample), 0), 248), 0, 248, 7)
    z = sample.count(0)
    if 0 < z < len(sample):
        base6, n6 = best(start([e for e in sample if e != 0]) + 1, 1, 250, 6)
        if n6 + z > n7:
            return base6, 1
    return base, 0
