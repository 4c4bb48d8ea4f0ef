//! `kvasir render`: a chat template applied to messages, as the engine would read them.

use super::args::{read_json, read_text};
use super::error::{CliError, CliResult, Exit};
use super::{out, session};
use crate::tokenizer::{ChatTemplate, Now, RenderRequest, SpecialTokens};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Clone, Debug, clap::Args)]
pub struct RenderArgs {
    /// A list of messages as JSON
    #[arg(long, value_name = "FILE")]
    pub messages: PathBuf,
    /// A list of tool schemas as JSON
    #[arg(long, value_name = "FILE")]
    pub tools: Option<PathBuf>,
    /// A Jinja template, instead of the model's
    #[arg(long, value_name = "FILE")]
    pub template: Option<PathBuf>,
    /// The model whose template is applied
    #[arg(long, value_name = "PATH|ID", env = "KVASIR_MODEL", hide_env_values = true, conflicts_with = "template")]
    pub model: Option<String>,
    #[arg(long, value_name = "TEXT", requires = "template")]
    pub bos_token: Option<String>,
    #[arg(long, value_name = "TEXT", requires = "template")]
    pub eos_token: Option<String>,
    #[arg(long, value_name = "TEXT", requires = "template")]
    pub unk_token: Option<String>,
    /// Do not open the assistant's answer at the end
    #[arg(long)]
    pub no_generation_prompt: bool,
    /// Pin the date that the template sees, such as 2024-07-26T12:34:56
    #[arg(long, value_name = "TIME")]
    pub now: Option<String>,
    /// Print {"text"} or {"error"}
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &RenderArgs) -> CliResult {
    let messages = read_json("--messages", &args.messages)?;
    let tools = args.tools.as_deref().map(|path| read_json("--tools", path)).transpose()?;
    let now = match &args.now {
        Some(text) => Now::parse(text).map_err(|e| CliError::usage(format!("--now: {e}")))?,
        None => session::now(),
    };
    match rendered(args, &messages, tools.as_ref(), now) {
        Ok(text) if args.json => out::json(&serde_json::json!({ "text": text }))?,
        Ok(text) => out::text(&text)?,
        Err(error) if args.json => {
            out::json(&serde_json::json!({ "error": error.message }))?;
            return Ok(error.exit);
        }
        Err(error) => return Err(error),
    }
    Ok(Exit::Ok)
}

fn rendered(
    args: &RenderArgs,
    messages: &serde_json::Value,
    tools: Option<&serde_json::Value>,
    now: Now,
) -> Result<String, CliError> {
    let template = match &args.template {
        Some(path) => {
            let source = read_text("--template", path)?;
            let special = SpecialTokens {
                bos: args.bos_token.clone(),
                eos: args.eos_token.clone(),
                unk: args.unk_token.clone(),
                pad: None,
            };
            Arc::new(ChatTemplate::new(&source, special).map_err(|e| CliError::failure(e.to_string()))?)
        }
        None => session::template_of_model(args.model.as_deref())?,
    };
    template
        .render(&RenderRequest {
            messages,
            tools,
            add_generation_prompt: !args.no_generation_prompt,
            now,
            extra: &BTreeMap::new(),
        })
        .map_err(|e| CliError::failure(e.to_string()))
}
