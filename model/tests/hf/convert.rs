//! Writing: nothing changes but what was asked for, and nothing half-written has the final name.

use std::fs;
use std::path::PathBuf;

use dropless_model::hf::config::{CONFIG, GENERATION_CONFIG};
use dropless_model::hf::{Conversion, Experts, HfConfig, ModelDir, SpecialTokens, convert};
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

use crate::model_dir::{self, Entries, FAMILIES, config, decode, fuse, model, strip};

/// A directory with a model in `in`.
struct Place(TempDir);

impl Place {
    fn new(settings: &Value, entries: &Entries, files: usize) -> Place {
        let place = Place(tempdir().unwrap());
        fs::create_dir(place.path("in")).unwrap();
        model_dir::write(&place.path("in"), settings, entries, files);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn convert(&self, from: &str, to: &str, conversion: &Conversion) -> dropless_model::Result<()> {
        convert(&ModelDir::open(&self.path(from)).unwrap(), &self.path(to), conversion).map(drop)
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap()
    }
}

fn into(experts: Experts) -> Conversion {
    Conversion { experts: Some(experts), ..Conversion::default() }
}

#[test]
fn without_a_wish_every_byte_of_every_tensor_stays_in_its_file() {
    for family in FAMILIES {
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let hub = model(family, dtype);
            for entries in [hub.clone(), fuse(&hub), strip(&hub), strip(&fuse(&hub))] {
                for files in [1, 3] {
                    let place = Place::new(&config(family), &entries, files);
                    place.convert("in", "out", &Conversion::default()).unwrap();
                    assert_eq!(model_dir::read(&place.path("out")), model_dir::read(&place.path("in")));
                    assert_eq!(place.json("out/config.json"), place.json("in/config.json"));
                }
            }
        }
    }
}

#[test]
fn the_other_layout_and_back() {
    for family in FAMILIES {
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let hub = model(family, dtype);
            let place = Place::new(&config(family), &hub, 2);
            place.convert("in", "fused", &into(Experts::Fused)).unwrap();
            assert_eq!(model_dir::read(&place.path("fused")).0, fuse(&hub), "{family} {dtype}");
            place.convert("fused", "back", &into(Experts::Separate)).unwrap();
            assert_eq!(model_dir::read(&place.path("back")).0, hub, "{family} {dtype}");
        }
    }
}

#[test]
fn patterns_that_are_no_numbers_survive_a_copy() {
    let mut hub = model("mixtral", Dtype::BF16);
    let bytes = (0..300 * 40).flat_map(|i: usize| u16::try_from(i * 5 % 65536).unwrap().to_le_bytes()).collect();
    hub.get_mut("lm_head.weight").unwrap().bytes = bytes;
    let place = Place::new(&config("mixtral"), &hub, 1);
    place.convert("in", "out", &into(Experts::Fused)).unwrap();
    assert_eq!(model_dir::read(&place.path("out")).0, fuse(&hub));
}

#[test]
fn another_type_rounds_once_and_selection_biases_never() {
    let hub = model("deepseek_v3", Dtype::F32);
    let place = Place::new(&config("deepseek_v3"), &hub, 1);
    for (dtype, name) in [(Dtype::BF16, "bfloat16"), (Dtype::F16, "float16"), (Dtype::F32, "float32")] {
        let conversion = Conversion { dtype: Some(dtype), ..Conversion::default() };
        place.convert("in", name, &conversion).unwrap();
        let (found, _) = model_dir::read(&place.path(name));
        assert_eq!(found, model("deepseek_v3", dtype), "{name}");
        assert_eq!(place.json(&format!("{name}/config.json"))["torch_dtype"], name);
    }
    // Exactly back.
    let wide = Conversion { dtype: Some(Dtype::F32), ..Conversion::default() };
    place.convert("bfloat16", "wide", &wide).unwrap();
    let (wide, narrow) = (model_dir::read(&place.path("wide")).0, model("deepseek_v3", Dtype::BF16));
    assert!(wide.iter().all(|(name, entry)| entry.dtype == Dtype::F32 && decode(entry) == decode(&narrow[name])));
    // A number that the type cannot hold.
    let mut large = model("mixtral", Dtype::BF16);
    large.get_mut("model.norm.weight").unwrap().bytes[..2].copy_from_slice(&[0x80, 0x7E]);
    let place = Place::new(&config("mixtral"), &large, 1);
    let half = Conversion { dtype: Some(Dtype::F16), ..Conversion::default() };
    let message = place.convert("in", "out", &half).unwrap_err().to_string();
    assert!(message.contains("model.norm.weight has the value 8.5") && message.contains("F16"), "{message}");
    assert_eq!(fs::read_dir(place.0.path()).unwrap().count(), 1, "nothing is left");
}

