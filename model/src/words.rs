//! Words of messages: of parsers in those of whoever writes the files, and of numbers.

use std::fmt::Display;

/// What parsers expect, and what that is called.
const EXPECTED: &[(&[&str], &str)] = &[
    (&["i8", "i16", "i32", "i64", "i128", "isize"], "a whole number"),
    (&["u8", "u16", "u32", "u64", "u128", "usize"], "a whole number, not negative"),
    (&["f32", "f64"], "a number"),
    (&["a boolean", "bool"], "true or false"),
    (&["a string", "str", "string", "a character", "char"], "text in quotes"),
    (&["a sequence", "a tuple"], "a list"),
    (&["a map", "struct", "internally tagged enum"], "a section of keys"),
];

/// What parsers say of a value, as it is meant.
const SAID: &[(&str, &str)] = &[
    ("invalid digit found in string", "expected a whole number, not negative"),
    ("invalid float literal", "expected a number"),
    ("cannot parse integer from empty string", "expected a whole number, not negative"),
    ("cannot parse float from empty string", "expected a number"),
    ("number too large to fit in target type", "the number is too large"),
    ("number too small to fit in target type", "the number is too small"),
    ("floating point `", "number `"),
    ("integer `", "number `"),
    ("invalid type: unit value", "invalid type: nothing"),
];

/// A parser's message without the names that types have in programs.
///
/// ```
/// let plain = dropless_model::words::plain("invalid type: string \"many\", expected u64");
/// assert_eq!(plain, "invalid type: string \"many\", expected a whole number, not negative");
/// ```
pub fn plain(message: &str) -> String {
    let mut message = match message.rsplit_once(", expected ") {
        None => message.to_owned(),
        Some((found, expected)) => {
            // A place in the file may follow: "u64 at line 1 column 2".
            let (wanted, place) = match expected.find(" at line ") {
                Some(at) => expected.split_at(at),
                None => (expected, ""),
            };
            let first = wanted.split(' ').next().unwrap_or_default();
            let named = EXPECTED.iter().find(|(names, _)| names.contains(&wanted) || names.contains(&first));
            let named = named.map_or(wanted, |(_, plain)| plain);
            format!("{found}, expected {named}{place}")
        }
    };
    for (said, meant) in SAID {
        // What stands in quotes is somebody's value.
        if let Some(at) = message.find(said).filter(|&at| !message[..at].contains('"')) {
            message.replace_range(at..at + said.len(), meant);
        }
    }
    message
}

/// A number of things.
///
/// ```
/// use dropless_model::words::count;
/// assert_eq!((count(1_usize, "rank"), count(2_usize, "rank")), ("1 rank".into(), "2 ranks".into()));
/// ```
pub fn count<N: Display + PartialEq + From<u8>>(number: N, thing: &str) -> String {
    let more = if number == N::from(1) { "" } else { "s" };
    format!("{number} {thing}{more}")
}
