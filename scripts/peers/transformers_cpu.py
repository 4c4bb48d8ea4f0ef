"""transformers on torch's CPU build, f32: `transformers_cpu.py MODEL.gguf [OUTPUT_LEN]` prints one JSON object.

The GGUF file is dequantised while it is loaded, so that all engines run the same weights. Where CUDA is there, `--device
cuda` takes f16 on it. One-at-a-time requests are what a program without a server does: `generate` in a loop.
"""

import argparse
import json
import os
import time

import torch
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--output-len", type=int, default=32)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

torch.manual_seed(1)
folder, file = os.path.split(os.path.abspath(args.model))
dtype = torch.float16 if args.device == "cuda" else torch.float32
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype).to(args.device).eval()


def prompt(rows, length):
    return torch.randint(1000, 40000, (rows, length), device=args.device)


def seconds(work):
    started = time.perf_counter()
    work()
    if args.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def generate(rows, input_len, output_len):
    ids = prompt(rows, input_len)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=output_len,
        max_new_tokens=output_len,
        pad_token_id=0,
    )


def decode_tok_s(rows, input_len):
    """From the difference of two lengths, so that the prompt cancels out."""
    short = seconds(lambda: generate(rows, input_len, 4))
    long = seconds(lambda: generate(rows, input_len, 4 + args.output_len))
    return rows * args.output_len / (long - short)


with torch.inference_mode():
    generate(1, 16, 4)
    ids = prompt(1, 512)
    result = {
        "prefill_tok_s": 512 / seconds(lambda: model(ids, logits_to_keep=1)),
        "decode_tok_s": decode_tok_s(1, 16),
        "batch_rows": 16,
        "batch_decode_tok_s": decode_tok_s(16, 16),
        "alone_64_64_requests_s": 1 / seconds(lambda: generate(1, 64, 64)),
        "alone_16_128_requests_s": 1 / seconds(lambda: generate(1, 16, 128)),
    }
print(json.dumps(result))
