"""The CUDA kernels through PyCUDA: real PyCUDA over a stand-in driver (tests/fakecuda), on tensors of the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fakecuda import harness
from fakecuda.cases import (
    PER_BLOCK,
    buffers_for,
    check,
    check_reduce,
    gaussian,
    load,
    noise,
    reference,
    same,
    some_tensors,
    split,
)

from zipccl_core import ExponentCodec, compress
from zipccl_core.codec.reduction import Reduction
from zipccl_core.kernels import OVERFLOW, FrameKernels, Split, Window, compiler, cuda
from zipccl_core.kernels.jobs import static_frame_nbytes
from zipccl_core.kernels.streams import TorchStreams

REASON = harness.reason_to_skip()
needs_pycuda = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TABLE = (120, 119, 121, 118, 122, 0, 255)


@needs_pycuda
@pytest.mark.parametrize("variant", compiler.VARIANTS)
def test_bytes_are_the_references(variant: str) -> None:
    def child() -> None:
        kernels, streams = load(variant)
        assert isinstance(kernels, FrameKernels)
        assert cuda.load(0, variant=variant) is kernels
        assert cuda.unavailable(0) is None
        for stream in (harness.Stream(0, 0), harness.Stream(0), cuda.new_stream(0)):
            streams.set(stream)
            check(kernels, some_tensors())
        check(kernels, some_tensors(), Window(table=TABLE))
        check(kernels, [gaussian(70_000)])  # a larger state
        check(kernels, [gaussian(17 * i, i) for i in range(150)])
        check_reduce(kernels, 3, 9000, average=True)
        check_reduce(kernels, 2, 0, average=False)
        check_reduce(kernels, 130, 700, average=True, own=65)

    harness.run(child)


@needs_pycuda
def test_a_base_for_all_blocks() -> None:
    def child() -> None:
        kernels, _ = load()
        codec, tensor = ExponentCodec(sigma=0.02, kernels="reference"), gaussian(3000)
        (buffer,) = buffers_for([tensor])
        kernels.encode_frames([tensor], [buffer], codec._window)
        frame = compress(tensor, codec)
        assert torch.equal(buffer[: frame.numel()], frame)

    harness.run(child)


@needs_pycuda
def test_a_sum_in_place() -> None:
    def child() -> None:
        kernels, _ = load()
        values = [gaussian(5000, seed) for seed in range(3)]
        wanted = torch.empty_like(values[0])
        Reduction("fp32", False, 5000, 0).reduce(values, wanted)
        out = values[1].clone()
        kernels.decode_reduce([split(reference(values[0]), 5000), out, values[2]], out, 1)
        assert same(out, wanted)

    harness.run(child)


@needs_pycuda
def test_frames_that_are_not_whole_and_damaged_ones() -> None:
    def child() -> None:
        kernels, _ = load()
        tensors = [gaussian(20_000, 1), gaussian(20_000, 2), noise(4000), gaussian(20_000, 3)]
        frames = [reference(tensor) for tensor in tensors]
        parts = [split(frames[0], 20_000), split(frames[1], 20_000, 128), split(frames[2], 4000, 0)]
        frames[3][130] ^= 1  # an offset
        parts.append(split(frames[3], 20_000))
        status = kernels.decode_frames(parts, [torch.empty_like(tensor) for tensor in tensors]).tolist()
        assert status[:3] == [0, OVERFLOW, OVERFLOW]
        assert status[3] not in (0, OVERFLOW)
        assert "offsets of escapes" in kernels.explain(status[3])
        total = kernels.decode_reduce([parts[0], parts[1], tensors[3]], torch.empty(20_000, dtype=torch.bfloat16), 1)
        assert total.tolist() == [0, OVERFLOW, 0]

    harness.run(child)


@needs_pycuda
def test_statuses_that_are_read_late() -> None:
    """They are pieces of memory that is cleared once for thousands of them."""

    def child() -> None:
        kernels, _ = load()
        tensor = gaussian(3000)
        good, bad = (split(reference(tensor), 3000) for _ in range(2))
        bad.static[128 + 128 + 1] = 7
        out = torch.empty_like(tensor)
        statuses = [kernels.decode_frames([bad if i % 7 == 0 else good], [out]) for i in range(60)]
        statuses += [kernels.decode_frames([good] * n, [out] * n) for n in (4000, 100, 5000)]
        for i, status in enumerate(statuses):
            assert bool(status.any()) is (i < 60 and i % 7 == 0)

    harness.run(child)


@needs_pycuda
def test_each_status_is_its_frames_own() -> None:
    """Also behind the first launch."""

    def child() -> None:
        kernels, _ = load()
        tensor = gaussian(2000)
        good, bad = reference(tensor), reference(tensor)
        bad[0] ^= 0xFF
        parts = [split(bad if i in (1, 64, 100) else good, 2000) for i in range(130)]
        expected = [1 if i in (1, 64, 100) else 0 for i in range(130)]
        assert kernels.decode_frames(parts, [torch.empty_like(tensor) for _ in parts]).tolist() == expected
        assert kernels.decode_reduce(parts, torch.empty_like(tensor), 1).tolist() == expected

    harness.run(child)


@needs_pycuda
@pytest.mark.parametrize(
    ("variant", "grid"), [("registers", 13 + 1 + 2), ("ballot", 13 + 1 + 2), ("cp_async", 4 + 1 + 1)]
)
def test_thread_blocks(tmp_path: Path, variant: str, grid: int) -> None:
    def child() -> None:
        kernels, _ = load(variant)
        check(kernels, [gaussian(100_000), gaussian(0), gaussian(8193)])

    harness.run(child, FAKECUDA_LOG=str(tmp_path / "log"))
    grids = {
        line.split()[2]: int(line.split()[4])
        for line in (tmp_path / "log").read_text().splitlines()
        if " launch " in line
    }
    assert grids["zipccl_exponent_encode"] == grids["zipccl_exponent_decode"] == grid


def test_what_a_status_says() -> None:
    assert cuda.explain(0) == "nothing is wrong"
    assert cuda.explain(8 | OVERFLOW) == "a block has an unknown mode; not all of the dynamic part is there"
    assert cuda.explain(1 << 12) == "unknown status 0x1000"


@needs_pycuda
def test_memory_that_kernels_must_not_touch() -> None:
    def child() -> None:
        kernels, _ = load()
        tensor = gaussian(1000)
        (buffer,) = buffers_for([tensor])
        encode = lambda tensor, buffer: kernels.encode_frames([tensor], [buffer], PER_BLOCK)  # noqa: E731
        decode = lambda frame, out: kernels.decode_frames([split(frame, 1000)], [out])  # noqa: E731
        for mistake, text in (
            (lambda: encode(tensor, buffer[:-1]), "a frame has 2175 bytes of memory, it needs 2176"),
            (lambda: encode(tensor.float(), buffer), "values must be 16-bit and contiguous, not torch.float32"),
            (lambda: encode(gaussian(2000)[::2], buffer), "contiguous"),
            (lambda: encode(tensor, torch.empty(3000, dtype=torch.uint8)[1:]), "begin at a multiple of 8"),
            (lambda: decode(buffer[:200], tensor), "a frame has 200 bytes of memory"),
            (lambda: kernels.decode_reduce([tensor, gaussian(999)], tensor, 1), "a part has 999 values, the sum 1000"),
            (lambda: kernels.decode_reduce([tensor], tensor.half(), 1), "bfloat16 or float32"),
            (lambda: kernels.encode_frames([], [], PER_BLOCK), "no tensors"),
            (lambda: kernels.decode_frames([], []), "no tensors"),
        ):
            with pytest.raises(ValueError, match=text):
                mistake()
        assert harness.current_context() is None

    harness.run(child)


@needs_pycuda
def test_inference_mode_and_kept_memory() -> None:
    def child() -> None:
        kernels, _ = load()
        with torch.inference_mode():
            check(kernels, [gaussian(3000)])
        check(kernels, [gaussian(3000)])
        assert not any(state.is_inference() for state in kernels._device._states.values())

    harness.run(child)


# ---- streams ----


def test_torchs_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a stream is being captured, torch tells only of the current device's."""
    devices = [0]

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        devices.append(wanted.index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: devices[-1] == 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"{handle} on {device}")
    streams = [TorchStreams(0), TorchStreams(1)]
    assert [each.capturing() for each in streams] == [False, True]
    assert streams[1].current() == "current of cuda:1"
    assert streams[1].external(7) == "7 on cuda:1"


