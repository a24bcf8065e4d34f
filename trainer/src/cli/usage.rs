//! What is wrong with a command line, in one line.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};
use dropless_core::escape::escaped;
use dropless_model::words::plain;

use super::Cli;
use crate::config::Config;

/// The line for arguments that the parser refused.
pub(super) fn refusal(arguments: &[OsString], error: clap::Error) -> String {
    // The parser's message is of several lines. One of an argument must not look like another of them.
    let shown = |argument: &OsString| escaped(&argument.to_string_lossy()).to_string();
    let error = Cli::try_parse_from(arguments.iter().map(shown)).err().unwrap_or(error);
    let text = error.to_string();
    let ends = |line: &str| line.starts_with("Usage:") || line.starts_with("For more information");
    let lines = text.lines().map(str::trim).take_while(|line| !ends(line));
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("tip:"));
    let message = lines.collect::<Vec<_>>().join("; ");
    let message = plain(message.trim_start_matches("error: "));
    let tip = of_key(arguments, &error).or_else(|| tip(&text)).map_or(String::new(), |tip| format!("; tip: {tip}"));
    format!("{message}{tip} (see dropless --help)")
}

/// The parser's own suggestion.
fn tip(text: &str) -> Option<String> {
    text.lines().find_map(|line| line.trim().strip_prefix("tip: ")).map(str::to_owned)
}

/// For an option that does not exist, and is named like a key of the configuration: how to set that.
fn of_key(arguments: &[OsString], error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return None };
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let command = arguments.get(1)?.to_str()?;
    Cli::command().find_subcommand(command)?.get_arguments().find(|argument| argument.get_long() == Some("set"))?;
    let key = option.strip_prefix("--")?.replace('-', "_");
    let path = Config::load(None, &[]).ok()?.path_of(&key)?;
    let given = |argument: &OsString| Some(argument.to_str()?.strip_prefix(option.as_str())?.to_owned());
    let at = arguments
        .iter()
        .position(|argument| given(argument).is_some_and(|rest| matches!(rest.as_bytes(), [] | [b'=', ..])))?;
    let value = match given(&arguments[at])?.strip_prefix('=') {
        Some(value) => value.to_owned(),
        None => arguments
            .get(at + 1)
            .and_then(|next| next.to_str())
            .filter(|next| !next.starts_with('-'))
            .unwrap_or("VALUE")
            .to_owned(),
    };
    Some(format!("--set {path}={}", escaped(&value)))
}
