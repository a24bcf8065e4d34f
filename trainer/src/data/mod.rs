//! Text to batches: a [`Tokenizer`] makes ids of files ([`Documents`], or the bytes themselves), a [`Corpus`] is the
//! stream of their tokens, [`Stream`] walks the [`Mixture`] of several in a seeded order, [`Batch`] is what a step trains
//! on. `docs/data.md` describes what a user sees of it.
//!
//! ```text
//! documents  [A A A |] [B B |]                   | = end of document
//! stream      A A A | B B | ...                  in windows of sequence_length + 1, each overlapping the next by one
//! ids         A A A | B                          targets    A A | - B        - = no target
//! positions   0 1 2 3 0                          start      0 0 0 0 4        first key that a token attends to
//! ```

mod batch;
mod bytes;
mod corpus;
mod files;
pub mod indexed;
pub mod jsonl;
mod load;
mod permutation;
pub mod prepare;
mod stream;
pub mod tokenizer;

pub use batch::{Batch, Share};
pub use bytes::Bytes;
pub use corpus::Corpus;
pub(crate) use files::format;
pub use files::{matching, once};
pub use indexed::Documents;
pub use load::{TextRecord, Texts};
pub use stream::{Mixture, Place, Position, Stream, validation};
pub use tokenizer::{Decoder, END, Kept, TOKENIZER, Tokenizer};
