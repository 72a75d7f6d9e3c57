"""zipccl_exponent_decode_reduce on a CPU (tests/cusim), in each variant: its bits are those of the reduction of order
`fp32`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from cuda_cases import as_bytes, normal, reference, specials
from cuda_simulator import GUARD, VARIANTS, Parts, Simulator, build, misplaced, split
from hypothesis import given, settings
from hypothesis import strategies as st

from zipccl_core import ExponentCodec, compress
from zipccl_core.codec.reduction import Reduction

BAD_OFFSET, OVERFLOW = 4, 128


@pytest.fixture(scope="module", params=VARIANTS)
def simulator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++)")
    return Simulator(build(compiler, tmp_path_factory.mktemp("cusim"), variant=request.param))


def wanted(ranks: Sequence[torch.Tensor], average: bool) -> bytes:
    result = torch.empty_like(ranks[0])
    Reduction(order="fp32", average=average, total=result.numel(), offset=0).reduce(ranks, result)
    return as_bytes(result)


def total(ranks: Sequence[torch.Tensor], initial: torch.Tensor | None = None) -> torch.Tensor:
    """In fp32, in the order of the ranks."""
    result = ranks[0].float() if initial is None else initial + ranks[0].float()
    for rank in ranks[1:]:
        result = result + rank.float()
    return result


def contributions(ranks: Sequence[torch.Tensor], own: int, offset: int = 0) -> list[Parts | np.ndarray]:
    """A frame of each rank; values of rank `own`, if there is one, behind `offset`."""
    result: list[Parts | np.ndarray] = []
    for index, rank in enumerate(ranks):
        if index == own:
            values = misplaced(2 * rank.numel() + GUARD, offset)[: 2 * rank.numel()]
            values[:] = rank.view(torch.uint8).numpy()
            result.append(values)
        else:
            result.append(split(compress(rank, ExponentCodec()).numpy(), rank.numel()))
    return result


def sample(n_ranks: int, numel: int) -> list[torch.Tensor]:
    """Different scales, so that the order of additions matters."""
    return [normal(numel, 0.02 * 3.0**rank, seed=rank) for rank in range(n_ranks)]


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 5])
def test_bits_are_the_reductions(simulator: Simulator, n_ranks: int, average: bool) -> None:
    for numel in (0, 1, 100, 1024, 5000, 20_000):
        ranks = sample(n_ranks, numel)
        for own in range(-1, n_ranks):
            status, result = simulator.decode_reduce(
                contributions(ranks, own), numel, divisor=n_ranks if average else 1, backwards=own % 2 == 0
            )
            assert status == [0] * n_ranks
            assert result.tobytes() == wanted(ranks, average), (numel, own)


def test_the_order_is_the_ranks(simulator: Simulator) -> None:
    """2^24 + 1 + 1 is 2^24 in this order, and not in another."""
    ranks = [torch.full((2048,), value).bfloat16() for value in (2.0**24, 1, 1)]
    _, result = simulator.decode_reduce(contributions(ranks, -1), 2048, wide=True)
    assert (result.view(np.float32) == 2.0**24).all()
    _, result = simulator.decode_reduce(contributions(ranks[::-1], 1), 2048, wide=True)
    assert (result.view(np.float32) == 2.0**24 + 2).all()


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_special_values(simulator: Simulator, n_ranks: int) -> None:
    """NaN, infinities and their difference, zeros of both signs, subnormals; frames RAW and not."""
    special = [specials(9000, seed) for seed in range(n_ranks)]
    sparse = [normal(9000, 1e-38, seed) for seed in range(n_ranks)]
    for index, tensor in enumerate(sparse):
        tensor[::50] = specials(180, index)
        tensor[7::64] = -0.0
    assert reference(special[0])[6] == 1
    assert reference(sparse[0])[6] == 0
    for ranks in (special, sparse):
        for own in (-1, 0):
            for average in (False, True):
                status, result = simulator.decode_reduce(
                    contributions(ranks, own), 9000, divisor=n_ranks if average else 1
                )
                assert status == [0] * n_ranks
                assert result.tobytes() == wanted(ranks, average)


def test_minus_zero_stays(simulator: Simulator) -> None:
    ranks = [torch.full((3000,), -0.0).bfloat16()] * 2
    for own in (-1, 0, 1):
        for wide in (False, True):
            _, result = simulator.decode_reduce(contributions(ranks, own), 3000, wide=wide)
            assert (result.view(np.uint32 if wide else np.uint16) == (0x80000000 if wide else 0x8000)).all()


@pytest.mark.parametrize("offset", [2, 4, 8, 14])
def test_misaligned_values_and_results(simulator: Simulator, offset: int) -> None:
    ranks = sample(3, 5000)
    _, result = simulator.decode_reduce(contributions(ranks, 1, offset), 5000, offset=offset)
    assert result.tobytes() == wanted(ranks, False)
    _, result = simulator.decode_reduce(contributions(ranks, 1, offset), 5000, wide=True, offset=offset // 4 * 4)
    assert result.tobytes() == as_bytes(total(ranks))


@pytest.mark.parametrize("own", [0, 1, 2])
@pytest.mark.parametrize("offset", [0, 2])
def test_in_place(simulator: Simulator, own: int, offset: int) -> None:
    ranks = sample(3, 9000)
    parts = contributions(ranks, own, offset)
    status, result = simulator.decode_reduce(parts, 9000, out=parts[own], divisor=3)
    assert status == [0] * 3
    assert result is parts[own]
    assert result.tobytes() == wanted(ranks, True)


@pytest.mark.parametrize("divisor", [1, 3, 4])
def test_fp32_results(simulator: Simulator, divisor: int) -> None:
    ranks = sample(4, 5000)
    _, result = simulator.decode_reduce(contributions(ranks, 2), 5000, wide=True, divisor=divisor)
    assert result.tobytes() == as_bytes(total(ranks) / divisor)


@pytest.mark.parametrize("offset", [0, 4])
def test_more_ranks_than_a_launch_has_jobs(simulator: Simulator, offset: int) -> None:
    """The sum of some ranks, in fp32, is where the others begin; it may be overwritten."""
    ranks = sample(5, 5000)
    parts = contributions(ranks, 3)
    _, partial = simulator.decode_reduce(parts[:2], 5000, wide=True, offset=offset)
    _, again = simulator.decode_reduce(parts[2:4], 5000, initial=partial, wide=True, out=partial)
    assert again.tobytes() == as_bytes(total(ranks[:4]))
    _, result = simulator.decode_reduce(parts[4:], 5000, initial=again, divisor=5)
    assert result.tobytes() == wanted(ranks, True)


def test_64_ranks(simulator: Simulator) -> None:
    ranks = sample(8, 1500) * 8
    status, result = simulator.decode_reduce(contributions(ranks, 63), 1500, divisor=64)
    assert status == [0] * 64
    assert result.tobytes() == wanted(ranks, True)


def test_each_rank_has_its_own_status(simulator: Simulator) -> None:
    parts = contributions(sample(4, 5000), 1)
    assert isinstance(parts[2], Parts)
    assert isinstance(parts[3], Parts)
    parts[2] = Parts(parts[2].static, parts[2].dynamic[:0])
    parts[3].static[128] = 1
    assert simulator.decode_reduce(parts, 5000)[0] == [0, 0, OVERFLOW, BAD_OFFSET]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), numel=st.integers(0, 3000), n_ranks=st.integers(1, 5), average=st.booleans())
def test_any_ranks(simulator: Simulator, data: st.DataObject, numel: int, n_ranks: int, average: bool) -> None:
    kinds = st.sampled_from(["normal", "specials", "tiny", "huge"])
    ranks = []
    for _ in range(n_ranks):
        kind, seed = data.draw(kinds), data.draw(st.integers(0, 1000))
        scale = {"normal": 1, "tiny": 1e-39, "huge": 3e38}.get(kind, 1)
        ranks.append(specials(numel, seed) if kind == "specials" else normal(numel, scale, seed))
    own = data.draw(st.integers(-1, n_ranks - 1))
    offset = data.draw(st.sampled_from([0, 2, 8]))
    status, result = simulator.decode_reduce(
        contributions(ranks, own, offset), numel, divisor=n_ranks if average else 1, offset=offset
    )
    assert status == [0] * n_ranks
    assert result.tobytes() == wanted(ranks, average)
