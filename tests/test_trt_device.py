"""The GPU through PyCUDA and cuda-bindings, beside torch in one process. Needs a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest

from lacache_trt.contract import TensorSpec
from lacache_trt.engines.tensorrt.device import CudaDevice
from lacache_trt.engines.tensorrt.staging import Staging
from lacache_trt.errors import CapacityError, EngineError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("pycuda") is None or find_spec("cuda") is None,
        reason="PyCUDA and cuda-bindings are not installed",
    ),
]
BYTES = 4096


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


def test_a_captured_graph_repeats_its_copies(device: CudaDevice) -> None:
    with device.activated():
        address = device.allocate(BYTES)
        source, target = device.pinned(BYTES), device.pinned(BYTES)

        def body() -> None:
            device.upload(address, source)
            device.download(target, address)

        assert address % 256 == 0
        body()
        device.synchronize()
        graph = device.capture(body)
        event = None
        for value in (7, 8, 9):
            source[...] = value
            device.replay(graph)
            event = device.record(event)
            device.wait(event)
            assert (target == value).all()
        device.destroy(graph)
        device.unpin(source)
        device.unpin(target)
        device.release(address)


def test_a_failed_capture_leaves_the_stream_usable(device: CudaDevice) -> None:
    def body() -> None:
        raise EngineError("on purpose")

    with device.activated():
        with pytest.raises(EngineError, match="on purpose"):
            device.capture(body)
        with pytest.raises(EngineError):
            device.capture(device.synchronize)
        device.synchronize()
        target = device.pinned(16)
        address = device.allocate(16)
        device.load(address, np.arange(16, dtype=np.uint8))
        device.download(target, address)
        device.synchronize()
        assert target.tolist() == list(range(16))


def test_memory_that_is_not_there(device: CudaDevice) -> None:
    with device.activated():
        free = device.free_bytes()
        with pytest.raises(CapacityError, match="cannot allocate"):
            device.allocate(free + 2**34)
        device.release(device.allocate(BYTES))


def current_context() -> int:
    """The driver's current context of this thread; 0 is none."""
    from cuda.bindings import driver

    status, context = driver.cuCtxGetCurrent()
    assert int(status) == 0
    return int(context)


def test_the_context_is_the_one_that_torch_uses(device: CudaDevice) -> None:
    import torch

    torch.zeros(1, device="cuda")
    of_torch = current_context()
    assert of_torch != 0
    with device.activated():
        assert current_context() == of_torch
        with device.activated():
            assert current_context() == of_torch
    assert current_context() == of_torch


def test_a_thread_is_left_as_it_was_found(device: CudaDevice) -> None:
    """Also where nothing was current, and after an error."""
    found: list[int] = []

    def work() -> None:
        found.append(current_context())
        with device.activated():
            inside.append(current_context())
        with pytest.raises(EngineError), device.activated():
            raise EngineError("on purpose")
        found.append(current_context())

    inside: list[int] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [0, 0]
    assert inside[0] != 0


def test_threads_and_torch_share_the_memory(device: CudaDevice) -> None:
    import torch

    tensor = torch.arange(16, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    found: list[list[int]] = []

    def work() -> None:
        with device.activated():
            target = device.pinned(16)
            device.download(target, tensor.data_ptr())
            device.synchronize()
            found.append(target.tolist())
            device.unpin(target)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(range(16))] * 4
    assert int((tensor + 1).sum()) == 136


def test_kernels_of_others_are_captured_with_our_copies(device: CudaDevice) -> None:
    """As TensorRT does it: work enqueued on the stream's handle becomes part of the graph."""
    import torch

    kernels = torch.cuda.ExternalStream(device.stream)
    values = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
    doubled = torch.zeros_like(values)
    torch.cuda.synchronize()
    with device.activated():
        source, target = device.pinned(BYTES), device.pinned(BYTES)

        def body() -> None:
            device.upload(values.data_ptr(), source)
            with torch.cuda.stream(kernels):
                torch.add(values, values, out=doubled)
            device.download(target, doubled.data_ptr())

        body()
        device.synchronize()
        graph = device.capture(body)
        for value in (3, 50, 100):
            source[...] = value
            device.replay(graph)
            device.wait(device.record())
            assert (target == 2 * value).all()
        device.destroy(graph)


