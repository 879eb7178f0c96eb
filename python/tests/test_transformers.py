"""`from_pretrained` through the package: with a stand-in for transformers on a simulated GPU, and with
transformers itself where it is installed."""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

import pinpool
import pinpool.safetensors
import pinpool.transformers
from conftest import MIB, until
from standin import Block, View, arrays, gone, same, torch, write  # noqa: F401

WINDOW = MIB // 2


def natural(name):
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def load(model, state_dict, checkpoint_files, load_config, expected_keys=None):
    """What transformers 5.17 does with files: `modeling_utils._load_pretrained_model` and
    `core_model_loading.convert_and_load_state_dict_in_model`."""
    modeling_utils = sys.modules["transformers.modeling_utils"]
    opened, slices = set(), {}
    for file in checkpoint_files:
        pointer = modeling_utils.safe_open(file, framework="pt", device="cpu", backend="mmap")
        opened.add(pointer)
        for name in pointer.keys():
            slices[name] = pointer.get_slice(name)
    with ThreadPoolExecutor(4) as pool:
        asked = sorted((name for name in slices if name in expected_keys), key=natural)
        index = model.get("index", lambda name: ...)
        futures = {name: pool.submit(slices[name].__getitem__, index(name)) for name in asked}
    for name, future in futures.items():
        model[name] = future.result()
    model["again"] = slices["layer.3"][index("layer.3")]
    for pointer in opened:
        pointer.__exit__(None, None, None)


class Stock(pinpool.safetensors.safe_open):
    """A stand-in for safetensors' class: its tensors are arrays."""

    def __init__(self, filename, framework, device, backend):
        assert (framework, device, backend) == ("pt", "cpu", "mmap")
        super().__init__(filename, "np")


