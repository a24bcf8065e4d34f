//! Text to batches: [`Corpus`] holds documents as token ids, [`Stream`] walks them in a seeded order, [`Batch`] is what
//! a step trains on.
//!
//! ```text
//! documents  [A A A |] [B B |]                   | = end of document
//! stream      A A A | B B | ...                  in windows of sequence_length + 1, each overlapping the next by one
//! ids         A A A | B                          targets    A A | - B        - = no target
//! positions   0 1 2 3 0                          start      0 0 0 0 4        first key that a token attends to
//! ```

mod batch;
mod corpus;
mod stream;

pub use batch::{Batch, Share};
pub use corpus::{Corpus, END};
pub use stream::{Position, Stream, validation};
