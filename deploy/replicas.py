"""Two replicas behind a router, from outside: the service goes on when one of them dies, and prefixes stay together.

    python replicas.py spread ROUTER KEY SHARE REPLICA…    chats on a few long prefixes: what the replicas found in their
                                                           prefix caches must be at least this share
    python replicas.py alive ROUTER KEY                    chats until some in a row are answered
"""

import concurrent.futures
import json
import random
import sys
import time
import urllib.error
import urllib.request

PREFIXES, ROUNDS = 8, 4


def chat(router, key, text, stream=False):
    body = {"model": "kvasir", "max_tokens": 4, "temperature": 0, "stream": stream,
            "messages": [{"role": "system", "content": text}, {"role": "user", "content": "Go on"}]}
    head = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{router}/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    if stream:
        assert text.rstrip().endswith("data: [DONE]"), text
    else:
        assert json.loads(text)["choices"][0]["finish_reason"] in ("stop", "length"), text


def counters(replica):
    page = urllib.request.urlopen(f"{replica}/metrics").read().decode()
    value = lambda name: next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name + "{"))
    return value("vllm:prefix_cache_queries_total"), value("vllm:prefix_cache_hits_total")


def spread(router, key, *replicas):
    """What was found in the prefix caches, as a share of all prompt tokens; None where a replica got nothing."""
    draw = random.Random(time.time_ns())
    words = ["sea", "stone", "river", "lamp", "window", "bread", "road", "cloud", "letter", "garden"]
    prompts = [" ".join(draw.choices(words, k=180)) for _ in range(PREFIXES)]
    before = [counters(replica) for replica in replicas]
    # All prefixes at once, so that a router has a reason to use both replicas; then all again.
    with concurrent.futures.ThreadPoolExecutor(PREFIXES) as threads:
        for turn in range(ROUNDS):
            list(threads.map(lambda i: chat(router, key, prompts[i], stream=(turn + i) % 2 == 1), range(PREFIXES)))
    after = [counters(replica) for replica in replicas]
    asked = [a[0] - b[0] for a, b in zip(after, before)]
    found = [a[1] - b[1] for a, b in zip(after, before)]
    for replica, a, f in zip(replicas, asked, found):
        print(f"{replica}: {a:.0f} prompt tokens, {f:.0f} found in its prefix cache")
    if min(asked) == 0:
        return None
    share = sum(found) / sum(asked)
    # Each prefix is new once: what is best is all but the first of the rounds.
    print(f"found: {share:.1%} of all prompt tokens (at best {1 - 1 / ROUNDS:.1%})")
    return share


def alive(router, key):
    """A request may be lost with the replica that had it; from then on none may."""
    deadline, in_a_row, lost = time.time() + 60, 0, 0
    while in_a_row < 8:
        assert time.time() < deadline, "the service does not go on"
        try:
            chat(router, key, f"Short {time.time_ns()}")
            in_a_row += 1
        except (urllib.error.URLError, ConnectionError, AssertionError):
            lost += 1
            in_a_row = 0
            time.sleep(0.5)
    print(f"8 requests in a row were answered, after {lost} that were not")


if __name__ == "__main__":
    command, router, key, *rest = sys.argv[1:]
    if command == "spread":
        wanted = float(rest.pop(0))
        # A router may need a while before it takes a replica back.
        deadline = time.time() + 120
        while (share := spread(router, key, *rest)) is None:
            assert time.time() < deadline, "a replica got nothing"
            time.sleep(5)
        assert share >= wanted, f"less than {wanted:.0%}"
    else:
        alive(router, key)
