//! Where log lines go: warnings and worse to standard error, as `KVASIR_LOG` or `RUST_LOG` say; the app also keeps a
//! file per day.
//!
//! Logs carry no prompt text above debug.

use crate::config::Dirs;
use tracing_appender::rolling::{RollingFileAppender, Rotation};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;
use tracing_subscriber::prelude::*;

/// Days of log files that are kept.
const MAX_LOG_FILES: usize = 7;

/// For commands: standard error only. A server also tells of its requests.
pub fn to_stderr(is_server: bool) {
    let default = if is_server { "kvasir::server=info,warn" } else { "warn" };
    let layer = fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(is_terminal())
        .with_target(false)
        .with_filter(filter(default));
    // A second call in one process keeps the first.
    let _ = tracing_subscriber::registry().with(layer).try_init();
}

/// For the app: standard error, and JSON lines in the log folder where that can be written.
pub fn to_stderr_and_file(dirs: &Dirs) {
    let stderr = fmt::layer().with_writer(std::io::stderr).with_target(false).with_filter(filter("warn"));
    let appender = RollingFileAppender::builder()
        .rotation(Rotation::DAILY)
        .filename_prefix("kvasir")
        .filename_suffix("log")
        .max_log_files(MAX_LOG_FILES)
        .build(&dirs.logs);
    let file = appender.ok().map(|appender| {
        fmt::layer().json().with_writer(std::sync::Mutex::new(appender)).with_filter(filter("kvasir=info,warn"))
    });
    let _ = tracing_subscriber::registry().with(stderr).with(file).try_init();
}

/// Colours are for people.
fn is_terminal() -> bool {
    std::io::IsTerminal::is_terminal(&std::io::stderr())
}

fn filter(default: &str) -> EnvFilter {
    ["KVASIR_LOG", "RUST_LOG"]
        .into_iter()
        .find_map(|name| EnvFilter::try_from_env(name).ok())
        .unwrap_or_else(|| EnvFilter::new(default))
}
