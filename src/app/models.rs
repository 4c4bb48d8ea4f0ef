//! Looking for models and picking files, each on a thread of its own.
//!
//! Guarantees: the UI thread never waits for the disk or for the system's file dialog; one scan and one dialog at a
//! time. Only headers are read.

use super::logic::Waker;
use super::state::ModelEntry;
use crate::model::catalog::{self, CatalogEntry, CatalogRoot, CatalogSource};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, sync_channel};

/// What a scan found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub entries: Vec<ModelEntry>,
    pub folders: Vec<PathBuf>,
    pub error: Option<String>,
}

/// Scans the model folders in the background.
pub struct ModelScanner {
    roots: Vec<CatalogRoot>,
    waker: Waker,
    result: Option<Receiver<Found>>,
}

impl ModelScanner {
    pub fn new(roots: Vec<CatalogRoot>, waker: Waker) -> Self {
        ModelScanner { roots, waker, result: None }
    }

    pub fn start(&mut self) {
        let (sender, receiver) = sync_channel(2);
        let (waker, roots) = (self.waker.clone(), self.roots.clone());
        self.result = Some(receiver);
        let thread_sender = sender.clone();
        let spawned = std::thread::Builder::new().name("kvasir-scan".into()).spawn(move || {
            // Nobody waits any longer when the app has ended.
            let _ = thread_sender.send(scan(&roots));
            waker();
        });
        if let Err(error) = spawned {
            let error = Some(format!("the scan could not start: {error}"));
            // The receiver is in `self.result`.
            let _ = sender.send(Found { error, ..Found::default() });
        }
    }

    pub fn try_recv(&mut self) -> Option<Found> {
        let found = self.result.as_ref()?.try_recv().ok()?;
        self.result = None;
        Some(found)
    }
}

/// Lists what the folders hold, loadable models first.
fn scan(roots: &[CatalogRoot]) -> Found {
    let mut entries: Vec<ModelEntry> = catalog::scan(roots).into_iter().map(entry_of).collect();
    entries.sort_by_key(|e| e.problem.is_some());
    Found { entries, folders: roots.iter().map(|r| r.path.clone()).collect(), error: None }
}

fn entry_of(entry: CatalogEntry) -> ModelEntry {
    ModelEntry {
        name: entry.id,
        path: entry.path,
        arch: entry.arch.unwrap_or_default(),
        quant: entry.quant.unwrap_or_default(),
        params: entry.params.unwrap_or(0),
        bytes: entry.bytes.unwrap_or(0),
        context: entry.context.unwrap_or(0),
        origin: origin_words(entry.source).into(),
        problem: entry.problem,
    }
}

fn origin_words(source: CatalogSource) -> &'static str {
    match source {
        CatalogSource::Kvasir => "fetched by Kvasir",
        CatalogSource::User => "own folder",
        CatalogSource::HuggingFace => "Hugging Face cache",
        CatalogSource::LmStudio => "LM Studio",
        CatalogSource::Ollama => "Ollama",
        CatalogSource::LlamaCpp => "llama.cpp cache",
    }
}

/// What came of a file dialog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Picked {
    File(PathBuf),
    /// Closed without a choice.
    Nothing,
    /// The dialog cannot be shown here.
    Unavailable(String),
}

/// The system's file dialog.
pub struct FilePicker {
    waker: Waker,
    result: Option<Receiver<Picked>>,
}

impl FilePicker {
    pub fn new(waker: Waker) -> Self {
        FilePicker { waker, result: None }
    }

    /// Opens the dialog, unless one is open.
    pub fn open(&mut self) {
        if self.result.is_some() {
            return;
        }
        let (sender, receiver) = sync_channel(2);
        let waker = self.waker.clone();
        self.result = Some(receiver);
        let thread_sender = sender.clone();
        let spawned = std::thread::Builder::new().name("kvasir-dialog".into()).spawn(move || {
            let picked = rfd::FileDialog::new()
                .set_title("Open a model")
                .add_filter("Models (.gguf, .safetensors)", &["gguf", "safetensors"])
                .pick_file();
            let _ = thread_sender.send(picked.map_or(Picked::Nothing, Picked::File));
            waker();
        });
        if let Err(error) = spawned {
            let _ = sender.send(Picked::Unavailable(format!("the file dialog could not open: {error}")));
        }
    }

    pub fn try_recv(&mut self) -> Option<Picked> {
        use std::sync::mpsc::TryRecvError;
        let picked = match self.result.as_ref()?.try_recv() {
            Ok(picked) => picked,
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => Picked::Unavailable(
                "no file dialog can be shown here; drop a file on the window or name it on the command line".into(),
            ),
        };
        self.result = None;
        Some(picked)
    }
}
