//! One value for every element.

use rayon::prelude::*;

use super::{Fast, Simd, TILE};
use crate::error::Result;
use crate::host::memory;
use crate::numerics::bf16;
use crate::ops::Fill;
use crate::tensor::DType;

impl Fast for Fill<'_> {
    fn run(&self, _simd: Simd) -> Result<()> {
        let mut out = memory::output(Fill::OP, self.out)?;
        match self.out.dtype() {
            DType::F32 => out.f32().par_chunks_mut(TILE).for_each(|out| out.fill(self.value)),
            DType::Bf16 => out.bf16().par_chunks_mut(TILE).for_each(|out| out.fill(bf16::from_f32(self.value))),
            _ => out.bytes().par_chunks_mut(TILE).for_each(|out| out.fill(0)),
        }
        Ok(())
    }
}
