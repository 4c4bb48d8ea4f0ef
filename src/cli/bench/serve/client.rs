//! One streamed request, timed where the client sees it.

use super::ServeBenchArgs;
use super::prompts::Prompt;
use crate::cli::error::CliError;
use crate::engine::remote::EventLines as Lines;
use crate::model::hub::with_causes;
use reqwest::{Client, RequestBuilder};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Endpoint {
    /// /v1/completions
    Completions,
    /// /v1/chat/completions
    Chat,
}

impl Endpoint {
    pub fn path(self) -> &'static str {
        match self {
            Endpoint::Completions => "/v1/completions",
            Endpoint::Chat => "/v1/chat/completions",
        }
    }
}

/// The server under load.
pub struct Target {
    client: Client,
    base_url: String,
    api_key: Option<String>,
    endpoint: Endpoint,
    temperature: f32,
    pub model: String,
}

/// What became of a request. Times are in seconds.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub started: Option<Instant>,
    /// Since the first start of the run.
    pub started_s: f64,
    pub input_tokens: u32,
    pub output_tokens: u32,
    pub ttft_s: f64,
    /// Between chunks that bring text.
    pub itls_s: Vec<f64>,
    pub e2el_s: f64,
    pub fault: Option<String>,
}

impl Outcome {
    /// Mean time per output token after the first.
    pub fn tpot_s(&self) -> Option<f64> {
        (self.output_tokens > 1).then(|| (self.e2el_s - self.ttft_s) / f64::from(self.output_tokens - 1))
    }
}

impl Target {
    /// Finds the model's name where none is given.
    pub async fn connect(args: &ServeBenchArgs) -> Result<Target, CliError> {
        // Another part of the program may have chosen its provider already; either serves.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = Client::builder().connect_timeout(Duration::from_secs(10)).tcp_nodelay(true);
        if ["127.0.0.1", "localhost", "[::1]"].iter().any(|host| args.base_url.contains(host)) {
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(|e| CliError::failure(with_causes(&e)))?;
        let mut target = Target {
            client,
            base_url: args.base_url.trim_end_matches('/').to_owned(),
            api_key: args.api_key.clone(),
            endpoint: args.endpoint,
            temperature: args.temperature,
            model: args.model.clone().unwrap_or_default(),
        };
        if target.model.is_empty() {
            let request = target.with_key(target.client.get(format!("{}/v1/models", target.base_url)));
            let models = json_of(request).await.map_err(|fault| {
                CliError::failure(format!("{}/v1/models: {fault}", target.base_url))
                    .with_fix("start the server first, or name it with --base-url")
            })?;
            let first = models["data"][0]["id"].as_str();
            target.model = first.ok_or_else(|| CliError::failure("the server lists no model"))?.to_owned();
        }
        Ok(target)
    }

    /// A small request with an answer in JSON.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, String> {
        json_of(self.request(path, body)).await
    }

    fn request(&self, path: &str, body: &Value) -> RequestBuilder {
        let request = self.client.post(format!("{}{path}", self.base_url));
        self.with_key(request).header("content-type", "application/json").body(body.to_string())
    }

    fn with_key(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.api_key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        }
    }

    fn body(&self, prompt: &Prompt) -> Value {
        let mut body = json!({
            "model": self.model, "max_tokens": prompt.output_len, "temperature": self.temperature, "ignore_eos": true,
            "stream": true, "stream_options": { "include_usage": true },
        });
        match self.endpoint {
            Endpoint::Completions => body["prompt"] = prompt.content.clone(),
            Endpoint::Chat => body["messages"] = json!([{ "role": "user", "content": prompt.content }]),
        }
        body
    }

    /// Asks and reads to the end.
    pub async fn ask(&self, prompt: &Prompt) -> Outcome {
        let started = Instant::now();
        let mut outcome = Outcome { started: Some(started), input_tokens: prompt.input_len, ..Outcome::default() };
        if let Err(fault) = self.stream(prompt, started, &mut outcome).await {
            outcome.fault = Some(fault);
        }
        outcome
    }

    async fn stream(&self, prompt: &Prompt, started: Instant, outcome: &mut Outcome) -> Result<(), String> {
        let sent = self.request(self.endpoint.path(), &self.body(prompt)).send().await;
        let mut response = sent.map_err(|e| with_causes(&e))?;
        let status = response.status();
        if !status.is_success() {
            return Err(format!("{status}: {}", response.text().await.unwrap_or_default()));
        }
        let mut lines = Lines::default();
        let mut last = None;
        let mut num_chunks = 0;
        while let Some(bytes) = response.chunk().await.map_err(|e| with_causes(&e))? {
            let now = Instant::now();
            for data in lines.push(&bytes) {
                let Ok(event) = serde_json::from_str::<Value>(&data) else { continue };
                if let Some(message) = event["error"]["message"].as_str() {
                    return Err(message.to_owned());
                }
                let choice = &event["choices"][0];
                let text = choice["text"].as_str().or(choice["delta"]["content"].as_str());
                let text = text.or(choice["delta"]["reasoning_content"].as_str());
                if text.is_some_and(|text| !text.is_empty()) {
                    match last.replace(now) {
                        None => outcome.ttft_s = now.duration_since(started).as_secs_f64(),
                        Some(before) => outcome.itls_s.push(now.duration_since(before).as_secs_f64()),
                    }
                    outcome.e2el_s = now.duration_since(started).as_secs_f64();
                    num_chunks += 1;
                }
                if let Some(tokens) = event["usage"]["completion_tokens"].as_u64() {
                    outcome.output_tokens = tokens as u32;
                    outcome.input_tokens =
                        event["usage"]["prompt_tokens"].as_u64().map_or(outcome.input_tokens, |n| n as u32);
                }
            }
        }
        if last.is_none() {
            return Err("the answer has no text".into());
        }
        if outcome.output_tokens == 0 {
            // Without usage a chunk counts as a token.
            outcome.output_tokens = num_chunks;
        }
        Ok(())
    }
}

async fn json_of(request: RequestBuilder) -> Result<Value, String> {
    let response = request.send().await.map_err(|e| with_causes(&e))?;
    let status = response.status();
    let text = response.text().await.map_err(|e| with_causes(&e))?;
    if !status.is_success() {
        return Err(format!("{status}: {text}"));
    }
    serde_json::from_str(&text).map_err(|e| e.to_string())
}
