//! Text to batches: packing, order, split, and what is refused.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;

use dropless::data::{Batch, Corpus, END, Mixture, Place, Position, Stream, Texts, validation};
use dropless::{Config, Error};
use dropless_core::Error as CoreError;
use dropless_core::ops::NONE;

/// One document of the ids 0.. whose stream, end token included, has `tokens` tokens.
fn counted(tokens: u32) -> Corpus {
    Corpus::from_ids(&[(0..tokens - 1).collect()], 999, 1000).unwrap()
}

/// The same as the one source of a run.
fn counting(tokens: u32) -> Arc<Mixture> {
    Arc::new(counted(tokens).into())
}

/// The first ids of the next `n` sequences.
fn firsts(stream: &mut Stream, n: usize) -> Vec<u32> {
    let batch = stream.next_batch(n).unwrap();
    batch.ids.chunks(batch.sequence).map(|ids| ids[0]).collect()
}

#[test]
fn b243_packed_documents_restart_positions_and_see_only_themselves() {
    // [1 2 |] [3 |] with end token 0; the sequence has 5 tokens, and one more is there to be predicted.
    let corpus = Corpus::from_ids(&[vec![1, 2], vec![3], vec![4]], 0, 10).unwrap();
    let batch = validation(&corpus, 5, 1).unwrap().next().unwrap().unwrap();
    assert_eq!(batch.ids, [1, 2, 0, 3, 0]);
    assert_eq!(batch.positions, [0, 1, 2, 0, 1]);
    assert_eq!(batch.start, [0, 0, 0, 3, 3]);
    assert_eq!(batch.targets, [2, 0, NONE, 0, NONE], "an end token predicts nothing");
    assert_eq!(batch.valid, 3);
}

#[test]
fn b240_short_texts_are_refused_and_no_window_passes_the_end() {
    let sequence = 8;
    let stream = |tokens| Stream::new(counting(tokens), sequence, 1, Position::default());
    for (tokens, has) in [(1, "has 1 token,"), (5, "has 5 tokens,"), (8, "has 8 tokens,")] {
        let message = stream(tokens).unwrap_err().to_string();
        assert!(message.contains(has) && message.contains("needs 9"), "{message}");
    }
    let empty = Arc::new(Corpus::from_bytes([]).into());
    assert!(Stream::new(empty, sequence, 1, Position::default()).unwrap_err().to_string().contains("is empty"));
    assert_eq!(firsts(&mut stream(9).unwrap(), 20), [0; 20], "9 tokens have one window");
    let mut seen = firsts(&mut stream(10).unwrap(), 50);
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen, [0, 1], "10 tokens have windows at 0 and 1");
}

#[test]
fn b241_ids_are_not_cut_and_too_large_ones_are_located() {
    let corpus = Corpus::from_ids(&[vec![70000, 129279]], 1, 129280).unwrap();
    assert_eq!(corpus.tokens(), [70000, 129279, 1]);
    let message = Corpus::from_ids(&[vec![1], vec![2, 129280]], 1, 129280).unwrap_err().to_string();
    assert!(message.contains("document 1, position 1") && message.contains("129280"), "{message}");
}

#[test]
fn b190_a_walk_goes_on_exactly_where_it_stopped() {
    // Ten windows an epoch, give or take the phase; three epochs in batches of two.
    let corpus = counting(42);
    let new = |position| Stream::new(corpus.clone(), 4, 7, position).unwrap();
    let mut whole = new(Position::default());
    let uninterrupted: Vec<Batch> = (0..15).map(|_| whole.next_batch(2).unwrap()).collect();
    for stop in 0..15 {
        let mut first = new(Position::default());
        let mut batches: Vec<Batch> = (0..stop).map(|_| first.next_batch(2).unwrap()).collect();
        let mut second = new(first.position());
        batches.extend((stop..15).map(|_| second.next_batch(2).unwrap()));
        assert_eq!(batches, uninterrupted, "stopped after {stop} batches");
    }
}

#[test]
fn b190_each_epoch_sees_each_window_once_in_an_order_of_its_own() {
    let corpus = counting(401);
    let mut stream = Stream::new(corpus, 4, 7, Position::default()).unwrap();
    let mut orders = Vec::new();
    for epoch in 0..3 {
        let mut order = Vec::new();
        while stream.position().sources[0].epoch == epoch {
            order.extend(firsts(&mut stream, 1));
        }
        let phase = *order.iter().min().unwrap();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (phase..).step_by(4).take(sorted.len()).collect::<Vec<_>>());
        assert!(sorted.len() >= 99);
        assert_ne!(order, sorted, "shuffled");
        orders.push(order);
    }
    assert_ne!(orders[0], orders[1]);
}

#[test]
fn another_seed_is_another_order() {
    let order = |seed| firsts(&mut Stream::new(counting(401), 4, seed, Position::default()).unwrap(), 50);
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
}

#[test]
fn a_position_outside_the_text_is_refused() {
    let position = Position { sources: vec![Place { epoch: 0, index: 11, taken: 11 }] };
    let message = Stream::new(counting(42), 4, 7, position).unwrap_err().to_string();
    assert!(message.contains("sequence 11 of epoch 0"), "{message}");
}

#[test]
fn b190_ranks_share_a_batch_without_overlap_whatever_their_number() {
    let batch = Stream::new(counting(401), 4, 7, Position::default()).unwrap().next_batch(16).unwrap();
    for ranks in [1, 2, 4] {
        let mut ids: Vec<u32> = Vec::new();
        for step in 0..2 {
            for rank in 0..ranks {
                ids.extend(batch.share(8, step, rank, ranks).ids);
            }
        }
        assert_eq!(ids, batch.ids, "{ranks} ranks");
    }
}

