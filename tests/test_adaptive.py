"""The adaptive strategy: ranks agree whatever each of them measures, choices follow the figures, and bits stay."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from zipccl_core import (
    NATIVE,
    AdaptiveStrategy,
    Call,
    Communicator,
    ConfigError,
    ExponentCodec,
    Operation,
    Plan,
    ZipCCLConfig,
)  # fmt: skip
from zipccl_core.strategy.base import Known
from zipccl_core.strategy.cost import modelled, volume
from zipccl_core.strategy.profile import Estimates, Measurements, Way, load, save
from zipccl_core.strategy.switcher import FIRST_STEP, LAG, SIZES, Sampled, Switcher, forget_profiles
from zipccl_core.testing import run_ranks

BF16 = torch.bfloat16
COMPRESSED = Plan(ExponentCodec())
COLLECTIVES = [operation for operation in Operation if operation != Operation.SEND_RECV]
NOW = Estimates(ratio=1.4, encode_s=1e-10, decode_s=1e-10)


@pytest.fixture(autouse=True)
def _no_profiles() -> None:
    forget_profiles()


def call(operation: Operation, nbytes: int | None, world_size: int = 2) -> Call:
    return Call(operation, BF16, None if nbytes is None else nbytes // 2, world_size, COMPRESSED)


def measured(native: float, raw: float, whole: float, pipelined: float) -> Measurements:
    """Seconds a megabyte, without latency."""
    by_way = dict(zip(Way, (native, raw, whole, pipelined), strict=True))
    seconds = {way: tuple(cost * nbytes / 1e6 for nbytes in SIZES) for way, cost in by_way.items()}
    return Measurements(nbytes=SIZES, seconds=seconds, estimates=NOW)


class Rank:
    """The `Peers` of one simulated rank, whose clock and data say what a test wants."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self.rank, self.world_size, self.name = world, rank, world.size, "simulated"
        self.n_timed = 0

    def nodes(self) -> list[int]:
        return [rank // 2 for rank in range(self.world_size)]

    def gather(self, values: Sequence[float]) -> Callable[[], list[list[float]]]:
        gathered = self._world.put(self.rank, list(values))
        return lambda: self._world.get(gathered)

    def broadcast(self, text: str) -> str:
        return str(self._world.get(self._world.put(self.rank, text))[0])

    def timed(self, operation: Operation, plans: Sequence[Plan], nbytes: int) -> Callable[[int], list[float]]:
        def seconds(rounds: int) -> list[float]:
            self.n_timed += rounds
            return [self._world.seconds(self.rank, operation, plan, nbytes) for plan in list(plans) * rounds]

        return seconds

    def sample(self, plan: Plan, values: torch.Tensor | None) -> Sampled:
        return self._world.sampled(self.rank, values)


class World:
    """Ranks as threads. `seconds` and `sampled` are what a rank measures."""

    def __init__(
        self,
        size: int,
        seconds: Callable[[int, Operation, Plan, int], float],
        sampled: Callable[[int, torch.Tensor | None], Sampled],
    ) -> None:
        self.size, self.seconds, self.sampled = size, seconds, sampled
        self._numbers, self._values = [0] * size, dict[int, dict[int, Any]]()
        self._changed = threading.Condition()

    def put(self, rank: int, value: Any) -> int:
        with self._changed:
            number = self._numbers[rank]
            self._numbers[rank] += 1
            self._values.setdefault(number, {})[rank] = value
            self._changed.notify_all()
        return number

    def get(self, number: int) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._values[number]) == self.size, timeout=30)
            return [self._values[number][rank] for rank in range(self.size)]

    def run(self, work: Callable[[Rank], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def body(rank: int) -> None:
            try:
                results[rank] = work(Rank(self, rank))
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def plans_of(strategy: AdaptiveStrategy, calls: Sequence[Call], peers: Rank) -> list[Plan]:
    switcher, plans = Switcher(strategy, peers), []
    values = torch.ones(8, dtype=BF16)
    for each in calls:
        known, _ = switcher.known(each, (each.numel or 1000 * (peers.rank + 1)) * 2, values)
        plans.append(strategy.choose(each._replace(known=known)))
    return plans


# ---------------------------------------------------------------- what one choice follows from


@pytest.mark.parametrize(
    ("costs", "way"),
    [((1, 2, 2, 2), Way.NATIVE), ((2, 1, 2, 2), Way.RAW), ((2, 2, 1, 2), Way.WHOLE), ((2, 2, 2, 1), Way.PIPELINED),
     ((1, 0.98, 0.98, 0.98), Way.NATIVE)],
)  # fmt: skip
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_the_cheapest_way_is_taken(costs: tuple[float, ...], way: Way, operation: Operation) -> None:
    known = Known(measured(*costs), NOW, 4e6)
    for nbytes in (1 << 20, 100 << 20, None):
        if nbytes is None and operation != Operation.ALL_TO_ALL:
            continue
        plan = AdaptiveStrategy().choose(call(operation, nbytes)._replace(known=known))
        assert (plan == NATIVE) is (way == Way.NATIVE)
        if way == Way.RAW:
            assert plan.codec is not None
            assert plan.codec.id == "raw"
        if way in (Way.WHOLE, Way.PIPELINED):
            assert plan.codec == COMPRESSED.codec
            assert (plan.chunk_numel > 1 << 20) is (way == Way.WHOLE)


def test_small_calls_are_native_and_what_is_not_measured_goes_by_size() -> None:
    strategy = AdaptiveStrategy(min_nbytes=4096, unmeasured_min_nbytes=8192)
    known = Known(measured(2, 2, 1, 2), NOW, 4e6)
    assert strategy.choose(call(Operation.ALL_GATHER, 4094)._replace(known=known)) == NATIVE
    assert strategy.choose(call(Operation.ALL_GATHER, 4096)._replace(known=known)) != NATIVE
    assert strategy.choose(call(Operation.SEND_RECV, 8190)) == NATIVE
    assert strategy.choose(call(Operation.SEND_RECV, 8192)) == COMPRESSED
    assert strategy.choose(call(Operation.ALL_TO_ALL, None)) == COMPRESSED


def test_data_that_compresses_worse_costs_more_and_a_slower_codec_too() -> None:
    strategy, each = AdaptiveStrategy(), call(Operation.ALL_GATHER, 8 << 20)
    for estimates, better in [
        (NOW.model_copy(update={"ratio": 1.0}), Way.NATIVE),
        (NOW.model_copy(update={"encode_s": 1e-6}), Way.NATIVE),
        (NOW.model_copy(update={"ratio": 2.0}), Way.PIPELINED),
    ]:
        known = Known(measured(0.01, 0.01, 0.009, 0.008), estimates, 0)
        assert strategy.way(each._replace(known=known)) == better


@given(
    st.sampled_from(COLLECTIVES), st.integers(2, 64), st.floats(1e3, 1e9), st.floats(1e-11, 1e-7), st.floats(0.9, 3),
    st.floats(1e-12, 1e-8),
)  # fmt: skip
def test_pieces_never_cost_more_than_one(
    operation: Operation, world_size: int, nbytes: float, wire: float, ratio: float, codec: float
) -> None:
    estimates = Estimates(ratio=ratio, encode_s=codec, decode_s=codec)
    arguments = (operation, nbytes, world_size, wire, estimates)
    whole, pipelined = modelled(Way.WHOLE, *arguments), modelled(Way.PIPELINED, *arguments)
    volumes = volume(operation, world_size)
    busiest = max(nbytes * volumes.sent * wire / ratio, nbytes * (volumes.encoded + volumes.decoded) * codec)
    assert busiest * (1 - 1e-9) <= pipelined <= whole * (1 + 1e-9)
    assert whole <= 2 * busiest * (1 + 1e-9)


@pytest.mark.parametrize(
    "wrong",
    [{"nbytes": (200, 100)}, {"nbytes": ()}, {"nbytes": (100,)}, {"seconds": {Way.RAW: (1.0, 2.0)}},
     {"seconds": dict.fromkeys(Way, (1.0, 0.0))}],
)  # fmt: skip
def test_measurements_that_cannot_be(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"nbytes": (100, 200), "seconds": dict.fromkeys(Way, (1.0, 2.0)), "estimates": NOW}
    Measurements(**right)
    with pytest.raises(ValueError, match="validation error"):
        Measurements(**{**right, **wrong})


def test_times_between_measured_sizes_and_beyond() -> None:
    seconds = dict.fromkeys(Way, (1.0, 2.0, 6.0))
    known = Measurements(nbytes=(100, 200, 400), seconds=seconds, estimates=NOW)
    assert [known.at(Way.RAW, nbytes) for nbytes in (50, 100, 150, 300, 400, 600)] == [1.0, 1.0, 1.5, 4.0, 6.0, 10.0]


# ---------------------------------------------------------------- agreement


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_ranks_choose_alike_whatever_each_of_them_measures(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(2, 4))
    times = st.floats(1e-7, 10.0)
    drawn = data.draw(st.lists(times, min_size=40, max_size=40))
    ratios = data.draw(st.lists(st.floats(0.5, 100), min_size=8, max_size=8))
    sizes = data.draw(st.lists(st.sampled_from([16 << 10, 100 << 10, 3 << 20, 40 << 20]), min_size=1, max_size=4))
    operations = data.draw(st.lists(st.sampled_from(COLLECTIVES), min_size=1, max_size=3))
    numbers = [0] * world_size

    def next_of(rank: int, values: list[float]) -> float:
        numbers[rank] += 1
        return values[(numbers[rank] * (rank + 3)) % len(values)]

    forget_profiles()
    world = World(
        world_size,
        lambda rank, *_: next_of(rank, drawn),
        lambda rank, _: Sampled(1000.0, 1000.0 / next_of(rank, ratios), next_of(rank, drawn), next_of(rank, drawn)),
    )
    calls = [
        call(operation, None if operation == Operation.ALL_TO_ALL else nbytes, world_size)
        for _ in range(40)
        for operation in operations
        for nbytes in sizes
    ]
    plans = world.run(lambda peers: plans_of(AdaptiveStrategy(), calls, peers))
    assert all(each == plans[0] for each in plans)


def test_choices_change_at_the_same_call_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Data stop compressing on one rank of three: enough to make compression dearer for all."""
    cost = {"raw": 1.1e-8, "exponent": 0.8e-8}

    def seconds(rank: int, operation: Operation, plan: Plan, nbytes: int) -> float:
        return nbytes * (1e-8 if plan.codec is None else cost[plan.codec.id])

    calls = [call(Operation.ALL_GATHER, 1 << 20, 3)] * 80
    n_samples = [0, 0, 0]

    def sampled(rank: int, values: torch.Tensor | None) -> Sampled:
        n_samples[rank] += 1
        bad = rank == 1 and n_samples[rank] > 4
        return Sampled(1e5, 5e5 if bad else 7e4, 1e-5, 1e-5)

    with caplog.at_level(logging.INFO, "zipccl"):
        plans = World(3, seconds, sampled).run(lambda peers: plans_of(AdaptiveStrategy(), calls, peers))
    assert plans[0] == plans[1] == plans[2]
    natives = [plan == NATIVE for plan in plans[0]]
    assert not any(natives[: FIRST_STEP + LAG])
    assert natives[-1]
    assert natives.index(True) == len(natives) - natives[::-1].index(False), "it changed its mind once"
    told = [record.getMessage() for record in caplog.records if "goes native now" in record.getMessage()]
    assert len(told) == 1
    assert "ratio" in told[0]


def test_figures_near_the_old_ones_change_nothing() -> None:
    """A ratio that goes up and down a little does not make anybody change their mind, wherever the break-even is."""
    n_samples = [0, 0]

    def sampled(rank: int, values: torch.Tensor | None) -> Sampled:
        n_samples[rank] += 1
        return Sampled(1e5, 7e4 * (1 + 0.03 * (-1) ** n_samples[rank]), 1e-5, 1e-5)

    world = World(2, lambda rank, operation, plan, nbytes: nbytes * (1e-8 if plan.codec is None else 0.97e-8), sampled)

    def figures(peers: Rank) -> set[Estimates]:
        switcher = Switcher(AdaptiveStrategy(), peers)
        each, values = call(Operation.ALL_REDUCE, 1 << 20), torch.ones(4, dtype=BF16)
        return {switcher.known(each, 1 << 20, values)[0].estimates for _ in range(200)}

    assert [len(seen) for seen in world.run(figures)] == [1, 1]


def test_all_to_alls_of_mixed_sizes_do_not_flap() -> None:
    """Three large ones for each small one: what all of them are like decides, not the last."""

    def seconds(rank: int, operation: Operation, plan: Plan, nbytes: int) -> float:
        return 1e-4 + nbytes * 1e-8 if plan.codec is None else 1e-3 + nbytes * 0.7e-8

    def work(peers: Rank) -> list[Plan]:
        switcher, strategy, plans = Switcher(AdaptiveStrategy(), peers), AdaptiveStrategy(), []
        each, values = call(Operation.ALL_TO_ALL, None), torch.ones(8, dtype=BF16)
        for number in range(400):
            known, _ = switcher.known(each, (32 << 10) if number % 4 == 0 else (64 << 20), values)
            plans.append(strategy.choose(each._replace(known=known)))
        return plans

    plans, others = World(2, seconds, lambda rank, _v: Sampled(1e5, 7e4, 1e-5, 1e-5)).run(work)
    assert plans == others
    changes = sum(before != after for before, after in itertools.pairwise(plans))
    assert (plans[0], plans[-1], changes) == (NATIVE, plans[-1], 1), "from the small first one to what is typical"
    assert plans[-1] != NATIVE


def test_small_tensors_say_nothing_of_the_codecs_speed() -> None:
    def run(rank: int, world_size: int) -> tuple[float, float]:
        probe = Communicator(dist.group.WORLD)._probe
        values = torch.randn(1 << 20).to(BF16)
        small, large = probe.sample(COMPRESSED, values[:8192]), probe.sample(COMPRESSED, values)
        assert small.nbytes / small.frame_nbytes > 1.3
        assert large.encode_s > 0
        assert large.decode_s > 0
        return small.encode_s, small.decode_s

    assert run_ranks(run, 1, backend="gloo") == [(0.0, 0.0)]


def test_another_configuration_does_not_lose_what_is_under_way() -> None:
    """Figures are gathered from the 8th call on and count from the 12th; in between, both ranks are configured anew."""

    def run(rank: int, world_size: int) -> int:
        communicator = Communicator(dist.group.WORLD, {"strategy": "adaptive"})
        values = torch.ones(20_000, dtype=BF16)
        for _ in range(5):
            for _ in range(9):
                communicator.all_reduce(values)
            communicator.configure(ZipCCLConfig(strategy="adaptive"))
        for _ in range(9):
            communicator.all_reduce(values)
        communicator.close()
        return communicator.stats()["all_reduce"].calls

    assert run_ranks(run, 2, backend="gloo") == [54, 54]


# ---------------------------------------------------------------- profiles


def test_a_profile_in_a_file_is_measured_once_and_is_rank_0s(tmp_path: Path) -> None:
    path = tmp_path / "cluster" / "profile.json"
    strategy = AdaptiveStrategy(profile=str(path))

    def run() -> list[int]:
        forget_profiles()
        world = World(2, lambda rank, _o, plan, nbytes: nbytes * 1e-8, lambda rank, _v: Sampled(1e5, 7e4, 1e-5, 1e-5))

        def work(peers: Rank) -> int:
            plans_of(strategy, [call(Operation.ALL_GATHER, 1 << 20)], peers)
            return peers.n_timed

        return world.run(work)

    assert all(run())
    (kind,) = load(path)
    assert kind.startswith("all_gather fp32 {")
    assert kind.endswith("on nodes 0,0")
    assert run() == [0, 0]
    known = load(path)[kind]
    save(path, {"another": known})
    assert load(path) == {kind: known, "another": known}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that share nothing but the file")
def test_processes_that_save_at_the_same_time_keep_each_others(tmp_path: Path) -> None:
    path, known = tmp_path / "profile.json", measured(1, 1, 1, 1)

    def run(rank: int, world_size: int) -> None:
        for number in range(10):
            save(path, {f"{rank} {number}": known})

    run_ranks(run, 3, backend=None, timeout=60)
    assert len(load(path)) == 30


def test_where_nothing_can_be_saved_nobody_is_left_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 alone would raise."""
    (tmp_path / "file").write_text("")
    strategy = AdaptiveStrategy(profile=str(tmp_path / "file" / "profile.json"))
    world = World(2, lambda rank, _o, plan, nbytes: nbytes * 1e-8, lambda rank, _v: Sampled(1e5, 7e4, 1e-5, 1e-5))
    plans = world.run(lambda peers: plans_of(strategy, [call(Operation.ALL_GATHER, 1 << 20)] * 3, peers))
    assert plans[0] == plans[1]
    assert caplog.text.count("is not kept in") == 1


@pytest.mark.parametrize("text", ['{"exponent 0,0": {"speed": 3}}', "[]", "null", "no JSON"])
def test_a_file_that_is_no_profile_is_an_error_on_all_ranks(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)

    def run(rank: int, world_size: int) -> str:
        with pytest.raises(ConfigError) as caught:
            dist.all_reduce(torch.ones(1 << 20, dtype=BF16))
        return str(caught.value)

    config = ZipCCLConfig(strategy={"id": "adaptive", "profile": str(path)})
    for message in run_ranks(run, 2, config=config, timeout=60):
        assert str(path) in message


# ---------------------------------------------------------------- on real groups


def results(rank: int, world_size: int, numel: int, repeats: int, names: Sequence[str]) -> tuple[list[bytes], Any]:
    """Bits of every result of some operations, and how many calls went natively."""
    generator = torch.Generator().manual_seed(rank)
    values = (torch.randn(numel, generator=generator) * 0.02).to(BF16)
    found: list[bytes] = []

    def all_gather() -> torch.Tensor:
        gathered = torch.empty(world_size * numel, dtype=BF16)
        dist.all_gather_single(gathered, values)
        return gathered

    def reduce_scatter() -> torch.Tensor:
        part = torch.empty(numel // world_size, dtype=BF16)
        dist.reduce_scatter_single(part, values)
        return part

    def all_to_all() -> torch.Tensor:
        exchanged = torch.empty_like(values)
        dist.all_to_all_single(exchanged, values)
        return exchanged

    def all_reduce() -> torch.Tensor:
        reduced = values.clone()
        work = dist.all_reduce(reduced, async_op=True)
        assert work is not None
        work.wait()
        return reduced

    def broadcast() -> torch.Tensor:
        spread = values.clone()
        dist.broadcast(spread, world_size - 1)
        return spread

    calls = [all_gather, reduce_scatter, all_to_all, all_reduce, broadcast]
    for _ in range(repeats):
        for each in calls:
            if each.__name__ in names:
                found.append(each().view(torch.uint8).numpy().tobytes())
    group: Any = dist.group.WORLD
    stats = group.stats() if hasattr(group, "stats") else {}
    return found, {str(operation): stats[operation].native_calls for operation in stats}


@pytest.mark.parametrize(
    ("world_size", "numel", "repeats", "names"),
    [(2, 600_000, 14, COLLECTIVES), (3, 300_000, 6, COLLECTIVES), (16, 64 << 10, 16, ["all_to_all"])],
)
def test_bits_are_the_native_ones_and_ranks_go_the_same_way(
    world_size: int, numel: int, repeats: int, names: Sequence[str]
) -> None:
    numel, names = numel // world_size * world_size, [str(name) for name in names]
    config = ZipCCLConfig(strategy={"id": "adaptive", "measure_s": 0.05}, reduction="gloo")
    native = run_ranks(results, world_size, numel, repeats, names, backend="gloo", timeout=100)
    ours = run_ranks(results, world_size, numel, repeats, names, config=config, timeout=100)
    for (wanted, _), (came, ways) in zip(native, ours, strict=True):
        assert came == wanted
        assert ways == ours[0][1]


def test_what_is_measured_is_logged_and_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int, world_size: int) -> tuple[int, list[str]]:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("zipccl")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        for _ in range(3):
            dist.all_reduce(torch.ones(200_000, dtype=BF16))
        group: Any = dist.group.WORLD
        return group.stats()["all_reduce"].calls, records

    ranks = run_ranks(run, 2, config=ZipCCLConfig(strategy="adaptive"), timeout=60)
    assert [calls for calls, _ in ranks] == [3, 3]
    assert [sum("all_reduce measured in" in record for record in records) for _, records in ranks] == [1, 0]


def test_a_call_without_values_counts_none() -> None:
    """A receiver of a broadcast has none yet."""
    world = World(2, lambda rank, _o, plan, nbytes: nbytes * 1e-8, lambda rank, _v: Sampled(1e5, 5e4, 1e-5, 1e-5))

    def work(peers: Rank) -> float:
        switcher = Switcher(AdaptiveStrategy(), peers)
        values = torch.ones(4, dtype=BF16) if peers.rank == 0 else None
        return switcher.known(call(Operation.BROADCAST, 1 << 20), 1 << 20, values)[0].estimates.ratio

    assert world.run(work) == [2.0, 2.0]
