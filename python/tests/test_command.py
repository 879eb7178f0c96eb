"""python -m pinpool, and what Prometheus gets."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import prometheus_client
import pytest

import pinpool
from conftest import MIB, until
from pinpool.prometheus import Collector

COMMAND = [sys.executable, "-m", "pinpool"]


def command(*words):
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "device, status", [("host", 0), ("cuda:999", 1), ("gpu", 2)], ids=["good", "missing", "no name"]
)
def test_doctor(device, status):
    code, out, err = command("doctor", "--device", device, "--pin", "1MiB", "--capacity", "1MiB")
    assert code == status, out + err
    lines = dict(line.split(maxsplit=1) for line in out.split("\n\n")[0].splitlines())
    assert pinpool.__version__ in lines["python"]
    assert lines["vllm"] == lines["sglang"] == "not installed"


def test_a_closed_pipe_leaves_the_status():
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([*COMMAND, "doctor", "--device", "host"], stdout=theirs, timeout=60)
    os.close(theirs)
    assert done.returncode == 0


def test_load_and_help(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 64)
    code, out, _ = command("load", "--device", "host", "--verify", "--json", str(file))
    assert code == 0 and '"error":null' in out.splitlines()[-1]
    code, out, _ = command("bench", "--help")
    assert code == 0 and "Usage: python -m pinpool bench" in out


class Asked(Collector):
    times = 0

    def collect(self):
        self.times += 1
        return super().collect()


@pytest.fixture
def served(pool):
    """A server of a pool's metrics."""
    served, registry = Asked(pool), prometheus_client.CollectorRegistry()
    registry.register(served)
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    served.address = f"127.0.0.1:{server.server_port}"
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


def test_metrics(pool, served):
    buffer = pool.checkout(MIB)
    code, out, err = command("top", "--once", "--interval", "0.1", served.address)
    assert code == 0, err
    assert f"Pool {pool.name}: 1.0 MiB of 8 MiB in use" in out
    buffer.release()
    # The names are those of the library's own metrics.
    source = pathlib.Path(__file__).parents[2] / "src/telemetry/metrics.rs"
    known = re.findall(
        r"^    (?:gauge|monotonic_counter) \[([\w.]+)\]", source.read_text(), re.MULTILINE
    )
    for metric in served.collect():
        for sample in metric.samples:
            assert sample.name in {name.replace(".", "_") for name in known}
            assert sample.labels["pool"] == pool.name


def test_ctrl_c_ends_it(served):
    before = served.times
    running = subprocess.Popen([*COMMAND, "top", "--once", "--interval", "60", served.address])
    until(lambda: served.times > before)
    running.send_signal(signal.SIGINT)
    assert running.wait(20) == -signal.SIGINT
