//! `kvasir COMMAND --help=WORD`: the flags that are about a word.

use super::{Cli, CliError, CliResult, Exit, out};
use clap::{Arg, Command, CommandFactory};
use std::ffi::OsString;

/// The command and the word, where a command line asks for help about one.
pub fn asked(args: &[OsString]) -> Option<(Command, String)> {
    let word = args.iter().find_map(|arg| arg.to_str()?.strip_prefix("--help="))?;
    let mut command = Cli::command();
    command.build();
    for arg in args.iter().skip(1).take_while(|arg| !arg.to_string_lossy().starts_with('-')) {
        match command.find_subcommand(arg) {
            Some(found) => command = found.clone(),
            None => break,
        }
    }
    Some((command, word.to_lowercase()))
}

/// Shows what a command has about the word.
pub fn show((command, word): (Command, String)) -> CliResult {
    let text = |arg: &Arg| {
        let names = [arg.get_long(), arg.get_value_names().and_then(|names| Some(names.first()?.as_str()))];
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        format!("{} {help}", names.into_iter().flatten().collect::<Vec<_>>().join(" ")).to_lowercase()
    };
    let is_about = |arg: &Arg| !arg.is_hide_set() && !word.is_empty() && text(arg).contains(&word);
    if !command.get_arguments().any(is_about) {
        let name = command.get_bin_name().unwrap_or(command.get_name()).to_owned();
        return Err(CliError::usage(format!("no flag of `{name}` is about `{word}`"))
            .with_fix(format!("`{name} --help` shows all of them")));
    }
    let hidden = |arg: Arg| {
        let hide = !is_about(&arg);
        arg.hide(hide)
    };
    let mut command = command.mut_args(hidden).disable_help_flag(true).override_usage("").help_template("{all-args}");
    out::line(command.render_help().to_string().trim_end())?;
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: &str) -> Option<(String, String)> {
        let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        asked(&args).map(|(command, word)| (command.get_name().to_owned(), word))
    }

    #[test]
    fn the_command_and_the_word_are_found() {
        assert_eq!(found("kvasir serve --help=KV"), Some(("serve".into(), "kv".into())));
        assert_eq!(found("kvasir bench latency --json --help=len"), Some(("latency".into(), "len".into())));
        assert_eq!(found("kvasir --help=demo"), Some(("kvasir".into(), "demo".into())));
        assert_eq!(found("kvasir serve --help"), None);
        assert_eq!(found("kvasir generate help"), None);
    }

    #[test]
    fn a_word_that_nothing_is_about_is_told() {
        let args = ["kvasir", "serve", "--help=zebra"].map(OsString::from);
        let error = show(asked(&args).expect("it is asked for")).expect_err("no zebra");
        assert!(error.message.contains("kvasir serve") && error.message.contains("zebra"), "{}", error.message);
    }
}
