"""transformers on a model of the synthetic shape with random weights, on CUDA in bf16 where it is there, else on the CPU:
`torch_synthetic.py [--shape 8b|1b|tiny]` prints one JSON object, with the copy bandwidth of the device."""

import argparse
import json
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {
    "8b": (32, 4096, 14336, 32, 8, 128256),
    "1b": (16, 2048, 8192, 32, 8, 128256),
    "tiny": (2, 256, 768, 8, 2, 2048),
}
parser = argparse.ArgumentParser()
parser.add_argument("--shape", choices=SHAPES, default="8b")
args = parser.parse_args()
layers, hidden, intermediate, heads, kv_heads, vocabulary = SHAPES[args.shape]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
torch.set_default_device(device)
config = LlamaConfig(
    num_hidden_layers=layers,
    hidden_size=hidden,
    intermediate_size=intermediate,
    num_attention_heads=heads,
    num_key_value_heads=kv_heads,
    vocab_size=vocabulary,
    max_position_embeddings=8192,
)
model = LlamaForCausalLM(config).eval()


def seconds(work):
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def generate(rows, input_len, output_len):
    ids = torch.randint(0, vocabulary, (rows, input_len))
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=output_len,
        max_new_tokens=output_len,
        pad_token_id=0,
    )


with torch.inference_mode():
    generate(1, 16, 4)
    ids = torch.randint(0, vocabulary, (1, 512))
    alone = seconds(lambda: generate(1, 64, 64))
    source = torch.empty(256 << 20 if device == "cuda" else 16 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    copy = min(seconds(lambda: target.copy_(source)) for _ in range(10))
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "copy_gb_s": 2 * source.numel() / copy / 1e9,
        "prefill_tok_s": 512 / min(seconds(lambda: model(ids, logits_to_keep=1)) for _ in range(3)),
        "decode_tok_s": 32 / (seconds(lambda: generate(1, 16, 36)) - seconds(lambda: generate(1, 16, 4))),
        "alone_64_64_requests_s": 1 / alone,
    }
print(json.dumps(result))
