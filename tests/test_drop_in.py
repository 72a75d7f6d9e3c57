"""Drop-in: `ZIPCCL=1` and programs that know nothing of ZipCCL; PREMUL_SUM, uneven gathers and batches of messages."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zipccl_core import Communicator, ConfigError, ZipCCLConfig, ZipCCLProcessGroup, drop_in
from zipccl_core.testing import run_ranks, same_bits

ROOT = Path(__file__).parent.parent
ALWAYS = ZipCCLConfig(strategy="always", reduction="gloo")
NEVER = ZipCCLConfig(enabled=False)
ON = {"ZIPCCL": "1", "ZIPCCL_STRATEGY": "always", "ZIPCCL_REDUCTION": "gloo"}

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about its own deprecated names

PROGRAM = """
import datetime, hashlib, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]

backend = None if sys.argv[1] == "None" else sys.argv[1]
dist.init_process_group(backend)
rank = dist.get_rank()
values = torch.randn(100_000, generator=torch.Generator().manual_seed(rank)).bfloat16()
total = values.clone()
dist.all_reduce(total)
group = dist.new_group([0, 1])
gathered = torch.zeros(200_000).bfloat16()
dist.all_gather_into_tensor(gathered, values, group=group)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(300, 300).bfloat16())
model(torch.full((4, 300), rank + 1.0).bfloat16()).sum().backward()
if dist.get_backend() == "gloo":
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))
if rank == 0:
    bits = [digest(each) for each in (total, gathered, model.module.weight.grad)]
    groups = [dist.group.WORLD, group]
    names = ("all_reduce", "all_gather")
    frames = [g.stats()[name].frames for g, name in zip(groups, names)] if hasattr(groups[0], "stats") else []
    print(dist.get_backend(), dist.get_backend(group), bits, frames, sep="|")
