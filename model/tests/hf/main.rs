//! Model directories of other libraries: read in every form that they come in, written so that nothing is lost, and
//! refused where they could be taken for another model.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod convert;
mod formats;
mod fp8;
mod inspect;
mod model_dir;
mod refused;
