//! Small random models in directories, written without the code under test: names and shapes are spelt out here.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::{Value, json};

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) type Entries = BTreeMap<String, Entry>;

pub(crate) const FAMILIES: [&str; 3] = ["deepseek_v3", "qwen3_moe", "mixtral"];
pub(crate) const HIDDEN: usize = 40;
pub(crate) const WIDTH: usize = 24;
pub(crate) const EXPERTS: usize = 4;
pub(crate) const VOCAB: usize = 300;

pub(crate) fn config(family: &str) -> Value {
    let mut config = json!({
        "model_type": family, "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 64, "initializer_range": 0.02, "tie_word_embeddings": false, "torch_dtype": "float32",
        "a_key_of_another_library": 7,
    });
    let more = match family {
        "deepseek_v3" => json!({
            "intermediate_size": 48, "moe_intermediate_size": WIDTH, "first_k_dense_replace": 1, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
            "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": true,
            "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 1,
        }),
        "qwen3_moe" => json!({
            "intermediate_size": 48, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS, "head_dim": 16,
            "num_key_value_heads": 1, "norm_topk_prob": true, "mlp_only_layers": [0], "decoder_sparse_step": 1,
        }),
        _ => json!({ "intermediate_size": WIDTH, "num_local_experts": EXPERTS, "num_key_value_heads": 1 }),
    };
    let fields = more.as_object().unwrap().clone();
    config.as_object_mut().unwrap().extend(fields);
    config
}

/// Names, without `model.`, and shapes as on the hub.
pub(crate) fn tensors(family: &str) -> Vec<(String, Vec<usize>)> {
    let mut out = vec![("embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]), ("norm.weight".into(), vec![HIDDEN])];
    let mut add = |name: String, shape: &[usize]| out.push((name, shape.to_vec()));
    let layers = if family == "deepseek_v3" { 3 } else { 2 };
    for layer in 0..layers {
        let name = |rest: &str| format!("layers.{layer}.{rest}.weight");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            add(name(norm), &[HIDDEN]);
        }
        let attention: &[(&str, &[usize])] = match family {
            "deepseek_v3" => &[
                ("q_a_proj", &[16, HIDDEN]),
                ("q_a_layernorm", &[16]),
                ("q_b_proj", &[32, 16]),
                ("kv_a_proj_with_mqa", &[24, HIDDEN]),
                ("kv_a_layernorm", &[16]),
                ("kv_b_proj", &[32, 16]),
                ("o_proj", &[HIDDEN, 16]),
            ],
            "qwen3_moe" => &[
                ("q_proj", &[32, HIDDEN]),
                ("k_proj", &[16, HIDDEN]),
                ("v_proj", &[16, HIDDEN]),
                ("o_proj", &[HIDDEN, 32]),
                ("q_norm", &[16]),
                ("k_norm", &[16]),
            ],
            _ => &[
                ("q_proj", &[HIDDEN, HIDDEN]),
                ("k_proj", &[20, HIDDEN]),
                ("v_proj", &[20, HIDDEN]),
                ("o_proj", &[HIDDEN, HIDDEN]),
            ],
        };
        for (part, shape) in attention {
            add(name(&format!("self_attn.{part}")), shape);
        }
        let mut mlp = |prefix: &str, [gate, up, down]: [&str; 3], width: usize| {
            add(name(&format!("{prefix}.{gate}")), &[width, HIDDEN]);
            add(name(&format!("{prefix}.{up}")), &[width, HIDDEN]);
            add(name(&format!("{prefix}.{down}")), &[HIDDEN, width]);
        };
        const USUAL: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
        if layer == 0 && family != "mixtral" {
            mlp("mlp", USUAL, 48);
            continue;
        }
        let (moe, parts) = if family == "mixtral" { ("block_sparse_moe", ["w1", "w3", "w2"]) } else { ("mlp", USUAL) };
        for expert in 0..EXPERTS {
            mlp(&format!("{moe}.experts.{expert}"), parts, WIDTH);
        }
        if family == "deepseek_v3" {
            mlp("mlp.shared_experts", USUAL, WIDTH);
            add(format!("layers.{layer}.mlp.gate.e_score_correction_bias"), &[EXPERTS]);
        }
        add(name(&format!("{moe}.gate")), &[EXPERTS, HIDDEN]);
        if layer == 2 {
            for norm in ["enorm", "hnorm", "shared_head.norm"] {
                add(name(norm), &[HIDDEN]);
            }
            add(name("eh_proj"), &[HIDDEN, 2 * HIDDEN]);
        }
    }
    out.push(("lm_head.weight".into(), vec![VOCAB, HIDDEN]));
    out
}

/// Repeatable noise.
pub(crate) struct Noise(u64);

impl Noise {
    pub(crate) fn new(seed: u64) -> Noise {
        Noise(seed.wrapping_mul(2) + 1)
    }

    pub(crate) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(self.0 >> 33).unwrap()
    }

    /// Around -1 to 1.
    pub(crate) fn value(&mut self) -> f32 {
        self.bits() as f32 / 2f32.powi(30) - 1.0
    }
}