def produce_encode_consume(streams: harness.Streams, kernels: cuda.CudaKernels, stream: harness.Stream) -> bool:
    """Everything in the order of one stream of torch's: values come, become a frame, which is copied; values are
    overwritten, decoded, and copied. Whether all of it is right, and it took the encoder's memory in turn."""
    streams.set(stream)
    tensor, garbage = gaussian(9000), noise(9000)
    values, (buffer,), out = garbage.clone(), buffers_for([tensor]), torch.zeros_like(tensor)
    frame, result, at = torch.zeros_like(buffer), torch.zeros_like(tensor), static_frame_nbytes(9000)
    copied, zeros = torch.zeros(1, dtype=torch.int64), torch.zeros_like(buffer)
    kept = []  # on a device, torch frees memory in the order of the stream; here at once, before queues have run
    for _ in range(2):
        stream.copy(values, tensor)
        sizes = kernels.encode_frames([values], [buffer], PER_BLOCK)
        stream.copy(copied, sizes)
        stream.copy(values, garbage)
        stream.copy(frame, buffer)
        status = kernels.decode_frames([Split(buffer[:at], buffer[at:])], [out])
        stream.copy(result, out)
        stream.copy(buffer, zeros)
        stream.copy(out, garbage)
        kept += [sizes, status]
    stream.synchronize()
    wanted = reference(tensor)
    good = torch.equal(frame[: wanted.numel()], wanted) and same(result, tensor) and status.tolist() == [0]
    return good and copied.tolist() == [int(wanted[40:48].view(torch.int64))]


