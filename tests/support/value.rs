//! A value of a test's own that the pool registers, adopts or sends.

#![allow(unsafe_code, reason = "a value that derefs to bytes which stay where they are")]

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pinpool::StableDeref;

/// Bytes that are overwritten when they are dropped, so that a copy which comes later shows; and whose drop
/// does this, at last.
pub struct Value {
    pub bytes: Box<[u8]>,
    pub dropped: Box<dyn Fn() + Send + Sync>,
}

impl Value {
    pub fn new(bytes: Vec<u8>, dropped: impl Fn() + Send + Sync + 'static) -> Self {
        Self { bytes: bytes.into(), dropped: Box::new(dropped) }
    }

    /// One with a count of how often it was dropped.
    pub fn watched(bytes: Vec<u8>) -> (Self, Arc<AtomicUsize>) {
        let dropped = Arc::new(AtomicUsize::new(0));
        let count = dropped.clone();
        (Self::new(bytes, move || _ = count.fetch_add(1, Ordering::SeqCst)), dropped)
    }

    /// One that is counted while it exists.
    pub fn counted(bytes: Vec<u8>, there: &Arc<AtomicUsize>) -> Self {
        there.fetch_add(1, Ordering::SeqCst);
        let there = there.clone();
        Self::new(bytes, move || {
            there.fetch_sub(1, Ordering::SeqCst);
        })
    }
}

impl Deref for Value {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Value {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

// SAFETY: the bytes are a box's.
unsafe impl StableDeref for Value {}

impl Drop for Value {
    fn drop(&mut self) {
        self.bytes.fill(0xDD);
        (self.dropped)();
    }
}
