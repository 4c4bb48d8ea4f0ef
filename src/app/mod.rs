//! The desktop app: views over plain state; intent comes back as commands.
//!
//! Guarantees: the engine and the window never wait for each other; a run belongs to its chat and not to what is on
//! screen; an idle window draws nothing; chats survive a killed process but for the last second. It does not attempt to
//! share a GPU device with the engine.
//!
//! Reading order: [`state`], [`command`], [`logic`], [`views`], [`window`]. What logic needs beside them: [`chat`],
//! [`prompt`], [`store`], [`models`], [`demo`].
//! Tests: app.

pub(crate) mod actions;
pub mod chat;
pub mod command;
pub mod demo;
pub mod format;
pub mod frame_stats;
pub mod input_rules;
pub mod inspect;
pub mod logic;
pub mod markdown;
pub mod models;
pub mod prompt;
pub mod shortcuts;
pub mod state;
pub mod store;
pub mod tessellate_timer;
pub mod theme;
pub mod views;
pub mod window;
pub mod words;

use crate::engine::EngineHandle;
use crate::engine::options::ModelSource;
use crate::model::catalog::CatalogRoot;
use state::{DefaultModel, ThemeChoice, Workspace};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// How the app starts. Every field is said by the caller.
pub struct AppOptions {
    pub engine: EngineHandle,
    /// Loaded at start; `None` loads the model of the last start, if it is still there.
    pub model_to_load: Option<ModelSource>,
    /// What the first run offers to download.
    pub default_model: DefaultModel,
    /// Where chats and the window's place are kept.
    pub data_dir: PathBuf,
    /// Where models are looked for.
    pub model_roots: Vec<CatalogRoot>,
    /// Four chats on one system prompt, as soon as a model is there.
    pub demo: bool,
    /// Ends the app when the demo is over; [`run`] fails when the demo did.
    pub exit_after_demo: bool,
    /// Instead of the theme that was chosen last.
    pub theme: Option<ThemeChoice>,
    /// Instead of the Chat workspace.
    pub workspace: Option<Workspace>,
    /// Size of the window in points, instead of the last one.
    pub size: Option<[f32; 2]>,
    /// Prints how long the UI thread worked per frame when the app ends.
    pub frame_stats: bool,
}

/// Why the app could not run, or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    #[error("the window cannot be opened: {message}\n{fix}")]
    Window { message: String, fix: &'static str },
    #[error("a thread could not be started: {0}")]
    Thread(std::io::Error),
    #[error("the demo failed: {0}")]
    Demo(String),
}

/// What helps when no window can be opened.
const WINDOW_FIX: &str = "Install a Vulkan driver (Debian, Ubuntu: sudo apt install mesa-vulkan-drivers) and start the app \
    inside a desktop session; `kvasir chat` works in a terminal.";

const DEFAULT_SIZE: [f32; 2] = [1440.0, 900.0];
const MIN_SIZE: [f32; 2] = [800.0, 560.0];

/// Opens the window and runs until it is closed.
pub fn run(options: AppOptions) -> Result<(), AppError> {
    let outcome = DemoOutcome::default();
    let (native, demo) = (native_options(&options), options.demo);
    let app_outcome = outcome.clone();
    let result = eframe::run_native(
        "kvasir",
        native,
        Box::new(move |cc| Ok(Box::new(window::KvasirApp::new(cc, options, app_outcome)?))),
    );
    result.map_err(|error| AppError::Window { message: error.to_string(), fix: WINDOW_FIX })?;
    match outcome.take() {
        Some(Err(reason)) => Err(AppError::Demo(reason)),
        Some(Ok(())) => Ok(()),
        // The window was closed by hand while the demo ran: nothing failed.
        None => {
            tracing::debug!(demo, "the window was closed");
            Ok(())
        }
    }
}

fn native_options(options: &AppOptions) -> eframe::NativeOptions {
    let viewport = egui::ViewportBuilder::default()
        .with_title("kvasir")
        .with_app_id("kvasir")
        .with_inner_size(options.size.unwrap_or(DEFAULT_SIZE))
        .with_min_inner_size(MIN_SIZE)
        .with_drag_and_drop(true);
    eframe::NativeOptions {
        viewport,
        renderer: eframe::Renderer::Wgpu,
        // A size that was asked for wins over the one of the last start.
        persist_window: options.size.is_none(),
        persistence_path: Some(options.data_dir.join("window.ron")),
        ..Default::default()
    }
}

/// How the demo ended, told from the window to [`run`].
#[derive(Clone, Default)]
pub struct DemoOutcome(Arc<Mutex<Option<Result<(), String>>>>);

impl DemoOutcome {
    fn set(&self, outcome: Result<(), String>) {
        *self.0.lock().unwrap_or_else(|e| e.into_inner()) = Some(outcome);
    }

    /// `None` while the demo runs or when there is none.
    pub fn take(&self) -> Option<Result<(), String>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).take()
    }
}
