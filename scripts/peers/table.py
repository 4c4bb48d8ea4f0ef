"""Medians of the rounds as a Markdown table: `table.py FOLDER` reads one PEER.jsonl for each engine."""

import json
import pathlib
import statistics
import sys

NAMES = {
    "kvasir": "Kvasir",
    "vulkan": "llama.cpp, Vulkan on the same adapter",
    "cpu": "llama.cpp, CPU",
    "transformers": "transformers, torch CPU f32",
}
ROWS = {
    "decode_tok_s": "decode, one stream (tok/s)",
    "batch_decode_tok_s": "steady decode, several streams (tok/s)",
    "prefill_tok_s": "prefill of 512 (tok/s)",
    "decode_4096_over_64": "decode at 4,096 of context / at 64",
}

results = {}
for name in NAMES:
    path = pathlib.Path(sys.argv[1]) / f"{name}.jsonl"
    if path.exists() and path.read_text().strip():
        results[name] = [json.loads(line) for line in path.read_text().splitlines()]


def median(peer, figure):
    values = [run[figure] for run in results.get(peer, []) if run.get(figure) is not None]
    return statistics.median(values) if values else None


if not results:
    sys.exit("nothing was measured")
peers = list(results)
if "kvasir" in results:
    first = results["kvasir"][0]
    print(f"{first['adapter']}, {first['driver']}; medians of {len(results['kvasir'])} rounds\n")
print("| | " + " | ".join(NAMES[p] for p in peers) + " |")
print("|---" * (len(peers) + 1) + "|")
for figure, title in ROWS.items():
    ours = median("kvasir", figure)
    cells = []
    for peer in peers:
        value = median(peer, figure)
        if value is None:
            cells.append("")
            continue
        cell = f"{value:.2f}" if value < 10 else f"{value:.0f}"
        if figure == "batch_decode_tok_s":
            cell += f" ({results[peer][0]['batch_rows']} rows)"
        if peer != "kvasir" and ours is not None:
            cell += f" (Kvasir: {ours / value:.2f}x)"
        cells.append(cell)
    print(f"| {title} | " + " | ".join(cells) + " |")
for lengths in ["64_64", "16_128"]:
    served, alone = median("kvasir", f"served_{lengths}_requests_s"), median("transformers", f"alone_{lengths}_requests_s")
    if served is not None and alone is not None:
        taken, given = lengths.split("_")
        print(
            f"\n16 requests at once in Kvasir against `generate` one at a time, {taken} tokens in and {given} out: "
            f"{served:.2f} / {alone:.2f} requests/s = {served / alone:.1f}x"
        )
