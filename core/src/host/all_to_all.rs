use crate::error::Result;
use crate::ops::{AllToAll, Checked};
#[derive(Debug)]
pub(super) struct Exchange;
impl Exchange {
    pub(super) fn new(_ranks: usize) -> Self {
        Exchange
    }
    pub(super) fn leave(&self, _rank: usize) {}
    pub(super) fn run(&self, _rank: usize, _op: &Checked<AllToAll<'_>>) -> Result<()> {
        Ok(())
    }
}
