"""Counters, tables and flat floats."""

from __future__ import annotations

import threading

import pytest

from zipccl_core import Statistics


def filled() -> Statistics:
    statistics = Statistics()
    statistics.add("all_gather", calls=2, raw_nbytes=3000, wire_nbytes=2000, frames=4, escapes=17, encode_s=0.5)
    statistics.add("broadcast", calls=1, native_calls=1, native_nbytes=10)
    return statistics


def test_counters_and_ratio() -> None:
    statistics = filled()
    assert statistics["all_gather"].ratio == 1.5
    assert statistics["broadcast"].ratio == 1.0
    assert statistics["all_reduce"].calls == 0
    assert [str(operation) for operation in statistics] == ["all_gather", "broadcast"]
    with pytest.raises(ValueError, match="all_gathr"):
        statistics["all_gathr"]


def test_flat_floats() -> None:
    flat = filled().flat()
    assert flat["zipccl/all_gather/ratio"] == 1.5
    assert flat["zipccl/broadcast/native_calls"] == 1.0
    assert all(isinstance(value, float) for value in flat.values())
    assert "comm/all_gather/ratio" in filled().flat("comm")


def test_table() -> None:
    lines = filled().table().splitlines()
    assert lines[0].split()[:2] == ["operation", "calls"]
    assert "1.500" in lines[1]
    assert lines[2].split()[:4] == ["broadcast", "1", "1", "0.00"]
    assert len({len(line) for line in lines}) == 1
    assert str(filled()) == filled().table()


def test_sum() -> None:
    total = Statistics.sum([filled(), filled(), Statistics()])
    assert total["all_gather"].raw_nbytes == 6000
    assert total["all_gather"].ratio == 1.5


def test_threads_lose_nothing() -> None:
    statistics = Statistics()

    def add() -> None:
        for _ in range(2000):
            statistics.add("all_reduce", calls=1, raw_nbytes=2)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statistics["all_reduce"].calls == 8000
    assert statistics["all_reduce"].raw_nbytes == 16_000
