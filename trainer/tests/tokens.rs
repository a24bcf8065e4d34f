//! Tokenizers and corpora: what becomes of files, in which order a run sees it, and what a run keeps of it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use dropless::checkpoint::Checkpoint;
use dropless::config::Config;
use dropless::data::{
    Batch, Corpus, Decoder, Documents, Mixture, Position, Stream, Texts, Tokenizer, matching, validation,
};
use dropless::generate::Generator;
use dropless::options::TrainOptions;
use dropless::sample::Sampling;
use dropless::source::Source;
use dropless::train::{self, steps_in_memory};
use dropless_core::ops::NONE;
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

/// The end of a text in the tokenizer below.
const END: u32 = 260;

/// A `tokenizer.json` of the byte-level kind: 256 bytes, four merges, the end of a text, the beginning of one.
fn tokenizer_json() -> String {
    // Printable bytes stand for themselves, the others for the characters from 256 on, in order.
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut other = 256..;
    let letters: Vec<String> = (0..256u32)
        .map(|byte| if printable(byte) { byte } else { other.next().unwrap() })
        .map(|code| char::from_u32(code).unwrap().to_string())
        .collect();
    let mut vocab: serde_json::Map<String, Value> =
        letters.iter().enumerate().map(|(id, letter)| (letter.clone(), json!(id))).collect();
    let merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "b")];
    for (id, (left, right)) in (256..).zip(merges) {
        vocab.insert(format!("{left}{right}"), json!(id));
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [special(END, "<|end|>"), special(261, "<|begin|>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                  "merges": merges.map(|(left, right)| format!("{left} {right}"))},
    })
    .to_string()
}

/// A directory with the tokenizer, as a model's has it.
fn tokenizer(dir: &Path) -> PathBuf {
    let folder = dir.join("tokenizer");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer_json()).unwrap();
    let config = json!({"eos_token": {"content": "<|end|>"}, "bos_token": "<|begin|>"});
    fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    fs::write(folder.join("generation_config.json"), json!({"eos_token_id": [261, 260]}).to_string()).unwrap();
    folder
}

fn dropless(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dropless")).current_dir(dir).args(arguments).output().unwrap()
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

fn assert_done(output: &Output) -> String {
    assert!(output.status.success(), "{}", printed(output));
    printed(output)
}

fn assert_refused(output: &Output, words: &[&str]) {
    let text = printed(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} in {text}");
    }
}

/// A model that computes at once.
const SMALL: &[&str] = &[
    "model.family=mixtral",
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=1",
    "model.num_key_value_heads=1",
    "model.head_dim=32",
    "model.num_local_experts=4",
    "train.recipe=f32",
    "train.numerics=f32",
    "train.batch_size=4",
    "train.micro_batch_size=4",
    "train.sequence_length=32",
    "train.warmup_steps=0",
    "train.sample_tokens=0",
    "train.eval_interval=0",
];

fn config(more: &[String]) -> Config {
    let all: Vec<String> = SMALL.iter().map(|s| (*s).to_owned()).chain(more.iter().cloned()).collect();
    Config::load(None, &all).unwrap()
}

/// `dropless train` of the small model, in `dir`, with more arguments.
fn run(dir: &Path, arguments: &[&str]) -> Output {
    run_in(dir, "run", arguments)
}

/// The same, with another directory of the run.
fn run_in(dir: &Path, out: &str, arguments: &[&str]) -> Output {
    let set = SMALL.iter().flat_map(|set| ["--set", set]);
    let all: Vec<&str> =
        ["train", "--out", out, "--backend", "host"].into_iter().chain(set).chain(arguments.iter().copied()).collect();
    dropless(dir, &all)
}

