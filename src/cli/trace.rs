//! `kvasir trace`: a recorded run for trace viewers.

use super::error::{CliError, CliResult, Exit};
use super::{out, replay};
use crate::recording::trace;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, clap::Subcommand)]
pub enum TraceCommand {
    /// A recording in the trace event format, for ui.perfetto.dev or about:tracing
    Export(ExportArgs),
}

#[derive(Clone, Debug, clap::Args)]
pub struct ExportArgs {
    /// A recording (`--record FILE` writes one)
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Where the trace goes
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
}

pub fn run(command: &TraceCommand) -> CliResult {
    let TraceCommand::Export(args) = command;
    let is_same = |a: &Path, b: &Path| a.canonicalize().ok().is_some_and(|a| b.canonicalize().is_ok_and(|b| a == b));
    if is_same(&args.file, &args.out) {
        return Err(CliError::usage(format!("--out is the recording itself: {}", args.out.display())));
    }
    let trace = trace::export(&replay::read(&args.file)?);
    let fault =
        |e: std::io::Error| CliError::failure(format!("the trace cannot be written: {e}: {}", args.out.display()));
    let mut file = std::io::BufWriter::new(std::fs::File::create(&args.out).map_err(fault)?);
    serde_json::to_writer(&mut file, &trace).map_err(|e| fault(e.into()))?;
    file.flush().map_err(fault)?;
    out::note(&format!("open {} in ui.perfetto.dev", args.out.display()));
    Ok(Exit::Ok)
}
