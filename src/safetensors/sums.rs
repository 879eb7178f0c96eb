//! Checksums of tensors, taken while they are read.
//!
//! A checksum is taken over a tensor's bytes in order, but the copier's threads read chunks in parallel. A tensor
//! that lies within one chunk is hashed by the thread that reads the chunk. Of a tensor in several chunks, each thread
//! waits until the part before its own is hashed. That ends, since chunks begin in order: another thread is reading
//! that part already, or the transfer has stopped. So large tensors are hashed at the speed of one thread, and small
//! ones at the speed of all threads together.

use std::ops::Range;
use std::time::Duration;

use crate::locks::{Condvar, Mutex};
use xxhash_rust::xxh3::Xxh3;

use super::header::Tensor;
use crate::copy::copier::Tap;

/// How often a waiting thread checks whether the transfer has stopped.
const PROGRESS_POLL: Duration = Duration::from_millis(20);

/// XXH3, 128 bits.
#[derive(Default)]
pub(super) struct Hasher(Box<Xxh3>);

impl Hasher {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn digest(&self) -> u128 {
        self.0.digest128()
    }
}

/// The checksums of one file's tensors.
#[derive(Debug)]
pub(super) struct Sums {
    /// In the file's order; tensors without bytes are left out.
    sums: Vec<Sum>,
}

/// The checksum of one tensor.
struct Sum {
    /// The tensor's bytes in the file.
    range: Range<u64>,
    run: Mutex<HashRun>,
    /// Notified when `run.done` grows.
    advanced: Condvar,
}

#[derive(Default)]
struct HashRun {
    /// Only of a tensor that lies in several chunks, and until it is complete.
    hasher: Option<Hasher>,
    /// Bytes hashed so far, of a tensor that lies in several chunks.
    done: u64,
    /// The checksum, when the tensor is complete.
    sum: Option<u128>,
}

impl std::fmt::Debug for Sum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sum").field("range", &self.range).finish_non_exhaustive()
    }
}

impl Sums {
    /// For these tensors, which are in the file's order.
    pub(super) fn new<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> Self {
        let with_bytes = tensors.filter(|tensor| !tensor.is_empty());
        let sum =
            |tensor: &Tensor| Sum { range: tensor.range(), run: Mutex::default(), advanced: Condvar::new() };
        Self { sums: with_bytes.map(sum).collect() }
    }

    /// The checksum of the tensor at this range of its file, if all of it was read.
    pub(super) fn of(&self, range: &Range<u64>) -> Option<u128> {
        if range.is_empty() {
            return Some(Hasher::default().digest());
        }
        let place = self.sums.binary_search_by_key(&range.start, |sum| sum.range.start).ok()?;
        self.sums[place].run.lock().sum
    }
}

impl Tap for Sums {
    fn read(&self, at: u64, bytes: &[u8], stopped: &dyn Fn() -> bool) {
        let end = at + bytes.len() as u64;
        let first = self.sums.partition_point(|sum| sum.range.end <= at);
        let count = self.sums[first..].partition_point(|sum| sum.range.start < end);
        // From the back: the next chunk waits only for the tensor that reaches into it, which is the last one here. The
        // first one here may have to wait for the chunk before, so it comes last.
        for sum in self.sums[first..first + count].iter().rev() {
            let (from, to) = (sum.range.start.max(at), sum.range.end.min(end));
            if !sum.add(from, &bytes[(from - at) as usize..(to - at) as usize], stopped) {
                return;
            }
        }
    }
}

impl Sum {
    /// Adds the part that starts at `from`. `false`: the transfer stopped before the parts before it were added.
    fn add(&self, from: u64, bytes: &[u8], stopped: &dyn Fn() -> bool) -> bool {
        let (before, len) = (from - self.range.start, self.range.end - self.range.start);
        let mut run = self.run.lock();
        while run.done < before {
            if stopped() {
                return false;
            }
            self.advanced.wait_for(&mut run, PROGRESS_POLL);
        }
        if bytes.len() as u64 == len {
            run.sum = Some(xxhash_rust::xxh3::xxh3_128(bytes));
            return true;
        }
        let hasher = run.hasher.get_or_insert_default();
        hasher.update(bytes);
        let sum = (before + bytes.len() as u64 == len).then(|| hasher.digest());
        run.done += bytes.len() as u64;
        if sum.is_some() {
            run.sum = sum;
            run.hasher = None;
        }
        drop(run);
        self.advanced.notify_all();
        true
    }
}
