//! The host device. (placeholder)
