//! Tensors: a shape, an element type, and a contiguous view of memory that some backend owns.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::error::{Result, ensure};

/// Element types. Formats are described in `NUMERICS.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE-754 binary32.
    F32,
    /// The upper half of binary32.
    Bf16,
    /// 8-bit float, 4 exponent and 3 fraction bits, no infinity.
    E4m3,
    /// A power of two, 2^(code - 127); 255 is NaN.
    Ue8m0,
    /// Two 4-bit floats (2 exponent bits, 1 fraction bit) per byte, the low nibble first. Shapes count bytes.
    E2m1x2,
    /// Unsigned 32-bit integers: ids, offsets, counts.
    U32,
}

impl DType {
    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::Bf16 => 2,
            DType::E4m3 | DType::Ue8m0 | DType::E2m1x2 => 1,
        }
    }
}

/// Where a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The memory the ops work in.
    Device,
    /// Host memory for offloaded activations (pinned, where that means something).
    Host,
}

/// A contiguous, row-major view of a buffer. Cloning shares the buffer; the last clone returns it to its backend.
///
/// There are no strides, so a transposed or broadcast view cannot be passed by mistake.
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<dyn Any + Send + Sync>,
    offset: usize,
    shape: Vec<usize>,
    dtype: DType,
    memory: Memory,
}

impl Tensor {
    /// A view of a whole new buffer; for backends.
    pub fn from_storage(storage: Arc<dyn Any + Send + Sync>, shape: &[usize], dtype: DType, memory: Memory) -> Tensor {
        Tensor { storage, offset: 0, shape: shape.to_vec(), dtype, memory }
    }

    /// The buffer, for the backend that made it; None if another one did.
    pub fn storage<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.storage.downcast_ref()
    }

    /// The same, shared.
    pub fn shared_storage<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.storage.clone().downcast().ok()
    }

    /// The same elements of `whole` as this view has of its own buffer. For backends around others, whose storage holds
    /// the tensors of those: see [`crate::around`].
    ///
    /// # Errors
    /// [`crate::Error::Argument`] when `whole` has another element type or too few elements.
    pub fn view_of(&self, whole: &Tensor) -> Result<Tensor> {
        let end = self.offset + self.len();
        ensure(
            self.dtype == whole.dtype && end <= whole.len(),
            "view",
            "whole",
            || format!("{:?} with at least {end} elements", self.dtype),
            || format!("{whole:?}"),
        )?;
        Ok(Tensor { offset: whole.offset + self.offset, shape: self.shape.clone(), ..whole.clone() })
    }

    /// First element of the view, counted in elements from the start of the buffer.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Extents, slowest first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the tensor is stored.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// True when there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of the view in bytes.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Fails unless the view has so many bytes; for [`crate::Backend::read`] and [`crate::Backend::write`].
    ///
    /// # Errors
    /// [`crate::Error::Argument`].
    pub fn has_bytes(&self, op: &'static str, bytes: usize) -> Result<()> {
        let expected = || format!("{} for {self:?}", self.bytes());
        ensure(bytes == self.bytes(), op, "bytes", expected, || bytes.to_string())
    }

    /// Extent of the last dimension (1 for a tensor without dimensions).
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows when all dimensions but the last are taken together.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)].iter().product()
    }

    /// The same elements under another shape.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] when the number of elements differs.
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor> {
        ensure(
            // A product that does not fit is not the length, whatever is left of it.
            shape.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent)) == Some(self.len()),
            "reshape",
            "shape",
            || format!("{} elements as in {:?}", self.len(), self.shape),
            || format!("{shape:?}"),
        )?;
        Ok(Tensor { shape: shape.to_vec(), ..self.clone() })
    }

    /// Entries `from..to` of the first dimension.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] when the range does not lie inside.
    pub fn slice(&self, from: usize, to: usize) -> Result<Tensor> {
        let n = self.shape.first().copied().unwrap_or(0);
        ensure(from <= to && to <= n, "slice", "range", || format!("inside 0..{n}"), || format!("{from}..{to}"))?;
        let mut shape = self.shape.clone();
        shape[0] = to - from;
        let row: usize = shape[1..].iter().product();
        Ok(Tensor { offset: self.offset + from * row, shape, ..self.clone() })
    }

    /// Entry `index` of the first dimension, without that dimension.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] when the index does not lie inside.
    pub fn index(&self, index: usize) -> Result<Tensor> {
        let one = self.slice(index, index + 1)?;
        let shape = one.shape[1..].to_vec();
        Ok(Tensor { shape, ..one })
    }

    /// True when both views belong to one buffer.
    pub fn shares_storage(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}{:?}", self.dtype, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(shape: &[usize]) -> Tensor {
        Tensor::from_storage(Arc::new(()), shape, DType::E4m3, Memory::Device)
    }

    #[test]
    fn a_shape_with_another_number_of_elements_is_refused() {
        assert_eq!(bytes(&[6, 4]).reshape(&[8, 3]).map(|x| x.shape().to_vec()).ok(), Some(vec![8, 3]));
        for shape in [&[5, 5][..], &[], &[1 << 63, 2, 24], &[usize::MAX, usize::MAX, 24]] {
            assert!(bytes(&[6, 4]).reshape(shape).is_err(), "{shape:?}");
        }
    }

    #[test]
    fn a_view_of_a_view_has_the_same_elements_of_another_buffer() -> Result<()> {
        let (outer, inner) = (bytes(&[6, 4]), bytes(&[30]).slice(3, 27)?);
        let view = outer.slice(2, 5)?.index(1)?.reshape(&[2, 2])?.view_of(&inner)?;
        assert_eq!((view.offset(), view.shape()), (3 + 3 * 4, &[2, 2][..]));
        assert!(view.shares_storage(&inner) && !view.shares_storage(&outer));
        for (last, fits) in [(26, false), (27, true)] {
            assert_eq!(outer.index(5)?.view_of(&bytes(&[30]).slice(3, last)?).is_ok(), fits, "{last}");
        }
        let other_type = Tensor::from_storage(Arc::new(()), &[24], DType::Ue8m0, Memory::Device);
        assert!(outer.view_of(&other_type).is_err());
        Ok(())
    }

    #[test]
    fn b020_b021_offsets_pass_32_bits() -> Result<()> {
        let rows = bytes(&[300_000, 7168]);
        assert_eq!(rows.slice(299_593, 300_000)?.offset(), 2_147_482_624);
        assert_eq!(rows.slice(299_594, 300_000)?.offset(), 2_147_489_792);
        assert_eq!(bytes(&[9, 16_384, 16_384]).index(8)?.offset(), 1 << 31);
        assert_eq!(bytes(&[9, 16_384, 16_384]).bytes(), 9 << 28);
        Ok(())
    }
}
