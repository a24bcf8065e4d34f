//! What a run shows while it runs: a bar on a terminal, lines elsewhere. `metrics.jsonl` has all of it, and more.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

use crate::metrics::{Load, NO_TARGETS, Record};
use crate::output::{self, say, tell};
use crate::system;

/// Columns of a line, and of a terminal that does not say how many it has.
const COLUMNS: u16 = 80;
/// How often the time that is left is drawn, at the least.
const TICK: Duration = Duration::from_millis(500);
/// How often a line says how far a validation is.
const TOLD: Duration = Duration::from_secs(30);
/// Columns of the bar, and of the time left with its name.
const BAR: usize = 10;
const LEFT: usize = 8;

/// A bar when the error output is a terminal; otherwise a line on the standard output every few steps.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    interval: u64,
    steps: u64,
}

impl Progress {
    /// For a run of `steps` steps of which `done` are done, with a plain line every `interval` steps.
    pub fn new(steps: u64, done: u64, interval: u64) -> Progress {
        Progress::on(output::drawable().then(Screen::standard_error), steps, done, interval)
    }

    fn on(screen: Option<Screen>, steps: u64, done: u64, interval: u64) -> Progress {
        let bar = screen.map(|screen| {
            let template = format!("{{bar:{BAR}}} {{pos}}/{{len}}  {{wide_msg}} eta {{eta}}");
            let bar = bar(screen, steps, &template).with_position(done);
            bar.reset_eta();
            tick(&bar);
            bar
        });
        Progress { bar, interval, steps }
    }

    /// Shows a step.
    pub fn step(&self, record: &Record) {
        if record.targets == 0 {
            self.note(&format!("warning: step {}: {NO_TARGETS}, so it has no loss", record.step));
        }
        match &self.bar {
            Some(bar) => {
                bar.set_position(record.step);
                let place = BAR + format!(" {}/{}  ", record.step, self.steps).len() + LEFT;
                bar.set_message(fitting(numbers(record), usize::from(columns()).saturating_sub(place)));
            }
            None if record.step.is_multiple_of(self.interval) || record.step == self.steps => {
                let place = format!("step {}/{}", record.step, self.steps);
                say(fitting([place].into_iter().chain(numbers(record)), COLUMNS.into()));
            }
            None => {}
        }
    }

    /// Shows how far a validation between the steps is.
    pub(crate) fn validation(&self) -> Validating {
        Validating { bar: self.bar.clone(), own: false, told: Instant::now() }
    }

    /// Shows a line that stays.
    pub fn note(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say(line)),
            None => say(line),
        }
    }

    /// Ends the display.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }
}

/// How far a validation is: on a terminal at once, elsewhere a line on the error output every half minute.
#[derive(Debug)]
pub(crate) struct Validating {
    bar: Option<ProgressBar>,
    /// Whether nothing else is shown there.
    own: bool,
    told: Instant,
}

impl Validating {
    /// Of a validation on its own.
    pub(crate) fn alone() -> Validating {
        Validating { bar: bar_on_terminal(0, "{wide_msg}"), own: true, told: Instant::now() }
    }

    /// So many batches are done, of so many.
    pub(crate) fn reached(&mut self, done: usize, of: usize) {
        match &self.bar {
            Some(bar) => bar.set_message(place(done, of)),
            None => self.due(done, of).iter().for_each(tell),
        }
    }

    /// The line, when there was none for a while.
    fn due(&mut self, done: usize, of: usize) -> Option<String> {
        let due = self.told.elapsed() >= TOLD;
        due.then(|| {
            self.told = Instant::now();
            place(done, of)
        })
    }
}

fn place(done: usize, of: usize) -> String {
    format!("validation: batch {done} of {of}")
}

impl Drop for Validating {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.as_ref().filter(|_| self.own) {
            bar.finish_and_clear();
        }
    }
}

/// Moves the time that is left on between steps; where there is no thread for that, it moves with the steps.
fn tick(bar: &ProgressBar) {
    let bar = bar.downgrade();
    let _ = std::thread::Builder::new().name("progress".into()).spawn(move || {
        loop {
            std::thread::sleep(TICK);
            match bar.upgrade() {
                Some(bar) if !bar.is_finished() => bar.tick(),
                _ => return,
            }
        }
    });
}

/// A bar of `length`, if the error output is a terminal.
pub(crate) fn bar_on_terminal(length: u64, template: &str) -> Option<ProgressBar> {
    output::drawable().then(|| bar(Screen::standard_error(), length, template))
}

fn bar(screen: Screen, length: u64, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::term_like(Box::new(screen)));
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// What there is to say of a step, the most important first.
fn numbers(record: &Record) -> Vec<String> {
    let (Load { min, mean, max }, speed) = (record.expert_load, &record.speed);
    let mut numbers = vec![
        record.loss.map_or("no loss".into(), |loss| format!("loss {loss:.4}")),
        format!("expert load {min} to {max}, mean {mean:.0}"),
        format!("{:.0} tokens/s", speed.tokens_per_s()),
    ];
    numbers.extend(speed.mfu().map(|mfu| format!("MFU {:.1}%", 100.0 * mfu)));
    numbers.extend([format!("{:.3} s", speed.step_s), format!("{:.3} TFLOP/s a rank", speed.tflops_per_rank())]);
    if let Some(timings) = speed.timings {
        let times = [
            ("gemm", timings.gemm),
            ("attention", timings.attention),
            ("dispatch", timings.dispatch),
            ("exposed", timings.exposed),
        ];
        numbers.extend(times.map(|(name, time)| format!("{name} {:.3} s", time.as_secs_f64())));
    }
    numbers
}

