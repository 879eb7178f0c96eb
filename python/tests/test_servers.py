"""The plugins for vLLM and SGLang, with stand-ins that have the faces of the servers' own modules:
vLLM's of 0.25.1 and 0.33.0, SGLang's of 0.5.23."""

import dataclasses
import logging
import re
import sys
import types
from importlib.metadata import entry_points

import pytest

import pinpool.safetensors
from test_process import run

GROUPS = ("vllm.general_plugins", "sglang.srt.plugins")

# What the loaders of both servers have, in the module whose names they look up at each call.
LOADER = """
import dataclasses, os
def {one}(files, *arguments, **keywords):
    raise AssertionError("the server's own")
{several} = {one}
def pt_weights_iterator(files):
    yield from [("pt", file) for file in files]
@dataclasses.dataclass
class Source:
    files: list
    prefix: str = ""
class DefaultModelLoader:
    local_expert_ids = None
    def __init__(self, load_config):
        unknown = set(load_config.model_loader_extra_config) - {{"enable_multithread_load"}}
        if unknown:
            raise ValueError(f"Unexpected extra config keys: {{unknown}}")
        self.load_config = load_config
    def _get_weights_iterator(self, source, *, resolved_source=None):
        config = self.load_config
        assert config.load_format == "auto"
        files = resolved_source or source.files
        if not files[0].endswith(".safetensors"):
            weights = pt_weights_iterator(files)
        elif config.model_loader_extra_config.get("enable_multithread_load"):
            weights = {several}(files, max_workers=8)
        else:
            weights = {one}(files, {arguments})
        return ((source.prefix + name, tensor) for name, tensor in weights)
"""
VLLM = LOADER.format(
    one="safetensors_weights_iterator",
    several="multi_thread_safetensors_weights_iterator",
    arguments="True, None, local_expert_ids=self.local_expert_ids, safetensors_prefetch_num_threads=8",
)
SGLANG = LOADER.format(
    one="safetensors_weights_iterator",
    several="buffered_multi_thread_safetensors_weights_iterator",
    arguments="disable_mmap=False, prefetch=False",
)


@dataclasses.dataclass
class LoadConfig:
    load_format: str
    model_loader_extra_config: object
    safetensors_load_strategy: object = None
    use_tqdm_on_load: bool = True


class Tensor:
    def numel(self):
        return 5

    def element_size(self):
        return 2


class Bar:
    def __init__(self, **keywords):
        self.at, self.total = 0, keywords["total"]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, nbytes):
        self.at += nbytes


@pytest.fixture
def modules(monkeypatch):
    """Puts modules in place by name, and takes them and what imported them away at the end."""
    for name in ("_vllm_loader", "_sglang_loader"):
        monkeypatch.delitem(sys.modules, f"pinpool.{name}", raising=False)
        monkeypatch.delattr(pinpool, name, raising=False)

    def put(name, text="", **members):
        for end in [*(match.start() for match in re.finditer(r"\.", name)), len(name)]:
            if name[:end] not in sys.modules:
                module = types.ModuleType(name[:end])
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name[:end], module)
                parent, _, last = name[:end].rpartition(".")
                if parent:
                    setattr(sys.modules[parent], last, module)
        exec(text, sys.modules[name].__dict__)
        sys.modules[name].__dict__.update(members)
        return sys.modules[name]

    put("torch", version=types.SimpleNamespace(cuda="13.0"))
    put("torch.distributed", is_initialized=lambda: False)
    put("tqdm.auto", tqdm=Bar)
    return put


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "b.safetensors"
    path.write_bytes(b"40 bytes of a file that is never parsed.")
    return str(path)


@pytest.fixture
def loads(monkeypatch):
    """The calls of `weights`, which gives the tensors that are kept."""
    calls = []

    def weights(files, device, *, keep=None, **options):
        calls.append((files, device, options))
        names = ["dense", "experts.1", "experts.2", "engram"]
        yield from [(name, Tensor()) for name in names if keep is None or keep(name)]

    monkeypatch.setattr(pinpool.safetensors, "weights", weights, raising=False)
    return calls


def names(weights):
    return [name for name, _ in weights]


def register(group):
    [plugin] = entry_points(group=group, name="pinpool")
    plugin.load()()


def test_a_plugin_opens_nothing_and_its_errors_end_nothing(tmp_path):
    run(
        f"""
import logging, os, sys
os.environ["PINPOOL_TORCH"] = "1"
sys.modules["torch"] = None  # which starts threads, where it is
from importlib.metadata import entry_points
before = os.listdir("/proc/self/task")
told = []
logging.Handler.handle = lambda self, record: told.append(record.getMessage())
logging.getLogger().addHandler(logging.Handler())
for group in {GROUPS}:
    [plugin] = entry_points(group=group, name="pinpool")
    plugin.load()()
    plugin.load()()
assert os.listdir("/proc/self/task") == before, "threads"
assert "libcuda" not in open("/proc/self/maps").read()
# Neither of the servers is here, nor is torch, which is tried once.
assert ["not to be had" in text for text in told] == [True, False, True, True, True], told
""",
        tmp_path,
    )


