"""The GPU through PyCUDA and cuda-bindings, beside torch in one process. Needs a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest

from lacache_trt.engines.tensorrt.device import CudaDevice
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


def test_threads_and_torch_share_the_context(device: CudaDevice) -> None:
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


@pytest.mark.parametrize("closed", ["device.close()", "pass"], ids=["closed", "left-open"])
def test_the_process_ends_cleanly(closed: str) -> None:
    script = (
        "from lacache_trt.engines.tensorrt.device import CudaDevice\n"
        "device = CudaDevice()\n"
        "with device.activated():\n"
        "    device.allocate(4096); device.pinned(64); device.record()\n"
        f"{closed}\n"
        "print('end')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr
    assert "clean" not in result.stderr