fn lines(dir: &Path) -> Vec<Value> {
    let text = fs::read_to_string(dir.join("run/metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn f02_a_text_that_changed_is_refused_and_one_that_moved_is_not() {
    let dir = tempdir().unwrap();
    let text = |n: usize| (0..n).map(|i| format!("line {i} of a text\n")).collect::<String>();
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::create_dir(dir.path().join("v")).unwrap();
    fs::write(dir.path().join("d/a.txt"), text(200)).unwrap();
    fs::write(dir.path().join("v/a.txt"), text(20)).unwrap();
    let sets = ["--set", "data.train=[\"d/*.txt\"]", "--set", "data.validation=[\"v/*.txt\"]"];
    assert_done(&run(dir.path(), &[&sets[..], &["--steps", "2"]].concat()));
    let resume = |sets: &[&str]| run(dir.path(), &[sets, &["--steps", "3", "--resume"]].concat());
    // Other bytes, as many as before.
    fs::write(dir.path().join("d/a.txt"), text(200).replace("text", "TEXT")).unwrap();
    assert_refused(&resume(&sets), &["the training text is", "but the checkpoint was made with"]);
    fs::write(dir.path().join("d/a.txt"), text(200)).unwrap();
    // One more file that matches.
    fs::write(dir.path().join("d/b.txt"), text(9)).unwrap();
    assert_refused(&resume(&sets), &["the training text is"]);
    fs::remove_file(dir.path().join("d/b.txt")).unwrap();
    // The validation text.
    fs::write(dir.path().join("v/a.txt"), text(21)).unwrap();
    assert_refused(&resume(&sets), &["the validation text \"validation\" is"]);
    fs::write(dir.path().join("v/a.txt"), text(20)).unwrap();
    // The embedded text instead.
    let embedded = ["--set", "data.train=[]", "--set", "data.validation=[\"v/*.txt\"]"];
    assert_refused(&resume(&embedded), &["the training text is"]);
    // The same under another path.
    fs::rename(dir.path().join("d"), dir.path().join("e")).unwrap();
    let moved = ["--set", "data.train=[\"e/*.txt\"]", "--set", "data.validation=[\"v/*.txt\"]"];
    assert_done(&resume(&moved));
}

#[test]
fn f06_every_target_counts_once() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("train.txt"), "abcQ".repeat(40)).unwrap();
    let loss = |text: &str| {
        fs::write(dir.path().join("v.txt"), text).unwrap();
        let set = [
            format!("data.train=[\"{}/train.txt\"]", dir.path().display()),
            format!("data.validation=[\"{}/v.txt\"]", dir.path().display()),
            "train.steps=0".into(),
            "model.initializer_range=0.5".into(),
        ];
        let out = tempdir().unwrap();
        let options = TrainOptions { out: out.path().into(), threads: 1, ..TrainOptions::default() };
        train::run(&config(&set), &options).unwrap().unwrap().validation.remove(0)
    };
    let (same, other) = (loss(&"a".repeat(63)), loss(&("a".repeat(33) + &"Q".repeat(30))));
    assert_ne!(same.loss, other.loss);
    assert_eq!([same.targets, other.targets], [63, 63]);
    // A text that is shorter than a sequence is one, too.
    assert_eq!(loss("ab").targets, 2);
    for tokens in 2..40 {
        let corpus = Corpus::from_ids(&[(0..tokens - 1).collect()], 999, 1000).unwrap();
        for (sequence, sequences) in [(1, 1), (4, 3), (8, 2), (64, 1)] {
            let batches = validation(&corpus, sequence, sequences).unwrap().map(Result::unwrap);
            let targets: Vec<u32> = batches.flat_map(|batch| batch.targets).filter(|&target| target != NONE).collect();
            assert_eq!(targets, (1..tokens - 1).chain([999]).collect::<Vec<_>>(), "{tokens} {sequence} {sequences}");
        }
    }
}

#[test]
fn f12_hidden_files_are_skipped_and_a_file_counts_once() {
    let dir = tempdir().unwrap();
    for folder in ["h/.git", "h/sub"] {
        fs::create_dir_all(dir.path().join(folder)).unwrap();
    }
    for name in ["h/a.txt", "h/._a.txt", "h/.git/b.txt", "h/sub/c.txt", "h/sub/.d.txt"] {
        fs::write(dir.path().join(name), name).unwrap();
    }
    let at = |pattern: &str| format!("{}/{pattern}", dir.path().display());
    let names = |patterns: &[String]| -> Vec<String> {
        let files = matching(patterns).unwrap();
        files.iter().map(|path| path.strip_prefix(dir.path()).unwrap().display().to_string()).collect()
    };
    assert_eq!(names(&[at("h/*.txt")]), ["h/a.txt"]);
    assert_eq!(names(&[at("h/**/*.txt")]), ["h/a.txt", "h/sub/c.txt"]);
    assert_eq!(names(&[at("h/*.txt"), at("h/../h/a.txt")]).len(), 1);
    assert_eq!(names(&[at("h/._a.txt")]), ["h/._a.txt"], "what is asked for by name");
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(dir.path().join("h/a.txt"), dir.path().join("h/z.txt")).unwrap();
        assert_eq!(names(&[at("h/*.txt")]), ["h/a.txt"], "a link to it");
    }
}

#[test]
fn f13_attention_counts_the_pairs_that_the_mask_leaves() {
    let first = |corpus: Corpus| -> Batch {
        let text: Arc<Mixture> = Arc::new(corpus.into());
        Stream::new(text, 128, 1, Position::default()).unwrap().next_batch(8).unwrap()
    };
    let short = first(Corpus::from_bytes(vec![b"eightbyt".to_vec(); 400]));
    let long = first(Corpus::from_bytes([b"eightbyt".repeat(400)]));
    assert_eq!(long.keys_per_token(), 64.5);
    let pairs: u64 = short.start.iter().enumerate().map(|(at, &start)| at as u64 % 128 - u64::from(start) + 1).sum();
    assert_eq!(short.keys_per_token(), pairs as f64 / 1024.0);
    assert!((4.5..5.1).contains(&short.keys_per_token()), "{}", short.keys_per_token());
    let model = config(&[]).model.architecture();
    assert!(model.flops_per_token(short.keys_per_token()) < model.flops_per_token(64.5));
}

