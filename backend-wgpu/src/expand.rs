//! Writes out what the constants of a dispatch decide, before a driver sees it: not every driver unrolls loops, and only
//! constant indices keep an array in registers; and every branch that is never taken costs time to compile.
//!
//! - A loop is marked by the comment `unrolled` behind its head, which has the form
//!   `for (var i = FROM; i < TO; i += BY) {`.
//! - One with loads in it is marked `unrolled loads` where there can be more than a dozen. Recordings keep it a loop: one of
//!   the compilers behind WebGPU, SwiftShader's, takes twice the time for each load in a row.
//! - A choice is marked by the comment `decided` behind each of its conditions, which have the form `A == B && C == D`.
//!
//! What stands there in capital letters is a literal, a constant of the dispatch, or one of them less 1. Both end at
//! their own indentation.

/// The constants of a dispatch.
pub(crate) type Constants<'a> = [(&'a str, u32)];

/// `text` with what is marked in it written out; loops with loads only if `loads` says so.
pub(crate) fn expand(text: &str, constants: &Constants<'_>, loads: bool) -> String {
    let marked = if loads { text.replace("{ // unrolled loads", "{ // unrolled") } else { text.to_owned() };
    let text = &marked;
    let mut out = String::new();
    write(&mut out, &text.lines().collect::<Vec<_>>(), constants);
    out
}

fn write(out: &mut String, mut lines: &[&str], constants: &Constants<'_>) {
    while let Some((line, rest)) = lines.split_first() {
        let indent = &line[..line.len() - line.trim_start().len()];
        lines = if let Some(counter) = Counter::of(line.trim_start(), constants) {
            let (body, end) = block(indent, rest);
            for value in counter.values {
                let number = format!("{value}u");
                let body: Vec<String> = body.iter().map(|line| replace(line, counter.name, &number)).collect();
                braced(out, indent, &body.iter().map(String::as_str).collect::<Vec<_>>(), constants);
            }
            &end[1..]
        } else if let Some(condition) = condition(line.trim_start()) {
            decide(out, indent, holds(condition, constants), rest, constants)
        } else {
            out.push_str(line);
            out.push('\n');
            rest
        };
    }
}

/// Writes the branch that is taken, of a choice whose first condition holds or not. Returns the lines behind it.
fn decide<'a, 'l>(
    out: &mut String,
    indent: &str,
    mut taken: bool,
    mut lines: &'a [&'l str],
    constants: &Constants<'_>,
) -> &'a [&'l str] {
    let mut done = false;
    loop {
        let (body, end) = block(indent, lines);
        if taken {
            braced(out, indent, body, constants);
        }
        done |= taken;
        lines = &end[1..];
        let otherwise = end[0].trim_start().strip_prefix("} else ");
        taken = match otherwise {
            None => return lines,
            Some("{") => !done,
            Some(other) => {
                let condition = condition(other).expect("a marked choice is marked at each condition");
                !done && holds(condition, constants)
            }
        };
    }
}

fn braced(out: &mut String, indent: &str, body: &[&str], constants: &Constants<'_>) {
    out.push_str(indent);
    out.push_str("{\n");
    write(out, body, constants);
    out.push_str(indent);
    out.push_str("}\n");
}

/// The lines up to the brace at this indentation, and those from it on.
fn block<'a, 'l>(indent: &str, lines: &'a [&'l str]) -> (&'a [&'l str], &'a [&'l str]) {
    let closes = |line: &&str| line.strip_prefix(indent).is_some_and(|rest| rest.starts_with('}'));
    lines.split_at(lines.iter().position(closes).expect("a marked block ends at its own indentation"))
}

/// The counter of a marked loop.
struct Counter<'a> {
    name: &'a str,
    values: std::iter::StepBy<std::ops::Range<u32>>,
}

impl<'a> Counter<'a> {
    fn of(line: &'a str, constants: &Constants<'_>) -> Option<Self> {
        let clauses = line.strip_prefix("for (var ")?.strip_suffix(") { // unrolled")?;
        let [start, test, step] = clauses.split("; ").collect::<Vec<_>>().try_into().ok()?;
        let ((name, from), (_, to), (_, by)) =
            (start.split_once(" = ")?, test.split_once(" < ")?, step.split_once(" += ")?);
        let [from, to, by] = [from, to, by].map(|bound| value(bound, constants));
        Some(Counter { name, values: (from..to).step_by(by as usize) })
    }
}

