//! `DROPLESS_REQUIRE`: what must be there where the tests run. Tests that need anything else pass with a line that says
//! why they were skipped.

use dropless_core::{Error, Result};

/// Something that a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// An adapter for the wgpu backend.
    Wgpu,
    /// A device for the cuda backend.
    Cuda,
    /// The run-time compiler of CUDA kernels.
    Nvrtc,
    /// Chromium, in which the page of recordings runs.
    Chromium,
    /// A launcher that started this test as several processes with a device each.
    Ranks,
}

impl Need {
    /// All of them, by their names.
    const ALL: [(&str, Need); 5] = [
        ("wgpu", Need::Wgpu),
        ("cuda", Need::Cuda),
        ("nvrtc", Need::Nvrtc),
        ("chromium", Need::Chromium),
        ("ranks", Need::Ranks),
    ];

    /// Whether `DROPLESS_REQUIRE` names it.
    ///
    /// # Panics
    /// When that names something unknown, which would ask for nothing.
    pub fn required(self) -> bool {
        let names = std::env::var("DROPLESS_REQUIRE").unwrap_or_default();
        parse(&names).unwrap_or_else(|wrong| panic!("DROPLESS_REQUIRE: {wrong}")).contains(&self)
    }

    /// What was opened.
    ///
    /// # Errors
    /// Why it is not here.
    ///
    /// # Panics
    /// When it is required and not here, or when opening it failed in another way.
    pub fn available<T>(self, opened: Result<T>) -> std::result::Result<T, String> {
        match opened {
            Err(Error::Unavailable { why, .. }) if !self.required() => Err(why),
            opened => Ok(opened.unwrap_or_else(|error| panic!("{error}"))),
        }
    }

    /// What was opened; None, with a line that says why, where it is not here.
    ///
    /// # Panics
    /// As [`available`](Need::available).
    pub fn or_skip<T>(self, opened: Result<T>) -> Option<T> {
        self.available(opened).inspect_err(|why| println!("skipped: {why}")).ok()
    }
}

/// The names of a list with commas; none in an empty one.
fn parse(names: &str) -> std::result::Result<Vec<Need>, String> {
    let one = |name: &str| {
        let known = || Need::ALL.map(|(name, _)| name).join(", ");
        let need = Need::ALL.iter().find(|(known, _)| *known == name);
        need.map(|(_, need)| *need).ok_or_else(|| format!("{name:?} is none of {}", known()))
    };
    names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_are_named_in_a_list() {
        assert_eq!(parse(""), Ok(vec![]));
        assert_eq!(parse("ranks"), Ok(vec![Need::Ranks]));
        assert_eq!(parse("wgpu, cuda,nvrtc"), Ok(vec![Need::Wgpu, Need::Cuda, Need::Nvrtc]));
    }

    #[test]
    fn a_misspelt_need_is_no_leave_to_skip() {
        assert_eq!(parse("wgpu,cud"), Err("\"cud\" is none of wgpu, cuda, nvrtc, chromium, ranks".into()));
    }

    #[test]
    fn only_what_is_not_here_is_skipped() {
        // No test run can ask for it, as it is not among the processes of a launcher.
        let absent = || Err::<(), _>(Error::Unavailable { backend: "cuda", why: "no device".into() });
        if !Need::Ranks.required() {
            assert_eq!(Need::Ranks.available(absent()), Err("no device".into()));
        }
        let broken = Err::<(), _>(Error::ForeignTensor { op: "read", backend: "cuda" });
        assert!(std::panic::catch_unwind(|| Need::Ranks.available(broken)).is_err());
        assert_eq!(Need::Ranks.available(Ok(1)), Ok(1));
    }
}
