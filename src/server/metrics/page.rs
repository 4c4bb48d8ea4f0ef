//! The page that Prometheus reads (text format 0.0.4).

use super::histogram::Histogram;
use super::{Metrics, REASONS};
use crate::engine::handle::StepTotals;
use crate::telemetry::{BlockState, EngineSnapshot, RequestState, WaitReason};
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the page tells besides the counters.
pub struct Facts<'a> {
    pub model_name: &'a str,
    pub max_model_len: u32,
    pub num_blocks: u32,
    pub prefix_caching: bool,
    pub kv_cache_dtype: &'a str,
    pub gpu_memory_utilization: f32,
    pub snapshot: &'a EngineSnapshot,
    pub totals: StepTotals,
}

struct Page<'a> {
    out: String,
    labels: String,
    facts: &'a Facts<'a>,
}

/// The whole page.
pub fn page(metrics: &Metrics, facts: &Facts<'_>) -> String {
    let name = facts.model_name.replace('\\', r"\\").replace('"', "\\\"").replace('\n', "\\n");
    let labels = format!("model_name=\"{name}\",engine=\"0\"");
    let mut page = Page { out: String::with_capacity(32 << 10), labels, facts };
    page.gauges();
    page.counters(metrics);
    page.histograms(metrics);
    page.own(metrics);
    page.out
}

