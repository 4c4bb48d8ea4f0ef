//! What commands share: finding a model, starting the engine on it, reading its tokenizer and template.

use super::args::{ModelArgs, token_lists};
use super::error::CliError;
use super::{interrupt, out};
use crate::config::{ConfigFile, Dirs, EngineArgs, is_offline};
use crate::engine::EngineHandle;
use crate::engine::handle::{EngineStatus, LoadedModel};
use crate::engine::loader;
use crate::engine::options::{EngineOptions, LoadRequest, LoraModule, ModelSource};
use crate::ids::TokenId;
use crate::model::hub::DefaultAccess;
use crate::protocol::{EngineEvent, OwnerTag, PinRequest, RunError};
use crate::tokenizer::{AddSpecial, ChatTemplate, Now, RenderRequest, Tokenizer};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the adapter of `--lora` is called; no flag can name one so.
const LORA_NAME: &str = "--lora";

/// A running engine with a model.
pub struct Session {
    pub engine: EngineHandle,
    pub model: Arc<LoadedModel>,
    /// The adapter that `--lora` names; 0 is none.
    pub lora: u64,
}

/// The settings file, with its warnings on standard error.
pub fn config() -> Result<ConfigFile, CliError> {
    let (file, warnings) = ConfigFile::load(&Dirs::resolve()?.config_file())?;
    warnings.iter().for_each(|w| out::note(&format!("warning: {w}")));
    Ok(file)
}

/// The options of a command: flags, environment, file, defaults, and what the command itself needs.
pub fn options(
    args: &ModelArgs,
    file: &ConfigFile,
    seed: Option<u64>,
    adjust: impl FnOnce(&mut EngineOptions),
) -> Result<EngineOptions, CliError> {
    let mut options = engine_options(&args.engine, file, seed, adjust)?;
    if let Some(path) = &args.lora {
        options.lora.add(LoraModule { name: LORA_NAME.into(), path: path.clone() });
    }
    Ok(options)
}

/// As [`options`], for commands that name models otherwise.
pub fn engine_options(
    args: &EngineArgs,
    file: &ConfigFile,
    seed: Option<u64>,
    adjust: impl FnOnce(&mut EngineOptions),
) -> Result<EngineOptions, CliError> {
    let mut options = args.resolve(&file.engine, &Dirs::resolve()?.cache, seed)?;
    adjust(&mut options);
    Ok(options)
}

/// Starts the engine and loads the model, showing progress where a person looks. Ctrl-C cancels.
pub fn open(args: &ModelArgs, seed: Option<u64>, adjust: impl FnOnce(&mut EngineOptions)) -> Result<Session, CliError> {
    let file = config()?;
    let options = options(args, &file, seed, adjust)?;
    let source = source(args.model.as_deref(), &file)?;
    let engine = EngineHandle::start(options.clone());
    engine.load(LoadRequest { source, options });
    let mut progress = Progress::default();
    let loaded = engine.wait_for_model(|status| {
        if interrupt::presses() > 0 {
            engine.cancel_load();
        }
        if let EngineStatus::Loading { phase, done, total } = status {
            progress.show(phase, *done, *total);
        }
    });
    progress.clear();
    match loaded {
        Ok(model) => {
            let lora = lora_of(&model);
            Ok(Session { engine, model, lora })
        }
        Err(status) => {
            engine.shutdown();
            Err(status.into())
        }
    }
}

/// The adapter that `--lora` named; 0 is none.
pub fn lora_of(model: &LoadedModel) -> u64 {
    model.loras.find(LORA_NAME).map_or(0, |lora| lora.id)
}

/// Computes the prefixes of these files and keeps them for the requests that follow: lists of token ids, or text.
pub fn pin_prefixes(session: &Session, files: &[PathBuf]) -> Result<(), CliError> {
    for path in files {
        let shown = path.display();
        let lists = match path.extension().is_some_and(|x| x == "json") {
            true => token_lists("--pin-prefix", path)?,
            false => {
                let text = std::fs::read_to_string(path)
                    .map_err(|e| CliError::failure(format!("cannot read the prefix: {e}: {shown}")))?;
                let encoded = session.model.tokenizer.encode(&text, AddSpecial::Yes);
                vec![encoded.map_err(|e| CliError::failure(format!("{e}: {shown}")))?]
            }
        };
        let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let fault = |error: RunError| CliError::failure(format!("cannot pin the prefix: {error}: {shown}"));
        for tokens in lists {
            // A client of its own, so that no request waits for its share because of it.
            let owner = OwnerTag { id: u64::MAX, label: format!("pin {shown}") };
            let request = PinRequest { owner, name: name.clone(), tokens, cache_salt: 0, adapter: session.lora };
            let run = session.engine.pin_prefix(request).map_err(fault)?;
            while let Some(event) = run.recv() {
                if let EngineEvent::Failed { error } = event {
                    return Err(fault(error));
                }
            }
        }
    }
    Ok(())
}