@pytest.mark.parametrize("engram", [None, False, True])
def test_vllm(modules, loads, file, caplog, engram):
    """Engram: not known to 0.25.1; 0.33 keeps it on the CPU, or does not."""
    caplog.set_level(logging.INFO)
    known, package = {}, "vllm.model_executor.model_loader"

    class Opened:
        def __init__(self, path, framework, device):
            assert (path, framework, device) == (file, "pt", "cpu")

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def keys(self):
            return ["dense", "engram"]

        def get_tensor(self, name):
            return "on the CPU"

    modules("safetensors", safe_open=Opened)
    config = types.SimpleNamespace()
    if engram is not None:
        config.engram_config = types.SimpleNamespace(cpu_offload=engram)
    modules("vllm.config", get_current_vllm_config_or_none=lambda: config)
    modules(
        package,
        _LOAD_FORMAT_TO_MODEL_LOADER=known,
        register_model_loader=lambda name: lambda loader: known.update({name: loader}),
    )
    theirs = modules(f"{package}.default_loader", VLLM)

    def skip(name, local):
        return local is not None and name.startswith("experts.") and name[8:] not in local

    utils = modules(f"{package}.weight_utils", should_skip_weight=skip)
    if engram is not None:
        utils._ENGRAM_WEIGHT_RE = re.compile("engram")
    register("vllm.general_plugins")
    loader = known["pinpool"]
    register("vllm.general_plugins")
    assert known == {"pinpool": loader}

    original = theirs.safetensors_weights_iterator
    given = LoadConfig("pinpool", {"window": 1 << 20, "ahead": 3})
    made = loader(given)
    # Nothing is loaded before the first tensor is asked for.
    weights = made._get_weights_iterator(theirs.Source([file], "model."))
    assert loads == [] and theirs.safetensors_weights_iterator is original
    made.local_expert_ids = {"1"}
    tensors = dict(weights)
    assert list(tensors) == ["model.dense", "model.experts.1", "model.engram"]
    assert (tensors["model.engram"] == "on the CPU") == bool(engram)
    assert loads == [([file], "cuda", {"window": 1 << 20, "ahead": 3})]
    assert "pinpool loaded 0.00 GB" in caplog.messages[-1]
    assert given.load_format == "pinpool"

    # Also in place of the iterator with several threads; other files are vLLM's own.
    made = loader(LoadConfig("pinpool", {"enable_multithread_load": True}))
    assert len(names(made._get_weights_iterator(theirs.Source([file])))) == 4 and len(loads) == 2
    assert names(made._get_weights_iterator(theirs.Source(["a.bin"]))) == ["pt"]
    assert "without pinpool" in caplog.messages[-1] and len(loads) == 2
    made = loader(LoadConfig("pinpool", {}, "torchao"))
    with pytest.raises(AssertionError, match="the server's own"):
        made._get_weights_iterator(theirs.Source([file]))
    assert theirs.safetensors_weights_iterator is original
    with pytest.raises(ValueError, match="widnow"):
        loader(LoadConfig("pinpool", {"widnow": 1}))
    with pytest.raises(
        ValueError, match="\"window\" in the extra config is a number of bytes, at least 1, not '1GiB'"
    ):
        loader(LoadConfig("pinpool", {"window": "1GiB"}))
    sys.modules["torch"].version.cuda = None
    with pytest.raises(ValueError, match="NVIDIA"):
        names(loader(given)._get_weights_iterator(theirs.Source([file])))


def test_sglang(modules, loads, file, monkeypatch):
    modules("sglang.srt.configs.load_config", LoadFormat=types.SimpleNamespace(AUTO="auto"))
    theirs = modules("sglang.srt.model_loader.loader", SGLANG)
    # What is registered goes away with the stand-ins.
    monkeypatch.setitem(sys.modules, "sglang.private.private_model_loader", None)
    del sys.modules["sglang.private.private_model_loader"]
    register("sglang.srt.plugins")
    register("sglang.srt.plugins")
    assert "pinpool._sglang_loader" not in sys.modules, "imported before it is asked for"
    # As SGLang does it for --load-format private.
    loader = sys.modules["sglang.private.private_model_loader"].PrivateModelLoader
    made = loader(LoadConfig("private", {"ahead": 2}))
    weights = made._get_weights_iterator(theirs.Source([], "a."), resolved_source=[file])
    assert loads == []
    assert names(weights) == ["a.dense", "a.experts.1", "a.experts.2", "a.engram"]
    assert loads == [([file], "cuda", {"ahead": 2})]
    made = loader(LoadConfig("private", {"enable_multithread_load": True}))
    assert len(names(made._get_weights_iterator(theirs.Source([file])))) == 4
    assert names(made._get_weights_iterator(theirs.Source(["a.bin"]))) == ["pt"]


def test_sglang_with_another_private_loader(modules, caplog, tmp_path, monkeypatch):
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "__init__.py").write_text("")
    modules("sglang").__path__ = [str(tmp_path)]
    register("sglang.srt.plugins")
    assert "another package's" in caplog.messages[-1]
    assert "sglang.private.private_model_loader" not in sys.modules
