"""Device path: how the collectives of a group run on a device: on a communication stream, ordered by events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from zipccl_core.codec.frame import HEADER_NBYTES, align
from zipccl_core.collective.work import NO_TIMEOUT, ZipCCLWork, in_mode_of_caller
from zipccl_core.errors import ZipCCLError

if TYPE_CHECKING:
    from torch import Tensor

    from zipccl_core.collective.device import Device, Event
    from zipccl_core.collective.exchange import Exchange, Verdict
    from zipccl_core.collective.mover import Mover
    from zipccl_core.collective.wire import Wire
    from zipccl_core.collective.worker import Worker


Steps = Sequence[Callable[[], None]]


class DevicePath:
    """The calls of one group on one device.

    All steps of a call are put on one stream of the group's own: it waits for the caller's stream, then encodes, lets
    the bytes move, and decodes; `Work.wait` lets the stream of whoever waits wait for the end of that. The host reads
    the sizes of dynamic parts where they are needed, and nothing else:

    - exact sizes: between the two movements of an exchange. A call with `async_op=True` does so on the group's worker.
    - capped sizes: when the call is waited for, or before the next call of the group, whichever comes first; so the
      order of all movements is the same on all ranks, also where something did not fit and has to follow.
    """

    def __init__(self, device: Device, mover: Mover) -> None:
        self.device, self.mover = device, mover
        self._stream: Any = None
        self._unsettled: DeviceCall | None = None
        self._under_way: list[DeviceCall] = []
        self._lock = threading.RLock()

    @property
    def stream(self) -> Any:
        """The communication stream, made when it is first used."""
        if self._stream is None:
            self._stream = self.device.new_stream()
        return self._stream

    def run(self, call: DeviceCall, result: list[Tensor], worker: Worker, in_background: bool) -> DeviceWork:
        """Starts a call.

        Args:
            call: a new one.
            result: of the work.
            worker: of the group.
            in_background: the host may not wait here; if starting the call would let it, the worker starts it.
        """
        work = DeviceWork(result, call)
        if in_background and (call.cap is None or self.mover.blocks):

            def start_and_settle() -> None:
                self.settle()
                call.start()
                call.settle()

            worker.submit(start_and_settle, [], work)
            return work

        def start() -> None:
            self.settle()
            call.start()
            self._unsettled = call

        worker.run(start)
        work.complete()
        return work

    def close(self) -> None:
        """No more calls will come."""
        self.settle()
        self.mover.close()

    def settle(self) -> None:
        """Brings what did not fit in the last call, if that is not done yet."""
        with self._lock:
            call, self._unsettled = self._unsettled, None
        if call is not None:
            call.settle()

    def keep(self, call: DeviceCall) -> None:
        """Keeps a call until the device has carried it out, whoever drops it.

        Raises:
            WireFormatError: an earlier one met a damaged frame, which nobody has been told yet.
        """
        with self._lock:
            over = [other for other in self._under_way if other.is_over()]
            self._under_way = [other for other in self._under_way if other not in over]
            self._under_way.append(call)
        for other in over:
            other.check()

    def forget(self, call: DeviceCall) -> None:
        """It will not be carried out."""
        with self._lock:
            self._under_way.remove(call)


class DeviceCall:
    """One call on its way. The stream on which it is made is the caller's: what is there so far comes first.

    Args:
        path: of the group, on the device.
        exchanges: makes them, and the memory that they need, on the communication stream.
        before, after: steps before the first and after the last exchange.
        tensors: what the steps use, kept until they have.
        cap: of the call's link.
        wire: for the counters.
        name: of the call, for messages.
    """

    def __init__(
        self,
        path: DevicePath,
        exchanges: Callable[[], Sequence[Exchange]],
        before: Steps,
        after: Steps,
        tensors: Sequence[Tensor],
        cap: float | None,
        wire: Wire,
        name: str,
    ) -> None:
        self._path, self._device, self._make, self.cap, self._name = path, path.device, exchanges, cap, name
        self._before, self._after, self._tensors, self._wire = before, after, list(tensors), wire
        self._caller = self._device.current()
        self._ready = self._device.record()  # on the caller's stream: the input is there
        self._exchanges: Sequence[Exchange] = ()
        self._verdicts: list[Verdict] = []
        self._settled = False
        self._lock = threading.Lock()
        self._done: Event | None = None

    def start(self) -> None:
        """Puts everything on the communication stream. With exact sizes the host waits for the first movement."""
        self._path.keep(self)
        try:
            with self._named():
                self._start()
        except BaseException:
            self._path.forget(self)
            self._wire.close()
            raise

    def _start(self) -> None:
        device = self._device
        with device.on(self._path.stream), torch.no_grad():
            device.wait(self._ready)
            for step in self._before:
                device.enqueue(step)
            self._exchanges = self._make()
            del self._make, self._before  # they hold the caller's tensors
            for exchange in self._exchanges:
                exchange.begin()
                if self.cap is None and exchange.lacks():
                    exchange.complete()
                exchange.deliver()
                if self.cap is not None and exchange.settles_first and exchange.lacks():
                    exchange.complete()
                    exchange.deliver()
            self._end()

    def _end(self) -> None:
        for step in self._after:
            self._device.enqueue(step)
        self._done = self._device.record()
        self._verdicts = [exchange.verdict for exchange in self._exchanges if exchange.verdict is not None]

    def settle(self) -> None:
        """With capped sizes: blocks the host until it knows whether all has arrived, and else brings the rest."""
        with self._lock:
            if self._settled:
                return
            self._settled = True
            try:
                with self._named():
                    if self.cap is not None:
                        self._bring_the_rest()
                self._count()
            finally:
                self._wire.close()

    def _bring_the_rest(self) -> None:
        device = self._device
        incomplete = [one for one in self._exchanges if one.lacks() and not one.settles_first]
        if not incomplete:
            return
        with device.on(self._path.stream), torch.no_grad():
            for exchange in incomplete:
                exchange.complete()
                exchange.deliver()
            self._end()

    def finish(self) -> None:
        """Lets the current stream wait for the output."""
        self.settle()
        assert self._done is not None
        self._device.wait(self._done)
        if self.cap is not None or self._done.done():
            self.check()
        if self._device.current() == self._caller:
            # Whatever reuses the memory comes behind the wait. On another stream it would not: then it is kept longer.
            self._tensors, self._exchanges, self._after = [], (), ()

    def check(self) -> None:
        """Raises what the device found wrong with frames."""
        with self._named():
            for verdict in self._verdicts:
                verdict.check()

    def is_over(self) -> bool:
        """Whether the device has carried it out."""
        return self._settled and self._done is not None and self._done.done()

    def synchronize(self) -> None:
        """Blocks the host until it has."""
        self.settle()
        assert self._done is not None
        self._done.synchronize()
        self.check()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ZipCCLError as error:
            raise type(error)(f"{self._name}: {error}") from error

    def _count(self) -> None:
        count = self._wire.count
        for exchange in self._exchanges:
            for one, size, n_peers in exchange.sent:
                raw_nbytes = one.values.numel() * one.values.element_size()
                raw = size >= raw_nbytes - align(one.layout.static_nbytes)  # as many as a RAW frame has
                wire_nbytes = exchange.wire_nbytes(one, size)
                used = HEADER_NBYTES + (raw_nbytes if raw else one.layout.static_nbytes + size)
                count(frames=1, raw_frames=int(raw), escapes=0 if raw else size)
                count(
                    raw_nbytes=n_peers * raw_nbytes,
                    wire_nbytes=n_peers * wire_nbytes,
                    padding_nbytes=n_peers * max(0, wire_nbytes - used),
                )


class DeviceWork(ZipCCLWork):
    """A call on a device. `wait` means what it means natively on a GPU: the current stream waits, and the host goes on
    as soon as the call's steps are on their way, and with capped sizes as soon as they are known to have arrived."""

    def __init__(self, result: list[Tensor], call: DeviceCall) -> None:
        super().__init__(result)
        self._call = call

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Lets the current stream wait for the output."""
        super().wait(timeout)
        self._call.finish()
        return True

    def is_completed(self) -> bool:
        """Whether the device has carried it out."""
        return super().is_completed() and (self._error is not None or self._call.is_over())

    def _resolve(self, future: torch.futures.Future[Any]) -> None:
        """When the output is there, for the host too: whoever takes it from a future knows of no stream."""

        def resolve() -> None:
            if self._error is None:
                try:
                    self._call.synchronize()
                except Exception as error:  # raised by the future
                    self._error = error
            super(DeviceWork, self)._resolve(future)

        threading.Thread(target=in_mode_of_caller(resolve), name="zipccl-future", daemon=True).start()
