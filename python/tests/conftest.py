"""Devices for the tests: the host, and a simulated GPU of `crates/pinpool-sim`, which
`PINPOOL_TEST_SIM` names."""

import ctypes
import gc
import os
import signal
import time

import pytest

SIM = os.environ.get("PINPOOL_TEST_SIM", "")
if SIM:
    os.environ["PINPOOL_LIBCUDA"] = SIM

import pinpool  # noqa: E402

# A shell starts a job in the background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

MIB = 1 << 20


def until(so, seconds=20):
    """Waits until it is so; no test asserts how long that takes."""
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, "never"
        time.sleep(0.001)


def in_use(pool):
    stats = pool.stats()
    return stats["checked_out_bytes"] + stats["in_flight_bytes"]


@pytest.fixture(params=["host", "cuda:0"])
def device(request):
    if request.param != "host" and not SIM:
        pytest.skip("PINPOOL_TEST_SIM names no simulation")
    return request.param


@pytest.fixture
def pool(device):
    """All of its memory has come back at the end."""
    with pinpool.Pool(device, 8 * MIB, allow_unpinned=True) as made:
        yield made
        # An exception that was caught has the test's frame, and with it the buffers.
        gc.collect()
        until(lambda: in_use(made) == 0)


class Gpu:
    """The simulated driver, as a program calls it that shares the GPU with the pool."""

    def __init__(self):
        self.library = ctypes.CDLL(SIM)
        self.context = self.made("cuDevicePrimaryCtxRetain", 0)
        self("cuCtxSetCurrent", self.context)
        self.memory = self.made("cuMemAlloc_v2", MIB)

    def __call__(self, name, *words):
        code = getattr(self.library, name)(*(ctypes.c_size_t(word) for word in words))
        assert code == 0, f"{name} failed with {code}"

    def made(self, name, *words):
        word = ctypes.c_size_t()
        self(name, ctypes.addressof(word), *words)
        return word.value

    def word(self):
        """A place for a handle, which a call gets after other arguments."""
        word = ctypes.c_size_t()
        word.address = ctypes.addressof(word)
        return word

    def stream(self):
        return self.made("cuStreamCreate", 1)

    def upload(self, buffer, stream, memory=None):
        self("cuMemcpyHtoDAsync_v2", memory or self.memory, buffer.address, len(buffer), stream)

    def download(self, buffer, stream):
        self("cuMemcpyDtoHAsync_v2", buffer.address, self.memory, len(buffer), stream)

    def sim(self, command):
        """What the simulation answers to a command of its `control.rs`."""
        answer = ctypes.create_string_buffer(1 << 16)
        length = self.library.sim_cuda(command.encode(), answer, len(answer))
        return answer.raw[:length].decode()

    def violations(self):
        return [line for line in self.sim("report").splitlines() if line.startswith("violation")]


@pytest.fixture(scope="session")
def driver():
    if not SIM:
        pytest.skip("PINPOOL_TEST_SIM names no simulation")
    pinpool.Device("cuda:0")
    return Gpu()


@pytest.fixture
def gpu(driver):
    """No rule of the driver's was broken at the end."""
    driver.known = driver.violations()
    yield driver
    driver.sim("hang false")
    assert driver.violations() == driver.known
