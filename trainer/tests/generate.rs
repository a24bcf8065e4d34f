//! Generated text: what a prompt becomes does not depend on the cache or on other prompts.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dropless::checkpoint::Checkpoint;
use dropless::config::Config;
use dropless::generate::Generator;
use dropless::options::TrainOptions;
use dropless::sample::Sampling;
use dropless::source::Source;
use dropless::train;

/// Longer than the context of 32 tokens with its continuation, and shorter.
const PROMPTS: [&str; 3] = ["A prompt of thirty-one bytes ...", "b", "of eleven b"];
const TOKENS: usize = 24;

fn generator(family: &str) -> (tempfile::TempDir, Generator) {
    let set = [
        &format!("model.family={family}"),
        "model.hidden_size=32",
        "model.num_hidden_layers=2",
        "model.initializer_range=0.5",
        "train.sequence_length=32",
        "train.steps=0",
        "data.validation_fraction=0.001",
    ];
    let config = Config::load(None, &set.map(str::to_owned)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let options = TrainOptions { out: dir.path().into(), ..TrainOptions::default() };
    let summary = train::run(&config, &options).unwrap().unwrap();
    let checkpoint = Checkpoint::open(&summary.checkpoint).unwrap();
    let generator = Generator::open(Source::of_checkpoint(&checkpoint, &[]).unwrap(), &options).unwrap();
    (dir, generator)
}

#[test]
fn texts_are_those_of_single_prompts_and_of_whole_passes() {
    let sampling = Sampling { seed: 5, temperature: 1.0, top_p: 1.0 };
    for family in ["deepseek_v3", "qwen3_moe", "mixtral"] {
        let (_dir, generator) = generator(family);
        let prompts = PROMPTS.map(|prompt| generator.tokenizer().encode(prompt).unwrap());
        let all = prompts.each_ref().map(Vec::as_slice);
        let together = generator.continue_ids(&all, TOKENS, &sampling, |_, _| Ok(())).unwrap();
        for (prompt, text) in all.into_iter().zip(&together) {
            let alone = generator.continue_ids(&[prompt], TOKENS, &sampling, |_, _| Ok(())).unwrap();
            assert_eq!(alone.concat(), *text, "{family}");
            // A cache that is asked for one token has seen nothing before.
            let mut whole = prompt.to_vec();
            for position in 0..text.len() {
                whole.push(generator.next_id(&whole, position as u64, &sampling).unwrap().unwrap());
            }
            assert_eq!(whole[prompt.len()..], text[..], "{family}");
        }
        assert!(together.iter().any(|text| text.len() > 8), "{family}: {together:?}");
        // Of a model that knows nothing most bytes are no text; what is shown as it grows is, and is all there is.
        let mut shown = [const { String::new() }; 3];
        let texts = generator.continue_texts(&PROMPTS, TOKENS, &sampling, |prompt, text| shown[prompt] += text);
        assert_eq!(texts.unwrap(), shown, "{family}");
    }
}
