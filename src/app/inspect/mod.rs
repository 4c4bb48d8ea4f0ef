//! The Inspect workspace and the live dock: what the engine does, block by block and step by step.
//! Tests: app.
//!
//! Guarantees: [`model`] and what it stands on ([`map`], [`history`], [`requests`], [`kpi`], [`words`]) draw nothing;
//! [`views`] read the model and emit [`InspectCommand`]s; nothing here waits for the engine or asks for a repaint,
//! except while an eviction fades (at most a second). Of texts it shows the beginnings of cached prefixes only, of tensors
//! nothing.
//!
//! Each frame the window calls [`InspectModel::ingest`], draws with [`inspect_ui`] or [`live_dock_ui`], and passes each
//! command to [`InspectModel::apply`]; what comes back is the window's to do.

pub mod forks;
pub mod grid;
pub mod history;
pub mod host;
pub mod kpi;
pub mod map;
pub mod model;
pub mod move_words;
pub mod queue_words;
pub mod requests;
pub mod views;
pub mod words;

pub use kpi::{Kpis, StatusLine};
pub use model::{Cursor, InspectCommand, InspectModel, PrefixCommand, Selection};
pub use views::dock::live_dock_ui;
pub use views::workspace::{InspectView, inspect_ui};
