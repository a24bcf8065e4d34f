//! `dropless launch`: the ranks of one machine as processes, with the variables that torchrun would set.
//!
//! They also get a secret that nobody else has, by which they know each other (docs/protocol.md).
//!
//! Rank 0 has the terminal to itself; what another rank prints appears on the error output, line by line, behind the
//! rank's name. Signals are passed on, and a second one ends all of it at once. When a rank fails, the others have a
//! moment to notice it and to say so, then they are ended, with what they started where the system knows it.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use clap::Args;
use dropless_core::world::{LISTEN, SECRET, SECRET_FILE};

use super::STOPPED;
use crate::error::{Error, Result};
use crate::output;
use crate::stop::SAME;
use crate::system::{self, Signals, Stop};

/// How long ranks that run on after another failed have to end by themselves, and then after being asked to.
const NOTICE: Duration = Duration::from_secs(3);
const GRACE: Duration = Duration::from_secs(5);
/// How long they have after a second signal.
const LAST: Duration = Duration::from_millis(500);
/// How often the ranks are looked at.
const POLL: Duration = Duration::from_millis(20);
/// More than any machine has GPUs: what is above must be a slip, and would take the machine's processes from everyone.
const MOST_RANKS: i64 = 256;

#[derive(Debug, Args)]
pub(super) struct LaunchArgs {
    /// Number of ranks, each a process with one GPU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MOST_RANKS))]
    nproc: u32,
    /// Port on which rank 0 listens for the others [default: a free one]
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
/// [`Error::Usage`] or [`Error::Thread`] when a rank cannot be started; those that were are ended.
pub(super) fn run(args: &LaunchArgs) -> Result<ExitCode> {
    let failed = |what: &str, error: io::Error| Error::Usage(format!("launch: {what}: {error}"));
    let mut signals = Signals::new().map_err(|e| failed("signals", e))?;
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
    let secret = secret().map_err(|e| failed("random bytes", e))?;
    let (printing, printed) = channel();
    let mut ranks = Ranks::default();
    for rank in 0..args.nproc {
        let mut command = Command::new(&program);
        command.args(&args.arguments).env("TORCHELASTIC_RUN_ID", &run);
        command.env(SECRET, &secret).env_remove(SECRET_FILE).env_remove(LISTEN);
        let started = start(command, rank, args.nproc, port).map_err(|e| failed(&program.display().to_string(), e));
        let followed = started.and_then(|process| {
            ranks.running.push((rank, process));
            follow(rank, &mut ranks.running, &printing)
        });
        if let Err(error) = followed {
            ranks.stop(Stop::Kill);
            return Err(error);
        }
    }
    drop(printing);
    let code = ranks.wait(&mut signals);
    // What the ranks printed last may still be on its way; what they started may hold their output open for ever.
    while printed.recv_timeout(GRACE) == Ok(()) {}
    Ok(code)
}

/// What the ranks know and nobody else.
fn secret() -> io::Result<String> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
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
        .stdin(Stdio::null());
    if rank != 0 {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    system::apart(&mut command);
    command.spawn()
}

/// Copies what a process that was just started prints into pipes to the error output. Each thread tells `printing` when
/// it ends.
fn follow(rank: u32, running: &mut [(u32, Child)], printing: &Sender<()>) -> Result<()> {
    let Some((_, process)) = running.last_mut() else { return Ok(()) };
    let stdout = process.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>);
    let stderr = process.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>);
    for pipe in stdout.into_iter().chain(stderr) {
        let printing = printing.clone();
        let copy = move || {
            let mut pipe = BufReader::new(pipe);
            let mut line = Vec::new();
            while pipe.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
                let text = String::from_utf8_lossy(&line);
                output::relay(&format!("rank {rank}: {}", text.trim_end()));
                line.clear();
            }
            let _ = printing.send(());
        };
        let name = format!("output of rank {rank}");
        thread::Builder::new().name(name.clone()).spawn(copy).map_err(Error::thread(format!("the {name}")))?;
    }
    Ok(())
}

/// The ranks that have not ended, the exit code of the first that failed, and whether any was stopped before its end.
#[derive(Default)]
struct Ranks {
    running: Vec<(u32, Child)>,
    failed: Option<u8>,
    stopped: bool,
}

impl Ranks {
    /// Waits for all, passing signals on; once one fails, ends the others.
    fn wait(mut self, signals: &mut Signals) -> ExitCode {
        // What is done next to ranks that run on after a failure, and when.
        let mut measures = [(NOTICE, Stop::Terminate), (GRACE, Stop::Kill)].into_iter();
        let mut next = None;
        let mut asked = None::<Instant>;
        while !self.running.is_empty() {
            for how in signals.pending() {
                self.stop(how);
                match asked {
                    None => asked = Some(Instant::now()),
                    Some(first) if first.elapsed() < SAME => {}
                    Some(_) => return self.end(how),
                }
            }
            self.reap();
            if self.failed.is_some() {
                let now = Instant::now();
                match next {
                    Some((due, how)) if now >= due => {
                        self.stop(how);
                        next = measures.next().map(|(wait, how)| (now + wait, how));
                    }
                    None => next = measures.next().map(|(wait, how)| (now + wait, how)),
                    Some(_) => {}
                }
            }
            thread::sleep(POLL);
        }
        ExitCode::from(self.failed.unwrap_or(if self.stopped { STOPPED } else { 0 }))
    }

    /// Ends all, which were just told for the second time and have a moment to go. What this process returns says so.
    fn end(mut self, how: Stop) -> ExitCode {
        let told = Instant::now();
        while !self.running.is_empty() && told.elapsed() < LAST {
            self.running.retain_mut(|(_, process)| matches!(process.try_wait(), Ok(None)));
            thread::sleep(POLL);
        }
        self.stop(Stop::Kill);
        // Nothing of them is left behind for the system to keep.
        self.running.iter_mut().for_each(|(_, process)| drop(process.wait()));
        ExitCode::from(system::ended(how))
    }

    /// Takes out the ranks that have ended.
    fn reap(&mut self) {
        let (failed, stopped) = (&mut self.failed, &mut self.stopped);
        self.running.retain_mut(|(rank, process)| {
            let (code, what) = match process.try_wait() {
                Ok(None) => return true,
                Ok(Some(status)) if status.success() => return false,
                Ok(Some(status)) if system::code(status) == STOPPED => {
                    *stopped = true;
                    return false;
                }
                Ok(Some(status)) => (system::code(status), status.to_string()),
                // A process that cannot be asked is gone.
                Err(error) => (1, error.to_string()),
            };
            if failed.is_none() {
                output::tell(format_args!("rank {rank} failed: {what}"));
                *failed = Some(code);
            }
            false
        });
    }

    /// Asks every rank to end, or ends it.
    fn stop(&mut self, how: Stop) {
        self.running.iter_mut().for_each(|(_, process)| system::stop(process, how));
    }
}
