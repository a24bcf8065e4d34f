//! The page of recordings in Chromium, whose WebGPU runs on the CPU here (SwiftShader): it shows the digest of what was
//! recorded, names the first op that differs, and says in a line what it cannot run.
#![cfg(feature = "wgpu")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod chromium;
mod serve;

use std::fs;
use std::path::Path;
use std::time::Instant;

use dropless::Config;
use dropless::options::{BackendKind, TrainOptions};
use dropless_core::ops::{Add, Cast};
use dropless_core::{Backend, DType, Memory};
use dropless_tests::conformance;
use dropless_tests::require::Need;
use dropless_wgpu::recording::{Recorder, Recording, Step};
use dropless_wgpu::{Wgpu, WgpuOptions};

use chromium::Chromium;

/// Every kind of layer, in the recipe with most kinds of shaders.
const TINY: [&str; 11] = [
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.moe_intermediate_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=1",
    "model.n_routed_experts=4",
    "model.n_group=2",
    "train.recipe=\"fp8-block\"",
    "train.sequence_length=16",
    "train.batch_size=4",
    "train.micro_batch_size=4",
];

/// On a CPU the problems of attention take minutes: of their kinds one goes through the browser here, of the others all.
fn wanted(kind: &str) -> bool {
    kind == "attention_hopper" || !kind.starts_with("attention")
}

/// The page, and a folder of recordings beside it.
fn page(dir: &Path) {
    let web = Path::new(env!("CARGO_MANIFEST_DIR")).join("../web");
    for file in fs::read_dir(web).unwrap().map(Result::unwrap).filter(|file| file.path().is_file()) {
        fs::copy(file.path(), dir.join(file.file_name())).unwrap();
    }
}

/// The files of a recording with another header.
fn with_header(recordings: &Path, of: &str, name: &str, change: impl Fn(&str) -> String) {
    fs::create_dir(recordings.join(name)).unwrap();
    for file in fs::read_dir(recordings.join(of)).unwrap().map(Result::unwrap) {
        let to = recordings.join(name).join(file.file_name());
        fs::copy(file.path(), &to).unwrap();
        if file.file_name() == "recording.json" {
            let text = fs::read_to_string(&to).unwrap();
            let changed = change(&text);
            assert_ne!(text, changed, "{name}");
            fs::write(to, changed).unwrap();
        }
    }
}

/// A few ops whose results are kept.
fn sums() -> Recording {
    let recorder = Recorder::keeping(4096);
    let options = WgpuOptions { recorder: Some(recorder.clone()), ..WgpuOptions::default() };
    let wgpu = Wgpu::new(&options).unwrap();
    let backend: &dyn Backend = &wgpu;
    let values: Vec<f32> = (0..1000u16).map(|i| f32::from(i) * 1.01).collect();
    recorder.section("operands");
    let x = backend.upload(DType::F32, &[1000], &values).unwrap();
    recorder.section("sums");
    let sum = backend.alloc(DType::F32, &[1000], Memory::Device).unwrap();
    let out = backend.alloc(DType::Bf16, &[1000], Memory::Device).unwrap();
    Add { a: &x, b: &x, c: None, out: &sum }.run(backend).unwrap();
    Cast { x: &sum, out: &out }.run(backend).unwrap();
    recorder.finish("a test", "sums", &wgpu.caps().device, None).unwrap()
}

#[test]
fn chromium_computes_the_recorded_bits_and_names_the_op_that_differs() {
    if Need::Wgpu.or_skip(Wgpu::new(&WgpuOptions::default())).is_none() {
        return;
    }
    let Some(program) = Need::Chromium.or_skip(chromium::find()) else { return };
    let dir = tempfile::tempdir().unwrap();
    page(dir.path());
    let recordings = dir.path().join("recordings");
    let options = TrainOptions { backend: BackendKind::Wgpu, ..TrainOptions::default() };
    let config = Config::load(None, &TINY.map(str::to_owned)).unwrap();
    let (step, _) = dropless::train::record(&config, &options, 1, &recordings.join("step")).unwrap();
    let conformance = conformance::record(1, wanted).unwrap();
    conformance.write(&recordings.join("conformance")).unwrap();

    // One word that the host brought is another one.
    let mut altered = sums();
    altered.contents[700] ^= 1;
    altered.write(&recordings.join("altered")).unwrap();
    // One shader rounds in another way.
    let mut wrong = sums();
    for text in &mut wrong.program.shaders {
        *text = text.replace("a + 0x7FFFu + ((a >> 16u) & 1u)", "a + 0xFFFFu");
    }
    wrong.write(&recordings.join("wrong")).unwrap();
    with_header(&recordings, "step", "version", |text| text.replace("\"version\": 1", "\"version\": 2"));
    let digest = step.header.digest.clone();
    with_header(&recordings, "step", "damaged", |text| text.replace(&digest, "0123456789abcdef"));
    let binding = format!("\"binding\": {}", step.header.needs.binding);
    with_header(&recordings, "step", "large", |text| text.replace(&binding, "\"binding\": 1000000000000"));

    let served = serve::folder(dir.path());
    let mut browser = Chromium::start(&program);
    for (name, recording) in [("step", &step), ("conformance", &conformance)] {
        let began = Instant::now();
        let shown = browser.replay(&served, name);
        println!("{name}: {:.1} s", began.elapsed().as_secs_f64());
        assert_eq!((shown.state.as_str(), &shown.digest), ("right", &recording.header.digest), "{shown:?}");
        for Step { loss, .. } in &recording.header.steps {
            let loss = format!("{:.4} nats per token, as recorded", f32::from_bits(loss.value));
            assert!(shown.page.contains(&loss), "{shown:?}");
        }
    }
    let shown = browser.replay(&served, "altered");
    assert_eq!(shown.state, "wrong", "{shown:?}");
    assert!(shown.verdict.contains("operation 0 of 3, write (in: operands), wrote other bits"), "{shown:?}");
    assert!(shown.report.contains("among the words 512 to 767"), "{shown:?}");
    let shown = browser.replay(&served, "wrong");
    assert_eq!(shown.state, "wrong", "{shown:?}");
    assert!(shown.verdict.contains("operation 2 of 3, cast (in: sums), wrote other bits"), "{shown:?}");
    assert!(shown.report.contains("of out (bf16)\n    word ") && shown.report.contains(", not "), "{shown:?}");

    for (name, line) in [
        ("version", "The recording is of version 2, and this page reads version 1."),
        ("damaged", "The recording is damaged: its digest is 0123456789abcdef"),
        ("large", "The recording is too large: it needs maxStorageBufferBindingSize of 1000000.0 MB"),
        ("absent", "There is no recordings/absent/recording.json (404"),
    ] {
        let shown = browser.replay(&served, name);
        assert_eq!(shown.state, "failed", "{shown:?}");
        assert!(shown.status.starts_with(line) && !shown.status.contains('\n'), "{shown:?}");
    }
    assert_eq!(browser.complaints(), [""; 0]);
}
