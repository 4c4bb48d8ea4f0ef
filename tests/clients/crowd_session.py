"""A crowd of connections: none fails, memory stays flat, and those that leave leave nothing behind.

    python crowd_session.py http://127.0.0.1:8000 KEY PROCESS [CONNECTIONS]
"""

import asyncio
import json
import sys
import time

from common import BASE, KEY, metric, until_idle

PROCESS = sys.argv[3]
CONNECTIONS = int(sys.argv[4]) if len(sys.argv) > 4 else 256
ROUNDS = 4
HOST, PORT = BASE.removeprefix("http://").split(":")


def memory_mib():
    """Resident memory of the server."""
    with open(f"/proc/{PROCESS}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


async def open_stream(i, max_tokens):
    body = json.dumps({"prompt": f"Number {i % 32}:", "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": i % 32}).encode()
    reader, writer = await asyncio.open_connection(HOST, int(PORT))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def whole(i):
    reader, writer = await open_stream(i, 6)
    text = (await reader.read()).decode()
    writer.close()
    assert text.startswith("HTTP/1.1 200") and "data: [DONE]" in text and '"error"' not in text, text[:400]
    # Chunk sizes lie between the lines; the text of the events is what matters.
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return i % 32, "".join(event["choices"][0]["text"] for event in events)


async def leaves(i):
    _, writer = await open_stream(i, 1000)
    return writer


async def main():
    sizes = []
    for _ in range(ROUNDS):
        started = time.time()
        texts = await asyncio.gather(*(whole(i) for i in range(CONNECTIONS)))
        assert len(set(texts)) == len({prompt for prompt, _ in texts}), "equal requests got different texts"
        sizes.append(memory_mib())
        print(f"ok: {CONNECTIONS} streams in {time.time() - started:.1f} s, {sizes[-1]:.0f} MiB", flush=True)
    for _ in range(ROUNDS):
        writers = await asyncio.gather(*(leaves(i) for i in range(CONNECTIONS)))
        while metric("vllm:num_requests_running") == 0:
            await asyncio.sleep(0.02)
        for writer in writers:
            writer.transport.abort()
        started = time.time()
        # The loop closes the sockets at its next turn.
        await asyncio.sleep(0)
        until_idle()
        assert metric("vllm:kv_cache_usage_perc") == 0
        sizes.append(memory_mib())
        print(f"ok: {CONNECTIONS} left, nothing runs after {time.time() - started:.2f} s, {sizes[-1]:.0f} MiB", flush=True)
    growth = max(sizes[1:]) - sizes[0]
    print(f"ok: memory grew by {growth:.1f} MiB after the first round")
    assert growth < 32, sizes


asyncio.run(main())