/// A bar for a load or a download; nothing where standard error is not a terminal.
#[derive(Default)]
pub struct Progress {
    bar: Option<ProgressBar>,
}

impl Progress {
    pub fn show(&mut self, phase: &str, done: u64, total: u64) {
        if !out::shows_progress() {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let style = ProgressStyle::with_template("{msg} {wide_bar:.cyan} {decimal_bytes}/{decimal_total_bytes}");
            ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        bar.set_message(phase.to_string());
        bar.set_length(total);
        bar.set_position(done);
    }

    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// What `--model` names: no flag is the default model, then a path, then the id of a model on this machine.
pub fn source(model: Option<&str>, file: &ConfigFile) -> Result<ModelSource, CliError> {
    let Some(name) = model else { return Ok(ModelSource::Default) };
    if name.is_empty() {
        // As an unset shell variable gives it; the default model would be a download that nobody asked for.
        return Err(CliError::usage("the name of the model is empty")
            .with_fix("name a model, or leave --model (or KVASIR_MODEL) out for the default model"));
    }
    let path = Path::new(name);
    if path.exists() {
        return Ok(ModelSource::Path(path.to_path_buf()));
    }
    if name == "default" {
        return Ok(ModelSource::Default);
    }
    super::models::find_by_id(name, file)
}

/// The tokenizer of a model, whose weights may be missing.
pub fn tokenizer_of_model(model: Option<&str>) -> Result<Arc<Tokenizer>, CliError> {
    Ok(Arc::new(loader::read_tokenizer(&local_path(model)?)?))
}

/// The chat template of a model, without opening an adapter.
pub fn template_of_model(model: Option<&str>) -> Result<Arc<ChatTemplate>, CliError> {
    let path = local_path(model)?;
    let text = loader::read_text_side(&path)?;
    text.template.ok_or_else(|| no_template(&path.display().to_string(), text.template_fault.as_deref()))
}

/// The place of a model on this machine, downloading the default model on first use.
pub fn local_path(model: Option<&str>) -> Result<std::path::PathBuf, CliError> {
    let source = source(model, &config()?)?;
    let mut progress = Progress::default();
    let dirs = Dirs::resolve()?;
    let path = loader::locate(&source, default_access(&dirs), &mut |p| {
        progress.show(p.phase, p.done, p.total);
        interrupt::presses() == 0
    });
    progress.clear();
    Ok(path?)
}

/// Where the default model is kept, and whether it may be fetched.
pub fn default_access(dirs: &Dirs) -> DefaultAccess<'_> {
    DefaultAccess { cache_dir: &dirs.cache, offline: is_offline() }
}

/// The prompt of a conversation: the template renders it, special tokens included.
pub fn encode_chat(model: &LoadedModel, messages: &serde_json::Value) -> Result<Vec<TokenId>, CliError> {
    let template = model.template.as_ref().ok_or_else(|| no_template(&model.name, model.template_fault.as_deref()))?;
    let request =
        RenderRequest { messages, tools: None, add_generation_prompt: true, now: now(), extra: &BTreeMap::new() };
    let text = template.render(&request).map_err(|e| CliError::failure(e.to_string()))?;
    model.tokenizer.encode(&text, AddSpecial::No).map_err(|e| CliError::failure(e.to_string()))
}

/// Why there is no template to render, and what else can be done.
pub fn no_template(name: &str, fault: Option<&str>) -> CliError {
    let message = match fault {
        Some(fault) => format!("{name}: {fault}"),
        None => format!("{name} has no chat template"),
    };
    CliError::model(message)
        .with_fix("use `kvasir generate` without --chat for plain completions, or an instruct model")
}

/// The local date and time.
pub fn now() -> Now {
    let now = jiff::ZonedDateTime::now();
    Now {
        year: now.year(),
        month: now.month(),
        day: now.day(),
        hour: now.hour(),
        minute: now.minute(),
        second: now.second(),
    }
}
