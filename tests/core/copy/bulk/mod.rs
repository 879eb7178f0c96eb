//! Sources, files, sinks, readers and writers by a copier on the host device: what arrives, what goes
//! wrong, what is left behind, and how it behaves beside others.
#![allow(missing_docs, clippy::unwrap_used)]

mod files;
mod manners;
mod memory;
mod scarce;
mod shapes;
mod trouble;

use std::borrow::Cow;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pinpool::copier::{CopyRange, FileSink, FileSource, Fill, Priority, Reading, Sink, Source};
use pinpool::host::{Call, Failure, Fault, HostConfig};
use pinpool::{Copier, DeviceSlice, Error};

use super::setup::{HANG, until};
use crate::support::downloaded;
pub use crate::support::rig::{Rig, pattern};

/// A rig's copier, bytes, and device memory of their length.
fn with(rig: &Rig, len: usize, seed: u64) -> (Copier, Vec<u8>, DeviceSlice) {
    (rig.copier(), pattern(len, seed), rig.device.alloc(len).unwrap().slice(..).unwrap())
}

/// A file on a disk with these bytes.
fn file_of(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// A source, sink, reader or writer that a function stands for.
pub struct Calls<F>(F, &'static str, u64);

impl<F> std::fmt::Debug for Calls<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.1)
    }
}

pub fn source<F>(name: &'static str, len: usize, fill: F) -> Calls<F>
where
    F: Fn(u64, &mut Fill<'_>) -> io::Result<()> + Send + Sync + 'static,
{
    Calls(fill, name, len as u64)
}

impl<F: Fn(u64, &mut Fill<'_>) -> io::Result<()> + Send + Sync + 'static> Source for Calls<F> {
    fn len(&self) -> u64 {
        self.2
    }
    fn name(&self) -> Cow<'_, str> {
        self.1.into()
    }
    fn fill(&self, offset: u64, into: &mut Fill<'_>) -> io::Result<()> {
        (self.0)(offset, into)
    }
}

pub fn sink<F: Fn(u64, &[u8]) -> io::Result<()> + Send + Sync + 'static>(put: F) -> Calls<F> {
    Calls(put, "a sink", 0)
}

impl<F: Fn(u64, &[u8]) -> io::Result<()> + Send + Sync + 'static> Sink for Calls<F> {
    fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        (self.0)(offset, bytes)
    }
}

fn reader<F: FnMut(&mut [u8]) -> io::Result<usize>>(read: F) -> Calls<F> {
    Calls(read, "a reader", 0)
}

impl<F: FnMut(&mut [u8]) -> io::Result<usize>> Read for Calls<F> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (self.0)(into)
    }
}

/// A writer, which is given the number of the call, from 0.
fn writer<F: FnMut(u64, &[u8]) -> io::Result<usize>>(write: F) -> Calls<F> {
    Calls(write, "a writer", 0)
}

impl<F: FnMut(u64, &[u8]) -> io::Result<usize>> Write for Calls<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.2 += 1;
        (self.0)(self.2 - 1, bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Holds up sources and sinks until they are told to go on.
#[derive(Clone, Default)]
pub struct Blocks(Arc<(AtomicUsize, AtomicBool)>);

impl Blocks {
    pub fn calls(&self) -> usize {
        self.0.0.load(Ordering::Relaxed)
    }

    pub fn go_on(&self) {
        self.0.1.store(true, Ordering::Relaxed);
    }

    pub fn wait(&self) {
        self.0.0.fetch_add(1, Ordering::Relaxed);
        let since = Instant::now();
        while !self.0.1.load(Ordering::Relaxed) && since.elapsed() < 3 * HANG {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A source of sevens that is held up behind its first `free` bytes.
    pub fn source(&self, len: usize, free: u64) -> impl Source + std::fmt::Debug + use<> {
        let blocks = self.clone();
        source("what is held up", len, move |offset, into: &mut Fill<'_>| {
            if offset >= free {
                blocks.wait();
            }
            into.push(&vec![7; into.remaining()]);
            Ok(())
        })
    }
}
