//! What a run reports while it runs, and its file of that, `OUT/metrics.jsonl`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use dropless_core::{Timings, files};
use dropless_model::words::count;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::config::DataConfig;
use crate::error::{Error, Result};
use crate::train::{Completed, Validation, overall};

/// Choices of an expert in a step, over all experts of all layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Load {
    /// Of the expert with the fewest.
    pub min: u64,
    /// Mean.
    pub mean: f64,
    /// Of the expert with the most.
    pub max: u64,
}

impl Load {
    /// Of these counts.
    pub fn of<'a>(counts: impl IntoIterator<Item = &'a u64>) -> Load {
        let counts: Vec<u64> = counts.into_iter().copied().collect();
        let total: u64 = counts.iter().sum();
        let extreme = |value: Option<&u64>| value.copied().unwrap_or(0);
        let mean = total as f64 / counts.len().max(1) as f64;
        Load { min: extreme(counts.iter().min()), mean, max: extreme(counts.iter().max()) }
    }
}

/// A step's numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The step, from 1.
    pub step: u64,
    /// Mean loss, nats per token; None in a step without targets.
    pub loss: Option<f32>,
    /// Tokens that were predicted.
    pub targets: usize,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
    /// Learning rate.
    pub lr: f32,
    /// How fast it went.
    pub speed: Speed,
    /// Balance of the experts.
    pub expert_load: Load,
    /// After steps that validate, what it came to for each set.
    pub validation: Vec<Validation>,
}

/// The speed of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Seconds of the first rank, from the batch to the new weights.
    pub step_s: f64,
    /// Tokens over all ranks.
    pub tokens: usize,
    /// Useful arithmetic of a token, see `Architecture::flops_per_token` of [`dropless_model`].
    pub flops_per_token: f64,
    /// Ranks.
    pub ranks: usize,
    /// What a rank's device could do in a second.
    pub peak_flops: Option<f64>,
    /// Where the time of the first rank's device went, if it measures that.
    pub timings: Option<Timings>,
}

impl Speed {
    /// Tokens in a second, over all ranks.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.step_s
    }

    /// Useful arithmetic of a rank in a second, 10^12.
    pub fn tflops_per_rank(&self) -> f64 {
        self.tokens_per_s() * self.flops_per_token / self.ranks as f64 / 1e12
    }

    /// Model FLOPs utilization: useful arithmetic over what the device could do.
    pub fn mfu(&self) -> Option<f64> {
        self.peak_flops.map(|peak| self.tflops_per_rank() * 1e12 / peak)
    }
}

/// [`Timings`] in seconds.
#[derive(Serialize)]
struct Seconds {
    gemm_s: f64,
    attention_s: f64,
    dispatch_s: f64,
    exposed_s: f64,
}

impl From<Timings> for Seconds {
    fn from(Timings { gemm, attention, dispatch, exposed }: Timings) -> Seconds {
        let [gemm_s, attention_s, dispatch_s, exposed_s] =
            [gemm, attention, dispatch, exposed].map(|time| time.as_secs_f64());
        Seconds { gemm_s, attention_s, dispatch_s, exposed_s }
    }
}

/// A line of a step.
#[derive(Serialize)]
struct Line {
    step: u64,
    loss: Option<f32>,
    loss_bits: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<&'static str>,
    grad_norm: f32,
    lr: f32,
    step_s: f64,
    tokens_per_s: f64,
    tflops_per_rank: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    mfu: Option<f64>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    timings: Option<Seconds>,
    expert_load: Load,
    /// A constant: no backend can drop a token.
    dropped: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    validation_loss: Option<f64>,
    /// By the names of the sets, if they have names.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    validation_losses: BTreeMap<String, f64>,
}

/// A line of a checkpoint.
#[derive(Serialize)]
struct SavedLine<'a> {
    step: u64,
    digest: &'a str,
    bytes: u64,
    /// None if the process that wrote it did not live to say it.
    copy_s: Option<f64>,
    write_s: Option<f64>,
}

/// Stands in the line of a step in which every target is masked.
pub(crate) const NO_TARGETS: &str = "no token of the step has a target";