@needs_pycuda
@pytest.mark.parametrize("defer", ["first", "last"])
def test_launches_are_in_the_order_of_the_current_stream(defer: str) -> None:
    """Streams run late, in the worst order that their events allow."""

    def child() -> None:
        kernels, streams = load()
        for stream in (harness.Stream(0), cuda.new_stream(0), harness.Stream(0, 0), harness.Stream(0)):
            assert produce_encode_consume(streams, kernels, stream)

    harness.run(child, FAKECUDA_DEFER=defer)


@needs_pycuda
@pytest.mark.parametrize(("defer", "forgets"), [("first", "companion"), ("last", "current")])
def test_a_forgotten_event_would_be_noticed(defer: str, forgets: str) -> None:
    """The test above can fail: the companion does not wait for the stream, or the stream not for the companion."""

    def child() -> None:
        kernels, streams = load()
        stream = harness.Stream(0)
        wait = harness.Stream.wait_stream

        def forgetful(self: harness.Stream, other: harness.Stream) -> None:
            if (self.cuda_stream == stream.cuda_stream) != (forgets == "current"):
                wait(self, other)

        harness.Stream.wait_stream = forgetful
        assert not produce_encode_consume(streams, kernels, stream)

    harness.run(child, FAKECUDA_DEFER=defer)


