//! The ops: one file each beside the shader of the same name, and the table of all shaders.

pub(crate) mod copy;

#[cfg(test)]
use crate::shader::Shader;

/// Every shader of the backend.
#[cfg(test)]
pub(crate) const ALL: &[&Shader] = &[&copy::COPY];