/// The first of these, as many as fit a line, which has one in any case.
fn fitting(parts: impl IntoIterator<Item = String>, columns: usize) -> String {
    let mut parts = parts.into_iter();
    let mut line = parts.next().unwrap_or_default();
    for part in parts {
        if line.len() + 2 + part.len() > columns {
            break;
        }
        line += "  ";
        line += &part;
    }
    line
}

fn columns() -> u16 {
    system::columns().unwrap_or(COLUMNS)
}

/// A terminal, by sequences that all terminals know. A picture is drawn at once.
#[derive(Debug)]
struct Screen {
    picture: Mutex<String>,
    columns: fn() -> u16,
    draw: fn(String),
}

impl Screen {
    fn standard_error() -> Screen {
        Screen { picture: Mutex::default(), columns, draw: output::draw }
    }

    fn add(&self, sequence: &str) -> io::Result<()> {
        self.picture.lock().unwrap_or_else(PoisonError::into_inner).push_str(sequence);
        Ok(())
    }

    fn move_cursor(&self, by: usize, way: char) -> io::Result<()> {
        if by == 0 { Ok(()) } else { self.add(&format!("\u{1b}[{by}{way}")) }
    }
}

impl TermLike for Screen {
    fn width(&self) -> u16 {
        (self.columns)()
    }

    fn move_cursor_up(&self, by: usize) -> io::Result<()> {
        self.move_cursor(by, 'A')
    }

    fn move_cursor_down(&self, by: usize) -> io::Result<()> {
        self.move_cursor(by, 'B')
    }

    fn move_cursor_right(&self, by: usize) -> io::Result<()> {
        self.move_cursor(by, 'C')
    }

    fn move_cursor_left(&self, by: usize) -> io::Result<()> {
        self.move_cursor(by, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.add(text)?;
        self.add("\n")
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.add(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.add("\r\u{1b}[2K")
    }

    fn flush(&self) -> io::Result<()> {
        let picture = std::mem::take(&mut *self.picture.lock().unwrap_or_else(PoisonError::into_inner));
        if !picture.is_empty() {
            (self.draw)(picture);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use dropless_core::Timings;

    use super::*;
    use crate::metrics::Speed;

    fn record() -> Record {
        let second = Duration::from_secs(1);
        let timings = Timings { gemm: second, attention: second, dispatch: second, exposed: second };
        let (tokens, flops_per_token, peak_flops) = (500, 1e9, Some(2e12));
        let speed = Speed { step_s: 0.5, tokens, flops_per_token, ranks: 2, peak_flops, timings: Some(timings) };
        let expert_load = Load { min: 0, mean: 256.25, max: 1657 };
        Record {
            step: 399,
            loss: Some(1.5),
            targets: 500,
            grad_norm: 0.25,
            lr: 1e-3,
            speed,
            expert_load,
            validation: Vec::new(),
        }
    }

    #[test]
    fn f29_a_line_of_progress_has_labels_and_fits_80_columns() {
        let line = |columns| fitting(["step 399/400".to_owned()].into_iter().chain(numbers(&record())), columns);
        let expected = "step 399/400  loss 1.5000  expert load 0 to 1657, mean 256  1000 tokens/s";
        assert_eq!(line(COLUMNS.into()), expected);
        let expected = format!("{expected}  MFU 25.0%  0.500 s  0.500 TFLOP/s a rank  gemm 1.000 s");
        assert_eq!(line(expected.len()), expected);
        for columns in 30..200 {
            assert!(line(columns).len() <= columns);
        }
    }

    #[test]
    fn f29_a_validation_shows_how_far_it_is() {
        static DRAWN: Mutex<String> = Mutex::new(String::new());
        let draw = |picture: String| DRAWN.lock().unwrap().push_str(&picture);
        let screen = Screen { picture: Mutex::default(), columns: || COLUMNS, draw };
        let progress = Progress::on(Some(screen), 400, 0, 1);
        let mut validation = progress.validation();
        for batch in 1..=8 {
            validation.reached(batch, 8);
            std::thread::sleep(Duration::from_millis(60));
        }
        drop(validation);
        progress.finish();
        let drawn = DRAWN.lock().unwrap();
        assert!(drawn.contains("validation: batch 2 of 8") && drawn.contains("validation: batch 8 of 8"), "{drawn}");
        // Elsewhere a line comes when it is due, and only then.
        let mut lines = Validating { bar: None, own: true, told: Instant::now() };
        assert_eq!(lines.due(3, 8), None);
        lines.told = lines.told.checked_sub(TOLD).unwrap();
        assert_eq!(lines.due(3, 8).as_deref(), Some("validation: batch 3 of 8"));
        assert_eq!(lines.due(3, 8), None);
    }

    #[test]
    fn f29_a_bar_fits_80_columns_and_cuts_no_number() {
        static DRAWN: Mutex<String> = Mutex::new(String::new());
        let draw = |picture: String| DRAWN.lock().unwrap().push_str(&picture);
        let screen = Screen { picture: Mutex::default(), columns: || COLUMNS, draw };
        let progress = Progress::on(Some(screen), 400, 0, 1);
        progress.step(&record());
        progress.finish();
        let drawn = DRAWN.lock().unwrap().clone();
        let lines: Vec<&str> = drawn.split(['\r', '\n']).map(|line| line.trim_start_matches("\u{1b}[2K")).collect();
        assert!(lines.iter().all(|line| line.chars().count() <= COLUMNS.into()), "{lines:?}");
        let shown = |line: &&str| line.contains("399/400  loss 1.5000  expert load 0 to 1657, mean 256 ");
        assert!(lines.iter().any(shown), "{lines:?}");
    }
}
