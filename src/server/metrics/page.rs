//! The page that Prometheus reads (text format 0.0.4): each metric once, with a sample for each model.

use super::histogram::Histogram;
use super::{Metrics, REASONS};
use crate::engine::handle::StepTotals;
use crate::server::app::unix_seconds;
use crate::telemetry::{BlockState, EngineSnapshot, RequestState, WaitReason};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the page tells of one model.
pub struct Facts {
    pub metrics: Arc<Metrics>,
    pub model_name: String,
    pub max_model_len: u32,
    pub num_blocks: u32,
    /// It waits out of memory to be asked for.
    pub is_unloaded: bool,
    /// How often it was loaded and unloaded.
    pub moves: (u64, u64),
    pub prefix_caching: bool,
    pub kv_cache_dtype: &'static str,
    pub gpu_memory_utilization: f32,
    /// Adapters by id and name.
    pub loras: Vec<(u64, String)>,
    /// How many adapters there is room for.
    pub max_loras: u32,
    pub snapshot: Arc<EngineSnapshot>,
    pub totals: StepTotals,
}

/// A model with the labels that its samples have in common.
struct Subject {
    labels: String,
    facts: Facts,
}

struct Page {
    out: String,
    subjects: Arc<[Subject]>,
}

/// The whole page.
pub fn page(all: Vec<Facts>) -> String {
    let subject = |facts: Facts| {
        let name = escaped(&facts.model_name);
        Subject { labels: format!("model_name=\"{name}\",engine=\"0\""), facts }
    };
    let subjects: Arc<[Subject]> = all.into_iter().map(subject).collect();
    let mut page = Page { out: String::with_capacity((32 << 10) * subjects.len()), subjects };
    page.gauges();
    page.counters();
    page.histograms();
    page.own();
    page.out
}

/// Requests of a model by where they are.
#[derive(Clone, Copy, Default)]
struct Load {
    running: u32,
    /// Waits for a place or for blocks.
    capacity: u32,
    /// Waits for another request's prefix.
    deferred: u32,
}

impl Load {
    fn of(snapshot: &EngineSnapshot) -> Load {
        let mut load = Load::default();
        for request in &snapshot.requests {
            match request.state {
                RequestState::Finished => {}
                RequestState::Waiting { reason: WaitReason::Prefix { .. } | WaitReason::Share { .. }, .. } => {
                    load.deferred += 1;
                }
                RequestState::Waiting { .. } => load.capacity += 1,
                RequestState::Reading { .. } | RequestState::Decoding => load.running += 1,
            }
        }
        load
    }
}

/// Names of the adapters that requests have, by whether they run.
fn lora_info(facts: &Facts) -> Vec<(String, f64)> {
    let max = facts.max_loras;
    if max == 0 {
        return Vec::new();
    }
    let names = |is_wanted: fn(&RequestState) -> bool| {
        let has_some = |id: u64| facts.snapshot.requests.iter().any(|r| r.adapter == id && is_wanted(&r.state));
        let names = facts.loras.iter().filter(|(id, _)| has_some(*id)).map(|(_, name)| escaped(name));
        names.collect::<Vec<_>>().join(",")
    };
    let running = names(|state| matches!(state, RequestState::Reading { .. } | RequestState::Decoding));
    let waiting = names(|state| matches!(state, RequestState::Waiting { .. }));
    let labels = format!("max_lora=\"{max}\",running_lora_adapters=\"{running}\",waiting_lora_adapters=\"{waiting}\"");
    vec![(labels, unix_seconds() as f64)]
}

