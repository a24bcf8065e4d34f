//! The command line: parsing, the commands, and their exit codes.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | `verify`, `bisect` or `replay` found a difference; or one of several processes was blocked and had to be ended |
//! | 2 | failed: one line on standard error says why |
//! | 3 | `train` was asked to stop before its last step |
//!
//! `launch` exits with the code of the first rank that failed, or 128 + the number of the signal that ended it, or that
//! asked it to end for the second time.

mod bisect;
mod doctor;
mod launch;
mod models;
#[cfg(not(feature = "wgpu"))]
#[path = "no_record.rs"]
mod record;
#[cfg(feature = "wgpu")]
mod record;
mod runs;
mod tokenize;
mod train;
mod usage;

use std::error::Error as _;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use dropless_core::World;
use dropless_core::host::Simd;
use dropless_core::world::SECRET_FILE;

use crate::backends::{self, Transport};
use crate::config::{Numerics, Recipe};
use crate::error::{Error, Result};
use crate::generate::Generator;
use crate::options::{BackendKind, TrainOptions};
use crate::output::{self, Shown, finish, report, say, show, tell};
use crate::sample::Sampling;
use crate::train::reference;
use crate::verify::Report;
use crate::{bench, system, train as training};
use dropless_model::hf::TensorFiles;

/// Trains Mixture-of-Experts language models that never drop a token, with the same bits on every backend.
#[derive(Debug, Parser)]
#[command(name = "dropless", version, arg_required_else_help = false)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model; without arguments the shipped small one, on the embedded text
    Train(train::TrainArgs),
    /// Compute the validation loss of a checkpoint or a model directory
    Eval(EvalArgs),
    /// Continue a text with a trained model
    Generate(GenerateArgs),
    /// Make token ids of text files, once, for runs that read them from disk (.bin and .idx, as Megatron has them)
    Tokenize(tokenize::TokenizeArgs),
    /// Write a model directory with other files: experts separate or fused, another element type, shards
    Convert(models::ConvertArgs),
    /// Say what is in a model directory
    Inspect(models::InspectArgs),
    /// Compare a model directory (config.json, model.safetensors, expected.safetensors) with what is computed here
    Verify(VerifyArgs),
    /// Run training steps on a backend in lockstep with the host and name the first op whose bits differ
    Bisect(bisect::BisectArgs),
    /// Write down what training steps do on the wgpu backend, for `replay` and for browsers to run again
    Record(record::RecordArgs),
    /// Run a recording and name the first op that writes other bits here
    Replay(record::ReplayArgs),
    /// Say which backends are available on this machine, whether they compute the host's bits, and why others are not
    Doctor,
    /// Measure the speed of a backend's ops
    Bench(BenchArgs),
    /// Start one process per GPU of this machine, with the environment variables that torchrun would set
    Launch(launch::LaunchArgs),
}

/// Where one rank computes. None of it affects results.
#[derive(Debug, Args)]
struct Device {
    /// Backend
    #[arg(long, value_enum, default_value_t = BackendName::Auto)]
    backend: BackendName,
    /// GPU of the wgpu backend, by index or part of its name [default: DROPLESS_ADAPTER, or the best one]
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// Threads of the host backend; 0 for one per core
    #[arg(long, default_value_t = 0, value_name = "N")]
    threads: usize,
    /// Vector instructions of the host backend [default: the best that the machine supports]
    #[arg(long, value_enum)]
    simd: Option<SimdName>,
}

/// Among how many ranks. None of it affects results.
#[derive(Debug, Args)]
struct Ranks {
    /// Number of ranks, among which sequences are divided: threads of this process; for cuda, the processes that a
    /// launcher started [default: those, or 1]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Ranks that share one set of experts; the others hold the same ones [default: all ranks]
    #[arg(long, value_name = "N")]
    expert_parallel: Option<usize>,
}

