"""Writes two checkpoints of random bytes into FOLDER, for benches/peers/safetensors_load.py: `llama`, the 291 tensors of a
Llama of 8B (16.1 GB), and `experts`, the 3,933 of a model with many experts (13.7 GB).

    python3 checkpoints.py FOLDER
"""

import json
import os
import pathlib
import sys


def llama():
    yield "model.embed_tokens.weight", [128256, 4096]
    for n in range(32):
        for name, shape in {
            "self_attn.q_proj": [4096, 4096],
            "self_attn.k_proj": [1024, 4096],
            "self_attn.v_proj": [1024, 4096],
            "self_attn.o_proj": [4096, 4096],
            "mlp.gate_proj": [14336, 4096],
            "mlp.up_proj": [14336, 4096],
            "mlp.down_proj": [4096, 14336],
            "input_layernorm": [4096],
            "post_attention_layernorm": [4096],
        }.items():
            yield f"model.layers.{n}.{name}.weight", shape
    yield "model.norm.weight", [4096]
    yield "lm_head.weight", [128256, 4096]


def experts():
    yield "model.embed_tokens.weight", [128256, 2048]
    for n in range(30):
        for name, shape in {"q": [2048, 2048], "kv": [1024, 2048], "gate": [64, 2048]}.items():
            yield f"model.layers.{n}.{name}.weight", shape
        for expert in range(128):
            yield f"model.layers.{n}.experts.{expert}.weight", [784, 2048]
    yield "lm_head.weight", [128256, 2048]
    yield "model.norm.weight", [2048]


def write(path, tensors):
    header, at = {}, 0
    for name, shape in tensors:
        nbytes = 2
        for extent in shape:
            nbytes *= extent
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = os.urandom(64 << 20)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done in range(0, at, len(block)):
            file.write(block[: at - done])
    print(f"{path}: {len(header)} tensors, {at / 1e9:.1f} GB")


folder = pathlib.Path(sys.argv[1])
write(folder / "llama.safetensors", llama())
write(folder / "experts.safetensors", experts())
