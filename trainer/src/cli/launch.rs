//! `dropless launch`: the ranks of one machine as processes, with the variables that torchrun would set.
//!
//! Rank 0 has the terminal to itself; what another rank prints appears on the error output, line by line, behind the
//! rank's name. Each rank leads a process group of its own, so that a signal from the terminal reaches the ranks once,
//! through here, and ending a rank ends what it started. When a rank fails, the others have a moment to notice it and
//! to say so, then they are ended.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use clap::Args;
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::error::{Error, Result};

/// How long ranks that run on after another failed have to end by themselves, and then after being asked to.
const NOTICE: Duration = Duration::from_secs(3);
const GRACE: Duration = Duration::from_secs(5);
/// How often the ranks are looked at.
const POLL: Duration = Duration::from_millis(20);
/// More than any machine has GPUs: what is above must be a slip, and would take the machine's processes from everyone.
const MOST_RANKS: i64 = 256;

#[derive(Debug, Args)]
pub(super) struct LaunchArgs {
    /// Ranks: a process and a GPU each
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MOST_RANKS))]
    nproc: u32,
    /// Port at which rank 0 waits for the others [default: a free one]
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u16).range(1..))]
    master_port: Option<u16>,
    /// Run this program instead of dropless, e.g. a profiler that is given dropless to run
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    /// Arguments of every rank, e.g. train configs/default.toml
    #[arg(last = true, required = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// Runs the ranks to their end.
///
/// # Errors
/// [`Error::Usage`] when a rank cannot be started; those that were are ended.
pub(super) fn run(args: &LaunchArgs) -> Result<ExitCode> {
    let failed = |what: &str, error: io::Error| Error::Usage(format!("launch: {what}: {error}"));
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(|e| failed("signals", e))?;
    let program = match &args.program {
        Some(program) => program.clone(),
        None => std::env::current_exe().map_err(|e| failed("the path of this program", e))?,
    };
    let port = match args.master_port {
        Some(port) => port,
        None => free_port().map_err(|e| failed("no free port", e))?,
    };
    // So that the ranks of two launches at one port do not take each other for their own.
    let started = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
    let run = format!("{}-{started}", std::process::id());
    let (printing, printed) = channel();
    let mut ranks = Ranks::default();
    for rank in 0..args.nproc {
        let mut command = Command::new(&program);
        command.args(&args.arguments).env("TORCHELASTIC_RUN_ID", &run);
        match start(command, rank, args.nproc, port) {
            Ok(mut process) => {
                follow(rank, &mut process, &printing);
                ranks.running.push((rank, process));
            }
            Err(error) => {
                ranks.signal(Signal::KILL);
                return Err(failed(&program.display().to_string(), error));
            }
        }
    }
    drop(printing);
    let code = ranks.wait(&mut signals);
    // What the ranks printed last may still be on its way; what they started may hold their output open for ever.
    while printed.recv_timeout(GRACE) == Ok(()) {}
    Ok(code)
}

/// A port that nobody listens at now.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

fn start(mut command: Command, rank: u32, ranks: u32, port: u16) -> io::Result<Child> {
    command
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("WORLD_SIZE", ranks.to_string())
        .env("LOCAL_WORLD_SIZE", ranks.to_string())
        .env("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string())
        .env("MASTER_PORT", port.to_string())
        .env_remove("TORCHELASTIC_USE_AGENT_STORE")
        .stdin(Stdio::null())
        .process_group(0);
    if rank != 0 {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    // A launcher that is killed must not leave ranks behind that hold the GPUs.
    #[cfg(target_os = "linux")]
    // SAFETY: between fork and exec this makes one system call; it neither allocates nor takes a lock.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?));
    }
    command.spawn()
}

/// Copies what the process prints into pipes to the error output. Each thread tells `printing` when it ends.
fn follow(rank: u32, process: &mut Child, printing: &Sender<()>) {
    let stdout = process.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>);
    let stderr = process.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>);
    for pipe in stdout.into_iter().chain(stderr) {
        let printing = printing.clone();
        std::thread::spawn(move || {
            let mut pipe = BufReader::new(pipe);
            let mut line = Vec::new();
            while pipe.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
                let text = String::from_utf8_lossy(&line);
                // A closed output is no reason to stop reading: the rank would block.
                let _ = writeln!(io::stderr(), "rank {rank}: {}", text.trim_end());
                line.clear();
            }
            let _ = printing.send(());
        });
    }
}

/// The ranks that have not ended, and the exit code of the first that failed.
#[derive(Default)]
struct Ranks {
    running: Vec<(u32, Child)>,
    failed: Option<u8>,
}

impl Ranks {
    /// Waits for all, passing signals on; once one fails, ends the others.
    fn wait(mut self, signals: &mut Signals) -> ExitCode {
        // What is done next to ranks that run on after a failure, and when.
        let mut measures = [(NOTICE, Signal::TERM), (GRACE, Signal::KILL)].into_iter();
        let mut next = None;
        while !self.running.is_empty() {
            for number in signals.pending() {
                self.signal(if number == SIGINT { Signal::INT } else { Signal::TERM });
            }
            self.reap();
            if self.failed.is_some() {
                let now = Instant::now();
                match next {
                    Some((due, signal)) if now >= due => {
                        self.signal(signal);
                        next = measures.next().map(|(wait, signal)| (now + wait, signal));
                    }
                    None => next = measures.next().map(|(wait, signal)| (now + wait, signal)),
                    Some(_) => {}
                }
            }
            std::thread::sleep(POLL);
        }
        ExitCode::from(self.failed.unwrap_or(0))
    }

    /// Takes out the ranks that have ended.
    fn reap(&mut self) {
        let failed = &mut self.failed;
        self.running.retain_mut(|(rank, process)| {
            // A process that cannot be asked is gone.
            let status = process.try_wait().unwrap_or(Some(ExitStatus::from_raw(1 << 8)));
            let Some(status) = status else { return true };
            if !status.success() && failed.is_none() {
                eprintln!("rank {rank} failed: {status}");
                *failed = Some(code(status));
            }
            false
        });
    }

    /// Sends a signal to every rank and what it started.
    fn signal(&self, signal: Signal) {
        for (_, process) in &self.running {
            // One that has just ended is found by `reap`.
            let _ = kill_process_group(Pid::from_child(process), signal);
        }
    }
}

/// The exit code, or 128 + the signal that ended the process, as shells have it.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}
