"""What the sessions of Python clients share: the question, the schema, the engine's own counters."""

import sys
import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

BASE, KEY = sys.argv[1], sys.argv[2]
ASK = [{"role": "user", "content": "Say hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
        "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": CITY}}


def metric(name):
    """The value of a metric that has one series."""
    page = urllib.request.urlopen(f"{BASE}/metrics").read().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    return families[name].samples[0].value


def until_idle():
    """Waits until nothing runs: what an abort must come to."""
    deadline = time.time() + 20
    while metric("vllm:num_requests_running") + metric("vllm:num_requests_waiting") != 0:
        assert time.time() < deadline, "the request still runs"
        time.sleep(0.05)


def expect(error, call):
    """The error that a call must end with."""
    try:
        call()
    except error as caught:
        return caught
    raise AssertionError(f"{error.__name__} was expected")


def session(*parts):
    """Runs the parts one after the other and names each that passed."""
    for part in parts:
        part()
        print(f"ok: {part.__name__}", flush=True)