impl Record {
    fn line(&self) -> String {
        let line = Line {
            step: self.step,
            loss: self.loss,
            loss_bits: self.loss.map(|loss| format!("{:08x}", loss.to_bits())),
            warning: (self.targets == 0).then_some(NO_TARGETS),
            grad_norm: self.grad_norm,
            lr: self.lr,
            step_s: self.speed.step_s,
            tokens_per_s: self.speed.tokens_per_s(),
            tflops_per_rank: self.speed.tflops_per_rank(),
            mfu: self.speed.mfu(),
            timings: self.speed.timings.map(Seconds::from),
            expert_load: self.expert_load,
            dropped: 0,
            validation_loss: (!self.validation.is_empty()).then(|| overall(&self.validation)),
            validation_losses: match &self.validation[..] {
                [set] if set.name == DataConfig::VALIDATION => BTreeMap::new(),
                sets => sets.iter().map(|set| (set.name.clone(), set.loss)).collect(),
            },
        };
        serde_json::to_string(&line).unwrap_or_else(|e| unreachable!("plain numbers: {e}"))
    }
}

/// `metrics.jsonl`, one line for each step and one for each checkpoint.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
}

/// The name of the file.
pub(crate) const METRICS: &str = "metrics.jsonl";

impl Metrics {
    /// Makes the file of the run that begins in `out`. One in which nothing is may be there.
    ///
    /// # Errors
    /// [`Error::Io`], also when something is in it.
    pub fn begin(out: &Path) -> Result<Metrics> {
        let path = out.join(METRICS);
        let file = files::change(&path)?;
        match file.metadata().map_err(Error::io(&path))?.len() {
            0 => Ok(Metrics { path, file }),
            _ => Err(Error::io(&path)(ErrorKind::AlreadyExists.into())),
        }
    }

    /// Opens the file of the run in `out`, which goes on after the checkpoint of step `done`. The lines of later steps are
    /// removed, and one that was cut off, so that each step is there once; lines that are none of a step stay, and are
    /// described.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for what is no regular file, [`Error::Io`].
    pub fn resume(out: &Path, done: u64) -> Result<(Metrics, Option<String>)> {
        let (Metrics { path, mut file }, survey) = Metrics::survey(out, done)?;
        if survey.cuts {
            files::replace_with(&path, |kept| survey.copy(&mut file, kept))?;
            file = files::change(&path)?;
        }
        if survey.open_end {
            file.seek(SeekFrom::End(0)).and_then(|_| file.write_all(b"\n")).map_err(Error::io(&path))?;
        }
        let note = survey.first_foreign.map(|line| {
            let lines = count(survey.foreign, "line");
            format!("{}: kept {lines} not of a step, the first of them line {line}", path.display())
        });
        Ok((Metrics { path, file }, note))
    }

    /// Adds a line. Comes before the checkpoint of its step, so that a run that goes on from there has the line.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&mut self, record: &Record) -> Result<()> {
        self.add(record.line())
    }

    /// Adds a line at the end, where somebody else may have added some.
    fn add(&mut self, line: String) -> Result<()> {
        let line = line + "\n";
        let written = self.file.seek(SeekFrom::End(0)).and_then(|_| self.file.write_all(line.as_bytes()));
        written.map_err(Error::io(&self.path))
    }

    /// Adds a line for a checkpoint that became complete: the digest over all weights and optimizer state, and what it took
    /// to write.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn saved(&mut self, completed: &Completed) -> Result<()> {
        let line = SavedLine {
            step: completed.step,
            digest: &completed.saved.digest,
            bytes: completed.bytes,
            copy_s: Some(completed.copy.as_secs_f64()),
            write_s: Some(completed.write.as_secs_f64()),
        };
        self.add_saved(&line)
    }

    fn add_saved(&mut self, line: &SavedLine<'_>) -> Result<()> {
        self.add(serde_json::to_string(line).unwrap_or_else(|e| unreachable!("plain numbers: {e}")))
    }

    /// Adds the line of a checkpoint that `out` has, if it has none: the process that wrote it was killed in between.
    /// How long it took, nobody knows then.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::Checkpoint`] for what is no regular file.
    pub(crate) fn complete(out: &Path, step: u64, digest: &str, bytes: u64) -> Result<()> {
        let (mut metrics, survey) = Metrics::survey(out, step)?;
        if survey.saved.as_deref() == Some(digest) {
            return Ok(());
        }
        if survey.open_end {
            metrics
                .file
                .seek(SeekFrom::End(0))
                .and_then(|_| metrics.file.write_all(b"\n"))
                .map_err(Error::io(&metrics.path))?;
        }
        metrics.add_saved(&SavedLine { step, digest, bytes, copy_s: None, write_s: None })
    }

    /// The file of the run in `out`, and what is in it as far as step `done`.
    fn survey(out: &Path, done: u64) -> Result<(Metrics, Survey)> {
        let path = out.join(METRICS);
        let mut file = files::change(&path)?;
        let size = file.metadata().map_err(Error::io(&path))?.len();
        if size > LARGEST {
            return Err(Error::checkpoint(
                path,
                format!("is damaged: it has {size} bytes, expected at most {LARGEST}"),
            ));
        }
        let survey = Survey::of(&mut file, done).map_err(Error::io(&path))?;
        Ok((Metrics { path, file }, survey))
    }
}

