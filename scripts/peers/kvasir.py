"""Kvasir's figures under the names that all peers use: `KVASIR=binary kvasir.py MODEL` prints one JSON object."""

import json
import os
import subprocess
import sys


def bench(*args):
    command = [os.environ["KVASIR"], "bench", *args, "--model", sys.argv[1], "--json"]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        sys.exit(f"{' '.join(command)}: {ran.stderr.strip()}")
    return json.loads(ran.stdout)


def latency(input_len, output_len):
    return bench("latency", "--input-len", str(input_len), "--output-len", str(output_len), "--runs", "1")


def throughput(concurrency, input_len, output_len):
    sizes = ["--num-prompts", str(concurrency), "--concurrency", str(concurrency)]
    return bench("throughput", *sizes, "--input-len", str(input_len), "--output-len", str(output_len))


alone = latency(512, 64)
short, long = latency(64, 32), latency(4096, 32)
result = {
    "adapter": alone["adapter"],
    "driver": alone["driver"],
    "prefill_tok_s": alone["prefill_tok_s"],
    "decode_tok_s": alone["decode_tok_s"],
    "dispatches_per_step": alone["dispatches_per_step"],
    "batch_rows": 16,
    "batch_decode_tok_s": throughput(16, 16, 64)["steady_decode_tok_s"],
    "decode_4096_over_64": long["decode_tok_s"] / short["decode_tok_s"],
    "served_64_64_requests_s": throughput(16, 64, 64)["requests_s"],
    "served_16_128_requests_s": throughput(16, 16, 128)["requests_s"],
}
print(json.dumps(result))
