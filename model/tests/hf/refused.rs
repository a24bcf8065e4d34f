//! Directories that do not fit: everything that is wrong, in one line.

use std::fs;
use std::path::Path;

use dropless_model::hf::ModelDir;
use safetensors::Dtype;
use serde_json::json;
use tempfile::tempdir;

use crate::model_dir::{self, Entries, Entry, config, fuse, model};

fn message(dir: &Path) -> String {
    let message = ModelDir::open(dir).unwrap_err().to_string();
    assert_eq!(message.lines().count(), 1, "{message}");
    message
}

fn refusal(family: &str, entries: &Entries, words: &[&str]) {
    let dir = tempdir().unwrap();
    model_dir::write(dir.path(), &config(family), entries, 1);
    let message = message(dir.path());
    for word in words.iter().chain(&["model.safetensors"]) {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
}

#[test]
fn two_layouts_at_once() {
    for family in ["mixtral", "qwen3_moe"] {
        let separate = model(family, Dtype::F32);
        let mut both = separate.clone();
        let fused = fuse(&separate);
        let name = "model.layers.1.mlp.experts.down_proj";
        both.insert(name.into(), fused[name].clone());
        refusal(family, &both, &["separate and fused experts", "experts.0.", name]);
    }
    let mut names = model("qwen3_moe", Dtype::F32);
    let norm = names.remove("model.norm.weight").unwrap();
    names.insert("norm.weight".into(), norm);
    refusal("qwen3_moe", &names, &["names with and without model.", "norm.weight"]);
    // The router of fused files is not where that of separate ones is.
    let mut fused = fuse(&model("mixtral", Dtype::F32));
    let router = fused.remove("model.layers.0.mlp.gate.weight").unwrap();
    fused.insert("model.layers.0.block_sparse_moe.gate.weight".into(), router);
    refusal("mixtral", &fused, &["missing: model.layers.0.mlp.gate.weight", "not of this model: model.layers.0.block"]);
}

#[test]
fn missing_unknown_and_wrongly_shaped_tensors_are_listed_together() {
    let mut entries = model("qwen3_moe", Dtype::F32);
    entries.remove("model.norm.weight");
    entries.remove("lm_head.weight");
    let name = "model.layers.1.mlp.experts.3.down_proj.weight";
    entries.get_mut(name).unwrap().shape.reverse();
    let ids = Entry { dtype: Dtype::I32, ..entries["model.layers.1.mlp.gate.weight"].clone() };
    entries.insert("model.layers.1.mlp.gate.weight".into(), ids);
    entries.insert("model.layers.2.mlp.gate.weight".into(), entries["model.layers.0.mlp.up_proj.weight"].clone());
    let words = [
        "5 tensors do not fit config.json",
        "missing: model.norm.weight [40], lm_head.weight [300, 40]",
        "of another shape: model.layers.1.mlp.experts.3.down_proj.weight [24, 40] (expected [40, 24])",
        "of another type: model.layers.1.mlp.gate.weight I32 (expected F32, BF16, F16 or F8_E4M3)",
        "not of this model: model.layers.2.mlp.gate.weight [48, 40]",
    ];
    refusal("qwen3_moe", &entries, &words);
    let several = tempdir().unwrap();
    model_dir::write(several.path(), &config("qwen3_moe"), &entries, 3);
    let said = message(several.path());
    assert!(said.contains("3.down_proj.weight [24, 40] in model-0000"), "{said}");
    let few: Entries = entries.into_iter().filter(|(name, _)| !name.contains("experts")).collect();
    refusal("qwen3_moe", &few, &["missing", "and 8 more"]);
}

#[test]
fn files_that_are_none() {
    let dir = tempdir().unwrap();
    let entries = model("mixtral", Dtype::BF16);
    model_dir::write(dir.path(), &config("mixtral"), &entries, 2);
    let index = dir.path().join("model.safetensors.index.json");
    let good = fs::read_to_string(&index).unwrap();
    ModelDir::open(dir.path()).unwrap();
    for (text, words) in [
        (good.replace("model-00002", "../model-00002"), ["index.json", "../model-00002-of-00002.safetensors"]),
        (good.replace("model-00001-of-00002", "model-00002-of-00002"), ["index.json", "is not in"]),
        (json!({ "weight_map": {} }).to_string(), ["index.json", "names no tensor"]),
        ("{".to_owned(), ["index.json", "EOF"]),
        (good.replace("model-00002", "absent"), ["absent-of-00002.safetensors", "No such file"]),
    ] {
        fs::write(&index, text).unwrap();
        let message = message(dir.path());
        assert!(words.iter().all(|word| message.contains(word)), "{message:?} lacks one of {words:?}");
    }
    fs::write(&index, good).unwrap();
    // What is no regular file, in the place of each.
    for name in ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"] {
        let path = dir.path().join(name);
        let aside = dir.path().join("aside");
        fs::rename(&path, &aside).unwrap();
        fs::create_dir(&path).unwrap();
        let said = message(dir.path());
        assert!(said.contains(name) && said.contains("not a regular file"), "{said}");
        fs::remove_dir(&path).unwrap();
        #[cfg(unix)]
        for device in ["/dev/zero", "/dev/null"] {
            std::os::unix::fs::symlink(device, &path).unwrap();
            let said = message(dir.path());
            assert!(said.contains(name) && said.contains("not a regular file"), "{said}");
            fs::remove_file(&path).unwrap();
        }
        fs::rename(&aside, &path).unwrap();
    }
    ModelDir::open(dir.path()).unwrap();
}

#[test]
fn sizes_are_compared_before_memory_is_asked_for() {
    let dir = tempdir().unwrap();
    model_dir::write(dir.path(), &config("mixtral"), &model("mixtral", Dtype::BF16), 1);
    let path = dir.path().join("model.safetensors");
    // A hole of 2^40 bytes that claims to be a header of almost that length.
    let claimed = (1u64 << 40) - 8;
    fs::write(&path, claimed.to_le_bytes()).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    let said = message(dir.path());
    assert!(said.contains(&claimed.to_string()) && said.contains("at most 100000000"), "{said}");
    fs::OpenOptions::new().write(true).open(dir.path().join("config.json")).unwrap().set_len(1 << 40).unwrap();
    let said = message(dir.path());
    assert!(said.contains("config.json") && said.contains("expected at most"), "{said}");
}
