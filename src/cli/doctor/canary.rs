//! `kvasir doctor --canary`: damages a block of the KV cache under a running request, and sees that it is noticed.

use super::DoctorArgs;
use crate::cli::error::{CliError, CliResult, Exit};
use crate::cli::{out, session};
use crate::engine::EngineHandle;
use crate::engine::handle::Run;
use crate::ids::BlockId;
use crate::protocol::{Decoding, EngineEvent, GenerateRequest, OwnerTag, RunError, SamplingParams, StopRules};
use crate::tokenizer::AddSpecial;
use serde_json::json;
use std::time::{Duration, Instant};

/// How long any one thing may take.
const PATIENCE: Duration = Duration::from_secs(120);
const TEXT: &str = "The canary sings as long as the air is good; when it stops, the miners leave at once. ";

pub fn run(args: &DoctorArgs) -> CliResult {
    let session = session::open(&args.model, Some(0), |options| options.kv_canary = true)?;
    let encoded = session.model.tokenizer.encode(&TEXT.repeat(2), AddSpecial::No);
    let prompt = encoded.map_err(|error| CliError::failure(error.to_string()))?;
    let request = GenerateRequest {
        owner: OwnerTag { id: 0, label: "canary".into() },
        prompt,
        sampling: SamplingParams::greedy(),
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(64) },
        decoding: Decoding::ONE,
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    };
    let run = session.engine.submit(request)?;
    let block = damage_first_block(&session.engine, &run)?;
    let error = outcome(&run)?;
    session.engine.shutdown();
    let caught = matches!(error, Some(RunError::Corrupted { block: found, .. }) if found == block);
    let told = error.map_or_else(|| "the request ended as if nothing had happened".to_string(), |e| e.to_string());
    if args.json {
        out::json(&json!({ "canary": { "block": block.0, "caught": caught, "told": told } }))?;
    } else {
        out::line(&format!(
            "Block {block} was damaged on purpose. {}: {told}",
            if caught { "Caught" } else { "Missed" }
        ))?;
    }
    if caught { Ok(Exit::Ok) } else { Err(CliError::failure("the KV canary missed a damaged block")) }
}

/// Waits for the first text, then damages the request's first block between two steps.
fn damage_first_block(engine: &EngineHandle, run: &Run) -> Result<BlockId, CliError> {
    let started = Instant::now();
    loop {
        match run.recv_timeout(PATIENCE) {
            Some(EngineEvent::Text { .. }) => break,
            Some(EngineEvent::Failed { error }) => return Err(error.into()),
            Some(_) if started.elapsed() < PATIENCE => {}
            _ => return Err(CliError::failure("the request got no text")),
        }
    }
    engine.pause();
    loop {
        let snapshot = engine.telemetry().snapshot();
        let info = snapshot.requests.iter().find(|r| r.id == run.id() && !r.blocks.is_empty());
        if let (true, Some(info)) = (engine.is_paused(), info) {
            let block = info.blocks[0];
            engine.corrupt_block(block);
            engine.resume();
            return Ok(block);
        }
        if started.elapsed() > PATIENCE {
            return Err(CliError::failure("the engine does not pause"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How the run ended: its error, if any.
fn outcome(run: &Run) -> Result<Option<RunError>, CliError> {
    loop {
        match run.recv_timeout(PATIENCE) {
            Some(EngineEvent::Failed { error }) => return Ok(Some(error)),
            Some(EngineEvent::Finished { .. }) => return Ok(None),
            Some(_) => {}
            None => return Err(CliError::failure("the request does not end")),
        }
    }
}
