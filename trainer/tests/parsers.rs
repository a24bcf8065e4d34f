//! Parsers of files that others wrote, on inputs that are damaged at random (`dropless_tests::mutations`).
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::path::Path;

use dropless::checkpoint::{Checkpoint, Save, State, save};
use dropless::config::Config;
use dropless::data::tokenizer::Json;
use dropless::data::{Documents, Position, TextRecord, jsonl};
use dropless::train::Mean;
use dropless_core::host::{Host, HostOptions};
use dropless_model::hf::{ModelDir, NamedTensor, TensorFiles};
use dropless_tests::mutations::{Counted, mutations};
use safetensors::Dtype;

#[global_allocator]
static MEMORY: Counted = Counted;

#[test]
fn damaged_indexes_are_refused_or_read() {
    let index = |code: u8, size: i64, lengths: &[i32], ends: &[i64]| {
        let mut out = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0".to_vec();
        out.push(code);
        out.extend((lengths.len() as u64).to_le_bytes());
        out.extend((ends.len() as u64).to_le_bytes());
        lengths.iter().for_each(|length| out.extend(length.to_le_bytes()));
        let mut pointer = 0;
        for &length in lengths {
            out.extend(i64::to_le_bytes(pointer));
            pointer += i64::from(length) * size;
        }
        ends.iter().for_each(|end| out.extend(end.to_le_bytes()));
        out
    };
    let seeds = [index(8, 2, &[3, 5, 0, 8], &[0, 2, 3, 4]), index(4, 4, &[8], &[0, 1]), index(8, 2, &[], &[0, 0, 0])];
    let mut ids: Vec<u8> = (0..32).collect();
    ids.extend([0; 8]);
    mutations("idx", &seeds, |idx| {
        for bytes in [0, 32, 33, 40] {
            if let Ok(documents) = Documents::new(ids[..bytes].to_vec().into(), idx.to_vec().into(), 7) {
                let mut tokens = Vec::new();
                documents.read(0..documents.tokens(), &mut tokens);
                assert_eq!(tokens.len(), documents.tokens());
                let _ = documents.check_ids(5);
            }
        }
    });
}

#[test]
fn damaged_lines_are_refused_or_read() {
    let seeds = [
        br#"{"text": "a \"quoted\" \u00e9\ud83e\udd80 text", "n": [1, 2.5e3, {"deep": null}]}"#.to_vec(),
        r#"{"id":17,"text":"grüße, 東京","more":{"text":"another"}}"#.as_bytes().to_vec(),
        [b"{\"a\":".to_vec(), b"[".repeat(5000), b"]".repeat(5000), b",\"text\":\"deep\"}".to_vec()].concat(),
    ];
    mutations("jsonl", &seeds, |line| {
        if let Ok(text) = jsonl::text(line, "text") {
            assert!(text.len() <= line.len());
        }
    });
}

/// Models of the kinds that tokenizers have, with what goes before and after them.
fn tokenizers() -> Vec<Vec<u8>> {
    let with = |rest: &str, model: &str| {
        format!(
            r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{{"id":7,"content":"<e>","single_word":false,
            "lstrip":false,"rstrip":false,"normalized":false,"special":true}}],{rest},"model":{model}}}"#
        )
        .into_bytes()
    };
    vec![
        with(
            r#""normalizer":{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Replace","pattern":{"String":" "},"content":"_"}]},
            "pre_tokenizer":{"type":"Split","pattern":{"Regex":"(?i:'s|'t)|[^\\r\\n\\p{L}]?\\p{L}+|\\p{N}{1,3}|\\s+(?!\\S)|\\s+"},"behavior":"Isolated","invert":false},
            "post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<e>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":1}}],"special_tokens":{"<e>":{"id":"<e>","ids":[7],"tokens":["<e>"]}}},
            "decoder":{"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}"#,
            r#"{"type":"BPE","dropout":null,"unk_token":"?","continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":true,"byte_fallback":true,"vocab":{"a":0,"b":1,"ab":2,"?":3,"_":4,"abab":5,"<0x41>":6},"merges":["a b","ab ab"]}"#,
        ),
        with(
            r#""normalizer":null,"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},"post_processor":null,"decoder":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}"#,
            r#"{"type":"Unigram","unk_id":0,"vocab":[["?",0.0],["▁",-2.0],["a",-1.5],["ab",-1.0],["b",-3.0]],"byte_fallback":false}"#,
        ),
        with(
            r###""normalizer":{"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,"strip_accents":null,"lowercase":true},"pre_tokenizer":{"type":"BertPreTokenizer"},"post_processor":null,"decoder":{"type":"WordPiece","prefix":"##","cleanup":true}"###,
            r###"{"type":"WordPiece","unk_token":"?","continuing_subword_prefix":"##","max_input_chars_per_word":100,"vocab":{"?":0,"a":1,"##b":2,"b":3,"##a":4}}"###,
        ),
        with(
            r#""normalizer":{"type":"Prepend","prepend":"_"},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},"post_processor":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":false,"use_regex":true},"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}"#,
            r#"{"type":"WordLevel","vocab":{"?":0,"a":1,"ab":2},"unk_token":"?"}"#,
        ),
    ]
}