/// The largest file, of tens of millions of steps.
const LARGEST: u64 = 1 << 34;
/// No line of a step is longer.
const LONGEST_LINE: usize = 1 << 20;
/// What a line of a step begins with.
const LINE_START: &[u8] = b"{\"step\":";

/// What every line of a step has, and every line of a checkpoint.
#[derive(Deserialize)]
#[serde(untagged)]
enum Own {
    Step {
        step: u64,
        #[serde(rename = "loss")]
        _loss: IgnoredAny,
        #[serde(rename = "loss_bits")]
        _loss_bits: IgnoredAny,
    },
    Saved {
        step: u64,
        digest: String,
        #[serde(rename = "write_s")]
        _write_s: IgnoredAny,
    },
}

impl Own {
    /// What a line is; None for a line of somebody else.
    fn of(line: &[u8]) -> Option<Own> {
        let text = std::str::from_utf8(line).ok().filter(|line| line.len() < LONGEST_LINE)?;
        serde_json::from_str(text).ok()
    }

    fn step(&self) -> u64 {
        match self {
            Own::Step { step, .. } | Own::Saved { step, .. } => *step,
        }
    }
}

/// What a file has to lose, and what it keeps, found without holding more than a line of it.
#[derive(Debug, Default)]
struct Survey {
    kept: Vec<Range<u64>>,
    /// Whether something goes.
    cuts: bool,
    /// Lines that are none of a step, and the number of the first.
    foreign: u64,
    first_foreign: Option<u64>,
    /// Whether what is kept ends in the middle of a line.
    open_end: bool,
    /// The digest in the last line of the checkpoint of the step as far as which all is kept.
    saved: Option<String>,
}

impl Survey {
    fn of(file: &mut File, done: u64) -> std::io::Result<Survey> {
        let mut survey = Survey::default();
        let mut reader = BufReader::new(file);
        let (mut at, mut number) = (0, 0);
        loop {
            // A line of which no more than the longest is held.
            let (from, mut line, mut whole) = (at, Vec::new(), false);
            while !whole {
                let part = reader.fill_buf()?;
                if part.is_empty() {
                    break;
                }
                let newline = part.iter().position(|&byte| byte == b'\n');
                whole = newline.is_some();
                let length = newline.map_or(part.len(), |newline| newline + 1);
                line.extend_from_slice(&part[..length.min(LONGEST_LINE - line.len())]);
                reader.consume(length);
                at += length as u64;
            }
            if at == from {
                return Ok(survey);
            }
            number += 1;
            let own = if whole { Own::of(&line) } else { None };
            let step = own.as_ref().map(Own::step);
            let start = line.len().min(LINE_START.len());
            let cut_off = !whole && line[..start] == LINE_START[..start];
            if cut_off || step.is_some_and(|step| step > done) {
                survey.cuts = true;
                continue;
            }
            if step.is_none() {
                survey.foreign += 1;
                survey.first_foreign.get_or_insert(number);
                survey.open_end = !whole;
            }
            if let Some(Own::Saved { step, digest, .. }) = own
                && step == done
            {
                survey.saved = Some(digest);
            }
            match survey.kept.last_mut().filter(|last| last.end == from) {
                Some(last) => last.end = at,
                None => survey.kept.push(from..at),
            }
        }
    }

