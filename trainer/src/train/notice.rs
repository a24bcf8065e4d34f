//! What the ranks tell each other at every step besides its sums: whether one of them is asked to stop, and how far each
//! is with its part of a checkpoint. It is a number that travels with the sums of the losses, so that all ranks decide the
//! same after the same step, and none waits for anything that a step does not wait for anyway.

use crate::stop::Reason;

/// How far a rank is with its part of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Part {
    /// There is none, or it is being written.
    #[default]
    Open,
    /// It is written.
    Written,
    /// It cannot be written, or the checkpoint cannot be completed.
    Failed,
}

/// One rank's notice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Notice {
    pub(super) stop: Option<Reason>,
    pub(super) part: Part,
}

/// Codes of a [`Part`].
const PARTS: [Part; 3] = [Part::Open, Part::Written, Part::Failed];

impl Notice {
    /// A small whole number, exact in f32.
    pub(super) fn code(self) -> f32 {
        let part = match self.part {
            Part::Open => 0,
            Part::Written => 1,
            Part::Failed => 2,
        };
        f32::from(Reason::code(self.stop) * 3 + part)
    }

    /// The notice with this code.
    pub(super) fn of(code: f32) -> Notice {
        let known = |notice: &Notice| notice.code() == code;
        let reasons =
            (0..=u8::MAX / 3).map_while(|code| if code == 0 { Some(None) } else { Reason::of(code).map(Some) });
        let all = reasons.flat_map(|stop| PARTS.map(|part| Notice { stop, part }));
        all.into_iter().find(known).unwrap_or_default()
    }
}

/// Why the ranks stop: the last of the reasons in the order of [`Reason`], whoever has it.
pub(super) fn stop(notices: &[Notice]) -> Option<Reason> {
    notices.iter().filter_map(|notice| notice.stop).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_what_its_code_says() {
        for stop in
            [None, Some(Reason::TimeLimit), Some(Reason::Interrupt), Some(Reason::Terminate), Some(Reason::User)]
        {
            for part in PARTS {
                let notice = Notice { stop, part };
                assert_eq!(Notice::of(notice.code()), notice);
            }
        }
        let of = |reason| Notice { stop: reason, part: Part::Open };
        assert_eq!(stop(&[of(None), of(Some(Reason::TimeLimit)), of(Some(Reason::User))]), Some(Reason::User));
        assert_eq!(stop(&[of(None); 3]), None);
    }
}
