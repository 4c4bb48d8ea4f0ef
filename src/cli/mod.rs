//! The command line: one file per command.
//!
//! Guarantees: data goes to standard output, everything else to standard error; each command returns an [`Exit`] or a
//! [`CliError`] with what, why and how to mend it, and only `main.rs` ends the process; a closed standard output ends a
//! command quietly.

mod app;
mod args;
mod bench;
mod chat;
mod completions;
mod doctor;
mod embed;
mod error;
mod estimate;
mod eval;
mod generate;
mod help;
mod inspect;
mod interrupt;
mod logging;
mod man;
mod models;
mod out;
mod quantize;
mod render;
mod replay;
mod run_batch;
mod serve;
mod serve_fleet;
mod session;
mod tokenize;
mod trace;

pub use error::{CliError, CliResult, Exit};

use clap::{CommandFactory, FromArgMatches, Parser};
use std::ffi::OsString;

/// A portable LLM inference engine and the app that shows it at work
#[derive(Clone, Debug, Parser)]
#[command(name = "kvasir", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub app: app::AppArgs,
}

#[derive(Clone, Debug, clap::Subcommand)]
pub enum Command {
    /// The desktop app (also without a command)
    App(Box<app::AppArgs>),
    /// The OpenAI-compatible server
    Serve(Box<serve::ServeArgs>),
    /// Completions of one or several prompts
    Generate(Box<generate::GenerateArgs>),
    /// Vectors of texts
    Embed(Box<embed::EmbedArgs>),
    /// The requests of a file in OpenAI's batch format
    RunBatch(Box<run_batch::RunBatchArgs>),
    /// A conversation in the terminal
    Chat(Box<chat::ChatArgs>),
    /// Adapters, folders, what is missing and how to mend it
    Doctor(Box<doctor::DoctorArgs>),
    /// Models on this machine
    Models(models::ModelsArgs),
    /// Memory that a model needs, and whether it fits
    Estimate(Box<estimate::EstimateArgs>),
    /// Header and tensors of a checkpoint
    Inspect(inspect::InspectArgs),
    /// A folder's weights in 4 or 8 bits, as a new folder
    Quantize(Box<quantize::QuantizeArgs>),
    /// Text to token ids
    Tokenize(tokenize::TokenizeArgs),
    /// A chat template applied to messages
    Render(render::RenderArgs),
    /// Logits and perplexity, for comparing with references
    #[command(subcommand)]
    Eval(Box<eval::EvalCommand>),
    /// Speed of engine and scheduler
    #[command(subcommand)]
    Bench(Box<bench::BenchCommand>),
    /// A recorded run again: the same decisions and tokens, or the first difference; or with other settings
    Replay(Box<replay::ReplayArgs>),
    /// A recorded run for trace viewers
    #[command(subcommand)]
    Trace(trace::TraceCommand),
    /// The completion script of a shell
    Completions(completions::CompletionsArgs),
    /// The manual page
    Man(man::ManArgs),
}

/// How a command line ended: what to print, and the exit code.
pub struct Ending {
    pub code: u8,
    /// For standard error; empty when there is nothing to say.
    pub message: String,
}

/// Runs a command line. `force_exit` ends the process where a command does not look at Ctrl-C in time.
pub fn run(args: impl Iterator<Item = OsString>, force_exit: fn()) -> Ending {
    let args: Vec<OsString> = args.collect();
    if let Some(asked) = help::asked(&args) {
        return ending(help::show(asked));
    }
    let cli = match parse(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are data; they come as errors of code 0. A closed pipe is no fault.
            let _ = error.print();
            return Ending { code: error.exit_code() as u8, message: String::new() };
        }
    };
    ending(dispatch(cli, force_exit))
}

/// A number below zero is the value of the flag before it, so that the flag's own check says what it may be.
fn parse(args: Vec<OsString>) -> Result<Cli, clap::Error> {
    fn lenient(command: clap::Command) -> clap::Command {
        let of_flag = |arg: clap::Arg| match arg.is_positional() || !arg.get_action().takes_values() {
            true => arg,
            false => arg.allow_negative_numbers(true),
        };
        command.mut_args(of_flag).mut_subcommands(lenient)
    }
    let mut command = lenient(Cli::command());
    let matches = command.try_get_matches_from_mut(args)?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

fn ending(result: CliResult) -> Ending {
    match result {
        Ok(exit) => Ending { code: exit.code(), message: String::new() },
        Err(error) => Ending { code: error.exit.code(), message: message(&error) },
    }
}

fn dispatch(cli: Cli, force_exit: fn()) -> CliResult {
    let Some(command) = cli.command else { return app::run(&cli.app) };
    // The window ends with Ctrl-C as any other program: chats are saved as they grow.
    if !matches!(command, Command::App(_)) {
        interrupt::install(force_exit);
        logging::to_stderr(matches!(command, Command::Serve(_)));
    }
    match command {
        Command::App(args) => app::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Embed(args) => embed::run(&args),
        Command::RunBatch(args) => run_batch::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Models(args) => models::run(&args),
        Command::Estimate(args) => estimate::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Render(args) => render::run(&args),
        Command::Eval(command) => eval::run(&command),
        Command::Bench(command) => bench::run(&command),
        Command::Replay(args) => replay::run(&args),
        Command::Trace(command) => trace::run(&command),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => man::run(&args),
    }
}

fn message(error: &CliError) -> String {
    match (&error.fix, error.message.is_empty()) {
        (_, true) => String::new(),
        (None, false) => format!("error: {}", error.message),
        (Some(fix), false) => format!("error: {}\n  fix: {fix}", error.message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_of_all_commands_fit_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_bare_path_opens_the_app() {
        let cli = Cli::try_parse_from(["kvasir", "model.gguf"]).unwrap();
        assert!(cli.command.is_none());
        assert_eq!(cli.app.file.as_deref(), Some(std::path::Path::new("model.gguf")));
        let cli = Cli::try_parse_from(["kvasir", "--demo", "--exit-after-demo"]).unwrap();
        assert!(cli.command.is_none() && cli.app.demo && cli.app.exit_after_demo);
        let cli = Cli::try_parse_from(["kvasir", "generate", "hello", "--max-tokens", "2"]).unwrap();
        assert!(matches!(cli.command, Some(Command::Generate(_))));
        assert!(Cli::try_parse_from(["kvasir", "--exit-after-demo"]).is_err());
    }
}
