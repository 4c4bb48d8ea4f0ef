//! `kvasir models`: models found on this machine, read in place; fetching and removing them.

use super::error::{CliError, CliResult, Exit};
use super::{interrupt, out, session};
use crate::config::{ConfigFile, Dirs, is_offline};
use crate::engine::loader::{LoadFailure, OFFLINE_FIX};
use crate::engine::options::ModelSource;
use crate::model::ModelError;
use crate::model::catalog::{self, CatalogEntry, CatalogEnv, CatalogRoot, CatalogSource};
use crate::model::hub::{self, FetchError, FetchProgress, HubAccess};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Clone, Debug, clap::Args)]
pub struct ModelsArgs {
    #[command(subcommand)]
    pub command: Option<ModelsCommand>,
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Debug, clap::Subcommand)]
pub enum ModelsCommand {
    /// Models in the usual places and in the folders of the settings
    List {
        /// Print one JSON array
        #[arg(long)]
        json: bool,
    },
    /// Fetch a model: org/name, org/name:quantisation, org/name@revision, or `default` (HF_HUB_OFFLINE=1: from the cache only)
    Pull {
        #[arg(value_name = "ID")]
        id: String,
    },
    /// Remove a model that kvasir fetched
    Rm {
        #[arg(value_name = "ID")]
        id: String,
    },
}

pub fn run(args: &ModelsArgs) -> CliResult {
    match &args.command {
        None => list(args.json),
        Some(ModelsCommand::List { json }) => list(args.json || *json),
        Some(ModelsCommand::Pull { id }) => pull(id),
        Some(ModelsCommand::Rm { id }) => remove(id),
    }
}

/// Places to look in, as settings and environment say.
pub fn roots(file: &ConfigFile) -> Result<Vec<CatalogRoot>, CliError> {
    let own = hub::default_model_path(&Dirs::resolve()?.cache);
    let own = own.parent().map(PathBuf::from).unwrap_or_default();
    let models = &file.models;
    let is_wanted = |root: &CatalogRoot| match root.source {
        CatalogSource::HuggingFace => models.scan_hf.unwrap_or(true),
        CatalogSource::LmStudio => models.scan_lmstudio.unwrap_or(true),
        CatalogSource::Ollama => models.scan_ollama.unwrap_or(true),
        CatalogSource::Kvasir | CatalogSource::User | CatalogSource::LlamaCpp => true,
    };
    Ok(catalog::roots(&environment(), &own, &models.dirs).into_iter().filter(is_wanted).collect())
}

/// The variables that say where models lie.
pub fn environment() -> CatalogEnv {
    let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    CatalogEnv {
        home: variable("HOME").or_else(|| variable("USERPROFILE")),
        xdg_cache_home: variable("XDG_CACHE_HOME"),
        hf_hub_cache: variable("HF_HUB_CACHE"),
        huggingface_hub_cache: variable("HUGGINGFACE_HUB_CACHE"),
        hf_home: variable("HF_HOME"),
        ollama_models: variable("OLLAMA_MODELS"),
        llama_cache: variable("LLAMA_CACHE"),
    }
}

/// The model of an id, among those on this machine.
pub fn find_by_id(id: &str, file: &ConfigFile) -> Result<ModelSource, CliError> {
    if id == "default" || id == hub::DEFAULT_MODEL.name {
        return Ok(ModelSource::Default);
    }
    let path = catalog::resolve(id, &roots(file)?).map_err(|error| match error {
        ModelError::NotFound { .. } => CliError::model(format!("there is no file, folder or model of this name: {id}"))
            .with_fix("`kvasir models` lists the models on this machine, `kvasir models pull ID` fetches one"),
        other => LoadFailure::from(other).into(),
    })?;
    Ok(ModelSource::Path(path))
}

