//! Recordings of the wgpu backend: they come back from their files as they were, run natively with the recorded digest,
//! name the op that differs, and what is damaged is said in a line.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::path::Path;

use dropless_core::ops::{Add, Cast, Fill};
use dropless_core::{Backend, DType, Memory};
use dropless_tests::require::Need;
use dropless_wgpu::recording::{Op, Recorder, Recording};
use dropless_wgpu::{Wgpu, WgpuOptions};

/// A few ops on one tensor, whose results are kept up to `kept` words.
fn recorded(kept: u64) -> Option<Recording> {
    let recorder = Recorder::keeping(kept);
    let options = WgpuOptions { recorder: Some(recorder.clone()), ..WgpuOptions::default() };
    let wgpu = Need::Wgpu.or_skip(Wgpu::new(&options))?;
    let backend: &dyn Backend = &wgpu;
    let values: Vec<f32> = (0..5000u16).map(|i| f32::from(i) * 1.01).collect();
    recorder.section("operands");
    let x = backend.upload(DType::F32, &[5000], &values).unwrap();
    let [one, sum] = [(); 2].map(|()| backend.alloc(DType::F32, &[5000], Memory::Device).unwrap());
    let out = backend.alloc(DType::Bf16, &[5001], Memory::Device).unwrap();
    recorder.section("sums");
    Fill { out: &one, value: 1.0 }.run(backend).unwrap();
    Add { a: &x, b: &one, c: None, out: &sum }.run(backend).unwrap();
    // From the middle of a word on.
    Cast { x: &sum, out: &out.slice(1, 5001).unwrap() }.run(backend).unwrap();
    backend.download::<u16>(&out).unwrap();
    Some(recorder.finish("a test", "sums", &wgpu.caps().device, None).unwrap())
}

/// The place of the op with this name.
fn place(recording: &Recording, name: &str) -> usize {
    let named = |op: &Op| matches!(op, Op::Run { pipeline, .. } if recording.program.pipelines[*pipeline].name == name);
    recording.program.ops.iter().position(named).unwrap()
}

#[test]
fn a_recording_comes_back_from_its_files_and_runs_with_its_digest() {
    let Some(recording) = recorded(0) else { return };
    let dir = tempfile::tempdir().unwrap();
    recording.write(dir.path()).unwrap();
    let read = Recording::read(dir.path()).unwrap();
    assert_eq!((&read.program, &read.contents, &read.sums), (&recording.program, &recording.contents, &recording.sums));
    let replay = read.replay(None).unwrap();
    assert!(replay.difference.is_none(), "{replay:?}");
    assert_eq!(replay.digest, recording.header.digest);
    // The same ops once more: nothing in a recording is by chance.
    assert_eq!(recorded(0).unwrap().header.digest, recording.header.digest);
    // One that is there is replaced, and nothing else is.
    recording.write(dir.path()).unwrap();
    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("notes.txt"), "").unwrap();
    assert!(recording.write(other.path()).unwrap_err().to_string().contains("something else than a recording"));
}

#[test]
fn the_first_op_that_differs_is_named_with_its_elements() {
    for kept in [0, 10_000] {
        let Some(mut recording) = recorded(kept) else { return };
        for text in &mut recording.program.shaders {
            *text = text.replace("a + 0x7FFFu + ((a >> 16u) & 1u)", "a + 0xFFFFu");
        }
        let cast = place(&recording, "cast");
        let replay = recording.replay(None).unwrap();
        let difference = replay.difference.unwrap();
        assert_ne!(replay.digest, recording.header.digest);
        assert_eq!((difference.op, difference.name.as_str(), difference.section.as_str()), (cast, "cast", "sums"));
        let place = difference.place.as_ref().unwrap();
        assert!(difference.again && place.tensor == "out" && place.element == "bf16", "{difference}");
        assert!(!place.elements.is_empty());
        for element in &place.elements {
            assert_eq!(element.expected.is_some(), kept > 0, "{difference}");
            assert_ne!(element.expected, Some(element.found), "{difference}");
        }
    }
}

#[test]
fn a_word_that_changed_turns_it_red_at_the_op_that_brought_it() {
    let Some(mut recording) = recorded(0) else { return };
    recording.contents[17] ^= 1;
    let difference = recording.replay(None).unwrap().difference.unwrap();
    assert_eq!((difference.op, difference.name.as_str(), difference.section.as_str()), (0, "write", "operands"));
    let place = difference.place.unwrap();
    assert_eq!(place.words, 0..512);
}

#[test]
fn what_is_damaged_is_said_in_a_line() {
    let Some(recording) = recorded(0) else { return };
    let dir = tempfile::tempdir().unwrap();
    let refused = |what: &str, damage: &dyn Fn(&Path)| {
        recording.write(dir.path()).unwrap();
        damage(dir.path());
        let line = Recording::read(dir.path()).unwrap_err().to_string();
        assert!(line.contains(what) && !line.contains('\n'), "{what}: {line}");
    };
    let header = |from: &'static str, to: &'static str| {
        move |dir: &Path| {
            let path = dir.join("recording.json");
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.contains(from), "{from} in {text}");
            fs::write(path, text.replacen(from, to, 1)).unwrap();
        }
    };
    let cut = |name: &'static str| {
        move |dir: &Path| {
            let bytes = fs::read(dir.join(name)).unwrap();
            fs::write(dir.join(name), &bytes[..bytes.len() / 2]).unwrap();
        }
    };
    refused("recording.json: damaged: ", &cut("recording.json"));
    refused("version is 2, and this program reads 1", &header("\"version\": 1", "\"version\": 2"));
    refused("format is \"a zip\"", &header("dropless recording", "a zip"));
    refused("unknown field", &header("\"program\"", "\"programme\""));
    refused("damaged: the digest is", &header("\"digest\": \"", "\"digest\": \"0"));
    refused("needs something else", &header("\"buffer\": ", "\"buffer\": 1"));
    refused("ops: the header says", &header("\"ops\": ", "\"ops\": 9"));
    refused("contents.bin.gz: damaged", &header("\"contents\": ", "\"contents\": 1"));
    for name in ["program.json.gz", "contents.bin.gz", "sums.bin.gz"] {
        refused(&format!("{name}: damaged"), &cut(name));
        refused(name, &|dir| fs::remove_file(dir.join(name)).unwrap());
    }
}

#[test]
fn one_rank_is_recorded() {
    let options = WgpuOptions { recorder: Some(Recorder::new()), ..WgpuOptions::default() };
    if Need::Wgpu.or_skip(Wgpu::new(&WgpuOptions::default())).is_none() {
        return;
    }
    assert!(Wgpu::ranks(2, &options).unwrap_err().to_string().contains("one rank can be recorded, not 2"));
}
