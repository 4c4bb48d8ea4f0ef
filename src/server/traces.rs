//! Traces: W3C trace context from clients, and a span for each request that runs, sent to an OpenTelemetry collector as
//! OTLP over HTTP in JSON.
//!
//! Guarantees: nobody waits for the collector; spans that find the queue full, or no collector, are dropped and counted in
//! the log; without an endpoint nothing is measured. Names of attributes are vLLM's. It does not attempt gRPC, metrics or
//! logs over OTLP.

use super::app::{Caller, unix_ns};
use crate::protocol::{EngineEvent, GenerateRequest, OutputRules};
use serde_json::{Value, json};
use std::sync::Mutex;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Spans that may wait to be sent.
const QUEUE: usize = 4096;
/// Spans of one message to the collector.
const BATCH: usize = 256;
const BATCH_INTERVAL: Duration = Duration::from_secs(1);
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Where a client's trace stands: the header `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    pub trace_id: u128,
    pub parent_id: u64,
}

impl TraceContext {
    /// Reads `version-trace-parent-flags`; what is not as the recommendation has it does not count.
    pub fn parse(header: &str) -> Option<Self> {
        let mut parts = header.trim().split('-');
        let mut hex = |len: usize| {
            let is_hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
            parts.next().filter(|part| part.len() == len && part.chars().all(is_hex))
        };
        let (version, trace, parent, _flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
        // Later versions may say more.
        if version == "ff" || (version == "00" && parts.next().is_some()) {
            return None;
        }
        let trace_id = u128::from_str_radix(trace, 16).ok().filter(|id| *id != 0)?;
        let parent_id = u64::from_str_radix(parent, 16).ok().filter(|id| *id != 0)?;
        Some(TraceContext { trace_id, parent_id })
    }
}

enum Message {
    Span(Value),
    Flush(oneshot::Sender<()>),
}

/// Takes spans in.
pub struct Tracer {
    sender: mpsc::Sender<Message>,
    /// Until it is started.
    exporter: Mutex<Option<Exporter>>,
}

struct Exporter {
    endpoint: String,
    receiver: mpsc::Receiver<Message>,
}

impl Tracer {
    /// For a collector at `endpoint`, whose path is `/v1/traces` where it has none.
    pub fn new(endpoint: &str) -> Tracer {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let endpoint = endpoint.trim_end_matches('/');
        let has_path = endpoint.split_once("://").is_some_and(|(_, rest)| rest.contains('/'));
        let endpoint = if has_path { endpoint.to_owned() } else { format!("{endpoint}/v1/traces") };
        let exporter = Mutex::new(Some(Exporter { endpoint, receiver }));
        Tracer { sender, exporter }
    }

    /// Sends spans from now on, in a task of its own.
    pub fn start(&self) {
        if let Some(exporter) = self.exporter.lock().unwrap_or_else(|e| e.into_inner()).take() {
            tokio::spawn(exporter.run());
        }
    }

    /// Waits until what was taken in is sent.
    pub async fn flush(&self) {
        let (done, is_done) = oneshot::channel();
        if self.sender.send(Message::Flush(done)).await.is_ok() {
            // A collector that is gone was waited for once.
            let _ = tokio::time::timeout(SEND_TIMEOUT, is_done).await;
        }
    }

    /// A span for a request whose runs begin now.
    pub fn begin(&self, caller: &Caller, model: &str, requests: &[(GenerateRequest, OutputRules)]) -> RequestSpan {
        let context = caller.trace;
        let mut ids = [0u8; 24];
        // Without randomness of the system spans of one process may be taken for one another: nothing else hangs on it.
        let _ = getrandom::fill(&mut ids);
        let (own_trace, span) = ids.split_at(16);
        let own_trace = u128::from_le_bytes(own_trace.try_into().expect("16 of 24 bytes")).max(1);
        let first = requests.first().map(|(request, _)| request);
        let mut attributes = vec![
            text("gen_ai.request.id", &caller.request_id),
            text("gen_ai.response.model", model),
            int("gen_ai.request.n", first.map_or(1, |r| u64::from(r.decoding.num_choices()))),
        ];
        if let Some(request) = first {
            attributes.push(double("gen_ai.request.temperature", request.sampling.temperature.into()));
            attributes.push(double("gen_ai.request.top_p", request.sampling.top_p.into()));
            let max_tokens = request.stop.max_tokens.map(|n| int("gen_ai.request.max_tokens", n.into()));
            attributes.extend(max_tokens);
        }
        RequestSpan {
            sender: self.sender.clone(),
            trace_id: context.map_or(own_trace, |context| context.trace_id),
            span_id: u64::from_le_bytes(span.try_into().expect("8 of 24 bytes")).max(1),
            parent_id: context.map(|context| context.parent_id),
            start_ns: unix_ns(),
            attributes,
            tokens: (0, 0),
            first_token_ns: None,
            fault: None,
        }
    }
}

impl Exporter {
    async fn run(mut self) {
        // Another part of the program may have chosen its provider already; either serves.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let Ok(client) = reqwest::Client::builder().timeout(SEND_TIMEOUT).build() else { return };
        let mut is_reached = true;
        loop {
            let Some(first) = self.receiver.recv().await else { return };
            let (mut spans, mut flush) = (Vec::new(), None);
            let mut next = Some(first);
            let deadline = tokio::time::sleep(BATCH_INTERVAL);
            tokio::pin!(deadline);
            while let Some(message) = next {
                match message {
                    Message::Span(span) => spans.push(span),
                    Message::Flush(done) => {
                        flush = Some(done);
                        break;
                    }
                }
                if spans.len() >= BATCH {
                    break;
                }
                next = tokio::select! {
                    message = self.receiver.recv() => message,
                    () = &mut deadline => None,
                };
            }
            if !spans.is_empty() {
                let sent = self.send(&client, &spans).await;
                match (&sent, is_reached) {
                    (Err(fault), true) => tracing::warn!("spans do not reach {}: {fault}", self.endpoint),
                    (Ok(()), false) => tracing::info!("spans reach {} again", self.endpoint),
                    _ => {}
                }
                is_reached = sent.is_ok();
            }
            if let Some(done) = flush {
                let _ = done.send(());
            }
        }
    }

