//! The differential harness.
