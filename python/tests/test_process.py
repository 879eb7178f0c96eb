"""What belongs to a process as a whole: the import, forks, and the end. Each runs in a process of its own.

`PINPOOL_EXITS` says how many processes end in each way (1).
"""

import os
import pathlib
import subprocess
import sys

import pytest

from conftest import SIM

EXITS = int(os.environ.get("PINPOOL_EXITS", "1"))


def run(program, tmp_path, code=0):
    """Runs a program, which ends with that code; no call came to the driver after the end began."""
    report = tmp_path / "report"
    environment = os.environ | {
        "PINPOOL_SIM_REPORT": str(report),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    if report.exists():
        late = [line for line in report.read_text().splitlines() if line.startswith("violation")]
        assert late == []
    return done.stdout


def test_the_import_starts_nothing(tmp_path):
    run(
        """
import os
before = os.listdir("/proc/self/task")
import pinpool
assert os.listdir("/proc/self/task") == before, "threads"
loaded = open("/proc/self/maps").read()
assert "libcuda" not in loaded and "pinpool_sim" not in loaded
# So a child of a fork may use it, though its parent has imported it.
if os.fork() == 0:
    pinpool.Pool("host", 1 << 20, allow_unpinned=True).checkout(10)
    os._exit(0)
assert os.wait()[1] == 0
""",
        tmp_path,
    )


START = """
import atexit, builtins, os, signal, sys, threading, time, warnings
warnings.filterwarnings("ignore", message=".*fork.*")
import pinpool
pool = pinpool.Pool({device!r}, 8 << 20, allow_unpinned=True)
buffer = pool.checkout(1 << 20)
memoryview(buffer)[:5] = b"hello"
"""


def test_the_child_of_a_fork(device, tmp_path):
    out = run(
        START.format(device=device)
        + """
import gc, multiprocessing
uses = [lambda: pool.checkout(10), lambda: pool.checkout(10, timeout=0), pool.stats, pool.regions,
        pool.trim, pool.close, lambda: pinpool.Device("host"), lambda: memoryview(buffer), buffer.wait,
        lambda: buffer.hold(0), lambda: buffer.address, lambda: buffer.ready, lambda: buffer.pinned]
def child():
    global buffer
    for use in uses:
        try:
            use()
            os._exit(9)
        except pinpool.ForkedError as error:
            assert "forked" in str(error) and isinstance(error, RuntimeError)
    assert pool.name and len(buffer)
    del buffer
    gc.collect()
if os.fork() == 0:
    child()
    os._exit(0)
assert os.wait()[1] == 0
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
assert process.exitcode == 0
process = multiprocessing.get_context("spawn").Process(target=print, args=("spawned",))
process.start()
process.join()
assert process.exitcode == 0 and bytes(buffer)[:5] == b"hello"
""",
        tmp_path,
    )
    assert "spawned" in out


ENDS = {
    "return": "",
    "objects in another module": "builtins.kept = (pool, buffer, memoryview(buffer))",
    "exit": "sys.exit(3)",
    "_exit": "os._exit(4)",
    "exception": "raise ValueError",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(20)",
    "a daemon thread that checks out": """
def work():
    while True:
        with pool.checkout(4096) as other:
            memoryview(other)[:1] = b"x"
threading.Thread(target=work, daemon=True).start(); time.sleep(0.02)""",
    "a daemon thread that waits": """
held = [pool.checkout(1 << 20) for _ in range(4)]
threading.Thread(target=lambda: pool.checkout(6 << 20, timeout=60), daemon=True).start(); time.sleep(0.02)""",
    "atexit": "atexit.register(lambda: memoryview(pool.checkout(10)))",
    "closed": "pool.close(timeout=0)",
}
CODES = {"exit": 3, "_exit": 4, "exception": 1, "SIGTERM": -15}


@pytest.mark.parametrize("way", ENDS)
def test_ends(device, way, tmp_path):
    for _ in range(EXITS):
        run(START.format(device=device) + ENDS[way], tmp_path, CODES.get(way, 0))


@pytest.mark.skipif(not SIM, reason="PINPOOL_TEST_SIM names no simulation")
def test_a_lost_device(tmp_path):
    """What it may still use never comes back, and a wait says why."""
    run(
        START.format(device="cuda:0")
        + """
from conftest import Gpu
gpu = Gpu()
stream = gpu.stream()
gpu.sim("hang true")
gpu.upload(buffer, stream)
buffer.hold(stream)
gpu.sim("kill 0 719")
gpu.sim("hang false")
for _ in range(2):
    try:
        buffer.wait(20)
        os._exit(9)
    except pinpool.DeviceLostError as error:
        assert "719" in str(error), error
try:
    memoryview(buffer)
    os._exit(8)
except pinpool.StateError:
    pass
size = len(buffer)
del buffer
assert pool.stats()["quarantined_bytes"] >= size, pool.stats()
assert pool.close(0.2) is False
""",
        tmp_path,
    )