#[test]
fn f13_the_speed_of_a_run_is_that_of_its_documents() {
    let flops = |text: &dyn Fn(&Path)| {
        let dir = tempdir().unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        text(&dir.path().join("d"));
        assert_done(&run(
            dir.path(),
            &["--steps", "1", "--set", "data.train=[\"d/*.txt\"]", "--set", "data.validation=[\"d/*.txt\"]"],
        ));
        let line = &lines(dir.path())[0];
        line["tflops_per_rank"].as_f64().unwrap() / line["tokens_per_s"].as_f64().unwrap()
    };
    let long = flops(&|d| fs::write(d.join("a.txt"), "eightbyt".repeat(100)).unwrap());
    let short = flops(&|d| (0..100).for_each(|n| fs::write(d.join(format!("{n:03}.txt")), "eightbyt").unwrap()));
    assert!(short < 0.99 * long, "{short} {long}");
}

#[test]
fn f26_a_step_without_targets_has_no_loss_and_says_so() {
    let dir = tempdir().unwrap();
    // Every other token is the end of a document, and the sequences have one token.
    let documents: Vec<Vec<u32>> = vec![vec![]; 8];
    let text = Corpus::from_ids(&documents, 256, 257).unwrap();
    let batch = Stream::new(Arc::new(text.into()), 4, 1, Position::default()).unwrap().next_batch(1).unwrap();
    assert_eq!(batch.valid, 0);
    // The same as a run: documents without ids in an .idx file.
    let idx = [&header(8, 0, 401)[..], &vec![0; 8 * 401]].concat();
    fs::write(dir.path().join("ends.idx"), idx).unwrap();
    fs::write(dir.path().join("ends.bin"), "").unwrap();
    fs::write(dir.path().join("v.txt"), "a text to validate on").unwrap();
    let set = ["--set", "data.train=[\"ends.idx\"]", "--set", "data.validation=[\"v.txt\"]"];
    let text = assert_done(&run(dir.path(), &[&set[..], &["--steps", "2"]].concat()));
    assert!(text.contains("warning: step 1: no token of the step has a target"), "{text}");
    assert!(text.contains("warning: 2 steps had no targets") && !text.contains("training loss"), "{text}");
    for line in lines(dir.path()).iter().filter(|line| line.get("digest").is_none()) {
        assert_eq!((&line["loss"], &line["loss_bits"]), (&Value::Null, &Value::Null), "{line}");
        assert_eq!(line["warning"], "no token of the step has a target");
    }
}

/// The head of an index: type of the ids, sequences, entries of the documents.
fn header(code: u8, sequences: u64, documents: u64) -> Vec<u8> {
    let mut out = b"MMIDIDX\0\0".to_vec();
    out.extend(1u64.to_le_bytes());
    out.push(code);
    out.extend(sequences.to_le_bytes());
    out.extend(documents.to_le_bytes());
    out
}

/// Three sequences in two documents, as Megatron writes them.
fn megatron(code: u8, size: usize, ids: &[[i64; 2]; 3]) -> (Vec<u8>, Vec<u8>) {
    let bin = ids.iter().flatten().flat_map(|id| id.to_le_bytes()[..size].to_vec()).collect();
    let mut idx = header(code, 3, 3);
    (0..3).for_each(|_| idx.extend(2i32.to_le_bytes()));
    (0..3).for_each(|n| idx.extend((n * 2 * size as i64).to_le_bytes()));
    [0i64, 2, 3].iter().for_each(|first| idx.extend(first.to_le_bytes()));
    (bin, idx)
}

