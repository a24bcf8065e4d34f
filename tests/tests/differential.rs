//! Every problem of the harness on every backend that is here, against the host. The last line says which ones ran.

use std::process::ExitCode;

use dropless_tests::differential::{UNDER_TEST, cases};
use dropless_tests::ops;
use libtest_mimic::{Arguments, Failed, Trial};

fn main() -> ExitCode {
    let (mut trials, mut ran) = (Vec::new(), String::from("host"));
    let mut skipped = Vec::new();
    for candidate in UNDER_TEST {
        match candidate.device() {
            Ok(device) => {
                ran += &format!(", {} ({device})", candidate.name);
                let problems = ops::problems().into_iter().filter(|problem| candidate.ranks || problem.ranks == 1);
                trials.extend(problems.map(|problem| {
                    let check = move || problem.check(candidate, cases()).map_err(Failed::from);
                    Trial::test(format!("{}::{}", candidate.name, problem.name), check)
                }));
            }
            Err(why) => skipped.push(format!("skipped: {}: {why}", candidate.name)),
        }
    }
    let arguments = Arguments::from_args();
    let listing = arguments.list;
    let conclusion = libtest_mimic::run(&arguments, trials);
    if !listing {
        skipped.iter().for_each(|line| println!("{line}"));
        println!("backends: {ran}; {} problems of each kind", cases());
    }
    conclusion.exit_code()
}
