//! `kvasir chat`: a conversation in the terminal. Ctrl-C stops the answer and keeps the conversation; at the prompt, or
//! pressed again, it quits.

use super::args::{LoraArg, ModelArgs, SamplingArgs};
use super::error::{CliError, CliResult, Exit};
use super::{generate, interrupt, out, session};
use crate::config::HumanInt;
use crate::engine::Run;
use crate::protocol::{Decoding, EngineEvent, GenerateRequest, OwnerTag};
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// How long Ctrl-C waits for an engine that is busy with a long step.
const POLL: Duration = Duration::from_millis(50);

#[derive(Clone, Debug, clap::Args)]
pub struct ChatArgs {
    /// What the assistant is told first
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// At most this many tokens per answer (default: as the context allows)
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<HumanInt>,
    /// Compute this prefix first and keep it: text, or token ids in a .json file (repeatable)
    #[arg(long, value_name = "FILE")]
    pub pin_prefix: Vec<PathBuf>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub lora: LoraArg,
    #[command(flatten)]
    pub model: ModelArgs,
}

pub fn run(args: &ChatArgs) -> CliResult {
    let session = session::open(&args.lora.on(&args.model), args.sampling.seed, |_| {})?;
    session::pin_prefixes(&session, &args.pin_prefix)?;
    if session.model.template.is_none() {
        return Err(session::no_template(&session.model.name, session.model.template_fault.as_deref()));
    }
    let is_terminal = std::io::stdin().is_terminal();
    if is_terminal {
        out::note(&format!("{} · /clear starts over, /quit or Ctrl-D ends", session.model.name));
    }
    let lines = read_lines();
    let mut messages = opening(args);
    loop {
        if is_terminal {
            out::text("> ")?;
        }
        let Some(line) = next_line(&lines)? else { break };
        match line.trim() {
            "" => continue,
            "/quit" | "/exit" => break,
            "/clear" => messages = opening(args),
            text => {
                messages.push(json!({ "role": "user", "content": text }));
                match answer(args, &session, &messages)? {
                    Some(answer) => messages.push(json!({ "role": "assistant", "content": answer })),
                    // The conversation is full: the question is taken back, so that /clear is not the only way on.
                    None => drop(messages.pop()),
                }
            }
        }
    }
    session.engine.shutdown();
    Ok(Exit::Ok)
}

fn opening(args: &ChatArgs) -> Vec<Value> {
    args.system.iter().map(|text| json!({ "role": "system", "content": text })).collect()
}

/// Lines of standard input, read on a thread of their own so that Ctrl-C is seen while waiting.
fn read_lines() -> Receiver<std::io::Result<String>> {
    let (sender, lines) = sync_channel(16);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

/// The next line, or `None` at the end of input.
fn next_line(lines: &Receiver<std::io::Result<String>>) -> Result<Option<String>, CliError> {
    loop {
        interrupt::check()?;
        match lines.recv_timeout(POLL) {
            Ok(line) => return Ok(Some(line?)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

/// Streams one answer; `None` when the conversation is refused.
fn answer(args: &ChatArgs, session: &session::Session, messages: &[Value]) -> Result<Option<String>, CliError> {
    let prompt = session::encode_chat(&session.model, &Value::from(messages.to_vec()))?;
    let submitted = session.engine.submit(GenerateRequest {
        owner: OwnerTag { id: 1, label: "chat".into() },
        prompt,
        sampling: args.sampling.params(&session.model.defaults),
        stop: args.sampling.stop_rules(args.max_tokens),
        decoding: Decoding::ONE,
        priority: 0,
        cache_salt: 0,
        adapter: session.lora,
    });
    let run = match submitted {
        Ok(run) => run,
        Err(error) => {
            out::note(&format!("{error}; /clear starts over"));
            return Ok(None);
        }
    };
    interrupt::reset();
    let text = stream(session, &run)?;
    interrupt::reset();
    Ok(Some(text))
}

fn stream(session: &session::Session, run: &Run) -> Result<String, CliError> {
    let mut text = String::new();
    let mut is_stopping = false;
    loop {
        match interrupt::presses() {
            0 => {}
            1 if !is_stopping => {
                is_stopping = true;
                session.engine.abort(run.id());
            }
            1 => {}
            _ => interrupt::check()?,
        }
        match run.recv_timeout(POLL) {
            Some(EngineEvent::Text { delta, .. }) => {
                // Some templates end with a space that the first token repeats.
                let delta = if text.is_empty() { delta.trim_start() } else { &delta };
                out::text(delta)?;
                text.push_str(delta);
            }
            Some(EngineEvent::Finished { usage, timings, .. }) => {
                out::text("\n")?;
                if out::shows_progress()
                    && let Some(tok_s) = generate::rate(usage.output_tokens.saturating_sub(1), timings.decode_us)
                {
                    out::note(&format!("[{} tokens, {tok_s:.1} tok/s]", usage.output_tokens));
                }
                return Ok(text);
            }
            Some(EngineEvent::Failed { error }) => return Err(error.into()),
            Some(
                EngineEvent::Started { .. }
                | EngineEvent::Reading { .. }
                | EngineEvent::Preempted { .. }
                | EngineEvent::Choice { .. }
                | EngineEvent::PromptLogprobs { .. }
                | EngineEvent::Embedding { .. },
            )
            | None => {}
        }
    }
}