#[test]
fn damaged_tokenizers_are_refused_or_used() {
    let config = br#"{"eos_token":"<e>","bos_token":{"content":"<e>"}}"#;
    let used = |json: &[u8], config: &[u8], generation: &[u8]| {
        let Ok(tokenizer) = Json::parse(json, Some(config), Some(generation)) else { return false };
        let tokenizer = dropless::data::Tokenizer::Json(Box::new(tokenizer));
        let ids = tokenizer.encode("abab b's 12345 é<e> \n\n a");
        ids.is_ok_and(|ids| tokenizer.decode(&ids).is_ok())
    };
    let seeds = tokenizers();
    for seed in &seeds {
        assert!(used(seed, config, b"{}"), "{}", String::from_utf8_lossy(seed));
    }
    // Panics of the library are errors here; their messages would fill the screen.
    std::panic::set_hook(Box::new(|_| {}));
    let checked = std::panic::catch_unwind(|| {
        mutations("tokenizer", &seeds, |json| {
            let _ = used(json, config, b"{}");
        });
        mutations("tokenizer_config", &[config.to_vec()], |config| {
            let _ = used(&seeds[0], config, b"{}");
        });
        let generation = br#"{"eos_token_id":[7,2],"bos_token_id":1,"pad_token_id":null}"#.to_vec();
        mutations("generation_config", &[generation], |generation| {
            let _ = used(&seeds[0], b"{}", generation);
        });
    });
    let _ = std::panic::take_hook();
    if let Err(failure) = checked {
        std::panic::resume_unwind(failure);
    }
}

/// Lists as deep as a stack is not.
fn deep(before: &str, after: &str) -> Vec<u8> {
    [before.as_bytes(), &b"[".repeat(5000), &b"]".repeat(5000), after.as_bytes()].concat()
}

#[test]
fn damaged_configurations_are_refused_or_checked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    let small = "# comment\n[model]\nfamily = \"mixtral\"\nhidden_size = 64\n[train]\nlearning_rate = 1e-3\nsteps = 1_000\n\
                 [data]\ntrain = [\"a*.txt\", 'b']\n[[data.source]]\npaths = [\"c\"]\nweight = 0.5\n";
    let seeds = [
        include_bytes!("../../configs/default.toml").to_vec(),
        include_bytes!("../../configs/qwen3_moe.toml").to_vec(),
        small.as_bytes().to_vec(),
        deep("[data]\ntrain = ", "\n"),
    ];
    mutations("toml", &seeds, |toml| {
        fs::write(&path, toml).unwrap();
        if let Ok(config) = Config::load(Some(&path), &[]) {
            let _ = config.check(1, 1).and_then(|()| config.check_initial()).and_then(|()| config.check_data());
            assert!(Config::from_toml(&config.to_toml(), "again").is_ok());
        }
    });
}

/// A small model directory, with what its files hold.
fn model_dir(reference: &str) -> tempfile::TempDir {
    let from = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/reference")).join(reference);
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(from.join(name), dir.path().join(name)).unwrap();
    }
    dir
}

