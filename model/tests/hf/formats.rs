//! Reading: every family, layout, element type and number of files gives the same weights.

use dropless_core::host::{Host, HostOptions};
use dropless_core::numerics::bf16;
use dropless_core::{Backend, NumericModel};
use dropless_model::hf::{ModelDir, WeightFiles};
use dropless_model::nn::Tokens;
use dropless_model::{Model, Options};
use safetensors::Dtype;
use tempfile::tempdir;

use crate::model_dir::{self, Entry, FAMILIES, config, decode, fuse, model, strip};

/// The weights of each rank, by their names on the hub.
fn loaded(dir: &ModelDir, ranks: usize) -> Vec<Vec<(String, Vec<f32>)>> {
    let options = HostOptions { threads: 1, numerics: NumericModel::F32, ..HostOptions::default() };
    let hosts = Host::ranks(ranks, options).unwrap();
    let on_rank = |host: &Host| {
        let tokens = Tokens::new(host, 1, 8, 1).unwrap();
        let parts = dir.config.model.architecture();
        let model = Model::new(host, &parts, &Options::default(), &tokens).unwrap();
        dir.weights.load(host, &model.params).unwrap();
        let pieces = model.params.pieces().unwrap();
        let host: &dyn Backend = host;
        pieces.into_iter().map(|piece| (piece.name, host.download(&piece.value).unwrap())).collect()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = hosts.iter().map(|host| scope.spawn(move || on_rank(host))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_form_of_a_model_has_the_same_weights() {
    for family in FAMILIES {
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let separate = model(family, dtype);
            for (fused, prefixed, files) in [(false, true, 1), (true, true, 3), (false, false, 2), (true, false, 1)] {
                let entries = if fused { fuse(&separate) } else { separate.clone() };
                let entries = if prefixed { entries } else { strip(&entries) };
                let dir = tempdir().unwrap();
                model_dir::write(dir.path(), &config(family), &entries, files);
                let dir = ModelDir::open(dir.path()).unwrap();
                assert!(dir.weights.ignored().is_empty());
                let weights = loaded(&dir, 1).remove(0);
                assert_eq!(weights.len(), separate.len(), "{family} {dtype} fused: {fused}");
                for (name, values) in weights {
                    assert_eq!(values, decode(&separate[&name]), "{family} {dtype} fused: {fused}: {name}");
                }
            }
        }
    }
}

#[test]
fn a_rank_has_its_own_experts() {
    for fused in [false, true] {
        let separate = model("mixtral", Dtype::BF16);
        let dir = tempdir().unwrap();
        let entries = if fused { fuse(&separate) } else { separate.clone() };
        model_dir::write(dir.path(), &config("mixtral"), &entries, 2);
        let ranks = loaded(&ModelDir::open(dir.path()).unwrap(), 2);
        let experts = |rank: &[(String, Vec<f32>)]| rank.iter().filter(|(name, _)| name.contains(".experts.")).count();
        assert_eq!(ranks.iter().map(|rank| experts(rank)).collect::<Vec<_>>(), [12, 12]);
        for (name, values) in ranks.iter().flatten() {
            assert_eq!(*values, decode(&separate[name]), "{name}");
        }
    }
}

#[test]
fn a_tensor_is_read_in_small_blocks() {
    let dir = tempdir().unwrap();
    let mut settings = config("mixtral");
    let rows = 2 * WeightFiles::CHUNK / model_dir::HIDDEN + 1;
    settings["vocab_size"] = rows.into();
    let mut entries = model("mixtral", Dtype::BF16);
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let bytes = (0..rows * model_dir::HIDDEN).flat_map(|i| bf16::from_f32(i as f32).to_le_bytes()).collect();
        entries.insert(name.into(), Entry { dtype: Dtype::BF16, shape: vec![rows, model_dir::HIDDEN], bytes });
    }
    model_dir::write(dir.path(), &settings, &entries, 1);
    let dir = ModelDir::open(dir.path()).unwrap();
    let (mut next, mut reads) = (0, 0);
    let each = |from: usize, values: &[f32]| {
        assert_eq!(from, next);
        assert!(values.len() <= WeightFiles::CHUNK);
        assert_eq!(values[0], bf16::round(from as f32));
        next += values.len();
        reads += 1;
        Ok(())
    };
    dir.weights.read("model.embed_tokens.weight", each).unwrap();
    assert_eq!((next, reads), (rows * model_dir::HIDDEN, 3));
}

#[test]
fn a_tied_output_matrix_may_be_absent_or_the_same() {
    let mut settings = config("qwen3_moe");
    settings["tie_word_embeddings"] = true.into();
    let with = |head: Option<Entry>| {
        let mut entries = model("qwen3_moe", Dtype::BF16);
        entries.remove("lm_head.weight");
        entries.extend(head.map(|head| ("lm_head.weight".to_owned(), head)));
        let dir = tempdir().unwrap();
        model_dir::write(dir.path(), &settings, &entries, 1);
        ModelDir::open(dir.path())
    };
    let table = model("qwen3_moe", Dtype::BF16)["model.embed_tokens.weight"].clone();
    assert!(with(None).unwrap().notes().iter().all(|note| !note.contains("lm_head")));
    let same = with(Some(table.clone())).unwrap();
    assert_eq!(same.weights.ignored(), ["lm_head.weight"]);
    let mut other = table;
    *other.bytes.last_mut().unwrap() ^= 1;
    let message = with(Some(other)).unwrap_err().to_string();
    for word in ["model.safetensors: lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings"] {
        assert!(message.contains(word), "{message}");
    }
}

#[test]
fn tensors_that_mean_nothing_to_the_model_are_named_once() {
    let family = "deepseek_v3";
    let full = model(family, Dtype::F32);
    let open = |settings: &serde_json::Value, entries: &model_dir::Entries| {
        let dir = tempdir().unwrap();
        model_dir::write(dir.path(), settings, entries, 1);
        ModelDir::open(dir.path())
    };
    // The module's copies of embedding and output matrix, and rotary frequencies.
    let mut more = full.clone();
    let copies = ["embed_tokens.weight", "shared_head.head.weight"].map(|rest| format!("model.layers.2.{rest}"));
    for copy in &copies {
        more.insert(copy.clone(), full["lm_head.weight"].clone());
    }
    let frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq";
    more.insert(frequencies.into(), full["model.norm.weight"].clone());
    let dir = open(&config(family), &more).unwrap();
    assert_eq!(dir.weights.ignored(), [frequencies, &copies[0], &copies[1]]);
    let notes = dir.notes();
    assert_eq!(notes.len(), 2, "{notes:?}");
    assert!(notes[0].contains("a_key_of_another_library") && notes[1].contains("3 tensors"), "{notes:?}");

    // A module beyond the configuration.
    let mut settings = config(family);
    settings["num_nextn_predict_layers"] = 0.into();
    let dir = open(&settings, &full).unwrap();
    assert!(dir.weights.ignored().iter().all(|name| name.starts_with("model.layers.2.")));
    assert_eq!(dir.weights.ignored().len(), full.keys().filter(|name| name.contains("layers.2.")).count());

    // One that the configuration names and the files leave out; but not one of which a part is missing.
    let without: model_dir::Entries =
        full.iter().filter(|(name, _)| !name.contains("layers.2.")).map(|(n, e)| (n.clone(), e.clone())).collect();
    let dir = open(&config(family), &without).unwrap();
    assert!(dir.weights.ignored().is_empty() && dir.config.model.architecture().next.is_none());
    let mut part = full;
    part.remove("model.layers.2.eh_proj.weight");
    let message = open(&config(family), &part).unwrap_err().to_string();
    assert!(message.contains("missing: model.layers.2.eh_proj.weight [40, 80]"), "{message}");
}

/// bf16 of the contract and of the library that reads files, on every pattern: its value, and what rounds to it from just
/// below, on and just above the middle to the next.
#[test]
fn the_two_bf16_are_one() {
    for code in 0..=u16::MAX {
        let (ours, theirs) = (bf16::to_f32(code), half::bf16::from_bits(code).to_f32());
        assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{code:#06x}");
        for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
            let x = f32::from_bits(u32::from(code) << 16 | low);
            let (ours, theirs) = (bf16::from_f32(x), half::bf16::from_f32(x));
            if x.is_nan() {
                assert!(bf16::to_f32(ours).is_nan() && theirs.is_nan(), "{x:?}");
            } else {
                assert_eq!(ours, theirs.to_bits(), "{:#010x}", x.to_bits());
            }
        }
    }
}
