//! Parsers of files that others wrote, on inputs that are damaged at random (`dropless_tests::mutations`).

use dropless::data::tokenizer::Json;
use dropless::data::{Documents, jsonl};
use dropless_tests::mutations::{Counted, mutations};

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