#[test]
fn validation_covers_the_text_once_and_pads_without_counting() {
    let corpus = counted(42);
    let batches: Vec<Batch> = validation(&corpus, 4, 3).unwrap().map(Result::unwrap).collect();
    assert_eq!(batches.len(), 4);
    assert!(batches.iter().all(|b| b.sequences() == 3 && b.ids.len() == 12));
    let targets: Vec<u32> = batches.iter().flat_map(|b| b.targets.iter().copied()).filter(|&t| t != NONE).collect();
    assert_eq!(targets, (1..41).chain([999]).collect::<Vec<u32>>());
    assert_eq!(batches.iter().map(|b| b.valid).sum::<usize>(), targets.len());
    // The last of eleven windows has the last id alone, and the twelfth is there to fill the batch.
    assert_eq!(batches[3].start[4..12], [0, 0, 2, 3, 0, 1, 2, 3]);
    assert_eq!(batches[3].ids[4..12], [40, 999, 0, 0, 0, 0, 0, 0]);
}

/// The texts of a configuration with these patterns.
fn load(train: &[&str], validation: &[&str]) -> dropless::Result<(Corpus, Corpus)> {
    let mut overrides = vec!["data.validation_fraction=0.25".to_owned(), "train.sequence_length=2".to_owned()];
    overrides.extend([format!("data.train={train:?}"), format!("data.validation={validation:?}")]);
    split(&Config::load(None, &overrides).unwrap())
}

/// The one source and the one validation set of a configuration.
fn split(config: &Config) -> dropless::Result<(Corpus, Corpus)> {
    let mut texts = Texts::load(config)?;
    assert_eq!((texts.train.sources().len(), texts.validation.len()), (1, 1));
    Ok((texts.train.sources()[0].clone(), texts.validation.remove(0).1))
}

#[test]
fn files_are_read_in_order_and_split_without_overlap() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("b.txt"), "bbbbBB").unwrap();
    std::fs::write(dir.path().join("a.txt"), "aaaaaaAA").unwrap();
    std::fs::write(dir.path().join("empty.txt"), "").unwrap();
    let all = format!("{}/*.txt", dir.path().display());
    let text = |corpus: &Corpus| -> String {
        corpus.tokens().iter().map(|&t| u8::try_from(t).map_or('|', char::from)).collect()
    };
    let (train, validation) = load(&[&all, &all], &[]).unwrap();
    assert_eq!((text(&train), text(&validation)), ("aaaaaa|bbbbB|".into(), "AA|B|".into()));
    let one = format!("{}/b.*", dir.path().display());
    let (train, validation) = load(&[&all], &[&one]).unwrap();
    assert_eq!((text(&train), text(&validation)), ("aaaaaaAA|bbbbBB|".into(), "bbbbBB|".into()));
}

#[test]
fn missing_and_empty_text_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("empty.txt"), "").unwrap();
    let refuse = |pattern: &str| load(&[pattern], &[]).unwrap_err().to_string();
    let missing = format!("{}/*.md", dir.path().display());
    assert!(refuse(&missing).contains("*.md\" matches no file"));
    assert!(refuse(&format!("{}/*.txt", dir.path().display())).contains("the training text is empty"));
    assert!(refuse("a***").contains("pattern \"a***\""));
}

#[test]
fn the_embedded_text_is_what_its_readme_says() {
    let text = include_bytes!("../data/shakespeare.txt");
    let readme = include_str!("../data/README.md");
    let hash = blake3::hash(text).to_string();
    assert!(readme.contains(&hash), "trainer/data/README.md does not name {hash}");
    assert!(text.is_ascii() && !text.contains(&b'\r'));
}

#[test]
fn the_embedded_documents_are_the_text_cut_at_blank_lines() {
    let config = Config::load(None, &["data.validation_fraction=0.1".to_owned()]).unwrap();
    let documents = |corpus: &Corpus| -> Vec<Vec<u8>> {
        let tokens = corpus.tokens();
        let tokens = tokens.strip_suffix(&[END]).unwrap();
        tokens.split(|&t| t == END).map(|ids| ids.iter().map(|&id| u8::try_from(id).unwrap()).collect()).collect()
    };
    let (train, validation) = split(&config).unwrap();
    let (train, validation) = (documents(&train), documents(&validation));
    assert_eq!(train.len(), validation.len());
    let whole: Vec<Vec<u8>> = train.into_iter().zip(validation).map(|(text, aside)| [text, aside].concat()).collect();
    assert_eq!(whole.concat(), include_bytes!("../data/shakespeare.txt"));
    for document in &whole[..whole.len() - 1] {
        let blank = document[8192..].windows(2).position(|pair| pair == b"\n\n").unwrap();
        assert_eq!(document.len(), 8192 + blank + 2);
    }
}

#[test]
fn entropy_is_that_of_the_byte_frequencies() {
    let entropy = |text: &str| Corpus::from_bytes([text.as_bytes().to_vec()]).unigram_entropy();
    assert_eq!(entropy("aaaa"), 0.0);
    assert!((entropy("abab") - 2f64.ln()).abs() < 1e-15);
    assert!((entropy("abcdefgh") - 8f64.ln()).abs() < 1e-15);
}

#[test]
fn a_batch_that_no_memory_holds_is_an_error() {
    let mut stream = Stream::new(counting(42), 4, 7, Position::default()).unwrap();
    for sequences in [1 << 50, usize::MAX] {
        let refused = stream.next_batch(sequences).unwrap_err();
        assert!(matches!(refused, Error::Core(CoreError::Capacity { op: "batch", .. })), "{refused}");
        assert!(refused.to_string().contains("train.batch_size"), "{refused}");
    }
    assert_eq!(stream.position().sources, [Place::default()], "nothing was taken");
}