def test_a_capture_is_not_disturbed_by_other_threads(device: CudaDevice) -> None:
    """Torch allocates and computes on the legacy stream while this thread captures."""
    import torch

    def meanwhile() -> None:
        large = torch.ones(2**24, device="cuda")
        sums.append(float(large.sum()))
        del large
        torch.cuda.empty_cache()

    sums: list[float] = []
    torch.zeros(1, device="cuda")
    with device.activated():
        address = device.allocate(BYTES)
        source, target = device.pinned(BYTES), device.pinned(BYTES)

        def body() -> None:
            device.upload(address, source)
            thread = threading.Thread(target=meanwhile)
            thread.start()
            thread.join()
            device.download(target, address)

        graph = device.capture(body)
        source[...] = 5
        device.replay(graph)
        device.synchronize()
        assert (target == 5).all()
    assert sums == [2.0**24]


def test_an_event_waits_for_what_was_enqueued_before_it(device: CudaDevice) -> None:
    import torch

    kernels = torch.cuda.ExternalStream(device.stream)
    flag = torch.zeros(16, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with device.activated():
        target = device.pinned(16)
        with torch.cuda.stream(kernels):
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
            flag.fill_(9)
        device.download(target, flag.data_ptr())
        event = device.record()
        assert not (target == 9).all()
        device.wait(event)
        assert (target == 9).all()
        assert device.record(event) is event


def test_staged_tensors_travel_in_one_captured_copy(device: CudaDevice) -> None:
    specs = (
        TensorSpec("tokens", ("B", "N"), "int32"),
        TensorSpec("temperature", ("B",), "float32"),
        TensorSpec("logit_columns", ("B", "R"), "int32"),
    )
    sizes = {"B": 2, "N": 100, "R": 0}
    with device.activated():
        staging, back = (Staging(device, specs, sizes) for _ in range(2))
        assert all(address % 256 == 0 for address in staging.addresses.values())

        def body() -> None:
            staging.upload()
            device.download(back._host, staging._base)

        body()
        device.synchronize()
        graph = device.capture(body)
        for seed in range(3):
            generator = np.random.default_rng(seed)
            values = {
                "tokens": generator.integers(0, 1000, (2, 100)).astype(np.int32),
                "temperature": generator.random(2).astype(np.float32),
                "logit_columns": np.zeros((2, 0), np.int32),
            }
            staging.write(values)
            back.write({name: np.zeros_like(value) for name, value in values.items()})
            device.replay(graph)
            device.synchronize()
            for name, value in values.items():
                np.testing.assert_array_equal(back.arrays[name], value)
        device.destroy(graph)
        for each in (staging, back):
            each.release()


def test_torch_goes_on_after_a_device_is_closed() -> None:
    import torch

    tensor = torch.arange(4, device="cuda")
    for _ in range(3):
        device = CudaDevice()
        with device.activated():
            device.allocate(BYTES)
            device.capture(lambda: None)
        device.close()
        assert int(tensor.sum()) == 6
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor += 1
    graph.replay()
    assert tensor.tolist() == [1, 2, 3, 4]


BEFORE = {"alone": "", "torch-first": "import torch; torch.zeros(1, device='cuda')\n"}
AFTER = {"closed": "device.close()", "left-open": "pass", "torch-last": "torch.zeros(1).cuda()"}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("after", AFTER)
def test_the_process_ends_cleanly(before: str, after: str) -> None:
    script = (
        f"{BEFORE[before]}"
        "from lacache_trt.engines.tensorrt.device import CudaDevice\n"
        "device = CudaDevice()\n"
        "with device.activated():\n"
        "    device.allocate(4096); device.pinned(64); event = device.record()\n"
        "    graph = device.capture(lambda: None)\n"
        f"{'import torch; ' if after == 'torch-last' else ''}{AFTER[after]}\n"
        "print('end')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr
    assert "clean" not in result.stderr