#[test]
fn damaged_model_configurations_are_refused_or_fit_the_weights() {
    for reference in ["deepseek_v3_a", "qwen3_moe_a", "mixtral_a"] {
        let dir = model_dir(reference);
        let path = dir.path().join("config.json");
        let seed = fs::read(&path).unwrap();
        ModelDir::open(dir.path()).unwrap();
        let nested = String::from_utf8(seed.clone()).unwrap();
        let nested = deep(&nested.replacen('}', ",\"rope_scaling\":", 1), "}");
        mutations(reference, &[seed, nested], |json| {
            fs::write(&path, json).unwrap();
            if let Ok(dir) = ModelDir::open(dir.path()) {
                let _ = dir.notes();
            }
        });
    }
}

/// The header and the bytes of two tensors.
const HEADER: &str = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#;
const DATA: [u8; 32] = [7; 32];

/// A file of them, with a header of that length.
fn tensors(header: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, &DATA].concat()
}

#[test]
fn damaged_tensor_files_are_refused_or_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let read = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let Ok(files) = TensorFiles::open(dir.path(), "model") else { return false };
        for name in files.names() {
            let (tensor, shape) = (files.get(name).unwrap(), files.shape(name).unwrap());
            let _ = files.ids(name);
            let values = files.values(name, shape);
            assert!(values.is_ok_and(|values| values.len() * 2 <= tensor.bytes.len()) || tensor.dtype != Dtype::F32);
        }
        true
    };
    assert!(read(&tensors(HEADER.as_bytes())));
    mutations("safetensors", &[tensors(HEADER.as_bytes())], |bytes| {
        let _ = read(bytes);
    });
    let headers = [HEADER.as_bytes().to_vec(), deep("{\"a\":", "}")];
    mutations("safetensors header", &headers, |header| {
        let _ = read(&tensors(header));
    });
}

#[test]
fn damaged_indexes_of_tensor_files_are_refused_or_read() {
    let dir = tempfile::tempdir().unwrap();
    let one = |name: &str| {
        let header = format!(r#"{{"{name}":{{"dtype":"U8","shape":[32],"data_offsets":[0,32]}}}}"#);
        tensors(header.as_bytes())
    };
    fs::write(dir.path().join("model-1.safetensors"), one("a")).unwrap();
    fs::write(dir.path().join("model-2.safetensors"), one("b")).unwrap();
    let index = br#"{"metadata":{"total_size":64},"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}}"#;
    let path = dir.path().join("model.safetensors.index.json");
    fs::write(&path, index).unwrap();
    TensorFiles::open(dir.path(), "model").unwrap();
    mutations("index", &[index.to_vec(), deep("{\"weight_map\":", "}")], |json| {
        fs::write(&path, json).unwrap();
        if let Ok(files) = TensorFiles::open(dir.path(), "model") {
            assert!(files.names().count() <= 2);
        }
    });
}

#[test]
fn damaged_states_are_refused() {
    let out = tempfile::tempdir().unwrap();
    let config = Config::load(None, &[]).unwrap();
    let state = State {
        step: 3,
        position: Position::default(),
        text: TextRecord::default(),
        config,
        validation_loss: Some(2.5),
        validation: [("books".into(), Mean { loss: 2.5, targets: 99 })].into(),
    };
    let weights = [NamedTensor::f32("a", &[2], &[1.0; 2])];
    let all = Save { out: out.path(), weights: &weights, optimizer: &[], state: &state, keep: 0 };
    let host = Host::new(HostOptions { threads: 1, ..HostOptions::default() }).unwrap();
    let checkpoint = save(&host, &all).unwrap().unwrap().path;
    let path = checkpoint.join("state.json");
    let seed = fs::read(&path).unwrap();
    let read = |json: &[u8]| {
        fs::write(&path, json).unwrap();
        Checkpoint::reopen(&checkpoint).ok().map(|checkpoint| checkpoint.state)
    };
    assert_eq!(read(&seed).as_ref(), Some(&state));
    let nested = deep(&String::from_utf8(seed.clone()).unwrap().replacen("{", "{\"x\":", 1), "}");
    mutations("state", &[seed, nested], |json| {
        // What damage there may be changes no value.
        assert!(read(json).is_none_or(|read| read == state));
    });
}
