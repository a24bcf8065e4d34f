//! What is in a model directory, without reading a weight.

use std::collections::BTreeMap;
use std::fmt;

use super::blocks::SCALE_SUFFIX;
use super::dir::ModelDir;
use super::layout::Experts;
use super::listing;
use crate::architecture::{Architecture, Feed};
use crate::attention::AttentionConfig;
use crate::params::Kind;
use crate::words::count;

/// The numbers of a model. Selection biases, which no optimizer changes, are no parameters; those of a
/// multi-token-prediction module are counted apart.
#[derive(Clone, Debug)]
pub struct Inspection {
    family: &'static str,
    architecture: Architecture,
    /// Parameters, without the multi-token-prediction module.
    pub total: u64,
    /// Those of them that a token meets.
    pub active: u64,
    /// Those of the embedding, which is looked up.
    pub embedding: u64,
    /// Those of the multi-token-prediction module.
    pub next: u64,
    /// Elements and bytes of each type, by name.
    pub dtypes: BTreeMap<String, (u64, u64)>,
    /// Number of files.
    pub files: usize,
    layout: String,
    blocks: Option<String>,
    ignored: Vec<String>,
    keys: Vec<String>,
}

impl Inspection {
    /// Looks at a directory.
    pub fn of(dir: &ModelDir) -> Inspection {
        let (weights, architecture) = (&dir.weights, dir.config.model.architecture());
        let layers = architecture.layers.len();
        let (mut fixed, mut experts, mut next) = (0, 0, 0);
        for part in weights.parts().iter().filter(|part| part.kind != Kind::Bias) {
            let layer = part.name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
            let count = match part.kind {
                _ if layer.is_some_and(|layer: usize| layer >= layers) => &mut next,
                Kind::Expert => &mut experts,
                _ => &mut fixed,
            };
            *count += part.len as u64;
        }
        let (top_k, of) = architecture.moe().map_or((0, 1), |moe| (moe.top_k as u64, moe.experts as u64));
        let mut dtypes: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for found in weights.files().names().filter_map(|name| weights.files().find(name)) {
            let of_type = dtypes.entry(found.dtype.to_string()).or_default();
            of_type.0 += found.shape.iter().product::<usize>() as u64;
            of_type.1 += found.bytes as u64;
        }
        let experts_are = match weights.layout().experts {
            _ if architecture.moe().is_none() => "no experts",
            Experts::Separate => "separate experts",
            Experts::Fused => "fused experts",
        };
        let prefix = if weights.layout().prefixed { "with" } else { "without" };
        let scaled = weights.files().names().any(|name| name.ends_with(SCALE_SUFFIX));
        Inspection {
            family: dir.config.model.family(),
            total: fixed + experts,
            active: fixed + experts * top_k / of,
            embedding: (architecture.vocab * architecture.hidden) as u64,
            next,
            dtypes,
            files: weights.files().count(),
            layout: format!("{experts_are}, names {prefix} model."),
            blocks: weights.blocks().filter(|_| scaled).map(|blocks| format!("{} x {}", blocks.rows, blocks.columns)),
            ignored: weights.ignored().to_vec(),
            keys: dir.config.ignored.clone(),
            architecture,
        }
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.dtypes.values().map(|(_, bytes)| bytes).sum()
    }

    fn rows(&self) -> Vec<(&'static str, String)> {
        let model = &self.architecture;
        let dense = model.layers.iter().filter(|feed| matches!(feed, Feed::Dense { .. })).count();
        let attention = match &model.attention {
            AttentionConfig::Mla(mla) => format!("latent, {} heads, latent rank {}", mla.heads, mla.kv_rank),
            AttentionConfig::Gqa(gqa) => {
                format!("grouped-query, {} heads of {}, {} of keys and values", gqa.heads, gqa.head_dim, gqa.kv_heads)
            }
        };
        let mut rows = vec![
            ("family", self.family.to_owned()),
            ("layers", format!("{}: {dense} dense, {} MoE", model.layers.len(), model.layers.len() - dense)),
            ("hidden", format!("{}, vocabulary {}", model.hidden, model.vocab)),
            ("attention", attention),
        ];
        if let Some(moe) = model.moe() {
            let shared = moe.shared_width.map_or(String::new(), |width| format!(", and a shared one of width {width}"));
            rows.push((
                "experts",
                format!("{} of width {}, {} for a token{shared}", moe.experts, moe.width, moe.top_k),
            ));
        }
        rows.push(("parameters", number(self.total)));
        let products = self.active - if model.tied { 0 } else { self.embedding };
        rows.push(("active", format!("{} for a token, {} in products", number(self.active), number(products))));
        if model.next.is_some() {
            rows.push(("prediction", format!("{} more in a multi-token-prediction module", number(self.next))));
        }
        if model.tied {
            rows.push(("tied", "the embedding is the output matrix".to_owned()));
        }
        let bytes = |n: u64| format!("{} bytes", number(n));
        for (dtype, (count, size)) in &self.dtypes {
            rows.push(("type", format!("{dtype}: {} elements, {}", number(*count), bytes(*size))));
        }
        rows.extend(self.blocks.iter().map(|blocks| ("FP8 blocks", blocks.clone())));
        rows.push(("size", format!("{} in {}", bytes(self.bytes()), count(self.files, "file"))));
        rows.push(("layout", self.layout.clone()));
        for (title, names) in [("ignored tensors", &self.ignored), ("ignored keys", &self.keys)] {
            if !names.is_empty() {
                rows.push((title, format!("{}: {}", names.len(), listing::some(names))));
            }
        }
        rows
    }
}

/// With a separator at each thousand.
fn number(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Width of the table.
const COLUMNS: usize = 80;
/// Width of its first column.
const TITLE: usize = 17;

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (row, (title, text)) in self.rows().iter().enumerate() {
            if row > 0 {
                writeln!(f)?;
            }
            write!(f, "{title:TITLE$}")?;
            let mut column = TITLE;
            for (at, word) in text.split(' ').enumerate() {
                if at > 0 && column + 1 + word.len() > COLUMNS {
                    write!(f, "\n{:TITLE$}", "")?;
                    column = TITLE;
                } else if at > 0 {
                    write!(f, " ")?;
                    column += 1;
                }
                write!(f, "{word}")?;
                column += word.len();
            }
        }
        Ok(())
    }
}
