//! Commands on models: scan, load, unload.

use crate::app::logic::AppCore;
use crate::app::models::Picked;
use crate::engine::options::ModelSource;
use std::path::PathBuf;

const KEY_MODEL: &str = "model";
/// How the built-in default model is written in the settings.
const DEFAULT_WORD: &str = "default";

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
    core.put_setting(KEY_MODEL, String::new());
}

/// A model was loaded: the next start loads it again.
pub fn remember_loaded(core: &mut AppCore) {
    if core.state.model().is_some()
        && let Some(word) = core.pending_model.take()
    {
        core.put_setting(KEY_MODEL, word);
    }
}

/// The model that was loaded last, if it is still there.
pub fn last_used(core: &AppCore) -> Option<ModelSource> {
    match core.setting(KEY_MODEL).filter(|w| !w.is_empty())? {
        DEFAULT_WORD => Some(ModelSource::Default),
        path => Some(PathBuf::from(path)).filter(|p| p.exists()).map(ModelSource::Path),
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