#[test]
fn shards_are_no_larger_than_asked_for() {
    let hub = model("deepseek_v3", Dtype::BF16);
    let place = Place::new(&config("deepseek_v3"), &hub, 1);
    let most = 30_000;
    place.convert("in", "out", &Conversion { shard_bytes: Some(most), ..Conversion::default() }).unwrap();
    let (found, places) = model_dir::read(&place.path("out"));
    assert_eq!(found, hub);
    let index = place.json("out/model.safetensors.index.json");
    let map: std::collections::BTreeMap<String, String> = serde_json::from_value(index["weight_map"].clone()).unwrap();
    assert_eq!(map, places);
    let total: usize = hub.values().map(|entry| entry.bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    let mut files: Vec<&String> = places.values().collect();
    files.dedup();
    files.sort();
    files.dedup();
    assert!(files.len() > 3, "{files:?}");
    for (at, file) in files.iter().enumerate() {
        assert_eq!(**file, format!("model-{:05}-of-{:05}.safetensors", at + 1, files.len()));
        let mine = hub.iter().filter(|(name, _)| places[*name] == **file);
        let sizes: Vec<u64> = mine.map(|(_, entry)| entry.bytes.len() as u64).collect();
        assert!(sizes.iter().sum::<u64>() <= most || sizes.len() == 1, "{file}: {sizes:?}");
    }
    ModelDir::open(&place.path("out")).unwrap();
}

#[test]
fn every_tensor_is_aligned_in_its_file() {
    // The f32 bias of an odd number of experts' worth of bf16 would end up between them.
    let place = Place::new(&config("deepseek_v3"), &model("deepseek_v3", Dtype::BF16), 1);
    place.convert("in", "out", &Conversion::default()).unwrap();
    let bytes = fs::read(place.path("out/model.safetensors")).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!((header + 8) % 8, 0);
    assert!(metadata.tensors().values().all(|info| info.data_offsets.0 % (info.dtype.bitsize() / 8) == 0));
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
}

#[test]
fn what_the_model_ignores_is_carried() {
    let mut settings = config("deepseek_v3");
    settings["num_nextn_predict_layers"] = 0.into();
    let mut entries = model("deepseek_v3", Dtype::BF16);
    let ids = model_dir::Entry { dtype: Dtype::I64, shape: vec![3], bytes: (0..24).collect() };
    entries.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), ids);
    let place = Place::new(&settings, &entries, 2);
    place.convert("in", "out", &into(Experts::Separate)).unwrap();
    assert_eq!(model_dir::read(&place.path("out")).0, entries);
}

#[test]
fn ids_and_tokenizer_come_along() {
    let mut settings = config("mixtral");
    settings["eos_token_id"] = json!([5, 6]);
    settings["bos_token_id"] = 4.into();
    let place = Place::new(&settings, &model("mixtral", Dtype::BF16), 1);
    fs::write(place.path("in/tokenizer.json"), "{}").unwrap();
    fs::write(place.path("in/state.json"), "{}").unwrap();
    place.convert("in", "out", &Conversion::default()).unwrap();
    let expected = json!({ "_from_model_config": true, "bos_token_id": 4, "eos_token_id": [5, 6] });
    assert_eq!(place.json("out/generation_config.json"), expected);
    assert_eq!(place.json("out/tokenizer.json"), json!({}));
    assert!(!place.path("out/state.json").exists(), "no checkpoint of a run any more");
    // One that is there stays as it is.
    fs::write(place.path("in").join(GENERATION_CONFIG), r#"{"temperature":0.5}"#).unwrap();
    place.convert("in", "again", &Conversion::default()).unwrap();
    assert_eq!(place.json("again/generation_config.json"), json!({ "temperature": 0.5 }));
}

#[test]
fn absent_ids_are_those_of_the_family_and_null_is_none() {
    let tokens = |family: &str, change: Option<Value>| {
        let mut settings = config(family);
        if let Some(ids) = change {
            settings["eos_token_id"] = ids.clone();
            settings["bos_token_id"] = ids;
        }
        let dir = tempdir().unwrap();
        fs::write(dir.path().join(CONFIG), settings.to_string()).unwrap();
        SpecialTokens::of(&HfConfig::read(&dir.path().join(CONFIG)).unwrap())
    };
    let of = |bos: Option<u32>, eos: &[u32]| SpecialTokens { bos, eos: eos.to_vec(), pad: None };
    assert_eq!(tokens("deepseek_v3", None), of(Some(0), &[1]));
    assert_eq!(tokens("mixtral", None), of(Some(1), &[2]));
    assert_eq!(tokens("qwen3_moe", None), of(None, &[]));
    for family in FAMILIES {
        assert_eq!(tokens(family, Some(Value::Null)), of(None, &[]));
        assert_eq!(tokens(family, Some(json!(9))), of(Some(9), &[9]));
    }
}

#[test]
fn the_name_of_the_new_directory_may_end_with_a_separator() {
    let place = Place::new(&config("mixtral"), &model("mixtral", Dtype::F32), 2);
    place.convert("in", "out/", &Conversion::default()).unwrap();
    assert_eq!(model_dir::read(&place.path("out")), model_dir::read(&place.path("in")));
    assert_eq!(fs::read_dir(place.0.path()).unwrap().count(), 2, "nothing else is left");
    let message = place.convert("in", "absent/..", &Conversion::default()).unwrap_err().to_string();
    assert!(message.contains("names no new directory"), "{message}");
}

#[test]
fn what_is_there_is_not_overwritten() {
    let place = Place::new(&config("mixtral"), &model("mixtral", Dtype::BF16), 1);
    for out in ["in", "file"] {
        fs::write(place.path("file"), "precious").unwrap();
        let message = place.convert("in", out, &Conversion::default()).unwrap_err().to_string();
        assert!(message.contains("exists already"), "{message}");
    }
    assert_eq!(fs::read_to_string(place.path("file")).unwrap(), "precious");
    assert_eq!(fs::read_dir(place.0.path()).unwrap().count(), 2, "nothing is left");
}
