//! The desktop app: views over plain state; intent comes back as commands.
//! Tests: app.

pub mod format;
pub mod inspect;
pub mod theme;
