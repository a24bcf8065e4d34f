//! The program `dropless`.

use std::process::ExitCode;

fn main() -> ExitCode {
    // A layer of Mesa looks for a display to prefer its GPU, and complains in many lines where there is none.
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    // SAFETY: as above.
    unsafe { dropless::backends::prepare_environment() };
    dropless::cli::run(std::env::args_os())
}
