//! What a specification works on: the elements of a tensor, read whole, changed one by one, and written back.

use crate::backend::Backend;
use crate::error::Result;
use crate::numerics::bf16;
use crate::tensor::{DType, Tensor};

/// The elements of a tensor. A float is widened to f32 when it is read and rounded once, to nearest even, when it is set;
/// what is not set keeps its bits.
#[derive(Clone, Debug)]
pub(super) struct Values<'a> {
    tensor: &'a Tensor,
    bytes: Vec<u8>,
}

impl<'a> Values<'a> {
    pub(super) fn read(memory: &dyn Backend, tensor: &'a Tensor) -> Result<Values<'a>> {
        let mut bytes = vec![0; tensor.bytes()];
        memory.read(tensor, &mut bytes)?;
        Ok(Values { tensor, bytes })
    }

    pub(super) fn read_opt(memory: &dyn Backend, tensor: Option<&'a Tensor>) -> Result<Option<Values<'a>>> {
        tensor.map(|tensor| Values::read(memory, tensor)).transpose()
    }

    /// Writes all elements back.
    pub(super) fn write(&self, memory: &dyn Backend) -> Result<()> {
        memory.write(self.tensor, &self.bytes)
    }

    pub(super) fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    pub(super) fn rows(&self) -> usize {
        self.tensor.rows()
    }

    pub(super) fn cols(&self) -> usize {
        self.tensor.cols()
    }

    /// Number of elements.
    pub(super) fn len(&self) -> usize {
        self.tensor.len()
    }

    fn element<const N: usize>(&self, i: usize) -> [u8; N] {
        self.bytes.as_chunks().0[i]
    }

    fn set<const N: usize>(&mut self, i: usize, element: [u8; N]) {
        self.bytes.as_chunks_mut().0[i] = element;
    }

    /// Element i of an F32 or Bf16 tensor.
    pub(super) fn float(&self, i: usize) -> f32 {
        match self.tensor.dtype() {
            DType::Bf16 => bf16::to_f32(self.bf16(i)),
            _ => f32::from_le_bytes(self.element(i)),
        }
    }

    /// Sets element i of an F32 or Bf16 tensor.
    pub(super) fn set_float(&mut self, i: usize, value: f32) {
        match self.tensor.dtype() {
            DType::Bf16 => self.set(i, bf16::from_f32(value).to_le_bytes()),
            _ => self.set(i, value.to_le_bytes()),
        }
    }

    /// All elements of an F32 or Bf16 tensor.
    pub(super) fn floats(&self) -> Vec<f32> {
        (0..self.len()).map(|i| self.float(i)).collect()
    }

    /// Row r of an F32 or Bf16 tensor.
    pub(super) fn row(&self, r: usize) -> Vec<f32> {
        let cols = self.tensor.cols();
        (r * cols..(r + 1) * cols).map(|i| self.float(i)).collect()
    }

    /// Room for a row.
    pub(super) fn row_of_zeros(&self) -> Vec<f32> {
        vec![0.0; self.tensor.cols()]
    }

    /// Sets row r of an F32 or Bf16 tensor.
    pub(super) fn set_row(&mut self, r: usize, values: &[f32]) {
        let cols = self.tensor.cols();
        for (i, &value) in (r * cols..(r + 1) * cols).zip(values) {
            self.set_float(i, value);
        }
    }

    /// The code of element i of a Bf16 tensor.
    pub(super) fn bf16(&self, i: usize) -> u16 {
        u16::from_le_bytes(self.element(i))
    }

    /// Element i of a U32 tensor.
    pub(super) fn word(&self, i: usize) -> u32 {
        u32::from_le_bytes(self.element(i))
    }

    /// Sets element i of a U32 tensor.
    pub(super) fn set_word(&mut self, i: usize, value: u32) {
        self.set(i, value.to_le_bytes());
    }

    /// All elements of a U32 tensor.
    pub(super) fn words(&self) -> Vec<u32> {
        (0..self.len()).map(|i| self.word(i)).collect()
    }

    /// Sets all elements of a U32 tensor.
    pub(super) fn set_words(&mut self, values: &[u32]) {
        self.bytes.copy_from_slice(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>());
    }

    /// The bytes, whatever the type.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes, to be changed.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// The bytes of row r.
    pub(super) fn row_bytes(&self, r: usize) -> &[u8] {
        let row = self.tensor.cols() * self.tensor.dtype().size();
        &self.bytes[r * row..(r + 1) * row]
    }
}
