//! What a run measured, under the names of `vllm bench serve`.

use super::ServeBenchArgs;
use super::client::Outcome;
use crate::cli::error::CliError;
use serde_json::{Map, Value, json};

/// A measure of a request in milliseconds; `None` where it has none.
type Measure = fn(&Outcome) -> Option<f64>;

/// What limits of good requests and tables know.
const MEASURES: [(&str, Measure); 3] = [
    ("ttft", |outcome| Some(outcome.ttft_s * 1e3)),
    ("tpot", |outcome| outcome.tpot_s().map(|s| s * 1e3)),
    ("e2el", |outcome| Some(outcome.e2el_s * 1e3)),
];

#[derive(Clone, Debug, Default)]
pub struct Figures {
    pub model: String,
    pub duration_s: f64,
    pub outcomes: Vec<Outcome>,
}

/// A limit that good requests keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    measure: usize,
    at_most_ms: f64,
}

/// Reads `ttft:200` and the like.
pub fn limits(texts: &[String]) -> Result<Vec<Limit>, CliError> {
    let limit = |text: &String| {
        let (name, ms) = text.split_once(':')?;
        let measure = MEASURES.iter().position(|(known, _)| *known == name)?;
        Some(Limit { measure, at_most_ms: ms.parse().ok().filter(|ms| *ms > 0.0)? })
    };
    let fault = |text| CliError::usage(format!("--goodput takes ttft:MS, tpot:MS or e2el:MS, not `{text}`"));
    texts.iter().map(|text| limit(text).ok_or_else(|| fault(text))).collect()
}

impl Figures {
    /// Why the first failed request did.
    pub fn first_fault(&self) -> String {
        self.outcomes.iter().find_map(|outcome| outcome.fault.clone()).unwrap_or_default()
    }

    pub fn json(&self, args: &ServeBenchArgs, limits: &[Limit]) -> Value {
        let good: Vec<&Outcome> = self.outcomes.iter().filter(|outcome| outcome.fault.is_none()).collect();
        let (input, output): (u64, u64) = good.iter().fold((0, 0), |(i, o), outcome| {
            (i + u64::from(outcome.input_tokens), o + u64::from(outcome.output_tokens))
        });
        let per_second = |count: u64| count as f64 / self.duration_s.max(f64::MIN_POSITIVE);
        let keeps = |outcome: &&&Outcome| {
            limits.iter().all(|limit| (MEASURES[limit.measure].1)(outcome).is_none_or(|ms| ms <= limit.at_most_ms))
        };
        let kept = good.iter().filter(keeps).count() as u64;
        let (most_tokens, most_requests) = peaks(&good);
        let mut result = json!({
            "date": jiff::Timestamp::now().to_string(),
            "endpoint_type": "openai",
            "backend": "openai",
            "model_id": self.model,
            "num_prompts": args.num_prompts,
            "request_rate": if args.request_rate.is_finite() { json!(args.request_rate) } else { json!("inf") },
            "burstiness": args.burstiness,
            "max_concurrency": args.max_concurrency,
            "duration": self.duration_s,
            "completed": good.len(),
            "failed": self.outcomes.len() - good.len(),
            "total_input_tokens": input,
            "total_output_tokens": output,
            "request_throughput": per_second(good.len() as u64),
            "request_goodput": if limits.is_empty() { Value::Null } else { json!(per_second(kept)) },
            "output_throughput": per_second(output),
            "total_token_throughput": per_second(input + output),
            "max_output_tokens_per_s": most_tokens,
            "max_concurrent_requests": most_requests,
        });
        let fields = result.as_object_mut().expect("it was made as an object");
        for (name, measure) in MEASURES {
            spread(fields, name, good.iter().filter_map(|outcome| measure(outcome)).collect());
        }
        let itls = good.iter().flat_map(|outcome| &outcome.itls_s).map(|s| s * 1e3);
        spread(fields, "itl", itls.collect());
        if args.save_detailed {
            let all = |of: fn(&Outcome) -> Value| Value::from(self.outcomes.iter().map(of).collect::<Vec<_>>());
            fields.insert("input_lens".into(), all(|outcome| outcome.input_tokens.into()));
            fields.insert("output_lens".into(), all(|outcome| outcome.output_tokens.into()));
            fields.insert("ttfts".into(), all(|outcome| outcome.ttft_s.into()));
            fields.insert("itls".into(), all(|outcome| outcome.itls_s.clone().into()));
            fields.insert("start_times".into(), all(|outcome| outcome.started_s.into()));
            fields.insert("errors".into(), all(|outcome| outcome.fault.clone().unwrap_or_default().into()));
        }
        result
    }
}

