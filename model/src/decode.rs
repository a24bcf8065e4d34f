//! Generation with a key/value cache: each pass computes only the new tokens of several sequences, and takes the
//! earlier ones from the cache. A row's bits depend on nothing else in its batch, so the logits are those of a pass
//! over whole sequences.

use dropless_core::ops::NONE;
use dropless_core::{Backend, DType, Error, Result, Tensor};

use crate::cache::{Cache, Kept, NewRows, copy_rows};
use crate::context::{Context, Inputs, alloc};
use crate::model::Model;
use crate::nn::Tokens;

impl Model {
    /// An empty cache for so many sequences, of at most as many tokens as the model was made for.
    ///
    /// # Errors
    /// [`Error::Capacity`] when there is not enough memory.
    pub fn cache(&self, backend: &dyn Backend, sequences: usize) -> Result<Cache> {
        let (capacity, element) = (self.positions(), self.element());
        let kept = |widths: [usize; 2]| -> Result<Kept> {
            let [a, b] = widths.map(|width| alloc(backend, element, &[capacity, width]));
            Ok([a?, b?])
        };
        let layer = |widths| (0..sequences).map(|_| kept(widths)).collect();
        let layers = self.cached_widths().map(layer).collect::<Result<_>>()?;
        Ok(Cache { lengths: vec![0; sequences], capacity, layers })
    }

    /// Logits of the token after each sequence, f32 `[sequences, vocabulary]`, for `new`: more tokens of each sequence, of
    /// some of them none (whose row is then undefined). The cache grows by them.
    ///
    /// # Errors
    /// Those of the ops; [`Error::Argument`] for other sequences than the cache has, more tokens than it holds, or no new
    /// token at all.
    pub fn decode(&self, backend: &dyn Backend, cache: &mut Cache, new: &[&[u32]]) -> Result<Tensor> {
        let rows = placed(backend, cache, new)?;
        let total = rows.iter().map(|r| r.count).sum();
        let tokens = Tokens::new(backend, 1, total, 1)?;
        let inputs = inputs(backend, new, &rows)?;
        let c = self.inference(backend, &tokens, &inputs);
        let mut x = self.embed(backend, &inputs.ids)?;
        for (layer, kept) in self.layers().zip(&cache.layers) {
            x = layer.decode(c, &x, &rows, kept)?;
        }
        for (length, rows) in cache.lengths.iter_mut().zip(&rows) {
            *length = rows.length();
        }
        // The head sees the last row of each sequence.
        let last = alloc(backend, x.dtype(), &[rows.len(), x.cols()])?;
        for (sequence, rows) in rows.iter().enumerate().filter(|(_, rows)| rows.count > 0) {
            let end = rows.from + rows.count;
            copy_rows(backend, &x.slice(end - 1, end)?, &last.slice(sequence, sequence + 1)?)?;
        }
        let tokens = Tokens::new(backend, 1, rows.len(), 1)?;
        self.logits_of(Context { tokens: &tokens, ..c }, &last)
    }
}

/// Where the new tokens lie.
fn placed(backend: &dyn Backend, cache: &Cache, new: &[&[u32]]) -> Result<Vec<NewRows>> {
    let refuse = |field, expected: String, found: usize| {
        Err(Error::Argument { op: "decode", field, expected, found: found.to_string() })
    };
    if new.len() != cache.lengths.len() {
        return refuse("new", format!("one for each of the {} sequences", cache.lengths.len()), new.len());
    }
    let mut from = 0;
    let mut rows = Vec::with_capacity(new.len());
    for (ids, &before) in new.iter().zip(&cache.lengths) {
        if before + ids.len() > cache.capacity {
            return refuse("new", format!("at most {} tokens of a sequence", cache.capacity), before + ids.len());
        }
        let (count, length) = (ids.len(), before + ids.len());
        let positions: Vec<u32> = (0..).take(length).collect();
        let positions = backend.upload(DType::U32, &[length], &positions)?;
        rows.push(NewRows { from, count, before, whole: Tokens::new(backend, 1, length, 1)?, positions });
        from += count;
    }
    if from == 0 {
        return refuse("new", "at least one token".into(), 0);
    }
    Ok(rows)
}

fn inputs(backend: &dyn Backend, new: &[&[u32]], rows: &[NewRows]) -> Result<Inputs> {
    let positions: Vec<u32> = rows
        .iter()
        .flat_map(|r| r.before..r.length())
        .map(u32::try_from)
        .collect::<std::result::Result<_, _>>()
        .expect("a sequence is shorter than 2^32");
    let put = |values: &[u32]| backend.upload(DType::U32, &[values.len()], values);
    Ok(Inputs {
        ids: put(&new.concat())?,
        targets: put(&vec![NONE; positions.len()])?,
        start: put(&vec![0; positions.len()])?,
        positions: put(&positions)?,
        scale: backend.upload(DType::F32, &[1], &[0.0f32])?,
        next: None,
    })
}
