//! What `inspect` says.

use dropless_model::hf::{Inspection, ModelDir};
use safetensors::Dtype;
use tempfile::tempdir;

use crate::model_dir::{self, EXPERTS, FAMILIES, HIDDEN, VOCAB, WIDTH, config, fuse, model};

#[test]
fn numbers_are_those_of_the_files() {
    for family in FAMILIES {
        for fused in [false, true] {
            let entries = model(family, Dtype::BF16);
            let count = |part: &str| -> u64 {
                let found = entries.iter().filter(|(name, _)| name.contains(part) && !name.ends_with("_bias"));
                found.map(|(_, entry)| entry.shape.iter().product::<usize>() as u64).sum()
            };
            let next = if family == "deepseek_v3" { count(".layers.2.") } else { 0 };
            let experts = count(".experts.") - if next > 0 { (EXPERTS * 3 * WIDTH * HIDDEN) as u64 } else { 0 };
            let bytes: usize = entries.values().map(|entry| entry.bytes.len()).sum();
            let total = count("") - next;
            let dir = tempdir().unwrap();
            model_dir::write(dir.path(), &config(family), &if fused { fuse(&entries) } else { entries }, 2);
            let found = Inspection::of(&ModelDir::open(dir.path()).unwrap());
            assert_eq!((found.total, found.next, found.bytes()), (total, next, bytes as u64), "{family}");
            assert_eq!(found.active, total - experts / 2, "{family}: two of four experts");
            assert_eq!(found.embedding, (VOCAB * HIDDEN) as u64);
            let text = found.to_string();
            let layout = if fused { "fused experts, names with model." } else { "separate experts, names with model." };
            for word in [family, "BF16", "in 2 files", layout, "a_key_of_another_library"] {
                assert!(text.contains(word), "{text}\nlacks {word}");
            }
            assert!(text.lines().all(|line| line.len() <= 80 && !line.ends_with(' ')), "{text}");
        }
    }
}