#[test]
fn indexed_files_of_every_type_are_read() {
    let ids = [[1, 2], [3, 4], [5, 6]];
    for (code, size) in [(1, 1), (2, 1), (3, 2), (4, 4), (5, 8), (8, 2)] {
        let (bin, idx) = megatron(code, size, &ids);
        let open = |end| Documents::new(bin.clone().into(), idx.clone().into(), end).unwrap();
        let all = |documents: &Documents, from| {
            let mut out = Vec::new();
            documents.read(from..documents.tokens(), &mut out);
            out
        };
        let documents = open(9);
        assert_eq!((documents.documents(), all(&documents, 0)), (2, vec![1, 2, 3, 4, 9, 5, 6, 9]), "type {code}");
        for from in 0..8 {
            assert_eq!(all(&documents, from), [1, 2, 3, 4, 9, 5, 6, 9][from..], "type {code}");
        }
        documents.check_ids(7).unwrap();
        let message = documents.check_ids(6).unwrap_err();
        assert!(message.contains("document 1, position 1: id 6 is not below"), "{message}");
    }
    // Documents that end with the end token are closed already.
    let (bin, idx) = megatron(8, 2, &[[1, 2], [3, 9], [5, 9]]);
    let documents = Documents::new(bin.into(), idx.into(), 9).unwrap();
    assert_eq!(documents.tokens(), 6);
    // Each that does not gets one: an empty one, too, and nothing changes for the others.
    for count in [3, 200] {
        let sequence = |n: u16| match n % 3 {
            0 => vec![n % 5, 9],
            1 => vec![],
            _ => vec![n % 5, 2],
        };
        let all: Vec<Vec<u16>> = (0..count).map(sequence).collect();
        let (bin, idx) = indexed(&all);
        let documents = Documents::new(bin.into(), idx.into(), 9).unwrap();
        let closed = |ids: &Vec<u16>| {
            let end = (ids.last() != Some(&9)).then_some(9);
            ids.iter().copied().chain(end).map(u32::from).collect::<Vec<u32>>()
        };
        let expected: Vec<u32> = all.iter().flat_map(closed).collect();
        assert_eq!(documents.tokens(), expected.len());
        for from in 0..expected.len() {
            let to = expected.len().min(from + 7);
            let mut out = Vec::new();
            documents.read(from..to, &mut out);
            assert_eq!(out, expected[from..to], "{from}");
        }
    }
    // A negative id is none.
    let (bin, idx) = megatron(4, 4, &[[1, -2], [3, 9], [5, 9]]);
    let message = Documents::new(bin.into(), idx.into(), 9).unwrap().check_ids(usize::MAX >> 40).unwrap_err();
    assert!(message.contains("document 0, position 1"), "{message}");
    // Floating-point numbers, another version, a file that is cut off or too long.
    let (bin, idx) = megatron(6, 8, &ids);
    let refused = |bin: &[u8], idx: &[u8]| Documents::new(bin.to_vec().into(), idx.to_vec().into(), 9).unwrap_err();
    assert!(refused(&bin, &idx).contains("type 6"));
    let (bin, idx) = megatron(4, 4, &ids);
    assert!(refused(&bin[..20], &idx).contains("does not have"));
    assert!(refused(&bin, &idx[..idx.len() - 1]).contains("damaged"));
    assert!(refused(&[&bin[..], &[0; 4]].concat(), &idx).contains("but the .bin file has 28"));
    let mut other = idx.clone();
    other[9] = 2;
    assert!(refused(&bin, &other).contains("version 2"));
}

/// Files with a document in each sequence, ids of 16 bits.
fn indexed(sequences: &[Vec<u16>]) -> (Vec<u8>, Vec<u8>) {
    let count = sequences.len() as u64;
    let mut idx = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x08".to_vec();
    idx.extend([count, count + 1].iter().flat_map(|n| n.to_le_bytes()));
    idx.extend(sequences.iter().flat_map(|ids| u32::try_from(ids.len()).unwrap().to_le_bytes()));
    let mut at = 0u64;
    for ids in sequences {
        idx.extend(at.to_le_bytes());
        at += 2 * ids.len() as u64;
    }
    idx.extend((0..=count).flat_map(u64::to_le_bytes));
    let bin = sequences.iter().flatten().flat_map(|id| id.to_le_bytes()).collect();
    (bin, idx)
}

/// The tokens of a configuration, for so many ranks, stopped after `stop` batches.
fn tokens(text: &Arc<Mixture>, ranks: usize, stop: usize) -> Vec<u32> {
    let mut stream = Stream::new(text.clone(), 4, 7, Position::default()).unwrap();
    let mut out = Vec::new();
    for step in 0..30 {
        if step == stop {
            let saved = serde_json::to_string(&stream.position()).unwrap();
            stream = Stream::new(text.clone(), 4, 7, serde_json::from_str(&saved).unwrap()).unwrap();
        }
        let batch = stream.next_batch(8).unwrap();
        for micro in 0..2 {
            (0..ranks).for_each(|rank| out.extend(batch.share(4, micro, rank, ranks).ids));
        }
    }
    out
}

#[test]
fn weighted_sources_give_one_stream_for_any_ranks_across_any_stop() {
    let source = |base: u32, n: u32| Corpus::from_ids(&[(base..base + n).collect()], 999, 1000).unwrap();
    let text = Arc::new(Mixture::new(vec![(source(0, 99), 3.0), (source(100, 40), 1.0), (source(200, 99), 0.5)]));
    let whole = tokens(&text, 1, usize::MAX);
    for ranks in [1, 2, 4] {
        for stop in 0..30 {
            assert_eq!(tokens(&text, ranks, stop), whole, "{ranks} ranks, stopped after {stop}");
        }
    }
    // At every point each source is within one sequence of its share of 6 to 2 to 1.
    let firsts: Vec<usize> =
        whole.chunks(4).map(|ids| *ids.iter().find(|&&id| id != 999).unwrap() as usize / 100).collect();
    for end in 1..firsts.len() {
        for (source, part) in [6.0, 2.0, 1.0].into_iter().enumerate() {
            let taken = firsts[..end].iter().filter(|&&found| found == source).count() as f64;
            let due = part / 9.0 * end as f64;
            assert!((taken - due).abs() < 1.0 + 1e-6, "{taken} of {end} sequences from source {source}, {due} are due");
        }
    }
}

