//! Names and values of others in messages: what is no text in them must not act on a terminal or break a line.

use std::fmt::{self, Display, Write};

/// The text with its control characters, and the ones that turn the direction of writing, as escapes: `\n`, `\u{1b}`.
///
/// ```
/// let name = "model\u{1b}[2J\nerror: none";
/// assert_eq!(dropless_core::escape::escaped(name).to_string(), "model\\u{1b}[2J\\nerror: none");
/// ```
pub fn escaped(text: &str) -> impl Display + '_ {
    Escaped(text)
}

struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| if acts(c) { write!(f, "{}", c.escape_default()) } else { f.write_char(c) })
    }
}

/// Whether a character does something else than stand there.
fn acts(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}')
}
