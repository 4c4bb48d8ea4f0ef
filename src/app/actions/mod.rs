//! One function per command, grouped by what it changes.

pub(super) mod chats;
pub(super) mod forks;
pub(super) mod messages;
pub(super) mod models;
pub(super) mod panes;
pub(super) mod prefixes;
