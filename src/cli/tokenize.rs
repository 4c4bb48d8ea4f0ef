//! `kvasir tokenize`: text to token ids with a model's tokenizer.

use super::error::{CliError, CliResult, Exit};
use super::{out, session};
use crate::tokenizer::AddSpecial;
use std::io::Read;

/// Text read from standard input is bounded by this.
const MAX_TEXT_BYTES: u64 = 64 << 20;

#[derive(Clone, Debug, clap::Args)]
pub struct TokenizeArgs {
    /// The model whose tokenizer is used
    #[arg(long, value_name = "PATH|ID", env = "KVASIR_MODEL", hide_env_values = true)]
    pub model: Option<String>,
    /// The text (default: standard input)
    #[arg(long, value_name = "TEXT")]
    pub text: Option<String>,
    /// Do not add the tokens that begin or end a text
    #[arg(long)]
    pub no_special: bool,
    /// Print {"ids", "tokens"}
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &TokenizeArgs) -> CliResult {
    let text = match &args.text {
        Some(text) => text.clone(),
        None => read_stdin()?,
    };
    let tokenizer = session::tokenizer_of_model(args.model.as_deref())?;
    let special = if args.no_special { AddSpecial::No } else { AddSpecial::Yes };
    let ids = tokenizer.encode(&text, special).map_err(|e| CliError::failure(e.to_string()))?;
    let tokens: Vec<String> = ids.iter().map(|&id| tokenizer.token_text(id)).collect();
    if args.json {
        out::json(&serde_json::json!({ "ids": ids, "tokens": tokens }))?;
    } else {
        let lines: String = ids.iter().zip(&tokens).map(|(id, token)| format!("{id}\t{token:?}\n")).collect();
        out::text(&lines)?;
    }
    Ok(Exit::Ok)
}

fn read_stdin() -> Result<String, CliError> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_TEXT_BYTES {
        return Err(CliError::usage(format!("the text has more than {MAX_TEXT_BYTES} bytes")));
    }
    String::from_utf8(bytes).map_err(|e| CliError::usage(format!("standard input is not UTF-8 text: {e}")))
}
