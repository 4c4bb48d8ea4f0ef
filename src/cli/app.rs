//! `kvasir [FILE]` and `kvasir app [FILE]`: the desktop app.

use super::args::ModelArgs;
use super::error::{CliError, CliResult, Exit};
use super::{logging, models, session};
use crate::app::state::{DefaultModel, ThemeChoice, Workspace};
use crate::app::{AppError, AppOptions};
use crate::config::Dirs;
use crate::engine::EngineHandle;
use crate::engine::options::{EngineOptions, ModelSource};
use crate::engine::remote::RemoteOptions;
use crate::model::hub::{DEFAULT_MODEL, default_model_path};
use std::path::PathBuf;

#[derive(Clone, Debug, clap::Args)]
pub struct AppArgs {
    /// A model to load: a GGUF file or a Hugging Face folder
    #[arg(value_name = "FILE", conflicts_with = "model")]
    pub file: Option<PathBuf>,
    /// Show the engine of this `kvasir serve`, and chat through it
    #[arg(long, value_name = "URL", conflicts_with_all = ["file", "model"])]
    pub connect: Option<String>,
    /// The key that the server wants, with --connect
    #[arg(long, value_name = "KEY", env = "KVASIR_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Four chats on one system prompt, as soon as a model is there
    #[arg(long)]
    pub demo: bool,
    /// End the app when the demo is over; fails when the demo did
    #[arg(long, requires = "demo")]
    pub exit_after_demo: bool,
    /// Keep conversations in this folder
    #[arg(long, value_name = "DIR", env = "KVASIR_DATA_DIR", hide_env_values = true)]
    pub data_dir: Option<PathBuf>,
    /// dark, light or auto, instead of the last choice
    #[arg(long, value_name = "NAME")]
    pub theme: Option<String>,
    /// chat, models or inspect
    #[arg(long, value_name = "NAME")]
    pub workspace: Option<String>,
    /// Size of the window in points, such as 1440x900
    #[arg(long, value_name = "WxH")]
    pub size: Option<String>,
    /// Print how long the UI thread worked per frame when the app ends
    #[arg(long)]
    pub frame_stats: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

pub fn run(args: &AppArgs) -> CliResult {
    let file = session::config()?;
    let dirs = Dirs::resolve()?;
    logging::to_stderr_and_file(&dirs);
    let theme_word = args.theme.clone().or_else(|| file.ui.theme.clone());
    let model_to_load = match &args.file {
        _ if args.connect.is_some() => None,
        Some(path) => Some(ModelSource::Path(path.clone())),
        // The demo needs a model and asks nobody.
        None if args.demo && args.model.model.is_none() => Some(ModelSource::Default),
        None => args.model.model.as_deref().map(|name| session::source(Some(name), &file)).transpose()?,
    };
    let options = AppOptions {
        model_to_load,
        default_model: DefaultModel {
            name: DEFAULT_MODEL.name.into(),
            bytes: DEFAULT_MODEL.download_bytes,
            is_here: default_model_path(&dirs.cache).is_file(),
        },
        data_dir: args.data_dir.clone().unwrap_or(dirs.data),
        model_roots: models::roots(&file)?,
        demo: args.demo,
        exit_after_demo: args.exit_after_demo,
        theme: theme_word
            .map(|word| parse("--theme", &word, &ThemeChoice::WORDS, ThemeChoice::from_word))
            .transpose()?,
        workspace: args
            .workspace
            .as_ref()
            .map(|word| parse("--workspace", word, &Workspace::ALL.map(Workspace::name), workspace_of))
            .transpose()?,
        size: args.size.as_deref().map(size).transpose()?,
        frame_stats: args.frame_stats,
        engine: engine(args, session::options(&args.model, &file, None, |_| {})?)?,
    };
    let engine = options.engine.clone();
    let ended = crate::app::run(options);
    engine.shutdown();
    ended.map_err(|error| match error {
        AppError::Window { message, fix } => {
            CliError::failure(format!("the window cannot be opened: {message}")).with_fix(fix)
        }
        other => CliError::failure(other.to_string()),
    })?;
    Ok(Exit::Ok)
}

/// The engine of this process, or one that is elsewhere.
fn engine(args: &AppArgs, options: EngineOptions) -> Result<EngineHandle, CliError> {
    let Some(url) = &args.connect else { return Ok(EngineHandle::start(options)) };
    if !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme)) {
        return Err(CliError::usage(format!("--connect wants a URL such as http://127.0.0.1:8000, not `{url}`")));
    }
    let url = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
    Ok(EngineHandle::connect(options, RemoteOptions { url, api_key: args.api_key.clone(), model: None }))
}

fn workspace_of(word: &str) -> Option<Workspace> {
    Workspace::ALL.into_iter().find(|w| w.name().eq_ignore_ascii_case(word))
}

fn parse<T>(flag: &str, word: &str, words: &[&str], parse: fn(&str) -> Option<T>) -> Result<T, CliError> {
    parse(word).ok_or_else(|| CliError::usage(format!("{flag} must be one of {}, not `{word}`", words.join(", "))))
}

/// `1440x900`, each side from 200 to 16384 points.
fn size(text: &str) -> Result<[f32; 2], CliError> {
    let side = |part: &str| part.parse::<u16>().ok().filter(|n| (200..=16_384).contains(n)).map(f32::from);
    text.split_once(['x', 'X', '×'])
        .and_then(|(width, height)| Some([side(width)?, side(height)?]))
        .ok_or_else(|| CliError::usage(format!("--size must be a width and a height such as 1440x900, not `{text}`")))
}
