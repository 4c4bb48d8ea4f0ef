//! Parses the command line, starts one command; the only place with an exit code.

use std::io::Write;
use std::process::ExitCode;

#[allow(clippy::disallowed_methods, reason = "the one place that may end the process with a code")]
fn main() -> ExitCode {
    let ending = kvasir::cli::run(std::env::args_os(), || std::process::exit(130));
    if !ending.message.is_empty() {
        // Where standard error is closed there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "{}", ending.message);
    }
    ExitCode::from(ending.code)
}
