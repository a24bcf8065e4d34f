//! FP8 weights in blocks of any size: exact values, and a refusal by name for what is not understood.

use dropless_model::hf::{Conversion, Experts, ModelDir, convert};
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::tempdir;

use crate::model_dir::{self, Entries, Entry, FAMILIES, Noise, config, decode, fuse, model};

/// The value of an e4m3 code, by the definition of the format.
fn e4m3(code: u8) -> f32 {
    let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    sign * if exponent == 0 { fraction * 2f32.powi(-9) } else { (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7) }
}

/// Turns matrices into codes and factors; returns also what their values are.
fn quantize(entries: &Entries, [rows, columns]: [usize; 2], scales: Dtype) -> (Entries, Entries) {
    let (mut files, mut values) = (entries.clone(), entries.clone());
    let mut noise = Noise::new(3);
    for (name, entry) in entries {
        let skipped = ["embed", "lm_head", "mlp.gate.", "moe.gate.", "eh_proj"].iter().any(|part| name.contains(part));
        let &[ref groups @ .., r, c] = &entry.shape[..] else { continue };
        if skipped {
            continue;
        }
        let groups: usize = groups.iter().product();
        let (down, across) = (r.div_ceil(rows), c.div_ceil(columns));
        let codes: Vec<u8> =
            (0..entry.shape.iter().product()).map(|_| u8::try_from(noise.bits() % 256).unwrap() & 0xF7).collect();
        let exponents: Vec<u8> =
            (0..groups * down * across).map(|_| u8::try_from(110 + noise.bits() % 30).unwrap()).collect();
        let factors: Vec<f32> = match scales {
            Dtype::F8_E8M0 => exponents.iter().map(|&e| 2f32.powi(i32::from(e) - 127)).collect(),
            _ => exponents.iter().map(|_| noise.value() * 0.01).collect(),
        };
        let dequantized: Vec<f32> = (0..codes.len())
            .map(|i| {
                let (group, row, column) = (i / (r * c), i / c % r, i % c);
                e4m3(codes[i]) * factors[(group * down + row / rows) * across + column / columns]
            })
            .collect();
        let shape = [&entry.shape[..entry.shape.len() - 2], &[down, across]].concat();
        let bytes = if scales == Dtype::F8_E8M0 { exponents } else { model_dir::encode(Dtype::F32, &factors) };
        files.insert(format!("{name}_scale_inv"), Entry { dtype: scales, shape, bytes });
        files.insert(name.clone(), Entry { dtype: Dtype::F8_E4M3, shape: entry.shape.clone(), bytes: codes });
        let bytes = model_dir::encode(Dtype::F32, &dequantized);
        values.insert(name.clone(), Entry { dtype: Dtype::F32, shape: entry.shape.clone(), bytes });
    }
    (files, values)
}

fn settings(family: &str, blocks: Value) -> Value {
    let mut settings = config(family);
    settings["torch_dtype"] = "bfloat16".into();
    settings["quantization_config"] =
        json!({ "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": blocks });
    settings
}

#[test]
fn b132_b182_values_are_exact_for_every_block_size_layout_and_type_of_factors() {
    let mut quantized = 0;
    for family in FAMILIES {
        for blocks in [[128, 128], [64, 32], [16, 24], [7, 5]] {
            for scales in [Dtype::F32, Dtype::F8_E8M0] {
                for fused in [false, true] {
                    let entries = model(family, Dtype::BF16);
                    let entries = if fused { fuse(&entries) } else { entries };
                    let (files, values) = quantize(&entries, blocks, scales);
                    quantized += files.len() - values.len();
                    let dir = tempdir().unwrap();
                    let (from, out) = (dir.path().join("in"), dir.path().join("out"));
                    std::fs::create_dir(&from).unwrap();
                    model_dir::write(&from, &settings(family, json!(blocks)), &files, 2);
                    let from = ModelDir::open(&from).unwrap();
                    convert(&from, &out, &Conversion::default()).unwrap();
                    let (found, _) = model_dir::read(&out);
                    assert_eq!(found.len(), values.len());
                    for (name, value) in &values {
                        let same = found[name] == *value;
                        assert!(same, "{family} {blocks:?} {scales} fused: {fused}: {name}");
                    }
                    let text = std::fs::read_to_string(out.join("config.json")).unwrap();
                    let settings: Value = serde_json::from_str(&text).unwrap();
                    assert_eq!(settings["torch_dtype"], "float32");
                    assert!(settings.get("quantization_config").is_none());

                    // The other layout has the same values.
                    let (other, back) = (dir.path().join("other"), dir.path().join("back"));
                    let into = |experts| Conversion { experts: Some(experts), ..Conversion::default() };
                    let (first, second) = match fused {
                        true => (Experts::Separate, Experts::Fused),
                        false => (Experts::Fused, Experts::Separate),
                    };
                    convert(&from, &other, &into(first)).unwrap();
                    convert(&ModelDir::open(&other).unwrap(), &back, &into(second)).unwrap();
                    let (back, _) = model_dir::read(&back);
                    assert!(
                        back.iter().all(|(name, entry)| decode(entry) == decode(&values[name])),
                        "{family} {blocks:?}"
                    );
                }
            }
        }
    }
    assert!(quantized > 1000, "{quantized}");
}