/// A label's value as the format has it.
fn escaped(text: &str) -> String {
    text.replace('\\', r"\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, subject: &Subject, name: &str, more: &str, value: f64) {
        let comma = if more.is_empty() { "" } else { "," };
        let _ = writeln!(self.out, "{name}{{{}{comma}{more}}} {value}", subject.labels);
    }

    /// A metric with a sample for each model and each value of a further label.
    fn each(&mut self, name: &str, kind: &str, help: &str, samples: impl Fn(&Facts) -> Vec<(String, f64)>) {
        self.head(name, kind, help);
        for subject in self.subjects.clone().iter() {
            for (more, value) in samples(&subject.facts) {
                self.sample(subject, name, &more, value);
            }
        }
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Fn(&Facts) -> f64) {
        self.each(name, "gauge", help, |facts| vec![(String::new(), value(facts))]);
    }

    fn counter(&mut self, name: &str, help: &str, value: impl Fn(&Facts) -> u64) {
        self.each(&format!("{name}_total"), "counter", help, |facts| vec![(String::new(), value(facts) as f64)]);
    }

    /// `limit` hides buckets that no value can reach.
    fn histogram(&mut self, name: &str, help: &str, of: fn(&Metrics) -> &Histogram, limit: impl Fn(&Facts) -> f64) {
        self.head(name, "histogram", help);
        let (bucket, sum, total) = (format!("{name}_bucket"), format!("{name}_sum"), format!("{name}_count"));
        for subject in self.subjects.clone().iter() {
            let histogram = of(&subject.facts.metrics);
            for (bound, count) in histogram.cumulative(limit(&subject.facts)) {
                self.sample(subject, &bucket, &format!("le=\"{bound:?}\""), count as f64);
            }
            // Taken once: the last bucket and the count are to agree.
            let count = histogram.count() as f64;
            self.sample(subject, &bucket, "le=\"+Inf\"", count);
            self.sample(subject, &sum, "", histogram.sum());
            self.sample(subject, &total, "", count);
        }
    }

    fn gauges(&mut self) {
        let of = |facts: &Facts| Load::of(&facts.snapshot);
        self.gauge("vllm:num_requests_running", "Requests in the batch.", |facts| f64::from(of(facts).running));
        self.gauge("vllm:num_requests_waiting", "Requests in the queue.", |facts| {
            f64::from(of(facts).capacity + of(facts).deferred)
        });
        let by_reason = "vllm:num_requests_waiting_by_reason";
        self.each(by_reason, "gauge", "Requests in the queue, by what they wait for.", |facts| {
            let load = of(facts);
            let sample = |reason: &str, count| (format!("reason=\"{reason}\""), f64::from(count));
            vec![sample("capacity", load.capacity), sample("deferred", load.deferred)]
        });
        let usage = |facts: &Facts| share(u64::from(facts.snapshot.kv.used), u64::from(facts.snapshot.kv.total));
        self.gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1.", usage);
        self.gauge("vllm:gpu_cache_usage_perc", "The older name of vllm:kv_cache_usage_perc.", usage);
        let hit_rate = "vllm:gpu_prefix_cache_hit_rate";
        self.gauge(hit_rate, "Share of the prompt tokens found in the prefix cache.", |facts| {
            share(facts.snapshot.kv.hit_tokens, facts.snapshot.kv.query_tokens)
        });
        self.each("vllm:cache_config_info", "gauge", "Settings of the KV cache.", |facts| {
            let settings = format!(
                "block_size=\"{}\",num_gpu_blocks=\"{}\",enable_prefix_caching=\"{}\",cache_dtype=\"{}\",gpu_memory_utilization=\"{}\"",
                facts.snapshot.block_size,
                facts.num_blocks,
                if facts.prefix_caching { "True" } else { "False" },
                facts.kv_cache_dtype,
                facts.gpu_memory_utilization,
            );
            vec![(settings, 1.0)]
        });
        if self.subjects.iter().any(|subject| subject.facts.max_loras > 0) {
            self.each(
                "vllm:lora_requests_info",
                "gauge",
                "Adapters of requests, and since when (Unix time).",
                lora_info,
            );
        }
        self.each("vllm:engine_sleep_state", "gauge", "Whether the engine is awake.", |facts| {
            let awake = f64::from(u8::from(!facts.is_unloaded));
            let sample = |state: &str, value| (format!("sleep_state=\"{state}\""), value);
            vec![sample("awake", awake), sample("weights_offloaded", 0.0), sample("discard_all", 1.0 - awake)]
        });
    }

    fn counters(&mut self) {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let queries = |facts: &Facts| facts.snapshot.kv.query_tokens;
        let hits = |facts: &Facts| facts.snapshot.kv.hit_tokens;
        self.counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queries);
        self.counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", hits);
        self.counter("vllm:gpu_prefix_cache_queries", "The older name of vllm:prefix_cache_queries.", queries);
        self.counter("vllm:gpu_prefix_cache_hits", "The older name of vllm:prefix_cache_hits.", hits);
        self.counter("vllm:num_preemptions", "Preemptions.", |facts| facts.snapshot.preemptions_total);
        let counted: [(&str, &str, fn(&Metrics) -> &AtomicU64); 4] = [
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", |m| &m.prompt_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens that were not computed again.", |m| &m.prompt_tokens_cached),
            ("vllm:generation_tokens", "Output tokens.", |m| &m.generation_tokens),
            ("vllm:corrupted_requests", "Requests with logits that are no numbers, or damaged KV.", |m| {
                &m.corrupted_requests
            }),
        ];
        for (name, help, counter) in counted {
            self.counter(name, help, |facts| of(counter(&facts.metrics)));
        }
        for (name, help) in [
            ("vllm:spec_decode_num_drafts", "Drafts of speculative decoding."),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens of speculative decoding."),
            ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens."),
        ] {
            // There is no speculation, so there are none.
            self.counter(name, help, |_| 0);
        }
        let per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        self.each(per_position, "counter", "Accepted draft tokens by their position in the draft.", |_| {
            vec![("position=\"0\"".into(), 0.0)]
        });
        self.each("vllm:request_success_total", "counter", "Ended requests by reason.", |facts| {
            let counts = REASONS.iter().zip(&facts.metrics.finished);
            counts.map(|(reason, count)| (format!("finished_reason=\"{reason}\""), of(count) as f64)).collect()
        });
    }

    fn histograms(&mut self) {
        type Row = (&'static str, &'static str, fn(&Metrics) -> &Histogram);
        let in_context: [Row; 3] = [
            ("vllm:request_prompt_tokens", "Prompt tokens of a request.", |m| &m.request_prompt_tokens),
            ("vllm:request_generation_tokens", "Output tokens of a request.", |m| &m.request_generation_tokens),
            ("vllm:request_params_max_tokens", "Output tokens that requests allow.", |m| &m.params_max_tokens),
        ];
        for (name, help, histogram) in in_context {
            self.histogram(name, help, histogram, |facts| f64::from(facts.max_model_len));
        }
        let all: [Row; 14] = [
            ("vllm:iteration_tokens_total", "Tokens of a step.", |m| &m.step_tokens),
            ("vllm:request_params_n", "Choices that requests ask for.", |m| &m.params_n),
            ("vllm:time_to_first_token_seconds", "From submit to the first token.", |m| &m.ttft),
            ("vllm:inter_token_latency_seconds", "Between tokens.", |m| &m.inter_token),
            ("vllm:request_time_per_output_token_seconds", "Mean time between tokens.", |m| &m.per_output_token),
            ("vllm:time_per_output_token_seconds", "The older name of the above.", |m| &m.per_output_token),
            ("vllm:e2e_request_latency_seconds", "From submit to the end.", |m| &m.e2e),
            ("vllm:request_queue_time_seconds", "From submit to the batch.", |m| &m.queue),
            ("vllm:request_inference_time_seconds", "In the batch.", |m| &m.inference),
            ("vllm:request_prefill_time_seconds", "From the batch to the first token.", |m| &m.prefill),
            ("vllm:request_decode_time_seconds", "From the first token to the last.", |m| &m.decode),
            ("vllm:kv_block_lifetime_seconds", "From the taking of a block to its end.", |m| &m.block_lifetime),
            ("vllm:kv_block_idle_before_evict_seconds", "Of an evicted block since its use.", |m| &m.block_idle),
            ("vllm:kv_block_reuse_gap_seconds", "Between uses of a shared block.", |m| &m.block_reuse),
        ];
        for (name, help, histogram) in all {
            self.histogram(name, help, histogram, |_| f64::INFINITY);
        }
    }

    /// What has no name elsewhere.
    fn own(&mut self) {
        let tax = "Share of the computed tokens computed again.";
        self.gauge("kvasir:recompute_tax", tax, |facts| facts.snapshot.recompute_tax());
        self.gauge("kvasir:model_loaded", "1 where the model is not waiting to be asked for.", |facts| {
            f64::from(u8::from(!facts.is_unloaded))
        });
        self.histogram("kvasir:step_gpu_seconds", "GPU time of a step.", |m| &m.step_gpu, |_| f64::INFINITY);
        let counters: [(&str, &str, fn(&Facts) -> u64); 7] = [
            ("kvasir:steps", "Steps.", |facts| facts.totals.steps),
            (
                "kvasir:jump_forward_tokens",
                "Output tokens that grammars forced, so that no step sampled them.",
                |facts| facts.totals.forced_tokens,
            ),
            ("kvasir:failed_steps", "Steps that failed and were tried again.", |facts| facts.totals.failed_steps),
            ("kvasir:device_recoveries", "Times that executor and cache were rebuilt.", |facts| {
                facts.totals.recoveries
            }),
            ("kvasir:swaps", "Preemptions that saved their blocks.", |facts| facts.snapshot.swaps_total),
            ("kvasir:model_loads", "Times that the model was loaded.", |facts| facts.moves.0),
            ("kvasir:model_unloads", "Times that the model was unloaded, for others or for being idle.", |facts| {
                facts.moves.1
            }),
        ];
        for (name, help, value) in counters {
            self.counter(name, help, value);
        }
        self.each("kvasir:kv_blocks", "gauge", "KV blocks by state.", |facts| {
            let blocks = &facts.snapshot.blocks;
            let sample = |(word, state): (&str, BlockState)| {
                let count = blocks.iter().filter(|block| block.state == state).count();
                (format!("state=\"{word}\""), count as f64)
            };
            let states =
                [("free", BlockState::Free), ("active", BlockState::Active), ("cached", BlockState::CachedIdle)];
            states.into_iter().map(sample).collect()
        });
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