/// Where all ranks compute, and how they reach each other. None of it affects results.
#[derive(Debug, Args)]
struct Machine {
    #[command(flatten)]
    device: Device,
    #[command(flatten)]
    ranks: Ranks,
    /// How rows are exchanged between the ranks of cuda [default: auto]
    #[arg(long, value_enum)]
    exchange: Option<TransportName>,
    /// Seconds after which all ranks of cuda end when one fails, exits, stops responding, or never joins; time in which
    /// a rank reads or writes files does not count [default: 60]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(2..=86_400))]
    timeout: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TransportName {
    /// CUDA peer-to-peer memory where all GPUs of a group support it, otherwise NCCL
    Auto,
    /// NCCL
    Nccl,
    /// CUDA peer-to-peer memory
    Peer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BackendName {
    /// cuda if it is available or a launcher started several processes, otherwise host
    Auto,
    /// CPU threads
    Host,
    /// Any GPU, by integer arithmetic: the host's bits
    Wgpu,
    /// An NVIDIA GPU of the Hopper generation: the host's bits at production speed
    Cuda,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SimdName {
    /// None
    Plain,
    /// x86-64 with AVX2 and FMA
    Avx2,
    /// x86-64 with AVX-512
    Avx512,
}

impl Device {
    /// The options for these ranks.
    fn options(&self, ranks: Option<&Ranks>) -> Result<TrainOptions> {
        let world = World::from_environment()?;
        let several = world.as_ref().is_some_and(|world| world.ranks > 1);
        let backend = match self.backend {
            // Several processes can only be ranks of cuda; where it cannot be had, they should say why.
            BackendName::Auto if several => BackendKind::Cuda,
            name => name.kind(),
        };
        if several && backend != BackendKind::Cuda {
            let what = "a launcher started several processes, but only the ranks of --backend cuda have one each; \
                        start one, with --ranks";
            return Err(Error::Usage(what.into()));
        }
        if several {
            check_secret_file()?;
        }
        let world = world.filter(|_| backend == BackendKind::Cuda);
        only_for(BackendKind::Wgpu, backend, self.adapter.is_some(), "--adapter")?;
        let number = ranks.and_then(|ranks| ranks.ranks);
        Ok(TrainOptions {
            backend,
            adapter: self.adapter.clone(),
            ranks: number.unwrap_or_else(|| world.as_ref().map_or(1, |world| world.ranks)),
            world,
            expert_parallel: ranks.and_then(|ranks| ranks.expert_parallel),
            threads: self.threads,
            simd: self.simd.map(SimdName::level),
            ..TrainOptions::default()
        })
    }
}

/// Verifies that nobody else may read the file with the secret of the job.
fn check_secret_file() -> Result<()> {
    let Some(path) = std::env::var_os(SECRET_FILE).filter(|path| !path.is_empty()) else { return Ok(()) };
    let path = PathBuf::from(path);
    match system::open_to_others(&path) {
        None => Ok(()),
        Some(mode) => {
            let path = path.display();
            Err(Error::Usage(format!(
                "{SECRET_FILE}: others than its owner may open {path} (mode {mode:03o}): chmod 600 {path}"
            )))
        }
    }
}

impl Machine {
    /// The options for a run in `out`.
    fn options(&self, out: PathBuf, resume: bool) -> Result<TrainOptions> {
        let options = self.device.options(Some(&self.ranks))?;
        only_for(BackendKind::Cuda, options.backend, self.exchange.is_some(), "--exchange")?;
        only_for(BackendKind::Cuda, options.backend, self.timeout.is_some(), "--timeout")?;
        Ok(TrainOptions {
            out,
            resume,
            transport: match self.exchange {
                None => options.transport,
                Some(TransportName::Auto) => Transport::Auto,
                Some(TransportName::Nccl) => Transport::Nccl,
                Some(TransportName::Peer) => Transport::Peer,
            },
            timeout: self.timeout.map_or(options.timeout, Duration::from_secs),
            ..options
        })
    }
}

/// Refuses a flag that would do nothing.
fn only_for(owner: BackendKind, backend: BackendKind, given: bool, flag: &str) -> Result<()> {
    if !given || backend == owner {
        return Ok(());
    }
    let [owner, backend] = [owner, backend].map(|kind| format!("{kind:?}").to_lowercase());
    Err(Error::Usage(format!("{flag} is of the {owner} backend, but this is {backend}")))
}

impl SimdName {
    fn level(self) -> Simd {
        match self {
            SimdName::Plain => Simd::Plain,
            SimdName::Avx2 => Simd::Avx2,
            SimdName::Avx512 => Simd::Avx512,
        }
    }
}

impl BackendName {
    fn kind(self) -> BackendKind {
        match self {
            BackendName::Auto if backends::usable(BackendKind::Cuda) => BackendKind::Cuda,
            BackendName::Auto | BackendName::Host => BackendKind::Host,
            BackendName::Wgpu => BackendKind::Wgpu,
            BackendName::Cuda => BackendKind::Cuda,
        }
    }
}

#[derive(Debug, Args)]
struct EvalArgs {
    #[command(flatten)]
    model: models::ModelArgs,
    #[command(flatten)]
    machine: Machine,
}

#[derive(Debug, Args)]
struct GenerateArgs {
    #[command(flatten)]
    model: models::ModelArgs,
    /// The text to continue; may be given several times: prompts run together, each with the result it has alone
    #[arg(long, required = true)]
    prompt: Vec<String>,
    /// Maximum number of tokens to add
    #[arg(long, default_value_t = 256, value_name = "N")]
    tokens: usize,
    /// Seed of sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Divides the logits; 0 always takes the most likely token
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Sample from the most likely tokens whose probabilities add up to this (nucleus sampling)
    #[arg(long, default_value_t = 0.95)]
    top_p: f64,
    #[command(flatten)]
    device: Device,
}

#[derive(Debug, Args)]
struct VerifyArgs {
    /// The directory
    model: PathBuf,
    /// Arithmetic of the matrix products
    #[arg(long, value_enum, default_value_t = Numerics::F32)]
    numerics: Numerics,
    #[command(flatten)]
    machine: Machine,
}

#[derive(Debug, Args)]
struct BenchArgs {
    /// Backend
    #[arg(value_enum, default_value_t = BackendName::Host)]
    backend: BackendName,
    /// GPU of the wgpu backend, by index or part of its name [default: DROPLESS_ADAPTER, or the best one]
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// Threads; 0 for one per core
    #[arg(long, default_value_t = 0, value_name = "N")]
    threads: usize,
    /// Vector instructions [default: the best that the machine supports]
    #[arg(long, value_enum)]
    simd: Option<SimdName>,
}

/// The exit code of a run that was asked to stop before its last step, and has saved where it goes on.
pub(crate) const STOPPED: u8 = 3;

/// Runs the program with these arguments, the first of which is its name.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    if let Err(source) = output::start() {
        let error = Error::Thread { what: "what this program prints".into(), source };
        output::tell_alone(format_args!("error: {error}"));
        return ExitCode::from(2);
    }
    if let Err(error) = system::write_to_the_limit() {
        output::tell_alone(format_args!("error: signals: {error}"));
        return ExitCode::from(2);
    }
    system::open_to_the_limit();
    let code = carry_out(arguments);
    finish();
    code
}

fn carry_out(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => return refuse(&usage::refusal(&arguments, error)),
        Err(help) => {
            report(help);
            return ExitCode::SUCCESS;
        }
    };
    match dispatch(cli.command) {
        Ok(code) => code,
        Err(error) => refuse(&error.to_string()),
    }
}

