//! `kvasir completions SHELL`: the completion script of a shell.

use super::error::{CliResult, Exit};
use super::{Cli, out};
use clap::CommandFactory;

#[derive(Clone, Debug, clap::Args)]
pub struct CompletionsArgs {
    /// bash, elvish, fish, powershell or zsh
    pub shell: clap_complete::Shell,
}

pub fn run(args: &CompletionsArgs) -> CliResult {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "kvasir", &mut script);
    out::text(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Ok)
}
