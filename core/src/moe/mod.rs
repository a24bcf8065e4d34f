//! The Mixture-of-Experts layer over any backend.
