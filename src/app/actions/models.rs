//! Commands on models: scan, load, unload.

use crate::app::logic::AppCore;
use crate::app::models::Picked;
use crate::app::state::EngineChoices;
use crate::engine::options::{KvCacheDtype, LoadRequest, ModelSource, PreemptionMode};
use crate::telemetry::{QueuePolicy, VictimPolicy};
use std::path::PathBuf;

const KEY_MODEL: &str = "model";
const KEY_QUEUE: &str = "scheduling_policy";
const KEY_VICTIM: &str = "victim_policy";
const KEY_PREEMPTION: &str = "preemption_mode";
const KEY_KV_DTYPE: &str = "kv_cache_dtype";
/// How the built-in default model is written in the settings.
const DEFAULT_WORD: &str = "default";
/// The user unloaded the model.
const NONE_WORD: &str = "none";

/// Starts loading a model with the options that the engine was started with and the policies that were chosen.
pub fn load(core: &mut AppCore, source: ModelSource) {
    if keeps_model(core) {
        return;
    }
    core.state.models.error = None;
    let word = match &source {
        ModelSource::Default => DEFAULT_WORD.to_owned(),
        ModelSource::Path(path) => path.to_string_lossy().into_owned(),
    };
    core.pending_model = Some(word);
    let options = core.state.choices.apply(core.engine.options());
    core.state.loaded_with = options.clone();
    core.engine.load(LoadRequest { source, options });
    core.state.engine = core.engine.status();
}

/// A remote engine keeps the model that its server has; the user is told.
fn keeps_model(core: &mut AppCore) -> bool {
    let Some(host) = &core.state.remote_host else { return false };
    core.state.notice = Some(format!("The engine at {host} keeps the model that it was started with"));
    true
}

pub fn unload(core: &mut AppCore) {
    if keeps_model(core) {
        return;
    }
    core.engine.unload();
    core.put_setting(KEY_MODEL, NONE_WORD.into());
}

/// Takes the choices of the last start.
pub fn restore_choices(core: &mut AppCore) {
    core.state.choices = EngineChoices {
        queue: core.setting(KEY_QUEUE).and_then(|word| policy(word, &QUEUE_POLICIES)),
        victim: core.setting(KEY_VICTIM).and_then(|word| policy(word, &VICTIM_POLICIES)),
        preemption: core.setting(KEY_PREEMPTION).and_then(|word| policy(word, &PREEMPTION_MODES)),
        kv_cache_dtype: core.setting(KEY_KV_DTYPE).and_then(|word| policy(word, &KV_DTYPES)),
    };
}

/// Keeps the choices for the next load and the next start.
pub fn set_choices(core: &mut AppCore, choices: EngineChoices) {
    core.state.choices = choices;
    core.put_setting(KEY_QUEUE, choices.queue.map_or(String::new(), |p| word(p, &QUEUE_POLICIES)));
    core.put_setting(KEY_VICTIM, choices.victim.map_or(String::new(), |p| word(p, &VICTIM_POLICIES)));
    core.put_setting(KEY_PREEMPTION, choices.preemption.map_or(String::new(), |p| word(p, &PREEMPTION_MODES)));
    core.put_setting(KEY_KV_DTYPE, choices.kv_cache_dtype.map_or(String::new(), |p| word(p, &KV_DTYPES)));
}

/// Every choice with the word that the settings use.
pub const QUEUE_POLICIES: [(&str, QueuePolicy); 4] = [
    ("fair", QueuePolicy::Fair),
    ("fcfs", QueuePolicy::Fcfs),
    ("priority", QueuePolicy::Priority),
    ("longest-prefix", QueuePolicy::LongestPrefix),
];
pub const VICTIM_POLICIES: [(&str, VictimPolicy); 3] = [
    ("last-in", VictimPolicy::LastIn),
    ("least-computed", VictimPolicy::LeastComputed),
    ("priority", VictimPolicy::Priority),
];
pub const PREEMPTION_MODES: [(&str, PreemptionMode); 3] =
    [("auto", PreemptionMode::Auto), ("recompute", PreemptionMode::Recompute), ("swap", PreemptionMode::Swap)];
pub const KV_DTYPES: [(&str, KvCacheDtype); 4] = [
    ("auto", KvCacheDtype::Auto),
    ("f16", KvCacheDtype::F16),
    ("f32", KvCacheDtype::F32),
    ("int8", KvCacheDtype::Int8),
];

fn policy<T: Copy>(word: &str, all: &[(&str, T)]) -> Option<T> {
    all.iter().find(|(w, _)| *w == word).map(|(_, p)| *p)
}

fn word<T: Copy + PartialEq>(policy: T, all: &[(&str, T)]) -> String {
    all.iter().find(|(_, p)| *p == policy).map_or("", |(w, _)| w).to_owned()
}

/// Loads the present model again. What runs is ended by the engine with a message.
pub fn reload(core: &mut AppCore) {
    let source = match core.setting(KEY_MODEL) {
        Some(DEFAULT_WORD) | None => ModelSource::Default,
        Some(NONE_WORD) => return,
        Some(path) => ModelSource::Path(PathBuf::from(path)),
    };
    load(core, source);
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
