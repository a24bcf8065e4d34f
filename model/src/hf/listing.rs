//! What does not fit between a model and its files: everything in one line, of bounded length.

use dropless_core::escape::escaped;

/// Names of one kind that a line shows.
const SHOWN: usize = 6;

/// Tensors that do not fit, each with what was expected.
#[derive(Debug, Default)]
pub(super) struct Problems {
    pub(super) missing: Vec<String>,
    pub(super) shapes: Vec<String>,
    pub(super) types: Vec<String>,
    pub(super) unknown: Vec<String>,
}

impl Problems {
    /// The line, if there is anything to say.
    pub(super) fn line(&self) -> Option<String> {
        let kinds = [
            ("missing", &self.missing),
            ("of another shape", &self.shapes),
            ("of another type", &self.types),
            ("not of this model", &self.unknown),
        ];
        let count: usize = kinds.iter().map(|(_, tensors)| tensors.len()).sum();
        let lists = kinds.iter().filter(|(_, tensors)| !tensors.is_empty());
        let lists: Vec<String> = lists.map(|(kind, tensors)| format!("{kind}: {}", some(tensors))).collect();
        (count > 0).then(|| match count {
            1 => format!("1 tensor does not fit config.json: {}", lists.join("; ")),
            _ => format!("{count} tensors do not fit config.json: {}", lists.join("; ")),
        })
    }
}

/// The first names, and how many more there are.
pub(super) fn some(names: &[String]) -> String {
    let shown = names.iter().take(SHOWN).map(|name| escaped(name).to_string()).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