/// The message for a change of the files or of the configuration.
fn refusal(change: impl FnOnce(&mut Value, &mut Entries)) -> String {
    let (mut files, _) = quantize(&model("qwen3_moe", Dtype::BF16), [16, 24], Dtype::F32);
    let mut settings = settings("qwen3_moe", json!([16, 24]));
    change(&mut settings, &mut files);
    let dir = tempdir().unwrap();
    model_dir::write(dir.path(), &settings, &files, 1);
    let message = ModelDir::open(dir.path()).unwrap_err().to_string();
    assert_eq!(message.lines().count(), 1, "{message}");
    message
}

fn assert_words(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
}

#[test]
fn quantization_that_is_not_understood_is_refused_by_name() {
    let method =
        |name: &'static str| refusal(|settings, _| settings["quantization_config"]["quant_method"] = name.into());
    for name in ["compressed-tensors", "mxfp4", "gptq"] {
        assert_words(&method(name), &["config.json", "quantization_config.quant_method", name, "\"fp8\""]);
    }
    for (size, word) in
        [(Value::Null, "absent"), (json!([128]), "[128]"), (json!([0, 128]), "[0,128]"), (json!("x"), "x")]
    {
        let message = refusal(|settings, _| settings["quantization_config"]["weight_block_size"] = size);
        assert_words(&message, &["config.json", "quantization_config.weight_block_size", word, "[rows, columns]"]);
    }
    let message = refusal(|settings, _| settings["quantization_config"]["fmt"] = "e5m2".into());
    assert_words(&message, &["quantization_config.fmt", "e5m2", "e4m3"]);
    let message = refusal(|settings, _| settings["quantization_config"] = Value::Null);
    assert_words(&message, &["F8_E4M3", "config.json has no quantization_config"]);
}

const WEIGHT: &str = "model.layers.1.mlp.experts.0.gate_proj.weight";

#[test]
fn b183_factors_are_neither_missed_nor_applied_silently() {
    let scale = format!("{WEIGHT}_scale_inv");
    let message = refusal(|_, files| drop(files.remove(&scale)));
    assert_words(&message, &["1 tensor does not fit", "missing", &scale, "[2, 2]"]);
    // Factors of another block size.
    let message = refusal(|settings, _| settings["quantization_config"]["weight_block_size"] = json!([8, 24]));
    assert_words(&message, &["of another shape", "[2, 2] (expected [4, 2])", "and 17 more"]);
    // A weight that needs none.
    let plain = model("qwen3_moe", Dtype::BF16)[WEIGHT].clone();
    let message = refusal(|_, files| drop(files.insert(WEIGHT.into(), plain)));
    assert_words(&message, &["not of this model", &scale, "for a weight that is BF16"]);
    let message = refusal(|_, files| {
        let entry = Entry { dtype: Dtype::I64, shape: vec![2, 2], bytes: vec![0; 32] };
        files.insert(scale.clone(), entry);
    });
    assert_words(&message, &["of another type", &scale, "I64", "F8_E8M0"]);
    // A norm is no matrix.
    let message = refusal(|_, files| {
        let entry = Entry { dtype: Dtype::F8_E4M3, shape: vec![40], bytes: vec![0; 40] };
        files.insert("model.norm.weight".into(), entry);
    });
    assert_words(&message, &["of another type", "model.norm.weight F8_E4M3", "[40]"]);
}

#[test]
fn a_factor_that_is_not_finite_is_refused() {
    let (mut files, _) = quantize(&model("mixtral", Dtype::BF16), [16, 24], Dtype::F8_E8M0);
    let scale = "model.layers.1.block_sparse_moe.experts.0.w1.weight_scale_inv";
    files.get_mut(scale).unwrap().bytes[0] = 255;
    let dir = tempdir().unwrap();
    model_dir::write(dir.path(), &settings("mixtral", json!([16, 24])), &files, 1);
    let dir = ModelDir::open(dir.path()).unwrap();
    let name = "model.layers.1.block_sparse_moe.experts.0.w1.weight";
    let message = dir.weights.read(name, |_, _| Ok(())).unwrap_err().to_string();
    assert_words(&message, &["model.safetensors", scale, "NaN"]);
}
