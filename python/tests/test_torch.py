"""torch's pinned memory from a pool: without torch, by `fake_torch.cpp`, on the simulated GPU.

`PINPOOL_TEST_TORCH` names a folder `VERSION/torch` with the headers of a version. With torch and a
GPU `torch_gpu.py` tests the rest.
"""

import ctypes
import os
import pathlib
import platform
import pwd
import re
import subprocess
import sys
import types

import pytest

import pinpool
import pinpool.torch
from conftest import MIB, SIM, until
from pinpool._shim import build

HERE = pathlib.Path(__file__).parent
HEADERS = os.environ.get("PINPOOL_TEST_TORCH", "")
VERSION = pathlib.Path(HEADERS).parent.name
SIZE = MIB // 2
NUMBERS = ["blocks", "allocations", "bytes", "peak", "pinned"]
NUMBERS += ["others", "recorded", "emptied", "captures", "waits"]


def torch(version=f"{VERSION}+cu130", file=f"{HEADERS}/__init__.py", cuda="13.0"):
    made = types.ModuleType("torch")
    made.__version__, made.__file__ = version, file
    made.version = types.SimpleNamespace(cuda=cuda)
    return made


class Fake:
    """The allocator that torch would ask."""

    def __init__(self, folder):
        sources = ["-isystem", f"{HEADERS}/include", HERE / "fake_torch.cpp"]
        for name, parts in [("libc10.so", sources), ("libtorch_cpu.so", ["-xc", os.devnull])]:
            options = ["-w", "-std=c++20", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
            subprocess.run([build.COMPILER, *options, *parts, "-o", folder / name], check=True)
        library = ctypes.CDLL(str(folder / "libc10.so"))
        ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        library.fake_text.restype = ctypes.c_char_p
        library.fake_pin.restype = library.fake_address.restype = ctypes.c_void_p
        self.library = library
        self("start")

    def __call__(self, name, *words):
        return getattr(self.library, f"fake_{name}")(*map(ctypes.c_size_t, words))

    def text(self):
        return self("text").decode()

    def numbers(self):
        words = (ctypes.c_int64 * len(NUMBERS))()
        self("numbers", ctypes.addressof(words))
        return dict(zip(NUMBERS, words))

    def pin(self, nbytes=SIZE, byte=None):
        return Pinned(self, nbytes, byte)


class Pinned:
    """Pinned memory, as a tensor has it."""

    def __init__(self, fake, nbytes, byte):
        self.fake, self.nbytes = fake, nbytes
        self.data = fake("pin", nbytes)
        if not self.data:
            raise RuntimeError(fake.text())
        self.address = fake("address", self.data) or 0
        if byte is not None:
            ctypes.memset(self.address, byte, nbytes)

    def __del__(self):
        if self.data:
            self.fake("drop", self.data)

    def __len__(self):
        return self.nbytes

    def __bytes__(self):
        return ctypes.string_at(self.address, self.nbytes)

    def data_ptr(self):
        return self.address + self.nbytes // 3


@pytest.fixture(scope="module")
def installed(driver, tmp_path_factory):
    """The hook, once: it stays in this process."""
    if not HEADERS:
        pytest.skip("PINPOOL_TEST_TORCH names no headers of torch")
    made = Fake(tmp_path_factory.mktemp("torch"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", torch())
        for _ in range(2):
            pinpool.torch.install(64 * MIB, "cuda:0", initial=8 * MIB, largest=2 * MIB, wait=0.1)
        assert not any(pinpool.torch.stats().values()) and pinpool.torch.trim() == 0
        with pytest.raises(pinpool.ArgumentError, match="no tensor has been pinned"):
            pinpool.torch.idle(types.SimpleNamespace(data_ptr=lambda: 1))
        assert made.pin(1).address
        with pytest.raises(pinpool.Error, match="install once"):
            pinpool.torch.install()
    return made


def block_bytes():
    return pinpool.torch.stats()["block_bytes"]


@pytest.fixture
def fake(installed, gpu):
    """All of the pool's memory has come back at the end."""
    yield installed
    gpu.sim("hang false")
    until(lambda: block_bytes() == 0)
    assert pinpool.torch.stats()["blocks"] == 0


def on_the_device(fake, gpu, stream):
    block = fake.pin()
    gpu.download(block, stream)
    gpu("cuStreamSynchronize", stream)
    return set(bytes(block))


def test_memory_and_numbers(fake):
    before = fake.numbers()
    blocks = [fake.pin(nbytes, 5) for nbytes in (0, 1, 7, 64, 4097, MIB)]
    assert fake("keeps_history")
    assert all(block.address % 64 == 0 and set(bytes(block)) <= {5} for block in blocks)
    now, stats = fake.numbers(), pinpool.torch.stats()
    assert now["blocks"] == stats["blocks"] == 5 and now["pinned"] == stats["pinned_bytes"]
    assert now["allocations"] == before["allocations"] + 5
    assert stats["requested_bytes"] == MIB + 4097 + 64 + 7 + 1 <= now["bytes"] == block_bytes()
    blocks.clear()
    fake("reset")
    now = fake.numbers()
    assert now["allocations"] == now["peak"] == now["bytes"] == 0
    fake("empty_cache")
    assert fake.numbers()["emptied"] == before["emptied"] + 1
    assert pinpool.torch.stats()["pinned_bytes"] < stats["pinned_bytes"]


@pytest.mark.parametrize("known_by", ["torch", "hold"])
def test_what_a_queued_copy_reads_is_not_used_again(fake, gpu, known_by):
    stream = gpu.stream()
    gpu.sim("hang true")
    block = fake.pin(byte=7)
    start = block.address
    assert pinpool.torch.idle(block)
    gpu.upload(block, stream)
    if known_by == "torch":
        assert fake("record", block.data_ptr(), start, 0, stream)
    else:
        pinpool.torch.hold(block, types.SimpleNamespace(cuda_stream=stream))
    assert not pinpool.torch.idle(block)
    del block
    others = [fake.pin(byte=0xEE) for _ in range(32)]
    assert all(abs(other.address - start) >= SIZE for other in others)
    gpu.sim("hang false")
    assert on_the_device(fake, gpu, stream) == {7}
    pinpool.torch.forget(stream)
    gpu("cuStreamDestroy_v2", stream)


def test_a_graph_keeps_what_its_capture_uses_and_pins(fake, gpu):
    stream = gpu.stream()
    block = fake.pin(byte=6)
    gpu("cuStreamBeginCapture_v2", stream, 0)
    fake("capture", stream, 1)
    unused = fake.pin()
    gpu.upload(block, stream)
    assert fake("record", block.address, block.address, 0, stream)
    graph = gpu.word()
    fake("capture", stream, 0)
    gpu("cuStreamEndCapture", stream, graph.address)
    assert fake.numbers()["captures"] == 0
    del block, unused
    assert pinpool.torch.stats()["blocks"] == 0 and block_bytes() >= 2 * SIZE
    executable = gpu.made("cuGraphInstantiateWithFlags", graph.value, 0)
    others = [fake.pin(byte=0xEE) for _ in range(8)]
    gpu("cuGraphLaunch", executable, stream)
    assert on_the_device(fake, gpu, stream) == {6}
    others.clear()
    gpu("cuGraphExecDestroy", executable)
    gpu("cuGraphDestroy", graph.value)


def test_what_is_not_the_pools(fake, gpu):
    """Torch's own allocator has the largest blocks, and is asked about what the pool does not
    know; a stream of a device that the pool was not opened for is waited for."""
    before = fake.numbers()
    large = fake.pin(3 * MIB, 1)
    assert "`largest`" in fake.text() and pinpool.torch.stats()["blocks"] == 0
    assert not fake("record", large.address, large.address, 0, gpu.stream())
    with pytest.raises(pinpool.ArgumentError, match="another allocator"):
        pinpool.torch.hold(large, 0)
    block = fake.pin()
    assert fake("record", block.address, block.address, 1, gpu.stream())
    assert "waited for" in fake.text()
    now = fake.numbers()
    assert [now[key] - before[key] for key in ("others", "recorded", "waits")] == [1, 1, 1]


def test_a_hold_is_on_the_streams_own_device(fake, gpu, monkeypatch):
    """The default stream of every device has the handle 0."""
    block = fake.pin()
    default = [types.SimpleNamespace(cuda_stream=0, device_index=index) for index in (0, 1)]
    pinpool.torch.hold(block, default[0])
    with pytest.raises(pinpool.ArgumentError, match="none of those of the pool"):
        pinpool.torch.hold(block, default[1])
    pinpool.torch.hold(block, 0)
    monkeypatch.setattr(pinpool.torch, "_several", True)
    with pytest.raises(pinpool.ArgumentError, match="give torch's stream"):
        pinpool.torch.hold(block, 0)
    pinpool.torch.hold(block, gpu.stream())


def test_an_exhausted_pool(fake):
    held = []
    with pytest.raises(RuntimeError, match=r"^OutOfMemoryError: .*install\(capacity=") as raised:
        while True:
            held.append(fake.pin())
    assert 64 <= len(held) <= 128
    del raised
    held.clear()
    assert fake.pin().address


def test_a_child_of_a_fork(fake):
    """It can drop what it has of its parent, and pin nothing."""
    block = fake.pin(byte=3)
    child = os.fork()
    if child == 0:
        try:
            del block
            fake.pin()
        except RuntimeError as error:
            os._exit(0 if "fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert set(bytes(block)) == {3} and pinpool.torch.stats()["blocks"] == 1


def test_the_import_needs_no_torch():
    text = "import sys, pinpool.torch\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True)
    text = "import pinpool.torch\npinpool.torch.stats()"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert "install() comes first" in done.stderr


def test_the_library_exports_its_functions_alone():
    command = ["nm", "-D", "--defined-only", "-f", "posix", pinpool._native.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in done.stdout.splitlines()}
    rest = {name for name in names if not name.startswith("pinpool_")}
    assert rest == {"PyInit__native"} and "pinpool_alloc" in names


def refused(monkeypatch, made, **options):
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setattr(pinpool.torch, "_shim", None)
    with pytest.raises(pinpool.Error) as raised:
        pinpool.torch.install(**options)
    return str(raised.value)


def test_refusals(monkeypatch, tmp_path):
    assert "without CUDA" in refused(monkeypatch, torch("2.11.0", cuda=None))
    assert "2.14, 2.15, and this is 2.99.0" in refused(monkeypatch, torch("2.99.0"))
    assert "host_alloc" in refused(monkeypatch, torch("2.11.0"), backing="hostalloc")
    # A version that the wheel has no shim for, without headers, a compiler, headers that compile, and
    # a folder for what is compiled.
    made = torch("2.12.0", f"{tmp_path}/__init__.py")
    assert "from a wheel" in refused(monkeypatch, made)
    headers = tmp_path / "include/ATen/core"
    headers.mkdir(parents=True)
    (headers / "CachingHostAllocator.h").write_text("#error a new world\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = refused(monkeypatch, made)
    assert "2.11, 2.12" in text and "a new world" in text
    monkeypatch.setenv("XDG_CACHE_HOME", str(headers / "CachingHostAllocator.h"))
    assert "$XDG_CACHE_HOME" in refused(monkeypatch, made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "COMPILER", "/nowhere/g++")
    text = refused(monkeypatch, made, any_version=True)
    assert "there is no /nowhere/g++" in text and "with torch 2.11" in text
    assert [each.name for each in (tmp_path / "cache/pinpool").iterdir()] == []


@pytest.mark.skipif(not HEADERS, reason="PINPOOL_TEST_TORCH names no headers of torch")
def test_a_shim_is_compiled_once(monkeypatch, tmp_path):
    """For what is not a release: it may have any interface."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    released = pinpool.torch._built(torch("2.11.7"))
    assert released.parent == build.FOLDER and released.name == "torch_2_11.so"
    path = pinpool.torch._built(torch("2.11.0a0+git1"))
    assert path.parent == tmp_path / "pinpool" and list(path.parent.iterdir()) == [path]
    with monkeypatch.context() as patch:
        patch.setattr(build, "build", None)
        assert pinpool.torch._built(torch("2.11.0a0+git1")) == path
        # Machines that share the folder have a file each.
        others = []
        patch.setattr(build, "build", lambda include, out: others.append(out.name))
        for name, value in (("machine", "pdp11"), ("libc_ver", ("glibc", "2.0"))):
            with monkeypatch.context() as there:
                there.setattr(platform, name, lambda value=value: value)
                pinpool.torch._built(torch("2.11.0a0+git1"))
    assert len({path.name, *others}) == 3


def test_a_shim_that_does_not_load_is_compiled_again(installed, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = torch(f"{VERSION}a0+git1")
    before = os.umask(0)
    try:
        path = pinpool.torch._built(made)
        path.write_bytes(b"\x7fELF of another machine")
        assert pinpool.torch._load(made).pinpool_torch_install
    finally:
        os.umask(before)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    compiled = []
    monkeypatch.setattr(build, "build", lambda include, out: (out.touch(0o755), compiled.append(1)))
    assert "does not load" in refused(monkeypatch, made, any_version=True) and len(compiled) == 2


def test_a_shim_of_another_users_is_not_loaded(monkeypatch, tmp_path):
    """Whoever can write to the file or to its folder has his code run."""
    made = torch("2.12.0", f"{tmp_path}/__init__.py")
    (tmp_path / "include/ATen/core").mkdir(parents=True)
    (tmp_path / "include/ATen/core/CachingHostAllocator.h").touch()
    monkeypatch.setattr(build, "build", lambda include, out: out.touch(0o755))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = pinpool.torch._built(made)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for each, mode in ((path, 0o775), (path, 0o757), (path.parent, 0o770), (path.parent, 0o703)):
        kept = each.stat().st_mode
        each.chmod(mode)
        assert re.search(f"{each} .*chmod go-w.*XDG_CACHE_HOME", refused(monkeypatch, made))
        each.chmod(kept)
    assert pinpool.torch._built(made) == path
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        assert f"{path.parent} belongs to" in refused(monkeypatch, made)
    # Of a user without a home, too, nothing is taken from the current folder.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert "$XDG_CACHE_HOME" in refused(monkeypatch, made)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert "~/.cache" in refused(monkeypatch, made) and not pathlib.Path("~").exists()


def test_with_torch_on_a_gpu():
    environment = {name: text for name, text in os.environ.items() if text != SIM}
    command = [sys.executable, HERE / "torch_gpu.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout
