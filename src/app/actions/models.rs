//! Commands on models: scan, load, unload.

use crate::app::logic::AppCore;
use crate::app::models::Picked;
use crate::engine::options::ModelSource;
use std::path::PathBuf;

const KEY_MODEL: &str = "model";
/// How the built-in default model is written in the settings.
const DEFAULT_WORD: &str = "default";
/// The user unloaded the model.
const NONE_WORD: &str = "none";

pub fn load(core: &mut AppCore, source: ModelSource) {
    core.state.models.error = None;
    let word = match &source {
        ModelSource::Default => DEFAULT_WORD.to_owned(),
        ModelSource::Path(path) => path.to_string_lossy().into_owned(),
    };
    core.pending_model = Some(word);
    core.load_model(source);
}

pub fn unload(core: &mut AppCore) {
    core.engine.unload();
    core.put_setting(KEY_MODEL, NONE_WORD.into());
}

/// A model was loaded: the next start loads it again.
pub fn remember_loaded(core: &mut AppCore) {
    if core.state.model().is_some()
        && let Some(word) = core.pending_model.take()
    {
        core.put_setting(KEY_MODEL, word);
    }
}

/// What to load when no model was named: the one of the last start, if it is still there; else the default model where
/// that costs no download or a demo needs one. Nothing where the user unloaded the last one.
pub fn at_start(core: &AppCore, is_demo: bool) -> Option<ModelSource> {
    let default = (core.state.default_model.is_here || is_demo).then_some(ModelSource::Default);
    match core.setting(KEY_MODEL) {
        Some(NONE_WORD) if !is_demo => None,
        None | Some(NONE_WORD) => default,
        Some(DEFAULT_WORD) => Some(ModelSource::Default),
        Some(path) => Some(PathBuf::from(path)).filter(|p| p.exists()).map(ModelSource::Path).or(default),
    }
}

/// Looks for models on this computer, on a thread of its own.
pub fn scan(core: &mut AppCore) {
    if !core.state.models.is_scanning {
        core.state.models.is_scanning = true;
        core.state.models.error = None;
        core.scanner.start();
    }
}

/// Takes in what the scan and the file dialog found.
pub fn poll(core: &mut AppCore) {
    if let Some(found) = core.scanner.try_recv() {
        let models = &mut core.state.models;
        models.is_scanning = false;
        models.has_scanned = true;
        models.entries = found.entries;
        models.folders = found.folders;
        models.error = found.error;
    }
    match core.picker.try_recv() {
        Some(Picked::File(path)) => load(core, ModelSource::Path(path)),
        Some(Picked::Unavailable(reason)) => core.state.models.error = Some(reason),
        Some(Picked::Nothing) | None => {}
    }
}
