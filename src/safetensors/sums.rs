//! Checksums of tensors, taken while they are read.
//!
//! A tensor's checksum goes over its bytes in order, while the pipeline's threads read chunks side by side. A tensor
//! within one chunk is its thread's alone. Of a tensor in several, each thread waits for the part before its own:
//! chunks begin in order, so that part is already being read. So large tensors are as fast as one thread takes
//! checksums; small ones, as fast as all threads together.

use std::ops::Range;
use std::time::Duration;

use crate::locks::{Condvar, Mutex};
use xxhash_rust::xxh3::Xxh3;

use super::header::Tensor;
use crate::copy::pipeline::Tap;

/// How often a thread that waits looks whether the transfer has stopped.
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
    /// In the file's order, those without bytes left out.
    sums: Vec<Sum>,
}

struct Sum {
    range: Range<u64>,
    run: Mutex<HashRun>,
    bell: Condvar,
}

#[derive(Default)]
struct HashRun {
    /// There once more than one chunk has to do with it.
    hasher: Option<Hasher>,
    /// Bytes so far.
    done: u64,
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
            |tensor: &Tensor| Sum { range: tensor.range(), run: Mutex::default(), bell: Condvar::new() };
        Self { sums: with_bytes.map(sum).collect() }
    }

    /// The checksum of the tensor at that place of its file, if all of it was read.
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
        // From the back: the chunk behind this one waits for the tensor that reaches into it, and only for that. What
        // this one waits for comes last.
        for sum in self.sums[first..first + count].iter().rev() {
            let (from, to) = (sum.range.start.max(at), sum.range.end.min(end));
            if !sum.add(from, &bytes[(from - at) as usize..(to - at) as usize], stopped) {
                return;
            }
        }
    }
}

impl Sum {
    /// Adds the part that starts at `from`. `false`: what comes before it never came.
    fn add(&self, from: u64, bytes: &[u8], stopped: &dyn Fn() -> bool) -> bool {
        let (before, len) = (from - self.range.start, self.range.end - self.range.start);
        let mut run = self.run.lock();
        while run.done < before {
            if stopped() {
                return false;
            }
            self.bell.wait_for(&mut run, PROGRESS_POLL);
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
        self.bell.notify_all();
        true
    }
}