#[test]
fn a_run_on_weighted_sources_is_the_same_for_any_ranks_and_names_its_sets() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("a.txt"), "the abacus of the abbot\n".repeat(60)).unwrap();
    let jsonl: String =
        (0..80).map(|n| json!({"n": n, "content": format!("number {n}\nof many")}).to_string() + "\n").collect();
    fs::write(dir.path().join("b.jsonl"), jsonl).unwrap();
    let file = dir.path().join("config.toml");
    let at = dir.path().display();
    let text = format!(
        "[data]\n[[data.source]]\npaths = [\"{at}/a.txt\"]\nweight = 2\n[[data.source]]\npaths = [\"{at}/b.jsonl\"]\n\
         field = \"content\"\n[[data.validation]]\nname = \"prose\"\npaths = [\"{at}/a.txt\"]\n[[data.validation]]\n\
         name = \"numbers\"\npaths = [\"{at}/b.jsonl\"]\nfield = \"content\"\n"
    );
    fs::write(&file, &text).unwrap();
    let set: Vec<String> = SMALL.iter().map(|s| (*s).to_owned()).collect();
    let config = Config::load(Some(&file), &set).unwrap();
    assert_eq!(Config::from_toml(&config.to_toml(), "written").unwrap(), config);
    let digest =
        |ranks| steps_in_memory(&config, &TrainOptions { ranks, threads: 1, ..TrainOptions::default() }, 3).unwrap();
    let expected = digest(1);
    assert_eq!((digest(2), digest(4)), (expected.clone(), expected));
    let output = run(dir.path(), &["config.toml", "--steps", "2", "--set", "train.eval_interval=1"]);
    let printed = assert_done(&output);
    for words in
        ["step 1: validation loss of prose", "step 1: validation loss of numbers", "\nvalidation loss of prose "]
    {
        assert!(printed.contains(words), "{words} in {printed}");
    }
    let line = &lines(dir.path())[0];
    let [prose, numbers] = ["prose", "numbers"].map(|name| line["validation_losses"][name].as_f64().unwrap());
    let all = line["validation_loss"].as_f64().unwrap();
    assert!((prose.min(numbers)..=prose.max(numbers)).contains(&all), "{line}");
    let eval = assert_done(&dropless(dir.path(), &["eval", "run", "--backend", "host"]));
    assert!(eval.contains("validation loss of prose") && eval.contains("validation loss of numbers"), "{eval}");
    // Misspelt keys, names and files are refused by name.
    for (from, to, words) in [
        ("weight = 2", "wieght = 2", "data.source[0].wieght"),
        ("weight = 2", "weight = -2", "data.source[0].weight is -2"),
        ("\"numbers\"", "\"prose\"", "two sets named \"prose\""),
        ("field = \"content\"\n[[data.v", "field = \"text\"\n[[data.v", "b.jsonl:1: there is no field \"text\""),
        ("[data]", "[data]\ntrain = [\"a.txt\"]", "data.train and data.source"),
    ] {
        assert!(text.contains(from));
        fs::write(&file, text.replacen(from, to, 1)).unwrap();
        let message = Config::load(Some(&file), &set).and_then(|config| {
            config.check_data()?;
            Texts::load(&config)
        });
        let message = message.map(drop).unwrap_err().to_string();
        assert!(message.contains(words), "{words:?} in {message}");
    }
}

#[test]
fn a_tokenizer_gives_the_ids_of_its_merges_and_their_text_back() {
    let dir = tempdir().unwrap();
    let tokenizer = Tokenizer::open_file(&tokenizer(dir.path())).unwrap();
    let ids = tokenizer.encode("the cab the<|end|>").unwrap();
    assert_eq!(ids, [257, 32, 99, 259, 258], "the end of a text is not the text's to say twice");
    assert_eq!(tokenizer.encode("a<|end|>b").unwrap(), [97, END, 98]);
    assert_eq!((tokenizer.end(), tokenizer.ids()), (END, 262));
    assert_eq!(tokenizer.special_tokens().unwrap().eos, [261, 260]);
    assert_eq!(tokenizer.special_tokens().unwrap().bos, Some(261));
    let text = "grüße, 東京 🦀 the end";
    assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
    // Piece by piece, every piece is text, whatever the tokens cut.
    for tokenizer in [&tokenizer, &Tokenizer::Byte] {
        let ids = tokenizer.encode(text).unwrap();
        let mut decoder = Decoder::new(tokenizer, &ids[..3]);
        let pieces: Vec<String> = ids[3..].iter().map(|&id| decoder.push(id).unwrap()).collect();
        assert!(pieces.contains(&"東".to_owned()) && pieces.contains(&"🦀".to_owned()), "{pieces:?}");
        let rest = decoder.finish().unwrap();
        // A cut character at the beginning is none.
        assert!(text.ends_with((pieces.concat() + &rest).trim_start_matches('\u{fffd}')), "{pieces:?}");
        // An incomplete one at the end is one of those, too.
        let mut decoder = Decoder::new(tokenizer, &[]);
        let bytes = tokenizer.encode("🦀").unwrap();
        let shown: String = bytes[..3].iter().map(|&id| decoder.push(id).unwrap()).collect();
        assert_eq!(shown + &decoder.finish().unwrap(), "\u{fffd}");
    }
}