fn refuse(message: &str) -> ExitCode {
    tell(format_args!("error: {message}"));
    ExitCode::from(2)
}

/// Starts the threads that hash and read texts and make initial weights, which would otherwise start, or panic, at their
/// first use.
fn start_threads() -> Result<()> {
    match rayon::ThreadPoolBuilder::new().build_global() {
        Err(error) if error.source().is_some() => {
            Err(Error::thread("reading and hashing")(std::io::Error::other(error)))
        }
        // Without a source, it says that they run already.
        _ => Ok(()),
    }
}

fn dispatch(command: Command) -> Result<ExitCode> {
    if !matches!(command, Command::Launch(_)) {
        start_threads()?;
    }
    match command {
        Command::Train(args) => return train::run(args),
        Command::Eval(args) => eval(args)?,
        Command::Generate(args) => generate(&args)?,
        Command::Tokenize(args) => tokenize::run(&args)?,
        Command::Convert(args) => models::convert(&args)?,
        Command::Inspect(args) => models::inspect(&args)?,
        Command::Verify(args) => return verify(args),
        Command::Bisect(args) => return bisect::run(args),
        Command::Record(args) => record::run(args)?,
        Command::Replay(args) => return record::replay(&args),
        Command::Doctor => report(doctor::report()),
        Command::Bench(args) => {
            let (backend, adapter, threads, simd) = (args.backend, args.adapter, args.threads, args.simd);
            let backend = backend.kind();
            only_for(BackendKind::Wgpu, backend, adapter.is_some(), "--adapter")?;
            let options =
                TrainOptions { backend, adapter, threads, simd: simd.map(SimdName::level), ..TrainOptions::default() };
            bench::run(&options, &mut Shown)?;
        }
        Command::Launch(args) => return launch::run(&args),
    }
    Ok(ExitCode::SUCCESS)
}

