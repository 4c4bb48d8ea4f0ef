//! `kvasir embed`: vectors of texts.

use super::args::{LoraArg, ModelArgs, PoolingArg};
use super::error::{CliError, CliResult, Exit};
use super::{interrupt, out, session};
use crate::engine::pooling::normalised;
use crate::protocol::{EngineEvent, GenerateRequest, OutputRules, OwnerTag, Pooling};
use crate::tokenizer::AddSpecial;
use serde_json::json;
use std::io::BufRead;
use std::time::Duration;

/// Texts that are with the engine at a time.
const PIECE: usize = 64;

#[derive(Clone, Debug, clap::Args)]
pub struct EmbedArgs {
    /// Texts; without any, each line of standard input is one
    #[arg(value_name = "TEXT")]
    pub texts: Vec<String>,
    /// Keep so many values at the head of each vector
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub dimensions: Option<u32>,
    /// One JSON object for all instead of a list of numbers per line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub pooling: PoolingArg,
    #[command(flatten)]
    pub lora: LoraArg,
    #[command(flatten)]
    pub model: ModelArgs,
}

pub fn run(args: &EmbedArgs) -> CliResult {
    let (noun, texts) = match args.texts.is_empty() {
        false => ("text", args.texts.clone()),
        true => ("line", std::io::stdin().lock().lines().collect::<Result<Vec<_>, _>>()?),
    };
    let session = session::open(&args.lora.on(&args.model), None, |options| {
        options.max_queue = options.max_queue.max(PIECE as u32);
    })?;
    let pooling = match (args.pooling.pooling(), &session.model.pooling) {
        (Some(pooling), _) => pooling,
        (None, Ok(pooling)) => *pooling,
        (None, Err(fault)) => return Err(CliError::model(fault.clone()).with_fix("choose one with --pooling")),
    };
    let size = session.model.hidden_size;
    if let Some(dimensions) = args.dimensions.filter(|n| *n > size) {
        return Err(CliError::usage(format!("--dimensions {dimensions} is more than the {size} values of a vector")));
    }
    let mut embeddings = Vec::new();
    for (piece_idx, piece) in texts.chunks(PIECE).enumerate() {
        let place = |idx: usize| format!("{noun} {}", piece_idx * PIECE + idx + 1);
        for (values, prompt_tokens) in embed(&session, piece, pooling, place)? {
            let values = normalised(values, args.dimensions.map(|n| n as usize));
            if args.json {
                let index = embeddings.len();
                embeddings.push(json!({ "index": index, "embedding": values, "prompt_tokens": prompt_tokens }));
            } else {
                out::line(&json!(values).to_string())?;
            }
        }
    }
    if args.json {
        out::json(&json!({ "model": session.model.name, "pooling": pooling, "embeddings": embeddings }))?;
    }
    session.engine.shutdown();
    Ok(Exit::Ok)
}

/// Vectors and numbers of tokens, in the order of the texts. A fault begins with the `place` of its text.
fn embed(
    session: &session::Session,
    texts: &[String],
    pooling: Pooling,
    place: impl Fn(usize) -> String,
) -> Result<Vec<(Vec<f32>, u32)>, CliError> {
    let at = |idx: usize, error: CliError| CliError { message: format!("{}: {}", place(idx), error.message), ..error };
    let mut runs = Vec::with_capacity(texts.len());
    for (idx, text) in texts.iter().enumerate() {
        let encoded = session.model.tokenizer.encode(text, AddSpecial::Yes);
        let prompt = encoded.map_err(|e| at(idx, CliError::failure(e.to_string())))?;
        let owner = OwnerTag { id: 0, label: "embed".into() };
        let rules = OutputRules { pooling: Some(pooling), ..OutputRules::default() };
        let request = GenerateRequest { adapter: session.lora, ..GenerateRequest::embedding(owner, prompt) };
        runs.push(session.engine.submit_with(request, rules).map_err(|e| at(idx, e.into()))?);
    }
    let mut vectors = Vec::with_capacity(runs.len());
    for (idx, run) in runs.into_iter().enumerate() {
        let mut values = Vec::new();
        loop {
            interrupt::check()?;
            match run.recv_timeout(Duration::from_millis(100)) {
                Some(EngineEvent::Embedding { values: told }) => values = told,
                Some(EngineEvent::Finished { usage, .. }) => {
                    vectors.push((values, usage.prompt_tokens));
                    break;
                }
                Some(EngineEvent::Failed { error }) => return Err(at(idx, error.into())),
                _ => {}
            }
        }
    }
    Ok(vectors)
}