#[test]
fn a_tokenizer_that_gives_other_ids_each_time_is_refused() {
    let dir = tempdir().unwrap();
    let folder = tokenizer(dir.path());
    fs::write(dir.path().join("a.txt"), "the text").unwrap();
    let prepare = |out| dropless(dir.path(), &["tokenize", "--tokenizer", "tokenizer", "--out", out, "a.txt"]);
    let write = |dropout: &str| {
        let json = tokenizer_json().replace("\"dropout\":null", &format!("\"dropout\":{dropout}"));
        fs::write(folder.join("tokenizer.json"), json).unwrap();
    };
    write("0.5");
    assert_refused(&prepare("random"), &["tokenizer.json: model.dropout is 0.5"]);
    write("0.0");
    assert_done(&prepare("fixed"));
}

#[test]
fn special_tokens_are_ids_of_the_tokenizer() {
    let dir = tempdir().unwrap();
    let folder = tokenizer(dir.path());
    fs::write(folder.join("tokenizer_config.json"), json!({"eos_token": "<|end|>"}).to_string()).unwrap();
    for (key, id, word) in [("bos_token_id", 999, "begins"), ("pad_token_id", 262, "is padded")] {
        fs::write(folder.join("generation_config.json"), json!({ key: id }).to_string()).unwrap();
        let message = Tokenizer::open_file(&folder).unwrap_err().to_string();
        assert!(message.ends_with(&format!("a text {word} with id {id}, but its ids are below 262")), "{message}");
        fs::write(folder.join("generation_config.json"), json!({ key: 261 }).to_string()).unwrap();
        Tokenizer::open_file(&folder).unwrap();
    }
}

/// A text may end with the end token itself; it is there once.
#[test]
fn an_end_token_that_is_spelled_out_is_the_end() {
    let dir = tempdir().unwrap();
    tokenizer(dir.path());
    let (lines, named) = (dir.path().join("a.jsonl"), dir.path().join("tokenizer"));
    fs::write(&lines, "{\"text\":\"ab<|end|>\"}\n{\"text\":\"cab\"}\n".repeat(20)).unwrap();
    let command = ["tokenize", "--tokenizer", "tokenizer", "--eos", "--out", "closed", "a.jsonl"];
    assert_done(&dropless(dir.path(), &command));
    let tokens = |file: &str| {
        let set = [
            format!("data.train=[\"{}/{file}\"]", dir.path().display()),
            format!("data.tokenizer={}", named.display()),
            "train.sequence_length=4".into(),
        ];
        let mut out = Vec::new();
        Texts::load(&config(&set)).unwrap().train.sources()[0].read(0..40, &mut out);
        out
    };
    let expected = [259, END, 99, 259, END].repeat(8);
    assert_eq!((&tokens("a.jsonl"), &tokens("closed.bin")), (&expected, &expected));
}

#[test]
fn what_is_no_file_is_named_for_what_it_is() {
    let dir = tempdir().unwrap();
    fs::create_dir(dir.path().join("folder")).unwrap();
    let refusal = |pattern: &str| {
        let pattern = format!("data.train=[\"{pattern}\"]");
        Texts::load(&config(&[pattern])).unwrap_err().to_string()
    };
    let folder = dir.path().join("f*");
    let message = refusal(folder.to_str().unwrap());
    assert!(message.contains("matches no file, but the directory ") && message.ends_with("folder"), "{message}");
    #[cfg(unix)]
    assert!(refusal("/dev/zero").ends_with("matches no file, but /dev/zero, which is a pipe, a socket or a device"));
    let none = dir.path().join("none");
    assert!(refusal(none.to_str().unwrap()).ends_with("none\" matches no file"));
}