fn eval(args: EvalArgs) -> Result<()> {
    let options = args.machine.options(PathBuf::new(), false)?;
    let source = args.model.source()?;
    let at = source.step.map_or(String::new(), |step| format!(" at step {step}"));
    let what = format!("{}{at}", source.path.display());
    let Some(result) = training::evaluate(source, &options)? else { return Ok(()) };
    say(what);
    train::print_validation(&result);
    Ok(())
}

fn generate(args: &GenerateArgs) -> Result<()> {
    let (temperature, top_p) = (args.temperature, args.top_p);
    if !(temperature.is_finite() && temperature >= 0.0) {
        return Err(Error::Usage(format!("--temperature is {temperature:?}, expected 0 or more")));
    }
    if !(0.0..=1.0).contains(&top_p) {
        return Err(Error::Usage(format!("--top-p is {top_p:?}, expected 0 to 1")));
    }
    let options = args.device.options(None)?;
    let source = args.model.source()?;
    let sampling = Sampling { seed: args.seed, temperature, top_p };
    let generator = Generator::open(source, &options)?;
    let prompts: Vec<&str> = args.prompt.iter().map(String::as_str).collect();
    if let [prompt] = prompts[..] {
        // A single text is shown as it grows.
        show(prompt.as_bytes());
        generator.continue_texts(&prompts, args.tokens, &sampling, |_, text| show(text.as_bytes()))?;
        show(b"\n");
        return Ok(());
    }
    let texts = generator.continue_texts(&prompts, args.tokens, &sampling, |_, _| {})?;
    for (prompt, text) in prompts.iter().zip(texts) {
        show(format!("{prompt}{text}\n\n").as_bytes());
    }
    Ok(())
}

fn verify(args: VerifyArgs) -> Result<ExitCode> {
    let options = args.machine.options(PathBuf::new(), false)?;
    let Some(computed) = reference::compute(&args.model, args.numerics.into(), Recipe::F32, &options)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let compared = Report::compare(&TensorFiles::open(&args.model, "expected")?, computed)?;
    report(format_args!("|error| / |reference|, 2-norms over each tensor\n{compared}"));
    Ok(if compared.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