@pytest.fixture
def transformers(monkeypatch):
    names = ["transformers", "transformers.modeling_utils", "transformers.core_model_loading"]
    package, modeling, core = (types.ModuleType(name) for name in names)
    package.__version__ = "5.17.3"
    package.modeling_utils, package.core_model_loading = modeling, core
    modeling.safe_open, core.dot_natural_key = Stock, natural
    modeling.PreTrainedModel = type(
        "PreTrainedModel", (), {"_load_pretrained_model": staticmethod(load)}
    )
    for name, module in zip(names, [package, modeling, core], strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    yield package
    pinpool.transformers.uninstall()
    assert modeling.safe_open is Stock
    assert modeling.PreTrainedModel._load_pretrained_model is load


@pytest.fixture
def files(arrays, tmp_path):
    """In the order of their names as texts, in which transformers does not ask for them."""
    names = sorted(arrays)
    parts = names[:20], names[20:]
    write_part = lambda at, part: write(tmp_path / f"{at}", {name: arrays[name] for name in part})  # noqa: E731
    return [write_part(*part) for part in enumerate(parts)]


def run(transformers, files, names, device_map, mesh=None, **model):
    config = types.SimpleNamespace(device_map=device_map, device_mesh=mesh)
    owner = transformers.modeling_utils.PreTrainedModel
    owner._load_pretrained_model(model, None, files, config, expected_keys=names)
    model.pop("index", None)
    return model


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_a_model_on_one_gpu(transformers, torch, files, arrays, device):
    names = [name for name in arrays if name != "layer.17"]  # which the model does not have
    expected = arrays | {"again": arrays["layer.3"]}
    pinpool.transformers.install(window=WINDOW, ahead=1)
    model = run(transformers, files, names, {"": device})
    assert set(model) == {*names, "again"} and same(model, expected)
    assert all(isinstance(tensor, View) for tensor in model.values())
    assert torch.calls[-1] == "synchronize"
    assert len(torch.calls) < 20, "one block for several tensors"
    count, kept = len(model), sum(max(tensor.nbytes, 1) for tensor in model.values())
    # Four threads each have at most one tensor twice.
    largest = max(array.nbytes for _, array in arrays.values()) + 256
    assert Block.most <= kept + 2 * max(WINDOW, largest) + 4 * largest
    until(lambda: Block.alive <= kept + count * 256)
    del model
    until(gone)


def test_parts_of_a_model(transformers, torch, files, arrays):
    """A rank's rows, and one tensor whole: nothing is loaded but these."""
    pinpool.transformers.install()
    names = [name for name in arrays if name.startswith("layer.") and len(arrays[name][1]) > 2]
    index = lambda name: ... if name == "layer.0" else (slice(1, 3),)  # noqa: E731
    model = run(transformers, files, names, {"": 0}, mesh="two ranks", index=index)
    again = model.pop("again")
    assert numpy.array_equal(again.array(), arrays["layer.3"][1][1:3])
    assert same(model, {name: arrays[name][1][index(name)] for name in names})
    assert Block.most <= 2 * sum(-(-tensor.nbytes // 256) * 256 for tensor in model.values())


def test_other_models_are_loaded_as_ever(transformers, torch, files, arrays, tmp_path):
    pinpool.transformers.install()
    maps = [None, {"": "cpu"}, {"a": 0, "b": "disk"}, {"a": 0, "b": 1}, {"": "mps"}]
    for device_map in maps:
        model = run(transformers, files, list(arrays), device_map)
        assert not any(isinstance(tensor, View) for tensor in model.values()) and Block.most == 0
        assert same(model, arrays | {"again": arrays["layer.3"]})
    # Of two files with one name the program says which it takes.
    kind, array = arrays["layer.5"]
    files.append(write(tmp_path / "more", {"layer.5": (kind, array[:0]), "new": (kind, array)}))
    with pytest.warns(UserWarning, match="layer.5.*twice"):
        model = run(transformers, files, [*arrays, "new"], {"": 0})
    expected = arrays | {"layer.5": (kind, array[:0]), "new": (kind, array)}
    assert same(model, expected | {"again": arrays["layer.3"]})


def test_other_versions(transformers):
    transformers.__version__ = "6.0.0"
    with pytest.warns(UserWarning, match=r"6\.0\.0, and pinpool was tested with 5\.17"):
        pinpool.transformers.install()
    pinpool.transformers.uninstall()
    del transformers.core_model_loading.dot_natural_key
    with warnings.catch_warnings(), pytest.raises(pinpool.UnsupportedError, match="install 5.17"):
        warnings.simplefilter("ignore")
        pinpool.transformers.install()
    transformers.core_model_loading.dot_natural_key = natural


class Files:
    """In the place of a GPU: loads that are complete when they begin, in memory of torch's."""

    copier = None

    def __init__(self, torch, files):
        self.module = torch
        self.opened = [pinpool.safetensors.safe_open(file) for file in files]
        self.windows = 0

    def start(self, window, least):
        block = self.module.empty(max(window.nbytes, least), dtype=self.module.uint8)
        places, at = {}, 0
        self.windows += len(window.names()) > 1
        for name in window.names():
            [tensor] = [each.get_tensor(name) for each in self.opened if name in each.keys()]
            flat = tensor.contiguous().reshape(-1).view(self.module.uint8)
            block[at : at + len(flat)] = flat
            places[name] = block.data_ptr() + at
            at += -(-len(flat) // 256) * 256
        return types.SimpleNamespace(take=places.get, close=lambda: None), block


def test_transformers_itself(tmp_path, monkeypatch):
    """The same model as without, whose weights came through the loader. In a process of its own: beside
    the stand-ins torch would import half of itself."""
    if importlib.util.find_spec("transformers") and "PINPOOL_TEST_ALONE" not in os.environ:
        words = [sys.executable, "-m", "pytest", "-q", f"{__file__}::test_transformers_itself"]
        done = subprocess.run(words, env=os.environ | {"PINPOOL_TEST_ALONE": "1"}, capture_output=True)
        assert done.returncode == 0, done.stdout.decode()
        return
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if not re.match(r"5\.17\.", transformers.__version__):
        pytest.skip("another version")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    made.save_pretrained(tmp_path, max_shard_size="300KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    place = Files(torch, files)
    tokens = torch.arange(100)[None]
    expected = made(tokens).logits
    devices = [None]
    if torch.cuda.is_available():
        devices.append("cuda")
    with contextlib.ExitStack() as stack:
        stack.callback(pinpool.transformers.uninstall)
        pinpool.transformers.install(window=1 << 17)
        for device in [*devices, "stand-in"]:
            if device == "stand-in":
                monkeypatch.setattr(pinpool.transformers, "_device", lambda _: "cuda:0")
                monkeypatch.setattr(pinpool.safetensors, "_place", lambda *_: place)
                monkeypatch.setattr(pinpool.safetensors, "_Gpu", Files)
                monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
            device_map = device if device == "cuda" else None
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path, device_map=device_map, dtype=torch.float32
            )
            state = loaded.state_dict()
            for name, tensor in made.state_dict().items():
                assert torch.equal(state[name].cpu(), tensor), name
            if device != "cuda":
                assert torch.equal(loaded(tokens).logits, expected)
    assert place.windows > 3