    /// Copies what is kept.
    fn copy(&self, from: &mut File, to: &mut File) -> std::io::Result<()> {
        for range in &self.kept {
            from.seek(SeekFrom::Start(range.start))?;
            std::io::copy(&mut Read::by_ref(from).take(range.end - range.start), to)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::checkpoint::Saved;

    fn record(step: u64) -> Record {
        Record {
            step,
            loss: Some(1.5),
            targets: 400,
            grad_norm: 0.25,
            lr: 1e-3,
            speed: Speed { step_s: 0.5, tokens: 500, flops_per_token: 1e9, ranks: 2, peak_flops: None, timings: None },
            expert_load: Load::of(&[3, 1, 2]),
            validation: Vec::new(),
        }
    }

    fn completed(step: u64) -> Completed {
        let (copy, write) = (Duration::from_millis(250), Duration::from_millis(1500));
        Completed { step, saved: Saved { path: "out".into(), digest: "abc".into() }, bytes: 4096, copy, write }
    }

    #[test]
    fn a_line_has_the_bits_of_the_loss_and_no_dropped_token() {
        let out = tempfile::tempdir().unwrap();
        let mut metrics = Metrics::begin(out.path()).unwrap();
        metrics.write(&record(7)).unwrap();
        metrics.write(&record(8)).unwrap();
        metrics.saved(&completed(7)).unwrap();
        let text = fs::read_to_string(out.path().join("metrics.jsonl")).unwrap();
        let expected = "{\"step\":7,\"loss\":1.5,\"loss_bits\":\"3fc00000\",\"grad_norm\":0.25,\"lr\":0.001,\
                        \"step_s\":0.5,\"tokens_per_s\":1000.0,\"tflops_per_rank\":0.5,\"expert_load\":{\"min\":1,\"mean\":2.0,\"max\":3},\
                        \"dropped\":0}";
        let saved = "{\"step\":7,\"digest\":\"abc\",\"bytes\":4096,\"copy_s\":0.25,\"write_s\":1.5}";
        assert_eq!(text.lines().collect::<Vec<_>>(), [expected, &expected.replace(":7,", ":8,"), saved]);
    }

    #[test]
    fn what_a_device_measures_is_in_the_line() {
        let millis = Duration::from_millis;
        let timings = Timings { gemm: millis(250), attention: millis(125), dispatch: millis(64), exposed: millis(32) };
        let mut record = record(1);
        record.speed = Speed { peak_flops: Some(2e12), timings: Some(timings), ..record.speed };
        let expected = "\"tflops_per_rank\":0.5,\"mfu\":0.25,\"gemm_s\":0.25,\"attention_s\":0.125,\
                        \"dispatch_s\":0.064,\"exposed_s\":0.032,\"expert_load\"";
        assert!(record.line().contains(expected), "{}", record.line());
    }

    #[test]
    fn a_resumed_run_replaces_the_lines_after_its_checkpoint() {
        let out = tempfile::tempdir().unwrap();
        let mut metrics = Metrics::begin(out.path()).unwrap();
        for step in 1..=4 {
            metrics.write(&record(step)).unwrap();
        }
        metrics.file.write_all(b"{\"step\":5,\"lo").unwrap();
        let (mut metrics, note) = Metrics::resume(out.path(), 2).unwrap();
        assert_eq!(note, None);
        metrics.write(&record(3)).unwrap();
        metrics.saved(&completed(3)).unwrap();
        let text = fs::read_to_string(out.path().join("metrics.jsonl")).unwrap();
        let steps: Vec<u64> = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap())
            .collect();
        assert_eq!(steps, [1, 2, 3, 3]);
        assert!(text.ends_with("\"write_s\":1.5}\n"));
    }

    /// Lines of somebody else, among them one that is no text and one without an end.
    #[test]
    fn f18_foreign_lines_are_kept_and_said() {
        let out = tempfile::tempdir().unwrap();
        let path = out.path().join(METRICS);
        let lines = |steps: &[u64]| steps.iter().flat_map(|&step| (record(step).line() + "\n").into_bytes()).collect();
        let lines: &dyn Fn(&[u64]) -> Vec<u8> = &lines;
        let foreign = b"{\"step\":9,\"mine\":1}\n\xff\xfe no text\n".to_vec();
        let before = [lines(&[1]), foreign.clone(), lines(&[2, 3]), b"# the end".to_vec()].concat();
        fs::write(&path, before).unwrap();
        let (mut metrics, note) = Metrics::resume(out.path(), 2).unwrap();
        assert!(note.unwrap().ends_with("metrics.jsonl: kept 3 lines not of a step, the first of them line 2"));
        metrics.write(&record(3)).unwrap();
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"# later\n").unwrap();
        metrics.write(&record(4)).unwrap();
        let expected = [
            lines(&[1]),
            foreign,
            lines(&[2]),
            b"# the end\n".to_vec(),
            lines(&[3]),
            b"# later\n".to_vec(),
            lines(&[4]),
        ];
        assert_eq!(fs::read(&path).unwrap(), expected.concat());
    }

    #[test]
    fn f18_what_has_no_end_of_a_line_takes_no_memory() {
        let out = tempfile::tempdir().unwrap();
        let file = File::create(out.path().join(METRICS)).unwrap();
        file.set_len(64 << 20).unwrap();
        let (mut metrics, note) = Metrics::resume(out.path(), 0).unwrap();
        assert!(note.unwrap().contains("kept 1 line not of a step"));
        assert_eq!(metrics.file.stream_position().unwrap(), (64 << 20) + 1);
    }
}
