"""Writes a llama-shaped GGUF of seeded random weights: `synthetic.py OUT.gguf [--shape 8b|1b|tiny] [--seed N]`.

For machines where no model can be fetched: the speed of a step hangs on shapes and storage types, not on what weights say.
All matrices are Q4_0 (the output head Q8_0), norms F32. Needs Python alone. Layout: the GGUF specification, version 3.
"""

import argparse
import random
import struct

SHAPES = {  # layers, hidden, intermediate, heads, kv heads, vocabulary
    "8b": (32, 4096, 14336, 32, 8, 128256),
    "1b": (16, 2048, 8192, 32, 8, 128256),
    "tiny": (2, 256, 768, 8, 2, 2048),
}
F32, Q4_0, Q8_0 = 0, 2, 8
UINT32, FLOAT32, STRING, ARRAY, INT32 = 4, 6, 8, 9, 5
ALIGNMENT = 32

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--shape", choices=SHAPES, default="8b")
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
layers, hidden, intermediate, heads, kv_heads, vocabulary = SHAPES[args.shape]
head_dim = hidden // heads


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key, kind, data):
    return text(key) + struct.pack("<I", kind) + data


def u32(key, value):
    return entry(f"llama.{key}", UINT32, struct.pack("<I", value))


def byte_symbols():
    """The printable stand-ins for bytes of byte-level BPE (Radford et al. 2019)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(rest)) for b in range(256)]


tokens = byte_symbols() + ["<|begin|>", "<|end|>"]
tokens += [f"w{i}" for i in range(vocabulary - len(tokens))]
kinds = [1] * 256 + [3, 3] + [1] * (vocabulary - 258)  # 3: control
metadata = [
    entry("general.architecture", STRING, text("llama")),
    entry("general.name", STRING, text(f"synthetic-{args.shape}")),
    u32("block_count", layers),
    u32("context_length", 8192),
    u32("embedding_length", hidden),
    u32("feed_forward_length", intermediate),
    u32("attention.head_count", heads),
    u32("attention.head_count_kv", kv_heads),
    u32("rope.dimension_count", head_dim),
    u32("vocab_size", vocabulary),
    entry("llama.rope.freq_base", FLOAT32, struct.pack("<f", 500000.0)),
    entry("llama.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", 1e-5)),
    entry("tokenizer.ggml.model", STRING, text("gpt2")),
    entry("tokenizer.ggml.pre", STRING, text("gpt-2")),
    entry("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, vocabulary) + b"".join(map(text, tokens))),
    entry("tokenizer.ggml.token_type", ARRAY, struct.pack(f"<IQ{vocabulary}i", INT32, vocabulary, *kinds)),
    entry("tokenizer.ggml.merges", ARRAY, struct.pack("<IQ", STRING, 1) + text("w 1")),
    entry("tokenizer.ggml.bos_token_id", UINT32, struct.pack("<I", 256)),
    entry("tokenizer.ggml.eos_token_id", UINT32, struct.pack("<I", 257)),
]

# (name, inner dimension, rows, storage type)
tensors = [("token_embd.weight", hidden, vocabulary, Q4_0), ("output_norm.weight", hidden, 1, F32)]
tensors.append(("output.weight", hidden, vocabulary, Q8_0))
for i in range(layers):
    q, kv = heads * head_dim, kv_heads * head_dim
    matrices = [("attn_q", hidden, q), ("attn_k", hidden, kv), ("attn_v", hidden, kv), ("attn_output", q, hidden)]
    matrices += [("ffn_gate", hidden, intermediate), ("ffn_up", hidden, intermediate)]
    matrices += [("ffn_down", intermediate, hidden)]
    tensors += [(f"blk.{i}.{name}.weight", k, n, Q4_0) for name, k, n in matrices]
    tensors += [(f"blk.{i}.{name}.weight", hidden, 1, F32) for name in ["attn_norm", "ffn_norm"]]

dice = random.Random(args.seed)


def blocks(kind, inner):
    """About a MiB of random blocks: an f16 scale that keeps activations near 1, then random integers."""
    size = {Q4_0: 16, Q8_0: 32}[kind]
    spread = {Q4_0: 4.6, Q8_0: 74.0}[kind]  # standard deviation of the integers
    scale = struct.pack("<e", inner**-0.5 / spread)
    return b"".join(scale + dice.randbytes(size) for _ in range(1 << 15))


def size_of(inner, rows, kind):
    return inner * rows * 4 if kind == F32 else inner * rows // 32 * {Q4_0: 18, Q8_0: 34}[kind]


def padded(size):
    return -(-size // ALIGNMENT) * ALIGNMENT


infos, offset = [], 0
for name, inner, rows, kind in tensors:
    dims = [inner] if rows == 1 else [inner, rows]
    infos.append(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
    offset += padded(size_of(inner, rows, kind))
head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)) + b"".join(metadata + infos)
with open(args.out, "wb") as out:
    out.write(head + bytes(padded(len(head)) - len(head)))
    for name, inner, rows, kind in tensors:
        left = size_of(inner, rows, kind)
        filler = bytes(padded(left) - left)
        if kind == F32:
            out.write(struct.pack("<f", 1.0) * inner)
            left = 0
        else:
            pattern = blocks(kind, inner)
        while left > 0:
            out.write(pattern[:left])
            left -= len(pattern)
        out.write(filler)
