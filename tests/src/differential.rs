//! The differential harness: random problems of every op, given to the host and to another backend, whose bits must
//! agree.
//!
//! `DROPLESS_CASES` says how many problems of each kind. What failed once is kept in `proptest-regressions/` and tried
//! first.

mod backends;
mod compare;
mod maker;
mod random;

pub use backends::{Candidate, Ranks, UNDER_TEST, host};
pub use compare::{Outcome, Output, compare};
pub use maker::{Draw, Maker, TYPES, draws};
pub use random::Random;

use dropless_core::{Backend, NumericModel};
use proptest::test_runner::{
    Config, FailurePersistence, FileFailurePersistence, RngSeed, TestCaseError, TestError, TestRunner,
};

/// Problems of a kind where `DROPLESS_CASES` is not set.
const CASES: u32 = 12;

/// A kind of problem.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// The op, and what of it.
    pub name: &'static str,
    /// How many ranks work on it.
    pub ranks: usize,
    /// The arithmetic of matrix products.
    pub numerics: NumericModel,
    /// Whether chance has a part in its shape; else one run is enough.
    pub varied: bool,
    /// Makes the operands and runs the ops, on each rank.
    pub run: fn(&mut Maker<'_>),
}

impl Problem {
    /// Of one rank under the Hopper model.
    pub const fn new(name: &'static str, run: fn(&mut Maker<'_>)) -> Problem {
        Problem { name, ranks: 1, numerics: NumericModel::Hopper, varied: true, run }
    }

    /// What the ranks of a backend make of a draw.
    pub fn outcome(&self, draw: &Draw, ranks: &[Box<dyn Backend>]) -> Outcome {
        let on = |rank: &dyn Backend| {
            let mut maker = Maker::new(rank, draw);
            (self.run)(&mut maker);
            maker.finish()
        };
        std::thread::scope(|scope| {
            let on = &on;
            let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || on(&**rank))).collect();
            let outcomes = threads.into_iter().map(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
            let join = |mut all: Outcome, rank: Outcome| {
                all.ops.extend(rank.ops);
                all.outputs.extend(rank.outputs);
                all
            };
            outcomes.reduce(join).expect("a backend has a rank")
        })
    }

    /// Compares a backend with the host over the draws that failed once and `cases` more, the same in every run.
    ///
    /// # Errors
    /// The smallest problem found whose bits differ, and how.
    pub fn check(&self, candidate: &Candidate, cases: u32) -> Result<(), String> {
        let kept = format!("{}/proptest-regressions/{}.txt", env!("CARGO_MANIFEST_DIR"), self.name);
        // Proptest wants the name for the whole run.
        let kept = FileFailurePersistence::Direct(Box::leak(kept.into_boxed_str()));
        self.compare(candidate, cases, Some(Box::new(kept)))
    }

    /// As [`check`](Problem::check), but failures are kept elsewhere, or not at all.
    ///
    /// # Errors
    /// As [`check`](Problem::check).
    pub fn compare(
        &self,
        candidate: &Candidate,
        cases: u32,
        failure_persistence: Option<Box<dyn FailurePersistence>>,
    ) -> Result<(), String> {
        let host = host(self.ranks, self.numerics).unwrap();
        let device = (candidate.open)(self.ranks, self.numerics).map_err(|error| error.to_string())?;
        let mut runner = TestRunner::new(Config {
            cases: if self.varied { cases } else { 1 },
            max_shrink_iters: if self.varied { 2000 } else { 0 },
            rng_seed: RngSeed::Fixed(20260),
            failure_persistence,
            ..Config::default()
        });
        let agree = |draw: Draw| {
            let (want, got) = (self.outcome(&draw, &host), self.outcome(&draw, &device));
            compare(want, got).map_err(TestCaseError::fail)
        };
        runner.run(&draws(), agree).map_err(|error| match error {
            TestError::Fail(reason, draw) => format!("{}: {reason}\n  from {draw:?}", self.name),
            TestError::Abort(reason) => format!("{}: {reason}", self.name),
        })
    }
}

/// `DROPLESS_CASES`.
pub fn cases() -> u32 {
    std::env::var("DROPLESS_CASES").map_or(CASES, |n| n.parse().expect("DROPLESS_CASES is a number"))
}
