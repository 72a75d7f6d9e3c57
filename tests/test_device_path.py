"""The collectives on a device, without one: streams are recorded and carried out in odd orders (recorded_device.py),
over gloo, on real processes. Bits are native gloo's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recorded_device import RecordedDevice

from zipccl_core import Communicator, ExponentCodec, ZipCCLConfig
from zipccl_core.collective.device.exchange import Exchange
from zipccl_core.collective.device.path import DeviceWork
from zipccl_core.collective.device.patterns import Gather
from zipccl_core.strategy.operation import Operation
from zipccl_core.testing import run_ranks, same_bits

BF16, CPU = torch.bfloat16, torch.device("cpu")
NUMELS = (0, 1, 700, 1024, 5000, 20_001)
SIZES = {
    "exact": {"dynamic_sizes": "exact"},
    "capped": {"dynamic_sizes": "capped", "dynamic_cap": 1.0},
    "too small a cap": {"dynamic_sizes": "capped", "dynamic_cap": 0.01},
}
ROUNDS = 3

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def data(numel: int, *seed: int) -> torch.Tensor:
    """Several octaves, so that there are escapes; some of it compresses, some becomes RAW."""
    generator = torch.Generator().manual_seed(sum(part * 1009**i for i, part in enumerate(seed, 1)))
    octaves = torch.randint(-6, 7, (numel,), generator=generator) * (sum(seed) % 3 != 0)
    values = (torch.randn(numel, generator=generator) * torch.exp2(octaves.float())).to(BF16)
    if sum(seed) % 5 == 4:
        values = torch.randint(-(2**15), 2**15, (numel,), generator=generator, dtype=torch.int16).view(BF16)
    return values


class Caller:
    """A user of a communicator on a recorded device: what it does with tensors is in stream order, as on a GPU."""

    def __init__(self, seed: int, chunk_numel: int = 1 << 26, **config: Any) -> None:
        self.device = RecordedDevice(seed, chunk_numel)
        config = {"strategy": "always", "reduction": "gloo", **config}
        self.group = dist.group.WORLD
        self.communicator = Communicator(self.group, ZipCCLConfig(**config), devices={CPU: self.device})
        self.rank, self.world_size = self.communicator.rank, self.communicator.world_size

    def computed(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor whose values are there when the current stream comes here, and no sooner."""
        tensor, values = torch.full_like(values, float("nan")), values.clone()
        self.device.enqueue(lambda: tensor.copy_(values))
        return tensor

    def reads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Their values, as work that comes next on the current stream sees them; it also uses the memory for itself."""
        seen = [torch.empty_like(tensor) for tensor in tensors]
        for tensor, copy in zip(tensors, seen, strict=True):
            self.device.enqueue(lambda tensor=tensor, copy=copy: copy.copy_(tensor))
            self.device.enqueue(lambda tensor=tensor: tensor.fill_(-7))
        self.device.record().synchronize()
        return seen

    def end(self) -> None:
        """Carries out what nobody has waited for: peers may wait for it."""
        self.communicator._worker.drain()
        self.device.run_all()
        self.communicator.close()
        self.device.run_all()

    def sees(
        self,
        call: Callable[..., Any],
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        wanted: list[torch.Tensor],
        async_op: bool,
    ) -> None:
        work = call(async_op=async_op)
        assert (work is not None) == async_op
        if work is not None:
            assert isinstance(work, DeviceWork)
            work.wait()
        for tensor in inputs:  # the caller may overwrite its input now
            self.device.enqueue(lambda tensor=tensor: tensor.fill_(9))
        for seen, want in zip(self.reads(*outputs), wanted, strict=True):
            assert same_bits(seen, want)


def native(call: Callable[..., Any], output: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    call(output, *args, **kwargs)
    return output


# ---------------------------------------------------------------------- what runs on every rank


def gathers(caller: Caller) -> None:
    rank, world_size, communicator = caller.rank, caller.world_size, caller.communicator
    for numel in NUMELS:
        for async_op in (False, True):
            every = [data(numel, r, numel) for r in range(world_size)]
            out = torch.zeros(world_size * numel, dtype=BF16)
            mine = caller.computed(every[rank])
            call = lambda async_op: communicator.all_gather_into_tensor(out, mine, async_op)  # noqa: E731
            caller.sees(call, [out], [mine], [torch.cat(every)], async_op)

            whole = torch.zeros(world_size * numel, dtype=BF16)  # in place
            part = whole[rank * numel : (rank + 1) * numel]
            values = every[rank]
            caller.device.enqueue(lambda part=part, values=values: part.copy_(values))
            call = lambda async_op: communicator.all_gather_into_tensor(whole, part, async_op)  # noqa: E731
            caller.sees(call, [whole], [], [torch.cat(every)], async_op)

            uneven = [data(numel * r // world_size, r, numel) for r in range(world_size)]
            outs = [torch.zeros_like(one) for one in uneven]
            outs[-1] = torch.zeros(2, outs[-1].numel(), dtype=BF16).t()[:, 0]  # strided
            mine = caller.computed(uneven[rank])
            call = lambda async_op: communicator.all_gather(outs, mine, async_op)  # noqa: E731
            caller.sees(call, outs, [mine], uneven, async_op)


def all_to_alls(caller: Caller) -> None:
    rank, world_size, communicator = caller.rank, caller.world_size, caller.communicator

    def split(numel: int, source: int, target: int) -> int:
        return 0 if (source + target) % 3 == 2 else numel * (1 + source) // (1 + target)

    for numel in NUMELS:
        for async_op in (False, True):
            parts = [[data(split(numel, s, t), s, t, numel) for t in range(world_size)] for s in range(world_size)]
            wanted = [parts[s][rank] for s in range(world_size)]
            mine = caller.computed(torch.cat(parts[rank]))
            out = torch.zeros(sum(map(len, wanted)), dtype=BF16)
            call = lambda async_op: communicator.all_to_all_single(  # noqa: E731
                out, mine, [len(part) for part in wanted], [len(part) for part in parts[rank]], async_op
            )
            caller.sees(call, [out], [mine], [torch.cat(wanted)], async_op)

            own = [caller.computed(part) for part in parts[rank]]
            outs = [torch.zeros_like(part) for part in wanted]
            call = lambda async_op: communicator.all_to_all(outs, own, async_op)  # noqa: E731
            caller.sees(call, outs, own, wanted, async_op)

            whole = caller.computed(torch.cat([data(numel, rank, t) for t in range(world_size)]))  # onto itself
            call = lambda async_op: communicator.all_to_all_single(whole, whole, async_op=async_op)  # noqa: E731
            caller.sees(call, [whole], [], [torch.cat([data(numel, s, rank) for s in range(world_size)])], async_op)


def reductions(caller: Caller) -> None:
    rank, world_size, communicator = caller.rank, caller.world_size, caller.communicator
    finite = lambda numel, *seed: data(numel, *seed, -sum(seed) % 5)  # noqa: E731
    for numel in NUMELS:
        for async_op in (False, True):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                values = finite(world_size * numel, rank, numel)
                wanted = torch.zeros(numel, dtype=BF16)
                if numel:
                    dist.reduce_scatter_tensor(wanted, values, op=dist.ReduceOp.SUM)
                if op == dist.ReduceOp.AVG:
                    wanted.div_(world_size)
                out, mine = torch.zeros(numel, dtype=BF16), caller.computed(values)
                call = lambda async_op: communicator.reduce_scatter_tensor(out, mine, op, async_op)  # noqa: E731
                caller.sees(call, [out], [mine], [wanted], async_op)

                mine = caller.computed(values)  # the output is a part of the input, as in DeepSpeed
                part = mine[rank * numel : (rank + 1) * numel]
                call = lambda async_op: communicator.reduce_scatter_tensor(part, mine, op, async_op)  # noqa: E731
                caller.sees(call, [part], [], [wanted], async_op)

                wanted = finite(numel, rank, numel)
                mine = caller.computed(wanted)
                dist.all_reduce(wanted, op=dist.ReduceOp.SUM)
                if op == dist.ReduceOp.AVG:
                    wanted.div_(world_size)
                call = lambda async_op: communicator.all_reduce(mine, op, async_op)  # noqa: E731
                caller.sees(call, [mine], [], [wanted], async_op)

                tensors = [finite(numel, rank, 1), finite(77, rank, 2).view(7, 11).t()]
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
                dist.all_reduce(flat, op=dist.ReduceOp.SUM)
                if op == dist.ReduceOp.AVG:
                    flat.div_(world_size)
                mine_too = [caller.computed(tensor) for tensor in tensors]
                call = lambda async_op: communicator.all_reduce_coalesced(mine_too, op, async_op)  # noqa: E731
                caller.sees(call, mine_too, [], [flat[:numel], flat[numel:].view(11, 7)], async_op)


def broadcasts(caller: Caller) -> None:
    for numel in NUMELS:
        for source in range(caller.world_size):
            for async_op in (False, True):
                wanted = data(numel, source, numel)
                mine = caller.computed(wanted if caller.rank == source else data(numel, 77))
                call = lambda async_op: caller.communicator.broadcast(mine, source, async_op)  # noqa: E731
                caller.sees(call, [mine], [], [wanted], async_op)


def several_at_once(caller: Caller) -> None:
    """Calls of several operations under way, waited for in another order, on another stream, or never."""
    rank, world_size, communicator, device = caller.rank, caller.world_size, caller.communicator, caller.device
    works, outs, wanted = [], [], []
    for step in range(6):
        every = [data(3000, r, step) for r in range(world_size)]
        mine, out = caller.computed(every[rank]), torch.zeros(world_size * 3000, dtype=BF16)
        works.append(communicator.all_gather_into_tensor(out, mine, async_op=True))
        outs.append(out)
        wanted.append(torch.cat(every))
        del mine  # the caller drops its input
        summed = caller.computed(torch.full((2048,), float(rank)).to(BF16))
        assert communicator.all_reduce(summed, async_op=True) is not None  # and this work
    order = [3, 0, 5, 1, 4, 2]
    for step in order:
        beside = device.new_stream()
        with device.on(beside if step % 2 else device.current()):
            works[step].wait()
            works[step].wait()
            (seen,) = caller.reads(outs[step])
        assert same_bits(seen, wanted[step])
    assert all(work.is_completed() for work in works)


def on_every_rank(rank: int, world_size: int, case: Callable[[Caller], None], config: dict[str, Any]) -> None:
    for seed in range(ROUNDS):
        caller = Caller(seed * 100 + rank, chunk_numel=4096 if seed % 2 else 1 << 26, **config)
        case(caller)
        caller.end()


CASES = [gathers, all_to_alls, reductions, broadcasts, several_at_once]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("world_size", [2, 3])
def test_as_native(case: Callable[[Caller], None], world_size: int, sizes: str) -> None:
    run_ranks(on_every_rank, world_size, case, SIZES[sizes], backend="gloo", timeout=200)


def test_four_ranks_with_checksums() -> None:
    config = {**SIZES["too small a cap"], "codec": ExponentCodec(checksum="crc32c")}
    run_ranks(on_every_rank, 4, gathers, config, backend="gloo", timeout=200)


# ---------------------------------------------------------------------- fp32 order


def fp32_reductions(rank: int, world_size: int) -> None:
    for sizes in SIZES.values():
        caller = Caller(rank, reduction="fp32", **sizes)
        every = [data(3 * 5000, r, 15) for r in range(world_size)]
        total = every[0].float()
        for values in every[1:]:
            total = total + values.float()
        mine = caller.computed(every[rank])
        out = torch.zeros(5000, dtype=BF16)
        call = lambda async_op: caller.communicator.reduce_scatter_tensor(out, mine, async_op=async_op)  # noqa: E731
        caller.sees(call, [out], [], [total[rank * 5000 : (rank + 1) * 5000].to(BF16)], True)
        caller.end()


def test_fp32_order() -> None:
    run_ranks(fp32_reductions, 3, backend="gloo")


# ---------------------------------------------------------------------- the tests can fail


class Forgetful(RecordedDevice):
    """Forgets one kind of wait: the path's for the caller's stream, or the caller's for the path's."""

    def __init__(self, seed: int, forgotten: str) -> None:
        super().__init__(seed)
        self._forgotten = forgotten

    def wait(self, event: Any) -> None:
        of_the_path = self.current() is not self._streams[0]
        if of_the_path != (self._forgotten == "path"):
            super().wait(event)


def a_wait_is_missing(rank: int, world_size: int, forgotten: str, sizes: str) -> int:
    wrong = 0
    for seed in range(6):
        caller = Caller(seed * 100 + rank, **SIZES[sizes])
        caller.communicator.close()
        caller.device = Forgetful(seed * 100 + rank, forgotten)
        caller.device.current()  # the caller's stream is the first
        config = caller.communicator.config
        caller.communicator = Communicator(caller.group, config, devices={CPU: caller.device})
        every = [data(5000, r, 3) for r in range(world_size)]
        mine, out = caller.computed(every[rank]), torch.zeros(world_size * 5000, dtype=BF16)
        caller.communicator.all_gather_into_tensor(out, mine)
        (seen,) = caller.reads(out)
        wrong += not same_bits(seen, torch.cat(every))
        caller.end()
    return wrong


@pytest.mark.parametrize(("forgotten", "sizes"), [("path", "exact"), ("path", "capped"), ("caller", "exact")])
def test_a_missing_wait_is_noticed(forgotten: str, sizes: str) -> None:
    assert sum(run_ranks(a_wait_is_missing, 2, forgotten, sizes, backend="gloo")) > 0


# ---------------------------------------------------------------------- how it is done


def order(rank: int, world_size: int) -> None:
    """With exact sizes the host reads them before anything is decoded; with a cap, decoding is on its way already, and
    is done again only where something did not fit."""
    did: list[str] = []
    for name in ("_deliver", "_read_sizes", "_complete"):
        for kind in (Exchange, Gather):
            if name in vars(kind):
                inner = getattr(kind, name)
                setattr(kind, name, lambda self, name=name, inner=inner: (did.append(name), inner(self))[1])
    expected = {
        "exact": ["_read_sizes", "_complete", "_deliver"],
        "capped": ["_deliver", "_read_sizes"],
        "too small a cap": ["_deliver", "_read_sizes", "_complete", "_deliver"],
    }
    for name, sizes in SIZES.items():
        caller = Caller(rank, **sizes)
        mine, out = caller.computed(data(5000, rank, 2)), torch.zeros(world_size * 5000, dtype=BF16)
        del did[:]
        caller.communicator.all_gather_into_tensor(out, mine)
        assert did == expected[name]
        (seen,) = caller.reads(out)
        assert same_bits(seen, torch.cat([data(5000, r, 2) for r in range(world_size)]))
        caller.end()


def test_when_the_host_reads() -> None:
    run_ranks(order, 2, backend="gloo")


def memory(rank: int, world_size: int) -> None:
    for sizes in SIZES.values():
        caller = Caller(rank, **sizes)
        (path_device, communicator) = caller.device, caller.communicator

        def start() -> tuple[Any, Any]:
            mine, out = caller.computed(data(5000, rank)), torch.zeros(world_size * 5000, dtype=BF16)
            return communicator.all_gather_into_tensor(out, mine, async_op=True), weakref.ref(mine)

        work, mine = start()
        gc.collect()
        assert mine() is not None  # the caller dropped it, and the call still needs it
        work.wait()
        path_device.record().synchronize()
        del work
        gc.collect()
        assert mine() is None

        work, mine = start()
        with path_device.on(path_device.new_stream()):
            work.wait()  # what follows on the caller's own stream may come before the call
        gc.collect()
        assert mine() is not None
        path_device.run_all()
        communicator.all_gather_into_tensor(torch.zeros(world_size, dtype=BF16), torch.zeros(1, dtype=BF16))
        del work
        gc.collect()
        assert mine() is None
        caller.end()


def test_memory_lives_as_long_as_it_is_needed() -> None:
    run_ranks(memory, 2, backend="gloo")


def futures(rank: int, world_size: int) -> None:
    for sizes in SIZES.values():
        caller = Caller(rank, **sizes)
        mine, out = caller.computed(data(5000, rank)), torch.zeros(world_size * 5000, dtype=BF16)
        future = caller.communicator.all_gather_into_tensor(out, mine, async_op=True).get_future()
        (value,) = future.then(lambda ended: [tensor.clone() for tensor in ended.value()]).wait()
        assert same_bits(value, torch.cat([data(5000, r) for r in range(world_size)]))
        caller.end()


def test_a_future_is_for_the_host() -> None:
    run_ranks(futures, 2, backend="gloo")


def counters(rank: int, world_size: int) -> None:
    """Those of the CPU's path, but for the bytes: here the largest of the ranks' dynamic parts moves."""
    on_cpu = Communicator(dist.group.WORLD, ZipCCLConfig(strategy="always"))
    on_cpu.all_gather_into_tensor(torch.zeros(world_size * 5000, dtype=BF16), data(5000, 3))
    escapes = on_cpu.stats()[Operation.ALL_GATHER].escapes
    on_cpu.close()
    assert escapes > 0
    for sizes in SIZES.values():
        caller = Caller(rank, **sizes)
        mine, out = caller.computed(data(5000, 3)), torch.zeros(world_size * 5000, dtype=BF16)
        caller.communicator.all_gather_into_tensor(out, mine)
        ours = caller.communicator.stats()[Operation.ALL_GATHER]
        assert (ours.calls, ours.frames, ours.raw_nbytes) == (1, 1, (world_size - 1) * 10_000)
        assert (
            (world_size - 1) * 6875
            < ours.wire_nbytes
            < (world_size - 1) * (12_300 if sizes["dynamic_sizes"] == "capped" else 8000)
        )
        assert (ours.escapes, ours.self_nbytes) == (escapes, 10_000)
        assert ours.wire_nbytes % 128 == 0
        caller.end()


def test_statistics() -> None:
    run_ranks(counters, 3, backend="gloo")


def graph(rank: int, world_size: int) -> None:
    caller = Caller(rank)
    caller.device.capture = True
    mine, out = torch.ones(3000, dtype=BF16), torch.zeros(world_size * 3000, dtype=BF16)
    caller.communicator.all_gather_into_tensor(out, mine)
    assert caller.communicator.stats()[Operation.ALL_GATHER].native_calls == 1
    caller.device.capture = False
    caller.communicator.all_gather_into_tensor(out, mine)
    assert caller.communicator.stats()[Operation.ALL_GATHER].native_calls == 1
    caller.end()


def test_what_is_captured_in_a_graph_is_native() -> None:
    run_ranks(graph, 2, backend="gloo")


class Reluctant(ExponentCodec):
    id: str = "reluctant"  # type: ignore[assignment]

    def unavailable(self, device: torch.device) -> str | None:
        return "not on this rank" if dist.get_rank() == 1 else None


def one_rank_cannot(rank: int, world_size: int) -> None:
    caller = Caller(rank, codec=Reluctant())
    mine, out = torch.ones(3000, dtype=BF16), torch.zeros(world_size * 3000, dtype=BF16)
    for _ in range(2):
        caller.communicator.all_gather_into_tensor(out, mine)
    assert caller.communicator.stats()[Operation.ALL_GATHER].native_calls == 2
    assert out.eq(1).all()
    caller.end()


def test_all_ranks_compress_or_none() -> None:
    run_ranks(one_rank_cannot, 3, backend="gloo")
