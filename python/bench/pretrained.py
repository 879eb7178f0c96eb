"""`from_pretrained` of transformers with and without `pinpool.transformers`, in turns: the seconds of each load of a random
Llama of 8B from the page cache, and whether the logits are the same.

    python3 pretrained.py FOLDER [ROUNDS]   FOLDER gets the model if it is empty (16 GB)
"""

import gc
import pathlib
import statistics
import sys
import time

import torch
import transformers

import pinpool.transformers

folder = pathlib.Path(sys.argv[1])
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
folder.mkdir(parents=True, exist_ok=True)
if not any(folder.iterdir()):
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = transformers.LlamaForCausalLM(config)
    made.save_pretrained(folder, max_shard_size="5GB")
    del made
    torch.set_default_dtype(torch.float32)
tokens = torch.arange(64, device="cuda")[None]
logits, seconds = {}, {"transformers": [], "pinpool": []}
for n in range(2 * rounds + 2):
    way = ["transformers", "pinpool"][n % 2]
    if way == "pinpool":
        pinpool.transformers.install()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    since = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map="cuda", dtype=torch.bfloat16
    )
    torch.cuda.synchronize()
    took = time.perf_counter() - since
    pinpool.transformers.uninstall()
    with torch.no_grad():
        logits[way] = model(tokens).logits
    del model
    # The first of each pins memory and loads code.
    print(f"{'first, ' if n < 2 else ''}{way}: {took:.2f} s", flush=True)
    if n > 1:
        seconds[way].append(took)
middle = {way: statistics.median(each) for way, each in seconds.items()}
print(f"times as fast: {middle['transformers'] / middle['pinpool']:.2f}")
print(f"logits equal: {torch.equal(*logits.values())}")