    async fn send(&self, client: &reqwest::Client, spans: &[Value]) -> Result<(), String> {
        let version = env!("CARGO_PKG_VERSION");
        let body = json!({ "resourceSpans": [{
            "resource": { "attributes": [text("service.name", "kvasir"), text("service.version", version)] },
            "scopeSpans": [{ "scope": { "name": "kvasir", "version": version }, "spans": spans }],
        }] });
        let request = client.post(&self.endpoint).header("content-type", "application/json").body(body.to_string());
        let response = request.send().await.map_err(|e| e.to_string())?;
        response.error_for_status().map(drop).map_err(|e| e.to_string())
    }
}

/// One request under way; the span ends when this is dropped.
pub struct RequestSpan {
    sender: mpsc::Sender<Message>,
    trace_id: u128,
    span_id: u64,
    parent_id: Option<u64>,
    start_ns: u64,
    attributes: Vec<Value>,
    /// Of prompts and outputs.
    tokens: (u64, u64),
    first_token_ns: Option<u64>,
    fault: Option<String>,
}

impl RequestSpan {
    pub fn observe(&mut self, event: &EngineEvent) {
        match event {
            EngineEvent::Text { tokens, .. } if !tokens.is_empty() => {
                self.first_token_ns.get_or_insert_with(unix_ns);
            }
            EngineEvent::Finished { usage, timings, .. } => {
                self.tokens.0 += u64::from(usage.prompt_tokens);
                self.tokens.1 += u64::from(usage.output_tokens);
                let queue_s = timings.queue_us as f64 / 1e6;
                self.attributes.push(double("gen_ai.latency.time_in_queue", queue_s));
            }
            EngineEvent::Failed { error } => self.fault = Some(error.to_string()),
            _ => {}
        }
    }

    fn value(&mut self) -> Value {
        let end_ns = unix_ns().max(self.start_ns);
        let seconds = |ns: u64| (ns.saturating_sub(self.start_ns)) as f64 / 1e9;
        let mut attributes = std::mem::take(&mut self.attributes);
        attributes.push(int("gen_ai.usage.prompt_tokens", self.tokens.0));
        attributes.push(int("gen_ai.usage.completion_tokens", self.tokens.1));
        attributes.push(double("gen_ai.latency.e2e", seconds(end_ns)));
        attributes.extend(self.first_token_ns.map(|ns| double("gen_ai.latency.time_to_first_token", seconds(ns))));
        let status = match &self.fault {
            Some(fault) => json!({ "code": 2, "message": fault }),
            None => json!({ "code": 1 }),
        };
        json!({
            "traceId": format!("{:032x}", self.trace_id),
            "spanId": format!("{:016x}", self.span_id),
            "parentSpanId": self.parent_id.map_or_else(String::new, |id| format!("{id:016x}")),
            "name": "llm_request",
            "kind": 2,
            "startTimeUnixNano": self.start_ns.to_string(),
            "endTimeUnixNano": end_ns.to_string(),
            "attributes": attributes,
            "status": status,
        })
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        let span = self.value();
        if self.sender.try_send(Message::Span(span)).is_err() {
            tracing::debug!("a span was dropped: the collector does not keep up");
        }
    }
}

fn text(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

fn int(key: &str, value: u64) -> Value {
    // 64-bit integers are strings in the JSON form of protocol buffers.
    json!({ "key": key, "value": { "intValue": value.to_string() } })
}

fn double(key: &str, value: f64) -> Value {
    json!({ "key": key, "value": { "doubleValue": value } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_context_is_read_as_the_recommendation_has_it() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let context = TraceContext::parse(good).expect("a context");
        assert_eq!(context.trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c);
        assert_eq!(context.parent_id, 0xb7ad_6b71_6920_3331);
        assert!(TraceContext::parse("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more").is_some());
        for bad in [
            "",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        ] {
            assert_eq!(TraceContext::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn an_endpoint_without_a_path_gets_the_usual_one() {
        let endpoint = |given: &str| {
            let tracer = Tracer::new(given);
            let exporter = tracer.exporter.lock().expect("no panic").take();
            exporter.expect("not started").endpoint
        };
        assert_eq!(endpoint("http://localhost:4318"), "http://localhost:4318/v1/traces");
        assert_eq!(endpoint("http://localhost:4318/"), "http://localhost:4318/v1/traces");
        assert_eq!(endpoint("http://collector/other"), "http://collector/other");
    }
}