@needs_pycuda
def test_what_is_enqueued(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def lines(name: str) -> list[list[str]]:
        words = [line.split()[1:] for line in log.read_text().splitlines()]
        return [line for line in words if line[0] == name]

    def child() -> None:
        kernels, streams = load()
        tensor = gaussian(9000)
        (buffer,) = buffers_for([tensor])

        def enqueued(stream: harness.Stream) -> str:
            streams.set(stream)
            log.write_text("")
            kernels.encode_frames([tensor], [buffer], PER_BLOCK)
            return " ".join(
                line.split()[1] for line in log.read_text().splitlines() if line.split()[1] not in ("push", "pop")
            )

        on_companion = "record wait launch launch record wait"
        stream = harness.Stream(0)
        assert enqueued(stream).endswith(on_companion)
        assert enqueued(stream) == on_companion
        companion = lines("launch")[0][5]
        assert int(companion, 16) not in (0, stream.cuda_stream)
        assert enqueued(harness.Stream(0)).endswith(on_companion)
        assert lines("launch")[0][5] != companion
        assert enqueued(harness.Stream(0, 0)) == "launch launch"
        assert {line[5] for line in lines("launch")} == {"(nil)"}
        own = cuda.new_stream(0)
        assert enqueued(own) == "launch launch"
        assert {int(line[5], 16) for line in lines("launch")} == {own.cuda_stream}
        assert [line[1] for line in lines("launch")] == ["zipccl_exponent_encode", "zipccl_exponent_raw"]

    harness.run(child, FAKECUDA_LOG=str(log))


@needs_pycuda
def test_the_encoders_memory() -> None:
    """One state a stream, kept and grown; a graph has its own for each launch."""

    def child() -> None:
        kernels, streams = load()
        states = kernels._device._states
        check(kernels, [gaussian(100)])
        (small,) = states.values()
        check(kernels, [gaussian(100)])
        assert states[0] is small
        check(kernels, [gaussian(10)] * 5000)
        assert states[0] is small  # 64 jobs a launch
        streams.set(harness.Stream(0))
        check(kernels, [gaussian(100)])
        assert len(states) == 2
        seen = []
        launch = kernels._device.launch

        def spy(current: harness.Stream, launches: list) -> None:
            seen.extend(arguments[3] for function, _, arguments in launches if function is kernels._encode)
            launch(current, launches)

        kernels._device.launch = spy
        streams.is_capturing = True
        check(kernels, [gaussian(100)])
        check(kernels, [gaussian(9000)])
        streams.is_capturing = False
        check(kernels, [gaussian(100)])
        kept = [state.data_ptr() for state in states.values()]
        assert len(states) == 2
        assert [address in kept for address in seen] == [False, False, True]
        cuda._SMALLEST_STATE = 2
        states.clear()
        for numel in (100, 9000, 100_000, 100):
            check(kernels, [gaussian(numel)])
        assert next(iter(states.values())).numel() == 2 * (1 + 13)

    harness.run(child)


@needs_pycuda
def test_threads_with_streams_of_their_own() -> None:
    def child() -> None:
        kernels, streams = load()
        streams_of_torch = [harness.Stream(0), harness.Stream(0), cuda.new_stream(0), harness.Stream(0)]
        streams_of_torch[3] = streams_of_torch[0]  # two threads in one stream
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                streams.set(streams_of_torch[number])
                for seed in range(6):
                    tensor = gaussian(3000 + 5000 * seed, number)
                    (buffer,) = buffers_for([tensor])
                    sizes = kernels.encode_frames([tensor], [buffer], PER_BLOCK)
                    wanted, out = reference(tensor), torch.zeros_like(tensor)
                    streams.current().synchronize()
                    assert torch.equal(buffer[: wanted.numel()], wanted)
                    assert sizes.tolist() == [int(wanted[40:48].view(torch.int64))]
                    frame = split(wanted, tensor.numel())
                    status = kernels.decode_frames([frame], [out])
                    streams.current().synchronize()
                    assert same(out, tensor)
                    assert status.tolist() == [0]
                assert harness.current_context() is None
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    harness.run(child, FAKECUDA_DEFER="first")


@needs_pycuda
def test_threads_that_load_at_the_same_time(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def child() -> None:
        cuda.streams_of = harness.Streams
        loaded: list[cuda.CudaKernels] = []
        threads = [threading.Thread(target=lambda: loaded.append(cuda.load(0))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(loaded) == 4
        assert len(set(map(id, loaded))) == 1

    harness.run(child, FAKENVCC_LOG=str(log), ZIPCCL_CACHE_DIR=str(tmp_path / "cache"))
    assert len(log.read_text().splitlines()) == 1


@needs_pycuda
def test_several_devices_and_whoever_s_context(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def child() -> None:
        kernels = [load(index=index)[0] for index in (0, 1)]
        assert kernels[0] is not kernels[1]
        import pycuda.driver as driver

        for made_current in (None, 0, 1):
            before = harness.current_context()
            if made_current is not None:  # as torch does, without asking anybody
                harness.call("cuCtxSetCurrent", harness.primary_context(made_current))
                before = harness.primary_context(made_current).value
            for each in kernels:
                check(each, [gaussian(2000)])
                assert harness.current_context() == before
        with pytest.raises(driver.Error):
            kernels[0]._device.launch(harness.Stream(0, 0), [(kernels[0]._decode, 0, (bytes(3080), 0))])
        assert harness.current_context() == before
        assert driver.Context.get_current() is None  # PyCUDA's own stack

    harness.run(child, FAKECUDA_LOG=str(log))
    devices = {line.split()[-1] for line in log.read_text().splitlines() if " launch " in line}
    assert devices == {"0", "1"}


@needs_pycuda
def test_a_failed_launch_leaves_everything_in_order(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def child() -> None:
        kernels, streams = load()
        import pycuda.driver as driver

        streams.set(harness.Stream(0))
        check(kernels, [gaussian(1000)])
        log.write_text("")
        with pytest.raises(driver.Error, match="cuLaunchKernel failed"):  # an empty grid
            kernels._device.launch(streams.current(), [(kernels._decode, 0, (bytes(3080), 0))])
        assert [line.split()[1] for line in log.read_text().splitlines()] == [
            *("push", "record", "pop", "push", "wait", "pop"),  # the companion waits
            *("push", "pop"),
            *("push", "record", "pop", "push", "wait", "pop"),  # and is waited for
        ]
        assert harness.current_context() is None
        check(kernels, [gaussian(1000)])

    harness.run(child, FAKECUDA_LOG=str(log))


@needs_pycuda
def test_what_goes_wrong_in_a_kernel_is_told() -> None:
    """The simulator's own findings arrive as a driver's errors do."""

    def child() -> None:
        kernels, _ = load()
        import pycuda.driver as driver

        with pytest.raises(driver.Error, match="zipccl_exponent_decode: .* multiple of 32"), kernels._device.active():
            kernels._decode.prepared_async_call((1, 1), (33, 1, 1), None, bytes(3080), 0)
        assert harness.current_context() is None

    harness.run(child)
