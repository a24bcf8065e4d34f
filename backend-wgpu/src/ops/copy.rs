//! Copies of bytes between buffers at any alignment: what the device's own copy cannot do.

use dropless_core::Result;

use crate::dispatch::{Dispatch, Stream};
use crate::shader::{BYTES, Binding, Declaration, Shader, params};