/// Mean, median, standard deviation and 99th percentile of milliseconds, as `mean_ttft_ms` and so on.
fn spread(fields: &mut Map<String, Value>, name: &str, mut values: Vec<f64>) {
    values.sort_by(f64::total_cmp);
    let number = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / number;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / number;
    for (what, value) in
        [("mean", mean), ("median", between(&values, 0.5)), ("std", variance.sqrt()), ("p99", between(&values, 0.99))]
    {
        fields.insert(format!("{what}_{name}_ms"), value.into());
    }
}

/// The percentile of sorted values, between neighbours in a straight line, as numpy has it; 0 for none.
pub fn between(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let at = share * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

/// Most output tokens in a second of the run, and most requests at a time.
fn peaks(good: &[&Outcome]) -> (f64, usize) {
    let end = good.iter().map(|outcome| outcome.started_s + outcome.e2el_s).fold(0.0, f64::max);
    let mut tokens = vec![0.0; end as usize + 1];
    let mut changes = Vec::with_capacity(2 * good.len());
    for outcome in good {
        // A chunk may hold several tokens.
        let per_chunk = f64::from(outcome.output_tokens) / (outcome.itls_s.len() + 1) as f64;
        let mut at = outcome.started_s + outcome.ttft_s;
        for itl in std::iter::once(0.0).chain(outcome.itls_s.iter().copied()) {
            at += itl;
            if let Some(second) = tokens.get_mut(at as usize) {
                *second += per_chunk;
            }
        }
        changes.extend([(outcome.started_s, 1i64), (outcome.started_s + outcome.e2el_s, -1)]);
    }
    // Who ends makes room for who starts at the same time.
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let (mut now, mut most) = (0, 0);
    for (_, change) in changes {
        now += change;
        most = most.max(now);
    }
    (tokens.into_iter().fold(0.0, f64::max), most as usize)
}

/// The figures for a person.
pub fn table(result: &Value) -> String {
    let number = |name: &str| result[name].as_f64().unwrap_or(0.0);
    let mut text = String::new();
    let mut line = |label: &str, value: String| text.push_str(&format!("{label:<36}{value:>12}\n"));
    line("Requests that ended well", format!("{:.0}", number("completed")));
    line("Requests that failed", format!("{:.0}", number("failed")));
    line("Duration (s)", format!("{:.2}", number("duration")));
    line("Input tokens", format!("{:.0}", number("total_input_tokens")));
    line("Output tokens", format!("{:.0}", number("total_output_tokens")));
    line("Requests per second", format!("{:.2}", number("request_throughput")));
    if result["request_goodput"].is_number() {
        line("Good requests per second", format!("{:.2}", number("request_goodput")));
    }
    line("Output tokens per second", format!("{:.2}", number("output_throughput")));
    line("Most output tokens in a second", format!("{:.0}", number("max_output_tokens_per_s")));
    line("Most requests at a time", format!("{:.0}", number("max_concurrent_requests")));
    line("All tokens per second", format!("{:.2}", number("total_token_throughput")));
    for (name, label) in [
        ("ttft", "Time to first token"),
        ("tpot", "Time per output token after it"),
        ("itl", "Time between chunks"),
        ("e2el", "Time to the end"),
    ] {
        for what in ["mean", "median", "p99"] {
            line(&format!("{label}, {what} (ms)"), format!("{:.2}", number(&format!("{what}_{name}_ms"))));
        }
    }
    text
}
