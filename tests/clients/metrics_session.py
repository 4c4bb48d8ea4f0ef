"""The metrics page as Prometheus' own client reads it: python metrics_session.py http://127.0.0.1:8000 KEY"""

import http.client
import statistics
import time

from prometheus_client.parser import text_string_to_metric_families

from common import BASE, session

SECONDS = {
    "vllm:time_to_first_token_seconds": [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560],
}
TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
REQUEST = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
SECONDS |= {f"vllm:{name}_seconds": TOKEN for name in ("inter_token_latency", "request_time_per_output_token", "time_per_output_token")}
SECONDS |= {f"vllm:{name}_seconds": REQUEST for name in (
    "e2e_request_latency", "request_queue_time", "request_inference_time", "request_prefill_time", "request_decode_time")}
HISTOGRAMS = [*SECONDS, *(f"vllm:{name}" for name in (
    "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total", "request_params_n", "request_params_max_tokens",
    "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds"))]
GAUGES = {
    "vllm:num_requests_running": [], "vllm:num_requests_waiting": [], "vllm:num_requests_waiting_by_reason": ["reason"],
    "vllm:kv_cache_usage_perc": [], "vllm:cache_config_info": ["block_size", "num_gpu_blocks"], "vllm:engine_sleep_state": ["sleep_state"],
    "vllm:gpu_cache_usage_perc": [], "vllm:gpu_prefix_cache_hit_rate": [],
}
# The parser drops `_total` from the names of families.
COUNTERS = {f"vllm:{name}": [] for name in (
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "prompt_tokens_cached", "generation_tokens",
    "corrupted_requests", "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "gpu_prefix_cache_hits", "gpu_prefix_cache_queries")}
COUNTERS |= {"vllm:request_success": ["finished_reason"], "vllm:spec_decode_num_accepted_tokens_per_pos": ["position"]}

CONNECTION = http.client.HTTPConnection(BASE.removeprefix("http://"))


def page():
    CONNECTION.request("GET", "/metrics")
    answer = CONNECTION.getresponse()
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return answer.read().decode()


def names():
    families = {family.name: family for family in text_string_to_metric_families(page())}
    for kind, wanted in (("gauge", GAUGES), ("counter", COUNTERS)):
        for name, labels in wanted.items():
            assert families[name].type == kind, name
            for sample in families[name].samples:
                assert {"model_name", "engine", *labels} <= set(sample.labels), sample
    for name in HISTOGRAMS:
        family = families[name]
        assert family.type == "histogram", name
        bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
        counts = [s.value for s in family.samples if s.name.endswith("_bucket")]
        assert counts == sorted(counts) and bounds[-1] == float("inf"), name
        assert counts[-1] == next(s.value for s in family.samples if s.name.endswith("_count")), name
        if name in SECONDS:
            assert bounds[:-1] == SECONDS[name], f"{name}: {bounds}"
    assert any(name.startswith("kvasir:") for name in families)


def speed():
    times = []
    for _ in range(300):
        started = time.perf_counter()
        text = page()
        times.append(time.perf_counter() - started)
    print(f"   {len(text)} bytes in {statistics.median(times) * 1e3:.2f} ms (median, with the client's own time)")
    assert statistics.median(times) < 0.001


session(names, speed)