impl Page<'_> {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, more: &str, value: f64) {
        let comma = if more.is_empty() { "" } else { "," };
        let _ = writeln!(self.out, "{name}{{{}{comma}{more}}} {value}", self.labels);
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, "gauge", help);
        self.sample(name, "", value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        let name = format!("{name}_total");
        self.head(&name, "counter", help);
        self.sample(&name, "", value as f64);
    }

    /// `limit` hides buckets that no value can reach.
    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram, limit: f64) {
        self.head(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        for (bound, count) in histogram.cumulative(limit) {
            self.sample(&bucket, &format!("le=\"{bound:?}\""), count as f64);
        }
        // Taken once: the last bucket and the count are to agree.
        let count = histogram.count() as f64;
        self.sample(&bucket, "le=\"+Inf\"", count);
        self.sample(&format!("{name}_sum"), "", histogram.sum());
        self.sample(&format!("{name}_count"), "", count);
    }

    fn gauges(&mut self) {
        let facts = self.facts;
        let (mut running, mut capacity, mut deferred) = (0u32, 0u32, 0u32);
        for request in &facts.snapshot.requests {
            match request.state {
                RequestState::Finished => {}
                RequestState::Waiting { reason: WaitReason::Prefix { .. } | WaitReason::Share { .. }, .. } => {
                    deferred += 1
                }
                RequestState::Waiting { .. } => capacity += 1,
                RequestState::Reading { .. } | RequestState::Decoding => running += 1,
            }
        }
        self.gauge("vllm:num_requests_running", "Requests in the batch.", f64::from(running));
        self.gauge("vllm:num_requests_waiting", "Requests in the queue.", f64::from(capacity + deferred));
        let by_reason = "vllm:num_requests_waiting_by_reason";
        self.head(by_reason, "gauge", "Requests in the queue, by what they wait for.");
        self.sample(by_reason, "reason=\"capacity\"", f64::from(capacity));
        self.sample(by_reason, "reason=\"deferred\"", f64::from(deferred));
        let kv = facts.snapshot.kv;
        let usage = share(u64::from(kv.used), u64::from(kv.total));
        self.gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1.", usage);
        self.gauge("vllm:gpu_cache_usage_perc", "The older name of vllm:kv_cache_usage_perc.", usage);
        let hit_rate = share(kv.hit_tokens, kv.query_tokens);
        self.gauge("vllm:gpu_prefix_cache_hit_rate", "Share of the prompt tokens found in the prefix cache.", hit_rate);
        let config = "vllm:cache_config_info";
        self.head(config, "gauge", "Settings of the KV cache.");
        let settings = format!(
            "block_size=\"{}\",num_gpu_blocks=\"{}\",enable_prefix_caching=\"{}\",cache_dtype=\"{}\",gpu_memory_utilization=\"{}\"",
            facts.snapshot.block_size,
            facts.num_blocks,
            if facts.prefix_caching { "True" } else { "False" },
            facts.kv_cache_dtype,
            facts.gpu_memory_utilization,
        );
        self.sample(config, &settings, 1.0);
        let sleep = "vllm:engine_sleep_state";
        self.head(sleep, "gauge", "Whether the engine is awake.");
        self.sample(sleep, "sleep_state=\"awake\"", 1.0);
        self.sample(sleep, "sleep_state=\"weights_offloaded\"", 0.0);
        self.sample(sleep, "sleep_state=\"discard_all\"", 0.0);
    }

    fn counters(&mut self, metrics: &Metrics) {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let kv = self.facts.snapshot.kv;
        self.counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", kv.query_tokens);
        self.counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", kv.hit_tokens);
        self.counter("vllm:gpu_prefix_cache_queries", "The older name of vllm:prefix_cache_queries.", kv.query_tokens);
        self.counter("vllm:gpu_prefix_cache_hits", "The older name of vllm:prefix_cache_hits.", kv.hit_tokens);
        self.counter("vllm:num_preemptions", "Preemptions.", self.facts.snapshot.preemptions_total);
        self.counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", of(&metrics.prompt_tokens));
        let cached = of(&metrics.prompt_tokens_cached);
        self.counter("vllm:prompt_tokens_cached", "Prompt tokens that were not computed again.", cached);
        self.counter("vllm:generation_tokens", "Output tokens.", of(&metrics.generation_tokens));
        let corrupted = of(&metrics.corrupted_requests);
        self.counter("vllm:corrupted_requests", "Requests with logits that are no numbers, or damaged KV.", corrupted);
        for (name, help) in [
            ("vllm:spec_decode_num_drafts", "Drafts of speculative decoding."),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens of speculative decoding."),
            ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens."),
        ] {
            // There is no speculation, so there are none.
            self.counter(name, help, 0);
        }
        let per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        self.head(per_position, "counter", "Accepted draft tokens by their position in the draft.");
        self.sample(per_position, "position=\"0\"", 0.0);
        let success = "vllm:request_success_total";
        self.head(success, "counter", "Ended requests by reason.");
        for (reason, count) in REASONS.iter().zip(&metrics.finished) {
            self.sample(success, &format!("finished_reason=\"{reason}\""), of(count) as f64);
        }
    }

    fn histograms(&mut self, metrics: &Metrics) {
        let all = f64::INFINITY;
        let context = f64::from(self.facts.max_model_len);
        let m = metrics;
        let list: [(&str, &str, &Histogram, f64); 17] = [
            ("vllm:request_prompt_tokens", "Prompt tokens of a request.", &m.request_prompt_tokens, context),
            ("vllm:request_generation_tokens", "Output tokens of a request.", &m.request_generation_tokens, context),
            ("vllm:iteration_tokens_total", "Tokens of a step.", &m.step_tokens, all),
            ("vllm:request_params_n", "Choices that requests ask for.", &m.params_n, all),
            ("vllm:request_params_max_tokens", "Output tokens that requests allow.", &m.params_max_tokens, context),
            ("vllm:time_to_first_token_seconds", "From submit to the first token.", &m.ttft, all),
            ("vllm:inter_token_latency_seconds", "Between tokens.", &m.inter_token, all),
            ("vllm:request_time_per_output_token_seconds", "Mean time between tokens.", &m.per_output_token, all),
            ("vllm:time_per_output_token_seconds", "The older name of the above.", &m.per_output_token, all),
            ("vllm:e2e_request_latency_seconds", "From submit to the end.", &m.e2e, all),
            ("vllm:request_queue_time_seconds", "From submit to the batch.", &m.queue, all),
            ("vllm:request_inference_time_seconds", "In the batch.", &m.inference, all),
            ("vllm:request_prefill_time_seconds", "From the batch to the first token.", &m.prefill, all),
            ("vllm:request_decode_time_seconds", "From the first token to the last.", &m.decode, all),
            ("vllm:kv_block_lifetime_seconds", "From the taking of a block to its end.", &m.block_lifetime, all),
            ("vllm:kv_block_idle_before_evict_seconds", "Of an evicted block since its use.", &m.block_idle, all),
            ("vllm:kv_block_reuse_gap_seconds", "Between uses of a shared block.", &m.block_reuse, all),
        ];
        for (name, help, histogram, limit) in list {
            self.histogram(name, help, histogram, limit);
        }
    }

    /// What has no name elsewhere.
    fn own(&mut self, metrics: &Metrics) {
        let (snapshot, totals) = (self.facts.snapshot, self.facts.totals);
        self.gauge("kvasir:recompute_tax", "Share of the computed tokens computed again.", snapshot.recompute_tax());
        let all = f64::INFINITY;
        self.histogram("kvasir:step_gpu_seconds", "GPU time of a step.", &metrics.step_gpu, all);
        self.counter("kvasir:steps", "Steps.", totals.steps);
        self.counter("kvasir:failed_steps", "Steps that failed and were tried again.", totals.failed_steps);
        self.counter("kvasir:device_recoveries", "Times that executor and cache were rebuilt.", totals.recoveries);
        self.counter("kvasir:swaps", "Preemptions that saved their blocks.", snapshot.swaps_total);
        let states = "kvasir:kv_blocks";
        self.head(states, "gauge", "KV blocks by state.");
        for (word, state) in
            [("free", BlockState::Free), ("active", BlockState::Active), ("cached", BlockState::CachedIdle)]
        {
            let count = snapshot.blocks.iter().filter(|block| block.state == state).count();
            self.sample(states, &format!("state=\"{word}\""), count as f64);
        }
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