#[test]
fn a_byte_order_mark_is_no_json() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("a.jsonl"), "\u{feff}{\"text\":\"a\"}\n{\"text\":\"bc\"}\n").unwrap();
    assert_done(&dropless(dir.path(), &["tokenize", "--tokenizer", "byte", "--out", "a", "a.jsonl"]));
    assert_eq!(fs::read(dir.path().join("a.bin")).unwrap(), b"a\0b\0c\0");
    // It stands at the beginning of a file and nowhere else.
    fs::write(dir.path().join("b.jsonl"), "{\"text\":\"a\"}\n\u{feff}{\"text\":\"bc\"}\n").unwrap();
    let output = dropless(dir.path(), &["tokenize", "--tokenizer", "byte", "--out", "b", "b.jsonl"]);
    assert_refused(&output, &["b.jsonl:2: "]);
}

#[test]
fn what_is_wrong_with_a_line_of_json_has_one_place() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("a.jsonl"), "{\"text\":\"a\"}\n{\"text\":5}\n").unwrap();
    let output = dropless(dir.path(), &["tokenize", "--tokenizer", "byte", "--out", "a", "a.jsonl"]);
    assert_refused(&output, &["a.jsonl:2: ", " (column 9)"]);
    assert!(!printed(&output).contains("at line"), "{}", printed(&output));
}

#[test]
fn a_run_with_a_tokenizer_exports_it_and_generates_with_it() {
    let dir = tempdir().unwrap();
    let from = tokenizer(dir.path());
    fs::write(dir.path().join("a.txt"), "the abbot and the cab of the abbess\n".repeat(90)).unwrap();
    let set = ["--set", "data.train=[\"a.txt\"]", "--set", "data.tokenizer=tokenizer", "--steps", "2"];
    let printed = assert_done(&run(dir.path(), &set));
    assert!(printed.contains("nats per token") && printed.contains("token-unigram"), "{printed}");
    let checkpoint = dir.path().join("run/checkpoints/step-000002");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(fs::read(checkpoint.join(name)).unwrap(), fs::read(from.join(name)).unwrap(), "{name}");
    }
    for name in ["config.json", "generation_config.json"] {
        let json: Value = serde_json::from_slice(&fs::read(checkpoint.join(name)).unwrap()).unwrap();
        assert_eq!((&json["eos_token_id"], &json["bos_token_id"]), (&json!([261, 260]), &json!(261)), "{name}");
    }
    // The checkpoint has all that it takes.
    fs::remove_dir_all(&from).unwrap();
    assert_done(&dropless(dir.path(), &["eval", "run", "--backend", "host"]));
    let generate = ["generate", "run", "--prompt", "the ", "--tokens", "20", "--temperature", "2", "--backend", "host"];
    let output = dropless(dir.path(), &generate);
    assert_done(&output);
    assert!(String::from_utf8(output.stdout).unwrap().starts_with("the "));
    // Also when its name goes after it was checked.
    let checked = Checkpoint::open(&checkpoint).unwrap();
    fs::rename(&checkpoint, dir.path().join("retired")).unwrap();
    let source = Source::of_checkpoint(&checked, &[]).unwrap();
    let generator = Generator::open(source, &TrainOptions::default()).unwrap();
    assert_eq!(generator.tokenizer().end(), END);
    fs::rename(dir.path().join("retired"), &checkpoint).unwrap();
    // A model directory of it is generated from alike.
    for name in ["state.json", "optimizer.safetensors"] {
        fs::remove_file(checkpoint.join(name)).unwrap();
    }
    let options = TrainOptions::default();
    let source = Source::of_directory(&checkpoint, None, &["train.sequence_length=32".into()]).unwrap();
    let generator = Generator::open(source, &options).unwrap();
    assert_eq!(generator.tokenizer().end(), END);
    let sampling = Sampling { seed: 1, temperature: 1.0, top_p: 1.0 };
    generator.continue_texts(&["the abb"], 8, &sampling, |_, _| {}).unwrap();
    // A vocabulary that is too small is refused, and so is a tokenizer that does not say how a text ends.
    let small = [&set[..], &["--set", "model.vocab_size=256", "--set", "data.tokenizer=run/tokenizer"]].concat();
    assert_refused(&run_in(dir.path(), "other", &small), &["model.vocab_size is 256", "has ids up to 261"]);
    fs::create_dir(dir.path().join("bare")).unwrap();
    fs::write(dir.path().join("bare/tokenizer.json"), tokenizer_json()).unwrap();
    let bare = [&set[..], &["--set", "data.tokenizer=bare"]].concat();
    assert_refused(
        &run_in(dir.path(), "third", &bare),
        &["bare/tokenizer.json", "nothing says which token ends a text"],
    );
}

/// Text of several chunks: a long document, and lines that are documents.
fn large(dir: &TempDir) -> [String; 2] {
    let text: String = (0..400_000u64).map(|n| format!("line {n} of the text, grüße {}\n", n * n % 977)).collect();
    let jsonl: String =
        (0..150_000).map(|n| json!({"id": n, "text": format!("the {n} ").repeat(n % 17)}).to_string() + "\n").collect();
    fs::write(dir.path().join("a.txt"), text).unwrap();
    fs::write(dir.path().join("b.jsonl"), jsonl).unwrap();
    ["a.txt", "b.jsonl"].map(str::to_owned)
}

