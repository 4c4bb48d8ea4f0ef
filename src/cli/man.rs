//! `kvasir man`: the manual page, or a folder of pages, one per command.

use super::error::{CliError, CliResult, Exit};
use super::{Cli, out};
use clap::CommandFactory;
use std::path::PathBuf;

#[derive(Clone, Debug, clap::Args)]
pub struct ManArgs {
    /// Write the pages of all commands into this folder instead of printing the first
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

pub fn run(args: &ManArgs) -> CliResult {
    let Some(folder) = &args.out else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Cli::command())
            .render(&mut page)
            .map_err(|e| CliError::failure(format!("the page could not be made: {e}")))?;
        out::text(&String::from_utf8_lossy(&page))?;
        return Ok(Exit::Ok);
    };
    let fault = |e: std::io::Error| CliError::failure(format!("{}: {e}", folder.display()));
    std::fs::create_dir_all(folder).map_err(fault)?;
    clap_mangen::generate_to(Cli::command(), folder).map_err(fault)?;
    Ok(Exit::Ok)
}