pub(crate) fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        other => panic!("{other}"),
    }
}

pub(crate) fn decode(entry: &Entry) -> Vec<f32> {
    let words = || entry.bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match entry.dtype {
        Dtype::F32 => entry.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        Dtype::BF16 => words().map(|w| bf16::from_bits(w).to_f32()).collect(),
        Dtype::F16 => words().map(|w| f16::from_bits(w).to_f32()).collect(),
        other => panic!("{other}"),
    }
}

pub(crate) fn entry(dtype: Dtype, shape: &[usize], noise: &mut Noise) -> Entry {
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| noise.value()).collect();
    Entry { dtype, shape: shape.to_vec(), bytes: encode(dtype, &values) }
}

/// A model as on the hub: separate experts, names with `model.`; the selection bias is f32.
pub(crate) fn model(family: &str, dtype: Dtype) -> Entries {
    let mut noise = Noise::new(7);
    let each = |(name, shape): (String, Vec<usize>)| {
        let dtype = if name.ends_with("_bias") { Dtype::F32 } else { dtype };
        let name = if name.starts_with("lm_head") { name } else { format!("model.{name}") };
        (name, entry(dtype, &shape, &mut noise))
    };
    tensors(family).into_iter().map(each).collect()
}

/// The same with fused experts.
pub(crate) fn fuse(separate: &Entries) -> Entries {
    let mut out = Entries::new();
    for (name, entry) in separate {
        let name = name.replace("block_sparse_moe", "mlp");
        let Some((prefix, rest)) = name.split_once(".experts.") else {
            out.insert(name, entry.clone());
            continue;
        };
        let (expert, part) = rest.split_once('.').unwrap();
        let (rows, columns) = (entry.shape[0], entry.shape[1]);
        let (fused, parts, half) = match part {
            "gate_proj.weight" | "w1.weight" => ("gate_up_proj", 2, 0),
            "up_proj.weight" | "w3.weight" => ("gate_up_proj", 2, 1),
            _ => ("down_proj", 1, 0),
        };
        let shape = vec![EXPERTS, parts * rows, columns];
        let size = entry.bytes.len();
        let all = Entry { dtype: entry.dtype, shape, bytes: vec![0; EXPERTS * parts * size] };
        let all = out.entry(format!("{prefix}.experts.{fused}")).or_insert(all);
        let at = (expert.parse::<usize>().unwrap() * parts + half) * size;
        all.bytes[at..at + size].copy_from_slice(&entry.bytes);
    }
    out
}

/// The same with names that lack `model.`.
pub(crate) fn strip(entries: &Entries) -> Entries {
    entries.iter().map(|(name, e)| (name.strip_prefix("model.").unwrap_or(name).to_owned(), e.clone())).collect()
}

pub(crate) fn write_file<'a>(path: &Path, entries: impl Iterator<Item = (&'a String, &'a Entry)>) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, entry) in entries {
        let from = data.len();
        data.extend(&entry.bytes);
        let value =
            json!({ "dtype": entry.dtype.to_string(), "shape": entry.shape, "data_offsets": [from, data.len()] });
        header.insert(name.clone(), value);
    }
    let header = serde_json::to_vec(&header).unwrap();
    fs::write(path, [&(header.len() as u64).to_le_bytes(), &header[..], &data].concat()).unwrap();
}

/// Writes `config.json` and the tensors, in one file or dealt out to several.
pub(crate) fn write(dir: &Path, config: &Value, entries: &Entries, files: usize) {
    fs::write(dir.join("config.json"), serde_json::to_vec(config).unwrap()).unwrap();
    if files == 1 {
        return write_file(&dir.join("model.safetensors"), entries.iter());
    }
    let file = |at: usize| format!("model-{:05}-of-{files:05}.safetensors", at + 1);
    for shard in 0..files {
        let mine = entries.iter().enumerate().filter(|(at, _)| at % files == shard).map(|(_, entry)| entry);
        write_file(&dir.join(file(shard)), mine);
    }
    let map: BTreeMap<&String, String> =
        entries.keys().enumerate().map(|(at, name)| (name, file(at % files))).collect();
    let index = json!({ "metadata": { "total_size": 0 }, "weight_map": map });
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Every tensor of the files of a directory, and the file of each.
pub(crate) fn read(dir: &Path) -> (Entries, BTreeMap<String, String>) {
    let (mut entries, mut places) = (Entries::new(), BTreeMap::new());
    for found in fs::read_dir(dir).unwrap() {
        let path = found.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap().to_owned();
        if !file.ends_with(".safetensors") {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        let parsed = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, view) in parsed.tensors() {
            let entry = Entry { dtype: view.dtype(), shape: view.shape().to_vec(), bytes: view.data().to_vec() };
            assert!(entries.insert(name.clone(), entry).is_none(), "{name} twice");
            places.insert(name, file.clone());
        }
    }
    (entries, places)
}