fn list(as_json: bool) -> CliResult {
    let entries = catalog::scan(&roots(&session::config()?)?);
    if as_json {
        let value = serde_json::to_value(&entries).map_err(|e| CliError::failure(e.to_string()))?;
        out::json(&value)?;
        return Ok(Exit::Ok);
    }
    if entries.is_empty() {
        out::note("No models were found. `kvasir models pull default` fetches a small one.");
        return Ok(Exit::Ok);
    }
    let mut rows = vec![["model", "arch", "size", "quant", "on disk", "context", "path"].map(String::from).to_vec()];
    rows.extend(entries.iter().map(row));
    out::text(&out::table(&rows))?;
    for entry in &entries {
        if let Some(problem) = &entry.problem {
            out::note(&format!("{}: {problem}", entry.id));
        }
    }
    Ok(Exit::Ok)
}

fn row(entry: &CatalogEntry) -> Vec<String> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    vec![
        entry.id.clone(),
        or_dash(entry.arch.clone()),
        or_dash(entry.params.map(out::params)),
        or_dash(entry.quant.clone()),
        or_dash(entry.bytes.map(out::bytes)),
        or_dash(entry.context.map(|c| c.to_string())),
        entry.path.display().to_string(),
    ]
}

fn pull(id: &str) -> CliResult {
    let cancel = AtomicBool::new(false);
    let mut bar = session::Progress::default();
    let mut show = |progress: FetchProgress| {
        bar.show(&progress.file, progress.done_bytes, progress.total_bytes);
        if interrupt::presses() > 0 {
            cancel.store(true, Ordering::Relaxed);
        }
    };
    let fetched = if id == "default" || id == hub::DEFAULT_MODEL.name {
        hub::fetch_default(session::default_access(&Dirs::resolve()?), &mut show, &cancel)
    } else {
        hub::download(id, &access()?, &mut show, &cancel)
    };
    bar.clear();
    interrupt::check()?;
    let path = fetched.map_err(|error| match error {
        FetchError::Offline { .. } => CliError::failure(error.to_string()).with_fix(OFFLINE_FIX),
        _ => CliError::failure(error.to_string()),
    })?;
    out::line(&path.display().to_string())?;
    Ok(Exit::Ok)
}

/// The hub as `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH` and `HF_HUB_OFFLINE` say.
fn access() -> Result<HubAccess, CliError> {
    let env = environment();
    let variable = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
    let token_file = variable("HF_TOKEN_PATH").map(PathBuf::from);
    let token_file = token_file.or_else(|| Some(catalog::hugging_face_home(&env)?.join("token")));
    let token = variable("HF_TOKEN")
        .or_else(|| token_file.and_then(|path| std::fs::read_to_string(path).ok()).map(|t| t.trim().to_string()));
    let cache = catalog::hugging_face_cache(&env)
        .ok_or_else(|| CliError::failure("there is no folder for models").with_fix("set HF_HOME or HOME"))?;
    Ok(HubAccess {
        endpoint: variable("HF_ENDPOINT").unwrap_or_else(|| hub::DEFAULT_ENDPOINT.into()).trim_end_matches('/').into(),
        token: token.filter(|t| !t.is_empty()),
        offline: is_offline(),
        cache,
    })
}

/// Only what kvasir fetched itself: models of other programs are theirs.
fn remove(id: &str) -> CliResult {
    let roots = roots(&session::config()?)?;
    let wanted = if id == "default" { hub::DEFAULT_MODEL.name } else { id };
    let own: Vec<_> = catalog::list(&roots).into_iter().filter(|c| c.source == CatalogSource::Kvasir).collect();
    let is_it = |c: &&catalog::Candidate| {
        c.id.eq_ignore_ascii_case(wanted)
            || c.path.file_name().is_some_and(|f| f == hub::DEFAULT_MODEL.file && wanted == hub::DEFAULT_MODEL.name)
    };
    let Some(found) = own.iter().find(is_it) else {
        return Err(CliError::model(format!("kvasir has fetched no model of this name: {id}")).with_fix(
            "models of other programs are removed with those programs; `kvasir models` shows where they lie",
        ));
    };
    let removed =
        if found.path.is_dir() { std::fs::remove_dir_all(&found.path) } else { std::fs::remove_file(&found.path) };
    removed.map_err(|e| CliError::failure(format!("cannot remove the model: {e}: {}", found.path.display())))?;
    out::line(&found.path.display().to_string())?;
    Ok(Exit::Ok)
}