#[test]
fn prepared_files_do_not_depend_on_threads_or_kills_and_are_what_a_run_reads_itself() {
    let dir = tempdir().unwrap();
    let [text, jsonl] = large(&dir);
    let arguments = |out: &str, threads: &str| -> Vec<String> {
        ["tokenize", "--tokenizer", "byte", "--out", out, "--threads", threads, &text, &jsonl].map(str::to_owned).into()
    };
    let prepare = |out: &str, threads: &str| {
        let arguments = arguments(out, threads);
        assert_done(&dropless(dir.path(), &arguments.iter().map(String::as_str).collect::<Vec<_>>()))
    };
    let files =
        |out: &str| ["bin", "idx"].map(|e| blake3::hash(&fs::read(dir.path().join(format!("{out}.{e}"))).unwrap()));
    let printed = prepare("one", "1");
    assert!(printed.starts_with(&format!("{} documents", 1 + 150_000 - 150_000_usize.div_ceil(17))), "{printed}");
    let expected = files("one");
    prepare("three", "3");
    assert_eq!(files("three"), expected);
    // Killed again and again, each time a little later.
    let (mut kills, mut journal) = (0, Vec::new());
    for wait in (10..3000).step_by(10) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dropless"));
        command.current_dir(dir.path()).args(arguments("killed", "2")).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        journal =
            fs::read(dir.path().join("killed.partial/journal")).ok().filter(|now| !now.is_empty()).unwrap_or(journal);
        // Both files are there when it was done, or ended while it removed what it had needed.
        if status.success() || (dir.path().join("killed.idx").exists() && !dir.path().join("killed.partial").exists()) {
            break;
        }
        assert!(status.code().is_none(), "it was ended: {status}");
        kills += 1;
    }
    assert!(kills > 0);
    assert_eq!(files("killed"), expected, "after {kills} kills");
    assert!(!dir.path().join("killed.partial").exists());
    // Ended between the last steps: the ids have their name, and the index has, too.
    for steps in 1..=2 {
        let at = |name: &str| dir.path().join(name);
        let folder = at("killed.partial");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("journal"), &journal).unwrap();
        if steps == 1 {
            fs::rename(at("killed.idx"), folder.join("idx")).unwrap();
        }
        prepare("killed", "1");
        assert_eq!((files("killed"), folder.exists()), (expected, false));
    }
    // Nothing is written over, and what is left of other texts is not continued.
    let again = arguments("one", "1");
    assert_refused(
        &dropless(dir.path(), &again.iter().map(String::as_str).collect::<Vec<_>>()),
        &["one.bin is there already"],
    );
    fs::create_dir(dir.path().join("other.partial")).unwrap();
    fs::write(dir.path().join("other.partial/journal"), "{\"job\":\"00\"}\n").unwrap();
    let other = arguments("other", "1");
    assert_refused(
        &dropless(dir.path(), &other.iter().map(String::as_str).collect::<Vec<_>>()),
        &["other.partial", "another tokenizer"],
    );
    // Line by line, the same as the run makes of them itself.
    let tokens = |set: &str| {
        let set = [format!("data.train=[\"{}/{set}\"]", dir.path().display())];
        let texts = Texts::load(&config(&set)).unwrap();
        let mut out = Vec::new();
        texts.train.sources()[0].read(0..5_000_000, &mut out);
        out
    };
    let lines = ["tokenize", "--tokenizer", "byte", "--out", "lines", "b.jsonl"];
    assert_done(&dropless(dir.path(), &lines));
    assert_eq!(tokens("lines.bin"), tokens("b.jsonl"));
    assert_done(&dropless(dir.path(), &[&lines[..4], &["closed", "--eos", "b.jsonl"]].concat()));
    assert_eq!(tokens("closed.idx"), tokens("b.jsonl"), "with its end tokens written down");
}

#[test]
fn a_text_is_not_copied_into_memory_and_what_is_too_large_is_refused() {
    let dir = tempdir().unwrap();
    // A hole of 300 MB: bytes are mapped, a tokenizer would have to hold its ids.
    let file = fs::File::create(dir.path().join("large.txt")).unwrap();
    file.set_len(300 << 20).unwrap();
    let pattern = format!("data.train=[\"{}/large.txt\"]", dir.path().display());
    let texts = Texts::load(&config(std::slice::from_ref(&pattern))).unwrap();
    assert_eq!(texts.train.sources()[0].len() + texts.validation[0].1.len(), (300 << 20) + 2);
    let named = format!("data.tokenizer={}", tokenizer(dir.path()).display());
    let message = Texts::load(&config(&[pattern, named])).unwrap_err().to_string();
    assert!(message.contains("300 MiB") && message.contains("dropless tokenize"), "{message}");
}