dist.destroy_process_group()
"""


def run_program(*args: str, program: str = PROGRAM, ranks: int = 2, **environ: str) -> list[Any]:
    """Runs a program as a user's launcher does. The entry point's function is called by hand where the package is on
    the path only, and not installed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    clean = {name: text for name, text in os.environ.items() if not name.startswith("ZIPCCL")}
    processes = []
    for rank in range(ranks):
        environment = {**clean, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYTHONPATH=str(ROOT), **environ)
        command = [sys.executable, "-c", program, *args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, text=True, env=environment, **pipes))
    try:
        return [(*process.communicate(timeout=50), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def native() -> list[str]:
    (out, err, code), (_, other_err, other_code) = run_program("gloo")
    assert (code, other_code) == (0, 0), err + other_err
    assert "zipccl" not in err
    return str(out).strip().split("|")


def test_off_by_default(native: list[str]) -> None:
    assert native[-1] == "[]"


@pytest.mark.parametrize("backend", ["gloo", "nccl", "None", "cpu:gloo,cuda:nccl"])
def test_unmodified_program(native: list[str], backend: str) -> None:
    """The same bits in frames, under the names that were asked for."""
    (out, err, code), (_, other_err, other_code) = run_program(backend, **ON)
    assert (code, other_code) == (0, 0), err + other_err
    name, of_new_group, bits, frames = out.strip().split("|")
    assert name == of_new_group == ("undefined" if backend == "None" else backend)
    assert bits == native[2]
    assert all(count > 0 for count in json.loads(frames))
    assert len(json.loads(frames)) == 2
    assert err.count("zipccl is active") == 1
    assert "unknown environment variable" not in err


def test_disabled_by_the_configuration() -> None:
    """ZipCCL's groups, with nothing in frames; the log does not say that it is active."""
    (out, err, code), _ = run_program("gloo", **{**ON, "ZIPCCL_ENABLED": "false"})
    assert code == 0, err
    assert not any(json.loads(out.strip().split("|")[-1]))
    assert "zipccl is active" not in err
    assert err.count("enabled is false") == 1


def test_bad_configuration_is_an_error() -> None:
    for _, err, code in run_program("gloo", **{**ON, "ZIPCCL_CODEC": "kodec"}):
        assert code != 0
        assert "ConfigError" in err


@pytest.mark.parametrize(
    ("value", "on"),
    [
        ("1", True),
        ("true", True),
        ("ON", True),
        ("yes", True),
        ("0", False),
        ("off", False),
        ("no", False),
        ("", False),
    ],
)
def test_values(value: str, on: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert drop_in.wanted({"ZIPCCL": value}) is on
    assert not drop_in.wanted({})
    assert not caplog.records


def test_value_that_is_none(caplog: pytest.LogCaptureFixture) -> None:
    assert not drop_in.wanted({"ZIPCCL": "maybe"})
    assert "ZIPCCL='maybe' is ignored; allowed: 1, true, yes, on;" in caplog.text


LOADER = """
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    print(sum(int(batch.sum()) for batch in DataLoader(range(8), batch_size=4, num_workers=1)))
"""
LIGHT = "import sys, torch; print('pydantic' in sys.modules, 'zipccl_core.drop_in' in sys.modules)"
WITHOUT = (
    "import torch, torch.distributed as d; d.is_available = lambda: False;"
    "import zipccl_core._autoload as a; a.autoload(); print(1)"
)
CHANGED = (
    "import torch, torch.distributed.distributed_c10d as c; del c._new_process_group_helper;"
    "import zipccl_core._autoload as a; a.autoload(); print(1)"
)


@pytest.mark.parametrize(
    ("program", "says"), [(LOADER, "28"), (LIGHT, "False True"), (WITHOUT, "1")], ids=["loader", "light", "without"]
)
def test_programs_that_do_not_train(program: str, says: str) -> None:
    ((out, err, code),) = run_program(program=program, ranks=1, ZIPCCL="1")
    assert (out.strip(), err, code) == (says, "", 0)


def test_another_torch() -> None:
    """One that makes its groups in another way: told, and left alone."""
    ((out, err, code),) = run_program(program=CHANGED, ranks=1, ZIPCCL="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (out.strip(), code) == ("1", 0)
    assert "supported: torch 2.13" in err


def test_installed_by_hand() -> None:
    """With a configuration; other backends and later groups are left alone."""

    def run(rank: int, world_size: int) -> None:
        drop_in.install(ALWAYS)
        drop_in.install(ALWAYS)
        dist.init_process_group("gloo")
        try:
            assert isinstance(dist.group.WORLD, ZipCCLProcessGroup)
            assert dist.group.WORLD.communicator.config == ALWAYS
            assert (dist.group.WORLD.name(), dist.group.WORLD._get_backend_name()) == ("zipccl", "gloo")
            assert dist.new_group(pg_options={"codec": "raw"}).communicator.config.codec.id == "raw"
            with pytest.raises(ConfigError, match="unknown key"):
                dist.new_group(pg_options={"kodec": "raw"})
        finally:
            drop_in.uninstall()
        assert not isinstance(dist.new_group(), ZipCCLProcessGroup)

    run_ranks(run, 2, backend=None)


def numbers(rank: int, dtype: torch.dtype, numel: int = 8192) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", [ALWAYS, NEVER], ids=["frames", "native"])
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_premul_sum(dtype: torch.dtype, config: ZipCCLConfig, factor: float) -> None:
    """Two addends: the sum has one rounding, whatever the order."""

    def run(rank: int, world_size: int) -> None:
        op = dist._make_nccl_premul_sum(factor)
        scaled = [numbers(each, dtype) * torch.tensor([factor]).to(dtype) for each in range(world_size)]
        expected = (scaled[0].float() + scaled[1].float()).to(dtype)
        half = slice(rank * 4096, rank * 4096 + 4096)
        group: Any = dist.group.WORLD
        communicators = [None] if config is NEVER else [None, Communicator(group.plain, config)]
        for api in communicators:
            caller: Any = dist if api is None else api
            value, part, parted = numbers(rank, dtype), torch.zeros(4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
            caller.reduce_scatter_tensor(part, value, op=op)
            caller.reduce_scatter(parted, list(value.split(4096)), op=op)
            assert same_bits(value, numbers(rank, dtype))
            caller.all_reduce(value, op=op)
            assert same_bits(value, expected)
            assert same_bits(part, expected[half])
            assert same_bits(parted, expected[half])
        pair = [numbers(rank, dtype), numbers(rank, dtype)]
        with dist._coalescing_manager():
            for each in pair:
                dist.all_reduce(each, op=op)
        outs = [torch.zeros(4096, dtype=dtype) for _ in range(2)]
        with dist._coalescing_manager():
            for out in outs:
                dist.reduce_scatter_tensor(out, numbers(rank, dtype), op=op)
        assert all(same_bits(each, expected) for each in pair)
        assert all(same_bits(out, expected[half]) for out in outs)
        assert (group.stats()["all_reduce"].frames > 0) == (config is ALWAYS and dtype == torch.bfloat16)

    run_ranks(run, 2, config=config)


@pytest.mark.parametrize("async_op", [False, True])
def test_uneven_all_gather_that_is_native(async_op: bool) -> None:
    def run(rank: int, world_size: int) -> None:
        outs = [torch.zeros(3 * each, dtype=torch.int64) for each in range(world_size)]
        work = dist.all_gather(outs, torch.full((3 * rank,), rank), async_op=async_op)
        if work is not None:
            work.wait()
        assert [out.tolist() for out in outs] == [[each] * 3 * each for each in range(world_size)]
        assert dist.group.WORLD.stats()["all_gather"].native_calls == 1

    run_ranks(run, 3, config=ALWAYS)


class Recorder:
    """Stands for the inner group of a GPU."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _get_backend(self, device: torch.device) -> Recorder:
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args[1:])) or name


def test_batches_of_messages_between_gpus() -> None:
    """One batch of the inner group, by its calls; batches on a CPU go on as they are."""

    def run(rank: int, world_size: int) -> None:
        group: Any = dist.group.WORLD
        far, near = torch.zeros(4, device="meta"), torch.zeros(4)
        plain, group._plain = group._plain, Recorder()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, far, 1 - rank, tag=3), dist.P2POp(dist.irecv, far, 1 - rank, tag=4)]
        )
        calls, group._plain = group._plain.calls, plain
        assert works == ["_end_coalescing"]
        assert calls == [("_start_coalescing",), ("send", 1 - rank, 3), ("recv", 1 - rank, 4), ("_end_coalescing",)]
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((4,), rank + 1.0), 1 - rank),
                dist.P2POp(dist.irecv, near, 1 - rank),
            ]
        ):
            work.wait()
        assert near.tolist() == [2.0 - rank] * 4

    run_ranks(run, 2, config=ALWAYS)


def test_an_adapters_native_call_gets_nothing_multiplied() -> None:
    """It hands torch's own reduction on, which multiplies."""

    def body(rank: int, world_size: int) -> list[float]:
        communicator = Communicator(dist.group.WORLD, ZipCCLConfig(strategy="never"))
        half, value = dist._make_nccl_premul_sum(0.5), torch.full((8,), 4.0).bfloat16()
        seen: list[float] = []
        native = lambda: seen.append(value[0].item())  # noqa: E731
        communicator.all_reduce(value, half, native=native)
        communicator.all_reduce_coalesced([value], half, native=native)
        communicator.reduce_scatter_tensor(torch.empty(4).bfloat16(), value, half, native=native)
        return seen

    assert run_ranks(body, 2, backend="gloo") == [[4.0] * 3] * 2


def test_by_hand_where_entry_points_are_off() -> None:
    code = (
        "import sys, torch.distributed as dist; from zipccl_core import drop_in; drop_in.install();"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1);"
        "print(type(dist.group.WORLD).__name__, dist.get_backend()); dist.destroy_process_group()"
    )
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=100)
    assert result.stdout.split() == ["ZipCCLProcessGroup", "gloo"], result.stderr
