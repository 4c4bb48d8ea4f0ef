//! Watches the events of one run.

use super::Metrics;
use crate::protocol::{EngineEvent, FinishReason, GenerateRequest, RunError, RunTimings, Usage};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Counts one run: at its start, with each token, at its end. One that is dropped before its end was aborted.
pub struct RunMeter {
    metrics: Arc<Metrics>,
    submitted: Instant,
    has_token: bool,
    /// When each choice had its last token.
    last_token: HashMap<u32, Instant>,
    is_over: bool,
}

impl RunMeter {
    /// A run that is queued now.
    pub fn new(metrics: Arc<Metrics>, request: &GenerateRequest) -> Self {
        metrics.params_n.observe(f64::from(request.decoding.num_choices()));
        if let Some(max_tokens) = request.stop.max_tokens {
            metrics.params_max_tokens.observe(f64::from(max_tokens));
        }

        let submitted = Instant::now();
        RunMeter { metrics, submitted, has_token: false, last_token: HashMap::new(), is_over: false }
    }

    /// The engine did not take it.
    pub fn refuse(mut self) {
        self.is_over = true;
    }

    pub fn observe(&mut self, event: &EngineEvent) {
        match event {
            EngineEvent::Started { prompt_tokens, cached_tokens } => {
                self.metrics.prompt_tokens.fetch_add(u64::from(*prompt_tokens), Ordering::Relaxed);
                self.metrics.prompt_tokens_cached.fetch_add(u64::from(*cached_tokens), Ordering::Relaxed);
            }
            EngineEvent::Text { choice, tokens, .. } if !tokens.is_empty() => self.tokens(*choice, tokens.len() as u64),
            EngineEvent::Finished { reason, usage, timings } => self.finished(reason, *usage, *timings),
            EngineEvent::Failed { error } => {
                self.is_over = true;
                self.metrics.count_finish("error");
                if matches!(error, RunError::Corrupted { .. } | RunError::NotFinite { .. }) {
                    self.metrics.corrupted_requests.fetch_add(1, Ordering::Relaxed);
                }
            }
            _ => {}
        }
    }

    fn tokens(&mut self, choice: u32, num_tokens: u64) {
        let now = Instant::now();
        let metrics = &self.metrics;
        metrics.generation_tokens.fetch_add(num_tokens, Ordering::Relaxed);
        if !std::mem::replace(&mut self.has_token, true) {
            metrics.ttft.observe((now - self.submitted).as_secs_f64());
        }
        if let Some(last) = self.last_token.insert(choice, now) {
            // Merged tokens share the time since the last event.
            metrics.inter_token.observe_times((now - last).as_secs_f64() / num_tokens as f64, num_tokens);
        }
    }

    fn finished(&mut self, reason: &FinishReason, usage: Usage, timings: RunTimings) {
        self.is_over = true;
        let metrics = &self.metrics;
        metrics.count_finish(reason.api_word());
        metrics.e2e.observe(self.submitted.elapsed().as_secs_f64());
        let prefill_us = timings.ttft_us.saturating_sub(timings.queue_us);
        metrics.queue.observe_us(timings.queue_us);
        metrics.prefill.observe_us(prefill_us);
        metrics.decode.observe_us(timings.decode_us);
        metrics.inference.observe_us(prefill_us + timings.decode_us);
        metrics.request_prompt_tokens.observe(f64::from(usage.prompt_tokens));
        metrics.request_generation_tokens.observe(f64::from(usage.output_tokens));
        if usage.output_tokens > 1 {
            metrics.per_output_token.observe_us(timings.decode_us / u64::from(usage.output_tokens - 1));
        }
    }
}

impl Drop for RunMeter {
    fn drop(&mut self) {
        if !self.is_over {
            self.metrics.count_finish("abort");
        }
    }
}
