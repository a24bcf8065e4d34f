//! `dropless tokenize`: text files to `.bin` and `.idx`, once, for runs that read them from disk.

use std::path::PathBuf;

use clap::Args;

use super::say;
use crate::config::Tokenizer as Named;
use crate::data::prepare::{self, Job};
use crate::data::{Tokenizer, once};
use crate::error::Result;
use crate::progress::bar_on_terminal;

#[derive(Debug, Args)]
pub(super) struct TokenizeArgs {
    /// Text files, each of which is a document, and .jsonl files with a document in each line; the order of the documents
    /// is that of the files' names
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// A tokenizer.json, a model directory that has one, or "byte"
    #[arg(long, value_name = "PATH")]
    tokenizer: String,
    /// The files to write are PREFIX.bin and PREFIX.idx
    #[arg(long, value_name = "PREFIX")]
    out: PathBuf,
    /// The field of a JSON line that has the text
    #[arg(long, default_value = "text")]
    field: String,
    /// Write the end token after each document; without it, runs add it when they read
    #[arg(long)]
    eos: bool,
    /// Threads; 0 for one per core. The result does not depend on it
    #[arg(long, default_value_t = 0, value_name = "N")]
    threads: usize,
}

/// Prepares the files, or goes on where a process that was ended has stopped.
pub(super) fn run(args: &TokenizeArgs) -> Result<()> {
    let tokenizer = Tokenizer::open(&Named::from(args.tokenizer.clone()))?;
    let job = Job::new(&tokenizer, once(args.files.clone())?, None, &args.field, args.eos)?;
    let threads = match args.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let bar = bar_on_terminal(job.bytes(), "{bar:24} {bytes}/{total_bytes} {bytes_per_sec} eta {eta}");
    let mut progress = |bytes| {
        if let Some(bar) = &bar {
            bar.set_position(bytes);
        }
    };
    let done = prepare::to_disk(&job, &args.out, threads, &mut progress);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let done = done?;
    let (bin, idx) = (done.bin.display(), done.idx.display());
    say(format_args!("{} documents, {} tokens: {bin}, {idx}", done.documents, done.tokens));
    Ok(())
}