/// The condition of a marked branch.
fn condition(line: &str) -> Option<&str> {
    line.strip_prefix("if ")?.strip_suffix(" { // decided")
}

fn holds(condition: &str, constants: &Constants<'_>) -> bool {
    condition.split(" && ").all(|term| {
        let (left, right) = term.split_once(" == ").expect("a marked condition compares constants");
        value(left, constants) == value(right, constants)
    })
}

fn value(text: &str, constants: &Constants<'_>) -> u32 {
    if let Some(more) = text.strip_suffix(" - 1u") {
        return value(more, constants) - 1;
    }
    let named = constants.iter().find(|(name, _)| *name == text).map(|&(_, value)| value);
    let literal = || text.strip_suffix('u').and_then(|digits| digits.parse().ok());
    named.or_else(literal).unwrap_or_else(|| panic!("{text} decides, but is no constant"))
}

/// `line` with the word `name` replaced wherever it stands for itself.
fn replace(line: &str, name: &str, by: &str) -> String {
    let in_word = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    let mut out = String::new();
    let mut rest = line;
    while let Some(at) = rest.find(name) {
        let (before, after) = (&rest[..at], &rest[at + name.len()..]);
        let alone = !before.ends_with(in_word) && !after.starts_with(|c: char| in_word(c) && c != '.');
        out.push_str(before);
        out.push_str(if alone { by } else { name });
        rest = after;
        if !alone {
            // The rest of the word is none of its own.
            let end = rest.find(|c: char| !in_word(c)).unwrap_or(rest.len());
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::expand;

    #[test]
    fn marked_loops_are_written_out() {
        let text = "\
for (var i = 0u; i < STEP; i += 2u) { // unrolled
    sum += side.i[i] * ii;
    for (var c = 1u; c < 3u; c += 1u) { // unrolled
        x[i][c] = ic(c);
    }
}
for (var i = 0u; i < STEP; i += 1u) {
}
";
        let want = "\
{
    sum += side.i[0u] * ii;
    {
        x[0u][1u] = ic(1u);
    }
    {
        x[0u][2u] = ic(2u);
    }
}
{
    sum += side.i[2u] * ii;
    {
        x[2u][1u] = ic(1u);
    }
    {
        x[2u][2u] = ic(2u);
    }
}
for (var i = 0u; i < STEP; i += 1u) {
}
";
        assert_eq!(expand(text, &[("STEP", 4)], true), want);
    }

    #[test]
    fn loops_with_loads_stay_loops_where_they_should() {
        let text = "for (var i = 0u; i < N; i += 1u) { // unrolled loads\n    sum += x_at(i);\n}\n";
        assert_eq!(expand(text, &[("N", 2)], true), "{\n    sum += x_at(0u);\n}\n{\n    sum += x_at(1u);\n}\n");
        assert_eq!(expand(text, &[("N", 2)], false), text);
    }

    #[test]
    fn choices_are_decided() {
        let text = "\
if A == 1u && B == 1u { // decided
    both();
} else if A == 1u { // decided
    for (var i = 0u; i < B; i += 1u) { // unrolled
        one(i);
    }
} else {
    none();
}
after();
";
        for (a, b, want) in [
            (1, 1, "{\n    both();\n}\nafter();\n"),
            (1, 2, "{\n    {\n        one(0u);\n    }\n    {\n        one(1u);\n    }\n}\nafter();\n"),
            (0, 1, "{\n    none();\n}\nafter();\n"),
        ] {
            assert_eq!(expand(text, &[("A", a), ("B", b)], true), want, "A = {a}, B = {b}");
        }
    }

    #[test]
    #[should_panic(expected = "n decides, but is no constant")]
    fn what_decides_must_be_known() {
        expand("for (var i = 0u; i < n; i += 1u) { // unrolled\n}\n", &[], true);
    }
}
